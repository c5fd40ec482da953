"""Functions by path or type: what they are given, what they may give, and what becomes of it."""

from __future__ import annotations

import copy
import functools
from typing import Any

import numpy as np
import pytest
import torch

from quire import BaseDocument, DocumentArray, DocumentBatch, Text
from quire.data import MultiModalDataset
from quire.errors import ColumnError, DocumentTypeError, FunctionError, OptionError, PathError, SchemaError
from quire.typing import NdArray, PaddleTensor, TorchTensor
from tests.data.sample_students import (
    Graduate,
    Node,
    Paper,
    Scale,
    Student,
    Thesis,
    add_to,
    embed_title,
    incomplete_students,
    mixed_at_five,
    student,
    students,
)

pytestmark = pytest.mark.needs("torch")


def prepared(preprocessing: Any, documents: Any = None, **options: Any) -> Any:
    """The batch of all documents; what the functions did to it is not to be seen in the source or in the next batch."""
    documents = students(4) if documents is None else documents
    before = copy.deepcopy(documents)
    ds = MultiModalDataset[Student](documents, preprocessing, **options)
    batch, again = ds.__getitems__(range(len(ds))), ds.__getitems__(range(len(ds)))
    assert documents.identical(before)
    assert batch == again
    return batch


def kind(batch: Any, name: str) -> str:
    return str(batch.schema.by_name[name])


# --- order


def test_functions_run_in_the_order_of_the_dict() -> None:
    seen: list[str] = []
    one = {"name": lambda _: seen.append("name"), "": lambda _: seen.append("document")}
    MultiModalDataset[Student](students(1), one)[0]
    MultiModalDataset[Student](students(1), dict(reversed(one.items())))[0]
    assert seen == ["name", "document", "document", "name"]


def test_functions_of_a_list_run_in_order() -> None:
    batch = prepared({"name": [str.upper, lambda name: name[:2], lambda name: name + "!"]})
    assert batch.name == ["NA!"] * 4
    assert prepared({"name": (str.upper, len)}).name.tolist() == [6] * 4
    assert prepared({"name": []}).name == students(4).name


def test_later_paths_see_results_of_earlier_ones() -> None:
    seen: list[Any] = []
    prepared({"thesis.title": embed_title, "thesis": lambda thesis: seen.append(thesis.title), "name": len})
    assert all(isinstance(title, torch.Tensor) for title in seen)


# --- what functions give


def test_none_keeps_the_value_changed_in_place() -> None:
    def darken(photo: torch.Tensor) -> None:
        photo *= 0.5

    def tag(tags: dict[str, Any]) -> None:
        tags["numbers"].append(-1)

    def rename(thesis: Thesis) -> None:
        thesis.title.text = "new"

    batch = prepared({"photo": darken, "tags": tag, "words": lambda words: words.append("b"), "thesis": rename})
    assert batch.photo[:, 0, 0].tolist() == [0.0, 0.5, 1.0, 1.5]
    assert batch.tags == [{"numbers": [i, -1]} for i in range(4)]
    assert batch.words == [["a", "b"]] * 4
    assert batch.thesis.title.text == ["new"] * 4


def test_document_is_changed_in_place() -> None:
    def change(document: Student) -> None:
        document.photo += 1
        document.tags["new"] = document.words
        document.words.append("b")
        document.papers[:0] = [Paper(vector=torch.zeros(2))]
        document.tree.children[0].name = "changed"
        document.thesis.title = Text(text="other")
        document.grade = 1.0

    batch = prepared({"": change})
    assert batch.photo[:, 0, 0].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert batch.tags[1] == {"numbers": [1], "new": ["a", "b"]}
    assert batch.papers.offsets.tolist() == [0, 1, 3, 6, 7]
    assert batch.thesis.title.text == ["other"] * 4
    assert batch.grade.tolist() == [1.0] * 4
    assert batch[0].tree.children[0].name == "changed"


def test_tensors_of_another_framework_are_changed_in_place() -> None:
    def change(vector: Any) -> None:
        assert isinstance(vector, np.ndarray)
        vector *= 2

    batch = prepared({"vector": change})
    assert isinstance(batch.vector, torch.Tensor)
    assert batch.vector[0].tolist() == [2.0, 4.0, 6.0]


@pytest.mark.parametrize(
    ("result", "expected", "kind_name"),
    [
        (0, torch.zeros(4, dtype=torch.int64), "int"),
        (0.0, torch.zeros(4, dtype=torch.float64), "float"),
        (False, torch.zeros(4, dtype=torch.bool), "bool"),
        (np.float32(0), torch.zeros(4, dtype=torch.float64), "float"),
        (np.int16(0), torch.zeros(4, dtype=torch.int64), "int"),
        (torch.tensor(0), torch.zeros(4, dtype=torch.int64), "TorchTensor"),
        (torch.zeros(2), torch.zeros(4, 2), "TorchTensor"),
        (torch.zeros(0), torch.zeros(4, 0), "TorchTensor"),
        (np.zeros(2, np.float32), torch.zeros(4, 2), "NdArray"),
        ("", [""] * 4, "str"),
        (b"", [b""] * 4, "bytes"),
        ([], [[]] * 4, "list"),
        ({}, [{}] * 4, "dict"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("path", ["name", "age", "photo", "thesis", "tags", "papers", "spare", "tree"])
def test_falsy_results_are_used(path: str, result: Any, expected: Any, kind_name: str) -> None:
    documents = DocumentArray[Student](student(i, spare=Thesis(title="x")) for i in range(4))
    batch = prepared({path: lambda _: result}, documents)
    results = batch[path]
    if isinstance(expected, list):
        assert results == expected
    else:
        assert torch.equal(results, expected)
        assert results.dtype == expected.dtype
    assert kind(batch, path).startswith(kind_name)


def test_functions_may_return_documents() -> None:
    batch = prepared({"name": lambda name: Text(text=name), "thesis": lambda thesis: thesis.title})
    assert batch.name.text == students(4).name
    assert type(batch.thesis) is DocumentBatch[Text]
    assert kind(batch, "name") == "Text"


def test_functions_may_return_arrays_of_documents() -> None:
    batch = prepared({"name": lambda name: DocumentArray[Text](Text(text=letter) for letter in name[:2])})
    assert batch.name.offsets.tolist() == [0, 2, 4, 6, 8]
    assert batch.name.text == ["n", "a"] * 4


def test_functions_may_return_another_document() -> None:
    batch = prepared({"": lambda document: document.thesis})
    assert type(batch) is DocumentBatch[Thesis]
    assert batch.pages.tolist() == [0, 1, 2, 3]


def test_integers_among_floats_become_floats() -> None:
    assert prepared({"age": lambda age: age if age % 2 else age / 2}).age.tolist() == [0.0, 1.0, 1.0, 3.0]


def test_field_that_still_fits_keeps_its_type() -> None:
    batch = prepared({"photo": Scale(2.0), "name": str.upper, "age": lambda age: age + 1})
    assert batch.schema is Student.document_schema()


def test_schema_shows_another_shape_or_dtype() -> None:
    assert kind(prepared({"photo": lambda photo: photo[0]}), "photo") == "TorchTensor"
    assert kind(prepared({"photo": lambda photo: photo.double()}), "photo") == "TorchTensor"


def test_partials_and_callables_are_functions() -> None:
    batch = prepared({"photo": [functools.partial(add_to, number=1.0), Scale(3.0), torch.nn.Flatten(0)]})
    assert batch.photo.tolist() == [[3.0 * (i + 1)] * 6 for i in range(4)]


# --- mixed kinds and shapes


@pytest.mark.parametrize(
    ("path", "function", "message"),
    [
        ("age", lambda age: "two" if age == 2 else age, r"Student.age: .* document 2 \(id id2\) gives str 'two' where"),
        ("thesis.pages", lambda n: torch.ones(1) if n == 3 else n, r"Student.thesis.pages: .* document 3 \(id id3\)"),
        ("papers.venue", lambda v: 1 if v == "venue 1" else v, r"Student.papers.venue: .* document 2 \(id id2\)"),
        ("name", lambda n: b"" if n == "name 1" else n, r"document 1 \(id id1\) gives bytes"),
        ("", lambda d: Text() if d.age == 1 else d, r"document 1 \(id id1\) gives Text where others give Student"),
    ],
    ids=["scalar", "nested", "array", "bytes", "document"],
)
def test_mixed_kinds_raise(path: str, function: Any, message: str) -> None:
    with pytest.raises(FunctionError, match=message):
        prepared({path: function})


def grown(photo: torch.Tensor) -> torch.Tensor:
    return torch.ones(int(photo[0, 0]) + 1)


def test_error_of_mixed_shapes_names_the_documents() -> None:
    with pytest.raises(ColumnError, match=r"documents 2, 0: Student.photo: mixed shapes: row 0 has \(3,\)"):
        MultiModalDataset[Student](students(4), {"photo": grown}).__getitems__([2, 0])


def test_only_final_results_need_one_kind_and_shape() -> None:
    steps = {
        "photo": [grown, lambda photo: photo.sum()],
        "name": [mixed_at_five, str, len],
        "": lambda _: None,
        "shaped": [torch.clone, lambda shaped: shaped.repeat(len(shaped)), lambda shaped: shaped[:1]],
    }
    documents = DocumentArray[Student](student(i, shaped=torch.ones(i + 1)) for i in range(6))
    batch = prepared(steps, documents)
    assert batch.photo.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert batch.name.tolist() == [6, 6, 6, 6, 6, 1]
    assert batch.shaped.shape == (6, 1)
    in_two = {"photo": grown, "": lambda _: None, TorchTensor: lambda tensor: tensor.sum()}
    assert prepared(in_two, documents).photo.shape == (6,)


def test_error_names_the_function_that_failed() -> None:
    with pytest.raises(FunctionError, match="'name' by int failed on document 0"):
        prepared({"name": [str.upper, int, len]})
    with pytest.raises(FunctionError, match="'name' by lower, mixed_at_five on the batch"):
        prepared({"name": [str.lower, mixed_at_five]}, students(7))


def test_mixed_shapes_are_padded_or_ragged() -> None:
    batch = prepared({"photo": grown}, shapes="pad")
    assert batch.photo.shape == (4, 4)
    assert batch.mask("photo").sum(1).tolist() == [1, 2, 3, 4]
    assert [document.photo.shape for document in batch] == [(1,), (2,), (3,), (4,)]
    ragged = prepared({"photo": grown}, shapes="ragged")
    assert [row.shape for row in ragged.photo.values()] == [(1,), (2,), (3,), (4,)]


def test_mixed_shapes_of_documents_follow_the_policy() -> None:
    documents = DocumentArray[Student](student(i, shaped=torch.ones(i + 1)) for i in range(3))
    with pytest.raises(ColumnError, match="Student.shaped: mixed shapes"):
        prepared(None, documents)
    assert MultiModalDataset[Student](documents)[1].shaped.shape == (2,)
    assert prepared(None, documents, shapes="pad").shaped.tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert prepared(None, documents, shapes="ragged").shaped[2].tolist() == [1, 1, 1]
    one_shape = prepared({"shaped": lambda shaped: shaped.sum()}, documents)
    assert one_shape.shaped.tolist() == [1.0, 2.0, 3.0]


def test_unknown_shape_policy_is_rejected() -> None:
    with pytest.raises(ColumnError, match="shapes='cut' is not a policy"):
        MultiModalDataset[Student](students(1), shapes="cut")  # type: ignore[arg-type]


# --- paths and types


def test_functions_skip_missing_values() -> None:
    steps = {"grade": lambda grade: grade + 1, "spare.title.text": str.upper, "spare": lambda spare: spare}
    batch = prepared(steps, incomplete_students(4), missing="mask")
    assert batch.grade.tolist() == [1.0, 0.0, 2.0, 0.0]
    assert batch.validity("grade").tolist() == [True, False, True, False]
    assert batch.spare.title.text == ["SPARE", None, None, "SPARE"]
    assert batch.validity("spare").tolist() == [True, False, False, True]
    assert batch.validity("spare.title").tolist() == [True, False, False, True]


def test_results_of_another_kind_keep_missing_values() -> None:
    batch = prepared({"grade": str, "spare": lambda _: torch.ones(2)}, incomplete_students(4), missing="mask")
    assert batch.grade == ["0.0", None, "1.0", None]
    assert batch.spare.tolist() == [[1, 1], [0, 0], [0, 0], [1, 1]]
    assert batch.validity("spare").tolist() == [True, False, False, True]
    assert [document.spare is None for document in batch] == [False, True, True, False]


def test_paths_lead_into_elements_of_arrays() -> None:
    batch = prepared({"papers.vector": lambda vector: vector + 1, "papers.venue": len})
    assert batch.papers.vector.tolist() == [[1, 1], [1, 1], [2, 2]]
    assert batch.papers.venue.tolist() == [7, 7, 7]
    assert batch[2].papers[1].vector.tolist() == [2, 2]


def test_function_gets_the_array_itself() -> None:
    assert prepared({"papers": len}).papers.tolist() == [0, 1, 2, 0]


def test_paths_lead_into_recursive_documents() -> None:
    batch = prepared({"tree.name": str.upper, "tree.children.name": str.title, "tree.children.children": len})
    assert batch.tree.name == ["ROOT"] * 4
    [child] = batch[0].tree.children
    assert (child.name, child.children) == ("Leaf", 0)
    root = prepared({"tree": lambda tree: len(tree.children)})
    assert root.tree.tolist() == [1] * 4


def test_types_select_fields() -> None:
    batch = prepared({Text: embed_title, float: lambda grade: grade * 2, TorchTensor: lambda tensor: tensor + 1})
    assert batch.thesis.title.shape == (4, 4)
    assert batch.spare.title.shape == (4, 4)
    assert batch.grade.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert batch.photo[:, 0, 0].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert batch.papers.vector.tolist() == [[1, 1], [1, 1], [2, 2]]
    assert batch.shaped.tolist() == [[2, 2]] * 4
    assert batch.vector[0].tolist() == [1.0, 2.0, 3.0]


def test_more_types_select_fields() -> None:
    assert prepared({NdArray: lambda vector: vector.sum()}).vector.tolist() == [6.0] * 4
    assert prepared({dict: len}).tags.tolist() == [1] * 4
    assert prepared({DocumentArray[Paper]: len}).papers.tolist() == [0, 1, 2, 0]
    assert prepared({Node: lambda node: node.name}).tree == ["root"] * 4
    assert prepared({Student: lambda document: document.thesis}).pages.tolist() == [0, 1, 2, 3]
    assert prepared({BaseDocument: lambda document: document.thesis}).pages.tolist() == [0, 1, 2, 3]


def test_types_select_documents_in_arrays() -> None:
    def move(paper: Paper) -> None:
        paper.vector += 1

    assert prepared({Paper: move}).papers.vector.tolist() == [[1, 1], [1, 1], [2, 2]]
    texts = prepared({Paper: lambda paper: Text(text=paper.venue)})
    assert texts.papers.text == ["venue 0", "venue 0", "venue 1"]
    assert type(texts[2].papers) is DocumentArray[Text]
    with pytest.raises(FunctionError, match="'papers' by <lambda> must give documents"):
        prepared({Paper: lambda paper: paper.vector})
    with pytest.raises(FunctionError, match=r"'papers' by <lambda> failed on document 1 \(id id1\): ZeroDivisionError"):
        prepared({Paper: lambda _: 1 / 0})


def test_types_do_not_select_ids_and_bools() -> None:
    class Flag(BaseDocument):
        up: bool
        height: int
        name: str

    ds = MultiModalDataset[Flag]([Flag(id="x", up=True, height=2, name="a")], {int: lambda n: n * 2, str: str.upper})
    assert (ds[0].id, ds[0].up, ds[0].height, ds[0].name) == ("x", True, 4, "A")


@pytest.mark.parametrize(
    ("key", "error", "message"),
    [
        ("thesis.titel", PathError, "Thesis has no field 'titel' .* Did you mean 'title'"),
        ("nmae", PathError, "Student has no field 'nmae' .* Did you mean 'name'"),
        ("name.text", PathError, "Student.name is str, which has no fields"),
        (PaddleTensor, PathError, "Student has no field of the type PaddleTensor"),
        (complex, PathError, "Student has no field of the type complex"),
        (3, SchemaError, "a key is a path or a type, got 3"),
    ],
    ids=str,
)
def test_wrong_key_is_rejected_at_construction(key: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        MultiModalDataset[Student](students(1), {key: len})


@pytest.mark.parametrize("value", [3, None, "len", [len, 3], {"a": len}], ids=repr)
def test_value_that_is_not_callable_is_rejected_at_construction(value: Any) -> None:
    with pytest.raises(SchemaError, match=r"preprocessing\['name'\]: give a function or a list of functions, not"):
        MultiModalDataset[Student](students(1), {"name": value})


def test_path_removed_by_an_earlier_function_raises() -> None:
    with pytest.raises(FunctionError, match="'thesis.pages' by str: 'thesis' has no fields now"):
        prepared({"thesis": lambda _: 1, "thesis.pages": str})
    with pytest.raises(FunctionError, match="an earlier function gave a Text, which has no 'pages'"):
        prepared({"thesis": lambda thesis: thesis.title, "thesis.pages": str})


def test_function_on_documents_must_return_documents() -> None:
    with pytest.raises(FunctionError, match="'' .the document. by .* must give documents"):
        prepared({"": lambda _: 5})


# --- subclasses, output


def test_subclasses_keep_their_fields() -> None:
    def honour(document: Student) -> None:
        if isinstance(document, Graduate):
            document.honours["more"] = 2

    documents = DocumentArray[Student]([student(0, Graduate, honours={"first": 1}), student(1)])
    for steps in ({"name": len}, {"": honour}, {"": [honour, honour], "photo": Scale(1.0)}):
        batch = prepared(steps, documents)
        assert [type(document) for document in batch] == [Graduate, Student]
    assert batch[0].honours == {"first": 1, "more": 2}


class Row(BaseDocument):
    name: int
    age: str
    photo: TorchTensor[6]


FLAT = {"photo": torch.nn.Flatten(0), "name": len, "age": str}


def test_output_validates_as_another_class() -> None:
    batch = prepared(FLAT, output=Row)
    assert type(batch) is DocumentBatch[Row]
    assert batch.name.tolist() == [6] * 4
    assert batch.photo.shape == (4, 6)
    assert batch.schema is Row.document_schema()
    numpy = prepared(FLAT, output=Row, framework="numpy")
    assert isinstance(numpy.name, np.ndarray)


def test_output_that_does_not_fit_names_path_and_document() -> None:
    ds = MultiModalDataset[Student](students(4), {**FLAT, "name": lambda name: name}, output=Row)
    with pytest.raises(FunctionError, match=r"document 2 \(id id2\) is no Row after preprocessing: Row.name"):
        ds.__getitems__([2, 1])


# --- the dataset itself


def test_dataset_needs_a_document_class() -> None:
    with pytest.raises(SchemaError, match=r"MultiModalDataset\[Student\]"):
        MultiModalDataset(students(1))
    with pytest.raises(DocumentTypeError):
        MultiModalDataset[Student](DocumentArray[Paper]([Paper(vector=torch.ones(2))]).stack())
    with pytest.raises(DocumentTypeError):
        MultiModalDataset[Student]([Paper(vector=torch.ones(2))])


def test_dataset_accepts_arrays_lists_iterators_and_batches() -> None:
    expected = MultiModalDataset[Student](students(3)).__getitems__([0, 1, 2])
    for source in (list(students(3)), (document for document in students(3)), students(3).stack()):
        assert MultiModalDataset[Student](source).__getitems__([0, 1, 2]) == expected


def test_empty_dataset_is_rejected_unless_allowed() -> None:
    for empty in ([], students(3).filter({"name": "nobody"}), students(3).stack()[:0]):
        with pytest.raises(OptionError, match=r"MultiModalDataset\[Student\] has no rows.*allow_empty=True"):
            MultiModalDataset[Student](empty)
    ds = MultiModalDataset[Student]([], {"name": len, "": lambda document: document}, allow_empty=True)
    assert len(ds) == len(ds.__getitems__([])) == 0
    assert list(ds) == []


def test_dataset_can_be_subclassed() -> None:
    class Mine(MultiModalDataset):
        pass

    assert issubclass(Mine[Student], Mine)
    assert Mine[Student] is Mine[Student]
    assert len(Mine[Student](students(2))) == 2
    assert repr(MultiModalDataset[Student](students(2))) == "<MultiModalDataset[Student] of 2>"


@pytest.mark.parametrize("source", [len, [len], "name"], ids=["function", "list", "text"])
def test_preprocessing_rejects_other_values_than_dicts(source: Any) -> None:
    with pytest.raises(SchemaError, match="give functions by the path or type of what they change"):
        MultiModalDataset[Student](students(2), preprocessing=source)
