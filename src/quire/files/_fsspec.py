"""A filesystem of fsspec in one process, asked within a time.

The asynchronous ones (s3, gs, http, ...) run in a thread with a loop that no fork takes along, so each process opens
its own. Their calls are cancelled when the time is over. The others have no such way: their calls run in a thread that
is left behind.
"""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Mapping
from functools import cache, partial
from typing import Any

from quire._optional import require
from quire.files._limits import shown
from quire.files._retry import bounded, too_slow

_LOOKS = frozenset({"info", "ls"})
"""What fsspec may answer from memory, where others write too."""
_inherited: list[Any] = []
"""What was opened before a fork: to drop it is to close the connections of the parent."""


def require_fsspec(url: str) -> Any:
    """The module, or the command that installs it."""
    module = require("fsspec", extra="parquet", needed_for=shown(url))
    _start_anew_after_forks()
    return module


@cache
def _start_anew_after_forks() -> None:
    """Let a forked child start a loop of its own; older releases of fsspec do not see to it."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=require("fsspec.asyn", extra="parquet", needed_for="fsspec").reset_lock)


class Connection:
    """The filesystem of an address, opened on first use and again after a fork."""

    def __init__(self, url: str, storage_options: Mapping[str, Any]) -> None:
        self._url, self._options = url, storage_options
        self._opened: tuple[int, Any, str] | None = None

    def within(self, seconds: float) -> Attempt:
        """Calls that have so many seconds together."""
        until = time.monotonic() + seconds
        opened = self._opened
        if opened is None or opened[0] != os.getpid():
            _inherited.append(opened)
            url_to_fs = require_fsspec(self._url).core.url_to_fs
            filesystem, root = bounded(partial(url_to_fs, self._url, **self._options), seconds)
            self._opened = opened = (os.getpid(), filesystem, root.rstrip("/"))
        return Attempt(opened[1], opened[2], until)


class Attempt:
    """Calls to a filesystem that share one time."""

    def __init__(self, filesystem: Any, root: str, until: float) -> None:
        self._filesystem, self.root, self._until = filesystem, root, until

    def path(self, name: str) -> str:
        """A file of the folder, as the filesystem names it."""
        return f"{self.root}/{name}"

    def ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the filesystem."""
        filesystem = self._filesystem
        seconds = max(self._until - time.monotonic(), 0.001)
        if method in _LOOKS:
            filesystem.invalidate_cache()
        coroutine = getattr(filesystem, f"_{method}", None) if filesystem.async_impl else None
        if not inspect.iscoroutinefunction(coroutine):
            return bounded(partial(getattr(filesystem, method), *args, **kwargs), seconds)
        asyn = require_fsspec(self.root).asyn
        try:
            return asyn.sync(filesystem.loop, coroutine, *args, timeout=seconds, **kwargs)
        except asyn.FSTimeoutError:
            raise too_slow(seconds) from None
