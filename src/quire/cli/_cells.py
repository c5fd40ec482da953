"""The cells of a CSV file as values, to tell what its columns are."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Any

from pydantic_core import from_json as parse_json

from quire.codec._csv import CsvOptions, table_records

_WHOLE = re.compile(r"-?(0|[1-9]\d{0,18})")
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?|[+-]?(inf|nan)", re.IGNORECASE)
_TRUTH = {"true": True, "false": False}
_PART = re.compile(r"[A-Za-z]\w*")


def rows_of(lines: Iterable[str], options: CsvOptions, name: str) -> Iterator[dict[str, Any]]:
    """The rows of a table as nested dicts of values; a column 'thesis.title' is in the document 'thesis'.

    The first is no row, but has all columns, with nothing in them.
    """
    records = table_records(lines, options, name)
    paths = [_path(column) for column in next(records, (1, []))[1]]
    yield _row(paths, [])
    for _, record in records:
        yield {name: _there(value) for name, value in _row(paths, record).items()}


def _path(column: str) -> tuple[str, ...]:
    parts = column.split(".")
    return tuple(parts) if all(map(_PART.fullmatch, parts)) else (column,)


def _row(paths: Sequence[Any], record: list[str]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for path, cell in zip_longest(paths, record[: len(paths)], fillvalue=""):  # who reads them for good tells of that
        inner = row
        for part in path[:-1]:
            inner = inner.setdefault(part, _Inner())
        inner[path[-1]] = _value(cell)
    return row


def _there(value: Any) -> Any:
    """A document of which no cell has anything is None."""
    if type(value) is not _Inner:
        return value
    found = {name: _there(item) for name, item in value.items()}
    return found if any(item is not None for item in found.values()) else None


class _Inner(dict[str, Any]):
    """A document in several cells."""


def _value(cell: str) -> Any:
    """The number, truth value, list or object in a cell; else the text."""
    if not cell:
        return None
    if _WHOLE.fullmatch(cell):
        return int(cell) if -(1 << 63) <= int(cell) < 1 << 63 else cell
    if _NUMBER.fullmatch(cell):
        is_code = cell.lstrip("+-").isdigit() or re.match(r"[+-]?0\d", cell)  # as in '007': no number would keep it
        return cell if is_code else float(cell)
    if cell.lower() in _TRUTH:
        return _TRUTH[cell.lower()]
    if cell[0] in "[{":
        try:
            return parse_json(cell)
        except ValueError:
            return cell
    return cell
