"""Upload and download of one file while it is produced or read.

A thread does the network part, and a `PieceQueue` connects it with the caller, so that both work at the same time and
neither gets far ahead of the other. An upload is atomic: the file is complete, or does not appear.
"""

from __future__ import annotations

import importlib
import os
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from quire._lowlevel.forks import ForkSafeCondition
from quire.errors import StorageError, StorageNotFoundError
from quire.files._folder import LocalFolder
from quire.files._fsspec import CLEANUP_SECONDS, UPLOAD_PART
from quire.files._remote import RemoteFolder, open_folder
from quire.files._retry import SLOWEST_TRANSFER, RemoteCall, RemoteOptions, timeout_error
from quire.files._uris import display_uri, local_path, scheme_of

Pieces = Generator[Any, None, None]
"""Bytes or memoryviews, in order."""
WritePieces = Callable[[Iterable[Any]], None]
"""Writes the pieces as a file; an error, also one of the pieces, leaves no file."""

_QUEUE_BYTES = 32 << 20
"""The bytes that wait in a queue at most, unless one piece is larger."""
_PIECE = 1 << 20


# --- addresses


class FileAddress(NamedTuple):
    """The address of a file: its folder, and its name there."""

    folder: str
    name: str


def split_address(url: str) -> FileAddress:
    """Split the address of a file into its folder and name."""
    folder, _, name = url.rpartition("/")
    if not name:
        raise StorageError(f"{display_uri(url)}: this is a folder; the address of a file has a name at its end.")
    return FileAddress(f"{folder}/" if folder.endswith(":/") else folder, name)


def _is_local(url: str) -> bool:
    return ("://" not in url and "::" not in url) or scheme_of(url) == "file"


def _to_local_path(url: str) -> Path:
    return Path(os.path.abspath(os.path.expanduser(local_path(url))))  # noqa: PTH100, PTH111 - a link stays a link


def _http_file(url: str, options: RemoteOptions) -> Any:
    return importlib.import_module("quire.files._http").HttpFile(url, options)  # slow to import, and rarely needed


# --- a queue between threads


class AbandonedError(Exception):
    """The other side of a queue has stopped."""


class PieceQueue:
    """A queue of pieces between two threads, of at most `max_bytes`, or one larger piece."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._size = max_bytes, 0
        self._pieces: deque[Any] = deque()
        self._changed = ForkSafeCondition()
        self._ended = self._abandoned = False
        self._error: BaseException | None = None

    def put(self, piece: Any, seconds: float | None = None) -> None:
        """Add a piece as soon as there is room; raise TimeoutError if there is none within `seconds`."""
        until = None if seconds is None else time.monotonic() + seconds
        with self._changed:
            # An empty queue takes a piece of any size, so that one larger than the limit does not wait for ever.
            while self._pieces and self._size + len(piece) > self._max_bytes and not self._abandoned:
                left = None if until is None else until - time.monotonic()
                if left is not None and seconds is not None and left <= 0:
                    raise timeout_error(seconds)
                self._changed.wait(left)
            if self._abandoned:
                raise AbandonedError
            self._pieces.append(piece)
            self._size += len(piece)
            self._changed.notify_all()

    def end(self, error: BaseException | None = None) -> None:
        """End the pieces; with an error, it is raised after the last piece."""
        with self._changed:
            self._ended, self._error = True, error
            self._changed.notify_all()

    def abandon(self) -> None:
        """Stop: the other side gets AbandonedError, and pieces that wait are dropped."""
        with self._changed:
            self._abandoned = True
            self._pieces.clear()
            self._changed.notify_all()

    def __iter__(self) -> Iterator[Any]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pieces or self._ended or self._abandoned)
                if self._abandoned:
                    raise AbandonedError
                if not self._pieces:
                    break
                piece = self._pieces.popleft()
                self._size -= len(piece)
                self._changed.notify_all()
            yield piece
        if self._error is not None:
            raise self._error


# --- uploads


def send(url: str, source: Callable[[], Pieces], options: RemoteOptions) -> None:
    """Write the pieces of the source to a file while they are produced.

    After a failure that may be temporary, the source is called again, and its pieces are sent from the start. It runs
    in this thread, and the upload in another. Errors of the source are raised as they are.
    """
    write, options = _choose_writer(url, options)
    source_error = None
    try:
        RemoteCall("writing the file", url).run(lambda _: _send_once(write, source, options), options, own_time=True)
    except _SourceFailedError as error:
        source_error = error.reason
    if source_error is not None:  # raised here, so that the wrapper does not show up as its context
        raise source_error


class _SourceFailedError(StorageError):
    """The source raised an error, so that the upload is not retried."""

    def __init__(self, reason: Exception) -> None:
        super().__init__(str(reason))
        self.reason = reason


def _send_once(write: WritePieces, source: Callable[[], Pieces], options: RemoteOptions) -> None:
    # A limit for each wait and not for the upload: however large, it goes on for as long as the store takes pieces.
    seconds = options.timeout + UPLOAD_PART / SLOWEST_TRANSFER
    pieces_queue = PieceQueue(_QUEUE_BYTES)
    sender = _Sender(write, pieces_queue)
    try:
        with closing(source()) as pieces:
            for piece in _wrap_source_errors(pieces):
                pieces_queue.put(piece, seconds)
        pieces_queue.end()
    except AbandonedError:
        pass  # the sender has the reason
    except BaseException:
        pieces_queue.abandon()
        sender.join(CLEANUP_SECONDS)  # it removes what it has begun
        raise
    sender.wait(seconds)


def _wrap_source_errors(pieces: Iterator[Any]) -> Iterator[Any]:
    try:
        yield from pieces
    except Exception as error:
        raise _SourceFailedError(error) from error


class _Sender(threading.Thread):
    """Uploads in the background. If it hangs it is left behind, and stops when it next uses the queue."""

    def __init__(self, write: WritePieces, pieces: PieceQueue) -> None:
        super().__init__(daemon=True, name="quire-send")
        self._write, self._pieces = write, pieces
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._write(self._pieces)
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
            self._error = error
            self._pieces.abandon()

    def wait(self, seconds: float) -> None:
        """Wait until the file is complete."""
        self.join(seconds)
        if self.is_alive():
            self._pieces.abandon()
            raise timeout_error(seconds)
        if self._error is not None:
            raise self._error


def _choose_writer(url: str, options: RemoteOptions) -> tuple[WritePieces, RemoteOptions]:
    """Return the function that writes to an address, and the options with which it is retried."""
    if _is_local(url):
        path = _to_local_path(url)

        def write_local(pieces: Iterable[Any]) -> None:
            with LocalFolder(path.parent).open_for_write(path.name) as file:
                for piece in pieces:
                    file.write(piece)

        # A disk that fails once fails again, and the caller should know at once.
        return write_local, replace(options, retries=0)
    if scheme_of(url) in ("http", "https"):
        return _http_file(url, options).upload, options
    address = split_address(url)
    folder = RemoteFolder(address.folder, options)
    return partial(folder.write_pieces, address.name), folder.upload_options


# --- pieces


def split_pieces(parts: Iterable[Any]) -> Pieces:
    """Yield parts of any size as pieces of at most 1 MiB; small parts are combined."""
    small = bytearray()
    for part in parts:
        view = memoryview(part)
        # Large parts are sent as views, without a copy; a copy of small ones takes less than sending each alone.
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


class SpooledPieces:
    """Pieces that can be produced only once, kept in a temporary file so that they can be sent again."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces, self._size = pieces, 0  # `_size` bytes are in the file; the rest is still to be produced
        self._file = tempfile.TemporaryFile(prefix="quire-")  # noqa: SIM115 - closed by close()

    def close(self) -> None:
        """Drop the pieces."""
        self._pieces.close()
        self._file.close()

    def __call__(self) -> Pieces:
        """Yield the pieces from the start."""
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


# --- downloads


@contextmanager
def receive(url: str, options: RemoteOptions) -> Iterator[IO[bytes]]:
    """Open the file at an address for reading. A remote file is read ahead in a thread, and cannot seek."""
    if _is_local(url):
        path = _to_local_path(url)
        try:
            file = path.open("rb")
        except FileNotFoundError as error:
            raise StorageNotFoundError(f"{path}: there is no such file.") from error
        except OSError as error:
            raise StorageError(f"{path}: {error.strerror or error}.") from error
        with file:
            yield file
        return
    pieces = PieceQueue(_QUEUE_BYTES)
    receiver = threading.Thread(target=_receive, args=(url, options, pieces), daemon=True, name="quire-receive")
    receiver.start()
    try:
        yield cast("IO[bytes]", _PieceReader(iter(pieces)))
    finally:
        pieces.abandon()
        receiver.join(CLEANUP_SECONDS)


def _receive(url: str, options: RemoteOptions, pieces: PieceQueue) -> None:
    """Download a file into a queue; an error is raised where the queue is read."""
    failure: BaseException | None = None
    try:
        if scheme_of(url) in ("http", "https"):
            parts: Any = _http_file(url, options).download()
        else:
            address = split_address(url)
            parts = RemoteFolder(address.folder, options).parts(address.name)
        with closing(parts):
            for part in parts:
                pieces.put(part)
    except AbandonedError:
        pass
    except BaseException as error:  # noqa: BLE001 - raised where the file is read
        failure = error
    pieces.end(failure)


class _PieceReader:
    """Pieces as a file that is read from the start to the end."""

    def __init__(self, pieces: Iterator[Any]) -> None:
        self._pieces, self._rest = pieces, memoryview(b"")

    def read(self, size: int = -1) -> bytes:
        """Return `size` bytes, or fewer at the end; all bytes if the size is negative."""
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


# --- the files of a store


def list_files(url: str | os.PathLike[str], *, remote: RemoteOptions | None = None) -> list[str]:
    """Return the addresses of the files in a folder and below it, sorted: what `pull` takes of all that was pushed.

    Names that begin with a dot or an underscore are left out. A folder that does not exist has no files.
    """
    folder = open_folder(url, remote)
    return [folder.join(entry.name) for entry in folder.list()]


def delete_file(url: str | os.PathLike[str], *, missing_ok: bool = False, remote: RemoteOptions | None = None) -> bool:
    """Delete a file at a path or an address, and return whether it existed.

    A file that does not exist is a StorageNotFoundError, or ignored with `missing_ok`. Nothing is deleted from web
    servers.
    """
    text = os.fspath(url)
    path = _to_local_path(text) if _is_local(text) else None
    address = split_address(text) if path is None else FileAddress(str(path.parent), path.name)
    if scheme_of(address.folder) in ("http", "https"):
        raise StorageError(
            f"{display_uri(text)}: nothing is deleted from a web server. Delete it where the server stores it."
        )
    folder = open_folder(address.folder, remote)
    if not folder.exists(address.name):
        if missing_ok:
            return False
        raise StorageNotFoundError(f"{display_uri(text)}: there is no such file. Pass missing_ok=True to ignore this.")
    folder.delete(address.name)
    return True
