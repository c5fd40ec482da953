"""Documents as lines of JSON."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given

from quire import BaseDocument, DocumentArray
from quire.errors import DecodeError, EncodeError, SchemaError
from tests.strategies import Leaf, Node, arrays, laws, leaves, nodes


class Note(BaseDocument):
    text: str
    stars: int = 0


NOTES = DocumentArray[Note]([{"text": "a"}, {"text": "b\n\u2028c\r", "stars": 2}])


@laws
@given(arrays(leaves().filter(lambda leaf: type(leaf) is Leaf), Leaf))
def test_leaf_documents_round_trip(docs: DocumentArray[Leaf]) -> None:
    text = docs.to_ndjson()
    assert text.count("\n") == len(docs)
    assert DocumentArray[Leaf].from_ndjson(text=text).identical(docs)
    again = docs.to_ndjson(tensors="base64")
    assert DocumentArray[Leaf].from_ndjson(text=again.encode()).identical(docs)


@laws
@given(arrays(nodes(), Node))
def test_recursive_documents_round_trip(docs: DocumentArray[Node]) -> None:
    assert DocumentArray[Node].from_ndjson(text=docs.to_ndjson()).identical(docs)


def test_paths_and_files_are_accepted(tmp_path: Path) -> None:
    path = tmp_path / "notes.ndjson"
    assert NOTES.to_ndjson(path) is None
    assert DocumentArray[Note].from_ndjson(path).identical(NOTES)
    assert DocumentArray[Note].from_ndjson(str(path)).identical(NOTES)
    for mode in ("", "b"):
        with open(tmp_path / "other", f"w{mode}", **({} if mode else {"encoding": "utf-8"})) as file:  # noqa: PTH123
            NOTES.to_ndjson(file)
            assert not file.closed
        with open(tmp_path / "other", f"r{mode}", **({} if mode else {"encoding": "utf-8"})) as file:  # noqa: PTH123
            assert DocumentArray[Note].from_ndjson(file).identical(NOTES)
            assert not file.closed
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["notes.ndjson", "other"]


def test_file_objects_of_the_caller_stay_open() -> None:
    """DocArray closes the caller's BytesIO."""
    binary, text = io.BytesIO(), io.StringIO()
    NOTES.to_ndjson(binary)
    NOTES.to_ndjson(text)
    assert binary.getvalue().decode() == text.getvalue() == NOTES.to_ndjson()
    binary.seek(0)
    assert DocumentArray[Note].from_ndjson(binary).identical(NOTES)
    assert not binary.closed


def test_lines_are_read_one_by_one() -> None:
    taken = []

    def lines() -> Iterator[str]:
        for number in range(1, 100):
            taken.append(number)
            yield '{"text": "a"}\n' if number != 3 else "{"

    with pytest.raises(DecodeError, match="Note in the text, line 3: Invalid JSON"):
        DocumentArray[Note].from_ndjson(lines())
    assert taken == [1, 2, 3]


def test_empty_lines_and_a_byte_order_mark_are_skipped() -> None:
    docs = DocumentArray[Note].from_ndjson(text=b'\xef\xbb\xbf{"text": "a"}\r\n\n  \n{"text": "b"}')
    assert docs.text == ["a", "b"]
    assert len(DocumentArray[Note].from_ndjson(text="")) == 0


def test_errors_name_file_line_and_field(tmp_path: Path) -> None:
    path = tmp_path / "bad.ndjson"
    path.write_text('{"text": "a"}\n\n{"text": "a", "stars": "many"}\n')
    with pytest.raises(DecodeError, match=r"Note in .*bad\.ndjson, line 3, stars: .*integer.*got str 'many'"):
        DocumentArray[Note].from_ndjson(path)
    path.write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    with pytest.raises(DecodeError, match="line 2: the text is not utf-8"):
        DocumentArray[Note].from_ndjson(path)
    with pytest.raises(SchemaError):
        DocumentArray.from_ndjson(text="")


def test_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    class Holder(BaseDocument):
        x: object = None

    path = tmp_path / "notes.ndjson"
    path.write_text("before")
    with pytest.raises(EncodeError, match="row 1"):
        DocumentArray[Holder]([{}, {"x": object()}]).to_ndjson(path)
    assert path.read_text() == "before"
    assert [entry.name for entry in tmp_path.iterdir()] == ["notes.ndjson"]
