"""A worker process: the end that works, and the end that asks."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from multiprocessing import connection, parent_process, spawn
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from typing import Any

from quire.errors import FunctionError
from quire.parallel._shipping import define, definitions, has_cloudpickle, pack, unpack
from quire.parallel._tasks import Failure, Function, Outcome, packed_outcome, summary_of, work_on

_tokens = itertools.count(1)
_starting = threading.Lock()


class Shipment:
    """A function, packed once for all workers, and known to each by its token."""

    def __init__(self, function: Function) -> None:
        self.token = next(_tokens)
        self.data, self.classes = pack(function)


# --- the end that works


def serve(channel: Connection) -> None:
    """Do what comes through the channel until it is closed or the parent is gone. Ctrl-C is the parent's business."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    job = _Job()
    with contextlib.suppress(EOFError, OSError):
        while True:
            news, items = channel.recv_bytes(), channel.recv_bytes()
            channel.send_bytes(packed_outcome(job(news, items)))
            _flush()


class _Job:
    """The function that the process has in hand."""

    _function: Function

    def __call__(self, news: bytes, items: bytes) -> Outcome:
        """Take in what is new (classes, another function), and work on the items."""
        try:
            classes, shipped = unpack(news)
            define(classes)
            self._function = self._function if shipped is None else unpack(shipped)
            received = unpack(items)
        except Exception as error:  # noqa: BLE001 - unpickling runs imports of the user's modules
            return Outcome(failure=Failure(0, error, f"the worker process could not read it: {summary_of(error)}"))
        return work_on(self._function, received)


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)


def _flush() -> None:
    """What was printed must not be lost when the process is ended."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


# --- the end that asks


class Worker:
    """A process, started at once; the next call after its death starts another."""

    def __init__(self, context: BaseContext) -> None:
        self._context = context
        self._ended = False
        self._in_use, self._changing = threading.Lock(), threading.Lock()
        self._start()

    def _start(self) -> None:
        self._channel, other = self._context.Pipe()
        self._known: set[str] = set()
        self._token = 0
        self._process = self._context.Process(target=serve, args=(other,), daemon=True)  # type: ignore[attr-defined]
        with _without_main():
            self._process.start()
        other.close()

    def __call__(self, function: Function | Shipment, items: Sequence[Any]) -> Outcome:
        """What the process makes of the items."""
        shipment = function if isinstance(function, Shipment) else Shipment(function)
        data, classes = pack(items)
        with self._in_use:
            self._revive()
            try:
                received = self._ask(shipment, data, classes | shipment.classes)
            except (EOFError, OSError) as error:
                raise self._died() from error
        outcome: Outcome = unpack(received)
        return outcome

    def _revive(self) -> None:
        with self._changing:
            if self._process.exitcode is not None and not self._ended:
                self._channel.close()
                self._start()

    def warm_up(self) -> None:
        """Wait until the process has started."""
        self(str, ())

    def _ask(self, shipment: Shipment, data: bytes, classes: frozenset[str]) -> bytes:
        news = definitions(classes - self._known) if classes - self._known else []
        self._channel.send_bytes(pack((news, None if self._token == shipment.token else shipment.data))[0])
        self._channel.send_bytes(data)
        self._known |= classes
        self._token = shipment.token
        return self._channel.recv_bytes()

    def _died(self) -> FunctionError:
        self._process.join(5)
        return FunctionError(f"the worker process ended while it was at work: {_reason(self._process.exitcode)}")

    def end(self) -> None:
        """Stop the process, whatever it is doing."""
        with self._changing:
            self._ended = True
            self._process.terminate()

    def wait(self) -> None:
        """Until the process is gone."""
        self._process.join(5)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
        self._channel.close()


def _reason(exitcode: int | None) -> str:
    if exitcode is None or exitcode >= 0:
        return f"exit code {exitcode}. Its own message, if any, is on the standard error stream."
    with contextlib.suppress(ValueError):
        return f"it was killed by {signal.Signals(-exitcode).name}. Is there enough memory for what it does?"
    return f"it was killed by signal {-exitcode}."


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Start a process that does not import the main script, which would run again if it has no guard.

    What the script defines goes by value instead; without cloudpickle it cannot, and the script is imported as usual.
    """
    if not has_cloudpickle():
        yield
        return
    me = threading.get_ident()

    def without(name: str) -> dict[str, Any]:
        data: dict[str, Any] = original(name)
        mine = threading.get_ident() == me
        return {key: value for key, value in data.items() if not (mine and key.startswith("init_main"))}

    with _starting:
        original = spawn.get_preparation_data
        spawn.get_preparation_data = without
        try:
            yield
        finally:
            spawn.get_preparation_data = original
