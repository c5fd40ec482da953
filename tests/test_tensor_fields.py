"""Documents with tensor fields: dimensions that fields share, assignment, and tensors of every framework."""

from __future__ import annotations

import copy
import pickle
import warnings
from importlib import import_module
from typing import Annotated, Any, ClassVar, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import pytest
from pydantic import Field, ValidationError

from quire import BaseDocument, DocumentArray
from quire.schema import FieldKind
from quire.tensors import framework_of
from quire.typing import AnyTensor, DType, NdArray, Shape, float32, int64


class Pairs(BaseDocument):
    """Named dimensions that appear in several fields."""

    inputs: NdArray[float32, "n", "d"]
    labels: NdArray[int64, "n"]
    weights: NdArray["d"] | None = None
    mask: Annotated[np.ndarray | None, Shape("n")] = None
    other: NdArray["k"] | None = None


def _pairs(n: int = 3, d: int = 2, **more: Any) -> dict[str, Any]:
    return {"inputs": np.zeros((n, d), np.float32), "labels": np.zeros(n, np.int64), **more}


def test_equal_shared_dimensions_are_accepted() -> None:
    pairs = Pairs(**_pairs(weights=np.zeros(2), mask=np.zeros(3), other=np.zeros(9)))
    assert pairs.inputs.shape == (3, 2)
    pairs.mask = None
    pairs.other = np.zeros(1)
    pairs.labels = np.ones(3, np.int64)
    assert pairs.labels.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("changes", "expected", "got"),
    [
        ({"labels": np.zeros(4, np.int64)}, "labels of shape (n,) with n=3", "int64 (4,) of numpy"),
        ({"weights": np.zeros(3)}, "weights of shape (d,) with d=2", "float64 (3,) of numpy"),
        ({"mask": np.zeros(2)}, "mask of shape (n,) with n=3", "float64 (2,) of numpy"),
    ],
)
def test_different_shared_dimensions_are_rejected(changes: dict[str, Any], expected: str, got: str) -> None:
    message = f"expected {expected} (from another field), got {got}"
    with pytest.raises(ValidationError) as caught:
        Pairs(**{**_pairs(), **changes})
    assert caught.value.errors()[0]["msg"] == message
    assert caught.value.errors()[0]["ctx"] == {"expected": expected, "got": got}
    with pytest.raises(ValidationError):
        Pairs.model_validate({**_pairs(), **changes})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("labels", np.zeros(4, np.int64)),  # fits its own type, and not the others
        ("inputs", np.zeros((4, 2), np.float32)),
        ("weights", np.zeros(5)),
        ("labels", np.zeros(3)),  # does not fit its own type
        ("inputs", "text"),
    ],
)
def test_failed_assignment_changes_nothing(field: str, value: Any) -> None:
    pairs = Pairs(**_pairs(weights=np.zeros(2)))
    before, chosen = dict(pairs.__dict__), set(pairs.model_fields_set)
    with pytest.raises(ValidationError):
        setattr(pairs, field, value)
    assert all(pairs.__dict__[name] is kept for name, kept in before.items())
    assert pairs.model_fields_set == chosen
    with pytest.raises(ValidationError):
        pairs.update({"other": np.zeros(1), field: value})
    assert pairs.other is None
    assert all(pairs.__dict__[name] is kept for name, kept in before.items())


def test_shared_dimensions_are_checked_in_json_subclasses_and_nested_documents() -> None:
    class More(Pairs):
        extra: NdArray["d", ...] | None = None

    class Outer(BaseDocument):
        pairs: Pairs
        labels: NdArray["n"] | None = None  # of this document: its n is its own

    More(**_pairs(extra=np.zeros((2, 7))))
    with pytest.raises(ValidationError, match=r"extra of shape \(d, ...\) with d=2"):
        More(**_pairs(extra=np.zeros((3, 7))))
    assert Outer(pairs=_pairs(), labels=np.zeros(99)).labels.shape == (99,)
    with pytest.raises(ValidationError) as caught:
        Outer(pairs={**_pairs(), "labels": np.zeros(1, np.int64)})
    assert caught.value.errors()[0]["loc"] == ("pairs",)
    text = Pairs(**_pairs()).model_dump_json().replace('"shape":[3],"data":[0,0,0]', '"shape":[1],"data":[0]')
    with pytest.raises(ValidationError, match=r"labels of shape \(n,\) with n=3 \(from another field\)"):
        Pairs.model_validate_json(text)


def test_fields_of_a_document_keep_their_kind() -> None:
    class Kinds(BaseDocument):
        any_tensor: AnyTensor
        maybe: NdArray[3] | None = None
        annotated: Annotated[np.ndarray, Shape(3, "n"), DType("float32")] | None = None
        described: Annotated[NdArray[2], Field(description="two")] | None = None
        many: list[NdArray] = []
        either: NdArray[1] | str = "none"
        constant: ClassVar[np.ndarray] = np.zeros(1)

    fields = Kinds.document_schema().by_name
    assert [fields[name].kind for name in ("any_tensor", "maybe", "annotated", "described")] == [FieldKind.TENSOR] * 4
    assert fields["annotated"].spec == NdArray[float32, 3, "n"].spec
    assert fields["maybe"].nullable
    assert fields["many"].items[0].type is NdArray
    assert fields["either"].kind is FieldKind.UNION
    assert "constant" not in fields
    assert str(Kinds.document_schema()).startswith("Kinds(id: str, any_tensor: AnyTensor, maybe: NdArray[3] | None")


T = TypeVar("T")


class Box(BaseDocument, Generic[T]):
    content: T


def test_generic_documents_accept_tensor_types() -> None:
    box = Box[NdArray[float32, 2]](content=[1, 2])
    assert box.content.dtype == np.float32
    assert pickle.loads(pickle.dumps(box)) == box
    with pytest.raises(ValidationError, match=r"expected NdArray float32 \(2,\)"):
        Box[NdArray[float32, 2]](content=[1, 2, 3])


class Left(BaseDocument):
    """Refers to a document that refers back."""

    right: Right | None = None
    rights: list[Right] = []
    vectors: list[npt.NDArray[np.float32]] = []


class Right(BaseDocument):
    left: Left | None = None
    lefts: list[Left | NdArray] = []
    vector: npt.NDArray[np.float32] | None = None


def test_documents_that_refer_to_each_other_check_their_tensors() -> None:
    left = Left(right={"left": {"vectors": [[1, 2]]}, "lefts": [Left(), np.zeros(2)]}, rights=[Right(vector=[1])])
    assert left.right.left.vectors[0].dtype == np.float32
    assert Left.model_validate_json(left.model_dump_json()) == left
    with pytest.raises(ValidationError) as caught:
        Left(right={"left": {"vectors": [np.zeros(2)]}})
    assert caught.value.errors()[0]["loc"] == ("right", "left", "vectors", 0)


def test_tensors_in_arrays_of_documents_are_checked_with_their_path() -> None:
    class Group(BaseDocument):
        members: DocumentArray[Pairs]

    with pytest.raises(ValidationError) as caught:
        Group(members=[_pairs(), {**_pairs(), "inputs": np.zeros(3, np.float32)}])
    assert "expected NdArray float32 (n, d), got float32 (3,) of numpy" in str(caught.value)
    assert "1" in str(caught.value)


FRAMEWORKS = ["torch", "tensorflow", "jax", "paddle", "scipy"]


@pytest.fixture(params=["numpy", *(pytest.param(name, marks=pytest.mark.needs(name)) for name in FRAMEWORKS)])
def tensor(request: pytest.FixtureRequest) -> Any:
    """A small tensor of each framework, of float32 and shape (2, 2)."""
    ones = np.ones((2, 2), np.float32)
    make = {
        "numpy": lambda: ones,
        "torch": lambda: import_module("torch").from_numpy(ones),
        "tensorflow": lambda: import_module("tensorflow").constant(ones),
        "jax": lambda: import_module("jax.numpy").asarray(ones),
        "paddle": lambda: import_module("paddle").to_tensor(ones),
        "scipy": lambda: import_module("scipy.sparse").csr_array(ones),
    }[request.param]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # paddle warns when it is imported
        return make()


class Holder(BaseDocument):
    x: AnyTensor[float32, 2, "n"]
    y: AnyTensor["n"] | None = None


def test_any_tensor_keeps_the_object(tensor: Any) -> None:
    holder = Holder(x=tensor, y=[1, 2])
    assert holder.x is tensor
    holder.x = tensor
    assert holder.x is tensor
    for again in (
        pickle.loads(pickle.dumps(holder)),
        copy.deepcopy(holder),
        holder.model_copy(deep=True),
        Holder.model_validate_json(holder.model_dump_json()),
    ):
        assert again.identical(holder)
        assert type(again.x) is type(tensor)
    assert copy.copy(holder).x is tensor
    assert holder.model_copy(update={"y": None}).x is tensor
    with pytest.raises(ValidationError, match=r"expected y of shape \(n,\) with n=2 \(from another field\)"):
        Holder(x=tensor, y=[1, 2, 3])
    with pytest.raises(ValidationError, match=r"expected AnyTensor any dtype \(n,\), got float32 \(2, 2\)"):
        Holder(x=tensor, y=tensor)


def test_tensors_of_two_frameworks_are_not_equal(tensor: Any) -> None:
    others = [np.ones((2, 2), np.float32)] if framework_of(tensor).name != "numpy" else []
    for other in others:
        assert Holder(x=tensor) != Holder(x=other)
        assert Holder(x=other) != Holder(x=tensor)
    assert Holder(x=tensor) == Holder(x=copy.deepcopy(tensor))


def test_repr_of_a_document_abbreviates_tensors(tensor: Any) -> None:
    text = repr(Holder(id="a", x=tensor))
    assert "float32" in text
    assert "2, 2" in text
    assert len(text) < 150


def test_default_tensor_is_validated_and_copied() -> None:
    class Defaults(BaseDocument):
        a: NdArray[float32, 2] = np.zeros(2, np.float32)
        b: NdArray[float32, 2] = Field(default_factory=lambda: np.ones(2, np.float32))
        c: list[NdArray] = [np.zeros(1)]

    class Wrong(BaseDocument):
        a: NdArray[3] = np.zeros(2)

    assert Defaults().a is not Defaults().a
    assert Defaults() == Defaults()
    with pytest.raises(ValidationError, match=r"expected NdArray any dtype \(3,\), got float64 \(2,\) of numpy"):
        Wrong()


def test_private_and_extra_tensors_are_kept_and_compared() -> None:
    class Loose(BaseDocument, extra="allow"):
        _hidden: Any = None

    a, b = Loose(more=np.array([1.0, np.nan])), Loose(more=np.array([1.0, np.nan]))
    assert a == b
    assert copy.deepcopy(a) == a
    assert copy.deepcopy(a).more is not a.more
    assert a != Loose(more=np.array([1.0, 2.0]))
