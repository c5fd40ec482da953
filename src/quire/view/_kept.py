"""What was worked out once, and is kept while there is room for it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


def _one(value: object) -> int:  # noqa: ARG001 - the size of any value
    return 1


class Kept(Generic[K, V]):
    """Values by their keys; those that were not asked for the longest go first. One is made at a time."""

    def __init__(self, most: int, size: Callable[[V], int] = _one) -> None:
        self._most, self._size = most, size
        self._values: OrderedDict[K, V] = OrderedDict()
        self._lock, self._making = threading.Lock(), threading.Lock()

    def get(self, key: K, make: Callable[[], V]) -> V:
        """The value of a key, made if it is not there; meanwhile, others that are there can be had."""
        found = self._found(key)
        if found is None:
            with self._making:
                found = self._found(key)  # somebody else may have made it
                if found is None:
                    found = self._put(key, make())
        return found

    def _found(self, key: K) -> V | None:
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
            return self._values.get(key)

    def _put(self, key: K, value: V) -> V:
        with self._lock:
            self._values[key] = value
            while len(self._values) > 1 and sum(map(self._size, self._values.values())) > self._most:
                self._values.popitem(last=False)
        return value
