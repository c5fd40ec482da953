"""WebDataset: tar files, in which consecutive files with the same name before the first dot are a sample."""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import IO, Any

from pydantic_core import from_json as parse_json

from quire.errors import DecodeError, OptionError, StorageError
from quire.files import MAX_BYTES, Folder, display_uri, open_folder
from quire.schema import Field, FieldKind
from quire.storage._shard_reader import local_file
from quire.storage.importers._source import (
    ForeignDataset,
    ImportOptions,
    decode_image_tensor,
    decode_tensor,
    document_class,
    field_names,
    load_image,
    load_npy,
    load_npz,
    match_fields,
    source_errors,
    tensor_annotation,
    to_field_tensor,
    validate_rows,
)
from quire.storage.importers._unpickle import load_value

SUFFIXES = (".tar", ".tgz", ".tar.gz", ".tar.bz2", ".tar.xz")
KEY = "key"
_SAMPLES = 100
"""The number of samples that a class is inferred from."""
_NAME = re.compile(r"((?:.*/)?[^./]+)\.([^/]+)", re.DOTALL)
_IMAGES = {"jpg", "jpeg", "png", "ppm", "pgm", "pbm", "pnm", "webp", "bmp", "gif", "tif", "tiff"}
_TEXTS = {"txt", "text", "transcript"}
_NUMBERS = {"cls", "cls2", "class", "count", "index", "inx", "id"}
_PICKLES = {"pyd", "pickle", "pkl"}

Sample = tuple[str, dict[str, bytes]]


def read_webdataset(source: Any, document_type: type[Any] | None, options: ImportOptions) -> ForeignDataset:
    """Read the tar files of a folder, in the order of their names."""
    folder = open_folder(source, options.remote)
    files = [entry.name for entry in folder.list(SUFFIXES)]
    if not files:
        raise StorageError(f"{display_uri(folder.url)}: there are no tar files ({', '.join(SUFFIXES)}).")
    row_type = document_type or _infer_class(islice(_read_samples(folder, files), _SAMPLES), options)

    def rows(first: int) -> Iterator[Any]:
        places = (
            (where, partial(_decode_row, row_type, where, files, options, closed=document_type is None))
            for where, files in islice(_read_samples(folder, files), first, None)
        )
        yield from validate_rows(row_type, places, options.extra)

    return ForeignDataset(row_type, rows)


def _decode_row(
    document_type: type[Any], where: str, files: dict[str, bytes], options: ImportOptions, *, closed: bool
) -> dict[str, Any]:
    matches = match_fields(document_type, files, options.extra)
    if closed and len(matches) < len(files):
        unknown = ", ".join(sorted(files.keys() - matches.keys()))
        raise DecodeError(f"{unknown}: not among the files of the first {_SAMPLES} samples. Pass document_type=...")
    return {key: _decode_value(name, files[name], field, where, options) for name, (key, field) in matches.items()}


# --- samples


def _read_samples(folder: Folder, files: list[str]) -> Iterator[Sample]:
    """Yield the place of each sample, and its files by what comes after the first dot of their names."""
    for name in files:
        where = folder.join(name)
        with source_errors(where), local_file(folder, name) as path, path.open("rb") as opened:
            for key, contents in _group_members(opened):
                yield f"{where}, sample {key!r}", {KEY: key.encode(), **contents}


def _group_members(opened: IO[bytes]) -> Iterator[Sample]:
    key, contents = "", dict[str, bytes]()
    try:
        with tarfile.open(fileobj=opened, mode="r|*") as archive:
            # A sample ends where the next stem begins. The archive is read as a stream, so it is not known before.
            for stem, suffix, content in _read_members(archive):
                if contents and (stem != key or suffix in contents):
                    if stem == key:
                        raise DecodeError(f"two files of the sample {key!r} end in {suffix!r}.")
                    yield key, contents
                    contents = {}
                key, contents[suffix] = stem, content
    except tarfile.TarError as error:
        raise DecodeError(f"not a complete tar file: {error}.") from error
    if contents:
        yield key, contents


def _read_members(archive: tarfile.TarFile) -> Iterator[tuple[str, str, bytes]]:
    """Yield the stem, suffix and content of files; members of other types and with hidden names are skipped."""
    for member in archive:
        archive.members = []  # type: ignore[attr-defined]  # otherwise tarfile keeps all of them
        match = _NAME.fullmatch(member.name)
        if not member.isreg() or match is None:
            continue
        if member.size > MAX_BYTES:
            raise DecodeError(f"{member.name} has {member.size:,} bytes; a file may have {MAX_BYTES:,}.")
        file = archive.extractfile(member)
        content = b"" if file is None else file.read()
        if len(content) != member.size:
            raise DecodeError(f"{member.name} is truncated.")
        yield match[1], match[2].lower(), content


# --- values


def _decode_value(name: str, content: bytes, field: Field, where: str, options: ImportOptions) -> Any:
    """Decode a file for a field."""
    kind = name.rpartition(".")[2]
    if field.kind is FieldKind.BYTES:
        return content
    if field.kind is FieldKind.TENSOR:
        if kind in ("npy", "npz"):
            return decode_tensor(content, field, where)
        return (
            decode_image_tensor(content, field, where)
            if kind in _IMAGES
            else to_field_tensor(_decode_file(name, content, options), field)
        )
    return _decode_file(name, content, options)


def _decode_file(name: str, content: bytes, options: ImportOptions) -> Any:
    kind = name.rpartition(".")[2]
    if name == KEY or kind in _TEXTS:
        return content.decode()
    if kind in _NUMBERS:
        return int(content)
    if kind in ("json", "jsn"):
        return parse_json(content)
    if kind == "npy":
        return load_npy(content)
    if kind == "npz":
        return load_npz(content)
    if kind not in _PICKLES:
        return content
    if not options.allow_pickle:
        raise OptionError(
            f"{name}: a pickle. Pass allow_pickle=True to read numbers, texts, containers and arrays of them, or a "
            "document_type=... without that field."
        )
    return load_value(content)


# --- the class


def _infer_class(samples: Iterator[Sample], options: ImportOptions) -> type[Any]:
    """Make a class for samples: files that only some of them have are optional."""
    seen: dict[str, Any] = {}
    number, counts = 0, dict[str, int]()
    for where, files in samples:
        number += 1
        for name, content in files.items():
            with source_errors(f"{where}: {name}"):
                annotation = _annotation(name, content, options, where)
            seen[name] = annotation if name not in seen else _merge(seen[name], annotation)
            counts[name] = counts.get(name, 0) + 1
    names = field_names(seen)
    annotations: dict[str, Any] = {}
    for name, annotation in seen.items():
        field = tensor_annotation(*annotation) if isinstance(annotation, tuple) else annotation
        annotations[names[name]] = field if counts[name] == number else field | None
    return document_class(options.name or "Sample", annotations)


def _annotation(name: str, content: bytes, options: ImportOptions, where: str) -> Any:
    """Return the type of a file; of an array, its dtype and shape."""
    kind = name.rpartition(".")[2]
    if kind == "npy":
        array = load_npy(content)
        return array.dtype, array.shape
    if kind in _IMAGES:
        if options.images != "decode":
            return bytes
        pixels = load_image(content, where)
        return pixels.dtype, pixels.shape
    if kind in ("json", "jsn", "npz") or kind in _PICKLES:
        _decode_file(name, content, options)  # raises an error if it is refused
        return Any
    return type(_decode_file(name, content, options))


def _merge(one: Any, other: Any) -> Any:
    """Return the dtype and shape that two arrays have in common; None where they differ."""
    if not (isinstance(one, tuple) and isinstance(other, tuple)):
        return one
    (dtype, shape), (other_dtype, other_shape) = one, other
    if shape is not None:
        has_ndim = other_shape is not None and len(shape) == len(other_shape)
        shape = tuple(a if a == b else None for a, b in zip(shape, other_shape, strict=True)) if has_ndim else None
    return dtype if dtype == other_dtype else None, shape
