"""Spark's daemon, which forks the Python workers, with what stages need imported once before that."""

from __future__ import annotations

import gc

import pyarrow as pa
from pyspark.daemon import manager

from quire.distributed import _spark_transport, _stages, _write

_IMPORTED = (pa, _spark_transport, _stages, _write)


if __name__ == "__main__":
    gc.freeze()  # none of it is garbage, which workers look for behind every task
    manager()
