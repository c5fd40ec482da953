"""Summaries stay readable: deep and wide schemas, recursive documents, a million rows, control characters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import create_model

from quire import BaseDocument, DocumentArray, DocumentBatch
from quire.display import one_line, rows_table
from tests.display.test_display import Node, Student, render, student


def deep(levels: int) -> Any:
    model: Any = create_model("Level0", __base__=BaseDocument, end=(int, 0))
    for level in range(1, levels):
        model = create_model(f"Level{level}", __base__=BaseDocument, inner=(model, ...))
    return model


def test_summary_truncates_deep_schemas(capsys: pytest.CaptureFixture[str]) -> None:
    deep(20).schema_summary()
    shown = capsys.readouterr().out
    assert "inner: Level18" in shown
    assert "inner: Level12 …" in shown
    assert "Level11" not in shown
    deep(4).schema_summary()
    assert "end: int" in capsys.readouterr().out


def test_summary_truncates_wide_schemas(capsys: pytest.CaptureFixture[str]) -> None:
    wide: Any = create_model("Wide", __base__=BaseDocument, **{f"field{n}": (int, n) for n in range(500)})  # type: ignore[call-overload]
    for show in (wide.schema_summary, wide().summary):
        show()
        shown = capsys.readouterr().out
        assert "field58" in shown
        assert "field60" not in shown
        assert "… 441 more fields" in shown
    DocumentArray[wide]([wide()]).summary()
    assert "… 441 more" in capsys.readouterr().out
    assert "441 more fields" in wide()._repr_html_()


def test_schema_summary_marks_recursive_fields(capsys: pytest.CaptureFixture[str]) -> None:
    Node.schema_summary()
    assert "children: DocumentArray[Node] ↻" in capsys.readouterr().out


def test_summary_of_cyclic_document_terminates(capsys: pytest.CaptureFixture[str]) -> None:
    node = Node()
    node.children.append(node)
    node.summary()
    assert capsys.readouterr().out.count("children") < 20
    assert node._repr_html_().count("children") < 20


def test_summary_of_million_rows_reads_only_first(capsys: pytest.CaptureFixture[str]) -> None:
    class Number(BaseDocument):
        value: int
        name: str = ""

    one = Number(value=7, name="seven")
    docs = DocumentArray[Number]._trusted([one] * 1_000_000)
    batch = DocumentBatch[Number].from_columns({"value": np.full(1_000_000, 7)})
    for rows in (docs, batch):
        rows.summary()
        shown = capsys.readouterr().out
        assert "1,000,000" in shown
        assert "value" in shown
        assert "7" in shown
        assert "1,000,000 rows, first 8" in rows._repr_html_()


def test_summary_shows_nested_fields_and_first_values(capsys: pytest.CaptureFixture[str]) -> None:
    DocumentArray[Student]([student()]).summary()
    shown = capsys.readouterr().out
    for part in ("  title", "Leaves", "<numpy float32[2]>", "<DocumentArray[Thesis] of 5>"):
        assert part in shown
    DocumentArray[Student]().summary()
    assert "length 0" in capsys.readouterr().out


@pytest.mark.needs("pyarrow", "xxhash")
@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_dataset_summary_shows_rows_and_first_values(
    form: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from quire.storage import open_dataset, write_dataset

    write_dataset(DocumentArray[Student]([student(), student("Bob")]), tmp_path, format=form)
    dataset = open_dataset(tmp_path, Student)
    dataset.summary()
    shown = capsys.readouterr().out
    assert "StoredDataset[Student]  (rows 2, shards 1, bytes" in shown
    assert "Ada" in shown
    assert "StoredDataset[Student]" in render(dataset)
    assert "(2 rows)" in dataset._repr_html_()
    empty = open_dataset(tmp_path, Student, where={"name": "Eve"})
    empty.summary()
    assert "rows 0" in capsys.readouterr().out


def test_summary_escapes_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    class Odd(BaseDocument, extra="allow"):
        text: str

    Odd(text="\x1b[2Jgone", **{"\x1b[31mred": 1}).summary()
    DocumentArray[Odd]([Odd(text="\x1b[2J")]).summary()
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "\\x1b[2Jgone" in shown
    assert one_line("a\nb\tc") == "a\\nb\\tc"


def test_rows_table_lists_columns_that_do_not_fit() -> None:
    names = [f"column{n}" for n in range(30)]
    shown = render(rows_table("many", names, [["x" * 30] * 30], 100))
    assert "column1" in shown
    assert "… 27 more columns: column3, column4" in shown
