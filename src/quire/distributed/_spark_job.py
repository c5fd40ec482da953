"""Jobs of Spark: what goes in from the driver, how large its batches are, and what its errors mean."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from quire._optional import require
from quire.distributed._failures import error_from_text
from quire.distributed._spark_session import BATCH_BYTES
from quire.distributed._spark_work import PACKS, SPARK_PACKS
from quire.errors import PartitionError

_BYTES = 32 << 20
_RECORDS = "spark.sql.execution.arrow.maxRecordsPerBatch"
_RELATION = "spark.sql.execution.arrow.localRelationThreshold"
_UNKNOWN_WIDTH = 1 << 16


def driver_frame(session: Any, packs: Sequence[Sequence[pa.RecordBatch]]) -> Any:
    """A frame of packs, those of each partition in one of Spark's own where Spark allows it."""
    batches = [pa.concat_batches(part) for part in packs]
    if _major(session) < 4:
        rows = [tuple(row.values()) for batch in batches for row in batch.to_pylist()]
        return session.createDataFrame(rows, SPARK_PACKS)
    with settings(session, {_RELATION: "0"}):  # then a record batch is a partition
        return session.createDataFrame(pa.Table.from_batches(batches, PACKS))


def _major(session: Any) -> int:
    return int(session.version.split(".")[0])


@contextmanager
def bounded(session: Any, schema: pa.Schema) -> Iterator[None]:
    """Jobs that are planned meanwhile give Python batches of so many bytes; before Spark 4, of so many rows."""
    if _major(session) >= 4:
        wanted = {BATCH_BYTES: str(_BYTES)}
    else:
        wanted = {_RECORDS: str(max(1, min(10_000, _BYTES // max(1, sum(map(_width, schema.types))))))}
    with settings(session, wanted):
        yield


def _width(arrow_type: pa.DataType) -> int:
    """About how many bytes a row has; where the type does not say it, a picture's."""
    try:
        return int(arrow_type.bit_width) // 8
    except ValueError:
        return 64 if pa.types.is_string(arrow_type) else _UNKNOWN_WIDTH


@contextmanager
def settings(session: Any, wanted: dict[str, str]) -> Iterator[None]:
    """Settings of a session for a while."""
    before = {name: session.conf.get(name, None) for name in wanted}
    for name, value in wanted.items():
        session.conf.set(name, value)
    try:
        yield
    finally:
        for name, old in before.items():
            if old is None:
                session.conf.unset(name)
            else:
                session.conf.set(name, old)


@contextmanager
def unwrapped() -> Iterator[None]:
    """What went wrong in a worker as the error that it was there; what went wrong with Spark as one of ours."""
    errors: Any = require("pyspark.errors", extra="spark", needed_for="engine='spark'")
    try:
        yield
    except (errors.PySparkException, *_gateway_errors()) as error:
        found = error_from_text(str(error))
        if found is None:
            raise PartitionError(f"Spark could not do it: {error}") from error
        raise found from found.__cause__


def _gateway_errors() -> tuple[type[Exception], ...]:
    """Those of the connection to Java, which Spark Connect has none of."""
    try:
        protocol: Any = require("py4j.protocol", extra="spark", needed_for="engine='spark'")
    except ImportError:
        return ()
    return (protocol.Py4JError,)
