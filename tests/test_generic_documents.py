"""Type variables of generic documents, wherever they stand in an annotation."""

from __future__ import annotations

import gc
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Annotated, Any, Generic, Optional, TypeVar
from weakref import ref

import pytest
from annotated_types import Gt
from pydantic import AfterValidator, Field, InstanceOf, SkipValidation, ValidationError, condecimal, constr

from quire import BaseDocument, DocumentArray, DocumentBatch

T = TypeVar("T")
U = TypeVar("U")


class Box(BaseDocument, Generic[T]):
    content: T


class Shelf(BaseDocument, Generic[T]):
    boxes: DocumentArray[Box[T]] = DocumentArray[Box]()  # type: ignore[type-arg]


class Store(BaseDocument, Generic[U]):
    boxes: DocumentArray[Box[U]] | None = None
    optional: Optional[DocumentArray[Box[U]]] = None
    several: list[DocumentArray[Box[U]]] = []
    by_name: dict[str, DocumentArray[Box[U]]] = {}
    annotated: Annotated[DocumentArray[Box[U]] | None, Field(description="more boxes")] = None
    batch: DocumentBatch[Box[U]] | None = None
    nested: DocumentArray[Box[Box[U]]] | None = None
    shelves: DocumentArray[Shelf[U]] | None = None
    one: Shelf[U] | None = None


class Plain(BaseDocument, Generic[T]):
    several: list[DocumentArray[T]] = []  # type: ignore[type-var]
    optional: DocumentArray[T] | None = None  # type: ignore[type-var]


class Note:
    """Metadata that is equal to nothing but itself."""


def is_even(value: int) -> int:
    if value % 2:
        raise ValueError("odd")
    return value


# Each call makes new metadata.
ANNOTATED: dict[str, Callable[[], Any]] = {
    "constraint": lambda: Annotated[int, Gt(0)],
    "field": lambda: Annotated[int, Field(gt=0)],
    "described": lambda: Annotated[int, Field(ge=1, le=9, strict=True, description="few", examples=[1])],
    "pattern": lambda: Annotated[str, Field(pattern="^a", min_length=1)],
    "constrained": lambda: constr(pattern="^a"),
    "digits": lambda: condecimal(max_digits=4, decimal_places=2),
    "in a list": lambda: list[Annotated[int, Field(gt=0)]],
    "optional": lambda: Optional[Annotated[int, Field(gt=0)]],
    "deep": lambda: dict[str, tuple[Annotated[float, Field(gt=0)], ...]],
    "instance": lambda: InstanceOf[int],
    "unvalidated": lambda: SkipValidation[int],
    "function": lambda: Annotated[int, AfterValidator(is_even)],
}
COPIED: dict[str, Any] = {
    "lambda": Annotated[int, AfterValidator(lambda value: value)],
    "note": Annotated[int, Note()],
    "callback": Annotated[int, Field(json_schema_extra=lambda schema: schema.clear())],
    "several": Annotated[int, Note(), Field(gt=0)],
}

GOOD: Any = [{"content": 3}]
BAD: Any = [{"content": "not an int"}]


def test_type_variables_are_substituted_inside_of_arrays() -> None:
    with pytest.raises(ValidationError, match="boxes.0.content"):
        Shelf[int](boxes=BAD)
    shelf = Shelf[int](boxes=GOOD)
    assert type(shelf.boxes) is DocumentArray[Box[int]]
    assert Shelf[str](boxes=BAD).boxes[0].content == "not an int"
    assert Shelf(boxes=BAD).boxes[0].content == "not an int"
    with pytest.raises(ValidationError):
        Shelf[int](boxes=DocumentArray[Box[str]]([Box[str](content="x")]))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "wrap"),
    [
        ("boxes", lambda boxes: boxes),
        ("optional", lambda boxes: boxes),
        ("several", lambda boxes: [boxes]),
        ("by_name", lambda boxes: {"a": boxes}),
        ("annotated", lambda boxes: boxes),
        ("batch", lambda boxes: boxes),
        ("nested", lambda boxes: [{"content": box} for box in boxes]),
        ("shelves", lambda boxes: [{"boxes": boxes}]),
        ("one", lambda boxes: {"boxes": boxes}),
    ],
)
def test_type_variables_are_substituted_everywhere(name: str, wrap: Any) -> None:
    with pytest.raises(ValidationError, match="content"):
        Store[int](**{name: wrap(BAD)})
    document = Store[int](**{name: wrap(GOOD)})
    if name != "batch":  # a batch inside of a document has no form in bytes
        assert Store[int].from_bytes(document.to_bytes()) == document
    assert Store[int].from_json(document.to_json()) == document
    assert pickle.loads(pickle.dumps(document)) == document
    assert "~" not in str(Store[int].document_schema())


def test_bare_type_variable_is_substituted_inside_of_arrays() -> None:
    with pytest.raises(ValidationError, match="several.0.0.content"):
        Plain[Box[int]](several=[BAD])
    with pytest.raises(ValidationError, match="optional.0.content"):
        Plain[Box[int]](optional=BAD)
    assert type(Plain[Box[int]](optional=GOOD).optional) is DocumentArray[Box[int]]


def test_subclass_of_a_generic_document_keeps_its_types() -> None:
    class IntegerShelf(Shelf[int]):
        name: str = ""

    with pytest.raises(ValidationError, match="boxes.0.content"):
        IntegerShelf(boxes=BAD)
    assert DocumentArray[IntegerShelf]([IntegerShelf(boxes=GOOD)]).stack().boxes.content.tolist() == [3]


@pytest.mark.parametrize("generic", [Box, Shelf, Store])
@pytest.mark.parametrize("annotation", ANNOTATED.values(), ids=ANNOTATED)
def test_equal_annotated_parameters_give_the_same_class(generic: Any, annotation: Callable[[], Any]) -> None:
    document_type = generic[annotation()]
    assert generic[annotation()] is document_type
    assert pickle.loads(pickle.dumps(document_type)) is document_type
    assert DocumentArray[generic[annotation()]] is DocumentArray[document_type]


@pytest.mark.needs("cloudpickle")
@pytest.mark.parametrize("generic", [Box, Shelf, Store])
@pytest.mark.parametrize("annotation", [*(make() for make in ANNOTATED.values()), *COPIED.values()])
def test_class_with_an_annotated_parameter_round_trips_in_cloudpickle(generic: Any, annotation: Any) -> None:
    import cloudpickle

    document_type = generic[annotation]
    assert pickle.loads(cloudpickle.dumps(document_type)) is document_type
    assert pickle.loads(cloudpickle.dumps(DocumentArray[document_type])) is DocumentArray[document_type]


def test_document_with_a_pattern_parameter_is_pickled() -> None:
    document = Box[ANNOTATED["pattern"]()](content="ab")  # type: ignore[misc]
    again = pickle.loads(pickle.dumps(document))
    assert type(again) is type(document)
    assert again == document
    with pytest.raises(ValidationError):
        again.content = "b"


@pytest.mark.needs("cloudpickle")
def test_class_with_an_annotated_parameter_round_trips_through_another_process() -> None:
    import cloudpickle

    annotations = [*(make() for make in ANNOTATED.values()), *COPIED.values()]
    types = [Box[annotation] for annotation in annotations]
    echo = "import sys, pickle, cloudpickle; sys.stdout.buffer.write(cloudpickle.dumps(pickle.load(sys.stdin.buffer)))"
    content = cloudpickle.dumps(types)
    done = subprocess.run([sys.executable, "-c", echo], input=content, capture_output=True, check=True)
    for document_type, again in zip(types, pickle.loads(done.stdout), strict=True):
        assert again is document_type


def test_different_annotated_parameters_give_different_classes() -> None:
    one = Box[Annotated[int, Field(gt=1)]]
    assert Box[Annotated[int, Field(gt=2)]] is not one
    assert Box[Annotated[int, Field(gt=True)]] is not one
    assert Box[Annotated[int, Field(ge=1)]] is not one
    assert Box[Annotated[int, Field(gt=1, description="d")]] is not one
    assert (
        Box[Annotated[int, AfterValidator(lambda value: value)]]
        is not (Box[Annotated[int, AfterValidator(lambda value: value)]])
    )


def test_class_with_an_annotated_parameter_can_be_collected() -> None:
    document_type: Any = Box[Annotated[int, Field(gt=12345)]]
    pickle.loads(pickle.dumps(document_type))
    gone = ref(document_type)
    del document_type
    gc.collect()
    assert gone() is None
