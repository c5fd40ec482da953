"""Shards on Spark: DataFrames hold the partitions and move rows, and stages run in `mapInArrow`.

Nothing here needs RDDs, so that it also runs on Spark Connect.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa

from quire._optional import require
from quire.data import is_vector, prepare_frame
from quire.display import is_shown, track
from quire.distributed._batches import split_large
from quire.distributed._engine import Frame, SelectStage, Stage, StageChain, UnionStage
from quire.distributed._failures import error_from_text
from quire.distributed._resources import Resources, resources_of
from quire.distributed._spark_transport import (
    NUMBER_COLUMN,
    PACK_BYTES,
    PACK_SCHEMA,
    PART_COLUMN,
    SPARK_COUNT_TYPES,
    SPARK_PACK_TYPES,
    InputKind,
    OutputKind,
    ReportParameter,
    SparkWork,
    arrow_schema,
    empty_batch,
    pack_batch,
    spark_schema,
    unpack_batches,
)
from quire.errors import FunctionError, OptionError, PartitionError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


MAX_BYTES_SETTING = "spark.sql.execution.arrow.maxBytesPerBatch"
_LOCAL_SETTINGS = {
    "spark.master": "local[*]",
    "spark.app.name": "quire",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.maxResultSize": "0",  # unlimited: `iter_batches` collects a bounded window at a time
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "FATAL",  # errors are raised as exceptions
    "spark.sql.shuffle.partitions": str(os.cpu_count() or 1),
    "spark.python.daemon.module": "quire.distributed._spark_daemon",
    MAX_BYTES_SETTING: str(32 << 20),
}


def spark_session(**options: Any) -> SparkSession:
    """Return the active Spark session; without one, start Spark on this machine, on loopback only.

    The options are settings of Spark, whose dots may be written as underscores: `master='local[2]'`,
    `**{'spark.driver.memory': '4g'}`. An active session keeps its settings.
    """
    active = active_session()
    if active is not None:
        return active
    settings = dict(_LOCAL_SETTINGS)
    for name, value in options.items():
        settings[name if name.startswith("spark.") else f"spark.{name.replace('_', '.')}"] = str(value)
    # A cluster is named by the options, by Spark Connect, or by `spark-submit`, which runs this process.
    named = "spark.remote" in settings or not settings["spark.master"].startswith("local")
    if named or any(os.environ.get(name) for name in ("SPARK_REMOTE", "PYSPARK_GATEWAY_PORT")):
        settings = {name: value for name, value in settings.items() if _LOCAL_SETTINGS.get(name) != value}
    else:
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    sql: Any = require("pyspark.sql", extra="spark", needed_for="engine='spark'")
    return sql.SparkSession.builder.config(map=settings).getOrCreate()


def active_session() -> SparkSession | None:
    """Return the session that is running, if there is one."""
    sql: Any = require("pyspark.sql", extra="spark", needed_for="engine='spark'")
    session = sql.SparkSession.getActiveSession() or getattr(sql.SparkSession, "_instantiatedSession", None)
    return session if session is not None and is_open(session) else None


def is_open(session: SparkSession) -> bool:
    """Whether the session was not stopped; one of Spark Connect has no context to ask."""
    context = getattr(session, "_sc", None)
    return context is None or getattr(context, "_jsc", None) is not None


_BATCH_BYTES = 32 << 20
_MAX_RECORDS = "spark.sql.execution.arrow.maxRecordsPerBatch"
_RELATION_LIMIT = "spark.sql.execution.arrow.localRelationThreshold"
_UNKNOWN_WIDTH = 1 << 16


def frame_from_packs(session: SparkSession, packs: Sequence[Sequence[pa.RecordBatch]]) -> DataFrame:
    """Return a DataFrame of packs, with each partition in one of Spark's partitions if Spark allows it."""
    batches = [pa.concat_batches(part) for part in packs]
    if _major_version(session) < 4:
        rows = [tuple(row.values()) for batch in batches for row in batch.to_pylist()]
        return session.createDataFrame(rows, SPARK_PACK_TYPES)
    with temporary_settings(session, {_RELATION_LIMIT: "0"}):  # each record batch becomes a partition
        return session.createDataFrame(pa.Table.from_batches(batches, PACK_SCHEMA))


def _major_version(session: SparkSession) -> int:
    return int(session.version.split(".")[0])


@contextmanager
def limit_batches(session: SparkSession, schema: pa.Schema) -> Iterator[None]:
    """Let jobs planned meanwhile pass Python batches of limited bytes; before Spark 4, of limited rows."""
    if _major_version(session) >= 4:
        changes = {MAX_BYTES_SETTING: str(_BATCH_BYTES)}
    else:
        rows = _BATCH_BYTES // max(1, sum(map(_estimate_width, schema.types)))
        changes = {_MAX_RECORDS: str(max(1, min(10_000, rows)))}
    with temporary_settings(session, changes):
        yield


def _estimate_width(arrow_type: pa.DataType) -> int:
    """Estimate the bytes of a row; if the type does not say, assume a picture."""
    try:
        return int(arrow_type.bit_width) // 8
    except ValueError:
        return 64 if pa.types.is_string(arrow_type) else _UNKNOWN_WIDTH


@contextmanager
def temporary_settings(session: SparkSession, changes: dict[str, str]) -> Iterator[None]:
    """Change settings of a session for the duration of the block."""
    before = {name: session.conf.get(name, None) for name in changes}
    for name, value in changes.items():
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
    """Raise an error of a worker as the error it was there, and one of Spark itself as a PartitionError."""
    caught: list[Any] = [require("pyspark.errors", extra="spark", needed_for="engine='spark'").PySparkException]
    with suppress(ImportError):  # Spark Connect has no connection to Java
        caught.append(require("py4j.protocol", extra="spark", needed_for="engine='spark'").Py4JError)
    try:
        yield
    except tuple(caught) as error:
        original = error_from_text(str(error))
        if original is None:
            raise PartitionError(f"Spark failed: {error}") from error
        raise original from original.__cause__


@contextmanager
def describe_jobs(session: SparkSession, chain: StageChain) -> Iterator[None]:
    """Describe the jobs that are started meanwhile, and their stages, by the names of a chain, for the Spark UI.

    A description that the caller has set is kept. Spark Connect has no names for jobs.
    """
    if not chain.stages or not hasattr(session, "_sc"):
        yield
        return
    context = session.sparkContext
    if context.getLocalProperty(_JOB_DESCRIPTION) is not None:
        yield
        return
    context.setLocalProperty(_JOB_DESCRIPTION, chain.name)
    try:
        yield
    finally:
        context.setLocalProperty(_JOB_DESCRIPTION, None)


_JOB_DESCRIPTION = "spark.job.description"
_MAX_WINDOW_BYTES = 256 << 20
"""About how many bytes of partitions are collected at a time, estimated from the previous ones."""


@dataclass(frozen=True)
class SparkSource:
    """Where the rows of a frame come from: a DataFrame, or only the numbers of partitions."""

    session: Any
    kind: InputKind
    make_frame: Callable[[], DataFrame] | None
    """Called when rows are needed: creating a DataFrame pickles stages, and some of them run a job for that."""
    parts: int | None
    in_windows: bool = False
    """Whether some of the partitions can be computed without the others."""

    @cached_property
    def frame(self) -> Any:
        return None if self.make_frame is None else self.make_frame()

    def rows(self) -> DataFrame:
        return self.frame if self.kind != "numbers" else self.window(0, self.parts or 0)

    def window(self, first: int, end: int) -> DataFrame:
        """Return some of the partitions, by number."""
        if self.kind == "packs":
            return self.frame.where(f"{PART_COLUMN} >= {first} AND {PART_COLUMN} < {end}")
        return self.session.range(first, end, 1, max(1, end - first)).toDF(NUMBER_COLUMN)


class SparkFrame(Frame[Any]):
    """A source and the stages that are still to run on it, as one `mapInArrow`."""

    def __init__(self, source: SparkSource, chain: StageChain) -> None:
        self.source, self.chain = source, chain

    @property
    def schema(self) -> pa.Schema:
        return self.chain.schema

    @cached_property
    def native(self) -> DataFrame:
        if self.source.kind == "columns" and not self.chain.stages:
            return self.source.frame
        return self.map_stages("columns", self.source.rows())

    def map_stages(self, output: OutputKind, rows: DataFrame, first: int | None = 0) -> DataFrame:
        """Return the DataFrame of what the stages make of rows: packs, columns or counts."""
        types = {"packs": SPARK_PACK_TYPES, "counts": SPARK_COUNT_TYPES}.get(output) or spark_schema(self.schema)
        self.chain.prepare()
        resources = self.chain.resources
        options = {} if resources is None else {"profile": _resource_profile(resources)}
        work = SparkWork(self.chain, self.source.kind, output, first, _report_accumulator(self.source.session))
        try:
            return rows.mapInArrow(work.function(), types, **options)
        except NotImplementedError as error:
            raise OptionError(
                f"Spark {self.source.session.version} cannot hold documents inside documents as columns. "
                "Use Spark 3.5 or newer, or write a dataset."
            ) from error

    def packs(self, first: int | None = 0) -> DataFrame:
        return self.map_stages("packs", self.source.rows(), first)

    def then(self, stage: Stage) -> SparkFrame:
        requested, before = resources_of(stage), self.chain.resources
        if requested is not None and before is not None and requested != before:
            raise OptionError(
                f"Resources({requested}) after Resources({before}): a stage of Spark has one resource profile. Call "
                "repartition() between the two functions, or request the same for both."
            )
        return SparkFrame(self.source, self.chain.then(stage))


_accumulators: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""The accumulator of each Spark context: Spark keeps all that were created."""


def _report_accumulator(session: SparkSession) -> Any:
    """Return the accumulator that brings reports of stages to the driver; Spark Connect has none."""
    context = getattr(session, "_sc", None)
    if context is None:
        return None
    if context not in _accumulators:
        _accumulators[context] = context.accumulator([], ReportParameter())
    return _accumulators[context]


def _resource_profile(resources: Resources) -> Any:
    """Return Spark's form of what tasks need, and executors for their memory."""
    module: Any = require("pyspark.resource", extra="spark", needed_for="Resources on Spark")
    builder = module.ResourceProfileBuilder()
    # A profile must name the CPUs of a task: without them, Spark would reserve none.
    tasks = module.TaskResourceRequests().cpus(int(resources.cpus or 1))
    if resources.gpus:
        tasks = tasks.resource("gpu", resources.gpus)
    if resources.memory_bytes is not None:
        mebibytes = max(1, resources.memory_bytes >> 20)
        builder = builder.require(module.ExecutorResourceRequests().pysparkMemory(f"{mebibytes}m"))
    return builder.require(tasks).build


class SparkEngine:
    """Spark as an engine: attached to the active session, else started on this machine with options as settings."""

    name = "spark"

    def __init__(self, **options: Any) -> None:
        self._options, self._started = options, None

    @property
    def session(self) -> SparkSession:
        if self._started is not None and is_open(self._started):
            return self._started
        active = active_session()
        self._started = spark_session(**self._options) if active is None else None
        return active or self._started

    @property
    def workers(self) -> int:
        """The cores of the cluster; on Spark Connect, which does not report them, the partitions of a shuffle."""
        session = self.session
        if hasattr(session, "_sc"):
            return max(1, int(session.sparkContext.defaultParallelism))
        return max(1, int(session.conf.get("spark.sql.shuffle.partitions", "2")))

    def check_resources(self, resources: Resources) -> None:
        """Raise for what resource profiles cannot express, or this cluster does not provide."""
        session, request = self.session, f"Resources({resources})"
        settings = session.conf
        if _major_version(session) < 4:
            raise OptionError(f"{request}: Spark {session.version} has no profiles for functions; Spark 4 has.")
        if resources.concurrency is not None:
            raise OptionError(
                f"{request}: Spark runs as many tasks at a time as fit into the executors. Leave out concurrency= and "
                "request cpus=, or repartition() into fewer partitions."
            )
        if resources.cpus is not None and (resources.cpus < 1 or resources.cpus != int(resources.cpus)):
            raise OptionError(f"{request}: a task of Spark has a whole number of CPUs.")
        if settings.get("spark.master", "").startswith("local") and "cluster" not in settings.get("spark.master", ""):
            raise OptionError(f"{request}: Spark on one machine ({settings.get('spark.master')}) has no profiles.")
        if resources.gpus and not int(settings.get("spark.executor.resource.gpu.amount", "0")):
            raise OptionError(
                f"{request}: the executors have no GPUs. Start Spark with spark.executor.resource.gpu.amount."
            )
        if resources.memory is not None and settings.get("spark.dynamicAllocation.enabled", "false") != "true":
            raise OptionError(
                f"{request}: Spark starts executors with other memory only if spark.dynamicAllocation.enabled is true. "
                "Else set spark.executor.memory or spark.executor.pyspark.memory for all of them."
            )

    # --- frames

    def from_batches(self, partitions: Sequence[Sequence[pa.RecordBatch]], schema: pa.Schema) -> SparkFrame:
        """Send packs, which become columns where they are used."""
        packs = [
            [pack_batch(number, part) for part in split_large(batches, PACK_BYTES)]
            or [pack_batch(number, empty_batch(schema))]
            for number, batches in enumerate(partitions)
        ]
        session = self.session
        frame = frame_from_packs(session, packs)
        return _frame_of_packs(session, lambda: frame, schema, len(partitions), in_windows=True)

    def from_stage(self, stage: Stage, partitions: int) -> SparkFrame:
        """Run tasks that have a number each, and no data."""
        numbers = StageChain(pa.schema([pa.field(NUMBER_COLUMN, pa.int64())]), (stage,))
        return SparkFrame(SparkSource(self.session, "numbers", None, partitions, in_windows=True), numbers)

    def from_native(self, native: Any) -> SparkFrame:
        """Return the frame of a Spark DataFrame; vectors of Spark ML become arrays."""
        if not hasattr(native, "mapInArrow"):
            raise TypeError(f"engine='spark' takes a Spark DataFrame, got {type(native).__name__}.")
        if any(is_vector(field.dataType) for field in native.schema.fields):
            native = prepare_frame(native, None)
        return self._frame_of_columns(lambda: native, arrow_schema(native.schema), None, native.sparkSession)

    def _frame_of_columns(
        self, make: Callable[[], DataFrame], schema: pa.Schema, parts: int | None, session: SparkSession | None = None
    ) -> SparkFrame:
        return SparkFrame(SparkSource(session or self.session, "columns", make, parts), StageChain(schema))

    # --- from frame to frame

    def run(self, frame: Frame[Any], stage: Stage) -> SparkFrame:
        return _own_frame(frame).then(stage)

    def select(self, frame: Frame[Any], names: Sequence[str]) -> SparkFrame:
        """Select columns; if Spark itself reads them, it reads no others."""
        own = _own_frame(frame)
        if own.source.kind != "columns" or own.chain.stages:
            return own.then(SelectStage(frame.schema, names))
        schema = SelectStage(own.schema, names).schema
        columns = [_quote(name) for name in names]
        return self._derive(own, lambda native: native.select(*columns), own.source.parts, schema)

    def limit(self, frame: Frame[Any], rows: int) -> SparkFrame:
        """Take the first rows of each partition, and then the first of all, partition by partition."""
        # Each partition keeps no more rows than needed, and one partition then takes the first of all.
        head = _HeadStage(frame.schema, rows)
        own = _own_frame(frame).then(head)
        return _frame_of_packs(own.source.session, lambda: own.packs(None).coalesce(1), frame.schema, 1).then(head)

    def union(self, frames: Sequence[Frame[Any]]) -> SparkFrame:
        owns = [_own_frame(frame) for frame in frames]
        known = [own.source.parts for own in owns if own.source.parts is not None]
        total = sum(known) if len(known) == len(owns) else None
        if total is not None and all(own.source.kind == "numbers" for own in owns):
            return self.from_stage(UnionStage([own.chain for own in owns], known), total)
        session = owns[0].source.session
        if total is None:
            return self._frame_of_columns(
                lambda: reduce(lambda one, other: one.union(other), [own.native for own in owns]),
                frames[0].schema,
                None,
                session,
            )

        # Packs carry the number of their partition: those of a frame are numbered after those of the frames before it.
        def union_packs() -> DataFrame:
            packs = [own.packs(first) for own, first in zip(owns, accumulate([0, *known[:-1]]), strict=True)]
            return reduce(lambda one, other: one.union(other), packs)

        return _frame_of_packs(session, union_packs, frames[0].schema, total)

    def repartition(self, frame: Frame[Any], partitions: int) -> SparkFrame:
        return self._derive(frame, lambda native: native.repartition(partitions), partitions)

    def exchange(self, frame: Frame[Any], name: str, partitions: int) -> SparkFrame:
        """Repartition by numbers whose hashes are the partitions."""
        numbers = ", ".join(map(str, _find_preimages(partitions)))
        functions: Any = require("pyspark.sql.functions", extra="spark", needed_for="engine='spark'")
        key = f"element_at(array({numbers}), {_quote(name)} + 1)"
        return self._derive(frame, lambda native: native.repartition(partitions, functions.expr(key)), partitions)

    def shuffle(self, frame: Frame[Any], seed: int) -> SparkFrame:
        """Give each row a random key, which decides its partition and its place there."""
        functions: Any = require("pyspark.sql.functions", extra="spark", needed_for="engine='spark'")
        key = "quire random key"
        parts = _own_frame(frame).source.parts or self.workers

        def shuffle_rows(native: DataFrame) -> DataFrame:
            keyed = native.withColumn(key, functions.rand(seed)).repartition(parts, _quote(key))
            return keyed.sortWithinPartitions(_quote(key)).drop(key)

        return self._derive(frame, shuffle_rows, parts)

    def _derive(
        self,
        frame: Frame[Any],
        move: Callable[[DataFrame], DataFrame],
        parts: int | None,
        schema: pa.Schema | None = None,
    ) -> SparkFrame:
        """Return a frame of what Spark makes of another frame's rows, when it is needed."""
        own = _own_frame(frame)
        return self._frame_of_columns(lambda: move(own.native), schema or frame.schema, parts, own.source.session)

    def cache(self, frame: Frame[Any]) -> SparkFrame:
        """Keep rows in the executors, on disk if memory does not suffice, while the frame is in use here."""
        own = _own_frame(frame)
        parts = own.source.parts

        def persist() -> DataFrame:
            persisted = own.packs().persist()
            # A DataFrame of its own, so that Spark lets go of the data when this frame is no longer used.
            rows = persisted.select("*")
            # Not at exit: Spark releases everything by itself, and may have ended already.
            weakref.finalize(rows, unpersist, persisted).atexit = False
            return rows

        return _frame_of_packs(own.source.session, persist, frame.schema, parts, in_windows=parts is not None)

    def keeps_partitions(self, frame: Frame[Any]) -> bool:
        """Whether a stage gets each partition in one call, with the same rows each time."""
        return _own_frame(frame).source.parts is not None

    # --- results

    def iter_batches(self, frame: Frame[Any]) -> Iterator[pa.RecordBatch]:
        """Yield the record batches of partitions in order, and compute the next ones ahead."""
        own = _own_frame(frame)
        if not own.source.in_windows:
            # Spark reads the settings when it plans the job, so they are restored before the first row is consumed.
            with (
                translate_errors(),
                limit_batches(own.source.session, own.chain.input_schema),
                describe_jobs(own.source.session, own.chain),
            ):
                rows = own.packs().toLocalIterator(prefetchPartitions=True)
            with translate_errors():
                yield from unpack_batches(rows, own.schema)
            return
        with translate_errors():
            yield from self._iter_windows(own)

    def _iter_windows(self, own: SparkFrame) -> Iterator[pa.RecordBatch]:
        """Collect as many partitions at a time as are likely to fit into memory."""
        width, first, total = self.workers, 0, own.source.parts or 0
        while first < total:
            end = min(total, first + width)
            with describe_jobs(own.source.session, own.chain):
                rows = own.map_stages("packs", own.source.window(first, end)).collect()
            yield from unpack_batches(rows, own.schema)
            # The next window has as many partitions as fit into the limit, if they are as large as these.
            size = max(1, sum(len(row[1]) for row in rows))
            width, first = max(self.workers, (end - first) * _MAX_WINDOW_BYTES // size), end

    def collect(self, frame: Frame[Any]) -> list[pa.RecordBatch]:
        own = _own_frame(frame)
        session = own.source.session
        with translate_errors(), limit_batches(session, own.chain.input_schema), describe_jobs(session, own.chain):
            return list(unpack_batches(own.packs().collect(), own.schema))

    def collect_tracked(
        self,
        frame: Frame[Any],
        what: str,
        show: bool | None,  # noqa: FBT001
    ) -> list[pa.RecordBatch]:
        with _track_tasks(_own_frame(frame).source.session, what, show):
            return self.collect(frame)

    def count(self, frame: Frame[Any]) -> int:
        return sum(count for _, count in self._counts(frame))

    def num_partitions(self, frame: Frame[Any]) -> int:
        """Return the requested number; for foreign DataFrames, the number of Spark's tasks."""
        parts = _own_frame(frame).source.parts
        return len(self._counts(frame)) if parts is None else parts

    def _counts(self, frame: Frame[Any]) -> list[tuple[int, int]]:
        own = _own_frame(frame)
        session = own.source.session
        with (
            translate_errors(),
            limit_batches(session, own.chain.input_schema),
            describe_jobs(session, own.chain),
            _track_tasks(session, "counting", None),
        ):
            return [tuple(row) for row in own.map_stages("counts", own.source.rows()).collect()]

    def close(self) -> None:
        """Stop Spark, if this engine has started it."""
        if self._started is not None:
            self._started.stop()
        self._started = None


@contextmanager
def _track_tasks(session: SparkSession, what: str, show: bool | None) -> Iterator[None]:  # noqa: FBT001
    """Show the tasks that Spark has finished meanwhile. Spark Connect does not report them."""
    if getattr(session, "_sc", None) is None or not is_shown(show):
        yield
        return
    finished = threading.Event()
    tasks = _finished_tasks(session.sparkContext.statusTracker(), finished)
    thread = threading.Thread(target=lambda: deque(track(tasks, f"{what}: tasks", show=show), 0), daemon=True)
    thread.start()
    try:
        yield
    finally:
        finished.set()
        thread.join()


def _finished_tasks(tracker: Any, finished: threading.Event) -> Iterator[int]:
    """Yield a number for each task that finishes in a stage that is active now or later."""
    seen: dict[int, int] = {}
    is_last = False
    while not is_last:
        is_last = finished.wait(_POLL_SECONDS)
        for stage in {*seen, *tracker.getActiveStageIds()}:
            info = tracker.getStageInfo(stage)
            done = info.numCompletedTasks if info is not None else seen.get(stage, 0)
            yield from range(seen.get(stage, 0), done)
            seen[stage] = done


_POLL_SECONDS = 0.2


class _HeadStage:
    """A stage that yields the first rows of a partition."""

    stateful = False

    def __init__(self, schema: pa.Schema, rows: int) -> None:
        self.schema, self._rows = schema, rows

    def __call__(self, partition: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:  # noqa: ARG002
        left = self._rows
        while left > 0 and (batch := next(batches, None)) is not None:
            yield batch.slice(0, left)
            left -= len(batch)


def _own_frame(frame: Frame[Any]) -> SparkFrame:
    if not isinstance(frame, SparkFrame):
        raise TypeError(f"engine='spark' takes its own frames, got {type(frame).__name__}.")
    return frame


def _frame_of_packs(
    session: SparkSession,
    make: Callable[[], DataFrame],
    schema: pa.Schema,
    parts: int | None,
    *,
    in_windows: bool = False,
) -> SparkFrame:
    return SparkFrame(SparkSource(session, "packs", make, parts, in_windows), StageChain(schema))


def _find_preimages(partitions: int) -> list[int]:
    """Return a number for each partition whose hash in Spark, which `repartition` uses, is that partition.

    Spark's own way to name partitions, `repartitionById`, is newer than the oldest Spark that is supported.
    """
    preimages: dict[int, int] = {}
    number = 0
    while len(preimages) < partitions:
        preimages.setdefault(_murmur3(number) % partitions, number)
        number += 1
    return [preimages[partition] for partition in range(partitions)]


def _murmur3(number: int) -> int:
    """Return the hash of an int in Spark: Murmur3 with the seed 42, signed."""
    mask = 0xFFFFFFFF
    key = number * 0xCC9E2D51 & mask
    key = ((key << 15 | key >> 17) & mask) * 0x1B873593 & mask
    state = 42 ^ key
    state = ((state << 13 | state >> 19) & mask) * 5 + 0xE6546B64 & mask
    state ^= 4
    state = (state ^ state >> 16) * 0x85EBCA6B & mask
    state = (state ^ state >> 13) * 0xC2B2AE35 & mask
    state ^= state >> 16
    return state - (1 << 32) if state >> 31 else state


def unpersist(frame: DataFrame) -> None:
    """Release a DataFrame that is no longer used."""
    with suppress(Exception):  # Spark may have ended
        frame.unpersist()


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
    """Call a function on several ranks of torch.distributed that Spark starts; return the result of rank 0.

    The ranks are connected when the function is called, so a `StreamingDataset` in it yields the rank's own share, and
    `DistributedDataParallel` works. With `local_mode` they are processes on the driver's machine; by default they are
    if Spark runs on it alone, and else tasks of the executors.
    """
    if workers < 1:
        raise OptionError(f"workers={workers}: at least 1 is needed.")
    session = spark_session()
    torch: Any = require("pyspark.ml.torch.distributor", extra="spark", needed_for="torch_distributor()")
    cloudpickle: Any = require("cloudpickle", extra="process", needed_for="torch_distributor()")
    if local_mode is None:
        local_mode = session.conf.get("spark.master", "").startswith("local")
    distributor = torch.TorchDistributor(num_processes=workers, local_mode=local_mode, use_gpu=use_gpu)
    paths = [entry or os.getcwd() for entry in sys.path]  # noqa: PTH109 - as str
    try:
        result: R = distributor.run(_run_on_rank, paths, cloudpickle.dumps((function, args, kwargs)), use_gpu)
    except Exception as error:
        raise FunctionError(f"a rank failed, see its output: {str(error).strip().splitlines()[0]}") from error
    return result


def _run_on_rank(paths: list[str], call: bytes, use_gpu: bool) -> object:  # noqa: FBT001 - Spark calls it by position
    """Run a rank. All return the result of rank 0: Spark returns that of whichever ends last."""
    dist: Any = require("torch.distributed", extra="torch", needed_for="torch_distributor()")
    cloudpickle: Any = require("cloudpickle", extra="process", needed_for="torch_distributor()")
    sys.path += [path for path in paths if path not in sys.path]
    function, args, kwargs = cloudpickle.loads(call)
    if os.environ.get("MASTER_ADDR", "").startswith("127."):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("nccl" if use_gpu else "gloo")
    result = [function(*args, **kwargs)]
    if dist.get_rank():
        result = [None]
    dist.broadcast_object_list(result, src=0)
    gc.collect()
    dist.destroy_process_group()
    return result[0]
