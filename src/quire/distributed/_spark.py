"""The Spark that shards run on: the session that is active, or else one of this machine alone."""

from __future__ import annotations

import gc
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import accumulate
from typing import Any, TypeVar

import pyarrow as pa

from quire._optional import require
from quire.data._spark import _is_vector, _prepared
from quire.distributed._batches import split_large
from quire.distributed._engine import Frame, SelectStage, Stage, StageChain, UnionStage
from quire.distributed._failures import error_from_text
from quire.distributed._spark_transport import (
    NUMBER_COLUMN,
    PACK_BYTES,
    PACK_SCHEMA,
    PART_COLUMN,
    SPARK_COUNT_TYPES,
    SPARK_PACK_TYPES,
    InputKind,
    OutputKind,
    SparkWork,
    arrow_schema,
    empty_batch,
    pack_batch,
    spark_schema,
    unpack_batches,
)
from quire.errors import FunctionError, OptionError, PartitionError

MAX_BYTES_SETTING = "spark.sql.execution.arrow.maxBytesPerBatch"


_LOCAL_SETTINGS = {
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
    MAX_BYTES_SETTING: str(32 << 20),
}


def spark_session(**options: Any) -> Any:
    """The session of Spark that is active; without one, Spark is started here, on loopback alone.

    The options are settings of Spark, whose dots may be written as underscores: `master='local[2]'`,
    `**{'spark.driver.memory': '4g'}`. A session that is there already keeps the settings that it has.
    """
    active = active_session()
    if active is not None:
        return active
    settings = {**_LOCAL_SETTINGS, **{_setting_name(name): str(value) for name, value in options.items()}}
    if _is_cluster(settings):
        settings = {name: value for name, value in settings.items() if _LOCAL_SETTINGS.get(name) != value}
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


def _is_cluster(settings: dict[str, str]) -> bool:
    """Whether there is a cluster: named by the options, by Spark Connect, or by `spark-submit`, which runs this."""
    named = "spark.remote" in settings or not settings["spark.master"].startswith("local")
    return named or any(os.environ.get(name) for name in ("SPARK_REMOTE", "PYSPARK_GATEWAY_PORT"))


def _setting_name(name: str) -> str:
    """`driver_memory` as 'spark.driver.memory'."""
    return name if name.startswith("spark.") else f"spark.{name.replace('_', '.')}"


def is_open(session: Any) -> bool:
    """Whether it was not stopped; one of Spark Connect has no context to ask."""
    context = getattr(session, "_sc", None)
    return context is None or getattr(context, "_jsc", None) is not None


_BATCH_BYTES = 32 << 20


_MAX_RECORDS = "spark.sql.execution.arrow.maxRecordsPerBatch"


_RELATION_LIMIT = "spark.sql.execution.arrow.localRelationThreshold"


_UNKNOWN_WIDTH = 1 << 16


def frame_from_packs(session: Any, packs: Sequence[Sequence[pa.RecordBatch]]) -> Any:
    """A frame of packs, those of each partition in one of Spark's own where Spark allows it."""
    batches = [pa.concat_batches(part) for part in packs]
    if _major_version(session) < 4:
        rows = [tuple(row.values()) for batch in batches for row in batch.to_pylist()]
        return session.createDataFrame(rows, SPARK_PACK_TYPES)
    with temporary_settings(session, {_RELATION_LIMIT: "0"}):  # then a record batch is a partition
        return session.createDataFrame(pa.Table.from_batches(batches, PACK_SCHEMA))


def _major_version(session: Any) -> int:
    return int(session.version.split(".")[0])


@contextmanager
def limit_batches(session: Any, schema: pa.Schema) -> Iterator[None]:
    """Jobs that are planned meanwhile give Python batches of so many bytes; before Spark 4, of so many rows."""
    if _major_version(session) >= 4:
        wanted = {MAX_BYTES_SETTING: str(_BATCH_BYTES)}
    else:
        wanted = {
            _MAX_RECORDS: str(max(1, min(10_000, _BATCH_BYTES // max(1, sum(map(_estimate_width, schema.types))))))
        }
    with temporary_settings(session, wanted):
        yield


def _estimate_width(arrow_type: pa.DataType) -> int:
    """About how many bytes a row has; where the type does not say it, a picture's."""
    try:
        return int(arrow_type.bit_width) // 8
    except ValueError:
        return 64 if pa.types.is_string(arrow_type) else _UNKNOWN_WIDTH


@contextmanager
def temporary_settings(session: Any, wanted: dict[str, str]) -> Iterator[None]:
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
def translate_errors() -> Iterator[None]:
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


_MAX_WINDOW_BYTES = 256 << 20
"""So many bytes of partitions are asked of Spark at a time, by what those before them had."""


@dataclass(frozen=True)
class SparkSource:
    """Where the rows of a frame come from: a frame of Spark, or nothing but the numbers of partitions."""

    session: Any
    takes: InputKind
    frame: Any
    parts: int | None
    in_windows: bool = False
    """Whether some of the partitions can be had without what makes the others."""

    def rows(self) -> Any:
        """As a frame of Spark."""
        return self.frame if self.takes != "numbers" else self.window(0, self.parts or 0)

    def window(self, first: int, end: int) -> Any:
        """Some of the partitions, by their numbers."""
        if self.takes == "packs":
            return self.frame.where(f"{PART_COLUMN} >= {first} AND {PART_COLUMN} < {end}")
        return self.session.range(first, end, 1, max(1, end - first)).toDF(NUMBER_COLUMN)


class SparkFrame(Frame[Any]):
    """A source and the stages that are still to run on it, as one `mapInArrow`."""

    def __init__(self, source: SparkSource, chain: StageChain) -> None:
        self.source, self.chain = source, chain

    @property
    def schema(self) -> pa.Schema:
        """Of what the last stage gives."""
        return self.chain.schema

    @cached_property
    def native(self) -> Any:
        """The frame of Spark."""
        if self.source.takes == "columns" and not self.chain.stages:
            return self.source.frame
        return self.mapped("columns", self.source.rows())

    def mapped(self, gives: OutputKind, rows: Any, first: int | None = 0) -> Any:
        """The frame of Spark of what the stages make of rows of the source, as packs, columns or counts."""
        wanted = {"packs": SPARK_PACK_TYPES, "counts": SPARK_COUNT_TYPES}.get(gives) or spark_schema(self.schema)
        try:
            return rows.mapInArrow(SparkWork(self.chain, self.source.takes, gives, first).function(), wanted)
        except NotImplementedError as error:
            raise OptionError(
                f"Spark {self.source.session.version} has no columns of documents inside documents, and moves none. "
                "Use Spark 3.5 or newer, or write a dataset."
            ) from error

    def packs(self, first: int | None = 0) -> Any:
        """The frame of Spark of its rows in packs."""
        return self.mapped("packs", self.source.rows(), first)

    def then(self, stage: Stage) -> SparkFrame:
        """The same, and one more stage."""
        return SparkFrame(self.source, self.chain.then(stage))


class SparkEngine:
    """Spark as an engine: attached to the active session, else started on this machine; the options are settings."""

    name = "spark"

    def __init__(self, **options: Any) -> None:
        self._options, self._started = options, None

    @property
    def session(self) -> Any:
        """The session of Spark."""
        if self._started is not None and is_open(self._started):
            return self._started
        active = active_session()
        self._started = spark_session(**self._options) if active is None else None
        return active or self._started

    @property
    def workers(self) -> int:
        """The cores of the cluster; on Spark Connect, the partitions of a shuffle, as the cores are not told."""
        session = self.session
        if hasattr(session, "_sc"):
            return max(1, int(session.sparkContext.defaultParallelism))
        return max(1, int(session.conf.get("spark.sql.shuffle.partitions", "2")))

    # --- frames

    def from_batches(self, partitions: Sequence[Sequence[pa.RecordBatch]], schema: pa.Schema) -> SparkFrame:
        """Packs, which are turned to columns where they are used."""
        packs = [
            [pack_batch(number, part) for part in split_large(batches, PACK_BYTES)]
            or [pack_batch(number, empty_batch(schema))]
            for number, batches in enumerate(partitions)
        ]
        session = self.session
        frame = frame_from_packs(session, packs)
        return _frame_of_packs(session, frame, schema, len(partitions), in_windows=True)

    def from_stage(self, stage: Stage, partitions: int) -> SparkFrame:
        """Tasks that have a number each, and no data."""
        numbers = StageChain(pa.schema([pa.field(NUMBER_COLUMN, pa.int64())]), (stage,))
        return SparkFrame(SparkSource(self.session, "numbers", None, partitions, in_windows=True), numbers)

    def from_native(self, native: Any) -> SparkFrame:
        """A frame of Spark; vectors of Spark ML become arrays."""
        if not hasattr(native, "mapInArrow"):
            raise TypeError(f"engine='spark' takes a DataFrame of Spark, got {type(native).__name__}.")
        if any(_is_vector(field.dataType) for field in native.schema.fields):
            native = _prepared(native, None)
        return self._columns(native, arrow_schema(native.schema), None)

    def _columns(self, frame: Any, schema: pa.Schema, parts: int | None) -> SparkFrame:
        return SparkFrame(SparkSource(frame.sparkSession, "columns", frame, parts), StageChain(schema))

    # --- from frame to frame

    def run(self, frame: Frame[Any], stage: Stage) -> SparkFrame:
        """One more stage of the same `mapInArrow`."""
        return _own_frame(frame).then(stage)

    def select(self, frame: Frame[Any], names: Sequence[str]) -> SparkFrame:
        """Some of the columns; where Spark itself reads them, it reads no others."""
        own = _own_frame(frame)
        if own.source.takes != "columns" or own.chain.stages:
            return own.then(SelectStage(frame.schema, names))
        schema = SelectStage(own.schema, names).schema
        return self._columns(own.native.select(*[_quote(name) for name in names]), schema, own.source.parts)

    def limit(self, frame: Frame[Any], rows: int) -> SparkFrame:
        """The first rows: those of each partition, then those of all, one partition after the other."""
        head = _HeadStage(frame.schema, rows)
        own = _own_frame(frame).then(head)
        return _frame_of_packs(own.source.session, own.packs(None).coalesce(1), frame.schema, 1).then(head)

    def union(self, frames: Sequence[Frame[Any]]) -> SparkFrame:
        """The partitions of all."""
        owns = [_own_frame(frame) for frame in frames]
        known = [own.source.parts for own in owns if own.source.parts is not None]
        total = sum(known) if len(known) == len(owns) else None
        if total is not None and all(own.source.takes == "numbers" for own in owns):
            return self.from_stage(UnionStage([own.chain for own in owns], known), total)
        if total is None:
            joined = reduce(lambda one, other: one.union(other), [own.native for own in owns])
            return self._columns(joined, frames[0].schema, None)
        firsts = accumulate([0, *known[:-1]])
        packs = [own.packs(first) for own, first in zip(owns, firsts, strict=True)]
        return _frame_of_packs(
            owns[0].source.session, reduce(lambda one, other: one.union(other), packs), frames[0].schema, total
        )

    def repartition(self, frame: Frame[Any], partitions: int) -> SparkFrame:
        """So many partitions, filled in turn."""
        return self._columns(frame.native.repartition(partitions), frame.schema, partitions)

    def partition_by(self, frame: Frame[Any], names: Sequence[str], partitions: int) -> SparkFrame:
        """Partitions by the hash of columns."""
        moved = frame.native.repartition(partitions, *[_quote(name) for name in names])
        return self._columns(moved, frame.schema, partitions)

    def shuffle(self, frame: Frame[Any], seed: int) -> SparkFrame:
        """A random key for each row: it says the partition, and the place there."""
        functions: Any = require("pyspark.sql.functions", extra="spark", needed_for="engine='spark'")
        key = "quire random key"
        parts = _own_frame(frame).source.parts or self.workers
        keyed = frame.native.withColumn(key, functions.rand(seed)).repartition(parts, _quote(key))
        return self._columns(keyed.sortWithinPartitions(_quote(key)).drop(key), frame.schema, parts)

    def cache(self, frame: Frame[Any]) -> SparkFrame:
        """Kept by the executors, on disk where memory does not suffice, for as long as the frame is in use here."""
        own = _own_frame(frame)
        held = own.packs().persist()
        parts = own.source.parts
        kept = _frame_of_packs(own.source.session, held.select("*"), frame.schema, parts, in_windows=parts is not None)
        weakref.finalize(kept.source.frame, _unpersist, held).atexit = False
        return kept

    # --- what runs

    def iter_batches(self, frame: Frame[Any]) -> Iterator[pa.RecordBatch]:
        """The record batches of partitions in order: of some at a time, and of the next ones ahead."""
        own = _own_frame(frame)
        if not own.source.in_windows:
            with translate_errors(), limit_batches(own.source.session, own.chain.takes):
                rows = own.packs().toLocalIterator(prefetchPartitions=True)
            with translate_errors():
                yield from unpack_batches(rows, own.schema)
            return
        with translate_errors():
            yield from self._in_windows(own)

    def _in_windows(self, own: SparkFrame) -> Iterator[pa.RecordBatch]:
        """Partitions that Spark needs no others for: so many at a time as are likely to fit into memory."""
        width, first, total = self.workers, 0, own.source.parts or 0
        while first < total:
            end = min(total, first + width)
            rows = own.mapped("packs", own.source.window(first, end)).collect()
            yield from unpack_batches(rows, own.schema)
            held = max(1, sum(len(row[1]) for row in rows))
            width, first = max(self.workers, (end - first) * _MAX_WINDOW_BYTES // held), end

    def collect(self, frame: Frame[Any]) -> list[pa.RecordBatch]:
        """All of it, of all partitions at a time."""
        own = _own_frame(frame)
        with translate_errors(), limit_batches(own.source.session, own.chain.takes):
            return list(unpack_batches(own.packs().collect(), own.schema))

    def count(self, frame: Frame[Any]) -> int:
        """The number of rows."""
        return sum(count for _, count in self._counts(frame))

    def num_partitions(self, frame: Frame[Any]) -> int:
        """What was asked for; for frames of others, the tasks that Spark has for them."""
        parts = _own_frame(frame).source.parts
        return len(self._counts(frame)) if parts is None else parts

    def _counts(self, frame: Frame[Any]) -> list[tuple[int, int]]:
        own = _own_frame(frame)
        with translate_errors(), limit_batches(own.source.session, own.chain.takes):
            return [tuple(row) for row in own.mapped("counts", own.source.rows()).collect()]

    def close(self) -> None:
        """End Spark, if this engine has started it."""
        if self._started is not None:
            self._started.stop()
        self._started = None


class _HeadStage:
    """A stage that gives the first rows of a partition."""

    stateful = False

    def __init__(self, schema: pa.Schema, rows: int) -> None:
        self.schema, self._rows = schema, rows

    def __call__(self, partition: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:  # noqa: ARG002
        """Until there are enough."""
        left = self._rows
        while left > 0 and (batch := next(batches, None)) is not None:
            yield batch.slice(0, left)
            left -= len(batch)


def _own_frame(frame: Frame[Any]) -> SparkFrame:
    if not isinstance(frame, SparkFrame):
        raise TypeError(f"engine='spark' takes its own frames, got {type(frame).__name__}.")
    return frame


def _frame_of_packs(
    session: Any, frame: Any, schema: pa.Schema, parts: int | None, *, in_windows: bool = False
) -> SparkFrame:
    return SparkFrame(SparkSource(session, "packs", frame, parts, in_windows), StageChain(schema))


def _unpersist(held: Any) -> None:
    with suppress(Exception):  # Spark may have ended
        held.unpersist()


def _quote(name: str) -> str:
    return f"`{name.replace('`', '``')}`"


R = TypeVar("R")


def torch_distributor(
    function: Callable[..., R],
    *args: Any,
    workers: int = 2,
    local_mode: bool | None = None,
    use_gpu: bool = False,
    **kwargs: Any,
) -> R:
    """Call a function on so many ranks of torch.distributed that Spark starts, and give what rank 0 returns.

    The ranks are connected when the function is called, so a `StreamingDataset` in it gives the rank's own share, and
    `DistributedDataParallel` works. With `local_mode` they are processes of the driver's machine; by default they are
    if Spark runs on it alone, and else tasks of the executors.
    """
    if workers < 1:
        raise OptionError(f"workers={workers}: at least 1.")
    session = spark_session()
    torch: Any = require("pyspark.ml.torch.distributor", extra="spark", needed_for="torch_distributor()")
    cloudpickle: Any = require("cloudpickle", extra="process", needed_for="torch_distributor()")
    alone = session.conf.get("spark.master", "").startswith("local")
    distributor = torch.TorchDistributor(
        num_processes=workers, local_mode=alone if local_mode is None else local_mode, use_gpu=use_gpu
    )
    paths = [entry or os.getcwd() for entry in sys.path]  # noqa: PTH109 - of text
    try:
        made: R = distributor.run(_run_on_rank, paths, cloudpickle.dumps((function, args, kwargs)), use_gpu)
    except Exception as error:
        raise FunctionError(f"a rank failed, its output tells how: {str(error).strip().splitlines()[0]}") from error
    return made


def _run_on_rank(paths: list[str], packed: bytes, use_gpu: bool) -> Any:  # noqa: FBT001 - Spark calls it by position
    """One rank's part. All give what rank 0 made: Spark returns that of whichever ends last."""
    dist: Any = require("torch.distributed", extra="torch", needed_for="torch_distributor()")
    cloudpickle: Any = require("cloudpickle", extra="process", needed_for="torch_distributor()")
    sys.path += [path for path in paths if path not in sys.path]
    function, args, kwargs = cloudpickle.loads(packed)
    if os.environ.get("MASTER_ADDR", "").startswith("127."):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("nccl" if use_gpu else "gloo")
    found = [function(*args, **kwargs)]
    if dist.get_rank():
        found = [None]
    dist.broadcast_object_list(found, src=0)
    gc.collect()
    dist.destroy_process_group()
    return found[0]
