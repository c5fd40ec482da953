"""Rows of plain Python objects: how many there are, some of them, and several objects as one.

An object has rows if it is an array, a frame, a table, an array of documents, a list, or a dict of such. A list or
tuple of arrays is columns, `[images, labels]`; a list of anything else, dicts included, is rows. All else is one thing
without rows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from quire._optional import is_loaded, require
from quire.array import DocumentArray, DocumentBatch
from quire.errors import ColumnError
from quire.tensors import framework_of_type

if TYPE_CHECKING:
    from numpy.typing import NDArray

_PLAIN = (int, float, complex, bool, str, bytes, type(None))


def is_frame(value: Any) -> bool:
    """Whether it is a data frame, a series or an index of pandas."""
    if not is_loaded("pandas"):
        return False
    pandas: Any = require("pandas", extra="pandas", needed_for="a data frame")
    return isinstance(value, (pandas.DataFrame, pandas.Series, pandas.Index))


def is_table(value: Any) -> bool:
    """Whether it is a table or a record batch of Arrow."""
    if not is_loaded("pyarrow"):
        return False
    arrow: Any = require("pyarrow", extra="parquet", needed_for="an Arrow table")
    return isinstance(value, (arrow.Table, arrow.RecordBatch))


def _is_tensor(value: Any) -> bool:
    return framework_of_type(type(value)) is not None and len(value.shape) > 0


def _is_array(value: Any) -> bool:
    return _is_tensor(value) or is_frame(value) or is_table(value) or isinstance(value, (DocumentArray, DocumentBatch))


def _is_columns(value: Any) -> bool:
    """Whether a list, tuple or dict is a nest of columns."""
    if isinstance(value, dict):
        return bool(value) and all(
            _is_array(v) or isinstance(v, (list, tuple)) or _is_columns(v) for v in value.values()
        )
    if not isinstance(value, (list, tuple)) or not value:
        return False
    return all(_is_array(v) or _is_columns(v) for v in value) and not all(isinstance(v, dict) for v in value)


def has_rows(value: Any) -> bool:
    """Whether the object can be divided."""
    return _is_array(value) or isinstance(value, (list, tuple)) or _is_columns(value) or is_untyped(value)


# --- how many


def length_of(value: Any) -> int:
    """The number of rows; an object without rows counts as one."""
    if isinstance(value, dict) and not _is_columns(value):
        return _length_of_mixed(value)
    if _is_columns(value):
        return _length_of_columns(value)
    if isinstance(value, (list, tuple)) or _is_array(value):
        return int(value.num_rows) if is_table(value) else len(value)
    return 1


def _length_of_mixed(value: dict[Any, Any]) -> int:
    rows = [key for key, item in value.items() if _is_array(item) or _is_columns(item)]
    if rows:
        others = [key for key, item in value.items() if key not in rows and not isinstance(item, (list, tuple))]
        raise ColumnError(f"a dict has rows in {rows} and none in {others}: how many rows it has cannot be told.")
    return 1 if value else 0


def _length_of_columns(value: Any) -> int:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    lengths = {key: length_of(item) for key, item in items}
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{key!r}: {length:,}" for key, length in lengths.items())
        raise ColumnError(f"columns of one object have different numbers of rows: {told}.")
    return next(iter(lengths.values()))


def check_rows(value: Any, doing: str) -> int:
    """The number of rows of an object that is to be divided; ColumnError if it has none."""
    if not has_rows(value):
        raise ColumnError(
            f"{doing} needs rows, and a {type(value).__name__} has none. Arrays, frames, lists, dicts of arrays and "
            "arrays of documents have."
        )
    return length_of(value)


# --- some of them


def rows_of(value: Any, where: slice | NDArray[np.int64]) -> Any:
    """Rows by position. They may share memory with the object."""
    if _is_columns(value) or type(value) is dict:
        return mapped(lambda item: rows_of(item, where), value)
    if is_frame(value):
        return value.iloc[where] if hasattr(value, "iloc") else value[where]
    if is_table(value):
        return value.slice(where.start, where.stop - where.start) if isinstance(where, slice) else value.take(where)
    if isinstance(where, slice) or isinstance(value, (DocumentArray, DocumentBatch)):
        return value[where]
    framework = framework_of_type(type(value))
    if framework is not None:
        return framework.take(value, where)
    return type(value)([value[i] for i in where.tolist()])


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """A list, tuple or dict of the same kind with each of its items changed."""
    if isinstance(value, dict):
        return {key: function(item) for key, item in value.items()}
    return _like(value, [function(item) for item in value])


def _like(value: Any, items: list[Any]) -> Any:
    if isinstance(value, tuple):
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return items


def divided(value: Any, parts: int) -> list[Any]:
    """The object in so many parts, one behind the other, whose sizes differ by one at most."""
    total = check_rows(value, "partition()")
    ends = [total * part // parts for part in range(parts + 1)]
    return [rows_of(value, slice(start, stop)) for start, stop in pairwise(ends)]


# --- several as one


def joined(values: Sequence[Any]) -> Any:
    """The rows of all, one behind the other. What is empty says nothing, unless all is."""
    full = [value for value in values if check_rows(value, "joining partitions")]
    if len(full) < 2:
        return full[0] if full else _emptiest(values)
    first = full[0]
    kinds = {_kind(value): value for value in full}
    if len(kinds) > 1:
        told = " and ".join(type(value).__name__ for value in kinds.values())
        raise ColumnError(f"partitions of one kind can be joined, and these hold {told}.")
    if _is_columns(first):
        return _joined_columns(full)
    if isinstance(first, (list, tuple)) and not isinstance(first, DocumentArray):
        return type(first)([item for value in full for item in value])
    return _joined_arrays(full)


def _emptiest(values: Sequence[Any]) -> Any:
    """The one that tells most of what there would be."""
    return next((value for value in values if not is_untyped(value)), values[0])


def is_untyped(value: Any) -> bool:
    """Whether it is empty, and does not tell what would be in it."""
    return type(value) in (list, tuple, dict) and len(value) == 0


def _kind(value: Any) -> Any:
    if _is_columns(value):
        return type(value), tuple(value) if isinstance(value, dict) else len(value)
    framework = framework_of_type(type(value))
    return type(value) if framework is None else framework.name


def _joined_columns(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, dict):
        return {key: joined([value[key] for value in values]) for key in first}
    return _like(first, [joined([value[place] for value in values]) for place in range(len(first))])


def _joined_arrays(values: Sequence[Any]) -> Any:
    first = values[0]
    if is_frame(first):
        pandas: Any = require("pandas", extra="pandas", needed_for="a data frame")
        return pandas.concat(values) if hasattr(first, "iloc") else first.append(list(values[1:]))
    if is_table(first):
        arrow: Any = require("pyarrow", extra="parquet", needed_for="an Arrow table")
        tables = [v if isinstance(v, arrow.Table) else arrow.Table.from_batches([v]) for v in values]
        return arrow.concat_tables(tables)
    if isinstance(first, DocumentBatch):
        return type(first).concat(values)
    if isinstance(first, DocumentArray):
        return type(first)(document for value in values for document in value)
    return _joined_tensors(values)


def _joined_tensors(values: Sequence[Any]) -> Any:
    framework = framework_of_type(type(values[0]))
    assert framework is not None
    shapes = {framework.shape(value)[1:] for value in values}
    if len(shapes) > 1:
        raise ColumnError(f"rows of one shape can be joined, and these have {' and '.join(map(str, shapes))}.")
    return np.concatenate(values) if framework.name == "numpy" else framework.concat(values)


# --- copies


def fresh(value: Any) -> Any:
    """A copy that can be changed, and changes nothing else."""
    if isinstance(value, _PLAIN) or is_table(value):
        return value
    if type(value) in (list, dict) or isinstance(value, tuple):
        return mapped(fresh, value)
    if is_frame(value):
        return _fresh_frame(value)
    if type(value) is np.ndarray and value.dtype.hasobject is False:
        return value.copy()
    try:
        return copy.deepcopy(value)
    except Exception:  # noqa: BLE001 - locks, files and their like cannot be copied, and are shared
        return value


def _fresh_frame(value: Any) -> Any:
    made = value.copy()
    if hasattr(made, "columns"):
        for place in range(made.shape[1]):
            if made.dtypes.iloc[place] == "object" and _holds_mutable(made.iloc[:, place]):
                made.isetitem(place, made.iloc[:, place].map(fresh))
        return made
    return made.map(fresh) if made.dtype == "object" and _holds_mutable(made) else made


def _holds_mutable(items: Iterable[Any]) -> bool:
    return any(not isinstance(item, _PLAIN) for item in items)
