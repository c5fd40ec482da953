"""Packing documents into blocks of tokens."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch.utils.data import DataLoader

from quire import BaseDocument
from quire.data import PackedDataset, StreamingDataset, TokenBlock, _packing, flatten_cu_seqlens
from quire.data._epoch import RowOrder
from quire.data._interleaved import InterleavedOrder
from quire.data._packing import BlockPart, PackSlice, TokenPlan, _order_bins, pack_bins
from quire.errors import OptionError, PathError, ShardError
from quire.storage import open_dataset, write_dataset
from quire.typing import NdArray, int32, uint16

pytestmark = [
    pytest.mark.needs("torch", "pyarrow", "fsspec", "xxhash"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata 0.11 calls it; torch 2.13 warns
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork"),
]
LENGTHS = [5, 0, 17, 1, 1, 40, 0, 3, 9, 64, 2, 2, 8, 8, 8, 31, 0, 0, 12, 7, 100, 1, 6, 33, 16, 16, 4, 0]


class Doc(BaseDocument):
    tokens: NdArray[int32, "length"]
    name: str = ""


class ListDoc(BaseDocument):
    tokens: list[int] | None = None
    name: str = ""


class Fixed(BaseDocument):
    tokens: NdArray[uint16, 5]
    name: str = ""


def make_docs(lengths: Iterable[int], document_type: type[Any] = Doc) -> Iterator[Any]:
    """Yield documents whose tokens count from 0 over all of them."""
    start = 0
    for row, length in enumerate(lengths):
        tokens: Any = np.arange(start, start + length, dtype=np.uint16 if document_type is Fixed else np.int32)
        yield document_type(tokens=tokens.tolist() if document_type is ListDoc else tokens, name=f"name {row}")
        start += length


def write_docs(folder: Path, lengths: Iterable[int], document_type: type[Any] = Doc, format: str = "arrow") -> Path:  # noqa: A002
    """Write documents into shards of 10 rows."""
    docs = list(make_docs(lengths, document_type))
    for start in range(0, max(len(docs), 1), 10):
        part = docs[start : start + 10]
        write_dataset(part, folder, document_type, mode="append", format=format, durable=False)
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return open_dataset(write_docs(tmp_path_factory.mktemp("pack") / "d", LENGTHS), Doc)


def packed(source: Any, length: int = 16, batch_size: int = 2, **options: Any) -> PackedDataset[Any]:
    """Open a packed dataset of numpy arrays; padding has the token -1."""
    names = ("split", "long", "dtype", "pad_value")
    packing = {"pad_value": -1, **{name: options.pop(name) for name in names if name in options}}
    options = {"framework": "numpy", "memory_bytes": 2_048, **options}
    document_type = source.document_type if hasattr(source, "document_type") else Doc
    return StreamingDataset[document_type](source, batch_size, **options).pack("tokens", length, **packing)  # type: ignore[valid-type]


def tokens_of(batch: Any) -> list[int]:
    """Return the tokens of a batch without padding, after checking that all columns agree."""
    tokens, ids = np.asarray(batch.tokens), np.asarray(batch.document_ids)
    assert tokens.shape == ids.shape == np.asarray(batch.position_ids).shape
    assert ((tokens == -1) == (ids == -1)).all()
    assert (np.asarray(batch.mask("tokens")) == (ids >= 0)).all()
    assert np.asarray(batch.length).tolist() == (ids >= 0).sum(axis=1).tolist()
    bounds, longest = flatten_cu_seqlens(batch)
    bounds = np.asarray(bounds)
    positions = np.asarray(batch.position_ids).ravel()
    assert bounds.dtype == np.int32
    assert bounds[0] == 0
    assert bounds[-1] == tokens.size
    assert bounds[:-1].tolist() == np.flatnonzero(positions == 0).tolist()
    assert longest == (positions.max() + 1 if positions.size else 0)
    for row in range(len(batch)):
        ends = np.asarray(batch.cu_seqlens[row])
        own = ids[row]
        # Within a piece, there is one document, and its tokens follow each other.
        for begin, end in pairwise(ends.tolist()):
            assert len(set(own[begin:end].tolist())) == 1
            if own[begin] >= 0:
                assert (np.diff(tokens[row, begin:end]) == 1).all()
    return tokens[ids >= 0].tolist()


def sequence(datasets: list[PackedDataset[Any]], steps: int | None = None) -> tuple[list[int], Any]:
    """Take steps on all ranks; return the tokens in the order of the epoch, and the state after them."""
    running = [iter(dataset) for dataset in datasets]
    tokens: list[int] = []
    state = datasets[0].state_dict()
    lengths = {len(dataset) for dataset in datasets}
    assert len(lengths) == 1
    taken = 0
    while steps is None or taken < steps:
        batches = [next(batch, None) for batch in running]
        if batches[0] is None:
            assert all(batch is None for batch in batches)  # ranks take the same number of steps
            break
        taken += 1
        assert all(batch is not None for batch in batches)
        tokens += [token for batch in batches for token in tokens_of(batch)]
        states = [batch.state for batch in batches if batch is not None]
        assert all(each == states[0] for each in states)
        state = states[0]
    return tokens, state


def ranks(source: Any, world: int, **options: Any) -> list[PackedDataset[Any]]:
    return [packed(source, rank=rank, world_size=world, **options) for rank in range(world)]


# --- laws of the arithmetic


class _Lengths:
    """The lengths of rows, without a dataset."""

    path = "tokens"

    def __init__(self, lengths: list[int]) -> None:
        self.prefix = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)

    def __len__(self) -> int:
        return len(self.prefix) - 1

    def lengths(self, rows: Any) -> Any:
        return self.prefix[rows + 1] - self.prefix[rows]

    def between(self, start: int, stop: int) -> Any:
        return np.diff(self.prefix[start : stop + 1])


LENGTH_LISTS = st.lists(st.one_of(st.just(0), st.integers(0, 12), st.integers(0, 90)), max_size=60)


@settings(deadline=None, max_examples=300)
@given(
    lengths=LENGTH_LISTS,
    length=st.integers(1, 40),
    other_length=st.integers(1, 40),
    worlds=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    batch_size=st.integers(1, 4),
    last=st.sampled_from(["keep", "drop", "pad"]),
    shuffle=st.sampled_from([False, "block", "global"]),
    seed=st.integers(0, 2**64 - 1),
    epoch=st.integers(0, 3),
    data=st.data(),
)
def test_blocks_divide_and_resume_the_sequence_of_an_epoch(
    lengths: list[int], length: int, other_length: int, worlds: tuple[int, int], batch_size: int, last: Any,
    shuffle: Any, seed: int, epoch: int, data: Any,
) -> None:  # fmt: skip
    index: Any = _Lengths(lengths)
    order = RowOrder(len(lengths), seed, shuffle, data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9)))
    rows = order.rows(epoch, np.arange(len(lengths)))
    expected = [(row, token) for row in rows.tolist() for token in range(lengths[row])]
    positions = RowOrder(len(expected), shuffle=False)

    def shares(world: int, start: int, length: int) -> list[PackSlice]:
        plan = TokenPlan(index, order, length)
        return [
            PackSlice(positions, epoch, start, r, world, batch_size, last, length=length, plan=plan)
            for r in range(world)
        ]

    def take(shares: list[PackSlice], steps: range) -> list[tuple[int, int]]:
        parts = [part for step in steps for share in shares for part in share.parts([step])]
        for part in parts:
            check_part(part, shares[0].length, shares[0].batch_size, last)
        return [item for part in parts for item in expand(part)]

    first = shares(worlds[0], 0, length)
    assert len({share.steps for share in first}) == 1
    taken = data.draw(st.integers(0, first[0].steps))
    begun = take(first, range(taken))
    assert begun == expected[: len(begun)]
    if taken == first[0].steps:
        if last != "drop":
            assert begun == expected
        else:
            assert len(begun) == len(expected) // length // (batch_size * worlds[0]) * batch_size * worlds[0] * length
        return
    assert len(begun) == taken * worlds[0] * batch_size * length
    rest = shares(worlds[1], len(begun), other_length)
    ended = take(rest, range(rest[0].steps))
    assert begun + ended == expected[: len(begun) + len(ended)]
    if last != "drop":
        assert begun + ended == expected


def expand(part: BlockPart) -> list[tuple[int, int]]:
    pieces = zip(part.rows.tolist(), part.starts.tolist(), part.sizes.tolist(), strict=True)
    return [(row, token) for row, start, size in pieces for token in range(start, start + size)]


def check_part(part: BlockPart, length: int, batch_size: int, last: str) -> None:
    """Pieces are in order, do not overlap, and are within a block."""
    if last == "pad":
        assert part.blocks == batch_size
        assert part.real is not None
    ends = part.places + part.sizes
    assert (part.sizes > 0).all()
    assert (part.places[1:] >= ends[:-1]).all()
    assert (part.places // length == (ends - 1) // length).all()
    assert not len(ends) or ends[-1] <= part.blocks * length


@settings(deadline=None, max_examples=200)
@given(lengths=LENGTH_LISTS, length=st.integers(1, 100))
def test_bins_contain_each_document_once(lengths: list[int], length: int) -> None:
    offsets, rows, starts = pack_bins(_Lengths(lengths), length, split=True)  # type: ignore[arg-type]
    sizes = np.minimum(np.array([lengths[row] for row in rows.tolist()], np.int64) - starts, length)
    tokens = [
        (row, token)
        for row, start, size in zip(rows.tolist(), starts.tolist(), sizes.tolist(), strict=True)
        for token in range(start, start + size)
    ]
    assert sorted(tokens) == [(row, token) for row, size in enumerate(lengths) for token in range(size)]
    fill = np.add.reduceat(sizes, offsets[:-1]) if len(sizes) else sizes
    assert (fill <= length).all()
    assert (np.diff(offsets) > 0).all()
    # Best fit: no two bins fit into one, or a piece of one would have been put into the other.
    assert len(fill) < 2 or np.sort(fill)[:2].sum() > length


def test_lognormal_documents_need_little_padding() -> None:
    lengths = np.maximum(1, np.exp(np.random.default_rng(0).normal(np.log(270), 1.1, 50_000)).astype(np.int64))
    for length, most in ((2_048, 0.001), (8_192, 0.002)):
        offsets, _, _ = pack_bins(_Lengths(lengths.tolist()), length, split=True)  # type: ignore[arg-type]
        assert 1 - lengths.sum() / ((len(offsets) - 1) * length) <= most


def test_windows_of_bins_contain_each_document_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_packing, "_BIN_WINDOW", 5)
    offsets, rows, starts = pack_bins(_Lengths(LENGTHS), 16, split=True)  # type: ignore[arg-type]
    pieces = sorted(zip(rows.tolist(), starts.tolist(), strict=True))
    assert pieces == [(row, start) for row, length in enumerate(LENGTHS) for start in range(0, length, 16)]
    ends = [len(LENGTHS) * window // 6 for window in range(1, 7)]
    windows = [set(np.searchsorted(ends, rows[a:b], "right").tolist()) for a, b in pairwise(offsets.tolist())]
    assert all(len(own) == 1 for own in windows), "a bin has documents of one window"


def test_bins_are_ordered_like_their_rows() -> None:
    assert _order_bins(RowOrder(100, 3, "block", 10, 4), 50) == RowOrder(50, 3, "block", 5, 4)
    assert _order_bins(RowOrder(100, 3, "block", 10, 4), 9) == RowOrder(9, 3, "block", 1, 4)
    assert _order_bins(RowOrder(100, 3, "block", 50, 4), 7) == RowOrder(7, 3, "block", 3, 3)
    lanes = _order_bins(InterleavedOrder(np.array([0, 40, 60, 100]), 2), 50)
    assert lanes.size == 50
    assert lanes.blocks.starts.tolist() == [0, 20, 30, 50]  # type: ignore[attr-defined]


# --- laws of datasets


@settings(deadline=None, max_examples=60)
@given(
    length=st.integers(1, 80),
    batch_size=st.integers(1, 5),
    world=st.integers(1, 4),
    last=st.sampled_from(["keep", "pad", "drop"]),
    shuffle=st.sampled_from([False, "block", "global"]),
    seed=st.integers(0, 9),
    split=st.booleans(),
)
def test_every_token_comes_once(source: Any, world: int, split: bool, last: str, **options: Any) -> None:
    more = {} if split else {"long": "split"}
    datasets = ranks(source, world, split=split, last=last, **more, **options)
    tokens, state = sequence(datasets)
    assert len(set(tokens)) == len(tokens)
    if last != "drop":
        assert sorted(tokens) == list(range(sum(LENGTHS)))
    assert len(json.dumps(state)) < 200
    if options["shuffle"] is False and split:
        assert tokens == list(range(len(tokens)))


@pytest.mark.parametrize("shuffle", ["global", "interleaved"])
def test_tokens_do_not_depend_on_the_size_of_spans(source: Any, shuffle: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"length": 10, "batch_size": 2, "shuffle": shuffle, "seed": 4}
    expected, _ = sequence(ranks(source, 2, **options))
    monkeypatch.setattr(_packing, "_CHUNK", 5)
    assert sequence(ranks(source, 2, **options))[0] == expected


@settings(deadline=None, max_examples=60)
@given(
    worlds=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    batch_sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    lengths=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    shuffle=st.sampled_from([False, "block", "global"]),
    split=st.booleans(),
    steps=st.integers(0, 40),
)
def test_resumed_tokens_continue_the_epoch(
    source: Any, worlds: Any, batch_sizes: Any, lengths: Any, split: bool, steps: int, **options: Any
) -> None:
    if not split:
        lengths = (lengths[0], lengths[0])
        options["long"] = "split"
    options["split"] = split
    whole, _ = sequence(ranks(source, 1, length=lengths[0], batch_size=1, **options))
    first = ranks(source, worlds[0], length=lengths[0], batch_size=batch_sizes[0], **options)
    begun, state = sequence(first, min(steps, len(first[0])))
    assert begun == whole[: len(begun)]
    rest = ranks(source, worlds[1], length=lengths[1], batch_size=batch_sizes[1], **options)
    for dataset in rest:
        dataset.load_state_dict(json.loads(json.dumps(state)))
    ended, _ = sequence(rest)
    if len(begun) == len(whole):  # the next epoch
        assert rest[0].epoch == 2
        assert sorted(ended) == sorted(whole)
    else:
        assert begun + ended == whole


@settings(deadline=None, max_examples=15)
@given(lengths=LENGTH_LISTS.filter(any), document_type=st.sampled_from([Doc, ListDoc]), split=st.booleans())
def test_documents_of_any_lengths_are_packed(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], document_type: type[Any], split: bool
) -> None:
    folder = write_docs(tmp_path_factory.mktemp("pack") / "d", lengths, document_type)
    dataset = StreamingDataset[document_type](folder, 3, framework="numpy", missing="mask")  # type: ignore[valid-type]
    blocks = dataset.pack("tokens", 90, split=split, pad_value=-1)
    names, tokens = [], []
    for batch in blocks:
        tokens += tokens_of(batch)
        names += batch.documents.name
        ids = batch.document_ids
        for row in range(len(batch)):
            own = [f"name {ids[row, at]}" for at in np.flatnonzero(ids[row] >= 0)]
            assert set(batch.documents[row].name) <= set(own)
    assert sorted(tokens) == list(range(sum(lengths)))
    assert sorted(names) == sorted(f"name {row}" for row, length in enumerate(lengths) if length)


class PackingMachine(RuleBasedStateMachine):
    """Training on packed tokens that is interrupted at any step, and resumed with other ranks and block lengths."""

    source: Any

    @initialize(shuffle=st.sampled_from([False, "block", "global"]), split=st.booleans(), seed=st.integers(0, 3))
    def begin(self, shuffle: Any, split: bool, seed: int) -> None:
        """Open the dataset."""
        self.options: dict[str, Any] = {"shuffle": shuffle, "split": split, "seed": seed}
        if not split:
            self.options["long"] = "split"
        self.epoch, self.tokens, self.expected = 0, list[int](), list[int]()
        self._open(1, 2, 16)
        self._expect()

    def _open(self, world: int, batch_size: int, length: int) -> None:
        self.datasets = ranks(self.source, world, batch_size=batch_size, length=length, **self.options)
        self.running: list[Any] | None = None

    def _expect(self) -> None:
        [alone] = ranks(self.source, 1, batch_size=1, length=16, **self.options)
        alone.set_epoch(self.epoch)
        self.expected, _ = sequence([alone])

    @rule(steps=st.integers(1, 6))
    def train(self, steps: int) -> None:
        """Take steps; after the last one of an epoch, the next epoch begins."""
        for _ in range(steps):
            self.running = self.running or [iter(dataset) for dataset in self.datasets]
            batches = [next(batch, None) for batch in self.running]
            if batches[0] is None:
                assert self.tokens == self.expected
                self.epoch, self.tokens, self.running = self.epoch + 1, [], None
                self._expect()
                return
            self.tokens += [token for batch in batches for token in tokens_of(batch)]

    @rule(world=st.integers(1, 4), batch_size=st.integers(1, 3), length=st.sampled_from([7, 16, 33]))
    def resume(self, world: int, batch_size: int, length: int) -> None:
        """Continue from the state with other ranks."""
        state = self.datasets[-1].state_dict()
        if self.running is not None and len(self.tokens) == len(self.expected):
            # At the end of an epoch, a new process begins the next one.
            self.epoch, self.tokens = self.epoch + 1, []
            self._expect()
        self._open(world, batch_size, length if self.options["split"] else 16)
        for dataset in self.datasets:
            dataset.load_state_dict(json.loads(json.dumps(state)))

    @precondition(lambda self: hasattr(self, "expected"))
    @invariant()
    def tokens_are_those_of_the_epoch(self) -> None:
        """The tokens so far begin the sequence of the epoch."""
        assert self.tokens == self.expected[: len(self.tokens)]


def test_interrupted_training_takes_the_tokens_of_each_epoch_in_order(source: Any) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    machine = type("Machine", (PackingMachine,), {"source": source})
    run_state_machine_as_test(machine, settings=settings(deadline=None, max_examples=25, stateful_step_count=15))


# --- orders are a file format: a state of another version must mean the same tokens


def test_order_of_tokens_never_changes() -> None:
    results = {}
    for shuffle in ("block", "global"):
        order = RowOrder(len(LENGTHS), 7, shuffle, 3, 4)  # type: ignore[arg-type]
        plan = TokenPlan(_Lengths(LENGTHS), order, 100)  # type: ignore[arg-type]
        share = PackSlice(RowOrder(sum(LENGTHS), shuffle=False), 1, 0, 0, 1, 3, "keep", length=100, plan=plan)
        [part] = share.parts([0])
        results[shuffle] = [part.rows.tolist(), part.starts.tolist(), part.sizes.tolist()]
    assert results == {
        "block": [
            [2, 9, 18, 15, 15, 10, 20, 20, 11, 0, 19, 24, 5, 7, 26],
            [0, 0, 0, 0, 7, 0, 0, 74, 0, 0, 0, 0, 0, 0, 0],
            [17, 64, 12, 7, 24, 2, 74, 26, 2, 5, 7, 16, 40, 3, 1],
        ],
        "global": [
            [11, 5, 7, 3, 9, 9, 23, 25, 2, 18, 19, 10, 8, 8, 20],
            [0, 0, 0, 0, 0, 54, 0, 0, 0, 0, 0, 0, 0, 3, 0],
            [2, 40, 3, 1, 54, 10, 33, 16, 17, 12, 7, 2, 3, 6, 94],
        ],
    }


def test_order_of_bins_never_changes() -> None:
    offsets, rows, starts = pack_bins(_Lengths(LENGTHS), 48, split=True)  # type: ignore[arg-type]
    assert offsets.tolist() == [0, 8, 10, 15, 17, 20, 21, 24, 25, 26]
    expected = [0, 3, 8, 13, 14, 19, 20, 22, 2, 15, 4, 10, 11, 21, 26, 5, 12, 7, 18, 23, 9, 9, 24, 25, 20, 20]
    assert rows.tolist() == expected
    assert np.flatnonzero(starts).tolist() == [6, 21, 25]
    assert starts[[6, 21, 25]].tolist() == [96, 48, 48]


def test_state_of_an_earlier_version_is_read(source: Any) -> None:
    dataset = packed(source, 16, 2, shuffle=False)
    next(batches := iter(dataset))
    state = dataset.state_dict()
    assert state.pop("dataset_version") > 0  # earlier states do not have it
    assert {**state, "order": ""} == {
        "pack": 1, "position": [0, 0, 1, 0, 0, 1, 0], "division": [1, 2, 16, "keep"], "size": sum(LENGTHS), "order": ""
    }  # fmt: skip
    assert tokens_of(next(batches)) == list(range(32, 64))
    again = packed(source, 16, 2, shuffle=False)
    again.load_state_dict(state)
    assert tokens_of(next(iter(again))) == list(range(32, 64))


def test_state_resumes_in_a_pass_of_other_epochs(source: Any) -> None:
    steps = len(packed(source))
    for epochs in (2, None):
        *_, before = (batch.state for _, batch in zip(range(steps + 3), packed(source, epochs=epochs), strict=False))
        later = packed(source)
        later.load_state_dict(before)
        assert len(later) == steps, "the second epoch is a pass of its own, of which 3 steps were taken"
        assert len(list(later)) == steps - 3
    endless = packed(source, epochs=None)
    endless.load_state_dict(before)
    assert endless.epoch == 1
    assert len(list(zip(range(2 * steps), endless, strict=False))) == 2 * steps


@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_states_of_workers_are_combined(source: Any, workers: int, epochs: int) -> None:
    options = {"batch_size": 5, "epochs": epochs}
    expected = [tokens_of(batch) for batch in packed(source, **options)]
    stream = packed(source, **options)._stream
    first = stream.state_dict()
    states = [[first, *(batch.state for batch in stream.batches(own, workers, 1))] for own in range(workers)]
    for yielded in range(len(expected) + 1):
        for later in range(min(3, yielded + 1)):
            steps = [len(range(worker, yielded - later, workers)) for worker in range(workers)]
            snapshots = {
                f"worker_{worker}": {"dataset_state": json.loads(json.dumps(states[worker][step]))}
                for worker, step in enumerate(steps)
            }
            resumed = packed(source, **options)
            resumed.load_state_dict({"_snapshot": {"_worker_snapshots": snapshots}, "_steps_since_snapshot": later})
            if yielded < len(expected):
                assert tokens_of(next(iter(resumed))) == expected[yielded]
            else:
                assert resumed.epoch == epochs, "the pass was complete"


def test_stored_order_resumes_with_another_seed(source: Any) -> None:
    dataset = packed(source, shuffle=False, seed=1)
    tokens_before = tokens_of(next(iter(dataset)))
    other = packed(source, shuffle=False, seed=2, memory_bytes=1 << 20)
    other.load_state_dict(dataset.state_dict())
    assert tokens_of(next(iter(other)))[0] == tokens_before[-1] + 1


def test_state_and_groups_are_bounded(source: Any) -> None:
    assert len(packed(source).state_dict()["order"]) == 16
    # A block of 16 tokens takes 4 bytes a token, and 8 each for position and document; a group has half of the memory.
    for number in (1, 3, 16):
        assert packed(source, memory_bytes=2 * 2 * 16 * 20 * number)._stream._group_size == number
    assert packed(source, memory_bytes=1 << 30)._stream._group_size == 16


# --- batches


def test_batch_has_documents_that_begin_in_a_block(source: Any) -> None:
    [batch, *_] = packed(source, 16, 2, shuffle=False)
    assert batch.document_ids[0].tolist() == [0] * 5 + [2] * 11
    assert batch.document_ids[1].tolist() == [2] * 6 + [3, 4] + [5] * 8
    assert batch.position_ids[1].tolist() == [*range(6), 0, 0, *range(8)]
    assert batch.documents[0].name == ["name 0", "name 2"]
    assert batch.documents[1].name == ["name 3", "name 4", "name 5"]
    assert "tokens" not in batch.documents.flat.schema.by_name
    assert [ends.tolist() for ends in batch.column("cu_seqlens").values()] == [[0, 5, 16], [0, 6, 7, 8, 16]]
    assert batch.document_type is TokenBlock[Doc]
    assert flatten_cu_seqlens(batch)[0].tolist() == [0, 5, 16, 22, 23, 24, 32]
    assert flatten_cu_seqlens(batch)[1] == 11


def test_incomplete_block_is_padded(source: Any) -> None:
    *_, batch = packed(source, 100, 8, shuffle=False, pad_value=9)
    padding = -sum(LENGTHS) % 100
    assert batch.tokens[-1, -padding:].tolist() == [9] * padding
    assert batch.document_ids[-1, -padding:].tolist() == [-1] * padding
    assert batch.length.tolist()[-1] == 100 - padding
    assert batch.tokens.shape == (len(batch), 100)


def test_padded_batches_have_empty_blocks(source: Any) -> None:
    blocks = [batch for rank in range(3) for batch in packed(source, 50, 3, last="pad", rank=rank, world_size=3)]
    assert {len(batch) for batch in blocks} == {3}
    masks = np.concatenate([batch.mask() for batch in blocks])
    assert masks.sum() == -(-sum(LENGTHS) // 50)
    lengths = np.concatenate([np.asarray(batch.length) for batch in blocks])
    assert (lengths[~masks] == 0).all()


def test_tokens_are_torch_tensors_of_the_wanted_dtype(source: Any) -> None:
    [batch, *_] = packed(source, 16, 2, framework="torch", dtype="int64", pad_value=-100)
    assert isinstance(batch.tokens, torch.Tensor)
    assert batch.tokens.dtype == batch.position_ids.dtype == batch.document_ids.dtype == torch.int64
    bounds, _ = flatten_cu_seqlens(batch)
    assert bounds.dtype == torch.int32


def test_whole_documents_stay_whole(source: Any) -> None:
    for batch in packed(source, 100, 2, split=False):
        for row in range(len(batch)):
            ids = batch.document_ids[row]
            for document in set(ids[ids >= 0].tolist()):
                assert (ids == document).sum() == LENGTHS[document]


def test_long_document_is_an_error_or_split(source: Any) -> None:
    with pytest.raises(OptionError, match=r"row 9 has 64 tokens, and a block has 50.*long='split'"):
        packed(source, 50, split=False)
    tokens = [token for batch in packed(source, 50, split=False, long="split") for token in tokens_of(batch)]
    assert sorted(tokens) == list(range(sum(LENGTHS)))


# --- sources


@pytest.mark.parametrize("format", ["arrow", "parquet"])
@pytest.mark.parametrize("document_type", [Doc, ListDoc, Fixed])
def test_lists_and_tensors_are_packed(tmp_path: Path, document_type: type[Any], format: str) -> None:  # noqa: A002
    lengths = [5] * 25 if document_type is Fixed else LENGTHS
    folder = write_docs(tmp_path / "d", lengths, document_type, format)
    dataset = StreamingDataset[document_type](folder, 2, framework="numpy", missing="mask")  # type: ignore[valid-type]
    tokens = [int(token) for batch in dataset.pack("tokens", 16) for token in batch.tokens[batch.document_ids >= 0]]
    assert sorted(tokens) == list(range(sum(lengths)))


def test_rows_without_tokens_have_none(tmp_path: Path) -> None:
    docs = [ListDoc(tokens=[1, 2]), ListDoc(), ListDoc(tokens=[]), ListDoc(tokens=[3])]
    write_dataset(docs, tmp_path / "d", ListDoc, format="arrow")
    [batch] = StreamingDataset[ListDoc](tmp_path / "d", 1, shuffle=False, missing="mask").pack("tokens", 4)
    assert batch.tokens.tolist() == [[1, 2, 3, 0]]
    assert batch.document_ids.tolist() == [[0, 0, 3, -1]]


def test_missing_values_of_other_fields_are_filled(tmp_path: Path) -> None:
    class Scored(Doc):
        score: float | None = None

    docs = [Scored(tokens=doc.tokens, score=None if row % 2 else row) for row, doc in enumerate(make_docs([3] * 6))]
    write_dataset(docs, tmp_path / "d", Scored, format="arrow")
    dataset = StreamingDataset[Scored](tmp_path / "d", 2, shuffle=False, missing={"score": -1.0})
    [batch] = dataset.pack("tokens", 16)
    assert batch.documents.score.tolist() == [0, -1, 2, -1, 4, -1]


def test_selected_rows_are_packed(source: Any) -> None:
    chosen = {"name": {"$in": ["name 2", "name 5"]}}
    [batch] = packed(source.folder.url, 60, 1, where=chosen, shuffle=False)
    assert batch.tokens.shape == (1, 60)
    assert tokens_of(batch) == [*range(5, 22), *range(24, 64)]
    assert sorted(set(batch.document_ids[0].tolist())) == [-1, 0, 1]


def test_files_of_other_tools_are_packed(tmp_path: Path) -> None:
    rows = [[1, 2, 3], [], None, [4, 5]]
    table = pa.table({"tokens": pa.array(rows, pa.list_(pa.int32())), "name": ["a", "b", "c", "d"]})
    pq.write_table(table, tmp_path / "file.parquet")
    [batch] = StreamingDataset[ListDoc](tmp_path, 1, shuffle=False, missing="mask").pack("tokens", 6)
    assert batch.tokens.tolist() == [[1, 2, 3, 4, 5, 0]]
    assert batch.documents.name == ["a", "d"]


def test_lengths_are_stored_with_the_dataset(source: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.storage import ShardReader

    monkeypatch.setattr(ShardReader, "read", None)  # no column is read
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path))
    assert source._row_reader.row_lengths("tokens").tolist() == LENGTHS
    assert tokens_of(next(iter(packed(source.folder.url, 16, 1, shuffle=False)))) == list(range(16))


def test_computed_lengths_are_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.storage import RowReader

    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "cache"))
    folder = write_docs(tmp_path / "d", LENGTHS)
    calls: list[str] = []
    compute = RowReader.row_lengths
    monkeypatch.setattr(RowReader, "row_lengths", lambda self, path: calls.append(path) or compute(self, path))
    first = [tokens_of(batch) for batch in packed(folder, split=False, long="split")]
    assert [tokens_of(batch) for batch in packed(folder, split=False, long="split")] == first
    assert calls == ["tokens"]
    # A damaged file is computed again, and never used.
    for file in (tmp_path / "cache" / "shards").iterdir():
        if file.is_file() and not file.name.endswith(".lock"):
            content = bytearray(file.read_bytes())
            content[-1] ^= 1
            file.write_bytes(content)
    assert [tokens_of(batch) for batch in packed(folder, split=False, long="split")] == first
    assert calls == ["tokens"] * 2


def test_small_cache_does_not_prevent_packing(tmp_path: Path) -> None:
    from quire.storage import ReadOptions

    folder = write_docs(tmp_path / "d", LENGTHS)
    storage = ReadOptions(cache=tmp_path / "cache", cache_bytes=8)
    tokens = [token for batch in packed(folder, storage=storage) for token in tokens_of(batch)]
    assert sorted(tokens) == list(range(sum(LENGTHS)))


def test_altered_lengths_are_detected(tmp_path: Path) -> None:
    class Wide(BaseDocument):
        tokens: NdArray[int32, "length", "width"]

    write_dataset([Wide(tokens=np.zeros((3, 2), np.int32))], tmp_path / "d", Wide, format="arrow")
    with pytest.raises(ShardError, match="a row has 6 elements, and 3 were expected"):
        list(StreamingDataset[Wide](tmp_path / "d", 1).pack("tokens", 4))


# --- loaders


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_data_loader_returns_the_same_batches(source: Any, workers: int, context: str) -> None:
    whole = [tokens_of(batch) for batch in packed(source, framework="torch")]
    blocks = packed(source, framework="torch")
    how: dict[str, Any] = {"multiprocessing_context": context} if workers else {}
    loader = DataLoader(blocks, batch_size=None, num_workers=workers, **how)  # type: ignore[arg-type]
    first, *rest = list(loader)
    assert [tokens_of(batch) for batch in (first, *rest)] == whole
    later = packed(source, framework="torch")
    later.load_state_dict(first.state)
    assert [tokens_of(batch) for batch in DataLoader(later, batch_size=None, num_workers=workers, **how)] == whole[1:]  # type: ignore[arg-type]


@pytest.mark.needs("torchdata")
@pytest.mark.parametrize("workers", [0, 2])
def test_stateful_loader_resumes_where_it_was(source: Any, workers: int) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    whole = [tokens_of(batch) for batch in packed(source, framework="torch")]
    loader = StatefulDataLoader(packed(source, framework="torch"), batch_size=None, num_workers=workers)  # type: ignore[arg-type]
    batches = iter(loader)
    first = [tokens_of(next(batches)) for _ in range(3)]
    state = loader.state_dict()
    loader = StatefulDataLoader(packed(source, framework="torch"), batch_size=None, num_workers=workers)  # type: ignore[arg-type]
    loader.load_state_dict(state)
    assert first + [tokens_of(batch) for batch in loader] == whole
    # The state of the loader is also one for the dataset, with another number of workers.
    blocks = packed(source, framework="torch")
    blocks.load_state_dict(state)
    assert first + [tokens_of(batch) for batch in blocks] == whole


def test_loader_threads_return_the_same_batches(source: Any) -> None:
    whole = [[tokens_of(batch) for batch in dataset] for dataset in [packed(source)] * 2]
    blocks = packed(source)
    assert [[tokens_of(batch) for batch in blocks.loader(threads=2)] for _ in range(2)] == whole
    assert whole[0] != whole[1]
    blocks = packed(source, epochs=2)
    assert [tokens_of(batch) for batch in blocks.loader()] == whole[0] + whole[1]
    assert len(blocks) == len(whole[0]) + len(whole[1])


def test_packed_dataset_is_pickled(source: Any) -> None:
    for split in (True, False):
        blocks = packed(source, split=split, length=100)
        again = pickle.loads(pickle.dumps(blocks))
        assert [tokens_of(batch) for batch in again] == [tokens_of(batch) for batch in blocks]
        assert repr(blocks) == f"<PackedDataset of {sum(LENGTHS)} tokens in blocks of 100>"


def test_packing_does_not_change_the_dataset(source: Any) -> None:
    dataset = StreamingDataset[Doc](source, 4, shapes="pad")
    state, steps = dataset.state_dict(), len(dataset)
    blocks = dataset.pack("tokens", 16)
    list(blocks)
    assert (dataset.state_dict(), len(dataset)) == (state, steps)
    assert blocks.num_tokens == sum(LENGTHS)
    assert blocks.num_blocks == -(-sum(LENGTHS) // 16)
    assert blocks.batch_size == 4


def test_batches_are_converted_to_a_framework(source: Any) -> None:
    [batch, *_] = packed(source).iter_batches("torch")
    assert isinstance(batch.tokens, torch.Tensor)


# --- errors


def test_state_of_another_order_is_rejected(source: Any) -> None:
    state = packed(source).state_dict()
    for other in (packed(source, seed=1), packed(source, shuffle=False), packed(source, 100, split=False)):
        with pytest.raises(OptionError, match="tokens in another order"):
            other.load_state_dict(state)
    with pytest.raises(OptionError, match="no state of a PackedDataset"):
        packed(source).load_state_dict(StreamingDataset[Doc](source, 2, shapes="pad").state_dict())
    with pytest.raises(OptionError, match="no state of a StreamingDataset"):
        StreamingDataset[Doc](source, 2, shapes="pad").load_state_dict(state)
    for damaged in ({**state, "position": [0]}, {**state, "position": [-1] * 7}, {"pack": 1}):
        with pytest.raises(OptionError, match="damaged"):
            packed(source).load_state_dict(damaged)


def test_wrong_options_are_rejected(source: Any, tmp_path: Path) -> None:
    dataset = StreamingDataset[Doc](source, 2)
    with pytest.raises(OptionError, match="a block has at least one token"):
        dataset.pack("tokens", 0)
    with pytest.raises(PathError, match="tokes"):
        dataset.pack("tokes", 8)
    with pytest.raises(OptionError, match="no sequence of numbers"):
        dataset.pack("name", 8)

    class Nested(BaseDocument):
        doc: Doc

    write_dataset([Nested(doc=doc) for doc in make_docs([3])], tmp_path / "nested", Nested)
    with pytest.raises(OptionError, match="not of nested ones"):
        StreamingDataset[Nested](tmp_path / "nested", 2).pack("doc.tokens", 8)
    with pytest.raises(OptionError, match="use 'raise' or 'split'"):
        dataset.pack("tokens", 8, split=False, long="cut")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="is for whole documents"):
        dataset.pack("tokens", 8, long="split")
    with pytest.raises(OptionError, match="not every value fits"):
        dataset.pack("tokens", 8, dtype="int16")
    with pytest.raises(OptionError, match="is no dtype"):
        dataset.pack("tokens", 8, dtype="token")
    with pytest.raises(OptionError, match="pad_value=0.5 does not fit"):
        dataset.pack("tokens", 8, pad_value=0.5)
    with pytest.raises(OptionError, match="on_error='skip' would change the lengths"):
        StreamingDataset[Doc](source, 2, on_error="skip").pack("tokens", 8)
    with pytest.raises(OptionError, match="preprocessing and output"):
        StreamingDataset[Doc](source, 2, preprocessing={"name": str.upper}).pack("tokens", 8)
    with pytest.raises(OptionError, match="nothing to bucket"):
        StreamingDataset[Doc](source, 2, bucket_by="tokens").pack("tokens", 8)

    class Untyped(BaseDocument):
        tokens: NdArray
        maybe: list[int | None] = []

    write_dataset([Untyped(tokens=np.zeros(3))], tmp_path / "d", Untyped)
    with pytest.raises(OptionError, match="Declare it"):
        StreamingDataset[Untyped](tmp_path / "d", 1).pack("tokens", 8)
