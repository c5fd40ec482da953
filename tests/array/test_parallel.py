"""map, map_batch, apply and apply_batch."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from quire import BaseDocument, DocumentArray, DocumentBatch
from quire.errors import DocumentTypeError, DuplicateIdError, FunctionError, OptionError
from quire.parallel import Workers
from quire.typing import NdArray


class Item(BaseDocument):
    number: int
    vector: NdArray | None = None


class Other(BaseDocument):
    text: str = ""


def items(count: int = 50) -> DocumentArray[Item]:
    return DocumentArray[Item]([Item(number=i, vector=np.full(3, i)) for i in range(count)])


@pytest.fixture(scope="module", params=["thread", "process"])
def pool(request: pytest.FixtureRequest) -> Iterator[Workers]:
    with Workers(2, request.param) as created:
        yield created


@pytest.fixture(scope="module")
def processes() -> Iterator[Workers]:
    with Workers(2, "process") as created:
        yield created


# --- map


def test_map_yields_results_in_order(pool: Workers) -> None:
    docs = items()
    assert list(docs.map(lambda doc: doc.number * 2, pool=pool)) == [2 * i for i in range(50)]
    assert [doc.number for doc in docs.map(lambda doc: doc, pool=pool)] == docs.number
    assert sorted(docs.map(lambda doc: doc.number, pool=pool, ordered=False)) == docs.number


def test_map_of_batch_and_of_unstacked_array(pool: Workers) -> None:
    batch = items(10).stack()
    assert list(batch.map(lambda doc: int(doc.vector.sum()), pool=pool)) == [3 * i for i in range(10)]
    assert list(batch.unstack().map(lambda doc: doc.number, pool=pool)) == list(range(10))
    result = list(batch.map_batch(lambda part: part, 4, pool=pool))
    assert [type(part) for part in result] == [DocumentBatch[Item]] * 3
    assert [len(part) for part in result] == [4, 4, 2]
    assert DocumentBatch[Item].concat(result) == batch


def test_map_of_untyped_array(pool: Workers) -> None:
    docs = DocumentArray([Item(number=1), Other(text="a")])
    assert list(docs.map(lambda doc: type(doc).__name__, pool=pool)) == ["Item", "Other"]
    assert list(DocumentArray[Item]().map(lambda doc: doc, pool=pool)) == []


def test_map_accepts_num_workers_and_num_worker() -> None:
    docs = items(3)
    for how in ({"num_workers": 2}, {"num_worker": 2}, {"num_worker": 2, "num_workers": 2}, {"num_worker": None}):
        assert list(docs.map(lambda doc: doc.number, **how)) == [0, 1, 2]
    with pytest.raises(OptionError, match=re.escape("two spellings of one thing, but differ: [2, 3]")):
        docs.map(lambda doc: doc, num_workers=2, num_worker=3)


def test_map_rejects_wrong_keywords_at_the_call() -> None:
    with pytest.raises(TypeError, match="num_wokers"):
        items().map(lambda doc: doc, num_wokers=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="apply has no option 'ordered'"):
        items().apply(lambda doc: doc, ordered=False)  # type: ignore[call-arg]
    with pytest.raises(OptionError, match="batch_size=0"):
        items().map_batch(lambda docs: docs, 0)


def test_map_ignores_changes_of_the_array() -> None:
    docs = items(30)
    results = docs.map(lambda doc: doc.number, num_workers=2, window=2)
    assert next(results) == 0
    del docs[:]
    assert list(results) == list(range(1, 30))


def test_window_bounds_items_in_flight() -> None:
    begun: list[int] = []

    def job(doc: Item) -> int:
        begun.append(doc.number)
        return doc.number

    for consumed, _ in enumerate(items(200).map(job, num_workers=2, window=6)):
        assert len(begun) <= consumed + 6
        time.sleep(0.0005)


def test_progress_is_shown_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(items(5).map(lambda doc: doc.number, show_progress=True)) == [0, 1, 2, 3, 4]
    assert "5/5" in capsys.readouterr().err
    items(6).apply_batch(lambda _: None, 2, show_progress=True)
    assert "3/3" in capsys.readouterr().err
    list(items(5).map(lambda doc: doc.number))
    assert capsys.readouterr().err == ""


# --- map_batch


def test_map_batch_yields_results_of_arrays(pool: Workers) -> None:
    result = list(items(10).map_batch(lambda docs: docs, 4, pool=pool))
    assert [type(docs) for docs in result] == [DocumentArray[Item]] * 3
    assert [docs.number for docs in result] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_map_batch_shuffle_repeats_with_seed(pool: Workers) -> None:
    docs = items(20)

    def orders(seed: int) -> list[list[int]]:
        return list(docs.map_batch(lambda part: part.number, 6, shuffle=True, seed=seed, pool=pool))

    assert orders(1) == orders(1) == [part.number for part in docs.batch(6, shuffle=True, seed=1)]
    assert orders(1) != orders(2)
    assert sorted(number for part in orders(1) for number in part) == docs.number


def test_workers_run_while_consumer_works() -> None:
    """The consumer gets its first batch before later ones are started, and workers never wait for it."""
    docs, begun, used = items(64 * 16), list[int](), list[int]()
    ahead_of_the_consumer = threading.Event()

    def cpu_job(part: DocumentArray[Item]) -> DocumentArray[Item]:
        begun.append(part[0].number // 16)
        if used:
            ahead_of_the_consumer.set()
        return part

    for part in docs.map_batch(cpu_job, batch_size=16, num_worker=4):
        used.append(part[0].number // 16)
        assert len(begun) <= len(used) + 8
        if len(used) == 2:
            assert ahead_of_the_consumer.wait(20)  # a batch was begun while the consumer held one
    assert used == sorted(begun) == list(range(64))


def test_errors_name_document_or_batch(pool: Workers) -> None:
    def fail(_: Any) -> None:
        raise ValueError("no")

    with pytest.raises(FunctionError, match=r"^document \d: ValueError: no$"):
        list(items().map(fail, pool=pool))
    with pytest.raises(FunctionError, match=r"^batch \d: ValueError: no$"):
        list(items().map_batch(fail, 5, pool=pool))


# --- apply


def test_apply_with_threads_keeps_changed_documents_and_takes_returned_ones() -> None:
    docs = items()
    before = list(docs)

    def change(doc: Item) -> Item | None:
        doc.number += 100
        return None if doc.number % 2 else Item(id=doc.id, number=-doc.number)

    assert docs.apply(change) is docs
    assert docs.number == [-(100 + i) if i % 2 == 0 else 100 + i for i in range(50)]
    assert [a is b for a, b in zip(docs, before, strict=True)] == [bool(i % 2) for i in range(50)]


def test_apply_with_processes_takes_returned_documents(processes: Workers) -> None:
    docs = items()

    def change(doc: Item) -> Item:
        doc.number += 1
        return doc

    assert docs.apply(change, pool=processes).number == list(range(1, 51))
    assert docs.by_id(docs[3].id) is docs[3]


def test_apply_with_processes_rejects_none(processes: Workers) -> None:
    docs = items()
    with pytest.raises(FunctionError, match=r"document \d: the function gave None. In another process .* return the"):
        docs.apply(lambda doc: setattr(doc, "number", 5), pool=processes)
    with pytest.raises(FunctionError, match=r"batch \d: the function gave None"):
        docs.apply_batch(lambda part: None, 5, backend="process", num_workers=1)  # noqa: ARG005
    assert docs.number == list(range(50))


def test_apply_replaces_by_position() -> None:
    docs = DocumentArray[Item]([Item(id="same", number=i) for i in range(10)])
    docs.apply(lambda doc: Item(number=doc.number * 10))
    assert docs.number == [10 * i for i in range(10)]


@pytest.mark.parametrize("wrong", [Other(), 5, "text"])
def test_apply_with_wrong_results_changes_nothing(wrong: Any, pool: Workers) -> None:
    docs = items()
    before = list(docs)
    with pytest.raises(DocumentTypeError, match="item 17: expected a Item"):
        docs.apply(lambda doc: wrong if doc.number == 17 else Item(number=0), pool=pool)
    assert all(a is b for a, b in zip(docs, before, strict=True))


def test_apply_with_error_changes_nothing(pool: Workers) -> None:
    docs = items()
    before = list(docs)

    def fail_late(doc: Item) -> Item:
        return Item(number=1 // (doc.number - 40))

    with pytest.raises(FunctionError, match="document 40: ZeroDivisionError"):
        docs.apply(fail_late, pool=pool)
    assert all(a is b for a, b in zip(docs, before, strict=True))


def test_apply_keeps_ids_unique() -> None:
    docs = DocumentArray[Item]([Item(number=i) for i in range(3)], unique_ids=True)
    with pytest.raises(DuplicateIdError):
        docs.apply(lambda doc: Item(id="a", number=doc.number))
    assert docs.number == [0, 1, 2]


def test_apply_runs_in_executor_of_the_caller() -> None:
    docs = items(5)
    with ThreadPoolExecutor(2) as executor:
        docs.apply(lambda doc: setattr(doc, "number", 7), pool=executor)
    assert docs.number == [7] * 5


# --- apply_batch


@pytest.mark.parametrize("shuffle", [False, True])
def test_apply_batch_restores_positions(shuffle: bool, pool: Workers) -> None:
    docs = items(11)

    def change(part: DocumentArray[Item]) -> DocumentArray[Item]:
        return DocumentArray[Item]([Item(number=doc.number + 1) for doc in part])

    assert docs.apply_batch(change, 4, shuffle=shuffle, seed=0, pool=pool) is docs
    assert docs.number == list(range(1, 12))
    docs.apply_batch(list, 4, shuffle=shuffle, pool=pool)
    docs.apply_batch(lambda part: part.stack(), 4, shuffle=shuffle, pool=pool)
    assert docs.number == list(range(1, 12))


def test_apply_batch_in_place() -> None:
    docs = items(10)
    docs.apply_batch(lambda part: setattr(part, "number", [0] * len(part)), 3)
    assert docs.number == [0] * 10


def test_apply_batch_rejects_other_number_of_documents(pool: Workers) -> None:
    docs = items(10)
    before = list(docs)
    with pytest.raises(FunctionError, match="batch 2: the function got 2 documents and gave 1"):
        docs.apply_batch(lambda part: part if len(part) == 4 else part[:1], 4, pool=pool)
    with pytest.raises(FunctionError, match="batch 0: the function must give an array of documents, but gave"):
        docs.apply_batch(len, 4, pool=pool)
    assert all(a is b for a, b in zip(docs, before, strict=True))


@pytest.mark.parametrize("count", [0, 1, 7, 3000])
def test_apply_of_short_function_calls_every_document_once(count: int) -> None:
    """In the threads, or in the calling thread if that is faster."""
    docs, calls = DocumentArray[Item]([Item(number=i) for i in range(count)]), list[int]()

    def change(doc: Item) -> None:
        calls.append(doc.number)
        doc.number += 1

    docs.apply(change, num_workers=2)
    assert sorted(calls) == list(range(count))
    assert docs.number == list(range(1, count + 1))
    if count > 1000:
        with pytest.raises(FunctionError, match="document 2900: ZeroDivisionError"):
            docs.apply(lambda doc: Item(number=1 // (doc.number - 2901)))
