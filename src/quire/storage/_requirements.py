"""Check that pyarrow is installed, before any other module of the package imports it."""

from quire._optional import require

require("pyarrow", extra="parquet", needed_for="a dataset on disk")
