"""The text of a `.proto`: what is written, what names are given, and that protoc takes it."""

from __future__ import annotations

import sys
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, Optional, TypeVar

import pytest

from quire import BaseDocument, DocumentArray
from quire.errors import SchemaError
from quire.typing import NdArray
from tests.codec.proto_documents import Student, Thesis
from tests.codec.protoc import compile_proto, generated_class

GOLDEN = Path(__file__).parent / "golden" / "student.proto"
T = TypeVar("T")


class Box(BaseDocument, Generic[T]):
    content: T


class Tensor(BaseDocument):
    """A document whose name quire has for a message of its own."""

    values: NdArray


class Node(BaseDocument):
    name: str
    parent: Optional["Node"] = None
    children: DocumentArray["Node"] = []


class NotesEntry(BaseDocument):
    text: str


class Shade(Enum):
    red = 1
    RED = 2
    UNSPECIFIED = 3
    grün = 4  # noqa: PLC2401


class Odd(BaseDocument):
    message: str
    optional: int = 0
    größe: float  # noqa: PLC2401
    fooBar: int  # noqa: N815
    foo_bar: int
    Clear: int
    中: str  # noqa: PLC2401
    repeated: list[int] = []
    reserved: bool = False
    notes: dict[str, NotesEntry] = {}
    last: NotesEntry | None = None
    shade: Shade
    boxes: DocumentArray[Box[int]] = []
    box: Box[list[str]] | None = None
    tensor: Tensor | None = None
    node: Node | None = None


def document(name: str, **annotations: Any) -> Any:
    return type(BaseDocument)(name, (BaseDocument,), {"__annotations__": annotations, "__module__": __name__})


def test_golden_proto_is_reproduced() -> None:
    assert Student.to_proto_schema(package="school") == GOLDEN.read_text()


def test_a_schema_is_its_own_successor() -> None:
    for tp in (Student, Odd, Node):
        text = tp.to_proto_schema(package="a.b")
        assert tp.to_proto_schema(text) == text


@pytest.mark.needs("grpc_tools")
@pytest.mark.parametrize("tp", [Student, Odd, Node, Box[int], Tensor], ids=lambda tp: tp.__name__)
def test_protoc_accepts_the_text_without_a_warning(tp: Any, tmp_path: Path) -> None:
    compile_proto(tp.to_proto_schema(package=f"takes.{tp.__name__.partition('[')[0]}"), tmp_path)


@pytest.mark.needs("grpc_tools")
def test_names_that_are_invalid_in_protobuf_round_trip(tmp_path: Path) -> None:
    odd = Odd(
        message="m", größe=1.5, fooBar=1, foo_bar=2, Clear=3, 中="z", shade=Shade.grün, boxes=[{"content": 3}],
        box={"content": ["a"]}, notes={"n": {"text": "t"}}, last={"text": "l"}, tensor={"values": [1.0]},
        node={"name": "root", "children": [{"name": "leaf"}]},
    )  # fmt: skip
    generated = generated_class(Odd, tmp_path)
    message = generated.FromString(odd.to_typed_protobuf().SerializeToString())
    assert (message.message, message.grosse, message.fooBar, message.foo_bar_2, message.Clear_) == ("m", 1.5, 1, 2, 3)
    assert message.node.children[0].name == "leaf"
    assert Odd.from_typed_protobuf(message).identical(odd)


def test_generics_and_quires_own_messages_have_names() -> None:
    text = Odd.to_proto_schema()
    assert "\nmessage BoxInt {" in text
    assert "\nmessage BoxListStr {" in text
    assert "// From Python: quire:Tensor\nmessage QuireTensor {" in text
    assert "map<string, .NotesEntry> notes" in text
    for value in (
        "SHADE_UNSPECIFIED = 0",
        "SHADE_RED = 1",
        "SHADE_RED_2 = 2",
        "SHADE_UNSPECIFIED_2 = 3",
        "SHADE_GRUN = 4",
    ):
        assert f"  {value};" in text


def test_classes_of_the_same_name_are_different_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    other = ModuleType("archive.records")
    monkeypatch.setitem(sys.modules, "archive.records", other)
    exec("from quire import BaseDocument\nclass Thesis(BaseDocument):\n    shelf: int", other.__dict__)
    both = document("Both", new=Thesis, old=other.Thesis)
    text = both.to_proto_schema()
    assert "  Thesis new = 2;\n  RecordsThesis old = 3;" in text
    swapped = document("Both", old=other.Thesis, new=Thesis)
    assert "  RecordsThesis old = 3;\n  Thesis new = 2;" in swapped.to_proto_schema(text)


def test_proto_distinguishes_none_and_empty() -> None:
    class Lists(BaseDocument):
        a: list[int] | None = None
        b: list[int | None] = []
        c: list[list[int]] = []

    text = Lists.to_proto_schema()
    assert "optional ListsA a = 2;  // None when left out" in text
    assert "message ListsBItemOptional {\n  optional int64 value = 1;" in text
    assert "repeated ListsCItem c = 4;" in text


def test_invalid_packages_are_rejected() -> None:
    with pytest.raises(SchemaError, match="'my-package' is not a package"):
        Node.to_proto_schema(package="my-package")


def test_package_of_the_previous_file_is_kept() -> None:
    previous = Node.to_proto_schema(package="trees")
    assert "package trees;" in Node.to_proto_schema(previous)
    assert "package woods;" in Node.to_proto_schema(previous, package="woods")
