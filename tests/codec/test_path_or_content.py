"""Readers of text take a path or content, and never guess which of the two a string is."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire import BaseDocument, DocumentArray, DocumentBatch
from quire.errors import DecodeError, OptionError, QuireError, UriError, UriNotFoundError


class Note(BaseDocument):
    text: str
    stars: int = 0


NOTES = DocumentArray[Note]([{"text": "a"}, {"text": "b", "stars": 2}])
Reader = Callable[..., Any]
READERS: list[tuple[Reader, str]] = [
    (DocumentArray[Note].from_csv, NOTES.to_csv()),
    (DocumentArray[Note].from_ndjson, NOTES.to_ndjson()),
]
FROM_JSON: list[Reader] = [Note.from_json, DocumentArray[Note].from_json, DocumentBatch[Note].from_json]


@pytest.mark.parametrize(("read", "content"), READERS, ids=["csv", "ndjson"])
def test_paths_files_and_text_are_read(read: Reader, content: str, tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_bytes(content.encode())
    sources = [path, str(path), path.as_uri(), io.StringIO(content), io.BytesIO(content.encode())]
    for source in sources:
        assert read(source).identical(NOTES)
    assert read(iter(content.splitlines(keepends=True))).identical(NOTES)
    for text in (content, content.encode(), bytearray(content.encode())):
        assert read(text=text).identical(NOTES)


@pytest.mark.parametrize(("read", "content"), READERS, ids=["csv", "ndjson"])
def test_content_in_place_of_a_path_raises_an_error(read: Reader, content: str) -> None:
    for given_content in (content, '{"text": "a"}', "[1]", "a\rb", "a\0b"):
        with pytest.raises(OptionError, match=r"is content and not a path\. Pass it as text=\.\.\."):
            read(given_content)
    for blank in ("", "  "):
        with pytest.raises(OptionError, match=rf"^'{blank}' is not a path\. Empty content is passed as text=''\.$"):
            read(blank)
    with pytest.raises(OptionError, match=r"content as text=\.\.\., got bytes"):
        read(content.encode())


@pytest.mark.parametrize(("read", "content"), READERS, ids=["csv", "ndjson"])
def test_a_missing_file_says_how_content_is_passed(read: Reader, content: str) -> None:
    with pytest.raises(UriNotFoundError, match=r"there is no file 'text,stars'\. Content is passed as text=\.\.\."):
        read("text,stars")
    with pytest.raises(FileNotFoundError, match=r"'a{60}\.\.\.'"):
        read("a" * 5000)
    with pytest.raises(UriError, match="the file cannot be read"):
        read(os.sep)
    with pytest.raises(OptionError, match=r"^pass a path or a file, or the content as text=\.\.\.$"):
        read()
    with pytest.raises(OptionError, match="not both"):
        read("rows.csv", text=content)
    with pytest.raises(OptionError, match="expected a path, a file or an iterable of lines.*got int"):
        read(3)
    for value in (3, Path("rows.csv"), io.StringIO(content)):
        with pytest.raises(OptionError, match=r"text= takes the content as str or bytes, got .* as the first argument"):
            read(text=value)


@pytest.mark.parametrize(("read", "content"), READERS, ids=["csv", "ndjson"])
@pytest.mark.usefixtures("no_files")
def test_text_is_never_opened(read: Reader, content: str) -> None:
    assert read(text=content).identical(NOTES)
    for text in ("/etc/passwd", "/proc/self/environ", "~/.netrc", "file:///etc/passwd", "rows.csv"):
        with pytest.raises(
            OptionError, match=rf"text= takes the content, and '{text}' is a path\. Pass it as the first"
        ):
            read(text=text)


@pytest.mark.parametrize("read", FROM_JSON)
@pytest.mark.usefixtures("no_files")
@pytest.mark.parametrize(
    "path",
    ["/etc/passwd", "./rows.json", "../rows", "rows.json", "my rows.jsonl", "~/x", "C:\\rows", "s3://bucket/rows"],
)
def test_from_json_rejects_paths_without_opening_them(read: Reader, path: str) -> None:
    for text in (path, path.encode(), Path(path)):
        with pytest.raises(QuireError):
            read(text)


def test_from_json_says_what_to_write() -> None:
    expected = (
        r"^Note: from_json\(\) takes JSON itself, and 'rows\.json' is a path\. "
        r"Write from_json\(Path\('rows\.json'\)\.read_text\(\)\)\.$"
    )
    for text in ("rows.json", b"rows.json", Path("rows.json")):
        with pytest.raises(OptionError, match=expected):
            Note.from_json(text)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="takes JSON as str or bytes, got int"):
        Note.from_json(3)  # type: ignore[arg-type]


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists))
def test_json_is_never_mistaken_for_a_path(value: Any) -> None:
    class Holder(BaseDocument):
        value: Any = None

    for text in (json.dumps({"value": value}), f" \n{json.dumps({'value': value}, indent=2)}"):
        Holder.from_json(text)
    for text in (json.dumps(value), json.dumps(str(value))):
        with pytest.raises(DecodeError):
            Note.from_json(text)


@pytest.fixture
def no_files() -> Iterator[None]:
    """The test fails if it opens a file."""
    _opened.clear()
    _watch[0] = True
    yield
    _watch[0] = False
    assert _opened == []


_opened: list[object] = []
_watch = [False]


def _note_opened(event: str, arguments: tuple[object, ...]) -> None:
    if _watch[0] and event == "open" and not str(arguments[0]).endswith((".py", ".pyc")):  # which errors may import
        _opened.append(arguments[0])


sys.addaudithook(_note_opened)
