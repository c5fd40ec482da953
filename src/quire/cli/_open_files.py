"""Opening files that are no datasets: those of quire, tables, JSON, and folders of any files."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from pydantic_core import from_json as parse_json

from quire import codec
from quire.array import DocumentArray
from quire.cli._cells import rows_of
from quire.cli._forms import files_below
from quire.cli._infer import Row, inferred, inferred_table, plain
from quire.codec._blocks import read_index
from quire.codec._compression import compression_of
from quire.codec._csv import CsvOptions, iter_csv
from quire.codec._json import from_dict, rows_from_json
from quire.codec._ndjson import iter_ndjson
from quire.codec._text_files import text_lines
from quire.documents import documents_of_files
from quire.errors import DecodeError
from quire.files import guess_type

Opened = tuple[Any, int | None, int | None, Any, dict[str, Any]]
"""The class, rows, bytes, the documents, and what else is known."""
METADATA = "metadata.jsonl"
"""What is known of the files of a folder: a line for each, with its name in 'file_name'."""
_UNPACK: dict[str, Any] = {"gzip": gzip.open, "bz2": bz2.open, "lzma": lzma.open}


@contextmanager
def opened_text(path: str) -> Iterator[IO[bytes]]:
    """A file of text, unpacked if it is packed."""
    with Path(path).open("rb") as file:
        packed = compression_of(file.read(8))
    if packed is None:
        with Path(path).open("rb") as file:
            yield file
    elif packed.name in _UNPACK:
        with _UNPACK[packed.name](path, "rb") as file:
            yield file
    else:
        raise DecodeError(f"{path}: text that is packed with {packed.name} cannot be read here: unpack it first.")


def open_csv(path: str, options: Any) -> Opened:
    """A table."""
    how = csv_options(path, options.delimiter)
    document_type, rows = options.document_type, None
    if document_type is None:
        with opened_text(path) as file, text_lines(file, how.encoding) as lines:
            document_type, rows = inferred_table(rows_of(lines, how, path), _stem(path), options.sample)

    def items() -> Iterator[Any]:
        with opened_text(path) as file:
            yield from iter_csv(document_type, file, how, options.extra or "forbid")

    return document_type, rows, _size(path), items, {}


def csv_options(path: str, delimiter: str | None) -> CsvOptions:
    """How a table is laid out; one of a name with .tsv has tabs."""
    return CsvOptions(delimiter or ("\t" if ".tsv" in Path(path).suffixes else None))


def open_ndjson(path: str, options: Any) -> Opened:
    """Lines of JSON."""
    document_type, rows = options.document_type, None
    if document_type is None:
        with opened_text(path) as file, text_lines(file, "utf-8") as lines:
            document_type, rows = inferred(_objects(lines, path), _stem(path), options.sample)

    def items() -> Iterator[Any]:
        with opened_text(path) as file:
            yield from iter_ndjson(document_type, file, extra=options.extra or "forbid")

    return document_type, rows, _size(path), items, {}


def _objects(lines: Iterator[str], path: str) -> Iterator[Any]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield _object(line, f"{path}, line {number}")


def _object(text: str | bytes, where: str) -> Any:
    try:
        found = parse_json(text)
    except ValueError as error:
        raise DecodeError(f"{where}: this is no JSON: {error}.") from error
    if not isinstance(found, dict):
        raise DecodeError(f"{where}: a row is an object of JSON, got {type(found).__name__}.")
    return found


def open_json(path: str, options: Any) -> Opened:
    """A list of objects of JSON, or one."""
    with opened_text(path) as file:
        text = file.read()
    if text.lstrip()[:1] == b"{":
        text = b"[" + text + b"]"
    document_type = options.document_type
    if document_type is None:
        try:
            found = parse_json(text)
        except ValueError as error:
            raise DecodeError(f"{path}: this is no JSON: {error}.") from error
        document_type, _ = inferred(
            (_object(json.dumps(row), f"{path}, row {n}") for n, row in enumerate(found)), _stem(path)
        )
    documents = rows_from_json(document_type, text, extra=options.extra or "forbid")
    return document_type, len(documents), _size(path), lambda: iter(documents), {}


# --- quire's own files


def open_binary(path: str, options: Any) -> Opened:
    """What `save_binary` or `push` wrote; documents of a class that is not loaded become those of a class made here."""
    reading: Any = {"allow_pickle": options.allow_pickle}
    name, facts = ("", {}) if "://" in path else _header(path)
    given = options.document_type or codec.find(name, None)
    array: Any = DocumentArray if given is None else DocumentArray[given]  # type: ignore[valid-type]

    def documents() -> Iterator[Any]:
        if "://" in path:
            return iter(array.pull_stream(path, show_progress=False, **reading))
        return iter(array.load_binary(path, streaming=True, **reading))

    rows = facts.get("rows")
    if given is not None:
        return given, rows, _size(path), documents, facts
    document_type, found = inferred(documents(), name.rpartition(":")[2] or _stem(path), options.sample)
    rows = found if rows is None else rows
    made = lambda: (from_dict(document_type, plain(document)) for document in documents())  # noqa: E731
    return document_type, rows, _size(path), made, facts


def _header(path: str) -> tuple[str, dict[str, Any]]:
    """The name of the class, and what the file tells of itself."""
    options = codec.read_options({})
    with Path(path).open("rb") as file:
        packed = compression_of(file.read(8))
        file.seek(0)
        if not codec.starts_stream(file, None):
            return "", {"compression": "none" if packed is None else packed.name, "index": False}
        index = read_index(file, options)
        name = codec.Header(next(codec.segments_of(file, options))).type_name
    facts: dict[str, Any] = {"class": name, "compression": "none" if packed is None else packed.name}
    facts["index"] = index is not None
    if index is not None:
        facts |= {"blocks": len(index.counts), "rows": sum(index.counts)}
    return name, facts


# --- folders of files


class File(Row):
    """A file: its path in the folder, its type, and what is in it."""

    path: str
    mime_type: str | None = None
    content: bytes


def open_folder_of_files(path: str, options: Any) -> Opened:
    """A document for each file; what `metadata.jsonl` tells of files are fields of theirs."""
    folder = Path(path)
    found = [file for file in files_below(folder) if file.name != METADATA]
    if not found:
        raise DecodeError(f"{path}: there are no files in the folder.")
    document_type, told = options.document_type, _metadata(folder)
    total = sum(file.stat().st_size for file in found)
    if document_type is not None:
        array: Any = DocumentArray[document_type]  # type: ignore[valid-type]
        mode = _read_mode(document_type)
        return document_type, len(found), total, lambda: (_document(array, file, mode) for file in found), {}
    document_type = File
    if told:
        document_type, _ = inferred((_file_row(folder, file, told, b"") for file in found), _stem(path))
    rows = lambda: (from_dict(document_type, _file_row(folder, file, told)) for file in found)  # noqa: E731
    return document_type, len(found), total, rows, {"metadata": bool(told)}


def _read_mode(document_type: Any) -> Any:
    names = document_type.model_fields.keys()
    return "rb" if names & {"blob", "bytes_"} else "r" if "text" in names else None


def _document(array: Any, file: Path, mode: Any) -> Any:
    return documents_of_files(array, [str(file)], read_mode=mode, to_dataturi=False)[0]


def _file_row(folder: Path, file: Path, told: dict[str, Any], content: bytes | None = None) -> dict[str, Any]:
    name = file.relative_to(folder).as_posix()
    own = {"path": name, "mime_type": guess_type(name), "content": file.read_bytes() if content is None else content}
    return {**told.get(name, {}), **own}


def _metadata(folder: Path) -> dict[str, dict[str, Any]]:
    file = folder / METADATA
    if not file.exists():
        return {}
    with text_lines(file, "utf-8") as lines:
        rows = list(_objects(lines, str(file)))
    return {str(row.pop("file_name", "")): row for row in rows}


def _stem(path: str) -> str:
    return Path(path).name.partition(".")[0] or "Row"


def _size(path: str) -> int | None:
    return None if "://" in path else Path(path).stat().st_size
