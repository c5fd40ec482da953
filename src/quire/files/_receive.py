"""Files read from any address, some of it ahead of the reader."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import IO, Any, cast

from quire.errors import StorageError, StorageNotFoundError
from quire.files._handover import GivenUpError, Handover
from quire.files._remote import _LAST_WORDS, RemoteFolder
from quire.files._retry import RemoteOptions
from quire.files._send import is_local, local_file, place_of, web
from quire.files._uris import scheme_of

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
