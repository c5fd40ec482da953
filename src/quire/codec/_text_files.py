"""Text from and to paths and files. A path is written atomically: completely or not at all."""

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

from quire.errors import DecodeError, EncodeError, OptionError, UriError, UriNotFoundError
from quire.files import Target, display_uri, fetch, open_target, scheme_of
from quire.tensors import describe

TextTarget = str | os.PathLike[str] | IO[str] | IO[bytes]
TextSource = str | os.PathLike[str] | IO[str] | IO[bytes] | Iterable[str]
_MAX_SHOWN = 60
"""The number of characters of a wrong path that an error repeats."""
_PATH = re.compile(
    r"[~.]{0,2}[/\\][^\r\n]*|[A-Za-z][A-Za-z0-9+.-]*:[/\\][^\r\n]*|"
    r"[^\s,;\"{}\[\]]*\.(?:csv|tsv|txt|json|jsonl|ndjson)(?:\.(?:gz|bz2|xz|zst|lz4))?",
    re.IGNORECASE,
)
"""A path or an address: a single line without a line end. Content has more lines, or a line end."""


@contextmanager
def text_writer(target: TextTarget, encoding: str) -> Iterator[IO[str]]:
    """Open a text file for a path, which is written atomically, or for a file of the caller, which stays open."""
    try:
        if not isinstance(target, (str, os.PathLike)) and not _is_binary(target):
            yield target  # type: ignore[misc]
        else:
            with (
                open_target(cast("Target", target)) as file,
                _wrap_binary(file, encoding, write_through=True) as wrapper,
            ):
                yield wrapper
    except UnicodeEncodeError as error:
        raise EncodeError(f"a text cannot be written in {encoding}: {error}.") from error


@contextmanager
def _wrap_binary(file: Any, encoding: str, *, write_through: bool = False) -> Iterator[IO[str]]:
    wrapper = io.TextIOWrapper(file, encoding, newline="", write_through=write_through)
    try:
        yield wrapper
    finally:
        wrapper.detach()  # otherwise the file would be closed with the wrapper


def _is_binary(file: object) -> bool:
    return isinstance(file, (io.RawIOBase, io.BufferedIOBase)) or "b" in str(getattr(file, "mode", ""))


@contextmanager
def text_lines(source: TextSource | None, encoding: str, text: str | bytes | None = None) -> Iterator[Iterator[str]]:
    """Open the lines of a path, an address, a file or an iterable of lines, or of the content `text`.

    A byte order mark is dropped. A source of type `str` is always a path or an address, and never guessed to be
    content, so that text from an untrusted source is not opened as a file.
    """
    name = source_name(source, "the text")
    if source is None and text is None:
        raise OptionError("pass a path or a file, or the content as text=...")
    if source is not None and text is not None:
        raise OptionError("pass either a path or a file, or the content as text=..., and not both.")
    if isinstance(text, str):
        check_content(text)
        yield _decode_lines(io.StringIO(text, newline=""), encoding, name)
    elif isinstance(text, (bytes, bytearray)):
        yield _decode_lines(io.BytesIO(text), encoding, name)
    elif text is not None:
        raise OptionError(
            f"text= takes the content as str or bytes, got {describe(text)}. "
            "Pass a path or a file as the first argument."
        )
    elif isinstance(source, (str, os.PathLike)):
        with _open_path(os.fspath(source)) as file:
            yield _decode_lines(file, encoding, name)
    elif isinstance(source, Iterable) and not isinstance(source, (bytes, bytearray)):
        yield _decode_lines(source, encoding, name)
    else:
        raise OptionError(
            f"expected a path, a file or an iterable of lines, or the content as text=..., got {describe(source)}."
        )


def check_content(text: str) -> None:
    """Raise an error for a path in place of content, without a look at the file system."""
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
        file = Path(path).open("rb")  # noqa: SIM115 - errors in the body of the caller are not errors of opening
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENAMETOOLONG):
            raise UriError(f"{_shorten(path)}: the file cannot be read ({error.strerror or error}).") from error
        raise UriNotFoundError(f"there is no file {_shorten(path)}. Content is passed as text=...") from error
    with file:
        yield file


def _shorten(text: str) -> str:
    return repr(text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}...")


def _decode_lines(lines: Iterable[Any], encoding: str, name: str) -> Iterator[str]:
    """Decode lines one by one, so that an error can name the line; UTF-16 and UTF-32 need a decoder of whole files."""
    wide = codecs.lookup(encoding).name.startswith(("utf-16", "utf-32"))
    number = 1
    try:
        with _wrap_binary(lines, encoding) if wide and _is_binary(lines) else nullcontext(lines) as decoded:
            for line in decoded:
                text = line if isinstance(line, str) else bytes(line).decode(encoding)
                yield text.removeprefix("\ufeff") if number == 1 else text
                number += 1
    except UnicodeDecodeError as error:
        raise DecodeError(f"{name}, line {number}: the text is not {encoding}: {error}.") from error


def source_name(source: object, fallback: str) -> str:
    """Return the name of a source for error messages: a path, the name of a file, or the fallback."""
    if isinstance(source, (str, os.PathLike)):
        return display_uri(os.fspath(source))
    name = getattr(source, "name", None)
    return name if isinstance(name, str) else fallback
