"""Documents as CSV."""

from __future__ import annotations

import csv
import io
import sys
import threading
from collections.abc import Iterator
from datetime import date, datetime
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar, Literal
from uuid import UUID

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from quire import BaseDocument, DocumentArray, Text
from quire.codec import CsvOptions, iter_csv
from quire.errors import DecodeError, EncodeError, OptionError, UriError
from quire.typing import NdArray, float32
from tests.files.upload_server import run_upload_server
from tests.strategies import Branch, Leaf, Node, Twig, arrays, branches, laws, leaves, nodes


class Level(Enum):
    LOW = 1
    HIGH = 2


class Thesis(BaseDocument):
    title: str
    pages: int | None = None


class Student(BaseDocument):
    id: str = ""
    name: str
    nick: str | None = None
    age: int = 18
    tall: bool = False
    born: date | None = None
    thesis: Thesis
    second: Thesis | None = None
    vector: NdArray[float32, 2] | None = None
    words: list[str] = []
    level: Level = Level.LOW
    grade: Literal[1, 2] = 1
    either: int | str | None = None


class Word(BaseDocument):
    """Empty texts in every kind of text field."""

    id: ClassVar[None] = None  # type: ignore[assignment]
    required: str
    optional: str | None = None
    other: str = "x"
    empty: str = ""


def plain(branch: Branch) -> bool:
    all_leaves = [branch.leaf, branch.spare, branch.either, *branch.leaves, *(branch.more or ())]
    values = branch.tags.values()
    return all(leaf is None or isinstance(leaf, int) or type(leaf) is Leaf for leaf in all_leaves) and not any(
        isinstance(value, bytes) or (isinstance(value, float) and not np.isfinite(value)) for value in values
    )


NUL = "" if sys.version_info >= (3, 11) else "\0"  # which the csv module of Python 3.10 cannot write


def again(docs: Any, **options: Any) -> Any:
    try:
        text = docs.to_csv(**options)
    except EncodeError as error:
        assume(not NUL or "need to escape" not in str(error))
        raise
    return type(docs).from_csv(text=text, **options)


texts = st.text(st.characters(exclude_characters=NUL, codec="utf-8"), max_size=4) | st.text('"', max_size=4)
words = st.builds(Word, required=texts, optional=st.none() | texts, other=texts, empty=texts)


@laws
@given(arrays(leaves().filter(lambda leaf: type(leaf) is Leaf), Leaf))
def test_leaf_documents_round_trip(docs: DocumentArray[Leaf]) -> None:
    assert again(docs).identical(docs)


@laws
@given(arrays(branches().filter(plain), Branch))
def test_every_kind_of_field_round_trips(docs: DocumentArray[Branch]) -> None:
    assert again(docs).identical(docs)


@laws
@given(arrays(nodes(), Node))
def test_recursive_documents_round_trip(docs: DocumentArray[Node]) -> None:
    assert again(docs).identical(docs)


@laws
@given(arrays(words, Word, 5), st.sampled_from([",", ";", "\t"]))
def test_none_and_empty_texts_are_distinguished(docs: DocumentArray[Word], delimiter: str) -> None:
    assert again(docs, delimiter=delimiter) == docs


def test_csv_text() -> None:
    docs = DocumentArray[Student](
        [
            {"id": "1", "name": "Ada", "thesis": {"id": "t", "title": "a,b"}, "vector": [1, 2], "either": "7"},
            {"id": "2", "name": "", "nick": "", "thesis": {"id": "u", "title": ""}, "level": Level.HIGH, "either": 7},
        ]
    )
    text = docs.to_csv()
    header, first, second = csv.reader(io.StringIO(text))
    assert header[:8] == ["id", "name", "nick", "age", "tall", "born", "thesis.id", "thesis.title"]
    cells = dict(zip(header, first, strict=True))
    assert cells["nick"] == cells["second.title"] == cells["second.id"] == ""
    assert (cells["age"], cells["tall"], cells["thesis.title"], cells["words"]) == ("18", "false", "a,b", "[]")
    assert cells["vector"] == '{"framework":"numpy","dtype":"float32","shape":[2],"data":[1.0,2.0]}'
    assert (cells["level"], cells["grade"], cells["either"]) == ("1", "1", '"7"')
    assert dict(zip(header, second, strict=True))["nick"] == '""'
    assert again(docs).identical(docs)


def test_files_of_other_programs_are_read() -> None:
    text = (
        "name;thesis.title;age;tall;born;grade;vector;second.title;either\r\n"
        "Ada;Leaves; 36 ;TRUE;1815-12-10;2;[1, 2];;seven\r\n"
        "\r\n"
        '"Grace\r\nHopper";"say ""hi""";;no;;;;Ships;7\r\n'
    )
    docs = DocumentArray[Student].from_csv(text=text, delimiter=";")
    ada, grace = docs
    assert (ada.age, ada.tall, ada.born, ada.grade) == (36, True, date(1815, 12, 10), 2)
    assert ada.vector is not None
    assert ada.vector.tolist() == [1, 2]
    assert (ada.second, ada.either) == (None, "seven")
    assert (grace.name, grace.thesis.title) == ("Grace\r\nHopper", 'say "hi"')
    assert (grace.age, grace.tall, grace.born, grace.grade, grace.vector) == (18, False, None, 1, None)
    assert grace.second is not None
    assert (grace.second.title, grace.either) == ("Ships", 7)


def test_whole_document_may_be_in_one_cell() -> None:
    class Page(BaseDocument):
        title: Text
        thesis: Thesis | None = None

    docs = DocumentArray[Page].from_csv(text='title,thesis\nplain,"{""title"": ""a""}"\n')
    assert docs[0].title.text == "plain"
    assert docs[0].thesis is not None
    assert docs[0].thesis.title == "a"
    with pytest.raises(DecodeError, match="'thesis.title' is part of 'thesis', which is there too"):
        DocumentArray[Page].from_csv(text="title,thesis,thesis.title\n")


def test_paths_files_and_encodings_are_accepted(tmp_path: Path) -> None:
    docs = DocumentArray[Thesis]([{"title": "naïve ✓", "pages": 3}])
    path = tmp_path / "a.csv"
    for encoding in ("utf-8", "utf-8-sig", "utf-16"):
        assert docs.to_csv(path, encoding=encoding) is None
        assert DocumentArray[Thesis].from_csv(path, encoding=encoding).identical(docs)
    docs.to_csv(str(path), encoding="utf-8-sig")
    assert path.read_bytes().startswith(b"\xef\xbb\xbf")
    assert DocumentArray[Thesis].from_csv(str(path)).identical(docs)
    binary, text = io.BytesIO(), io.StringIO(newline="")
    docs.to_csv(binary)
    docs.to_csv(text)
    assert binary.getvalue().decode() == text.getvalue()
    for file in (binary, text):
        file.seek(0)
        assert DocumentArray[Thesis].from_csv(file).identical(docs)  # type: ignore[arg-type]
        assert not file.closed
    with pytest.raises(EncodeError, match="cannot be written in latin-1"):
        docs.to_csv(path, encoding="latin-1")
    assert DocumentArray[Thesis].from_csv(path).identical(docs)
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.csv"]


def test_dialects_round_trip() -> None:
    docs = DocumentArray[Thesis]([{"title": "a\tb"}])
    assert again(docs, dialect="excel-tab").identical(docs)
    assert again(docs, dialect="unix").identical(docs)


def test_cells_may_be_large() -> None:
    """The csv module refuses cells of more than 128 KiB unless its process-wide limit is raised."""

    class Large(BaseDocument):
        x: NdArray

    before = csv.field_size_limit()
    docs = DocumentArray[Large]([{"x": np.arange(40_000.0)}])
    assert again(docs).identical(docs)
    assert csv.field_size_limit() == before


def test_times_and_ids_round_trip() -> None:
    class Event(BaseDocument):
        at: datetime
        key: UUID | None = None

    docs = DocumentArray[Event].from_csv(text="at,key\n2024-01-02 03:04,\n1,12345678-1234-5678-1234-567812345678\n")
    assert docs[0].at == datetime(2024, 1, 2, 3, 4)  # noqa: DTZ001
    assert docs[0].key is None
    assert docs[1].key == UUID("12345678-1234-5678-1234-567812345678")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "the table is empty"),
        ("name,thesis.titel\n", r"line 1: Student has no column 'thesis.titel'. Did you mean 'thesis.title'"),
        ("name\n", "there is no column 'thesis', and Student has no default"),
        ("name,thesis.pages\n", "there is no column 'thesis.title', and Thesis has no default"),
        ("name,name,thesis.title\n", "the column 'name' is there twice"),
        ("name,thesis.title\na\n", "Student in the table, line 2: 1 cells, but the header has 2"),
        ('name,thesis.title\n"a\nb",c\nd,e,f\n', "line 4: 3 cells"),
        ("name,thesis.title,age\na,b,many\n", r"Student in the table, line 2, age: .*integer.*got str 'many'"),
        ("name,thesis.title,thesis.pages\na,b,1.5\n", r"line 2, thesis.pages: "),
        ("name,thesis.title,vector\na,b,[1\n", r"line 2, vector: the cell is not JSON"),
        ("name,thesis.title,vector\na,b,[1]\n", r"line 2, vector: expected NdArray float32 \(2,\)"),
        ('name,thesis.title\na,"b\n', "line 2: "),
        ('name,thesis.title\na,"b"c\n', "line 2: .*expected"),
    ],
)
def test_errors_name_line_and_column(text: str, match: str) -> None:
    with pytest.raises(DecodeError, match=match):
        DocumentArray[Student].from_csv(text=text.encode())


def test_unknown_columns_are_ignored_on_request() -> None:
    docs = DocumentArray[Thesis].from_csv(text="title,colour\na,red\n", extra="ignore")
    assert docs.title == ["a"]
    with pytest.raises(OptionError, match="use 'forbid' or 'ignore'"):
        DocumentArray[Thesis].from_csv(text="title\n", extra="allow")  # type: ignore[arg-type]


def test_empty_cell_without_a_default_raises_an_error() -> None:
    class Row(BaseDocument):
        number: int

    with pytest.raises(DecodeError, match="Row in the table, line 3, number: the cell is empty"):
        DocumentArray[Row].from_csv(text='number\n1\n""\n')


def test_arrays_of_several_classes_are_rejected() -> None:
    with pytest.raises(EncodeError, match="several classes"):
        DocumentArray([Thesis(title="a"), Word(required="b")]).to_csv()
    with pytest.raises(EncodeError, match="row 1: the array holds values that Leaf has no field for"):
        DocumentArray[Leaf]([Leaf(text="a"), Twig(text="a")]).to_csv()
    with pytest.raises(EncodeError, match="row 0: 'leaf' holds values that Leaf has no field for"):
        DocumentArray[Branch]([{"leaf": Twig(text="a")}]).to_csv()
    assert DocumentArray([Thesis(title="a")]).to_csv().startswith("id,title,pages\r\n")


# --- the limit of the csv module


def test_readers_of_csv_do_not_wait_for_each_other() -> None:
    """The lines of one reader come from a pipe, and another thread reads a table meanwhile."""
    limit = csv.field_size_limit()
    large = "x" * (2 * limit)
    others: list[threading.Thread] = []

    def read_other() -> None:
        [document] = DocumentArray[Thesis].from_csv(text=f"title,pages\n{large},1\n")
        assert document.title == large

    def lines() -> Iterator[str]:
        yield "title,pages\n"
        others.append(threading.Thread(target=read_other, daemon=True))
        others[0].start()
        others[0].join(60)
        yield f"{large},2\n"

    [document] = DocumentArray[Thesis].from_csv(lines())
    assert not others[0].is_alive(), "the other reader waits for a lock"
    assert (document.title, document.pages) == (large, 2)
    assert csv.field_size_limit() == limit


def test_csv_limit_is_restored_while_the_caller_has_a_document(tmp_path: Path) -> None:
    limit = csv.field_size_limit()
    path = tmp_path / "rows.csv"
    path.write_text("title,pages\n" + "a,1\n" * 1000)
    stream = iter_csv(Thesis, path, CsvOptions(), "forbid")
    assert next(stream).pages == 1
    assert csv.field_size_limit() == limit
    del stream
    assert csv.field_size_limit() == limit


def test_folder_in_place_of_a_csv_file_is_an_error_of_quire(tmp_path: Path) -> None:
    with pytest.raises(UriError, match="the file cannot be read"):
        DocumentArray[Thesis].from_csv(tmp_path)


@pytest.mark.parametrize("extra", ["forbid", "ignore"])
@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_table_with_another_delimiter_says_which_one(delimiter: str, extra: Any) -> None:
    text = f"title{delimiter}pages\nA{delimiter}3\n"
    other = ";" if delimiter == "," else None
    with pytest.raises(DecodeError) as caught:
        DocumentArray[Thesis].from_csv(text=text, delimiter=other, extra=extra)
    message = f"the table, line 1: the columns are separated by {delimiter!r}. Pass delimiter={delimiter!r}."
    assert str(caught.value) == message
    assert DocumentArray[Thesis].from_csv(text=text, delimiter=delimiter)[0].pages == 3


def test_table_without_any_known_column_is_an_error() -> None:
    class Row(BaseDocument):
        label: int = 0

    with pytest.raises(
        DecodeError, match=r"line 1: Row has none of the columns \['lable', 'x'\]. Did you mean 'label'"
    ):
        DocumentArray[Row].from_csv(text="lable,x\n1,2\n", extra="ignore")
    assert DocumentArray[Row].from_csv(text="label,x\n1,2\n", extra="ignore").label == [1]


def test_tables_are_read_from_an_address() -> None:
    with run_upload_server() as site:
        site.files["/data/words.csv"] = b"required,other\na,b\n"
        [word] = DocumentArray[Word].from_csv(f"{site.url}/words.csv")
        assert (word.required, word.other) == ("a", "b")
        with pytest.raises(UriError, match="nothing.csv"):
            DocumentArray[Word].from_csv(f"{site.url}/nothing.csv")
