"""Fields of numpy arrays: accepted, converted and rejected values."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import pytest
from pydantic import TypeAdapter, ValidationError

from quire import BaseDocument, DocumentArray
from quire.errors import TensorError
from quire.typing import AnyTensor, DType, NdArray, Shape, TorchTensor, float32, int64, uint8


class Sample(BaseDocument):
    array: NdArray


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((2, 3), np.float32),
        np.zeros((), np.int8),
        np.zeros((0, 3)),
        np.ones(3, ">f4"),
        np.arange(6)[::-2],
        np.broadcast_to(np.float32(1), (2, 2)),
        np.array(["a", "bc"]),
        np.array([1, "a", None], dtype=object),
        np.zeros(2, [("x", "f4"), ("y", "i2")]),
        np.zeros(2, "datetime64[s]"),
        np.zeros((2, 2)).view(np.matrix) if hasattr(np, "matrix") else np.zeros(1),
    ],
    ids=lambda array: f"{array.dtype}-{array.shape}",
)
@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")
def test_field_keeps_array_object(array: Any) -> None:
    for tp in (NdArray, AnyTensor):
        assert tp(array) is array
    assert Sample(array=array).array is array


@pytest.mark.parametrize(
    ("tp", "value", "dtype", "shape"),
    [
        (NdArray, [1, 2, 3], "int64", (3,)),
        (NdArray, [1, 2.5], "float64", (2,)),
        (NdArray, [True, False], "bool", (2,)),
        (NdArray, [1j, 2], "complex128", (2,)),
        (NdArray, ((1, 2), (3, 4)), "int64", (2, 2)),
        (NdArray, [2**63], "uint64", (1,)),
        (NdArray, [1, 2**64 - 1], "uint64", (2,)),  # which numpy converts to floats
        (NdArray, [], "float64", (0,)),
        (NdArray, [[], []], "float64", (2, 0)),
        (NdArray[float32], [1, 2], "float32", (2,)),
        (NdArray[float32], [0.1, 1e-3], "float32", (2,)),
        (NdArray[uint8], [0, 255], "uint8", (2,)),
        (NdArray[int64], [], "int64", (0,)),
        (NdArray[uint8], [True, False], "uint8", (2,)),
        (NdArray[float32, "n", 3], [], "float32", (0, 3)),
        (NdArray["n", 3, "m"], [], "float64", (0, 3, 0)),
        (NdArray[0, 3], [], "float64", (0, 3)),
        (NdArray[np.complex64], [0.1 + 0.2j], "complex64", (1,)),
        (NdArray[np.complex64], [1, 2], "complex64", (2,)),
        (NdArray[np.float16], [0.1, float("inf"), float("nan")], "float16", (3,)),
        (NdArray, [np.float32(0.1), np.float32(0.2)], "float32", (2,)),
        (NdArray, [np.zeros(2, np.float16), np.zeros(2, np.float16)], "float16", (2, 2)),
        (NdArray[np.int32], [np.int64(3), np.int64(4)], "int32", (2,)),
        (NdArray, np.float32(0.5), "float32", ()),
        (NdArray[np.int64], [-(2**63), 2**63 - 1], "int64", (2,)),
        (NdArray[np.uint64], [0, 2**64 - 1], "uint64", (2,)),
    ],
)
def test_list_is_converted_to_array(tp: Any, value: Any, dtype: str, shape: tuple[int, ...]) -> None:
    result = tp(value)
    assert type(result) is np.ndarray
    assert (result.dtype.name, result.shape) == (dtype, shape)
    np.testing.assert_array_equal(result, np.asarray(value, result.dtype).reshape(shape))


@pytest.mark.parametrize(
    ("tp", "value", "reason"),
    [
        (NdArray[uint8], [256], "the numbers do not fit dtype uint8"),
        (NdArray[uint8], [-1], "the numbers do not fit dtype uint8"),
        (NdArray[np.uint64], [-1], "the numbers do not fit dtype uint64"),  # a cast back would give -1 again
        (NdArray[int64], [2**63], "the numbers do not fit dtype int64"),
        (NdArray[int64], [1.0], "the numbers do not fit dtype int64"),
        (NdArray[int64], [0.5], "the numbers do not fit dtype int64"),
        (NdArray[np.bool_], [0, 1], "the numbers do not fit dtype bool"),
        (NdArray[float32], [1e39], "the numbers do not fit dtype float32"),
        (NdArray[float32], [2**24 + 1], "the numbers do not fit dtype float32"),
        (NdArray[np.float64], [2**63 - 1], "the numbers do not fit dtype float64"),
        (NdArray[np.float64], [2**64 - 1], "the numbers do not fit dtype float64"),
        (NdArray[np.float16], [70000], "the numbers do not fit dtype float16"),
        (NdArray[float32], [1j], "the numbers do not fit dtype float32"),
        (NdArray[np.complex64], [1e39 + 0j], "the numbers do not fit dtype complex64"),
        (NdArray, [-1, 2**63], "the list holds something else than numbers"),
        (NdArray, [2**64], "the list holds something else than numbers"),
        (NdArray, [[1], [1, 2]], "the list does not make a tensor"),
        (NdArray, ["a"], "the list holds something else than numbers"),
        (NdArray, [None], "the list holds something else than numbers"),
        (NdArray, [{}], "the list holds something else than numbers"),
        (NdArray, [1, "a"], "the list holds something else than numbers"),
        (NdArray[float32], [np.zeros(2)], "got list"),  # arrays keep their dtype
        (NdArray[3], [1, 2], "expected NdArray any dtype (3,)"),
    ],
)
def test_lossy_list_is_rejected(tp: Any, value: Any, reason: str) -> None:
    with pytest.raises(TensorError) as caught:
        tp(value)
    assert reason in str(caught.value) or (reason == "got list" and "got float64 (1, 2) of numpy" in str(caught.value))


@pytest.mark.parametrize("value", [4, 2.5, True, 1j, "abc", b"abc", None, object(), {1, 2}, range(3), lambda: 0])
def test_other_values_are_rejected(value: Any) -> None:
    """Above all the int: it is a size to np.ndarray, which would give uninitialised memory."""
    with pytest.raises(ValidationError, match="expected NdArray any dtype any shape, got ") as caught:
        Sample(array=value)
    assert caught.value.errors()[0]["loc"] == ("array",)
    assert f"got {type(value).__name__}" in str(caught.value)


@pytest.mark.parametrize("value", [{}, {"a": 1}, {"data": [1]}, {"dtype": "float32", "shape": [1]}])
def test_mapping_without_tensor_keys_is_rejected(value: Any) -> None:
    with pytest.raises(ValidationError, match="the object is not a tensor in JSON: it has no '"):
        Sample(array=value)


@pytest.mark.parametrize(
    ("tp", "value"),
    [
        (NdArray[3, 224, 224], np.zeros((224, 224, 3), np.float32)),  # never a reshape
        (NdArray[3], np.zeros((1, 3))),
        (NdArray[2, 3], np.zeros(3)),  # never a broadcast
        (NdArray[2, 3], np.zeros(6)),
        (NdArray[2], np.zeros(())),
        (NdArray[float32], np.zeros(2)),  # never a cast
        (NdArray[np.float64], np.zeros(2, np.float32)),
        (NdArray[int64], np.zeros(2, np.int32)),
        (NdArray[uint8], np.zeros(2, np.bool_)),
        (NdArray[float32], np.float64(1)),
    ],
)
def test_array_of_other_shape_or_dtype_is_rejected(tp: Any, value: Any) -> None:
    with pytest.raises(TensorError, match="expected NdArray .*, got "):
        tp(value)


def test_masked_array_is_rejected() -> None:
    masked = np.ma.masked_array([1.0, 2.0], mask=[False, True])
    for tp in (NdArray, NdArray[2], AnyTensor):
        with pytest.raises(TensorError, match=r"the mask would be lost on the way \(use .filled\(\)"):
            tp(masked)


def test_failed_assignment_keeps_old_value() -> None:
    sample = Sample(array=[1, 2])
    before = sample.array
    with pytest.raises(ValidationError):
        sample.array = 4
    assert sample.array is before


def test_strict_validation_accepts_only_arrays() -> None:
    adapter = TypeAdapter(NdArray[2])
    array = np.zeros(2)
    assert adapter.validate_python(array, strict=True) is array
    with pytest.raises(ValidationError, match="got list"):
        adapter.validate_python([0.0, 0.0], strict=True)


class Plain(BaseDocument):
    bare: np.ndarray
    typed: npt.NDArray[np.float32]
    maybe: npt.NDArray[np.float32] | None = None
    many: list[npt.NDArray[np.uint8]] = []
    named: dict[str, npt.NDArray[np.float32]] = {}
    either: npt.NDArray[np.float32] | npt.NDArray[np.int64] | None = None
    inexact: npt.NDArray[np.floating[Any]] | None = None
    shaped: Annotated[npt.NDArray[np.float32], Shape(2)] | None = None
    inside: Annotated[np.ndarray | None, Shape(2), DType("uint8")] = None
    both: list[Annotated[np.ndarray, Shape(1)] | npt.NDArray[np.int8]] = []


GOOD = np.zeros(2, np.float32)


def test_numpy_annotations_become_tensor_types() -> None:
    fields = Plain.document_schema().by_name
    assert fields["bare"].type is NdArray
    assert fields["typed"].type is NdArray[float32]
    assert fields["maybe"].type is NdArray[float32]
    assert fields["inexact"].type is NdArray
    assert fields["shaped"].type is NdArray[float32, 2]
    assert fields["inside"].type is NdArray[uint8, 2]
    assert fields["many"].items[0].type is NdArray[uint8]


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("typed", np.zeros(2), "NdArray float32 any shape"),
        ("maybe", np.zeros(2), "NdArray float32 any shape"),
        ("many", [np.zeros(2)], "NdArray uint8 any shape"),
        ("named", {"a": np.zeros(2)}, "NdArray float32 any shape"),
        ("either", np.zeros(2), "NdArray float32 any shape"),
        ("shaped", np.zeros(3, np.float32), "NdArray float32 (2,)"),
        ("inside", np.zeros(2, np.int8), "NdArray uint8 (2,)"),
        ("both", [np.zeros(3)], "NdArray any dtype (1,)"),
        ("both", [np.zeros(3)], "NdArray int8 any shape"),
    ],
)
def test_numpy_annotations_are_validated_in_nested_types(field: str, value: Any, expected: str) -> None:
    fields = {"bare": np.zeros(1), "typed": GOOD, field: value}
    with pytest.raises(ValidationError) as caught:
        Plain(**fields)
    assert f"expected {expected}, got" in str(caught.value)


def test_numpy_annotations_accept_matching_values() -> None:
    byte, long = np.zeros(2, np.uint8), np.zeros(3, np.int64)
    plain = Plain(
        bare=long, typed=GOOD, many=[byte], named={"a": GOOD}, either=long, inexact=long * 0.5, shaped=GOOD, inside=byte
    )
    assert plain.bare is long
    assert plain.typed is GOOD
    assert plain.many[0] is byte
    assert plain.either is long
    assert plain.inside is byte
    assert Plain(bare=[1], typed=[1, 2], many=[[1]]).many[0].dtype == np.uint8


def test_annotations_work_in_type_adapter() -> None:
    adapter = TypeAdapter(Annotated[np.ndarray, Shape(3, "n"), DType("float32")])
    assert adapter.validate_python([[1], [2], [3]]).dtype == np.float32
    with pytest.raises(ValidationError, match=r"expected NdArray float32 \(3, n\), got float64 \(3,\) of numpy"):
        adapter.validate_python(np.zeros(3))


def test_shape_on_non_tensor_raises_schema_error() -> None:
    from quire.errors import SchemaError

    with pytest.raises(SchemaError, match=r"Shape.* describes a tensor, but <class 'int'> is none"):
        TypeAdapter(Annotated[int, Shape(3)])


UNIONS: list[Any] = [
    NdArray[float32] | NdArray[np.float64],
    NdArray[np.float64] | NdArray[float32] | None,
    TorchTensor | NdArray,  # torch is not even imported
    TorchTensor | NdArray | None,
    NdArray[3] | AnyTensor | None,
    AnyTensor | NdArray,
    list[float] | NdArray,
    str | TorchTensor[2] | NdArray["n"] | int,
]


@pytest.mark.parametrize("union", UNIONS, ids=repr)
def test_union_keeps_value_of_matching_member(union: Any) -> None:
    class Either(BaseDocument):
        x: union
        xs: list[union] = []
        by_name: dict[str, union] = {}

    for array in (np.zeros(2, np.float32), np.zeros(2)):
        either = Either(x=array, xs=[array], by_name={"a": array})
        assert either.x is either.xs[0] is either.by_name["a"] is array
        either.x = array
        assert either.x is array
        assert Either.model_validate_json(either.model_dump_json()) == either
    with pytest.raises(ValidationError):
        Either(x=object())


def test_union_keeps_list_for_list_member() -> None:
    assert TypeAdapter(NdArray | list[float]).validate_python([1.0]) == [1.0]


def test_default_is_validated_and_copied() -> None:
    class Defaults(BaseDocument):
        a: NdArray[float32, 2] = [0, 1]
        b: NdArray = np.zeros(2)

    first, second = Defaults(), Defaults()
    assert first.a.dtype == np.float32
    first.a += 1
    first.b += 1
    np.testing.assert_array_equal(second.a, [0, 1])
    np.testing.assert_array_equal(second.b, [0, 0])
    np.testing.assert_array_equal(Defaults().b, [0, 0])


@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")
def test_stacking_matrices_keeps_their_shape() -> None:
    docs = DocumentArray[Sample]([Sample(array=np.zeros((1, 2)).view(np.matrix)) for _ in range(3)])
    assert docs.stack().array.shape == (3, 1, 2)
    assert type(docs.stack()).from_bytes(docs.stack().to_bytes())[1].array.shape == (1, 2)
