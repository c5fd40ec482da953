"""MixedDataset: several streaming datasets as one, each batch drawn from one of them by weight."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, overload

import numpy as np

from quire.array import DocumentBatch, whole_number
from quire.data._bijection import derive_key, uniform
from quire.data._epoch import StepGroup
from quire.data._epoch_registry import EpochRegistry, PassStart, Worker, register_with_torch, this_worker
from quire.data._streaming import StreamingDataset, StreamState
from quire.document import BaseDocument
from quire.errors import OptionError

if TYPE_CHECKING:
    from numpy.typing import NDArray

DocT = TypeVar("DocT", bound=BaseDocument)
Stop = Literal["first", "all"]
_DRAWS = 4_096
"""The number of draws that are computed at a time."""
_STATE_KEYS = {"epoch", "step", "origin", "mix", "drawn", "datasets"}


@dataclass(frozen=True)
class MixedState:
    """The position of a mix: the pass, the number of draws taken in it, and the position of each dataset.

    `origin` is the step at which the iteration began, `drawn` the name of the dataset of the last batch.
    """

    epoch: int
    step: int
    origin: int
    mix: str
    drawn: str
    datasets: dict[str, StreamState]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)

    @classmethod
    def from_dict(cls, state: Any) -> MixedState:
        """Read a state that `to_dict` returned; anything else is an OptionError."""
        if (
            not isinstance(state, Mapping)
            or not set(state) >= _STATE_KEYS
            or not isinstance(state["datasets"], Mapping)
        ):
            raise OptionError("this is no state of a MixedDataset.")
        counts = [state[name] for name in ("epoch", "step", "origin")]
        if not all(isinstance(count, int) and count >= 0 for count in counts):
            raise OptionError(f"the state is damaged: epoch, step and origin are {counts}.")
        datasets = {name: StreamState.from_dict(part) for name, part in state["datasets"].items()}
        epoch, step, origin = counts
        return cls(epoch, step, origin, state["mix"], state["drawn"], datasets)


class MixedDataset(Generic[DocT]):
    """Batches of several datasets, each drawn with the probability of its weight: `for batch in MixedDataset(...)`.

    Which dataset a step draws from is a function of the seed, the pass and the step. All ranks therefore draw from the
    same dataset, workers share the steps, and a state determines the next batch exactly. `batch.state['drawn']` is the
    name or the number of the dataset. With `stop='first'`, a pass ends when the dataset that is drawn next has no rows
    left. With `stop='all'`, it ends when every dataset was read completely at least once, and a dataset that ends
    before the others begins its next epoch. The pass after it starts every dataset with a new epoch.
    """

    @overload
    def __init__(
        self,
        datasets: Mapping[str, StreamingDataset[DocT]] | Sequence[StreamingDataset[DocT]],
        weights: Sequence[float] | None = None,
        *,
        seed: int = 0,
        stop: Stop = "first",
    ) -> None: ...
    @overload
    def __init__(
        self: MixedDataset[Any],
        datasets: Mapping[str, StreamingDataset[Any]] | Sequence[StreamingDataset[Any]],
        weights: Sequence[float] | None = None,
        *,
        seed: int = 0,
        stop: Stop = "first",
    ) -> None: ...
    def __init__(
        self,
        datasets: Mapping[str, StreamingDataset[Any]] | Sequence[StreamingDataset[Any]],
        weights: Sequence[float] | None = None,
        *,
        seed: int = 0,
        stop: Stop = "first",
    ) -> None:
        named = datasets.items() if isinstance(datasets, Mapping) else enumerate(datasets)
        self.datasets = {str(name): dataset for name, dataset in named}
        self.seed, self.stop = whole_number("seed", seed), stop
        self._bounds = _cumulative_weights(self.datasets, weights)
        if stop not in ("first", "all"):
            raise OptionError(f"stop={stop!r}: use 'first' or 'all'.")
        shares = np.diff(self._bounds, prepend=0.0)
        never_drawn = [name for name, share in zip(self.datasets, shares, strict=True) if share <= 0]
        if stop == "all" and never_drawn:
            raise OptionError(f"stop='all' waits for every dataset, and {never_drawn} have weight 0: leave them out.")
        bounds = np.frombuffer(self._bounds.tobytes(), np.uint64).tolist()
        self._mix = f"{derive_key(self.seed, len(self.datasets), *bounds):x}"
        self._registry = EpochRegistry()
        self._state: MixedState | None = None
        self._resume: MixedState | None = None
        register_with_torch(type(self))

    # --- batches

    def __iter__(self) -> Iterator[DocumentBatch[DocT]]:
        """Iterate over one pass: the batches of this rank, or those of this DataLoader worker."""
        worker = this_worker()
        if worker is None:
            return self.batches(*Worker.alone())
        return self._batches(worker, *self._begin(worker))  # begins now, so that all workers see the same pass

    def batches(self, worker: int, workers: int, pass_id: int) -> Iterator[DocumentBatch[DocT]]:
        """Iterate over the batches of one of several workers; `pass_id` identifies the pass that they share."""
        this = Worker(worker, workers, pass_id)
        yield from self._batches(this, *self._begin(this))
        if not workers:
            for registry in (self._registry, *(dataset._registry for dataset in self.datasets.values())):
                registry.end(pass_id)

    def _begin(self, worker: Worker) -> tuple[PassStart, int, list[_Cursor]]:
        """Begin or resume a pass: its start, the step at which it began, and a cursor for each dataset."""
        for dataset in self.datasets.values():
            dataset._slice(PassStart())  # raises an error for invalid ranks, before the pass counts as begun
        resumed, self._resume = self._resume, None
        if resumed is not None:
            start = PassStart(resumed.epoch, resumed.step)
            self._registry.resume(start, worker)
            cursors = [_Cursor.resume(ds, resumed.datasets[name], worker) for name, ds in self.datasets.items()]
            return start, resumed.origin, cursors
        start = self._registry.begin(worker, 1)
        cursors = [_Cursor.begin(dataset, worker) for dataset in self.datasets.values()]
        self._state = self._state_at(start, start.position, "", cursors)
        return start, start.position, cursors

    def _batches(
        self, worker: Worker, start: PassStart, origin: int, cursors: list[_Cursor]
    ) -> Iterator[DocumentBatch[DocT]]:
        names = list(self.datasets)
        for step, number in self._steps(start, cursors):
            if worker.workers and (step - origin) % worker.workers != worker.number:
                continue
            [batch] = cursors[number].fetch()
            state = self._state_at(PassStart(start.epoch, step + 1), origin, names[number], cursors)
            object.__setattr__(batch, "_state", state)
            self._state = state
            yield batch

    def _steps(self, start: PassStart, cursors: list[_Cursor]) -> Iterator[tuple[int, int]]:
        """Advance the cursors step by step to the end of the pass: each step, and the number of its dataset."""
        # A worker goes through the steps of all workers, because where a dataset is depends on all draws before. Only
        # counters advance here; rows are read in `fetch`.
        for step in itertools.count(start.position):
            if self._is_over(start.epoch, step, cursors):
                return
            number = self._draw(start.epoch, step)
            cursors[number].advance()
            yield step, number

    def _is_over(self, epoch: int, step: int, cursors: list[_Cursor]) -> bool:
        """Return whether a pass ends before this step."""
        if self.stop == "all":
            return all(cursor.is_complete for cursor in cursors)
        cursor = cursors[self._draw(epoch, step)]
        return cursor.is_complete and not cursor.is_endless

    def _draw(self, epoch: int, step: int) -> int:
        """Return the number of the dataset that a step draws from."""
        return int(self._draws(epoch, step - step % _DRAWS)[step % _DRAWS])

    def _draws(self, epoch: int, first: int) -> NDArray[np.int64]:
        """Return the numbers of the datasets of the steps from `first` on; the last result is kept."""
        # Inverse transform sampling: the shares of the datasets divide [0, 1), and a uniform number falls into the
        # share of the dataset that is drawn. Rounding may leave the last bound below 1, hence the minimum.
        known = getattr(self, "_known", None)
        if known is None or known[0] != (epoch, first):
            numbers = np.arange(first, first + _DRAWS, dtype=np.uint64)
            chances = uniform(derive_key(self.seed, epoch), numbers)
            drawn = np.minimum(np.searchsorted(self._bounds, chances, side="right"), len(self._bounds) - 1)
            self._known = known = (epoch, first), drawn
        return known[1]

    def __len__(self) -> int:
        """Count the batches of the current pass on this rank, or of the next pass when none is under way.

        The batches that were taken before a pass was resumed count, too, so that the length is that of the whole pass.
        """
        if self.stop == "first" and all(dataset.options.epochs is None for dataset in self.datasets.values()):
            raise TypeError("datasets with epochs=None never end, and have no length together.")
        start = self._registry.current_start(1)
        cursors = [_Cursor.next(dataset) for dataset in self.datasets.values()]
        return start.position + sum(1 for _ in self._steps(start, cursors))

    # --- state

    def _state_at(self, at: PassStart, origin: int, drawn: str, cursors: list[_Cursor]) -> MixedState:
        states = {name: cursor.state() for name, cursor in zip(self.datasets, cursors, strict=True)}
        return MixedState(at.epoch, at.position, origin, self._mix, drawn, states)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch that this process took."""
        if this_worker() is None and self._registry.read().workers:
            raise OptionError("workers of a DataLoader make the batches: keep the state of the last one, batch.state.")
        if self._state is None:
            cursors = [_Cursor.next(dataset) for dataset in self.datasets.values()]
            start = self._registry.current_start(1)
            return self._state_at(start, start.position, "", cursors).to_dict()
        return self._state.to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state of a mix or of one of its batches, with any number of workers and ranks.

        The next batch is the one that would have followed. After the last batch of a pass, that is the first batch of
        the next pass.
        """
        resumed = MixedState.from_dict(state)
        if resumed.mix != self._mix or set(resumed.datasets) != set(self.datasets):
            raise OptionError("the state is of another mix: open the same datasets with the same weights and seed.")
        for name, part in resumed.datasets.items():
            part.check(self.datasets[name].order, self.datasets[name]._fingerprint)
        if this_worker() is not None:
            self._state = self._resume = resumed
            return
        # A pass that has ended is resumed as the beginning of the next pass.
        starts = {name: resumed.datasets[name].position() for name in self.datasets}
        cursors = [_Cursor(dataset, starts[name], 0) for name, dataset in self.datasets.items()]
        start = PassStart(resumed.epoch, resumed.step)
        if self._is_over(resumed.epoch, resumed.step, cursors):
            start = PassStart(resumed.epoch + 1)
            starts = {name: cursor.next_pass() for name, cursor in zip(self.datasets, cursors, strict=True)}
        for name, part_start in starts.items():
            self.datasets[name]._registry.set_next(part_start)
        self._registry.set_next(start)
        self._state = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        register_with_torch(type(self))


class _Cursor:
    """The position of one dataset in a pass over the mix: a step of an epoch.

    `start` is where its epoch began (in a resumed pass possibly in the middle, or at its very end), and `start.done`
    counts the epochs that the pass has completed before. The end of an epoch and the beginning of the next are
    different positions: only at the latter has another epoch of the dataset begun.
    """

    def __init__(self, dataset: StreamingDataset[Any], start: PassStart, step: int, pass_id: int = 0) -> None:
        self._dataset, self._start, self._pass_id = dataset, start, pass_id
        self._share, self._next = dataset._slice(start), step

    @classmethod
    def next(cls, dataset: StreamingDataset[Any]) -> _Cursor:
        """Return a cursor where the current pass began, or where the next one will."""
        return cls(dataset, dataset._registry.current_start(dataset.options.epochs or 1), 0)

    @classmethod
    def begin(cls, dataset: StreamingDataset[Any], worker: Worker) -> _Cursor:
        """Begin a pass as one of its workers."""
        start = dataset._registry.begin(worker, dataset.options.epochs or 1)
        return cls(dataset, start, 0, worker.pass_id)

    @classmethod
    def resume(cls, dataset: StreamingDataset[Any], state: StreamState, worker: Worker) -> _Cursor:
        """Resume a worker of a pass from its own state."""
        start = PassStart(state.epoch, state.start, state.done)
        if not state.divides_like(dataset._slice(PassStart())):
            raise OptionError("with other ranks, batch_size or last, give the state to the MixedDataset itself.")
        dataset._registry.resume(start, worker)
        return cls(dataset, start, state.step, worker.pass_id)

    @property
    def is_complete(self) -> bool:
        """Whether the pass has read all epochs of the dataset."""
        done = self._start.done + (self._next >= self._share.steps)
        return done >= (self._dataset.options.epochs or 1)

    @property
    def is_endless(self) -> bool:
        """Whether the dataset repeats for ever."""
        return self._dataset.options.epochs is None

    def next_pass(self) -> PassStart:
        """Return where the dataset begins the pass that follows this one."""
        epochs = self._dataset.options.epochs or 1
        return PassStart(max(self._start.epoch - self._start.done + epochs, self._start.epoch + 1))

    def advance(self) -> None:
        """Take a step, if need be the first one of the next epoch."""
        while self._next >= self._share.steps:
            if not self._dataset._slice(PassStart()).steps:
                raise OptionError(f"{self._dataset!r} has no steps, and was drawn.")
            self._start, self._next = PassStart(self._start.epoch + 1, 0, self._start.done + 1), 0
            self._share = self._dataset._slice(self._start)
            if self._pass_id:
                self._dataset._registry.reach(self._pass_id, self._start.epoch)
        self._next += 1

    def fetch(self) -> Iterator[DocumentBatch[Any]]:
        """Read the batch of the step that was taken last."""
        return self._dataset.fetch(StepGroup(self._share, self._start.done, 0, [self._next - 1]))

    def state(self) -> StreamState:
        """Return the position as the state of the dataset."""
        return self._dataset._state_at(StepGroup(self._share, self._start.done, 0, ()), self._next)


def _cumulative_weights(datasets: Mapping[str, Any], weights: Sequence[float] | None) -> NDArray[np.float64]:
    """Return the upper bound of each dataset's share of [0, 1)."""
    shares = np.ones(len(datasets)) if weights is None else np.asarray(weights, np.float64)
    if not datasets or shares.shape != (len(datasets),) or not (shares >= 0).all() or not 0 < shares.sum() < np.inf:
        raise OptionError(f"a mix has datasets, and a weight from 0 up for each; got {len(datasets)} and {weights}.")
    return np.cumsum(shares / shares.sum())
