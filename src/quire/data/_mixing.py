"""Several datasets as one: each batch is of one of them, drawn with given probabilities."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from quire.array import DocumentBatch
from quire.data._bijection import _hash, _mixed, _number, key_of
from quire.data._group import Group
from quire.data._passes import Pass, Passes, Worker, known_to_torch, new_mark, this_worker
from quire.data._stream_state import StreamState
from quire.data._streaming import StreamingDataset
from quire.errors import OptionError

Stop = Literal["first", "all"]
_DRAWS = 4_096  # so many at a time


@dataclass(frozen=True)
class MixedState:
    """So many draws of a pass are behind, and there each dataset is. `origin` is where the pass began."""

    epoch: int
    step: int
    origin: int
    mix: str
    drawn: str
    datasets: dict[str, StreamState]

    def to_dict(self) -> dict[str, Any]:
        """The numbers, by name."""
        return asdict(self)


class MixedDataset:
    """Batches of several datasets, each drawn with the probability of its weight: `for batch in MixedDataset(...)`.

    Which dataset a step draws from is a function of the seed, the pass and the step, so all ranks draw alike, workers
    are shares of the steps, and a state tells the very next batch. `batch.state['drawn']` is the dataset's name, or
    number. A pass ends when a dataset is drawn that has no more ('first'), or when all of them were gone through at
    least once ('all'), and those that end before begin their next epoch.
    """

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
        self.seed, self.stop = seed, stop
        self._bounds = _bounds(self.datasets, weights)
        if stop not in ("first", "all"):
            raise OptionError(f"stop={stop!r}: use 'first' or 'all'.")
        self._mix = f"{key_of(seed, len(self.datasets), *np.frombuffer(self._bounds.tobytes(), np.uint64).tolist()):x}"
        self._passes = Passes()
        self._state: MixedState | None = None
        self._resume: MixedState | None = None
        known_to_torch(type(self))

    # --- batches

    def __iter__(self) -> Iterator[DocumentBatch[Any]]:
        """A pass: the batches of this rank, or of this worker of it."""
        worker = this_worker()
        if worker is None:
            return self.batches(0, 0, new_mark())
        return self._batches(worker, *self._begun(worker))  # it begins now, as others do

    def batches(self, worker: int, workers: int, mark: int) -> Iterator[DocumentBatch[Any]]:
        """The batches of one of several workers of a pass, which the mark stands for."""
        who = Worker(worker, workers, mark)
        yield from self._batches(who, *self._begun(who))
        if not workers:
            for passes in (self._passes, *(dataset._passes for dataset in self.datasets.values())):
                passes.end(mark)

    def _begun(self, who: Worker) -> tuple[Pass, int, list[_Cursor]]:
        """Where a worker begins, where its pass does, and where each dataset does."""
        resumed, self._resume = self._resume, None
        if resumed is not None:
            start = Pass(resumed.epoch, resumed.step)
            self._passes.resume(start, who.mark, who.number, who.workers)
            cursors = [_Cursor.resumed(ds, resumed.datasets[name], who) for name, ds in self.datasets.items()]
            return start, resumed.origin, cursors
        start = self._passes.begin(who.mark, who.number, who.workers, 1)
        cursors = [_Cursor.begun(dataset, who) for dataset in self.datasets.values()]
        self._state = self._state_at(start, start.position, "", cursors)
        return start, start.position, cursors

    def _batches(self, who: Worker, start: Pass, origin: int, cursors: list[_Cursor]) -> Iterator[DocumentBatch[Any]]:
        names = list(self.datasets)
        for step, number in self._drawn(start, cursors):
            if who.workers and (step - origin) % who.workers != who.number:
                continue
            [batch] = cursors[number].fetch()
            state = self._state_at(Pass(start.epoch, step + 1), origin, names[number], cursors)
            object.__setattr__(batch, "_state", state)
            self._state = state
            yield batch

    def _drawn(self, start: Pass, cursors: list[_Cursor]) -> Iterator[tuple[int, int]]:
        """The draws of a pass from a step on: the step, and the number of the dataset, which has moved on."""
        for step in itertools.count(start.position):
            if self.stop == "all" and all(cursor.is_through for cursor in cursors):
                return
            number = int(self._draws(start.epoch, step - step % _DRAWS)[step % _DRAWS])
            if not cursors[number].move(again=self.stop == "all"):
                return
            yield step, number

    def _draws(self, epoch: int, first: int) -> Any:
        """The numbers of the datasets that some steps draw from."""
        known = getattr(self, "_known", None)
        if known is None or known[0] != (epoch, first):
            numbers = np.arange(first, first + _DRAWS, dtype=np.uint64)
            key = _number(_mixed(key_of(self.seed, epoch)))
            chances = (_hash(numbers, key, np.empty_like(numbers)) >> np.uint64(11)) / 2**53
            drawn = np.minimum(np.searchsorted(self._bounds, chances, side="right"), len(self._bounds) - 1)
            self._known = known = (epoch, first), drawn
        return known[1]

    def __len__(self) -> int:
        """The batches of the pass that is under way on this rank, or of the next; they are counted."""
        if self.stop == "first" and all(dataset.options.epochs is None for dataset in self.datasets.values()):
            raise TypeError("datasets with epochs=None never end, and have no length together.")
        start = self._passes.next(1)
        return sum(1 for _ in self._drawn(start, [_Cursor.next(dataset) for dataset in self.datasets.values()]))

    # --- where it is

    def _state_at(self, at: Pass, origin: int, drawn: str, cursors: list[_Cursor]) -> MixedState:
        states = {name: cursor.state() for name, cursor in zip(self.datasets, cursors, strict=True)}
        return MixedState(at.epoch, at.position, origin, self._mix, drawn, states)

    def state_dict(self) -> dict[str, Any]:
        """Where the datasets are: behind the last batch that was taken, in this process."""
        if this_worker() is None and self._passes.last().workers:
            raise OptionError("workers of a DataLoader make the batches: keep the state of the last one, batch.state.")
        if self._state is None:
            cursors = [_Cursor.next(dataset) for dataset in self.datasets.values()]
            start = self._passes.next(1)
            return self._state_at(start, start.position, "", cursors).to_dict()
        return self._state.to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state: of this, or of a batch, with any number of workers and ranks."""
        if not {"epoch", "step", "origin", "mix", "drawn", "datasets"} <= set(state):
            raise OptionError("this is no state of a MixedDataset.")
        if state["mix"] != self._mix or set(state["datasets"]) != set(self.datasets):
            raise OptionError("the state is of another mix: open the same datasets with the same weights and seed.")
        found = {name: StreamState.from_dict(part) for name, part in state["datasets"].items()}
        for name, part in found.items():
            part.check(self.datasets[name].order, self.datasets[name]._fingerprint)
        if this_worker() is not None:
            self._state = self._resume = MixedState(**{**state, "datasets": found})
            return
        for name, part in found.items():
            self.datasets[name]._passes.set(part.next_pass(None))
        self._passes.set(Pass(state["epoch"], state["step"]))
        self._state = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        known_to_torch(type(self))


class _Cursor:
    """Where a dataset is in a pass over several: at a step of an epoch; `start.done` epochs of the pass are behind."""

    def __init__(self, dataset: StreamingDataset[Any], start: Pass, step: int, mark: int = 0) -> None:
        self._dataset, self._start, self._mark = dataset, start, mark
        self._share, self._next = dataset._slice(start), step

    @classmethod
    def next(cls, dataset: StreamingDataset[Any]) -> _Cursor:
        """As the next pass will begin."""
        return cls(dataset, dataset._passes.next(dataset.options.epochs or 1), 0)

    @classmethod
    def begun(cls, dataset: StreamingDataset[Any], who: Worker) -> _Cursor:
        """Begin a pass."""
        start = dataset._passes.begin(who.mark, who.number, who.workers, dataset.options.epochs or 1)
        return cls(dataset, start, 0, who.mark)

    @classmethod
    def resumed(cls, dataset: StreamingDataset[Any], state: StreamState, who: Worker) -> _Cursor:
        """Go on in a pass."""
        start = Pass(state.epoch, state.start, state.done)
        if not state.divides_like(dataset._slice(Pass())):
            raise OptionError("with other ranks, batch_size or last, give the state to the MixedDataset itself.")
        dataset._passes.resume(start, who.mark, who.number, who.workers)
        return cls(dataset, start, state.step, who.mark)

    @property
    def is_through(self) -> bool:
        """Whether all epochs of a pass over the dataset are behind."""
        done = self._start.done + (self._next >= self._share.steps)
        return done >= (self._dataset.options.epochs or 1)

    def move(self, *, again: bool) -> bool:
        """Go behind the next step, in the next epoch where that is needed; whether there is one."""
        while self._next >= self._share.steps:
            if not again and self._dataset.options.epochs is not None and self.is_through:
                return False
            if not self._dataset._slice(Pass()).steps:
                raise OptionError(f"{self._dataset!r} has no steps, and was drawn.")
            self._start, self._next = Pass(self._start.epoch + 1, 0, self._start.done + 1), 0
            self._share = self._dataset._slice(self._start)
            if self._mark:
                self._dataset._passes.reach(self._mark, self._start.epoch)
        self._next += 1
        return True

    def fetch(self) -> Iterator[DocumentBatch[Any]]:
        """The batch of the step that it is behind."""
        return self._dataset.fetch(Group(self._share, self._start.done, 0, [self._next - 1]))

    def state(self) -> StreamState:
        """Where it is."""
        return self._dataset._state_at(self._share, self._next, (self._start.done, 0))


def _bounds(datasets: Mapping[str, Any], weights: Sequence[float] | None) -> Any:
    """The sums of the weights up to each dataset, as parts of 1."""
    given = np.ones(len(datasets)) if weights is None else np.asarray(weights, np.float64)
    if not datasets or given.shape != (len(datasets),) or not (given >= 0).all() or not 0 < given.sum() < np.inf:
        raise OptionError(f"a mix has datasets, and a weight from 0 up for each; got {len(datasets)} and {weights}.")
    return np.cumsum(given / given.sum())
