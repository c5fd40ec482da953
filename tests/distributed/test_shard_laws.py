"""Laws of shards for any documents and any partitions: no row is lost or duplicated."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire import DocumentArray
from quire.distributed import DocumentShards, engine
from tests.storage.sample_documents import leaves, trees
from tests.strategies import Leaf, Node, Tree, arrays, laws, nodes, same_types

pytestmark = pytest.mark.needs("pyarrow")
LOCAL = engine("local", num_workers=2)
PARTS = st.integers(1, 5)


def shards_of(documents: DocumentArray[Any], parts: int) -> DocumentShards[Any]:
    created = DocumentShards[documents.document_type]  # type: ignore[name-defined]
    return created.from_documents(documents, num_partitions=parts, engine=LOCAL)


def ids(shards: DocumentShards[Any]) -> list[str]:
    return sorted(shards.collect().id)


@laws
@given(st.one_of(arrays(trees(), Tree), arrays(nodes(), Node)), PARTS)
def test_identity_map_keeps_documents(documents: DocumentArray[Any], parts: int) -> None:
    shards = shards_of(documents, parts)
    for same in (
        shards,
        shards.map(lambda d: d),
        shards.map_batch(lambda b: b, 2),
        shards.transform_shard(lambda a: a),
    ):
        actual = same.collect()
        assert actual.identical(documents)
        assert same_types(actual, documents)


@laws
@given(arrays(leaves(), Leaf, 9), PARTS, PARTS, st.integers(0, 3))
def test_exchanges_neither_lose_nor_duplicate_rows(
    documents: DocumentArray[Leaf], parts: int, others: int, seed: int
) -> None:
    shards = shards_of(documents, parts)
    expected = sorted(documents.id)
    assert shards.repartition(others).collect().identical(documents)
    assert ids(shards.shuffle(seed)) == expected
    assert ids(shards.partition_by("id", others)) == expected
    assert sorted(one for part in shards.split(0.2, 0.5, 0.3, seed=seed) for one in ids(part)) == expected
    assert (
        ids(
            DocumentShards.concat(
                [shards.filter(lambda d: hash(d.id) % 2), shards.filter(lambda d: not hash(d.id) % 2)]
            )
        )
        == expected
    )


@laws
@given(arrays(leaves(), Leaf, 9), PARTS, PARTS, st.floats(0, 1))
def test_sample_does_not_depend_on_partitions(
    documents: DocumentArray[Leaf], parts: int, others: int, fraction: float
) -> None:
    shards = shards_of(documents, parts)
    drawn = ids(shards.sample(fraction=fraction, seed=1))
    assert drawn == ids(shards.shuffle(2).repartition(others).sample(fraction=fraction, seed=1))
    assert set(drawn) <= set(ids(shards.sample(fraction=min(1.0, fraction + 0.2), seed=1)))


@laws
@given(arrays(leaves(), Leaf, 9), PARTS, st.integers(0, 12))
def test_take_returns_the_first_rows(documents: DocumentArray[Leaf], parts: int, number: int) -> None:
    assert shards_of(documents, parts).head(number).identical(documents[:number])
