"""Laws of what the viewer is made of: filters mean what documents say, and nothing that comes in breaks it."""

from __future__ import annotations

import io
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as Pillow

from quire import BaseDocument, DocumentArray
from quire.array._filter import compile_filter
from quire.errors import DecodeError, QuireError
from quire.storage import open_dataset, write_dataset
from quire.storage._pages import Pages
from quire.view._filter import FilterError, parse_filter
from quire.view._kept import Kept
from quire.view._matching import matching
from quire.view._orders import Orders, Wanted
from quire.view._pictures import picture_of_bytes, picture_of_tensor
from quire.view._ranges import RangeError, asked_range
from quire.view._sniff import data_uri_content, media_type, tensor_look
from quire.view._sounds import wav_of_samples
from quire.view._vectors import principal

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
PARTS = NUMBERS | st.sampled_from([0.5, float("inf"), float("nan")])
ORDERED = st.sampled_from(["$eq", "$ne", "$lt", "$lte", "$gt", "$gte"])
CONDITIONS = st.one_of(
    st.builds(lambda name, value: {"number": {name: value}}, ORDERED, NUMBERS),
    st.builds(lambda name, value: {"part": {name: value}}, ORDERED, PARTS),
    st.builds(lambda path, name, value: {path: {name: value}}, st.sampled_from(["word", "inner.word"]), ORDERED, WORDS),
    st.builds(lambda values: {"number": {"$in": values}}, st.lists(st.integers(-1, 8), min_size=1)),
    st.builds(lambda values: {"word": {"$nin": values}}, st.lists(WORDS, min_size=1)),
    st.builds(lambda path, wanted: {path: {"$exists": wanted}}, st.sampled_from(["part", "inner.word"]), st.booleans()),
    st.builds(lambda path, wanted: {path: wanted}, st.sampled_from(["word", "many.word"]), WORDS),
    st.builds(lambda wanted: {"flag": wanted}, st.booleans()),
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
def test_columns_are_filtered_as_documents_are(pages: Pages, query: dict[str, Any]) -> None:
    test = compile_filter(query, Row.document_schema())
    assert matching(pages, query).tolist() == [i for i, row in enumerate(ROWS) if test(row)]


@given(text=WORDS, number=st.integers(-5, 5))
def test_what_is_quoted_is_meant_as_it_is(text: str, number: int) -> None:
    quoted = '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
    schema = Row.document_schema()
    assert parse_filter(f"word = {quoted}", schema) == {"word": {"$eq": text}}
    assert parse_filter(f"number>={number} and flag", schema) == {
        "$and": [{"number": {"$gte": number}}, {"flag": True}]
    }


def test_a_filter_is_read_up_to_its_longest() -> None:
    longest = "number = 1".ljust(2_000)
    assert parse_filter(longest, Row.document_schema()) == parse_filter("number = 1", Row.document_schema())
    with pytest.raises(FilterError, match=r"2,001 characters; at most 2,000"):
        parse_filter(longest + " ", Row.document_schema())


@settings(max_examples=300, deadline=None)
@given(text=st.one_of(st.text(max_size=60), st.text(alphabet="()\"' =<>!~/,.:andortisw1\\", max_size=40)))
def test_any_line_is_a_filter_or_an_error_that_is_told(pages: Pages, text: str) -> None:
    try:
        found = parse_filter(text, Row.document_schema())
        matching(pages, found)
    except FilterError as error:
        assert 0 <= error.position <= len(text)
    except QuireError:
        pass


@given(path=st.sampled_from(["number", "part", "word", "flag", "inner.word"]), descending=st.booleans())
def test_an_order_has_every_row_once(pages: Pages, path: str, descending: bool) -> None:
    rows = Orders(pages).rows(Wanted("", path, descending), 0, 100)
    assert sorted(rows.tolist()) == list(range(60))


# --- ranges, media types, pictures, sounds


@given(header=st.text(max_size=20) | st.from_regex(r"bytes=\d{0,4}-\d{0,4}"), size=st.integers(0, 3000))
def test_a_range_lies_within_what_there_is(header: str, size: int) -> None:
    try:
        found = asked_range(header, size)
    except RangeError:
        return
    assert found is None or 0 <= found[0] < found[1] <= size


@given(content=st.binary(max_size=64))
def test_any_bytes_have_a_family_or_none(content: bytes) -> None:
    assert media_type(content) is None or media_type(content).partition("/")[0] in ("image", "audio", "video")  # type: ignore[union-attr]


@given(text=st.text(max_size=40))
def test_a_data_uri_has_bytes_or_is_none(text: str) -> None:
    for given_text in (text, f"data:image/png,{text}", f"data:image/png;base64,{text}"):
        assert isinstance(data_uri_content(given_text), (bytes, type(None)))


@pytest.mark.parametrize("dtype", ["uint8", "int16", "int64", "float16", "float32", "float64", "bool", "complex64"])
@pytest.mark.parametrize(
    "shape", [(1,), (3, 5), (20, 20), (3, 16, 16), (16, 16, 3), (4, 16, 16, 3), (2, 2, 2, 2), (900, 700)]
)
def test_any_numbers_have_a_picture(shape: tuple[int, ...], dtype: str) -> None:
    array = np.resize(np.arange(100).astype(dtype), shape)
    data, kind = picture_of_tensor(array, 96)
    image = Pillow.open(io.BytesIO(data))
    assert max(image.size) <= 100
    assert kind == f"image/{str(image.format).lower()}"


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 0.0])
def test_numbers_that_are_none_have_a_picture_too(value: float) -> None:
    assert picture_of_tensor(np.full((4, 4), value), 96)[1] == "image/png"
    assert picture_of_tensor(np.full((3, 16, 16), value, np.float32), 96)[1] == "image/webp"


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGBA", "LA", "CMYK", "I", "F", "I;16", "YCbCr"])
def test_images_of_any_mode_are_made_anew(mode: str) -> None:
    buffer = io.BytesIO()
    Pillow.new(mode, (30, 20)).save(buffer, "TIFF")
    data, _ = picture_of_bytes(buffer.getvalue(), 96)
    assert Pillow.open(io.BytesIO(data)).size == (30, 20)


@given(content=st.binary(max_size=200))
def test_bytes_that_are_no_image_are_an_error(content: bytes) -> None:
    with pytest.raises(DecodeError):
        picture_of_bytes(b"\x89PNG\r\n\x1a\n" + content, 96)


@pytest.mark.parametrize(
    ("samples", "first"),
    [
        (np.array([1.0, -1.0, 2.0], np.float32), 32767),
        (np.array([32767, 0], np.int16), 32767),
        (np.array([255, 128], np.uint8), 32512),
        (np.array([2**31 - 1, 0], np.int32), 32767),
    ],
)
def test_samples_of_any_kind_are_sixteen_bits(samples: Any, first: int) -> None:
    with wave.open(io.BytesIO(wav_of_samples(samples, 8000))) as file:
        assert np.frombuffer(file.readframes(10), "<i2")[0] == first
        assert file.getnframes() == len(samples)


@pytest.mark.parametrize(("shape", "channels"), [((100, 2), 2), ((2, 100), 2), ((100, 1), 1), ((100,), 1)])
def test_channels_are_found_behind_and_in_front(shape: tuple[int, ...], channels: int) -> None:
    with wave.open(io.BytesIO(wav_of_samples(np.zeros(shape, np.float32), 8000.0))) as file:
        assert (file.getnchannels(), file.getnframes()) == (channels, 100)


@pytest.mark.parametrize("rate", [0, -1, None, "8000", float("nan"), 10**9])
def test_a_sound_without_a_rate_is_an_error(rate: Any) -> None:
    with pytest.raises(DecodeError, match="samples a second"):
        wav_of_samples(np.zeros(10), rate)


def test_looks_are_told_by_shape_and_dtype() -> None:
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
    assert {key: tensor_look(*key) for key in looks} == looks


# --- what is kept, and axes


def test_a_value_is_made_once_and_the_oldest_goes() -> None:
    made: list[int] = []

    def make(key: int) -> int:
        made.append(key)
        return key * 10

    kept: Kept[int, int] = Kept(2)
    for key in (1, 2, 1, 3, 1, 2):
        assert kept.get(key, lambda key=key: make(key)) == key * 10  # type: ignore[misc]
    assert made == [1, 2, 3, 2]


@given(width=st.integers(1, 12), rows=st.integers(3, 20), seed=st.integers(0, 5))
def test_the_first_axis_has_the_most_variance(width: int, rows: int, seed: int) -> None:
    matrix = np.random.default_rng(seed).normal(size=(rows, width)) * np.arange(1, width + 1)
    points, explained = principal(matrix)
    assert points.shape == (rows, 2)
    assert np.abs(points).max() <= 1 + 1e-9
    assert explained[0] >= explained[1] >= 0
    assert sum(explained) <= 1 + 1e-9
    assert points[:, 0].var() >= points[:, 1].var() - 1e-9


def test_a_sound_in_a_text_is_found(tmp_path: Path) -> None:
    assert data_uri_content("data:image/png;base64,AAAA") == b"\0\0\0"
    assert data_uri_content("data:text/html,<b>") is None
    assert data_uri_content(str(tmp_path)) is None
