"""Property tests of the parts of the viewer: filters, orders, ranges, media and embeddings."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as Pillow

from quire import BaseDocument, DocumentArray
from quire.array import compile_filter
from quire.errors import DecodeError, QuireError
from quire.storage import open_dataset, write_dataset
from quire.storage._pages import Pages
from quire.viewer._api import RangeNotSatisfiableError, parse_range
from quire.viewer._cache import Cache
from quire.viewer._embeddings import project_pca
from quire.viewer._filter import FilterError, parse_filter
from quire.viewer._media import render_image, render_tensor
from quire.viewer._row_order import RowOrders, Selection, find_matching_rows
from quire.viewer._tensor_display import tensor_display

pytestmark = pytest.mark.needs("fastapi", "uvicorn", "PIL", "pyarrow", "av")


class Inner(BaseDocument):
    word: str | None = None


class Row(BaseDocument):
    number: int
    part: float | None = None
    word: str | None = None
    flag: bool
    inner: Inner | None = None
    many: DocumentArray[Inner]


WORDS = st.sampled_from(["", "a", "b", "ab", "A b", 'quo"te', "back\\slash", "sla/sh"])
ROWS = [
    Row(
        id=f"{i}",
        number=i % 7,
        part=[None, 0.5, -1.0, float("inf"), 2.0][i % 5],
        word=[None, "a", "ab", "A b", ""][i % 5],
        flag=i % 2 == 0,
        inner=None if i % 3 == 0 else Inner(id="x", word=None if i % 3 == 1 else "b"),
        many=DocumentArray[Inner]([Inner(id=f"{j}", word="ab"[j % 2]) for j in range(i % 3)]),
    )
    for i in range(60)
]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Pages:
    folder = tmp_path_factory.mktemp("laws") / "rows"
    write_dataset(ROWS, folder, Row, format="arrow")
    return Pages(open_dataset(folder, Row))


NUMBERS = st.one_of(st.integers(-2, 8), st.sampled_from([-1.0, 2.0]))
PARTS = NUMBERS | st.sampled_from([0.5, float("inf")])  # queries reject NaN, which has no order
ORDERED = st.sampled_from(["$eq", "$ne", "$lt", "$lte", "$gt", "$gte"])
CONDITIONS = st.one_of(
    st.builds(lambda name, value: {"number": {name: value}}, ORDERED, NUMBERS),
    st.builds(lambda name, value: {"part": {name: value}}, ORDERED, PARTS),
    st.builds(lambda path, name, value: {path: {name: value}}, st.sampled_from(["word", "inner.word"]), ORDERED, WORDS),
    st.builds(lambda values: {"number": {"$in": values}}, st.lists(st.integers(-1, 8), min_size=1)),
    st.builds(lambda values: {"word": {"$nin": values}}, st.lists(WORDS, min_size=1)),
    st.builds(lambda path, value: {path: {"$exists": value}}, st.sampled_from(["part", "inner.word"]), st.booleans()),
    st.builds(lambda path, value: {path: value}, st.sampled_from(["word", "many.word"]), WORDS),
    st.builds(lambda value: {"flag": value}, st.booleans()),
    st.just({"word": {"$not": {"$regex": "(?i)B"}}}),
)
QUERIES = st.recursive(
    CONDITIONS,
    lambda inner: st.one_of(
        st.builds(lambda parts: {"$and": parts}, st.lists(inner, min_size=1, max_size=3)),
        st.builds(lambda parts: {"$or": parts}, st.lists(inner, min_size=1, max_size=3)),
        st.builds(lambda part: {"$not": part}, inner),
    ),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(query=QUERIES)
def test_column_filters_match_document_filters(pages: Pages, query: dict[str, Any]) -> None:
    test = compile_filter(query, Row.document_schema())
    assert find_matching_rows(pages, query).tolist() == [i for i, row in enumerate(ROWS) if test(row)]


@given(text=WORDS, number=st.integers(-5, 5))
def test_quoted_text_is_literal(text: str, number: int) -> None:
    quoted = '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
    schema = Row.document_schema()
    assert parse_filter(f"word = {quoted}", schema) == {"word": {"$eq": text}}
    assert parse_filter(f"number>={number} and flag", schema) == {
        "$and": [{"number": {"$gte": number}}, {"flag": True}]
    }


def test_filter_length_is_limited() -> None:
    longest = "number = 1".ljust(2_000)
    assert parse_filter(longest, Row.document_schema()) == parse_filter("number = 1", Row.document_schema())
    with pytest.raises(FilterError, match=r"2,001 characters; at most 2,000"):
        parse_filter(longest + " ", Row.document_schema())


@settings(max_examples=300, deadline=None)
@given(text=st.one_of(st.text(max_size=60), st.text(alphabet="()\"' =<>!~/,.:andortisw1\\", max_size=40)))
def test_any_line_is_a_filter_or_a_quire_error(pages: Pages, text: str) -> None:
    try:
        find_matching_rows(pages, parse_filter(text, Row.document_schema()))
    except FilterError as error:
        assert 0 <= error.position <= len(text)
    except QuireError:
        pass


@given(path=st.sampled_from(["number", "part", "word", "flag", "inner.word"]), descending=st.booleans())
def test_order_contains_every_row_once(pages: Pages, path: str, descending: bool) -> None:
    rows = RowOrders(pages).rows(Selection("", path, descending), 0, 100)
    assert sorted(rows.tolist()) == list(range(60))


# --- ranges and images


@given(header=st.text(max_size=20) | st.from_regex(r"bytes=\d{0,4}-\d{0,4}"), size=st.integers(0, 3000))
def test_range_is_within_the_content(header: str, size: int) -> None:
    try:
        byte_range = parse_range(header, size)
    except RangeNotSatisfiableError:
        return
    assert byte_range is None or 0 <= byte_range[0] < byte_range[1] <= size


@pytest.mark.parametrize("dtype", ["uint8", "int16", "int64", "float16", "float32", "float64", "bool", "complex64"])
@pytest.mark.parametrize(
    "shape", [(1,), (3, 5), (20, 20), (3, 16, 16), (16, 16, 3), (4, 16, 16, 3), (2, 2, 2, 2), (900, 700)]
)
def test_render_tensor_accepts_any_shape_and_dtype(shape: tuple[int, ...], dtype: str) -> None:
    array = np.resize(np.arange(100).astype(dtype), shape)
    data, kind = render_tensor(array, 96)
    image = Pillow.open(io.BytesIO(data))
    assert max(image.size) <= 100
    assert kind == f"image/{str(image.format).lower()}"


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 0.0])
def test_render_tensor_accepts_nan_and_infinity(value: float) -> None:
    assert render_tensor(np.full((4, 4), value), 96)[1] == "image/png"
    assert render_tensor(np.full((3, 16, 16), value, np.float32), 96)[1] == "image/webp"


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGBA", "LA", "CMYK", "I", "F", "I;16", "YCbCr"])
def test_render_image_accepts_every_mode(mode: str) -> None:
    buffer = io.BytesIO()
    Pillow.new(mode, (30, 20)).save(buffer, "TIFF")
    data, _ = render_image(buffer.getvalue(), 96)
    assert Pillow.open(io.BytesIO(data)).size == (30, 20)


@given(content=st.binary(max_size=200))
def test_render_image_rejects_invalid_bytes(content: bytes) -> None:
    with pytest.raises(DecodeError):
        render_image(b"\x89PNG\r\n\x1a\n" + content, 96)


def test_tensor_display_depends_on_shape_and_dtype() -> None:
    looks = {
        ((16, 16, 3), "uint8"): "image",
        ((3, 16, 16), "float32"): "image",
        ((16, 16), "uint8"): "image",
        ((16, 16), "float32"): "heat",
        ((16, 16, 3), "int64"): "heat",
        ((2, 2, 3), "uint8"): "heat",
        ((9, 16, 16, 3), "uint8"): "frames",
        ((5,), "float32"): "vector",
        ((), "float32"): "tensor",
        ((0, 3), "float32"): "tensor",
    }
    assert {key: tensor_display(*key) for key in looks} == looks


# --- cache and principal components


def test_cache_computes_once_and_evicts_the_least_recently_used() -> None:
    computed: list[int] = []

    def compute(key: int) -> int:
        computed.append(key)
        return key * 10

    cache: Cache[int, int] = Cache(2)
    for key in (1, 2, 1, 3, 1, 2):
        assert cache.get(key, lambda key=key: compute(key)) == key * 10  # type: ignore[misc]
    assert computed == [1, 2, 3, 2]


@given(width=st.integers(1, 12), rows=st.integers(3, 20), seed=st.integers(0, 5))
def test_first_principal_component_has_the_most_variance(width: int, rows: int, seed: int) -> None:
    matrix = np.random.default_rng(seed).normal(size=(rows, width)) * np.arange(1, width + 1)
    points, explained = project_pca(matrix)
    assert points.shape == (rows, 2)
    assert np.abs(points).max() <= 1 + 1e-9
    assert explained[0] >= explained[1] >= 0
    assert sum(explained) <= 1 + 1e-9
    assert points[:, 0].var() >= points[:, 1].var() - 1e-9
