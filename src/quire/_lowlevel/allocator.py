"""The memory that the C allocator keeps after it was freed."""

from __future__ import annotations

import ctypes

from quire._lowlevel import is_safe


def return_free_memory() -> None:
    """Return memory that glibc's allocator keeps for later to the system; on other allocators, do nothing."""
    if is_safe():
        return
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # another libc, or Windows
        return
    trim(0)
