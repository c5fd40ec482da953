"""The layout of a document class in Arrow: which form each of its fields has, worked out from its schema alone."""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from enum import Flag
from functools import cached_property
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import PydanticUserError
from pydantic.errors import PydanticInvalidForJsonSchema

from quire._class_registry import class_name
from quire.columns import Columns
from quire.errors import OptionError, SchemaError
from quire.schema import Field, FieldKind, FieldPath, Schema, parse_path
from quire.storage._arrow_codec import (
    ArrowCodec,
    AsTextCodec,
    BytesCodec,
    DatetimeCodec,
    EnumCodec,
    FixedWidthCodec,
    MessageCodec,
    NumberCodec,
    TextCodec,
)
from quire.storage._nested_codecs import (
    PLACEHOLDER,
    DocumentCodec,
    DocumentsCodec,
    ListCodec,
    encode_fields,
    has_list_codec,
    placeholder,
)
from quire.storage._row_locations import AddressTable, RowLocations
from quire.storage._tensor_codecs import ComplexCodec, RaggedTensorCodec, TensorCodec

TensorStorage = Literal["fixed", "binary", "list"]
"""How tensors of one shape are stored: as bytes of one length, as bytes, or as nested lists."""
SCHEMA_KEY, FINGERPRINT_KEY, CLASS_KEY = b"quire.json_schema", b"quire.fingerprint", b"quire.class"
FORMAT_KEY, CLASSES_KEY, ENUMS_KEY = b"quire.format", b"quire.classes", b"quire.enums"
_LISTED = re.compile(r"bool|u?int\d+|float(16|32|64)")
"""The dtypes that lists can have."""
_MOMENTS = FixedWidthCodec.types
_NAMED = {FieldKind.ENUM: EnumCodec, FieldKind.DECIMAL: AsTextCodec, FieldKind.PATH: AsTextCodec}


class Layout:
    """The forms of all fields of a schema, and the Arrow schema that they make."""

    def __init__(self, schema: Schema, tensor_storage: TensorStorage = "fixed", paths: Paths = None) -> None:
        if tensor_storage not in ("fixed", "binary", "list"):
            raise OptionError(f"tensor_storage={tensor_storage!r}: use 'fixed', 'binary' or 'list'.")
        if schema.is_open:
            raise SchemaError("a dataset needs the documents' class: schema=Student.")
        self.schema = select_fields(schema, paths)
        self.codecs = _field_codecs(self.schema, schema.name, tensor_storage, paths)
        self.fields = pa.schema([codec.arrow_field() for codec in self.codecs] or [PLACEHOLDER])
        self.parts = 0
        for codec in self.codecs:
            self.parts = codec.place(self.parts)

    @cached_property
    def fingerprint(self) -> str:
        """What tells layouts apart: the names and types of all fields."""
        return hashlib.blake2b(_described(self.fields).encode(), digest_size=8).hexdigest()

    @cached_property
    def arrow_schema(self) -> pa.Schema:
        """The Arrow schema of shards, with what is told of the class."""
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
        """The columns as a record batch."""
        return self.batch(encode_fields(self.codecs, columns, self.schema.name), len(columns))

    def batch(self, arrays: Sequence[pa.Array], rows: int) -> pa.RecordBatch:
        """A record batch of the arrays of all forms; one without any has a column that keeps the number of rows."""
        return pa.RecordBatch.from_arrays(list(arrays) or [placeholder(rows)], schema=self.fields)

    def addresses(self) -> AddressTable:
        """A table for the addresses of record batches of this layout."""
        return AddressTable(self.parts)

    def locate(self, batch: pa.RecordBatch) -> list[int]:
        """The parts of a record batch."""
        arrays = batch.columns if self.codecs else ()
        return [part for codec, array in zip(self.codecs, arrays, strict=True) for part in codec.locate(array)]

    def read_ahead(self, rows: RowLocations, counts: NDArray[np.int64]) -> None:
        """Let the system read the large columns of `counts` rows from each of these on."""
        for codec in self.codecs:
            if codec.is_large and isinstance(codec, TensorCodec):
                codec.read_ahead(rows, counts)

    @cached_property
    def read_ahead_parts(self) -> frozenset[int]:
        """The parts that `read_ahead` reads."""
        return frozenset(codec.first + 1 for codec in self.codecs if codec.is_large and isinstance(codec, TensorCodec))

    def gather(self, rows: RowLocations) -> Columns:
        """The columns of rows, copied; their checksums are verified first, where that is due."""
        rows.verify()
        made = {codec.field.name: codec.gather(rows) for codec in self.codecs}
        return Columns(self.schema, made, len(rows))

    def gather_parts(self, rows: RowLocations, sizes: Sequence[int]) -> Iterator[Columns]:
        """The columns of parts of rows, of these sizes: the small columns of all of them are gathered at once."""
        rows.verify()
        small = {codec.field.name: codec.gather(rows) for codec in self.codecs if not codec.is_large}
        start = 0
        for size in sizes:
            span = slice(start, start + size)
            start, own = start + size, rows.slice(span)
            made = {
                codec.field.name: small[codec.field.name].slice(span)
                if codec.field.name in small
                else codec.gather(own)
                for codec in self.codecs
            }
            yield Columns(self.schema, made, size)


def _field_codecs(schema: Schema, path: str, storage: str, paths: Paths) -> Sequence[ArrowCodec]:
    made = []
    for field in schema.fields:
        codec = _field_codec(field, f"{path}.{field.name}", storage, paths_below(field.name, paths))
        made.append(MessageCodec(field, f"{path}.{field.name}", schema) if codec is None else codec)
    return made


def _field_codec(field: Field, path: str, storage: str, paths: Paths) -> ArrowCodec | None:
    """The form of a field; None where it has no columns of its own."""
    kind = field.kind
    if kind in (FieldKind.DOCUMENT, FieldKind.DOCUMENTS) and not field.recursive:
        return _document_codec(field, path, storage, paths)
    if kind is FieldKind.TENSOR:
        return _tensor_codec(field, path, storage)
    if kind is FieldKind.SCALAR and field.type in NumberCodec.types:
        return NumberCodec(field, path)
    if kind is FieldKind.SCALAR and field.type is complex:
        return ComplexCodec(field, path)
    if kind is FieldKind.TEXT:
        return TextCodec(field, path)
    if kind is FieldKind.BYTES and (field.type is bytes or field.wrapper):
        return BytesCodec(field, path)
    if kind in _MOMENTS:
        return FixedWidthCodec(field, path)
    if kind is FieldKind.DATETIME:
        return DatetimeCodec(field, path)
    if kind in _NAMED and not (kind is FieldKind.ENUM and issubclass(field.type, Flag)):
        return _NAMED[kind](field, path)
    return ListCodec(field, path) if has_list_codec(field) else None


def _document_codec(field: Field, path: str, storage: str, paths: Paths) -> ArrowCodec:
    schema = select_fields(field.document_type.document_schema(), paths)
    codecs = _field_codecs(schema, path, storage, paths)
    if field.kind is FieldKind.DOCUMENT:
        return DocumentCodec(field, path, schema, codecs)
    one = Field("item", FieldKind.DOCUMENT, field.document_type)
    return DocumentsCodec(field, path, DocumentCodec(one, path, schema, codecs))


def _tensor_codec(field: Field, path: str, storage: str) -> ArrowCodec | None:
    spec = field.spec
    if spec.dtype == "string":
        return None
    if spec.dtype is None or spec.fixed_shape is None:
        return RaggedTensorCodec(field, path)
    if 0 in spec.fixed_shape:
        return RaggedTensorCodec(field, path)
    if storage == "list" and not _LISTED.fullmatch(spec.dtype):
        storage = "fixed"  # lists have no short floats and no complex numbers
    return TensorCodec(field, path, spec.dtype, spec.fixed_shape, storage)


def _nested_classes(codecs: Sequence[ArrowCodec], above: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """The classes of documents inside documents, by path."""
    for codec in codecs:
        path = (*above, codec.field.name)
        document = codec.item if isinstance(codec, DocumentsCodec) else codec
        if isinstance(document, DocumentCodec):
            yield ".".join(path), class_name(document.field.document_type)
            yield from _nested_classes(document.codecs, path)


def _enums(fields: Iterable[Field], above: tuple[str, ...], seen: tuple[Any, ...] = ()) -> Iterator[tuple[str, Any]]:
    """The enums of fields, by path: the class, and the values of its members by name, as far as JSON has them."""
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
    """The fingerprint of the layout of all fields of a class."""
    key = "storage", "fingerprint"
    if key not in schema.notes:
        schema.notes[key] = Layout(schema).fingerprint
    found: str = schema.notes[key]
    return found


def json_schema(schema: Schema) -> str:
    """The JSON schema of a class; an empty one where pydantic has none for a field.

    pydantic warns of defaults that have no form in JSON. They are left out: the reader has the class, or does without.
    """
    notes, key = schema.document_type.document_schema().notes, ("storage", "json_schema")
    if key not in notes:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                notes[key] = json.dumps(schema.document_type.model_json_schema())
        except (PydanticInvalidForJsonSchema, PydanticUserError):
            notes[key] = "{}"
    found: str = notes[key]
    return found


def _described(schema: Any) -> str:
    fields = [(field.name, str(field.type), field.nullable, sorted((field.metadata or {}).items())) for field in schema]
    return repr(fields)


Paths = Sequence[FieldPath] | None
"""The paths of the fields that are read; None for all of them."""


def resolve_columns(schema: Schema, columns: Iterable[str] | None) -> Paths:
    """The paths that users write; one that is not there is an error."""
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


def select_fields(schema: Schema, paths: Paths) -> Schema:
    """The schema with the fields that paths begin with, in the order of the class."""
    if paths is None:
        return schema
    names = {path[0] for path in paths}
    return replace(schema, fields=tuple(field for field in schema.fields if field.name in names))


def paths_below(name: str, paths: Paths) -> Paths:
    """What is read of a nested document; all of it where its own path is named."""
    below = None if paths is None else [path[1:] for path in paths if path[0] == name]
    return None if below is None or () in below else below
