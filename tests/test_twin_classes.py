"""Several classes of one name: bytes are decoded as the classes that the schema names."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Iterator
from typing import Any

import pytest

from quire import BaseDocument, DocumentArray
from quire._class_registry import find

SOURCE = """
class Left(BaseDocument):
    n: int = 0

class LeftChild(Left):
    m: int = 0

class Right(BaseDocument):
    text: str = ""

class Either(BaseDocument):
    one: Left | Right
    listed: list[Left | Right] = []
    array: DocumentArray[Left] | DocumentArray[Right] | None = None
    left: Left | None = None
    lefts: DocumentArray[Left] = []
"""


def define() -> dict[str, Any]:
    """New classes of the same names, as a notebook's cell that runs again makes them."""
    names: dict[str, Any] = {"__name__": "notebook", "BaseDocument": BaseDocument, "DocumentArray": DocumentArray}
    exec(compile(SOURCE, "notebook", "exec", dont_inherit=True), names)
    return names


@pytest.fixture
def without_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def document_of(cell: dict[str, Any]) -> Any:
    child = cell["LeftChild"](n=1, m=2)
    return cell["Either"](
        one=child,
        listed=[cell["Right"](text="a"), cell["Left"](n=3), child],
        array=DocumentArray[cell["Right"]]([cell["Right"](text="b")]),
        left=child,
        lefts=[child, cell["Left"]()],
    )


def test_redefined_class_keeps_earlier_bytes_readable() -> None:
    first = define()
    document = document_of(first)
    rows = DocumentArray[first["Either"]]([document])
    data, several, message = document.to_bytes(), rows.to_bytes(), document.to_protobuf()
    second = define()
    for cell in (first, second):
        either = cell["Either"]
        for got in (
            either.from_bytes(data),
            either.from_protobuf(message),
            DocumentArray[either].from_bytes(several)[0],
        ):
            assert type(got.one) is cell["LeftChild"]
            assert [type(item) for item in got.listed] == [cell["Right"], cell["Left"], cell["LeftChild"]]
            assert type(got.array) is DocumentArray[cell["Right"]]
            assert type(got.left) is cell["LeftChild"]
            assert type(got.lefts[0]) is cell["LeftChild"]
    assert first["Either"].from_bytes(data) == document


@pytest.mark.needs("cloudpickle")
@pytest.mark.usefixtures("without_collection")
def test_cloudpickle_in_the_same_process_keeps_bytes_readable() -> None:
    import cloudpickle

    cell = define()
    either = cell["Either"]
    document = document_of(cell)
    data = document.to_bytes()
    assert pickle.loads(cloudpickle.dumps(either)) is either
    assert either.from_bytes(data) == document
    assert DocumentArray[either].from_bytes(DocumentArray[either]([document]).to_bytes())[0] == document
    for name in ("Either", "Left", "Right", "LeftChild"):
        assert find(f"notebook:{name}", None) in (cell[name], None)
    array: Any = DocumentArray.from_bytes(DocumentArray[either]([document]).to_bytes())
    assert type(array[0]) is either
