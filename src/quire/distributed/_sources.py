"""Files to read: found on the driver, large text files split, and all assigned to partitions by size.

Text files are split at the ends of lines. A piece knows how many lines and rows come before it, so that rows have the
same ids, and errors name the same lines, whatever the number of pieces.
"""

from __future__ import annotations

import codecs
import io
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from pathlib import Path
from typing import IO, Literal, NamedTuple, TypeVar

from quire.array import whole_number
from quire.errors import OptionError, StorageNotFoundError
from quire.files import Folder, RemoteOptions, compile_glob, display_uri, open_folder

T = TypeVar("T")
Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
"""A file, a folder or a pattern, at a path or a URL; or several of them."""
PARTITION_BYTES = 64 << 20
"""About how many bytes a partition has, if the number of partitions is not specified."""
_WILDCARD = re.compile(r"[*?\[]")


class FileRef(NamedTuple):
    """A file of a folder."""

    folder: Folder
    name: str
    size: int

    @property
    def url(self) -> str:
        return self.folder.join(self.name)


def find_files(
    paths: Paths, suffixes: Sequence[str], remote: RemoteOptions, *, allow_empty: bool | None = None
) -> list[FileRef]:
    """Return the files at paths, in folders and of patterns, in the order of their names.

    A path without any file is an error unless `allow_empty`; None stands for a caller that has no such option.
    """
    if not isinstance(paths, (str, os.PathLike, Iterable)):
        raise OptionError(f"files are read from a path, a URL, or several, got {type(paths).__name__}.")
    sources = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    if not sources and not allow_empty:
        raise OptionError("at least one path is needed.")
    files: list[FileRef] = []
    for source in sources:
        path = os.fspath(source)
        matches = _find_files(path, tuple(suffixes), remote)
        if not matches and not allow_empty:
            raise no_files_error(path, hint=allow_empty is not None)
        files.extend(matches)
    return files


def no_files_error(path: str | os.PathLike[str], *, hint: bool) -> StorageNotFoundError:
    """Return the error for a path or a pattern without files."""
    place = display_uri(os.fspath(path))
    cause = (
        f"no file matches {place!r}."
        if is_pattern(path)
        else f"{place}: there is no such file, and no folder with files in it to read."
    )
    return StorageNotFoundError(cause + (" Pass allow_empty=True if there may be none." if hint else ""))


def is_pattern(path: str | os.PathLike[str]) -> bool:
    """Whether a path has wildcards."""
    return _WILDCARD.search(os.fspath(path)) is not None


def _find_files(path: str, suffixes: tuple[str, ...], remote: RemoteOptions) -> list[FileRef]:
    if is_pattern(path):
        # The folder before the first wildcard is listed, and the names in it are compared with the rest.
        url = open_folder(path, remote).url if "://" not in path else path
        start = url.rindex("/", 0, _WILDCARD.search(url).start()) + 1  # type: ignore[union-attr]
        folder, expression = open_folder(url[:start], remote), compile_glob(url[start:])
        return [FileRef(folder, *entry) for entry in folder.list() if expression.fullmatch(entry.name)]
    folder = open_folder(path, remote)
    parent_url, _, name = folder.url.rpartition("/")
    if name and not parent_url.endswith(":/"):  # unless it is the root of a file system or a bucket
        parent = open_folder(parent_url or "/", remote)
        if parent.exists(name):
            return [FileRef(parent, name, parent.size(name))]
    return [FileRef(folder, *entry) for entry in folder.list(suffixes)]


def check_partitions(partitions: int) -> int:
    """Return a number of partitions, or raise an error if it is not a positive integer."""
    partitions = whole_number("num_partitions", partitions)
    if partitions < 1:
        raise OptionError(f"num_partitions={partitions}: at least one is needed.")
    return partitions


def assign_to_partitions(
    units: Sequence[T], sizes: Sequence[int], partitions: int | None, workers: int
) -> list[list[T]]:
    """Assign units, in order, to partitions of about one size; by default as many as are worthwhile."""
    if partitions is not None:
        partitions = check_partitions(partitions)
    weights = [max(size, 1) for size in sizes]
    total = sum(weights)
    parts = partitions or max(1, min(len(units), max(workers, total // PARTITION_BYTES)))
    assigned: list[list[T]] = [[] for _ in range(parts)]
    before = 0
    for unit, weight in zip(units, weights, strict=True):
        # A unit goes to the partition that holds its middle.
        assigned[min((2 * before + weight) * parts // (2 * total), parts - 1)].append(unit)
        before += weight
    return assigned


MIN_PIECE_BYTES = 4 << 20
"""Smaller pieces are not worthwhile."""
_LINE_SAFE_ENCODINGS = ("utf-8", "utf-8-sig", "ascii", "iso8859-1", "cp1252")
"""Encodings in which a byte of 10 is the end of a line, and nothing else."""


class TextPiece(NamedTuple):
    """The lines of a file from one byte to another; the whole file if it has no end."""

    file: FileRef
    start: int = 0
    stop: int | None = None
    lines: int = 0
    """The number of lines before it."""
    rows: int = 0
    """The number of rows before it."""
    head: bytes = b""
    """The header line, if it is not in the piece."""

    @property
    def size(self) -> int:
        return self.file.size if self.stop is None else self.stop - self.start


class PieceReader:
    """The lines of a piece as those of a file: the header, and empty lines for those that are not read."""

    def __init__(self, piece: TextPiece, source: IO[bytes]) -> None:
        self._piece, self._source, self.name = piece, source, getattr(source, "name", None)

    def __iter__(self) -> Iterator[bytes]:
        piece, source = self._piece, self._source
        head = piece.head.splitlines(keepends=True)
        yield from head
        yield from repeat(b"\n", piece.lines - len(head))
        source.seek(piece.start)
        left = piece.size
        while left > 0 and (line := source.readline()):
            left -= len(line)
            yield line


class _Cut(NamedTuple):
    """The end of a line: where it is, and what is before it."""

    place: int
    lines: int
    rows: int


def split_text_file(kind: Literal["csv", "json"], file: FileRef, size: int, encoding: str) -> list[TextPiece]:
    """Split a file into pieces of about `size` bytes; it stays whole if it must be read from the beginning."""
    whole, size = [TextPiece(file)], max(size, MIN_PIECE_BYTES)
    path = file.folder.local_path(file.name)
    plain = codecs.lookup(encoding).name in _LINE_SAFE_ENCODINGS and not file.name.endswith(".gz")
    if path is None or not plain or file.size < 2 * size:
        return whole
    with path.open("rb") as source:
        if kind == "json" and source.read(1024).lstrip()[:1] != b"{":  # one array, and not an object per line
            return whole
    head = _read_header(path) if kind == "csv" else b""
    cuts = _find_cuts(path, size, kind, head)
    if cuts is None:
        return whole
    ends = [*(cut.place for cut in cuts[1:]), file.size]
    return [
        TextPiece(file, cut.place, end, cut.lines, cut.rows, head if cut.place else b"")
        for cut, end in zip(cuts, ends, strict=True)
    ]


def _read_header(path: Path) -> bytes:
    """Return the line with the names of the columns, and the empty ones before it."""
    header = io.BytesIO()
    with path.open("rb") as source:
        for line in source:
            header.write(line)
            if line.strip(b"\r\n"):
                break
    return header.getvalue()


def _find_cuts(path: Path, size: int, kind: str, head: bytes) -> list[_Cut] | None:
    """Return where pieces begin; None if the end of a line may be within quotation marks."""
    place, rows, cuts = 0, -1 if kind == "csv" else 0, [_Cut(0, 0, 0)]
    with path.open("rb") as source:
        for number, line in enumerate(source):
            if place - cuts[-1].place >= size and place >= len(head):
                cuts.append(_Cut(place, number, rows))
            place += len(line)
            if kind == "csv":
                rows += line not in (b"\n", b"\r\n")
                if line.count(b'"') % 2:  # a quoted value goes on in the next line
                    return None
            else:
                rows += not line.isspace()
    return cuts
