"""Positions of rows: integers, slices, lists, masks, arrays and tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from quire.errors import RowIndexError
from quire.tensors import framework_of

if TYPE_CHECKING:
    from numpy.typing import NDArray


_INT64 = np.dtype(np.int64)


def resolve_index(key: Any, length: int) -> int | slice | NDArray[np.int64]:
    """What a key means among so many rows; negative positions count from the end."""
    if isinstance(key, slice):
        return key
    if isinstance(key, (int, np.integer)) and not isinstance(key, (bool, np.bool_)):
        return _checked(int(key), length)
    array = _as_array(key)
    usual = array.dtype == _INT64 and array.strides == (8,) and len(array) and array.flags.writeable
    if usual and _within(array, length):
        return array  # the usual case, before all questions: it runs when caches are cold, and each step costs
    if array.ndim == 0 and array.dtype.kind in "iu":
        return _checked(int(array), length)
    if array.ndim != 1 or array.dtype.kind not in "biuf":
        raise RowIndexError(
            f"{key!r} is not a position: use an int, a slice, or a list, array or mask with one dimension."
        )
    if array.dtype.kind == "b":
        if len(array) != length:
            raise RowIndexError(f"the mask has {len(array)} entries, but there are {length} rows.")
        return np.flatnonzero(array)
    return _positions(array, length)


def _as_array(key: Any) -> NDArray[Any]:
    framework = framework_of(key)
    if framework is not None:
        return framework.to_numpy(key)
    try:
        return np.asarray(list(key) if isinstance(key, range) else key)
    except ValueError as error:
        raise RowIndexError(f"{key!r} is not a list of positions: {error}") from error


def _positions(array: NDArray[Any], length: int) -> NDArray[np.int64]:
    if not array.size:
        return np.empty(0, np.int64)
    if array.dtype.kind == "f":
        raise RowIndexError("positions are integers, got floats.")
    if array.dtype.kind == "u" and array.max() >= length:  # as int64, a large one would be negative
        raise RowIndexError(f"position {array.max()} is out of range: there are {length} rows.")
    positions = np.array(array, np.int64, order="C")  # torch wants no memory that is read-only or runs backwards
    if _within(positions, length):
        return positions
    positions = np.where(positions < 0, positions + length, positions)
    wrong = (positions < 0) | (positions >= length)
    if wrong.any():
        raise RowIndexError(f"position {array[wrong][0]} is out of range: there are {length} rows.")
    return positions


def _within(positions: NDArray[np.int64], length: int) -> bool:
    """Whether all are from 0 to length. Seen without a sign, a negative position is larger than any."""
    return 0 <= positions.item(positions.view(np.uint64).argmax()) < length


def _checked(index: int, length: int) -> int:
    if not -length <= index < length:
        raise RowIndexError(f"position {index} is out of range: there are {length} rows.")
    return index % length
