"""DocumentArray as a list that accepts only documents of its class."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from quire import BaseDocument, Document, DocumentArray, Text
from quire.errors import DocumentTypeError, DuplicateIdError, OptionError, PathError, SchemaError
from tests.strategies import laws


class Item(BaseDocument):
    number: int = 0


class Special(Item):
    more: str = ""


class Other(BaseDocument):
    number: int = 0


def items(*numbers: int) -> list[Item]:
    return [Item(id=str(number), number=number) for number in numbers]


POOL = items(*range(6), 0, 1)  # two pairs of equal documents
documents = st.sampled_from(POOL)
slices = st.builds(slice, *[st.none() | st.integers(-7, 7)] * 2, st.sampled_from([None, 1, 2, 3, -1, -2]))


def outcome(action: Callable[[], Any]) -> Any:
    """Return the result of an action, or the builtin error that it raises."""
    try:
        result = action()
    except (IndexError, ValueError) as error:
        return IndexError if isinstance(error, IndexError) else ValueError
    return list(result) if isinstance(result, (list, DocumentArray)) else result


class ListMachine(RuleBasedStateMachine):
    """An array and a list of the same documents stay equal under the same operations."""

    def __init__(self) -> None:
        super().__init__()
        self.docs: Any = DocumentArray[Item]()
        self.model: list[Item] = []

    def both(self, action: Callable[[Any], Any]) -> None:
        result, expected = outcome(lambda: action(self.docs)), outcome(lambda: action(self.model))
        if isinstance(expected, list):
            assert [a is b for a, b in zip(result, expected, strict=True)] == [True] * len(expected)
        else:
            assert result is expected or (isinstance(expected, (int, bool)) and result == expected), (result, expected)

    @rule(document=documents)
    def append(self, document: Item) -> None:
        self.both(lambda x: x.append(document))

    @rule(document=documents, index=st.integers(-9, 9))
    def insert(self, document: Item, index: int) -> None:
        self.both(lambda x: x.insert(index, document))

    @rule(added=st.lists(documents, max_size=3))
    def extend(self, added: list[Item]) -> None:
        self.both(lambda x: x.extend(iter(added)))

    @rule(added=st.lists(documents, max_size=3))
    def add(self, added: list[Item]) -> None:
        self.both(lambda x: x + added)

    @rule(added=st.lists(documents, max_size=3))
    def add_in_place(self, added: list[Item]) -> None:
        before = self.docs
        self.docs += added
        self.model += added
        assert self.docs is before

    @rule(index=st.integers(-7, 7))
    def get(self, index: int) -> None:
        self.both(lambda x: x[index])

    @rule(rows=slices)
    def get_slice(self, rows: slice) -> None:
        self.both(lambda x: x[rows])

    @rule(index=st.integers(-7, 7), document=documents)
    def set(self, index: int, document: Item) -> None:
        self.both(lambda x: x.__setitem__(index, document))

    @rule(rows=slices, added=st.lists(documents, max_size=4))
    def set_slice(self, rows: slice, added: list[Item]) -> None:
        self.both(lambda x: x.__setitem__(rows, added))

    @rule(index=st.integers(-7, 7))
    def delete(self, index: int) -> None:
        self.both(lambda x: x.__delitem__(index))

    @rule(rows=slices)
    def delete_slice(self, rows: slice) -> None:
        self.both(lambda x: x.__delitem__(rows))

    @rule(index=st.integers(-7, 7))
    def pop(self, index: int) -> None:
        self.both(lambda x: x.pop(index))
        self.both(lambda x: x.pop())

    @rule(document=documents)
    def remove(self, document: Item) -> None:
        self.both(lambda x: x.remove(document))

    @rule(document=documents, start=st.integers(-3, 3), stop=st.integers(-3, 8))
    def index(self, document: Item, start: int, stop: int) -> None:
        self.both(lambda x: x.index(document))
        self.both(lambda x: x.index(document, start, stop))

    @rule(document=documents)
    def count_and_contains(self, document: Item) -> None:
        self.both(lambda x: x.count(document))
        self.both(lambda x: document in x)

    @rule(reverse=st.booleans())
    def sort(self, reverse: bool) -> None:
        self.both(lambda x: x.sort(key=lambda item: item.number % 3, reverse=reverse))

    @rule()
    def reverse(self) -> None:
        self.both(lambda x: x.reverse())
        self.both(lambda x: list(reversed(x)))

    @rule()
    def copy(self) -> None:
        self.both(lambda x: x.copy())
        self.both(copy.copy)

    @rule()
    def clear(self) -> None:
        self.both(lambda x: x.clear())

    @invariant()
    def the_same(self) -> None:
        assert type(self.docs) is DocumentArray[Item]
        assert len(self.docs) == len(self.model)
        assert bool(self.docs) == bool(self.model)
        self.both(list)
        if self.model:
            assert self.docs.by_id(self.model[0].id).id == self.model[0].id


TestListMachine = ListMachine.TestCase
TestListMachine.settings = settings(laws, max_examples=60, stateful_step_count=25)


# --- accepted documents


def test_mappings_and_main_values_become_documents() -> None:
    docs = DocumentArray[Item]([{"number": 1}, Item(number=2)])
    docs.append({"number": 3})
    docs.insert(0, {"number": 0})
    docs[1] = {"number": 9}
    docs.extend([{"number": 4}])
    assert docs.number == [0, 9, 2, 3, 4]
    texts = DocumentArray[Text](["a"])
    texts.append("b")
    assert texts.text == ["a", "b"]


def test_documents_of_subclasses_are_kept() -> None:
    special = Special(number=1, more="x")
    docs = DocumentArray[Item]([special])
    assert docs[0] is special


INSERTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "append": lambda docs, bad: docs.append(bad),
    "insert": lambda docs, bad: docs.insert(1, bad),
    "extend": lambda docs, bad: docs.extend([Item(), bad]),
    "add in place": lambda docs, bad: docs.__iadd__([Item(), bad]),
    "add": lambda docs, bad: docs + [bad],  # noqa: RUF005
    "set": lambda docs, bad: docs.__setitem__(0, bad),
    "set slice": lambda docs, bad: docs.__setitem__(slice(0, 2), [Item(), bad]),
    "set list": lambda docs, bad: docs.__setitem__([0, 1], [Item(), bad]),
    "set mask": lambda docs, bad: docs.__setitem__([True, False, True], [Item(), bad]),
    "merge": lambda docs, bad: docs.merge([Item(id="0", number=7), bad]),
}


@pytest.mark.parametrize("insert", INSERTIONS.values(), ids=INSERTIONS)
@pytest.mark.parametrize("bad", [Other(), "text", None, 3, {"number": "many"}, {"number": [1]}, [Item()], Item])
def test_rejected_item_changes_nothing(insert: Callable[[Any, Any], Any], bad: Any) -> None:
    docs = DocumentArray[Item](items(0, 1, 2))
    held, before = list(docs), copy.deepcopy(docs)
    with pytest.raises(DocumentTypeError, match=r"DocumentArray\[Item\]: item \d") as raised:
        insert(docs, bad)
    assert isinstance(raised.value, TypeError)
    assert [a is b for a, b in zip(docs, held, strict=True)] == [True] * 3
    assert docs.identical(before)


def test_errors_describe_rejected_items() -> None:
    with pytest.raises(DocumentTypeError, match=r"item 1: expected a Item, got Other"):
        DocumentArray[Item]([Item(), Other()])
    with pytest.raises(DocumentTypeError, match=r"item 0: expected a Item, got str 'text'"):
        DocumentArray[Item](["text"])
    with pytest.raises(DocumentTypeError, match=r"(?s)item 0: .*number"):
        DocumentArray[Item]([{"number": "many"}])


@pytest.mark.parametrize("bad", [3, None, "abc", b"abc", {"number": 1}, Item()])
def test_array_rejects_values_that_are_not_iterables_of_documents(bad: Any) -> None:
    docs = DocumentArray[Item](items(0))
    with pytest.raises(DocumentTypeError, match="takes an iterable of documents"):
        DocumentArray[Item](bad)
    with pytest.raises(DocumentTypeError, match="takes an iterable of documents"):
        docs.extend(bad)
    assert len(docs) == 1


def test_assignment_rejects_other_number_of_documents() -> None:
    docs = DocumentArray[Item](items(0, 1, 2))
    with pytest.raises(DocumentTypeError, match="2 positions, but 1 documents"):
        docs[[0, 1]] = items(5)
    with pytest.raises(ValueError, match="extended slice"):
        docs[::2] = items(5)
    assert docs.number == [0, 1, 2]
    docs[[2, 0]] = items(7, 8)
    assert docs.number == [8, 1, 7]


def test_sort_by_a_path_says_what_to_write() -> None:
    with pytest.raises(OptionError, match=r"key=lambda doc: doc\.number$"):
        DocumentArray[BaseDocument]().sort(key="number")  # type: ignore[arg-type]


def test_sort_with_failing_key_keeps_the_order() -> None:
    docs = DocumentArray[Item](items(2, 0, 1))
    with pytest.raises(ZeroDivisionError):
        docs.sort(key=lambda item: 1 / item.number)
    assert docs.number == [2, 0, 1]


def test_array_extends_itself() -> None:
    docs = DocumentArray[Item](items(0, 1))
    docs.extend(docs)
    docs[1:1] = docs
    assert len(docs) == 8


def test_iteration_while_appending_is_like_a_list() -> None:
    docs = DocumentArray[Item](items(0))
    for item in docs:
        if item.number < 3:
            docs.append(Item(number=item.number + 1))
    assert docs.number == [0, 1, 2, 3]


# --- arrays without a type


def test_untyped_array_holds_any_document() -> None:
    mixed = [Item(number=1), Special(more="x"), Text(text="t"), Document(tags={"a": 1})]
    docs = DocumentArray(mixed)
    assert [a is b for a, b in zip(docs, mixed, strict=True)] == [True] * 4
    assert list(docs.stack().unstack()) == mixed
    assert [type(document) for document in docs.stack()] == [Item, Special, Text, Document]
    assert copy.deepcopy(docs).identical(docs)
    with pytest.raises(DocumentTypeError, match="expected a BaseDocument, got dict"):
        docs.append({"number": 1})
    with pytest.raises(PathError):
        docs.number  # noqa: B018


def test_untyped_array_of_one_class_has_its_columns() -> None:
    docs = DocumentArray(items(1, 2))
    assert docs.number == [1, 2]
    docs.number = [3, 4]
    assert docs.stack().number.tolist() == [3, 4]
    assert list(docs.stack().unstack()) == list(docs)


# --- ids


def test_by_id_returns_document() -> None:
    docs = DocumentArray[Item](items(0, 1, 2))
    assert docs.by_id("1") is docs[1]
    docs[1].id = "new"
    assert docs.by_id("new") is docs[1]
    with pytest.raises(PathError, match="no document in <DocumentArray.Item. of 3> has the id '1'"):
        docs.by_id("1")
    with pytest.raises(KeyError):
        docs.by_id("zzz")


@pytest.mark.parametrize(
    "change",
    [
        lambda docs: docs.insert(0, Item(id="x")),
        lambda docs: docs.reverse(),
        lambda docs: docs.sort(key=lambda item: -item.number),
        lambda docs: docs.pop(0),
        lambda docs: docs.__delitem__([0, 1]),
        lambda docs: docs.__setitem__(0, Item(id="y")),
        lambda docs: docs.merge([Item(id="z")]),
        lambda docs: docs.extend(items(9)),
    ],
    ids=["insert", "reverse", "sort", "pop", "delete", "set", "merge", "extend"],
)
def test_by_id_after_changes(change: Callable[[Any], Any]) -> None:
    docs = DocumentArray[Item](items(0, 1, 2, 3))
    before = docs.id
    assert docs.by_id("3") is docs[3]
    change(docs)
    assert all(docs.by_id(document.id) is document for document in docs)
    for gone in set(before) - set(docs.id):
        with pytest.raises(PathError):
            docs.by_id(gone)


def test_by_id_returns_first_of_several() -> None:
    docs = DocumentArray[Item]([Item(id="a", number=1), Item(id="a", number=2)])
    assert docs.by_id("a").number == 1
    del docs[0]
    assert docs.by_id("a").number == 2


def test_by_id_of_none_raises_path_error() -> None:
    class Nameless(BaseDocument):
        id: ClassVar[None] = None

    with pytest.raises(PathError):
        DocumentArray[Nameless]([Nameless()]).by_id(None)


@pytest.mark.parametrize(
    "change",
    [
        lambda docs: docs.append(Item(id="1")),
        lambda docs: docs.extend([Item(id="7"), Item(id="7")]),
        lambda docs: docs.insert(0, Item(id="2")),
        lambda docs: docs.__setitem__(0, Item(id="2")),
        lambda docs: docs.__setitem__(slice(None), [Item(id="5"), Item(id="5")]),
        lambda docs: docs.__setitem__([0, 1], [Item(id="2"), Item(id="1")]),
        lambda docs: docs.extend(docs),
    ],
    ids=["append", "extend", "insert", "set", "slice", "list", "self"],
)
def test_unique_ids_reject_duplicates(change: Callable[[Any], Any]) -> None:
    docs = DocumentArray[Item](items(0, 1, 2), unique_ids=True)
    before = list(docs)
    with pytest.raises(DuplicateIdError, match="is in the array already") as raised:
        change(docs)
    assert isinstance(raised.value, ValueError)
    assert [a is b for a, b in zip(docs, before, strict=True)] == [True] * 3


def test_unique_ids_accept_changes_without_duplicates() -> None:
    docs = DocumentArray[Item](items(0, 1, 2), unique_ids=True)
    docs[0] = Item(id="0", number=9)
    docs[:2] = [docs[1], docs[0]]
    docs.reverse()
    docs.merge([Item(id="1", number=5), Item(id="8")])
    assert sorted(docs.id) == ["0", "1", "2", "8"]
    with pytest.raises(DuplicateIdError):
        DocumentArray[Item]([*items(0), *items(0)], unique_ids=True)
    for twin in (docs.copy(), copy.deepcopy(docs)):
        with pytest.raises(DuplicateIdError):
            twin.append(Item(id="8"))
    assert len(DocumentArray[Item]([*items(0), *items(0)])) == 2


# --- empty


def test_empty_makes_documents_with_defaults() -> None:
    docs = DocumentArray[Item].empty(3)
    assert (type(docs), len(docs), len(set(docs.id)), docs.number) == (DocumentArray[Item], 3, 3, [0, 0, 0])
    assert len(DocumentArray[Item].empty()) == 0
    assert [type(document) for document in DocumentArray.empty(2)] == [Document, Document]
    DocumentArray.empty(1)[0].tags["a"] = 1
    assert DocumentArray.empty(1)[0].tags == {}

    class Strict(BaseDocument):
        name: str

    with pytest.raises(SchemaError, match="Strict has no default for name"):
        DocumentArray[Strict].empty(1)


def test_index_error_describes_missing_document() -> None:
    docs = DocumentArray[Item]([Item()])
    for look in (docs.index, docs.remove):
        with pytest.raises(ValueError, match=r"^no document in <DocumentArray\[Item\] of 1> is equal to int 3\."):
            look(3)
