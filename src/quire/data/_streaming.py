"""StreamingDataset[T]: train on documents in shards, whatever their number."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, overload

import numpy as np
from typing_extensions import Self, Unpack

from quire._parametrize import ParametrizedMeta
from quire.array import DocumentBatch, bind, resolve_index, whole_number
from quire.data._collate import in_framework, known_to_default_collate
from quire.data._epoch import Group, RowOrder, Slice
from quire.data._epoch_registry import Pass, Passes, known_to_torch, new_mark, this_worker
from quire.data._fetch import Fetch
from quire.data._frameworks import Wanted, tensorflow_dataset
from quire.data._loader import Loader
from quire.data._preprocessing import Preprocessing
from quire.data._stream_options import Streaming, StreamOptions, check_stream_options, fingerprint, order_of, row_bytes
from quire.data._windows import Windows, window_starts
from quire.document import BaseDocument
from quire.errors import DecodeError, OptionError, SchemaError, ShardError
from quire.files import shown
from quire.storage import StoredDataset
from quire.tensors import describe

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch.utils.data import IterableDataset

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


DocT = TypeVar("DocT", bound=BaseDocument)
_MOST_TOGETHER, _BYTES_AHEAD = 16, 16 << 20
"""So many batches are gathered at a time, if those that a thread makes ahead are not larger together."""

if TYPE_CHECKING:

    class _Base(IterableDataset[DocumentBatch[DocT]]): ...

else:
    _Base = Generic


class StreamingDataset(_Base[DocT], metaclass=ParametrizedMeta):
    """A dataset in shards, as batches for torch's DataLoader (`batch_size=None`), TensorFlow and JAX, or a loop.

    The order of an epoch is a function of the seed and the epoch; ranks and workers are shares of it, by rows. So every
    row comes once, all ranks take the same number of steps, and `state_dict()` is a few numbers from which any number
    of ranks and workers goes on with the very next row. Iterating is a pass of one epoch, the next pass is the next
    epoch. `dataset[i]` is a document and `dataset[[3, 1]]` a batch, by the number of the row.
    """

    document_type: ClassVar[type[Any]] = BaseDocument

    def __init__(
        self,
        url: str | os.PathLike[str] | StoredDataset[DocT],
        batch_size: int,
        preprocessing: Preprocessing | None = None,
        *,
        output: type[BaseDocument] | None = None,
        **streaming: Unpack[Streaming],
    ) -> None:
        if self.document_type is BaseDocument:
            raise SchemaError("StreamingDataset needs the documents' class: StreamingDataset[Student](...).")
        self.batch_size = check_stream_options(streaming, batch_size)
        self.options = options = StreamOptions(**streaming)
        self.stored: StoredDataset[DocT] = self._opened(url)
        if not len(self.stored) and not options.allow_empty:
            raise OptionError(self._describe_empty())
        self.order = order_of(self.stored, options)
        self._passes = Passes()
        self._fetch = Fetch(self.stored, preprocessing, output, options, self._passes)
        self._ranks: tuple[int, int] | None = None
        share = self._slice(Pass())  # complains of what it does not know
        self._ahead = self._batches_together(share, _BYTES_AHEAD)
        self._together = self._batches_together(share, options.memory_bytes)
        self._fingerprint = fingerprint(self.stored)
        self._state: StreamState | None = None
        self._resume: StreamState | None = None
        self._read = -1, -1  # the epoch and the window that were last read ahead
        known_to_torch(type(self))

    def _batches_together(self, share: Slice, most: int) -> int:
        """How many batches are gathered at a time: few enough for the budget, and for the window that is at hand."""
        room = min(most, self.options.memory_bytes // 2) / max(row_bytes(self.stored) * self.batch_size, 1)
        window = self.order.block * self.order.window // (share.world_size * share.batch_size)
        return max(1, min(_MOST_TOGETHER, int(room), window))

    def _opened(self, url: Any) -> StoredDataset[DocT]:
        options = self.options
        if isinstance(url, StoredDataset):
            if options.columns is not None or options.where is not None or options.verify is not None:
                raise OptionError("the dataset is open already: pass columns, where and verify to open_dataset().")
            return url
        if not isinstance(url, (str, os.PathLike)):
            raise OptionError(
                f"{type(self).__name__} reads a dataset by its path or address, got {describe(url)}. Documents in "
                "memory are for MultiModalDataset, or are written first: write_dataset(docs, 'folder')."
            )
        return StoredDataset[self.document_type](url, options.columns, options.where, options.storage)  # type: ignore[name-defined]

    def _describe_empty(self) -> str:
        stored = sum(shard.rows for shard in self.stored.shards)
        cause = f"none of its {stored:,} rows matches where={self.options.where!r}" if stored else "it has no rows"
        if stored and self.options.where is None:
            cause = f"none of its {stored:,} rows was chosen in open_dataset()"
        return (
            f"{type(self).__name__} of {shown(self.stored.folder.url)}: {cause}, so training on it would do nothing. "
            "Pass allow_empty=True if it may be empty."
        )

    @classmethod
    def _bind(cls, parameter: Any) -> dict[str, Any]:
        return bind(cls, parameter)

    # --- batches

    def __iter__(self) -> Iterator[DocumentBatch[DocT]]:
        """A pass: the batches of this rank, or of this worker of it."""
        known_to_default_collate()
        worker = this_worker()
        if worker is None:
            return self.batches(0, 0, new_mark())
        return self._batches(self._begun(worker.number, worker.workers, worker.mark))  # it begins now, as others do

    def batches(self, worker: int, workers: int, mark: int) -> Iterator[DocumentBatch[DocT]]:
        """The batches of one of several workers of a pass, which the mark stands for."""
        yield from self._batches(self._begun(worker, workers, mark))
        if not workers:
            self._passes.end(mark)

    def _batches(self, groups: Iterable[Group]) -> Iterator[DocumentBatch[DocT]]:
        for group in groups:
            for batch in self.fetch(group):
                self._state = batch._state
                yield batch

    def groups(self, mark: int, is_alone: Callable[[], bool]) -> Iterator[Group]:
        """The steps of a pass; a few at a time, which costs hardly more than one. More when none are made ahead."""
        return self._begun(0, 0, mark, lambda: self._together if is_alone() else self._ahead)

    def _begun(
        self, worker: int, workers: int, mark: int, together: Callable[[], int] | None = None
    ) -> Iterator[Group]:
        """Begin a pass as one of its workers, or go on in it: its steps, of which so many are taken together."""
        resumed, self._resume = self._resume, None
        if resumed is None:
            start = self._passes.begin(mark, worker, workers, self.options.epochs or 1)
            self._state = self._state_at(self._slice(start), 0, (start.done, 0))
        else:
            start = Pass(resumed.epoch, resumed.start, resumed.done)
            self._passes.resume(start, mark, worker, workers)
        before, first = (0, 0) if resumed is None else (resumed.before, resumed.step)
        together = _doubling(self._together) if together is None else together
        return self._groups(start, (worker, workers, mark), (before, first), together)

    def _groups(
        self, start: Pass, who: tuple[int, int, int], done: tuple[int, int], together: Callable[[], int]
    ) -> Iterator[Group]:
        """The steps of a worker: it takes every so-manieth of the whole pass, so they come in turn."""
        (worker, workers, mark), (before, first) = who, done
        epochs, each = self.options.epochs, max(workers, 1)
        while epochs is None or start.done < epochs:
            share = self._slice(start)
            steps = range(first + (worker - before - first) % each, share.steps, each)
            while steps:
                number = together()
                yield Group(share, start.done, before, steps[:number])
                steps = steps[number:]
            start, before, first = Pass(start.epoch + 1, 0, start.done + 1), before + share.steps, 0
            if epochs is None:
                self._check_endless(share)
                self._passes.reach(mark, start.epoch)

    def _check_endless(self, share: Slice) -> None:
        if not share.steps and not share.start:
            raise OptionError("epochs=None, but an epoch has no steps: a pass would never end, and give nothing.")

    def fetch(self, group: Group) -> Iterator[DocumentBatch[DocT]]:
        """The batches of some steps; each carries the state to go on from behind it."""
        self._read_ahead(group)
        for step, batch in zip(group.steps, self._fetch.batches(group.rows()), strict=True):
            state = self._state_at(group.share, step + 1, (group.done, group.before))
            object.__setattr__(batch, "_state", state)
            yield batch

    def _read_ahead(self, group: Group) -> None:
        """Let the system read what comes with the windows that begin in these steps, once."""
        epoch, span, order = group.share.epoch, group.span(), self.order
        if order.shuffle != "block" or not span or not isinstance(self._fetch, Fetch):
            return
        first, last = order.window_at(epoch, span.start), order.window_at(epoch, span.stop - 1)
        if self._read[0] == epoch:
            first = max(first, self._read[1] + 1)
        if first <= last:
            self._read = epoch, last
            with suppress(ShardError, DecodeError):  # who asks for the rows is told
                self.stored.read_ahead(*order.runs(epoch, max(span.start, order.begin_of(epoch, first)), span.stop))

    def _state_at(self, share: Slice, step: int, behind: tuple[int, int]) -> StreamState:
        return StreamState.at(share, step, behind, self.options.epochs, self._fingerprint)

    def _slice(self, start: Pass) -> Slice:
        rank, world_size = self._share()
        return Slice(self.order, start.epoch, start.position, rank, world_size, self.batch_size, self.options.last)

    def _share(self) -> tuple[int, int]:
        """The rank and the number of ranks; a worker has those of the process that it works for."""
        return self.options.share() if self._ranks is None or this_worker() is None else self._ranks

    def __len__(self) -> int:
        """The batches of the pass that is under way on this rank, or of the next."""
        epochs = self.options.epochs
        if epochs is None:
            raise TypeError("a dataset with epochs=None never ends, and has no length.")
        start = self._passes.next(epochs)
        first, whole = self._slice(start).steps, self._slice(Pass(start.epoch)).steps
        return first + whole * (epochs - start.done - 1)

    @property
    def num_rows(self) -> int:
        """The rows of the dataset, of all ranks."""
        return len(self.stored)

    @property
    def only_copies(self) -> bool:
        """Whether batches are rows of mapped files, with nothing done to them."""
        return self._fetch.only_copies

    def loader(self, prefetch: int = 4, threads: int = 1) -> Loader[DocT]:
        """The batches of a pass, made ahead by threads of this process: `for batch in dataset.loader(): ...`."""
        return Loader(self, prefetch, threads)

    def iter_batches(self, framework: str | None = None) -> Iterator[DocumentBatch[DocT]]:
        """A pass, with the tensors of a framework."""
        return (batch if framework is None else in_framework(batch, framework) for batch in self)

    def windows(
        self, length: int, stride: int = 1, *, order_by: str | None = None, max_gap: Any = None
    ) -> Windows[DocT]:
        """Windows of so many consecutive rows, each beginning so many rows behind the one before.

        With `order_by`, the path of numbers or points in time, rows are consecutive where its values do not go down,
        nor are more than `max_gap` apart.
        """
        return Windows(self, window_starts(self.stored, length, stride, order_by, max_gap), length, stride)

    def to_tf_dataset(self, *, features: Wanted = None, labels: Wanted = None) -> Any:
        """A `tf.data.Dataset` of the batches of a pass, each time another; see `MultiModalDataset.to_tf_dataset`."""
        first = self._fetch.batch(np.arange(min(self.batch_size, self.num_rows)))
        start, epochs = self._passes.next(self.options.epochs or 1), self.options.epochs
        number = -1 if epochs is None else None if start.position or start.done else len(self)
        return tensorflow_dataset(lambda: iter(self), number, first, features, labels)

    # --- rows

    @overload
    def __getitem__(self, key: int) -> DocT: ...
    @overload
    def __getitem__(self, key: slice | Sequence[int] | NDArray[Any]) -> DocumentBatch[DocT]: ...
    def __getitem__(self, key: Any) -> Any:
        """A preprocessed document by the number of its row; by slice, list or mask, a batch."""
        rows = resolve_index(key, self.num_rows)
        if isinstance(rows, int):
            return self._fetch.batch(np.array([rows]))[0]
        return self._fetch.batch(np.arange(self.num_rows)[rows] if isinstance(rows, slice) else rows)

    # --- where it is

    @property
    def epoch(self) -> int:
        """The epoch that the pass which is under way began with, or the next one will."""
        return self._passes.next(self.options.epochs or 1).epoch

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass be that epoch. One that was resumed there goes on where it was."""
        epoch = whole_number("epoch", epoch)
        self._slice(Pass(epoch))
        record = self._passes.last()
        if not (record.is_new and record.start.epoch == epoch):
            self._passes.set(Pass(epoch))
        self._state = None

    def state_dict(self) -> dict[str, Any]:
        """Where the dataset is: behind the last batch that was taken of it, in this process."""
        if this_worker() is None and self._passes.last().workers:
            raise OptionError(
                "workers of a DataLoader make the batches, and the dataset does not know how many of them were taken. "
                "Keep the state of the last one, batch.state, or that of a StatefulDataLoader."
            )
        if self._state is not None:
            return self._state.to_dict()
        start = self._passes.next(self.options.epochs or 1)
        return self._state_at(self._slice(start), 0, (start.done, 0)).to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, with any number of ranks and workers.

        It is that of a dataset, a loader, a batch, or a StatefulDataLoader.
        """
        found = StreamState.from_dict(state)
        found.check(self.order, self._fingerprint)
        if this_worker() is None:
            self._passes.set(found.next_pass(self.options.epochs))
            self._state = None
        elif found.divides_like(self._slice(Pass())) and found.epochs == (self.options.epochs or 0):
            self._state = self._resume = found
        else:
            raise OptionError(
                "with other ranks, batch_size, last or epochs than before, no worker knows where it goes on. Give the "
                "state to the dataset, not to the loader: dataset.load_state_dict(state)."
            )

    @property
    def errors(self) -> list[str]:
        """What went wrong with shards whose rows were skipped or replaced, in this process and its workers."""
        return self._passes.errors()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ranks": self._share()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        known_to_torch(type(self))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.num_rows} rows in batches of {self.batch_size}>"

    def __copy__(self) -> Self:
        return self


def _doubling(most: int) -> Callable[[], int]:
    """One at first, then more and more, so that the first batch does not wait for others."""
    numbers = chain((1 << power for power in range(most.bit_length() - 1)), repeat(most))
    return lambda: next(numbers)
