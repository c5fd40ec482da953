"""MixedDataset: several streaming datasets as one, each batch drawn from one of them, or with rows of all of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from math import inf, isfinite
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar, overload

import numpy as np

from quire._lowlevel.pool import place_buffers
from quire.array import DocumentBatch, whole_number
from quire.columns import (
    Column,
    Columns,
    DocumentsColumn,
    ObjectColumn,
    RaggedColumn,
    TensorColumn,
    retype_columns,
)
from quire.data._bijection import derive_key, uniform
from quire.data._collate import register_default_collate
from quire.data._column_store import in_worker
from quire.data._derived_stream import DerivedStream
from quire.data._epoch import Order, RowOrder, Slice, StepGroup
from quire.data._epoch_registry import EpochRegistry, PassStart, Worker, register_with_torch, this_worker
from quire.data._loader import Loader
from quire.data._packing import BlockOrder, PackedDataset, PackFetch, PackState, TokenBlock
from quire.data._row_mixing import (
    MixPass,
    RowGroup,
    RowMix,
    RowState,
    RowStep,
    Schedule,
    StepMemory,
    combine_workers,
    find_start,
    iterate_steps,
    to_units,
)
from quire.data._shm_transport import use_shared_memory
from quire.data._streaming import StreamingDataset, StreamState, _doubling
from quire.data._trainers import check_trainer
from quire.document import BaseDocument
from quire.errors import ColumnError, OptionError, reject_unknown_options
from quire.tensors import describe

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

DocT = TypeVar("DocT", bound=BaseDocument)
if TYPE_CHECKING:
    Part = StreamingDataset[DocT] | DerivedStream[DocT]
    """A dataset of a mix: rows, blocks of tokens, or windows."""
Stop = Literal["first", "all"]
Mix = Literal["batch", "row"]
Weights = Sequence[float] | Mapping[str, float]
"""A number for each dataset, in their order or by name."""
_DRAWS = 4_096
"""The number of draws that are computed at a time."""
_STATE_KEYS = {"epoch", "step", "origin", "mix", "drawn", "datasets"}
_OTHER_MIX = "the state is of another mix: open the same datasets with the same weights and seed."


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
    datasets: dict[str, StreamState | PackState]
    rows: int = 0
    """The number of rows of the batch, which is not part of the state."""

    def sources(self) -> NDArray[np.int64]:
        """Return the number of the dataset of each row of the batch."""
        return np.full(self.rows, list(self.datasets).index(self.drawn))

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name."""
        state = {name: getattr(self, name) for name in ("epoch", "step", "origin", "mix", "drawn")}
        return {**state, "datasets": {name: part.to_dict() for name, part in self.datasets.items()}}

    @classmethod
    def from_dict(cls, state: Any, streams: Mapping[str, StreamingDataset[Any]]) -> MixedState:
        """Read a state that `to_dict` returned, for datasets of these names; anything else is an OptionError."""
        if (
            not isinstance(state, Mapping)
            or not set(state) >= _STATE_KEYS
            or not isinstance(state["datasets"], Mapping)
        ):
            raise OptionError("this is no state of a MixedDataset.")
        counts = [state[name] for name in ("epoch", "step", "origin")]
        if not all(isinstance(count, int) and count >= 0 for count in counts):
            raise OptionError(f"the state is damaged: epoch, step and origin are {counts}.")
        if set(state["datasets"]) != set(streams):
            raise OptionError(_OTHER_MIX)
        datasets = {name: stream._state_type.from_dict(state["datasets"][name]) for name, stream in streams.items()}
        epoch, step, origin = counts
        return cls(epoch, step, origin, state["mix"], state["drawn"], datasets)


class MixedDataset(Generic[DocT]):
    """Several datasets as one: `for batch in MixedDataset({'web': web, 'code': code}, [0.7, 0.3])`.

    - `mix='batch'` draws every batch from one dataset, with the probability of its weight. Which one is a function of
      the seed, the pass and the step, so all ranks draw from the same dataset. `batch.state['drawn']` is its name.
    - `mix='row'` makes batches of rows of all datasets. After every step, the number of rows of each dataset is less
      than one row away from its weight times the number of all rows, and ranks have equal shares, up to one row. The
      rows of a batch are sorted by dataset; `batch.sources` has the number of the dataset of each row. The datasets
      have the same `batch_size`, `last`, ranks and framework, and their classes a common base.

    With `mix='batch'`, the datasets may also be blocks of tokens (`dataset.pack`) and windows (`dataset.windows`). With
    `mix='row'`, either all of them are blocks of tokens, of one length, or none: rows are then blocks.

    Workers share the steps, and a state determines the next batch exactly, with any number of ranks and workers. With
    `stop='first'`, a pass ends when the dataset that comes next has no rows left; by rows, at most one row of that
    dataset is left out. With `stop='all'`, it ends when every dataset was read completely at least once, and a dataset
    that ends before the others begins its next epoch. The pass after it starts every dataset with a new epoch.

    weights: a number for each dataset; equal by default. temperature: weights by size instead, `rows ** (1 /
        temperature)`: 1 is in proportion to the sizes, and a high temperature makes the weights equal. The size of a
        packed dataset is its number of tokens.
    schedule: for `mix='row'`, weights that change during training: `[(0, [9, 1]), (1_000_000, [1, 1])]` are those from
        the first row on, and those after a million rows on all ranks, counted over all passes.
    rows: for `mix='row'`, the epochs of each dataset in a pass, such as `{'web': 1.0, 'code': 2.5}`. A pass has exactly
        that many rows, and the next one continues with the rows after them.
    seed: determines the draws; with `mix='row'`, which rank gets a row more than the others.
    """

    @overload
    def __init__(
        self,
        datasets: Mapping[str, Part[DocT]] | Sequence[Part[DocT]],
        weights: Weights | None = None,
        *,
        mix: Mix = "batch",
        temperature: float | None = None,
        schedule: Sequence[tuple[int, Weights]] | None = None,
        rows: Weights | None = None,
        seed: int = 0,
        stop: Stop = "first",
    ) -> None: ...
    @overload
    def __init__(
        self: MixedDataset[Any],
        datasets: Mapping[str, Part[Any]] | Sequence[Part[Any]],
        weights: Weights | None = None,
        *,
        mix: Mix = "batch",
        temperature: float | None = None,
        schedule: Sequence[tuple[int, Weights]] | None = None,
        rows: Weights | None = None,
        seed: int = 0,
        stop: Stop = "first",
    ) -> None: ...
    @reject_unknown_options
    def __init__(  # noqa: PLR0913
        self,
        datasets: Mapping[str, Part[Any]] | Sequence[Part[Any]],
        weights: Weights | None = None,
        *,
        mix: Mix = "batch",
        temperature: float | None = None,
        schedule: Sequence[tuple[int, Weights]] | None = None,
        rows: Weights | None = None,
        seed: int = 0,
        stop: Stop = "first",
    ) -> None:
        named = datasets.items() if isinstance(datasets, Mapping) else enumerate(datasets)
        self.datasets = {str(name): dataset for name, dataset in named}
        self._streams = _find_streams(self.datasets, mix)
        self.seed, self.stop, self.mix = whole_number("seed", seed), stop, mix
        if mix not in ("batch", "row"):
            raise OptionError(f"mix={mix!r}: use 'batch' or 'row'.")
        if stop not in ("first", "all"):
            raise OptionError(f"stop={stop!r}: use 'first' or 'all'.")
        options = {"weights": weights, "temperature": temperature, "schedule": schedule, "rows": rows}
        chosen = [name for name, value in options.items() if value is not None]
        if len(chosen) > 1:
            raise OptionError(f"{' and '.join(chosen)} both say how much of each dataset to take: pass one of them.")
        if temperature is not None:
            weights = _weights_by_size(self.datasets, temperature)
        self._row_mix: RowMix | None = None
        if mix == "row":
            if any(dataset.options.max_tokens is not None for dataset in self._streams.values()):
                raise OptionError("mix='row' makes batches of rows, and max_tokens has made them already: use one.")
            self._orders = {name: _order_of(dataset) for name, dataset in self.datasets.items()}
            sizes = [order.size for order in self._orders.values()]
            self._row_mix = _plan_rows(self._streams, sizes, weights, schedule, rows, stop)
            self._row_type = _find_common_type(self._streams)
            self._row_ids = {name: _identify(ds, self._orders[name]) for name, ds in self._streams.items()}
            self._mix = f"{derive_key(self.seed, int(self._row_mix.digest, 16)):x}"
        elif schedule is not None or rows is not None:
            raise OptionError(f"{chosen[0]} is an option of mix='row', which counts rows: pass mix='row'.")
        else:
            self._bounds = _cumulative_weights(self._streams, _in_order("weights", self._streams, weights))
            _check_all_drawn(self._streams, np.diff(self._bounds, prepend=0.0), stop)
            bounds = np.frombuffer(self._bounds.tobytes(), np.uint64).tolist()
            self._mix = f"{derive_key(self.seed, len(self._streams), *bounds):x}"
        self._registry = EpochRegistry()
        self._state: MixedState | RowState | None = None
        self._resume: MixedState | RowState | None = None
        register_with_torch(type(self))

    # --- batches

    def __iter__(self) -> Iterator[DocumentBatch[DocT]]:
        """Iterate over one pass: the batches of this rank, or those of this DataLoader worker."""
        register_default_collate()
        worker = this_worker()
        if worker is None:
            return self.batches(*Worker.alone())
        # Begins now, so that all workers see the same pass.
        return self.trace_pass(self._iterate(self._begin(worker)))

    def trace_pass(self, batches: Iterator[DocumentBatch[DocT]]) -> Iterator[DocumentBatch[DocT]]:
        """Return the batches of a pass, recorded as spans if a dataset of the mix has the option `tracing`."""
        streams: list[Any] = [getattr(dataset, "_stream", dataset) for dataset in self.datasets.values()]
        traced = [stream._tracing for stream in streams if stream.options.tracing]
        return traced[0].trace_pass(batches, traced[1:], datasets=sorted(self.datasets)) if traced else batches

    def batches(self, worker: int, workers: int, pass_id: int) -> Iterator[DocumentBatch[DocT]]:
        """Iterate over the batches of one of several workers; `pass_id` identifies the pass that they share."""
        yield from self.trace_pass(self._iterate(self._begin(Worker(worker, workers, pass_id))))
        if not workers:
            self._end(pass_id)

    def loader(self, prefetch: int = 4, threads: int = 1, *, device: str | torch.device | None = None) -> Loader[DocT]:
        """Prefetch the batches of a pass with threads of this process; see `StreamingDataset.loader`."""
        return Loader(self, prefetch, threads, device)

    def groups(self, pass_id: int, is_alone: Callable[[], bool]) -> Iterator[Any]:
        """Iterate over the steps of a pass, in groups for `fetch`; they are larger while no batches are made ahead."""
        worker, parts = Worker(0, 0, pass_id), list(self._streams.values())
        alone, ahead = (min(getattr(part, name) for part in parts) for name in ("_group_size", "_group_size_ahead"))
        return self._begin(worker, lambda: alone if is_alone() else ahead)

    def fetch(self, group: Any) -> Iterator[DocumentBatch[DocT]]:
        """Read the batches of some steps; each carries the state to continue from after it."""
        if isinstance(group, RowGroup):
            yield from self._fetch_rows(group)
            return
        [batch] = group.dataset.fetch(group.steps)
        object.__setattr__(batch, "_state", replace(group.state, rows=len(batch)))
        yield batch

    def _iterate(self, groups: Iterator[Any]) -> Iterator[DocumentBatch[DocT]]:
        for group in groups:
            for batch in self.fetch(group):
                self._state = batch._state
                yield batch

    def _end(self, pass_id: int) -> None:
        for registry in (self._registry, *(dataset._registry for dataset in self._streams.values())):
            registry.end(pass_id)

    def _begin(self, worker: Worker, group_size: Callable[[], int] | None = None) -> Iterator[Any]:
        """Begin or resume a pass as one of its workers, and return its steps."""
        # Raises an error for invalid ranks, before the pass begins.
        world_size = max(dataset._slice(PassStart()).world_size for dataset in self._streams.values())
        check_trainer(self._registry, world_size, 1, is_resumed=self._resume is not None)
        if self._row_mix is not None:
            return self._begin_rows(self._row_mix, worker, group_size)
        resumed, self._resume = self._resume, None
        if isinstance(resumed, MixedState):
            start, origin = PassStart(resumed.epoch, resumed.step), resumed.origin
            self._registry.resume(start, worker)
            cursors = [_Cursor.resume(ds, resumed.datasets[name], worker) for name, ds in self._streams.items()]
        else:
            start = self._registry.begin(worker, 1)
            origin = start.position
            cursors = [_Cursor.begin(dataset, worker) for dataset in self._streams.values()]
            self._state = self._state_at(start, origin, "", cursors)
        return self._drawn_steps(worker, start, origin, cursors)

    def _drawn_steps(
        self, worker: Worker, start: PassStart, origin: int, cursors: list[_Cursor]
    ) -> Iterator[_DrawnStep]:
        names = list(self._streams)
        for step, number in self._steps(start, cursors):
            if worker.workers and (step - origin) % worker.workers != worker.number:
                continue
            state = self._state_at(PassStart(start.epoch, step + 1), origin, names[number], cursors)
            yield _DrawnStep(self._streams[names[number]], cursors[number].last_step(), state)

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
        if self._row_mix is not None:
            return self._count_row_steps(self._row_mix)
        if self.stop == "first" and all(dataset.options.epochs is None for dataset in self._streams.values()):
            raise TypeError("datasets with epochs=None never end, and have no length together.")
        start = self._registry.current_start(1)
        cursors = [_Cursor.next(dataset) for dataset in self._streams.values()]
        return start.position + sum(1 for _ in self._steps(start, cursors))

    # --- state

    def _state_at(self, at: PassStart, origin: int, drawn: str, cursors: list[_Cursor]) -> MixedState:
        states = {name: cursor.state() for name, cursor in zip(self._streams, cursors, strict=True)}
        return MixedState(at.epoch, at.position, origin, self._mix, drawn, states)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch that this process took."""
        if this_worker() is None and self._registry.read().workers:
            raise OptionError("workers of a DataLoader make the batches: keep the state of the last one, batch.state.")
        if self._state is None and self._row_mix is not None:
            return self._row_state(self._row_mix, self._registry.current_start(1)).to_dict()
        if self._state is None:
            cursors = [_Cursor.next(dataset) for dataset in self._streams.values()]
            start = self._registry.current_start(1)
            return self._state_at(start, start.position, "", cursors).to_dict()
        return self._state.to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state of a mix or of one of its batches, with any number of workers and ranks.

        The next batch is the one that would have followed. After the last batch of a pass, that is the first batch of
        the next pass.
        """
        if self._row_mix is not None:
            self._load_row_state(self._row_mix, state)
            return
        resumed = MixedState.from_dict(state, self._streams)
        if resumed.mix != self._mix:
            raise OptionError(_OTHER_MIX)
        for name, part in resumed.datasets.items():
            stream = self._streams[name]
            part.check(stream.order, stream._fingerprint, stream.stored._version or 0)
        if this_worker() is not None:
            self._state = self._resume = resumed
            return
        # A pass that has ended is resumed as the beginning of the next pass.
        starts = {name: resumed.datasets[name].position() for name in self._streams}
        cursors = [_Cursor(dataset, starts[name], 0) for name, dataset in self._streams.items()]
        start = PassStart(resumed.epoch, resumed.step)
        if self._is_over(resumed.epoch, resumed.step, cursors):
            start = PassStart(resumed.epoch + 1)
            starts = {name: cursor.next_pass() for name, cursor in zip(self._streams, cursors, strict=True)}
        for name, part_start in starts.items():
            self._streams[name]._registry.set_next(part_start)
        self._registry.set_next(start)
        self._state = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        register_with_torch(type(self))

    @property
    def only_copies(self) -> bool:
        """Whether batches are rows of mapped files without any change."""
        return self.mix == "batch" and all(dataset.only_copies for dataset in self._streams.values())

    @property
    def framework(self) -> str:
        """The framework of the batches: torch, if some of the datasets have it."""
        frameworks = {dataset.framework for dataset in self._streams.values()}
        return "torch" if "torch" in frameworks else min(frameworks)

    @property
    def memory_bytes(self) -> int:
        """The budget for the batches that a loader prefetches."""
        return min(dataset.options.memory_bytes for dataset in self._streams.values())

    # --- rows of all datasets in a batch

    def _row_share(self, current: MixPass, position: int) -> Slice:
        """Return this rank's share of a pass from a position on."""
        parts = {
            name: (ds._rank_and_world_size(), ds.batch_size, ds.options.last) for name, ds in self._streams.items()
        }
        _check_equal(parts, ("ranks", "batch_size", "last"))
        (rank, world_size), batch_size, last = next(iter(parts.values()))
        order = RowOrder(current.length, shuffle=False)
        return Slice(order, current.number, position, rank, world_size, batch_size, last)

    def _begin_rows(self, mix: RowMix, worker: Worker, group_size: Callable[[], int] | None) -> Iterator[RowGroup]:
        """Begin or resume a pass as one of its workers, and return its steps."""
        self._row_share(mix.pass_at(0), 0)  # raises an error for different ranks, before the pass counts as begun
        resumed, self._resume = self._resume, None
        if isinstance(resumed, RowState):
            current = mix.pass_at(resumed.epoch)
            share = self._row_share(current, resumed.start)
            self._registry.resume(PassStart(resumed.epoch, resumed.start, 0, resumed.taken), worker)
            first, taken, counts = resumed.step, resumed.taken, [resumed.counts[name] for name in self._streams]
        else:
            start = self._registry.begin(worker, 1)
            self._state = self._row_state(mix, start)
            current, first, taken = mix.pass_at(start.epoch), 0, start.taken
            share, counts = self._row_share(current, start.position), mix.unpack(current, start.position, start.done)
        group_size = group_size or _doubling(min(dataset._group_size for dataset in self._streams.values()))
        return self._row_groups(RowGroup(current, share, taken, ()), worker, first, counts, group_size)

    def _row_groups(
        self, base: RowGroup, worker: Worker, first: int, counts: list[int], group_size: Callable[[], int]
    ) -> Iterator[RowGroup]:
        assert self._row_mix is not None
        own: list[RowStep] = []
        number = group_size()
        for step in iterate_steps(self._row_mix, base.current, base.share, first, counts):
            if not worker.workers or step.number % worker.workers == worker.number:
                own.append(step)
            if len(own) == number:
                yield replace(base, steps=own)
                own, number = [], group_size()
        if own:
            yield replace(base, steps=own)

    def _fetch_rows(self, group: RowGroup) -> Iterator[DocumentBatch[DocT]]:
        """Read the rows of each dataset for some steps, and join them."""
        datasets = list(self._streams.values())
        orders = list(self._orders.values())
        steps = [group.find_rows(step, orders, self.seed) for step in group.steps]
        streams = []
        for number, dataset in enumerate(datasets):
            places = [place for step in steps for place in step[number].places]
            _read_ahead(dataset, places)
            own_rows = [step[number] for step in steps if step[number].size]
            parts: list[Any] = [rows.part for rows in own_rows]
            streams.append(dataset._fetch.batches(parts, [rows.epochs for rows in own_rows]))
        for step, own in zip(group.steps, steps, strict=True):
            chosen = [number for number, rows in enumerate(own) if rows.size]
            memory, batches = StepMemory([own[number].size for number in chosen]), []
            for position, number in enumerate(chosen):
                with place_buffers(partial(memory.take, position)):
                    batches.append(next(streams[number]))
            if not batches:  # of fewer rows than ranks, this rank has none
                nothing: list[Any] = [own[0].part]
                chosen, batches = [0], list(datasets[0]._fetch.batches(nothing, [own[0].epochs]))
            lengths = dict(zip(chosen, map(len, batches), strict=True))
            batch = self._join(batches, memory)
            del batches
            state = self._row_state_after(group, step, tuple(lengths.get(i, 0) for i in range(len(datasets))))
            object.__setattr__(batch, "_state", state)
            yield batch

    def _join(self, batches: list[DocumentBatch[Any]], memory: StepMemory) -> DocumentBatch[DocT]:
        """Concatenate the rows of several datasets as a batch of their common class."""
        document_type = self._row_type
        parts = [_as_type(batch._columns, document_type) for batch in batches]
        shapes = next(iter(self._streams.values())).options.shapes
        columns = parts[0] if len(parts) == 1 else memory.join(parts, shapes)
        for name, column in columns.columns.items():
            _check_joined(f"{columns.schema.name}.{name}", column, [part.columns[name] for part in parts])
        batch_type: Any = DocumentBatch[document_type]  # type: ignore[valid-type]
        if in_worker():
            use_shared_memory(batch_type)
        batch: DocumentBatch[DocT] = batch_type._wrap(columns)
        return batch._guard_missing() if any(part._guard is not None for part in batches) else batch

    def _row_state_after(self, group: RowGroup, step: RowStep, own: tuple[int, ...]) -> RowState:
        drawn = [after - before for before, after in zip(step.before, step.after, strict=True)]
        return self._make_row_state(group.share, step.number + 1, group.taken, step.after, drawn, own)

    def _row_state(self, mix: RowMix, start: PassStart) -> RowState:
        current = mix.pass_at(start.epoch)
        counts = mix.unpack(current, start.position, start.done)
        return self._make_row_state(self._row_share(current, start.position), 0, start.taken, counts, [], ())

    def _make_row_state(
        self, share: Slice, step: int, taken: int, counts: Sequence[int], drawn: Sequence[int], own: tuple[int, ...]
    ) -> RowState:
        names = list(self._streams)
        return RowState(
            epoch=share.epoch,
            start=share.start,
            step=step,
            taken=taken,
            counts=dict(zip(names, counts, strict=True)),
            drawn=dict(zip(names, drawn, strict=False)),  # nothing at the beginning of a pass
            world_size=share.world_size,
            batch_size=share.batch_size,
            last=share.last,
            mix=self._mix,
            datasets=self._row_ids,
            own=own,
        )

    def _load_row_state(self, mix: RowMix, state: Any) -> None:
        names = list(self._streams)
        if isinstance(state, Mapping) and "_snapshot" in state:
            resumed = combine_workers(mix, names, state)
        else:
            resumed = RowState.from_dict(state)
        if resumed.mix != self._mix or set(resumed.datasets) != set(names):
            raise OptionError(
                "the state is of another mix: open the same datasets with the same weights, schedule or rows, with the "
                "same seed and stop."
            )
        others = [name for name in names if resumed.datasets[name] != self._row_ids[name]]
        if others:
            raise OptionError(
                f"the state is of another order of rows: dataset {others[0]!r} has other rows. Open the same dataset "
                "with the same seed, shuffle, where and memory_bytes, pack it into blocks of the same length, or begin "
                "anew."
            )
        start = find_start(mix, resumed, names)
        if this_worker() is None:
            self._registry.set_next(start)
            self._state = None
        elif resumed.divides_like(self._row_share(mix.pass_at(0), 0)):
            self._state = self._resume = resumed
        else:
            raise OptionError("with other ranks, batch_size or last, give the state to the MixedDataset itself.")

    def _count_row_steps(self, mix: RowMix) -> int:
        start = self._registry.current_start(1)
        current = mix.pass_at(start.epoch)
        if current.is_endless:
            raise TypeError("datasets with epochs=None never end, and have no length together.")
        return start.taken + self._row_share(current, start.position).steps


class _DrawnStep(NamedTuple):
    """A step of a mix by batches: its dataset, the step in it, and the state after it."""

    dataset: StreamingDataset[Any]
    steps: StepGroup
    state: MixedState


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
    def resume(cls, dataset: StreamingDataset[Any], state: StreamState | PackState, worker: Worker) -> _Cursor:
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

    def last_step(self) -> StepGroup:
        """Return the step that was taken last."""
        return StepGroup(self._share, self._start.done, 0, [self._next - 1])

    def state(self) -> StreamState | PackState:
        """Return the position as the state of the dataset."""
        return self._dataset._state_at(StepGroup(self._share, self._start.done, 0, ()), self._next)


# --- options


def _find_streams(datasets: Mapping[str, Part[Any]], mix: Mix) -> dict[str, StreamingDataset[Any]]:
    """Return the streams that count, divide and resume the datasets of a mix."""
    streams = {}
    for name, dataset in datasets.items():
        if not isinstance(dataset, (StreamingDataset, DerivedStream)):
            raise OptionError(f"a mix has streaming datasets, got {describe(dataset)} for {name!r}.")
        if mix == "row" and isinstance(dataset, DerivedStream):
            is_packed = isinstance(dataset, PackedDataset)
            if not is_packed or not all(isinstance(other, PackedDataset) for other in datasets.values()):
                advice = "pack all datasets, or " if is_packed else ""
                raise OptionError(
                    f"mix='row' puts rows of all datasets into one batch, and {name!r} has {_unit_of(dataset)} "
                    f"instead: {advice}use mix='batch'."
                )
        # Blocks of tokens and windows have a stream of their own.
        streams[name] = dataset._stream if isinstance(dataset, DerivedStream) else dataset
    return streams


def _in_order(option: str, datasets: Mapping[str, Any], values: Weights | None) -> Sequence[float] | None:
    """Return the values of an option in the order of the datasets."""
    if not isinstance(values, Mapping):
        return values
    if set(values) != set(datasets):
        raise OptionError(f"{option} has a number for each dataset, {[*datasets]}; got {[*values]}.")
    return [values[name] for name in datasets]


def _check_all_drawn(datasets: Mapping[str, Any], shares: Sequence[float] | NDArray[Any], stop: Stop) -> None:
    never_drawn = [name for name, share in zip(datasets, shares, strict=True) if share <= 0]
    if stop == "all" and never_drawn:
        raise OptionError(f"stop='all' waits for every dataset, and {never_drawn} have weight 0: leave them out.")


def _weights_by_size(datasets: Mapping[str, Part[Any]], temperature: Any) -> list[float]:
    if not isinstance(temperature, (int, float)) or not 0 < temperature < inf:
        raise OptionError(f"temperature is a number above 0, got {temperature!r}.")
    units = {name: _unit_of(dataset) for name, dataset in datasets.items()}
    if len(set(units.values())) > 1:
        raise OptionError(f"temperature compares the sizes of datasets, and they count {units}: pass weights instead.")
    sizes = [getattr(dataset, f"num_{units[name]}") for name, dataset in datasets.items()]
    largest = max(sizes, default=0) or 1
    # Relative to the largest, so that nothing overflows. Rounded, because `pow` may differ in its last bit on another
    # machine, and a state must fit there, too.
    return [round((size / largest) ** (1 / temperature), 12) for size in sizes]


def _unit_of(dataset: Part[Any]) -> str:
    """Return what a dataset consists of: 'rows', 'tokens' or 'windows'."""
    if isinstance(dataset, PackedDataset):
        return "tokens"
    return "windows" if isinstance(dataset, DerivedStream) else "rows"


def _order_of(dataset: Part[Any]) -> Order | BlockOrder:
    """Return the order of what mix='row' counts: of the rows of a dataset, or of its blocks of tokens."""
    if isinstance(dataset, PackedDataset):
        return dataset._block_order
    assert isinstance(dataset, StreamingDataset)
    return dataset.order


def _plan_rows(
    datasets: Mapping[str, StreamingDataset[Any]],
    sizes: list[int],
    weights: Weights | None,
    schedule: Sequence[tuple[int, Weights]] | None,
    rows: Weights | None,
    stop: Stop,
) -> RowMix:
    """Check the options of a mix by rows, and make its plan."""
    if not datasets:
        raise OptionError("a mix has datasets, and a weight from 0 up for each; got 0.")
    _check_equal({name: (ds.batch_size, ds.options.last) for name, ds in datasets.items()}, ("batch_size", "last"))
    sorted_ = [name for name, dataset in datasets.items() if dataset.options.bucket_by is not None]
    if sorted_:
        raise OptionError(
            f"mix='row' makes batches of rows of all datasets, and {sorted_} have bucket_by, which batches rows of "
            "similar lengths: use mix='batch'."
        )
    frameworks = {name: (ds.options.resolved_framework(), ds.options.shapes) for name, ds in datasets.items()}
    _check_equal(frameworks, ("framework", "shapes"))
    fetches: dict[str, Any] = {name: dataset._fetch for name, dataset in datasets.items()}
    packings = {name: fetch.packing for name, fetch in fetches.items() if isinstance(fetch, PackFetch)}
    if packings:
        _check_equal(packings, ("length", "dtype", "pad_value"))
    if rows is not None:
        return _plan_fixed_rows(datasets, sizes, rows, stop)
    breakpoints = [(0, weights)] if schedule is None else list(schedule)
    starts, units = _check_breakpoints(datasets, breakpoints)
    ever = [any(part) for part in zip(*units, strict=True)]
    empty = [name for name, size, is_used in zip(datasets, sizes, ever, strict=True) if is_used and not size]
    if empty:
        reason = ", or no full block with last='drop'" if packings else ""
        raise OptionError(f"{empty} have no rows{reason}: leave them out, or give them weight 0.")
    _check_all_drawn(datasets, units[-1], stop)  # a pass may begin after the last breakpoint
    epochs = [dataset.options.epochs for dataset in datasets.values()]
    limits: list[int | None] = [None if n is None else n * size for n, size in zip(epochs, sizes, strict=True)]
    if stop == "all":  # a dataset without end counts as complete after an epoch
        limits = [(n or 1) * size for n, size in zip(epochs, sizes, strict=True)]
    return RowMix(Schedule(starts, units), sizes, None, limits, stops_after_all=stop == "all")


def _plan_fixed_rows(
    datasets: Mapping[str, StreamingDataset[Any]], sizes: list[int], rows: Weights, stop: Stop
) -> RowMix:
    if stop != "first":
        raise OptionError(f"stop={stop!r}: with rows, a pass has a fixed length. Leave stop out.")
    several = [name for name, dataset in datasets.items() if dataset.options.epochs != 1]
    if several:
        raise OptionError(
            f"{several} have the option epochs, and rows has the epochs of each dataset: pass one of them."
        )
    epochs = _in_order("rows", datasets, rows)
    assert epochs is not None
    if len(epochs) != len(datasets) or not all(isfinite(number) and number >= 0 for number in epochs):
        raise OptionError(f"rows has the epochs of each dataset, from 0 up: {[*datasets]}; got {rows}.")
    fixed = [round(number * size) for number, size in zip(epochs, sizes, strict=True)]
    if not sum(fixed):
        raise OptionError(f"rows={rows}: a pass would have no rows.")
    return RowMix(Schedule([0], [fixed], sum(fixed)), sizes, fixed)


def _check_breakpoints(
    datasets: Mapping[str, Any], breakpoints: Sequence[tuple[int, Weights | None]]
) -> tuple[list[int], list[list[int]]]:
    """Return the rows from which weights apply, and the weights as units."""
    try:
        starts = [whole_number("schedule", rows) for rows, _ in breakpoints]
    except (TypeError, ValueError) as error:
        raise OptionError(
            f"schedule is a list of (rows, weights), such as [(0, [9, 1]), (1000, [1, 1])]: {error}."
        ) from error
    if not starts or starts[0] != 0 or any(after <= before for before, after in itertools.pairwise(starts)):
        raise OptionError(f"the rows of a schedule begin with 0 and increase, got {starts}.")
    units = []
    for _, weights in breakpoints:
        in_order = _in_order("weights", datasets, weights)
        _cumulative_weights(datasets, in_order)  # raises an error for invalid weights
        units.append(to_units([1.0] * len(datasets) if in_order is None else [float(weight) for weight in in_order]))
    return starts, units


def _check_equal(parts: Mapping[str, tuple[Any, ...]], options: tuple[str, ...]) -> None:
    """Raise an error for the first dataset that has other options than the first one."""
    (first, expected), *rest = parts.items()
    for name, values in rest:
        for option, value, other in zip(options, expected, values, strict=True):
            if value != other:
                raise OptionError(
                    f"mix='row' puts rows of all datasets into one batch, and {option} is {value!r} in {first!r} and "
                    f"{other!r} in {name!r}: open them with the same {option}."
                )


def _identify(dataset: StreamingDataset[Any], order: Order | BlockOrder) -> str:
    """Return a digest of a dataset and of the order of its rows."""
    content = (dataset._fingerprint, *order.identity)
    return blake2b(repr(content).encode(), digest_size=8).hexdigest()


def _find_common_type(datasets: Mapping[str, StreamingDataset[Any]]) -> type[BaseDocument]:
    """Return the class of batches with rows of all datasets: their own, or the nearest base class of all of them."""
    types = {
        name: getattr(dataset._fetch, "_output", None) or dataset.document_type for name, dataset in datasets.items()
    }
    first, *others = types.values()
    common = next(base for base in first.__mro__ if all(issubclass(other, base) for other in others))
    names = ", ".join(f"{document_type.__name__} ({name!r})" for name, document_type in types.items())
    if common is BaseDocument or not issubclass(common, BaseDocument):
        raise OptionError(
            f"mix='row' puts rows of all datasets into one batch, and their classes have no common base: {names}. Pass "
            "output=, one class for all, to the datasets; or use mix='batch'."
        )
    fetch: Any = next(iter(datasets.values()))._fetch
    is_packed = isinstance(fetch, PackFetch)
    return TokenBlock[common] if is_packed else common  # type: ignore[valid-type]


def _read_ahead(dataset: StreamingDataset[Any], places: Sequence[tuple[int, NDArray[np.int64]]]) -> None:
    """Ask the system to read the windows of the order that rows are in, which are given by epoch and position."""
    for epoch in sorted({epoch for epoch, positions in places if len(positions)}):
        own = np.concatenate([positions for other, positions in places if other == epoch])
        first, last = int(own.min()), int(own.max())
        share = Slice(dataset.order, epoch, first, 0, 1, last - first + 1)
        dataset._read_ahead(StepGroup(share, 0, 0, [0]))


def _as_type(columns: Columns, document_type: type[BaseDocument]) -> Columns:
    """Return columns as those of a base class of their own class, without a copy."""
    if columns.schema.document_type is document_type:
        return columns
    schema = document_type.document_schema()
    fields = tuple(field for field in schema.fields if field.name in columns.columns)
    # The documents of a block have only some of their fields, too.
    nested: dict[str, Column] = {}
    for field in fields if issubclass(document_type, TokenBlock) else ():
        column = columns.columns[field.name]
        if isinstance(column, DocumentsColumn):
            flat = _as_type(column.flat, field.document_type)
            nested[field.name] = DocumentsColumn(field, flat, column.offsets, column.validity)
    return retype_columns(columns, replace(schema, fields=fields), nested)


def _check_joined(path: str, joined: Column, parts: Sequence[Column]) -> None:
    """Raise an error for tensors that were joined to a list of tensors, because their dtypes differ."""
    tensors = [part for part in parts if isinstance(part, (TensorColumn, RaggedColumn))]
    if isinstance(joined, ObjectColumn) and tensors:
        kinds = sorted({str(part.dtype) for part in tensors} | {"objects" for part in parts if part not in tensors})
        raise ColumnError(
            f"{path}: the datasets of the mix have {' and '.join(kinds)}, and a batch has one tensor for all rows: "
            "convert them to one dtype, in the preprocessing of the datasets."
        )


def _cumulative_weights(datasets: Mapping[str, Any], weights: Sequence[float] | None) -> NDArray[np.float64]:
    """Return the upper bound of each dataset's share of [0, 1)."""
    shares = np.ones(len(datasets)) if weights is None else np.asarray(weights, np.float64)
    if not datasets or shares.shape != (len(datasets),) or not (shares >= 0).all() or not 0 < shares.sum() < np.inf:
        raise OptionError(f"a mix has datasets, and a weight from 0 up for each; got {len(datasets)} and {weights}.")
    return np.cumsum(shares / shares.sum())
