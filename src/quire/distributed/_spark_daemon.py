"""Spark's daemon, which forks the Python workers, with the modules that stages need already imported."""

from __future__ import annotations

import gc

import pyarrow as pa
from pyspark.daemon import manager

from quire.distributed import _spark_transport, _stages, _write

_IMPORTED = (pa, _spark_transport, _stages, _write)


if __name__ == "__main__":
    gc.freeze()  # workers collect garbage after every task, and none of this is garbage
    manager()
