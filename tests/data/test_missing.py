"""Missing numbers and tensors in training data: an error, a mask or a value, but never a zero that nobody asked for."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import create_model
from torch.utils.data import ConcatDataset, DataLoader, Subset

from quire import BaseDocument, DocumentArray, Text
from quire.data import MultiModalDataset, batched
from quire.errors import MissingValueError, OptionError
from quire.typing import AnyTensor, NdArray, TorchTensor, float32, int64, uint8
from tests.strategies import laws

pytestmark = pytest.mark.needs("torch")


class Box(BaseDocument):
    label: int = 1
    mask: NdArray[uint8, 2] | None = None


class Row(BaseDocument):
    label: int | None = None
    score: float | None = None
    flag: bool | None = None
    pixels: TorchTensor[float32, 2] | None = None
    anything: AnyTensor | None = None
    note: str | None = None
    box: Box | None = None
    boxes: DocumentArray[Box] = []


class LabelOnly(BaseDocument):
    label: int | None = None


def rows(count: int = 6, **fields: Any) -> DocumentArray[Row]:
    """Rows with a label each; other fields are functions of the number of the row."""
    functions = {"label": lambda i: i + 1, **fields}
    return DocumentArray[Row](
        Row(id=f"id{i}", **{name: value(i) for name, value in functions.items()}) for i in range(count)
    )


def except_row(number: int, value: Any) -> Any:
    return lambda i: None if i == number else value


def loaded(dataset: Any, workers: int = 0, **options: Any) -> list[Any]:
    context = "fork" if workers else None
    return list(DataLoader(dataset, num_workers=workers, multiprocessing_context=context, **options))


# --- raise


@pytest.mark.parametrize(
    ("path", "documents", "row"),
    [
        ("label", rows(label=except_row(3, 7)), 3),
        ("score", rows(score=except_row(0, 0.5)), 0),
        ("flag", rows(flag=except_row(5, True)), 5),
        ("pixels", rows(pixels=except_row(2, torch.ones(2))), 2),
        ("anything", rows(anything=lambda i: None if i == 4 else np.ones(2, np.float32 if i else np.float64)), 4),
        ("box.label", rows(box=except_row(1, Box())), 1),
        ("boxes.mask", rows(boxes=lambda i: [Box(mask=None if i == 3 else [1, 1])] * 2), 3),
    ],
)
def test_construction_names_field_row_and_what_to_do(path: str, documents: Any, row: int) -> None:
    with pytest.raises(MissingValueError, match=rf"Row\.{path}: document {row} \(id id{row}\) has no value") as error:
        MultiModalDataset[Row](documents)
    for way in (f"missing={{'{path}': value}}", "missing='mask'", f"batch.validity('{path}')", "preprocessing"):
        assert way in str(error.value)
    assert isinstance(error.value, ValueError)


def test_mixed_shapes_with_missing_rows_raise_under_every_policy() -> None:
    documents = rows(anything=lambda i: None if i == 2 else torch.ones(i + 1))
    for shapes in ("pad", "ragged"):
        with pytest.raises(MissingValueError, match=r"Row\.anything: document 2"):
            MultiModalDataset[Row](documents, shapes=shapes)  # type: ignore[arg-type]


def test_text_and_arrays_of_documents_may_be_none() -> None:
    batch = MultiModalDataset[Row](rows(note=except_row(1, "a"))).__getitems__(range(3))
    assert batch.note == ["a", None, "a"]


def test_field_without_any_value_reads_as_none() -> None:
    dataset = MultiModalDataset[Row](rows())
    batch = dataset.__getitems__(range(4))
    for path in ("score", "flag", "pixels", "anything", "box.label", "box.mask"):
        assert batch[path] is None
        assert not batch.validity(path).any()
    assert batch.score is batch.box.label is batch.to("cpu").score is batch[:2].score is batch.take([1]).score is None
    assert pickle.loads(pickle.dumps(batch)).score is None
    assert batch[0].score is None
    assert [part.score for part in loaded(dataset, 2, batch_size=3)] == [None, None]


def test_fields_that_functions_touch_raise_with_the_batch() -> None:
    dataset = MultiModalDataset[Row](rows(label=except_row(3, 7)), {"label": lambda label: label * 2})
    assert dataset.__getitems__([0, 1]).label.tolist() == [14, 14]
    with pytest.raises(MissingValueError, match=r"Row\.label: document 3 \(id id3\) .* 1 of 3 values of the batch"):
        dataset.__getitems__([1, 3, 5])
    with pytest.raises(MissingValueError, match=r"Row\.label: document 3"):
        dataset[3]  # alone, but others have a label


@pytest.mark.parametrize("workers", [0, 2])
def test_error_of_a_batch_is_raised_by_a_loader(workers: int) -> None:
    dataset = MultiModalDataset[Row](rows(label=except_row(3, 7)), {"label": lambda label: label * 2})
    with pytest.raises(MissingValueError, match=r"Row\.label: document 3"):
        loaded(dataset, workers, batch_size=2)


def test_fields_that_preprocessing_fills_drops_or_turns_into_text_are_fine() -> None:
    documents = rows(label=except_row(3, 7))

    def fill(row: Row) -> None:
        row.label = -1 if row.label is None else row.label

    assert MultiModalDataset[Row](documents, {"": fill}).__getitems__([2, 3]).label.tolist() == [7, -1]
    assert MultiModalDataset[Row](documents, {"label": str}).__getitems__([2, 3]).label == ["7", None]

    class Example(BaseDocument):
        note: str | None = None

    assert len(MultiModalDataset[Row](documents, output=Example).__getitems__([2, 3])) == 2
    batch = MultiModalDataset[Row](
        documents, {"": batched(lambda batch: batch.fill_missing({"label": 0}))}
    ).__getitems__([2, 3])
    assert batch.label.tolist() == [7, 0]


def test_functions_cannot_turn_missing_values_into_zeros() -> None:
    documents = rows(label=except_row(3, 7), note=except_row(2, "ab"))
    names = {0: "zero", 7: "seven"}
    listed = {"label": batched(lambda labels: [names[label] for label in labels.tolist()])}
    assert MultiModalDataset[Row](documents, listed).__getitems__([2, 3]).label == ["seven", None]
    for steps in ({"label": batched(lambda labels: labels * 2)}, {"label": batched(lambda labels: labels.tolist())}):
        with pytest.raises(MissingValueError, match=r"Row\.label: document 3"):
            MultiModalDataset[Row](documents, steps).__getitems__([2, 3])
    texts = MultiModalDataset[Row](rows(note=except_row(2, "ab")), {"note": len})
    with pytest.raises(MissingValueError, match=r"Row\.note: document 2"):
        texts.__getitems__([1, 2])


def test_missing_values_of_an_output_class_raise() -> None:
    dataset = MultiModalDataset[Row](rows(label=except_row(1, 7)), output=LabelOnly)
    with pytest.raises(MissingValueError, match=r"LabelOnly\.label: document 1"):
        dataset.__getitems__([0, 1])
    filled = MultiModalDataset[Row](rows(label=except_row(1, 7)), output=LabelOnly, missing={"label": 0})
    assert filled.__getitems__([0, 1]).label.tolist() == [7, 0]


# --- mask


@pytest.mark.parametrize("workers", [0, 2])
def test_mask_delivers_zeros_and_their_validity(workers: int) -> None:
    documents = rows(label=except_row(3, 7), box=except_row(0, Box(label=5)))
    batches = loaded(MultiModalDataset[Row](documents, missing="mask"), workers, batch_size=3)
    assert [batch.label.tolist() for batch in batches] == [[7, 7, 7], [0, 7, 7]]
    assert [batch.validity("label").tolist() for batch in batches] == [[True] * 3, [False, True, True]]
    assert batches[0].box.label.tolist() == [0, 5, 5]
    assert batches[0].validity("box.label").tolist() == [False, True, True]
    assert batches[0].score.tolist() == [0, 0, 0]


# --- values


@pytest.mark.parametrize("workers", [0, 2])
def test_values_by_path_fill_missing_rows(workers: int) -> None:
    documents = rows(
        label=except_row(3, 7),
        score=except_row(0, 0.5),
        flag=except_row(1, False),
        pixels=except_row(2, torch.ones(2)),
        box=except_row(4, Box(label=5)),
        boxes=lambda i: [Box(mask=None if i == 5 else [1, 1])],
    )
    missing = {"label": -100, "score": 2, "flag": True, "pixels": [3, 4], "box.label": 9, "boxes.mask": 255}
    dataset = MultiModalDataset[Row](documents, missing=missing)
    [batch] = loaded(dataset, workers, batch_size=6)
    assert batch.label.tolist() == [7, 7, 7, -100, 7, 7]
    assert batch.score.tolist() == [2.0, 0.5, 0.5, 0.5, 0.5, 0.5]
    assert batch.flag.tolist() == [False, True, False, False, False, False]
    assert batch.pixels[2].tolist() == [3, 4]
    assert batch.box.label.tolist() == [5, 5, 5, 5, 9, 5]
    assert batch["boxes.mask"][-1].tolist() == [255, 255]
    assert all(batch.validity(path).all() for path in missing)
    assert batch[4].box is None
    assert dataset[3].label == -100
    assert documents[3].label is None


def test_fields_that_are_not_named_raise() -> None:
    with pytest.raises(MissingValueError, match=r"Row\.score: document 0"):
        MultiModalDataset[Row](rows(score=except_row(0, 1.0)), missing={"label": 0})


def test_values_are_checked_after_preprocessing() -> None:
    documents = rows(label=except_row(3, 7))
    dataset = MultiModalDataset[Row](documents, {"label": lambda label: torch.ones(2) * label}, missing={"label": 0.5})
    assert dataset.__getitems__([2, 3]).label.tolist() == [[7, 7], [0.5, 0.5]]
    dataset = MultiModalDataset[Row](documents, {"label": float}, missing={"label": "a"})  # type: ignore[dict-item]
    with pytest.raises(OptionError, match="a missing float cannot be filled with str 'a'"):
        dataset.__getitems__([2, 3])

    def wrapped(row: Row) -> LabelOnly:
        return LabelOnly(label=row.label)

    dataset = MultiModalDataset[Row](documents, {"": wrapped}, missing={"label": 1})
    assert dataset.__getitems__([2, 3]).label.tolist() == [7, 1]
    dataset = MultiModalDataset[Row](documents, {"": wrapped}, missing={"score": 1.0, "label": 1})
    with pytest.raises(OptionError, match="missing: LabelOnly has no field 'score'"):
        dataset.__getitems__([2, 3])


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("rise", "missing='rise': use 'raise', 'mask', or values by path"),
        ("read", "missing='read': use"),
        (None, "missing=None: use"),
        (0, "missing=0: use"),
        ({"lable": 1}, "missing: Row has no field 'lable'.* Did you mean 'label'"),
        ({"box.lable": 1}, "missing: Box has no field 'lable'"),
        ({"": 1}, "the keys are paths"),
        ({1: 1}, "the keys are paths"),
        ({"a..b": 1}, "a name is empty"),
        ({"label": 0.5}, r"Row\.label: a missing int cannot be filled with float 0\.5"),
        ({"label": True}, "a missing int cannot be filled with bool True"),
        ({"label": 1 << 64}, "a missing int cannot be filled"),
        ({"flag": 1}, "a missing bool cannot be filled with int 1"),
        ({"score": None}, "a missing float cannot be filled with"),
        ({"pixels": "a"}, "filled with numbers"),
        ({"pixels": [1, 2, 3]}, r"expected float32 \(2,\) for missing rows"),
        ({"boxes.mask": -1}, "does not fit uint8"),
        ({"boxes.mask": 0.5}, "does not fit uint8"),
        ({"note": ""}, "only missing numbers and tensors are filled"),
        ({"box": 0}, "only missing numbers and tensors are filled"),
    ],
)
def test_wrong_values_of_missing_are_rejected(missing: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        MultiModalDataset[Row](rows(), missing=missing)


# --- loaders, parts, frameworks


def test_parts_subsets_and_concatenated_datasets_follow_the_policy() -> None:
    documents = rows(label=except_row(3, 7))
    touched = MultiModalDataset[Row](documents, {"label": lambda label: label})
    with pytest.raises(MissingValueError, match=r"Row\.label: document 3"):
        touched[2:].__getitems__([0, 1])
    with pytest.raises(MissingValueError, match=r"Row\.label: document 3"):
        loaded(Subset(touched, [2, 3]), batch_size=2)
    for collate in (MultiModalDataset[Row].collate_fn, touched.collate_fn, None):
        with pytest.raises(MissingValueError, match=r"Row\.label: document 1 of the batch \(id id3\)"):
            (collate or torch.utils.data.default_collate)([documents[2], documents[3]])
    masked = MultiModalDataset[Row](documents, missing="mask")
    both = ConcatDataset([masked, masked])
    [batch] = loaded(both, batch_size=12, collate_fn=masked.collate_fn)
    assert batch.label.tolist() == [7, 7, 7, 0, 7, 7] * 2
    filled = MultiModalDataset[Row](documents, missing={"label": -1})
    [batch] = loaded(ConcatDataset([filled, filled]), batch_size=12)
    assert batch.label.tolist() == [7, 7, 7, -1, 7, 7] * 2
    assert batch.score is None


@pytest.mark.needs("jax")
def test_batches_of_jax_are_filled() -> None:
    documents = rows(label=except_row(1, 7), pixels=except_row(2, torch.ones(2)))
    dataset = MultiModalDataset[Row](documents, missing={"label": -1, "pixels": 5})
    [batch] = dataset.iter_batches(6, framework="jax")
    assert batch.label.tolist() == [7, -1, 7, 7, 7, 7]
    assert batch.pixels[2].tolist() == [5, 5]
    assert batch.score is None
    own = MultiModalDataset[Row](documents, missing={"label": -1, "pixels": 5}, framework="jax").__getitems__([1, 2])
    assert type(own.pixels).__module__.startswith("jax")
    assert own.pixels.tolist() == [[1, 1], [5, 5]]
    assert own.label.tolist() == [-1, 7]


@pytest.mark.needs("tensorflow")
def test_tensorflow_datasets_raise_or_are_filled() -> None:
    documents = rows(label=except_row(1, 7), pixels=lambda i: torch.full((2,), float(i)))
    with pytest.raises(MissingValueError, match=r"Row\.label: document 1"):
        MultiModalDataset[Row](documents).to_tf_dataset(6)
    dataset = MultiModalDataset[Row](documents, missing={"label": -1})
    [(features, labels)] = list(dataset.to_tf_dataset(6, features="pixels", labels="label"))
    assert features.shape == (6, 2)
    assert labels.numpy().tolist() == [7, -1, 7, 7, 7, 7]
    [everything] = list(dataset.to_tf_dataset(6))
    assert set(everything) == {"label", "pixels", "box"}  # nothing of what no row has
    assert set(everything["box"]) == set()
    with pytest.raises(MissingValueError, match=r"Row\.score: no row has a value"):
        dataset.to_tf_dataset(6, features="score")
    [masked] = list(MultiModalDataset[Row](documents, missing="mask").to_tf_dataset(6, features="label"))
    assert masked.numpy().tolist() == [7, 0, 7, 7, 7, 7]
    own = MultiModalDataset[Row](documents, missing={"label": -1}, framework="tensorflow").__getitems__([1, 2])
    assert own.label.numpy().tolist() == [-1, 7]


# --- laws: every value is 1 or more, so that each zero in a batch stands for None

_LEAVES: dict[str, tuple[Any, Any]] = {
    "int": (int, st.integers(1, 9)),
    "float": (float, st.floats(1, 9)),
    "bool": (bool, st.just(True)),
    "complex": (complex, st.just(2 + 0j)),
    "numpy": (NdArray[int64, 2], st.integers(1, 9).map(lambda n: np.full(2, n))),
    "torch": (TorchTensor[float32], st.integers(1, 3).map(lambda n: torch.full((n,), 3.0))),
}


@st.composite
def nullable_documents(draw: st.DrawFn) -> DocumentArray[Any]:
    """Rows of a schema of nullable numbers and tensors, in documents and in lists of documents."""
    document_type = draw(_schemas(2))
    return DocumentArray[document_type](draw(st.lists(_documents(document_type), min_size=1, max_size=6)))  # type: ignore[valid-type]


def _schemas(depth: int) -> st.SearchStrategy[Any]:
    @st.composite
    def schema(draw: st.DrawFn) -> Any:
        fields: dict[str, Any] = {}
        for number in range(draw(st.integers(1, 3))):
            kind = draw(st.sampled_from([*_LEAVES, *(["document", "documents", "text"] if depth else [])]))
            if kind in _LEAVES:
                annotation = _LEAVES[kind][0]
            elif kind == "text":
                annotation = Text
            else:
                inner = draw(_schemas(depth - 1))
                annotation = inner if kind == "document" else DocumentArray[inner]
            optional = kind == "text" or draw(st.booleans())
            fields[f"f{number}_{kind}"] = (annotation | None, None) if optional else (annotation, ...)
        return create_model("Made", __base__=BaseDocument, **fields)

    return schema()


def _documents(document_type: Any) -> st.SearchStrategy[Any]:
    def values(name: str, field: Any) -> st.SearchStrategy[Any]:
        kind = name.partition("_")[2]
        if kind in _LEAVES:
            strategy = _LEAVES[kind][1]
        elif kind == "text":
            strategy = st.just(Text(text="a"))
        else:
            schema = document_type.document_schema().by_name[name]
            strategy = _documents(schema.document_type)
            strategy = st.lists(strategy, max_size=3) if kind == "documents" else strategy
        return strategy if field.is_required() else st.none() | strategy

    fields = {name: values(name, field) for name, field in document_type.model_fields.items() if name != "id"}
    return st.fixed_dictionaries(fields).map(lambda row: document_type(**row))


def leaves(batch: Any, path: str = "") -> Any:
    """All number and tensor columns that can be read, by path."""
    for field in batch.schema.fields:
        kind, name = field.name.partition("_")[2], f"{path}{field.name}"
        value = batch[field.name]
        if kind in ("document", "text"):
            yield from leaves(value, f"{name}.")
        elif kind == "documents":
            yield from leaves(value.flat, f"{name}.")
        elif kind in _LEAVES or field.name == "embedding":
            yield name, value


def has_zero(value: Any) -> bool:
    items = [value[i] for i in range(len(value))]
    return any(item is None or not np.asarray(item).all() for item in items)


PREPROCESSINGS: list[Any] = [None, {"": lambda _: None}, {"": batched(lambda batch: batch)}]


@laws
@given(nullable_documents(), st.sampled_from(["torch", "numpy"]), st.sampled_from(PREPROCESSINGS), st.data())
def test_zeros_replace_none_only_on_request(
    documents: Any, framework: str, preprocessing: Any, data: st.DataObject
) -> None:
    kind = MultiModalDataset[documents.document_type]
    options: Any = {"preprocessing": preprocessing, "framework": framework, "shapes": "ragged"}
    count = len(documents)
    chosen = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=count))

    masked = kind(documents, missing="mask", **options).__getitems__(chosen)
    assert masked.to_framework("numpy").unstack().identical(documents[chosen])  # None and zero are still distinguished
    try:
        batch = kind(documents, **options).__getitems__(chosen)
    except MissingValueError:  # fields that no function touches are checked in all rows, when the dataset is made
        every = kind(documents, missing="mask", **options).__getitems__(list(range(count)))
        assert any(value is None or has_zero(value) for _, value in leaves(every))
    else:
        for path, value in leaves(batch):
            assert value is None or not has_zero(value), path
            assert value is not None or not batch.validity(path).any()

    fills = {path: _filler(path) for path, _ in leaves(masked) if not path.endswith("embedding")}
    batch = kind(documents, missing=fills, **options).__getitems__(chosen)
    for path, value in leaves(batch):
        if path in fills:
            assert value is not None
            assert not has_zero(value), path
            assert batch.validity(path).all()


def _filler(path: str) -> Any:
    kind = path.rpartition("_")[2]
    return {"bool": True, "torch": torch.ones(2)}.get(kind, 5)


@pytest.mark.parametrize(("shapes", "filled"), [("ragged", [[3.0], [1.0, 1.0]]), ("pad", [[3.0, 0.0], [1.0, 1.0]])])
def test_fill_value_may_have_another_shape_than_the_rows_of_a_batch(shapes: Any, filled: list[Any]) -> None:
    class Signal(BaseDocument):
        samples: TorchTensor[float32] | None

    documents = DocumentArray[Signal]([Signal(samples=torch.full((1,), 3.0)), Signal(samples=None)])
    fill = {"samples": torch.ones(2)}
    batch = MultiModalDataset[Signal](documents, missing=fill, shapes=shapes).__getitems__([0, 1])
    assert [row.tolist() for row in batch.samples] == filled
    assert batch.validity("samples").all()
    with pytest.raises(OptionError, match=r"has the shape \(2,\), and the rows have \(1,\)"):
        MultiModalDataset[Signal](documents, missing=fill).__getitems__([0, 1])


class Vector(BaseDocument):
    vector: TorchTensor["length"] | None = None


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("shapes", ["pad", "ragged"])
def test_tensor_of_another_framework_fills_a_batch_without_values(framework: str, shapes: Any) -> None:
    documents = [Vector(), Vector(vector=torch.zeros(3))]
    fills = {"vector": torch.ones(2)}
    dataset = MultiModalDataset[Vector](documents, framework=framework, shapes=shapes, missing=fills)
    assert dataset.__getitems__([0]).unstack()[0].vector.tolist() == [1.0, 1.0]
