"""Batches and arrays: columns of every form, rows without a document, validation, empty ones."""

# ruff: noqa: DTZ001 - datetimes without a zone are values too

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import AfterValidator, Field, field_validator, model_validator
from typing_extensions import Self

from quire import BaseDocument, DocumentArray, DocumentBatch
from quire.columns import ObjectColumn
from quire.errors import DecodeError, EncodeError
from quire.typing import NdArray, TorchTensor, float32
from tests.codec.round_trips import dynamic, exact, written_whole
from tests.strategies import Branch, Leaf, Node, Seed, Tree, Twig, arrays, branches, laws, leaves, nodes, seeds, trees


@given(
    arrays(leaves(), Leaf)
    | arrays(branches(), Branch)
    | arrays(trees(), Tree)
    | arrays(seeds(), Seed)
    | arrays(nodes(), Node)
)
@laws
def test_arrays_round_trip(docs: Any) -> None:
    cls = type(docs)
    assert exact(cls.from_bytes(docs.to_bytes()), docs)
    assert exact(DocumentArray.from_bytes(docs.to_bytes()), docs)
    assert written_whole(cls.from_protobuf(docs.to_protobuf()), docs)
    assert written_whole(cls.from_bytes(docs.to_protobuf().SerializeToString()), docs)


@given(
    arrays(leaves(), Leaf)
    | arrays(branches(), Branch)
    | arrays(trees(2), Tree)
    | arrays(seeds(), Seed)
    | arrays(nodes(), Node),
    st.sampled_from(["ragged", "pad"]),
)
@laws
def test_batches_round_trip(docs: Any, shapes: Any) -> None:
    batch = docs.stack(shapes=shapes)
    for options in ({}, {"copy": False}):
        got = type(batch).from_bytes(batch.to_bytes(), **options)
        assert got.identical(batch)
        assert exact(got.unstack(), batch.unstack())
        assert same_columns(got._columns, batch._columns)
    assert exact(type(docs).from_bytes(batch.to_bytes()), docs)
    got = type(batch).from_protobuf(batch.to_protobuf())
    assert same_columns(got._columns, batch._columns)
    assert exact(type(batch).from_bytes(docs.to_bytes()).unstack(), docs)
    assert written_whole(type(batch).from_protobuf(docs.to_protobuf()).unstack(), docs)


def same_columns(a: Any, b: Any) -> bool:
    """Whether columns are of the same forms, with the same marks."""
    if a.columns.keys() != b.columns.keys() or len(a) != len(b):
        return False
    for name, one in a.columns.items():
        other = b.columns[name]
        objects = isinstance(one, ObjectColumn) and isinstance(other, ObjectColumn)  # texts that were read are packed
        if type(one) is not type(other) and not objects:
            return False
        if (
            hasattr(one, "data")
            and not objects
            and (one.data.shape != other.data.shape or one.data.dtype != other.data.dtype)
        ):
            return False
        nested = getattr(one, "columns", None) or getattr(one, "flat", None)
        if hasattr(nested, "columns") and not same_columns(nested, getattr(other, "columns", None) or other.flat):
            return False
    return True


# --- empty ones


@pytest.mark.parametrize("cls", [Leaf, Branch, Tree, Node, Seed, Twig])
def test_empty_arrays_and_batches_keep_their_class(cls: Any) -> None:
    docs = DocumentArray[cls]()
    for got in (
        DocumentArray.from_bytes(docs.to_bytes()),
        DocumentArray[cls].from_bytes(docs.to_bytes()),
        DocumentArray.from_protobuf(docs.to_protobuf()),
        DocumentArray.from_bytes(docs.stack().to_bytes()),
    ):
        assert exact(got, docs)
    for data in (docs.stack().to_bytes(), docs.to_bytes()):
        for batch_type in (DocumentBatch, DocumentBatch[cls]):
            batch = batch_type.from_bytes(data)
            assert type(batch) is DocumentBatch[cls]
            assert len(batch) == 0
    assert exact(DocumentArray.from_bytes(DocumentArray().to_bytes()), DocumentArray())


def test_empty_columns_keep_their_dtype_and_shape() -> None:
    class Vectors(BaseDocument):
        fixed: NdArray[float32, 3]
        loose: NdArray

    batch = DocumentArray[Vectors]([Vectors(fixed=[1, 2, 3], loose=np.zeros((0, 4), np.int16))]).stack()
    got = DocumentBatch[Vectors].from_bytes(batch[:0].to_bytes())
    assert got.fixed.shape == (0, 3)
    assert got.loose.dtype == np.int16
    got = DocumentBatch[Vectors].from_bytes(batch.to_bytes())
    assert got.loose.shape == (1, 0, 4)


# --- what is not there


class Parts(BaseDocument):
    number: int | None = None
    real: float | None = None
    flag: bool | None = None
    text: str | None = None
    blob: bytes | None = None
    when: datetime | None = None
    vector: NdArray[float32, 2] | None = None
    leaf: Leaf | None = None
    leaves: DocumentArray[Leaf] | None = None


FULL = Parts(
    number=1,
    real=-0.0,
    flag=True,
    text="ä",
    blob=b"\0",
    when=datetime(2024, 1, 1),
    vector=[1, 2],
    leaf=Leaf(text="x"),
    leaves=[Leaf(text="y")],
)


@pytest.mark.parametrize(
    "rows", [[Parts()], [Parts(), Parts()], [FULL, Parts()], [Parts(), FULL, Parts(), FULL], [FULL, FULL]], ids=len
)
def test_rows_without_a_value_round_trip(rows: list[Parts]) -> None:
    docs = DocumentArray[Parts](rows)
    assert exact(DocumentArray[Parts].from_bytes(docs.to_bytes()), docs)
    batch = docs.stack()
    got = DocumentBatch[Parts].from_bytes(batch.to_bytes())
    assert exact(got.unstack(), docs)
    for path in ("number", "vector", "leaf", "leaf.number", "leaves", "text"):
        np.testing.assert_array_equal(got.validity(path), batch.validity(path))


def test_falsy_values_round_trip() -> None:
    docs = DocumentArray[Parts]([Parts(number=0, real=0.0, flag=False, text="", blob=b"", leaves=[]), Parts(text="x")])
    assert exact(DocumentArray[Parts].from_bytes(docs.to_bytes()), docs)


def test_columns_with_big_integers_round_trip() -> None:
    docs = DocumentArray[Parts]([Parts(number=1), Parts(number=2**63), Parts(), Parts(number=-(2**63))])
    assert exact(DocumentArray[Parts].from_bytes(docs.to_bytes()), docs)
    assert exact(DocumentBatch[Parts].from_bytes(docs.stack().to_bytes()).unstack(), docs)


def test_padded_batches_keep_the_shapes_of_their_rows() -> None:
    class Loose(BaseDocument):
        a: NdArray

    docs = DocumentArray[Loose]([Loose(a=np.ones((2, 1))), Loose(a=np.ones((1, 3)))])
    batch = docs.stack(shapes="pad")
    got = DocumentBatch[Loose].from_bytes(batch.to_bytes())
    assert got.a.shape == (2, 2, 3)
    np.testing.assert_array_equal(got.mask("a"), batch.mask("a"))
    assert exact(got.unstack(), batch.unstack())


def test_slices_are_written_without_other_rows() -> None:
    docs = DocumentArray[Leaf]([Leaf(text=str(i), vector=[i, i, i]) for i in range(100)])
    batch = docs.stack()
    assert len(batch[:2].to_bytes()) < len(batch.to_bytes()) / 10
    assert exact(DocumentBatch[Leaf].from_bytes(batch[3:50:7].to_bytes()).unstack(), docs[3:50:7])


# --- what bytes hold is checked


class Checked(BaseDocument):
    number: Annotated[int, Field(gt=0)] = 1
    text: Annotated[str, Field(pattern="^a")] = "a"
    even: Annotated[int, AfterValidator(lambda value: value if value % 2 == 0 else 1 / 0)] = 0
    words: Annotated[list[str], Field(max_length=1)] = []
    limited: Annotated[float, Field(le=1)] | None = None


class Ruled(BaseDocument):
    low: int = 0
    high: int = 1
    name: str = "x"

    @field_validator("name")
    @classmethod
    def _not_empty(cls, value: str) -> str:
        if not value:
            raise ValueError("a name is needed")
        return value.strip()

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low > self.high:
            raise ValueError("low is above high")
        return self


class Shared(BaseDocument):
    a: NdArray["n"]
    b: NdArray["n", 2]


def _forged(cls: type[Any], rows: int = 2, **content: Any) -> list[Any]:
    """Return untrusted bytes: a document, an array message, a stream of columns, a batch."""
    good = cls.model_construct(
        id="good",
        **{
            name: info.get_default()
            for name, info in cls.model_fields.items()
            if not info.is_required() and name != "id"
        },
    )
    bad = cls.model_construct(**{**good.__dict__, **content})
    docs = DocumentArray[cls]._trusted([bad] * rows)
    return [
        (cls, bad.to_bytes()),
        (BaseDocument, bad.to_bytes()),
        (DocumentArray[cls], docs.to_protobuf().SerializeToString()),
        (DocumentArray[cls], docs.to_bytes()),
        (DocumentArray, docs.to_bytes()),
        (DocumentBatch[cls], docs.stack(shapes="ragged").to_bytes()),
        (DocumentBatch, docs.to_bytes()),
    ]


@pytest.mark.parametrize(
    ("cls", "content", "message"),
    [
        (Checked, {"number": 0}, r"Checked\.number.*greater than 0"),
        (Checked, {"text": "b"}, r"Checked\.text.*pattern"),
        (Checked, {"words": ["a", "b"]}, r"Checked\.words.*at most 1"),
        (Checked, {"limited": 2.0}, r"Checked\.limited.*less than or equal"),
        (Ruled, {"name": ""}, r"Ruled\.name.*a name is needed"),
        (Ruled, {"low": 5}, r"Ruled.*low is above high"),
        (Shared, {"a": np.ones(2), "b": np.ones((3, 2))}, r"Shared.*n"),
        (Shared, {"a": np.ones((2, 2)), "b": np.ones((2, 2))}, r"Shared\.a"),
        (Leaf, {"text": "x", "number": None}, r"Leaf\.number"),
        (Leaf, {"text": None}, r"Leaf\.text"),
        (Leaf, {"text": "x", "vector": None}, r"Leaf\.vector"),
        (Leaf, {"text": "x", "vector": np.zeros(4, np.float32)}, r"Leaf\.vector"),
        (Leaf, {"text": "x", "vector": np.zeros(3, np.float64)}, r"Leaf\.vector"),
        (Leaf, {"text": "x", "number": "3"}, r"Leaf\.number"),
        (Leaf, {"text": "x", "flag": 1}, r"Leaf\.flag"),
        (Leaf, {"text": 5}, r"Leaf\.text"),
        (Branch, {"leaf": None}, r"Branch\.leaf"),
        (Branch, {"leaf": Leaf(text="a"), "leaves": None}, r"Branch\.leaves"),
        (Branch, {"leaf": Leaf(text="a"), "color": None}, r"Branch\.color"),
        (
            Branch,
            {
                "leaf": Leaf.model_construct(
                    id="1", text="a", number="x", weight=None, flag=False, vector=np.zeros(3, np.float32)
                )
            },
            r"Branch\.leaf.*number",
        ),
        (
            Branch,
            {
                "leaf": Leaf(text="a"),
                "leaves": DocumentArray[Leaf]._trusted(
                    [
                        Leaf.model_construct(
                            id="1", text=3, number=1, weight=None, flag=False, vector=np.zeros(3, np.float32)
                        )
                    ]
                ),
            },
            r"Branch\.leaves.*text",
        ),
    ],
)
def test_invalid_value_raises_an_error_with_class_and_field(
    cls: type[Any], content: dict[str, Any], message: str
) -> None:
    for target, data in _forged(cls, **content):
        with pytest.raises(DecodeError, match=f"(?s){message}"):
            target.from_bytes(data)


def test_validators_may_change_decoded_values() -> None:
    document = Ruled.model_construct(id="1", low=0, high=1, name=" a ")
    assert Ruled.from_bytes(document.to_bytes()).name == "a"


def test_valid_values_pass_all_validators() -> None:
    for document in (
        Checked(number=2, text="ab", even=4),
        Ruled(low=1, high=2),
        Shared(a=np.ones(3), b=np.ones((3, 2))),
    ):
        docs = DocumentArray[type(document)]([document, document])  # type: ignore[misc]
        assert exact(type(docs).from_bytes(docs.to_bytes()), docs)
        assert exact(DocumentBatch[type(document)].from_bytes(docs.stack().to_bytes()).unstack(), docs)  # type: ignore[misc]


def test_shared_dimensions_may_differ_between_rows() -> None:
    docs = DocumentArray[Shared]([Shared(a=np.ones(i), b=np.ones((i, 2))) for i in (1, 2, 0)])
    assert exact(DocumentArray[Shared].from_bytes(docs.to_bytes()), docs)
    assert exact(DocumentBatch[Shared].from_bytes(docs.stack(shapes="ragged").to_bytes()).unstack(), docs)


def test_errors_of_validators_are_raised() -> None:
    for target, data in _forged(Checked, even=3):
        with pytest.raises((DecodeError, ZeroDivisionError)):
            target.from_bytes(data)


def test_invalid_row_of_a_subclass_raises_an_error() -> None:
    bad = Twig.model_construct(
        id="1", text="a", number=1, weight=None, flag=False, vector=np.zeros(3, np.float32), bark={"a": "b"}, ring=None
    )
    docs = DocumentArray[Leaf]._trusted([Leaf(text="a"), bad])
    for data in (docs.to_bytes(), docs.to_protobuf().SerializeToString(), docs.stack().to_bytes()):
        with pytest.raises(DecodeError, match=r"Twig\.bark"):
            DocumentArray[Leaf].from_bytes(data)


def test_array_rejects_documents_of_another_class() -> None:
    data = DocumentArray[Seed]([Seed(x=1)]).to_bytes()
    with pytest.raises(DecodeError, match=r"Leaf\.text: the bytes do not hold it"):
        DocumentArray[Leaf].from_bytes(data)
    with pytest.raises(DecodeError, match=r"Leaf\.text"):
        Leaf.from_bytes(Seed(x=1).to_bytes())
    with pytest.raises(DecodeError, match=r"Leaf\.text"):
        Leaf.from_bytes(dynamic(Leaf, id="x").to_bytes())


class Weights(BaseDocument):
    values: TorchTensor


@pytest.mark.needs("torch")
def test_tensor_without_data_raises_an_error_with_the_field() -> None:
    import torch

    docs = DocumentArray[Weights]([Weights(values=torch.ones(2, device="meta"))] * 2)
    for written in (docs.to_bytes, docs.stack().to_bytes, docs[0].to_bytes):
        with pytest.raises(EncodeError, match=r"Weights\.values: .* torch tensor cannot be written: .*meta"):
            written()
