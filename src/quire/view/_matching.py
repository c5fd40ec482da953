"""Which rows match a filter: columns are looked at as such, and documents only made where that cannot tell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from quire._paths import FieldPath, join_path, parse_path
from quire.array import compile_filter
from quire.columns import Column, Columns, DocumentColumn
from quire.errors import QueryError
from quire.schema import FieldKind, Schema
from quire.storage._pages import Pages

if TYPE_CHECKING:
    from numpy.typing import NDArray


def matching(pages: Pages, where: Mapping[str, Any]) -> NDArray[np.int64]:
    """The positions of the rows that match a filter, in order."""
    schema = pages.dataset.document_type.document_schema()
    query = compile_filter(where, schema)
    paths = sorted({join_path(_column_path(schema, path)) for path in query.paths})
    if not paths:  # it does not depend on the rows
        return np.arange(len(pages) if query(None) else 0)
    found = [np.zeros(0, np.int64)]
    for start, columns in pages.narrow(*paths).blocks():
        mask = query.mask(columns)
        if mask is None:
            return pages.matching(where)
        found.append(start + np.flatnonzero(mask))
    return np.concatenate(found)


def _column_path(schema: Schema, path: FieldPath) -> FieldPath:
    """The part of a path that leads to a column: the rest leads into its values, like the key of a dict."""
    for depth, name in enumerate(path):
        field = schema.by_name.get(name)
        if field is None or field.kind not in (FieldKind.DOCUMENT, FieldKind.DOCUMENTS):
            return path[: depth + 1]
        schema = field.document_type.document_schema()
    return path


def locate_column(columns: Columns, path: str) -> tuple[Column, NDArray[np.bool_]]:
    """The column at a path, and which rows have a value there."""
    present = np.ones(len(columns), np.bool_)
    *above, last = parse_path(path)
    for name in above:
        nested = columns.columns[name]
        if not isinstance(nested, DocumentColumn):
            raise QueryError(f"{path}: {name} has several documents in a row, or none of its own columns.")
        columns = nested.columns
        present = present if columns.validity is None else present & columns.validity
    column = columns.columns[last]
    return column, present & column.valid_rows()
