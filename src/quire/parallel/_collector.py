"""Whether this thread may wait for others.

The garbage collector closes what nobody reaches any more, in whatever thread it happens to run, and whatever locks that
thread holds: what it closes must wait for nobody.
"""

from __future__ import annotations

import gc
import sys
from threading import get_ident

_collecting: set[int] = set()


def _note(phase: str, _: dict[str, int]) -> None:
    (_collecting.add if phase == "start" else _collecting.discard)(get_ident())


gc.callbacks.append(_note)


def may_wait() -> bool:
    """Whether neither the collector runs in this thread, nor the interpreter ends, when threads stand still."""
    return get_ident() not in _collecting and not sys.is_finalizing()
