"""Tensors of every framework, dtype and layout come back as they were, in documents, rows and columns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from pydantic import create_model

from quire import BaseDocument, DocumentArray, DocumentBatch
from quire.errors import EncodeError
from quire.tensors import framework_of, get_framework
from quire.typing import AnyTensor, JaxArray, NdArray, PaddleTensor, TorchTensor, float32
from tests.codec.round_trips import assert_round_trips, exact
from tests.strategies import any_dtypes, any_shapes, laws


class Loose(BaseDocument):
    """Tensors of any framework, shape and dtype."""

    tensor: AnyTensor | None = None
    anything: Any = None
    listed: list[AnyTensor] = []
    named: dict[str, AnyTensor] = {}
    either: AnyTensor | str | None = None


class Numpy(BaseDocument):
    tensor: NdArray
    spare: NdArray | None = None


class Torch(BaseDocument):
    tensor: TorchTensor
    spare: TorchTensor | None = None


class Jax(BaseDocument):
    tensor: JaxArray
    spare: JaxArray | None = None


class Paddle(BaseDocument):
    tensor: PaddleTensor
    spare: PaddleTensor | None = None


def everywhere(tensor: Any, typed: Any = None) -> None:
    """Fail unless the tensor comes back as it was from every kind of field."""
    assert_round_trips(
        Loose(tensor=tensor, anything=tensor, listed=[tensor, tensor], named={"a": tensor}, either=tensor)
    )
    if typed is not None:
        assert_round_trips(typed(tensor=tensor))
        assert_round_trips(typed(tensor=tensor, spare=tensor))


# --- numpy


@given(hnp.arrays(any_dtypes, any_shapes))
@laws
def test_numpy_arrays_round_trip(array: Any) -> None:
    everywhere(array, Numpy)


@given(hnp.arrays(hnp.array_dtypes(hnp.scalar_dtypes(), max_size=1).map(lambda dtype: dtype[0]), 2))
@laws
def test_numpy_dtypes_round_trip(array: Any) -> None:
    everywhere(array, Numpy)


@pytest.mark.parametrize(
    "dtype", ["M8[ns]", "m8[D]", "M8[Y]", "<U5", "S3", ">i8", ">f8", ">U3", ">M8[s]", "f2", "c16", "?"]
)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (2, 3)], ids=str)
def test_numpy_dtypes_and_shapes_round_trip(dtype: str, shape: tuple[int, ...]) -> None:
    everywhere(np.ones(shape, dtype) if dtype[-1] not in "53" else np.full(shape, "ab", dtype), Numpy)


def test_byte_orders_round_trip_as_equal_values() -> None:
    got = Numpy.from_bytes(Numpy(tensor=np.array([1, 256], ">i4")).to_bytes()).tensor
    assert got.tolist() == [1, 256]
    assert got.dtype == np.dtype("int32")
    assert got.dtype.isnative


def test_non_contiguous_arrays_round_trip() -> None:
    base = np.arange(24).reshape(2, 3, 4)
    for array in (base.T, base[:, ::-1], base[..., 1], np.broadcast_to(base[0], (5, 3, 4)), np.asfortranarray(base)):
        everywhere(array, Numpy)


def test_large_arrays_are_encoded_as_buffers() -> None:
    for size in (4095, 4096, 70_000):
        everywhere(np.arange(size, dtype=np.uint8), Numpy)
    assert_round_trips(Loose(listed=[np.ones(5000), np.zeros(3), np.ones((100, 100), np.float32)]))


def test_arrays_of_texts_and_bytes_round_trip() -> None:
    assert_round_trips(Loose(anything=np.array(["a", "äöü", ""], dtype=object)))
    assert_round_trips(Loose(anything=np.array([[b"a"], [b"\xff"]], dtype=object)))
    assert_round_trips(Loose(anything=np.empty((0, 2), dtype=object)))


@pytest.mark.parametrize(
    "array", [np.array([None, 1], object), np.zeros(2, [("a", "i4")]), np.array(["a", b"b"], object)]
)
def test_arrays_without_an_encoding_raise_an_error_with_the_field(array: Any) -> None:
    with pytest.raises(EncodeError, match=r"Loose\.anything"):
        Loose(anything=array).to_bytes()


def test_long_doubles_raise_an_error_or_round_trip() -> None:
    document = Loose(anything=np.ones(2, np.longdouble))
    try:
        data = document.to_bytes()
    except EncodeError as error:
        assert "Loose.anything" in str(error)
        return
    assert exact(Loose.from_bytes(data), document)


def test_array_subclasses_are_read_as_arrays() -> None:
    class Mine(np.ndarray):  # type: ignore[type-arg]
        pass

    got = Loose.from_bytes(Loose(anything=np.arange(3).view(Mine)).to_bytes()).anything
    assert exact(got, np.arange(3))


def test_masked_arrays_are_rejected() -> None:
    masked = np.ma.masked_array([1, 2], [True, False])
    try:
        got = Loose.from_bytes(Loose.model_construct(id="1", anything=masked).to_bytes()).anything
    except EncodeError:
        return
    assert isinstance(got, np.ma.MaskedArray)


@given(st.lists(st.none() | hnp.arrays(np.float32, any_shapes), max_size=4))
@laws
def test_rows_of_any_shape_and_none_round_trip(tensors: list[Any]) -> None:
    docs = DocumentArray[Loose]([Loose(tensor=tensor, either=tensor) for tensor in tensors])
    assert exact(DocumentArray[Loose].from_bytes(docs.to_bytes()), docs)
    assert exact(DocumentBatch[Loose].from_bytes(docs.stack(shapes="ragged").to_bytes()).unstack(), docs)


@given(st.lists(st.none() | hnp.arrays(any_dtypes, any_shapes), max_size=4))
@laws
def test_rows_of_any_dtype_and_none_round_trip(tensors: list[Any]) -> None:
    docs = DocumentArray[Loose]([Loose(tensor=tensor) for tensor in tensors])
    assert exact(DocumentArray[Loose].from_bytes(docs.to_bytes()), docs)


# --- ml_dtypes in numpy

SMALL_FLOATS = ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"]


@pytest.mark.needs("ml_dtypes")
@pytest.mark.parametrize("dtype", SMALL_FLOATS)
def test_numpy_small_floats_round_trip(dtype: str) -> None:
    import ml_dtypes

    array = np.array([[0.5, -1.0, 2.0]]).astype(getattr(ml_dtypes, dtype))
    everywhere(array, Numpy)
    everywhere(array[:, :0], Numpy)
    assert_round_trips(Loose(anything=array[0, 0]))


# --- torch

TORCH_DTYPES = [
    *("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"),
    *("complex64", "complex128", "float8_e4m3fn", "float8_e5m2"),
]


@pytest.mark.needs("torch", "ml_dtypes")
@pytest.mark.parametrize("dtype", TORCH_DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0), (2, 3)], ids=str)
def test_torch_tensors_round_trip(dtype: str, shape: tuple[int, ...]) -> None:
    import torch

    everywhere(torch.ones(shape).to(getattr(torch, dtype)), Torch)


@pytest.mark.needs("torch")
def test_torch_views_and_large_tensors_round_trip() -> None:
    import torch

    base = torch.arange(24).reshape(2, 3, 4)
    for tensor in (base.transpose(0, 2), base[:, ::2], base[0, 0, 0], base[..., 1], torch.ones(1).expand(4)):
        everywhere(tensor, Torch)
    everywhere(torch.randn(3, 5000), Torch)
    everywhere(torch.tensor([1 + 2j]).conj(), Torch)
    everywhere(torch._neg_view(torch.tensor([1.0])), Torch)


@pytest.mark.needs("torch")
def test_requires_grad_round_trips() -> None:
    import torch

    for tensor in (torch.ones(2, requires_grad=True), torch.ones(5000, requires_grad=True)):
        document = Torch(tensor=tensor, spare=torch.ones(2))
        for got in (
            Torch.from_bytes(document.to_bytes()),
            DocumentArray[Torch].from_bytes(DocumentArray[Torch]([document, document]).to_bytes())[1],
        ):
            assert got.tensor.requires_grad
            assert got.tensor.is_leaf
            assert not got.spare.requires_grad
            assert torch.equal(got.tensor, tensor)
    mixed = DocumentArray[Torch]([Torch(tensor=torch.ones(2)), Torch(tensor=torch.ones(2, requires_grad=True))])
    assert [doc.tensor.requires_grad for doc in DocumentArray[Torch].from_bytes(mixed.to_bytes())] == [False, True]


@pytest.mark.needs("torch")
def test_results_of_operations_with_gradients_round_trip() -> None:
    import torch

    got = Torch.from_bytes(Torch(tensor=torch.ones(2, requires_grad=True) * 2).to_bytes())
    assert got.tensor.requires_grad
    assert got.tensor.tolist() == [2.0, 2.0]


@pytest.mark.needs("torch")
def test_torch_parameters_are_read_as_tensors() -> None:
    import torch

    got = Loose.from_bytes(Loose(anything=torch.nn.Parameter(torch.ones(2))).to_bytes()).anything
    assert type(got) is torch.Tensor
    assert got.requires_grad


@pytest.mark.needs("torch")
@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "hybrid", "empty", "bsr"])
def test_torch_sparse_tensors_round_trip(layout: str) -> None:
    import torch

    dense = torch.tensor([[0.0, 1.5, 0.0, 0.0], [2.0, 0.0, 0.0, -0.0]])
    tensor = {
        "coo": lambda: dense.to_sparse().coalesce(),
        "csr": dense.to_sparse_csr,
        "csc": dense.to_sparse_csc,
        "hybrid": lambda: torch.ones(3, 2, 2).to_sparse(1).coalesce(),
        "empty": lambda: torch.zeros(0, 3).to_sparse().coalesce(),
        "bsr": lambda: dense.to_sparse_bsr((1, 2)),
    }[layout]()
    document = Torch(tensor=tensor)
    if layout == "bsr":
        try:
            document.to_bytes()
        except EncodeError:
            return
    everywhere(tensor, Torch)


@pytest.mark.needs("torch")
@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_tensor_with_duplicate_entries_keeps_its_sum() -> None:
    import torch

    tensor = torch.sparse_coo_tensor(torch.tensor([[0, 0]]), torch.tensor([1.0, 2.0]), (2,))
    got = Torch.from_bytes(Torch(tensor=tensor).to_bytes()).tensor
    assert got.to_dense().tolist() == [3.0, 0.0]


# --- tensorflow

TF_DTYPES = [
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "bfloat16"),
    *("float32", "float64", "complex64", "complex128", "float8_e5m2", "float8_e4m3fn"),
]


def _tensorflow_document() -> Any:
    from quire.typing import TensorFlowTensor

    fields: Any = {"tensor": (TensorFlowTensor, ...), "spare": (TensorFlowTensor | None, None)}
    return create_model("Flow", __base__=BaseDocument, **fields)


@pytest.mark.needs("tensorflow")
@pytest.mark.parametrize("dtype", TF_DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)], ids=str)
def test_tensorflow_tensors_round_trip(dtype: str, shape: tuple[int, ...]) -> None:
    import tensorflow as tf

    from quire.typing import TensorFlowTensor

    tensor = tf.cast(tf.ones(shape), getattr(tf.dtypes, dtype, None) or getattr(tf.dtypes.experimental, dtype))
    everywhere(tensor)
    wrapped = TensorFlowTensor(tensor=tensor)
    everywhere(wrapped, _tensorflow_document())


@pytest.mark.needs("tensorflow")
def test_tensorflow_string_tensors_round_trip() -> None:
    import tensorflow as tf

    from quire.typing import TensorFlowTensor

    for tensor in (tf.constant([b"a", b"\xff", b""]), tf.constant("x"), tf.zeros((0,), tf.string)):
        everywhere(tensor)
        everywhere(TensorFlowTensor(tensor=tensor), _tensorflow_document())


@pytest.mark.needs("tensorflow")
def test_tensorflow_sparse_tensors_round_trip() -> None:
    import tensorflow as tf

    tensor = tf.sparse.SparseTensor([[0, 1], [2, 3]], [1.5, 2.5], (3, 4))
    everywhere(tensor)
    got = Loose.from_bytes(Loose(anything=tensor).to_bytes()).anything
    assert isinstance(got, tf.sparse.SparseTensor)


@pytest.mark.needs("tensorflow")
def test_tensorflow_variables_round_trip_or_raise_an_error() -> None:
    import tensorflow as tf

    document = Loose.model_construct(id="1", tensor=None, anything=tf.Variable([1.0]), listed=[], named={}, either=None)
    try:
        got = Loose.from_bytes(document.to_bytes()).anything
    except EncodeError as error:
        assert "Loose.anything" in str(error)
        return
    assert got.numpy().tolist() == [1.0]


# --- jax and paddle

JAX_DTYPES = [
    "bool",
    "uint8",
    "int8",
    "int32",
    "float16",
    "bfloat16",
    "float32",
    "complex64",
    "float8_e4m3fn",
    "float8_e5m2",
]


@pytest.mark.needs("jax")
@pytest.mark.parametrize("dtype", JAX_DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3)], ids=str)
def test_jax_arrays_round_trip(dtype: str, shape: tuple[int, ...]) -> None:
    import jax.numpy as jnp

    everywhere(jnp.ones(shape, getattr(jnp, dtype)), Jax)


PADDLE_DTYPES = [
    "bool",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex64",
    "complex128",
]


@pytest.mark.needs("paddle", "ml_dtypes")
@pytest.mark.parametrize("dtype", PADDLE_DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3)], ids=str)
def test_paddle_tensors_round_trip(dtype: str, shape: tuple[int, ...]) -> None:
    import paddle

    everywhere(paddle.ones(shape, "float32").cast(dtype), Paddle)


# --- scipy


@pytest.mark.needs("scipy")
@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "bsr", "dok", "lil", "dia"])
@pytest.mark.parametrize("kind", ["array", "matrix"])
@pytest.mark.parametrize("dtype", ["float32", "int64", "bool", "complex128"])
def test_scipy_sparse_arrays_round_trip(layout: str, kind: str, dtype: str) -> None:
    import scipy.sparse

    dense = np.array([[0, 1, 0, 0], [2, 0, 0, 3]]).astype(dtype)
    for content in (dense, np.zeros((2, 0), dtype), np.zeros((3, 3), dtype)):
        if layout == "bsr" and 0 in content.shape:
            continue
        sparse = getattr(scipy.sparse, f"{layout}_{kind}")(content)
        everywhere(sparse)


# --- rows of one framework in columns


@pytest.mark.needs("torch", "tensorflow", "jax", "paddle")
@pytest.mark.parametrize("name", ["numpy", "torch", "tensorflow", "jax", "paddle"])
def test_rows_of_every_framework_round_trip(name: str) -> None:
    framework = get_framework(name)
    rows = [np.arange(6, dtype=np.float32).reshape(2, 3) + i for i in range(3)]
    for shapes in (rows, [rows[0], rows[1][:1], rows[2][:, :0]]):
        docs = DocumentArray[Loose]([Loose(tensor=framework.from_numpy(row)) for row in shapes])
        for some in (docs, DocumentArray[Loose]([*docs, Loose(), Loose(tensor=docs[0].tensor)])):
            got = DocumentArray[Loose].from_bytes(some.to_bytes())
            assert exact(got, some)
            assert framework_of(got[0].tensor) is framework
            batch = DocumentBatch[Loose].from_bytes(some.stack(shapes="ragged").to_bytes())
            assert exact(batch.unstack(), some)


@pytest.mark.needs("torch", "tensorflow", "jax")
def test_rows_of_mixed_frameworks_round_trip() -> None:
    tensors = [
        get_framework(name).from_numpy(np.ones(2, np.float32)) for name in ("numpy", "torch", "tensorflow", "jax")
    ]
    docs = DocumentArray[Loose]([Loose(tensor=tensor, either=tensor) for tensor in tensors])
    assert exact(DocumentArray[Loose].from_bytes(docs.to_bytes()), docs)


class Vectors(BaseDocument):
    a: NdArray[float32, 3]
    b: NdArray[float32, 3] | None = None


@pytest.mark.needs("torch", "tensorflow", "jax", "paddle")
@pytest.mark.parametrize("name", ["torch", "tensorflow", "jax", "paddle"])
def test_batch_moved_to_another_framework_round_trips(name: str) -> None:
    docs = DocumentArray[Vectors]([Vectors(a=[1, 2, 3]), Vectors(a=[4, 5, 6], b=[7, 8, 9])])
    batch = docs.stack().to_framework(name)
    got = DocumentBatch[Vectors].from_bytes(batch.to_bytes())
    assert framework_of(got.a) is framework_of(batch.a)
    assert got.identical(batch)
    assert exact(got.to_framework("numpy").unstack(), batch.to_framework("numpy").unstack())
