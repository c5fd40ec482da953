"""Batches put one behind the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from quire.columns._column import Column, joined_validity
from quire.columns._columns import Columns, DocumentColumn, DocumentsColumn
from quire.columns._stack import ShapePolicy, StackOptions, stack_values
from quire.columns._tensor import LentColumn, RaggedColumn, TensorColumn


def concat_columns(parts: Sequence[Columns], shapes: ShapePolicy = "error") -> Columns:
    """Columns of one schema put one behind the other. `shapes` is the policy for tensors of mixed shapes."""
    kept = [part for part in parts if len(part)] or list(parts[:1])
    first = kept[0]
    if len(kept) == 1:
        return first.slice(slice(None))  # not the part itself: setting a column here must not show there
    columns = {
        name: _concat([part.columns[name] for part in kept], shapes, first.schema.name) for name in first.columns
    }
    validity = None
    if any(part.validity is not None for part in kept):
        validity = np.concatenate([np.ones(len(p), np.bool_) if p.validity is None else p.validity for p in kept])
    extra_states = None
    if any(part.extra_states is not None for part in kept):
        extra_states = [row for part in kept for row in part.extra_states or [None] * len(part)]
    return Columns(first.schema, columns, sum(map(len, kept)), validity, extra_states)


def _concat(columns: list[Any], shapes: ShapePolicy, where: str) -> Column:
    first: Any = columns[0]
    for column in columns:
        if isinstance(column, LentColumn):
            _ = column.data  # its own from now on, and a column like the others
    kinds = {type(column) for column in columns}
    if kinds == {DocumentColumn}:
        return DocumentColumn(first.field, concat_columns([column.columns for column in columns], shapes))
    if kinds == {DocumentsColumn}:
        return _concat_arrays(columns, shapes)
    joined: Column | None = first.concat(columns[1:]) if len(kinds) == 1 else None
    if joined is not None:
        return joined
    if any(isinstance(column, RaggedColumn) for column in columns):
        shapes = "ragged"
    elif any(isinstance(column, TensorColumn) and column.shapes is not None for column in columns):
        shapes = "pad"
    values = [value for column in columns for value in column.values()]
    return stack_values(first.field, values, StackOptions(shapes=shapes), f"{where}.{first.field.name}")


def _concat_arrays(columns: list[DocumentsColumn], shapes: ShapePolicy) -> Column:
    starts = np.cumsum([0] + [int(column.offsets[-1]) for column in columns])
    parts = [column.offsets[1:] + start for column, start in zip(columns, starts, strict=False)]
    offsets = np.concatenate([[0], *parts]).astype(np.int64)
    flat = concat_columns([column.flat for column in columns], shapes)
    return DocumentsColumn(columns[0].field, flat, offsets, joined_validity(columns))
