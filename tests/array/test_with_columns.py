"""`with_columns`: the columns of a batch as another class, with new ones. And names that `dir` lists."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from pydantic import Field

from quire import BaseDocument, DocumentArray, DocumentBatch
from quire.errors import ColumnError, DocumentTypeError, MissingValueError, PathError
from quire.typing import AnyTensor, NdArray, float32


class Camera(BaseDocument):
    name: str = ""
    iso: int = 100


class Photo(BaseDocument):
    pixels: NdArray[float32, 2]
    caption: str = ""
    label: int | None = None
    rating: int = Field(default=1, ge=1)
    camera: Camera = Camera()
    others: DocumentArray[Camera] = []
    tags: list[str] = []


class Predicted(BaseDocument):
    pixels: NdArray[float32, 2]
    camera: Camera
    others: DocumentArray[Camera]
    label: int | None
    prediction: int
    score: float = 0.5


class Lens(BaseDocument):
    name: str
    zoom: float = 1.0


class Shot(BaseDocument):
    camera: Lens
    others: DocumentArray[Lens]


class Zoom(BaseDocument):
    zoom: float


class ZoomShot(BaseDocument):
    camera: Zoom


def photos(rows: int = 3) -> DocumentBatch[Photo]:
    documents = [
        Photo(
            pixels=np.full(2, i, np.float32),
            caption=f"photo {i}",
            label=None if i == 1 else i,
            camera=Camera(name=f"camera {i}"),
            others=[Camera()] * i,
        )
        for i in range(rows)
    ]
    return DocumentArray[Photo](documents).stack()


# --- another class


def test_with_columns_returns_batch_of_other_class() -> None:
    batch = photos()
    predicted = batch.with_columns(Predicted, prediction=[7, 8, 9])
    assert type(predicted) is DocumentBatch[Predicted]
    assert predicted.prediction.tolist() == [7, 8, 9]
    assert predicted.score.tolist() == [0.5, 0.5, 0.5]
    assert predicted.id == batch.id
    assert predicted.camera.name == ["camera 0", "camera 1", "camera 2"]
    assert predicted.others.offsets.tolist() == [0, 0, 1, 3]
    assert predicted.validity("label").tolist() == [True, False, True]
    assert [field.name for field in predicted.schema.fields] == list(Predicted.model_fields)
    assert predicted[2] == Predicted(**predicted.to_dict()[2])


def test_with_columns_shares_memory_with_existing_columns() -> None:
    batch = photos()
    predicted = batch.with_columns(Predicted, prediction=[7, 8, 9])
    assert predicted.pixels is batch.pixels
    assert predicted.column("camera.iso").data is batch.column("camera.iso").data  # type: ignore[attr-defined]
    assert np.shares_memory(predicted[1].pixels, batch.pixels)


def test_with_columns_uses_given_tensor_without_copy() -> None:
    scores = np.array([0.1, 0.2, 0.3])
    assert photos().with_columns(Predicted, prediction=[1, 2, 3], score=scores).score is scores


def test_with_columns_does_not_change_source() -> None:
    batch = photos()
    predicted = batch.with_columns(Predicted, prediction=[7, 8, 9])
    predicted.camera.iso = [1, 2, 3]
    predicted.others.flat.iso = [4, 5, 6]
    assert batch.camera.iso.tolist() == [100, 100, 100]
    assert batch.others.iso.tolist() == [100, 100, 100]
    assert "prediction" not in batch.schema.by_name


def test_with_columns_accepts_nested_batches_and_columns() -> None:
    batch = photos()
    cameras = DocumentArray[Camera](Camera(name=name) for name in "abc").stack()
    predicted = batch.with_columns(
        Predicted, prediction=np.arange(3), camera=cameras, others=batch.others, label=batch.column("label")
    )
    assert predicted.camera.name == ["a", "b", "c"]
    assert predicted.others.offsets.tolist() == [0, 0, 1, 3]
    assert predicted.validity("label").tolist() == [True, False, True]


@pytest.mark.needs("torch")
def test_with_columns_keeps_framework_of_existing_columns() -> None:
    import torch

    batch = photos().to_framework("torch")
    predicted = batch.with_columns(Predicted, prediction=torch.arange(3))
    assert predicted.pixels is batch.pixels
    assert isinstance(predicted[0].pixels, np.ndarray)


def test_with_columns_converts_number_types() -> None:
    class Wide(BaseDocument):
        label: float | None
        rating: float

    wide = photos().with_columns(Wide)
    assert wide.rating.dtype == np.float64
    assert wide[1].label is None


def test_with_columns_converts_nested_classes() -> None:
    shots = photos().with_columns(Shot)
    assert shots.camera.zoom.tolist() == [1.0, 1.0, 1.0]
    assert shots[0].camera == Lens(name="camera 0")
    assert type(shots[2].others) is DocumentArray[Lens]


def test_with_columns_keeps_padding_and_ragged_rows() -> None:
    class Clip(BaseDocument):
        frames: NdArray[float32, "n"]

    class Scored(BaseDocument):
        frames: NdArray[float32, "n"]
        score: float

    class Other(BaseDocument):
        frames: AnyTensor

    clips = DocumentArray[Clip](Clip(frames=np.ones(n, np.float32)) for n in (1, 3))
    padded = clips.stack(shapes="pad").with_columns(Scored, score=[0, 1])
    assert padded.mask("frames").tolist() == [[True, False, False], [True, True, True]]
    assert padded[0].frames.shape == (1,)
    ragged = clips.stack(shapes="ragged").with_columns(Other)
    assert [row.frames.shape for row in ragged] == [(1,), (3,)]


def test_with_columns_validates_constraints_that_differ() -> None:
    class Loved(BaseDocument):
        rating: int = Field(ge=3)

    class Liked(BaseDocument):
        rating: int = Field(ge=1)

    batch = photos()
    assert batch.with_columns(Liked).rating.tolist() == [1, 1, 1]
    with pytest.raises(ColumnError, match=r"Loved.rating, row 0: Input should be greater than or equal to 3"):
        batch.with_columns(Loved)


def test_with_columns_drops_states_of_subclasses() -> None:
    class Old(Photo):
        year: int = 1900

    batch = DocumentArray[Photo]([Old(pixels=[0, 0])]).stack()
    assert type(batch[0]) is Old
    assert type(batch.with_columns(caption=["a"])[0]) is Old
    predicted = batch.with_columns(Predicted, prediction=[1])
    assert type(predicted[0]) is Predicted


def test_with_columns_keeps_guard_of_missing_values() -> None:
    batch = photos()._guard_missing()
    predicted = batch.with_columns(Predicted, prediction=[1, 2, 3])
    with pytest.raises(MissingValueError, match=r"Predicted.label: row 1"):
        predicted.label  # noqa: B018
    with pytest.raises(MissingValueError, match=r"Photo.label: row 1"):
        batch.with_columns(caption=["", "", ""]).label  # noqa: B018


def test_with_columns_accepts_empty_batch() -> None:
    predicted = photos(0).with_columns(Predicted, prediction=[])
    assert len(predicted) == 0
    assert predicted.pixels.shape == (0, 2)


def test_with_columns_result_can_be_pickled() -> None:
    predicted = photos().with_columns(Scored, prediction=[1, 2, 3])
    assert pickle.loads(pickle.dumps(predicted)) == predicted


class Scored(Predicted):
    others: DocumentArray[Camera] = []


# --- the same class


def test_with_columns_replaces_columns_of_same_class() -> None:
    batch = photos()
    changed = batch.with_columns(label=[4, 5, 6], caption=["a", "b", "c"])
    assert type(changed) is DocumentBatch[Photo]
    assert (changed.label.tolist(), changed.caption) == ([4, 5, 6], ["a", "b", "c"])
    assert batch.label.tolist() == [0, 0, 2]
    assert changed.pixels is batch.pixels
    changed.camera.iso = [1, 2, 3]
    assert batch.camera.iso.tolist() == [100, 100, 100]
    assert batch.with_columns() == batch


# --- mistakes

MISTAKES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({}, ColumnError, r"Predicted.prediction is required, and the batch of Photo has no such column: pass prediction="),
    ({"predicton": [1, 2, 3]}, PathError, r"Predicted has no field 'predicton'. Did you mean 'prediction'\?"),
    ({"prediction": [1, 2]}, ColumnError, r"Predicted.prediction: the batch has 3 rows, got 2 values. Pass a value"),
    ({"prediction": np.ones(3)}, ColumnError, r"expected a vector of int, got float64 \(3,\) of numpy. Convert"),
    ({"prediction": np.ones((3, 2), int)}, ColumnError, r"expected a vector of int, .*Pass one number for each row"),
    ({"prediction": ["a", "b", "c"]}, ColumnError, r"Predicted.prediction, row 0: Input should be a valid integer"),
    ({"prediction": [1, 2, None]}, ColumnError, r"Predicted.prediction, row 2: Input should be a valid integer"),
    ({"prediction": 3}, ColumnError, r"Predicted.prediction: a column is made from a tensor or a sequence"),
    (
        {"prediction": [1, 2, 3], "pixels": np.ones((3, 4), np.float32)},
        ColumnError,
        r"Predicted.pixels: expected rows of float32 \(2,\), .* whose rows are \(4,\). Its shape must be \(rows, 2\)",
    ),
    (
        {"prediction": [1, 2, 3], "pixels": np.ones((3, 2))},
        ColumnError,
        r"Predicted.pixels: expected rows of float32 \(2,\), .* Convert it to float32 first",
    ),
    ({"prediction": [1, 2, 3], "camera": photos()}, ColumnError, r"Predicted.camera, row 0"),
]


@pytest.mark.parametrize(("columns", "error", "message"), MISTAKES)
def test_with_columns_explains_wrong_columns(columns: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        photos().with_columns(Predicted, **columns)


def test_with_columns_lists_all_missing_fields() -> None:
    class Two(BaseDocument):
        first: int
        second: str

    with pytest.raises(ColumnError, match=r"Two.first and Two.second are required.*pass first=..., second=..., or"):
        photos().with_columns(Two)


def test_with_columns_without_class_suggests_a_class() -> None:
    with pytest.raises(PathError, match=r"Photo has no field 'prediction'.*batch.with_columns\(Predicted, \.\.\.\)"):
        photos().with_columns(prediction=[1, 2, 3])


def test_with_columns_rejects_document_instead_of_class() -> None:
    with pytest.raises(DocumentTypeError, match="takes a document class"):
        photos().with_columns(Camera())  # type: ignore[call-overload]


def test_with_columns_rejects_missing_values_of_required_fields() -> None:
    class Labelled(BaseDocument):
        label: int

    with pytest.raises(ColumnError, match=r"Labelled.label, row 1: there is no value.*1 of 3 rows.*fill_missing"):
        photos().with_columns(Labelled)
    assert photos().fill_missing({"label": -1}).with_columns(Labelled).label.tolist() == [0, -1, 2]


def test_with_columns_rejects_existing_columns_of_other_shape() -> None:
    class Wide(BaseDocument):
        pixels: NdArray[float32, 3]

    with pytest.raises(
        ColumnError, match=r"Wide.pixels: expected rows of float32 \(3,\), but the column has float32 \(2,"
    ):
        photos().with_columns(Wide)


def test_with_columns_names_missing_field_of_nested_class() -> None:
    message = r"ZoomShot.camera.zoom is required, and the batch of Camera has no such column: pass the column 'camera'"
    with pytest.raises(ColumnError, match=message):
        photos().with_columns(ZoomShot)


# --- dir


def test_dir_of_batch_lists_fields_and_methods() -> None:
    names = dir(photos())
    assert {"pixels", "camera", "id", "with_columns"} <= set(names)
    assert {"name", "iso", "flat"} <= set(dir(photos().others))
    assert "iso" in dir(photos().camera)
    assert names == sorted(names)


def test_dir_of_array_lists_fields_and_methods() -> None:
    documents = photos().unstack()
    assert {"pixels", "caption", "append"} <= set(dir(documents))
    assert "pixels" in dir(DocumentArray[Photo]())
    assert "iso" in dir(documents.camera)
    assert "iso" in dir(documents.others)
    assert "pixels" in dir(DocumentArray(documents))
