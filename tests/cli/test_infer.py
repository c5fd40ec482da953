"""The class that is made for rows without one."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.cli._cells import rows_of
from quire.cli._infer import inferred, inferred_table
from quire.codec._csv import CsvOptions
from tests.strategies import laws


def types_of(document_type: Any) -> dict[str, str]:
    return {field.name: str(field) for field in document_type.document_schema().fields}


def table(text: str) -> dict[str, str]:
    return types_of(inferred_table(rows_of(text.splitlines(keepends=True), CsvOptions(), "table"), "Row")[0])


@pytest.mark.parametrize(
    ("cells", "found"),
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
def test_columns_of_a_table(cells: list[str], found: str) -> None:
    assert table("a,b\n" + "".join(f"{cell},x\n" for cell in cells))["a"] == found


def test_dotted_columns_are_documents_that_may_be_missing() -> None:
    assert table("a.b,a.c\n1,x\n,\n") == {"a": "RowA | None"}
    assert table("a b,1st,class,id,to_json\nx,x,x,x,x\n").keys() == {
        "a_b",
        "column_1st",
        "column_class",
        "id",
        "column_to_json",
    }


@pytest.mark.parametrize(
    ("rows", "found"),
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
def test_fields_of_json(rows: list[Any], found: str) -> None:
    assert types_of(inferred(rows, "Row")[0])["a"] == found


_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=3),
    max_leaves=6,
)


@laws
@given(st.lists(st.dictionaries(st.sampled_from("abc"), _values), min_size=1, max_size=4))
def test_rows_fit_the_class_that_is_made_of_them(rows: list[dict[str, Any]]) -> None:
    document_type, count = inferred(rows, "Row")
    assert count == len(rows)
    for row in rows:
        made = json.loads(document_type.from_json(json.dumps(row)).to_json())
        assert _agree(row, made)


def _agree(row: Any, made: Any) -> bool:
    """Whether what was made has all that the row has, and nothing else but None."""
    if isinstance(row, dict) and isinstance(made, dict):
        return all(_agree(row.get(name), made.get(name)) for name in {*row, *made} - {"id"})
    if isinstance(row, list) and isinstance(made, list):
        return len(row) == len(made) and all(map(_agree, row, made))
    return bool(row == made)
