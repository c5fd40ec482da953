"""Answers to requests for a part of something: what players of sounds and films ask for."""

from __future__ import annotations

import re

_MOST = 8 << 20
"""A request without an end gets so many bytes at most."""
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})", re.ASCII)


class RangeError(ValueError):
    """A range with nothing in it."""


def asked_range(header: str | None, size: int) -> tuple[int, int] | None:
    """The first byte and the end of what a `Range` header asks for; None where all is to be sent.

    Of several ranges, or of units that are not known, the whole is an answer too.
    """
    match = _RANGE.fullmatch(header.strip()) if header else None
    if match is None or match[0] == "bytes=-":
        return None
    first, last = match.groups()
    if not first:  # so many from the end
        start, end = max(0, size - int(last)), size
    else:
        start = int(first)
        end = min(int(last) + 1, size) if last else min(start + _MOST, size)
    if start >= size or end <= start:
        raise RangeError
    return start, end
