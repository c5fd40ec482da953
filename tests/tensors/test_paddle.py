"""Fields of paddle tensors."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pytest
from pydantic import ValidationError

from quire import BaseDocument
from quire.errors import PickleError, TensorError
from quire.tensors import framework_of, tensor_to_json
from quire.typing import AnyTensor, DType, NdArray, PaddleTensor, Shape, float32

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import paddle

pytestmark = pytest.mark.needs("paddle")

DTYPES = [
    *("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"),
    *("complex64", "complex128", "float8_e4m3fn", "float8_e5m2"),
]


class Sample(BaseDocument):
    x: PaddleTensor


class Holder(BaseDocument):
    x: AnyTensor


class Anything(BaseDocument):
    value: Any


def test_field_keeps_tensor_object() -> None:
    tensor = paddle.ones([2, 3])
    tensor.stop_gradient = False
    for tp in (PaddleTensor, AnyTensor, PaddleTensor[float32, 2, "n"]):
        assert tp(tensor) is tensor
    sample = Sample(x=tensor)
    assert sample.x is tensor
    (sample.x * 3).sum().backward()
    assert tensor.grad.numpy().tolist() == [[3, 3, 3], [3, 3, 3]]
    assert not isinstance(np.ones((2, 3)), PaddleTensor)


def test_annotated_tensor_equals_paddle_tensor_type() -> None:
    class Spelled(BaseDocument):
        bare: paddle.Tensor
        shaped: Annotated[paddle.Tensor, Shape(3, "n"), DType(paddle.float32)] | None = None
        many: list[paddle.Tensor | None] = []
        named: dict[str, paddle.Tensor] = {}

    fields = Spelled.document_schema().by_name
    assert fields["bare"].type is PaddleTensor
    assert fields["shaped"].type is PaddleTensor[float32, 3, "n"]
    tensor = paddle.ones([3, 2])
    spelled = Spelled(bare=tensor, shaped=tensor, many=[tensor, None], named={"a": np.ones(2, np.float32)})
    assert spelled.bare is spelled.shaped is spelled.many[0] is tensor
    assert isinstance(spelled.named["a"], paddle.Tensor)
    with pytest.raises(
        ValidationError, match=r"expected PaddleTensor float32 \(3, n\), got float32 \(2, 3\) of paddle"
    ):
        Spelled(bare=tensor, shaped=paddle.ones([2, 3]))
    assert Spelled.model_json_schema()["properties"]["bare"]["x-tensor"] == {"dtype": None, "shape": None}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 3), (0, 3), ()], ids=str)
def test_json_pickle_and_copy_keep_dtype(dtype: str, shape: tuple[int, ...]) -> None:
    tensor = paddle.ones(shape).astype(dtype)
    sample = Sample(x=tensor)
    for again in (
        Sample.model_validate_json(sample.model_dump_json()),
        pickle.loads(pickle.dumps(sample)),
        copy.deepcopy(sample),
        sample.model_copy(deep=True),
        copy.copy(sample),
    ):
        assert again == sample
        assert isinstance(again.x, paddle.Tensor)
        assert again.x.dtype == tensor.dtype
        assert tuple(again.x.shape) == shape


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "uint64"])
def test_dtypes_that_paddle_misreads_are_rejected(dtype: str) -> None:
    """To paddle, an array of uint16 is one of bfloat16."""
    with pytest.raises(TensorError, match=f"paddle has no dtype '{dtype}'"):
        PaddleTensor(np.ones(2, dtype))


def test_lists_and_arrays_are_converted() -> None:
    assert PaddleTensor([1, 2]).dtype == paddle.int64
    assert PaddleTensor([1.5]).dtype == paddle.float32
    assert PaddleTensor([1j]).dtype == paddle.complex64
    assert PaddleTensor[paddle.bfloat16]([1.5]).dtype == paddle.bfloat16
    assert PaddleTensor(np.ones(2)).dtype == paddle.float64
    result = PaddleTensor(np.arange(6).reshape(2, 3)[:, ::-1])
    assert result.numpy().tolist() == [[2, 1, 0], [5, 4, 3]]
    back = NdArray(result)
    assert (back.dtype, back.shape) == (np.int64, (2, 3))
    for value, tp in (
        ([300], PaddleTensor[paddle.uint8]),
        ([[1], [2, 3]], PaddleTensor),
        ("ab", PaddleTensor),
        (3, PaddleTensor),
    ):
        with pytest.raises(TensorError):
            tp(value)


def test_tensor_with_gradient_is_not_converted() -> None:
    tensor = paddle.ones([2])
    tensor.stop_gradient = False
    for value in (tensor, [tensor]):
        with pytest.raises(TensorError, match=r"it is part of a gradient graph \(use .detach\(\)\)"):
            NdArray(value)


def test_copy_detaches_tensor_from_gradient_graph() -> None:
    leaf = paddle.ones([2])
    leaf.stop_gradient = False
    sample = Sample(x=leaf * 3)
    for again in (copy.deepcopy(sample), sample.model_copy(deep=True), pickle.loads(pickle.dumps(sample))):
        assert again == sample
        assert again.x is not sample.x
        assert again.x.is_leaf
    assert not copy.deepcopy(sample).x.stop_gradient


def test_parameter_is_kept_and_copied() -> None:
    parameter = paddle.create_parameter([2], "float32")
    sample = Sample(x=parameter)
    assert sample.x is parameter
    again = copy.deepcopy(sample)
    assert again == sample
    assert type(again.x) is type(parameter)
    assert again.x is not parameter


@pytest.mark.parametrize(
    "make",
    [
        lambda: paddle.sparse.sparse_coo_tensor([[0, 1], [1, 0]], [1.0, 2.0], [2, 2]),
        lambda: paddle.sparse.sparse_csr_tensor([0, 1, 2], [1, 0], [1.0, 2.0], [2, 2]),
    ],
    ids=["coo", "csr"],
)
def test_sparse_tensor_is_rejected(make: Any) -> None:
    """Pickling one ends the process."""
    sparse = make()
    for document in (Sample, Holder):
        document(x=paddle.ones([2]))  # the fast path must not skip the check
        for _ in range(2):
            with pytest.raises(ValidationError) as caught:
                document(x=sparse)
            assert "a sparse paddle tensor would end the process when pickled (use .to_dense())" in str(caught.value)
    for tp in (PaddleTensor, AnyTensor, PaddleTensor[2, 2], NdArray):
        assert not isinstance(sparse, tp)
        with pytest.raises(TensorError, match="sparse"):
            tp(sparse)
    with pytest.raises(PickleError, match="A sparse paddle tensor cannot be pickled"):
        pickle.dumps(Anything(value=[sparse]))
    with pytest.raises(TensorError, match="sparse"):
        tensor_to_json(sparse)


def test_pickle_of_float8_from_before_loads() -> None:
    """A document as quire 0.1 pickled it, with a reducer for all tensors of paddle in `copyreg`."""
    again = pickle.loads((Path(__file__).parent / "golden" / "float8-paddle.pickle").read_bytes())
    assert again.embedding.dtype == paddle.float8_e5m2
    assert again.embedding.astype("float32").tolist() == [0, 1, 2]


def test_document_equality_compares_values() -> None:
    for a, b, equal in (
        (paddle.to_tensor([1.0, float("nan")]), paddle.to_tensor([1.0, float("nan")]), True),
        (paddle.to_tensor([1.0, float("nan")]), paddle.to_tensor([float("nan"), 1.0]), False),
        (paddle.ones([2]), paddle.ones([2]).astype("float64"), False),
        (paddle.ones([2]), paddle.ones([2, 1]), False),
        (paddle.ones([2]).astype("bfloat16"), paddle.ones([2]).astype("bfloat16"), True),
    ):
        assert (Sample(x=a) == Sample(x=b)) is equal
    assert Holder(x=paddle.ones([2])) != Holder(x=np.ones(2, np.float32))


def test_framework_reports_dtype_shape_and_device() -> None:
    framework = framework_of(paddle.ones([1]))
    assert framework is not None
    assert (framework.name, framework.layout(paddle.ones([1]))) == ("paddle", "dense")
    assert "cpu" in framework.device(paddle.ones([1]))
    assert framework.shape(paddle.ones([2, 3])) == (2, 3)
