"""Hypothesis strategies for documents with every kind of field, with numpy and pydantic only."""

from __future__ import annotations

from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum
from pathlib import PurePosixPath
from typing import Any, Generic, TypeVar
from uuid import UUID

import numpy as np
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from quire import BaseDocument, DocumentArray
from quire.typing import AnyTensor, NdArray, float32, uint8

laws = settings(
    max_examples=40,
    deadline=None,
    database=None,
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)
"""Settings of property tests: a few examples, no deadline, no database."""

T = TypeVar("T")


class Color(Enum):
    RED = "red"
    BLUE = 2


class Leaf(BaseDocument):
    text: str
    number: int = 0
    weight: float | None = None
    flag: bool = False
    vector: NdArray[float32, 3] = [0.0, 0.0, 0.0]


class Twig(Leaf):
    """A subclass with more fields."""

    bark: dict[str, int] = {}
    ring: NdArray | None = None


class Seed(BaseDocument, extra="allow"):
    """A document with extra fields."""

    size: complex = 0j
    _hidden: int = 0


class Branch(BaseDocument):
    color: Color = Color.RED
    when: datetime | None = None
    day: date | None = None
    span: timedelta = timedelta()
    price: Decimal | None = None
    key: UUID | None = None
    path: PurePosixPath = PurePosixPath()
    blob: bytes = b""
    words: list[str] = []
    tags: dict[int, Any] = {}
    either: Leaf | Seed | int | None = None
    leaf: Leaf
    spare: Leaf | None = None
    leaves: DocumentArray[Leaf] = []
    more: DocumentArray[Leaf] | None = None
    image: NdArray[uint8, 2, 3] | None = None
    anything: AnyTensor | None = None


class Tree(BaseDocument):
    """Two levels of nesting, and tensors of any shape."""

    branch: Branch
    branches: DocumentArray[Branch] = []
    shaped: NdArray[float32] | None = None


class Node(BaseDocument):
    name: str = ""
    parent: Node | None = None
    children: DocumentArray[Node] = []


class Box(BaseDocument, Generic[T]):
    item: T


class Crate(BaseDocument, Generic[T]):
    items: DocumentArray[T]


def tensors(dtype: st.SearchStrategy[Any] | Any, shape: Any) -> st.SearchStrategy[Any]:
    """Generate numpy arrays, including NaN and infinities."""
    return hnp.arrays(dtype, shape)


any_dtypes = st.sampled_from(
    ["bool", "uint8", "int16", "int64", "float16", "float32", "float64", "complex64", "<U2", ">f4"]
)
any_shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)
integers = st.integers() | st.integers(2**62, 2**65)
datetimes = st.datetimes(timezones=st.just(timezone.utc) | st.none())
plain_values = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.binary(max_size=3)


def leaves() -> st.SearchStrategy[Leaf]:
    """Generate leaves, some of them of the subclass."""
    fields = {
        "text": st.text(max_size=4),
        "number": integers,
        "weight": st.none() | st.floats(),
        "flag": st.booleans(),
        "vector": tensors(np.float32, 3),
    }
    bark = st.dictionaries(st.text(max_size=2), st.integers(), max_size=2)
    twigs = st.builds(Twig, **fields, bark=bark, ring=st.none() | tensors(np.float64, any_shapes))
    return st.builds(Leaf, **fields) | twigs


def seeds() -> st.SearchStrategy[Seed]:
    """Generate seeds with extra and private values."""

    def make(size: complex, hidden: int, extra: dict[str, Any]) -> Seed:
        seed = Seed(size=size, **extra)
        seed._hidden = hidden
        return seed

    extra = st.dictionaries(st.sampled_from(["a", "b"]), plain_values)
    return st.builds(make, st.complex_numbers(), st.integers(), extra)


def arrays(documents: st.SearchStrategy[Any], document_type: type[Any], max_size: int = 3) -> st.SearchStrategy[Any]:
    """Generate arrays of documents, including empty ones."""
    return st.lists(documents, max_size=max_size).map(DocumentArray[document_type])


def branches() -> st.SearchStrategy[Branch]:
    """Generate branches with every kind of field."""
    return st.builds(
        Branch,
        color=st.sampled_from(Color),
        when=st.none() | datetimes,
        day=st.none() | st.dates(),
        span=st.timedeltas(),
        price=st.none() | st.decimals(allow_nan=False, allow_infinity=False),
        key=st.none() | st.uuids(),
        path=st.sampled_from(["a", "a/b", "/"]),
        blob=st.binary(max_size=3),
        words=st.lists(st.text(max_size=2), max_size=2),
        tags=st.dictionaries(st.integers(), plain_values, max_size=2),
        either=st.none() | st.integers() | leaves() | seeds(),
        leaf=leaves(),
        spare=st.none() | leaves(),
        leaves=arrays(leaves(), Leaf),
        more=st.none() | arrays(leaves(), Leaf),
        image=st.none() | tensors(np.uint8, (2, 3)),
        anything=st.none() | tensors(any_dtypes, 2),
    )


def trees(rank: int | None = None) -> st.SearchStrategy[Tree]:
    """Generate trees whose `shaped` tensors have any shape, or any shape with `rank` dimensions."""
    shapes = any_shapes if rank is None else hnp.array_shapes(min_dims=rank, max_dims=rank, min_side=0, max_side=3)
    shaped = st.none() | tensors(np.float32, shapes)
    return st.builds(Tree, branch=branches(), branches=arrays(branches(), Branch, 2), shaped=shaped)


def nodes() -> st.SearchStrategy[Node]:
    """Generate recursive documents."""
    ends = st.builds(Node, name=st.text(max_size=3))
    return st.recursive(
        ends,
        lambda inner: st.builds(
            Node, name=st.text(max_size=3), parent=st.none() | inner, children=arrays(inner, Node, 2)
        ),
        max_leaves=5,
    )


def orders(length: int) -> st.SearchStrategy[list[int]]:
    """Generate lists of positions, also negative and repeated ones."""
    return st.lists(st.integers(-length, length - 1), max_size=6) if length else st.just([])


def same_types(a: Any, b: Any) -> bool:
    """Return whether two equal values also have the same types, such as bool and not int, tuple and not list."""
    if type(a) is not type(b):
        return False
    if isinstance(a, BaseDocument):
        return same_types(a.__dict__, b.__dict__) and same_types(a.__pydantic_extra__, b.__pydantic_extra__)
    if isinstance(a, dict):
        return all(same_types(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple, DocumentArray)):
        return all(same_types(x, y) for x, y in zip(a, b, strict=True))
    return True
