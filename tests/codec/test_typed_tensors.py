"""Tensors of every framework in messages of their document's class."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quire import BaseDocument
from quire.errors import DecodeError, EncodeError
from quire.typing import AnyTensor, JaxArray, NdArray, PaddleTensor, TorchTensor, float32, uint8


class Frame(BaseDocument):
    pixels: NdArray[uint8, 2, "n"]


class TorchHolder(BaseDocument):
    value: TorchTensor


class JaxHolder(BaseDocument):
    value: JaxArray


class PaddleHolder(BaseDocument):
    value: PaddleTensor


class Either(BaseDocument):
    value: TorchTensor[float32, 2] | NdArray[float32, 2]


class AnyHolder(BaseDocument):
    value: AnyTensor


def changed(**parts: Any) -> Any:
    """The message of a frame, with some parts of its tensor changed."""
    message = Frame(pixels=np.arange(6, dtype=np.uint8).reshape(2, 3)).to_typed_protobuf()
    for name, value in parts.items():
        message.pixels.ClearField(name)
        if isinstance(value, list):
            getattr(message.pixels, name).extend(value)
        else:
            setattr(message.pixels, name, value)
    return message


def test_tensor_data_is_little_endian_in_c_order() -> None:
    class Holder(BaseDocument):
        value: NdArray

    for array in (np.arange(6, dtype=">i2").reshape(3, 2).T, np.arange(6, dtype="<i2").reshape(3, 2).T):
        tensor = Holder(value=array).to_typed_protobuf().value
        assert (tensor.dtype, list(tensor.shape)) == ("int16", [2, 3])
        assert tensor.data == bytes([0, 0, 2, 0, 4, 0, 1, 0, 3, 0, 5, 0])
    copy = Holder.from_typed_protobuf(Holder(value=array).to_typed_protobuf()).value
    copy += 1  # the memory is the reader's own


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"data": b"12345"}, r"a tensor of uint8 \(2, 3\) needs 6 bytes, got 5"),
        ({"shape": [2, 2**62]}, r"needs \d+ bytes, got 6"),
        ({"shape": [2**63, 2, 0], "data": b""}, "Frame.pixels: "),
        ({"shape": [1] * 100, "data": b"1"}, "Frame.pixels: "),
        ({"shape": [6]}, r"expected NdArray uint8 \(2, n\), got uint8 \(6,\) of numpy"),
        ({"dtype": "int8"}, r"expected NdArray uint8"),
        ({"dtype": "object"}, "'object' is not a dtype of tensors"),
        ({"dtype": "datetime64[ns", "shape": [0], "data": b""}, "Frame.pixels: "),
        ({"dtype": "bool"}, "a bool is 0 or 1"),
        ({"dtype": "string"}, "needs 6 strings, got 0"),
    ],
)
def test_tensor_that_is_none_raises_an_error_with_its_field(parts: dict[str, Any], reason: str) -> None:
    with pytest.raises(DecodeError, match=reason) as caught:
        Frame.from_typed_protobuf(changed(**parts).SerializeToString())
    assert str(caught.value).startswith("Frame.pixels: ")


def test_any_tensor_is_read_as_numpy() -> None:
    holder = AnyHolder(value=np.ones(3))
    assert type(AnyHolder.from_typed_protobuf(holder.to_typed_protobuf()).value) is np.ndarray
    assert "// any dtype any shape of any framework, read as numpy" in AnyHolder.to_proto_schema()


@pytest.mark.needs("torch", "ml_dtypes")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int64", "bool", "complex64"])
def test_torch_tensors_round_trip_in_typed_messages(dtype: str) -> None:
    import torch

    value = torch.tensor([[0, 1], [1, 0]]).to(getattr(torch, dtype)).t()
    holder = TorchHolder(value=value)
    assert TorchHolder.from_typed_protobuf(holder.to_typed_protobuf().SerializeToString()).identical(holder)


@pytest.mark.needs("torch")
def test_torch_parameters_round_trip_and_sparse_tensors_are_rejected() -> None:
    import torch

    holder = TorchHolder(value=torch.nn.Parameter(torch.ones(2)))
    assert TorchHolder.from_typed_protobuf(holder.to_typed_protobuf()).value.tolist() == [1, 1]
    with pytest.raises(EncodeError, match=r"TorchHolder\.value: .* its layout is coo; make it dense first"):
        TorchHolder(value=torch.eye(2).to_sparse()).to_typed_protobuf()
    with pytest.raises(EncodeError, match=r"TorchHolder\.value: "):
        TorchHolder(value=torch.empty(2, device="meta")).to_typed_protobuf()


@pytest.mark.needs("torch")
def test_a_union_of_frameworks_keeps_the_framework() -> None:
    import torch

    for value in (torch.ones(2), np.ones(2, np.float32)):
        either = Either(value=value)
        assert type(Either.from_typed_protobuf(either.to_typed_protobuf()).value) is type(value)


@pytest.mark.needs("jax")
def test_jax_arrays_round_trip_in_typed_messages() -> None:
    import jax.numpy as jnp

    holder = JaxHolder(value=jnp.arange(3.0).astype(jnp.bfloat16))
    assert JaxHolder.from_typed_protobuf(holder.to_typed_protobuf().SerializeToString()).identical(holder)


@pytest.mark.needs("tensorflow")
def test_tensorflow_tensors_round_trip_in_typed_messages() -> None:
    import tensorflow as tf

    from quire.typing import TensorFlowTensor

    class Holder(BaseDocument):
        value: TensorFlowTensor

    Holder.model_rebuild(_types_namespace={"TensorFlowTensor": TensorFlowTensor})
    for value in (tf.ones((2, 3)), tf.constant([["a", "ä"]]), tf.constant(b"\xff")):
        holder = Holder(value=value)
        assert Holder.from_typed_protobuf(holder.to_typed_protobuf().SerializeToString()).identical(holder)


@pytest.mark.needs("paddle")
def test_paddle_tensors_round_trip_in_typed_messages() -> None:
    import paddle

    holder = PaddleHolder(value=paddle.ones([2, 3]))
    assert PaddleHolder.from_typed_protobuf(holder.to_typed_protobuf().SerializeToString()).identical(holder)
