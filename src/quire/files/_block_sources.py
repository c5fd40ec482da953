"""Where a process gets blocks of remote files: from its own threads, or from the fetcher process of the machine.

Ranks and DataLoader workers of a machine read the same blocks. They connect to the fetcher (`quire.files._fetcher`) by
a Unix socket in the folder of the node cache. The first one that finds no fetcher starts it; a lock on a file ensures
that there is one. When it is killed, clients see the end of the connection, start another one, and repeat what they
still need: complete blocks are on the disk.

Forked processes always use the fetcher for object stores: obstore hangs in a child that was forked after its use.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import multiprocessing
import os
import pickle
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire._lowlevel.forks import at_fork
from quire.errors import MissingDependencyError, OptionError, QuireError, ShardError, StorageError, StorageNotFoundError
from quire.files._folder import Folder
from quire.files._node_cache import BlockRange, BlockSource, NodeCacheError, open_local_source
from quire.files._uris import scheme_of

if sys.platform != "win32":
    import fcntl

_PROTOCOL = 1
LENGTH = struct.Struct("<I")
"""The length of a message of a client."""
TICK = 1.0
"""The fetcher reports to its clients every second that it is alive."""
_START_SECONDS = 60.0
_SILENCE_SECONDS = 60.0
"""After this time without a report, waiting for the fetcher is an error."""
_LONGEST_PATH = 100
"""The bytes that the path of a Unix socket may have, on all systems."""
_SHARED_SCHEMES = frozenset(
    {"abfs", "abfss", "adl", "az", "gcs", "gs", "hf", "http", "https", "oci", "oss", "r2", "s3", "s3a"}
)
"""Stores that another process reads just as well. A store in memory, or of a registered class, is in one process."""
_ERRORS: dict[str, type[QuireError]] = {
    error.__name__: error
    for error in (MissingDependencyError, NodeCacheError, OptionError, ShardError, StorageError, StorageNotFoundError)
}


# --- where


def _node_name() -> str:
    """Return a name of this machine, because several may share the folder of the cache over a network."""
    return hashlib.blake2b(socket.gethostname().encode(), digest_size=4).hexdigest()


def lock_path(place: Path) -> Path:
    """Return the path of the file that the fetcher of a folder has locked; it contains its process id."""
    return place / f"fetcher-{_PROTOCOL}-{_node_name()}.lock"


@contextmanager
def socket_address(place: Path, name: str) -> Iterator[str]:
    """Yield a path of a socket in a folder that is short enough for the system."""
    path = str(place / name)
    if len(os.fsencode(path)) <= _LONGEST_PATH:
        yield path
        return
    if not Path("/proc/self/fd").exists():
        raise StorageError(f"{place}: the path is too long for a Unix socket. Pass a shorter path as cache=.")
    handle = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{handle}/{name}"
    finally:
        os.close(handle)


def socket_name() -> str:
    """Return the name of the socket of the fetcher of this machine."""
    return f"fetcher-{_PROTOCOL}-{_node_name()}.sock"


def is_same_user(connection: socket.socket) -> bool:
    """Return whether the other end of a Unix socket belongs to the user of this process."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True  # the mode of the folder and of the socket keeps others out
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(user == os.getuid())


# --- the client


@dataclass(eq=False)
class _Wait:
    folder: int
    block: BlockRange
    is_done: bool = False
    error: Exception | None = None
    waiters: int = 0


class FetcherClient(BlockSource):
    """Blocks that the fetcher process of this machine downloads."""

    is_shared = True

    def __init__(self, place: Path, max_bytes: int) -> None:
        super().__init__(place)
        self.cache.make_folder()
        self._max_bytes = max_bytes
        self._lock = threading.Condition()
        self._socket: socket.socket | None = None
        self._folders: dict[str, tuple[int, Folder, int]] = {}
        self._requested: dict[str, tuple[int, BlockRange, int]] = {}
        self._waits: dict[str, _Wait] = {}
        self._last_message = 0.0

    # --- calls

    def expect(self, folder: Folder, total_bytes: int) -> None:
        with self._lock:
            number = self._folders[folder.url][0] if folder.url in self._folders else len(self._folders)
            self._folders[folder.url] = number, folder, total_bytes
            self._ensure_connection()
            self._send("folder", number, folder, total_bytes, self._max_bytes)

    def request(self, folder: Folder, blocks: Sequence[tuple[BlockRange, int]]) -> None:
        with self._lock:
            number = self._number(folder)
            for block, priority in blocks:
                self._requested[block.key] = number, block, priority
            self._ensure_connection()
            self._send("request", number, [(tuple(block), priority) for block, priority in blocks])

    def fetch(self, folder: Folder, blocks: Sequence[BlockRange]) -> None:
        with self._lock:
            number = self._number(folder)
            self._ensure_connection()
            self._send("fetch", number, [tuple(block) for block in blocks])

    def release(self, blocks: Iterable[BlockRange]) -> None:
        with self._lock:
            keys = [block.key for block in blocks if self._requested.pop(block.key, None) is not None]
            if keys and self._socket is not None:
                self._send("release", keys)

    def add(self, key: str, size: int) -> None:
        with self._lock:
            self._ensure_connection()
            self._send("add", key, size)

    def wait(self, folder: Folder, block: BlockRange) -> None:
        with self._lock:
            number = self._number(folder)
            self._ensure_connection()
            wait = self._waits.get(block.key)
            if wait is None:
                wait = self._waits[block.key] = _Wait(number, block)
                self._send("need", number, tuple(block))
            wait.waiters += 1
            try:
                self._last_message = time.monotonic()
                while not wait.is_done:
                    # The fetcher may be killed at any moment: a process that waits notices, and starts another one.
                    self._ensure_connection()
                    self._lock.wait(TICK)
                    if time.monotonic() - self._last_message > _SILENCE_SECONDS:
                        raise StorageError(
                            f"{self.cache.place}: the process that downloads blocks (see {lock_path(self.cache.place)}"
                            f") has not answered for {_SILENCE_SECONDS:.0f} seconds. End it, and read again."
                        )
            finally:
                wait.waiters -= 1
                if not wait.waiters and self._waits.get(block.key) is wait:
                    del self._waits[block.key]
            if wait.error is not None:
                raise wait.error

    def _number(self, folder: Folder) -> int:
        if folder.url not in self._folders:
            self._folders[folder.url] = len(self._folders), folder, 0
            if self._socket is not None:
                self._send("folder", *self._folders[folder.url], self._max_bytes)
        return self._folders[folder.url][0]

    # --- the connection

    def _send(self, *message: Any) -> None:
        if self._socket is None:
            return
        content = pickle.dumps(message)
        try:
            self._socket.sendall(LENGTH.pack(len(content)) + content)
        except OSError:
            self._disconnect(self._socket)  # a thread that waits connects again, and repeats all requests

    def _disconnect(self, connection: socket.socket) -> None:
        if self._socket is connection:
            self._socket = None
            self._lock.notify_all()
        with suppress(OSError):
            connection.close()

    def _ensure_connection(self) -> None:
        """Connect to the fetcher, which is started if there is none, and repeat what was requested before."""
        attempts = 0
        while self._socket is None:
            if attempts == 3:
                raise StorageError(
                    f"{self.cache.place}: the process that downloads blocks ends as soon as it has started. "
                    f"{self._read_log()}"
                )
            attempts += 1
            connection = self._connect()
            self._socket, self._last_message = connection, time.monotonic()
            threading.Thread(target=self._read, args=(connection,), daemon=True, name="quire-blocks").start()
            for number, folder, total_bytes in self._folders.values():
                self._send("folder", number, folder, total_bytes, self._max_bytes)
            for number in {number for number, _, _ in self._requested.values()}:
                blocks = [(tuple(b), priority) for own, b, priority in self._requested.values() if own == number]
                self._send("request", number, blocks)
            for wait in self._waits.values():
                if not wait.is_done:
                    self._send("need", wait.folder, tuple(wait.block))

    def _connect(self) -> socket.socket:
        end = time.monotonic() + _START_SECONDS
        while time.monotonic() < end:
            connection = self._try_to_connect()
            if connection is not None:
                return connection
            with self._starting() as is_mine:
                if is_mine:
                    connection = self._try_to_connect() or self._start(end)
                    if connection is not None:
                        return connection
            time.sleep(0.02)
        raise StorageError(
            f"{self.cache.place}: the process that downloads blocks did not start within {_START_SECONDS:.0f} seconds. "
            f"{self._read_log()}"
        )

    def _try_to_connect(self) -> socket.socket | None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with socket_address(self.cache.place, socket_name()) as address:
                connection.connect(address)
            if is_same_user(connection):
                # Only sending has a timeout: the thread that reads waits as long as the connection exists.
                connection.setsockopt(
                    socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(_SILENCE_SECONDS), 0)
                )
                return connection
        except (FileNotFoundError, ConnectionError, BlockingIOError):
            pass
        connection.close()
        return None

    @contextmanager
    def _starting(self) -> Iterator[bool]:
        """Hold the lock of the process that starts the fetcher, and yield whether it is this one."""
        self.cache.make_folder()
        handle = os.open(self.cache.place / f"start-{_node_name()}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_mine = True
        except BlockingIOError:
            is_mine = False
        try:
            yield is_mine
        finally:
            os.close(handle)

    def _start(self, end: float) -> socket.socket | None:
        """Start the fetcher, and wait until it accepts connections."""
        package = str(Path(__file__).parents[2])
        paths = [package, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        with (self.cache.place / "fetcher.log").open("wb") as log:
            process = subprocess.Popen(  # noqa: S603 - this interpreter
                [sys.executable, "-m", "quire.files._fetcher", str(self.cache.place), str(self._max_bytes)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.cache.place,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                start_new_session=True,  # it serves others, too, and must survive an interrupt of this program
            )
        if not _started:
            atexit.register(_disown_fetchers)
        _started.append(process)
        while time.monotonic() < end:
            connection = self._try_to_connect()
            if connection is not None:
                return connection
            if process.poll() not in (None, 0):
                raise StorageError(
                    f"{self.cache.place}: the process that downloads blocks cannot start. {self._read_log()}"
                )
            if process.returncode == 0:  # another one holds the lock, and is starting or ending
                time.sleep(0.1)
                return self._try_to_connect()
            time.sleep(0.01)
        return None

    def _read_log(self) -> str:
        text = ""
        with suppress(OSError):
            text = (self.cache.place / "fetcher.log").read_text("utf-8", "replace").strip()
        return f"The end of its log: {text[-500:]}" if text else "Its log is empty."

    def _read(self, connection: socket.socket) -> None:
        """Receive the answers of the fetcher, until the connection ends."""
        with suppress(OSError, ValueError), connection.makefile("rb") as file:
            for line in file:
                kind, *content = json.loads(line)
                with self._lock:
                    self._last_message = time.monotonic()
                    if kind == "done":
                        self._receive(*content)
        with self._lock:
            self._disconnect(connection)

    def _receive(self, key: str, error: list[str] | None) -> None:
        wait = self._waits.get(key)
        if wait is not None:
            wait.is_done, wait.error = True, None if error is None else _restore_error(*error)
            del self._waits[key]
            self._lock.notify_all()

    def abandon(self) -> None:
        """In a forked child, close the connection of the parent."""
        if self._socket is not None:
            with suppress(OSError):
                os.close(self._socket.detach())


def _restore_error(name: str, message: str) -> Exception:
    """Return an error of the fetcher: of the same class if it is one of quire, with the same message."""
    return _ERRORS[name](message) if name in _ERRORS else StorageError(f"{message} ({name})")


# --- the source of a process

_started: list[subprocess.Popen[bytes]] = []
"""Fetchers that this process has started, and has to wait for when they end."""
_clients: dict[tuple[Path, int], FetcherClient] = {}
_clients_lock = threading.Lock()
_is_forked = False


def open_block_source(folder: Folder, place: Path, max_bytes: int) -> BlockSource:
    """Return the source of the blocks of a folder: threads of this process if it is alone, else the fetcher process."""
    if _is_alone() or scheme_of(folder.url) not in _SHARED_SCHEMES or sys.platform == "win32":
        return open_local_source(place, max_bytes)
    with _clients_lock:
        key = place, max_bytes
        if key not in _clients:
            _clients[key] = FetcherClient(place, max_bytes)
        return _clients[key]


def _is_alone() -> bool:
    """Whether no other process of the same program reads on this machine, as far as this one can know."""
    if _is_forked or multiprocessing.parent_process() is not None:
        return False
    # Launchers set the number of processes of this machine, or at least of all machines.
    for name in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE", "WORLD_SIZE"):
        number = os.environ.get(name, "")
        if number.isdecimal():
            return int(number) <= 1
    return True


def _after_fork() -> None:
    global _is_forked, _clients_lock
    _is_forked, _clients_lock = True, threading.Lock()
    for client in _clients.values():
        client.abandon()
    _clients.clear()
    _disown_fetchers()


def _disown_fetchers() -> None:
    """Let fetchers outlive this process without a warning of `subprocess`: they serve others, and end by themselves."""
    for process in _started:
        if process.returncode is None:
            process.returncode = 0
    _started.clear()


at_fork(after_in_child=_after_fork)
