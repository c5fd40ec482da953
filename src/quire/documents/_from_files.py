"""Documents made from files: `DocumentArray.from_files`, the command line and the distributed readers use this."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from quire.array import DocumentArray
from quire.document import BaseDocument
from quire.documents._document import Document
from quire.errors import DecodeError, OptionError, SchemaError
from quire.files import guess_type, read_uri, to_data_uri

if TYPE_CHECKING:
    from quire.schema import Schema

ReadMode = Literal["r", "rb"]
_CONTENT_FIELDS = {"r": ("text",), "rb": ("blob", "bytes_")}


def documents_of_files(
    array_type: type[DocumentArray[Any]], paths: list[str], *, read_mode: ReadMode | None, to_dataturi: bool
) -> DocumentArray[Any]:
    """Return one document per file, with its address and, if `read_mode` is set, its content.

    An array type without a document class yields `Document`.
    """
    if array_type.document_type is BaseDocument:
        array_type = DocumentArray[Document]
    schema = array_type.document_type.document_schema()
    address = address_field(schema)
    content = None if read_mode is None else content_field(schema, read_mode)
    has_mime_type = any(field.name == "mime_type" for field in schema.fields)
    rows = []
    for path in paths:
        mime_type = guess_type(path)
        row: dict[str, Any] = {address: path}
        if to_dataturi:
            row[address] = to_data_uri(read_uri(path), mime_type or "application/octet-stream", base64=True)
        if content is not None:
            row[content] = _read_file(path, read_mode)
        if has_mime_type:
            row["mime_type"] = mime_type
        rows.append(row)
    return array_type(rows)


def address_field(schema: Schema) -> str:
    """Return the name of the field that holds the address of a file: 'uri' or 'url'."""
    return _first_field(schema, ("uri", "url"), "the address of a file")


def content_field(schema: Schema, read_mode: ReadMode) -> str:
    """Return the name of the field that holds the content of a file: 'text' for text, 'blob' or 'bytes_' for bytes."""
    if read_mode not in _CONTENT_FIELDS:
        raise OptionError(f"read_mode={read_mode!r}: use 'r' (text), 'rb' (bytes) or None (the address alone).")
    return _first_field(schema, _CONTENT_FIELDS[read_mode], "the content of a file")


def _first_field(schema: Schema, names: tuple[str, ...], purpose: str) -> str:
    for field in schema.fields:
        if field.name in names:
            return field.name
    raise SchemaError(f"{schema.name} has no field {' or '.join(map(repr, names))} for {purpose}.")


def _read_file(path: str, read_mode: ReadMode | None) -> str | bytes:
    content = read_uri(path)
    try:
        return content.decode() if read_mode == "r" else content
    except UnicodeDecodeError as error:
        raise DecodeError(f"{Path(path)}: not text in utf-8 ({error}). Read it with read_mode='rb'.") from error
