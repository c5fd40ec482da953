"""An fsspec filesystem in memory that fails on demand."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import fsspec
from fsspec.implementations.memory import MemoryFileSystem


class FaultyFileSystem(MemoryFileSystem):
    """By method, `plan` has what the next calls raise, and `after` what they raise once done; None is no fault."""

    protocol = "faulty"
    store: dict[str, Any] = {}
    pseudo_dirs = [""]
    plan: dict[str, list[BaseException | None]] = {}
    after: dict[str, list[BaseException | None]] = {}
    hanging: dict[str, threading.Event] = {}
    calls: list[str] = []


def _make_faulty(method: str) -> Any:
    def call(self: FaultyFileSystem, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(method)
        if method in self.hanging:
            self.hanging[method].wait()
        _raise_next(self.plan.get(method, []))
        result = getattr(MemoryFileSystem, method)(self, *args, **kwargs)
        _raise_next(self.after.get(method, []))
        return result

    return call


def _raise_next(errors: list[BaseException | None]) -> None:
    error = errors.pop(0) if errors else None
    if error is not None:
        raise error


for _name in ("ls", "info", "cat_file", "put_file", "mv", "rm_file", "makedirs"):
    setattr(FaultyFileSystem, _name, _make_faulty(_name))


@contextmanager
def faulty_store() -> Iterator[type[FaultyFileSystem]]:
    """Register the filesystem, empty and without faults, as faulty://."""
    fsspec.register_implementation("faulty", FaultyFileSystem, clobber=True)
    for state in (FaultyFileSystem.store, FaultyFileSystem.plan, FaultyFileSystem.after, FaultyFileSystem.hanging):
        state.clear()
    FaultyFileSystem.pseudo_dirs[:] = [""]
    FaultyFileSystem.calls.clear()
    yield FaultyFileSystem
    for event in FaultyFileSystem.hanging.values():
        event.set()
