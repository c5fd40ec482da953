"""Batches, shuffles, samples and splits: every row exactly once, repeatable with a seed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire import BaseDocument, DocumentArray
from quire.errors import OptionError, QueryError
from quire.typing import NdArray
from tests.strategies import laws


class Item(BaseDocument):
    number: int = 0
    parity: str = ""
    half: float | None = None
    words: list[str] = []
    vector: NdArray | None = None


def numbered(length: int) -> DocumentArray[Item]:
    parities = ("even", "odd")
    return DocumentArray[Item]([{"number": n, "parity": parities[n % 2]} for n in range(length)])


def both(length: int) -> list[Any]:
    return [numbered(length), numbered(length).stack()]


@laws
@given(st.integers(0, 20), st.integers(1, 8), st.booleans(), st.booleans(), st.integers(0, 3))
def test_batches_contain_every_row_once(length: int, size: int, shuffle: bool, drop_last: bool, seed: int) -> None:
    for rows in both(length):
        parts = list(rows.batch(size, shuffle=shuffle, seed=seed, drop_last=drop_last))
        sizes = [len(part) for part in parts]
        assert sizes[:-1] == [size] * (len(sizes) - 1)
        kept = length - length % size if drop_last else length
        assert sum(sizes) == kept
        result = [number for part in parts for number in part.number]
        assert len(set(result)) == kept
        assert shuffle or result == list(range(kept))
        assert all(type(part) is type(rows) for part in parts)


@pytest.mark.parametrize("stacked", [False, True])
def test_seed_repeats_the_order(stacked: bool) -> None:
    rows = both(50)[stacked]
    orders = [list(rows.shuffle(seed).number) for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == list(range(50))
    assert list(rows.number) == list(range(50))
    samples = [list(rows.sample(5, seed).number) for seed in (1, 1, 2)]
    assert samples[0] == samples[1] != samples[2]
    batched = [[list(part.number) for part in rows.batch(7, shuffle=True, seed=seed)] for seed in (1, 1, 2)]
    assert batched[0] == batched[1] != batched[2]
    assert list(rows.shuffle().number) != list(rows.shuffle().number)


def test_arrays_and_batches_shuffle_alike() -> None:
    docs, batch = both(20)
    assert docs.shuffle(3).number == batch.shuffle(3).number.tolist()
    assert docs.sample(5, 3).number == batch.sample(5, 3).number.tolist()


@pytest.mark.parametrize("stacked", [False, True])
def test_sample_returns_different_rows(stacked: bool) -> None:
    rows = both(6)[stacked]
    assert sorted(rows.sample(6).number) == list(range(6))
    assert len(rows.sample(0)) == 0
    for size in (7, -1):
        with pytest.raises(OptionError, match=f"n={size}: "):
            rows.sample(size)


@pytest.mark.parametrize("size", [0, -1])
def test_batch_rejects_size_below_one(size: int) -> None:
    for rows in both(3):
        with pytest.raises(OptionError, match=f"batch_size={size}"):
            rows.batch(size)


@laws
@given(st.integers(0, 30), st.lists(st.integers(1, 9), min_size=1, max_size=4), st.booleans())
def test_split_by_fractions(length: int, weights: list[int], shuffle: bool) -> None:
    docs = numbered(length)
    fractions = [weight / sum(weights) for weight in weights]
    parts = docs.split(*fractions, shuffle=shuffle, seed=0)
    assert len(parts) == len(weights)
    result = [number for part in parts for number in part.number]
    assert sorted(result) == list(range(length))
    assert shuffle or result == list(range(length))
    assert all(abs(len(part) - length * fraction) <= 1 for part, fraction in zip(parts, fractions, strict=True))


def test_split_by_counts() -> None:
    docs = numbered(6)
    assert [part.number for part in docs.split(1, 0, 5)] == [[0], [], [1, 2, 3, 4, 5]]
    assert [part.number for part in docs.split(1)] == [[0, 1, 2, 3, 4, 5]]
    first, second = docs.split(3, 3, shuffle=True, seed=1), docs.split(3, 3, shuffle=True, seed=1)
    assert first == second
    assert docs.split(0.5, 0.5)[0][0] is docs[0]


@pytest.mark.parametrize("parts", [(), (0.5,), (0.5, 0.6), (-0.5, 1.5), (2, 3), (0.5, 5), ("0.5", "0.5")])
def test_split_rejects_wrong_parts(parts: tuple[float, ...]) -> None:
    with pytest.raises(OptionError):
        numbered(6).split(*parts)


def test_split_by_groups_by_value() -> None:
    groups = numbered(5).split_by("parity")
    assert list(groups) == ["even", "odd"]
    assert [group.number for group in groups.values()] == [[0, 2, 4], [1, 3]]
    assert type(groups["odd"]) is DocumentArray[Item]
    assert list(numbered(2).split_by("half")) == [None]
    assert DocumentArray[Item]().split_by("parity") == {}
    with pytest.raises(QueryError, match="words: a split needs values that can be keys"):
        numbered(2).split_by("words")


def test_sizes_must_be_whole_numbers() -> None:
    for rows in both(4):
        with pytest.raises(OptionError, match="batch_size: expected a whole number"):
            rows.batch(2.5)
        with pytest.raises(OptionError, match="n: expected a whole number"):
            rows.sample(1.5)


# --- seeds


@pytest.mark.parametrize("seed", [2**63, 2**64, 2**127 - 1, 2**127, 2**200, np.int64(5)])
def test_seeds_of_any_size_repeat_shuffles_samples_and_splits(seed: int) -> None:
    for rows in both(40):
        for order in (
            lambda rows=rows: [rows.shuffle(seed)],
            lambda rows=rows: [rows.sample(5, seed)],
            lambda rows=rows: rows.split(0.5, 0.5, shuffle=True, seed=seed),
            lambda rows=rows: rows.split(0.5, 0.5, by="number", seed=seed),
            lambda rows=rows: list(rows.batch(7, shuffle=True, seed=seed)),
        ):
            parts = [list(part.number) for part in order()]
            assert parts == [list(part.number) for part in order()]


def test_splits_of_large_seeds_differ() -> None:
    splits = [tuple(numbered(200).split(0.5, 0.5, by="number", seed=seed)[0].number) for seed in (0, 2**127, 2**128)]
    assert len(set(splits)) == 3


@pytest.mark.parametrize("seed", [2**600, 1.5, "seed"])
def test_hash_splits_reject_other_seeds(seed: Any) -> None:
    with pytest.raises(OptionError, match="seed"):
        numbered(4).split(0.5, 0.5, by="number", seed=seed)


@pytest.mark.parametrize("seed", [-1, 1.5, "seed"])
def test_shuffles_reject_other_seeds(seed: Any) -> None:
    for call in ("shuffle", "sample", "split", "batch"):
        arguments = {"shuffle": (), "sample": (2,), "split": (2, 2), "batch": (2,)}[call]
        options = {"shuffle": True} if call in ("split", "batch") else {}
        with pytest.raises(OptionError, match=r"seed=.*use a whole number of 0 or more, or None"):
            getattr(numbered(4), call)(*arguments, seed=seed, **options)
