"""Documents of files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from quire.array import DocumentArray
from quire.document import BaseDocument
from quire.documents._document import Document
from quire.errors import DecodeError, SchemaError
from quire.files import guess_type, read_uri, to_data_uri

if TYPE_CHECKING:
    from quire.schema import Schema

ReadMode = Literal["r", "rb"]
_CONTENT = {"r": ("text",), "rb": ("blob", "bytes_")}


def documents_of_files(
    array_type: type[Any], paths: list[str], *, read_mode: ReadMode | None, to_dataturi: bool
) -> DocumentArray[Any]:
    """A document for each file: its address, and its content if it is asked for."""
    if array_type.document_type is BaseDocument:
        array_type = DocumentArray[Document]
    schema = array_type.document_type.document_schema()
    address = _field(schema, ("uri", "url"), "the address of a file")
    content = None if read_mode is None else _content_field(schema, read_mode)
    known = {field.name for field in schema.fields}
    rows = []
    for path in paths:
        mime_type = guess_type(path)
        row: dict[str, Any] = {address: _data_uri(path, mime_type) if to_dataturi else path}
        if content is not None:
            row[content] = _read(path, read_mode)
        if "mime_type" in known:
            row["mime_type"] = mime_type
        rows.append(row)
    made: DocumentArray[Any] = array_type(rows)
    return made


def _content_field(schema: Schema, read_mode: str) -> str:
    if read_mode not in _CONTENT:
        raise ValueError(f"read_mode is 'r' (text), 'rb' (bytes) or None (the address alone), got {read_mode!r}.")
    return _field(schema, _CONTENT[read_mode], "the content of a file")


def _field(schema: Schema, names: tuple[str, ...], purpose: str) -> str:
    found = next((field.name for field in schema.fields if field.name in names), None)
    if found is None:
        raise SchemaError(f"{schema.name} has no field {' or '.join(map(repr, names))} for {purpose}.")
    return found


def _data_uri(path: str, mime_type: str | None) -> str:
    return to_data_uri(read_uri(path), mime_type or "application/octet-stream", base64=True)


def _read(path: str, read_mode: str | None) -> str | bytes:
    content = read_uri(path)
    try:
        return content.decode() if read_mode == "r" else content
    except UnicodeDecodeError as error:
        raise DecodeError(f"{Path(path)}: not text in utf-8 ({error}). Read it with read_mode='rb'.") from error
