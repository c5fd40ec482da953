"""Arrays and batches as pandas data frames."""

from __future__ import annotations

from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Annotated, Any, ClassVar, Literal
from uuid import UUID
from zoneinfo import ZoneInfo

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from pydantic import Base64Bytes, Field, Json, field_validator

from quire import BaseDocument, DocumentArray, DocumentBatch, Text
from quire.codec._dataframes import read_numbers, read_objects
from quire.columns import ScalarColumn
from quire.errors import DecodeError, EncodeError, SchemaError
from quire.typing import NdArray, float32
from tests.strategies import Branch, Leaf, Node, Seed, Tree, Twig, arrays, branches, laws, leaves, nodes, trees

pytestmark = pytest.mark.needs("pandas")


class Thesis(BaseDocument):
    title: str
    pages: int | None = None


class Student(BaseDocument):
    name: str
    nick: str | None = None
    age: int = 18
    tall: bool | None = None
    height: float = 1.5
    weight: float | None = None
    thesis: Thesis
    second: Thesis | None = None
    vector: NdArray[float32, 2] | None = None
    others: DocumentArray[Thesis] = []


# --- the form


STUDENTS: list[dict[str, Any]] = [
    {"name": "Ada", "thesis": {"title": "a", "pages": 3}, "weight": float("nan"), "vector": [1, 2]},
    {"name": "Bob", "nick": "", "tall": True, "thesis": {"title": "b"}, "second": {"title": "c", "pages": 7}},
]


def test_data_frame_columns_and_dtypes() -> None:
    docs = DocumentArray[Student](STUDENTS)
    frame = docs.to_dataframe()
    assert list(frame.columns[:7]) == ["id", "name", "nick", "age", "tall", "height", "weight"]
    assert list(frame.columns[7:13]) == [
        *("thesis.id", "thesis.title", "thesis.pages"),
        *("second.id", "second.title", "second.pages"),
    ]
    dtypes = {name: str(dtype) for name, dtype in frame.dtypes.items()}
    assert (dtypes["age"], dtypes["height"]) == ("int64", "float64")
    assert (dtypes["tall"], dtypes["weight"], dtypes["thesis.pages"]) == ("boolean", "Float64", "Int64")
    assert frame["nick"].tolist() == [None, ""]
    assert frame["second.pages"].tolist() == [pd.NA, 7]
    assert frame["second.title"].tolist() == [None, "c"]
    assert frame["vector"][0] is docs[0].vector
    assert frame["others"].tolist() == [[], []]
    again = DocumentArray[Student].from_dataframe(frame)
    assert again.identical(docs)
    assert np.isnan(again[0].weight)
    assert again[1].weight is None


def test_a_frame_shares_no_memory_with_the_batch() -> None:
    batch = DocumentArray[Student](STUDENTS).stack()
    frame = batch.to_dataframe()
    frame.loc[0, "age"] = 99
    assert batch.age.tolist() == [18, 18]
    again = DocumentBatch[Student].from_dataframe(frame)
    again.age[0] = 1
    assert frame["age"].tolist() == [99, 18]


def test_numbers_of_a_batch_keep_their_dtypes() -> None:
    class Row(BaseDocument):
        x: float
        n: int | None = None

    batch = DocumentBatch[Row].from_columns({"x": np.zeros(3, np.float32), "n": np.arange(3, dtype=np.int16)})
    frame = batch.to_dataframe()
    assert [str(frame[name].dtype) for name in ("x", "n")] == ["float32", "Int16"]
    again = DocumentBatch[Row].from_dataframe(frame)
    assert (again.x.dtype, again.n.dtype) == (np.float32, np.int16)


def test_times_round_trip() -> None:
    class Event(BaseDocument):
        naive: datetime | None = None
        aware: datetime | None = None
        zoned: datetime | None = None
        mixed: datetime | None = None
        span: timedelta | None = None
        day: date | None = None
        key: UUID | None = None

    zone, noon = ZoneInfo("Europe/Paris"), datetime(1, 1, 1, 12, 0, 0, 1)  # noqa: DTZ001
    docs = DocumentArray[Event](
        [
            {
                "naive": noon,
                "aware": noon.replace(tzinfo=timezone.utc),
                "zoned": datetime(2024, 7, 1, tzinfo=zone),
                "mixed": noon,
                "span": timedelta(microseconds=1),
                "day": date(2024, 1, 1),
                "key": UUID(int=3),
            },
            {"mixed": noon.replace(tzinfo=timezone.utc)},
        ]
    )
    frame = docs.to_dataframe()
    assert [str(dtype) for dtype in frame.dtypes[1:]] == [
        *("datetime64[us]", "datetime64[us, UTC]", "object", "object", "timedelta64[us]", "object", "object"),
    ]
    again = DocumentArray[Event].from_dataframe(frame)
    assert again.identical(docs)
    assert again[0].zoned.tzinfo is zone
    zoned = pd.DataFrame(
        {"zoned": pd.Series([datetime(2024, 7, 1, tzinfo=zone)]).astype("datetime64[ns, Europe/Paris]")}
    )
    assert DocumentArray[Event].from_dataframe(zoned)[0].zoned == datetime(2024, 7, 1, tzinfo=zone)
    long = DocumentArray[Event]([{"span": timedelta.max}, {}])
    assert DocumentArray[Event].from_dataframe(long.to_dataframe()).identical(long)
    fine = pd.DataFrame({"naive": np.array(["2024-01-01", "2024-01-01T00:00:00.000000001"], "M8[ns]")})
    with pytest.raises(DecodeError, match="column 'naive'.*row 1: .* has nanoseconds"):
        DocumentArray[Event].from_dataframe(fine)


def test_any_mixture_of_missing_values_is_none() -> None:
    frame = pd.DataFrame(
        {
            "name": ["a", "b", "c", "d"],
            "nick": pd.Series([None, np.nan, pd.NA, "x"], dtype=object),
            "weight": [1.0, np.nan, 2.0, np.nan],
            "thesis.title": ["t"] * 4,
            "thesis.pages": [1.0, np.nan, 3.0, 4.0],
            "tall": pd.Series([True, None, np.nan, False], dtype=object),
            "vector": pd.Series([[1, 2], None, np.nan, np.zeros(2, np.float32)], dtype=object),
        }
    )
    for docs in (DocumentArray[Student].from_dataframe(frame), DocumentBatch[Student].from_dataframe(frame).unstack()):
        assert docs.nick == [None, None, None, "x"]
        assert docs.weight == [1.0, None, 2.0, None]
        assert docs.thesis.pages == [1, None, 3, 4]
        assert all(type(pages) is int for pages in docs.thesis.pages if pages is not None)
        assert docs.tall == [True, None, None, False]
        assert [vector is None for vector in docs.vector] == [False, True, True, False]
        assert docs.age == [18] * 4
        assert len(set(docs.id)) == 4


def test_text_of_any_dtype_is_read() -> None:
    for dtype in ("object", "string", "category"):
        frame = pd.DataFrame({"title": pd.Series(["a", "b"], dtype=dtype)})
        assert DocumentArray[Thesis].from_dataframe(frame).title == ["a", "b"]


def test_the_index_of_the_frame_does_not_matter() -> None:
    frame = pd.DataFrame({"title": ["a", "b"], "pages": [1, 2]}, index=[7, 7])
    assert DocumentArray[Thesis].from_dataframe(frame).pages == [1, 2]
    assert DocumentArray[Thesis].from_dataframe(frame.iloc[:0]).pages == []


def test_whole_document_may_be_in_one_column() -> None:
    class Page(BaseDocument):
        title: Text
        thesis: Thesis | None = None

    frame = pd.DataFrame({"title": ["a", "b"], "thesis": pd.Series([{"title": "x"}, None], dtype=object)})
    for docs in (DocumentArray[Page].from_dataframe(frame), DocumentBatch[Page].from_dataframe(frame).unstack()):
        assert docs.title.text == ["a", "b"]
        assert docs[0].thesis is not None
        assert docs[1].thesis is None


def test_missing_document_has_defaults_only_in_its_rows() -> None:
    class Outer(BaseDocument):
        inner: Leaf | None = None

    frame = pd.DataFrame({"inner.text": pd.Series(["a", None], dtype=object)})
    batch = DocumentBatch[Outer].from_dataframe(frame)
    assert batch.unstack()[1].inner is None
    assert batch.validity("inner.number").tolist() == [True, False]
    assert DocumentBatch[Outer].from_dataframe(batch.to_dataframe()).identical(batch)


# --- speed is a matter of structure: no document is built


def test_no_document_is_created_for_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    class Row(BaseDocument):
        text: str
        number: int | None = None
        inner: Leaf | None = None

    docs = DocumentArray[Row]({"text": str(i), "number": i, "inner": {"text": "a"}} for i in range(10))
    batch, frame = docs.stack(), docs.to_dataframe()

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a document was built")

    monkeypatch.setattr("quire.columns._columns._make_plain_documents", refuse)
    for document_type in (Row, Leaf):
        monkeypatch.setattr(document_type, "model_validate", refuse)
        monkeypatch.setattr(document_type, "__init__", refuse)
    pd.testing.assert_frame_equal(batch.to_dataframe(), frame)
    result = DocumentBatch[Row].from_dataframe(frame)
    assert isinstance(result.column("number"), ScalarColumn)


# --- rows, where columns are not enough


def test_validators_are_called() -> None:
    class Checked(BaseDocument):
        name: str
        inner: Thesis | None = None

        @field_validator("name")
        @classmethod
        def upper(cls, value: str) -> str:
            assert value != "bad"
            return value.upper()

    frame = pd.DataFrame({"name": ["a", "b"], "inner.title": pd.Series(["x", None], dtype=object)})
    docs = DocumentArray[Checked].from_dataframe(frame)
    assert docs.name == ["A", "B"]
    assert docs[1].inner is None
    assert DocumentBatch[Checked].from_dataframe(frame).name == ["A", "B"]
    with pytest.raises(DecodeError, match="^Checked, row 1, name: Assertion failed"):
        DocumentArray[Checked].from_dataframe(pd.DataFrame({"name": ["a", "bad"]}))


def test_configuration_and_shared_dimensions_are_respected() -> None:
    class Stripped(BaseDocument, str_strip_whitespace=True):
        name: str

    class Pair(BaseDocument):
        a: NdArray["n"]
        b: NdArray["n"]

    assert DocumentArray[Stripped].from_dataframe(pd.DataFrame({"name": [" a "]})).name == ["a"]
    frame = pd.DataFrame({"a": [np.zeros(2)], "b": [np.zeros(3)]})
    with pytest.raises(DecodeError, match="^Pair, row 0: expected b"):
        DocumentArray[Pair].from_dataframe(frame)


def test_constraints_and_literals_are_respected() -> None:
    class Bound(BaseDocument):
        id: ClassVar[None] = None  # type: ignore[assignment]
        number: Annotated[int, Field(gt=0)] = 1
        choice: Literal["a", "b"] = "a"

    assert DocumentArray[Bound].from_dataframe(pd.DataFrame({"number": [1, 2]})).number == [1, 2]
    with pytest.raises(DecodeError, match=r"Bound.number \(column 'number'\), row 1: .*greater than 0"):
        DocumentArray[Bound].from_dataframe(pd.DataFrame({"number": [1, 0]}))
    with pytest.raises(DecodeError, match="column 'choice'.*row 0"):
        DocumentArray[Bound].from_dataframe(pd.DataFrame({"choice": ["c"]}))


# --- errors


@pytest.mark.parametrize(
    ("columns", "match"),
    [
        ({"titel": ["a"]}, "Thesis has no column 'titel'. Did you mean 'title'"),
        ({"pages": [1]}, "there is no column 'title', and Thesis has no default"),
        ({"title": ["a"], 3: [1]}, "has no column 3"),
        ({"title": ["a", 3]}, r"Thesis.title \(column 'title'\), row 1: .*valid string"),
        ({"title": ["a", None]}, r"column 'title'\), row 1: .*valid string"),
        ({"title": ["a"], "pages": [1.5]}, r"column 'pages'\), row 0: .*fractional"),
        ({"title": ["a"], "pages": ["x"]}, r"column 'pages'\), row 0: .*integer"),
        ({"title": ["a"], "pages": [np.inf]}, r"column 'pages'\), row 0: .*finite"),
    ],
)
def test_errors_name_row_and_column(columns: dict[Any, Any], match: str) -> None:
    frame = pd.DataFrame(columns)
    for target in (DocumentArray[Thesis], DocumentBatch[Thesis]):
        with pytest.raises(DecodeError, match=match):
            target.from_dataframe(frame, extra="forbid")  # type: ignore[attr-defined]


def test_missing_numbers_of_required_fields_raise_an_error() -> None:
    frame = pd.DataFrame({"name": ["a", "b"], "age": pd.array([1, None], "Int64"), "thesis.title": ["x", "y"]})
    with pytest.raises(DecodeError, match=r"Student.age \(column 'age'\), row 1: .*valid integer"):
        DocumentArray[Student].from_dataframe(frame)


class Pages(BaseDocument):
    theses: list[Thesis] = []


class Open(BaseDocument, extra="allow"):
    title: str = ""


class Strict(BaseDocument, extra="forbid"):
    title: str = ""


@pytest.mark.parametrize("target", [DocumentArray, DocumentBatch])
def test_unknown_columns_are_ignored_or_rejected_on_request(target: Any) -> None:
    frame = pd.DataFrame({"title": ["a"], "colour": ["red"]})
    assert target[Thesis].from_dataframe(frame).title == ["a"]
    assert target[Thesis].from_dataframe(frame, extra="ignore").title == ["a"]
    with pytest.raises(DecodeError, match="Thesis has no column 'colour'. .* Or pass extra='ignore'."):
        target[Thesis].from_dataframe(frame, extra="forbid")


@pytest.mark.parametrize("target", [DocumentArray, DocumentBatch])
def test_unknown_keys_of_mappings_in_cells_follow_the_same_rule(target: Any) -> None:
    frame = pd.DataFrame({"theses": [[{"title": "a", "colour": "red"}]]})
    assert target[Pages].from_dataframe(frame)[0].theses == [Thesis(title="a")]
    with pytest.raises(DecodeError, match="theses"):
        target[Pages].from_dataframe(frame, extra="forbid")


@pytest.mark.parametrize("extra", ["forbid", "ignore"])
def test_class_takes_precedence_over_the_reader_for_unknown_columns(extra: Any) -> None:
    frame = pd.DataFrame({"title": ["a", "b"], "colour": ["red", "blue"]})
    rows = DocumentArray[Open].from_dataframe(frame, extra=extra)
    assert [row.__pydantic_extra__ for row in rows] == [{"colour": "red"}, {"colour": "blue"}]
    with pytest.raises(DecodeError, match="Strict sets extra='forbid'."):
        DocumentArray[Strict].from_dataframe(frame, extra=extra)


def test_error_about_a_missing_column_names_a_similar_ignored_one() -> None:
    frame = pd.DataFrame({"titel": ["a"]})
    message = "there is no column 'title', and Thesis has no default for it. The column 'titel' is ignored."
    with pytest.raises(DecodeError, match=message):
        DocumentArray[Thesis].from_dataframe(frame)


def test_values_without_a_column_raise_an_error() -> None:
    with pytest.raises(EncodeError, match="row 0: the array holds values that Leaf has no field for"):
        DocumentArray[Leaf]([Twig(text="a")]).to_dataframe()
    with pytest.raises(EncodeError, match="Leaf has no field for"):
        DocumentArray[Leaf]([Twig(text="a")]).stack().to_dataframe()
    with pytest.raises(EncodeError, match="Seed has no field for"):
        DocumentArray[Seed]([Seed(more=1)]).to_dataframe()
    with pytest.raises(EncodeError, match="several classes"):
        DocumentArray([Thesis(title="a"), Leaf(text="b")]).to_dataframe()
    assert list(DocumentArray([Thesis(title="a")]).to_dataframe().columns) == ["id", "title", "pages"]
    with pytest.raises(SchemaError, match="from_dataframe"):
        DocumentArray.from_dataframe(pd.DataFrame())
    with pytest.raises(DecodeError, match="takes a data frame, got dict"):
        DocumentArray[Thesis].from_dataframe({"title": ["a"]})


def test_other_frames_are_converted() -> None:
    class Other:
        def to_pandas(self) -> Any:
            return pd.DataFrame({"title": ["a"]})

    assert DocumentArray[Thesis].from_dataframe(Other()).title == ["a"]


# --- numbers, written


class Numbers(BaseDocument):
    id: ClassVar[None] = None  # type: ignore[assignment]
    flag: bool | None = None
    number: int | None = None
    real: float | None = None
    pair: complex | None = None
    plain: int = 0
    price: Annotated[Decimal, Field(allow_inf_nan=True)] | None = None
    fixed: Annotated[Decimal, Field(allow_inf_nan=True)] = Decimal(0)
    either: complex | str | None = None
    pure: complex = 0j


def columns_of(**columns: Any) -> Any:
    return DocumentBatch[Numbers].from_columns({name: np.array(values) for name, values in columns.items()})


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        *(("flag", "bool", "boolean"), ("number", "int64", "Int64"), ("number", "uint8", "UInt8")),
        *(("real", "float64", "Float64"), ("real", "float32", "Float32"), ("real", "float16", "object")),
        *(("pair", "complex128", "object"), ("plain", "int16", "int16"), ("pure", "complex64", "complex64")),
    ],
)
def test_optional_numbers_have_nullable_dtypes_where_pandas_has_them(name: str, dtype: str, expected: str) -> None:
    batch = columns_of(**{name: np.array([0, 1]).astype(dtype)})
    series = batch.to_dataframe()[name]
    assert str(series.dtype) == expected
    assert series.tolist() == [0, 1]
    again = DocumentBatch[Numbers].from_dataframe(batch.to_dataframe())
    assert again[name].tolist() == [0, 1]


def test_missing_numbers_are_masked_and_zeros_are_not() -> None:
    docs = DocumentArray[Numbers]([Numbers(number=0, flag=False, pair=0j), Numbers(), Numbers(number=3, real=0.0)])
    for frame in (docs.to_dataframe(), docs.stack().to_dataframe()):
        assert frame["number"].isna().tolist() == [False, True, False]
        assert frame["flag"].isna().tolist() == [False, True, True]
        assert frame["real"].isna().tolist() == [True, True, False]
        assert frame["pair"].tolist() == [0j, None, None]
        assert DocumentArray[Numbers].from_dataframe(frame).identical(docs)


@pytest.mark.parametrize(("name", "nan"), [("pair", complex("nan")), ("price", Decimal("NaN"))])
def test_nan_next_to_none_is_rejected_if_pandas_cannot_distinguish_them(name: str, nan: Any) -> None:
    docs = DocumentArray[Numbers]([Numbers(), Numbers(**{name: 1}), Numbers(**{name: nan})])
    for source in (docs, docs.stack()):
        with pytest.raises(EncodeError, match=rf"{name}, row 2: a data frame cannot hold NaN"):
            source.to_dataframe()
    assert docs[:2].to_dataframe()[name].tolist() == [None, 1]


@pytest.mark.parametrize(
    ("name", "nan"), [("fixed", Decimal("NaN")), ("pure", complex("nan")), ("either", complex("nan"))]
)
def test_nan_of_fields_without_none_and_of_unions_is_kept(name: str, nan: Any) -> None:
    docs = DocumentArray[Numbers]([Numbers(**{name: 1}), Numbers(**{name: nan})])
    for source in (docs, docs.stack()):
        frame = source.to_dataframe()
        again = DocumentArray[Numbers].from_dataframe(frame)
        value = getattr(again[1], name)
        assert type(value) is type(nan)
        assert value != value


def test_optional_numbers_of_a_batch_are_copied() -> None:
    batch = columns_of(number=[1, 2], plain=[3, 4])
    frame = batch.to_dataframe()
    frame.loc[0, "number"] = 9
    assert batch.number.tolist() == [1, 2]


# --- numbers, read


def field_of(name: str) -> Any:
    return Numbers.document_schema().by_name[name]


@pytest.mark.parametrize(
    ("name", "series", "values", "valid"),
    [
        ("number", pd.Series([1, 2], dtype="int8"), [1, 2], None),
        ("number", pd.Series([1, None], dtype="Int16"), [1, 0], [True, False]),
        ("number", pd.Series([1.0, np.nan]), [1, 0], [True, False]),
        ("number", pd.Series([2.0**53, -(2.0**53)]), [2**53, -(2**53)], None),
        ("number", pd.Series([1, 2], dtype="Float32"), [1, 2], None),
        ("plain", pd.Series([1.0, 2.0]), [1, 2], None),
        ("real", pd.Series([1.5, np.nan]), [1.5, None], [True, False]),
        ("real", pd.Series([1, 2], dtype="uint8"), [1.0, 2.0], None),
        ("real", pd.Series([1, None], dtype="Int64"), [1.0, 0.0], [True, False]),
        ("real", pd.Series([1.5, None], dtype="Float32"), [1.5, 0.0], [True, False]),
        ("flag", pd.Series([True, False]), [True, False], None),
        ("flag", pd.Series([True, None], dtype="boolean"), [True, False], [True, False]),
        ("pair", pd.Series([1.5, 2.0]), [1.5 + 0j, 2 + 0j], None),
        ("pair", pd.Series([1j, 2.0]), [1j, 2 + 0j], None),
        ("pair", pd.Series([3, 4], dtype="uint16"), [3 + 0j, 4 + 0j], None),
    ],
)
def test_numbers_are_read_as_arrays(name: str, series: Any, values: list[Any], valid: list[bool] | None) -> None:
    numbers = read_numbers(series, field_of(name))
    assert numbers is not None
    data, validity = numbers
    assert data.dtype.kind == {"number": "i", "plain": "i", "real": "f", "flag": "b", "pair": "c"}[name]
    assert (None if validity is None else validity.tolist()) == valid
    assert [None if value != value else value for value in data.tolist()] == values
    assert not np.shares_memory(data, series.to_numpy())


@pytest.mark.parametrize(
    ("name", "series"),
    [
        ("number", pd.Series([1.5, 2.0])),
        ("number", pd.Series([np.inf, 1.0])),
        ("number", pd.Series([2.0**54, 1.0])),
        ("number", pd.Series([-(2.0**54), 1.0])),
        ("plain", pd.Series([np.nan, 1.0])),
        ("number", pd.Series([True, False])),
        ("flag", pd.Series([1, 0])),
        ("real", pd.Series([True, False])),
        ("real", pd.Series([1j, 0])),
        ("number", pd.Series(["1", "2"])),
        ("number", pd.Series(["1", "2"], dtype="category")),
        ("real", pd.Series(pd.to_datetime(["2024-01-01"]))),
        ("price", pd.Series([1, 2])),
    ],
)
def test_other_numbers_are_validated_one_by_one(name: str, series: Any) -> None:
    assert read_numbers(series, field_of(name)) is None


def test_nan_is_a_number_in_fields_without_none() -> None:
    class Real(BaseDocument):
        real: float
        maybe: float | None = None

    series = pd.Series([np.nan, 1.0])
    schema = Real.document_schema()
    plain, maybe = read_numbers(series, schema.by_name["real"]), read_numbers(series, schema.by_name["maybe"])
    assert plain is not None
    assert maybe is not None
    assert plain[1] is None
    assert np.isnan(plain[0][0])
    assert maybe[1].tolist() == [False, True]  # type: ignore[union-attr]


def test_dtypes_are_kept_if_no_wider_one_is_needed() -> None:
    for name, dtype in {"real": "float32", "number": "uint8", "pair": "complex64"}.items():
        numbers = read_numbers(pd.Series([1, 2], dtype=dtype), field_of(name))
        assert numbers is not None
        assert numbers[0].dtype == dtype


def test_values_are_read_as_python_types() -> None:
    values = pd.Series([np.int64(3), np.float32(0.5), "x", pd.Timestamp("2024-01-01"), pd.Timedelta(1, "s"), [1]])
    objects = read_objects(values.astype(object), field_of("either"))
    assert list(map(type, objects)) == [int, float, str, datetime, timedelta, list]
    assert objects[3] == datetime(2024, 1, 1)  # noqa: DTZ001
    assert objects[4] == timedelta(seconds=1)
    own = [None, 1, 0.5, True, "x", np.int64(3)]
    objects = read_objects(pd.Series(own, dtype=object), field_of("either"))
    assert list(map(type, objects)) == [type(None), int, float, bool, str, int]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("price", [None, None, None, None, "x"]),
        ("fixed", [float, Decimal, None, None, "x"]),
        ("pair", [None, None, None, None, "x"]),
        ("pure", [float, Decimal, None, None, "x"]),
        ("plain", [None, None, None, None, "x"]),
        ("either", [float, Decimal, None, None, "x"]),
    ],
)
def test_missing_values_are_none_but_nan_is_kept_as_a_value(name: str, expected: list[Any]) -> None:
    series = pd.Series([np.nan, Decimal("NaN"), pd.NA, None, "x"], dtype=object)
    objects = read_objects(series, field_of(name))
    assert [type(value) if value is not None and value != value else value for value in objects] == expected


def test_tensors_in_cells_are_unchanged() -> None:
    value = np.float32(1)
    field = Student.document_schema().by_name["vector"]
    assert read_objects(pd.Series([value, None], dtype=object), field)[0] is value


# --- times


class Times(BaseDocument):
    id: ClassVar[None] = None  # type: ignore[assignment]
    at: datetime | None = None
    span: timedelta | None = None


class Moment(datetime):
    """A class of its own, which datetime64 would not keep."""


NOON = datetime(2024, 7, 1, 12, 0, 0, 123_456)  # noqa: DTZ001


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([NOON, None], "datetime64[us]"),
        ([None, None], "datetime64[us]"),
        ([NOON.replace(tzinfo=timezone.utc), None], "datetime64[us, UTC]"),
        ([NOON.replace(tzinfo=timezone.utc), NOON], "object"),
        ([NOON.replace(fold=1)], "object"),
        ([NOON.replace(tzinfo=timezone(timedelta(hours=1)))], "object"),
        ([NOON.replace(tzinfo=timezone(timedelta(0), "Z"))], "object"),
        ([NOON.replace(tzinfo=ZoneInfo("Europe/Paris")), NOON.replace(tzinfo=timezone.utc)], "object"),
        ([Moment(2024, 1, 1)], "object"),
    ],
)
def test_times_are_datetime64_only_without_loss(values: list[Any], dtype: str) -> None:
    docs = DocumentArray[Times]([Times.model_construct(at=value, span=None) for value in values])
    for source in (docs, docs.stack()):
        series = source.to_dataframe()["at"]
        assert str(series.dtype) == dtype
        assert [None if pd.isna(value) else value for value in series] == values
    if values[0] is not None and type(values[0]) is datetime:
        assert DocumentArray[Times].from_dataframe(docs.to_dataframe()).at == values


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([timedelta(microseconds=1), None], "timedelta64[us]"),
        ([timedelta(microseconds=2**63 - 1), timedelta(microseconds=1 - 2**63)], "timedelta64[us]"),
        ([timedelta(microseconds=2**63)], "object"),
        ([None, timedelta(microseconds=-(2**63))], "object"),
    ],
)
def test_timedeltas_are_timedelta64_within_its_range(values: list[Any], dtype: str) -> None:
    docs = DocumentArray[Times]([Times(span=value) for value in values])
    frame = docs.to_dataframe()
    assert str(frame["span"].dtype) == dtype
    assert DocumentArray[Times].from_dataframe(frame).identical(docs)


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_times_of_every_unit_are_read(unit: str) -> None:
    at = np.array(["2024-07-01T12:00:00", "NaT"], f"M8[{unit}]")
    span = np.array([5_000, "NaT"], f"m8[{unit}]")
    docs = DocumentArray[Times].from_dataframe(pd.DataFrame({"at": at, "span": span}))
    assert docs.at == [datetime(2024, 7, 1, 12), None]  # noqa: DTZ001
    factor = {"s": 1_000_000, "ms": 1_000, "us": 1, "ns": 0.001}[unit]
    assert docs.span == [timedelta(microseconds=5_000 * factor), None]


def test_times_finer_than_a_microsecond_are_rejected() -> None:
    for column, dtype in {"at": "M8[ns]", "span": "m8[ns]"}.items():
        frame = pd.DataFrame({column: np.array([1_000, "NaT", 1_001], dtype)})
        with pytest.raises(DecodeError, match=rf"column '{column}'.*row 2: .* has nanoseconds"):
            DocumentArray[Times].from_dataframe(frame)


def test_times_beyond_the_range_of_python_are_rejected() -> None:
    frame = pd.DataFrame({"at": np.array(["2024-01-01", "NaT", "20000-01-01"], "M8[s]")})
    with pytest.raises(DecodeError, match=r"column 'at'.*row 2: 20000-01-01.* is beyond the range"):
        DocumentArray[Times].from_dataframe(frame)


@pytest.mark.parametrize(("zone", "hour"), [("UTC", 12), ("Europe/Paris", 14)])
def test_zones_of_a_frame_are_kept(zone: str, hour: int) -> None:
    series = pd.Series([pd.Timestamp("2024-07-01T12:00", tz="UTC"), pd.NaT]).dt.tz_convert(zone)
    at = DocumentArray[Times].from_dataframe(pd.DataFrame({"at": series})).at
    assert at[1] is None
    assert (at[0].hour, str(at[0].tzinfo)) == (hour, zone)
    assert zone != "UTC" or at[0].tzinfo is timezone.utc


# --- documents inside of documents


class Note(BaseDocument):
    id: ClassVar[None] = None  # type: ignore[assignment]
    text: str | None = None
    rank: int | None = None


class Folder(BaseDocument):
    id: ClassVar[None] = None  # type: ignore[assignment]
    note: Note | None = None
    notes: Any = None


class Cabinet(BaseDocument):
    id: ClassVar[None] = None  # type: ignore[assignment]
    folder: Folder = Folder()
    spare: Folder | None = None


@pytest.mark.parametrize("make", [DocumentArray, lambda docs: DocumentArray[Cabinet](docs).stack()])
def test_document_without_any_value_is_rejected_with_its_row(make: Any) -> None:
    full = Cabinet(folder=Folder(note=Note(text="a")))
    assert make([full, Cabinet()]).to_dataframe()["folder.note.text"].tolist() == ["a", None]
    for row, docs in enumerate(([Cabinet(folder=Folder(note=Note()))], [full, Cabinet(folder=Folder(note=Note()))])):
        with pytest.raises(EncodeError, match=rf"^row {row}: 'folder.note' is a document without any value"):
            make(docs).to_dataframe()
    with pytest.raises(EncodeError, match=r"^row 1: 'spare' is a document without any value"):
        make([full, Cabinet(spare=Folder())]).to_dataframe()
    with pytest.raises(EncodeError, match=r"^row 0: 'spare.note' is a document without any value"):
        make([Cabinet(spare=Folder(note=Note(), notes=3))]).to_dataframe()
    assert len(make([Cabinet(spare=Folder(note=Note(rank=0)))]).to_dataframe()) == 1


def test_fields_whose_path_begins_alike_do_not_count_for_a_document() -> None:
    class Pair(BaseDocument):
        id: ClassVar[None] = None  # type: ignore[assignment]
        note: Note | None = None
        note_more: str = "always"

    with pytest.raises(EncodeError, match="row 0: 'note' is a document without any value"):
        DocumentArray[Pair]([Pair(note=Note())]).to_dataframe()


class Sealed(BaseDocument):
    id: ClassVar[None] = None  # type: ignore[assignment]
    data: Json[Any] | None = None
    blob: Base64Bytes | None = None


def test_fields_of_json_and_base64_are_written_as_their_texts() -> None:
    docs = DocumentArray[Sealed]([Sealed(data="[1, 2]", blob=b"aGVsbG8="), Sealed(), Sealed(data="null")])
    for source in (docs, docs.stack()):
        frame = source.to_dataframe()
        assert frame["data"][0] in ("[1,2]", "[1, 2]", b"[1,2]")
        assert frame["data"][1] is None
        assert bytes(frame["blob"][0]).strip() == b"aGVsbG8="
        again = DocumentArray[Sealed].from_dataframe(frame)
        assert again[0].data == [1, 2]
        assert again[0].blob == b"hello"
        assert again[1].data is again[1].blob is None


class Required(BaseDocument):
    data: Json[Any]
    blob: Base64Bytes


class RequiredOwner(BaseDocument):
    required: Required


class RequiredOrNone(BaseDocument):
    inner: Required | None = None
    owner: RequiredOwner | None = None


def test_rows_without_a_document_have_no_texts_of_json_and_base64() -> None:
    null, some = Required(data="null", blob=b"aGVsbG8="), Required(data="[1]", blob=b"")
    docs = DocumentArray[RequiredOrNone](
        [RequiredOrNone(), RequiredOrNone(inner=null), RequiredOrNone(owner=RequiredOwner(required=some))]
    )
    for source in (docs, docs.stack()):
        frame = source.to_dataframe()
        assert frame["inner.data"][0] is frame["inner.blob"][0] is frame["owner.required.blob"][1] is None
        assert DocumentArray[RequiredOrNone].from_dataframe(frame).identical(docs)
    assert DocumentArray[RequiredOrNone].from_dataframe(docs[:1].to_dataframe()).identical(docs[:1])


def test_texts_that_would_not_be_read_back_are_rejected() -> None:
    class Positive(BaseDocument):
        id: ClassVar[None] = None  # type: ignore[assignment]
        data: Json[Annotated[int, Field(gt=0)]] | None = None

    docs = DocumentArray[Positive]([Positive(), Positive.model_construct(data=-1)])
    for source in (docs, docs.stack()):
        with pytest.raises(EncodeError, match=r"^Positive.data: a data frame of it could not be read back: .*row 1"):
            source.to_dataframe()
    other = DocumentArray[Sealed]([Sealed.model_construct(data=(1, 2), blob=None)])
    for source in (other, other.stack()):
        with pytest.raises(EncodeError, match=r"^Sealed.data: its texts .* would be read back as other values"):
            source.to_dataframe()


class Empty(BaseDocument):
    id: ClassVar[None] = None  # type: ignore[assignment]


class Holder(BaseDocument):
    id: ClassVar[None] = None  # type: ignore[assignment]
    empty: Empty | None = None
    title: str = ""


def test_documents_without_fields_are_values_in_cells() -> None:
    docs = DocumentArray[Holder]([Holder(empty=Empty()), Holder(title="x")])
    for source in (docs, docs.stack()):
        frame = source.to_dataframe()
        assert list(frame.columns) == ["empty", "title"]
        assert frame["empty"].tolist() == [{}, None]


class Loose(BaseDocument, extra="allow"):
    id: ClassVar[None] = None  # type: ignore[assignment]
    title: str = ""


class Outer(BaseDocument):
    id: ClassVar[None] = None  # type: ignore[assignment]
    loose: Loose | None = None


def test_batches_of_classes_with_extra_values_are_tables_without_them() -> None:
    docs = DocumentArray[Outer]([Outer(loose=Loose(title="a")), Outer()])
    for source in (docs, docs.stack()):
        assert source.to_dataframe()["loose.title"].tolist() == ["a", None]
    docs[0].loose = Loose(title="a", colour="red")  # type: ignore[call-arg]
    for source in (docs, docs.stack()):
        with pytest.raises(EncodeError, match=r"'loose' holds values that Loose has no field for"):
            source.to_dataframe()


def test_unvalidated_mappings_are_written_unchanged() -> None:
    docs = DocumentArray[Node]([Node(id="a"), Node(id="b")])
    docs[1].__dict__["parent"] = {"id": "c"}
    assert docs.to_dataframe()["parent"].tolist() == [None, {"id": "c"}]


def test_arrays_and_recursive_documents_are_dicts_in_cells() -> None:
    docs = DocumentArray[Node]([Node(id="a", children=[Node(id="b", name="x")]), Node(id="c", parent=Node(id="d"))])
    for source in (docs, docs.stack()):
        frame = source.to_dataframe()
        assert type(frame["children"][0]) is list
        assert type(frame["children"][0][0]) is dict
        assert frame["children"][0][0]["name"] == "x"
        assert frame["parent"][0] is None
        assert frame["parent"][1]["id"] == "d"
        assert DocumentArray[Node].from_dataframe(frame).identical(docs)


# --- the law: last, as it takes longest


def flat(branch: Branch) -> bool:
    """Whether a table can hold the branch: documents of the declared classes."""
    all_leaves = [branch.leaf, branch.spare, *branch.leaves, *(branch.more or ())]
    return all(leaf is None or type(leaf) is Leaf for leaf in all_leaves)


def check(docs: Any) -> None:
    """The law, for the array and for its batch."""
    frame = docs.to_dataframe()
    assert type(docs).from_dataframe(frame).identical(docs)
    batch = docs.stack(shapes="ragged")
    pd.testing.assert_frame_equal(batch.to_dataframe(), frame, check_dtype=len(docs) > 0)
    assert type(batch).from_dataframe(frame, shapes="ragged").identical(batch)


@laws
@given(arrays(leaves().filter(lambda leaf: type(leaf) is Leaf), Leaf, 5))
def test_leaf_documents_round_trip(docs: DocumentArray[Leaf]) -> None:
    check(docs)


@laws
@given(arrays(branches().filter(flat), Branch))
def test_every_kind_of_field_round_trips(docs: DocumentArray[Branch]) -> None:
    frame = docs.to_dataframe()
    assert DocumentArray[Branch].from_dataframe(frame).identical(docs)
    assert DocumentBatch[Branch].from_dataframe(docs.stack().to_dataframe()).unstack().identical(docs)


@laws
@given(arrays(trees(), Tree))
def test_tensors_of_any_shape_round_trip(docs: DocumentArray[Tree]) -> None:
    if all(flat(tree.branch) and all(map(flat, tree.branches)) for tree in docs):
        assert DocumentArray[Tree].from_dataframe(docs.to_dataframe()).identical(docs)


@laws
@given(arrays(nodes(), Node))
def test_recursive_documents_round_trip(docs: DocumentArray[Node]) -> None:
    assert DocumentArray[Node].from_dataframe(docs.to_dataframe()).identical(docs)


def test_data_frame_without_any_known_column_is_an_error() -> None:
    class Row(BaseDocument):
        label: int = 0

    with pytest.raises(DecodeError, match=r"Row has none of the columns \['lable'\]. Did you mean 'label'"):
        DocumentArray[Row].from_dataframe(pd.DataFrame({"lable": [1]}))
    assert DocumentArray[Row].from_dataframe(pd.DataFrame({"label": [1], "x": [2]})).label == [1]
