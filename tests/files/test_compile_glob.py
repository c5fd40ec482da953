"""Glob patterns as regular expressions, for names in stores."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import OptionError
from quire.files import compile_glob

TOKENS = ("a", "b", "-", ".", "\\", "+", "]", "*", "?", "[a-c]", "[!a-b]", "[!a\\]", "[[+]")


@given(st.lists(st.sampled_from(TOKENS)).map("".join), st.text("abcd-.\\+][", max_size=5))
def test_pattern_of_one_name_matches_as_fnmatch(pattern: str, name: str) -> None:
    if "**" not in pattern:
        assert bool(compile_glob(pattern).fullmatch(name)) == fnmatchcase(name, pattern)


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("*", ["a"]),
        ("?/*", ["b/a"]),
        ("**/a", ["a", "b/a", "b/c/a"]),
        ("b/**", ["b/a", "b/c/a"]),
        ("b/**/a", ["b/a", "b/c/a"]),
        ("[!a]*/a", ["b/a"]),
    ],
)
def test_only_two_stars_cross_folders(pattern: str, names: list[str]) -> None:
    assert [name for name in ("a", "b/a", "b/c/a") if compile_glob(pattern).fullmatch(name)] == names


def test_invalid_range_is_an_error() -> None:
    with pytest.raises(OptionError, match="not a pattern of files"):
        compile_glob("[z-a]")
