"""Positions of rows: integers, slices, lists, masks, arrays and tensors, for arrays and batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire import BaseDocument, DocumentArray
from quire.errors import RowIndexError
from tests.strategies import laws


class Item(BaseDocument):
    number: int = 0


LENGTH = 5


def both() -> list[Any]:
    docs = DocumentArray[Item]([{"number": n} for n in range(LENGTH)])
    return [docs, docs.stack()]


def numbers(rows: Any) -> list[int]:
    return list(rows.number)


POSITIONS = [
    ([0, 2], [0, 2]),
    ([-1, 0, -1], [4, 0, 4]),
    ((1, 3), [1, 3]),
    (range(1, 4), [1, 2, 3]),
    ([], []),
    (np.array([], np.int64), []),
    (np.array([], bool)[:0].astype(np.int32), []),
    ([True, False, True, False, False], [0, 2]),
    ([False] * LENGTH, []),
    (np.array([3, -2]), [3, 3]),
    (np.array([1, 2], np.uint8), [1, 2]),
    (np.array([True, False, False, False, True]), [0, 4]),
    (np.arange(10)[::2] // 2, [0, 1, 2, 3, 4]),
    (np.array([4, 3, 2, 1, 0], ">i4"), [4, 3, 2, 1, 0]),
    (slice(1, None, 2), [1, 3]),
    (slice(None, None, -1), [4, 3, 2, 1, 0]),
    (slice(10, 20), []),
    (slice(-2, None), [3, 4]),
    (slice(np.int64(1), np.int64(3)), [1, 2]),
]


@pytest.mark.parametrize(("key", "expected"), POSITIONS, ids=lambda case: str(case)[:30])
def test_key_selects_rows(key: Any, expected: list[int]) -> None:
    for rows in both():
        assert numbers(rows[key]) == expected
        assert type(rows[key]) is type(rows)


@pytest.mark.parametrize("key", [1, -4, np.int64(1), np.array(1), np.uint8(1)], ids=repr)
def test_integer_key_selects_one_row(key: Any) -> None:
    for rows in both():
        assert type(rows[key]) is Item
        assert rows[key].number == 1


BAD = [
    (5, "position 5 is out of range: there are 5 rows"),
    (-6, "position -6 is out of range"),
    ([0, 5], "position 5 is out of range"),
    ([0, -6], "position -6 is out of range"),
    ([2**64 - 1], "position 18446744073709551615 is out of range"),
    ([2**70], "is not a position"),
    (np.array([7], np.uint8), "position 7 is out of range"),
    ([True, False], "the mask has 2 entries, but there are 5 rows"),
    (np.ones(6, bool), "the mask has 6 entries"),
    ([0.0, 1.0], "positions are integers, got floats"),
    (1.5, "is not a position"),
    (True, "is not a position"),
    (np.True_, "is not a position"),
    (None, "is not a position"),
    ([None], "is not a position"),
    (["a"], "is not a position"),
    ([[0], [1]], "is not a position"),
    ([[0], [1, 2]], "is not a list of positions"),
    (np.zeros((2, 2), int), "is not a position"),
    (Ellipsis, "is not a position"),
]


@pytest.mark.parametrize(("key", "message"), BAD, ids=lambda case: str(case)[:30])
def test_invalid_key_raises_row_index_error(key: Any, message: str) -> None:
    for rows in both():
        with pytest.raises(RowIndexError, match=message) as raised:
            rows[key]
        assert isinstance(raised.value, IndexError)
    docs = both()[0]
    for change in (lambda: docs.__delitem__(key), lambda: docs.__setitem__(key, Item())):
        with pytest.raises(RowIndexError, match=message):
            change()
    assert numbers(docs) == [0, 1, 2, 3, 4]


def test_take_accepts_every_kind_of_key() -> None:
    batch = both()[1]
    for key, expected in POSITIONS:
        assert numbers(batch.take(key)) == expected
    assert numbers(batch.take(2)) == [2]


def test_delete_by_positions_and_mask() -> None:
    docs = both()[0]
    del docs[[0, -1, 0]]
    assert numbers(docs) == [1, 2, 3]
    del docs[np.array([True, False, True])]
    assert numbers(docs) == [2]


def test_string_key_is_a_path() -> None:
    docs = both()[0]
    with pytest.raises(RowIndexError):
        del docs["number"]


@laws
@given(
    st.integers(0, 6).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(-n, n - 1) if n else st.nothing())))
)
def test_positions_select_like_python_lists(case: tuple[int, list[int]]) -> None:
    length, order = case
    docs = DocumentArray[Item]([{"number": n} for n in range(length)])
    expected = [range(length)[i] for i in order]
    assert docs[order].number == expected
    assert docs[np.array(order, np.int64)].number == expected
    assert docs.stack()[order].number.tolist() == expected


@pytest.mark.needs("torch")
def test_torch_columns_are_indexed_by_any_array() -> None:
    backwards = np.arange(3)[2:3][::-1]
    locked = np.arange(LENGTH)
    locked.flags.writeable = False  # as pandas gives its columns
    rows = both()[1].to_framework("torch")
    assert numbers(rows[backwards]) == [2]
    assert numbers(rows[locked]) == [0, 1, 2, 3, 4]


@pytest.mark.needs("torch")
def test_torch_tensor_selects_rows() -> None:
    import torch

    for rows in both():
        assert numbers(rows[torch.tensor([0, -1])]) == [0, 4]
        assert numbers(rows[torch.tensor([True, False, True, False, False])]) == [0, 2]
        assert numbers(rows[torch.tensor([], dtype=torch.int64)]) == []
        assert rows[torch.tensor(3)].number == 3
        with pytest.raises(RowIndexError):
            rows[torch.tensor([0.5])]


@pytest.mark.needs("tensorflow")
def test_tensorflow_tensor_selects_rows() -> None:
    import tensorflow as tf

    for rows in both():
        assert numbers(rows[tf.constant([0, -1])]) == [0, 4]
        assert numbers(rows[tf.constant([True, False, True, False, False])]) == [0, 2]
        assert rows[tf.constant(3)].number == 3


@pytest.mark.needs("jax")
def test_jax_array_selects_rows() -> None:
    import jax.numpy as jnp

    for rows in both():
        assert numbers(rows[jnp.array([0, -1])]) == [0, 4]
        assert numbers(rows[jnp.array([True, False, True, False, False])]) == [0, 2]
        assert rows[jnp.array(3)].number == 3
