"""The tree of columns: children, leaves, map_leaves, map_children, nbytes and frameworks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from quire import BaseDocument, DocumentArray
from quire.columns import Column, Columns, ObjectColumn, ScalarColumn, TensorColumn
from quire.tensors import get_framework
from quire.typing import NdArray, TorchTensor
from tests.strategies import Tree, arrays, laws, trees


class Part(BaseDocument):
    name: str
    weight: float


class Machine(BaseDocument):
    image: NdArray[2, 2]
    main: Part
    spare: Part | None = None
    parts: DocumentArray[Part] = []


def machines() -> Columns:
    part = Part(name="wheel", weight=2.0)
    docs = DocumentArray[Machine](
        [
            Machine(image=np.ones((2, 2)), main=part, parts=[part, part]),
            Machine(image=np.zeros((2, 2)), main=part, spare=part),
        ]
    )
    return docs.stack()._columns


def test_children_are_the_columns_of_nested_documents() -> None:
    columns = machines()
    assert [len(columns.columns[name].children) for name in ("id", "image", "main", "spare", "parts")] == [
        0,
        0,
        1,
        1,
        1,
    ]
    assert [len(columns.columns[name].children[0]) for name in ("main", "spare", "parts")] == [2, 2, 2]
    assert columns.columns["parts"].children[0].schema is Part.document_schema()


def test_leaves_are_visited_depth_first_in_the_order_of_the_fields() -> None:
    names = [leaf.field.name for leaf in machines().leaves()]
    assert names == ["id", "image", *(["id", "name", "weight"] * 3)]


def test_map_leaves_changes_leaves_of_nested_documents_and_nothing_else() -> None:
    columns = machines()

    def double(column: Column) -> Column:
        if not isinstance(column, ScalarColumn):
            return column
        return column.map_tensors(lambda framework, value: (framework, value * 2))

    doubled = columns.map_leaves(double)
    assert [doc.main.weight for doc in doubled.documents()] == [4.0, 4.0]
    assert [None if doc.spare is None else doc.spare.weight for doc in doubled.documents()] == [None, 4.0]
    assert [doc.parts.weight for doc in doubled.documents()] == [[4.0, 4.0], []]
    assert doubled.columns["image"] is columns.columns["image"]
    assert [doc.main.weight for doc in columns.documents()] == [2.0, 2.0]


def test_map_children_of_a_leaf_returns_the_leaf() -> None:
    leaf = machines().columns["image"]
    assert leaf.map_children(lambda nested: nested.slice(slice(0))) is leaf


def test_nbytes_adds_up_arrays_of_nested_documents() -> None:
    columns = machines()
    arrays = sum(leaf.data.nbytes for leaf in columns.leaves() if isinstance(leaf, TensorColumn))
    objects = sum(leaf.nbytes for leaf in columns.leaves() if isinstance(leaf, ObjectColumn))
    assert arrays == 2 * 4 * 8 + 3 * 2 * 8
    assert columns.nbytes == arrays + objects
    assert columns.columns["parts"].nbytes == columns.columns["parts"].children[0].nbytes


@pytest.mark.needs("torch")
def test_frameworks_are_those_of_tensors_and_numbers_in_nested_documents() -> None:
    import torch

    class Sample(BaseDocument):
        pixels: TorchTensor
        part: Part

    columns = DocumentArray[Sample]([Sample(pixels=torch.ones(2), part=Part(name="a", weight=1.0))]).stack()._columns
    assert columns.columns["id"].frameworks == set()
    assert columns.columns["pixels"].frameworks == {get_framework("torch")}
    assert columns.frameworks == {get_framework("torch"), get_framework("numpy")}


@laws
@given(arrays(trees(), Tree, 4))
def test_map_leaves_with_the_identity_gives_equal_documents(docs: DocumentArray[Tree]) -> None:
    batch = docs.stack(shapes="ragged")
    columns = batch._columns.map_leaves(lambda column: column)
    assert batch._with(columns).identical(batch)
