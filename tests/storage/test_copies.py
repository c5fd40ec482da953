"""Copies of datasets: of some rows, and of some columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import BaseDocument, DocumentArray
from quire.storage import StoredDataset, open_dataset, write_dataset
from quire.typing import NdArray

pytestmark = pytest.mark.needs("pyarrow")


class Digit(BaseDocument):
    idx: int
    digit: int
    words: NdArray
    image: NdArray | None = None


@pytest.fixture
def source(tmp_path: Path) -> Path:
    rows = [Digit(id=str(i), idx=i, digit=i % 3, words=np.array(["x" * (i + 1)])) for i in range(10)]
    write_dataset(rows, tmp_path / "source", Digit)
    return tmp_path / "source"


@pytest.mark.parametrize("columns", [["idx", "digit"], ["id", "words"], ["idx", "image"]])
@pytest.mark.parametrize("typed", [True, False])
def test_copy_of_some_columns_has_these_columns(
    source: Path, tmp_path: Path, columns: list[str], *, typed: bool
) -> None:
    dataset = open_dataset(source, Digit if typed else None, columns=columns, where={"idx": {"$gte": 7}})
    write_dataset(dataset, tmp_path / "target")
    copied: StoredDataset[Any] = open_dataset(tmp_path / "target")
    assert [field.name for field in copied.schema.fields] == [name for name in Digit.model_fields if name in columns]
    assert len(copied) == 3
    for row, original in zip(copied, open_dataset(source, Digit)[7:], strict=True):
        for name in columns:
            assert np.array_equal(getattr(row, name), getattr(original, name))


def test_copy_of_all_columns_keeps_the_class(source: Path, tmp_path: Path) -> None:
    write_dataset(open_dataset(source, Digit, where={"digit": 1}), tmp_path / "target")
    copied: StoredDataset[Any] = open_dataset(tmp_path / "target")
    assert copied.document_type is Digit
    assert [row.idx for row in copied] == [1, 4, 7]
    write_dataset(open_dataset(source, Digit, columns=list(Digit.model_fields)), tmp_path / "named")
    assert open_dataset(tmp_path / "named").document_type is Digit


class Author(BaseDocument):
    name: str
    age: int = 0


class Paper(BaseDocument):
    title: str
    first: Author
    editor: Author | None = None
    others: DocumentArray[Author] = DocumentArray[Author]()
    vector: NdArray | None = None


class Name(BaseDocument):
    name: str


class Title(BaseDocument):
    title: str
    first: Name


def test_copy_of_nested_columns_narrows_the_nested_classes(tmp_path: Path) -> None:
    def author(number: int) -> Author:
        return Author(id=f"a{number}", name=f"name {number}", age=number)

    papers = [
        Paper(
            title=f"paper {n}",
            first=author(n),
            editor=author(n + 10) if n % 2 else None,
            others=DocumentArray[Author](author(20 + i) for i in range(n)),
        )
        for n in range(4)
    ]
    write_dataset(papers, tmp_path / "source", Paper)
    columns = ["title", "first.name", "editor.age", "others.id", "others.name"]
    write_dataset(open_dataset(tmp_path / "source", Paper, columns=columns), tmp_path / "target")
    copied: StoredDataset[Any] = open_dataset(tmp_path / "target")
    assert (
        str(copied.schema) == "Paper(title: str, first: Author, editor: Author | None, others: DocumentArray[Author])"
    )
    assert [list(type(part).model_fields) for part in (copied[1].first, copied[1].editor)] == [["name"], ["age"]]
    assert [row.first.name for row in copied] == [f"name {n}" for n in range(4)]
    assert [row.editor and row.editor.age for row in copied] == [None, 11, None, 13]
    assert [row.others.id for row in copied] == [[f"a{20 + i}" for i in range(n)] for n in range(4)]
    assert copied[3].others.name == ["name 20", "name 21", "name 22"]
    again = open_dataset(tmp_path / "target", Title, extra="ignore")  # the class that the copy names is not needed
    assert [row.first.name for row in again] == [f"name {n}" for n in range(4)]


def test_copies_of_the_same_field_with_other_nested_columns_do_not_share_a_class(tmp_path: Path) -> None:
    write_dataset([Paper(title="a", first=Author(name="b", age=3))], tmp_path / "source", Paper)
    for column in ("first.name", "first.age"):
        write_dataset(open_dataset(tmp_path / "source", Paper, columns=[column]), tmp_path / column)
    rows: list[Any] = [open_dataset(tmp_path / column)[0] for column in ("first.name", "first.age")]
    assert [row.to_dict() for row in rows] == [{"first": {"name": "b"}}, {"first": {"age": 3}}]
