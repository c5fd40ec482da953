"""Answers of a store that ask for fewer requests, reported by the call that is retried to who makes many calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class _Watcher(threading.local):
    on_throttling: Callable[[float], None] | None = None


_watcher = _Watcher()


@contextmanager
def watch_throttling(on_throttling: Callable[[float], None]) -> Iterator[None]:
    """Call a function whenever a call of this thread is answered with 429 or 503, with the seconds to wait."""
    before, _watcher.on_throttling = _watcher.on_throttling, on_throttling
    try:
        yield
    finally:
        _watcher.on_throttling = before


def report_throttling(seconds: float = 0.0) -> None:
    """Report an answer of 429 or 503; `seconds` is how long the store asks to wait, if it says so."""
    if _watcher.on_throttling is not None:
        _watcher.on_throttling(seconds)
