"""Fields annotated with jaxtyping."""

from __future__ import annotations

import pickle
import subprocess
import sys
from typing import Any, Union

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
import torch
from jaxtyping import Bool, Complex, Float, Float32, Inexact, Int, Integer, Key, Num, Real, Shaped, UInt, UInt8
from pydantic import ValidationError

from quire import BaseDocument, DocumentArray
from quire.errors import SchemaError
from quire.typing import AnyTensor, JaxArray, NdArray, TorchTensor

pytestmark = pytest.mark.needs("jaxtyping", "torch", "jax")


def document_type(annotation: Any) -> Any:
    return type("Sample", (BaseDocument,), {"__annotations__": {"x": annotation}, "__module__": __name__})


class Photo(BaseDocument):
    pixels: Float32[torch.Tensor, "3 height width"]
    mask: Bool[torch.Tensor, "height width"] | None = None


@pytest.mark.parametrize(
    ("annotation", "expected"),
    [
        (Float32[torch.Tensor, "3 height width"], TorchTensor[torch.float32, 3, "height", "width"]),
        (UInt8[np.ndarray, "..."], NdArray[np.uint8, ...]),
        (Shaped[jax.Array, "n"], JaxArray["n"]),
        (Shaped[Any, "n _"], AnyTensor["n", "_"]),
        (Float32[torch.Tensor, ""], TorchTensor[torch.float32, ()]),
        (Bool[np.ndarray, "n"], NdArray[np.bool_, "n"]),
    ],
)
def test_annotation_is_the_same_type_as_that_of_quire(annotation: Any, expected: Any) -> None:
    assert document_type(annotation).document_schema().by_name["x"].type is expected


def test_values_are_checked_like_those_of_tensor_types() -> None:
    photo = Photo(pixels=torch.zeros(3, 4, 5), mask=torch.ones(4, 5, dtype=torch.bool))
    assert photo.pixels.shape == (3, 4, 5)
    with pytest.raises(
        ValidationError, match=r"expected TorchTensor float32 \(3, height, width\), got float32 \(1, 4, 5\)"
    ):
        Photo(pixels=torch.zeros(1, 4, 5))
    with pytest.raises(ValidationError, match="float64"):
        Photo(pixels=torch.zeros(3, 4, 5, dtype=torch.float64))
    with pytest.raises(ValidationError, match="height=4"):
        Photo(pixels=torch.zeros(3, 4, 5), mask=torch.ones(5, 5, dtype=torch.bool))


def test_documents_survive_every_form() -> None:
    photos = DocumentArray[Photo](Photo(pixels=torch.full((3, 2, 2), float(i))) for i in range(3))
    batch = photos.stack()
    assert batch.pixels.shape == (3, 3, 2, 2)
    for copy in (
        batch.unstack(),
        DocumentArray[Photo].from_bytes(photos.to_bytes()),
        pickle.loads(pickle.dumps(photos)),
    ):
        assert [photo.pixels.tolist() for photo in copy] == [photo.pixels.tolist() for photo in photos]
    assert torch.equal(Photo.model_validate_json(photos[1].model_dump_json()).pixels, photos[1].pixels)


def test_anonymous_dimensions_need_not_be_equal() -> None:
    sample = document_type(Shaped[np.ndarray, "_ _"])
    assert sample(x=np.zeros((2, 3))).x.shape == (2, 3)
    with pytest.raises(ValidationError, match=r"\(_, _\)"):
        sample(x=np.zeros(2))


@pytest.mark.parametrize(
    ("family", "accepted", "rejected"),
    [
        (Float, ["float16", "float32", "float64"], ["int32", "complex64", "bool"]),
        (Int, ["int8", "int64"], ["uint8", "float32"]),
        (UInt, ["uint8", "uint32"], ["int8", "bool"]),
        (Integer, ["int8", "uint64"], ["float32", "bool"]),
        (Complex, ["complex64", "complex128"], ["float32"]),
        (Inexact, ["float32", "complex64"], ["int8"]),
        (Real, ["float32", "int8", "uint8"], ["complex64", "bool"]),
        (Num, ["float32", "int8", "complex64"], ["bool"]),
        (Bool, ["bool"], ["int8"]),
        (Shaped, ["bool", "int8", "complex128"], []),
    ],
)
def test_families_accept_their_dtypes_alone(family: Any, accepted: list[str], rejected: list[str]) -> None:
    sample = document_type(family[np.ndarray, "2"])
    for dtype in accepted:
        assert sample(x=np.ones(2, dtype)).x.dtype == dtype
        assert sample.from_bytes(sample(x=np.ones(2, dtype)).to_bytes()).x.dtype == dtype
    for dtype in rejected:
        with pytest.raises(ValidationError, match=dtype):
            sample(x=np.ones(2, dtype))


def test_families_differ_from_each_other_and_pickle() -> None:
    types = [document_type(family[np.ndarray, "2"]).document_schema().by_name["x"].type for family in (Float, Int, Num)]
    assert len(set(types)) == 3
    assert [pickle.loads(pickle.dumps(tensor_type)) for tensor_type in types] == types


def test_lists_become_the_framework_s_dtype_of_the_family() -> None:
    assert document_type(Float[torch.Tensor, "2"])(x=[1, 2]).x.dtype == torch.float32
    assert document_type(Int[torch.Tensor, "2"])(x=[1, 2]).x.dtype == torch.int64
    assert document_type(Complex[np.ndarray, "2"])(x=[1.5, 2]).x.dtype == np.complex128
    with pytest.raises(ValidationError, match="float32"):
        document_type(Int[torch.Tensor, "2"])(x=[1.5, 2])


def test_unions_of_array_types_take_each_framework() -> None:
    sample = document_type(Float32[Union[np.ndarray, torch.Tensor], "n"])
    assert isinstance(sample(x=torch.zeros(2)).x, torch.Tensor)
    assert isinstance(sample(x=np.zeros(2, np.float32)).x, np.ndarray)
    assert sample(x=jnp.zeros(2)).x.shape == (2,)


@pytest.mark.parametrize("dimensions", ["*batch n", "#n", "n+1", "?n", "rows=3", "_rows", "*_"])
def test_other_forms_of_dimensions_are_rejected_when_the_class_is_made(dimensions: str) -> None:
    with pytest.raises(SchemaError, match=r"has no meaning in a document. Use a size \(3\)"):
        document_type(Float32[torch.Tensor, dimensions])


@pytest.mark.parametrize("annotation", [Key[jax.Array, "n"], jaxtyping.Int4[jax.Array, "n"]])
def test_dtypes_that_documents_do_not_have_are_rejected(annotation: Any) -> None:
    with pytest.raises(SchemaError, match="have one of the dtypes bool, uint8"):
        document_type(annotation)


def test_classes_that_are_no_tensors_are_rejected() -> None:
    with pytest.raises(SchemaError, match="is not a class of tensors"):
        document_type(Float32[bytes, "n"])


def test_quire_does_not_import_jaxtyping() -> None:
    program = "import sys, quire, quire.data; class_ = quire.Text; sys.exit('jaxtyping' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
