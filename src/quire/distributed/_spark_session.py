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
    "spark.driver.maxResultSize": "0",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "FATAL",  # errors are raised
    "spark.sql.shuffle.partitions": str(os.cpu_count() or 1),
    "spark.python.daemon.module": "quire.distributed._spark_daemon",
    BATCH_BYTES: str(32 << 20),
}


def spark_session(**options: Any) -> Any:
    """The session of Spark that is active; without one, Spark is started here, on loopback alone.

    The options are settings of Spark, whose dots may be written as underscores: `master='local[2]'`,
    `**{'spark.driver.memory': '4g'}`. A session that is there already keeps the settings that it has.
    """
    active = active_session()
    if active is not None:
        return active
    settings = {**_LOCAL, **{_setting(name): str(value) for name, value in options.items()}}
    if _is_elsewhere(settings):
        settings = {name: value for name, value in settings.items() if _LOCAL.get(name) != value}
    else:
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    sql: Any = require("pyspark.sql", extra="spark", needed_for="engine='spark'")
    return sql.SparkSession.builder.config(map=settings).getOrCreate()


def active_session() -> Any:
    """The session that is there already, if there is one."""
    sql: Any = require("pyspark.sql", extra="spark", needed_for="engine='spark'")
    found = sql.SparkSession.getActiveSession() or getattr(sql.SparkSession, "_instantiatedSession", None)
    return found if found is not None and is_open(found) else None


def _is_elsewhere(settings: dict[str, str]) -> bool:
    """Whether there is a cluster: named by the options, by Spark Connect, or by `spark-submit`, which runs this."""
    named = "spark.remote" in settings or not settings["spark.master"].startswith("local")
    return named or any(os.environ.get(name) for name in ("SPARK_REMOTE", "PYSPARK_GATEWAY_PORT"))


def _setting(name: str) -> str:
    """`driver_memory` as 'spark.driver.memory'."""
    return name if name.startswith("spark.") else f"spark.{name.replace('_', '.')}"


def is_open(session: Any) -> bool:
    """Whether it was not stopped; one of Spark Connect has no context to ask."""
    context = getattr(session, "_sc", None)
    return context is None or getattr(context, "_jsc", None) is not None
