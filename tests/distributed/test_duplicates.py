"""Duplicates and near duplicates: the same documents remain on every engine, one of each group."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire import BaseDocument
from quire.distributed import DocumentShards
from quire.distributed._duplicates import _EDGES, MinHash, UnitVectors, find_redundant
from quire.errors import OptionError, PartitionError, SchemaError
from quire.typing import NdArray, TorchTensor, float32

pytestmark = [
    pytest.mark.needs("pyarrow", "ray", "pyspark", "torch", "xxhash"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(600),
]
WORDS = [f"word{number * 7919 % 1000:03d}" for number in range(200)]


class Content(BaseDocument):
    text: str | None = None
    vector: TorchTensor[float32, 8] | None = None


class Page(BaseDocument):
    address: str
    content: Content | None = None


class Vector(BaseDocument):
    values: NdArray[float32, 8]


def make_pages() -> tuple[list[Page], list[str]]:
    """Return pages, most of them in groups of near duplicates, and the ids of those that are to remain."""
    random = np.random.default_rng(4)
    pages, groups = [], []
    for group in range(40):
        words, vector = list(random.choice(WORDS, 80)), random.standard_normal(8)
        for copy in range(group % 4 + 1):
            words[int(random.integers(80))] = f"other{copy}"
            noise = random.standard_normal(8) * 0.01 * copy
            content = Content(id="c", text=" ".join(words), vector=torch.tensor(vector + noise, dtype=torch.float32))
            pages.append(Page(id=f"{group}-{copy}", address=f"{group}", content=content))
            groups.append(group)
    # Documents without a value, which are no duplicates of each other.
    pages += [Page(id="no text", address="", content=Content(id="c")), Page(id="no content", address="")]
    groups += [-1, -2]
    order = random.permutation(len(pages))
    firsts: dict[int, str] = {}
    for number in order:
        firsts.setdefault(groups[number], pages[number].id)
    return [pages[number] for number in order], sorted(firsts.values())


@pytest.mark.parametrize(("by", "near"), [("content.text", "minhash"), ("content.vector", "embedding")])
def test_the_first_of_each_group_of_near_duplicates_remains(engine: Any, by: str, near: Any) -> None:
    pages, expected = make_pages()
    kept = DocumentShards[Page].from_documents(pages, num_partitions=3, engine=engine).dedupe(by, near=near).collect()
    assert sorted(kept.id) == expected
    local = DocumentShards[Page].from_documents(pages, num_partitions=5).dedupe(by, near=near, num_partitions=4)
    assert kept.to_json() == local.collect().to_json()


def test_dedupe_without_near_keeps_the_first_of_equal_values() -> None:
    pages, _ = make_pages()
    shards = DocumentShards[Page].from_documents(pages, num_partitions=3)
    assert shards.dedupe("address").collect().identical(shards.distinct("address").collect())
    pairs = {(page.address, page.content and page.content.text) for page in pages}
    assert len(shards.dedupe(["address", "content.text"])) == len(pairs)


def test_equal_values_are_found_whatever_the_order_of_functions_before() -> None:
    def shuffled(part: Any) -> list[Page]:
        import random

        return random.sample(list(part), len(part))  # another order each time: values decide, not positions

    pages, expected = make_pages()
    shards = DocumentShards[Page].from_documents(pages, num_partitions=3).transform_shard(shuffled)
    kept = shards.dedupe("content.text", near="minhash").collect()
    assert len(kept) == len(expected)
    assert len(set(kept.address)) == len(set(expected)) - 2 + 1


@pytest.mark.parametrize("threshold", [0.5, 0.8, 0.95])
def test_minhash_estimates_the_share_of_common_sequences(threshold: float) -> None:
    random = np.random.default_rng(0)
    sketcher = MinHash(threshold)
    for _ in range(20):
        letters = "".join(random.choice(list("abcdefghijklmnopqrstuvwxyz"), 600))
        one, other = letters[:500], letters[int(random.integers(100)) :]
        sets = [{text[i : i + 5] for i in range(len(text) - 4)} for text in (one, other)]
        actual = len(sets[0] & sets[1]) / len(sets[0] | sets[1])
        sketches = sketcher.sketch([one, other])
        assert abs(sketcher.similarities(sketches[0], sketches[1:])[0] - actual) < 4 * 0.045
        if actual > threshold + 0.05:
            buckets = sketcher.buckets(sketches)
            assert (buckets[0] == buckets[1]).any()


def test_minhash_ignores_case_and_spaces_and_takes_short_texts() -> None:
    sketcher = MinHash(0.8)
    sketches = sketcher.sketch(["Some  Text\nhere", "some text here", "ab", "", " "])
    assert (sketches[0] == sketches[1]).all()
    assert (sketches[3] == sketches[4]).all()
    assert not (sketches[2] == sketches[3]).any()


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 12))
def test_similar_vectors_share_a_bucket(seed: int, bits: int) -> None:
    random = np.random.default_rng(seed)
    sketcher = UnitVectors(0.95, bits)
    vectors = random.standard_normal((200, 16)).astype(np.float32)
    # Just similar enough: at an angle whose cosine is 0.951.
    across = random.standard_normal((200, 16)).astype(np.float32)
    units = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    across -= (across * units).sum(1, keepdims=True) * units
    across /= np.linalg.norm(across, axis=1, keepdims=True)
    others = units * 0.951 + across * np.sqrt(1 - 0.951**2)
    ones, others = sketcher.sketch(list(vectors)), sketcher.sketch(list(others))
    assert np.allclose((ones * others).sum(1), 0.951, atol=1e-3)
    share = (sketcher.buckets(ones) == sketcher.buckets(others)).any(1).mean()
    assert share > 0.94  # 0.99 is expected


def test_scaled_vectors_are_found_in_buckets() -> None:
    random = np.random.default_rng(1)
    bases = random.standard_normal((1500, 8)).astype(np.float32) * 10
    random.shuffle(bases)
    documents = [
        Vector(id=f"{base}-{copy}", values=bases[base] * (1 + copy) + np.float32(0.001 * copy))
        for copy in range(2)
        for base in range(len(bases))
    ]
    shards = DocumentShards[Vector].from_documents(documents, num_partitions=2)
    assert len(shards.dedupe("values", near="embedding", threshold=0.99999)) == 1500  # more than fit into one bucket


def test_zeros_and_nan_are_similar_to_nothing_but_themselves() -> None:
    rows = [np.zeros(8), np.zeros(8), -np.zeros(8), np.full(8, np.nan), np.ones(8), np.ones(8) * 2]
    documents = [Vector(id=f"{number}", values=row.astype(np.float32)) for number, row in enumerate(rows)]
    kept = DocumentShards[Vector].from_documents(documents).dedupe("values", near="embedding").collect()
    assert sorted(kept.id) == ["0", "3", "4"]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=60))
def test_all_but_the_first_of_each_connected_component_are_redundant(pairs: list[tuple[int, int]]) -> None:
    edges = [(min(pair), max(pair)) for pair in pairs if pair[0] != pair[1]]
    rows = [(one, other, bytes([one] * 16), bytes([other] * 16)) for one, other in edges]
    redundant = find_redundant(
        pa.Table.from_pylist([dict(zip(_EDGES.names, row, strict=True)) for row in rows], _EDGES)
    )
    component = {node: node for edge in edges for node in edge}
    for _ in component:
        for one, other in edges:
            component[one] = component[other] = min(component[one], component[other])
    assert sorted(digest[0] for digest in redundant.to_pylist()) == sorted(
        n for n, low in component.items() if n != low
    )


def test_dedupe_of_no_documents_is_empty() -> None:
    shards = DocumentShards[Page].from_documents([], document_type=Page)
    assert len(shards.dedupe("content.text", near="minhash")) == 0
    assert len(shards.dedupe("content.vector", near="embedding")) == 0


class Ragged(BaseDocument):
    vector: NdArray[float32]


def test_vectors_of_several_lengths_are_an_error() -> None:
    documents = [Ragged(vector=np.ones(size, np.float32)) for size in (3, 4)]
    with pytest.raises(PartitionError, match="vectors of one length"):
        DocumentShards[Ragged].from_documents(documents, num_partitions=1).dedupe("vector", near="embedding").collect()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"by": "address", "near": "exact"}, "use 'minhash' for texts or 'embedding'"),
        ({"by": "address", "near": "embedding"}, "a field with a vector a row"),
        ({"by": "content.vector", "near": "minhash"}, "a field with a text a row"),
        ({"by": ["address", "id"], "near": "minhash"}, "by one field"),
        ({"by": "address", "near": "minhash", "threshold": 80}, "above 0 and at most 1"),
        ({"by": "address", "threshold": 0.8}, "for near duplicates"),
        ({"by": "address", "near": "minhash", "treshold": 0.8}, "threshold"),
    ],
)
def test_wrong_arguments_are_an_error_when_dedupe_is_called(arguments: dict[str, Any], message: str) -> None:
    shards = DocumentShards[Page].from_documents(make_pages()[0])
    with pytest.raises(OptionError, match=message):
        shards.dedupe(**arguments)


def test_a_field_that_does_not_exist_is_an_error() -> None:
    with pytest.raises((SchemaError, OptionError, LookupError), match="txt"):
        DocumentShards[Page].from_documents(make_pages()[0]).dedupe("content.txt", near="minhash")
