"""Stacking documents: the column of each kind of field, and rejected values."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest
from pydantic_core import core_schema
from typing_extensions import Self

from quire import BaseDocument, DocumentArray, DocumentBatch, Text
from quire.columns import (
    DocumentColumn,
    DocumentsColumn,
    ObjectColumn,
    RaggedColumn,
    ScalarColumn,
    TensorColumn,
)
from quire.columns._stack import StackOptions, collect_extra_states, have_own_attributes, stack, validity_of
from quire.errors import ColumnError, SchemaError
from quire.typing import AnyTensor, NdArray, TorchTensor, float32
from tests.strategies import Branch, Leaf, Node


class Author(BaseDocument):
    name: str = ""
    age: int | None = None
    vector: NdArray[float32, 2] | None = None


class Special(Author):
    more: int = 0


class Shelf(DocumentArray[Author]):
    def __init__(self, documents: Any = (), *, room: str = "") -> None:
        super().__init__(documents)
        if room:
            self.room = room


class Book(BaseDocument):
    number: int = 0
    real: float = 0.0
    flag: bool = False
    complex_: complex = 0j
    maybe: int | None = None
    maybe_real: float | None = None
    title: str = ""
    vector: NdArray | None = None
    fixed: NdArray[float32, 2, "n"] | None = None
    exact: NdArray[float32, 2] | None = None
    anything: AnyTensor | None = None
    author: Author = Author()
    editor: Author | None = None
    authors: DocumentArray[Author] = []
    readers: DocumentArray[Author] | None = None
    shelf: Shelf = []


def stacked(name: str, values: list[Any], **options: Any) -> DocumentBatch[Book]:
    """Stack books with these values in one field, and check that unstacking gives the same values."""
    docs = DocumentArray[Book]([Book(**{name: value}) for value in values])
    batch = docs.stack(**options)
    assert batch.unstack().identical(docs)
    assert [batch[row] for row in range(len(docs))] == list(docs)
    return batch


# --- numbers


@pytest.mark.parametrize(
    ("name", "values", "dtype"),
    [
        ("number", [1, -2], "int64"),
        ("number", [2**63 - 1, -(2**63)], "int64"),
        ("real", [1.5, float("nan")], "float64"),
        ("flag", [True, False], "bool"),
        ("complex_", [1j, 2 + 0j], "complex128"),
    ],
)
def test_stack_makes_numbers_vectors(name: str, values: list[Any], dtype: str) -> None:
    batch = stacked(name, values)
    column = batch.column(name)
    assert type(column) is ScalarColumn
    assert isinstance(batch[name], np.ndarray)
    assert batch[name].dtype == dtype
    assert [type(document.__dict__[name]) for document in batch] == [type(value) for value in values]


@pytest.mark.parametrize("values", [[2**63], [1, -(2**63) - 1], [2**64, 0]], ids=str)
def test_stack_holds_integers_beyond_64_bits_as_objects(values: list[int]) -> None:
    batch = stacked("number", values)
    assert type(batch.column("number")) is ObjectColumn
    assert batch.number == values
    assert stacked("maybe", [*values, None]).maybe == [*values, None]


def test_validity_marks_missing_numbers() -> None:
    batch = stacked("maybe", [3, None, 0])
    assert batch.maybe.tolist() == [3, 0, 0]
    assert batch.validity("maybe").tolist() == [True, False, True]
    assert batch.validity("number").tolist() == [True] * 3
    assert stacked("maybe_real", [None, float("nan")]).validity("maybe_real").tolist() == [False, True]
    assert stacked("maybe", [None, None]).validity("maybe").tolist() == [False, False]


def test_stack_keeps_numbers_that_were_not_validated() -> None:
    docs = DocumentArray[Book]([Book(), Book(maybe_real=1.0)])
    docs[0].__dict__["number"] = True
    docs[0].__dict__["maybe_real"] = 2**60 + 1
    batch = docs.stack()
    assert [type(batch.column(name)) for name in ("number", "maybe_real")] == [ObjectColumn, ObjectColumn]
    assert batch[0].number is True
    assert batch[0].maybe_real == 2**60 + 1


# --- tensors


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int16", "float16", "float64", "complex64", "<U3", "M8[s]", "S2"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3)], ids=str)
def test_stack_makes_tensors_of_one_shape_one_tensor(dtype: str, shape: tuple[int, ...]) -> None:
    arrays = [np.zeros(shape, dtype), np.ones(shape, "i1").astype(dtype)]
    batch = stacked("vector", arrays)
    assert type(batch.column("vector")) is TensorColumn
    assert (batch.vector.dtype, batch.vector.shape) == (arrays[0].dtype, (2, *shape))
    assert [value.shape for value in batch.column("vector").values()] == [shape] * 2
    missing = stacked("vector", [arrays[0], None])
    assert (missing.vector.dtype, missing.validity("vector").tolist()) == (arrays[0].dtype, [True, False])


def test_stack_keeps_byte_orders() -> None:
    batch = stacked("vector", [np.ones(2, ">f4"), np.ones(2, ">f4")])
    assert batch[0].vector.dtype == ">f4"
    joined = DocumentBatch[Book].concat([batch, batch])
    assert joined[3].vector.dtype == ">f4"
    with pytest.raises(ColumnError, match="mixed dtypes: row 0 has >f4, row 1 has float32"):
        stacked("vector", [np.ones(2, ">f4"), np.ones(2, "<f4")])


def test_stack_accepts_record_arrays() -> None:
    record = np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")])
    assert stacked("vector", [record, None]).vector.dtype == record.dtype


def test_stack_rejects_mixed_dtypes_of_typed_field() -> None:
    docs = DocumentArray[Book]([Book(vector=np.zeros(2, np.int64)), Book(vector=np.array([0.5, 0.5]))])
    with pytest.raises(ColumnError, match="Book.vector: mixed dtypes: row 0 has int64, row 1 has float64. Cast"):
        docs.stack()
    assert docs[0].vector.dtype == np.int64


def test_stack_holds_mixed_dtypes_of_any_tensor_as_objects() -> None:
    values = [np.zeros(2, np.int64), None, np.array([0.5, 0.5])]
    batch = stacked("anything", values)
    assert type(batch.column("anything")) is ObjectColumn
    assert batch.anything[2] is values[2]
    assert batch.validity("anything").tolist() == [True, False, True]


def test_stack_does_not_broadcast() -> None:
    """Another library broadcasts (1,) to (3,) silently."""
    docs = DocumentArray[Book]([Book(), Book(vector=np.zeros(3)), Book(vector=np.zeros(1))])
    with pytest.raises(ColumnError, match=r"Book.vector: mixed shapes: row 1 has \(3,\), row 2 has \(1,\). Stack with"):
        docs.stack()
    with pytest.raises(ColumnError, match="mixed shapes"):
        DocumentArray[Book]([Book(anything=np.zeros((2, 1))), Book(anything=np.zeros((2, 2)))]).stack()
    nested = DocumentArray[Book]([Book(author={}, authors=[{}])])
    nested[0].authors.append(Author.model_construct(vector=np.zeros(3, np.float32)))
    nested[0].authors.append(Author(vector=[0, 0]))
    with pytest.raises(ColumnError, match=r"Book.authors.vector: mixed shapes: row 1 has \(3,\), row 2 has \(2,\)"):
        nested.stack()


def test_stack_pads_mixed_shapes() -> None:
    values = [np.ones((2, 1)), None, np.full((1, 3), 2.0), np.ones((2, 3))]
    batch = stacked("vector", values, shapes="pad")
    assert batch.vector.shape == (4, 2, 3)
    assert batch.vector.dtype == np.float64
    assert batch.vector[2].tolist() == [[2, 2, 2], [0, 0, 0]]
    mask = batch.mask("vector")
    assert mask.dtype == bool
    assert mask.astype(int).tolist() == [
        *([[1, 0, 0], [1, 0, 0]], [[0, 0, 0], [0, 0, 0]], [[1, 1, 1], [0, 0, 0]], [[1, 1, 1], [1, 1, 1]]),
    ]
    assert [None if doc.vector is None else doc.vector.shape for doc in batch] == [(2, 1), None, (1, 3), (2, 3)]
    assert batch[[0, 2]].mask("vector").sum() == 5
    assert stacked("vector", values[2:], shapes="pad")[1:].mask("vector").all()
    with pytest.raises(ColumnError, match="different numbers of dimensions cannot be padded. Use shapes='ragged'"):
        stacked("vector", [np.zeros(2), np.zeros((2, 2))], shapes="pad")
    with pytest.raises(ColumnError, match="title: only a tensor column has a mask"):
        batch.mask("title")


def test_stack_makes_mixed_shapes_ragged() -> None:
    values = [np.ones((2, 1)), None, np.arange(3.0), np.zeros((0, 2)), np.array(7.0)]
    batch = stacked("vector", values, shapes="ragged")
    column = batch.vector
    assert type(column) is RaggedColumn
    assert (len(column), column.flat.tolist()) == (5, [1, 1, 0, 1, 2, 7])
    assert column[2].tolist() == [0, 1, 2]
    assert column[-1].shape == ()
    assert column[1] is None
    with pytest.raises(IndexError):
        column[5]
    assert batch.validity("vector").tolist() == [True, False, True, True, True]
    assert type(stacked("vector", values[2:3], shapes="ragged").column("vector")) is TensorColumn


def test_stack_rejects_unknown_shape_policy() -> None:
    with pytest.raises(ColumnError, match="shapes='stretch' is not a policy"):
        DocumentArray[Book]().stack(shapes="stretch")
    with pytest.raises(SchemaError, match="'troch' is not a framework. Did you mean 'torch'"):
        DocumentArray[Book]().stack("troch")
    with pytest.raises(ColumnError, match="scipy has sparse matrices only"):
        DocumentArray[Book]().stack("scipy")


def test_stack_of_missing_tensors() -> None:
    batch = stacked("exact", [None, None])
    assert (batch.exact.shape, batch.exact.dtype) == ((2, 2), np.float32)
    assert batch.validity("exact").tolist() == [False, False]
    for name in ("vector", "fixed", "anything"):
        assert batch[name] == [None, None]
        assert batch.validity(name).tolist() == [False, False]


# --- empty


def test_empty_batch_has_columns() -> None:
    batch = DocumentArray[Book]().stack()
    assert (len(batch), list(batch), batch.title) == (0, [], [])
    assert (batch.number.dtype, batch.number.shape, batch.maybe.dtype) == (np.int64, (0,), np.int64)
    assert (batch.exact.shape, batch.exact.dtype) == ((0, 2), np.float32)
    assert (batch.fixed.shape, batch.fixed.dtype) == ((0, 2, 0), np.float32)
    assert batch.author.name == []
    assert (len(batch.authors), batch.authors.offsets.tolist(), len(batch.authors.flat)) == (0, [0], 0)
    assert batch.unstack() == DocumentArray[Book]()
    assert batch == DocumentBatch[Book]()
    assert batch[:0] == batch.take([]) == batch
    full = DocumentArray[Book]([Book(number=1, vector=np.zeros(2, np.int8), anything=np.zeros(3, bool))]).stack()
    joined = DocumentBatch[Book].concat([batch, full, batch])
    assert joined == full
    assert [joined.vector.dtype, joined.anything.dtype] == [np.int8, np.bool_]
    assert DocumentBatch[Book].concat([batch, batch]) == batch
    assert DocumentBatch[Book].concat([]) == batch


def test_empty_parts_of_batches() -> None:
    batch = DocumentArray[Book]([Book(vector=np.zeros(2, np.int8), authors=[{}])]).stack()[:0]
    assert (batch.vector.shape, batch.vector.dtype) == ((0, 2), np.int8)
    assert len(batch.authors.flat) == 0


# --- nested


def test_stack_makes_nested_documents_batches() -> None:
    docs = DocumentArray[Book]([Book(author=Author(name="a", age=1)), Book(editor=Special(name="e", more=3))])
    batch = docs.stack()
    assert type(batch.column("author")) is DocumentColumn
    assert type(batch.author) is DocumentBatch[Author]
    assert batch.author.name == batch["author.name"] == ["a", ""]
    assert batch.editor.name == [None, "e"]
    assert batch.validity("editor").tolist() == [False, True]
    assert batch.validity("editor.age").tolist() == [False, False]
    assert (batch.editor[0], type(batch.editor[1]), batch.editor[1].more) == (None, Special, 3)
    assert list(batch.editor) == [None, docs[1].editor]


def test_stack_makes_arrays_flat_batch_with_offsets() -> None:
    docs = DocumentArray[Book](
        [
            Book(authors=[{"name": "a"}, {"name": "b", "vector": [1, 2]}], readers=[]),
            Book(),
            Book(authors=[{"name": "c"}], readers=[Special(name="r", more=1)]),
        ]
    )
    batch = docs.stack()
    assert batch.unstack().identical(docs)
    column = batch.column("authors")
    assert type(column) is DocumentsColumn
    assert column.offsets.dtype == np.int64
    assert batch.authors.offsets.tolist() == [0, 2, 2, 3]
    assert batch.authors.name == batch["authors.name"] == batch.authors.flat.name == ["a", "b", "c"]
    assert batch.authors.flat.vector.shape == (3, 2)
    assert [part.name for part in (batch.authors[0], batch.authors[1], batch.authors[-1])] == [["a", "b"], [], ["c"]]
    assert batch.validity("readers").tolist() == [True, False, True]
    assert (batch.readers[1], len(batch.readers[0]), batch.readers[2][0].more) == (None, 0, 1)
    assert batch[2].readers[0].more == 1
    assert [batch.take([2, 0]).authors.offsets.tolist(), batch[1:].authors.offsets.tolist()] == [[0, 1, 3], [0, 0, 1]]
    with pytest.raises(ColumnError, match="indexed by one position"):
        batch.authors[[0, 1]]
    with pytest.raises(IndexError):
        batch.authors[3]


def test_stack_nests_arrays_of_arrays() -> None:
    docs = DocumentArray[Branch](
        [Branch(leaf=Leaf(text="l"), leaves=[Leaf(text=str(n)) for n in range(size)]) for size in (2, 0, 1)]
    )
    batch = docs.stack()
    assert batch.leaves.offsets.tolist() == [0, 2, 2, 3]
    assert batch[1].leaves == DocumentArray[Leaf]()
    assert batch.unstack().identical(docs)


def test_stack_keeps_class_and_attributes_of_array_subclasses() -> None:
    plain = stacked("shelf", [Shelf([{"name": "a"}]), Shelf()])
    assert type(plain.column("shelf")) is DocumentsColumn
    assert type(plain[0].shelf) is Shelf
    roomy = Shelf([{"name": "a"}], room="east")
    batch = stacked("shelf", [roomy, Shelf()])
    assert type(batch.column("shelf")) is ObjectColumn
    assert (batch[0].shelf.room, batch.unstack()[0].shelf.room) == ("east", "east")

    class Own(DocumentArray[Author]):
        pass

    own = stacked("authors", [Own([{"name": "a"}]), DocumentArray[Author]()])
    assert [type(doc.authors) for doc in own] == [Own, DocumentArray[Author]]


def test_stack_holds_recursive_documents_as_objects() -> None:
    docs = DocumentArray[Node]([Node(name="a", children=[Node(name="b")]), Node(parent=Node(name="p"))])
    batch = docs.stack()
    assert [type(batch.column(name)) for name in ("parent", "children")] == [ObjectColumn, ObjectColumn]
    assert batch.unstack().identical(docs)
    assert batch.children[0][0].name == "b"


def test_stack_holds_unions_as_objects() -> None:
    docs = DocumentArray[Branch](
        [Branch(leaf=Leaf(text=""), either=3), Branch(leaf=Leaf(text=""), either=Leaf(text="x"))]
    )
    assert docs.stack().either == [3, Leaf(text="x")]


# --- rejected documents


def test_stack_rejects_documents_without_a_field() -> None:
    broken = Text.model_construct()
    del broken.__dict__["url"]
    with pytest.raises(ColumnError, match="Text.url: document 1 has no such value; it was made without validation"):
        DocumentArray[Text]([Text(), broken]).stack()


def test_stack_does_not_change_documents() -> None:
    docs = DocumentArray[Book]([Book(vector=np.zeros(2), author=Author(name="a")) for _ in range(2)])
    held = [dict(document.__dict__) for document in docs]
    batch = docs.stack()
    batch.vector[0] = 7
    batch.title = ["x", "y"]
    batch.author.name = ["x", "y"]
    assert all(docs[row].__dict__[name] is value for row in range(2) for name, value in held[row].items())
    assert docs[0].vector.tolist() == [0, 0]
    assert docs.author.name == ["a", "a"]


# --- which rows an error names


def test_stack_error_names_row_that_is_no_document() -> None:
    docs = DocumentArray[Book]([Book(), Book(), Book()])
    docs[2].__dict__["author"] = {"name": "a"}
    with pytest.raises(ColumnError, match=r"^Book.author, row 2: expected a Author, got dict; it was set without"):
        docs.stack()
    docs[2].__dict__["author"] = Author()
    docs[1].__dict__["editor"] = 3
    with pytest.raises(ColumnError, match=r"^Book.editor, row 1: expected a Author, got int 3; it was set without"):
        docs.stack()
    with pytest.raises(ColumnError, match=r"^Author, row 1: expected a Author, got int"):
        stack(Author.document_schema(), [None, 3], StackOptions())


def test_stack_accepts_objects_with_the_fields() -> None:
    columns = stack(Author.document_schema(), [Special(name="a", more=3)], StackOptions())
    assert columns.columns["name"].values() == ["a"]
    assert columns.extra_states is not None
    assert columns.extra_states[0].fields == {"more": 3}  # type: ignore[union-attr]


@pytest.mark.parametrize("missing", [0, 1])
def test_stack_error_names_document_without_a_field(missing: int) -> None:
    docs: list[Any] = [Author(), Author(), Author()]
    del docs[2].__dict__["age"]
    docs[:missing] = [None] * missing
    with pytest.raises(ColumnError, match=r"^Author.age: document 2 has no such value; it was made without"):
        stack(Author.document_schema(), docs, StackOptions())
    with pytest.raises(ColumnError, match=r"^there.age: document 2 has no such value"):
        stack(Author.document_schema(), docs, StackOptions(), "there")


@pytest.mark.parametrize(
    ("values", "rows"),
    [
        ([np.zeros(2), np.zeros(2), np.zeros(3)], (0, 2)),
        ([None, np.zeros(2), None, np.zeros(2), np.zeros(3)], (1, 4)),
        ([np.zeros(2), None, np.zeros(3), np.zeros(2)], (0, 2)),
    ],
)
def test_mixed_shapes_error_names_first_rows_that_differ(values: list[Any], rows: tuple[int, int]) -> None:
    first, second = rows
    message = rf"Book.vector: mixed shapes: row {first} has \(2,\), row {second} has \(3,\). Stack with shapes='pad'"
    with pytest.raises(ColumnError, match=message):
        stacked("vector", values)
    typed = [None if value is None else np.zeros(2, "i1" if len(value) == 2 else "i2") for value in values]
    with pytest.raises(ColumnError, match=rf"mixed dtypes: row {first} has int8, row {second} has int16. Cast them"):
        stacked("vector", typed)


# --- rows without a document


def test_stack_of_none_gives_rows_without_values() -> None:
    author = Author(name="a", age=1, vector=[1, 2])
    columns = stack(Author.document_schema(), [None, author], StackOptions())
    assert columns.validity is not None
    assert columns.validity.tolist() == [False, True]
    assert columns.columns["name"].values() == [None, "a"]
    assert columns.columns["age"].values() == [None, 1]
    assert columns.extra_states is None
    assert columns.documents() == [None, author]
    full = stack(Author.document_schema(), [author], StackOptions())
    assert full.validity is None
    assert full.extra_states is None


def test_validity_is_false_for_none_only() -> None:
    assert validity_of([]) is None
    assert validity_of([0, "", False]) is None
    validity = validity_of([0, None, ""])
    assert validity is not None
    assert validity.tolist() == [True, False, True]
    assert validity.dtype == bool


class Extra(BaseDocument, extra="allow"):
    id: ClassVar[None] = None  # type: ignore[assignment]
    title: str = ""


def test_extra_states_hold_fields_beyond_the_schema() -> None:
    schema = Author.document_schema()
    assert collect_extra_states(schema, [Author(), Author()]) is None
    assert collect_extra_states(schema, [Author(), None]) is None
    assert collect_extra_states(schema, []) is None
    rest = collect_extra_states(schema, [Author(), None, Special(more=2)])
    assert rest is not None
    assert rest[1] is None
    assert [None if item is None else item.fields for item in rest] == [{}, None, {"more": 2}]
    assert [None if item is None else item.document_type for item in rest] == [Author, None, Special]
    kept = collect_extra_states(Extra.document_schema(), [Extra(colour="red"), None])  # type: ignore[call-arg]
    assert kept is not None
    assert kept[0].extra == {"colour": "red"}  # type: ignore[union-attr]
    assert kept[1] is None


def test_extra_states_hold_unknown_fields_of_decoded_documents() -> None:
    odd = Author(name="a")
    object.__setattr__(odd, "__pydantic_extra__", {"colour": "red"})
    for docs in ([Author(), odd], [None, odd]):
        rest = collect_extra_states(Author.document_schema(), docs)
        assert rest is not None
        assert rest[1].extra == {"colour": "red"}  # type: ignore[union-attr]


# --- numbers and arrays


def test_stack_holds_numbers_of_mixed_types_as_objects() -> None:
    docs = DocumentArray[Book]([Book(maybe=1), Book()])
    docs[0].__dict__["maybe"] = 1.5
    batch = docs.stack()
    assert type(batch.column("maybe")) is ObjectColumn
    assert batch.maybe == [1.5, None]


class Level(int):
    """A class of numbers that has no default."""

    def __new__(cls, value: int) -> Self:
        return super().__new__(cls, value)

    @classmethod
    def __get_pydantic_core_schema__(cls, *_: Any) -> Any:
        return core_schema.no_info_after_validator_function(cls, core_schema.int_schema())


def test_stack_holds_numbers_of_subclasses_as_objects() -> None:
    class Step(BaseDocument):
        level: Level | None = None

    docs = DocumentArray[Step]([Step(level=3), Step()])
    batch = docs.stack()
    assert type(batch.column("level")) is ObjectColumn
    assert [type(value) for value in batch.level] == [Level, type(None)]
    assert type(docs[:1].stack().column("level")) is ObjectColumn


def test_stack_of_missing_arrays_adds_no_rows() -> None:
    batch = stacked("readers", [None, [Author(name="a")], None, [Author(name="b"), Author(name="c")], []])
    assert batch.column("readers").offsets.tolist() == [0, 0, 1, 1, 3, 3]
    assert batch.validity("readers").tolist() == [False, True, False, True, True]
    assert batch["readers.name"] == ["a", "b", "c"]
    none = stacked("readers", [None, None])
    assert none.column("readers").offsets.tolist() == [0, 0, 0]


def test_have_own_attributes_finds_attributes_of_subclasses() -> None:
    assert not have_own_attributes(Shelf, [Shelf(), None])
    assert have_own_attributes(Shelf, [Shelf(), None, Shelf(room="east")])
    assert not have_own_attributes(DocumentArray[Author], [DocumentArray[Author]()])


# --- tensors


class Shaped(BaseDocument):
    id: ClassVar[None] = None  # type: ignore[assignment]
    fixed: NdArray[float32, 2, 3] | None = None
    rest: NdArray[float32, 2, ...] | None = None
    named: NdArray[float32, "n", 3] | None = None
    untyped: NdArray[2, 3] | None = None
    any_shape: NdArray[float32] | None = None


def test_empty_tensor_column_has_declared_shape() -> None:
    batch = DocumentArray[Shaped]().stack()
    assert {name: batch[name].shape for name in Shaped.model_fields} == {
        "fixed": (0, 2, 3),
        "rest": (0, 2),
        "named": (0, 0, 3),
        "untyped": (0, 2, 3),
        "any_shape": (0,),
    }
    assert batch.untyped.dtype == np.float32
    assert batch.column("fixed").validity is None


def test_column_of_missing_tensors_is_a_tensor_if_shape_and_dtype_are_known() -> None:
    batch = DocumentArray[Shaped]([Shaped(), Shaped()]).stack()
    kinds = {name: type(batch.column(name)) for name in Shaped.model_fields}
    assert kinds.pop("fixed") is TensorColumn
    assert set(kinds.values()) == {ObjectColumn}
    assert batch.fixed.shape == (2, 2, 3)
    assert batch.validity("fixed").tolist() == [False, False]
    assert batch.untyped == [None, None]


@pytest.mark.parametrize("values", [[np.zeros(2), None, np.ones(2)], [None, np.ones(2)]])
def test_missing_tensors_are_zeros(values: list[Any]) -> None:
    batch = stacked("vector", values)
    assert batch.vector.tolist() == [[0, 0] if value is None else value.tolist() for value in values]
    assert batch.validity("vector").tolist() == [value is not None for value in values]


def test_ragged_and_padded_columns_keep_row_shapes() -> None:
    values = [np.ones((1, 2)), None, np.ones((2, 1))]
    ragged = stacked("vector", values, shapes="ragged").column("vector")
    assert [tuple(shape) for shape in ragged.shapes] == [(1, 2), (0,), (2, 1)]
    padded = stacked("vector", values, shapes="pad").column("vector")
    assert padded.shapes.tolist() == [[1, 2], [0, 0], [2, 1]]
    assert padded.data.shape == (3, 2, 2)
    alike = stacked("vector", [np.ones(2), None], shapes="pad").column("vector")
    assert alike.shapes is None


# --- torch


class Torch(BaseDocument):
    id: ClassVar[None] = None  # type: ignore[assignment]
    tensor: TorchTensor | None = None
    anything: AnyTensor | None = None


@pytest.mark.needs("torch")
def test_stack_holds_sparse_and_nested_torch_tensors_as_objects() -> None:
    import torch

    dense = torch.eye(2)
    for odd in (dense.to_sparse(), torch.nested.nested_tensor([torch.ones(2), torch.ones(1)], layout=torch.jagged)):
        for values in ([odd, dense], [dense, odd], [None, dense, odd]):
            docs = DocumentArray[Torch]([Torch.model_construct(tensor=value, anything=None) for value in values])
            column = docs.stack().column("tensor")
            assert type(column) is ObjectColumn
            assert all(one is other for one, other in zip(column.values(), values, strict=True))


@pytest.mark.needs("torch")
@pytest.mark.parametrize("shapes", ["pad", "ragged"])
def test_stack_pads_and_rags_torch_like_numpy(shapes: Any) -> None:
    import torch

    docs = DocumentArray[Torch]([Torch(tensor=torch.ones(1, 2)), Torch(), Torch(tensor=torch.ones(2, 1))])
    batch = docs.stack(shapes=shapes)
    assert batch.unstack().identical(docs)
    with pytest.raises(ColumnError, match=r"mixed shapes: row 0 has \(1, 2\), row 2 has \(2, 1\)"):
        docs.stack()
    if shapes == "pad":
        assert batch.tensor.shape == (3, 2, 2)
        assert batch.mask("tensor").sum() == 4


@pytest.mark.needs("torch")
def test_stack_with_framework_converts_mixed_frameworks() -> None:
    import torch

    docs = DocumentArray[Torch]([Torch(anything=np.ones(2, np.float32)), Torch(), Torch(anything=torch.zeros(2))])
    assert type(docs.stack().column("anything")) is ObjectColumn
    for framework, kind in {"torch": torch.Tensor, "numpy": np.ndarray}.items():
        batch = docs.stack(framework)
        assert type(batch.anything) is kind
        assert batch.anything.tolist() == [[1, 1], [0, 0], [0, 0]]
        assert batch.validity("anything").tolist() == [True, False, True]


@pytest.mark.needs("torch")
def test_stack_error_names_field_that_cannot_be_converted() -> None:
    import torch

    docs = DocumentArray[Torch]([Torch(anything=np.array(["a", "b"]))])
    with pytest.raises(ColumnError, match=r"^Torch.anything: "):
        docs.stack("torch")
    devices = DocumentArray[Torch]([Torch(tensor=torch.ones(2)), Torch(tensor=torch.ones(2, device="meta"))])
    with pytest.raises(ColumnError, match=r"^Torch.tensor: the tensors do not stack: "):
        devices.stack()


@pytest.mark.needs("torch")
def test_column_of_missing_tensors_has_declared_or_requested_framework() -> None:
    import torch

    class Fixed(BaseDocument):
        tensor: TorchTensor[float32, 2] | None = None
        array: NdArray[float32, 2] | None = None

    docs = DocumentArray[Fixed]([Fixed(), Fixed()])
    assert [type(docs.stack()[name]) for name in ("tensor", "array")] == [torch.Tensor, np.ndarray]
    assert [type(docs.stack("numpy")[name]) for name in ("tensor", "array")] == [np.ndarray, np.ndarray]
    assert [type(docs.stack("torch")[name]) for name in ("tensor", "array")] == [torch.Tensor, torch.Tensor]


@pytest.mark.needs("torch", "scipy")
def test_stack_with_framework_keeps_sparse_matrices() -> None:
    from scipy.sparse import csr_array

    class Matrix(BaseDocument):
        value: AnyTensor | None = None

    matrix = csr_array(np.eye(2))
    batch = DocumentArray[Matrix]([Matrix(value=matrix), Matrix(value=np.eye(2)), Matrix()]).stack("torch")
    column = batch.column("value")
    assert type(column) is ObjectColumn
    assert column.values()[0] is matrix
    assert column.values()[2] is None


@pytest.mark.parametrize(("narrow", "wide"), [("<U1", "<U12"), ("S1", "S3")])
def test_texts_of_several_widths_stack_to_the_widest(narrow: str, wide: str) -> None:
    class Words(BaseDocument):
        words: NdArray
        maybe: NdArray | None = None

    short, long = np.array(["a"], narrow), np.array(["bcd"], wide)
    rows = DocumentArray[Words]([Words(words=short), Words(words=long, maybe=long), Words(words=short, maybe=short)])
    batch = rows.stack()
    assert batch.words.dtype == np.dtype(wide)
    assert batch.words[:, 0].tolist() == [*short, *long, *short]
    assert [None if row.maybe is None else row.maybe.tolist() for row in batch.unstack()] == [None, [*long], [*short]]
