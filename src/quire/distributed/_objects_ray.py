"""Any Python object a partition, on Ray: objects of its store, and tasks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa

from quire.distributed._chain import Chain
from quire.distributed._contract import Frame
from quire.distributed._nests import fresh
from quire.distributed._objects import Native, Node, Source, TaskEngine
from quire.distributed._ray import RayEngine, RayFrame
from quire.distributed._ray_session import ray_session
from quire.distributed._steps import Failure, Raise, Step
from quire.errors import PartitionError


class RayObjects(TaskEngine):
    """Objects in Ray's store. What lies there is read only, so functions get copies."""

    name = "ray"
    engine: RayEngine
    copies = True

    def __init__(self, engine: RayEngine) -> None:
        self.engine = engine
        self.workers = engine.workers
        self._ray = ray_session()
        self._task = self._ray.remote(_work)

    def hold(self, values: Sequence[Any]) -> Source:
        """The objects, put into the store."""
        return Source([self._ray.put(value) for value in values], len(values))

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
        return fresh(value)

    def opened(self, node: Native) -> list[Any]:
        """The blocks of a Dataset."""
        return list(node.native.to_pandas_refs() if node.schema is None else node.native.to_arrow_refs())

    def from_frame(self, frame: Frame[Any]) -> Node:
        """The blocks of its Dataset."""
        return Native(frame.native, frame.schema)

    def native(self, node: Node) -> Any:
        """A Dataset, whose blocks are the data frames."""
        data: Any = self._ray.data
        return data.from_pandas_refs(list(self._run_each(Raise(), self._handles(node))))

    def arrow_frame(self, node: Node, schema: pa.Schema) -> RayFrame:
        """A frame of a Dataset, whose blocks are the tables."""

        def made() -> Any:
            data: Any = self._ray.data
            return data.from_arrow_refs(list(self._run_each(Raise(), self._handles(node))))

        return self.engine._frame(made, Chain(schema), self.num_partitions(node))


def _work(step: Step, partition: int, *values: Any) -> Any:
    """A task of Ray."""
    made = step(partition, values)
    return made[0] if step.outputs == 1 else made
