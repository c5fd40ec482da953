"""Batches for other frameworks: conversion to JAX and others, and `tf.data.Dataset`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from quire._optional import require
from quire.array import DocumentBatch, reads_as_none
from quire.columns import (
    Column,
    Columns,
    DocumentColumn,
    ObjectColumn,
    ScalarColumn,
    TensorColumn,
    present_rows,
)
from quire.errors import ColumnError, MissingValueError
from quire.schema import FieldKind
from quire.tensors import Framework, cast_numbers, common_dtype, get_framework

if TYPE_CHECKING:
    import tensorflow as tf
    from numpy.typing import NDArray

Paths = str | Iterable[str] | None
"""One path, several, or all fields."""


def convert_batch(batch: DocumentBatch[Any], name: str) -> DocumentBatch[Any]:
    """Convert the tensors of a batch to a framework.

    For jax, plain numbers get its default width (32 bits, unless x64 is enabled): they have no width of their own.
    """
    if name != "jax":
        return batch.to_framework(name)
    widths, numpy = get_framework("jax").default_dtypes, get_framework("numpy")

    def cast(framework: Framework, value: Any) -> tuple[Framework, Any]:
        array = framework.to_numpy(value)
        return numpy, cast_numbers(array, common_dtype(widths.get(array.dtype.kind, array.dtype.name)))

    columns = batch._columns.map_leaves(
        lambda column: column.map_tensors(cast) if isinstance(column, ScalarColumn) else column
    )
    return batch._with(columns).to_framework("jax")


# --- TensorFlow


def make_tf_dataset(
    batches: Callable[[], Iterator[Any]], length: int | None, first: DocumentBatch[Any], features: Paths, labels: Paths
) -> tf.data.Dataset:
    """Make a `tf.data.Dataset` of batches; the first batch determines the signature of its elements.

    `length` is -1 for a dataset that never ends, and None if passes differ in length.
    """
    tf: Any = require("tensorflow", extra="tensorflow", needed_for="to_tf_dataset()")
    get_framework("tensorflow")

    def arrange(batch: DocumentBatch[Any]) -> object:
        selected = _select(batch, features, leave_out=labels)
        return selected if labels is None else (selected, _select(batch, labels))

    def make_spec(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: make_spec(part) for name, part in value.items()}
        if isinstance(value, tuple):
            return tuple(make_spec(part) for part in value)
        dtype = tf.string if value.dtype.kind == "O" else tf.as_dtype(value.dtype)
        return tf.TensorSpec(shape=(None, *value.shape[1:]), dtype=dtype)

    signature = make_spec(arrange(first))
    dataset = tf.data.Dataset.from_generator(lambda: map(arrange, batches()), output_signature=signature)
    return dataset if length is None else dataset.apply(tf.data.experimental.assert_cardinality(length))


def _select(batch: DocumentBatch[Any], paths: Paths, leave_out: Paths = None) -> NDArray[Any] | Mapping[str, Any]:
    """Return one column as an array, several in a dict, or all of them in dicts nested like the documents."""
    if isinstance(paths, str):
        return _read_column(batch, paths)
    if paths is not None:
        return {path: _read_column(batch, path) for path in paths}
    left_out = {leave_out} if isinstance(leave_out, str) else set(leave_out or ())
    return _select_all(batch._columns, "", left_out, shows_zeros=batch._guard is None)


def _read_column(batch: DocumentBatch[Any], path: str) -> NDArray[Any]:
    column = batch.column(path)
    if batch._guard is not None and reads_as_none(batch, column, path):
        raise MissingValueError(f"{batch.schema.name}.{path}: no row has a value; choose other features or labels.")
    return _to_array(column, path)


def _select_all(columns: Columns, prefix: str, left_out: set[str], *, shows_zeros: bool) -> Mapping[str, Any]:
    selected: dict[str, Any] = {}
    for name, column in columns.columns.items():
        path = f"{prefix}{name}"
        if path in left_out or name == "id":
            continue
        if isinstance(column, DocumentColumn):
            selected[name] = _select_all(column.columns, f"{path}.", left_out, shows_zeros=shows_zeros)
        elif not shows_zeros and present_rows(column) is not None:
            continue  # no row has a value: if only some had none, the dataset would have raised an error
        elif isinstance(column, TensorColumn) or (column.field.kind is FieldKind.TEXT and column.valid_rows().all()):
            selected[name] = _to_array(column, path)
    return selected


def _to_array(column: Column, path: str) -> NDArray[Any]:
    if isinstance(column, TensorColumn):
        return column.framework.to_numpy(column.data)
    if isinstance(column, ObjectColumn) and column.field.kind in (FieldKind.TEXT, FieldKind.BYTES):
        return np.array(["" if item is None else item for item in column.values()], dtype=object)
    raise ColumnError(f"{path}: a {column.field} has no form as a TensorFlow tensor; choose other features.")
