"""A thread-safe LRU cache with a limit on the total size of its values."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Cache(Generic[K, V]):
    """Values by key; the least recently used ones are evicted first.

    `functools.lru_cache` limits the number of values, not their bytes, and may compute a value twice if two threads
    ask for it at the same time. Here one value is computed at a time: computations read and sort whole columns.
    """

    def __init__(self, max_size: int, size: Callable[[V], int] = lambda _: 1) -> None:
        self._max_size, self._size = max_size, size
        self._values: OrderedDict[K, V] = OrderedDict()
        self._lock, self._computing = threading.Lock(), threading.Lock()

    def get(self, key: K, compute: Callable[[], V]) -> V:
        """Return the value of a key, computed if it is not cached; cached values stay available meanwhile."""
        value = self._look_up(key)
        if value is None:
            with self._computing:
                value = self._look_up(key)  # another thread may have computed it
                if value is None:
                    value = compute()
                    self._put(key, value)
        return value

    def _look_up(self, key: K) -> V | None:
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
            return self._values.get(key)

    def _put(self, key: K, value: V) -> None:
        with self._lock:
            self._values[key] = value
            # At least one value stays, even if it alone is too large: it was asked for just now.
            while len(self._values) > 1 and sum(map(self._size, self._values.values())) > self._max_size:
                self._values.popitem(last=False)
