"""Objects that hold rows: count, take, concatenate, copy and hash the rows of arrays, frames, tables and lists.

An object has rows if it is an array, a frame, a table, an array of documents, a list, or a dict of such. A list or
tuple of arrays is columns, `[images, labels]`; a list of anything else, dicts included, is rows. Anything else is one
object without rows.
"""

from __future__ import annotations

import copy
import datetime as dt
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal
from hashlib import blake2b
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from quire._optional import is_loaded, require
from quire.array import DocumentArray, DocumentBatch
from quire.errors import ColumnError, PathError, did_you_mean
from quire.tensors import framework_of_type

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    from numpy.typing import NDArray


_PLAIN = (int, float, complex, bool, str, bytes, type(None))


def is_pandas(value: object) -> TypeGuard[pd.DataFrame | pd.Series[Any] | pd.Index[Any]]:
    """Whether it is a pandas DataFrame, Series or Index."""
    if not is_loaded("pandas"):
        return False
    pandas: Any = require("pandas", extra="pandas", needed_for="a data frame")
    return isinstance(value, (pandas.DataFrame, pandas.Series, pandas.Index))


def is_arrow(value: object) -> TypeGuard[pa.Table | pa.RecordBatch]:
    """Whether it is an Arrow table or record batch."""
    if not is_loaded("pyarrow"):
        return False
    arrow: Any = require("pyarrow", extra="parquet", needed_for="an Arrow table")
    return isinstance(value, (arrow.Table, arrow.RecordBatch))


def _is_array(value: Any) -> bool:
    is_tensor = framework_of_type(type(value)) is not None and len(value.shape) > 0
    return is_tensor or is_pandas(value) or is_arrow(value) or isinstance(value, (DocumentArray, DocumentBatch))


def _is_columns(value: object) -> bool:
    """Whether a list, tuple or dict is a nest of columns."""
    if isinstance(value, dict):
        return bool(value) and all(
            _is_array(v) or isinstance(v, (list, tuple)) or _is_columns(v) for v in value.values()
        )
    if not isinstance(value, (list, tuple)) or not value:
        return False
    return all(_is_array(v) or _is_columns(v) for v in value) and not all(isinstance(v, dict) for v in value)


def has_rows(value: object) -> bool:
    """Whether the object can be divided."""
    return _is_array(value) or isinstance(value, (list, tuple)) or _is_columns(value) or is_untyped(value)


# --- how many


def count_rows(value: Any) -> int:
    """Return the number of rows; an object without rows counts as one."""
    if _is_columns(value):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        lengths = {key: count_rows(item) for key, item in items}
        if len(set(lengths.values())) > 1:
            described = ", ".join(f"{key!r}: {length:,}" for key, length in lengths.items())
            raise ColumnError(f"columns of one object have different numbers of rows: {described}.")
        return next(iter(lengths.values()))
    if isinstance(value, dict):
        rows = [key for key, item in value.items() if _is_array(item) or _is_columns(item)]
        if rows:
            others = [key for key, item in value.items() if key not in rows and not isinstance(item, (list, tuple))]
            raise ColumnError(f"a dict has rows in {rows} and none in {others}: its number of rows is unclear.")
        return 1 if value else 0
    if isinstance(value, (list, tuple)) or _is_array(value):
        return int(value.num_rows) if is_arrow(value) else len(value)
    return 1


def check_rows(value: object, doing: str) -> int:
    """Return the number of rows of an object that is to be divided; ColumnError if it has none."""
    if not has_rows(value):
        raise ColumnError(
            f"{doing} needs rows, and a {type(value).__name__} has none. Arrays, frames, lists, dicts of arrays and "
            "arrays of documents have rows."
        )
    return count_rows(value)


# --- some of them


def take_rows(value: Any, where: slice | NDArray[np.int64]) -> Any:
    """Return rows by position. They may share memory with the object."""
    if _is_columns(value) or type(value) is dict:
        return map_items(lambda item: take_rows(item, where), value)
    if is_pandas(value):
        return value.iloc[where] if hasattr(value, "iloc") else value[where]
    if is_arrow(value):
        return value.slice(where.start, where.stop - where.start) if isinstance(where, slice) else value.take(where)
    if isinstance(where, slice) or isinstance(value, (DocumentArray, DocumentBatch)):
        return value[where]
    framework = framework_of_type(type(value))
    if framework is not None:
        return framework.take(value, where)
    return type(value)([value[i] for i in where.tolist()])


def map_items(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to each item of a list, tuple or dict."""
    if isinstance(value, dict):
        return {key: function(item) for key, item in value.items()}
    return _rebuild(value, [function(item) for item in value])


def _rebuild(value: Any, items: list[Any]) -> Any:
    if isinstance(value, tuple):
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return items


def split_rows(value: Any, parts: int) -> list[Any]:
    """Split the object into consecutive parts whose sizes differ by one at most."""
    total = check_rows(value, "partition()")
    ends = [total * part // parts for part in range(parts + 1)]
    return [take_rows(value, slice(start, stop)) for start, stop in pairwise(ends)]


# --- several as one


def concat_rows(values: Sequence[Any]) -> Any:
    """Concatenate the rows of all objects. Empty ones are ignored, unless all are empty."""
    full = [value for value in values if check_rows(value, "joining partitions")]
    if not full:  # the one that says most about its rows
        return next((value for value in values if not is_untyped(value)), values[0])
    if len(full) == 1:
        return full[0]
    first = full[0]
    kinds = {_container_kind(value): value for value in full}
    if len(kinds) > 1:
        names = " and ".join(type(value).__name__ for value in kinds.values())
        raise ColumnError(f"only partitions of one kind can be joined, and these hold {names}.")
    if isinstance(first, dict):
        return {key: concat_rows([value[key] for value in full]) for key in first}
    if _is_columns(first):
        return _rebuild(first, [concat_rows([value[i] for value in full]) for i in range(len(first))])
    if isinstance(first, (list, tuple)) and not isinstance(first, DocumentArray):
        return type(first)([item for value in full for item in value])
    return _concat_arrays(full)


def is_untyped(value: Any) -> bool:
    """Whether it is empty, and does not say what it would contain."""
    return type(value) in (list, tuple, dict) and len(value) == 0


def _container_kind(value: Any) -> object:
    if _is_columns(value):
        return type(value), tuple(value) if isinstance(value, dict) else len(value)
    framework = framework_of_type(type(value))
    return type(value) if framework is None else framework.name


def _concat_arrays(values: Sequence[Any]) -> Any:
    first = values[0]
    if is_pandas(first):
        pandas: Any = require("pandas", extra="pandas", needed_for="a data frame")
        return pandas.concat(values) if hasattr(first, "iloc") else first.append(list(values[1:]))
    if is_arrow(first):
        arrow: Any = require("pyarrow", extra="parquet", needed_for="an Arrow table")
        tables = [v if isinstance(v, arrow.Table) else arrow.Table.from_batches([v]) for v in values]
        return arrow.concat_tables(tables)
    if isinstance(first, DocumentBatch):
        return type(first).concat(values)
    if isinstance(first, DocumentArray):
        return type(first)(document for value in values for document in value)
    framework = framework_of_type(type(first))
    assert framework is not None
    shapes = {framework.shape(value)[1:] for value in values}
    if len(shapes) > 1:
        raise ColumnError(f"only rows of one shape can be joined, and these have {' and '.join(map(str, shapes))}.")
    return np.concatenate(values) if framework.name == "numpy" else framework.concat(values)


# --- copies


def copy_value(value: Any) -> Any:
    """Return a copy that can be changed without changing the original."""
    if isinstance(value, _PLAIN) or is_arrow(value):  # immutable
        return value
    if type(value) in (list, dict) or isinstance(value, tuple):
        return map_items(copy_value, value)
    if is_pandas(value):
        return _copy_frame(value)
    if type(value) is np.ndarray and value.dtype.hasobject is False:
        return value.copy()
    try:
        return copy.deepcopy(value)
    except Exception:  # noqa: BLE001 - locks, open files and the like cannot be copied, and are shared
        return value


def _copy_frame(value: pd.DataFrame | pd.Series[Any]) -> pd.DataFrame | pd.Series[Any]:
    frame = value.copy()
    if hasattr(frame, "columns"):
        for column in range(frame.shape[1]):
            if frame.dtypes.iloc[column] == "object" and _holds_mutable(frame.iloc[:, column]):
                frame.isetitem(column, frame.iloc[:, column].map(copy_value))
        return frame
    return frame.map(copy_value) if frame.dtype == "object" and _holds_mutable(frame) else frame


def _holds_mutable(items: Iterable[Any]) -> bool:
    return any(not isinstance(item, _PLAIN) for item in items)


# --- keys


def get_column(value: Any, name: object) -> Any:
    """Return a column of a frame, a dict or an array of documents; PathError if there is none."""
    try:
        return value[name]
    except (KeyError, IndexError, TypeError) as error:
        known = list(map(str, value if isinstance(value, dict) else getattr(value, "columns", ())))
        raise PathError(f"a {type(value).__name__} has no {name!r}. {did_you_mean(str(name), known)}") from error


def assign_partitions(value: Any, names: Sequence[Any], parts: int) -> NDArray[np.int64]:
    """Return the partition of each row, by the values of its key columns."""
    combined: NDArray[np.uint64] | None = None
    for name in names:
        hashes = _hash_array(key_array(get_column(value, name)))
        combined = hashes if combined is None else _mix_bits(combined ^ (hashes << np.uint64(1)))
    assert combined is not None
    partitions: NDArray[np.int64] = (combined % np.uint64(parts)).astype(np.int64)
    return partitions


def key_array(column: Any) -> NDArray[Any]:
    """Return a column as a one-dimensional numpy array."""
    column = [] if is_untyped(column) else column
    array = np.asarray(column.to_numpy() if hasattr(column, "to_numpy") else column)
    if array.ndim == 1:
        return array
    if array.ndim == 0 or not isinstance(column, (list, tuple)):
        raise ColumnError(f"a key has one value a row, and this column has rows of shape {array.shape[1:]}.")
    return np.fromiter(column, np.object_, len(column))


def unique_values(column: Any) -> NDArray[Any]:
    """Return each value once, in order of appearance. All missing values count as one."""
    array = key_array(column)
    if array.dtype != object:
        _, first = np.unique(array, return_index=True)
        return array[np.sort(first)]
    seen: dict[Any, Any] = {}
    for item in array.tolist():
        seen.setdefault(None if _is_missing(item) else item, item)
    return np.fromiter(seen.values(), np.object_, len(seen))


# --- hashes
#
# Python's own hash of text differs from process to process, and hashes of bytes differ between 1 and 1.0, which one
# file may hold as an integer and another as a float. These hashes are equal for equal values, in every process. They
# decide which partition a row belongs to, so all workers of a job must have the same version of them.

_MISSING_HASH = 0x9E3779B97F4A7C15
# Times and fractions are hashed as 64 bits, too: the salts keep them apart from the integers of the same bits.
_TIME_SALT, _FRACTION_SALT = 0x5851F42D4C957F2D, 0x2545F4914F6CDD1D
_INT64_LIMIT = float(1 << 63)
_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc)


def _mix_bits(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix each 64-bit number so that every bit depends on all bits (the finaliser of splitmix64)."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = bits ^ (bits >> np.uint64(31))
    return mixed


def _hash_array(array: NDArray[Any]) -> NDArray[np.uint64]:
    kind = array.dtype.kind
    if kind in "iub":
        return _mix_bits(array.astype(np.int64).view(np.uint64))
    if kind == "f":
        return _hash_floats(array.astype(np.float64))
    if kind in "Mm":
        return _hash_times(array)
    return _hash_objects(array.tolist())


def _hash_floats(array: NDArray[np.float64]) -> NDArray[np.uint64]:
    with np.errstate(invalid="ignore"):
        # Whole numbers hash as the integer they equal.
        whole = (np.floor(array) == array) & (np.abs(array) < _INT64_LIMIT)
    integers = np.where(whole, array, 0).astype(np.int64).view(np.uint64)
    bits = np.where(whole, integers, array.view(np.uint64) ^ np.uint64(_FRACTION_SALT))
    return np.where(np.isnan(array), np.uint64(_MISSING_HASH), _mix_bits(bits))


def _hash_times(array: NDArray[Any]) -> NDArray[np.uint64]:
    nanoseconds = array.astype(f"{array.dtype.kind}8[ns]").view(np.int64).view(np.uint64)
    return np.where(np.isnat(array), np.uint64(_MISSING_HASH), _mix_bits(nanoseconds ^ np.uint64(_TIME_SALT)))


def _hash_objects(items: list[Any]) -> NDArray[np.uint64]:
    known: dict[Any, int] = {}
    hashes = np.empty(len(items), np.uint64)
    for row, item in enumerate(items):
        try:
            number = known.get(item)
        except TypeError:
            raise ColumnError(f"a key is text, a number or a time, got a {type(item).__name__} in row {row}.") from None
        if number is None:
            number = known[item] = _hash_object(item)
        hashes[row] = number
    return hashes


def _hash_object(item: object) -> int:
    if _is_missing(item):
        return _MISSING_HASH
    if isinstance(item, (float, np.number, np.bool_, np.datetime64)) or (
        isinstance(item, int) and abs(item) < _INT64_LIMIT
    ):
        return int(_hash_array(np.asarray([item]))[0])
    if isinstance(item, dt.datetime):
        aware = item if item.tzinfo else item.replace(tzinfo=dt.timezone.utc)
        # pandas' Timestamp is a datetime with nanoseconds, which differences of datetimes do not have.
        nanoseconds = (aware - _EPOCH) // dt.timedelta(microseconds=1) * 1000 + getattr(item, "nanosecond", 0)
        return int(_hash_times(np.asarray([nanoseconds], "M8[ns]"))[0])
    if isinstance(item, (str, bytes)):
        data = b"s" + item.encode("utf-8", "surrogatepass") if isinstance(item, str) else b"b" + item
    elif getattr(type(item), "__repr__", None) is object.__repr__:
        raise ColumnError(f"a key is text, a number or a time, got a {type(item).__name__}.")
    else:
        data = repr(item.normalize() if isinstance(item, Decimal) else item).encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


def _is_missing(item: object) -> bool:
    """Whether it is None, NaN, NaT or pandas' NA, whose comparisons are neither true nor false."""
    if item is None:
        return True
    try:
        return bool(item != item)
    except (TypeError, ValueError):
        return type(item).__name__ == "NAType"
