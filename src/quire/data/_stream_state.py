"""Where a stream is: a few numbers, from which any number of ranks and workers goes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from quire.data._epoch import RowOrder, Slice
from quire.data._passes import Pass
from quire.errors import OptionError

_VERSION = 1
_ORDER = ("size", "seed", "shuffle", "block", "window")
_NO_STATE = "this is no state of a StreamingDataset, or one of another version of quire."


@dataclass(frozen=True, slots=True)
class StreamState:
    """So many steps behind a position of an epoch, with so many ranks and rows in a batch; and which order that is of.

    `done` are the epochs of the pass that are behind, and `before` the steps of the pass in them.
    """

    epoch: int
    start: int
    step: int
    done: int
    before: int
    epochs: int
    world_size: int
    batch_size: int
    last: str
    size: int
    seed: int
    shuffle: Any
    block: int
    window: int
    dataset: str
    version: int = _VERSION

    @classmethod
    def at(cls, share: Slice, step: int, behind: tuple[int, int], epochs: int | None, dataset: str) -> StreamState:
        """The state behind so many steps; `behind` are the epochs of the pass that are, and the steps in them."""
        order = share.order
        parts: tuple[Any, ...] = (share.last, order.size, order.seed, order.shuffle, order.block, order.window, dataset)
        return cls(share.epoch, share.start, step, *behind, epochs or 0, share.world_size, share.batch_size, *parts)

    def to_dict(self) -> dict[str, Any]:
        """The numbers, by name."""
        return asdict(self)

    @classmethod
    def from_dict(cls, state: Any) -> StreamState:
        """The state again, also out of that of a StatefulDataLoader; what is none is an error."""
        if not isinstance(state, Mapping):
            raise OptionError(_NO_STATE)
        if "_snapshot" in state:
            return cls._from_workers(state["_snapshot"]["_worker_snapshots"], state["_steps_since_snapshot"])
        state = state.get("dataset_state") or state
        if state.get("version") != _VERSION or not set(cls.__slots__) <= set(state):
            raise OptionError(_NO_STATE)
        found = cls(**{name: state[name] for name in cls.__slots__})
        counts: tuple[Any, ...] = (found.epoch, found.start, found.step, found.done, found.before, found.epochs)
        if not all(isinstance(count, int) and count >= 0 for count in counts):
            raise OptionError(f"the state is damaged: {dict(state)}")
        return found

    @classmethod
    def _from_workers(cls, snapshots: Mapping[str, Any], later: int) -> StreamState:
        """Where workers are together, each of which knows how far it is itself, and so many steps later."""
        found = [cls.from_dict(snapshots[f"worker_{worker}"]) for worker in range(len(snapshots))]
        taken = min(state._next_of(worker, len(found)) for worker, state in enumerate(found))
        first = min(found, key=lambda state: state.done)
        return first._moved(taken + later - first.before)

    def _next_of(self, worker: int, workers: int) -> int:
        """The next step of the pass that is a worker's, counted from where the pass began."""
        at = self.before + self.step
        return at + (worker - at) % workers

    def _moved(self, step: int) -> StreamState:
        """So many steps behind the same position; where the epoch has fewer, in the one that comes then."""
        state, steps = self, self._steps()
        while step > steps and (not state.epochs or state.done + 1 < state.epochs):
            step, behind = step - steps, state.before + steps
            state = replace(state, epoch=state.epoch + 1, start=0, done=state.done + 1, before=behind)
            steps = state._steps()
        return replace(state, step=min(step, steps))

    def check(self, order: RowOrder, dataset: str) -> None:
        """Refuse a state of another order: its position would be that of other rows."""
        wanted = {name: getattr(order, name) for name in _ORDER}
        wanted["dataset"] = dataset
        other = [
            f"{name} was {getattr(self, name)!r}, is {value!r}"
            for name, value in wanted.items()
            if getattr(self, name) != value
        ]
        if other:
            raise OptionError(
                f"the state is of another order of rows: {'; '.join(other)}. Open the same dataset with the same seed, "
                "shuffle, where and memory_bytes, or begin anew."
            )

    def divides_like(self, share: Slice) -> bool:
        """Whether its steps are those of a share."""
        return (self.world_size, self.batch_size, self.last) == (share.world_size, share.batch_size, share.last)

    def next_pass(self, epochs: int | None) -> Pass:
        """Return where a StreamingDataset resumes: at the very next row, of this epoch or of the next one."""
        at = self.position()
        if self.step < self._steps():
            return at._replace(done=at.done if epochs is None or at.done < epochs else 0)
        done = at.done + 1
        return Pass(at.epoch + 1, 0, done if epochs is None or done < epochs else 0)

    def position(self) -> Pass:
        """Return the same place as a position in the epoch; at the end of the epoch, that is the number of rows."""
        if self.step < self._steps():
            return Pass(self.epoch, self.start + self.step * self.world_size * self.batch_size, self.done)
        return Pass(self.epoch, self.size, self.done)

    def _steps(self) -> int:
        order = RowOrder(self.size)
        return Slice(order, 0, self.start, 0, self.world_size, self.batch_size, self.last).steps  # type: ignore[arg-type]
