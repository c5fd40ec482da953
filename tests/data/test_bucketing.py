"""Batches of rows of similar lengths: `bucket_by` and `max_tokens`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from quire import BaseDocument
from quire.data import MixedDataset, StreamingDataset
from quire.data._bucketing import BucketOrder, cut_batches
from quire.errors import OptionError, PathError
from quire.storage import open_dataset, write_dataset
from quire.typing import NdArray, int32

pytestmark = [
    pytest.mark.needs("torch", "pyarrow", "fsspec", "xxhash"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata 0.11 calls it; torch 2.13 warns
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork"),
]
ROWS = 611
LENGTHS = np.minimum(np.exp(np.random.default_rng(1).normal(2.5, 1.0, ROWS)), 200).astype(int).tolist()


class Sentence(BaseDocument):
    number: int
    tokens: NdArray[int32, "length"]
    size: int


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("bucket") / "d"
    rows = [Sentence(number=i, tokens=np.arange(n, dtype=np.int32), size=n) for i, n in enumerate(LENGTHS)]
    for start in range(0, ROWS, 100):
        write_dataset(rows[start : start + 100], folder, Sentence, mode="append", format="arrow", durable=False)
    return open_dataset(folder, Sentence)


def bucketed(source: Any, batch_size: int = 8, **options: Any) -> StreamingDataset[Sentence]:
    options = {"framework": "numpy", "shapes": "pad", "bucket_by": "tokens", **options}
    return StreamingDataset[Sentence](source, batch_size, **options)


def numbers(batch: Any) -> list[int]:
    """Return the rows of a batch without padding, after checking that they are padded to the longest."""
    if len(batch):
        assert np.asarray(batch.tokens).shape == (len(batch), max(LENGTHS[row] for row in batch.number.tolist()))
    return batch.number[batch.mask()].tolist()  # type: ignore[no-any-return]


def run(datasets: list[StreamingDataset[Sentence]], steps: int | None = None) -> tuple[list[int], Any]:
    """Take steps on all ranks; return the rows in the order of the epoch, and the state after them."""
    running = [iter(dataset) for dataset in datasets]
    rows: list[int] = []
    state, taken = datasets[0].state_dict(), 0
    assert len({len(dataset) for dataset in datasets}) == 1
    while steps is None or taken < steps:
        batches = [next(batch, None) for batch in running]
        if batches[0] is None:
            assert all(batch is None for batch in batches)
            break
        taken += 1
        assert all(batch is not None for batch in batches)
        rows += [row for batch in batches for row in numbers(batch)]
        state = batches[0].state
    return rows, state


def ranks(source: Any, world: int, **options: Any) -> list[StreamingDataset[Sentence]]:
    return [bucketed(source, rank=rank, world_size=world, **options) for rank in range(world)]


OPTIONS = {
    "shuffle": st.sampled_from(["block", "global"]),
    "seed": st.integers(0, 9),
    "max_tokens": st.one_of(st.none(), st.integers(200, 2_000)),
    "batch_size": st.integers(1, 40),
    "bucket_by": st.sampled_from(["tokens", "size"]),
}


@settings(deadline=None, max_examples=40)
@given(world=st.integers(1, 5), last=st.sampled_from(["keep", "drop", "pad"]), epoch=st.integers(0, 2), **OPTIONS)
def test_every_row_comes_once(source: Any, world: int, last: str, epoch: int, **options: Any) -> None:
    datasets = ranks(source, world, last=last, **options)
    for dataset in datasets:
        dataset.set_epoch(epoch)
    rows, _ = run(datasets)
    assert len(set(rows)) == len(rows)
    if last != "drop":
        assert sorted(rows) == list(range(ROWS))


@settings(deadline=None, max_examples=40)
@given(worlds=st.tuples(st.integers(1, 4), st.integers(1, 4)), steps=st.integers(0, 30), **OPTIONS)
def test_resumed_rows_continue_the_epoch(source: Any, worlds: tuple[int, int], steps: int, **options: Any) -> None:
    whole, _ = run(ranks(source, 1, **options))
    first = ranks(source, worlds[0], **options)
    begun, state = run(first, min(steps, len(first[0])))
    assert begun == whole[: len(begun)]
    rest = ranks(source, worlds[1], **options)
    for dataset in rest:
        dataset.load_state_dict(json.loads(json.dumps(state)))
    ended, _ = run(rest)
    assert sorted(ended) == list(range(ROWS)) if len(begun) == ROWS else begun + ended == whole


@settings(deadline=None, max_examples=40)
@given(batch_size=st.integers(1, 20), shuffle=st.sampled_from(["block", "global"]), epoch=st.integers(0, 5))
def test_padding_is_bounded(source: Any, batch_size: int, shuffle: str, epoch: int) -> None:
    dataset = bucketed(source, batch_size, shuffle=shuffle)
    dataset.set_epoch(epoch)
    batches = [[LENGTHS[row] for row in batch.number.tolist()] for batch in dataset]
    for start in range(0, len(batches), 128):
        span = batches[start : start + 128]
        padding = sum(max(lengths) * len(lengths) - sum(lengths) for lengths in span)
        assert padding <= batch_size * max(map(max, span))


@settings(deadline=None, max_examples=40)
@given(max_tokens=st.integers(200, 3_000), batch_size=st.integers(1, 50), world=st.integers(1, 4))
def test_batches_have_at_most_max_tokens(source: Any, max_tokens: int, batch_size: int, world: int) -> None:
    for dataset in ranks(source, world, max_tokens=max_tokens, batch_size=batch_size):
        for batch in dataset:
            assert np.asarray(batch.tokens).size <= max_tokens
            assert len(batch) <= batch_size


class Lengths:
    """The lengths of rows, without a dataset."""

    path = "tokens"

    def __init__(self, lengths: list[int]) -> None:
        self._lengths = np.array(lengths, np.int64)
        self.kept: dict[Any, Any] = {}

    def __len__(self) -> int:
        return len(self._lengths)

    def lengths(self, rows: Any) -> Any:
        return self._lengths[rows]

    def between(self, start: int, stop: int) -> Any:
        return self._lengths[start:stop]


@settings(deadline=None, max_examples=100)
@given(
    lengths=st.lists(st.integers(0, 50), max_size=200),
    max_tokens=st.integers(50, 300),
    max_rows=st.integers(1, 20),
    seed=st.integers(0, 2**64 - 1),
)
def test_batches_are_as_large_as_fits(lengths: list[int], max_tokens: int, max_rows: int, seed: int) -> None:
    offsets, rows = cut_batches(Lengths(lengths), max_tokens, max_rows, seed)  # type: ignore[arg-type]
    assert sorted(rows.tolist()) == list(range(len(lengths)))
    batches = np.split(rows, offsets[1:-1]) if len(rows) else []
    for number, batch in enumerate(batches):
        longest = max(1, *(lengths[row] for row in batch))
        assert longest * len(batch) <= max_tokens
        assert len(batch) <= max_rows
        if number < len(batches) - 1:
            assert len(batch) == max_rows or longest * (len(batch) + 1) > max_tokens


def test_batches_differ_between_epochs_and_seeds(source: Any) -> None:
    for max_tokens in (None, 500):
        dataset = bucketed(source, max_tokens=max_tokens)
        first, second = ([numbers(batch) for batch in dataset] for _ in range(2))
        assert first != second
        assert [numbers(batch) for batch in bucketed(source, max_tokens=max_tokens, seed=1)] != first
        assert [numbers(batch) for batch in bucketed(source, max_tokens=max_tokens)] == first


def test_order_never_changes() -> None:
    order = BucketOrder(20, 3, "block", 3, 4, Lengths(LENGTHS[:20]), 4)
    assert [order.rows(1, np.arange(start, start + 4)).tolist() for start in range(0, 20, 4)] == [
        [3, 18, 12, 14],
        [6, 17, 19, 13],
        [11, 15, 1, 4],
        [8, 0, 5, 7],
        [16, 10, 2, 9],
    ]
    offsets, rows = cut_batches(Lengths(LENGTHS[:20]), 40, 6, 3)  # type: ignore[arg-type]
    assert offsets.tolist() == [0, 1, 2, 3, 4, 5, 7, 9, 11, 14, 18, 20]
    assert rows.tolist() == [4, 1, 15, 7, 11, 5, 8, 0, 9, 2, 10, 16, 13, 17, 19, 14, 6, 18, 12, 3]


@pytest.mark.parametrize("context", ["fork", "spawn"])
@pytest.mark.parametrize("max_tokens", [None, 500])
def test_data_loader_returns_the_same_batches(source: Any, max_tokens: int | None, context: str) -> None:
    whole = [numbers(batch) for batch in bucketed(source, max_tokens=max_tokens, framework="torch")]
    dataset = bucketed(source, max_tokens=max_tokens, framework="torch")
    loader: Any = DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context=context)
    assert [numbers(batch) for batch in loader] == whole
    assert [numbers(batch) for batch in bucketed(source, max_tokens=max_tokens).loader(threads=2)] == whole


@pytest.mark.needs("torchdata")
@pytest.mark.parametrize("max_tokens", [None, 500])
def test_stateful_loader_resumes_where_it_was(source: Any, max_tokens: int | None) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    def open_loader() -> Any:
        dataset: Any = bucketed(source, max_tokens=max_tokens, framework="torch")
        return StatefulDataLoader(dataset, batch_size=None, num_workers=2)

    whole = [numbers(batch) for batch in bucketed(source, max_tokens=max_tokens)]
    loader = open_loader()
    batches = iter(loader)
    first = [numbers(next(batches)) for _ in range(5)]
    state = loader.state_dict()
    loader = open_loader()
    loader.load_state_dict(state)
    assert first + [numbers(batch) for batch in loader] == whole


def test_damaged_shards_are_skipped(tmp_path: Path) -> None:
    rows = [Sentence(number=i, tokens=np.arange(n, dtype=np.int32), size=n) for i, n in enumerate(LENGTHS)]
    for start in range(0, 40, 10):
        write_dataset(rows[start : start + 10], tmp_path / "d", Sentence, mode="append", format="arrow")
    damaged = bucketed(tmp_path / "d", max_tokens=500, on_error="skip")
    file = sorted((tmp_path / "d").glob("*.arrow"))[1]
    file.write_bytes(b"nothing")
    rows_read = sorted(row for batch in damaged for row in numbers(batch))
    assert rows_read == [*range(10), *range(20, 40)]
    assert len(damaged.errors) == 1


def test_wrong_options_are_rejected(source: Any) -> None:
    with pytest.raises(OptionError, match="name it with bucket_by"):
        bucketed(source, bucket_by=None, max_tokens=100)
    with pytest.raises(OptionError, match="shuffle=False keeps the order"):
        bucketed(source, shuffle=False)
    with pytest.raises(OptionError, match="row .* has the length .* fits into no batch"):
        bucketed(source, max_tokens=20)
    with pytest.raises(OptionError, match="at least 1"):
        bucketed(source, max_tokens=0)
    with pytest.raises(OptionError, match="use 'skip'"):
        bucketed(source, max_tokens=500, on_error="replace")
    with pytest.raises(PathError, match="toknes"):
        bucketed(source, bucket_by="toknes")
    with pytest.raises(OptionError, match="has no length"):
        bucketed(source, bucket_by="id")
    with pytest.raises(OptionError, match="windows keep the order"):
        bucketed(source).windows(2)
    with pytest.raises(OptionError, match="last: expected"):
        bucketed(source, last="split")
    with pytest.raises(OptionError, match="Did you mean 'bucket_by'"):
        StreamingDataset[Sentence](source, 2, bucketby="tokens")  # type: ignore[call-arg]


def test_batches_of_max_tokens_are_mixed_as_wholes(source: Any) -> None:
    parts = [bucketed(source, max_tokens=500), bucketed(source, max_tokens=900)]
    assert {len(batch) > 0 for batch in MixedDataset(parts)} == {True}
    with pytest.raises(OptionError, match="max_tokens has made them already"):
        MixedDataset(parts, mix="row")


def test_state_of_other_buckets_is_rejected(source: Any) -> None:
    state = bucketed(source).state_dict()
    for other in (bucketed(source, batch_size=4), bucketed(source, max_tokens=500), bucketed(source, bucket_by="size")):
        with pytest.raises(OptionError, match="another order of rows"):
            other.load_state_dict(state)
