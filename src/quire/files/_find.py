"""Files by pattern: sorted, each once, sampled and cut if asked."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Iterable
from glob import iglob
from pathlib import Path

from quire.errors import UriNotFoundError

Patterns = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
"""One pattern of the shell's kind, or several: '*.jpg', 'photos/**/*.png'."""


def find_files(
    patterns: Patterns, *, recursive: bool = True, exclude_regex: str | None = None, allow_empty: bool = False
) -> list[str]:
    """Return the files that match any of the patterns, sorted.

    `exclude_regex` leaves out paths whose start it matches. Finding no file is an error unless `allow_empty`.
    """
    given = [patterns] if isinstance(patterns, (str, os.PathLike)) else list(patterns)
    excluded = _compiled(exclude_regex)
    expanded = (os.path.expanduser(os.fspath(pattern)) for pattern in given)  # noqa: PTH111 - a Path drops './'
    found = {path for pattern in expanded for path in iglob(pattern, recursive=recursive)}  # noqa: PTH207
    kept = found if excluded is None else {path for path in found if not excluded.match(path)}
    files = sorted(filter(os.path.isfile, kept))
    if not files and not allow_empty:
        shown = ", ".join(repr(os.fspath(pattern)) for pattern in given) or "an empty list of patterns"
        excluding = "" if exclude_regex is None else f" and not exclude_regex={exclude_regex!r}"
        raise UriNotFoundError(
            f"no file matches {shown}{excluding} (looked from {Path.cwd()}). "
            "Pass allow_empty=True if there may be none."
        )
    return files


def thin_out(paths: list[str], size: int | None, sampling_rate: float | None, seed: int | None) -> list[str]:
    """A part of the paths: each with a probability, and the first so many of these."""
    if sampling_rate is not None and not 0 <= sampling_rate <= 1:
        raise ValueError(f"sampling_rate is between 0 and 1, got {sampling_rate}.")
    if size is not None and size < 0:
        raise ValueError(f"size is 0 or more, got {size}.")
    chance = random.Random(seed)  # noqa: S311 - not for secrets
    kept = paths if sampling_rate is None else [path for path in paths if chance.random() < sampling_rate]
    return kept[:size]


def _compiled(pattern: str | None) -> re.Pattern[str] | None:
    try:
        return None if pattern is None else re.compile(pattern)
    except re.error as error:
        raise ValueError(f"exclude_regex={pattern!r} is not a regular expression ({error}).") from None
