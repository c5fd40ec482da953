"""Memory that messages come and go in."""

from __future__ import annotations

from functools import cache

import numpy as np

KEPT = 8 << 20
"""Twice the size of a message, unless limits say otherwise: gRPC takes some more than a message has."""


@cache
def keep_memory(size: int = KEPT) -> None:
    """Let the allocator keep what messages took for the next ones, and not give it back to the system each time.

    Fresh memory costs more than copying into it: the system clears every page, when it is touched first. glibc's
    allocator keeps blocks up to the largest that was ever freed (and 32 MiB), and twice as much in each of its arenas;
    so one is freed here. It was never touched, and others' allocators do not mind. MALLOC_TRIM_THRESHOLD_ or
    MALLOC_MMAP_THRESHOLD_ in the environment turn this off.
    """
    np.empty(size, np.uint8)
