"""Stacking documents and unstacking them again gives identical documents."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from quire import DocumentArray, DocumentBatch
from tests.strategies import Branch, Leaf, Node, Tree, arrays, branches, laws, leaves, nodes, orders, same_types, trees


def assert_same(result: Any, expected: Any) -> None:
    assert result.identical(expected)
    assert same_types(result, expected)


@laws
@given(arrays(leaves(), Leaf, 5))
def test_leaves_round_trip(docs: DocumentArray[Leaf]) -> None:
    before = copy.deepcopy(docs)
    batch = docs.stack()
    assert_same(batch.unstack(), docs)
    assert_same(batch.unstack(), docs)  # both stay usable
    assert_same(docs, before)
    assert [len(docs), len(batch)] == [len(before)] * 2


@laws
@given(arrays(branches(), Branch, 4))
def test_every_kind_of_field_round_trips(docs: DocumentArray[Branch]) -> None:
    batch = docs.stack()
    assert_same(batch.unstack(), docs)
    for row, document in enumerate(docs):
        assert_same(batch[row], document)
    assert_same(DocumentArray[Branch](batch), docs)


@laws
@given(arrays(trees(), Tree))
def test_ragged_shapes_round_trip(docs: DocumentArray[Tree]) -> None:
    assert_same(docs.stack(shapes="ragged").unstack(), docs)


@laws
@given(st.integers(0, 3).flatmap(lambda rank: arrays(trees(rank), Tree)))
def test_padded_shapes_round_trip(docs: DocumentArray[Tree]) -> None:
    batch = docs.stack(shapes="pad")
    assert_same(batch.unstack(), docs)
    if isinstance(batch.shaped, np.ndarray):
        mask = batch.mask("shaped")
        assert mask.shape == batch.shaped.shape
        assert mask.sum() == sum(0 if doc.shaped is None else doc.shaped.size for doc in docs)
        assert not batch.shaped[~mask].any()


@laws
@given(arrays(nodes(), Node))
def test_recursive_documents_round_trip(docs: DocumentArray[Node]) -> None:
    assert_same(docs.stack().unstack(), docs)


@laws
@given(arrays(branches(), Branch, 4).flatmap(lambda docs: st.tuples(st.just(docs), orders(len(docs)))))
def test_take_equals_indexing_documents(case: tuple[DocumentArray[Branch], list[int]]) -> None:
    docs, order = case
    batch = docs.stack()
    assert_same(batch.take(order).unstack(), docs[order])
    assert_same(batch[order].unstack(), docs[order])


@laws
@given(arrays(trees(), Tree), st.slices(3))
def test_slices_equal_slices_of_documents(docs: DocumentArray[Tree], rows: slice) -> None:
    assert_same(docs.stack(shapes="ragged")[rows].unstack(), docs[rows])


@laws
@given(arrays(branches(), Branch), arrays(branches(), Branch), arrays(branches(), Branch))
def test_concat_equals_concatenated_documents(a: Any, b: Any, c: Any) -> None:
    batch = DocumentBatch[Branch].concat([a.stack(), b.stack(), c.stack()])
    assert_same(batch.unstack(), a + b + c)


@laws
@given(
    arrays(trees(1), Tree),
    arrays(trees(1), Tree),
    st.sampled_from(["pad", "ragged"]),
    st.sampled_from(["pad", "ragged"]),
)
def test_padded_and_ragged_batches_concatenate(a: Any, b: Any, first: Any, second: Any) -> None:
    batch = DocumentBatch[Tree].concat([a.stack(shapes=first), b.stack(shapes=second)], shapes=second)
    assert_same(batch.unstack(), a + b)


@laws
@given(arrays(trees(), Tree))
def test_pickles_and_copies_are_identical(docs: DocumentArray[Tree]) -> None:
    batch = docs.stack(shapes="ragged")
    for created in (pickle.loads(pickle.dumps(batch)), copy.copy(batch), copy.deepcopy(batch)):
        assert type(created) is DocumentBatch[Tree]
        assert created.identical(batch)
        assert_same(created.unstack(), docs)
    assert_same(pickle.loads(pickle.dumps(docs)), docs)
    assert_same(copy.deepcopy(docs), docs)
