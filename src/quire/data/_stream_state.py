"""Where a stream is: a few numbers, from which any number of ranks and workers goes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from quire.data._epoch import RowOrder, Slice
from quire.data._passes import Pass
from quire.data._stream_options import StreamOptions
from quire.errors import OptionError

_VERSION = 1


@dataclass(frozen=True, slots=True)
class StreamState:
    """So many steps behind a position of an epoch, with so many ranks and rows in a batch; and which order that is of.

    `done` are the epochs of the pass that are behind.
    """

    epoch: int
    start: int
    step: int
    done: int
    epochs: int
    world_size: int
    batch_size: int
    last: str
    size: int
    seed: int
    shuffle: Any
    block: int
    window: int
    version: int = _VERSION

    @classmethod
    def at(cls, share: Slice, done: int, step: int, options: StreamOptions) -> StreamState:
        """The state behind so many steps."""
        order = share.order
        parts = (order.size, order.seed, order.shuffle, order.block, order.window)
        epochs = options.epochs or 0
        shares = (share.world_size, share.batch_size, share.last)
        return cls(share.epoch, share.start, step, done, epochs, *shares, *parts)

    def to_dict(self) -> dict[str, Any]:
        """The numbers, by name."""
        return asdict(self)

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> StreamState:
        """The state again; what is none is an error."""
        if isinstance(state, StreamState):
            return state
        if state.get("version") != _VERSION or not set(cls.__slots__) <= set(state):
            raise OptionError("this is no state of a StreamingDataset, or one of another version of quire.")
        return cls(**{name: state[name] for name in cls.__slots__})

    def check(self, order: RowOrder) -> None:
        """Refuse a state of another order: its position would be that of other rows."""
        wanted = {name: getattr(order, name) for name in ("size", "seed", "shuffle", "block", "window")}
        other = [
            f"{name} was {getattr(self, name)!r}, is {value!r}"
            for name, value in wanted.items()
            if getattr(self, name) != value
        ]
        if other:
            raise OptionError(
                f"the state is of another order of rows: {'; '.join(other)}. Open the same dataset with the same seed, "
                "shuffle and memory_bytes, or begin anew."
            )

    def divides_like(self, share: Slice) -> bool:
        """Whether its steps are those of a share."""
        return (self.world_size, self.batch_size, self.last) == (share.world_size, share.batch_size, share.last)

    def next_pass(self) -> Pass:
        """Where to go on: with the very next row, of this epoch or of the next one."""
        steps = self._steps()
        if self.step < steps:
            return Pass(self.epoch, self.start + self.step * self.world_size * self.batch_size, self.done)
        done = self.done + 1
        return Pass(self.epoch + 1, 0, done if done < self.epochs or not self.epochs else 0)

    def _steps(self) -> int:
        order = RowOrder(self.size)
        return Slice(order, 0, self.start, 0, self.world_size, self.batch_size, self.last).steps  # type: ignore[arg-type]
