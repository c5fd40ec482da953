"""Documents as a folder of files: what is in one field of each, and the others in `metadata.jsonl`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic_core import PydanticSerializationError

from quire.cli._open_files import METADATA
from quire.display import as_picture
from quire.errors import EncodeError, PathError, did_you_mean
from quire.media import encode_image
from quire.schema import FieldKind, Schema
from quire.tensors import framework_of

_MAGIC = (
    (b"\x89PNG", ".png"),
    (b"\xff\xd8\xff", ".jpg"),
    (b"GIF8", ".gif"),
    (b"RIFF", ".wav"),
    (b"ID3", ".mp3"),
    (b"OggS", ".ogg"),
    (b"fLaC", ".flac"),
    (b"%PDF", ".pdf"),
    (b"\x1aE\xdf\xa3", ".webm"),
)
_KINDS = (FieldKind.BYTES, FieldKind.TENSOR, FieldKind.TEXT)


def write_files(schema: Schema, documents: Iterator[Any], folder: Path, content: str | None) -> None:
    """Write a file for each document that has content, and a line for each."""
    name = _content_field(schema, content)
    with (folder / METADATA).open("w", encoding="utf-8") as lines:
        for row, document in enumerate(documents):
            rest = _rest(document, name, row)
            data, suffix = _encoded(getattr(document, name), f"{schema.name}.{name}, row {row}")
            told = {key: value for key, value in rest.items() if key != "path"}
            if data is not None:
                file = _file_name(rest.get("path"), row, suffix)
                _write(folder, file, data)
                told = {"file_name": file, **told}
            lines.write(json.dumps(told, ensure_ascii=False) + "\n")


def _rest(document: Any, name: str, row: int) -> dict[str, Any]:
    """All other fields as JSON has them."""
    try:
        found: dict[str, Any] = json.loads(document.model_dump_json(exclude={name}, context={"tensors": "lists"}))
    except (PydanticSerializationError, UnicodeError) as error:
        raise EncodeError(f"{type(document).__name__}, row {row}: {error}") from error
    return found


def _content_field(schema: Schema, content: str | None) -> str:
    if content is not None:
        if content not in schema.by_name:
            raise PathError(f"{schema.name} has no field {content!r}. {did_you_mean(content, schema.by_name)}")
        return content
    found = [field.name for kind in _KINDS for field in schema.fields if field.kind is kind and field.name != "id"]
    found = [name for name in found if name not in ("path", "url", "uri", "mime_type")]
    if not found:
        raise EncodeError(f"{schema.name} has no field whose content could be files: bytes, a tensor or a text.")
    return found[0]


def _encoded(value: Any, where: str) -> tuple[bytes | None, str]:
    """The content of a file, and the suffix that goes with it."""
    if value is None:
        return None, ""
    if isinstance(value, (bytes, bytearray)):
        suffix = next((suffix for magic, suffix in _MAGIC if value.startswith(magic)), ".bin")
        return bytes(value), ".webp" if value[8:12] == b"WEBP" else ".mp4" if value[4:8] == b"ftyp" else suffix
    if isinstance(value, str):
        return value.encode(), ".txt"
    framework = framework_of(value)
    if framework is None:
        raise EncodeError(f"{where}: a {type(value).__name__} has no form as a file; choose a field with --content.")
    array = framework.to_numpy(value)
    picture = as_picture(array)
    if picture is not None:
        return encode_image(picture, "png"), ".png"
    raise EncodeError(
        f"{where}: {framework.dtype(value)} of {array.ndim} axes is no image; choose a field with --content."
    )


def _file_name(path: Any, row: int, suffix: str) -> str:
    """The path that the document names, if it stays inside the folder; else the number of the row."""
    if not isinstance(path, str) or not path:
        return f"{row:08d}{suffix}"
    place = PurePosixPath(path)
    if place.is_absolute() or ".." in place.parts or "\\" in path or "\0" in path or place.name in ("", METADATA):
        raise EncodeError(f"row {row}: the path {path!r} leads out of the folder.")
    return str(place)


def _write(folder: Path, name: str, data: bytes) -> None:
    place = folder / name
    place.parent.mkdir(parents=True, exist_ok=True)
    if place.exists():
        raise EncodeError(f"two documents have the path {name!r}.")
    place.write_bytes(data)
