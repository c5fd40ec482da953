"""Regular expressions of queries: the same meaning with every engine, and bounded time."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire import BaseDocument, DocumentArray
from quire.array import _regex
from quire.array._regex import Regex, SimplePattern, compile_regex
from quire.errors import QueryError
from quire.viewer._filter import parse_filter


class Note(BaseDocument):
    text: str = ""


HARD = [
    "(a+)+$",
    "^(a|a)*$",
    "(a|aa)+$",
    "(.*a){20}$",
    "a*a*a*a*a*a*a*a*b",
    "(a?){30}a{30}b",
    "^(([a-z])+.)+[A-Z]([a-z])+$",
]
ENGINES = [
    pytest.param("re2", marks=pytest.mark.needs("re2")),
    pytest.param("pyarrow", marks=pytest.mark.needs("pyarrow")),
    "none",
]


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Hide all engines but one, or all of them."""
    name: str = request.param
    monkeypatch.setattr(_regex, "is_installed", lambda module: module == name)
    compile_regex.cache_clear()
    request.addfinalizer(compile_regex.cache_clear)
    return name


@pytest.mark.needs("re2", "pyarrow")
@pytest.mark.parametrize("pattern", HARD)
def test_backtracking_patterns_are_fast_or_rejected(engine: str, pattern: str) -> None:
    text = "a" * 50 + "!"  # on which Python's re takes hours
    rows = DocumentArray[Note]([Note(text=text)])
    try:
        result = rows.filter({"text": {"$regex": pattern}})
        assert len(result) == len(rows.stack().filter({"text": {"$regex": pattern}})) == 0
    except QueryError as error:
        assert engine == "none"
        assert "RE2 is not installed: pip install" in str(error)


@pytest.mark.needs("re2", "pyarrow", "fastapi")
def test_viewer_searches_in_bounded_time() -> None:
    query = parse_filter("text ~ /(a+)+$/", Note.document_schema())
    assert len(DocumentArray[Note]([Note(text="a" * 50 + "!")]).filter(query)) == 0


@pytest.mark.needs("re2", "pyarrow")
def test_long_texts_are_searched_by_re2(engine: str) -> None:
    regex = compile_regex("a*b")
    assert regex.search("a" * 1000 + "b")
    if engine == "none":
        with pytest.raises(QueryError, match=r"may take very long in Python's re, and RE2 is not installed"):
            regex.search("a" * 100_000)
    else:
        assert not regex.search("a" * 100_000)
        assert regex.search_all(["a" * 100_000, None, "b"]).tolist() == [False, False, True]


@pytest.mark.needs("re2", "pyarrow")
@pytest.mark.parametrize(
    "pattern", ["(", "[", "a**", "(?<=a)b", r"(a)\1", "(?=a)", "a{2,1}", "*a", ")", "\\", "a{2000}"]
)
def test_invalid_patterns_are_errors(engine: str, pattern: str) -> None:
    with pytest.raises(QueryError, match=r"^\$regex: "):
        compile_regex(pattern)
    if engine != "none":
        with pytest.raises(QueryError, match="is not a regular expression: .*Patterns have RE2's syntax"):
            compile_regex(pattern)


def test_patterns_that_are_too_long_are_rejected() -> None:
    with pytest.raises(QueryError, match="at most 2,000 characters, got 3,000"):
        compile_regex("a" * 3000)


@pytest.mark.parametrize(
    ("pattern", "text", "expected"),
    [
        ("a$", "a\n", False),
        ("(?m)a$", "a\nb", True),
        (r"\d", "\u0663", False),
        (r"\w+", "é", False),
        (r"\bx\b", "éxé", True),
        ("(?i)É", "é", True),
        ("^a.c$", "a\nc", False),
        ("(?s)^a.c$", "a\nc", True),
        (r"[\d.]+", "x1", True),
        (r"a{2,3}?b", "aab", True),
        ("", "", True),
        ("a|b|", "z", True),
        ("\\.", "a.b", True),
    ],
)
@pytest.mark.needs("re2", "pyarrow")
@pytest.mark.usefixtures("engine")
def test_patterns_mean_the_same_to_every_engine(pattern: str, text: str, expected: bool) -> None:
    assert compile_regex(pattern).search(text) is expected
    assert compile_regex(pattern).search_all([text, None]).tolist() == [expected, False]


atoms = st.sampled_from(
    ["a", "b", ".", "\\d", "\\w", "\\s", "[ab]", "[^a]", "[\\d-]", "\\.", "1", " ", "^", "$", "\\b", "é"]
)
repeats = st.sampled_from(["", "", "*", "+", "?", "{2}", "{1,2}", "{0,}", "*?", "+?"])
pieces = st.builds(lambda atom, repeat: atom + ("" if atom in ("^", "$", "\\b") else repeat), atoms, repeats)
patterns = st.recursive(
    st.lists(pieces, max_size=4).map("".join),
    lambda inner: st.one_of(
        st.builds("({})".format, inner),
        st.builds("(?:{}|{})".format, inner, inner),
        st.builds("{}{}".format, inner, inner),
    ),
    max_leaves=4,
)


@pytest.mark.needs("re2", "pyarrow")
@settings(max_examples=400, deadline=None)
@given(
    pattern=st.builds("{}{}".format, st.sampled_from(["", "(?i)", "(?m)", "(?s)"]), patterns),
    texts=st.lists(st.text("abAé1. \n", max_size=6), max_size=5),
)
def test_simple_patterns_find_what_re2_finds(pattern: str, texts: list[str]) -> None:
    simple: Any = SimplePattern.parse(pattern)
    assert simple is not None
    expected = _regex._search_column(pattern, texts).tolist()
    assert [simple.compiled.search(text) is not None for text in texts] == expected
    search = _regex._linear_search(pattern)
    assert [search(text) for text in texts] == expected


@pytest.mark.needs("re2", "pyarrow")
@settings(max_examples=300, deadline=None)
@given(pattern=st.text("ab()[]{}|*+?.\\^$-,:123iP<=!d", max_size=12), text=st.text(max_size=20))
def test_any_pattern_is_searched_or_rejected(pattern: str, text: str) -> None:
    try:
        regex = Regex(pattern)
    except QueryError:
        return
    assert regex.search(text) == regex.search_all([text])[0]
