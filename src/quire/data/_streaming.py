"""StreamingDataset[T]: train on documents in shards, whatever their number."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import partial
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, overload

import numpy as np
from typing_extensions import Self, Unpack

from quire._parametrize import ParametrizedMeta
from quire.array import DocumentBatch, bind, resolve_index, resolve_positions, whole_number
from quire.data._bucketing import choose_buckets
from quire.data._collate import register_default_collate
from quire.data._dataset import stack_documents
from quire.data._epoch import Order, RowOrder, Slice, StepGroup
from quire.data._epoch_registry import EpochRegistry, PassStart, Worker, register_with_torch, this_worker
from quire.data._fetch import Fetch
from quire.data._frameworks import Paths, convert_batch, make_tf_dataset
from quire.data._gather_ahead import gather_ahead
from quire.data._interleaved import InterleavedOrder
from quire.data._loader import Loader
from quire.data._packing import Long, PackedDataset
from quire.data._preprocessing import Preprocessing
from quire.data._read_plan import ReadPlan
from quire.data._run_plan import Network, RunPlanner, StreamPlan
from quire.data._stream_options import (
    Streaming,
    StreamOptions,
    check_stream_options,
    choose_order,
    compute_fingerprint,
    estimate_row_bytes,
    explain_version,
)
from quire.data._trainers import check_trainer, is_in_fit_loop
from quire.data._windows import Windows, find_window_starts
from quire.document import BaseDocument
from quire.errors import DecodeError, OptionError, SchemaError, ShardError, reject_unknown_options
from quire.files import display_uri
from quire.storage import Location, StoredDataset, open_dataset
from quire.tensors import describe

if TYPE_CHECKING:
    import tensorflow as tf
    import torch
    from numpy.typing import NDArray
    from torch.utils.data import IterableDataset

    from quire.data._fetch import FinishBatch

DocT = TypeVar("DocT", bound=BaseDocument)
_MAX_GROUP = 16
"""The most batches that are gathered in one call."""
_MAX_BYTES_AHEAD = 16 << 20
"""The most bytes that a thread gathers in one call, so that the loop does not wait long for the first of them."""
_STATE_VERSION = 1
_COUNTS = ("epoch", "start", "step", "done", "before", "epochs", "taken", "lanes", "dataset_version")
_ORDER_FIELDS = ("size", "seed", "shuffle", "block", "window", "lanes")
_LATER_FIELDS = {"taken", "lanes", "dataset_version"}
"""The fields that states of quire 0.1 do not have, or only those of some datasets."""
_OPTIONAL_FIELDS = {"lanes", "dataset_version"}
_NOT_A_STATE = "this is no state of a StreamingDataset, or one of another version of quire."


@dataclass(frozen=True, slots=True)
class StreamState:
    """The position of a stream, as plain numbers from which any number of ranks and workers can continue.

    The position is `step` steps after the row `start` of the epoch, where a step is a batch of `batch_size` rows on
    each of `world_size` ranks. `done` counts the epochs of the pass before this one, `before` the steps of the pass in
    them. `taken` counts the steps of the pass in earlier runs, which may have been of another size: only the length
    depends on it. The other fields identify the dataset and the order of its rows: an interleaved order has `lanes`,
    the others a `block` and a `window`. The field names are a file format: checkpoints contain them.
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
    version: int = _STATE_VERSION
    taken: int = 0
    lanes: int = 0
    dataset_version: int = 0

    @classmethod
    def at(cls, group: StepGroup, step: int, epochs: int | None, dataset: str, dataset_version: int = 0) -> StreamState:
        """Return the state after a number of steps of an epoch; the steps of the group itself do not matter."""
        share, order = group.share, group.share.order
        position = (share.epoch, share.start, step, group.done, group.before, epochs or 0)
        sizes = (share.world_size, share.batch_size)
        return cls(
            *position,
            *sizes,
            last=share.last,
            size=order.size,
            seed=order.seed,
            shuffle=order.shuffle,
            block=order.block,
            window=order.window,
            dataset=dataset,
            taken=group.taken,
            lanes=order.lanes,
            dataset_version=dataset_version,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name; `lanes` and `dataset_version` only if they are not 0."""
        return {name: value for name, value in asdict(self).items() if value or name not in _OPTIONAL_FIELDS}

    @classmethod
    def from_dict(cls, state: Any) -> StreamState:
        """Read a state of a dataset or a StatefulDataLoader; anything else is an OptionError."""
        if not isinstance(state, Mapping):
            raise OptionError(_NOT_A_STATE)
        if "_snapshot" in state:
            return cls._combine_workers(state["_snapshot"]["_worker_snapshots"], state["_steps_since_snapshot"])
        state = state.get("dataset_state") or state
        if state.get("version") != _STATE_VERSION or not {*cls.__slots__} - _LATER_FIELDS <= set(state):
            raise OptionError(_NOT_A_STATE)
        result = cls(**{name: state[name] for name in cls.__slots__ if name in state})
        counts: list[Any] = [getattr(result, name) for name in _COUNTS]
        if not all(isinstance(count, int) and count >= 0 for count in counts):
            raise OptionError(f"the state is damaged: {dict(state)}")
        # quire 0.1 saved no `taken`: its steps before the start are taken to be of the same size as those after it.
        return result if "taken" in state else replace(result, taken=result._estimate_steps(result.start))

    @classmethod
    def _combine_workers(cls, snapshots: Mapping[str, Any], later_steps: int) -> StreamState:
        """Combine the states of the workers of a StatefulDataLoader, each of which knows its own position only.

        Worker w of n takes the steps w, w + n, w + 2n, ... of the pass, and the loader yields them in order. So all
        steps before the smallest next step of any worker were yielded, and `later_steps` more since the snapshot.
        """
        states = [cls.from_dict(snapshots[f"worker_{worker}"]) for worker in range(len(snapshots))]
        reached = [state.before + state.step for state in states]
        taken = min(at + (worker - at) % len(states) for worker, at in enumerate(reached))
        first = min(states, key=lambda state: state.done)
        return first._move_to(taken + later_steps - first.before)

    def _move_to(self, step: int) -> StreamState:
        """Return the state after a number of steps from the same start, in a later epoch of the pass if need be."""
        state, steps = self, self._count_steps()
        while step > steps and (not state.epochs or state.done + 1 < state.epochs):
            step, before = step - steps, state.before + steps
            state = replace(state, epoch=state.epoch + 1, start=0, done=state.done + 1, before=before)
            steps = state._count_steps()
        return replace(state, step=min(step, steps))

    def check(self, order: Order, dataset: str, dataset_version: int = 0) -> None:
        """Raise an error for a state of another order, in which the same position means other rows."""
        expected = {name: getattr(order, name) for name in _ORDER_FIELDS}
        expected["dataset"] = dataset
        differences = [
            f"{name} was {getattr(self, name)!r}, is {value!r}"
            for name, value in expected.items()
            if getattr(self, name) != value
        ]
        if differences:
            raise OptionError(
                f"the state is of another order of rows: {'; '.join(differences)}."
                f"{explain_version(self.dataset_version, dataset_version) if self.dataset != dataset else ''} Open the "
                f"same dataset with the same seed, shuffle, where and {'lanes' if self.lanes else 'memory_bytes'}, or "
                "begin anew."
            )

    def divides_like(self, share: Slice) -> bool:
        """Return whether a step of the state has the same rows as a step of a share."""
        return (self.world_size, self.batch_size, self.last) == (share.world_size, share.batch_size, share.last)

    def next_pass(self, epochs: int | None) -> PassStart:
        """Return where a StreamingDataset resumes: at the very next row, of this epoch or of the next one."""
        at = self.position()
        is_at_end = self.step >= self._count_steps()
        at = PassStart(at.epoch + 1, 0, at.done + 1, at.taken) if is_at_end else at
        if epochs is None or at.done < epochs:
            return at
        # The pass of the state has ended, or its epochs are more than those of a pass now: a new pass begins here.
        return at._replace(done=0, taken=self._estimate_steps(at.position))

    def position(self) -> PassStart:
        """Return the same place as a position in the epoch; at the end of the epoch, that is the number of rows."""
        position = self.start + self.step * self.world_size * self.batch_size
        if self.step >= self._count_steps():
            position = self.size
        return PassStart(self.epoch, position, self.done, self.taken + self.before + self.step)

    def _estimate_steps(self, position: int) -> int:
        """Return how many steps of this size a position is after the beginning of its epoch."""
        return -(-position // max(self.world_size * self.batch_size, 1))

    def _count_steps(self) -> int:
        order = RowOrder(self.size)
        return Slice(order, 0, self.start, 0, self.world_size, self.batch_size, self.last).steps  # type: ignore[arg-type]


if TYPE_CHECKING:

    class _Base(IterableDataset[DocumentBatch[DocT]]): ...

else:
    _Base = Generic


class StreamingDataset(_Base[DocT], metaclass=ParametrizedMeta):
    """Train on a dataset in shards: batches for torch's DataLoader (`batch_size=None`), TensorFlow, JAX, or a loop.

    The order of an epoch is a function of the seed and the epoch, and the rows of a rank or worker are a share of it.
    So each row comes once per epoch, all ranks take the same number of steps, and `state_dict()` is a few numbers from
    which any number of ranks and workers continues with the very next row. Each iteration is a pass of one epoch, and
    the next pass is the next epoch. By row number, `dataset[i]` is a document and `dataset[[3, 1]]` a batch.
    """

    document_type: ClassVar[type[Any]] = BaseDocument
    _slice_type: Callable[..., Slice] = Slice
    """Makes the share of a rank. Datasets whose positions are not rows, such as packed ones, have another one."""
    _state_type: Any = StreamState
    _plan: tuple[Any, ReadPlan] | None = None
    """The blocks that are requested from a remote store, and who plans them."""

    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        """Create a dataset. Without a class, as `StreamingDataset(url, 64)`, the class of the files is taken."""
        url: Any = arguments[0] if arguments else options.get("url")
        if cls.document_type is not BaseDocument or not (isinstance(url, StoredDataset) or _is_location(url)):
            return super().__new__(cls)
        chosen = StreamOptions(**{name: value for name, value in options.items() if name in Streaming.__annotations__})
        stored: Any = url
        if not isinstance(url, StoredDataset):
            is_time = isinstance(chosen.version, datetime)
            stored = open_dataset(
                url,
                columns=chosen.columns,
                where=chosen.where,
                version=None if is_time else chosen.version,  # type: ignore[arg-type]
                as_of=chosen.version if is_time else None,  # type: ignore[arg-type]
                options=chosen.storage,
            )
        dataset: Any = object.__new__(cls[stored.document_type])  # type: ignore[index]
        dataset._inferred = stored
        return dataset  # type: ignore[no-any-return]

    def __init__(
        self,
        url: Location | StoredDataset[DocT],
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
        self.stored: StoredDataset[DocT] = self._open(url)
        if not len(self.stored) and not options.allow_empty:
            raise OptionError(self._describe_empty())
        self.order = choose_order(self.stored, options)
        self._registry = EpochRegistry()
        self._fetch = Fetch(self.stored, preprocessing, output, options, self._registry)
        # Ranks of a process group or of a launcher are resolved when a pass begins: trainers start their processes, and
        # set these ranks, after the dataset was created. Only ranks that are options are checked here.
        self._ranks: tuple[int, int, int] | None = None  # in a spawned worker: process id, rank, world size
        ranks = (0, 1) if options.rank is None or options.world_size is None else (options.rank, options.world_size)
        Slice(self.order, 0, 0, *ranks, self.batch_size, options.last)
        self._tracing = self._fetch.tracing
        self._group_size = self._limit_group(options.memory_bytes)
        self._group_size_ahead = self._limit_group(_MAX_BYTES_AHEAD)
        self._fingerprint = compute_fingerprint(self.stored, self.order)
        if options.bucket_by is not None:
            self.order, self._slice_type, self._fingerprint = choose_buckets(
                self.stored, self.order, options, self.batch_size, self._fingerprint
            )
        self._state: StreamState | None = None  # after the last batch that was taken
        self._resume: StreamState | None = None  # where a worker of a StatefulDataLoader continues
        self._read_ahead_until = -1, -1  # the epoch and the window that were last read ahead
        register_with_torch(type(self))

    def _open(self, url: Any) -> StoredDataset[DocT]:
        options = self.options
        inferred: StoredDataset[DocT] | None = self.__dict__.pop("_inferred", None)
        if inferred is not None and inferred is not url:
            return inferred
        if isinstance(url, StoredDataset):
            chosen = (options.columns, options.where, options.verify, options.version)
            if any(value is not None for value in chosen):
                raise OptionError(
                    "the dataset is open already: pass columns, where, verify and version to open_dataset()."
                )
            # A view of its own: the dataset becomes another version when its rows are changed, and a stream must not.
            return url._open_as(self.document_type, type(self).__name__)._with_state()
        if not _is_location(url):
            raise OptionError(
                f"{type(self).__name__} reads a dataset by its path or address, got {describe(url)}. Documents in "
                "memory are for MultiModalDataset, or are written first: write_dataset(docs, 'folder')."
            )
        dataset_type: Any = StoredDataset[self.document_type]  # type: ignore[name-defined]
        stored: StoredDataset[DocT] = dataset_type(
            url, options.columns, options.where, options.storage, version=options.version
        )
        return stored

    def _describe_empty(self) -> str:
        stored = sum(shard.rows for shard in self.stored.shards)
        cause = f"none of its {stored:,} rows matches where={self.options.where!r}" if stored else "it has no rows"
        if stored and self.options.where is None:
            cause = f"none of its {stored:,} rows was chosen in open_dataset()"
        return (
            f"{type(self).__name__} of {display_uri(self.stored.folder.url)}: {cause}, so training on it would do "
            "nothing. Pass allow_empty=True if it may be empty."
        )

    def _limit_group(self, max_bytes: int) -> int:
        """Return how many batches are gathered at a time, within a budget."""
        row_bytes = estimate_row_bytes(self.stored) + self._fetch.decoded_row_bytes
        room = min(max_bytes, self.options.memory_bytes // 2) / max(row_bytes * self.batch_size, 1)
        return max(1, min(_MAX_GROUP, int(room)))

    @classmethod
    def _bind(cls, parameter: Any) -> dict[str, Any]:
        return bind(cls, parameter)

    # --- batches

    def __iter__(self) -> Iterator[DocumentBatch[DocT]]:
        """Iterate over one pass: the batches of this rank, or those of this DataLoader worker."""
        register_default_collate()
        worker = this_worker()
        if worker is None:
            return self.batches(*Worker.alone())
        return self.trace_pass(self._iterate(self._begin(worker)))  # begins now, so that all workers see the same pass

    def batches(self, worker: int, workers: int, pass_id: int) -> Iterator[DocumentBatch[DocT]]:
        """Iterate over the batches of one of several workers; `pass_id` identifies the pass that they share."""
        ahead = not workers and self.stored._row_reader.reads_blocks
        group_size = _growing(self._group_size_ahead) if ahead else _doubling(self._group_size)
        batches = self._iterate(self._begin(Worker(worker, workers, pass_id), group_size), ahead=ahead)
        yield from self.trace_pass(batches)
        if not workers:
            self._registry.end(pass_id)

    def groups(self, pass_id: int, is_alone: Callable[[], bool]) -> Iterator[StepGroup]:
        """Iterate over the steps of a pass, in groups; they are larger while no batches are made ahead."""
        worker = Worker(0, 0, pass_id)
        return self._begin(worker, lambda: self._group_size if is_alone() else self._group_size_ahead)

    def _begin(self, worker: Worker, group_size: Callable[[], int] | None = None) -> Iterator[StepGroup]:
        """Begin or resume a pass as one of its workers, and return its steps."""
        world_size = self._slice(PassStart()).world_size  # raises an error for invalid ranks, before the pass begins
        resumed, self._resume = self._resume, None
        check_trainer(self._registry, world_size, self.options.epochs, is_resumed=resumed is not None)
        if resumed is None:
            start = self._registry.begin(worker, self.options.epochs or 1)
            self._state = self._state_at_start(start)
            before, first = 0, 0
        else:
            start = PassStart(resumed.epoch, resumed.start, resumed.done, resumed.taken)
            self._registry.resume(start, worker)
            before, first = resumed.before, resumed.step
        return self._steps(worker, start, before, first, group_size or _doubling(self._group_size))

    def _steps(
        self, worker: Worker, start: PassStart, before: int, first: int, group_size: Callable[[], int]
    ) -> Iterator[StepGroup]:
        """Iterate over the steps of a worker: each `workers`-th step of the pass, counted over all of its epochs.

        `before` counts the steps of the pass in the epochs before, and `first` is the first step of this epoch.
        """
        epochs, stride = self.options.epochs, max(worker.workers, 1)
        while epochs is None or start.done < epochs:
            share = self._slice(start)
            if epochs is None and not share.steps and not share.start:
                raise OptionError("epochs=None, but an epoch has no steps: a pass would never end, and give nothing.")
            steps = range(first + (worker.number - before - first) % stride, share.steps, stride)
            # A group stays within a window of the order, of which a step takes the rows of all ranks.
            window = max(1, self.order.reach // (share.world_size * share.batch_size))
            while steps:
                number = min(group_size(), window)
                yield StepGroup(share, start.done, before, steps[:number], start.taken)
                steps = steps[number:]
            start = PassStart(start.epoch + 1, 0, start.done + 1, start.taken)
            before, first = before + share.steps, 0
            if epochs is None:
                self._registry.reach(worker.pass_id, start.epoch)

    def _iterate(self, groups: Iterator[StepGroup], *, ahead: bool = False) -> Iterator[DocumentBatch[DocT]]:
        """Yield the batches of groups; with `ahead`, a thread gathers their rows before."""
        gathered = gather_ahead(groups, self._gather) if ahead else chain.from_iterable(map(self._gather, groups))
        for finish in gathered:
            batch = finish()
            self._state = batch._state
            yield batch

    def fetch(self, group: StepGroup) -> Iterator[DocumentBatch[DocT]]:
        """Read the batches of some steps; each carries the state to continue from after it."""
        for finish in self._gather(group):
            yield finish()

    def _gather(self, group: StepGroup) -> Iterator[FinishBatch]:
        """Gather the rows of some steps, and yield functions that make the batches; see `Fetch.gather`."""
        self._read_ahead(group)
        plan, parts = self._begin_plan(group)
        epochs = [group.share.epoch] * len(parts)
        for step, finish in zip(group.steps, self._fetch.gather(parts, epochs), strict=True):
            if plan is not None:  # after the first batch, so that little else is downloaded before it
                with suppress(ShardError, DecodeError):  # raised again when these rows are gathered
                    plan.extend(group)
                plan = None
            yield partial(self._finish, finish, self._state_at(group, step + 1))

    def trace_pass(self, batches: Iterator[DocumentBatch[DocT]]) -> Iterator[DocumentBatch[DocT]]:
        """Return the batches of a pass, recorded as spans with the option `tracing`."""
        if not self.options.tracing:
            return batches
        share = self._slice(self._registry.current_start(self.options.epochs or 1))
        return self._tracing.trace_pass(
            batches,
            url=display_uri(self.stored.folder.url),
            epoch=share.epoch,
            batch_size=self.batch_size,
            rank=share.rank,
            world_size=share.world_size,
        )

    def _finish(self, finish: FinishBatch, state: StreamState) -> DocumentBatch[DocT]:
        batch: DocumentBatch[DocT] = finish()
        object.__setattr__(batch, "_state", state)  # fields of a batch cannot be assigned otherwise
        return batch

    def _begin_plan(self, group: StepGroup) -> tuple[ReadPlan | None, list[Any]]:
        """Return the rows of these steps; if the dataset is remote, request their blocks, and return the plan, too."""
        reader, fetch = self.stored._row_reader, self._fetch
        if not reader.reads_blocks or not group.steps:
            return None, group.rows()
        owner = os.getpid(), fetch  # not the plan of a parent, nor that of a dataset which this one is a view of
        if self._plan is None or self._plan[0] != owner:
            select = getattr(fetch, "readable_rows", None)  # blocks of tokens are not skipped
            self._plan = owner, ReadPlan(reader, select, self.options.storage.prefetch_bytes)
        try:
            return self._plan[1], self._plan[1].begin(group)
        except (ShardError, DecodeError):  # raised again when the rows are gathered, or handled there
            return None, group.rows()

    def _read_ahead(self, group: StepGroup) -> None:
        """Ask the system to read the windows that begin in these steps, each window once."""
        epoch, span, order = group.share.epoch, group.span(), self.order
        if not span or not isinstance(self._fetch, Fetch):
            return
        if isinstance(order, InterleavedOrder):
            self._read_lanes_ahead(group, span, order)
            return
        if not isinstance(order, RowOrder) or order.shuffle != "block":
            return
        first, last = order.window_at(epoch, span.start), order.window_at(epoch, span.stop - 1)
        if self._read_ahead_until[0] == epoch:
            first = max(first, self._read_ahead_until[1] + 1)
        if first <= last:
            self._read_ahead_until = epoch, last
            with suppress(ShardError, DecodeError):  # raised again when the rows are gathered
                self.stored._row_reader.read_ahead(
                    *order.runs(epoch, max(span.start, order.window_start(epoch, first)), span.stop)
                )

    def _read_lanes_ahead(self, group: StepGroup, span: range, order: InterleavedOrder) -> None:
        """Ask the system to read the blocks that the lanes of this rank come to, some rows before they do."""
        reader = self.stored._row_reader
        if not reader.is_mapped or reader.is_filtered:
            return
        share, ahead = group.share, max(len(span), order.lanes * order.blocks.rows // 8)
        epoch, until = self._read_ahead_until
        if epoch != share.epoch or not span.start <= until:  # a new epoch, or a pass that begins elsewhere
            until = -1
        stop = min(span.stop + ahead, order.size)
        if until >= min(span.stop + ahead // 2, order.size):
            return
        # The lanes of this rank, and one on either side, since the border moves by a lane from step to step.
        lanes = range(
            max(0, share.rank * order.lanes // share.world_size - 1),
            min(order.lanes, -(-(share.rank + 1) * order.lanes // share.world_size) + 1),
        )
        self._read_ahead_until = share.epoch, stop
        with suppress(ShardError, DecodeError):  # raised again when the rows are gathered
            if until < 0:
                reader.read_ahead(*order.runs(share.epoch, span.start, stop, lanes))
            else:
                reader.read_ahead(*order.new_runs(share.epoch, until, stop, lanes))

    def _state_at(self, group: StepGroup, step: int) -> StreamState:
        version = self.stored._version or 0
        state: StreamState = self._state_type.at(group, step, self.options.epochs, self._fingerprint, version)
        return state

    def _state_at_start(self, start: PassStart) -> StreamState:
        return self._state_at(StepGroup(self._slice(start), start.done, 0, (), start.taken), 0)

    def _slice(self, start: PassStart) -> Slice:
        rank, world_size = self._rank_and_world_size()
        division = rank, world_size, self.batch_size, self.options.last
        return self._slice_type(self.order, start.epoch, start.position, *division)

    def _rank_and_world_size(self) -> tuple[int, int]:
        """Return the rank and the number of ranks; a spawned worker has those of its trainer."""
        # A process of a trainer may be spawned with the dataset, too, and fork its workers. They have another process
        # id than the process that received the dataset, and they inherit the process group from it.
        if self._ranks is not None and self._ranks[0] == os.getpid() and this_worker() is not None:
            return self._ranks[1:]
        return self.options.rank_and_world_size()

    def __len__(self) -> int:
        """Count the batches of the current pass on this rank, or of the next pass when none is under way.

        The batches that were taken before a pass was resumed count, too, so that the length is that of the whole pass.
        """
        epochs = self.options.epochs
        if epochs is None:
            raise TypeError("a dataset with epochs=None never ends, and has no length.")
        start = self._registry.current_start(epochs)
        first, whole = self._slice(start).steps, self._slice(PassStart(start.epoch)).steps
        return start.taken + first + whole * (epochs - start.done - 1)

    @property
    def num_rows(self) -> int:
        """The number of rows of the dataset, on all ranks."""
        return len(self.stored)

    @property
    def only_copies(self) -> bool:
        """Whether batches are rows of mapped files without any change."""
        return self._fetch.only_copies

    @property
    def framework(self) -> str:
        """The framework of the batches."""
        return self.options.resolved_framework()

    @property
    def memory_bytes(self) -> int:
        """The budget for the batches that a loader prefetches."""
        return self.options.memory_bytes

    @reject_unknown_options
    def loader(self, prefetch: int = 4, threads: int = 1, *, device: str | torch.device | None = None) -> Loader[DocT]:
        """Prefetch the batches of a pass with threads of this process: `for batch in dataset.loader(): ...`.

        With a `device`, such as 'cuda', the threads also copy the tensors of torch to it, from pinned memory and while
        the batches before are used. Other columns stay in main memory.
        """
        return Loader(self, prefetch, threads, device)

    def _end(self, pass_id: int) -> None:
        self._registry.end(pass_id)

    def iter_batches(self, framework: str | None = None) -> Iterator[DocumentBatch[DocT]]:
        """Iterate over one pass, with the tensors of a framework."""
        return (batch if framework is None else convert_batch(batch, framework) for batch in self)

    @reject_unknown_options
    def windows(
        self, length: int, stride: int = 1, *, order_by: str | None = None, max_gap: Any = None
    ) -> Windows[DocT]:
        """Return windows of `length` consecutive rows; each begins `stride` rows after the one before.

        With `order_by`, the path of numbers or times, a window ends where these values decrease, are missing, or are
        more than `max_gap` apart.
        """
        if self.options.bucket_by is not None:
            raise OptionError("windows: bucket_by sorts rows by their lengths, and windows keep the order of the data.")
        return Windows(self, find_window_starts(self.stored, length, stride, order_by, max_gap), length, stride)

    @reject_unknown_options
    def pack(
        self,
        path: str,
        length: int,
        *,
        split: bool = True,
        long: Long = "raise",
        pad_value: float = 0,
        dtype: str | None = None,
    ) -> PackedDataset[DocT]:
        """Pack documents into blocks of `length` tokens; `path` is a field of lists of numbers or 1-D tensors.

        A batch has `batch_size` blocks, as a `DocumentBatch` of `TokenBlock`. With `split`, documents are concatenated
        in the order of `shuffle`, and cut at the end of a block. Without it, documents stay whole: they are packed once
        by best-fit-decreasing, and the blocks are shuffled. A document that is longer than a block is then an error, or
        is split (`long='split'`). `pad_value` fills blocks, and `dtype` converts the tokens, for instance to 'int64'.
        """
        return PackedDataset(self, path, length, split=split, long=long, pad_value=pad_value, dtype=dtype)

    @reject_unknown_options
    def plan(
        self,
        nodes: int = 1,
        gpus: int = 1,
        *,
        link: float = 200e6,
        connection: float = 60e6,
        latency: float = 0.03,
        cache_bytes: int | None = None,
    ) -> StreamPlan:
        """Plan a run on `nodes` machines with `gpus` ranks each, without reading rows: bytes, requests, cache, seconds.

        `link` and `connection` are the bytes per second of a machine and of one request, `latency` the seconds of a
        round trip, and `cache_bytes` the room of the cache, by default that of this dataset. See `StreamPlan`.
        """
        if self.options.bucket_by is not None:
            raise OptionError("plan: batches of similar lengths have no plan. Plan the dataset without bucket_by.")
        reader, nodes = self.stored._row_reader, whole_number("nodes", nodes)
        planner = RunPlanner(
            self.order,
            reader.block_starts(),
            reader.block_bytes(),
            self.batch_size,
            whole_number("gpus", gpus),
            Network(link, connection, latency),
            reader.shard_reader.cache.max_bytes if cache_bytes is None else cache_bytes,
        )
        return planner.plan(nodes, {max(1, nodes // 4), max(1, nodes // 2), 2 * nodes, 4 * nodes})

    def to_tf_dataset(self, *, features: Paths = None, labels: Paths = None) -> tf.data.Dataset:
        """Return a `tf.data.Dataset`, of which each iteration is a pass; see `MultiModalDataset.to_tf_dataset`."""
        first = self._fetch.batch(np.arange(min(self.batch_size, self.num_rows)))
        start, epochs = self._registry.current_start(self.options.epochs or 1), self.options.epochs
        length = -1 if epochs is None else None if start.position or start.done else len(self)
        return make_tf_dataset(lambda: iter(self), length, first, features, labels)

    # --- rows

    @overload
    def __getitem__(self, key: int) -> DocT: ...
    @overload
    def __getitem__(self, key: slice | Sequence[int] | NDArray[Any]) -> DocumentBatch[DocT]: ...
    def __getitem__(self, key: Any) -> object:
        """Return a preprocessed document by row number, or a batch by slice, list or mask."""
        rows = resolve_index(key, self.num_rows)
        return self.take(rows)[0] if isinstance(rows, int) else self.take(rows)

    def take(self, indices: Any) -> DocumentBatch[DocT]:
        """Return a batch of the preprocessed rows at these positions: an int, a slice, a list, an array or a mask."""
        epoch = self.epoch if self._fetch.is_random else 0  # as the batches of this epoch
        return self._fetch.batch(resolve_positions(indices, self.num_rows), epoch)

    def preprocess(self, documents: Iterable[DocT] | DocumentBatch[DocT]) -> DocumentBatch[DocT]:
        """Return new documents as one batch, just as the dataset would deliver them to a training loop.

        See `MultiModalDataset.preprocess`. With the option `columns`, the batch has only these columns.
        """
        return self._fetch.preprocess(stack_documents(type(self), documents))

    # --- state

    @property
    def epoch(self) -> int:
        """The first epoch of the current pass, or of the next pass when none is under way."""
        return self._registry.current_start(self.options.epochs or 1).epoch

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass begin with an epoch. A pass that was resumed in this epoch keeps its position."""
        epoch = whole_number("epoch", epoch)
        Slice(self.order, epoch, 0, 0, 1, self.batch_size, self.options.last)  # raises an error for an invalid epoch
        record = self._registry.read()
        if record.has_begun or record.start.epoch != epoch:
            self._registry.set_next(PassStart(epoch))
        self._state = None

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch that this process took."""
        if this_worker() is None and self._registry.read().workers:
            raise OptionError(
                "workers of a DataLoader make the batches, and the dataset does not know how many of them were taken. "
                "Keep the state of the last one, batch.state, or that of a StatefulDataLoader."
            )
        if self._state is not None:
            return self._state.to_dict()
        return self._state_at_start(self._registry.current_start(self.options.epochs or 1)).to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, with any number of ranks and workers.

        It is the state of a dataset, a loader, a batch, or a StatefulDataLoader.
        """
        resumed = self._state_type.from_dict(state)
        order = self._order_with_lanes(getattr(resumed, "lanes", 0))
        resumed.check(order, self._fingerprint, self.stored._version or 0)
        self.order = order  # a state that was rejected changes nothing
        if this_worker() is None:
            self._registry.set_next(resumed.next_pass(self.options.epochs))
            self._state = None
            self._check_length_in_lightning()
        elif resumed.divides_like(self._slice(PassStart())) and resumed.epochs == (self.options.epochs or 0):
            self._state = self._resume = resumed
        else:
            raise OptionError(
                "with other ranks, batch_size, last or epochs than before, no worker knows where it goes on. Give the "
                "state to the dataset, not to the loader: dataset.load_state_dict(state)."
            )

    def _order_with_lanes(self, lanes: int) -> Order:
        """Return the order with the number of lanes of a state; raise an error if the number is an option."""
        order = self.order
        if not isinstance(order, InterleavedOrder) or not lanes or lanes == order.lanes:
            return order
        if self.options.lanes is not None:
            raise OptionError(
                f"the state is of an order with {lanes} lanes, and the dataset was opened with lanes={order.lanes}: "
                f"pass lanes={lanes}, or leave it out."
            )
        if this_worker() is None and self._registry.read().workers:
            raise OptionError(
                f"the state is of an order with {lanes} lanes, and workers of a DataLoader have begun with "
                f"{order.lanes}: open the dataset with lanes={lanes}."
            )
        return order.with_lanes(lanes)

    def _check_length_in_lightning(self) -> None:
        """Raise an error if Lightning has asked for the length already, and the resumed pass has another one."""
        epochs = self.options.epochs
        if epochs is not None and is_in_fit_loop() and len(self) != epochs * self._slice(PassStart()).steps:
            raise OptionError(
                "the checkpoint was written with another number of processes or another batch_size, so the epoch has "
                "another number of steps than Lightning expects, and rows would be left out. Use "
                "quire.integrations.lightning.QuireDataModule, which loads the state before Lightning asks for the "
                "length."
            )

    @property
    def errors(self) -> list[str]:
        """The errors of shards whose rows were skipped or replaced, in this process and its workers."""
        return self._registry.errors()

    def __getstate__(self) -> dict[str, Any]:
        # A spawned worker has no process group of its own, so it gets the rank of its trainer. Without valid ranks, the
        # dataset is on its way to a process that a trainer starts, which will have its own.
        ranks: tuple[int, int] | None = None
        with suppress(OptionError):
            ranks = self._rank_and_world_size()
        if ranks is not None:  # on its way to a spawned worker, perhaps, which knows nothing of the trainer
            check_trainer(self._registry, ranks[1], self.options.epochs, is_resumed=True)
        return {**self.__dict__, "_ranks": ranks, "_plan": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._ranks is not None:
            self._ranks = os.getpid(), *state["_ranks"]
        register_with_torch(type(self))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.num_rows} rows in batches of {self.batch_size}>"

    def _repr_html_(self) -> str:
        facts = {"batch size": f"{self.batch_size:,}", "shuffle": self.options.shuffle or "none"}
        return self.stored._render(type(self).__name__, facts)

    def __copy__(self) -> Self:
        return self


def _is_location(url: Any) -> bool:
    """Whether this is a path, an address, or a list of them."""
    files = url if isinstance(url, (list, tuple)) and url else [url]
    return all(isinstance(file, (str, os.PathLike)) for file in files)


def _doubling(limit: int) -> Callable[[], int]:
    """Return a function that returns 1, 2, 4, ... up to a limit, so that the first batch does not wait for others."""
    numbers = chain((1 << power for power in range(limit.bit_length() - 1)), repeat(limit))
    return lambda: next(numbers)


def _growing(limit: int) -> Callable[[], int]:
    """Return a function that returns 1, 1, 2, 2, 4, 4, ... up to a limit, for datasets whose blocks are downloaded.

    A group is gathered when all of its blocks have arrived, and at the beginning they arrive just in time: if each
    group were twice as long as the one before, its first batch would wait for the blocks of its last one.
    """
    numbers = chain((1 << power for power in range(limit.bit_length() - 1) for _ in range(2)), repeat(limit))
    return lambda: next(numbers)
