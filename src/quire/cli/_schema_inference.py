"""Inference of a document class from rows that have none: from JSON objects, from documents, and from CSV cells."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from itertools import islice, zip_longest
from typing import Annotated, Any, ClassVar
from uuid import UUID

import numpy as np
from pydantic import Field, create_model
from pydantic_core import from_json as parse_json

from quire._protocols import is_array_type, is_document_type
from quire.array import DocumentArray
from quire.codec import CsvOptions, table_records
from quire.document import BaseDocument, field_name
from quire.tensors import DType, Shape, framework_of

_PLAIN = (bool, int, float, str, bytes, datetime, date, time, timedelta, Decimal, UUID)
_CELL_TYPES = {bool, int, float, str}


class Row(BaseDocument):
    """Base class of inferred documents without an id."""

    id: ClassVar[None] = None  # type: ignore[assignment,misc]


def infer_document_type(
    rows: Iterable[Any], name: str, sample: int | None = None
) -> tuple[type[BaseDocument], int | None]:
    """Infer a class from mappings or documents; return it with the number of rows, None if there may be more.

    With `sample`, only that many rows are read.
    """
    inferred = InferredType()
    for row in islice(rows, sample):
        inferred.add(row)
    return inferred.document_type(name), None if inferred.count == sample else inferred.count


def infer_table_type(
    lines: Iterable[str], options: CsvOptions, path: str, name: str, sample: int | None = None
) -> tuple[type[BaseDocument], int | None]:
    """Infer a class from the lines of a CSV file, like `infer_document_type`; a column of mixed types is text."""
    rows = read_table(lines, options, path)
    inferred = InferredType()
    inferred.add_columns(next(rows))
    for row in islice(rows, sample):
        inferred.add(row)
    return inferred.document_type(name, is_table=True), None if inferred.count == sample else inferred.count


class InferredType:
    """The types of the values at one place of all rows: of the rows themselves, of a field, of the items of a list."""

    def __init__(self) -> None:
        self.types: set[Any] = set()
        """Python types, and 'document', 'list' and 'tensor'."""
        self.count = self.nones = self.documents = 0
        self.fields: dict[str, InferredType] = {}
        self.items: InferredType | None = None
        self.dtypes: set[str] = set()
        self.shapes: set[tuple[int, ...]] = set()

    def add_columns(self, row: Mapping[str, Any]) -> None:
        """Add the fields of a row without counting its values, so that a table without rows has its columns."""
        for name, item in row.items():
            inner = self.fields.setdefault(name, InferredType())
            if isinstance(item, Mapping):
                inner.types.add("document")
                inner.add_columns(item)

    def add(self, value: Any) -> None:
        """Add the value of another row."""
        self.count += 1
        if value is None:
            self.nones += 1
        elif isinstance(value, _PLAIN):
            self._add_plain(value)
        elif isinstance(value, Mapping):
            self._add_mapping(value)
        elif is_document_type(type(value)):
            self._add_mapping(document_values(value))
        elif isinstance(value, (list, tuple)) or is_array_type(type(value)):
            self.types.add("list")
            self.items = self.items or InferredType()
            for item in value:
                self.items.add(item)
        else:
            framework = framework_of(value)
            if framework is None or framework.is_sparse(value):
                self.types.add(object)
            else:
                self._add_tensor(framework.dtype(value), framework.shape(value))

    def _add_plain(self, value: Any) -> None:
        if type(value) is int and not -(1 << 63) <= value < 1 << 63:
            self.types.add(object)  # does not fit into a column of integers
        else:  # a subclass counts as its base: bool comes before int, datetime before date
            self.types.add(next(known for known in _PLAIN if isinstance(value, known)))

    def _add_mapping(self, value: Mapping[str, Any]) -> None:
        if {"dtype", "shape", "data"} <= value.keys():  # a tensor in quire's JSON
            self._add_tensor(str(value["dtype"]), value["shape"])
            return
        self.types.add("document")
        self.documents += 1
        for name, item in value.items():
            self.fields.setdefault(str(name), InferredType()).add(item)

    def _add_tensor(self, dtype: str, shape: Iterable[int]) -> None:
        self.types.add("tensor")
        self.dtypes.add(dtype)
        self.shapes.add(tuple(shape))

    def annotation(self, name: str, *, is_table: bool = False) -> Any:
        """Return the type of the values, optional if some are None; `name` is that of a nested class."""
        annotation = self._required_annotation(name, is_table=is_table)
        return annotation if annotation is Any or not self.nones else annotation | None

    def _required_annotation(self, name: str, *, is_table: bool) -> Any:
        types = self.types
        if types == {"document"}:
            return self.document_type(name, is_table=is_table)
        if types == {"list"} and self.items is not None:
            return self._list_annotation(self.items, name)
        if types == {"tensor"}:
            return self._tensor_annotation()
        # Integers among floats are floats, since JSON has one type of numbers. Other mixtures are text in a table, and
        # `Any` elsewhere.
        if types in ({int, float}, {float}):
            return float
        if is_table and types <= _CELL_TYPES:
            return next(iter(types)) if len(types) == 1 else str
        return next(iter(types)) if len(types) == 1 and types <= {*_PLAIN} else Any

    def _list_annotation(self, items: InferredType, name: str) -> Any:
        if items.types == {"document"} and not items.nones:
            return DocumentArray[items.document_type(name)]  # type: ignore[misc]
        return list[items.annotation(name)] if items.count else list[Any]  # type: ignore[misc]

    def _tensor_annotation(self) -> Any:
        # A shape or a dtype that differs between rows is left open.
        annotation: Any = np.ndarray
        if len(self.shapes) == 1:
            annotation = Annotated[annotation, Shape(*next(iter(self.shapes)))]
        return Annotated[annotation, DType(next(iter(self.dtypes)))] if len(self.dtypes) == 1 else annotation

    def document_type(self, name: str, *, is_table: bool = False) -> type[BaseDocument]:
        """Create a class with a field for each name that occurs; fields that some rows lack default to None."""
        fields: dict[str, Any] = {}
        for key, inferred in self.fields.items():
            # A name that is no identifier, or that a method of documents has, becomes an alias of a similar one.
            own_name = field_name(key, fields)
            inferred.nones += self.documents - inferred.count  # rows without the field
            annotation = inferred.annotation(f"{name}_{own_name}", is_table=is_table)
            options: dict[str, Any] = {"default": None} if inferred.nones or annotation is Any else {}
            fields[own_name] = (annotation, Field(**options) if own_name == key else Field(alias=key, **options))
        words = re.findall(r"[^\W_]+", name)
        class_name = "".join(word[0].upper() + word[1:] for word in words)
        if not class_name[:1].isalpha():
            class_name = f"Row{class_name}"
        return create_model(class_name, __base__=BaseDocument if "id" in fields else Row, **fields)


def document_values(document: BaseDocument) -> dict[str, Any]:
    """Return the fields of a document, extra ones included."""
    return {**document.__dict__, **(document.__pydantic_extra__ or {})}


def to_plain(value: Any) -> Any:
    """Convert documents to dicts, at any depth."""
    if is_document_type(type(value)):
        return {name: to_plain(item) for name, item in document_values(value).items()}
    if is_array_type(type(value)) or isinstance(value, list):
        return [to_plain(item) for item in value]
    return value


# --- CSV

_INTEGER = re.compile(r"-?(0|[1-9]\d{0,18})")
_FLOAT = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?|[+-]?(inf|nan)", re.IGNORECASE)
_BOOLEANS = {"true": True, "false": False}
_NAME = re.compile(r"[A-Za-z]\w*")


class _NestedRow(dict[str, Any]):
    """A nested document that is spread over several cells; a JSON object in one cell is a plain dict."""


def read_table(lines: Iterable[str], options: CsvOptions, name: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a CSV file as nested dicts; a column 'thesis.title' is in the dict 'thesis'.

    The first dict is no row: it has all columns, and every value is None.
    """
    records = table_records(lines, options, name)
    paths = [_column_path(column) for column in next(records, (1, []))[1]]
    yield _nest(paths, [])
    for _, record in records:
        yield {name: _none_if_empty(value) for name, value in _nest(paths, record).items()}


def _column_path(column: str) -> tuple[str, ...]:
    parts = column.split(".")
    return tuple(parts) if all(map(_NAME.fullmatch, parts)) else (column,)


def _nest(paths: Sequence[tuple[str, ...]], record: list[str]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    # A record of the wrong length is reported when the rows are read with the inferred class, with its line.
    for path, cell in zip_longest(paths, record[: len(paths)], fillvalue=""):
        inner = row
        for part in path[:-1]:
            inner = inner.setdefault(part, _NestedRow())
        inner[path[-1]] = _parse_cell(cell)
    return row


def _none_if_empty(value: Any) -> Any:
    """Replace a nested document of which all cells are empty by None."""
    if type(value) is not _NestedRow:
        return value
    items = {name: _none_if_empty(item) for name, item in value.items()}
    return items if any(item is not None for item in items.values()) else None


def _parse_cell(cell: str) -> Any:
    """Return the number, boolean, list or object in a cell, otherwise its text; None for an empty cell."""
    if not cell:
        return None
    if _INTEGER.fullmatch(cell):
        return int(cell) if -(1 << 63) <= int(cell) < 1 << 63 else cell
    if _FLOAT.fullmatch(cell):
        is_code = cell.lstrip("+-").isdigit() or re.match(r"[+-]?0\d", cell)  # a float would lose the zeros of '007'
        return cell if is_code else float(cell)
    if cell.lower() in _BOOLEANS:
        return _BOOLEANS[cell.lower()]
    if cell[0] in "[{":
        try:
            return parse_json(cell)
        except ValueError:
            return cell
    return cell
