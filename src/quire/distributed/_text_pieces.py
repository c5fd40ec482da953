"""Large files of text in pieces, which partitions read: cut at the ends of lines, and counted when they are cut.

Whatever the number of pieces, rows have the same ids, and errors tell the same lines: a piece knows how many lines and
rows are before it.
"""

from __future__ import annotations

import codecs
import io
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path
from typing import IO, Literal, NamedTuple

from quire.distributed._sources import FileRef

PIECE_BYTES = 4 << 20
"""Smaller pieces are not worth it."""
_ENCODINGS = ("utf-8", "utf-8-sig", "ascii", "iso8859-1", "cp1252")
"""In which a byte of 10 is the end of a line, and nothing else."""


class TextPiece(NamedTuple):
    """The lines of a file from one byte to another; without an end, the whole file."""

    file: FileRef
    start: int = 0
    stop: int | None = None
    lines: int = 0
    """How many there are before it."""
    rows: int = 0
    """How many rows are before it."""
    head: bytes = b""
    """The names of the columns, where they are not in it."""

    @property
    def size(self) -> int:
        """In bytes."""
        return self.file.size if self.stop is None else self.stop - self.start


class PieceOfFile:
    """The lines of a piece as those of a file: behind the names of columns, lines that are not read are empty."""

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


def pieces_of(kind: Literal["csv", "json"], file: FileRef, size: int, encoding: str) -> list[TextPiece]:
    """A file in pieces of about so many bytes; it stays whole where it must be read from the beginning."""
    whole, size = [TextPiece(file)], max(size, PIECE_BYTES)
    path = file.folder.local_path(file.name)
    plain = codecs.lookup(encoding).name in _ENCODINGS and not file.name.endswith(".gz")
    if path is None or not plain or file.size < 2 * size:
        return whole
    with path.open("rb") as source:
        if kind == "json" and source.read(1024).lstrip()[:1] != b"{":
            return whole
    head = _head(path) if kind == "csv" else b""
    cuts = _cuts(path, size, kind, head)
    if cuts is None:
        return whole
    ends = [*(cut.place for cut in cuts[1:]), file.size]
    return [
        TextPiece(file, cut.place, end, cut.lines, cut.rows, head if cut.place else b"")
        for cut, end in zip(cuts, ends, strict=True)
    ]


def _head(path: Path) -> bytes:
    """The line with the names of columns, and the empty ones before it."""
    found = io.BytesIO()
    with path.open("rb") as source:
        for line in source:
            found.write(line)
            if line.strip(b"\r\n"):
                break
    return found.getvalue()


def _cuts(path: Path, size: int, kind: str, head: bytes) -> list[_Cut] | None:
    """Where pieces begin; None where the end of a line may be one inside quotation marks."""
    place, rows, cuts = 0, -1 if kind == "csv" else 0, [_Cut(0, 0, 0)]
    with path.open("rb") as source:
        for number, line in enumerate(source):
            if place - cuts[-1].place >= size and place >= len(head):
                cuts.append(_Cut(place, number, rows))
            place += len(line)
            if kind == "csv":
                rows += line not in (b"\n", b"\r\n")
                if line.count(b'"') % 2:
                    return None
            else:
                rows += not line.isspace()
    return cuts
