"""Documents round-trip through Arrow data bit for bit, whichever rows are gathered and however they are stored."""

# ruff: noqa: DTZ001 - datetimes without a zone are values too

from __future__ import annotations

from datetime import date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from enum import Enum, Flag, IntEnum
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal
from uuid import UUID
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ConfigDict, create_model

from quire import BaseDocument, DocumentArray, DocumentBatch
from quire.errors import DecodeError, EncodeError, OptionError, SchemaError
from quire.storage._layout import Layout
from quire.tensors import DTYPES, DType, Shape, common_dtype
from quire.typing import ID, AnyTensor, NdArray, float32
from tests.codec.round_trips import exact
from tests.storage.sample_documents import branches, columns_of, encoded, gathered, leaves, trees
from tests.strategies import Branch, Leaf, Node, Seed, Tree, Twig, laws, nodes, orders

pytestmark = pytest.mark.needs("pyarrow")


def _comes_back(documents: list[Any], document_type: type[Any], storage: Any = "fixed") -> None:
    """Check that the documents round-trip, as a whole and in parts."""
    layout = Layout(document_type.document_schema(), storage)
    batch = encoded(documents, document_type, layout)
    batch.validate(full=True)
    rows = list(range(len(documents)))
    assert exact(gathered(layout, [batch], rows), documents)
    cut = len(documents) // 2
    pieces = [batch.slice(0, cut), batch.slice(cut)]
    assert exact(gathered(layout, pieces, rows[::-1]), documents[::-1])


def _class(**fields: Any) -> Any:
    """Make a document class whose annotations are values of the test."""
    return create_model("Row", __base__=BaseDocument, **{name: (tp, ...) for name, tp in fields.items()})


def _changed(batch: pa.RecordBatch, **arrays: pa.Array) -> pa.RecordBatch:
    """Return the record batch with some of its arrays replaced."""
    results = [arrays.get(name, column) for name, column in zip(batch.schema.names, batch.columns, strict=True)]
    return pa.RecordBatch.from_arrays(results, schema=batch.schema)


# --- laws


@laws
@given(st.data(), st.sampled_from([(leaves(), Leaf), (branches(), Branch), (trees(), Tree), (nodes(), Node)]))
def test_rows_in_any_order_are_gathered_from_any_number_of_slices(data: st.DataObject, kind: Any) -> None:
    strategy, document_type = kind
    layout = Layout(document_type.document_schema())
    parts = data.draw(st.lists(st.lists(strategy, max_size=3), min_size=1, max_size=3))
    documents, batches = [], []
    for part in parts:
        start = data.draw(st.integers(0, len(part)))
        documents += part[start:]
        batches.append(encoded(part, document_type, layout).slice(start))
    order = [row % len(documents) for row in data.draw(orders(len(documents)))]
    for rows in (order, list(range(len(documents)))):
        assert exact(gathered(layout, batches, rows), [documents[row] for row in rows])


@laws
@given(st.lists(trees(), max_size=3))
def test_encoded_batches_are_valid_arrow_data(documents: list[Tree]) -> None:
    encoded(documents, Tree).validate(full=True)


@laws
@given(st.lists(trees(), max_size=3))
def test_rows_round_trip_through_an_arrow_file(documents: list[Tree]) -> None:
    layout = Layout(Tree.document_schema())
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, layout.arrow_schema) as writer:
        writer.write_batch(encoded(documents, Tree, layout).replace_schema_metadata(layout.arrow_schema.metadata))
    result = pa.ipc.open_file(sink.getvalue()).get_batch(0)
    assert exact(gathered(layout, [result], list(range(len(documents)))), documents)


@laws
@given(st.lists(branches(), min_size=1, max_size=4), st.data())
def test_batch_taken_from_another_is_encoded_as_its_own_rows(documents: list[Branch], data: Any) -> None:
    batch = DocumentArray[Branch](documents).stack(shapes="ragged")
    rows = [row % len(documents) for row in data.draw(orders(len(documents)))]
    for part, kept in ((batch[rows], rows), (batch[1:], list(range(1, len(documents))))):
        layout = Layout(Branch.document_schema())
        written = layout.encode(part._columns)
        assert exact(gathered(layout, [written], list(range(len(kept)))), [documents[row] for row in kept])


# --- tensors

_NUMBERS = [name for name in DTYPES if name != "string"]


def _numbers(dtype: str, shape: tuple[int, ...]) -> Any:
    """Every pattern of bits is a number, NaN among them."""
    target = common_dtype(dtype)
    size = int(np.prod(shape))
    if dtype == "bool":
        return (np.arange(size) % 2 == 0).reshape(shape)
    raw = np.random.default_rng(size).integers(0, 256, size * target.itemsize, np.uint8)
    return raw.view(target).reshape(shape)


@pytest.mark.parametrize("storage", ["fixed", "binary", "list"])
@pytest.mark.parametrize("dtype", _NUMBERS)
def test_dtypes_round_trip_in_fixed_and_ragged_tensors(dtype: str, storage: str) -> None:
    class Row(BaseDocument):
        fixed: Annotated[np.ndarray, Shape(2, 3), DType(dtype)]
        scalar: Annotated[np.ndarray, Shape(), DType(dtype)]
        maybe: Annotated[np.ndarray, Shape(4), DType(dtype)] | None
        ragged: Annotated[np.ndarray, DType(dtype)]
        any_one: AnyTensor | None

    documents = [
        Row(
            fixed=_numbers(dtype, (2, 3)),
            scalar=_numbers(dtype, ()),
            maybe=None if n % 2 else _numbers(dtype, (4,)),
            ragged=_numbers(dtype, (n, 2)),
            any_one=None if n == 1 else _numbers(dtype, (n,)),
        )
        for n in range(4)
    ]
    if storage == "fixed":
        _comes_back(documents, Row)
    else:
        batch = encoded(documents, Row, Layout(Row.document_schema(), storage))  # type: ignore[arg-type]
        batch.validate(full=True)
        assert len(batch) == 4


@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3), ()], ids=str)
def test_shapes_without_elements_round_trip(shape: tuple[int, ...]) -> None:
    class Row(BaseDocument):
        fixed: Annotated[np.ndarray, Shape(*shape), DType("float32")]
        maybe: Annotated[np.ndarray, Shape(*shape), DType("int8")] | None
        ragged: NdArray

    some = Row(fixed=np.zeros(shape, np.float32), maybe=None, ragged=np.zeros(shape))
    more = Row(fixed=np.zeros(shape, np.float32), maybe=np.zeros(shape, np.int8), ragged=np.zeros((1, 0, 2)))
    _comes_back([some, more, some], Row)
    _comes_back([more, more], Row)
    _comes_back([], Row)


@pytest.mark.needs("torch")
def test_tensors_of_mixed_frameworks_round_trip() -> None:
    import torch

    class Row(BaseDocument):
        any_one: AnyTensor

    _comes_back([Row(any_one=np.ones(2)), Row(any_one=torch.ones(3)), Row(any_one=np.ones(1, np.int8))], Row)


# --- everything else


class Size(IntEnum):
    SMALL = 1
    LARGE = 2


class Level(str, Enum):
    LOW = "low level"
    HIGH = "high level"


class Rights(Flag):
    READ = 1
    WRITE = 2


class Kinds(BaseDocument):
    when: datetime
    maybe_when: datetime | None = None
    day: date = date(1, 1, 1)
    clock: time = time(23, 59, 59, 999_999)
    span: timedelta = timedelta(microseconds=-1)
    key: UUID = UUID(int=2**128 - 1)
    price: Decimal = Decimal("1.10")
    place: Path = Path()
    pure: PurePosixPath = PurePosixPath("/a")
    size: Size = Size.SMALL
    level: Level = Level.LOW
    rights: Rights = Rights.READ | Rights.WRITE
    number: complex = complex(-0.0, float("nan"))
    maybe_number: complex | None = None
    names: set[str] = {"a", "b"}
    frozen: frozenset[int] = frozenset({1})
    pair: tuple[int, str] = (1, "a")
    many: tuple[int, ...] = (1, 2)
    table: dict[str, list[float]] = {"a": [0.5]}
    either: int | str | list[int] = "x"
    anything: Any = None
    lists: list[list[int]] = [[1], []]
    floats: list[float | None] = [None, float("inf"), -0.0]
    blobs: list[bytes] = [b"", b"\0"]
    flags: list[bool] = [True, False]
    maybe_list: list[int] | None = None
    choice: Literal["a", "b"] = "a"
    mark: ID = ID("x")
    nothing: None = None


@pytest.mark.parametrize(
    "when",
    [
        datetime(1, 1, 1),
        datetime(9999, 12, 31, 23, 59, 59, 999_999),
        datetime(2024, 2, 29, 1, 2, 3, 4, timezone.utc),
        datetime(2024, 1, 1, tzinfo=timezone(timedelta(hours=5, minutes=30))),
        datetime(2024, 1, 1, tzinfo=timezone(-timedelta(hours=5, minutes=30, seconds=15, microseconds=3))),
        datetime(2024, 10, 27, 2, 30, tzinfo=ZoneInfo("Europe/Berlin")),
        datetime(2024, 10, 27, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"), fold=1),
        datetime(2024, 3, 31, 2, 30, tzinfo=ZoneInfo("Europe/Berlin")),
    ],
    ids=str,
)
def test_datetimes_keep_their_zone_and_fold(when: datetime) -> None:
    documents = [Kinds(when=when, maybe_when=maybe) for maybe in (None, when)]
    _comes_back(documents, Kinds)
    result = gathered(Layout(Kinds.document_schema()), [encoded(documents, Kinds)], [1])[0].when
    assert (result.tzinfo, result.fold, result.utcoffset()) == (when.tzinfo, when.fold, when.utcoffset())


def test_none_round_trips_in_every_optional_field() -> None:
    optional = {name: info.annotation | None for name, info in Kinds.model_fields.items() if name != "nothing"}
    maybe = create_model("Maybe", __base__=BaseDocument, **{name: (tp, None) for name, tp in optional.items()})
    full = Kinds(when=datetime(2024, 1, 1))
    values = {name: getattr(full, name) for name in optional}
    _comes_back([maybe(), maybe(**values), maybe()], maybe)
    _comes_back([maybe(), maybe()], maybe)


def test_garbage_in_missing_values_is_ignored() -> None:
    class Row(BaseDocument):
        day: date | None
        when: datetime | None

    layout = Layout(Row.document_schema())
    documents = [Row(day=None, when=None)] * 2
    batch = encoded(documents, Row, layout)
    wild = pa.py_buffer(np.full(2, -(2**31), np.int32)), pa.py_buffer(np.full(2, -(2**63) + 1))
    day = pa.Array.from_buffers(pa.date32(), 2, [batch["day"].buffers()[0], wild[0]])
    at = pa.Array.from_buffers(pa.timestamp("us"), 2, [None, wild[1]])
    marks = batch["when"].buffers()[0]
    when = pa.Array.from_buffers(batch["when"].type, 2, [marks], children=[at, batch["when"].field(1)])
    assert exact(gathered(layout, [_changed(batch, day=day, when=when)], [0, 1]), documents)


def test_enum_values_kept_as_plain_values_round_trip() -> None:
    class Row(BaseDocument):
        model_config = ConfigDict(use_enum_values=True)
        level: Level

    layout = Layout(Row.document_schema())
    assert layout.encode(columns_of([Row(level=Level.HIGH)], Row))["level"].to_pylist() == ["high level"]


# --- what has no form


class _Nowhere(tzinfo):
    def utcoffset(self, _: datetime | None) -> None:
        return None


class Limits(BaseDocument):
    number: int = 0
    numbers: list[int] = []
    span: timedelta = timedelta()
    clock: time = time()
    when: datetime = datetime(1, 1, 1)
    text: str = ""
    leaf: Leaf | None = None
    leaves: DocumentArray[Leaf] = []
    seed: Seed | None = None
    vector: NdArray[float32, 2] = [0.0, 0.0]
    ragged: NdArray | None = None


_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an integer of 65 bits": ({"number": 2**64}, "Limits.number"),
    "a negative integer of 65 bits": ({"number": -(2**63) - 1}, "Limits.number"),
    "an integer of 65 bits in a list": ({"numbers": [1, 2**64]}, r"Limits.numbers\[\]"),
    "a duration of more than 292,000 years": ({"span": timedelta.max}, "Limits.span"),
    "a time with a zone": ({"clock": time(1, tzinfo=timezone.utc)}, "Limits.clock"),
    "a zone without an offset": ({"when": datetime(2024, 1, 1, tzinfo=_Nowhere())}, "Limits.when"),
    "half of a character": ({"text": "\ud800"}, "Limits.text"),
    "a subclass with more fields": ({"leaf": Twig(text="a")}, "Limits.leaf, row 1.*subclass Twig"),
    "a subclass in an array": ({"leaves": [Twig(text="a")]}, "Limits.leaves, row 0.*subclass Twig"),
    "values beyond the fields": ({"seed": Seed(a=1)}, "Limits.seed, row 1.*no fields for a"),
    "an array of objects": ({"ragged": np.array([object()])}, "Limits.ragged"),
}


@pytest.mark.parametrize(("values", "message"), _REFUSED.values(), ids=_REFUSED)
def test_value_without_a_column_type_is_an_error_that_names_the_field(values: dict[str, Any], message: str) -> None:
    limits = Limits(**{name: value for name, value in values.items() if name != "text"})
    limits.__dict__.update(values)
    with pytest.raises(EncodeError, match=message):
        encoded([Limits(), limits], Limits)


@pytest.mark.needs("torch")
def test_sparse_tensor_is_an_error_that_names_the_field() -> None:
    import torch

    row_type = _class(fixed=Annotated[torch.Tensor, Shape(2), DType("float32")], ragged=torch.Tensor)
    sparse = torch.eye(2)[0].to_sparse()
    with pytest.raises(EncodeError, match="Row.fixed.*sparse"):
        encoded([row_type(fixed=sparse, ragged=torch.ones(1))], row_type)
    with pytest.raises(EncodeError, match="Row.ragged.*sparse"):
        encoded([row_type(fixed=torch.ones(2), ragged=sparse)], row_type)


def test_tensor_of_another_type_is_an_error_that_names_the_field() -> None:
    for wrong in (np.zeros(3, np.float32), np.zeros(2)):
        limits = Limits()
        limits.__dict__["vector"] = wrong
        with pytest.raises(EncodeError, match="Limits.vector"):
            encoded([limits], Limits)


def test_missing_column_is_an_error_that_names_it() -> None:
    layout = Layout(Leaf.document_schema())
    batch = DocumentBatch[Leaf]([Leaf(text="a")])
    columns = batch._columns
    del columns.columns["number"]
    with pytest.raises(EncodeError, match="Leaf.number"):
        layout.encode(columns)


def test_layout_requires_a_class_and_a_known_tensor_storage() -> None:
    with pytest.raises(SchemaError, match="document_type="):
        Layout(BaseDocument.document_schema())
    with pytest.raises(OptionError, match="tensor_storage='zip'"):
        Layout(Leaf.document_schema(), "zip")  # type: ignore[arg-type]


# --- data that is not what it should be


def test_invalid_date_is_an_error_that_names_the_field() -> None:
    class Row(BaseDocument):
        day: date

    layout = Layout(Row.document_schema())
    wild = pa.array([2**31 - 1], pa.int32()).view(pa.date32())
    batch = _changed(encoded([Row(day=date(2024, 1, 1))], Row, layout), day=wild)
    with pytest.raises(DecodeError, match="Row.day"):
        gathered(layout, [batch], [0])


@pytest.mark.parametrize("offsets", [[0, 9, 1], [0, -4, 1], [0, 2**31 - 1, 1], [1, 0, 1]], ids=str)
def test_offsets_outside_of_the_record_batch_are_an_error_that_names_the_field(offsets: list[int]) -> None:
    class Row(BaseDocument):
        words: list[str]
        text: str

    layout = Layout(Row.document_schema())
    good = encoded([Row(words=["a"], text="b"), Row(words=[], text="c")], Row, layout)
    bad = pa.py_buffer(np.array(offsets, np.int32))
    text = pa.Array.from_buffers(pa.string(), 2, [None, bad, pa.py_buffer(b"b")])
    words = pa.Array.from_buffers(good["words"].type, 2, [None, bad], children=[pa.array(["a"])])
    with pytest.raises(DecodeError, match="Row.text"):
        gathered(layout, [_changed(good, text=text)], [0, 1])
    with pytest.raises(DecodeError, match="Row.words"):
        gathered(layout, [_changed(good, words=words)], [0, 1])


@pytest.mark.parametrize(
    ("shape", "dtype", "framework"),
    [([3], "float32", "numpy"), ([-1, -2], "float32", "numpy"), ([2], "object", "numpy"), ([2], "float32", "os")],
    ids=str,
)
def test_tensor_shape_that_does_not_fit_its_bytes_is_an_error(shape: list[int], dtype: str, framework: str) -> None:
    class Row(BaseDocument):
        any_one: AnyTensor

    layout = Layout(Row.document_schema())
    values = [{"data": b"12345678", "shape": shape, "dtype": dtype, "framework": framework}]
    good = encoded([Row(any_one=np.ones(1))], Row, layout)
    with pytest.raises(DecodeError, match="Row.any_one"):
        gathered(layout, [_changed(good, any_one=pa.array(values, good["any_one"].type))], [0])
