"""Targets: documents written in every format, atomically, without replacing anything unless asked to."""

from __future__ import annotations

import bz2
import errno
import gzip
import json
import lzma
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from pydantic_core import PydanticSerializationError

from quire.array import DocumentArray, DocumentBatch
from quire.cli._formats import format_from_suffix
from quire.cli._sources import METADATA_FILE, DocumentSource, csv_options, load_storage
from quire.codec import TensorForm, from_suffixes, to_json, to_ndjson, write_csv
from quire.display import as_picture
from quire.errors import EncodeError, OptionError, PathError, StorageError, did_you_mean
from quire.files import open_target
from quire.media import MEDIA_SUFFIXES, detect_media_type, encode_image
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


def write_target(source: DocumentSource, items: Iterator[Any], path: str, options: TargetOptions) -> None:
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


def _write_folder(chosen: str, source: DocumentSource, items: Iterator[Any], path: str, options: TargetOptions) -> None:
    if "://" in path and chosen in _FOLDER_FORMATS:
        raise OptionError(
            f"{path}: a folder of {chosen} can only be written to this machine; datasets can go to a URL."
        )
    # `write_dataset` publishes a dataset at a URL atomically by itself.
    with nullcontext(path) if "://" in path else _replace_folder(Path(path)) as folder:
        if chosen == "files":
            write_files(source.schema, flatten(items), Path(folder), options.content)
        elif chosen == "huggingface":
            load_storage().write_huggingface(source.document_type, flatten(items), folder)
        else:
            write_options: dict[str, Any] = {"tensor_storage": options.tensor_storage}
            if options.shard_bytes is not None:
                write_options["shard_bytes"] = options.shard_bytes
            write_options["mode"] = "overwrite" if options.force else "create"
            load_storage().write_dataset(
                items, str(folder), source.document_type, format=chosen, show_progress=False, **write_options
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

_CONTENT_KINDS = (FieldKind.BYTES, FieldKind.TENSOR, FieldKind.TEXT)


def write_files(schema: Schema, documents: Iterator[Any], folder: Path, content: str | None) -> None:
    """Write the field `content` of each document as a file, and the other fields as a line of `metadata.jsonl`.

    The field `path` is the name of the file if it is a text; other files are named by their row. A path that leads out
    of the folder, or that another document has, raises `EncodeError`: nothing is overwritten.
    """
    name = _content_field(schema, content)
    with (folder / METADATA_FILE).open("w", encoding="utf-8") as lines:
        for row, document in enumerate(documents):
            try:
                text = document.model_dump_json(exclude={name}, context={"tensors": "lists"})
            except (PydanticSerializationError, UnicodeError) as error:
                raise EncodeError(f"{type(document).__name__}, row {row}: {error}") from error
            fields = json.loads(text)
            if "file_name" in fields:
                raise EncodeError(
                    f"{schema.name}, row {row}: {METADATA_FILE} names the file of a row in 'file_name', so a field of "
                    "that name cannot be written: rename it, or choose it with --content."
                )
            data, suffix = _encode_content(getattr(document, name), f"{schema.name}.{name}, row {row}")
            if data is not None:
                path = fields.pop("path") if isinstance(fields.get("path"), str) and fields["path"] else None
                file_name = f"{row:08d}{suffix}" if path is None else _check_file_name(path, row)
                file = folder / file_name
                try:
                    file.parent.mkdir(parents=True, exist_ok=True)
                    with file.open("xb") as target:
                        target.write(data)
                except (FileExistsError, NotADirectoryError) as error:
                    raise EncodeError(
                        f"{schema.name}, row {row}: the path {file_name!r} belongs to another document, or one of its "
                        "folders is the file of another document. Paths must be unique."
                    ) from error
                except OSError as error:
                    if error.errno != errno.ENAMETOOLONG:
                        raise
                    raise EncodeError(
                        f"{schema.name}, row {row}: the path {file_name[:40]!r}... has {len(file_name.encode())} bytes "
                        "and is too long for this file system. Shorten it, or rename the field to "
                        "name files by their row."
                    ) from error
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
        suffix = ".pdf" if value.startswith(b"%PDF") else MEDIA_SUFFIXES.get(detect_media_type(value) or "", ".bin")
        return bytes(value), suffix
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


def _check_file_name(path: str, row: int) -> str:
    """Return the path of a document in its normal form; raise if it could lead out of the folder on any system."""
    place = PurePosixPath(path)
    # Backslashes separate folders on Windows, where a colon follows a drive, or names a stream of another file.
    is_outside = place.is_absolute() or ".." in place.parts or "\\" in path or (os.name == "nt" and ":" in path)
    if is_outside or "\0" in path or not place.name:
        raise EncodeError(f"row {row}: the path {path!r} leads out of the folder, or is not the name of a file.")
    if place.name == METADATA_FILE:
        raise EncodeError(f"row {row}: the path {path!r} is that of the file with the other fields.")
    if any(part.startswith(".") for part in place.parts):
        raise EncodeError(f"row {row}: the path {path!r} is hidden, and hidden files of a folder are not read back.")
    return str(place)
