"""The cells of a CSV file as values, to tell what its columns are."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from quire.codec._csv import _cells_of_any_size
from quire.errors import DecodeError

_WHOLE = re.compile(r"-?(0|[1-9]\d{0,18})")
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?|[+-]?(inf|nan)", re.IGNORECASE)
_TRUTH = {"true": True, "false": False}
_PART = re.compile(r"[A-Za-z]\w*")


def rows_of(lines: Iterable[str], layout: dict[str, Any], name: str) -> Iterator[dict[str, Any]]:
    """The rows of a table as nested dicts of values; a column 'thesis.title' is in the document 'thesis'."""
    with _cells_of_any_size():
        records = csv.reader(lines, strict=True, **layout)
        try:
            paths = [_path(column) for column in next(records, ())]
            for record in filter(None, records):
                yield _row(paths, record)
        except csv.Error as error:
            raise DecodeError(f"{name}, line {records.line_num}: {error}.") from error


def _path(column: str) -> tuple[str, ...]:
    parts = column.split(".")
    return tuple(parts) if all(map(_PART.fullmatch, parts)) else (column,)


def _row(paths: list[tuple[str, ...]], record: list[str]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for path, cell in zip(paths, record, strict=False):  # whoever reads them for good tells of missing cells
        inner = row
        for part in path[:-1]:
            inner = inner.setdefault(part, {})
        inner[path[-1]] = _value(cell)
    return row


def _value(cell: str) -> Any:
    """The number, truth value, list or object in a cell; else the text."""
    if not cell:
        return None
    if _WHOLE.fullmatch(cell):
        return int(cell) if -(1 << 63) <= int(cell) < 1 << 63 else cell
    if _NUMBER.fullmatch(cell):
        return float(cell) if not re.match(r"[+-]?0\d", cell) else cell  # a code, as in '007'
    if cell.lower() in _TRUTH:
        return _TRUTH[cell.lower()]
    if cell[0] in "[{":
        try:
            return json.loads(cell)
        except ValueError:
            return cell
    return cell
