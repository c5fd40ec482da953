"""Text from and to paths and files. Writing to a path is all or nothing."""

from __future__ import annotations

import codecs
import errno
import io
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO, Any, cast

from quire.errors import DecodeError, EncodeError, OptionError, UriNotFoundError
from quire.files import Target, display_uri, fetch, open_target, scheme_of
from quire.tensors import describe

TextTarget = str | os.PathLike[str] | IO[str] | IO[bytes]
TextSource = str | os.PathLike[str] | IO[str] | IO[bytes] | Iterable[str]
_SHOWN = 60
"""Characters of a wrong path that an error repeats."""
_PATH = re.compile(
    r"[~.]{0,2}[/\\][^\r\n]*|[A-Za-z][A-Za-z0-9+.-]*:[/\\][^\r\n]*|"
    r"[^\s,;\"{}\[\]]*\.(?:csv|tsv|txt|json|jsonl|ndjson)(?:\.(?:gz|bz2|xz|zst|lz4))?",
    re.IGNORECASE,
)
"""A line without an end that is a path or an address. Content has more lines, or ends its only one."""


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


@contextmanager
def text_lines(source: TextSource | None, encoding: str, text: str | bytes | None = None) -> Iterator[Iterator[str]]:
    """The lines of a path, an address, a file or an iterable of lines, or of content given as `text`.

    A byte order mark is dropped. A `str` is always a path or an address: content is never guessed, so that text from
    an untrusted source is not opened as a file.
    """
    name = source_name(source, "the text")
    if source is None and text is None:
        raise OptionError("pass a path or a file, or the content as text=...")
    if source is not None and text is not None:
        raise OptionError("pass either a path or a file, or the content as text=..., and not both.")
    if isinstance(text, str):
        check_content(text)
        yield _lines(io.StringIO(text, newline=""), encoding, name)
    elif isinstance(text, (bytes, bytearray)):
        yield _lines(io.BytesIO(text), encoding, name)
    elif text is not None:
        raise OptionError(
            f"text= takes the content as str or bytes, got {describe(text)}. "
            "Pass a path or a file as the first argument."
        )
    elif isinstance(source, (str, os.PathLike)):
        with _open_path(os.fspath(source)) as file:
            yield _lines(file, encoding, name)
    elif isinstance(source, Iterable) and not isinstance(source, (bytes, bytearray)):
        yield _lines(source, encoding, name)
    else:
        raise OptionError(
            f"expected a path, a file or an iterable of lines, or the content as text=..., got {describe(source)}."
        )


def check_content(text: str) -> None:
    """Refuse a path where content belongs. The file system is not asked."""
    if _PATH.fullmatch(text):
        raise OptionError(f"text= takes the content, and {_shorten(text)} is a path. Pass it as the first argument.")


@contextmanager
def _open_path(path: str) -> Iterator[IO[bytes]]:
    start = path.lstrip()[:1]
    if not start:
        raise OptionError(f"{path!r} is not a path. Empty content is passed as text=''.")
    if start in "{[" or "\n" in path or "\r" in path or "\0" in path:
        raise OptionError(f"{_shorten(path)} is content and not a path. Pass it as text=...")
    if scheme_of(path) is not None and not os.path.lexists(path):
        yield io.BytesIO(fetch(path))
        return
    try:
        file = Path(path).open("rb")  # noqa: SIM115 - an error of the caller is not one of opening
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENAMETOOLONG):
            raise
        raise UriNotFoundError(f"there is no file {_shorten(path)}. Content is passed as text=...") from error
    with file:
        yield file


def _shorten(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")


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


def source_name(source: object, fallback: str) -> str:
    """What an error calls the source: a path, a file's own name, or the fallback."""
    if isinstance(source, (str, os.PathLike)):
        return display_uri(os.fspath(source))
    name = getattr(source, "name", None)
    return name if isinstance(name, str) else fallback
