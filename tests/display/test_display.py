"""Representations of documents, arrays and batches in a terminal and in a notebook."""

from __future__ import annotations

from functools import cached_property
from io import StringIO
from typing import Any

import numpy as np
import pytest
from pydantic import Field
from rich.console import Console

from quire import BaseDocument, DocumentArray
from quire.display import format_bytes
from quire.typing import NdArray, float32


class Thesis(BaseDocument):
    title: str
    vector: NdArray[float32, 2] | None = None


class Student(BaseDocument):
    name: str
    age: int = 20
    thesis: Thesis
    papers: DocumentArray[Thesis] = []
    tags: dict[str, Any] = {}


class Node(BaseDocument):
    children: DocumentArray["Node"] = []


def student(name: str = "Ada", papers: int = 5) -> Student:
    thesis = Thesis(title="Leaves", vector=np.zeros(2, np.float32))
    return Student(name=name, thesis=thesis, papers=[Thesis(title=f"Paper {i}") for i in range(papers)])


def render(thing: Any) -> str:
    out = StringIO()
    Console(file=out, width=200).print(thing)
    return out.getvalue()


def test_document_summary_shows_fields_and_values(capsys: pytest.CaptureFixture[str]) -> None:
    assert student().summary() is None
    shown = capsys.readouterr().out
    for line in (
        *("Student", "name = 'Ada'", "age = 20", "thesis: Thesis", "title = 'Leaves'", "vector = <numpy float32[2]>"),
        *("papers: DocumentArray[Thesis]", "title = 'Paper 2'", "… 2 more", "tags = {}"),
    ):
        assert line in shown, line
    assert "Paper 3" not in shown


def test_schema_summary_shows_fields_and_types(capsys: pytest.CaptureFixture[str]) -> None:
    Student.schema_summary()
    shown = capsys.readouterr().out
    for line in ("Student", "age: int", "vector: NdArray[float32, 2] | None", "papers: DocumentArray[Thesis]"):
        assert line in shown, line
    assert shown.count("title: str") == 2
    Node.schema_summary()
    assert "children: DocumentArray[Node]" in capsys.readouterr().out


@pytest.mark.parametrize("stacked", [False, True])
def test_array_and_batch_summary_shows_fields(capsys: pytest.CaptureFixture[str], stacked: bool) -> None:
    docs: Any = DocumentArray[Student]([student()])
    (docs.stack() if stacked else docs).summary()
    shown = capsys.readouterr().out
    for part in ("[Student]", " 1)", "name", "str", "papers", "DocumentArray[Thesis]"):
        assert part in shown, part


def test_rich_renders_documents_arrays_and_batches() -> None:
    docs = DocumentArray[Student]([student()])
    assert "name = 'Ada'" in render(student())
    assert "DocumentArray[Student]  (length 1)" in render(docs)
    assert "DocumentBatch[Student]  (rows 1)" in render(docs.stack())


def test_brackets_are_not_rendered_as_markup() -> None:
    shown = render(student("[bold]Ada[/bold]"))
    assert "'[bold]Ada[/bold]'" in shown


def test_repr_shows_type_and_length() -> None:
    docs = DocumentArray[Student]([student(), student()])
    assert repr(docs) == "<DocumentArray[Student] of 2>"
    assert repr(docs.stack()) == "<DocumentBatch[Student] of 2>"
    assert repr(DocumentArray()) == "<DocumentArray of 0>"
    assert repr(docs.stack().papers) == "<2 arrays with 10 Thesis in all>"


def test_document_html_shows_fields() -> None:
    html = student()._repr_html_()
    assert "<caption>Student</caption>" in html
    assert "<th>name</th><td>Ada</td>" in html
    assert "<caption>Thesis</caption>" in html
    assert "&lt;numpy float32[2]&gt;" in html


@pytest.mark.parametrize("stacked", [False, True])
def test_array_and_batch_html_shows_first_rows(stacked: bool) -> None:
    docs: Any = DocumentArray[Student]([student(str(i), papers=1) for i in range(12)])
    html = (docs.stack() if stacked else docs)._repr_html_()
    assert f"Document{'Batch' if stacked else 'Array'}[Student] (12 rows, first 8)" in html
    assert "<th>papers<br><small>DocumentArray[Thesis]</small></th>" in html
    assert "<td>7</td>" in html
    assert "<td>8</td>" not in html
    assert html.count("<caption>Thesis</caption>") == 8


def test_html_escapes_values() -> None:
    evil = "<script>alert('&')</script>"
    one = student(evil)
    one.tags = {evil: [evil]}
    for html in (one._repr_html_(), DocumentArray[Student]([one])._repr_html_()):
        assert "<script>" not in html
        assert "&lt;script&gt;" in html


def test_extra_values_are_shown_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    class Loose(BaseDocument, extra="allow"):
        pass

    Loose(color="red").summary()
    assert "color = 'red'" in capsys.readouterr().out
    assert "<th>color</th>" in Loose(color="red")._repr_html_()
    assert "color='red'" in repr(Loose(color="red"))


def test_repr_hides_fields_without_repr() -> None:
    class Secret(BaseDocument):
        password: str = Field(default="xyz", repr=False)

        @cached_property
        def derived(self) -> str:
            return "derived"

    secret = Secret()
    assert secret.derived == "derived"
    assert "xyz" not in repr(secret)
    assert "derived" not in repr(secret)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1000, "1.0 kB"),
        (33_500_000, "33.5 MB"),
        (2.5e9, "2.5 GB"),
        (3e16, "30,000.0 TB"),
        (-1500, "-1.5 kB"),
    ],
)
def test_sizes_have_decimal_units(count: float, text: str) -> None:
    assert format_bytes(count) == text
