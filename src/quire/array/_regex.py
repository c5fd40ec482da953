"""Regular expressions of queries: RE2's syntax, in time linear in the text whatever the pattern.

Python's `re` backtracks: `(a+)+$` takes minutes on thirty letters. RE2 (google-re2, or the one inside pyarrow) does
not. Simple patterns, whose worst case on a text is known to be small, still run on `re`: it is faster for one text, and
needs nothing installed.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from quire._installation import install_command
from quire._optional import is_installed
from quire.errors import QueryError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MOST_STEPS = 4_000_000
"""The most steps of backtracking that a text may take in the worst case: some 40 ms."""
_LONGEST = 2_000
"""The most characters of a pattern."""
_FLAGS = re.compile(r"\(\?([ims]+)\)")
_REPEAT = re.compile(r"[*+?]|\{(\d{1,3})(,?)(\d{0,3})\}")
_CLASS = re.compile(r"\[\^?(?:[^\]\[\\&|~-]|-(?!-)|\\.)+\]", re.DOTALL)
_ESCAPES = {  # as RE2 has them: of ASCII alone, without the vertical tab
    "d": "[0-9]",
    "D": "[^0-9]",
    "w": "[0-9A-Za-z_]",
    "W": "[^0-9A-Za-z_]",
    "s": "[\\t\\n\\f\\r ]",
    "S": "[^\\t\\n\\f\\r ]",
    **{name: f"\\{name}" for name in "ntrf"},
}
_ASSERTIONS = {"b": "(?a:\\b)", "B": "(?a:\\B)", "A": "\\A", "z": "\\Z"}


class Regex:
    """A pattern that is searched for in texts."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self._simple = SimplePattern.parse(pattern)
        self._search: Callable[[str], bool] | None = None
        if self._simple is None:
            self._search = _linear_search(pattern)  # raises for an invalid pattern

    def search(self, text: str) -> bool:
        """Whether the pattern occurs in a text."""
        if self._simple is not None and self._simple.steps(len(text)) <= _MOST_STEPS:
            return self._simple.compiled.search(text) is not None
        if self._search is None:
            self._search = _linear_search(self.pattern)
        return self._search(text)

    def search_all(self, texts: Sequence[str | None]) -> NDArray[np.bool_]:
        """Return for each text whether the pattern occurs in it; it never does in None."""
        if self._simple is None and is_installed("pyarrow"):
            return _search_column(self.pattern, texts)
        return np.fromiter((text is not None and self.search(text) for text in texts), np.bool_, len(texts))


@lru_cache(256)
def compile_regex(pattern: str) -> Regex:
    """Compile a pattern, or raise a QueryError that says what is wrong with it."""
    if len(pattern) > _LONGEST:
        raise QueryError(f"$regex: a pattern has at most {_LONGEST:,} characters, got {len(pattern):,}.")
    return Regex(pattern)


def _linear_search(pattern: str) -> Callable[[str], bool]:
    if is_installed("re2"):
        re2: Any = importlib.import_module("re2")
        options = re2.Options()
        options.log_errors = False
        try:
            search = re2.compile(pattern, options).search
        except re2.error as error:
            detail = error.args[0] if error.args else ""
            raise _invalid_pattern(pattern, detail.decode() if isinstance(detail, bytes) else str(detail)) from None
        return lambda text: search(_encodable(text)) is not None
    if is_installed("pyarrow"):
        _search_column(pattern, [""])  # raises for an invalid pattern
        return lambda text: bool(_search_column(pattern, [text])[0])
    try:
        re.compile(pattern)
    except re.error as error:
        raise _invalid_pattern(pattern, str(error)) from None
    raise QueryError(
        f"$regex: {pattern!r} may take very long in Python's re, and RE2 is not installed: {install_command('regex')}. "
        "Or repeat single characters only, not groups, and leave out lookaround and backreferences."
    )


def _search_column(pattern: str, texts: Sequence[str | None]) -> NDArray[np.bool_]:
    pa: Any = importlib.import_module("pyarrow")
    compute: Any = importlib.import_module("pyarrow.compute")
    try:
        array = pa.array([None if text is None else _encodable(text) for text in texts], pa.large_string())
        matches = compute.match_substring_regex(array, pattern=pattern)
    except pa.ArrowInvalid as error:
        raise _invalid_pattern(pattern, str(error)) from None
    result: NDArray[np.bool_] = matches.fill_null(pa.scalar(value=False)).to_numpy(zero_copy_only=False)
    return result


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate, which no UTF-8 has
        return text.encode("utf-8", "replace").decode()
    return text


def _invalid_pattern(pattern: str, reason: str) -> QueryError:
    return QueryError(
        f"$regex: {pattern!r} is not a regular expression: {reason.removeprefix('Invalid regular expression: ')}. "
        "Patterns have RE2's syntax: no lookaround and no backreferences."
    )


class SimplePattern:
    """A pattern that repeats single characters only, in Python's syntax, with a bound on its steps."""

    def __init__(self, pattern: str, repeats: list[int | None], branches: int) -> None:
        self.compiled = re.compile(pattern)
        self._repeats, self._branches = repeats, branches

    def steps(self, length: int) -> int:
        """Bound the steps of backtracking on a text: each repetition may end at any of its characters."""
        ends = (1 + (length if most is None else min(most, length)) for most in self._repeats)
        return (length + 1) * self._branches * prod(ends)

    @classmethod
    def parse(cls, pattern: str) -> SimplePattern | None:  # noqa: C901, PLR0912, PLR0915 - a case a character
        """Translate a pattern from RE2's syntax; None where it is not simple, or not a pattern."""
        flags = _FLAGS.match(pattern)
        many_lines = flags is not None and "m" in flags[1]
        parts = [flags[0] if flags else ""]
        repeats: list[int | None] = []
        branches, groups, at = 1, [1], flags.end() if flags else 0
        repeatable = False  # whether the last part is a single character
        while at < len(pattern):
            char, after = pattern[at], at + 1
            if (repeat := _REPEAT.match(pattern, at)) is not None:
                if not repeatable:
                    return None
                low, comma, high = repeat[1], repeat[2], repeat[3]
                most = None if char in "*+" or (comma and not high) else 1 if char == "?" else int(high or low)
                if most is not None and low and int(low) > most:
                    return None
                repeats.append(most)
                after = repeat.end()
                lazy = pattern[after : after + 1] == "?"
                after += lazy
                parts.append(repeat[0] + "?" * lazy)
                repeatable = False
            elif char == "(":
                if pattern.startswith("(?", at):
                    if not pattern.startswith("(?:", at):
                        return None
                    after = at + 3
                groups.append(1)
                parts.append("(?:")
                repeatable = False
            elif char == ")":
                if len(groups) == 1:
                    return None
                branches *= groups.pop()
                parts.append(")")
                repeatable = False
            elif char == "|":
                groups[-1] += 1
                parts.append("|")
                repeatable = False
            elif char == "[":
                match = _CLASS.match(pattern, at)
                inside = None if match is None else _translate_class(match[0])
                if match is None or inside is None:
                    return None
                parts.append(inside)
                after, repeatable = match.end(), True
            elif char == "\\":
                name = pattern[at + 1 : at + 2]
                after = at + 2
                repeatable = name not in _ASSERTIONS
                if name in _ASSERTIONS or name in _ESCAPES:
                    parts.append(_ASSERTIONS.get(name) or _ESCAPES[name])
                elif name and name.isascii() and not name.isalnum():
                    parts.append(re.escape(name))
                else:
                    return None
            elif char in "^$":
                parts.append("\\Z" if char == "$" and not many_lines else char)
                repeatable = False
            elif char == "{":
                return None
            else:
                parts.append(char if char == "." else re.escape(char))
                repeatable = True
            at = after
        if len(groups) != 1:
            return None
        try:
            return cls("".join(parts), repeats, branches * groups[0])
        except (re.error, OverflowError, RecursionError):
            return None


def _translate_class(text: str) -> str | None:
    """Translate a character class from RE2's escapes; None where the two syntaxes may differ."""
    parts: list[str] = []
    for match in re.finditer(r"\\(.)|[^\\]", text, re.DOTALL):
        name = match[1]
        if name is None:
            parts.append(match[0])
        elif name in "dws":
            parts.append(_ESCAPES[name][1:-1])
        elif name in "ntrf" or (name.isascii() and not name.isalnum()):
            parts.append(f"\\{name}")
        else:
            return None
    return "".join(parts)
