"""Shards on Ray: Ray Data holds the blocks and moves them, and stages run in its tasks, or in its pools of actors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Literal, TypeAlias

import pyarrow as pa

from quire._optional import is_loaded, require
from quire.distributed._chain import Chain, Selection, Union, exactly, in_parts, told
from quire.distributed._contract import Frame, Stage
from quire.distributed._failures import error_from_text
from quire.distributed._ray_session import ray_session
from quire.distributed._ray_tensors import arrow_schema, plain_batch
from quire.errors import PartitionError

_ID = "id"
"""The column of a source that has nothing but the numbers of partitions."""
Blocks: TypeAlias = Literal["ids"] | tuple[int, ...] | None
"""What is in the blocks of a source: numbers of partitions; or else which partition each block is, if not all are."""


class RayFrame(Frame[Any]):
    """A dataset of Ray Data and the stages that are still to run on it, as one operator."""

    def __init__(
        self, source: Callable[[], Any], chain: Chain, workers: int, parts: int | None, blocks: Blocks
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
            return dataset.map_batches(_Task(self.chain, self.blocks), **how)
        data: Any = require("ray.data", extra="ray", needed_for="engine='ray'")
        pool = data.ActorPoolStrategy(min_size=1, max_size=max(1, self._workers))
        return dataset.map_batches(_Actor, fn_constructor_args=(self.chain, self.blocks), compute=pool, **how)

    def then(self, stage: Stage) -> RayFrame:
        """The same, and one more stage."""
        return RayFrame(self._source, self.chain.then(stage), self._workers, self.parts, self.blocks)


class _Task:
    """The stages, called with a block."""

    def __init__(self, chain: Chain, blocks: Blocks) -> None:
        self._chain, self._blocks = chain, blocks

    def __call__(self, block: pa.Table) -> Iterator[pa.Table]:
        if self._blocks == "ids":
            for number in block.column(_ID).to_pylist():
                yield from self._tables(number, iter(()))
            return
        batches = (
            exactly(plain_batch(batch, self._chain.takes), self._chain.takes) for batch in in_parts(block.to_batches())
        )
        number = _task_number()
        yield from self._tables(self._blocks[number] if self._blocks else number, batches)

    def _tables(self, number: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
        for batch in told(self._chain, number, batches):
            yield pa.Table.from_batches([batch])


class _Actor(_Task):
    """The same in an actor, which lives as long as the job."""


def _task_number() -> int:
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
        return self._frame(lambda: self._data.from_arrow(tables), Chain(schema), len(partitions), blocks)

    def from_stage(self, stage: Stage, partitions: int) -> RayFrame:
        """Tasks that have a number each, and no data."""
        if not partitions:
            return self.from_batches([], stage.schema)
        chain = Chain(pa.schema([pa.field(_ID, pa.int64())]), (stage,))
        return self._frame(
            lambda: self._data.range(partitions, override_num_blocks=partitions), chain, partitions, "ids"
        )

    def from_native(self, native: Any) -> RayFrame:
        """A dataset of Ray."""
        if not isinstance(native, self._data.Dataset):
            raise TypeError(f"engine='ray' takes a Dataset of Ray Data, got {type(native).__name__}.")
        with _unwrapped():
            schema = arrow_schema(native)
        return self._frame(lambda: native, Chain(schema), None)

    def _frame(self, source: Callable[[], Any], chain: Chain, parts: int | None, blocks: Blocks = None) -> RayFrame:
        return RayFrame(_once(lambda: _ordered(source())), chain, self.workers, parts, blocks)

    # --- from frame to frame

    def run(self, frame: Frame[Any], stage: Stage) -> RayFrame:
        """One more stage of the same operator."""
        return _own(frame).then(stage)

    def select(self, frame: Frame[Any], names: Sequence[str]) -> RayFrame:
        """Some of the columns."""
        return self.run(frame, Selection(frame.schema, names))

    def limit(self, frame: Frame[Any], rows: int) -> RayFrame:
        """The first rows."""
        return self._moved(frame, lambda dataset: dataset.limit(rows), None)

    def union(self, frames: Sequence[Frame[Any]]) -> RayFrame:
        """The partitions of all. Ray's own union gives blocks in turn, so those that it has made already are joined."""
        owns = [_own(frame) for frame in frames]
        known = [own.parts for own in owns if own.parts is not None]
        total = sum(known) if len(known) == len(owns) else None
        if total is not None and all(own.blocks == "ids" for own in owns):
            return self.from_stage(Union([own.chain for own in owns], known), total)
        return self._frame(lambda: self._joined(owns), _same(frames[0]), total)

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
        return self._moved(frame, lambda dataset: dataset.random_shuffle(seed=seed), _own(frame).parts)

    def cache(self, frame: Frame[Any]) -> RayFrame:
        """The blocks in the object store, from the first use on."""
        return self._moved(frame, lambda dataset: dataset.materialize(), _own(frame).parts)

    def _moved(self, frame: Frame[Any], move: Callable[[Any], Any], parts: int | None) -> RayFrame:
        """A frame of what Ray makes of the dataset of another, when it is asked for."""
        own = _own(frame)
        return self._frame(lambda: move(own.native), _same(frame), parts)

    # --- what runs

    def iter_batches(self, frame: Frame[Any]) -> Iterator[pa.RecordBatch]:
        """The blocks as they are ready, in order."""
        with _unwrapped():
            for table in frame.native.iter_batches(batch_size=None, batch_format="pyarrow", prefetch_batches=1):
                for batch in in_parts(table.to_batches()):
                    if len(batch):
                        yield exactly(plain_batch(batch, frame.schema), frame.schema)

    def collect(self, frame: Frame[Any]) -> list[pa.RecordBatch]:
        """All of it."""
        return list(self.iter_batches(frame))

    def count(self, frame: Frame[Any]) -> int:
        """The number of rows, by what Ray knows of the blocks."""
        with _unwrapped():
            return int(frame.native.count())

    def num_partitions(self, frame: Frame[Any]) -> int:
        """What was asked for; for datasets of others, and behind a limit, the blocks that there are."""
        own = _own(frame)
        if own.parts is None:
            with _unwrapped():
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
def _unwrapped() -> Iterator[None]:
    """What went wrong in a worker as the error that it was there; what went wrong with Ray as one of ours."""
    exceptions: Any = require("ray.exceptions", extra="ray", needed_for="engine='ray'")
    try:
        yield
    except exceptions.RayError as error:
        found = error_from_text(str(error))
        if found is None:
            raise PartitionError(f"Ray could not do it: {error}") from error
        raise found from found.__cause__


def _own(frame: Frame[Any]) -> RayFrame:
    if not isinstance(frame, RayFrame):
        raise TypeError(f"engine='ray' takes its own frames, got {type(frame).__name__}.")
    return frame


def _same(frame: Frame[Any]) -> Chain:
    return Chain(frame.schema)


def _ordered(dataset: Any) -> Any:
    """The same dataset with blocks that come in their order: a setting of each, which some share with all others."""
    own = type(dataset).copy(dataset, _deep_copy=True)
    own.context.execution_options.preserve_order = True
    own.context.enable_progress_bars = False
    return own


def _once(make: Callable[[], Any]) -> Callable[[], Any]:
    """What is made when it is first asked for, and then kept."""
    lock, made = threading.Lock(), list[Any]()

    def get() -> Any:
        with lock:
            if not made:
                made.append(make())
            return made[0]

    return get
