"""Values of columns as keys: the same number for equal values in every process, and each value once.

Python's own hash of text differs from process to process, and hashes of bytes differ between 1 and 1.0, which one file
may have as an integer and another as a float. Here values that are equal have one number.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from decimal import Decimal
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.distributed._nests import is_untyped
from quire.errors import ColumnError, PathError, did_you_mean

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MISSING = 0x9E3779B97F4A7C15
_TIME, _FRACTION = 0x5851F42D4C957F2D, 0x2545F4914F6CDD1D
_WHOLE = float(1 << 63)
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc)


def column_of(value: Any, name: Any) -> Any:
    """A column of a frame, a dict or an array of documents; PathError if there is none."""
    try:
        return value[name]
    except (KeyError, IndexError, TypeError) as error:
        known = (
            [str(key) for key in value] if isinstance(value, dict) else list(map(str, getattr(value, "columns", ())))
        )
        raise PathError(f"a {type(value).__name__} has no {name!r}. {did_you_mean(str(name), known)}") from error


def targets(value: Any, names: Sequence[Any], parts: int) -> NDArray[np.int64]:
    """The partition of each row, by what it has in the columns."""
    mixed: NDArray[np.uint64] | None = None
    for name in names:
        hashes = _hashes(plain_array(column_of(value, name)))
        mixed = hashes if mixed is None else _mixed(mixed ^ (hashes << np.uint64(1)))
    assert mixed is not None
    found: NDArray[np.int64] = (mixed % np.uint64(parts)).astype(np.int64)
    return found


def plain_array(column: Any) -> NDArray[Any]:
    """A column as one axis of numpy."""
    column = [] if is_untyped(column) else column
    array = np.asarray(column.to_numpy() if hasattr(column, "to_numpy") else column)
    if array.ndim == 1:
        return array
    if array.ndim == 0 or not isinstance(column, (list, tuple)):
        raise ColumnError(f"a key is one value a row, and this column has rows of shape {array.shape[1:]}.")
    return np.fromiter(column, np.object_, len(column))


def unique(column: Any) -> NDArray[Any]:
    """Each value once, in the order in which they come. Missing values are one."""
    array = plain_array(column)
    if array.dtype != object:
        _, first = np.unique(array, return_index=True)
        return array[np.sort(first)]
    seen: dict[Any, Any] = {}
    for item in array.tolist():
        seen.setdefault(None if _is_missing(item) else item, item)
    return np.fromiter(seen.values(), np.object_, len(seen))


# --- numbers for values


def _mixed(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Bits that depend on all bits (the finaliser of splitmix64)."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = bits ^ (bits >> np.uint64(31))
    return mixed


def _hashes(array: NDArray[Any]) -> NDArray[np.uint64]:
    kind = array.dtype.kind
    if kind in "iub":
        return _mixed(array.astype(np.int64).view(np.uint64))
    if kind == "f":
        return _hashes_of_floats(array.astype(np.float64))
    if kind in "Mm":
        return _hashes_of_times(array)
    return _hashes_of_objects(array.tolist())


def _hashes_of_floats(array: NDArray[np.float64]) -> NDArray[np.uint64]:
    with np.errstate(invalid="ignore"):
        whole = (np.floor(array) == array) & (np.abs(array) < _WHOLE)
    integers = np.where(whole, array, 0).astype(np.int64).view(np.uint64)
    bits = np.where(whole, integers, array.view(np.uint64) ^ np.uint64(_FRACTION))
    return np.where(np.isnan(array), np.uint64(_MISSING), _mixed(bits))


def _hashes_of_times(array: NDArray[Any]) -> NDArray[np.uint64]:
    nanoseconds = array.astype(f"{array.dtype.kind}8[ns]").view(np.int64).view(np.uint64)
    return np.where(np.isnat(array), np.uint64(_MISSING), _mixed(nanoseconds ^ np.uint64(_TIME)))


def _hashes_of_objects(items: list[Any]) -> NDArray[np.uint64]:
    known: dict[Any, int] = {}
    found = np.empty(len(items), np.uint64)
    for place, item in enumerate(items):
        try:
            number = known.get(item)
        except TypeError:
            raise ColumnError(
                f"a key is text, a number or a time, got a {type(item).__name__} in row {place}."
            ) from None
        if number is None:
            number = known[item] = _hash_of(item)
        found[place] = number
    return found


def _hash_of(item: Any) -> int:
    if _is_missing(item):
        return _MISSING
    if isinstance(item, (float, np.number, np.bool_, np.datetime64)) or (isinstance(item, int) and abs(item) < _WHOLE):
        return int(_hashes(np.asarray([item]))[0])
    if isinstance(item, dt.datetime):
        return int(_hashes_of_times(np.asarray([_nanoseconds(item)], "M8[ns]"))[0])
    if isinstance(item, (str, bytes)):
        data = b"s" + item.encode("utf-8", "surrogatepass") if isinstance(item, str) else b"b" + item
    elif getattr(type(item), "__repr__", None) is object.__repr__:
        raise ColumnError(f"a key is text, a number or a time, got a {type(item).__name__}.")
    else:
        data = repr(item.normalize() if isinstance(item, Decimal) else item).encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


def _nanoseconds(moment: dt.datetime) -> int:
    aware = moment if moment.tzinfo else moment.replace(tzinfo=dt.timezone.utc)
    return (aware - _EPOCH) // dt.timedelta(microseconds=1) * 1000 + getattr(moment, "nanosecond", 0)


def _is_missing(item: Any) -> bool:
    """None, NaN, NaT and pandas' NA, which is not equal to anything, nor unequal."""
    if item is None:
        return True
    try:
        return bool(item != item)
    except (TypeError, ValueError):
        return type(item).__name__ == "NAType"
