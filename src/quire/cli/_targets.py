"""Writing documents in every format: whole or not at all, and in the place of nothing that is not meant."""

from __future__ import annotations

import bz2
import gzip
import importlib
import lzma
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from quire.array import DocumentArray, DocumentBatch
from quire.cli._forms import form_by_suffix
from quire.cli._open_files import csv_options
from quire.cli._sources import Source, storage
from quire.cli._write_files import write_files
from quire.codec._csv import write_csv
from quire.codec._json import TensorForm, to_json
from quire.codec._ndjson import to_ndjson
from quire.codec._suffixes import from_suffixes
from quire.errors import EncodeError, OptionError, StorageError
from quire.files import open_target

_PACK: dict[str, Any] = {"gzip": gzip.GzipFile, "bz2": bz2.BZ2File, "lzma": lzma.LZMAFile}


@dataclass(frozen=True)
class TargetOptions:
    """How documents are written: the format, whether what is there may go, and what goes with some formats."""

    form: str | None = None
    force: bool = False
    delimiter: str | None = None
    tensors: TensorForm = "lists"
    compress: str | None = None
    shard_bytes: int | None = None
    tensor_storage: str = "fixed"
    content: str | None = None


def target_form(path: str, options: TargetOptions) -> str:
    """The format of what is written: as asked for, or as the name tells; a name without a suffix is a dataset."""
    found = options.form or form_by_suffix(path)
    if found is None and Path(path).suffix and not path.endswith("/"):
        raise OptionError(f"{path}: the name does not tell a format: pass --to.")
    return found or "parquet"


def check_free(path: str, options: TargetOptions) -> None:
    """Refuse to write where something is, unless it may go."""
    place = Path(path)
    if "://" in path or options.force or not place.exists():
        return
    if place.is_dir() and not any(place.iterdir()):
        return
    raise StorageError(f"{path}: there is something already. Pass --force to replace it, or choose another name.")


def write(source: Source, items: Iterator[Any], path: str, options: TargetOptions) -> None:
    """Write the documents and batches of a source."""
    form = target_form(path, options)
    if form in _FOLDERS or (form in ("parquet", "arrow") and form_by_suffix(path) != form):
        _write_folder(form, source, items, path, options)
        return
    if "://" in path and form != "quire":
        raise OptionError(
            f"{path}: a file of {form} is written to this machine; datasets and quire's files go anywhere."
        )
    _FILES[form](source, items, path, options)


# --- files


def _write_one_shard(source: Source, items: Iterator[Any], path: str, options: TargetOptions) -> None:
    how = storage().WriteOptions(tensor_storage=options.tensor_storage)
    importlib.import_module("quire.storage._in_hand").save_shard(items, source.document_type, path, how)


def _write_binary(source: Source, items: Iterator[Any], path: str, options: TargetOptions) -> None:
    array: Any = DocumentArray[source.document_type]  # type: ignore[name-defined]
    documents = flattened(items)
    _, compress = from_suffixes(path, None, options.compress)
    if "://" in path:
        array.push_stream(documents, path, compress=compress, show_progress=False)
    else:
        array.write_binary(documents, path, "protobuf", compress, show_progress=False)


def _write_csv(source: Source, items: Iterator[Any], path: str, options: TargetOptions) -> None:
    with _opened(path, options) as file:
        write_csv(source.schema, flattened(items), file, csv_options(path, options.delimiter))


def _write_ndjson(_: Source, items: Iterator[Any], path: str, options: TargetOptions) -> None:
    with _opened(path, options) as file:
        to_ndjson(flattened(items), file, options.tensors)


def _write_json(_: Source, items: Iterator[Any], path: str, options: TargetOptions) -> None:
    with _opened(path, options) as file:
        before = b"["
        for document in flattened(items):
            file.write(before + b"\n" + to_json(document, None, options.tensors).encode())
            before = b","
        file.write(b"[]\n" if before == b"[" else b"\n]\n")


@contextmanager
def _opened(path: str, options: TargetOptions) -> Iterator[IO[bytes]]:
    """A file for text, which is packed if its name says so."""
    _, compress = from_suffixes(path, None, options.compress)
    if compress is not None and compress not in _PACK:
        raise EncodeError(f"{path}: text is packed with gzip, bz2 or lzma here, not with {compress}.")
    with open_target(path) as file:
        if compress is None:
            yield file
            return
        with _PACK[compress](fileobj=file, mode="wb") if compress == "gzip" else _PACK[compress](file, "wb") as packed:
            yield packed


def flattened(items: Iterator[Any]) -> Iterator[Any]:
    """Documents one by one, those of batches too."""
    for item in items:
        if isinstance(item, DocumentBatch):
            yield from item
        else:
            yield item


_FILES: dict[str, Callable[[Source, Iterator[Any], str, TargetOptions], None]] = {
    "parquet": _write_one_shard,
    "arrow": _write_one_shard,
    "quire": _write_binary,
    "csv": _write_csv,
    "ndjson": _write_ndjson,
    "json": _write_json,
}
_FOLDERS = ("files", "huggingface")


# --- folders


def _write_folder(form: str, source: Source, items: Iterator[Any], path: str, options: TargetOptions) -> None:
    if "://" in path:
        if form in _FOLDERS:
            raise OptionError(f"{path}: a folder of {form} is written to this machine; datasets go anywhere.")
        _write_dataset(form, source, items, path, options)
        return
    with _whole_folder(Path(path)) as folder:
        if form == "files":
            write_files(source.schema, flattened(items), folder, options.content)
        elif form == "huggingface":
            storage()
            importlib.import_module("quire.storage._huggingface").write_huggingface(
                source.document_type, flattened(items), folder
            )
        else:
            _write_dataset(form, source, items, str(folder), options)


def _write_dataset(form: str, source: Source, items: Iterator[Any], path: str, options: TargetOptions) -> None:
    more: dict[str, Any] = {"tensor_storage": options.tensor_storage}
    if options.shard_bytes is not None:
        more["shard_bytes"] = options.shard_bytes
    mode = "overwrite" if options.force else "create"
    storage().write_dataset(items, path, source.document_type, format=form, mode=mode, show_progress=False, **more)


@contextmanager
def _whole_folder(target: Path) -> Iterator[Path]:
    """A folder that takes the place of the target when all is written, and is gone when something fails."""
    target = Path(os.path.realpath(target))
    target.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent))
    made = part / "made"
    made.mkdir()
    try:
        yield made
        if target.exists():
            target.replace(part / "old")
        made.replace(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)
