"""The tokens of rows, which limit the batches of an endpoint with `max_batch_tokens`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.array import DocumentBatch
from quire.columns import LentColumn, RaggedColumn, ScalarColumn, TensorColumn
from quire.errors import DecodeError, SchemaError
from quire.schema import FieldKind, Schema
from quire.services._payloads import Rows

_WITH_LENGTH = (FieldKind.LIST, FieldKind.TENSOR, FieldKind.TEXT, FieldKind.BYTES)


def check_token_field(schema: Schema, name: str, where: str) -> None:
    """Raise an error for a field that has no number of tokens."""
    [field] = schema.resolve((name,))
    is_number = field.kind is FieldKind.SCALAR and field.type is int
    if not is_number and field.kind not in _WITH_LENGTH:
        raise SchemaError(
            f"{where}: tokens={name!r} is {field}; use a field of lists, tensors, texts or whole numbers."
        )


_MOST_TOKENS = 1 << 31
"""The tokens that one row may have, so that their sums are exact."""


def count_tokens(rows: Rows, name: str) -> NDArray[np.int64]:
    """Return the tokens of each row: the length of its value, or the value itself if it is a whole number."""
    if not isinstance(rows, DocumentBatch):
        return _check_counts([_count(getattr(document, name)) for document in rows], name)
    column = rows.column(name)
    if isinstance(column, ScalarColumn):
        return _check_counts(np.where(column.valid_rows(), np.asarray(column.data), 0).tolist(), name)
    if isinstance(column, RaggedColumn):
        lengths = [shape[0] if shape else 1 for shape in column.shapes]
    elif isinstance(column, TensorColumn):
        lengths = [shape[0] if shape else 1 for shape in _row_shapes(column)]
    else:
        lengths = [_count(value) for value in column.values()]
    return np.where(column.valid_rows(), np.array(lengths, np.int64), 0)


def _check_counts(counts: list[int], name: str) -> NDArray[np.int64]:
    """Return numbers of tokens as an array; those that a caller has sent may be any whole numbers."""
    for row, count in enumerate(counts):
        if not 0 <= count <= _MOST_TOKENS:
            raise DecodeError(f"row {row}: {name}={count} is no number of tokens.")
    return np.array(counts, np.int64)


def _row_shapes(column: TensorColumn) -> list[tuple[int, ...]]:
    if column.shapes is not None:  # the rows were padded
        return [tuple(shape) for shape in column.shapes.tolist()]
    # The shape of a column that is borrowed from a message is known without a copy of its data.
    borrowed = column.peek() if isinstance(column, LentColumn) else None
    shape = column.framework.shape(column.data) if borrowed is None else borrowed.shape
    return [tuple(shape[1:])] * len(column)


def _count(value: Any) -> int:
    if value is None:
        return 0
    if isinstance(value, int):
        return value
    return len(value) if getattr(value, "ndim", 1) else 1
