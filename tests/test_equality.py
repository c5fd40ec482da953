"""Equality of documents and of what they hold: by value, ids aside, NaN equal to NaN."""

from __future__ import annotations

from decimal import Decimal
from functools import cached_property
from typing import Any

import numpy as np
import pytest

from quire import BaseDocument, DocumentArray
from quire._equality import equal_values
from quire.typing import AnyTensor, NdArray

NAN = float("nan")


class Thesis(BaseDocument):
    title: str = ""
    vector: NdArray | None = None


class Other(BaseDocument):
    title: str = ""
    vector: NdArray | None = None


class Student(BaseDocument):
    score: float = 0.0
    thesis: Thesis = Thesis()
    papers: DocumentArray[Thesis] = []
    tags: dict[str, Any] = {}
    tensor: AnyTensor | None = None


def test_equality_ignores_ids() -> None:
    a, b = Thesis(title="a"), Thesis(title="a")
    assert a.id != b.id
    assert a == b
    assert not a.identical(b)
    assert a.identical(Thesis(id=a.id, title="a"))
    assert a != Thesis(title="b")


def test_equality_ignores_ids_of_nested_documents() -> None:
    inner = Thesis(title="a")
    a = Student(id="1", thesis=inner, papers=[inner], tags={"t": [inner]})
    b = Student(id="1", thesis=Thesis(title="a"), papers=[Thesis(title="a")], tags={"t": [Thesis(title="a")]})
    assert a == b
    assert not a.identical(b)
    for name in ("thesis", "papers", "tags"):
        assert not a.identical(Student(**{**a.__dict__, name: getattr(b, name)}))
    assert a.identical(Student(**a.__dict__))


def test_equality_compares_the_class() -> None:
    class Long(Thesis):
        pass

    assert Thesis(title="a") != Other(title="a")
    assert Thesis(title="a") != Long(title="a")
    assert Thesis() != "a"
    assert Thesis() != None  # noqa: E711
    assert Thesis().__eq__(3) is NotImplemented


def test_documents_are_not_hashable() -> None:
    with pytest.raises(TypeError):
        hash(Thesis())
    with pytest.raises(TypeError):
        hash(DocumentArray())


def test_equality_compares_tensors_by_value_and_dtype() -> None:
    a = Thesis(vector=np.array([1.0, NAN]))
    assert a == Thesis(vector=np.array([1.0, NAN]))
    assert a != Thesis(vector=np.array([1.0, 2.0]))
    assert a != Thesis(vector=np.array([1.0, NAN], np.float32))
    assert a != Thesis(vector=np.array([[1.0, NAN]]))
    assert a != Thesis()
    assert Thesis(vector=np.zeros((0, 2))) != Thesis(vector=np.zeros((0, 3)))


@pytest.mark.needs("torch")
def test_tensors_of_two_frameworks_are_not_equal() -> None:
    import torch

    a = Student(tensor=torch.ones(2))
    assert a == Student(tensor=torch.ones(2))
    assert a != Student(tensor=np.ones(2, np.float32))
    assert Student(tensor=np.ones(2, np.float32)) != a
    assert not equal_values(1.0, torch.tensor(1.0))
    assert not equal_values(torch.tensor(1.0), 1.0)


EQUAL = [
    (NAN, float("nan")),
    (complex(NAN, 1), complex(NAN, 1)),
    (Decimal("NaN"), Decimal("NaN")),
    (1, 1.0),
    (1.0, 1),
    ([1, [NAN]], [1, [NAN]]),
    ((1,), (1,)),
    ({"a": np.ones(2)}, {"a": np.ones(2)}),
    ({"b": 1, "a": 2}, {"a": 2, "b": 1}),
    ({1, 2}, {2, 1}),
    (None, None),
    ([Thesis(title="a")], [Thesis(title="a")]),
]
DIFFERENT = [
    (NAN, 1.0),
    (NAN, None),
    (NAN, Decimal("NaN")),
    (1.0, "1.0"),
    ([1], (1,)),
    ([1], [1, 2]),
    ({"a": 1}, {"b": 1}),
    ({"a": 1}, [1]),
    (np.ones(2), [1.0, 1.0]),
    (np.ones(1), 1.0),
    ([np.ones(2)], [np.zeros(2)]),
    (Thesis(), {}),
]


@pytest.mark.parametrize(("a", "b"), EQUAL)
def test_values_are_equal(a: Any, b: Any) -> None:
    assert equal_values(a, b)
    assert equal_values(b, a)


@pytest.mark.parametrize(("a", "b"), DIFFERENT)
def test_values_differ(a: Any, b: Any) -> None:
    assert not equal_values(a, b)
    assert not equal_values(b, a)


def test_equality_of_arrays_compares_class_and_documents() -> None:
    a = DocumentArray[Thesis]([Thesis(title="a")])
    assert a == DocumentArray[Thesis]([Thesis(title="a")])
    assert not a.identical(DocumentArray[Thesis]([Thesis(title="a")]))
    assert a.identical(a.copy())
    assert a != DocumentArray[Thesis]()
    assert DocumentArray[Thesis]() != DocumentArray[Other]()
    assert a != [Thesis(title="a")]


def test_equality_ignores_cached_properties() -> None:
    class Lazy(BaseDocument):
        base: int

        @cached_property
        def double(self) -> int:
            return 2 * self.base

    a, b = Lazy(base=1), Lazy(base=1)
    assert a.double == 2
    assert a == b
    assert b == a


def test_equality_compares_extra_values() -> None:
    class Loose(BaseDocument, extra="allow"):
        pass

    assert Loose(a=1) == Loose(a=1)
    assert Loose(a=1) != Loose(a=2)
    assert Loose(a=1) != Loose()
    assert Loose(a=np.ones(2)) == Loose(a=np.ones(2))


def test_equality_of_documents_with_missing_fields() -> None:
    assert Thesis.model_construct(title="a") == Thesis(title="a")
    partial = Thesis.model_construct()
    del partial.__dict__["title"]
    assert partial != Thesis()
    assert Thesis() != partial
