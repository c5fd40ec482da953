"""Pack documents of different lengths into blocks of one length, for training on tokens.

Documents that are split are one sequence of tokens for each epoch: concatenated in the stored order, or in a shuffled
one. A block is a range of that sequence, so that its content follows from the epoch and the position of its first
token alone. Dividing an epoch among ranks and workers, and resuming it with others or with another block length, are
additions and divisions, as for rows (`quire.data._epoch`).

Whole documents are packed into bins once for a dataset, and the bins are shuffled and divided like rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, TypeVar

import numpy as np

from quire._lowlevel.pool import take_buffer
from quire.array import DocumentArray, DocumentBatch, whole_number
from quire.columns import (
    Column,
    Columns,
    DocumentsColumn,
    RaggedColumn,
    ScalarColumn,
    TensorColumn,
)
from quire.data._column_store import convert_columns, in_worker
from quire.data._derived_stream import DerivedStream
from quire.data._epoch import Order, RowOrder, Slice, StepGroup
from quire.data._epoch_registry import EpochRegistry, PassStart
from quire.data._frameworks import convert_batch
from quire.data._interleaved import InterleavedOrder
from quire.data._lengths import LengthIndex, open_arrays
from quire.data._shm_transport import use_shared_memory
from quire.data._stream_options import explain_version
from quire.document import BaseDocument
from quire.errors import OptionError, reject_unknown_options
from quire.schema import parse_path
from quire.tensors import Framework, Tensor, get_framework
from quire.typing import AnyTensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quire.data._fetch import Fetch, FinishBatch
    from quire.data._streaming import StreamingDataset

    Numbers = NDArray[np.int64]
    Mask = NDArray[np.bool_]

DocT = TypeVar("DocT", bound=BaseDocument)
Long = Literal["raise", "split"]
_BIN_WINDOW = 16_384
"""The number of consecutive documents that are packed into bins together."""
_CHUNK = 65_536
"""The number of positions of a global shuffle whose lengths are summed up and searched at a time."""
_KEPT_SPANS = 4
_MAX_GROUP, _MAX_BYTES, _MAX_BYTES_AHEAD = 16, 64 << 20, 16 << 20
_STATE_VERSION = 1


class TokenBlock(BaseDocument, Generic[DocT]):
    """A block of tokens, a row of the batches of a `PackedDataset`.

    tokens: the tokens of pieces of documents, concatenated, and padding.
    position_ids: the position of each token in its piece, from 0; in padding, the position in the padding.
    document_ids: the row number of the document of each token in the dataset; -1 at padding.
    cu_seqlens: int32, where the pieces begin in the block, and where the last one ends: from 0 to the block length.
        Padding is a piece of its own.
    length: the number of tokens without padding.
    documents: the other fields of the documents whose first token is in the block, in order.
    """

    tokens: AnyTensor
    position_ids: AnyTensor
    document_ids: AnyTensor
    cu_seqlens: AnyTensor
    length: int
    documents: DocumentArray[DocT]


def flatten_cu_seqlens(batch: DocumentBatch[Any]) -> tuple[Tensor, int]:
    """Return where the sequences of all blocks of a batch begin and end, and the length of the longest.

    These are `cu_seqlens` (int32, on the device of the batch) and `max_seqlen` of flash attention's functions for
    sequences of different lengths, for the tokens of all blocks in a row: `batch.tokens.flatten()`.
    """
    column = batch.column("cu_seqlens")
    if not isinstance(column, RaggedColumn):
        column = _to_ragged(column)
    framework, length = column.framework, batch.tokens.shape[1]
    blocks = np.repeat(np.arange(len(column)), np.diff(column.offsets))
    ends = framework.to_numpy(column.flat) + blocks * length
    # Each block begins with a 0, which is the end of the block before it.
    bounds = np.append(0, np.delete(ends, column.offsets[:-1]))
    longest = int(np.diff(bounds).max(initial=0))
    flat = framework.from_numpy(bounds.astype(np.int32))
    device = getattr(column.flat, "device", None)
    return (flat if device is None else framework.to_device(flat, device, non_blocking=False)), longest


def _to_ragged(column: Column) -> RaggedColumn:
    """Return a column of rows that happen to have one length as a ragged one."""
    assert isinstance(column, TensorColumn)
    shape = column.framework.shape(column.data)
    flat = column.framework.reshape(column.data, (shape[0] * shape[1],))
    return RaggedColumn(column.field, flat, column.framework, [(shape[1],)] * shape[0])


# --- which tokens a block has


class BlockPart(NamedTuple):
    """The pieces of documents in the blocks of one batch, in order, without padding.

    places: where each piece begins in the blocks, concatenated. real: which blocks do not only fill the batch.
    """

    rows: Numbers
    starts: Numbers
    sizes: Numbers
    places: Numbers
    blocks: int
    real: Mask | None


class _Span(NamedTuple):
    """Consecutive documents of an epoch: their rows, and where each begins and the last ends, in tokens."""

    rows: Numbers
    bounds: Numbers


class TokenPlan:
    """The tokens of an epoch in one sequence, of which each block is a range."""

    def __init__(self, index: LengthIndex, order: Order, length: int) -> None:
        self._index, self._order, self.length = index, order, length
        self._spans: dict[tuple[int, int], _Span] = {}
        self._sums: tuple[int, Numbers] | None = None

    def part(self, share: PackSlice, numbers: Numbers, real: Mask | None) -> BlockPart:
        """Return the pieces of consecutive blocks, by their numbers from the start of a share on."""
        blocks = len(numbers)
        if real is not None:
            numbers = numbers[real]
        size, length = share.order.size, self.length
        begin = share.start + int(numbers[0]) * length if len(numbers) else size
        end = min(begin + len(numbers) * length, size)
        rows, bounds = self._documents(share.epoch, begin, end)
        # Pieces begin where a document does, or a block. Where both do, two edges are equal, and one has no tokens.
        edges = np.concatenate([np.maximum(bounds[:-1], begin), np.arange(begin, end, length), [end]])
        edges.sort()
        sizes = edges[1:] - edges[:-1]
        edges, sizes = edges[:-1][sizes > 0], sizes[sizes > 0]
        owners = np.searchsorted(bounds, edges, side="right") - 1
        return BlockPart(rows[owners], edges - bounds[owners], sizes, edges - begin, blocks, real)

    def _documents(self, epoch: int, begin: int, end: int) -> tuple[Numbers, Numbers]:
        """Return the rows of the documents with tokens in a range, and where each begins and the last ends."""
        if begin >= end:
            return np.zeros(0, np.int64), np.zeros(1, np.int64)
        if self._order.shuffle is False:
            bounds = self._index.prefix
            first, last = _search(bounds, begin, end)
            rows = np.arange(first, last)
            return _without_empty(rows, bounds[first : last + 1])
        parts: list[tuple[Numbers, Numbers]] = []
        for number in range(*_search(self._sums_before(epoch), begin, end)):
            span = self._span(epoch, number)
            first, last = _search(span.bounds, max(begin, int(span.bounds[0])), min(end, int(span.bounds[-1])))
            parts.append(_without_empty(span.rows[first:last], span.bounds[first : last + 1]))
        if len(parts) == 1:
            return parts[0]
        bounds = np.concatenate([*(bounds[:-1] for _, bounds in parts[:-1]), parts[-1][1]])
        return np.concatenate([rows for rows, _ in parts]), bounds

    # A span is a window of block order, or a fixed number of positions of an order without windows. The sums of the
    # tokens of all spans are computed once per epoch; the documents of a span, when a block is in it.

    def _positions(self, epoch: int, span: int) -> tuple[int, int]:
        order = self._order
        if isinstance(order, RowOrder) and order.shuffle == "block":
            return order.window_start(epoch, span), order.window_start(epoch, span + 1)
        return span * _CHUNK, min((span + 1) * _CHUNK, order.size)

    def _sums_before(self, epoch: int) -> Numbers:
        """Return the number of tokens before each span, and in all of them."""
        if self._sums is not None and self._sums[0] == epoch:
            return self._sums[1]
        order, prefix = self._order, self._index.prefix
        if order.shuffle == "block":
            begins, ends = order.runs(epoch, 0, order.size)
            sums = np.add.reduceat(prefix[ends] - prefix[begins], np.arange(0, len(begins), order.window))
        else:
            starts = range(0, order.size, _CHUNK)
            chunks = (np.arange(start, min(start + _CHUNK, order.size)) for start in starts)
            sums = np.array([self._index.lengths(order.rows(epoch, chunk)).sum() for chunk in chunks], np.int64)
        before = np.concatenate([np.zeros(1, np.int64), np.cumsum(sums)])
        self._sums = epoch, before
        return before

    def _span(self, epoch: int, number: int) -> _Span:
        span = self._spans.get((epoch, number))
        if span is None:
            rows = self._order.rows(epoch, np.arange(*self._positions(epoch, number)))
            first = self._sums_before(epoch)[number]
            span = _Span(rows, np.concatenate([[first], first + np.cumsum(self._index.lengths(rows))]))
            # A new dict, because other threads may be reading the old one.
            kept = list(self._spans.items())[1 - _KEPT_SPANS :]
            self._spans = dict([*kept, ((epoch, number), span)])
        return span

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_spans": {}, "_sums": None}


def _search(bounds: Numbers, begin: int, end: int) -> tuple[int, int]:
    """Return the first of consecutive ranges with a number from `begin` to `end`, and the one after the last."""
    return int(np.searchsorted(bounds, begin, side="right")) - 1, int(np.searchsorted(bounds, end, side="left"))


def _without_empty(rows: Numbers, bounds: Numbers) -> tuple[Numbers, Numbers]:
    """Leave out documents without tokens: the position of a token must identify its document."""
    kept = bounds[:-1] < bounds[1:]
    return (rows, bounds) if kept.all() else (rows[kept], np.append(bounds[:-1][kept], bounds[-1]))


class BinPlan:
    """Bins of whole documents, or of pieces of documents that are longer than a block."""

    def __init__(self, index: LengthIndex, length: int, long: Long) -> None:
        self._arguments = index, length, long
        self._index, self.length = index, length
        name = f"bins {index.key} {length} {long} {_BIN_WINDOW}"
        self._offsets, self._rows, self._starts = open_arrays(
            index.cache, name, lambda: pack_bins(index, length, split=long == "split")
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._arguments

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def part(self, share: PackSlice, numbers: Numbers, real: Mask | None) -> BlockPart:
        """Return the pieces of the bins at positions of an epoch, counted from the start of a share."""
        blocks, length = len(numbers), self.length
        positions = share.start + (numbers if real is None else numbers[real])
        bins = share.order.rows(share.epoch, positions)
        counts = self._offsets[bins + 1] - self._offsets[bins]
        before = np.cumsum(counts) - counts
        pieces = np.repeat(self._offsets[bins] - before, counts) + np.arange(int(counts.sum()))
        rows, starts = self._rows[pieces], self._starts[pieces]
        sizes = np.minimum(self._index.lengths(rows) - starts, length)
        # The place of a piece in its bin is the sum of the sizes before it: over all bins, without those of other bins.
        ends = np.cumsum(sizes)
        in_bin = ends - sizes - np.repeat(np.concatenate([[0], ends])[before], counts)
        return BlockPart(rows, starts, sizes, np.repeat(np.arange(len(bins)) * length, counts) + in_bin, blocks, real)


def pack_bins(index: LengthIndex, length: int, *, split: bool) -> list[Numbers]:
    """Pack documents into bins of a length, by best-fit-decreasing within windows of consecutive documents.

    Returns where each bin begins in the list of pieces, and the last one ends; and of each piece, the row, and the
    token that it begins with. Documents without tokens are left out.
    """
    size = len(index)
    windows = max(1, -(-size // _BIN_WINDOW))
    counts, rows, starts = [np.zeros(1, np.int64)], [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for window in range(windows):
        first, last = size * window // windows, size * (window + 1) // windows
        lengths = index.between(first, last)
        if not split and len(lengths) and int(lengths.max()) > length:
            row = first + int(np.argmax(lengths > length))
            raise OptionError(
                f"{index.path!r}: row {row} has {int(lengths[row - first]):,} tokens, and a block has {length:,}. Pass "
                "long='split' to split such documents, or leave them out with where=."
            )
        # A document of n tokens has ceil(n / length) pieces, all of them full but the last.
        pieces = -(-lengths // length)
        own_rows = np.repeat(np.arange(first, last), pieces)
        own_starts = (np.arange(len(own_rows)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * length
        sizes = np.minimum(lengths[own_rows - first] - own_starts, length)
        bins = _fit(sizes, length)
        # Bins are numbered by their first rows, so that neighbouring bins are neighbours in the data as well.
        order = np.argsort(bins, kind="stable")
        begins = np.flatnonzero(np.diff(bins[order], prepend=-1))
        numbers = np.argsort(np.argsort(own_rows[order][begins], kind="stable"), kind="stable")
        order = np.argsort(numbers[bins], kind="stable") if len(bins) else order
        rows.append(own_rows[order])
        starts.append(own_starts[order])
        counts.append(np.bincount(numbers[bins], minlength=len(begins)) if len(bins) else np.zeros(0, np.int64))
    return [np.cumsum(np.concatenate(counts)), np.concatenate(rows), np.concatenate(starts)]


def _fit(sizes: Numbers, capacity: int) -> Numbers:
    """Return the number of a bin for each piece: the largest first, each into the bin with the least room left for it.

    `rooms` is a set of numbers, as the bits of an int: bit r is set if some bin has room for exactly r tokens. The
    lowest bit from the size of a piece on is the best fit.
    """
    bins = np.empty(len(sizes), np.int64)
    order = np.argsort(-sizes, kind="stable")
    by_room: dict[int, list[int]] = {}
    rooms, count = 0, 0
    chosen: list[int] = []
    for size in sizes[order].tolist():
        fitting = rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            same_room = by_room[room]
            number = same_room.pop()
            if not same_room:
                rooms ^= 1 << room
        else:
            room, number, count = capacity, count, count + 1
        chosen.append(number)
        room -= size
        if room:
            same_room = by_room.setdefault(room, [])
            if not same_room:
                rooms |= 1 << room
            same_room.append(number)
    bins[order] = chosen
    return bins


# --- blocks as rows of a mix


class BlockOrder:
    """The blocks of every epoch of a packed dataset by number, which `MixedDataset(mix='row')` mixes like rows.

    `lanes` is at least 1, so that a rank gets consecutive blocks where possible (see `RowGroup`): of split documents,
    several blocks are then one range of tokens, which costs hardly more to locate than one block.
    """

    def __init__(self, share_of: Callable[..., PackSlice], positions: Order, last: str) -> None:
        self._share_of, self._positions, self._last = share_of, positions, last
        share = self._share_at(0)
        self._plan, self._length = share.plan, share.plan.length
        self.size = count_blocks(positions.size, 0, share.length, last)
        self.lanes = max(positions.lanes, 1)
        self.identity = (*positions.identity, self._length, self.size)

    def _share_at(self, epoch: int) -> PackSlice:
        return self._share_of(self._positions, epoch, 0, 0, 1, 1, self._last)

    def deal(self, begin: int, end: int, first: int, last: int) -> Numbers:
        """Return the share of a rank of the blocks from begin to end; see `Order.deal`."""
        if isinstance(self._plan, BinPlan):
            return self._positions.deal(begin, end, first, last)
        return np.arange(begin + first, begin + last, dtype=np.int64)

    def find(self, epochs: Numbers, blocks: Numbers, real: Mask | None) -> BlockPart:
        """Return the pieces of documents in blocks, in this order; those that are not real are empty and come last."""
        count = len(blocks)
        if real is not None:
            epochs, blocks, real = epochs[real], blocks[real], np.arange(count) < np.count_nonzero(real)
        is_cut = np.diff(epochs) != 0
        if not isinstance(self._plan, BinPlan):
            is_cut |= np.diff(blocks) != 1
        cuts = [0, *(np.flatnonzero(is_cut) + 1).tolist(), len(blocks)]
        runs = [(int(epochs[begin]), blocks[begin:end]) for begin, end in pairwise(cuts) if begin < end]
        parts = [self._plan.part(self._share_at(epoch), run, None) for epoch, run in runs]
        places = [part.places + begin * self._length for part, begin in zip(parts, cuts, strict=False)]
        empty = np.zeros(0, np.int64)
        rows, starts, sizes = (np.concatenate([empty, *(part[field] for part in parts)]) for field in range(3))
        return BlockPart(rows, starts, sizes, np.concatenate([empty, *places]), count, real)


# --- the share of a rank, and the state


def _order_bins(order: Order, bins: int) -> Order:
    """Return the order of bins that is like an order of rows. Bins are numbered by their first rows."""
    if isinstance(order, InterleavedOrder):
        return order.regroup(order.blocks.starts * bins // max(order.size, 1))
    assert isinstance(order, RowOrder)
    block = max(1, order.block * bins // max(order.size, 1))
    return RowOrder(bins, order.seed, order.shuffle, block, min(order.window, max(1, -(-bins // block))))


def count_blocks(size: int, start: int, length: int, last: str) -> int:
    """Return the number of blocks of `length` from a position on; only 'drop' leaves out one that is not full."""
    whole, rest = divmod(size - start, length)
    return whole + (rest > 0 and last != "drop")


@dataclass(frozen=True, slots=True)
class PackSlice(Slice):
    """One rank's share of the blocks of an epoch from a position on.

    Positions are tokens, of which a block has `length`; or bins, which are a block each. With `last='pad'`, batches are
    filled with empty blocks.
    """

    length: int = 1
    plan: Any = None

    def _blocks(self) -> Slice:
        count = count_blocks(self.order.size, self.start, self.length, self.last)
        blocks = RowOrder(count, shuffle=False)
        return Slice(blocks, self.epoch, 0, self.rank, self.world_size, self.batch_size, self.last)

    @property
    def steps(self) -> int:
        """The number of steps that every rank takes to the end of the epoch."""
        return self._blocks().steps

    def positions(self, step: int) -> tuple[Numbers, Mask | None]:
        """Return the numbers of the blocks of this rank's batch, from the start of the share on."""
        return self._blocks().positions(step)

    def parts(self, steps: Sequence[int]) -> list[Any]:
        """Return the pieces of documents in the blocks of each step."""
        blocks = self._blocks()
        return [self.plan.part(self, *blocks.positions(step)) for step in steps]


@dataclass(frozen=True, slots=True)
class PackState:
    """The position of a `PackedDataset`, in fewer than 200 bytes of JSON.

    `start` is a position of the epoch (a token, or a bin), and a step takes `batch_size` blocks of `length` positions
    on each of `world_size` ranks. The other fields are those of a `StreamState`; `order` identifies the dataset, the
    field and the order of the documents.
    """

    epoch: int
    start: int
    step: int
    done: int
    before: int
    epochs: int
    taken: int
    world_size: int
    batch_size: int
    length: int
    last: str
    size: int
    order: str
    dataset_version: int = 0

    @classmethod
    def at(cls, group: StepGroup, step: int, epochs: int | None, order: str, dataset_version: int = 0) -> PackState:
        """Return the state after a number of steps of an epoch."""
        share: Any = group.share
        division = share.world_size, share.batch_size, share.length, share.last
        position = share.epoch, share.start, step, group.done, group.before, epochs or 0, group.taken
        return cls(*position, *division, share.order.size, order, dataset_version)

    def to_dict(self) -> dict[str, Any]:
        """Return the state as numbers in few bytes."""
        position = [self.epoch, self.start, self.step, self.done, self.before, self.epochs, self.taken]
        division = [self.world_size, self.batch_size, self.length, self.last]
        return {
            "pack": _STATE_VERSION,
            "position": position,
            "division": division,
            "size": self.size,
            "order": self.order,
            **({"dataset_version": self.dataset_version} if self.dataset_version else {}),
        }

    @classmethod
    def from_dict(cls, state: Any) -> PackState:
        """Read a state of a `PackedDataset` or of a StatefulDataLoader; anything else is an OptionError."""
        if isinstance(state, Mapping) and "_snapshot" in state:
            return cls._combine_workers(state["_snapshot"]["_worker_snapshots"], state["_steps_since_snapshot"])
        if isinstance(state, Mapping):
            state = state.get("dataset_state") or state
        if not isinstance(state, Mapping) or state.get("pack") != _STATE_VERSION:
            raise OptionError("this is no state of a PackedDataset, or one of another version of quire.")
        try:
            values: list[Any] = [*state["position"], *state["division"], state["size"], state["order"]]
            result = cls(*[*values, state.get("dataset_version", 0)])
        except (KeyError, TypeError) as error:
            raise OptionError(f"the state is damaged: {dict(state)}") from error
        sizes = result.world_size, result.batch_size, result.length, result.size, result.dataset_version
        counts: list[Any] = [*state["position"], *sizes]
        if not all(isinstance(count, int) and count >= 0 for count in counts) or result.length < 1:
            raise OptionError(f"the state is damaged: {dict(state)}")
        return result

    @classmethod
    def _combine_workers(cls, snapshots: Mapping[str, Any], later_steps: int) -> PackState:
        """Combine the states of the workers of a StatefulDataLoader; see `StreamState`."""
        states = [cls.from_dict(snapshots[f"worker_{worker}"]) for worker in range(len(snapshots))]
        reached = [state.before + state.step for state in states]
        taken = min(at + (worker - at) % len(states) for worker, at in enumerate(reached))
        first = min(states, key=lambda state: state.done)
        step = taken + later_steps - first.before
        while step > first._count_steps() and (not first.epochs or first.done + 1 < first.epochs):
            steps = first._count_steps()
            step -= steps
            first = replace(first, epoch=first.epoch + 1, start=0, done=first.done + 1, before=first.before + steps)
        return replace(first, step=min(step, first._count_steps()))

    def check(self, order: Order, name: str, dataset_version: int = 0) -> None:
        """Raise an error for a state of another order, in which the same position means other tokens."""
        if self.order != name or self.size != order.size:
            raise OptionError(
                "the state is of another dataset, or of tokens in another order."
                f"{explain_version(self.dataset_version, dataset_version)} Open the same dataset with the same "
                "seed, shuffle, where and memory_bytes, and pack the same field in the same way, or begin anew."
            )

    def divides_like(self, share: Slice) -> bool:
        """Return whether a step of the state has the same blocks as a step of a share."""
        other: Any = share
        division = other.world_size, other.batch_size, other.length, other.last
        return (self.world_size, self.batch_size, self.length, self.last) == division

    def next_pass(self, epochs: int | None) -> PassStart:
        """Return where a `PackedDataset` resumes: at the very next token, of this epoch or of the next one."""
        at = self.position()
        if self.step >= self._count_steps():
            at = PassStart(at.epoch + 1, 0, at.done + 1, at.taken)
        if epochs is None or at.done < epochs:
            return at
        # The pass of the state has ended, or its epochs are more than those of a pass now: a new pass begins here.
        return at._replace(done=0, taken=-(-at.position // max(self._step_size(), 1)))

    def position(self) -> PassStart:
        """Return the same place as a position in the epoch; at the end of the epoch, that is its size."""
        position = self.start + self.step * self._step_size()
        if self.step >= self._count_steps():
            position = self.size
        return PassStart(self.epoch, position, self.done, self.taken + self.before + self.step)

    def _step_size(self) -> int:
        return self.world_size * self.batch_size * self.length

    def _count_steps(self) -> int:
        order = RowOrder(self.size, shuffle=False)
        division = 0, self.world_size, self.batch_size, self.last
        return PackSlice(order, 0, self.start, *division, length=self.length).steps  # type: ignore[arg-type]


# --- batches


class PackFetch:
    """Makes batches of blocks."""

    def __init__(
        self, fetch: Fetch, path: str, index: LengthIndex, length: int, dtype: np.dtype[Any], pad_value: Any
    ) -> None:
        self._stored, self._framework, self._has_mixed = fetch._stored, fetch._framework, fetch._has_mixed
        self._target: Framework | None = fetch._target
        self._missing = replace(
            fetch._missing, fills={at: value for at, value in fetch._missing.fills.items() if at[0] != path}
        )
        self._path, self._index, self._length = path, index, length
        self._stored_dtype = self._stored._row_reader.element_dtype(path)
        self._dtype, self._pad_value = dtype, pad_value
        block_type: Any = TokenBlock[self._stored.document_type]  # type: ignore[name-defined]
        schema = block_type.document_schema()
        self._schema = replace(schema, fields=tuple(field for field in schema.fields if field.name != "id"))
        self._batch_type: Any = DocumentBatch[block_type]
        self.only_copies = fetch.only_copies
        self._counting = np.arange(length)
        self.tracing = fetch.tracing

    @property
    def packing(self) -> tuple[int, str, Any]:
        """What blocks of several datasets in one batch have in common: length, dtype and value of padding."""
        return self._length, str(self._dtype), self._pad_value.item()

    def batches(self, parts: list[BlockPart], epochs: object = None) -> Iterator[DocumentBatch[Any]]:
        """Make a batch of the blocks of each part; no random augmentation depends on their epochs."""
        for finish in self.gather(parts, epochs):
            yield finish()

    def gather(self, parts: list[BlockPart], epochs: object = None) -> Iterator[FinishBatch]:
        """Gather the tokens of each part; see `Fetch.gather`."""
        del epochs
        return map(self.tracing.trace_finish, self.tracing.trace_gather(self._gather(parts)))

    def _gather(self, parts: list[BlockPart]) -> Iterator[FinishBatch]:
        rows, starts, sizes = (np.concatenate([part[place] for part in parts]) for place in range(3))
        reader = self._stored._row_reader
        ranges = reader.locate_elements(self._path, rows, starts, sizes, self._index.lengths(rows))
        firsts = [part.starts == 0 for part in parts]
        carried = reader.gather_parts(
            [part.rows[first] for part, first in zip(parts, firsts, strict=True)], self._target, self._path
        )
        end = 0
        for part, is_first, documents in zip(parts, firsts, carried, strict=True):
            span, end = slice(end, end + len(part.rows)), end + len(part.rows)
            tokens = take_buffer(part.blocks * self._length * self._stored_dtype.itemsize).view(self._stored_dtype)
            ranges.copy(span, tokens.view(np.uint8), part.places * tokens.itemsize)
            yield partial(self._make_batch, part, tokens, is_first, documents)

    def _make_batch(
        self, part: BlockPart, tokens: NDArray[Any], is_first: Mask, documents: Columns
    ) -> DocumentBatch[Any]:
        count, length, total = part.blocks, self._length, len(tokens)
        owners = part.places // length
        if int(part.sizes.sum()) == total:  # all blocks are full, as all but the last of an epoch are
            used, padded = np.full(count, length, np.int64), np.zeros(0, np.int64)
        else:
            used = np.bincount(owners, part.sizes, minlength=count).astype(np.int64)
            padded = np.flatnonzero(used < length)
        # Padding is a piece from the end of the last piece of a block to the end of the block.
        places, rows, owners_all = part.places, part.rows, owners
        if len(padded):
            begins = padded * length + used[padded]
            order = np.argsort(np.concatenate([places, begins]), kind="stable")
            places = np.concatenate([places, begins])[order]
            rows = np.concatenate([rows, np.full(len(begins), -1)])[order]
            owners_all = np.concatenate([owners, padded])[order]
        sizes = part.sizes if not len(padded) else np.diff(places, append=total)
        if tokens.dtype != self._dtype:
            tokens = tokens.astype(self._dtype)
        for block in padded.tolist():
            tokens[block * length + used[block] : (block + 1) * length] = self._pad_value
        shape = count, length
        document_ids = rows.repeat(sizes)
        # Large arrays are made in memory that was used before: the page faults of new memory cost more than filling it.
        position_ids = take_buffer(total * 8).view(np.int64).reshape(shape)
        pieces = np.bincount(owners_all, minlength=count)
        within = places - owners_all * length
        end = 0
        for block, number in enumerate(pieces.tolist()):  # one by one, so that copies stay in the processor's cache
            own, end = slice(end, end + number), end + number
            np.subtract(self._counting, within[own].repeat(sizes[own]), out=position_ids[block])
        # A 0 before the ends of the pieces of each block.
        ends = (within + sizes).astype(np.int32)
        cu_seqlens = np.zeros(len(ends) + count, np.int32)
        cu_seqlens[np.arange(len(ends)) + owners_all + 1] = ends
        target = self._target or get_framework("numpy")
        fields = self._schema.by_name

        def column(name: str, array: NDArray[Any], shapes: Numbers | None = None) -> TensorColumn:
            return TensorColumn(fields[name], target.from_numpy(array.reshape(shape)), target, None, shapes)

        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.bincount(owners[is_first], minlength=count))])
        shapes: list[tuple[int, ...]] = [(size + 1,) for size in pieces.tolist()]
        if self._has_mixed and documents.frameworks:
            documents = convert_columns(documents, self._framework)
        documents = self._missing.apply(documents, partial(_describe_row, part.rows[is_first]))
        columns = Columns(
            self._schema,
            {
                "tokens": column("tokens", tokens, used[:, None] if len(padded) else None),
                "position_ids": column("position_ids", position_ids),
                "document_ids": column("document_ids", document_ids),
                "cu_seqlens": RaggedColumn(fields["cu_seqlens"], target.from_numpy(cu_seqlens), target, shapes),
                "length": ScalarColumn(fields["length"], target.from_numpy(used), target),
                "documents": DocumentsColumn(fields["documents"], documents, offsets),
            },
            count,
            None if part.real is None or part.real.all() else part.real,
        )
        if self._target is None:
            columns = convert_columns(columns, self._framework)
        if in_worker():
            use_shared_memory(self._batch_type)
        return self._missing.make_batch(self._batch_type, columns)


def _describe_row(rows: Numbers, row: int) -> str:
    return f"row {int(rows[row])}"


class PackedDataset(DerivedStream[TokenBlock[DocT]], Generic[DocT]):
    """Blocks of tokens as batches of `TokenBlock`, for a loop or torch's DataLoader (`batch_size=None`).

    `StreamingDataset.pack` creates it. Each token comes once per epoch, all ranks take the same number of steps, and
    `state_dict()` is less than 200 bytes from which any number of ranks and workers continues with the very next token.
    """

    @reject_unknown_options
    def __init__(
        self,
        dataset: StreamingDataset[DocT],
        path: str,
        length: int,
        *,
        split: bool = True,
        long: Long = "raise",
        pad_value: float = 0,
        dtype: str | None = None,
    ) -> None:
        length = whole_number("length", length)
        if length < 1:
            raise OptionError(f"length={length}: a block has at least one token.")
        if long not in ("raise", "split"):
            raise OptionError(f"long={long!r}: use 'raise' or 'split'.")
        if split and long != "raise":
            raise OptionError("long='split' is for whole documents, split=False; with split=True, all are split.")
        _check_dataset(dataset, path)
        self.path, self.length = path, length
        token_dtype, pad = _check_values(dataset, path, dtype, pad_value)
        index = LengthIndex(dataset.stored, path, dataset._fingerprint)
        order, registry = dataset.order, EpochRegistry()
        identity = f"{dataset._fingerprint} {path}"
        plan: TokenPlan | BinPlan
        if split:
            plan, unit = TokenPlan(index, order, length), length
            if order.shuffle is not False:
                identity += "".join(f" {value}" for value in order.identity[1:])
            positions: Order = RowOrder(index.total, shuffle=False, window=2**40)
        else:
            plan, unit = BinPlan(index, length, long), 1
            positions = _order_bins(order, len(plan))
            identity += f" bins {length} {long} {positions}"
        self.num_tokens = index.total
        row_bytes = dataset.batch_size * length * (token_dtype.itemsize + 2 * 8)
        limit = min(dataset.options.memory_bytes // 2, _MAX_BYTES)
        # A copy of the dataset whose positions are tokens or bins: it counts, divides and resumes them, and only the
        # share of a rank and the fetching turn them into blocks.
        self._copy_stream(
            dataset,
            order=positions,
            _registry=registry,
            _fetch=PackFetch(dataset._fetch, path, index, length, token_dtype, pad),
            _group_size=max(1, min(_MAX_GROUP, limit // row_bytes)),
            _group_size_ahead=max(1, min(_MAX_GROUP, min(limit, _MAX_BYTES_AHEAD) // row_bytes)),
            _fingerprint=blake2b(identity.encode(), digest_size=8).hexdigest(),
            _slice_type=partial(PackSlice, length=unit, plan=plan),
            _state_type=PackState,
        )

    @property
    def num_blocks(self) -> int:
        """The number of blocks of an epoch, on all ranks."""
        return self._block_order.size

    @property
    def _block_order(self) -> BlockOrder:
        """The blocks of an epoch by number."""
        stream = self._stream
        return BlockOrder(stream._slice_type, stream.order, stream.options.last)

    def iter_batches(self, framework: str | None = None) -> Iterator[DocumentBatch[TokenBlock[DocT]]]:
        """Iterate over one pass, with the tensors of a framework."""
        return (batch if framework is None else convert_batch(batch, framework) for batch in self)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.num_tokens} tokens in blocks of {self.length}>"


def _check_dataset(dataset: StreamingDataset[Any], path: str) -> None:
    """Raise an error for a field or for options that packing cannot follow."""
    schema, options = dataset.stored.schema, dataset.options
    schema.resolve(parse_path(path))
    if len(parse_path(path)) != 1:
        raise OptionError(f"pack({path!r}): tokens are a field of the documents themselves, not of nested ones.")
    if dataset._fetch._steps or dataset._fetch._output is not None:
        raise OptionError(
            "pack: preprocessing and output would change documents after blocks are made of their stored lengths. "
            "Tokenize documents before they are written, and change batches in the training loop."
        )
    if options.on_error != "raise":
        raise OptionError(
            f"pack: on_error={options.on_error!r} would change the lengths that the places of all tokens follow from. "
            "Use on_error='raise', and leave out damaged shards with where=, or write them again."
        )
    if options.bucket_by is not None:
        raise OptionError("pack: blocks have one length, so there is nothing to bucket: leave out bucket_by.")


def _check_values(
    dataset: StreamingDataset[Any], path: str, dtype: str | None, pad_value: Any
) -> tuple[np.dtype[Any], Any]:
    """Return the dtype of the tokens in batches, and the value of padding in it."""
    stored = dataset.stored._row_reader.element_dtype(path)
    try:
        target = stored if dtype is None else np.dtype(dtype)
    except TypeError as error:
        raise OptionError(f"dtype={dtype!r} is no dtype of numpy, such as 'int64'.") from error
    if not np.can_cast(stored, target, "safe"):
        raise OptionError(f"dtype={dtype!r}: tokens are stored as {stored}, of which not every value fits into it.")
    with np.errstate(all="ignore"):
        value = np.array(pad_value).astype(target)
    if value.shape or not (value == pad_value):
        raise OptionError(f"pad_value={pad_value!r} does not fit into tokens of {target}.")
    return target, value
