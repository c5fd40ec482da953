"""Fields of TensorFlow tensors: wrapped, native, and in AnyTensor."""

from __future__ import annotations

import copy
import pickle
from typing import Annotated, Any

import numpy as np
import pytest
import tensorflow as tf
from pydantic import TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError

from quire import BaseDocument
from quire.errors import TensorError
from quire.tensors import NativeTensorFlow, framework_of
from quire.typing import AnyTensor, DType, NdArray, Shape, TensorFlowTensor, float32

pytestmark = pytest.mark.needs("tensorflow")

DTYPES = [
    *(
        "bool",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "int8",
        "int16",
        "int32",
        "int64",
        "float16",
        "bfloat16",
        "float32",
    ),
    *("float64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2"),
]


class Wrapped(BaseDocument):
    x: TensorFlowTensor


class Native(BaseDocument):
    x: tf.Tensor
    maybe: tf.Tensor | None = None
    many: list[tf.Tensor] = []
    named: dict[str, tf.Tensor] = {}


class Either(BaseDocument):
    x: AnyTensor


def test_wrapper_field_wraps_tensor() -> None:
    tensor = tf.ones(3)
    wrapped = Wrapped(x=tensor)
    assert isinstance(wrapped.x, TensorFlowTensor)
    assert wrapped.x.tensor is tensor
    again = Wrapped(x=wrapped.x)
    assert again.x is wrapped.x
    wrapped.x = [1, 2]
    assert wrapped.x.numpy().tolist() == [1, 2]
    with pytest.raises(ValidationError, match="expected TensorFlowTensor any dtype any shape, got int 4: int is not"):
        wrapped.x = 4
    with pytest.raises(ValidationError, match="TensorFlowTensor holds no ragged tensor: call .to_tensor"):
        wrapped.x = tf.ragged.constant([[1], [2, 3]])
    assert wrapped.x.numpy().tolist() == [1, 2]


def test_native_field_keeps_tensor_object() -> None:
    tensor, variable = tf.ones(3), tf.Variable([1.0])
    native = Native(x=tensor, maybe=variable, many=[tensor], named={"a": tensor})
    assert native.x is native.many[0] is native.named["a"] is tensor
    assert native.maybe is variable
    assert Native.document_schema().by_name["x"].type is NativeTensorFlow
    assert Native.document_schema().by_name["many"].items[0].type is NativeTensorFlow
    assert isinstance(Native(x=[1.0]).x, tf.Tensor)
    assert isinstance(Native(x=np.ones(2)).x, tf.Tensor)


def test_native_field_unwraps_wrapper() -> None:
    tensor = tf.ones(3)
    native = Native(x=TensorFlowTensor(tensor), many=[TensorFlowTensor(tensor)])
    assert native.x is native.many[0] is tensor
    assert not isinstance(TensorFlowTensor(tensor), NativeTensorFlow)


def test_annotated_tensor_equals_native_type() -> None:
    class Spelled(BaseDocument):
        a: Annotated[tf.Tensor, Shape(3, "n"), DType("float32")]
        b: TensorFlowTensor[tf.float32, 3, "n"] | None = None
        c: Annotated[TensorFlowTensor, Shape(3, "n"), DType(tf.float32)] | None = None

    fields = Spelled.document_schema().by_name
    assert fields["a"].type is NativeTensorFlow[float32, 3, "n"]
    assert fields["b"].type is fields["c"].type is TensorFlowTensor[float32, 3, "n"]
    good, bad = tf.ones((3, 2)), tf.ones((2, 3))
    assert Spelled(a=good, b=good, c=good).a is good
    for name in "abc":
        with pytest.raises(ValidationError, match=r"expected \w+ float32 \(3, n\), got float32 \(2, 3\) of tensorflow"):
            Spelled(**{"a": good, name: bad})


@pytest.mark.parametrize(
    "make",
    [
        lambda: tf.ones((2, 3)),
        lambda: tf.constant(1),
        lambda: tf.zeros((0, 3)),
        lambda: tf.constant(["a", "b"]),
        lambda: tf.constant("a"),
        lambda: tf.Variable([1.0]),
        lambda: tf.sparse.from_dense([[0.0, 1.0]]),
        lambda: tf.ragged.constant([[1], [2, 3]]),
        lambda: TensorFlowTensor(tf.ones(2)),
    ],
)
def test_any_tensor_keeps_object(make: Any) -> None:
    value = make()
    either = Either(x=value)
    assert either.x is value
    assert isinstance(value, AnyTensor)
    for again in (
        pickle.loads(pickle.dumps(either)),
        copy.deepcopy(either),
        either.model_copy(deep=True),
        copy.copy(either),
    ):
        assert again == either
        assert type(again.x) is type(value)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 3), (0, 3), ()], ids=str)
@pytest.mark.parametrize("document", [Wrapped, Either, Native])
def test_json_pickle_and_copy_keep_dtype(dtype: str, shape: tuple[int, ...], document: Any) -> None:
    tensor = tf.cast(tf.ones(shape), dtype)
    sample = document(x=tensor)
    for again in (
        document.model_validate_json(sample.model_dump_json()),
        pickle.loads(pickle.dumps(sample)),
        copy.deepcopy(sample),
    ):
        assert again == sample
        assert again.x.dtype == tensor.dtype
        assert again.x.shape == shape
        assert type(again.x) is type(sample.x)


@pytest.mark.parametrize(
    "make",
    [
        lambda: tf.constant(["a", "bcd"]),
        lambda: tf.constant("äö"),
        lambda: tf.constant([["a"], ["b"]]),
        lambda: tf.zeros((0, 2), tf.string),
        lambda: tf.constant([float("nan"), float("inf")]),
        lambda: tf.sparse.from_dense([[0.0, float("nan")], [2.0, 0.0]]),
        lambda: tf.sparse.from_dense(["", "a"]),
        lambda: tf.SparseTensor(np.zeros((0, 2), np.int64), np.zeros(0, np.float32), (3, 4)),
        lambda: tf.SparseTensor([[1, 0], [0, 1]], [1, 2], (2, 2)),  # not in order
    ],
)
def test_special_tensors_roundtrip_in_json(make: Any) -> None:
    for document in (Either, Wrapped):
        sample = document(x=make())
        again = document.model_validate_json(sample.model_dump_json())
        assert again == sample
        assert type(again.x) is type(sample.x)


def test_variable_becomes_tensor_in_json() -> None:
    again = Either.model_validate_json(Either(x=tf.Variable([1.0, 2.0])).model_dump_json())
    assert isinstance(again.x, tf.Tensor)
    assert again.x.numpy().tolist() == [1, 2]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: tf.ragged.constant([[1], [2, 3]]), "A ragged tensor has no sparse form"),
        (lambda: tf.constant([b"\xff"]), "not UTF-8"),
    ],
)
def test_tensors_without_json_form_are_rejected(make: Any, reason: str) -> None:
    with pytest.raises(PydanticSerializationError, match=reason):
        Either(x=make()).model_dump_json()


@pytest.mark.parametrize(
    ("a", "b", "equal"),
    [
        (lambda: tf.constant([1.0, np.nan]), lambda: tf.constant([1.0, np.nan]), True),
        (lambda: tf.constant([1.0, np.nan]), lambda: tf.constant([np.nan, 1.0]), False),
        (lambda: tf.ones(2), lambda: tf.ones(2, tf.float64), False),
        (lambda: tf.ones(2), lambda: tf.ones((2, 1)), False),
        (lambda: tf.constant([1.5], tf.bfloat16), lambda: tf.constant([1.5], tf.bfloat16), True),
        (lambda: tf.constant(["a"]), lambda: tf.constant(["a"]), True),
        (lambda: tf.constant(["a"]), lambda: tf.constant(["b"]), False),
        (lambda: tf.constant("a"), lambda: tf.constant("ab"), False),
        (lambda: tf.ones(2), lambda: tf.Variable(tf.ones(2)), False),
        (lambda: tf.Variable([1.0]), lambda: tf.Variable([1.0]), True),
        (lambda: tf.ones(2), lambda: TensorFlowTensor(tf.ones(2)), True),
        (lambda: tf.sparse.from_dense([0, 1]), lambda: tf.sparse.from_dense([0, 1]), True),
        (lambda: tf.sparse.from_dense([0, 1]), lambda: tf.sparse.from_dense([1, 0]), False),
        (lambda: tf.sparse.from_dense([0, 1]), lambda: tf.constant([0, 1]), False),
        (
            lambda: tf.SparseTensor([[1, 0], [0, 1]], [1, 2], (2, 2)),
            lambda: tf.SparseTensor([[0, 1], [1, 0]], [2, 1], (2, 2)),
            True,
        ),
        (lambda: tf.ragged.constant([[1], [2, 3]]), lambda: tf.ragged.constant([[1], [2, 3]]), True),
        (lambda: tf.ragged.constant([[1], [2, 3]]), lambda: tf.ragged.constant([[1, 2], [3]]), False),
        (lambda: tf.ragged.constant([[1], [2, 3]]), lambda: tf.ragged.constant([[[1]], [[2, 3]]]), False),
        (lambda: tf.ones(2), lambda: np.ones(2, np.float32), False),
    ],
)
def test_document_equality_compares_values(a: Any, b: Any, equal: bool) -> None:
    assert (Either(x=a()) == Either(x=b())) is equal
    assert (Either(x=b()) == Either(x=a())) is equal


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: tf.Variable([1.0]), "it is a tf.Variable, which changes"),
        (lambda: tf.sparse.from_dense([0, 1]), "its layout is coo, not dense"),
        (lambda: tf.ragged.constant([[1], [2, 3]]), "its layout is ragged, not dense"),
        (lambda: tf.constant(["a"]), "it holds strings"),
    ],
)
def test_lossy_conversion_is_rejected(make: Any, reason: str) -> None:
    for value in (make(),):
        with pytest.raises(TensorError, match=f"a tensorflow tensor cannot become a numpy tensor as it is: {reason}"):
            NdArray(value)


def test_dense_tensor_is_converted_to_array() -> None:
    for value in (tf.ones((2, 3)), TensorFlowTensor(tf.ones((2, 3)))):
        array = NdArray[float32, 2, 3](value)
        assert type(array) is np.ndarray
        assert array.tolist() == [[1, 1, 1], [1, 1, 1]]


@pytest.mark.parametrize(
    "union", [NdArray | TensorFlowTensor, TensorFlowTensor | NdArray, TensorFlowTensor | NdArray | None]
)
def test_union_keeps_value_of_matching_member(union: Any) -> None:
    class Both(BaseDocument):
        x: union

    array, wrapper = np.ones(2), TensorFlowTensor(tf.ones(2))
    assert Both(x=array).x is array
    assert Both(x=wrapper).x is wrapper
    assert type(Both.model_validate_json(Both(x=array).model_dump_json()).x) is np.ndarray
    assert isinstance(Both.model_validate_json(Both(x=wrapper).model_dump_json()).x, TensorFlowTensor)


def test_documents_work_inside_tf_function() -> None:
    class Shaped(BaseDocument):
        x: TensorFlowTensor[float32, "n", 3]

    @tf.function
    def double(x: Any) -> Any:
        return Shaped(x=x).x * 2 + Native(x=x).x

    assert double(tf.ones((2, 3))).numpy().tolist() == [[3, 3, 3], [3, 3, 3]]

    @tf.function(autograph=False)
    def convert(x: Any) -> Any:
        return TypeAdapter(NdArray).validate_python(x)

    with pytest.raises(ValidationError, match=r"it is symbolic, inside a tf.function"):
        convert(tf.ones(2))


def test_gradients_flow_through_document() -> None:
    x = tf.constant([1.0, 2.0])
    with tf.GradientTape() as tape:
        tape.watch(x)
        total = tf.reduce_sum(Wrapped(x=x).x ** 2)
    assert tape.gradient(total, x).numpy().tolist() == [2, 4]
    sample = Wrapped(x=x)
    with tf.GradientTape() as tape:
        tape.watch(sample.x)
        total = tf.reduce_sum(sample.x**2)
    assert tape.gradient(total, sample.x).numpy().tolist() == [2, 4]


def test_json_schema_is_generated() -> None:
    class Described(BaseDocument):
        a: tf.Tensor
        b: TensorFlowTensor[float32, 3, "n"] | None = None

    schema = Described.model_json_schema()["properties"]
    assert schema["a"]["x-tensor"] == {"dtype": None, "shape": None}
    assert schema["b"]["anyOf"][0]["x-tensor"] == {"dtype": "float32", "shape": [3, "n"]}


def test_framework_reports_dtype_shape_and_device() -> None:
    framework = framework_of(tf.ones(1))
    assert framework is not None
    assert framework.name == "tensorflow"
    assert framework_of(TensorFlowTensor(tf.ones(1))) is framework
    assert framework_of(tf.Variable([1.0])) is framework
    assert framework.layout(TensorFlowTensor(tf.sparse.from_dense([0, 1]))) == "coo"
    assert framework.shape(tf.ragged.constant([[1], [2, 3]])) == (2, -1)
    assert framework.device(tf.ones(1)).endswith("CPU:0")
    with pytest.raises(TensorError, match="tensorflow has no dtype 'float128'"):
        framework.native_dtype("float128")
