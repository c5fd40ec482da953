"""Documents as CSV: a row a document, nested fields as dotted columns, lists and tensors as JSON in a cell.

An empty cell is None in an optional field, else the default. A text or blob that is empty all the same is written as
two quotation marks; a text of n > 1 quotation marks, which would be taken for one, as n + 1.
"""

from __future__ import annotations

import csv
import io
import json
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import islice
from typing import Any

from pydantic_core import from_json as parse_json
from typing_extensions import Self

from quire._extra_fields import Extra
from quire.codec._flat import Gap, Leaf, check_nothing_more, gaps, input_keys, is_spread, leaves, read_header
from quire.codec._json import from_json, to_json
from quire.codec._readback import check_read_back
from quire.codec._text_files import TextSource, TextTarget, source_name, text_lines, text_writer
from quire.errors import DecodeError, EncodeError
from quire.schema import Field, FieldKind, FieldPath, Schema

_TREES = (FieldKind.TENSOR, FieldKind.DOCUMENT, FieldKind.DOCUMENTS, FieldKind.LIST, FieldKind.DICT)
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_limit = threading.Lock()
_BLOCK = 256
"""So many records are read at a time."""


@dataclass(frozen=True)
class CsvOptions:
    """How a CSV file is laid out; a delimiter overrides the dialect's."""

    delimiter: str | None = None
    dialect: str | type[csv.Dialect] = "excel"
    encoding: str = "utf-8"

    @property
    def layout(self) -> dict[str, Any]:
        """What Python's csv module is told."""
        return {"dialect": self.dialect} | ({} if self.delimiter is None else {"delimiter": self.delimiter})


@dataclass(frozen=True)
class _Cells:
    """How the values of one column are written and read."""

    leaf: Leaf
    keys: FieldPath
    is_json: bool
    """Every value is JSON: only so does a union know the text '1' from the number."""
    is_text: bool
    """Every value is a text, whatever the kind of the field."""
    marks_empty: bool
    """An empty cell means something else than an empty text."""

    @classmethod
    def of(cls, schema: Schema, leaf: Leaf) -> Self:
        """The cells of a column."""
        field = leaf.field
        if leaf.is_unknown:
            keys = (*input_keys(schema, leaf.path[:-1]), leaf.path[-1])
            return cls(leaf, keys, is_json=False, is_text=True, marks_empty=False)
        is_json = field.kind in (FieldKind.UNION, FieldKind.ANY)
        if field.kind is FieldKind.ENUM:
            is_json = not (issubclass(field.type, Enum) and all(isinstance(member.value, str) for member in field.type))
        is_text = field.decodes_input and not any(item.decodes_input for item in field.items)  # JSON text as it is
        is_json = not is_text and (is_json or field.decodes_input)
        marks = field.nullable or not field.required or field.kind is not FieldKind.TEXT
        if field.kind is FieldKind.TEXT and not field.nullable and leaf.default == "":
            marks = False
        return cls(leaf, input_keys(schema, leaf.path), is_json, is_text, marks and not is_json)

    def write(self, value: Any) -> str:
        """A JSON value as the text of a cell."""
        if value is None or value is _ABSENT:
            return "null" if value is None and not self.leaf.field.nullable else ""
        if self.is_json or not isinstance(value, str):
            return _encode(value)
        return _marked(value) if self.marks_empty else value

    def read(self, cell: str, where: str) -> Any:
        """The JSON value of a cell. What is not what the kind needs stays text, and pydantic says why not."""
        kind = FieldKind.TEXT if self.is_text else self.leaf.field.kind
        if self.leaf.is_unknown:
            return cell
        if kind is FieldKind.SCALAR and not self.is_json:
            return _number(self.leaf.field.type, cell)
        if not self.is_json and kind not in _TREES:
            return _unmarked(cell) if self.marks_empty else cell
        try:
            return parse_json(cell)  # whose nesting is bounded, unlike that of json.loads
        except ValueError as error:
            if self.is_json or is_spread(self.leaf.field):
                return cell
            raise DecodeError(f"{where}, {self.leaf.name}: the cell is not JSON: {error}.") from error


def _marked(text: str) -> str:
    return '""' if not text else text + '"' if len(text) > 1 and not text.strip('"') else text


def _unmarked(cell: str) -> str:
    return cell if len(cell) < 2 or cell.strip('"') else "" if cell == '""' else cell[:-1]


# --- writing


def to_csv(schema: Schema, documents: Sequence[Any], target: TextTarget | None, options: CsvOptions) -> str | None:
    """Write a table of the documents; without a target, give the text."""
    if target is None:
        text = io.StringIO(newline="")
        to_csv(schema, documents, text, options)
        return text.getvalue()
    check_nothing_more(schema, documents)
    with text_writer(target, options.encoding) as file:
        _write_rows(schema, documents, file, options)
    return None


def write_csv(schema: Schema, documents: Iterable[Any], target: TextTarget, options: CsvOptions) -> None:
    """Write a table of documents as they come."""
    with text_writer(target, options.encoding) as file:
        _write_rows(schema, _checked(schema, documents), file, options)


def _checked(schema: Schema, documents: Iterable[Any]) -> Iterator[Any]:
    for document in documents:
        check_nothing_more(schema, [document])
        yield document


def _write_rows(schema: Schema, documents: Iterable[Any], file: Any, options: CsvOptions) -> None:
    columns = [_Cells.of(schema, leaf) for leaf in leaves(schema)]
    if not columns:
        raise EncodeError(f"{schema.name} has no fields, and a table without columns has no rows. Use to_json().")
    table = _Table.of(schema, [column.leaf for column in columns])
    writer = csv.writer(file, **options.layout)
    writer.writerow([column.leaf.name for column in columns])
    for row, document in enumerate(documents):
        where = f", row {row}"
        values = parse_json(to_json(document, None, "lists", where, check=False))
        cells = [column.write(_at(column.leaf.path, values)) for column in columns]
        read = partial(_document, type(document), table, cells, f", line {row + 2}", "forbid")
        check_read_back(document, read, "CSV", where, _vanishing(schema, table, cells, values))
        _write(writer, cells, schema, row)


def _vanishing(schema: Schema, table: _Table, cells: list[str], values: dict[str, Any]) -> list[Field]:
    """The fields of documents that exist, but have no cell that says so."""
    return [
        schema.by_name[gap.path[0]]
        for _, gap in table.gaps
        if not any(cells[index] for index in gap.columns) and _at(gap.path, values) not in (None, _ABSENT)
    ]


def _write(writer: Any, cells: list[str], schema: Schema, row: int) -> None:
    try:
        writer.writerow(cells)
    except csv.Error as error:
        raise EncodeError(f"{schema.name}, row {row}: the dialect cannot write it: {error}.") from error


_ABSENT: Any = object()


def _at(path: FieldPath, values: Any) -> Any:
    """The value at a path; a mark where a document on the way is None."""
    for name in path:
        if values is None:
            return _ABSENT
        values = values[name]
    return values


# --- reading


@dataclass(frozen=True)
class _Table:
    columns: list[_Cells | None]
    gaps: list[tuple[FieldPath, Gap]]
    """The documents that may be missing, and the keys of each."""

    @classmethod
    def of(cls, schema: Schema, columns: Sequence[Leaf | None]) -> Self:
        """The table of columns."""
        cells = [None if leaf is None else _Cells.of(schema, leaf) for leaf in columns]
        return cls(cells, [(input_keys(schema, gap.path), gap) for gap in gaps(schema, columns)])


def iter_csv(
    document_type: type[Any],
    source: TextSource | None,
    options: CsvOptions,
    extra: Extra,
    text: str | bytes | None = None,
) -> Iterator[Any]:
    """The documents of a table, as they are read: of a path or file, or of content given as `text`.

    An error names the line and the column.
    """
    schema: Schema = document_type.document_schema()
    name = source_name(source, "the table")
    where = f" in {name}"
    with text_lines(source, options.encoding, text) as lines:
        records = table_records(lines, options, name)
        header = next(records, (1, None))[1]
        if header is None:
            raise DecodeError(f"{name} is empty: it has no line with the names of the columns.")
        columns = read_header(schema, header, extra, f"{name}, line 1")
        table = _Table.of(schema, columns)
        for line, record in records:
            yield _document(document_type, table, record, f"{where}, line {line}", extra)


def table_records(lines: Iterable[str], options: CsvOptions, name: str) -> Iterator[tuple[int, list[str]]]:
    """The cells of each row that is not empty, and the line on which it begins; the first has the names of columns."""
    return _in_blocks(_records(lines, options, name))


def _in_blocks(records: Iterator[tuple[int, list[str]]]) -> Iterator[tuple[int, list[str]]]:
    """The records, taken some at a time: nobody is kept from reading while the caller is at work."""
    block: list[tuple[int, list[str]]] = []
    error: DecodeError | None = None
    while error is None:
        with _cells_of_any_size():
            try:
                block.extend(islice(records, _BLOCK))
            except DecodeError as found:
                error = found
        if not block:
            break
        yield from block
        block.clear()
    if error is not None:
        raise error


def _records(lines: Iterable[str], options: CsvOptions, name: str) -> Iterator[tuple[int, list[str]]]:
    """The records that are not empty, and the line on which each begins."""
    reader = csv.reader(lines, strict=True, **options.layout)
    line = 1
    try:
        for record in reader:
            if record:
                yield line, record
            line = reader.line_num + 1
    except csv.Error as error:
        raise DecodeError(f"{name}, line {line}: {error}.") from error


def _document(document_type: type[Any], table: _Table, record: list[str], where: str, extra: Extra) -> Any:
    if len(record) != len(table.columns):
        raise DecodeError(
            f"{document_type.__name__}{where}: {len(record)} cells, but the header has {len(table.columns)}."
        )
    row, absent = _absent_documents(table, record)
    for index, column in enumerate(table.columns):
        if column is not None and index not in absent:
            _place(row, column, record[index], f"{document_type.__name__}{where}")
    return from_json(document_type, json.dumps(row), where, extra=extra)


def _absent_documents(table: _Table, record: list[str]) -> tuple[dict[str, Any], set[int]]:
    """A row with None for the optional documents whose cells are all empty, and the columns that are theirs."""
    row: dict[str, Any] = {}
    absent: set[int] = set()
    for keys, gap in table.gaps:
        if gap.columns[0] in absent or any(record[index] for index in gap.columns):
            continue
        absent.update(gap.columns)
        if gap.nullable:
            _parent(row, keys)[keys[-1]] = None
    return row, absent


def _parent(row: dict[str, Any], path: FieldPath) -> dict[str, Any]:
    for name in path[:-1]:
        row = row.setdefault(name, {})
    return row


def _place(row: dict[str, Any], column: _Cells, cell: str, where: str) -> None:
    """Put the value of a cell where it belongs; an empty one that means the default is left out."""
    field, name = column.leaf.field, column.keys[-1]
    row = _parent(row, column.keys)
    if cell or field.nullable:
        row[name] = column.read(cell, where) if cell else None
    elif field.required and field.kind is FieldKind.TEXT:
        row[name] = ""
    elif field.required and not is_spread(field):
        raise DecodeError(
            f"{where}, {column.leaf.name}: the cell is empty, and there is no None and no default for it."
        )


def _number(tp: type[Any], cell: str) -> Any:
    word = cell.strip()
    if tp is bool:
        return {"true": True, "false": False}.get(word.lower(), cell)
    try:
        return (
            int(word) if tp in (int, float) and word.lstrip("+-").isdecimal() else float(word) if tp is float else cell
        )
    except ValueError:
        return cell


@contextmanager
def _cells_of_any_size() -> Iterator[None]:
    """The csv module's limit of 128 KiB, which is the whole process's, would refuse a tensor."""
    with _limit:
        before = csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
        try:
            yield
        finally:
            csv.field_size_limit(before)
