"""Datasets for TensorFlow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from quire._optional import require
from quire.array import reads_as_none
from quire.columns import Column, Columns, DocumentColumn, ObjectColumn, TensorColumn, present_rows
from quire.errors import ColumnError, MissingValueError
from quire.schema import FieldKind
from quire.tensors import get_framework

Wanted = str | Iterable[str] | None


def tensorflow_dataset(
    batches: Callable[[], Iterator[Any]], number: int | None, first: Any, features: Wanted, labels: Wanted
) -> Any:
    """A `tf.data.Dataset` of so many batches; the first batch tells what its elements look like.

    The number is -1 for one that never ends, and None where passes differ in it.
    """
    tf: Any = require("tensorflow", extra="tensorflow", needed_for="to_tf_dataset()")
    get_framework("tensorflow")

    def arrange(batch: Any) -> Any:
        chosen = _chosen(batch, features, leave_out=labels)
        return chosen if labels is None else (chosen, _chosen(batch, labels))

    signature = _nested(arrange(first), lambda array: _spec(tf, array))
    made = tf.data.Dataset.from_generator(lambda: map(arrange, batches()), output_signature=signature)
    return made if number is None else made.apply(tf.data.experimental.assert_cardinality(number))


def _spec(tf: Any, array: Any) -> Any:
    dtype = tf.string if array.dtype.kind == "O" else tf.as_dtype(array.dtype)
    return tf.TensorSpec(shape=(None, *array.shape[1:]), dtype=dtype)


def _nested(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        return {name: _nested(part, change) for name, part in value.items()}
    return tuple(_nested(part, change) for part in value) if isinstance(value, tuple) else change(value)


def _chosen(batch: Any, wanted: Wanted, leave_out: Wanted = None) -> Any:
    """One column as it is, several in a dict, all of them nested as the documents are."""
    if isinstance(wanted, str):
        return _read(batch, wanted)
    if wanted is not None:
        return {path: _read(batch, path) for path in wanted}
    left = {leave_out} if isinstance(leave_out, str) else set(leave_out or ())
    return _all(batch._columns, "", left, shows_zeros=batch._guard is None)


def _read(batch: Any, path: str) -> Any:
    column = batch.column(path)
    if batch._guard is not None and reads_as_none(batch, column, path):
        raise MissingValueError(f"{batch.schema.name}.{path}: no row has a value; choose other features or labels.")
    return _array(column, path)


def _all(columns: Columns, before: str, left: set[str], *, shows_zeros: bool) -> Mapping[str, Any]:
    found: dict[str, Any] = {}
    for name, column in columns.columns.items():
        path = f"{before}{name}"
        if path in left or name == "id":
            continue
        if isinstance(column, DocumentColumn):
            found[name] = _all(column.columns, f"{path}.", left, shows_zeros=shows_zeros)
        elif not shows_zeros and present_rows(column) is not None:
            continue  # no row has a value: the dataset has checked that it is not some of them
        elif isinstance(column, TensorColumn) or (column.field.kind is FieldKind.TEXT and column.valid_rows().all()):
            found[name] = _array(column, path)
    return found


def _array(column: Column, path: str) -> Any:
    if isinstance(column, TensorColumn):
        return column.framework.to_numpy(column.data)
    if isinstance(column, ObjectColumn) and column.field.kind in (FieldKind.TEXT, FieldKind.BYTES):
        return np.array(["" if item is None else item for item in column.values()], dtype=object)
    raise ColumnError(f"{path}: a {column.field} has no form as a TensorFlow tensor; choose other features.")
