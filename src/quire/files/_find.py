"""Files by pattern: sorted, without duplicates, optionally sampled."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Iterable
from glob import iglob
from pathlib import Path

from quire.errors import OptionError, UriNotFoundError

Patterns = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
"""One or several glob patterns: '*.jpg', 'photos/**/*.png'."""


def find_files(
    patterns: Patterns, *, recursive: bool = True, exclude_regex: str | None = None, allow_empty: bool = False
) -> list[str]:
    """Return the files that match any of the patterns, sorted.

    `exclude_regex` leaves out paths whose start it matches. Finding no file is an error unless `allow_empty`.
    """
    pattern_list = [patterns] if isinstance(patterns, (str, os.PathLike)) else list(patterns)
    try:
        excluded = None if exclude_regex is None else re.compile(exclude_regex)
    except re.error as error:
        raise OptionError(f"exclude_regex={exclude_regex!r} is not a regular expression ({error}).") from error
    expanded = (os.path.expanduser(os.fspath(pattern)) for pattern in pattern_list)  # noqa: PTH111 - a Path drops './'
    paths = {path for pattern in expanded for path in iglob(pattern, recursive=recursive)}  # noqa: PTH207
    if excluded is not None:
        paths = {path for path in paths if not excluded.match(path)}
    files = sorted(filter(os.path.isfile, paths))
    if not files and not allow_empty:
        names = ", ".join(repr(os.fspath(pattern)) for pattern in pattern_list) or "an empty list of patterns"
        excluding = "" if exclude_regex is None else f" and not exclude_regex={exclude_regex!r}"
        raise UriNotFoundError(
            f"no file matches {names}{excluding} (looked from {Path.cwd()}). "
            "Pass allow_empty=True if there may be none."
        )
    return files


_GLOB_TOKENS = re.compile(r"\*\*/|\*\*|\*|\?|\[[!^]?[^\]]+\]|.", re.DOTALL)
_WILDCARDS = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}


def compile_glob(pattern: str) -> re.Pattern[str]:
    """Return the regular expression of a glob pattern, for names in a store that cannot search for itself.

    `*` and `?` stand for characters within a name, `[a-z]` and `[!a-z]` for one of them, and `**` for any number of
    folders.
    """
    parts = []
    for token in _GLOB_TOKENS.findall(pattern):
        if len(token) > 1 and token[0] == "[":
            negated = "^" if token[1] in "!^" else ""
            # Only ranges have a meaning inside the brackets. `[` is escaped, since `re` warns of sets in sets.
            members = token[1 + len(negated) : -1].replace("\\", r"\\").replace("[", r"\[")
            parts.append(f"[{negated}{members}]")
        else:
            parts.append(_WILDCARDS.get(token) or re.escape(token))
    try:
        return re.compile("".join(parts), re.DOTALL)
    except re.error as error:
        raise OptionError(f"{pattern!r} is not a pattern of files ({error}).") from error


def sample_paths(paths: list[str], size: int | None, sampling_rate: float | None, seed: int | None) -> list[str]:
    """Return a sample of the paths: each with probability `sampling_rate`, and the first `size` of these."""
    if sampling_rate is not None and not 0 <= sampling_rate <= 1:
        raise OptionError(f"sampling_rate={sampling_rate}: it is the share of files to keep, between 0 and 1.")
    if size is not None and size < 0:
        raise OptionError(f"size={size}: it is the number of files to keep, 0 or more, or None for all.")
    generator = random.Random(seed)  # noqa: S311 - not for secrets
    sampled = paths if sampling_rate is None else [path for path in paths if generator.random() < sampling_rate]
    return sampled[:size]
