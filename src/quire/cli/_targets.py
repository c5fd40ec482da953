"""Targets: documents written in every format, atomically, without replacing anything unless asked to."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from pydantic_core import PydanticSerializationError

from quire.array import DocumentArray, DocumentBatch
from quire.cli._formats import format_from_suffix
from quire.cli._sources import METADATA_FILE, Source, csv_options, load_storage
from quire.codec import TensorForm, from_suffixes, to_json, to_ndjson, write_csv
from quire.display import as_picture
from quire.errors import EncodeError, OptionError, PathError, StorageError, did_you_mean
from quire.files import open_target
from quire.media import encode_image
from quire.schema import FieldKind, Schema
from quire.tensors import framework_of

_FOLDER_FORMATS = ("files", "huggingface")
_COMPRESS: dict[str, Callable[..., Any]] = {"gzip": gzip.open, "bz2": bz2.open, "lzma": lzma.open}


@dataclass(frozen=True)
class TargetOptions:
    """Options of `write_target`; most apply to some formats only."""

    format: str | None = None
    """One of `TARGET_FORMATS`; None to detect it from the suffix."""
    force: bool = False
    """Replace an existing target."""
    delimiter: str | None = None
    tensors: TensorForm = "lists"
    compress: str | None = None
    shard_bytes: int | None = None
    tensor_storage: str = "fixed"
    content: str | None = None


def target_format(path: str, options: TargetOptions) -> str:
    """Return the format to write; a path without a suffix is a dataset of Parquet shards."""
    chosen = options.format or format_from_suffix(path)
    if chosen is None and Path(path).suffix and not path.endswith("/"):
        raise OptionError(f"{path}: the suffix does not belong to a known format: pass --to.")
    return chosen or "parquet"


def check_target_is_free(path: str, options: TargetOptions) -> None:
    """Raise `StorageError` if the target exists and must not be replaced; an empty folder is free."""
    place = Path(path)
    if "://" in path or options.force or not place.exists():
        return
    if place.is_dir() and not any(place.iterdir()):
        return
    raise StorageError(f"{path}: the target exists already. Pass --force to replace it, or choose another name.")


def write_target(source: Source, items: Iterator[Any], path: str, options: TargetOptions) -> None:
    """Write the documents and batches of a source."""
    chosen = target_format(path, options)
    if chosen in _FOLDER_FORMATS or (chosen in ("parquet", "arrow") and format_from_suffix(path) != chosen):
        _write_folder(chosen, source, items, path, options)
    elif chosen == "quire":
        array: Any = DocumentArray[source.document_type]  # type: ignore[name-defined]
        _, compress = from_suffixes(path, None, options.compress)
        if "://" in path:
            array.push_stream(flatten(items), path, compress=compress, show_progress=False)
        else:
            array.save_binary_stream(flatten(items), path, "protobuf", compress, show_progress=False)
    elif "://" in path:
        raise OptionError(
            f"{path}: a {chosen} file can only be written to this machine; datasets and quire's files can go to a URL."
        )
    elif chosen in ("parquet", "arrow"):
        write_options = load_storage().WriteOptions(tensor_storage=options.tensor_storage)
        load_storage().save_shard(items, source.document_type, path, write_options)
    else:
        with _open_text(path, options) as file:
            if chosen == "csv":
                write_csv(source.schema, flatten(items), file, csv_options(path, options.delimiter))
            elif chosen == "ndjson":
                to_ndjson(flatten(items), file, options.tensors)
            else:
                before = b"["
                for document in flatten(items):
                    file.write(before + b"\n" + to_json(document, None, options.tensors).encode())
                    before = b","
                file.write(b"[]\n" if before == b"[" else b"\n]\n")


def flatten(items: Iterator[Any]) -> Iterator[Any]:
    """Yield documents one by one, those of batches, too."""
    for item in items:
        if isinstance(item, DocumentBatch):
            yield from item
        else:
            yield item


@contextmanager
def _open_text(path: str, options: TargetOptions) -> Iterator[IO[bytes]]:
    """Open a text file for writing, compressed if its suffix or the options say so."""
    _, compress = from_suffixes(path, None, options.compress)
    if compress is not None and compress not in _COMPRESS:
        raise EncodeError(f"{path}: text can be compressed with gzip, bz2 or lzma, not with {compress}.")
    with open_target(path) as file:
        if compress is None:
            yield file
            return
        with _COMPRESS[compress](file, "wb") as compressed:
            yield compressed


# --- folders


def _write_folder(chosen: str, source: Source, items: Iterator[Any], path: str, options: TargetOptions) -> None:
    if "://" in path:
        if chosen in _FOLDER_FORMATS:
            raise OptionError(
                f"{path}: a folder of {chosen} can only be written to this machine; datasets can go to a URL."
            )
        _write_dataset(chosen, source, items, path, options)
        return
    with _replace_folder(Path(path)) as folder:
        if chosen == "files":
            write_files(source.schema, flatten(items), folder, options.content)
        elif chosen == "huggingface":
            load_storage().write_huggingface(source.document_type, flatten(items), folder)
        else:
            _write_dataset(chosen, source, items, str(folder), options)


def _write_dataset(chosen: str, source: Source, items: Iterator[Any], path: str, options: TargetOptions) -> None:
    write_options: dict[str, Any] = {"tensor_storage": options.tensor_storage}
    if options.shard_bytes is not None:
        write_options["shard_bytes"] = options.shard_bytes
    mode = "overwrite" if options.force else "create"
    load_storage().write_dataset(
        items, path, source.document_type, format=chosen, mode=mode, show_progress=False, **write_options
    )


@contextmanager
def _replace_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary folder that replaces the target if the block succeeds, and is removed if it fails.

    The temporary folder is next to the target, on the same file system, so that both renames are atomic.
    """
    target = Path(os.path.realpath(target))
    target.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent))
    new = part / "new"
    new.mkdir()
    old = part / "old"
    try:
        yield new
        if target.exists():
            target.replace(old)
        new.replace(target)
    except BaseException:
        if old.exists() and not target.exists():  # interrupted between the two renames
            old.replace(target)
        raise
    finally:
        if not old.exists() or target.exists():
            shutil.rmtree(part, ignore_errors=True)


# --- a folder of files

_SIGNATURES = (
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
_CONTENT_KINDS = (FieldKind.BYTES, FieldKind.TENSOR, FieldKind.TEXT)


def write_files(schema: Schema, documents: Iterator[Any], folder: Path, content: str | None) -> None:
    """Write the field `content` of each document as a file, and the other fields as a line of `metadata.jsonl`."""
    name = _content_field(schema, content)
    with (folder / METADATA_FILE).open("w", encoding="utf-8") as lines:
        for row, document in enumerate(documents):
            try:
                text = document.model_dump_json(exclude={name}, context={"tensors": "lists"})
            except (PydanticSerializationError, UnicodeError) as error:
                raise EncodeError(f"{type(document).__name__}, row {row}: {error}") from error
            fields = json.loads(text)
            path = fields.pop("path", None)
            data, suffix = _encode_content(getattr(document, name), f"{schema.name}.{name}, row {row}")
            if data is not None:
                file_name = _file_name(path, row, suffix)
                file = folder / file_name
                file.parent.mkdir(parents=True, exist_ok=True)
                if file.exists():
                    raise EncodeError(f"two documents have the path {file_name!r}.")
                file.write_bytes(data)
                fields = {"file_name": file_name, **fields}
            lines.write(json.dumps(fields, ensure_ascii=False) + "\n")


def _content_field(schema: Schema, content: str | None) -> str:
    """Return the field to write as files: the given one, or the first of bytes, a tensor or text."""
    if content is not None:
        if content not in schema.by_name:
            raise PathError(f"{schema.name} has no field {content!r}. {did_you_mean(content, schema.by_name)}")
        return content
    for kind in _CONTENT_KINDS:
        for field in schema.fields:
            if field.kind is kind and field.name not in ("id", "path", "url", "uri", "mime_type"):
                return field.name
    raise EncodeError(f"{schema.name} has no field whose content could be files: bytes, a tensor or a text.")


def _encode_content(value: Any, where: str) -> tuple[bytes | None, str]:
    """Return the content of a file and its suffix; images become PNG."""
    if value is None:
        return None, ""
    if isinstance(value, (bytes, bytearray)):
        suffix = next((suffix for signature, suffix in _SIGNATURES if value.startswith(signature)), ".bin")
        return bytes(value), ".webp" if value[8:12] == b"WEBP" else ".mp4" if value[4:8] == b"ftyp" else suffix
    if isinstance(value, str):
        return value.encode(), ".txt"
    framework = framework_of(value)
    if framework is None:
        raise EncodeError(
            f"{where}: a {type(value).__name__} cannot be written as a file; choose a field with --content."
        )
    array = framework.to_numpy(value)
    picture = as_picture(array)
    if picture is not None:
        return encode_image(picture, "png"), ".png"
    raise EncodeError(
        f"{where}: {framework.dtype(value)} of {array.ndim} axes is no image; choose a field with --content."
    )


def _file_name(path: object, row: int, suffix: str) -> str:
    """Return the path that the document names, checked to be inside the folder; otherwise the row number."""
    if not isinstance(path, str) or not path:
        return f"{row:08d}{suffix}"
    place = PurePosixPath(path)
    if place.is_absolute() or ".." in place.parts or "\\" in path or "\0" in path or place.name in ("", METADATA_FILE):
        raise EncodeError(f"row {row}: the path {path!r} leads out of the folder.")
    return str(place)
