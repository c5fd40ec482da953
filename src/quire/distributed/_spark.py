"""Shards on Spark: frames of Spark hold the partitions and move rows, and stages run in `mapInArrow`.

Nothing here needs RDDs, so that it runs on Spark Connect too.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import accumulate
from typing import Any

import pyarrow as pa

from quire._optional import require
from quire.data._spark import _is_vector, _prepared
from quire.distributed._chain import Chain, Selection, Union, in_parts
from quire.distributed._contract import Frame, Stage
from quire.distributed._spark_job import bounded, driver_frame, unwrapped
from quire.distributed._spark_session import active_session, is_open, spark_session
from quire.distributed._spark_types import arrow_schema, spark_schema
from quire.distributed._spark_work import (
    COUNTS,
    NUMBER,
    PACK_BYTES,
    PART,
    SPARK_PACKS,
    Gives,
    Takes,
    Work,
    empty_batch,
    packed,
    unpacked,
)
from quire.errors import OptionError

_MOST_AHEAD = 256 << 20
"""So many bytes of partitions are asked of Spark at a time, by what those before them had."""


@dataclass(frozen=True)
class Source:
    """Where the rows of a frame come from: a frame of Spark, or nothing but the numbers of partitions."""

    session: Any
    takes: Takes
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
            return self.frame.where(f"{PART} >= {first} AND {PART} < {end}")
        return self.session.range(first, end, 1, max(1, end - first)).toDF(NUMBER)


class SparkFrame(Frame[Any]):
    """A source and the stages that are still to run on it, as one `mapInArrow`."""

    def __init__(self, source: Source, chain: Chain) -> None:
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

    def mapped(self, gives: Gives, rows: Any, first: int | None = 0) -> Any:
        """The frame of Spark of what the stages make of rows of the source, as packs, columns or counts."""
        wanted = {"packs": SPARK_PACKS, "counts": COUNTS}.get(gives) or spark_schema(self.schema)
        try:
            return rows.mapInArrow(Work(self.chain, self.source.takes, gives, first).function(), wanted)
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
            [packed(number, part) for part in in_parts(batches, PACK_BYTES)] or [packed(number, empty_batch(schema))]
            for number, batches in enumerate(partitions)
        ]
        session = self.session
        frame = driver_frame(session, packs)
        return _packed(session, frame, schema, len(partitions), in_windows=True)

    def from_stage(self, stage: Stage, partitions: int) -> SparkFrame:
        """Tasks that have a number each, and no data."""
        numbers = Chain(pa.schema([pa.field(NUMBER, pa.int64())]), (stage,))
        return SparkFrame(Source(self.session, "numbers", None, partitions, in_windows=True), numbers)

    def from_native(self, native: Any) -> SparkFrame:
        """A frame of Spark; vectors of Spark ML become arrays."""
        if not hasattr(native, "mapInArrow"):
            raise TypeError(f"engine='spark' takes a DataFrame of Spark, got {type(native).__name__}.")
        if any(_is_vector(field.dataType) for field in native.schema.fields):
            native = _prepared(native, None)
        return self._columns(native, arrow_schema(native.schema), None)

    def _columns(self, frame: Any, schema: pa.Schema, parts: int | None) -> SparkFrame:
        return SparkFrame(Source(frame.sparkSession, "columns", frame, parts), Chain(schema))

    # --- from frame to frame

    def run(self, frame: Frame[Any], stage: Stage) -> SparkFrame:
        """One more stage of the same `mapInArrow`."""
        return _own(frame).then(stage)

    def select(self, frame: Frame[Any], names: Sequence[str]) -> SparkFrame:
        """Some of the columns; where Spark itself reads them, it reads no others."""
        own = _own(frame)
        if own.source.takes != "columns" or own.chain.stages:
            return own.then(Selection(frame.schema, names))
        schema = Selection(own.schema, names).schema
        return self._columns(own.native.select(*[_quoted(name) for name in names]), schema, own.source.parts)

    def limit(self, frame: Frame[Any], rows: int) -> SparkFrame:
        """The first rows: those of each partition, then those of all, one partition after the other."""
        head = _Head(frame.schema, rows)
        own = _own(frame).then(head)
        return _packed(own.source.session, own.packs(None).coalesce(1), frame.schema, 1).then(head)

    def union(self, frames: Sequence[Frame[Any]]) -> SparkFrame:
        """The partitions of all."""
        owns = [_own(frame) for frame in frames]
        known = [own.source.parts for own in owns if own.source.parts is not None]
        total = sum(known) if len(known) == len(owns) else None
        if total is not None and all(own.source.takes == "numbers" for own in owns):
            return self.from_stage(Union([own.chain for own in owns], known), total)
        if total is None:
            joined = reduce(lambda one, other: one.union(other), [own.native for own in owns])
            return self._columns(joined, frames[0].schema, None)
        firsts = accumulate([0, *known[:-1]])
        packs = [own.packs(first) for own, first in zip(owns, firsts, strict=True)]
        return _packed(
            owns[0].source.session, reduce(lambda one, other: one.union(other), packs), frames[0].schema, total
        )

    def repartition(self, frame: Frame[Any], partitions: int) -> SparkFrame:
        """So many partitions, filled in turn."""
        return self._columns(frame.native.repartition(partitions), frame.schema, partitions)

    def partition_by(self, frame: Frame[Any], names: Sequence[str], partitions: int) -> SparkFrame:
        """Partitions by the hash of columns."""
        moved = frame.native.repartition(partitions, *[_quoted(name) for name in names])
        return self._columns(moved, frame.schema, partitions)

    def shuffle(self, frame: Frame[Any], seed: int) -> SparkFrame:
        """A random key for each row: it says the partition, and the place there."""
        functions: Any = require("pyspark.sql.functions", extra="spark", needed_for="engine='spark'")
        key = "quire random key"
        parts = _own(frame).source.parts or self.workers
        keyed = frame.native.withColumn(key, functions.rand(seed)).repartition(parts, _quoted(key))
        return self._columns(keyed.sortWithinPartitions(_quoted(key)).drop(key), frame.schema, parts)

    def cache(self, frame: Frame[Any]) -> SparkFrame:
        """Kept by the executors, on disk where memory does not suffice, for as long as the frame is in use here."""
        own = _own(frame)
        held = own.packs().persist()
        parts = own.source.parts
        kept = _packed(own.source.session, held.select("*"), frame.schema, parts, in_windows=parts is not None)
        weakref.finalize(kept.source.frame, _forget, held).atexit = False
        return kept

    # --- what runs

    def iter_batches(self, frame: Frame[Any]) -> Iterator[pa.RecordBatch]:
        """The record batches of partitions in order: of some at a time, and of the next ones ahead."""
        own = _own(frame)
        if not own.source.in_windows:
            with unwrapped(), bounded(own.source.session, own.chain.takes):
                rows = own.packs().toLocalIterator(prefetchPartitions=True)
            with unwrapped():
                yield from unpacked(rows, own.schema)
            return
        with unwrapped():
            yield from self._in_windows(own)

    def _in_windows(self, own: SparkFrame) -> Iterator[pa.RecordBatch]:
        """Partitions that Spark needs no others for: so many at a time as are likely to fit into memory."""
        width, first, total = self.workers, 0, own.source.parts or 0
        while first < total:
            end = min(total, first + width)
            rows = own.mapped("packs", own.source.window(first, end)).collect()
            yield from unpacked(rows, own.schema)
            held = max(1, sum(len(row[1]) for row in rows))
            width, first = max(self.workers, (end - first) * _MOST_AHEAD // held), end

    def collect(self, frame: Frame[Any]) -> list[pa.RecordBatch]:
        """All of it, of all partitions at a time."""
        own = _own(frame)
        with unwrapped(), bounded(own.source.session, own.chain.takes):
            return list(unpacked(own.packs().collect(), own.schema))

    def count(self, frame: Frame[Any]) -> int:
        """The number of rows."""
        return sum(count for _, count in self._counts(frame))

    def num_partitions(self, frame: Frame[Any]) -> int:
        """What was asked for; for frames of others, the tasks that Spark has for them."""
        parts = _own(frame).source.parts
        return len(self._counts(frame)) if parts is None else parts

    def _counts(self, frame: Frame[Any]) -> list[tuple[int, int]]:
        own = _own(frame)
        with unwrapped(), bounded(own.source.session, own.chain.takes):
            return [tuple(row) for row in own.mapped("counts", own.source.rows()).collect()]

    def close(self) -> None:
        """End Spark, if this engine has started it."""
        if self._started is not None:
            self._started.stop()
        self._started = None


class _Head:
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


def _own(frame: Frame[Any]) -> SparkFrame:
    if not isinstance(frame, SparkFrame):
        raise TypeError(f"engine='spark' takes its own frames, got {type(frame).__name__}.")
    return frame


def _packed(session: Any, frame: Any, schema: pa.Schema, parts: int | None, *, in_windows: bool = False) -> SparkFrame:
    return SparkFrame(Source(session, "packs", frame, parts, in_windows), Chain(schema))


def _forget(held: Any) -> None:
    with suppress(Exception):  # Spark may have ended
        held.unpersist()


def _quoted(name: str) -> str:
    return f"`{name.replace('`', '``')}`"
