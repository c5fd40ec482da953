"""Documents come back as they were: nested, recursive, of subclasses, generic, with aliases, extras, or no id."""

# ruff: noqa: DTZ001 - datetimes without a zone are values too

from __future__ import annotations

import inspect
import typing
from datetime import datetime
from functools import cached_property
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar

import numpy as np
import pytest
from hypothesis import given
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, PrivateAttr, computed_field

from quire import BaseDocument, Document, DocumentArray, DocumentBatch, Image, Text
from quire.errors import DecodeError, OptionError, QuireError
from quire.typing import ID, AnyTensor, NdArray, float32
from tests.codec.round_trips import ROUND_TRIPS, assert_round_trips, dynamic, exact
from tests.strategies import (
    Box,
    Branch,
    Crate,
    Leaf,
    Node,
    Seed,
    Tree,
    Twig,
    branches,
    laws,
    leaves,
    nodes,
    seeds,
    trees,
)

T = TypeVar("T")


@given(leaves() | branches() | trees() | nodes() | seeds())
@laws
def test_every_document_round_trips_in_every_form(document: Any) -> None:
    assert_round_trips(document)


class Holder(BaseDocument):
    """Documents in every kind of field."""

    one: Leaf
    maybe: Leaf | None = None
    either: Leaf | Seed | None = None
    every: DocumentArray[Leaf] = []
    open_one: BaseDocument | None = None
    open_every: DocumentArray = []  # type: ignore[type-arg]
    anything: Any = None
    listed: list[Leaf] = []
    named: dict[str, Leaf] = {}
    pair: tuple[Leaf, Seed] | None = None
    mixed: list[Leaf | Seed | int] = []
    plain: Plain | None = None


class Plain(BaseModel):
    """No document, but holds one."""

    leaf: Leaf
    leaves: list[Leaf] = []


Holder.model_rebuild()


@pytest.mark.parametrize(
    "leaf", [Leaf(text="a"), Twig(text="b", bark={"c": 1}, ring=np.ones((2, 0)))], ids=["class", "subclass"]
)
@pytest.mark.parametrize(
    "field", ["maybe", "either", "open_one", "anything", "every", "open_every", "listed", "named", "pair", "mixed"]
)
def test_documents_in_every_kind_of_field_round_trip(leaf: Leaf, field: str) -> None:
    value: Any = leaf
    if field in ("every", "open_every"):
        value = (
            DocumentArray[Leaf]([leaf, Leaf(text="z"), leaf]) if field == "every" else DocumentArray([leaf, Seed(x=1)])
        )
    elif field in ("listed", "mixed"):
        value = [leaf, leaf]
    elif field == "named":
        value = {"k": leaf}
    elif field == "pair":
        value = (leaf, Seed(size=1j, more=[1]))
    assert_round_trips(Holder(one=leaf, **{field: value}))


def test_documents_inside_plain_models_round_trip() -> None:
    assert_round_trips(
        Holder(one=Leaf(text="a"), plain=Plain(leaf=Twig(text="b"), leaves=[Leaf(text="c"), Twig(text="d")]))
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda: DocumentArray[Leaf]([Leaf(text="a")]),
        DocumentArray[Leaf],
        DocumentArray,
        lambda: [DocumentArray[Twig]([Twig(text="a")]), Leaf(text="b")],
        lambda: {1: Leaf(text="a"), "x": [Seed(y=np.ones(2))]},
    ],
    ids=range(5),
)
def test_arrays_and_documents_in_a_field_of_any_round_trip(make: Any) -> None:
    assert_round_trips(Holder(one=Leaf(text="a"), anything=make()))


def test_rows_of_subclasses_round_trip() -> None:
    class Branchlet(Twig):
        tips: int = 3

    docs = DocumentArray[Leaf](
        [Leaf(text="a"), Twig(text="b", bark={"x": 1}), Branchlet(text="c", ring=np.eye(2), tips=9)]
    )
    for array_type in (DocumentArray[Leaf], DocumentArray):
        got = array_type.from_bytes(docs.to_bytes())
        assert exact(got, docs)
        assert [type(doc) for doc in got] == [Leaf, Twig, Branchlet]
        assert exact(array_type.from_protobuf(docs.to_protobuf()), docs)
    assert exact(DocumentBatch[Leaf].from_bytes(docs.stack().to_bytes()).unstack(), docs)


def test_array_of_a_subclass_rejects_documents_of_its_base() -> None:
    docs = DocumentArray[Leaf]([Leaf(text="a")])
    got = DocumentArray[Twig].from_bytes(docs.to_bytes())
    assert [type(doc) for doc in got] == [Twig]
    assert got[0].bark == {}


def test_rows_of_unrelated_classes_round_trip_in_an_untyped_array() -> None:
    docs = DocumentArray([Leaf(text="a"), Seed(b=1), Node(name="n"), Box[int](item=3)])
    assert exact(DocumentArray.from_bytes(docs.to_bytes()), docs)
    assert exact(DocumentArray.from_protobuf(docs.to_protobuf()), docs)


# --- generic, recursive, with a tag


@pytest.mark.parametrize(
    "document",
    [
        Box[int](item=2**70),
        Box[str](item="a"),
        Box[Leaf](item=Twig(text="a")),
        Box[Box[int]](item=Box[int](item=1)),
        Box[DocumentArray[Leaf]](item=DocumentArray[Leaf]([Leaf(text="x")])),
        Box[NdArray[float32, 2]](item=np.ones(2, np.float32)),
        Box(item=datetime(2024, 1, 1)),
        Crate[Leaf](items=DocumentArray[Leaf]([Leaf(text="a")])),
        Crate[Box[int]](items=DocumentArray[Box[int]]([Box[int](item=1)])),
    ],
    ids=lambda document: type(document).__name__,
)
def test_generic_documents_round_trip(document: Any) -> None:
    assert_round_trips(document)


def test_deep_recursive_documents_round_trip() -> None:
    node = Node(name="end")
    for depth in range(30):
        node = Node(name=str(depth), parent=node)
    assert exact(Node.from_bytes(node.to_bytes()), node)
    docs = DocumentArray[Node]([node, Node()])
    assert exact(DocumentArray[Node].from_bytes(docs.to_bytes()), docs)


class Left(BaseDocument):
    side: Literal["left"] = "left"
    x: int = 0


class Right(BaseDocument):
    side: Literal["right"] = "right"
    x: int = 0


class Same(BaseDocument):
    x: int = 0


class Sides(BaseDocument):
    tagged: Annotated[Left | Right, Field(discriminator="side")] = Left()
    untagged: Same | Left | None = None
    either: list[Left | Right] = []
    arrays: DocumentArray[Left] | DocumentArray[Right] | None = None


@pytest.mark.parametrize(
    "document",
    [
        Sides(tagged=Right(x=1)),
        Sides(untagged=Left(x=1)),
        Sides(untagged=Same(x=1)),
        Sides(either=[Right(), Left()]),
        Sides(arrays=DocumentArray[Right]([Right(x=2)])),
        Sides(arrays=DocumentArray[Right]()),
    ],
    ids=range(6),
)
def test_unions_of_documents_keep_the_class(document: Any) -> None:
    assert_round_trips(document)


# --- aliases, extras, no id, defaults


class Renamed(BaseDocument):
    model_config = ConfigDict(populate_by_name=False)

    title: str = Field(alias="Title")
    size: int = Field(0, validation_alias=AliasChoices("dimension", "extent"))
    note: str = Field("", serialization_alias="remark")


class EitherName(BaseDocument, populate_by_name=True):
    title: str = Field(alias="Title")


def test_fields_with_aliases_round_trip() -> None:
    assert_round_trips(Renamed(Title="a", dimension=3, note="x"))
    assert_round_trips(EitherName(Title="a"))
    assert_round_trips(EitherName(title="a"))
    assert_round_trips(Box[Renamed](item=Renamed(Title="a")))


class WithoutId(BaseDocument):
    id: ClassVar[None] = None  # type: ignore[assignment,misc]
    x: int = 0


class OwnId(BaseDocument):
    id: int | None = None  # type: ignore[assignment]
    x: int = 0


class Empty(BaseDocument):
    id: ClassVar[None] = None  # type: ignore[assignment,misc]


@pytest.mark.parametrize(
    "document",
    [
        WithoutId(x=1),
        OwnId(id=2**70, x=1),
        OwnId(x=1),
        Empty(),
        Box[WithoutId](item=WithoutId()),
        BaseDocument(),
        BaseDocument(id="x"),
    ],
)
def test_documents_without_an_id_or_with_another_type_round_trip(document: Any) -> None:
    assert_round_trips(document)


def test_extra_values_round_trip() -> None:
    assert_round_trips(Seed(a=1, b=[1, {2: Leaf(text="x")}], c=np.ones(3), d=None))
    assert_round_trips(Seed())
    docs = DocumentArray[Seed]([Seed(a=1), Seed(b=2), Seed()])
    assert exact(DocumentArray[Seed].from_bytes(docs.to_bytes()), docs)
    assert exact(DocumentBatch[Seed].from_bytes(docs.stack().to_bytes()).unstack(), docs)


Typed: Any = type(BaseDocument)(
    "Typed",
    (BaseDocument,),
    {
        "__module__": __name__,
        "__annotations__": {"__pydantic_extra__": typing.Dict[str, int]},  # noqa: UP006 - pydantic 2.6 wants no text
        "model_config": ConfigDict(extra="allow"),
    },
)


def test_typed_extra_values_round_trip() -> None:
    assert_round_trips(Typed(a=2**70))
    with pytest.raises(DecodeError, match=r"Typed\.a"):
        Typed.from_bytes(dynamic(Typed, id="1", a="x").to_bytes())


class Forbidding(BaseDocument, extra="forbid"):
    x: int


class Frozen(BaseDocument, frozen=True):
    x: int
    y: list[int] = []


class Computed(BaseDocument):
    x: int
    _secret: int = PrivateAttr(3)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def double(self) -> int:
        return 2 * self.x


def test_pydantic_configurations_are_respected() -> None:
    assert_round_trips(Forbidding(x=1))
    assert_round_trips(Frozen(x=1, y=[2]))
    assert_round_trips(Computed(x=1))


def test_predefined_documents_round_trip() -> None:
    assert_round_trips(Text(text="a", embedding=np.ones(2, np.float32)))
    assert_round_trips(Image(tensor=np.ones((2, 2, 3), np.uint8)))
    assert_round_trips(Document(text="a"))


def test_fields_named_like_methods_round_trip() -> None:
    class Odd(BaseDocument):
        to_bytes: int = 0  # type: ignore[assignment]
        copy: str = ""  # type: ignore[assignment]
        document_schema: float = 0.5  # type: ignore[assignment]

    odd = Odd(to_bytes=1, copy="x", document_schema=2.0)
    docs = DocumentArray[Odd]([odd])
    with_methods = BaseDocument.to_bytes(odd)
    assert exact(Odd.from_bytes(with_methods), odd)
    assert exact(DocumentArray[Odd].from_bytes(docs.to_bytes()), docs)


def test_one_tensor_in_two_fields_is_written_twice() -> None:
    class Two(BaseDocument):
        a: NdArray
        b: AnyTensor

    array = np.arange(3.0)
    got = Two.from_bytes(Two(a=array, b=array).to_bytes())
    got.a[0] = 9
    assert got.b[0] == 0


def test_decoded_values_are_writable_and_independent_of_the_bytes() -> None:
    class Vector(BaseDocument):
        a: NdArray

    for size in (3, 10_000):
        data = Vector(a=np.zeros(size)).to_bytes()
        got = Vector.from_bytes(data)
        got.a[0] = 1
        assert Vector.from_bytes(data).a[0] == 0
        batch_data = DocumentArray[Vector]([Vector(a=np.zeros(size))]).stack().to_bytes()
        batch = DocumentBatch[Vector].from_bytes(batch_data)
        batch.a[0, 0] = 1
        assert DocumentBatch[Vector].from_bytes(batch_data).a[0, 0] == 0


def test_ids_round_trip_as_ids() -> None:
    leaf = Leaf(text="a")
    for way in ROUND_TRIPS.values():
        got = way(leaf)
        assert got.id == leaf.id
        assert type(got.id) is type(leaf.id)
    assert type(ID("x")) is type(leaf.id) or isinstance(leaf.id, str)


# --- both halves of a pair


PAIRS = [("to_bytes", "from_bytes"), ("to_base64", "from_base64"), ("save_binary", "load_binary")]


@pytest.mark.parametrize("cls", [BaseDocument, DocumentArray, DocumentBatch])
@pytest.mark.parametrize("pair", PAIRS)
def test_readers_and_writers_have_the_same_defaults(cls: Any, pair: tuple[str, str]) -> None:
    if cls is BaseDocument and pair[0] == "save_binary":
        return
    out, into = (inspect.signature(getattr(cls, name)).parameters for name in pair)
    for name in ("protocol", "compress"):
        assert out[name].default == into[name].default
        assert out[name].kind == into[name].kind
        assert list(out)[1:].index(name) == list(into)[1:].index(name) or "file" in out


@pytest.mark.parametrize("protocol", [None, "protobuf", "pickle"])
@pytest.mark.parametrize("compress", [None, "gzip", "bz2", "xz", "zlib"])
def test_readers_detect_protocol_and_compression(protocol: str | None, compress: str | None) -> None:
    leaf = Leaf(text="a" * 100)
    docs = DocumentArray[Leaf]([leaf])
    for value in (leaf, docs, docs.stack()):
        try:
            data = value.to_bytes(protocol, compress)
        except QuireError as error:
            assert "compress" in str(error) or "zlib" in str(error)
            continue
        for asked in ((protocol, compress), (None, None)):
            got = type(value).from_bytes(data, *asked, allow_pickle=protocol == "pickle")
            assert got.identical(value)
        text = value.to_base64(protocol, compress)
        assert type(value).from_base64(text, allow_pickle=protocol == "pickle").identical(value)


class _Pair(BaseDocument, Generic[T]):
    first: T
    second: T


def test_generic_document_of_a_local_class_round_trips() -> None:
    class Local(BaseDocument):
        x: int = 1

    assert_round_trips(_Pair[Local](first=Local(), second=Local(x=2)))
    assert_round_trips(Tree(branch=Branch(leaf=Leaf(text="a"))))


class Counting(BaseDocument):
    """With private attributes and a cached property, which are not sent."""

    x: int = 1
    _seen: list[int] = PrivateAttr(default_factory=list)
    _unset: int

    @cached_property
    def double(self) -> object:
        return object()


class CountingMore(Counting):
    y: int = 2


def test_private_attributes_are_not_written() -> None:
    document = Counting()
    document._seen.append(1)
    for way in ROUND_TRIPS.values():
        got = way(document)
        got._seen.append(5)
        assert got._seen[-1] == 5
        assert not hasattr(got, "_unset")
    docs = DocumentArray[Counting].from_bytes(DocumentArray[Counting]([Counting(), CountingMore()]).to_bytes())
    docs[0]._seen.append(1)
    assert docs[1]._seen == []


def test_cached_properties_are_not_written() -> None:
    docs = DocumentArray[Counting]([Counting(id="1"), CountingMore(id="2", y=3)])
    assert all(doc.double for doc in docs)
    for data in (docs.to_bytes(), docs.to_protobuf().SerializeToString(), docs.stack().to_bytes()):
        got = DocumentArray[Counting].from_bytes(data, unknown="error")
        assert exact(list(got), [Counting(id="1"), CountingMore(id="2", y=3)])


class Album(DocumentArray[T]):
    """A class of arrays of its own."""


class Shelf(BaseDocument):
    album: Album[Leaf]
    plain: DocumentArray[Leaf] | None = None


def test_subclasses_of_arrays_round_trip() -> None:
    album = Album[Leaf]([Leaf(text="a")])
    assert_round_trips(Shelf(album=album, plain=DocumentArray[Leaf]()))
    assert type(Album[Leaf].from_bytes(album.to_bytes())) is Album[Leaf]


class StrictOne(BaseDocument, strict=True):
    number: int = 1
    real: float = 0.5
    items: set[int] = {1}
    pair: tuple[int, str] = (1, "a")
    plain: Plain | None = None
    leaf: Leaf = Leaf(text="a")
    vector: NdArray = np.ones(2)


def test_strict_documents_round_trip() -> None:
    assert_round_trips(StrictOne(plain=Plain(leaf=Leaf(text="b"))))


@pytest.mark.parametrize(
    "data", [None, "text", 5, np.zeros((4, 4), np.uint8)[:, ::2]], ids=["None", "str", "int", "gaps"]
)
def test_from_bytes_rejects_values_that_are_no_bytes(data: Any) -> None:
    for form in (Text, DocumentArray[Text], DocumentBatch[Text]):
        with pytest.raises(OptionError, match=f"expected bytes, got {type(data).__name__}"):
            form.from_bytes(data)
