"""The contract of an engine, the stages that engines share, and the engines by name.

Engines know no documents. They move Arrow record batches in the layout that storage gives a document class (tensors of
a fixed shape are fixed-size binary, described in the metadata of the field), and they call a `Stage`: record batches
in, record batches out. Everything that users see of shards (`map`, `filter`, `split`, reading, writing) is made of
stages, so that it gives the same on every engine. An engine only holds partitions, moves rows between them, and runs
stages where the data is.

The laws of a frame, which tests/distributed checks for every engine:

- it is lazy: nothing runs before `iter_batches`, `count`, `num_partitions` or the first use of a cached frame;
- `run`, `select`, `limit`, `union` and `iter_batches` keep the order of partitions, and of rows within them;
- a stage is called with record batches of exactly `frame.schema`, whatever types the engine itself uses for them;
- no call holds a whole partition in memory unless the engine must (to sort, to shuffle, to cache), and no record batch
  that an engine makes by itself is larger than `MAX_BATCH_BYTES`;
- empty partitions do no harm; stages see them, too, where the engine has a worker for them;
- an engine may run a stage again for a partition whose worker was lost. The results of exactly one attempt count;
- an error of a stage is raised by `iter_batches` (or `count`, ...) as the `PartitionError` that it is.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import pyarrow as pa

from quire.distributed._resources import Resources, shared_resources
from quire.errors import OptionError, check_options, did_you_mean

NativeT = TypeVar("NativeT")


@dataclass(frozen=True)
class Frame(Generic[NativeT]):
    """A lazy collection of record batches in partitions: the engine's own object, and the schema that stages see."""

    native: NativeT
    schema: pa.Schema
    """As of `Layout.fields`: the metadata of the fields describes what their bytes mean."""


@runtime_checkable
class Stage(Protocol):
    """What is done to a partition. It can be pickled, if need be by cloudpickle.

    It takes the record batches of the partition one at a time and yields others as it goes, holding no more of either
    than it needs. It may be called more than once for a partition, with a part of it each time (Ray has blocks), unless
    `exchange` has made the partitions.
    """

    @property
    def schema(self) -> pa.Schema:
        """The schema of the record batches it yields."""
        ...

    @property
    def stateful(self) -> bool:
        """Whether it creates an expensive object and keeps it in the worker.

        An engine that starts workers for a job, such as Ray, should then keep them for the whole job.
        """
        ...

    def __call__(self, partition: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the record batches that it makes of a partition; the number is for messages and file names."""
        ...


class Engine(Protocol):
    """Holds frames and runs stages on them. Frames of one engine only go into its own methods.

    `quire.distributed.engine(name, **options)` returns one; any object with these methods can be used instead. One with
    a method `check_resources(resources)`, which raises an error for what it cannot provide, also gets stages with an
    attribute `resources`. With `collect_tracked(frame, what, show)`, long jobs show a progress bar.
    """

    name: str
    """'local', 'ray', 'spark', ..."""

    @property
    def workers(self) -> int:
        """The number of partitions processed at a time, and the default number of partitions."""
        ...

    # --- frames

    def from_batches(self, partitions: Sequence[Sequence[pa.RecordBatch]], schema: pa.Schema) -> Frame[Any]:
        """Return a frame of data on the driver, one partition for each sequence; some may be empty."""
        ...

    def from_stage(self, stage: Stage, partitions: int) -> Frame[Any]:
        """Return a frame of what a stage makes of nothing: partition i is `stage(i, iter(()))`. Reads files."""
        ...

    def from_native(self, native: object) -> Frame[Any]:
        """Return a frame of the engine's own object (a DataFrame, a Dataset), with as exact a schema as possible.

        An object of another kind is a TypeError.
        """
        ...

    # --- from frame to frame

    def run(self, frame: Frame[Any], stage: Stage) -> Frame[Any]:
        """Run a stage on each partition."""
        ...

    def select(self, frame: Frame[Any], names: Sequence[str]) -> Frame[Any]:
        """Select some of the columns, in this order."""
        ...

    def limit(self, frame: Frame[Any], rows: int) -> Frame[Any]:
        """Keep the first rows."""
        ...

    def union(self, frames: Sequence[Frame[Any]]) -> Frame[Any]:
        """Concatenate the partitions of frames with equal schemas, in order."""
        ...

    def repartition(self, frame: Frame[Any], partitions: int) -> Frame[Any]:
        """Distribute the rows over partitions of about one size. Their order is kept only if the engine can."""
        ...

    def exchange(self, frame: Frame[Any], name: str, partitions: int) -> Frame[Any]:
        """Move each row into the partition whose number is in an int32 column; their order there does not matter.

        A stage that runs on the result is called once for a partition, with all of its rows. The rows are few and
        large: each holds many rows of the shards as bytes.
        """
        ...

    def shuffle(self, frame: Frame[Any], seed: int) -> Frame[Any]:
        """Shuffle the rows over all partitions, in whatever way the engine has."""
        ...

    def cache(self, frame: Frame[Any]) -> Frame[Any]:
        """Return the same rows; what makes them runs once, when it is first needed."""
        ...

    # --- results

    def iter_batches(self, frame: Frame[Any]) -> Iterator[pa.RecordBatch]:
        """Yield the record batches of all partitions, in order, as they are ready, without the empty ones.

        The caller may stop at any batch. Only a few are held ahead of the consumer, never all of the data.
        """
        ...

    def collect(self, frame: Frame[Any]) -> list[pa.RecordBatch]:
        """Return all batches of a small frame, such as the reports of writers, with all workers at work at a time."""
        ...

    def count(self, frame: Frame[Any]) -> int:
        """Return the number of rows."""
        ...

    def num_partitions(self, frame: Frame[Any]) -> int:
        """Return the number of partitions; this may run what makes the frame if it is not known otherwise."""
        ...

    def close(self) -> None:
        """End what the engine itself has started (workers, a session), not what it was attached to."""
        ...


def collect_tracked(
    engine: Engine,
    frame: Frame[Any],
    what: str,
    show: bool | None,  # noqa: FBT001
) -> list[pa.RecordBatch]:
    """Return all batches of a small frame, with a progress bar if the engine has one."""
    method = getattr(engine, "collect_tracked", None)
    batches: list[pa.RecordBatch] = engine.collect(frame) if method is None else method(frame, what, show)
    return batches


def prepare_stage(stage: Stage) -> None:
    """Compute what a stage needs from a job of its own, such as the bounds of a sort.

    Engines call this on the driver, when rows are needed, before they pickle the stage.
    """
    prepare = getattr(stage, "prepare", None)
    if prepare is not None:
        prepare()


def name_stage(stage: Stage) -> str:
    """Return the name of a stage in dashboards: that of the user's function, if it calls one."""
    return getattr(stage, "name", None) or type(stage).__name__.strip("_")


@dataclass(frozen=True)
class StageChain:
    """Stages that an engine runs as one: the batches between them do not leave the worker.

    `input_schema` is that of the batches for the first stage.
    """

    input_schema: pa.Schema
    stages: tuple[Stage, ...] = ()

    @property
    def schema(self) -> pa.Schema:
        """The schema of the batches that the last stage yields."""
        return self.stages[-1].schema if self.stages else self.input_schema

    @property
    def stateful(self) -> bool:
        return any(stage.stateful for stage in self.stages)

    @property
    def resources(self) -> Resources | None:
        """What the worker needs that runs them."""
        return shared_resources(self.stages)

    @property
    def name(self) -> str:
        """The names of the stages, in order: `ReadShards->describe`."""
        return "->".join(map(name_stage, self.stages))

    def prepare(self) -> None:
        for stage in self.stages:
            prepare_stage(stage)

    def then(self, stage: Stage) -> StageChain:
        """Return the chain with one more stage."""
        return StageChain(self.input_schema, (*self.stages, stage))

    def __call__(self, partition: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the batches of the last stage, without the empty ones."""
        for stage in self.stages:
            batches = stage(partition, batches)
        return (batch for batch in batches if len(batch))


class SelectStage:
    """A stage that selects some of the columns."""

    stateful = False

    def __init__(self, schema: pa.Schema, names: Sequence[str]) -> None:
        self.names = list(names)
        self.schema = pa.schema([schema.field(name) for name in names], schema.metadata)

    def __call__(self, partition: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:  # noqa: ARG002
        return (batch.select(self.names) for batch in batches)


class UnionStage:
    """A stage that makes the partitions of several chains: those of the first, then those of the next."""

    def __init__(self, chains: Sequence[StageChain], counts: Sequence[int]) -> None:
        self._chains, self._counts = list(chains), list(counts)
        self.schema: pa.Schema = chains[0].schema
        self.stateful = any(chain.stateful for chain in chains)
        self.name = " | ".join(dict.fromkeys(chain.name for chain in chains))

    def prepare(self) -> None:
        for chain in self._chains:
            chain.prepare()

    def __call__(self, partition: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield the partition of the chain that has it."""
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
"""The class of each engine, imported when it is first used; its fields are the options of `engine`."""
_ENGINE_OF_PACKAGE = {"pyarrow": "local", "pyspark": "spark", "ray": "ray"}
"""The engine whose frames are objects of a package."""
_default_engines: dict[str, Engine] = {}


def engine(name: str | Engine = "local", **options: Any) -> Engine:
    """Return the engine of a name, or the engine that is passed.

    Without options it is always the same object. `options` are the engine's own: `engine("local", backend="process")`,
    `engine("ray", num_cpus=2)`, `engine("spark", master="local[2]")`.
    """
    if not isinstance(name, str):
        if options:
            raise OptionError(f"options need the name of an engine, got {name!r}.")
        return name
    if name not in ENGINES:
        raise OptionError(f"engine={name!r}: there is no such engine. {did_you_mean(name, ENGINES)}")
    if options:
        return _create_engine(name, options)
    # Shared, because shards can only be combined on the same engine object.
    if name not in _default_engines:
        _default_engines[name] = _create_engine(name, {})
    return _default_engines[name]


def _create_engine(name: str, options: dict[str, Any]) -> Engine:
    module, _, cls = ENGINES[name].partition(":")
    engine_type = getattr(importlib.import_module(module), cls)
    parameters = inspect.signature(engine_type).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        check_options(f"engine({name!r})", options, [parameter.name for parameter in parameters])
    instance: Engine = engine_type(**options)
    return instance


def engine_of(native: object) -> Engine:
    """Return the engine whose own object this is."""
    package = type(native).__module__.partition(".")[0]
    if package not in _ENGINE_OF_PACKAGE:
        raise OptionError(
            f"a {type(native).__name__} belongs to no engine: pass a Ray Dataset, a Spark DataFrame or an Arrow table, "
            "or engine=."
        )
    return engine(_ENGINE_OF_PACKAGE[package])
