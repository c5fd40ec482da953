"""Equality, copies and JSON of torch tensors of every layout and state."""

from __future__ import annotations

import copy
import json
import multiprocessing
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic_core import PydanticSerializationError

from quire import BaseDocument, DocumentArray
from quire.errors import TensorError
from quire.tensors import framework_of, tensor_from_json, tensor_to_json
from quire.typing import AnyTensor, TorchTensor

pytestmark = [
    pytest.mark.needs("torch"),
    pytest.mark.filterwarnings("ignore:Sparse (CS|BS). tensor support is in beta state:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
]


class Sample(BaseDocument):
    x: TorchTensor


class Pair(BaseDocument):
    a: TorchTensor
    b: TorchTensor
    rest: dict[str, list[TorchTensor]] = {}


class Containers(BaseDocument):
    model_config = {"extra": "allow"}
    items: list[TorchTensor]
    table: dict[str, Any]
    anything: Any


NAN = float("nan")
EYE = torch.eye(3)


@pytest.mark.parametrize(
    ("a", "b", "equal"),
    [
        (lambda: torch.tensor([1.0, NAN]), lambda: torch.tensor([1.0, NAN]), True),
        (lambda: torch.tensor([1.0, NAN]), lambda: torch.tensor([NAN, 1.0]), False),
        (lambda: torch.tensor([NAN, 1]).to(torch.bfloat16), lambda: torch.tensor([NAN, 1]).to(torch.bfloat16), True),
        (
            lambda: torch.tensor([NAN, 1]).to(torch.float8_e5m2),
            lambda: torch.tensor([NAN, 1]).to(torch.float8_e5m2),
            True,
        ),
        (lambda: torch.tensor([2, 1]).to(torch.float8_e5m2), lambda: torch.tensor([1, 1]).to(torch.float8_e5m2), False),
        (lambda: torch.tensor([complex(NAN, 1)]), lambda: torch.tensor([complex(NAN, 1)]), True),
        (lambda: torch.ones(2), lambda: torch.ones(2).double(), False),  # dtype
        (lambda: torch.ones(2), lambda: torch.ones(2, 1), False),  # shape: no broadcast
        (lambda: torch.ones(0, 2), lambda: torch.ones(0, 3), False),
        (lambda: torch.ones(0, 2), lambda: torch.ones(0, 2), True),
        (lambda: torch.tensor(1), lambda: torch.tensor(1), True),
        (lambda: torch.tensor(1), lambda: torch.tensor([1]), False),
        (lambda: torch.ones(2), lambda: torch.ones(2, requires_grad=True), True),  # gradients do not count
        (lambda: torch.ones(2), lambda: torch.nn.Parameter(torch.ones(2)), True),
        (lambda: torch.ones(2, 3), lambda: torch.ones(3, 2).t(), True),
        (lambda: torch.ones(2), lambda: torch.ones(2, device="meta"), False),  # device
        (
            lambda: torch.ones(2, device="meta"),
            lambda: torch.ones(2, device="meta"),
            False,
        ),  # meta tensors have no values
        (EYE.to_sparse, EYE.to_sparse, True),
        (EYE.to_sparse, (EYE * 2).to_sparse, False),
        (EYE.to_sparse, lambda: EYE, False),  # layout
        (EYE.to_sparse_csr, EYE.to_sparse_csr, True),
        (EYE.to_sparse_csr, (EYE * 2).to_sparse_csr, False),
        (EYE.to_sparse_csr, EYE.to_sparse_csc, False),
        (EYE.to_sparse_csc, EYE.to_sparse_csc, True),
        (lambda: EYE.to_sparse_bsr((1, 1)), lambda: EYE.to_sparse_bsr((1, 1)), True),
        (
            lambda: torch.sparse_coo_tensor([[1, 0, 1]], [1.0, 2.0, 3.0], (2,)),
            lambda: torch.sparse_coo_tensor([[0, 1]], [2.0, 4.0], (2,)),
            True,  # entries of one index are summed
        ),
        (
            lambda: torch.sparse_csr_tensor(torch.tensor([0, 1]), torch.tensor([0]), torch.ones(1), (1, 2)),
            lambda: torch.sparse_csr_tensor(torch.tensor([0, 1]).int(), torch.tensor([0]).int(), torch.ones(1), (1, 2)),
            True,
        ),
        (
            lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
            lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
            True,
        ),
        (
            lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
            lambda: torch.nested.nested_tensor([torch.ones(3), torch.ones(2)], layout=torch.jagged),
            False,
        ),
    ],
)
def test_document_equality_compares_values(a: Any, b: Any, equal: bool) -> None:
    left, right = a(), b()
    assert (Sample(x=left) == Sample(x=right)) is equal
    assert (Sample(x=right) == Sample(x=left)) is equal
    assert Sample(x=left) == Sample(x=left)  # identity, also for meta tensors


def test_tensors_of_two_frameworks_are_not_equal() -> None:
    class Holder(BaseDocument):
        x: AnyTensor

    assert Holder(x=torch.ones(2)) != Holder(x=np.ones(2, np.float32))
    assert Holder(x=np.ones(2, np.float32)) != Holder(x=torch.ones(2))


def test_copy_of_leaf_is_leaf() -> None:
    leaf = torch.ones(2, requires_grad=True)
    leaf.sum().backward()
    for again in (copy.deepcopy(Sample(x=leaf)), Sample(x=leaf).model_copy(deep=True)):
        assert again.x is not leaf
        assert again.x.is_leaf
        assert again.x.requires_grad
        assert again.x.grad is not None
        assert again.x.grad is not leaf.grad
        with torch.no_grad():
            again.x.fill_(5)
    assert leaf.tolist() == [1, 1]


def test_copy_of_parameter_is_parameter() -> None:
    sample = Sample(x=torch.nn.Parameter(torch.ones(2)))
    for again in (copy.deepcopy(sample), sample.model_copy(deep=True), pickle.loads(pickle.dumps(sample))):
        assert type(again.x) is torch.nn.Parameter
        assert again.x is not sample.x
        assert again.x.requires_grad


def test_copy_detaches_tensor_from_gradient_graph() -> None:
    """torch alone refuses to deep-copy it."""
    leaf = torch.ones(2, requires_grad=True)
    inside = leaf * 3
    sample = Pair(a=inside, b=leaf, rest={"more": [inside]})
    for again in (copy.deepcopy(sample), sample.model_copy(deep=True)):
        assert again == sample
        assert again.a.is_leaf
        assert again.a.requires_grad
        assert again.a is again.rest["more"][0]  # the shared tensor stays shared
    assert sample.a.grad_fn is not None
    again = pickle.loads(pickle.dumps(sample))
    assert again == sample
    assert again.a.requires_grad
    shallow = copy.copy(sample)
    assert shallow.a is inside


def test_deepcopy_copies_memory_and_keeps_sharing() -> None:
    base = torch.zeros(4)
    pair = Pair(a=base[:2], b=base[1:3])
    again = copy.deepcopy(pair)
    again.a.fill_(7)
    assert base.tolist() == [0, 0, 0, 0]
    assert again.b.tolist() == [7, 0]


@pytest.mark.parametrize(
    "make",
    [
        EYE.to_sparse,
        EYE.to_sparse_csr,
        EYE.to_sparse_csc,
        lambda: EYE.to_sparse_bsr((1, 1)),
        lambda: EYE.to(torch.float64).to_sparse(),
        lambda: EYE.to(torch.bfloat16).to_sparse(),
        lambda: EYE.to(torch.bool).to_sparse(),
        lambda: torch.zeros(3, 0).to_sparse(),
        lambda: torch.zeros(3, 4).to_sparse(),
        lambda: torch.sparse_coo_tensor(
            [[2, 0]], torch.tensor([[1.0, NAN], [3.0, 4.0]]), (3, 2)
        ),  # the last axis is dense
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    ],
)
def test_other_layouts_are_copied_and_pickled(make: Any) -> None:
    sample = Sample(x=make())
    for again in (copy.deepcopy(sample), sample.model_copy(deep=True), pickle.loads(pickle.dumps(sample))):
        assert again == sample
        assert again.x is not sample.x
        assert again.x.layout is sample.x.layout


@pytest.mark.parametrize(
    "make",
    [
        EYE.to_sparse,
        EYE.to_sparse_csr,
        EYE.to_sparse_csc,
        lambda: EYE.to(torch.complex64).to_sparse(),
        lambda: EYE.to(torch.bfloat16).to_sparse(),
        lambda: EYE.to(torch.int8).to_sparse(),
        lambda: torch.zeros(3, 4).to_sparse(),
        lambda: torch.zeros(3, 0).to_sparse(),
        lambda: torch.zeros(3, 4).to_sparse_csr(),
        lambda: torch.ones(2, 2, 2).to_sparse(),
        lambda: torch.ones(4).to_sparse(),
        lambda: torch.sparse_coo_tensor([[0, 1]], [0.0, float("inf")], (2,)),  # an explicit zero
        lambda: torch.sparse_coo_tensor([[2, 0]], torch.tensor([[1.0, NAN], [3.0, 4.0]]), (3, 2)),
        lambda: torch.sparse_coo_tensor(torch.zeros(1, 0), torch.zeros(0, 2), (3, 2)),
        lambda: torch.eye(3, requires_grad=True).to_sparse(),
    ],
)
def test_sparse_json_roundtrip_keeps_tensor(make: Any) -> None:
    sample = Sample(x=make())
    again = Sample.model_validate_json(sample.model_dump_json())
    assert again == sample
    assert again.x.layout is sample.x.layout
    assert again.x.dtype is sample.x.dtype
    assert not again.x.requires_grad


def test_sparse_tensor_to_json_writes_layout_and_indices() -> None:
    written = tensor_to_json(torch.tensor([[0.0, 5.0], [0.0, NAN]]).to_sparse_csr())
    assert written == {
        "framework": "torch",
        "dtype": "float32",
        "shape": [2, 2],
        "layout": "csr",
        "indices": [[0, 1], [1, 1]],
        "data": [5.0, "NaN"],
    }


@pytest.mark.parametrize(
    "make",
    [
        lambda: EYE.to_sparse_bsr((1, 1)),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    ],
)
def test_layouts_without_json_form_are_rejected(make: Any) -> None:
    with pytest.raises(PydanticSerializationError, match="has no COO form here"):
        Sample(x=make()).model_dump_json()


def test_untrusted_sparse_content_is_validated() -> None:
    content = {
        "framework": "torch",
        "dtype": "float32",
        "shape": [2],
        "layout": "coo",
        "indices": [[1, 0]],
        "data": [1, 2],
    }
    assert tensor_from_json(content, None).to_dense().tolist() == [2, 1]  # in any order
    for changes in ({"indices": [[5, 0]]}, {"indices": [[0]]}, {"layout": "csq"}, {"layout": "torch.sparse_bsr"}):
        with pytest.raises(TensorError):
            tensor_from_json({**content, **changes}, None)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_dtypes_unknown_to_numpy_have_no_json_form() -> None:
    half = torch.ones(2, dtype=torch.complex32)
    assert Sample(x=half).x is half
    with pytest.raises(TensorError, match="numpy has no dtype 'complex32'"):
        tensor_to_json(half)


def test_json_of_tensor_with_gradient_is_its_value() -> None:
    leaf = torch.ones(2, requires_grad=True)
    for tensor in (leaf, leaf * 2, torch.nn.Parameter(torch.ones(2)), torch.ones(2, dtype=torch.complex64).conj()):
        again = Sample.model_validate_json(Sample(x=tensor).model_dump_json())
        assert again == Sample(x=tensor)
        assert type(again.x) is torch.Tensor
        assert not again.x.requires_grad


def test_json_keeps_float32_values() -> None:
    written = json.loads(Sample(x=torch.tensor([0.1, 1e-45, 3.4028235e38])).model_dump_json())
    assert torch.tensor(written["x"]["data"]).tolist() == torch.tensor([0.1, 1e-45, 3.4028235e38]).tolist()


def _send(connection: Any, dtype: torch.dtype) -> None:
    connection.send(Sample(id="a", x=torch.ones(2).to(dtype)))
    connection.recv()  # torch's shared memory lives as long as the sender


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn, torch.uint16], ids=str)
def test_documents_are_sent_between_processes(dtype: torch.dtype) -> None:
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_send, args=(there, dtype))
    process.start()
    assert here.recv().identical(Sample(id="a", x=torch.ones(2).to(dtype)))
    here.send("thanks")
    process.join()


def test_pickled_views_share_storage() -> None:
    """Also where quire carries the storage (float8): two views of one memory stay so."""
    base = torch.zeros(4).to(torch.float8_e5m2)
    again = pickle.loads(pickle.dumps(Pair(a=base[:2], b=base[1:3])))
    again.a.copy_(torch.ones(2))
    assert again.b.float().tolist() == [1, 0]


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.uint16, torch.complex32], ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_tensors_in_containers_are_pickled_in_any_dtype(dtype: torch.dtype) -> None:
    tensor = torch.ones(3).to(dtype)
    parameter = torch.nn.Parameter(tensor, requires_grad=False)
    document = Containers(items=[tensor, tensor], table={"a": (1, [tensor])}, anything={"b": parameter}, more=tensor)
    document.anything["itself"] = document.anything
    arrays = DocumentArray[Containers]([document])
    for again in (pickle.loads(pickle.dumps(document)), pickle.loads(pickle.dumps(arrays))[0]):
        tensors = [again.items[0], again.table["a"][1][0], again.anything["b"], again.more]
        assert all(item.dtype is dtype and item.tolist() == tensor.tolist() for item in tensors)
        assert again.items[0] is again.items[1]
        assert again.anything["itself"] is not None
    del document.anything["itself"]
    [again] = pickle.loads(pickle.dumps(arrays.stack())).unstack()
    assert again.table["a"][1][0].dtype is dtype
    assert again.more.dtype is dtype


def test_pickles_of_float8_from_before_load() -> None:
    """Documents and columns as quire 0.1 pickled them, with a reducer for all storages of torch in `copyreg`."""
    golden = Path(__file__).parent / "golden"
    again = pickle.loads((golden / "float8-document.pickle").read_bytes())
    assert again.embedding.dtype is torch.float8_e5m2
    assert again.embedding.float().tolist() == [0, 1, 2]
    batch = pickle.loads((golden / "uint16-batch.pickle").read_bytes())
    assert batch.embedding.dtype is torch.uint16
    assert batch.embedding.tolist() == [[0, 1, 2], [3, 4, 65535]]


def test_plain_tensors_are_pickled_by_torch_alone() -> None:
    """A pickle of a plain tensor has no reference to quire, whether torch can load it or not."""
    assert b"quire" not in pickle.dumps(torch.ones(3).to(torch.float8_e5m2))
    assert b"quire" not in pickle.dumps(torch.ones(3))


def test_framework_reports_dtype_shape_and_device() -> None:
    framework = framework_of(EYE)
    assert framework is not None
    assert (framework.name, framework.device(EYE), framework.layout(EYE)) == ("torch", "cpu", "dense")
    assert framework.layout(EYE.to_sparse()) == "coo"
    assert framework.is_sparse(EYE.to_sparse_csr())
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    assert framework.shape(nested) == (2, -1)
