"""Upload and download of one file while it is produced or read."""

from __future__ import annotations

import importlib
import os
import tempfile
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from quire.errors import StorageError, StorageNotFoundError
from quire.files._folder import LocalFolder
from quire.files._remote import _LAST_WORDS, _OBJECT_STORES, Connection, RemoteFolder, require_fsspec
from quire.files._retry import _SLOWEST, Errand, RemoteOptions, too_slow
from quire.files._uris import local_path, scheme_of, shown


class GivenUpError(Exception):
    """The other side has given up, and wants no more or has no more."""


class Handover:
    """Pieces of bytes, in order; no more than `room` bytes, or one piece, wait to be taken."""

    def __init__(self, room: int) -> None:
        self._room, self._size = room, 0
        self._pieces: deque[Any] = deque()
        self._changed = threading.Condition()
        self._ended = self._given_up = False
        self._error: BaseException | None = None

    def put(self, piece: Any, seconds: float | None = None) -> None:
        """Hand over a piece, as soon as there is room; if there is none in time, the other side hangs."""
        until = None if seconds is None else time.monotonic() + seconds
        with self._changed:
            while self._pieces and self._size + len(piece) > self._room and not self._given_up:
                left = None if until is None else until - time.monotonic()
                if left is not None and seconds is not None and left <= 0:
                    raise too_slow(seconds)
                self._changed.wait(left)
            if self._given_up:
                raise GivenUpError
            self._pieces.append(piece)
            self._size += len(piece)
            self._changed.notify_all()

    def end(self, error: BaseException | None = None) -> None:
        """There are no more pieces; with an error, it is raised behind the last."""
        with self._changed:
            self._ended, self._error = True, error
            self._changed.notify_all()

    def give_up(self) -> None:
        """Leave: whoever hands over or takes is told so, and what waits is forgotten."""
        with self._changed:
            self._given_up = True
            self._pieces.clear()
            self._changed.notify_all()

    def __iter__(self) -> Iterator[Any]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pieces or self._ended or self._given_up)
                if self._given_up:
                    raise GivenUpError
                if not self._pieces:
                    break
                piece = self._pieces.popleft()
                self._size -= len(piece)
                self._changed.notify_all()
            yield piece
        if self._error is not None:
            raise self._error


Pieces = Generator[Any, None, None]
Way = Callable[[Iterable[Any]], None]
"""Writes the pieces as a file; an error, be it of the pieces, leaves no file."""

_AHEAD = 32 << 20
"""The bytes that are ready to be sent, at most."""
_PIECE = 1 << 20
_PART = 16 << 20
"""The bytes that a store is sent at once."""


def send(url: str, source: Callable[[], Pieces], options: RemoteOptions) -> None:
    """Write what the source makes, while it makes it; done again from the start if the reason of a failure may pass.

    The source is run here, and the sending in a thread. Its errors are raised as they are.
    """
    way, options = _way_to(url, options)
    failed = None
    try:
        Errand("writing the file", url).run(lambda _: _attempt(way, source, options), options, own_time=True)
    except _SourceFailedError as error:
        failed = error.reason
    if failed is not None:
        raise failed


class _SourceFailedError(StorageError):
    """What is to be sent cannot be made: no reason to try again."""

    def __init__(self, reason: Exception) -> None:
        super().__init__(str(reason))
        self.reason = reason


def _attempt(way: Way, source: Callable[[], Pieces], options: RemoteOptions) -> None:
    seconds = options.timeout + _PART / _SLOWEST
    handover = Handover(_AHEAD)
    sender = _Sender(way, handover)
    try:
        with closing(source()) as pieces:
            for piece in _reported(pieces):
                handover.put(piece, seconds)
        handover.end()
    except GivenUpError:
        pass  # the sender tells why
    except BaseException:
        handover.give_up()
        sender.join(_LAST_WORDS)  # it removes what it has begun
        raise
    sender.result(seconds)


def _reported(pieces: Iterator[Any]) -> Iterator[Any]:
    try:
        yield from pieces
    except Exception as error:
        raise _SourceFailedError(error) from error


class _Sender(threading.Thread):
    """Sends in the background; it is left behind if it hangs, and then learns that nobody waits."""

    def __init__(self, way: Way, handover: Handover) -> None:
        super().__init__(daemon=True, name="quire-send")
        self._way, self._handover = way, handover
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._way(self._handover)
        except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
            self._error = error
            self._handover.give_up()

    def result(self, seconds: float) -> None:
        """Wait until the file is there."""
        self.join(seconds)
        if self.is_alive():
            self._handover.give_up()
            raise too_slow(seconds)
        if self._error is not None:
            raise self._error


# --- what is sent


def in_pieces(parts: Iterable[Any]) -> Pieces:
    """Parts of any size as pieces of at most 1 MiB; small ones go together."""
    small = bytearray()
    for part in parts:
        view = memoryview(part)
        if view.nbytes < _PIECE // 4:
            small += view
        else:
            if small:
                yield bytes(small)
                small.clear()
            whole = view.cast("B")
            for start in range(0, len(whole), _PIECE):
                yield whole[start : start + _PIECE]
        if len(small) >= _PIECE // 2:
            yield bytes(small)
            small.clear()
    if small:
        yield bytes(small)


class Kept:
    """The pieces of a source that can be asked only once, kept in a file without a name to be sent again."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces, self._size = pieces, 0
        self._file = tempfile.TemporaryFile(prefix="quire-")  # noqa: SIM115 - closed by close()

    def close(self) -> None:
        """Forget all."""
        self._pieces.close()
        self._file.close()

    def __call__(self) -> Pieces:
        """From the first piece on."""
        position = 0
        while position < self._size:
            self._file.seek(position)
            piece = self._file.read(min(_PIECE, self._size - position))
            position += len(piece)
            yield piece
        for piece in self._pieces:
            self._file.seek(self._size)
            self._size += self._file.write(piece)
            yield piece


# --- ways


class Place(NamedTuple):
    """A file at an address: the folder, and its name there."""

    folder: str
    name: str


def place_of(url: str) -> Place:
    """Where the file at an address lies."""
    folder, _, name = url.rpartition("/")
    if not name:
        raise StorageError(f"{shown(url)}: this is a folder; the address of a file has a name at its end.")
    return Place(f"{folder}/" if folder.endswith(":/") else folder, name)


def is_local(url: str) -> bool:
    """Whether an address is a path of this machine."""
    return ("://" not in url and "::" not in url) or scheme_of(url) == "file"


def local_file(url: str) -> Path:
    """The path that an address means."""
    return Path(os.path.abspath(os.path.expanduser(local_path(url))))  # noqa: PTH100, PTH111 - a link stays a link


def web(url: str, options: RemoteOptions) -> Any:
    """Requests to an address of http, whose modules take as long to import as all of quire."""
    return importlib.import_module("quire.files._http").Web(url, options)


def _way_to(url: str, options: RemoteOptions) -> tuple[Way, RemoteOptions]:
    if is_local(url):
        path = local_file(url)
        return partial(_to_path, LocalFolder(path.parent), path.name), replace(options, retries=0)
    if scheme_of(url) in ("http", "https"):
        return web(url, options).put, options
    require_fsspec(url)
    place = place_of(url)
    connection = Connection(place.folder, options.storage_options)
    way = _to_object if scheme_of(url) in _OBJECT_STORES else _to_part
    return partial(way, connection, place.name, options.timeout), options


def _to_path(folder: LocalFolder, name: str, pieces: Iterable[Any]) -> None:
    with folder.open_for_write(name) as file:
        for piece in pieces:
            file.write(piece)


def _to_object(connection: Connection, name: str, seconds: float, pieces: Iterable[Any]) -> None:
    """To a store where a file appears when its last part is told to be the last."""
    attempt = connection.within(seconds)
    file = attempt.ask("open", attempt.path(name), "wb", block_size=_PART)
    try:
        for piece in pieces:
            file.write(piece)
        file.close()
    except BaseException:
        file.closed = True  # else the collector closes it, and so makes a file of what there is
        with suppress(Exception):
            file.discard()
        raise


def _to_part(connection: Connection, name: str, seconds: float, pieces: Iterable[Any]) -> None:
    """To a file of another name, which is moved when all of it is there."""
    part = f".{name}.{uuid.uuid4().hex}.part"
    attempt = connection.within(seconds)
    try:
        attempt.ask("makedirs", attempt.root or "/", exist_ok=True)
        with attempt.ask("open", attempt.path(part), "wb") as file:
            for piece in pieces:
                file.write(piece)
        connection.within(seconds).ask("mv", attempt.path(part), attempt.path(name))
    except BaseException:
        with suppress(Exception):
            connection.within(_LAST_WORDS).ask("rm_file", attempt.path(part))
        raise


_AHEAD = 32 << 20
"""The bytes that are read ahead, at most, or one part of a file."""


@contextmanager
def receive(url: str, options: RemoteOptions) -> Iterator[IO[bytes]]:
    """The file at an address. What is far is read in a thread, ahead of the reader, who cannot seek in it."""
    if is_local(url):
        with _open_local(url) as file:
            yield file
        return
    handover = Handover(_AHEAD)
    receiver = threading.Thread(target=_run, args=(url, options, handover), daemon=True, name="quire-receive")
    receiver.start()
    try:
        yield cast("IO[bytes]", _Reader(iter(handover)))
    finally:
        handover.give_up()
        receiver.join(_LAST_WORDS)


def _open_local(url: str) -> IO[bytes]:
    path = local_file(url)
    try:
        return path.open("rb")
    except FileNotFoundError as error:
        raise StorageNotFoundError(f"{path}: there is no such file.") from error
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror or error}.") from error


def _run(url: str, options: RemoteOptions, handover: Handover) -> None:
    error: BaseException | None = None
    try:
        with closing(_pieces(url, options)) as pieces:
            for piece in pieces:
                handover.put(piece)
    except GivenUpError:
        pass
    except BaseException as found:  # noqa: BLE001 - it is raised where the file is read
        error = found
    handover.end(error)


def _pieces(url: str, options: RemoteOptions) -> Any:
    if scheme_of(url) in ("http", "https"):
        return web(url, options).get()
    place = place_of(url)
    return RemoteFolder(place.folder, options).parts(place.name)


class _Reader:
    """Pieces as a file that is read from the start to the end."""

    def __init__(self, pieces: Iterator[Any]) -> None:
        self._pieces, self._rest = pieces, memoryview(b"")

    def read(self, size: int = -1) -> bytes:
        """So many bytes, or fewer at the end; all of them, unless told how many."""
        parts: list[Any] = []
        missing = size if size >= 0 else 1 << 62
        while missing:
            if not self._rest:
                with suppress(StopIteration):
                    self._rest = memoryview(next(self._pieces))
            if not self._rest:
                break
            part, self._rest = self._rest[:missing], self._rest[missing:]
            parts.append(part)
            missing -= len(part)
        return bytes(parts[0]) if len(parts) == 1 else b"".join(parts)
