"""What an engine must do to carry shards: move Arrow record batches, and call stages on them.

Engines know no documents. What they move is in the layout that storage gives a document class (its fixed-shape tensors
are binary of one size, with marks in the fields' metadata), and what they call is a `Stage`: record batches in, record
batches out. Everything that users see of shards (`map`, `filter`, `split`, reading, writing) is made of stages, so that
it gives the same on every engine. What is left for an engine is to hold partitions, to move rows between them, and to
run stages where the data is.

The laws of a frame, which tests/distributed holds every engine to:

- it is lazy: nothing runs before `iter_batches`, `count`, `num_partitions` or the first use of what `cache` gave;
- `run`, `select`, `limit`, `union` and `iter_batches` keep the order of partitions, and that of rows within them;
- a stage is called with record batches of exactly `frame.schema`, whatever types the engine itself carries them in;
- no call holds a whole partition in memory unless the engine must (to sort, to shuffle, to cache), and no record batch
  that an engine makes by itself is larger than `MOST_BYTES`;
- empty partitions do no harm; stages see them, too, where the engine has a worker for them;
- an engine may run a stage again for a partition whose worker was lost. The results of one such attempt count, once;
- what a stage raises comes out of `iter_batches` (or `count`, ...) as the `PartitionError` that it is.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import pyarrow as pa

from quire.errors import OptionError, check_options, did_you_mean

NativeT = TypeVar("NativeT")


@dataclass(frozen=True)
class Frame(Generic[NativeT]):
    """A lazy collection of record batches in partitions: the engine's own, and the schema that stages see."""

    native: NativeT
    schema: pa.Schema
    """As of `Layout.fields`: with the fields' metadata, which say what their bytes mean."""


@runtime_checkable
class Stage(Protocol):
    """What is done to a partition. It can be pickled, by cloudpickle at the latest.

    It takes in the record batches of the partition one at a time, and gives others as it goes. It holds no more than
    it needs of both. It may be called more than once for a partition, with a part of it each time (Ray has blocks),
    unless `partition_by` has made the partitions.
    """

    @property
    def schema(self) -> pa.Schema:
        """Of the record batches that it gives."""
        ...

    @property
    def stateful(self) -> bool:
        """Whether it makes an object that is expensive to make, and keeps it in the worker.

        An engine that starts workers for a job, such as Ray, should then keep them for all of it.
        """
        ...

    def __call__(self, partition: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The record batches that it makes of those of a partition, whose number from 0 is for messages and names."""
        ...


class Engine(Protocol):
    """Holds frames and runs stages on them. Frames of one engine go into its own calls only.

    It is made by `quire.distributed.engine(name, **options)`; any object with these calls will do in its place.
    """

    name: str
    """'local', 'ray', 'spark', ..."""

    @property
    def workers(self) -> int:
        """How many partitions are worked on at a time: the number of partitions that data gets if none is said."""
        ...

    # --- frames

    def from_batches(self, partitions: Sequence[Sequence[pa.RecordBatch]], schema: pa.Schema) -> Frame[Any]:
        """A frame of data that the driver has, as many partitions as are given; some may be empty."""
        ...

    def from_stage(self, stage: Stage, partitions: int) -> Frame[Any]:
        """A frame of what a stage makes of nothing: partition i is `stage(i, iter(()))`. Files are read so."""
        ...

    def from_native(self, native: Any) -> Frame[Any]:
        """A frame of the engine's own object (a DataFrame, a Dataset); its schema is told as exactly as can be.

        An object of another kind is a TypeError.
        """
        ...

    # --- from frame to frame

    def run(self, frame: Frame[Any], stage: Stage) -> Frame[Any]:
        """What a stage makes of each partition."""
        ...

    def select(self, frame: Frame[Any], names: Sequence[str]) -> Frame[Any]:
        """Some of the columns, in this order."""
        ...

    def limit(self, frame: Frame[Any], rows: int) -> Frame[Any]:
        """The first rows."""
        ...

    def union(self, frames: Sequence[Frame[Any]]) -> Frame[Any]:
        """The partitions of all frames, whose schemas are equal, one frame behind the other."""
        ...

    def repartition(self, frame: Frame[Any], partitions: int) -> Frame[Any]:
        """The rows in so many partitions of about one size. Their order is kept only where the engine can."""
        ...

    def partition_by(self, frame: Frame[Any], names: Sequence[str], partitions: int) -> Frame[Any]:
        """Rows that are equal in these columns come into one partition. Nulls are equal.

        A stage that runs on the result is called once for a partition, with all of its rows: it may hold groups.
        """
        ...

    def shuffle(self, frame: Frame[Any], seed: int) -> Frame[Any]:
        """The rows in a random order, over all partitions; the same seed gives the same order on the same data."""
        ...

    def cache(self, frame: Frame[Any]) -> Frame[Any]:
        """The same rows; what they are made by runs once, when it is first needed."""
        ...

    # --- what runs

    def iter_batches(self, frame: Frame[Any]) -> Iterator[pa.RecordBatch]:
        """The record batches of all partitions, in order, as they are ready; those without rows are left out.

        It must be possible to break it off. Few are held ahead of the consumer: never all of the data.
        """
        ...

    def collect(self, frame: Frame[Any]) -> list[pa.RecordBatch]:
        """All of them at once, for frames that are small, as reports of writers are: all workers work at a time."""
        ...

    def count(self, frame: Frame[Any]) -> int:
        """The number of rows."""
        ...

    def num_partitions(self, frame: Frame[Any]) -> int:
        """The number of partitions; this may run what makes the frame, where the engine cannot tell otherwise."""
        ...

    def close(self) -> None:
        """End what the engine itself has started (workers, a session); what it was attached to goes on."""
        ...


@dataclass(frozen=True)
class StageChain:
    """Stages, and the schema of what goes into the first of them."""

    takes: pa.Schema
    stages: tuple[Stage, ...] = ()

    @property
    def schema(self) -> pa.Schema:
        """Of what the last stage gives."""
        return self.stages[-1].schema if self.stages else self.takes

    @property
    def stateful(self) -> bool:
        """Whether one of them is."""
        return any(stage.stateful for stage in self.stages)

    def then(self, stage: Stage) -> StageChain:
        """The same, and one more."""
        return StageChain(self.takes, (*self.stages, stage))

    def __call__(self, partition: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """What comes out at the end; batches without rows are left out."""
        for stage in self.stages:
            batches = stage(partition, batches)
        return (batch for batch in batches if len(batch))


class SelectStage:
    """A stage that gives some of the columns."""

    stateful = False

    def __init__(self, schema: pa.Schema, names: Sequence[str]) -> None:
        self.names = list(names)
        self.schema = pa.schema([schema.field(name) for name in names], schema.metadata)

    def __call__(self, partition: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:  # noqa: ARG002
        """The columns of each batch."""
        return (batch.select(self.names) for batch in batches)


class UnionStage:
    """A stage that makes partitions of nothing as others do: first those of one, then those of the next."""

    def __init__(self, chains: Sequence[StageChain], counts: Sequence[int]) -> None:
        self._chains, self._counts = list(chains), list(counts)
        self.schema: pa.Schema = chains[0].schema
        self.stateful = any(chain.stateful for chain in chains)

    def __call__(self, partition: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The partition of the one that has it, by its number there."""
        for chain, count in zip(self._chains, self._counts, strict=True):
            if partition < count:
                return chain(partition, batches)
            partition -= count
        raise IndexError(f"there is no partition {partition}")


ENGINES = {
    "local": "quire.distributed._local:LocalEngine",
    "ray": "quire.distributed._ray:RayEngine",
    "spark": "quire.distributed._spark:SparkEngine",
}
"""The class of each engine; its fields are the options of `engine`."""


_ENGINE_OF_PACKAGE = {"pyarrow": "local", "pyspark": "spark", "ray": "ray"}
"""Whose objects the frames of an engine are."""


_default_engines: dict[str, Engine] = {}


def engine(name: str | Engine = "local", **options: Any) -> Engine:
    """An engine by its name, or the engine that is given.

    Without options it is always the same one. `options` are the engine's own: `engine("local", backend="process")`,
    `engine("ray", num_cpus=2)`, `engine("spark", master="local[2]")`.
    """
    if not isinstance(name, str):
        if options:
            raise OptionError(f"options are for an engine that is made by its name, got {name!r}.")
        return name
    if name not in ENGINES:
        raise OptionError(f"engine={name!r}: there is no such engine. {did_you_mean(name, ENGINES)}")
    if options:
        return _create_engine(name, options)
    if name not in _default_engines:
        _default_engines[name] = _create_engine(name, {})
    return _default_engines[name]


def _create_engine(name: str, options: dict[str, Any]) -> Engine:
    module, _, cls = ENGINES[name].partition(":")
    engine_type = getattr(importlib.import_module(module), cls)
    parameters = inspect.signature(engine_type).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        check_options(f"engine({name!r})", options, [parameter.name for parameter in parameters])
    made: Engine = engine_type(**options)
    return made


def engine_of(native: Any) -> Engine:
    """The engine whose own object this is."""
    package = type(native).__module__.partition(".")[0]
    if package not in _ENGINE_OF_PACKAGE:
        raise OptionError(
            f"a {type(native).__name__} is of no engine: pass a Ray Dataset, a Spark DataFrame or an Arrow table, or "
            "say engine=."
        )
    return engine(_ENGINE_OF_PACKAGE[package])
