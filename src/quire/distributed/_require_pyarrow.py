"""Raise if pyarrow is missing, before a module is imported that needs it."""

from __future__ import annotations

from quire._optional import require

require("pyarrow", extra="parquet", needed_for="quire.distributed")
