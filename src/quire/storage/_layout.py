"""The layout of a document class in Arrow: the codec of each field, chosen by the schema alone."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Flag
from functools import cached_property
from itertools import accumulate
from typing import Any, ClassVar, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import PydanticUserError
from pydantic.errors import PydanticInvalidForJsonSchema

from quire._class_registry import class_name
from quire.columns import Columns
from quire.errors import EncodeError, OptionError, PathError, SchemaError
from quire.schema import Field, FieldKind, FieldPath, Schema, join_path, parse_path
from quire.storage._arrow_codec import (
    ArrowCodec,
    AsTextCodec,
    BytesCodec,
    DatetimeCodec,
    EnumCodec,
    EnumNumberCodec,
    EnumTextCodec,
    FixedWidthCodec,
    MessageCodec,
    NumberCodec,
    TextCodec,
    enum_value_type,
)
from quire.storage._interchange_codecs import (
    LISTABLE,
    InferredCodec,
    MapCodec,
    TensorListCodec,
    TimestampCodec,
    ValueListCodec,
)
from quire.storage._nested_codecs import (
    PLACEHOLDER,
    DocumentCodec,
    DocumentsCodec,
    ListCodec,
    encode_fields,
    find_node,
    has_list_codec,
    placeholder_array,
)
from quire.storage._row_locations import AddressTable, RowLocations
from quire.storage._tensor_codecs import ComplexCodec, RaggedTensorCodec, TensorCodec

TensorStorage = Literal["fixed", "binary", "list"]
"""How tensors of one shape are stored: as bytes of one length, as bytes, or as nested lists."""
SCHEMA_KEY, FINGERPRINT_KEY, CLASS_KEY = b"quire.json_schema", b"quire.fingerprint", b"quire.class"
FORMAT_KEY, CLASSES_KEY, ENUMS_KEY = b"quire.format", b"quire.classes", b"quire.enums"
Paths = Sequence[FieldPath] | None
"""The paths of the fields that are read; None for all of them."""


def resolve_columns(schema: Schema, columns: Iterable[str] | None) -> Paths:
    """Parse the paths of columns, and check that the schema has them."""
    if columns is None:
        return None
    if isinstance(columns, str):
        raise OptionError(f"columns is a list of paths, as in ['image', 'meta.source'], got {columns!r}.")
    paths = [parse_path(path) for path in columns]
    if not paths:
        raise OptionError(f"columns=[] reads nothing: name fields of {schema.name}, or leave it out to read all.")
    for path in paths:
        schema.resolve(path)
    return None if () in paths else paths


def paths_within(schema: Schema, paths: Iterable[FieldPath], selected: Paths) -> list[FieldPath]:
    """Return the paths to read for `paths` where only the `selected` columns are read; others are an error."""
    if selected is None:
        return list(paths)
    within: list[FieldPath] = []
    for path in paths:
        if any(path[: len(column)] == column for column in selected):
            within.append(path)
            continue
        below = [column for column in selected if column[: len(path)] == path]
        if not below:
            raise PathError(
                f"{schema.name}.{join_path(path)} is not among the columns that the dataset was opened with: "
                f"{', '.join(map(join_path, selected))}. Add it to columns= of open_dataset()."
            )
        within += below
    return within


def _select_fields(schema: Schema, paths: Paths) -> Schema:
    """Return the schema with the fields that paths begin with, in the order of the class."""
    if paths is None:
        return schema
    names = {path[0] for path in paths}
    return replace(schema, fields=tuple(field for field in schema.fields if field.name in names))


class Layout:
    """The codecs of all fields of a schema, and the Arrow schema that they make."""

    _storages: ClassVar[tuple[str, ...]] = ("fixed", "binary", "list")

    def __init__(self, schema: Schema, tensor_storage: str = "fixed", paths: Paths = None) -> None:
        if tensor_storage not in self._storages:
            raise OptionError(f"tensor_storage={tensor_storage!r}: use 'fixed', 'binary' or 'list'.")
        if schema.is_open:
            raise SchemaError("a dataset needs the documents' class: document_type=Student.")
        self.schema, self.paths = _select_fields(schema, paths), paths
        self.codecs = _choose_codecs(self.schema, schema.name, tensor_storage, paths)
        self.fields = pa.schema([codec.arrow_field() for codec in self.codecs] or [PLACEHOLDER])
        self.parts = 0
        for codec in self.codecs:
            self.parts = codec.assign_parts(self.parts)

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the names and types of all fields."""
        # The digest is stored in logs and in names of cached files: what goes into it must never change.
        fields = [(f.name, str(f.type), f.nullable, sorted((f.metadata or {}).items())) for f in self.fields]
        return hashlib.blake2b(repr(fields).encode(), digest_size=8).hexdigest()

    @cached_property
    def arrow_schema(self) -> pa.Schema:
        """The Arrow schema of shards, whose metadata describes the class."""
        metadata = {
            CLASS_KEY: class_name(self.schema.document_type).encode(),
            FINGERPRINT_KEY: self.fingerprint.encode(),
            SCHEMA_KEY: json_schema(self.schema).encode(),
            FORMAT_KEY: b"2",
            CLASSES_KEY: json.dumps(dict(_nested_classes(self.codecs, ()))).encode(),
            ENUMS_KEY: json.dumps(dict(_enums(self.schema.fields, ()))).encode(),
        }
        return self.fields.with_metadata(metadata)

    def encode(self, columns: Columns) -> pa.RecordBatch:
        """Return the columns as a record batch."""
        return self.batch(encode_fields(self.codecs, columns, self.schema.name), len(columns))

    def batch(self, arrays: Sequence[pa.Array], rows: int) -> pa.RecordBatch:
        """Return a record batch of the arrays of all codecs; without any, a column keeps the number of rows."""
        if not arrays:
            return pa.RecordBatch.from_arrays([placeholder_array(rows)], schema=self.fields)
        fields = [codec.field_of_type(array.type) for codec, array in zip(self.codecs, arrays, strict=True)]
        return pa.RecordBatch.from_arrays(list(arrays), schema=pa.schema(fields))

    def empty_batch(self) -> pa.RecordBatch:
        """Return a record batch without rows."""
        return pa.RecordBatch.from_pylist([], self.fields)

    def decode(self, batch: pa.RecordBatch) -> Columns:
        """Copy the columns of a record batch of this layout."""
        return self.gather(self.locate_rows(batch))

    def addresses(self) -> AddressTable:
        """Return an empty table for the addresses of record batches of this layout."""
        return AddressTable(self.parts)

    def locate(self, batch: pa.RecordBatch) -> list[int]:
        """Return the parts of a record batch, as an address table holds them."""
        arrays = batch.columns if self.codecs else ()
        return [part for codec, array in zip(self.codecs, arrays, strict=True) for part in codec.locate(array)]

    def locate_rows(self, batch: pa.RecordBatch, positions: NDArray[np.int64] | None = None) -> RowLocations:
        """Return the locations of rows of a record batch, by default of all."""
        if positions is None:
            positions = np.arange(len(batch), dtype=np.int64)
        addresses = self.addresses()
        addresses.add(self.locate(batch), batch)
        return RowLocations(addresses, np.zeros(len(positions), np.int64), positions)

    def find_codec(self, path: FieldPath) -> ArrowCodec | None:
        """Return the codec of a field, also inside of nested documents; None if it is not read, or inside of a list."""
        codec, codecs = None, self.codecs
        for name in path:
            codec = next((child for child in codecs if child.field.name == name), None)
            codecs = codec.codecs if isinstance(codec, DocumentCodec) else ()
        return codec

    def field_nodes(self, schema: pa.Schema, codecs: Sequence[ArrowCodec] | None = None) -> list[list[int]]:
        """Return the Arrow field nodes of a file that each codec reads; `codecs` are those that read it, if not all."""
        fields = list(schema)
        return [
            codec.field_nodes(*find_node(codec, fields, 0)) if codecs is None or codec in codecs else []
            for codec in self.codecs
        ]

    @cached_property
    def _large_tensors(self) -> list[TensorCodec]:
        return [codec for codec in self.codecs if codec.is_large and isinstance(codec, TensorCodec)]

    def read_ahead(self, rows: RowLocations, counts: NDArray[np.int64]) -> None:
        """Let the system read the large columns of `counts` rows from each of these on."""
        for codec in self._large_tensors:
            codec.read_ahead(rows, counts)

    @cached_property
    def read_ahead_parts(self) -> frozenset[int]:
        """The parts that `read_ahead` reads."""
        return frozenset(codec.first + 1 for codec in self._large_tensors)

    def gather(self, rows: RowLocations) -> Columns:
        """Copy the columns of rows, after their checksums are verified where that is due."""
        rows.verify()
        return Columns(self.schema, {codec.field.name: codec.gather(rows) for codec in self.codecs}, len(rows))

    def gather_parts(self, rows: RowLocations, sizes: Sequence[int], without: str | None = None) -> Iterator[Columns]:
        """Copy the columns of consecutive parts of rows, of these sizes; small columns are copied for all at once.

        The column of the field `without` is left out.
        """
        schema, codecs = self.schema, self.codecs
        if without is None:
            rows.verify()
        else:
            schema = replace(schema, fields=tuple(field for field in schema.fields if field.name != without))
            codecs = [codec for codec in codecs if codec.field.name != without]
            rows.verify([number for number, codec in enumerate(self.codecs) if codec.field.name != without])
        # Small columns are gathered for all parts at once: a call costs more than the copy. Large ones are gathered
        # part by part, when the caller asks for the next one, so that the tensors of one part are in memory.
        spans = [slice(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]
        parts = {
            codec.field.name: codec.gather_parts(rows, spans)
            if codec.is_large
            else map(codec.gather(rows).slice, spans)
            for codec in codecs
        }
        for size in sizes:
            yield Columns(schema, {name: next(columns) for name, columns in parts.items()}, size)


class InterchangeLayout(Layout):
    """The codecs of data for other libraries: each field as the Arrow type that they compute with.

    Fields that Arrow has no type for are errors. With `in_utc`, times that have a zone are in UTC. Tables can be
    encoded, and not decoded; `quire.storage._schema_conversion` reads them.
    """

    _storages: ClassVar[tuple[str, ...]] = ("interchange", "interchange in UTC")

    def __init__(self, schema: Schema, paths: Paths = None, *, in_utc: bool = False) -> None:
        super().__init__(schema, "interchange in UTC" if in_utc else "interchange", paths)

    def inferred_codecs(self) -> dict[str, InferredCodec]:
        """Return the codecs whose Arrow type depends on values, by path."""
        return {codec.path: codec for codec in _walk(self.codecs) if isinstance(codec, InferredCodec)}


def _walk(codecs: Iterable[ArrowCodec]) -> Iterator[ArrowCodec]:
    for codec in codecs:
        yield codec
        yield from _walk(codec.children)


# --- the codec of each kind of field


def _choose_codecs(schema: Schema, path: str, storage: str, paths: Paths) -> Sequence[ArrowCodec]:
    """Return the codec of each field; values of fields without a column type are stored as messages."""
    codecs = []
    for field in schema.fields:
        field_path = f"{path}.{field.name}"
        # Of a nested document, only the fields at the paths are read: pass on what is left of the paths below it.
        below = None if paths is None else [rest[1:] for rest in paths if rest[0] == field.name]
        if below is not None and () in below:
            below = None  # the path of the field itself: all of it is read
        if storage.startswith("interchange"):
            codecs.append(_interchange_codec(field, field_path, storage, below))
            continue
        build = _CODECS.get(field.kind)
        codec = None if build is None else build(field, field_path, storage, below)
        codecs.append(MessageCodec(field, field_path, schema) if codec is None else codec)
    return codecs


def _interchange_codec(field: Field, path: str, storage: str, paths: Paths = None) -> ArrowCodec:
    # The input of fields like Json is not their value, so that a reader could not tell which of both a column has.
    build = None if field.decodes_input else _INTERCHANGE_CODECS.get(field.kind)
    codec = None if build is None else build(field, path, storage, paths)
    if codec is None:
        raise EncodeError(
            f"{path}: Arrow has no type for {field}. Select other columns, as columns=['id'], or give the field a type "
            "such as str, list[float] or dict[str, int]."
        )
    return codec


def _document_codec(field: Field, path: str, storage: str, paths: Paths) -> ArrowCodec | None:
    if field.recursive:  # a struct cannot contain itself: such documents are stored as messages
        return None
    schema = _select_fields(field.document_type.document_schema(), paths)
    codecs = _choose_codecs(schema, path, storage, paths)
    if field.kind is FieldKind.DOCUMENT:
        return DocumentCodec(field, path, schema, codecs)
    item = Field("item", FieldKind.DOCUMENT, field.document_type)  # a document of the array, for paths and errors
    return DocumentsCodec(field, path, DocumentCodec(item, path, schema, codecs))


def _tensor_codec(field: Field, path: str, storage: str, _: Paths) -> ArrowCodec | None:
    spec = field.spec
    if spec.dtype == "string":
        return None
    if spec.dtype is None or spec.fixed_shape is None or 0 in spec.fixed_shape:  # Parquet has no bytes of length 0
        return RaggedTensorCodec(field, path)
    if storage == "list" and not LISTABLE.fullmatch(spec.dtype):
        storage = "fixed"  # lists have no short floats and no complex numbers
    return TensorCodec(field, path, spec.dtype, spec.fixed_shape, storage)


def _number_codec(field: Field, path: str, *_: Any) -> ArrowCodec | None:
    if field.type is complex:
        return ComplexCodec(field, path)
    return NumberCodec(field, path) if field.type in NumberCodec.types else None


def _enum_codec(field: Field, path: str, *_: Any) -> ArrowCodec | None:
    if issubclass(field.type, Flag):
        return None
    value_type = enum_value_type(field.type)
    if value_type is None:
        return EnumCodec(field, path)
    return EnumTextCodec(field, path) if value_type is str else EnumNumberCodec(field, path, value_type)


_Build = Callable[[Field, str, str, Paths], ArrowCodec | None]
_CODECS: Mapping[FieldKind, _Build] = {
    FieldKind.SCALAR: _number_codec,
    FieldKind.TEXT: lambda field, path, *_: TextCodec(field, path),
    FieldKind.BYTES: lambda field, path, *_: BytesCodec(field, path) if field.type is bytes or field.wrapper else None,
    FieldKind.DATE: lambda field, path, *_: FixedWidthCodec(field, path),
    FieldKind.TIME: lambda field, path, *_: FixedWidthCodec(field, path),
    FieldKind.TIMEDELTA: lambda field, path, *_: FixedWidthCodec(field, path),
    FieldKind.UUID: lambda field, path, *_: FixedWidthCodec(field, path),
    FieldKind.DATETIME: lambda field, path, *_: DatetimeCodec(field, path),
    FieldKind.ENUM: _enum_codec,
    FieldKind.DECIMAL: lambda field, path, *_: AsTextCodec(field, path),
    FieldKind.PATH: lambda field, path, *_: AsTextCodec(field, path),
    FieldKind.LIST: lambda field, path, *_: ListCodec(field, path) if has_list_codec(field) else None,
    FieldKind.TENSOR: _tensor_codec,
    FieldKind.DOCUMENT: _document_codec,
    FieldKind.DOCUMENTS: _document_codec,
}
"""How each kind of field is stored in Arrow and Parquet: the one place where a new kind is added.

An entry returns None where a field of the kind has no column type. Those, and kinds without an entry, are stored as
messages of the wire format (`MessageCodec`).
"""


def _interchange_tensor(field: Field, path: str, *_: Any) -> ArrowCodec | None:
    dtype, shape = field.spec.dtype, field.spec.fixed_shape
    if dtype is not None and not LISTABLE.fullmatch(dtype):
        return None
    if dtype is None or shape is None or 0 in shape:
        return TensorListCodec(field, path)
    return TensorCodec(field, path, dtype, shape, "list")


def _interchange_list(field: Field, path: str, storage: str, _: Paths) -> ArrowCodec | None:
    if has_list_codec(field):
        return ListCodec(field, path)
    if len(field.items) != 1:
        return None
    item = _interchange_codec(field.items[0], f"{path}[]", storage)
    return None if _needs_type(item) else ValueListCodec(field, path, item)


def _interchange_dict(field: Field, path: str, storage: str, _: Paths) -> ArrowCodec | None:
    if len(field.items) != 2 or field.items[0].nullable:
        return None
    key, value = (_interchange_codec(item, f"{path}[]", storage) for item in field.items)
    return None if _needs_type(key) or _needs_type(value) else MapCodec(field, path, key, value)


def _needs_type(codec: ArrowCodec) -> bool:
    """Whether items of lists and dicts, which are read as Python values, would not be read as what they are."""
    return any(isinstance(each, (TensorCodec, TensorListCodec, EnumCodec)) for each in _walk([codec]))


_INTERCHANGE_CODECS: Mapping[FieldKind, _Build] = {
    **_CODECS,
    FieldKind.SCALAR: lambda field, path, *_: NumberCodec(field, path) if field.type in NumberCodec.types else None,
    FieldKind.DATETIME: lambda field, path, storage, _: TimestampCodec(field, path, in_utc=storage.endswith("UTC")),
    FieldKind.ENUM: lambda field, path, *_: (
        EnumNumberCodec(field, path, int) if issubclass(field.type, Flag) else _enum_codec(field, path)
    ),
    FieldKind.LIST: _interchange_list,
    FieldKind.DICT: _interchange_dict,
    FieldKind.TENSOR: _interchange_tensor,
}
"""The Arrow type of each kind of field for other libraries; kinds without an entry, and entries of None, are errors."""


# --- what the metadata of a shard says about the class


def _nested_classes(codecs: Sequence[ArrowCodec], above: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield the paths and classes of documents inside documents."""
    for codec in codecs:
        path = (*above, codec.field.name)
        document = codec.item if isinstance(codec, DocumentsCodec) else codec
        if isinstance(document, DocumentCodec):
            yield ".".join(path), class_name(document.field.document_type)
            yield from _nested_classes(document.codecs, path)


def _enums(fields: Iterable[Field], above: tuple[str, ...], seen: tuple[Any, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield the paths of enums, with the class and the values of its members by name, as far as JSON has them."""
    for field in fields:
        path = (*above, field.name)
        if field.kind is FieldKind.ENUM:
            members = {
                name: member.value if type(member.value) in (str, int, float, bool) else repr(member.value)
                for name, member in field.type.__members__.items()
            }
            yield ".".join(path), {"class": f"{field.type.__module__}:{field.type.__qualname__}", "members": members}
        elif field.kind in (FieldKind.DOCUMENT, FieldKind.DOCUMENTS) and field.document_type not in seen:
            inner = field.document_type.document_schema().fields
            yield from _enums(inner, path, (*seen, field.document_type))
        else:
            yield from _enums(field.items, path, seen)


def layout_fingerprint(schema: Schema) -> str:
    """Return the fingerprint of the layout of all fields of a class."""
    key = "storage", "fingerprint"  # kept with the schema: making all codecs again for each dataset takes longer
    if key not in schema.notes:
        schema.notes[key] = Layout(schema).fingerprint
    fingerprint: str = schema.notes[key]
    return fingerprint


def json_schema(schema: Schema) -> str:
    """Return the JSON schema of a class; an empty one where pydantic has none for a field.

    pydantic warns about defaults that JSON cannot express. They are left out: readers have the class, or do without.
    """
    notes, key = schema.document_type.document_schema().notes, ("storage", "json_schema")
    if key not in notes:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                notes[key] = json.dumps(schema.document_type.model_json_schema())
        except (PydanticInvalidForJsonSchema, PydanticUserError):
            notes[key] = "{}"
    text: str = notes[key]
    return text
