"""Columns of every framework: kept by default, converted on request, with the same dtypes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quire import BaseDocument, DocumentArray, DocumentBatch
from quire.columns import ObjectColumn, RaggedColumn, TensorColumn
from quire.errors import ColumnError
from quire.typing import AnyTensor, JaxArray, NdArray, PaddleTensor, TorchTensor, float32


class Part(BaseDocument):
    vector: NdArray | None = None
    number: int = 0


class Torch(BaseDocument):
    tensor: TorchTensor | None = None
    fixed: TorchTensor[float32, 2] | None = None
    array: NdArray | None = None
    anything: AnyTensor | None = None
    label: int = 0
    weight: float | None = None
    part: Part = Part()
    parts: DocumentArray[Part] = []


def there_and_back(docs: DocumentArray[Any], **options: Any) -> Any:
    batch = docs.stack(**options)
    assert batch.unstack().identical(docs)
    assert [batch[row] for row in range(len(docs))] == list(docs)
    return batch


# --- torch


@pytest.mark.needs("torch")
def test_stack_keeps_frameworks_and_makes_numbers_numpy() -> None:
    import torch

    docs = DocumentArray[Torch]([Torch(tensor=torch.ones(2), array=np.ones(2), anything=torch.ones(1), label=3)] * 2)
    batch = there_and_back(docs)
    assert [type(batch[name]) for name in ("tensor", "array", "anything", "label")] == [
        *(torch.Tensor, np.ndarray, torch.Tensor, np.ndarray),
    ]
    assert [batch.tensor.dtype, batch.array.dtype, batch.label.dtype] == [torch.float32, np.float64, np.int64]


@pytest.mark.needs("torch")
def test_stack_to_torch_converts_every_column() -> None:
    import torch

    docs = DocumentArray[Torch](
        [
            Torch(tensor=torch.ones(2), array=np.ones(2), anything=np.zeros(3, np.int8), label=1, weight=0.5),
            Torch(
                tensor=torch.ones(2), array=np.zeros(2), label=2, part=Part(vector=np.ones(1)), parts=[Part(number=4)]
            ),
        ]
    )
    batch = docs.stack("torch")
    names = ("tensor", "array", "anything", "label", "weight", "part.vector", "part.number", "parts.number")
    assert {type(batch[name]) for name in names} == {torch.Tensor}
    assert [batch[name].dtype for name in ("array", "anything", "label", "weight")] == [
        *(torch.float64, torch.int8, torch.int64, torch.float64),
    ]
    assert batch.validity("weight").tolist() == [True, False]
    assert batch.validity("weight").dtype == torch.bool
    back = batch.unstack()  # a field typed with numpy gets numpy again; one that takes any keeps torch
    assert isinstance(back[0].array, np.ndarray)
    assert isinstance(batch[0].array, np.ndarray)
    assert isinstance(back[0].anything, torch.Tensor)
    assert back[0].part == docs[0].part
    assert back.label == [1, 2]
    batch[0].array[0] = 7
    assert batch.array[0, 0] == 7  # and shares its memory


@pytest.mark.needs("torch")
@pytest.mark.parametrize("dtype", ["bool", "uint8", "int64", "float16", "bfloat16", "float8_e4m3fn", "complex64"])
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)], ids=str)
def test_stack_keeps_torch_dtypes(dtype: str, shape: tuple[int, ...]) -> None:
    import torch

    tensor = torch.ones(shape).to(getattr(torch, dtype))
    batch = there_and_back(
        DocumentArray[Torch]([Torch(tensor=tensor, anything=tensor), Torch(tensor=tensor, anything=tensor)])
    )
    assert (batch.tensor.dtype, batch.tensor.shape) == (tensor.dtype, (2, *shape))
    assert batch[1:].tensor.dtype == batch.take([0]).anything.dtype == tensor.dtype
    joined = DocumentBatch[Torch].concat([batch, batch])
    assert (joined.tensor.dtype, joined.tensor.shape) == (tensor.dtype, (4, *shape))
    missing = there_and_back(DocumentArray[Torch]([Torch(tensor=tensor), Torch()]))
    assert missing.tensor.dtype == tensor.dtype


@pytest.mark.needs("torch")
def test_stack_pads_and_rags_torch_tensors() -> None:
    import torch

    docs = DocumentArray[Torch]([Torch(tensor=torch.ones(3)), Torch(), Torch(tensor=torch.ones(1))])
    with pytest.raises(ColumnError, match=r"Torch.tensor: mixed shapes: row 0 has \(3,\), row 2 has \(1,\)"):
        docs.stack()
    padded = there_and_back(docs, shapes="pad")
    assert padded.tensor.tolist() == [[1, 1, 1], [0, 0, 0], [1, 0, 0]]
    assert padded.mask("tensor").tolist() == [[True] * 3, [False] * 3, [True, False, False]]
    assert isinstance(padded.mask("tensor"), torch.Tensor)
    ragged = there_and_back(docs, shapes="ragged")
    assert isinstance(ragged.tensor, RaggedColumn)
    assert ragged.to_framework("numpy").tensor.flat.tolist() == [1, 1, 1, 1]
    with pytest.raises(ColumnError, match="Torch.tensor: mixed dtypes: row 0 has torch.int64, row 1 has torch.float32"):
        DocumentArray[Torch]([Torch(tensor=torch.tensor([1])), Torch(tensor=torch.tensor([0.5]))]).stack()


@pytest.mark.needs("torch")
def test_rows_share_memory_with_torch_columns() -> None:
    import torch

    batch = DocumentArray[Torch]([Torch(tensor=torch.zeros(2)) for _ in range(4)]).stack("torch")
    row, part = batch[1], batch[2:]
    row.tensor[0] = 5
    part.tensor[0] = 6
    assert batch.tensor.tolist() == [[0, 0], [5, 0], [6, 6], [0, 0]]
    assert batch.unstack()[1].tensor.data_ptr() == batch.tensor[1].data_ptr()
    assert part.tensor.untyped_storage().data_ptr() == batch.tensor.untyped_storage().data_ptr()
    row.tensor = torch.ones(2)
    assert batch.tensor[1].tolist() == [5, 0]
    assert batch[::-1].tensor[0].tolist() == [0, 0]


@pytest.mark.needs("torch")
def test_gradients_flow_through_stack() -> None:
    import torch

    leaf = torch.ones(2, requires_grad=True)
    batch = DocumentArray[Torch]([Torch(tensor=leaf * 2), Torch(tensor=leaf)]).stack()
    batch.tensor.sum().backward()
    assert leaf.grad.tolist() == [3, 3]
    with pytest.raises(ColumnError, match="Torch.tensor: .*part of a gradient graph"):
        batch.to_framework("numpy")
    with pytest.raises(ColumnError, match="Torch.tensor: .*part of a gradient graph"):
        DocumentArray[Torch]([Torch(tensor=leaf)]).stack("numpy")


@pytest.mark.needs("torch")
def test_stack_does_not_change_parameters() -> None:
    import torch

    parameter = torch.nn.Parameter(torch.ones(2))
    docs = DocumentArray[Torch]([Torch(tensor=parameter)])
    batch = docs.stack()
    assert docs[0].tensor is parameter
    assert isinstance(docs[0].tensor, torch.nn.Parameter)
    assert batch.tensor.requires_grad


@pytest.mark.needs("torch", "scipy")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
def test_stack_holds_sparse_tensors_as_objects() -> None:
    import scipy.sparse
    import torch

    sparse = torch.eye(3).to_sparse()
    docs = DocumentArray[Torch](
        [Torch(tensor=sparse, anything=scipy.sparse.eye(3).tocsr()), Torch(tensor=sparse.to_sparse_csr())]
    )
    batch = there_and_back(docs)
    assert [type(batch.column(name)) for name in ("tensor", "anything")] == [ObjectColumn, ObjectColumn]
    assert batch.tensor[0] is sparse
    assert docs.stack("torch").tensor[0] is sparse
    assert batch.to_framework("torch").tensor[0] is sparse
    assert batch.share_memory_().pin_memory().to("cpu").tensor[0].layout == torch.sparse_coo
    dense = DocumentArray[Torch]([Torch(tensor=sparse), Torch(tensor=torch.eye(3))]).stack()
    assert type(dense.column("tensor")) is ObjectColumn


@pytest.mark.needs("torch")
def test_stack_holds_mixed_frameworks_as_objects() -> None:
    import torch

    docs = DocumentArray[Torch]([Torch(anything=torch.ones(2)), Torch(anything=np.ones(2, np.float32)), Torch()])
    batch = there_and_back(docs)
    assert type(batch.column("anything")) is ObjectColumn
    converted = docs.stack("torch")
    assert converted.anything.shape == (3, 2)
    assert converted.validity("anything").tolist() == [True, True, False]
    moved = batch.to_framework("torch")
    assert [type(value) for value in moved.anything] == [torch.Tensor, torch.Tensor, type(None)]
    mixed = DocumentArray[Torch]([Torch(anything=np.zeros(1, np.int8)), Torch(anything=np.zeros(1))]).stack("torch")
    assert [value.dtype for value in mixed.anything] == [torch.int8, torch.float64]


@pytest.mark.needs("jax", "scipy")
def test_stack_holds_mixed_frameworks_and_layouts_as_objects() -> None:
    import jax.numpy as jnp
    import scipy.sparse

    class Loose(BaseDocument):
        value: AnyTensor

    for values in (
        [jnp.ones(2, "float32"), np.ones(2, np.float32)],
        [np.ones(2, np.float32), jnp.ones(2, "float32")],
        [scipy.sparse.eye(2).tocsr(), scipy.sparse.eye(2).tocsr()],
        [scipy.sparse.eye(2).tocsr()],
    ):
        batch = DocumentArray[Loose](Loose(value=value) for value in values).stack()
        assert type(batch.column("value")) is ObjectColumn
        assert all(result is value for result, value in zip(batch.value, values, strict=True))


@pytest.mark.needs("torch")
def test_to_moves_tensors_to_device() -> None:
    import torch

    docs = DocumentArray[Torch](
        [Torch(tensor=torch.ones(2), array=np.ones(2), part=Part(number=1), anything=torch.eye(2))]
    )
    batch = docs.stack()
    meta = batch.to("meta")
    assert [str(meta.tensor.device), str(meta.anything.device), type(meta.array)] == ["meta", "meta", np.ndarray]
    assert str(batch.tensor.device) == "cpu"
    assert str(docs.stack("torch").to("meta").part.number.device) == "meta"
    sparse = DocumentArray[Torch]([Torch(tensor=torch.eye(2).to_sparse())]).stack().to("meta")
    assert str(sparse.tensor[0].device) == "meta"
    with pytest.raises(ColumnError, match="Torch.tensor: .*it is on meta"):
        meta.to_framework("numpy")


@pytest.mark.needs("torch")
def test_to_framework_round_trips() -> None:
    import torch

    docs = DocumentArray[Torch](
        [
            Torch(tensor=torch.ones(2), array=np.ones(3), anything=np.ones(2, np.int16), label=2, parts=[Part()]),
            Torch(tensor=torch.ones(2), array=np.ones(3), anything=np.ones(2, np.int16), weight=1.0),
        ]
    )
    batch = docs.stack()
    torched = batch.to_framework("torch")
    assert {type(torched[name]) for name in ("tensor", "array", "anything", "label", "weight", "parts.number")} == {
        torch.Tensor
    }
    assert np.shares_memory(torched.array.numpy(), batch.array)
    assert torched.to_framework("numpy").to_framework("torch").identical(torched)
    numpied = torched.to_framework("numpy")
    assert {type(numpied[name]) for name in ("tensor", "array", "anything", "label")} == {np.ndarray}
    assert numpied.identical(batch)  # its rows are what the fields are typed with
    assert isinstance(numpied[0].tensor, torch.Tensor)


@pytest.mark.needs("torch")
def test_share_memory_and_pin_memory() -> None:
    import torch

    batch = DocumentArray[Torch]([Torch(tensor=torch.ones(2), label=1, parts=[Part(number=2)])]).stack("torch")
    assert not batch.tensor.is_shared()
    held = batch.tensor
    assert batch.share_memory_() is batch
    assert batch.tensor is held
    assert [batch[name].is_shared() for name in ("tensor", "label", "parts.number")] == [True] * 3
    pinned = batch.pin_memory()
    assert pinned.identical(batch)
    if not torch.accelerator.is_available():
        assert pinned.tensor is batch.tensor


@pytest.mark.needs("torch")
def test_set_columns_from_torch() -> None:
    import torch

    batch = DocumentArray[Torch]([Torch(), Torch()]).stack("torch")
    batch.array = torch.ones(2, 3)
    assert isinstance(batch.array, np.ndarray)  # typed with numpy
    batch.tensor = np.ones((2, 3), np.float32)
    assert isinstance(batch.tensor, torch.Tensor)
    batch.label = torch.tensor([4, 5])
    assert batch.unstack().label == [4, 5]
    with pytest.raises(ColumnError, match=r"Torch.fixed: expected rows of float32 \(2,\), got float64 \(2, 2\)"):
        batch.fixed = torch.ones(2, 2, dtype=torch.float64)
    with pytest.raises(ColumnError, match="gradient graph"):
        batch.array = torch.ones(2, 3, requires_grad=True)
    empty = DocumentArray[Torch]().stack()
    assert isinstance(empty.fixed, torch.Tensor)
    assert (empty.fixed.dtype, empty.fixed.shape) == (torch.float32, (0, 2))


# --- TensorFlow


@pytest.mark.needs("tensorflow")
def test_stack_and_unstack_tensorflow() -> None:
    import tensorflow as tf

    from quire.typing import TensorFlowTensor

    class Flow(BaseDocument):
        wrapped: TensorFlowTensor | None = None
        native: tf.Tensor | None = None
        anything: AnyTensor | None = None
        number: int = 0

    ones = tf.ones((2, 3))
    docs = DocumentArray[Flow]([Flow(wrapped=ones, native=ones, anything=ones), Flow(native=ones * 2)])
    batch = there_and_back(docs)
    assert type(batch.wrapped) is TensorFlowTensor
    assert [type(batch.native), type(batch.anything)] == [type(ones), type(ones)]
    assert [type(batch[0].wrapped), type(batch[0].native)] == [TensorFlowTensor, type(ones)]
    assert tuple(batch.wrapped.shape) == (2, 2, 3)
    assert batch.validity("wrapped").numpy().tolist() == [True, False]
    assert float(tf.reduce_sum(batch.native)) == 18
    assert batch.take([1]).native.numpy().sum() == 12
    assert there_and_back(docs[::-1])[1:].native.shape == (1, 2, 3)
    joined = DocumentBatch[Flow].concat([batch, batch])
    assert joined.unstack().identical(docs + docs)
    converted = docs.stack("tensorflow")
    assert converted.number.dtype == tf.int64
    assert docs.stack("numpy").native.dtype == np.float32
    back = batch.to_framework("numpy")
    assert (back[0].wrapped.dtype, type(back[0].native), type(back[0].anything)) == (tf.float32, type(ones), np.ndarray)
    padded = DocumentArray[Flow]([Flow(native=tf.ones(1)), Flow(native=tf.ones(2))])
    assert there_and_back(padded, shapes="pad").mask("native").numpy().tolist() == [[True, False], [True, True]]
    assert there_and_back(padded, shapes="ragged").native.flat.shape == (3,)
    sparse = tf.sparse.from_dense(np.eye(2, dtype=np.float32))
    assert type(there_and_back(DocumentArray[Flow]([Flow(wrapped=sparse)])).column("wrapped")) is ObjectColumn
    words = DocumentArray[Flow]([Flow(native=tf.constant(["a", "b"])), Flow(native=tf.constant(["c", ""]))])
    assert there_and_back(words).native.dtype == tf.string
    assert type(DocumentArray[Flow]().stack().wrapped) is TensorFlowTensor


@pytest.mark.needs("tensorflow")
def test_rows_are_converted_to_declared_tensorflow() -> None:
    import tensorflow as tf

    class Plain(BaseDocument):
        pixels: NdArray[2]

    batch = DocumentArray[Plain]([Plain(pixels=np.ones(2, np.float32))]).stack("tensorflow")
    assert isinstance(batch.pixels, tf.Tensor)
    assert isinstance(batch[0].pixels, np.ndarray)  # a row is what the class says


# --- jax


class Jax(BaseDocument):
    array: JaxArray | None = None
    label: int = 0


@pytest.mark.needs("jax")
def test_stack_and_unstack_jax() -> None:
    import jax
    import jax.numpy as jnp

    docs = DocumentArray[Jax]([Jax(array=jnp.ones(2), label=1), Jax(array=jnp.zeros(2)), Jax()])
    batch = there_and_back(docs)
    assert isinstance(batch.array, jax.Array)
    assert batch.array.dtype == jnp.float32
    assert batch.validity("array").tolist() == [True, True, False]
    assert batch.take([2, 0]).unstack().identical(docs[[2, 0]])
    assert DocumentBatch[Jax].concat([batch, batch]).unstack().identical(docs + docs)
    assert batch.to_framework("numpy").array.dtype == np.float32
    with pytest.raises(ColumnError, match="Jax.label: jax would cut int64 to 32 bits"):
        docs.stack("jax")
    with pytest.raises(ColumnError, match="Jax.label: jax would cut int64 to 32 bits"):
        batch.to_framework("jax")
    short = DocumentBatch[Jax].from_columns({"label": np.array([1, 2], np.int32)})
    assert isinstance(short.to_framework("jax").label, jax.Array)
    mixed = DocumentArray[Jax]([Jax(array=jnp.ones(2)), Jax(array=jnp.ones((1, 3)))])
    assert there_and_back(mixed, shapes="ragged").array.flat.shape == (5,)


# --- paddle


class Paddle(BaseDocument):
    tensor: PaddleTensor | None = None


@pytest.mark.needs("paddle")
def test_stack_and_unstack_paddle() -> None:
    import paddle

    docs = DocumentArray[Paddle]([Paddle(tensor=paddle.ones([2, 3])), Paddle(), Paddle(tensor=paddle.zeros([2, 3]))])
    batch = there_and_back(docs)
    assert isinstance(batch.tensor, paddle.Tensor)
    assert type(batch.column("tensor")) is TensorColumn
    assert batch.take([2, 0]).unstack().identical(docs[[2, 0]])
    assert batch[1:].unstack().identical(docs[1:])
    assert len(batch[:0]) == len(batch.take([])) == 0
    assert DocumentBatch[Paddle].concat([batch, batch]).unstack().identical(docs + docs)
    assert batch.to_framework("numpy").tensor.shape == (3, 2, 3)
    mixed = DocumentArray[Paddle]([Paddle(tensor=paddle.ones([1])), Paddle(tensor=paddle.ones([3]))])
    assert there_and_back(mixed, shapes="pad").mask("tensor").numpy().sum() == 4
    assert there_and_back(mixed, shapes="ragged").tensor.flat.shape == [4]
