"""Shards on Ray: Ray Data holds the blocks and moves them, and stages run in its tasks or pools of actors.

`RayObjects` does the same for partitions of any Python object, with Ray's object store and plain tasks.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import pyarrow as pa

from quire._lowlevel.forks import ForkSafeLock
from quire._optional import is_loaded, require
from quire.display import track
from quire.distributed._batches import cast_to_schema, split_large
from quire.distributed._engine import Frame, SelectStage, Stage, StageChain, UnionStage
from quire.distributed._failures import error_from_text, run_stages
from quire.distributed._metrics import MeteredStage, StageReport, StageStats, collect_reports
from quire.distributed._object_steps import ObjectStep, PartitionFailure, RaiseStep
from quire.distributed._objects import HeldNode, NativeNode, PlanNode, TaskEngine
from quire.distributed._ray_tensors import arrow_schema, convert_tensors
from quire.distributed._resources import Resources, resources_of
from quire.distributed._row_containers import copy_value
from quire.distributed._stages import CountRows, sum_counts
from quire.errors import OptionError, PartitionError

if TYPE_CHECKING:
    from types import ModuleType

    from ray.data import Dataset


_LOOPBACK = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # this makes Ray bind every socket to 127.0.0.1
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


def ray_session(**options: Any) -> ModuleType:
    """Return the module `ray`, connected to a cluster.

    A process that is connected stays so. Else RAY_ADDRESS, or `address` among the options of `ray.init`, names a
    cluster; without one, Ray is started on this machine, on loopback only.
    """
    if ray_is_running():
        return require("ray", extra="ray", needed_for="engine='ray'")
    address = options.pop("address", None) or os.environ.get("RAY_ADDRESS") or "local"
    if address != "local":
        ray = require("ray", extra="ray", needed_for="engine='ray'")
        ray.init(address=address, **options)
        return ray
    defaults = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
    with loopback() as ray:
        ray.init(address="local", **{**defaults, **options})
    require("ray.data", extra="ray", needed_for="engine='ray'")
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # errors are raised as exceptions
    return ray


def ray_is_running() -> bool:
    """Whether this process is connected to Ray."""
    if not is_loaded("ray"):
        return False
    ray = require("ray", extra="ray", needed_for="engine='ray'")
    return bool(ray.is_initialized())


@contextmanager
def loopback() -> Iterator[ModuleType]:
    """Make every part of Ray that is started meanwhile listen on 127.0.0.1 only."""
    before = {name: os.environ.get(name) for name in _LOOPBACK}
    os.environ.update(_LOOPBACK)
    ray = require("ray", extra="ray", needed_for="engine='ray'")
    constants: Any = require("ray._private.ray_constants", extra="ray", needed_for="engine='ray'")
    # Ray reads the environment variable when it is imported, which may have been before.
    enabled, constants.ENABLE_RAY_CLUSTER = constants.ENABLE_RAY_CLUSTER, False
    try:
        yield ray
    finally:
        constants.ENABLE_RAY_CLUSTER = enabled
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


_ID_COLUMN = "id"
"""The column of a source that holds only the numbers of partitions."""
BlockNumbers: TypeAlias = Literal["ids"] | tuple[int, ...] | None
"""What the blocks of a source hold: numbers of partitions ('ids'), or data.

A tuple names the partition of each data block where some partitions have none; None means that block i is partition i.
"""


class RayFrame(Frame[Any]):
    """A Ray Dataset and the stages that are still to run on it, as one operator."""

    def __init__(
        self,
        source: Callable[[], Any],
        chain: StageChain,
        workers: int,
        parts: int | None,
        blocks: BlockNumbers,
        *,
        whole: bool = False,
    ) -> None:
        self.whole = whole
        """Whether each block of the source is a partition that Ray never splits."""
        self._source, self.chain, self._workers, self.parts, self.blocks = source, chain, workers, parts, blocks

    @property
    def schema(self) -> pa.Schema:
        return self.chain.schema

    @cached_property
    def native(self) -> Dataset:
        dataset = self._source()
        if not self.chain.stages and self.blocks != "ids":
            return dataset
        self.chain.prepare()
        # Stages do not change the batches they get, so blocks are passed without a copy.
        options: dict[str, Any] = {"batch_size": None, "batch_format": "pyarrow", "zero_copy_batch": True}
        resources = self.chain.resources or Resources()
        options |= {name: value for name, value in _ray_options(resources).items() if value is not None}
        data: Any = require("ray.data", extra="ray", needed_for="engine='ray'")
        # Ray can only keep a least number of workers if they are actors.
        if not self.chain.stateful and not isinstance(resources.concurrency, tuple):
            options["compute"] = data.TaskPoolStrategy(resources.concurrency)
            task = _BlockTask(self.chain, self.blocks, _report_collector())
            return _map_blocks(dataset)(_name_function(task, self.chain.name), **options)
        least, most = resources.least_workers or 1, resources.most_workers or max(1, self._workers)
        options["compute"] = data.ActorPoolStrategy(min_size=least, max_size=most)
        actor = type(self.chain.name, (_BlockTask,), {"__doc__": "Runs the stages in an actor."})
        return _map_blocks(dataset)(
            actor, fn_constructor_args=(self.chain, self.blocks, _report_collector()), **options
        )

    def then(self, stage: Stage) -> RayFrame:
        # Stages with other resources run in other workers, as an operator of their own.
        if self.chain.stages and resources_of(stage) != self.chain.resources:
            chain = StageChain(self.schema, (stage,))
            return RayFrame(lambda: self.native, chain, self._workers, self.parts, None)
        chain = self.chain.then(stage)
        return RayFrame(self._source, chain, self._workers, self.parts, self.blocks, whole=self.whole)


def _map_blocks(dataset: Any) -> Callable[..., Any]:
    """Return the method `map_batches` that passes whole blocks to functions on GPUs, too.

    The public one requires a batch size for them, and then joins blocks of several partitions. Batches for the function
    are cut in the stage.
    """
    names = ("map_batches_internal", "_map_batches_without_batch_size_validation", "map_batches")
    method: Callable[..., Any] = next(getattr(dataset, name) for name in names if hasattr(dataset, name))
    return method


def _ray_options(resources: Resources) -> dict[str, float | None]:
    """Return what a task or an actor requests, by the names of Ray's options."""
    return {"num_cpus": resources.cpus, "num_gpus": resources.gpus, "memory": resources.memory_bytes}


class _BlockTask:
    """Runs the stages on a block."""

    def __init__(self, chain: StageChain, blocks: BlockNumbers, collector: Any) -> None:
        self._chain, self._blocks, self._collector = chain, blocks, collector
        self._keys = [stage.key for stage in chain.stages if isinstance(stage, MeteredStage)]

    def __call__(self, block: pa.Table) -> Iterator[pa.Table]:
        if not self._keys:
            yield from self._run(block)
            return
        ray: Any = require("ray", extra="ray", needed_for="engine='ray'")
        # A task whose worker is lost begins again with the same id. It waits until that is noted, since a message that
        # is on its way is lost with the worker. The rows do not depend on the collector, so its loss is no failure.
        with suppress(ray.exceptions.RayError):
            ray.get(self._collector.begin.remote(ray.get_runtime_context().get_task_id(), self._keys), timeout=60)
        with collect_reports() as reports:
            yield from self._run(block)
        self._collector.add.remote(reports)

    def _run(self, block: pa.Table) -> Iterator[pa.Table]:
        if self._blocks == "ids":
            for number in block.column(_ID_COLUMN).to_pylist():
                yield from self._tables(number, iter(()))
            return
        batches = (
            cast_to_schema(convert_tensors(batch, self._chain.input_schema), self._chain.input_schema)
            for batch in split_large(block.to_batches())
        )
        number = _task_index()
        yield from self._tables(self._blocks[number] if self._blocks else number, batches)

    def _tables(self, number: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
        for batch in run_stages(self._chain, number, batches):
            yield pa.Table.from_batches([batch])


class _ReportCollector:
    """An actor that keeps the reports of stages for the driver. It ends with the driver.

    A driver that never asks for them has one sum for each stage, and not a report for each block.
    """

    def __init__(self) -> None:
        self._counts: dict[str, StageStats] = {}
        self._begun: dict[tuple[str, str], None] = {}  # an ordered set

    def begin(self, task: str, keys: list[str]) -> None:
        """Note that a task begins to run stages; one that has begun before is a retry."""
        for key in keys:
            if (task, key) in self._begun:
                self.add([StageReport(key, StageStats("", retries=1))])
            self._begun[task, key] = None
        while len(self._begun) > _MOST_TASKS:
            del self._begun[next(iter(self._begun))]

    def add(self, reports: list[StageReport]) -> None:
        for key, counts in reports:
            before = self._counts.get(key)
            self._counts[key] = counts if before is None else before.add(counts)

    def take(self) -> list[StageReport]:
        """Return what was reported since the last call."""
        counts, self._counts = self._counts, {}
        return [StageReport(*item) for item in counts.items()]


_MOST_TASKS = 100_000
"""The tasks that a collector remembers, to recognise retries."""


def _report_collector() -> Any:
    """Return the collector of this driver, on its node, which is not lost without the driver."""
    ray: Any = require("ray", extra="ray", needed_for="engine='ray'")
    context = ray.get_runtime_context()
    return _create_collector(f"quire reports of {context.get_job_id()}", context.get_node_id())


@cache
def _create_collector(name: str, node_id: str) -> Any:
    """Create the collector, or find it.

    Ray ends an actor when the handle that created it is gone, although other handles exist, so this one is kept. A new
    cluster has other nodes, and therefore another collector.
    """
    ray: Any = require("ray", extra="ray", needed_for="engine='ray'")
    strategies: Any = require("ray.util.scheduling_strategies", extra="ray", needed_for="engine='ray'")
    node = strategies.NodeAffinitySchedulingStrategy(node_id, soft=False)
    options = {"name": name, "get_if_exists": True, "num_cpus": 0, "scheduling_strategy": node}
    return ray.remote(_ReportCollector).options(**options).remote()


def _name_function(task: _BlockTask, name: str) -> Callable[[pa.Table], Iterator[pa.Table]]:
    """Return a task as a function. Ray names an operator after its function or class."""

    def run(block: pa.Table) -> Iterator[pa.Table]:
        return task(block)

    run.__name__ = run.__qualname__ = name
    return run


def _task_index() -> int:
    """Return the number of the task within its operator; tasks are in the order of the blocks."""
    context: Any = require(
        "ray.data._internal.execution.interfaces.task_context", extra="ray", needed_for="engine='ray'"
    )
    current = context.TaskContext.get_current()
    return 0 if current is None else int(current.task_idx)


class RayEngine:
    """Ray as an engine: attached to a running Ray, else started on this machine with options of `ray.init`."""

    name = "ray"

    def __init__(self, **options: Any) -> None:
        self._options, self._owns = options, False

    @property
    def _data(self) -> ModuleType:
        """The module `ray.data`, with Ray running."""
        running = ray_is_running()
        ray_session(**self._options)
        self._owns = self._owns or not running
        return require("ray.data", extra="ray", needed_for="engine='ray'")

    @property
    def workers(self) -> int:
        """The CPUs of the cluster."""
        return max(1, int(ray_session(**self._options).cluster_resources().get("CPU", 1)))

    def check_resources(self, resources: Resources) -> None:
        """Raise unless the nodes of the cluster can run these workers. Ray itself would wait for more nodes."""
        names = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}
        needed = {names[name]: value for name, value in _ray_options(resources).items() if value}
        nodes = [node["Resources"] for node in ray_session(**self._options).nodes() if node["Alive"]]
        least = resources.least_workers or 1
        if needed and sum(min(int(node.get(name, 0) / needed[name]) for name in needed) for node in nodes) < least:
            largest = {name: max(node.get(name, 0) for node in nodes) for name in needed}
            described = ", ".join(f"{name}: {value:,.12g}" for name, value in largest.items())
            raise OptionError(
                f"Resources({resources}): the Ray cluster has no room for {least} such workers. The most that one of "
                f"its {len(nodes)} nodes has is {described}."
            )

    # --- frames

    def from_batches(self, partitions: Sequence[Sequence[pa.RecordBatch]], schema: pa.Schema) -> RayFrame:
        """Make a block of each partition with rows; Ray keeps no empty blocks."""
        tables_by_number = {
            number: pa.Table.from_batches(batches, schema)
            for number, batches in enumerate(partitions)
            if any(map(len, batches))
        } or {0: schema.empty_table()}
        tables = list(tables_by_number.values())
        blocks = tuple(tables_by_number) if len(tables) < len(partitions) else None
        return self._frame(lambda: self._data.from_arrow(tables), StageChain(schema), len(partitions), blocks)

    def from_stage(self, stage: Stage, partitions: int) -> RayFrame:
        """Run tasks that have a number each, and no data."""
        if not partitions:
            return self.from_batches([], stage.schema)
        chain = StageChain(pa.schema([pa.field(_ID_COLUMN, pa.int64())]), (stage,))
        return self._frame(
            lambda: self._data.range(partitions, override_num_blocks=partitions), chain, partitions, "ids"
        )

    def from_native(self, native: object) -> RayFrame:
        if not isinstance(native, self._data.Dataset):
            raise TypeError(f"engine='ray' takes a Ray Dataset, got {type(native).__name__}.")
        with _translate_errors():
            schema = arrow_schema(native)
        return self._frame(lambda: native, StageChain(schema), None)

    def _frame(
        self,
        source: Callable[[], Any],
        chain: StageChain,
        parts: int | None,
        blocks: BlockNumbers = None,
        *,
        whole: bool = False,
    ) -> RayFrame:
        """Return a frame of a dataset that is made when it is needed; `whole` if no partition may be split."""

        def make_ordered() -> Dataset:
            # The settings belong to the context of a dataset, which datasets may share with all others: so on a copy.
            dataset: Any = source()
            copy = type(dataset).copy(dataset, _deep_copy=True)
            copy.context.execution_options.preserve_order = True
            copy.context.enable_progress_bars = False
            if (
                whole
            ):  # else Ray splits what a task returns into blocks of 128 MiB, and stages would get parts of a group
                copy.context.target_max_block_size = None
            return copy

        return RayFrame(_make_once(make_ordered), chain, self.workers, parts, blocks, whole=whole)

    # --- from frame to frame

    def run(self, frame: Frame[Any], stage: Stage) -> RayFrame:
        return _own_frame(frame).then(stage)

    def select(self, frame: Frame[Any], names: Sequence[str]) -> RayFrame:
        return self.run(frame, SelectStage(frame.schema, names))

    def limit(self, frame: Frame[Any], rows: int) -> RayFrame:
        return self._derive(frame, lambda dataset: dataset.limit(rows), None)

    def union(self, frames: Sequence[Frame[Any]]) -> RayFrame:
        """Concatenate frames, in order.

        Ray's own union interleaves blocks, so blocks are computed first unless all frames read their rows from a stage.
        """
        owns = [_own_frame(frame) for frame in frames]
        known = [own.parts for own in owns if own.parts is not None]
        total = sum(known) if len(known) == len(owns) else None
        if total is not None and all(own.blocks == "ids" for own in owns):
            return self.from_stage(UnionStage([own.chain for own in owns], known), total)
        return self._frame(lambda: self._concat_blocks(owns), StageChain(frames[0].schema), total)

    def _concat_blocks(self, frames: Sequence[RayFrame]) -> Dataset:
        blocks = [block for frame in frames for block in frame.native.to_arrow_refs()]
        return self._data.from_arrow_refs(blocks) if blocks else self._data.from_arrow(frames[0].schema.empty_table())

    def repartition(self, frame: Frame[Any], partitions: int) -> RayFrame:
        return self._derive(frame, lambda dataset: dataset.repartition(partitions), partitions)

    def exchange(self, frame: Frame[Any], name: str, partitions: int) -> RayFrame:
        """Sort by the number of the partition: with bounds, Ray makes one block for each."""
        bounds = list(range(1, partitions))
        return self._derive(
            frame,
            lambda dataset: dataset.sort(name, boundaries=bounds) if bounds else dataset.repartition(1),
            partitions,
            whole=True,
        )

    def shuffle(self, frame: Frame[Any], seed: int) -> RayFrame:
        return self._derive(frame, lambda dataset: dataset.random_shuffle(seed=seed), _own_frame(frame).parts)

    def cache(self, frame: Frame[Any]) -> RayFrame:
        """Keep the blocks in the object store from the first use on."""
        return self._derive(frame, lambda dataset: dataset.materialize(), _own_frame(frame).parts)

    def _derive(
        self, frame: Frame[Any], move: Callable[[Any], Any], parts: int | None, *, whole: bool = False
    ) -> RayFrame:
        """Return a frame of what Ray makes of another frame's dataset, when it is needed."""
        own = _own_frame(frame)
        return self._frame(lambda: move(own.native), StageChain(frame.schema), parts, whole=whole)

    def keeps_partitions(self, frame: Frame[Any]) -> bool:
        """Whether a stage gets each partition in one call, with the same rows each time: not if Ray makes blocks."""
        own = _own_frame(frame)
        return own.whole or own.blocks == "ids"

    # --- results

    def iter_batches(self, frame: Frame[Any]) -> Iterator[pa.RecordBatch]:
        """Yield the blocks as they are ready, in order."""
        with _translate_errors():
            for table in frame.native.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1):
                for batch in split_large(table.to_batches()):
                    if len(batch):
                        yield cast_to_schema(convert_tensors(batch, frame.schema), frame.schema)

    def collect(self, frame: Frame[Any]) -> list[pa.RecordBatch]:
        return list(self.iter_batches(frame))

    def collect_tracked(
        self,
        frame: Frame[Any],
        what: str,
        show: bool | None,  # noqa: FBT001
    ) -> list[pa.RecordBatch]:
        """Collect the only batch of each partition, and count those that are done."""
        return list(track(self.iter_batches(frame), what, _own_frame(frame).parts, show=show))

    def count(self, frame: Frame[Any]) -> int:
        """Return the number of rows, which Ray knows of finished blocks."""
        if _own_frame(frame).chain.stages:
            return sum_counts(self.collect_tracked(self.run(frame, CountRows()), "counting", None))
        with _translate_errors():
            return int(frame.native.count())

    def num_partitions(self, frame: Frame[Any]) -> int:
        """Return the requested number; for foreign datasets, and after a limit, the actual blocks."""
        own = _own_frame(frame)
        if own.parts is None:
            with _translate_errors():
                return int(own.native.materialize().num_blocks())
        return own.parts

    def fetch_reports(self) -> list[StageReport]:
        """Return what stages have reported since the last call."""
        if not ray_is_running():
            return []
        collector = _report_collector()
        reports: list[StageReport] = ray_session().get(collector.take.remote())
        return reports

    def close(self) -> None:
        """Stop Ray, if this engine has started it."""
        if self._owns and ray_is_running():
            ray_session().shutdown()
        self._owns = False


@contextmanager
def _translate_errors() -> Iterator[None]:
    """Raise an error of a worker as the error it was there, and one of Ray itself as a PartitionError."""
    exceptions: Any = require("ray.exceptions", extra="ray", needed_for="engine='ray'")
    try:
        yield
    except exceptions.RayError as error:
        original = error_from_text(str(error))
        if original is None:
            raise PartitionError(f"Ray failed: {error}") from error
        raise original from original.__cause__


def _own_frame(frame: Frame[Any]) -> RayFrame:
    if not isinstance(frame, RayFrame):
        raise TypeError(f"engine='ray' takes its own frames, got {type(frame).__name__}.")
    return frame


def _make_once(make: Callable[[], Any]) -> Callable[[], Any]:
    """Return a function that calls `make` the first time and keeps the result."""
    lock, result = ForkSafeLock(), list[Any]()

    def get() -> Any:
        with lock:
            if not result:
                result.append(make())
            return result[0]

    return get


class RayObjects(TaskEngine):
    """Objects in Ray's store. They are read-only there, so functions get copies."""

    name = "ray"
    engine: RayEngine
    copies = True

    def __init__(self, engine: RayEngine) -> None:
        self.engine = engine
        self.workers = engine.workers
        self._ray = ray_session()
        self._task = self._ray.remote(_run_step)

    def hold(self, values: Sequence[Any]) -> HeldNode:
        return HeldNode([self._ray.put(value) for value in values], len(values))

    def run(self, step: ObjectStep, tasks: Iterable[tuple[int, Sequence[Any]]]) -> Iterator[Any]:
        """Yield references to the results of tasks, which are submitted as they are requested."""
        shipped, task = self._ray.put(step), self._task.options(num_returns=step.outputs or 1, name=step.name)
        for partition, handles in tasks:
            handle = task.remote(shipped, partition, *handles)
            yield [handle] if step.outputs == 1 else handle  # Ray returns a single reference without a list

    def get(self, handles: Iterable[Any]) -> Iterator[Any]:
        """Yield the objects as they are ready; a few tasks run ahead of the consumer."""
        waiting: deque[Any] = deque()
        for handle in handles:
            waiting.append(handle)
            if len(waiting) > 2 * self.workers:
                yield self._fetch(waiting.popleft())
        while waiting:
            yield self._fetch(waiting.popleft())

    def _fetch(self, handle: object) -> Any:
        try:
            value = self._ray.get(handle)
        except self._ray.exceptions.RayError as error:
            raise PartitionError(f"Ray could not finish a partition: {error}") from error
        if isinstance(value, PartitionFailure):
            raise value.to_error()
        return copy_value(value)

    def open_native(self, node: NativeNode) -> list[Any]:
        return list(node.native.to_pandas_refs() if node.schema is None else node.native.to_arrow_refs())

    def from_frame(self, frame: Frame[Any]) -> PlanNode:
        return NativeNode(frame.native, frame.schema)

    def native(self, node: PlanNode) -> Dataset:
        """Return a Ray Dataset whose blocks are the data frames."""
        data: Any = self._ray.data
        return data.from_pandas_refs(list(self._run_each(RaiseStep(), self._handles(node))))

    def arrow_frame(self, node: PlanNode, schema: pa.Schema) -> RayFrame:
        """Return a frame of a Ray Dataset whose blocks are the tables."""

        def make_dataset() -> Dataset:
            data: Any = self._ray.data
            return data.from_arrow_refs(list(self._run_each(RaiseStep(), self._handles(node))))

        return self.engine._frame(make_dataset, StageChain(schema), self.num_partitions(node))


def _run_step(step: ObjectStep, partition: int, *values: Any) -> Any:
    """Run a step, as a Ray task."""
    result = step(partition, values)
    return result[0] if step.outputs == 1 else result
