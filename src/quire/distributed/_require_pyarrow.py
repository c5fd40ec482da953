"""Check that pyarrow is installed before any module that imports it."""

from __future__ import annotations

from quire._optional import require

require("pyarrow", extra="parquet", needed_for="quire.distributed")
