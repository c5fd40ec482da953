"""Pickles of classes, documents, arrays and batches, and what cannot be pickled."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

import numpy as np
import pytest

from quire import BaseDocument, Document, DocumentArray, DocumentBatch, Text
from quire.errors import PickleError
from quire.typing import NdArray, TorchTensor, float32
from tests.strategies import Box, Branch, Color, Crate, Leaf, Node, Seed, Twig

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)

# --- in this process


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_generated_classes_are_pickled_by_recipe(protocol: int) -> None:
    classes = [
        *(DocumentArray, DocumentBatch, DocumentArray[Leaf], DocumentBatch[Leaf], DocumentArray[Box[int]]),
        *(
            Leaf,
            Box[int],
            Crate[Leaf],
            Box[Box[Leaf]],
            DocumentBatch[Crate[Leaf]],
            NdArray[float32, 3, "n"],
            BaseDocument,
        ),
    ]
    for cls in classes:
        assert pickle.loads(pickle.dumps(cls, protocol)) is cls


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_arrays_and_batches_round_trip(protocol: int) -> None:
    leaves = [Leaf(text="a", number=2**65, vector=[1, 2, 3]), Twig(text="b", bark={"x": 1})]
    for docs in (
        DocumentArray[Leaf](leaves),
        DocumentArray[Leaf](),
        DocumentArray([*leaves, Seed(a=1)]),
        DocumentArray(),
    ):
        for thing in (docs, docs.stack()):
            again = pickle.loads(pickle.dumps(thing, protocol))
            assert type(again) is type(thing)
            assert again.identical(thing)


def test_pickled_arrays_are_independent() -> None:
    docs = DocumentArray[Leaf]([Leaf(text="a")], unique_ids=True)
    again = pickle.loads(pickle.dumps(docs))
    again[0].vector[0] = 9
    again[0].text = "b"
    assert docs[0].vector[0] == 0
    with pytest.raises(ValueError, match="is in the array already"):
        again.append(Leaf(id=docs[0].id, text="c"))


MAKERS: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda thing: pickle.loads(pickle.dumps(thing)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_every_kind_of_field_round_trips(make: Callable[[Any], Any]) -> None:
    """A peer library pickles and copies through protobuf, which knows none of these."""
    branch = Branch(
        color=Color.BLUE,
        when=datetime(2020, 1, 2, tzinfo=timezone.utc),
        tags={1: 2**80, -3: {"deep": [None, b"x"]}},
        either=Seed(size=1j, extra="e"),
        leaf=Twig(text="t", number=2**64, bark={"b": 1}),
        leaves=[Twig(text="u"), Leaf(text="v", number=-(2**63) - 1)],
    )
    for thing in (branch, DocumentArray[Branch]([branch]), DocumentArray[Branch]([branch]).stack()):
        result = make(thing)
        assert type(result) is type(thing)
        assert result.identical(thing)
    assert type(make(branch).leaves[0]) is Twig
    assert type(make(branch).leaf) is Twig


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_documents_round_trip(make: Callable[[Any], Any]) -> None:
    """A peer library cannot pickle one."""
    for document in (BaseDocument(), Text(text="a"), Document(tags={"a": {1: 2}}), Node(children=[Node(name="x")])):
        assert make(document).identical(document)


def test_schemas_round_trip() -> None:
    for document_type in (Branch, Node, Box[int]):
        schema = document_type.document_schema()
        schema.notes["what others keep with it"] = lambda: None
        assert pickle.loads(pickle.dumps(schema)) == schema


def test_shared_objects_stay_shared() -> None:
    leaf = Leaf(text="a")
    docs = DocumentArray[Leaf]([leaf, leaf])
    result = pickle.loads(pickle.dumps((docs, leaf)))
    assert result[0][0] is result[0][1] is result[1]
    copied = copy.deepcopy(docs)
    assert copied[0] is copied[1] is not leaf


# --- schemas that pickle cannot name


def local_things() -> list[Any]:
    class Local(BaseDocument):
        name: str = "a"

    docs = DocumentArray[Local]([Local()])
    return [Local, Local(), docs, docs.stack(), DocumentArray[Local], Box[Local](item=Local())]


@pytest.mark.parametrize("index", range(6))
def test_local_class_raises_an_error_with_advice(index: int) -> None:
    message = "Local cannot be pickled: it was defined inside a function.*top level of a module, or use cloudpickle"
    with pytest.raises(PickleError, match=message) as raised:
        pickle.dumps(local_things()[index])
    assert isinstance(raised.value, pickle.PicklingError)


def test_local_schemas_are_copied() -> None:
    for thing in local_things():
        result = copy.deepcopy(thing)
        assert result is thing if isinstance(thing, type) else result.identical(thing)


def test_redefined_class_raises_an_error_with_advice() -> None:
    shadowed = type("Leaf", (BaseDocument,), {"__module__": "tests.strategies", "__qualname__": "Leaf"})
    with pytest.raises(PickleError, match="under a name that now means something else"):
        pickle.dumps(DocumentArray[shadowed]())


# --- cloudpickle


def test_cloudpickle_uses_the_recipe_for_classes_of_modules() -> None:
    """Not a copy: the class that comes back is the class that went in, and the pickle is small."""
    import cloudpickle

    for cls in (DocumentArray[Leaf], DocumentBatch[Leaf], DocumentArray[Box[int]], Box[int], NdArray[float32, 3]):
        content = cloudpickle.dumps(cls)
        assert pickle.loads(content) is cls
        assert len(content) < 400


def test_cloudpickle_of_a_local_class_returns_the_same_class() -> None:
    import cloudpickle

    things = local_things()
    for thing in things:
        again = pickle.loads(cloudpickle.dumps(thing))
        if isinstance(thing, type):
            assert again is thing
        else:
            assert type(again) is type(thing)
            assert again.identical(thing)


# --- torch


class Torch(BaseDocument):
    tensor: TorchTensor | None = None
    label: int = 0
    parts: DocumentArray[Leaf] = []


@pytest.mark.needs("torch")
def test_torch_batches_are_pickled_and_copied() -> None:
    import torch

    docs = DocumentArray[Torch]([Torch(tensor=torch.ones(2, dtype=torch.bfloat16), parts=[Leaf(text="a")]), Torch()])
    for batch in (docs.stack(), docs.stack("torch")):
        for result in (pickle.loads(pickle.dumps(batch)), copy.deepcopy(batch)):
            assert result.identical(batch)
            result.tensor.add_(1)
            assert batch.tensor[0].tolist() == [1, 1]
    graph = torch.ones(2, requires_grad=True) * 2
    deep = copy.deepcopy(DocumentArray[Torch]([Torch(tensor=graph)]))
    assert deep[0].tensor.is_leaf
    assert deep[0].tensor.tolist() == [2, 2]
    batch = DocumentArray[Torch]([Torch(tensor=graph)]).stack()
    stacked = copy.deepcopy(batch)
    assert stacked.tensor.tolist() == [[2, 2]]
    assert stacked.tensor.data_ptr() != batch.tensor.data_ptr()


@pytest.mark.needs("torch")
def test_pickle_of_a_row_does_not_contain_its_column() -> None:
    """torch alone writes all the memory that a tensor lies in."""
    import torch

    wide = torch.zeros(1000)
    docs = DocumentArray[Torch]([Torch(tensor=wide.clone()) for _ in range(50)])
    batch = docs.stack()
    one = len(pickle.dumps(docs[0]))
    assert len(pickle.dumps(batch[0])) < one + 200
    assert len(pickle.dumps(batch[:1])) < one + 1000
    assert len(pickle.dumps(batch.unstack())) < 50 * one
    assert len(pickle.dumps(DocumentArray[Torch]([Torch(parts=[Leaf(text="a")], tensor=batch.tensor[3])]))) < one + 1000
    for thing in (batch[0], batch[1:3], batch.unstack(), batch[::2]):
        assert pickle.loads(pickle.dumps(thing)).identical(thing)
    for result in (copy.deepcopy(batch[0]), pickle.loads(pickle.dumps(batch[0]))):
        assert result.tensor.untyped_storage().nbytes() == wide.nbytes
        assert type(result.tensor) is torch.Tensor
    leaf = torch.ones(4, 2, requires_grad=True)
    row = pickle.loads(pickle.dumps(Torch(tensor=leaf[1])))
    assert (row.tensor.requires_grad, row.tensor.tolist()) == (True, [1, 1])
    parameter = torch.nn.Parameter(torch.ones(2))
    assert type(pickle.loads(pickle.dumps(Torch(tensor=parameter))).tensor) is torch.nn.Parameter


def test_pickled_numpy_batches_are_compact() -> None:
    batch = DocumentBatch[Leaf].from_columns({"text": ["a"] * 100, "vector": np.zeros((100, 3), np.float32)})
    buffers: list[Any] = []
    content = pickle.dumps(batch, 5, buffer_callback=buffers.append)
    assert sum(buffer.raw().nbytes for buffer in buffers) >= 1200
    again = pickle.loads(content, buffers=buffers)
    assert again.identical(batch)
