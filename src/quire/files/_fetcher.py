"""The fetcher process: downloads blocks for all processes of a machine.

`python -m quire.files._fetcher FOLDER BYTES` serves the node cache in a folder, and limits its size, until there was no
client for some seconds. Clients (`quire.files._block_sources`) start it.

Clients send pickled tuples, because the options of a store may be any objects; connections of other users are refused.
The answers are lines of JSON: ["done", key, null or [class of the error, message]], or ["alive"].
"""

from __future__ import annotations

import fcntl
import json
import os
import pickle
import queue
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from quire.files._block_sources import LENGTH, TICK, is_same_user, lock_path, socket_address, socket_name
from quire.files._folder import Folder
from quire.files._node_cache import BlockRange, Fetcher

_IDLE_SECONDS = 5.0
"""A fetcher without clients ends after this time."""


class _Server:
    """Accepts clients, and passes their requests to a `Fetcher`."""

    def __init__(self, place: Path, max_bytes: int) -> None:
        self.fetcher = Fetcher(place, max_bytes)
        self._place = place
        self._clients: set[_Connection] = set()
        self._limits: dict[_Connection, int] = {}
        self._lock = threading.Lock()

    def serve(self) -> None:
        """Serve clients until there was none for some seconds."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        name = socket_name()
        with socket_address(self._place, f"{name}.{os.getpid()}") as address:
            listener.bind(address)
            os.chmod(address, 0o600)  # noqa: PTH101 - a path as text
        listener.listen(256)
        listener.settimeout(TICK)
        (self._place / f"{name}.{os.getpid()}").rename(self._place / name)
        last_client = time.monotonic()
        while time.monotonic() - last_client < _IDLE_SECONDS:
            with suppress(TimeoutError):
                connection, _ = listener.accept()
                if is_same_user(connection):
                    _Connection(self, connection).start()
                else:
                    connection.close()
            with self._lock:
                clients = list(self._clients)
            if clients:
                last_client = time.monotonic()
                self.fetcher.ensure_threads()
            for client in clients:
                client.send(["alive"])
        (self._place / name).unlink(missing_ok=True)
        listener.close()

    def add(self, client: _Connection) -> None:
        with self._lock:
            self._clients.add(client)

    def limit(self, client: _Connection, max_bytes: int | None) -> None:
        """Respect the smallest limit that a client has set."""
        with self._lock:
            if max_bytes is None:
                self._limits.pop(client, None)
                self._clients.discard(client)
            else:
                self._limits[client] = max_bytes
            if self._limits:
                self.fetcher.max_bytes = min(self._limits.values())


class _Connection:
    """The connection of a client, with a thread that reads and one that writes: a slow client delays no other."""

    def __init__(self, server: _Server, connection: socket.socket) -> None:
        connection.settimeout(None)
        self._server, self._socket = server, connection
        self._folders: dict[int, Folder] = {}
        self._messages: queue.SimpleQueue[list[Any] | None] = queue.SimpleQueue()

    def start(self) -> None:
        self._server.add(self)
        for target in (self._read, self._write):
            threading.Thread(target=target, daemon=True, name="quire-fetcher-client").start()

    def send(self, message: list[Any]) -> None:
        self._messages.put(message)

    def _write(self) -> None:
        with suppress(OSError):
            while (message := self._messages.get()) is not None:
                self._socket.sendall(json.dumps(message).encode() + b"\n")

    def _read(self) -> None:
        fetcher = self._server.fetcher
        try:
            with self._socket.makefile("rb") as file:
                while (message := _receive(file)) is not None:
                    self._handle(*message)
        except (OSError, EOFError, pickle.UnpicklingError):
            pass
        finally:
            self._server.limit(self, None)
            fetcher.leave(self)
            self._messages.put(None)
            self._socket.close()

    def _handle(self, kind: str, *content: Any) -> None:
        fetcher = self._server.fetcher
        if kind == "folder":
            number, folder, total_bytes, max_bytes = content
            self._folders[number] = folder
            self._server.limit(self, max_bytes)
            fetcher.expect(folder.url, total_bytes)
        elif kind == "request":
            number, blocks = content
            fetcher.request(self, self._folders[number], [(BlockRange(*block), priority) for block, priority in blocks])
        elif kind == "fetch":
            number, blocks = content
            fetcher.fetch(self._folders[number], [BlockRange(*block) for block in blocks])
        elif kind == "need":
            number, block = content
            fetcher.need(self._folders[number], BlockRange(*block), self._notify)
        elif kind == "add":
            fetcher.add(*content)
        elif kind == "release":
            fetcher.release(self, content[0])

    def _notify(self, key: str, error: Exception | None) -> None:
        self.send(["done", key, None if error is None else [type(error).__name__, str(error)]])


def _receive(file: Any) -> tuple[Any, ...] | None:
    """Read a message of a client; None at the end of the connection."""
    head = file.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    [size] = LENGTH.unpack(head)
    content = file.read(size)
    if len(content) < size:
        return None
    message: tuple[Any, ...] = pickle.loads(content)  # noqa: S301 - of the same user, see `is_same_user`
    return message


def main(arguments: Sequence[str]) -> int:
    """Serve a node cache, unless another process does: the folder, and the most bytes."""
    place, max_bytes = Path(arguments[0]), int(arguments[1])
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    # The file stays: if it were removed, another process could lock a new file of the same name at the same time.
    handle = os.open(lock_path(place), os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return 0
    os.ftruncate(handle, 0)
    os.write(handle, str(os.getpid()).encode())
    _Server(place, max_bytes).serve()
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    # Threads of clients and downloads may still run; nothing of them has to be kept.
    os._exit(status)
