"""Stages: chunks, user functions, failing rows, and layouts that are sent to workers."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire import BaseDocument, DocumentArray, DocumentBatch
from quire.distributed import DocumentShards, PartitionError
from quire.distributed._batches import (
    CHUNK_BYTES,
    rebatch_by_bytes,
    rebatch_by_multiples,
    rebatch_by_rows,
    split_evenly,
)
from quire.distributed._encoding import DocumentLayout, check_nullable, layout_from_arrow
from quire.distributed._exchange import PositionRouter, ScatterRows, carried_schema
from quire.distributed._failures import error_from_text, error_to_text, partition_error
from quire.distributed._stages import MapChunks, MapRows, UserFunction
from quire.errors import DocumentTypeError, EncodeError, OptionError
from tests.distributed.sample_documents import (
    Counting,
    Good,
    Rated,
    Vector,
    dearer,
    good,
    goods,
    in_columns,
    rated,
    twice,
)
from tests.strategies import laws

pytestmark = pytest.mark.needs("pyarrow", "cloudpickle")


def batches_of(sizes: Iterable[int]) -> list[pa.RecordBatch]:
    ends = [0, *np.cumsum(list(sizes)).tolist()]
    return [pa.record_batch({"n": pa.array(range(a, b), pa.int64())}) for a, b in pairwise(ends)]


def numbers(batches: Iterable[pa.RecordBatch]) -> list[int]:
    return [number for batch in batches for number in batch.column("n").to_pylist()]


# --- chunks


@laws
@given(st.lists(st.integers(0, 40), max_size=12), st.integers(8, 200))
def test_rebatch_by_bytes_keeps_rows_in_order(sizes: list[int], size: int) -> None:
    chunks = list(rebatch_by_bytes(batches_of(sizes), size))
    assert numbers(chunks) == list(range(sum(sizes)))
    assert all(0 < chunk.nbytes <= max(8, size * 3 // 2) for chunk in chunks)


@laws
@given(st.lists(st.integers(0, 40), max_size=12), st.integers(1, 25))
def test_rebatch_by_rows_returns_exact_sizes(sizes: list[int], size: int) -> None:
    chunks = list(rebatch_by_rows(batches_of(sizes), size))
    assert numbers(chunks) == list(range(sum(sizes)))
    assert all(len(chunk) == size for chunk in chunks[:-1])
    assert all(0 < len(chunk) <= size for chunk in chunks)


@laws
@given(st.lists(st.integers(0, 40), max_size=12), st.integers(1, 25), st.integers(8, 400))
def test_rebatch_by_multiples_returns_multiples_of_the_size(sizes: list[int], size: int, most: int) -> None:
    chunks = list(rebatch_by_multiples(batches_of(sizes), size, most))
    assert numbers(chunks) == list(range(sum(sizes)))
    assert all(chunk.num_rows % size == 0 for chunk in chunks[:-1])
    assert all(0 < chunk.nbytes <= max(8 * size, most * 3 // 2) for chunk in chunks)


@given(st.lists(st.integers(0, 40), max_size=6), st.integers(1, 25))
@laws
def test_map_batch_calls_functions_with_batch_size_rows(sizes: list[int], rows: int) -> None:
    layout, batch_sizes = DocumentLayout(Good), list[int]()

    def seen(batch: DocumentBatch[Good]) -> DocumentBatch[Good]:
        batch_sizes.append(len(batch))
        batch.price[:] = batch.price * 2  # it has its own memory
        return batch

    given_to, first = list[pa.RecordBatch](), 0
    for size in filter(None, sizes):
        given_to.append(layout.encode(list(goods(first + size))[first:]))
        first += size
    created = list(MapChunks(UserFunction(seen), layout, layout, rows=rows, columns=True)(0, iter(given_to)))
    documents = [document for batch in created for document in layout.array(layout.decode(batch))]
    assert [document.id for document in documents] == [document.id for document in goods(first)]
    assert [document.price for document in documents] == [2 * document.price for document in goods(first)]
    assert batch_sizes == [rows] * (first // rows) + [first % rows] * (first % rows > 0)


@laws
@given(st.lists(st.integers(0, 40), max_size=12), st.integers(1, 9))
def test_split_evenly_differs_by_one_row_at_most(sizes: list[int], parts: int) -> None:
    created = split_evenly(batches_of(sizes), parts)
    assert len(created) == parts
    assert numbers(batch for part in created for batch in part) == list(range(sum(sizes)))
    lengths = [sum(map(len, part)) for part in created]
    assert max(lengths) - min(lengths) <= 1


def test_rebatch_by_bytes_joins_small_batches() -> None:
    assert len(list(rebatch_by_bytes(batches_of([1] * 1000)))) == 1


def test_large_results_are_split_into_chunks() -> None:
    """A function may return far more than it received: no record batch comes near the limits of Arrow's offsets."""
    source, target = DocumentLayout(Good), DocumentLayout(Vector)
    batch = source.encode(list(goods(200)))

    def grown(documents: Any) -> list[Vector]:
        return [Vector(data=np.zeros(65536, np.float32)) for _ in documents]

    stages = [
        MapRows(UserFunction(lambda document: grown([document])[0]), source, target),
        MapChunks(UserFunction(grown), source, target),
        MapChunks(UserFunction(lambda rows: DocumentBatch[Vector](grown(rows))), source, target, columns=True),
    ]
    for stage in stages:
        created = list(stage(0, iter([batch])))
        assert sum(map(len, created)) == 200
        assert len(created) > 2
        assert max(one.nbytes for one in created) <= CHUNK_BYTES * 3 // 2


# --- functions


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (rated, Rated),
        (in_columns, Rated),
        (twice, Good),
        (partial(dearer, by=2), Good),
        (Counting, Good),
        (lambda document: document, None),
        (len, None),
    ],
    ids=["document", "batch", "iterator", "partial", "class", "lambda", "builtin"],
)
def test_return_type_reads_the_annotation(function: Any, expected: Any) -> None:
    assert UserFunction(function).return_type() is expected


def test_return_type_ignores_unknown_annotations() -> None:
    def first(documents: Any) -> BaseDocument:
        return documents[0]

    def second(documents: Any) -> list[int]:
        return documents

    def third(documents: Any) -> Missing:  # type: ignore[name-defined]
        return documents

    assert [UserFunction(function).return_type() for function in (first, second, third)] == [None, None, None]


def test_class_without_call_is_rejected() -> None:
    with pytest.raises(OptionError, match=r"Maker.*__call__"):
        UserFunction(type("Maker", (), {}))
    with pytest.raises(OptionError, match="a function or a class is needed, got 3"):
        UserFunction(3)  # type: ignore[arg-type]


def test_results_of_functions_are_checked() -> None:
    shards = DocumentShards[Good].from_documents(goods(3))
    for wrong in (lambda document: document.price, lambda _: None, lambda _: Rated(name="x")):
        with pytest.raises(PartitionError, match="must return documents of Good, but returned"):
            shards.map(wrong, document_type=Good).collect()
    for bad in (lambda documents: documents[0], lambda _: None, len):
        with pytest.raises(PartitionError, match="DocumentTypeError") as caught:
            shards.transform_shard(bad, document_type=Good).collect()
        assert isinstance(caught.value.__cause__, DocumentTypeError)


def test_mapping_result_becomes_a_document() -> None:
    shards = DocumentShards[Good].from_documents(goods(3))
    actual = shards.map(lambda document: {"name": document.name, "stars": 1}, document_type=Rated).collect()
    assert actual.stars == [1.0, 1.0, 1.0]
    assert actual.id == goods(3).id
    with pytest.raises(PartitionError, match="field 'stars'"):
        shards.map(lambda _: {"name": "x", "stars": "many"}, document_type=Rated).collect()


def test_undeclared_function_is_not_called_early() -> None:
    seen = []

    def noted(document):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        seen.append(document.id)
        return document

    created = DocumentShards[Good].from_documents(goods(6)).map(noted)
    assert type(created) is DocumentShards[Good]
    assert seen == []
    created.collect()
    assert sorted(seen) == goods(6).id


def test_id_set_by_the_function_is_kept() -> None:
    shards = DocumentShards[Good].from_documents(goods(3))
    created = shards.map(lambda d: Rated(id=f"{d.id}!", name=d.name), document_type=Rated)
    assert created.collect().id == ["good 000!", "good 001!", "good 002!"]


# --- failing rows


def test_on_error_null_needs_nullable_fields() -> None:
    class Needy(BaseDocument):
        weight: float

    shards = DocumentShards[Good].from_documents(goods(3))
    with pytest.raises(OptionError, match=r"Needy\.weight cannot be None, and Good has no such field"):
        shards.map(lambda d: d, document_type=Needy, on_error="null")
    check_nullable(DocumentLayout(Rated), DocumentLayout(Good))
    actual = shards.map(_failing, on_error="null").collect()
    assert [(d.price, d.remark, d.maker.town) for d in actual] == [
        (0, None, "Bath"),
        (1, None, "Cork"),
        (2, None, "Ely"),
    ]


def _failing(document: Good) -> Good:
    raise RuntimeError(document.id)


def test_unknown_on_error_is_rejected() -> None:
    with pytest.raises(OptionError, match="on_error='ignore'"):
        DocumentShards[Good].from_documents(goods(1)).map(dearer, on_error="ignore")  # type: ignore[arg-type]


def test_partition_errors_survive_text_and_pickle() -> None:
    created = partition_error(EncodeError("Good.maker.town: no such place"), 3, 5, "x")
    assert (
        str(created)
        == "partition 3, document 5 (id 'x'), field 'maker.town': EncodeError: Good.maker.town: no such place"
    )
    text = f"something was raised:\n{error_to_text(created)}\n  at line 7"
    for back in (error_from_text(text), pickle.loads(pickle.dumps(created))):
        assert isinstance(back, PartitionError)
        assert (str(back), back.__dict__) == (str(created), created.__dict__)
    assert error_from_text("nothing of ours") is None


# --- layouts


def test_stage_is_picklable_to_a_fresh_process() -> None:
    layout = layout_from_arrow(pa.schema([pa.field("first name", pa.string()), pa.field("size", pa.int64())]))
    stage = MapRows(UserFunction(lambda document: document), layout, layout)
    batch = layout.encode([layout.document_type(first_name="Ada", size=3)], ["a"])
    code = (
        "import sys, pickle; stage, batch = pickle.loads(sys.stdin.buffer.read())\n"
        "assert stage.source.document_type is stage.target.document_type\n"
        "sys.stdout.buffer.write(pickle.dumps([b.to_pylist() for b in stage(0, iter([batch]))]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input=cloudpickle.dumps((stage, batch)), stdout=subprocess.PIPE, check=True
    )
    assert pickle.loads(done.stdout) == [[{"id": "a", "first_name": "Ada", "size": 3}]]


def test_foreign_record_batches_conform_to_the_class() -> None:
    layout = DocumentLayout(Rated)
    foreign = pa.record_batch({"stars": pa.array([1, 2]), "name": ["a", "b"], "score": [[1.0, 2.0], None]})
    actual = layout.array(layout.decode(foreign))
    assert (actual.name, actual.stars) == (["a", "b"], [1.0, 2.0])
    assert actual[0].score.dtype == np.float16
    assert actual[1].score is None


def test_functions_may_change_their_documents() -> None:
    documents = goods(4)
    shards = DocumentShards[Good].from_documents(documents)

    def painted(batch: DocumentBatch[Good]) -> DocumentBatch[Good]:
        batch.photo[:] = 9
        return batch

    assert {int(document.photo[0, 0]) for document in shards.map_batch(painted).collect()} == {9}
    assert shards.collect().identical(goods(4))
    assert documents.identical(goods(4))


def test_map_accepts_documents_of_a_local_class() -> None:
    class Local(BaseDocument):
        number: int

    documents = DocumentArray[Local]([Local(number=i) for i in range(3)])
    assert DocumentShards[Local].from_documents(documents).map(
        lambda d: Local(number=d.number + 1)
    ).collect().number == [
        1,
        2,
        3,
    ]


def test_from_documents_accepts_a_generator() -> None:
    def many() -> Iterator[Good]:
        return (good(i) for i in range(7))

    assert DocumentShards.from_documents(many(), num_partitions=2).collect().identical(goods(7))


def test_partition_accepts_arrays_by_name_and_in_order() -> None:
    class Pair(BaseDocument):
        image: Any
        label: int

    images, labels = np.arange(12).reshape(6, 2), np.arange(6)
    for data in ({"label": labels, "image": images}, [images, labels], (images, labels)):
        shards = DocumentShards[Pair].partition(data, 3)
        assert shards.num_partitions() == 3
        assert shards.collect().label == labels.tolist()
    with pytest.raises(OptionError, match="3 arrays for the 2 fields of Pair: image, label"):
        DocumentShards[Pair].partition([labels, labels, labels])
    with pytest.raises(TypeError, match=r"DocumentShards\[Student\]\.partition"):
        DocumentShards.partition([labels, labels])


def test_rows_of_a_partition_that_arrives_in_several_calls_are_routed_as_in_one_call() -> None:
    """Ray may call a stage several times for a partition, with a block each time."""
    rows = pa.record_batch({"n": pa.array(range(100))})

    def scatter(*blocks: pa.RecordBatch) -> list[tuple[int, int]]:
        stage = ScatterRows(rows.schema, PositionRouter(4, seed=3))
        packs = pa.Table.from_batches([pack for block in blocks for pack in stage.work(2, iter([block]))])
        return [
            (target, number)
            for target, pack in zip(packs["partition"].to_pylist(), packs["pack"].to_pylist(), strict=True)
            for number in pa.ipc.read_record_batch(pack, carried_schema(rows.schema)).column("n").to_pylist()
        ]

    assert sorted(scatter(rows[:30], rows[30:70], rows[70:])) == sorted(scatter(rows))
