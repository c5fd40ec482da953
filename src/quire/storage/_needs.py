"""What all of this package needs; said before anything else is imported."""

from quire._optional import require

require("pyarrow", extra="parquet", needed_for="a dataset on disk")
