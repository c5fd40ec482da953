"""A worker process: the loop that runs in it, and the handle in the parent.

A task is two messages on a pipe: first what changed (new classes, another function), then the items. The answer is one
message, the pickled outcome.
"""

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

from quire._lowlevel.forks import ForkSafeLock
from quire.errors import FunctionError
from quire.parallel._pickling import dump_classes, dump_value, has_cloudpickle, load_classes, load_value
from quire.parallel._tasks import Failure, Function, Outcome, dump_outcome, run_task, summary_of

_tokens = itertools.count(1)
_starting = ForkSafeLock()


class PickledFunction:
    """A function, pickled once for all workers; each worker remembers the last one by its token."""

    def __init__(self, function: Function) -> None:
        self.token = next(_tokens)
        self.data, self.classes = dump_value(function)


# --- in the worker


def serve(channel: Connection) -> None:
    """Run tasks from the pipe until it is closed or the parent is gone. The parent handles Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()

    def exit_with_parent() -> None:
        # A parent that is killed closes nothing: the pipe may be open in other workers that it forked.
        if parent is not None:
            connection.wait([parent.sentinel])
            os._exit(1)

    threading.Thread(target=exit_with_parent, daemon=True).start()
    runner = _TaskRunner()
    with contextlib.suppress(EOFError, OSError):
        while True:
            changes, items = channel.recv_bytes(), channel.recv_bytes()
            channel.send_bytes(dump_outcome(runner(changes, items)))
            for stream in (sys.stdout, sys.stderr):  # output must not be lost when the process is terminated
                with contextlib.suppress(Exception):
                    stream.flush()


class _TaskRunner:
    _function: Function

    def __call__(self, changes: bytes, items: bytes) -> Outcome:
        """Apply the changes (new classes, another function), and run the task."""
        try:
            classes, function = load_value(changes)
            load_classes(classes)
            self._function = self._function if function is None else load_value(function)
            values = load_value(items)
        except Exception as error:  # noqa: BLE001 - unpickling imports the user's modules
            return Outcome(failure=Failure(0, error, f"the worker process could not read it: {summary_of(error)}"))
        return run_task(self._function, values)


# --- in the parent


class WorkerProcess:
    """The handle of a worker process, which starts at once; after its death the next call starts another."""

    def __init__(self, context: BaseContext) -> None:
        self._context = context
        self._ended = False
        self._in_use, self._changing = ForkSafeLock(), ForkSafeLock()
        self._start()

    def _start(self) -> None:
        self._channel, other = self._context.Pipe()
        self._known_classes: set[str] = set()
        self._token = 0
        self._process = self._context.Process(target=serve, args=(other,), daemon=True)  # type: ignore[attr-defined]
        with _skip_main_import():
            self._process.start()
        other.close()

    def __call__(self, function: Function | PickledFunction, items: Sequence[Any]) -> Outcome:
        """Run a task in the process and wait for its outcome."""
        pickled = function if isinstance(function, PickledFunction) else PickledFunction(function)
        data, classes = dump_value(items)
        with self._in_use:
            with self._changing:
                if self._process.exitcode is not None and not self._ended:
                    self._channel.close()
                    self._start()
            try:
                answer = self._exchange(pickled, data, classes | pickled.classes)
            except (EOFError, OSError) as error:
                self._process.join(5)
                reason = _exit_reason(self._process.exitcode)
                raise FunctionError(f"the worker process ended while it was at work: {reason}") from error
        outcome: Outcome = load_value(answer)
        return outcome

    def _exchange(self, function: PickledFunction, data: bytes, classes: frozenset[str]) -> bytes:
        # A worker keeps classes and its last function, so each of them is sent to it once.
        new_classes = dump_classes(classes - self._known_classes) if classes - self._known_classes else []
        new_function = None if self._token == function.token else function.data
        self._channel.send_bytes(dump_value((new_classes, new_function))[0])
        self._channel.send_bytes(data)
        self._known_classes |= classes
        self._token = function.token
        return self._channel.recv_bytes()

    def warm_up(self) -> None:
        """Wait until the process has started."""
        self(str, ())

    def terminate(self) -> None:
        """Stop the process, also in the middle of a task."""
        with self._changing:
            self._ended = True
            self._process.terminate()

    def join(self) -> None:
        """Wait until the process is gone; kill it after 5 seconds."""
        self._process.join(5)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
        self._channel.close()


def _exit_reason(exitcode: int | None) -> str:
    if exitcode is None or exitcode >= 0:
        return f"exit code {exitcode}. Its own message, if any, is on the standard error stream."
    with contextlib.suppress(ValueError):
        return f"it was killed by {signal.Signals(-exitcode).name}. Is there enough memory for what it does?"
    return f"it was killed by signal {-exitcode}."


@contextlib.contextmanager
def _skip_main_import() -> Iterator[None]:
    """Start a process that does not import the main script.

    multiprocessing imports it in a spawned process, so a script without `if __name__ == "__main__"` would run again.
    What the script defines is sent by value instead. Without cloudpickle that is impossible, and the script is imported
    as usual. There is no public switch, so `get_preparation_data` is replaced while this thread starts the process; the
    lock keeps two replacements from interleaving, and other threads get the original data.
    """
    if not has_cloudpickle():
        yield
        return
    this_thread = threading.get_ident()

    def get_preparation_data(name: str) -> dict[str, Any]:
        data: dict[str, Any] = original(name)
        if threading.get_ident() != this_thread:
            return data
        return {key: value for key, value in data.items() if not key.startswith("init_main")}

    with _starting:
        original = spawn.get_preparation_data
        spawn.get_preparation_data = get_preparation_data
        try:
            yield
        finally:
            spawn.get_preparation_data = original
