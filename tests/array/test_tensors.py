"""Tensors of batches for models: keys, tensors, apply, dtypes, jagged tensors, TensorDicts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from quire import BaseDocument, DocumentArray, DocumentBatch
from quire.errors import ColumnError, MissingDependencyError, MissingValueError, OptionError, PathError, SchemaError
from quire.typing import NdArray, TorchTensor, float32

pytestmark = pytest.mark.needs("torch")

import torch  # noqa: E402 - after the mark, by which this module is left out without torch


class Meta(BaseDocument):
    x: TorchTensor[float32, 2]
    source: str = ""


class Picture(BaseDocument):
    image: TorchTensor[float32, 3, 2, 2]
    label: int
    score: float = 0.5
    text: str = ""
    meta: Meta
    vector: NdArray[float32, 2] | None = None


class Clip(BaseDocument):
    frames: TorchTensor["time", 3]
    pitch: float = 1.0


class Scene(BaseDocument):
    tokens: TorchTensor["n"]
    clips: DocumentArray[Clip] = []
    name: str = ""


def make_batch(*, framework: str | None = "torch") -> DocumentBatch[Picture]:
    pictures = DocumentArray[Picture](
        Picture(
            image=torch.full((3, 2, 2), float(n)),
            label=n,
            text=f"text {n}",
            meta=Meta(x=torch.full((2,), float(n)), source=f"s{n}"),
            vector=np.full(2, n, np.float32),
        )
        for n in range(4)
    )
    return pictures.stack(framework=framework)


def make_scenes(shapes: Any = "ragged") -> DocumentBatch[Scene]:
    return DocumentArray[Scene](
        Scene(tokens=torch.arange(n), clips=[Clip(frames=torch.full((2, 3), float(k)), pitch=k) for k in range(n)])
        for n in (2, 0, 3)
    ).stack(shapes=shapes, framework="torch")


# --- keys and tensors


def test_keys_are_the_names_of_the_fields() -> None:
    batch = make_batch()
    assert batch.keys() == ["id", "image", "label", "score", "text", "meta", "vector"]
    assert dict(batch)["label"] is batch.label
    assert not isinstance(batch, Mapping)
    assert next(iter(batch)).text == "text 0"


def test_tensors_are_keyed_by_path() -> None:
    batch = make_batch()
    tensors = batch.tensors("image", "meta.x")
    assert list(tensors) == ["image", "meta.x"]
    assert tensors["image"] is batch.image
    assert tensors["meta.x"] is batch.meta.x


def test_tensors_fill_the_arguments_of_a_model() -> None:
    batch = make_batch()

    def model(image: Any, label: Any) -> Any:
        return image.sum() + label.sum()

    assert model(**batch.tensors("image", "label")) == batch.image.sum() + batch.label.sum()


def test_tensors_without_paths_are_all_tensor_columns() -> None:
    assert list(make_batch().tensors()) == ["image", "label", "score", "meta.x", "vector"]
    assert list(make_scenes().tensors()) == ["clips.frames", "clips.pitch"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("imag", r"tensors: Picture has no field 'imag'.*Did you mean 'image'"),
        ("meta.y", r"tensors: Meta has no field 'y'"),
        ("text", r"tensors: Picture.text is str, not one tensor. Columns with tensors: image, label, score, meta.x"),
        ("meta", r"tensors: Picture.meta is .*Columns with tensors: meta.x\."),
    ],
)
def test_tensors_rejects_columns_that_are_no_tensors(path: str, message: str) -> None:
    with pytest.raises(ColumnError, match=message):
        make_batch().tensors(path)


def test_tensors_of_ragged_columns_suggest_nested() -> None:
    with pytest.raises(ColumnError, match=r"Scene.tokens has rows of mixed shapes: use batch.nested\('tokens'\)"):
        make_scenes().tensors("tokens")


def test_tensors_of_missing_values_raise_in_guarded_batches() -> None:
    pictures = make_batch().unstack()
    pictures[1].vector = None
    batch = pictures.stack()._guard_missing()
    with pytest.raises(MissingValueError, match="row 1"):
        batch.tensors("vector")
    for picture in pictures:
        picture.vector = None
    batch = pictures.stack()._guard_missing()
    assert "vector" not in batch.tensors()
    with pytest.raises(ColumnError, match=r"Picture.vector has no value in any row"):
        batch.tensors("vector")


# --- apply and to


def test_apply_changes_every_tensor_and_keeps_the_rest() -> None:
    batch = make_batch()
    doubled = batch.apply(lambda tensor: tensor * 2)
    assert torch.equal(doubled.image, batch.image * 2)
    assert torch.equal(doubled.meta.x, batch.meta.x * 2)
    assert doubled.text == batch.text
    assert doubled.label.tolist() == [0, 2, 4, 6]
    assert batch.label.tolist() == [0, 1, 2, 3]


def test_apply_may_change_the_shape_of_rows_and_the_schema_follows() -> None:
    flat = make_batch().apply(lambda tensor: tensor.flatten(1) if tensor.dim() > 1 else tensor)
    assert flat.image.shape == (4, 12)
    assert str(flat.schema.by_name["image"]) != str(make_batch().schema.by_name["image"])


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda tensor: tensor[:2], r"apply: Picture.image: the batch has 4 rows here, and the function returned \(2,"),
        (
            lambda tensor: tensor.sum(),
            r"apply: Picture.image: the batch has 4 rows here, and the function returned \(\)",
        ),
        (lambda tensor: tensor.tolist(), r"apply: Picture.image: the function must return a dense tensor, got"),
        (lambda tensor: tensor[..., None], r"apply: Picture.label: a column of numbers has one number in each row"),
    ],
)
def test_apply_rejects_results_without_the_rows(function: Any, message: str) -> None:
    with pytest.raises(ColumnError, match=message):
        make_batch().apply(function)


def test_apply_keeps_the_shape_of_ragged_and_padded_columns() -> None:
    assert make_scenes().apply(lambda tensor: tensor + 1).tokens[2].tolist() == [1, 2, 3]
    padded = make_scenes("pad")
    assert padded.apply(lambda tensor: tensor + 1).mask("tokens").tolist() == padded.mask("tokens").tolist()
    for scenes in (make_scenes(), padded):
        with pytest.raises(ColumnError, match=r"Scene.tokens: its rows have several shapes"):
            scenes.apply(lambda tensor: tensor[..., :1])


def test_apply_keeps_missing_values() -> None:
    pictures = make_batch().unstack()
    pictures[1].vector = None
    batch = pictures.stack().apply(lambda tensor: tensor + 1)
    assert batch.validity("vector").tolist() == [True, False, True, True]


def test_to_casts_floating_columns_only() -> None:
    batch = make_batch().to("cpu", dtype=torch.bfloat16)
    assert batch.image.dtype == batch.meta.x.dtype == batch.score.dtype == torch.bfloat16
    assert batch.label.dtype == torch.int64
    assert batch.text == make_batch().text
    assert make_batch().to(dtype="float16").image.dtype == torch.float16


def test_to_casts_numpy_columns() -> None:
    batch = make_batch(framework="numpy").to(dtype="float64")
    assert batch.image.dtype == batch.vector.dtype == np.float64
    assert batch.label.dtype == np.int64


def test_to_keeps_the_gradient_of_a_cast_column() -> None:
    image = torch.zeros(2, 3, 2, 2, requires_grad=True)
    meta = DocumentBatch[Meta].from_columns({"x": torch.zeros(2, 2)})
    batch = DocumentBatch[Picture].from_columns({"image": image, "label": [1, 2], "meta": meta})
    batch.to(dtype=torch.float64).image.sum().backward()
    assert image.grad is not None


@pytest.mark.parametrize(("dtype", "error"), [(torch.int32, OptionError), ("floaty", SchemaError)])
def test_to_rejects_other_dtypes(dtype: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        make_batch().to(dtype=dtype)


# --- jagged tensors


def test_nested_shares_the_memory_of_a_ragged_column() -> None:
    batch = make_scenes()
    nested = batch.nested("tokens")
    assert nested.is_nested
    assert nested.layout is torch.jagged
    assert [part.tolist() for part in nested.unbind()] == [[0, 1], [], [0, 1, 2]]
    assert nested.values().data_ptr() == batch.column("tokens").flat.data_ptr()  # type: ignore[attr-defined]


def test_nested_keeps_the_inner_axes_of_ragged_rows() -> None:
    clips = DocumentArray[Clip](Clip(frames=torch.full((n, 3), float(n))) for n in (1, 4)).stack(shapes="ragged")
    nested = clips.nested("frames")
    assert [tuple(part.shape) for part in nested.unbind()] == [(1, 3), (4, 3)]


def test_nested_has_the_documents_of_arrays_in_each_row() -> None:
    batch = make_scenes()
    nested = batch.nested("clips.frames")
    assert [tuple(part.shape) for part in nested.unbind()] == [(2, 2, 3), (0, 2, 3), (3, 2, 3)]
    assert nested.values().data_ptr() == batch.clips.frames.data_ptr()
    assert [part.tolist() for part in batch.nested("clips.pitch").unbind()] == [[0.0, 1.0], [], [0.0, 1.0, 2.0]]


def test_nested_of_dense_and_padded_columns_has_their_real_elements() -> None:
    assert [part.tolist() for part in make_scenes("pad").nested("tokens").unbind()] == [[0, 1], [], [0, 1, 2]]
    assert [tuple(part.shape) for part in make_batch().nested("image").unbind()] == [(3, 2, 2)] * 4


def test_nested_takes_numpy_columns() -> None:
    class Speech(BaseDocument):
        samples: NdArray["n"]

    batch = DocumentArray[Speech](Speech(samples=np.arange(n)) for n in (1, 2)).stack(shapes="ragged")
    assert [part.tolist() for part in batch.nested("samples").unbind()] == [[0], [0, 1]]


def test_nested_rejects_other_columns() -> None:
    batch = make_scenes()
    with pytest.raises(PathError, match="Did you mean 'tokens'"):
        batch.nested("token")
    with pytest.raises(ColumnError, match=r"nested: Scene.name is str, and is not held as tensors"):
        batch.nested("name")
    with pytest.raises(ColumnError, match=r"nested: Picture.label is a number in each row"):
        make_batch().nested("label")

    class Photo(BaseDocument):
        pixels: TorchTensor["h", "w"]

    photos = DocumentArray[Photo](Photo(pixels=torch.zeros(n, n)) for n in (1, 2))
    with pytest.raises(
        ColumnError, match=r"differ in their first axis only, and these have the shapes \(1, 1\), \(2, 2"
    ):
        photos.stack(shapes="ragged").nested("pixels")
    with pytest.raises(ColumnError, match="padded along other axes than the first"):
        photos.stack(shapes="pad").nested("pixels")


# --- TensorDicts


@pytest.mark.needs("tensordict")
def test_tensordict_has_tensors_texts_and_nested_documents() -> None:
    batch = make_batch()
    content = batch.to_tensordict()
    assert content.batch_size == (4,)
    assert content["image"].data_ptr() == batch.image.data_ptr()
    assert torch.equal(content["meta", "x"], batch.meta.x)
    assert content["text"] == batch.text
    assert content[1]["text"] == "text 1"


@pytest.mark.needs("tensordict")
def test_batch_of_a_tensordict_is_the_same_batch() -> None:
    batch = make_batch()
    again = DocumentBatch[Picture].from_tensordict(batch.to_tensordict())
    assert again.identical(batch)
    scenes = DocumentBatch[Scene].from_tensordict(make_scenes().to_tensordict("id", "tokens", "name"))
    assert [row.tokens.tolist() for row in scenes] == [[0, 1], [], [0, 1, 2]]


@pytest.mark.needs("tensordict")
def test_batch_of_a_tensordict_takes_defaults_and_rejects_unknown_keys() -> None:
    from tensordict import TensorDict

    x = torch.zeros(2, 2)
    assert DocumentBatch[Meta].from_tensordict(TensorDict({"x": x}, [2])).source == ["", ""]
    with pytest.raises(PathError, match="no field 'xx'"):
        DocumentBatch[Meta].from_tensordict(TensorDict({"xx": x}, [2]))
    with pytest.raises(ColumnError, match="has no batch size"):
        DocumentBatch[Meta].from_tensordict(TensorDict({"x": x}, []))
    with pytest.raises(ColumnError, match="takes a TensorDict or a tensorclass, got dict"):
        DocumentBatch[Meta].from_tensordict({"x": x})


@pytest.mark.needs("tensordict")
def test_tensordict_rejects_what_it_cannot_hold() -> None:
    pictures = make_batch().unstack()
    pictures[1].vector = None
    with pytest.raises(MissingValueError, match=r"to_tensordict: Picture.vector has missing values"):
        pictures.stack().to_tensordict()
    with pytest.raises(ColumnError, match=r"to_tensordict: Scene.clips is an array of documents"):
        make_scenes().to_tensordict()
    with pytest.raises(ColumnError, match=r"to_tensordict: Scene.tokens is padded"):
        make_scenes("pad").to_tensordict("tokens")
    with pytest.raises(PathError, match="Did you mean 'image'"):
        make_batch().to_tensordict("imag")


def test_tensordict_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.array._torch_interop.is_installed", lambda _: False)
    with pytest.raises(MissingDependencyError, match="pip install tensordict"):
        make_batch().to_tensordict()
