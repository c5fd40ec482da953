"""The Ray that shards run on: the one that is running, or else one of this machine alone."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Literal, TypeAlias

import pyarrow as pa

from quire._optional import is_loaded, require
from quire.distributed._batches import cast_to_schema, split_large
from quire.distributed._engine import Frame, SelectStage, Stage, StageChain, UnionStage
from quire.distributed._failures import error_from_text, run_stages
from quire.distributed._object_steps import Failure, RaiseStep, Step
from quire.distributed._objects import HeldNode, NativeNode, Node, TaskEngine
from quire.distributed._ray_tensors import arrow_schema, convert_tensors
from quire.distributed._row_containers import copy_value
from quire.errors import PartitionError

_LOOPBACK = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # which is what makes every socket one of 127.0.0.1
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


def ray_session(**options: Any) -> Any:
    """The module `ray`, with a cluster behind it.

    A process that is connected stays so. Else RAY_ADDRESS, or `address` among the options of `ray.init`, names a
    cluster; without one, Ray is started here, on loopback alone.
    """
    if _is_connected():
        return require("ray", extra="ray", needed_for="engine='ray'")
    address = options.pop("address", None) or os.environ.get("RAY_ADDRESS") or "local"
    if address != "local":
        ray: Any = require("ray", extra="ray", needed_for="engine='ray'")
        ray.init(address=address, **options)
        return ray
    return _start_ray(options)


def _is_connected() -> bool:
    if not is_loaded("ray"):
        return False
    ray: Any = require("ray", extra="ray", needed_for="engine='ray'")
    return bool(ray.is_initialized())


def _start_ray(options: dict[str, Any]) -> Any:
    """Ray on this machine, without a dashboard and without its words about every step."""
    defaults = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
    with loopback() as ray:
        ray.init(address="local", **{**defaults, **options})
    require("ray.data", extra="ray", needed_for="engine='ray'")
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # errors are raised
    return ray


@contextmanager
def loopback() -> Iterator[Any]:
    """Whatever part of Ray is started meanwhile listens on 127.0.0.1 only."""
    before = {name: os.environ.get(name) for name in _LOOPBACK}
    os.environ.update(_LOOPBACK)
    ray: Any = require("ray", extra="ray", needed_for="engine='ray'")
    constants: Any = require("ray._private.ray_constants", extra="ray", needed_for="engine='ray'")
    was, constants.ENABLE_RAY_CLUSTER = constants.ENABLE_RAY_CLUSTER, False  # it was read when Ray was imported
    try:
        yield ray
    finally:
        constants.ENABLE_RAY_CLUSTER = was
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


_ID_COLUMN = "id"
"""The column of a source that has nothing but the numbers of partitions."""


BlockNumbers: TypeAlias = Literal["ids"] | tuple[int, ...] | None
"""What is in the blocks of a source: numbers of partitions; or else which partition each block is, if not all are."""


class RayFrame(Frame[Any]):
    """A dataset of Ray Data and the stages that are still to run on it, as one operator."""

    def __init__(
        self, source: Callable[[], Any], chain: StageChain, workers: int, parts: int | None, blocks: BlockNumbers
    ) -> None:
        self._source, self.chain, self._workers, self.parts, self.blocks = source, chain, workers, parts, blocks

    @property
    def schema(self) -> pa.Schema:
        """Of what the last stage gives."""
        return self.chain.schema

    @cached_property
    def native(self) -> Any:
        """The dataset of Ray."""
        dataset = self._source()
        if not self.chain.stages and self.blocks != "ids":
            return dataset
        how: dict[str, Any] = {"batch_size": None, "batch_format": "pyarrow", "zero_copy_batch": True}
        if not self.chain.stateful:
            return dataset.map_batches(_BlockTask(self.chain, self.blocks), **how)
        data: Any = require("ray.data", extra="ray", needed_for="engine='ray'")
        pool = data.ActorPoolStrategy(min_size=1, max_size=max(1, self._workers))
        return dataset.map_batches(_BlockActor, fn_constructor_args=(self.chain, self.blocks), compute=pool, **how)

    def then(self, stage: Stage) -> RayFrame:
        """The same, and one more stage."""
        return RayFrame(self._source, self.chain.then(stage), self._workers, self.parts, self.blocks)


class _BlockTask:
    """The stages, called with a block."""

    def __init__(self, chain: StageChain, blocks: BlockNumbers) -> None:
        self._chain, self._blocks = chain, blocks

    def __call__(self, block: pa.Table) -> Iterator[pa.Table]:
        if self._blocks == "ids":
            for number in block.column(_ID_COLUMN).to_pylist():
                yield from self._tables(number, iter(()))
            return
        batches = (
            cast_to_schema(convert_tensors(batch, self._chain.takes), self._chain.takes)
            for batch in split_large(block.to_batches())
        )
        number = _task_index()
        yield from self._tables(self._blocks[number] if self._blocks else number, batches)

    def _tables(self, number: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
        for batch in run_stages(self._chain, number, batches):
            yield pa.Table.from_batches([batch])


class _BlockActor(_BlockTask):
    """The same in an actor, which lives as long as the job."""


def _task_index() -> int:
    """The number of the task among those of its operator, which are in the order of the blocks."""
    context: Any = require(
        "ray.data._internal.execution.interfaces.task_context", extra="ray", needed_for="engine='ray'"
    )
    current = context.TaskContext.get_current()
    return 0 if current is None else int(current.task_idx)


class RayEngine:
    """Ray as an engine: attached to what runs, else started on this machine; the options are those of `ray.init`."""

    name = "ray"

    def __init__(self, **options: Any) -> None:
        self._options, self._owns = options, False

    @property
    def _data(self) -> Any:
        """The module `ray.data`, on a Ray that runs."""
        running = is_loaded("ray") and ray_is_running()
        ray_session(**self._options)
        self._owns = self._owns or not running
        return require("ray.data", extra="ray", needed_for="engine='ray'")

    @property
    def workers(self) -> int:
        """The CPUs of the cluster."""
        return max(1, int(ray_session(**self._options).cluster_resources().get("CPU", 1)))

    # --- frames

    def from_batches(self, partitions: Sequence[Sequence[pa.RecordBatch]], schema: pa.Schema) -> RayFrame:
        """A block for each partition; Ray has none without rows."""
        made = {number: pa.Table.from_batches(batches, schema) for number, batches in enumerate(partitions)}
        held = {number: table for number, table in made.items() if len(table)} or {0: schema.empty_table()}
        tables, blocks = list(held.values()), tuple(held) if len(held) < len(made) else None
        return self._frame(lambda: self._data.from_arrow(tables), StageChain(schema), len(partitions), blocks)

    def from_stage(self, stage: Stage, partitions: int) -> RayFrame:
        """Tasks that have a number each, and no data."""
        if not partitions:
            return self.from_batches([], stage.schema)
        chain = StageChain(pa.schema([pa.field(_ID_COLUMN, pa.int64())]), (stage,))
        return self._frame(
            lambda: self._data.range(partitions, override_num_blocks=partitions), chain, partitions, "ids"
        )

    def from_native(self, native: Any) -> RayFrame:
        """A dataset of Ray."""
        if not isinstance(native, self._data.Dataset):
            raise TypeError(f"engine='ray' takes a Dataset of Ray Data, got {type(native).__name__}.")
        with _translate_errors():
            schema = arrow_schema(native)
        return self._frame(lambda: native, StageChain(schema), None)

    def _frame(
        self, source: Callable[[], Any], chain: StageChain, parts: int | None, blocks: BlockNumbers = None
    ) -> RayFrame:
        return RayFrame(_make_once(lambda: _keep_order(source())), chain, self.workers, parts, blocks)

    # --- from frame to frame

    def run(self, frame: Frame[Any], stage: Stage) -> RayFrame:
        """One more stage of the same operator."""
        return _own_frame(frame).then(stage)

    def select(self, frame: Frame[Any], names: Sequence[str]) -> RayFrame:
        """Some of the columns."""
        return self.run(frame, SelectStage(frame.schema, names))

    def limit(self, frame: Frame[Any], rows: int) -> RayFrame:
        """The first rows."""
        return self._moved(frame, lambda dataset: dataset.limit(rows), None)

    def union(self, frames: Sequence[Frame[Any]]) -> RayFrame:
        """The partitions of all. Ray's own union gives blocks in turn, so those that it has made already are joined."""
        owns = [_own_frame(frame) for frame in frames]
        known = [own.parts for own in owns if own.parts is not None]
        total = sum(known) if len(known) == len(owns) else None
        if total is not None and all(own.blocks == "ids" for own in owns):
            return self.from_stage(UnionStage([own.chain for own in owns], known), total)
        return self._frame(lambda: self._joined(owns), _chain_of(frames[0]), total)

    def _joined(self, frames: Sequence[RayFrame]) -> Any:
        blocks = [block for frame in frames for block in frame.native.to_arrow_refs()]
        return self._data.from_arrow_refs(blocks) if blocks else self._data.from_arrow(frames[0].schema.empty_table())

    def repartition(self, frame: Frame[Any], partitions: int) -> RayFrame:
        """So many blocks, in order."""
        return self._moved(frame, lambda dataset: dataset.repartition(partitions), partitions)

    def partition_by(self, frame: Frame[Any], names: Sequence[str], partitions: int) -> RayFrame:
        """Blocks by the hash of columns."""
        return self._moved(frame, lambda dataset: dataset.repartition(partitions, keys=list(names)), partitions)

    def shuffle(self, frame: Frame[Any], seed: int) -> RayFrame:
        """The rows in a random order."""
        return self._moved(frame, lambda dataset: dataset.random_shuffle(seed=seed), _own_frame(frame).parts)

    def cache(self, frame: Frame[Any]) -> RayFrame:
        """The blocks in the object store, from the first use on."""
        return self._moved(frame, lambda dataset: dataset.materialize(), _own_frame(frame).parts)

    def _moved(self, frame: Frame[Any], move: Callable[[Any], Any], parts: int | None) -> RayFrame:
        """A frame of what Ray makes of the dataset of another, when it is asked for."""
        own = _own_frame(frame)
        return self._frame(lambda: move(own.native), _chain_of(frame), parts)

    # --- what runs

    def iter_batches(self, frame: Frame[Any]) -> Iterator[pa.RecordBatch]:
        """The blocks as they are ready, in order."""
        with _translate_errors():
            for table in frame.native.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1):
                for batch in split_large(table.to_batches()):
                    if len(batch):
                        yield cast_to_schema(convert_tensors(batch, frame.schema), frame.schema)

    def collect(self, frame: Frame[Any]) -> list[pa.RecordBatch]:
        """All of it."""
        return list(self.iter_batches(frame))

    def count(self, frame: Frame[Any]) -> int:
        """The number of rows, by what Ray knows of the blocks."""
        with _translate_errors():
            return int(frame.native.count())

    def num_partitions(self, frame: Frame[Any]) -> int:
        """What was asked for; for datasets of others, and behind a limit, the blocks that there are."""
        own = _own_frame(frame)
        if own.parts is None:
            with _translate_errors():
                return int(own.native.materialize().num_blocks())
        return own.parts

    def close(self) -> None:
        """End Ray, if this engine has started it."""
        if self._owns and ray_is_running():
            ray_session().shutdown()
        self._owns = False


def ray_is_running() -> bool:
    """Whether this process is connected to a Ray."""
    ray: Any = require("ray", extra="ray", needed_for="engine='ray'")
    return bool(ray.is_initialized())


@contextmanager
def _translate_errors() -> Iterator[None]:
    """What went wrong in a worker as the error that it was there; what went wrong with Ray as one of ours."""
    exceptions: Any = require("ray.exceptions", extra="ray", needed_for="engine='ray'")
    try:
        yield
    except exceptions.RayError as error:
        found = error_from_text(str(error))
        if found is None:
            raise PartitionError(f"Ray could not do it: {error}") from error
        raise found from found.__cause__


def _own_frame(frame: Frame[Any]) -> RayFrame:
    if not isinstance(frame, RayFrame):
        raise TypeError(f"engine='ray' takes its own frames, got {type(frame).__name__}.")
    return frame


def _chain_of(frame: Frame[Any]) -> StageChain:
    return StageChain(frame.schema)


def _keep_order(dataset: Any) -> Any:
    """The same dataset with blocks that come in their order: a setting of each, which some share with all others."""
    own = type(dataset).copy(dataset, _deep_copy=True)
    own.context.execution_options.preserve_order = True
    own.context.enable_progress_bars = False
    return own


def _make_once(make: Callable[[], Any]) -> Callable[[], Any]:
    """What is made when it is first asked for, and then kept."""
    lock, made = threading.Lock(), list[Any]()

    def get() -> Any:
        with lock:
            if not made:
                made.append(make())
            return made[0]

    return get


class RayObjects(TaskEngine):
    """Objects in Ray's store. What lies there is read only, so functions get copies."""

    name = "ray"
    engine: RayEngine
    copies = True

    def __init__(self, engine: RayEngine) -> None:
        self.engine = engine
        self.workers = engine.workers
        self._ray = ray_session()
        self._task = self._ray.remote(_run_step)

    def hold(self, values: Sequence[Any]) -> HeldNode:
        """The objects, put into the store."""
        return HeldNode([self._ray.put(value) for value in values], len(values))

    def run(self, step: Step, tasks: Iterable[tuple[int, Sequence[Any]]]) -> Iterator[Any]:
        """References to results of tasks, which are handed in as they are asked for."""
        shipped, task = self._ray.put(step), self._task.options(num_returns=step.outputs or 1, name=step.name)
        for partition, handles in tasks:
            made = task.remote(shipped, partition, *handles)
            yield [made] if step.outputs == 1 else made

    def get(self, handles: Iterable[Any]) -> Iterator[Any]:
        """The objects, as they are ready; a few are under way ahead of the consumer."""
        waiting: deque[Any] = deque()
        for handle in handles:
            waiting.append(handle)
            if len(waiting) > 2 * self.workers:
                yield self._got(waiting.popleft())
        while waiting:
            yield self._got(waiting.popleft())

    def _got(self, handle: Any) -> Any:
        try:
            value = self._ray.get(handle)
        except self._ray.exceptions.RayError as error:
            raise PartitionError(f"Ray could not finish a partition: {error}") from error
        if isinstance(value, Failure):
            raise value.raised()
        return copy_value(value)

    def opened(self, node: NativeNode) -> list[Any]:
        """The blocks of a Dataset."""
        return list(node.native.to_pandas_refs() if node.schema is None else node.native.to_arrow_refs())

    def from_frame(self, frame: Frame[Any]) -> Node:
        """The blocks of its Dataset."""
        return NativeNode(frame.native, frame.schema)

    def native(self, node: Node) -> Any:
        """A Dataset, whose blocks are the data frames."""
        data: Any = self._ray.data
        return data.from_pandas_refs(list(self._run_each(RaiseStep(), self._handles(node))))

    def arrow_frame(self, node: Node, schema: pa.Schema) -> RayFrame:
        """A frame of a Dataset, whose blocks are the tables."""

        def made() -> Any:
            data: Any = self._ray.data
            return data.from_arrow_refs(list(self._run_each(RaiseStep(), self._handles(node))))

        return self.engine._frame(made, StageChain(schema), self.num_partitions(node))


def _run_step(step: Step, partition: int, *values: Any) -> Any:
    """A task of Ray."""
    made = step(partition, values)
    return made[0] if step.outputs == 1 else made
