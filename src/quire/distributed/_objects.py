"""Any Python object as a partition: operations are kept as a plan of nodes until their results are requested.

An `ObjectEngine` runs such plans. `LocalObjects` runs them here; those of Ray and Spark are in `_ray` and
`_spark_objects`.
"""

from __future__ import annotations

import importlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from quire.distributed._engine import Engine, Frame, engine_of
from quire.distributed._engine import engine as get_engine
from quire.distributed._local import LocalEngine
from quire.distributed._object_steps import (
    ConcatStep,
    CountStep,
    ObjectStep,
    PairStep,
    PartitionFailure,
    SplitByKeysStep,
    SplitByRowsStep,
    Transform,
    TransformStep,
)
from quire.distributed._partitions import InMemoryPartition, LazyTable, Partition
from quire.distributed._row_containers import copy_value, is_pandas
from quire.errors import FunctionError, OptionError, PartitionError
from quire.parallel import MapOptions, ordered_map, run_map

ALL_PARTITIONS = slice(None)


@dataclass(eq=False)
class PlanNode:
    """A node of a plan. `cached` says that its objects are to be kept; `kept` is what the engine keeps of them."""

    cached: bool = field(default=False, init=False)
    kept: Any = field(default=None, init=False)
    lock: Any = field(default_factory=threading.RLock, init=False)


@dataclass(eq=False)
class HeldNode(PlanNode):
    """Objects that the engine holds."""

    held: Any
    parts: int


@dataclass(eq=False)
class NativeNode(PlanNode):
    """The engine's own collection of rows: partitions are data frames, or Arrow tables if their schema is known."""

    native: Any
    schema: pa.Schema | None = None

    def __post_init__(self) -> None:
        self.cached = True


@dataclass(eq=False)
class MapNode(PlanNode):
    """The results of a transform of each object."""

    parent: PlanNode
    transform: Transform


@dataclass(eq=False)
class ExchangeNode(PlanNode):
    """The rows in other partitions: by keys, or evenly."""

    parent: PlanNode
    parts: int
    names: tuple[Any, ...] | None = None

    def make_split(self, counts: dict[int, int]) -> ObjectStep:
        """Return the step that splits a partition into the parts for the others."""
        return SplitByRowsStep(counts, self.parts) if self.names is None else SplitByKeysStep(self.names, self.parts)


@dataclass(eq=False)
class ZipNode(PlanNode):
    """The objects of two plans in pairs."""

    nodes: tuple[PlanNode, PlanNode]


def fuse_maps(node: PlanNode) -> tuple[PlanNode, tuple[Transform, ...]]:
    """Return the last node whose objects must exist, and the transforms from it to this one."""
    transforms: list[Transform] = []
    while isinstance(node, MapNode) and not node.cached:
        transforms.append(node.transform)
        node = node.parent
    return node, tuple(reversed(transforms))


class ObjectEngine(ABC):
    """Holds the objects of partitions, and runs plans on them."""

    name: str
    engine: Engine
    """The engine for record batches that this one belongs to."""
    workers: int
    """How many partitions are processed at a time."""

    @abstractmethod
    def hold(self, values: Sequence[Any]) -> HeldNode:
        """Hold objects of the driver, one per partition."""

    @abstractmethod
    def values(self, node: PlanNode, partitions: slice = ALL_PARTITIONS) -> Iterator[Any]:
        """Yield the objects of all partitions, or of some, in order; the caller may change them."""

    @abstractmethod
    def counts(self, node: PlanNode) -> list[int]:
        """Return the number of rows in each partition."""

    @abstractmethod
    def num_partitions(self, node: PlanNode) -> int:
        """Return the number of partitions."""

    @abstractmethod
    def release(self, node: PlanNode) -> None:
        """Release what is kept of a node."""

    @abstractmethod
    def native(self, node: PlanNode) -> Any:
        """Return the engine's own collection of rows, for a plan whose objects are data frames."""

    @abstractmethod
    def from_frame(self, frame: Frame[Any]) -> PlanNode:
        """Return a plan whose objects hold the rows of a frame: Arrow tables, or `LazyTable`."""

    @abstractmethod
    def arrow_frame(self, node: PlanNode, schema: pa.Schema) -> Frame[Any]:
        """Return a frame of record batches, for a plan whose objects are Arrow tables of the schema."""


class TaskEngine(ObjectEngine):
    """An engine that runs single tasks. It refers to objects by handles: the objects themselves, or references."""

    copies: bool
    """Whether functions get copies, because what a handle refers to must not be changed."""

    @abstractmethod
    def run(self, step: ObjectStep, tasks: Iterable[tuple[int, Sequence[Any]]]) -> Iterator[Any]:
        """Yield the handles of the results of a step, one per task; lists of handles, if it has several outputs."""

    @abstractmethod
    def get(self, handles: Iterable[Any]) -> Iterator[Any]:
        """Yield the objects of handles; a failure is raised."""

    @abstractmethod
    def open_native(self, node: NativeNode) -> list[Any]:
        """Return handles of the partitions of the engine's own collection."""

    def values(self, node: PlanNode, partitions: slice = ALL_PARTITIONS) -> Iterator[Any]:
        return self.get(self._handles(node, partitions))

    def counts(self, node: PlanNode) -> list[int]:
        return list(self.get(self._run_each(CountStep(), self._handles(node))))

    def num_partitions(self, node: PlanNode) -> int:
        if isinstance(node, (HeldNode, ExchangeNode)):
            return node.parts
        if isinstance(node, NativeNode):
            return len(self._cached_handles(node))
        return self.num_partitions(node.parent if isinstance(node, MapNode) else node.nodes[0])  # type: ignore[attr-defined]

    def release(self, node: PlanNode) -> None:
        with node.lock:
            node.kept = None

    def _run_each(self, step: ObjectStep, handles: Iterable[Any], partitions: slice = ALL_PARTITIONS) -> Iterator[Any]:
        return self.run(step, ((place, (handle,)) for place, handle in enumerate(handles, partitions.start or 0)))

    def _handles(self, node: PlanNode, partitions: slice = ALL_PARTITIONS) -> Iterator[Any]:
        if node.cached:
            return iter(self._cached_handles(node)[partitions])
        return self._make_handles(node, partitions)

    def _make_handles(self, node: PlanNode, partitions: slice) -> Iterator[Any]:
        if isinstance(node, HeldNode):
            return iter(node.held[partitions])
        if isinstance(node, ExchangeNode):
            return self._exchanged(node, partitions)
        if isinstance(node, ZipNode):
            pairs = zip(*(self._handles(side, partitions) for side in node.nodes), strict=True)
            return self.run(PairStep(), enumerate(pairs, partitions.start or 0))
        assert isinstance(node, MapNode)
        # Transforms up to the last kept node run as one task: the objects between them are never stored.
        base, transforms = fuse_maps(node.parent)
        step = TransformStep((*transforms, node.transform), self.copies)
        return self._run_each(step, self._handles(base, partitions), partitions)

    def _cached_handles(self, node: PlanNode) -> list[Any]:
        with node.lock:
            if node.kept is None:
                if isinstance(node, NativeNode):
                    handles = self.open_native(node)
                else:
                    handles = list(self._make_handles(node, ALL_PARTITIONS))
                node.kept = self._check_handles(handles)
            kept: list[Any] = node.kept
            return kept

    def _check_handles(self, handles: list[Any]) -> list[Any]:
        """Raise the error of a failed partition before handles are kept, where that costs nothing."""
        return handles

    def _exchanged(self, node: ExchangeNode, partitions: slice) -> Iterator[Any]:
        # All to all: each partition is split into a piece for every target, and each target concatenates its pieces.
        # To divide rows evenly, a split must know how many rows come before its partition; keys need no counts.
        handles = list(self._handles(node.parent))
        counts = list(self.get(self._run_each(CountStep(), handles))) if node.names is None else []
        pieces = list(self._run_each(node.make_split(dict(enumerate(counts))), handles))
        return self.run(
            ConcatStep(), ((part, [piece[part] for piece in pieces]) for part in range(node.parts)[partitions])
        )


class LocalObjects(TaskEngine):
    """Objects in this process; tasks run in threads, or in processes."""

    name = "local"
    engine: LocalEngine

    def __init__(self, engine: LocalEngine) -> None:
        self.engine, self.workers, self._backend = engine, engine.workers, engine.backend
        self.copies = self._backend == "thread"

    def hold(self, values: Sequence[Any]) -> HeldNode:
        return HeldNode(list(values), len(values))

    def run(self, step: ObjectStep, tasks: Iterable[tuple[int, Sequence[Any]]]) -> Iterator[Any]:
        """Yield results as they come, in order; few are computed ahead."""
        if self._backend == "thread" or not isinstance(
            step, TransformStep
        ):  # other steps take less time than sending them
            return ordered_map(lambda task: step(*task), tasks, self.workers)
        return self._in_processes(step, tasks)

    def _in_processes(self, step: ObjectStep, tasks: Iterable[tuple[int, Sequence[Any]]]) -> Iterator[Any]:
        options = MapOptions(pool=self.engine._processes(), item_name="partition")
        try:
            yield from run_map(_StepTask(step), tasks, options)
        except PartitionError:
            raise
        except FunctionError as error:
            raise PartitionError(str(error)) from error

    def get(self, handles: Iterable[Any]) -> Iterator[Any]:
        for handle in handles:
            if isinstance(handle, PartitionFailure):
                raise handle.to_error()
            yield handle

    def values(self, node: PlanNode, partitions: slice = ALL_PARTITIONS) -> Iterator[Any]:
        """Yield the objects of the partitions; copies, unless they were just computed."""
        objects = super().values(node, partitions)
        return objects if isinstance(node, MapNode) and not node.cached else map(copy_value, objects)

    def _check_handles(self, handles: list[Any]) -> list[Any]:
        return list(self.get(handles))

    def open_native(self, node: NativeNode) -> list[Any]:
        """A frame is one partition."""
        return [node.native]

    def native(self, node: PlanNode) -> Any:
        """Return one data frame with all rows."""
        return ConcatStep().work(0, list(self.values(node)))

    def from_frame(self, frame: Frame[Any]) -> PlanNode:
        """Hold partitions that are read where they are worked on."""
        return self.hold([LazyTable(part, frame.schema) for part in frame.native])

    def arrow_frame(self, node: PlanNode, schema: pa.Schema) -> Frame[Any]:
        """Return a frame that is computed partition by partition."""
        plan = _cache_exchanges(node)
        return Frame(tuple(_TablePartition(self, plan, part) for part in range(self.num_partitions(node))), schema)


def _cache_exchanges(node: PlanNode) -> PlanNode:
    """Return the same plan for single partitions: rows are exchanged once for all of them."""
    if node.cached or isinstance(node, HeldNode):
        return node
    if isinstance(node, MapNode):
        return MapNode(_cache_exchanges(node.parent), node.transform)
    if isinstance(node, ZipNode):
        return ZipNode((_cache_exchanges(node.nodes[0]), _cache_exchanges(node.nodes[1])))
    assert isinstance(node, ExchangeNode)
    exchange = ExchangeNode(node.parent, node.parts, node.names)
    exchange.cached = True
    return exchange


@dataclass(frozen=True)
class _TablePartition(Partition):
    """A partition of a plan whose objects are Arrow tables."""

    objects: LocalObjects
    node: PlanNode
    number: int

    def batches(self) -> Iterator[pa.RecordBatch]:
        for table in self.objects.values(self.node, slice(self.number, self.number + 1)):
            yield from table.to_batches()

    def to_portable(self) -> Partition:
        """Compute the partition here: plans stay in this process."""
        return InMemoryPartition(list(self.batches()))


@dataclass
class _StepTask:
    """A step as a function of one argument."""

    step: ObjectStep

    def __call__(self, task: tuple[int, Sequence[Any]]) -> object:
        return self.step(*task)


_OBJECT_ENGINES = {
    "local": "_objects:LocalObjects",
    "ray": "_ray:RayObjects",
    "spark": "_spark_objects:SparkObjects",
}


def object_engine(engine: str | Engine) -> ObjectEngine:
    """Return the object engine that belongs to an engine."""
    base = get_engine(engine)
    if base.name not in _OBJECT_ENGINES:
        raise OptionError(f"engine={base.name!r} carries record batches only: use DocumentShards, or another engine.")
    module, _, cls = _OBJECT_ENGINES[base.name].partition(":")
    objects: ObjectEngine = getattr(importlib.import_module(f"quire.distributed.{module}"), cls)(base)
    return objects


def engine_of_rows(native: object) -> Engine:
    """Return the engine whose own collection of rows this is."""
    return get_engine("local") if is_pandas(native) else engine_of(native)
