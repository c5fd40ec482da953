"""Text from and to paths and files. Writing to a path is all or nothing."""

from __future__ import annotations

import codecs
import io
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO, Any, cast

from quire.errors import DecodeError, EncodeError
from quire.files import Target, open_target
from quire.tensors import describe

TextTarget = str | os.PathLike[str] | IO[str] | IO[bytes]
TextSource = str | bytes | os.PathLike[str] | IO[str] | IO[bytes] | Iterable[str]


@contextmanager
def text_writer(target: TextTarget, encoding: str) -> Iterator[IO[str]]:
    """A text file for a path, which is written whole or not at all, or for a file of the caller's, which stays open."""
    try:
        if not isinstance(target, (str, os.PathLike)) and not _is_binary(target):
            yield target  # type: ignore[misc]
        else:
            with open_target(cast("Target", target)) as file, _wrapped(file, encoding, write_through=True) as wrapper:
                yield wrapper
    except UnicodeEncodeError as error:
        raise EncodeError(f"a text cannot be written in {encoding}: {error}.") from error


@contextmanager
def _wrapped(file: Any, encoding: str, *, write_through: bool = False) -> Iterator[IO[str]]:
    wrapper = io.TextIOWrapper(file, encoding, newline="", write_through=write_through)
    try:
        yield wrapper
    finally:
        wrapper.detach()  # or the file would be closed with it


def _is_binary(file: Any) -> bool:
    return isinstance(file, (io.RawIOBase, io.BufferedIOBase)) or "b" in str(getattr(file, "mode", ""))


def is_text(source: object, starts: str = "") -> bool:
    """Whether a string is the text itself and not a path: it is empty, has a line break, or starts like the text."""
    if not isinstance(source, str):
        return False
    return not source.strip() or "\n" in source or (starts != "" and source.lstrip().startswith(starts))


@contextmanager
def text_lines(source: TextSource, encoding: str, starts: str = "") -> Iterator[Iterator[str]]:
    """The lines of a path, a file, a text or an iterable of lines, without a byte order mark."""
    name = source_name(source, "the text", starts)
    if is_text(source, starts):
        yield _lines(io.StringIO(str(source), newline=""), encoding, name)
    elif isinstance(source, (bytes, bytearray)):
        yield _lines(io.BytesIO(source), encoding, name)
    elif isinstance(source, (str, os.PathLike)):
        with Path(source).open("rb") as file:
            yield _lines(file, encoding, name)
    elif isinstance(source, Iterable):
        yield _lines(source, encoding, name)
    else:
        raise DecodeError(f"expected a path, a file or lines of text, got {describe(source)}.")


def _lines(lines: Iterable[Any], encoding: str, name: str) -> Iterator[str]:
    """Lines of bytes are decoded one by one, so that an error knows its line; UTF-16 has line ends of two bytes."""
    wide = codecs.lookup(encoding).name.startswith(("utf-16", "utf-32"))
    number = 1
    try:
        with _wrapped(lines, encoding) if wide and _is_binary(lines) else nullcontext(lines) as found:
            for line in found:
                text = line if isinstance(line, str) else bytes(line).decode(encoding)
                yield text.removeprefix("\ufeff") if number == 1 else text
                number += 1
    except UnicodeDecodeError as error:
        raise DecodeError(f"{name}, line {number}: the text is not {encoding}: {error}.") from error


def source_name(source: object, fallback: str, starts: str = "") -> str:
    """What an error calls the source: a path, a file's own name, or the fallback."""
    if isinstance(source, os.PathLike) or (isinstance(source, str) and not is_text(source, starts)):
        return str(source)
    name = getattr(source, "name", None)
    return name if isinstance(name, str) else fallback
