"""Static types of documents: checked by mypy and pyright, and run as tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from jaxtyping import Float32
from typing_extensions import assert_type

from quire import BaseDocument, Image, Text
from quire.schema import Schema
from quire.typing import ID, DType, Shape, TorchTensor

pytestmark = pytest.mark.needs("torch", "jaxtyping")

Photo = Annotated[torch.Tensor, Shape(3, 224, 224), DType("float32")]


class Thesis(BaseDocument):
    title: str
    embedding: Annotated[npt.NDArray[np.float32], Shape(4)] | None = None


class Student(BaseDocument):
    name: str
    thesis: Thesis
    photo: Photo
    mask: TorchTensor | None = None
    depth: Float32[torch.Tensor, "height width"] | None = None


def student() -> Student:
    return Student(name="Ada", thesis=Thesis(title="Leaves"), photo=torch.zeros(3, 224, 224))


def test_tensor_fields_have_framework_types() -> None:
    ada = student()
    assert_type(ada.id, ID)
    assert_type(ada.name, str)
    assert_type(ada.thesis.title, str)
    assert_type(ada.thesis.embedding, npt.NDArray[np.float32] | None)
    assert_type(ada.photo, torch.Tensor)
    assert_type(ada.mask, torch.Tensor | None)
    assert_type(ada.depth, torch.Tensor | None)
    assert_type(ada.photo + 1, torch.Tensor)


def test_main_values_are_positional() -> None:
    assert_type(Text("hello", embedding=np.zeros(2)).text, str | None)
    assert Image("a.png").url == Image(url="a.png").url
    assert Image(np.zeros((2, 2, 3), np.uint8)).tensor is not None


def test_document_methods_keep_class() -> None:
    ada = student()
    assert_type(ada.model_copy(), Student)
    assert_type(Student.model_validate(ada), Student)
    assert_type(Student.document_schema(), Schema)
    assert_type(ada.identical(ada), bool)
    ada.update({"name": "Ada L."})
    ada.update(name="Ada")
    ada.update(student())


if TYPE_CHECKING:

    def mistakes(ada: Student, anything: Any) -> None:
        """Each line is an error for both type checkers, which also report unused ignores."""
        Student(name=1, thesis=anything, photo=anything)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        Student(name="Ada", thesis=anything)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
        Student(name="Ada", thesis=anything, photo=[1, 2])  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        ada.photo = np.zeros(3)  # type: ignore[assignment]  # pyright: ignore[reportAttributeAccessIssue]
        ada.nmae = "Ada"  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
