"""The Spark that shards run on: the session that is active, or else one of this machine alone."""

from __future__ import annotations

import os
import sys
from typing import Any

from quire._optional import require

BATCH_BYTES = "spark.sql.execution.arrow.maxBytesPerBatch"
_LOCAL = {
    "spark.master": "local[*]",
    "spark.app.name": "quire",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
    "spark.sql.shuffle.partitions": str(os.cpu_count() or 1),
    BATCH_BYTES: str(32 << 20),
}


def spark_session(**options: Any) -> Any:
    """The session of Spark that is active; without one, Spark is started here, on loopback alone.

    The options are settings of Spark, whose dots may be written as underscores: `master='local[2]'`,
    `**{'spark.driver.memory': '4g'}`. A session that is there already keeps the settings that it has.
    """
    sql: Any = require("pyspark.sql", extra="spark", needed_for="engine='spark'")
    active = sql.SparkSession.getActiveSession() or getattr(sql.SparkSession, "_instantiatedSession", None)
    if active is not None and _is_open(active):
        return active
    settings = {**_LOCAL, **{_setting(name): str(value) for name, value in options.items()}}
    if os.environ.get("SPARK_REMOTE") or "spark.remote" in settings or not settings["spark.master"].startswith("local"):
        settings = {name: value for name, value in settings.items() if _LOCAL.get(name) != value}
    else:
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    return sql.SparkSession.builder.config(map=settings).getOrCreate()


def _setting(name: str) -> str:
    """`driver_memory` as 'spark.driver.memory'."""
    return name if name.startswith("spark.") else f"spark.{name.replace('_', '.')}"


def _is_open(session: Any) -> bool:
    """Whether it was not stopped; one of Spark Connect has no context to ask."""
    context = getattr(session, "_sc", None)
    return context is None or getattr(context, "_jsc", None) is not None
