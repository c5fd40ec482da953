"""Arrays changed by several threads at once, and their index of unique ids."""

from __future__ import annotations

import copy
import os
import pickle
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from quire import BaseDocument, DocumentArray
from quire.array._insert import _IdState
from quire.errors import DuplicateIdError

THREADS = 6


class Item(BaseDocument):
    number: int = 0
    thread: int = 0


class Loose(BaseDocument):
    id: str | None = None  # type: ignore[assignment]


@pytest.fixture(autouse=True)
def switch_often() -> Iterator[None]:
    """Let threads interrupt each other as often as the interpreter can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def run_threads(work: Callable[[int], None], threads: int = THREADS) -> None:
    """Run a function in several threads that begin together; the first error is raised."""
    errors: list[BaseException] = []
    barrier = threading.Barrier(threads)

    def run(number: int) -> None:
        barrier.wait()
        try:
            work(number)
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    running = [threading.Thread(target=run, args=(number,)) for number in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    if errors:
        raise errors[0]


# --- no document is lost or inserted twice

CALLS = st.lists(st.tuples(st.sampled_from(["append", "extend", "insert", "mapping"]), st.integers(0, 20)), max_size=60)


@settings(deadline=None, max_examples=25)
@given(programs=st.lists(CALLS, min_size=2, max_size=THREADS), unique_ids=st.booleans())
def test_threads_insert_every_document_once(programs: list[list[tuple[str, int]]], unique_ids: bool) -> None:
    array = DocumentArray[Item]([Item(number=-1, thread=-1) for _ in range(3)], unique_ids=unique_ids)
    inserted: list[list[int]] = [[] for _ in programs]

    def work(thread: int) -> None:
        for call, size in programs[thread]:
            first = len(inserted[thread])
            numbers = list(range(first, first + (size if call == "extend" else 1)))
            documents = [Item(number=number, thread=thread) for number in numbers]
            if call == "append":
                array.append(documents[0])
            elif call == "mapping":
                array.append({"number": numbers[0], "thread": thread})
            elif call == "extend":
                array.extend(documents)
            else:
                array.insert(size, documents[0])
            inserted[thread] += numbers

    run_threads(work, len(programs))
    result = Counter((doc.thread, doc.number) for doc in array if doc.thread >= 0)
    assert result == Counter((thread, number) for thread, numbers in enumerate(inserted) for number in numbers)
    assert all(array.by_id(doc.id) is doc for doc in array)


def test_documents_of_one_thread_stay_in_order() -> None:
    array = DocumentArray[Item]()

    def work(thread: int) -> None:
        for number in range(0, 400, 4):
            array.append(Item(number=number, thread=thread))
            array.extend(Item(number=number + k, thread=thread) for k in (1, 2, 3))

    run_threads(work)
    for thread in range(THREADS):
        assert [doc.number for doc in array if doc.thread == thread] == list(range(400))
    rows = [(doc.thread, doc.number) for doc in array]
    for row, (thread, number) in enumerate(rows):
        if number % 4 == 1:
            assert rows[row : row + 3] == [(thread, number + k) for k in range(3)], "what extend adds stays together"


def test_map_may_append_to_another_array() -> None:
    documents = DocumentArray[Item](Item(number=i) for i in range(500))
    result = DocumentArray[Item](unique_ids=True)
    list(documents.map(lambda doc: result.append(Item(number=doc.number)), num_workers=8))
    assert sorted(doc.number for doc in result) == list(range(500))


@pytest.mark.parametrize("way", ["append", "extend", "insert"])
def test_one_of_several_threads_inserts_an_id(way: str) -> None:
    array = DocumentArray[Item](unique_ids=True)
    refused = [0] * THREADS

    def work(thread: int) -> None:
        for number in range(200):
            document = Item(id=str(number), number=number, thread=thread)
            try:
                if way == "append":
                    array.append(document)
                elif way == "insert":
                    array.insert(0, document)
                else:
                    array.extend([document, Item(id=f"{number} again", number=number, thread=thread)])
            except DuplicateIdError:
                refused[thread] += 1

    run_threads(work)
    each = 2 if way == "extend" else 1
    assert Counter(doc.number for doc in array) == dict.fromkeys(range(200), each)
    assert sum(refused) == 200 * (THREADS - 1)
    if way == "extend":
        assert all(array.by_id(f"{number} again").thread == array.by_id(str(number)).thread for number in range(200))


def test_threads_delete_and_append_to_unique_ids() -> None:
    array = DocumentArray[Item]([Item(id=f"old{i}") for i in range(300)], unique_ids=True)

    def work(thread: int) -> None:
        for number in range(100):
            if thread % 2:
                array.append(Item(id=f"{thread}-{number}"))
            else:
                del array[0]

    run_threads(work)
    assert len(array) == 300
    for document in list(array):
        with pytest.raises(DuplicateIdError):
            array.append(Item(id=document.id))


# --- processes and copies


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork on this system")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_child_forked_while_thread_appends_can_append() -> None:
    array = DocumentArray[Item](unique_ids=True)
    is_over = threading.Event()

    def fill() -> None:
        while not is_over.is_set():
            array.extend([Item() for _ in range(20)])
            del array[:20]

    thread = threading.Thread(target=fill)
    thread.start()
    try:
        for _ in range(15):
            child = os.fork()
            if not child:  # whatever the parent's thread was doing, the child neither waits nor refuses free ids
                status = 1
                with suppress(BaseException):
                    before = len(array)
                    array.append(Item(id="new"))
                    for document in array[:5]:
                        with pytest.raises(DuplicateIdError):
                            array.append(Item(id=document.id))
                    status = int(len(array) != before + 1)
                os._exit(status)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        is_over.set()
        thread.join()


@pytest.mark.parametrize(
    "make", [lambda array: pickle.loads(pickle.dumps(array)), copy.deepcopy, copy.copy, lambda array: array.copy()]
)
def test_copies_have_their_own_id_index(make: Any) -> None:
    array = DocumentArray[Item]([Item(id="a")], unique_ids=True)
    array.append(Item(id="b"))
    created = make(array)
    with pytest.raises(DuplicateIdError):
        created.append(Item(id="b"))
    created.append(Item(id="c"))
    array.append(Item(id="c"))
    assert created.id == array.id == ["a", "b", "c"]


# --- the index


def test_append_to_unique_ids_does_not_scan_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    builds: list[int] = []
    build = _IdState.build
    monkeypatch.setattr(_IdState, "build", lambda self, docs: (builds.append(len(docs)), build(self, docs))[1])
    array = DocumentArray[Item](unique_ids=True)
    for number in range(500):
        array.append(Item(id=str(number)))
        array.insert(0, Item(id=f"first {number}"))
        array.extend([Item(id=f"pair {number}"), Item()])
        array[-1] = Item(id=f"last {number}")
        del array[0]
        with suppress(DuplicateIdError):
            array.append(Item(id="0"))
    assert builds == [0]


def test_id_that_a_document_gave_up_is_free() -> None:
    array = DocumentArray[Loose]([Loose(id="a"), Loose(id="b")], unique_ids=True)
    array[0].id = "c"
    array.append(Loose(id="a"))
    with pytest.raises(DuplicateIdError, match="'c'"):
        array.append(Loose(id="c"))
    array[1].id = None
    del array[1]
    array.append(Loose(id="b"))
    array[0].id = "d"
    array[0] = Loose(id="d")
    with pytest.raises(DuplicateIdError, match="'d'"):
        array.append(Loose(id="d"))


def test_set_column_of_ids_rejects_duplicates() -> None:
    array = DocumentArray[Item]([Item(id="a"), Item(id="b")], unique_ids=True)
    with pytest.raises(DuplicateIdError, match="'x'"):
        array.id = ["x", "x"]
    assert array.id == ["a", "b"]
    array["id"] = ["b", "c"]
    array.append(Item(id="a"))
    with pytest.raises(DuplicateIdError, match="'c'"):
        array.append(Item(id="c"))
    plain = DocumentArray[Item]([Item(id="a"), Item(id="b")])
    plain.id = ["x", "x"]
    assert plain.id == ["x", "x"]


def test_update_of_nested_array_updates_id_index() -> None:
    class Shelf(BaseDocument):
        items: DocumentArray[Item] = []

    shelf = Shelf(items=DocumentArray[Item]([Item(id="a")], unique_ids=True))
    shelf.items.append(Item(id="b"))
    shelf.update(items=[Item(id="b", number=3), Item(id="c")])
    with pytest.raises(DuplicateIdError, match="'c'"):
        shelf.items.append(Item(id="c"))
    assert shelf.items.by_id("b").number == 3


IDS = st.sampled_from(["a", "b", "c", "d", "e", None])
ROWS = st.integers(-6, 6)


class UniqueIds(RuleBasedStateMachine):
    """An array with unique ids behaves like a list whose ids are compared every time."""

    @initialize(ids=st.lists(IDS, max_size=4))
    def create(self, ids: list[Any]) -> None:
        with suppress(DuplicateIdError):
            self.array = DocumentArray[Loose]([Loose(id=key) for key in ids], unique_ids=True)
            self.ids = list(ids)
            assert is_unique(ids)
            return
        assert not is_unique(ids)
        self.array, self.ids = DocumentArray[Loose](unique_ids=True), []

    def change(self, call: Callable[[], Any], expected: list[Any]) -> None:
        try:
            call()
        except DuplicateIdError:
            assert not is_unique(expected)
        else:
            assert is_unique(expected)
            self.ids = expected
        assert self.array.id == self.ids

    @rule(key=IDS)
    def append(self, key: Any) -> None:
        self.change(lambda: self.array.append(Loose(id=key)), [*self.ids, key])

    @rule(keys=st.lists(IDS, max_size=3))
    def extend(self, keys: list[Any]) -> None:
        self.change(lambda: self.array.extend([Loose(id=key) for key in keys]), [*self.ids, *keys])

    @rule(row=ROWS, key=IDS)
    def insert(self, row: int, key: Any) -> None:
        expected = list(self.ids)
        expected.insert(row, key)
        self.change(lambda: self.array.insert(row, Loose(id=key)), expected)

    @rule(row=ROWS, key=IDS)
    def assign(self, row: int, key: Any) -> None:
        if -len(self.ids) <= row < len(self.ids):
            expected = list(self.ids)
            expected[row] = key
            self.change(lambda: self.array.__setitem__(row, Loose(id=key)), expected)

    @rule(start=ROWS, stop=ROWS, keys=st.lists(IDS, max_size=3))
    def assign_slice(self, start: int, stop: int, keys: list[Any]) -> None:
        expected = list(self.ids)
        expected[start:stop] = keys
        self.change(lambda: self.array.__setitem__(slice(start, stop), [Loose(id=key) for key in keys]), expected)

    @rule(rows=st.lists(st.integers(0, 5), max_size=3), keys=st.lists(IDS, min_size=3, max_size=3))
    def assign_rows(self, rows: list[int], keys: list[Any]) -> None:
        rows = [row for row in rows if row < len(self.ids)]
        expected = list(self.ids)
        for row, key in zip(rows, keys, strict=False):
            expected[row] = key
        if rows:
            self.change(lambda: self.array.__setitem__(rows, [Loose(id=key) for key in keys[: len(rows)]]), expected)

    @rule(rows=st.lists(st.integers(0, 5), max_size=3))
    def delete_rows(self, rows: list[int]) -> None:
        rows = [row for row in rows if row < len(self.ids)]
        if rows:
            expected = [key for row, key in enumerate(self.ids) if row not in rows]
            self.change(lambda: self.array.__delitem__(rows), expected)

    @rule(start=ROWS, stop=ROWS, step=st.sampled_from([1, 2, -1]))
    def delete_slice(self, start: int, stop: int, step: int) -> None:
        expected = list(self.ids)
        del expected[start:stop:step]
        self.change(lambda: self.array.__delitem__(slice(start, stop, step)), expected)

    @rule(row=st.integers(0, 5), again=st.booleans())
    def pop(self, row: int, again: bool) -> None:
        if row < len(self.ids):
            expected = list(self.ids)
            del expected[row]
            taken: list[Loose] = []
            self.change(lambda: taken.append(self.array.pop(row)), expected)
            if again:
                self.change(lambda: self.array.append(taken[0]), [*self.ids, taken[0].id])

    @rule(row=st.integers(0, 5))
    def append_what_is_there(self, row: int) -> None:
        if row < len(self.ids) and str(self.ids[row]) in "abcde":
            self.change(lambda: self.array.append(self.array[row]), [*self.ids, self.ids[row]])

    @rule()
    def turn(self) -> None:
        self.change(self.array.reverse, self.ids[::-1])

    @rule()
    def sort(self) -> None:
        self.change(lambda: self.array.sort(key=lambda doc: str(doc.id)), sorted(self.ids, key=str))

    @rule(keys=st.lists(st.sampled_from(["a", "c", "f"]), max_size=3, unique=True))
    def merge(self, keys: list[Any]) -> None:
        expected = [*self.ids, *(key for key in keys if key not in self.ids)]
        self.change(lambda: self.array.merge([Loose(id=key) for key in keys]), expected)

    @rule(data=st.data())
    def set_ids(self, data: Any) -> None:
        expected = data.draw(st.lists(IDS, min_size=len(self.ids), max_size=len(self.ids)))
        self.change(lambda: self.array.__setitem__("id", expected), expected)

    @rule(row=st.integers(0, 5))
    def change_in_place(self, row: int) -> None:
        """Set an unused id; the old one is free afterwards."""
        if row < len(self.ids):
            self.array[row].id = self.ids[row] = f"new {id(self.array[row])}"


def is_unique(ids: list[Any]) -> bool:
    known = [key for key in ids if key is not None]
    return len(set(known)) == len(known)


TestUniqueIds = UniqueIds.TestCase
TestUniqueIds.settings = settings(deadline=None, max_examples=60, stateful_step_count=30, database=None)
