"""How often the values of two columns occur together: a confusion matrix, as of labels and predictions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.errors import QueryError
from quire.schema import Field, FieldKind, join_path, parse_path
from quire.storage import Pages
from quire.viewer._enum_names import EnumNames, name_of
from quire.viewer._row_order import locate_column

if TYPE_CHECKING:
    from numpy.typing import NDArray

COMPARABLE = (FieldKind.SCALAR, FieldKind.TEXT, FieldKind.ENUM, FieldKind.DATE, FieldKind.UUID)
MAX_ROWS = 2_000_000
"""Rows that are counted: the first ones of a larger selection."""
_MAX_VALUES = 12
"""Values with a row and a column of their own; the others are counted together."""
_MAX_DISTINCT = 10_000
_LONGEST = 200


def compare_columns(
    pages: Pages, path: str, other: str, rows: NDArray[np.int64] | None, names: EnumNames
) -> dict[str, Any]:
    """Count the pairs of values of two columns, in all rows or in some of them (in any order).

    `labels` are the most frequent values of both columns, as texts, with None for missing ones; `counts` has a row for
    each value of the first column. The last row and the last column stand for all other values, if there are some.
    """
    schema = pages.dataset.document_type.document_schema()
    fields = [schema.resolve(parse_path(each))[-1] for each in (path, other)]
    for each, field in zip((path, other), fields, strict=True):
        if field.kind not in COMPARABLE:
            raise QueryError(f"{each} is {field}, whose values are not counted: compare labels, numbers or texts.")
    texts = [
        _labeller(field, join_path(parse_path(each)), names) for each, field in zip((path, other), fields, strict=True)
    ]
    total = len(pages) if rows is None else len(rows)
    selected = None if rows is None else np.sort(rows[:MAX_ROWS])
    pairs: Counter[tuple[str | None, str | None]] = Counter()
    for start, columns in pages.narrow(*dict.fromkeys((path, other))).blocks():
        if start >= MAX_ROWS and selected is None:
            break
        if selected is not None:
            bounds = np.searchsorted(selected, [start, start + len(columns)])
            inside = selected[bounds[0] : bounds[1]] - start
            if not len(inside):
                continue
            columns = columns.take(inside)  # noqa: PLW2901 - the rows of the block that are selected
        values = [_read_labels(columns, each, text) for each, text in zip((path, other), texts, strict=True)]
        pairs.update(zip(*values, strict=True))
        if len(pairs) > _MAX_DISTINCT:
            raise QueryError(
                f"{path} and {other} have more than {_MAX_DISTINCT:,} pairs of values: they are no labels."
            )
    return {"path": path, "other": other, "total": total, **_count(pairs)}


def _labeller(field: Field, path: str, names: EnumNames) -> Callable[[Any], str | None]:
    members = names.get(path)

    def label(value: Any) -> str | None:
        if value is None or value != value:  # NaN is missing
            return None
        if isinstance(value, Enum):
            return value.name
        if members is not None and (name := name_of(value, members)) is not None:
            return name
        return str(value).lower() if field.type is bool else str(value)[:_LONGEST]

    return label


def _read_labels(columns: Any, path: str, label: Callable[[Any], str | None]) -> list[str | None]:
    column, present = locate_column(columns, path)
    return [label(value) if is_present else None for value, is_present in zip(column.values(), present, strict=True)]


def _count(pairs: Counter[tuple[str | None, str | None]]) -> dict[str, Any]:
    frequent: Counter[str | None] = Counter()
    for (one, other), times in pairs.items():
        frequent[one] += times
        frequent[other] += times
    labels = [label for label, _ in frequent.most_common(_MAX_VALUES)]
    labels.sort(key=lambda label: (label is None, _sort_key(label)))
    places = {label: place for place, label in enumerate(labels)}
    has_others = len(frequent) > len(labels)
    size = len(labels) + has_others
    counts = np.zeros((size, size), np.int64)
    for (one, other), times in pairs.items():
        counts[places.get(one, size - 1), places.get(other, size - 1)] += times
    equal = sum(times for (one, other), times in pairs.items() if one == other)
    return {
        "labels": labels,
        "others": has_others,
        "counts": counts.tolist(),
        "rows": int(counts.sum()),
        "equal": equal,
    }


def _sort_key(label: str | None) -> tuple[int, float, str]:
    """Sort numbers by their value, and other labels after them."""
    try:
        return 0, float(label or ""), ""
    except ValueError:
        return 1, 0.0, label or ""
