"""Documents as CSV: one row per document, nested fields as dotted columns, lists and tensors as JSON in a cell.

An empty cell is None in an optional field, else the default. A text or blob that is really empty is therefore written
as two quotation marks, and a text of n > 1 quotation marks, which would be taken for an empty one, as n + 1.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import islice
from typing import IO, Any

from pydantic import JsonValue
from pydantic_core import from_json as parse_json
from typing_extensions import Self

from quire._extra_fields import Extra
from quire._lowlevel.forks import ForkSafeLock
from quire._protocols import DocumentLike
from quire.codec._json import from_json, to_json
from quire.codec._kinds import KINDS, CellForm
from quire.codec._readback import check_read_back
from quire.codec._table_columns import (
    Leaf,
    OptionalDocument,
    check_all_in_columns,
    input_keys,
    is_spread,
    leaves,
    optional_documents,
    read_header,
)
from quire.codec._text_files import TextSource, TextTarget, source_name, text_lines, text_writer
from quire.errors import DecodeError, EncodeError, OptionError
from quire.schema import FieldKind, FieldPath, Schema

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_size_limit_lock = ForkSafeLock()
_raised_limits: list[int] = []
"""What the limit of the csv module was before each reader that reads now: of the first one, the original limit."""
_RECORDS_PER_READ = 256


@dataclass(frozen=True)
class CsvOptions:
    """The layout of a CSV file; a delimiter overrides that of the dialect."""

    delimiter: str | None = None
    dialect: str | type[csv.Dialect] = "excel"
    encoding: str = "utf-8"

    def __post_init__(self) -> None:
        try:
            csv.reader((), **self.layout)
            codecs.lookup(self.encoding)
        except (TypeError, ValueError, csv.Error, LookupError) as error:
            raise OptionError(
                f"delimiter={self.delimiter!r}, dialect={self.dialect!r}, encoding={self.encoding!r}: {error}."
            ) from error

    @property
    def layout(self) -> dict[str, Any]:
        """The keywords of Python's csv module."""
        return {"dialect": self.dialect} | ({} if self.delimiter is None else {"delimiter": self.delimiter})


@dataclass(frozen=True)
class _Cells:
    """How the values of one column are written and read."""

    leaf: Leaf
    keys: FieldPath
    form: CellForm
    marks_empty: bool
    """Whether an empty cell means something else than an empty text."""

    @classmethod
    def of(cls, schema: Schema, leaf: Leaf) -> Self:
        """Return the cells of a column."""
        field = leaf.field
        if leaf.is_unknown:
            keys = (*input_keys(schema, leaf.path[:-1]), leaf.path[-1])
            return cls(leaf, keys, CellForm.TEXT, marks_empty=False)
        form = KINDS[field.kind].cell
        if field.decodes_input:  # a field of `Json` takes text, which is not encoded again
            form = CellForm.JSON if any(item.decodes_input for item in field.items) else CellForm.TEXT
        elif field.kind is FieldKind.ENUM:
            is_text = issubclass(field.type, Enum) and all(isinstance(member.value, str) for member in field.type)
            form = CellForm.TEXT if is_text else CellForm.JSON
        marks = field.nullable or not field.required or field.kind is not FieldKind.TEXT
        if field.kind is FieldKind.TEXT and not field.nullable and leaf.default == "":
            marks = False
        return cls(leaf, input_keys(schema, leaf.path), form, marks and form is not CellForm.JSON)

    def write(self, value: JsonValue) -> str:
        """Return a JSON value as the text of a cell."""
        if value is None or value is _ABSENT:
            return "null" if value is None and not self.leaf.field.nullable else ""
        if self.form is CellForm.JSON or not isinstance(value, str):
            return _encode(value)
        if not self.marks_empty or value.strip('"'):
            return value
        # An empty cell means None or the default: an empty text is written as two quotation marks, and a text of two
        # or more of them with one more.
        return '""' if not value else value + '"' if len(value) > 1 else value

    def read(self, cell: str, where: str) -> JsonValue:
        """Return the JSON value of a cell; text that is not of the field's kind is left for pydantic to reject."""
        if self.form is CellForm.NUMBER:
            return _parse_number(self.leaf.field.type, cell)
        if self.form is CellForm.TEXT:
            if not self.marks_empty or len(cell) < 2 or cell.strip('"'):
                return cell
            return "" if cell == '""' else cell[:-1]  # see `write`
        try:
            value: JsonValue = parse_json(cell)  # unlike json.loads, it limits the nesting
        except ValueError as error:
            if self.form is CellForm.JSON or is_spread(self.leaf.field):
                return cell
            raise DecodeError(f"{where}, {self.leaf.name}: the cell is not JSON: {error}.") from error
        return value

    def put(self, values: dict[str, Any], cell: str, where: str) -> None:
        """Add the value of a cell to those of its document; an empty cell that means the default is left out."""
        field, name = self.leaf.field, self.keys[-1]
        if cell or field.nullable:
            values[name] = self.read(cell, where) if cell else None
        elif field.required and field.kind is FieldKind.TEXT:
            values[name] = ""
        elif field.required and not is_spread(field):
            raise DecodeError(
                f"{where}, {self.leaf.name}: the cell is empty, and there is no None and no default for it."
            )


# --- writing


def to_csv(schema: Schema, documents: Sequence[Any], target: TextTarget | None, options: CsvOptions) -> str | None:
    """Write a table of documents; without a target, return the text."""
    if target is None:
        text = io.StringIO(newline="")
        to_csv(schema, documents, text, options)
        return text.getvalue()
    check_all_in_columns(schema, documents)
    with text_writer(target, options.encoding) as file:
        _write_rows(schema, documents, file, options)
    return None


def write_csv(schema: Schema, documents: Iterable[Any], target: TextTarget, options: CsvOptions) -> None:
    """Write a table of documents from an iterable, one by one."""

    def check(document: DocumentLike) -> DocumentLike:
        check_all_in_columns(schema, [document])
        return document

    with text_writer(target, options.encoding) as file:
        _write_rows(schema, map(check, documents), file, options)


def _write_rows(schema: Schema, documents: Iterable[Any], file: IO[str], options: CsvOptions) -> None:
    columns = [_Cells.of(schema, leaf) for leaf in leaves(schema)]
    if not columns:
        raise EncodeError(f"{schema.name} has no fields, and a table without columns has no rows. Use to_json().")
    table = _Table.of(schema, [column.leaf for column in columns])
    writer = csv.writer(file, **options.layout)
    writer.writerow([column.leaf.name for column in columns])
    for row, document in enumerate(documents):
        where = f", row {row}"
        values = parse_json(to_json(document, None, "lists", where, check=False))
        cells = [column.write(_value_at(column.leaf.path, values)) for column in columns]
        read = partial(_read_document, type(document), table, cells, f", line {row + 2}", "forbid")
        # A document whose cells are all empty would be read back as missing.
        vanishing = [
            schema.by_name[optional.path[0]]
            for _, optional in table.optional
            if not any(cells[index] for index in optional.columns)
            and _value_at(optional.path, values) not in (None, _ABSENT)
        ]
        check_read_back(document, read, "CSV", where, vanishing)
        try:
            writer.writerow(cells)
        except csv.Error as error:
            raise EncodeError(f"{schema.name}, row {row}: the dialect cannot write it: {error}.") from error


_ABSENT: Any = object()


def _value_at(path: FieldPath, values: Any) -> Any:
    """Return the value at a path, or `_ABSENT` if a document on the way is None."""
    for name in path:
        if values is None:
            return _ABSENT
        values = values[name]
    return values


# --- reading


@dataclass(frozen=True)
class _Table:
    columns: list[_Cells | None]
    optional: list[tuple[FieldPath, OptionalDocument]]
    """The documents that may be missing, each with the keys under which pydantic accepts it."""

    @classmethod
    def of(cls, schema: Schema, columns: Sequence[Leaf | None]) -> Self:
        """Return the table of some columns."""
        cells = [None if leaf is None else _Cells.of(schema, leaf) for leaf in columns]
        optional = optional_documents(schema, columns)
        return cls(cells, [(input_keys(schema, document.path), document) for document in optional])


def iter_csv(
    document_type: type[Any],
    source: TextSource | None,
    options: CsvOptions,
    extra: Extra,
    text: str | bytes | None = None,
) -> Iterator[Any]:
    """Yield the documents of a table while it is read, from a path or file, or from the content `text`.

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
        _check_delimiter(schema, header, f"{name}, line 1")
        columns = read_header(schema, header, extra, f"{name}, line 1")
        table = _Table.of(schema, columns)
        for line, record in records:
            yield _read_document(document_type, table, record, f"{where}, line {line}", extra)


def _check_delimiter(schema: Schema, header: list[str], where: str) -> None:
    """Raise an error for a header of one cell that another delimiter divides into columns of the schema."""
    names = {leaf.name for leaf in leaves(schema)}
    if len(header) != 1 or header[0] in names:
        return
    for delimiter in (",", ";", "\t", "|"):
        if names.intersection(header[0].split(delimiter)):
            raise DecodeError(f"{where}: the columns are separated by {delimiter!r}. Pass delimiter={delimiter!r}.")


def table_records(lines: Iterable[str], options: CsvOptions, name: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the line number and the cells of each row that is not empty; the first row has the names of the columns.

    Rows are read some at a time, so that the limit of the csv module is as before while the caller uses them.
    """

    def read() -> Iterator[tuple[int, list[str]]]:
        reader = csv.reader(lines, strict=True, **options.layout)
        line = 1
        try:
            for record in reader:
                if record:
                    yield line, record
                line = reader.line_num + 1
        except csv.Error as error:
            raise DecodeError(f"{name}, line {line}: {error}.") from error

    records = read()
    block: list[tuple[int, list[str]]] = []
    error: DecodeError | None = None
    # An error is raised after the rows before it have been yielded.
    while error is None:
        with _unlimited_cells():
            try:
                block.extend(islice(records, _RECORDS_PER_READ))
            except DecodeError as cause:
                error = cause
        if not block:
            break
        yield from block
        block.clear()
    if error is not None:
        raise error


def _read_document(document_type: type[Any], table: _Table, record: list[str], where: str, extra: Extra) -> Any:
    if len(record) != len(table.columns):
        raise DecodeError(
            f"{document_type.__name__}{where}: {len(record)} cells, but the header has {len(table.columns)}."
        )
    row: dict[str, Any] = {}
    absent: set[int] = set()  # the columns of documents whose cells are all empty
    for keys, document in table.optional:
        if document.columns[0] in absent or any(record[index] for index in document.columns):
            continue
        absent.update(document.columns)
        if document.nullable:
            _parent(row, keys)[keys[-1]] = None
    for index, column in enumerate(table.columns):
        if column is not None and index not in absent:
            column.put(_parent(row, column.keys), record[index], f"{document_type.__name__}{where}")
    return from_json(document_type, json.dumps(row), where, extra=extra)


def _parent(row: dict[str, Any], path: FieldPath) -> dict[str, Any]:
    for name in path[:-1]:
        row = row.setdefault(name, {})
    return row


def _parse_number(tp: type[Any], cell: str) -> float | str:
    word = cell.strip()
    if tp is bool:
        return {"true": True, "false": False}.get(word.lower(), cell)
    try:
        if tp in (int, float) and word.lstrip("+-").isdecimal():
            return int(word)
        return float(word) if tp is float else cell
    except ValueError:
        return cell


@contextmanager
def _unlimited_cells() -> Iterator[None]:
    """Lift the csv module's limit of 128 KiB for a cell, which a tensor exceeds.

    The limit is a setting of the whole process: the first of several readers lifts it, and the last one restores it.
    The lock is not held while they read, since lines may come from a slow pipe, or from another reader.
    """
    with _size_limit_lock:
        _raised_limits.append(csv.field_size_limit(min(sys.maxsize, 2**31 - 1)))
    try:
        yield
    finally:
        with _size_limit_lock:
            original = _raised_limits[0]
            _raised_limits.pop()
            if not _raised_limits:
                csv.field_size_limit(original)
