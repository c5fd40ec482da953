"""Summaries stay readable: deep and wide schemas, documents that hold themselves, a million rows, odd names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import create_model

from quire import BaseDocument, DocumentArray, DocumentBatch
from quire.display import one_line, rows_table
from tests.display.test_display import Node, Student, rendered, student


def deep(levels: int) -> Any:
    made: Any = create_model("Level0", __base__=BaseDocument, end=(int, 0))
    for level in range(1, levels):
        made = create_model(f"Level{level}", __base__=BaseDocument, inner=(made, ...))
    return made


def test_deep_schemas_are_cut(capsys: pytest.CaptureFixture[str]) -> None:
    deep(20).schema_summary()
    shown = capsys.readouterr().out
    assert "inner: Level18" in shown
    assert "inner: Level12 …" in shown
    assert "Level11" not in shown
    deep(4).schema_summary()
    assert "end: int" in capsys.readouterr().out


def test_wide_schemas_are_cut(capsys: pytest.CaptureFixture[str]) -> None:
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


def test_documents_that_lead_back_are_marked(capsys: pytest.CaptureFixture[str]) -> None:
    Node.schema_summary()
    assert "children: DocumentArray[Node] ↻" in capsys.readouterr().out


def test_a_document_that_holds_itself_has_an_end(capsys: pytest.CaptureFixture[str]) -> None:
    node = Node()
    node.children.append(node)
    node.summary()
    assert capsys.readouterr().out.count("children") < 20
    assert node._repr_html_().count("children") < 20


def test_a_million_rows_are_summed_up_without_a_look_at_them(capsys: pytest.CaptureFixture[str]) -> None:
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
        assert "1,000,000 rows, first 10" in rows._repr_html_()


def test_nested_fields_and_first_values_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    DocumentArray[Student]([student()]).summary()
    shown = capsys.readouterr().out
    for part in ("  title", "Leaves", "<numpy float32[2]>", "<DocumentArray[Thesis] of 5>"):
        assert part in shown
    DocumentArray[Student]().summary()
    assert "length 0" in capsys.readouterr().out


@pytest.mark.needs("pyarrow", "xxhash")
@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_datasets_are_summed_up(form: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from quire.storage import open_dataset, write_dataset

    write_dataset(DocumentArray[Student]([student(), student("Bob")]), tmp_path, format=form)
    dataset = open_dataset(tmp_path, Student)
    dataset.summary()
    shown = capsys.readouterr().out
    assert "StoredDataset[Student]  (rows 2, shards 1, bytes" in shown
    assert "Ada" in shown
    assert "StoredDataset[Student]" in rendered(dataset)
    assert "(2 rows)" in dataset._repr_html_()
    empty = open_dataset(tmp_path, Student, where={"name": "Eve"})
    empty.summary()
    assert "rows 0" in capsys.readouterr().out


def test_signs_that_move_the_cursor_are_spelled_out(capsys: pytest.CaptureFixture[str]) -> None:
    class Odd(BaseDocument, extra="allow"):
        text: str

    Odd(text="\x1b[2Jgone", **{"\x1b[31mred": 1}).summary()
    DocumentArray[Odd]([Odd(text="\x1b[2J")]).summary()
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "\\x1b[2Jgone" in shown
    assert one_line("a\nb\tc") == "a\\nb\\tc"


def test_columns_without_room_are_named() -> None:
    names = [f"column{n}" for n in range(30)]
    shown = rendered(rows_table("many", names, [["x" * 30] * 30], 100))
    assert "column1" in shown
    assert "… 27 more columns: column3, column4" in shown
