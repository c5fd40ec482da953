"""Inference of a document class from rows without one."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.cli._schema_inference import infer_document_type, infer_table_type
from quire.codec._csv import CsvOptions
from tests.strategies import laws


def field_types(document_type: Any) -> dict[str, str]:
    return {field.name: str(field) for field in document_type.document_schema().fields}


def table_types(text: str) -> dict[str, str]:
    return field_types(infer_table_type(text.splitlines(keepends=True), CsvOptions(), "table", "Row")[0])


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        (["1", "-2"], "int"),
        (["1", ""], "int | None"),
        (["1", "2.5"], "float"),
        (["1e3", "nan"], "float"),
        (["true", "False"], "bool"),
        (["007", "1"], "str"),
        (["99999999999999999999", "1"], "str"),
        (["a", "1"], "str"),
        (["true", "1"], "str"),
        (["", ""], "str | None"),
        (['"[1, 2]"', '"[3]"'], "list[int]"),
        (['"[""a""]"', '"[]"'], "list[str]"),
        (['"[oops"', "x"], "str"),
    ],
)
def test_csv_columns_get_the_type_of_their_cells(cells: list[str], expected: str) -> None:
    assert table_types("a,b\n" + "".join(f"{cell},x\n" for cell in cells))["a"] == expected


def test_dotted_columns_become_optional_documents() -> None:
    assert table_types("a.b,a.c\n1,x\n,\n") == {"a": "RowA | None"}
    assert table_types("a b,1st,class,id,to_json\nx,x,x,x,x\n").keys() == {
        "a_b",
        "column_1st",
        "column_class",
        "id",
        "column_to_json",
    }


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([{"a": 1}, {"a": None}], "int | None"),
        ([{"a": 1}, {}], "int | None"),
        ([{"a": 1}, {"a": 2.0}], "float"),
        ([{"a": 1}, {"a": "x"}], "Any"),
        ([{"a": 1 << 70}], "Any"),
        ([{"a": [1, None]}], "list[int | None]"),
        ([{"a": []}], "list[Any]"),
        ([{"a": [{"b": 1}, {"c": 2}]}], "DocumentArray[RowA]"),
        ([{"a": {"b": {"c": 1}}}], "RowA"),
        ([{"a": {"dtype": "float32", "shape": [2], "data": [1, 2]}}], "NdArray[float32, 2]"),
    ],
)
def test_json_fields_get_the_type_of_their_values(rows: list[Any], expected: str) -> None:
    assert field_types(infer_document_type(rows, "Row")[0])["a"] == expected


_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=3),
    max_leaves=6,
)


@laws
@given(st.lists(st.dictionaries(st.sampled_from("abc"), _values), min_size=1, max_size=4))
def test_inferred_class_accepts_its_rows(rows: list[dict[str, Any]]) -> None:
    document_type, count = infer_document_type(rows, "Row")
    assert count == len(rows)
    for row in rows:
        document = json.loads(document_type.from_json(json.dumps(row)).to_json())
        assert _agree(row, document)


def _agree(row: Any, document: Any) -> bool:
    """Whether a document has the values of its row, and None for all other fields."""
    if isinstance(row, dict) and isinstance(document, dict):
        return all(_agree(row.get(name), document.get(name)) for name in {*row, *document} - {"id"})
    if isinstance(row, list) and isinstance(document, list):
        return len(row) == len(document) and all(map(_agree, row, document))
    return bool(row == document)
