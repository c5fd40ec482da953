"""Classes that are not loaded: their documents keep every field and their name, and nothing is imported."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import date
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import create_model

from quire import BaseDocument, DocumentArray, DocumentBatch, _class_registry
from quire.document import DynamicDocument
from quire.errors import DecodeError
from quire.typing import AnyTensor, NdArray, float32
from tests.codec.round_trips import dynamic, exact
from tests.strategies import Branch, Leaf, Node, Seed, Tree, Twig


@pytest.fixture
def forget() -> Iterator[Callable[..., None]]:
    """Let classes seem not to be loaded, until the test ends."""
    forgotten: dict[str, list[Any]] = {}

    def do(*classes: type[Any]) -> None:
        for cls in classes:
            name = _class_registry.class_name(cls)
            forgotten[name] = _class_registry._classes.pop(name)

    yield do
    _class_registry._classes.update(forgotten)


def test_collected_class_releases_its_name_to_the_earlier_class() -> None:
    class Passing(BaseDocument):
        x: int = 1

    name, data = _class_registry.class_name(Passing), Passing().to_bytes()
    later = type(BaseDocument)(
        "Passing", (BaseDocument,), {"__module__": __name__, "__qualname__": Passing.__qualname__}
    )
    assert _class_registry.find(name, None) is later
    del later
    gc.collect()
    assert _class_registry.find(name, None) is Passing
    assert type(BaseDocument.from_bytes(data)) is Passing


class Tone(Enum):
    LOW = 1
    HIGH = "high"


class Inner(BaseDocument):
    x: int = 1
    vector: NdArray[float32, 2] = [0.0, 1.0]


class Deeper(Inner):
    more: dict[int, str] = {1: "a"}


class Outer(BaseDocument):
    number: int = 2**70
    real: float = -0.0
    flag: bool = True
    text: str = "ä"
    blob: bytes = b"\0"
    when: date = date(2024, 1, 1)
    tone: Tone = Tone.HIGH
    tones: list[Tone] = [Tone.LOW]
    items: set[int] = {1, 2}
    tensor: AnyTensor = np.arange(6).reshape(2, 3)
    shaped: NdArray | None = None
    one: Inner = Inner(id="1")
    many: DocumentArray[Inner] = DocumentArray[Inner]([Inner(id="2"), Deeper(id="3")])
    none: Inner | None = None
    nothing: DocumentArray[Inner] = DocumentArray[Inner]()
    any_array: DocumentArray | None = None  # type: ignore[type-arg]
    open_one: BaseDocument | None = None


def full(id: str = "o", **more: Any) -> Outer:  # noqa: A002
    return Outer(id=id, any_array=DocumentArray([Inner(id="4"), Outer(id="5")]), open_one=Deeper(id="6"), **more)


NAMES = list(Outer.model_fields)


def test_dynamic_document_keeps_all_fields_and_its_class_name(forget: Any) -> None:
    document = full()
    data = document.to_bytes()
    forget(Outer, Inner, Deeper)
    for got in (BaseDocument.from_bytes(data), BaseDocument.from_protobuf(document.to_protobuf())):
        assert type(got) is DynamicDocument
        assert got.__quire_name__ == f"{__name__}:Outer"
        assert list(got.__pydantic_extra__) == NAMES
        assert (got.id, got.number, got.text, got.when) == ("o", 2**70, "ä", date(2024, 1, 1))
        assert type(got.one) is DynamicDocument
        assert got.one.__quire_name__ == f"{__name__}:Inner"
        assert [doc.__quire_name__.rpartition(":")[2] for doc in got.many] == ["Inner", "Deeper"]
        assert got.to_bytes() == data
        assert exact(Outer.from_bytes(got.to_bytes(), types=[Outer, Inner, Deeper]), document)


@pytest.mark.parametrize("way", ["stream", "message", "packed", "columns"])
def test_array_of_dynamic_documents_keeps_all_fields_and_the_class_name(forget: Any, way: str) -> None:
    docs = DocumentArray[Outer]([full("a", shaped=np.ones(2)), full("b"), Outer(id="c", shaped=np.ones((2, 2)))])
    data = {
        "stream": docs.to_bytes,
        "message": lambda: docs.to_protobuf().SerializeToString(),
        "packed": lambda: docs.to_bytes(compress="gzip"),
        "columns": lambda: docs.stack(shapes="ragged").to_bytes(),
    }[way]()
    forget(Outer, Inner, Deeper)
    got = DocumentArray.from_bytes(data)
    assert type(got) is DocumentArray
    assert [type(doc) for doc in got] == [DynamicDocument] * 3
    assert [list(doc.__pydantic_extra__) for doc in got] == [NAMES] * 3
    assert [doc.id for doc in got] == ["a", "b", "c"]
    assert got[0].number == 2**70
    for again in (got.to_bytes(), got.to_protobuf().SerializeToString(), got[:2].to_bytes(), got.copy().to_bytes()):
        back = DocumentArray[Outer].from_bytes(again, types=[Outer, Inner, Deeper])
        assert exact(list(back), list(docs)[: len(back)])
    known = DocumentArray.from_bytes(got.to_bytes(), types=[Outer, Inner, Deeper])
    assert exact(known, docs)


def test_empty_array_keeps_the_class_name(forget: Any) -> None:
    docs = DocumentArray[Outer]()
    for data in (docs.to_bytes(), docs.to_protobuf().SerializeToString(), docs.stack().to_bytes()):
        got = dynamic_array(forget, data)
        assert len(got) == 0
        assert got._declared == f"{__name__}:Outer"
        for again in (got.to_bytes(), got.to_protobuf().SerializeToString()):
            assert exact(DocumentArray.from_bytes(again, types=[Outer]), docs)


def dynamic_array(forget: Any, data: bytes) -> Any:
    if f"{__name__}:Outer" in _class_registry._classes:
        forget(Outer)
    return DocumentArray.from_bytes(data)


def test_unloaded_subclass_is_read_as_its_base_or_kept(forget: Any) -> None:
    docs = DocumentArray[Inner]([Inner(id="1"), Deeper(id="2", more={5: "x"})])
    data = [docs.to_bytes(), docs.to_protobuf().SerializeToString(), docs.stack().to_bytes()]
    document = Deeper(id="3").to_bytes()
    forget(Deeper)
    assert type(Inner.from_bytes(document)) is Inner
    kept = Inner.from_bytes(document, unknown="keep")
    assert kept.__pydantic_extra__ == {"more": {1: "a"}}
    assert Inner.from_bytes(document, types=[Deeper]).identical(Deeper(id="3"))
    for content in data:
        got = DocumentArray[Inner].from_bytes(content)
        assert [type(doc) for doc in got] == [Inner, Inner]
        kept = DocumentArray[Inner].from_bytes(content, unknown="keep")
        assert kept[1].__pydantic_extra__ == {"more": {5: "x"}}
        assert exact(DocumentArray[Inner].from_bytes(content, types=[Deeper]), docs)


@pytest.mark.parametrize(
    "document",
    [
        Leaf(text="a"),
        Twig(text="a", ring=np.ones((0, 2))),
        Branch(leaf=Twig(text="b")),
        Tree(branch=Branch(leaf=Leaf(text="c"))),
        Node(name="a", parent=Node(), children=[Node(), Node()]),
        Seed(a=1, b=[2]),
    ],
    ids=lambda document: type(document).__name__,
)
def test_generated_documents_round_trip_as_dynamic_documents(forget: Any, document: Any) -> None:
    cls, classes = type(document), (Leaf, Twig, Branch, Tree, Node, Seed)
    docs = DocumentArray[cls]([document, document])
    sources = [docs.to_bytes(), docs.to_protobuf().SerializeToString(), docs.stack().to_bytes()]
    data = document.to_bytes()
    forget(*classes)
    got = BaseDocument.from_bytes(data)
    assert type(got) is DynamicDocument
    assert exact(BaseDocument.from_bytes(got.to_bytes(), types=classes), document)
    for source in sources:
        rows = DocumentArray.from_bytes(source)
        assert {type(row) for row in rows} == {DynamicDocument}
        assert exact(DocumentArray.from_bytes(rows.to_bytes(), types=classes), docs)


def test_nested_dynamic_documents_round_trip(forget: Any) -> None:
    class Holder(BaseDocument):
        one: BaseDocument
        anything: Any = None
        many: DocumentArray = DocumentArray()  # type: ignore[type-arg]

    holder = Holder(one=Inner(), anything=[Inner()], many=DocumentArray([Inner(), Leaf(text="x")]))
    rows = DocumentArray[Holder]([holder, holder])
    sources = [rows.to_bytes(), rows.to_protobuf().SerializeToString(), rows.stack().to_bytes()]
    data = holder.to_bytes()
    forget(Inner)
    got = Holder.from_bytes(data)
    assert type(got.one) is DynamicDocument
    assert type(got.anything[0]) is DynamicDocument
    assert [type(doc) for doc in got.many] == [DynamicDocument, Leaf]
    assert exact(Holder.from_bytes(got.to_bytes(), types=[Inner]), holder)
    for source in sources:
        array = DocumentArray[Holder].from_bytes(source)
        assert type(array[1].one) is DynamicDocument
        assert exact(DocumentArray[Holder].from_bytes(array.to_bytes(), types=[Inner]), rows)


def test_unknown_enum_members_are_kept() -> None:
    data = dynamic("a:B", tone=Tone.HIGH, tones={Tone.LOW: [Tone.HIGH]}).to_bytes()
    got = BaseDocument.from_bytes(data)
    assert got.tone.name == "HIGH"
    assert got.tone.value == "high"
    assert got.tone.type == f"{__name__}:Tone"
    assert got.to_bytes() == data


def test_enums_are_looked_up_in_types() -> None:
    document = dynamic("a:B", tone=Tone.HIGH, tones={Tone.LOW: [Tone.HIGH]})
    got = BaseDocument.from_bytes(document.to_bytes(), types=[Tone])
    assert exact(got.__pydantic_extra__, document.__pydantic_extra__)


def test_dynamic_documents_are_mutable() -> None:
    got = BaseDocument.from_bytes(dynamic("a:B", x=1, y=[1]).to_bytes())
    got.x = 5
    got.z = "new"
    again = BaseDocument.from_bytes(got.to_bytes())
    assert (again.x, again.y, again.z) == (5, [1], "new")
    assert again.__quire_name__ == "a:B"


def test_dynamic_documents_compare_their_fields() -> None:
    data = dynamic("a:B", x=1, t=np.ones(2)).to_bytes()
    assert BaseDocument.from_bytes(data) == BaseDocument.from_bytes(data)
    assert BaseDocument.from_bytes(data).identical(BaseDocument.from_bytes(data))
    assert BaseDocument.from_bytes(data) != BaseDocument.from_bytes(dynamic("a:B", x=2, t=np.ones(2)).to_bytes())


def test_dynamic_documents_accept_any_field_name() -> None:
    content = {"to_bytes": 1, "model_fields": 2, "_declared": 3, "__dict__": 4, "": 5, "a b": 6, "id": None, "self": 7}
    document = _class_registry.make_dynamic("a:B", dict(content))
    data = codec_bytes(document)
    got = BaseDocument.from_bytes(data)
    assert got.__pydantic_extra__ == content
    assert codec_bytes(got) == data
    rows = DocumentArray.from_bytes(DocumentArray([got, got]).to_bytes())
    assert [row.__pydantic_extra__ for row in rows] == [content, content]


def codec_bytes(document: Any) -> bytes:
    return BaseDocument.to_bytes(document)


def test_batch_of_an_unloaded_class_raises_an_error_with_advice(forget: Any) -> None:
    docs = DocumentArray[Outer]([full()])
    for data in (docs.stack().to_bytes(), docs.to_bytes()):
        assert type(DocumentBatch.from_bytes(data)) is DocumentBatch[Outer]
    forget(Outer)
    for data in (docs.stack().to_bytes(), docs.to_bytes()):
        with pytest.raises(DecodeError, match=r"Outer' is not loaded.*types=\[\.\.\.\]"):
            DocumentBatch.from_bytes(data)
        assert type(DocumentBatch.from_bytes(data, types=[Outer])) is DocumentBatch[Outer]


def test_collected_classes_are_not_found() -> None:
    cls: Any = create_model("Passing", __base__=BaseDocument, __module__=__name__, x=(int, 1))
    data = cls(x=3).to_bytes()
    del cls
    gc.collect()
    got = BaseDocument.from_bytes(data)
    assert type(got) is DynamicDocument
    assert got.x == 3


# --- without imports


@pytest.mark.parametrize(
    "name",
    [
        "os:system",
        "subprocess:Popen",
        "antigravity:fly",
        "builtins:eval",
        "a",
        "",
        ":",
        "a:b:c",
        "quire.document:BaseDocument.from_bytes",
    ],
)
def test_a_name_is_only_looked_up(name: str) -> None:
    before = set(sys.modules)
    document = dynamic(name, x=1, inner=dynamic(name, y=2))
    got = BaseDocument.from_bytes(document.to_bytes())
    assert got.__quire_name__ == name
    assert type(got) is DynamicDocument
    rows = DocumentArray.from_bytes(DocumentArray([got, got]).to_bytes())
    assert [row.x for row in rows] == [1, 1]
    assert set(sys.modules) == before


def test_names_of_unexpected_classes_are_ignored() -> None:
    document = dynamic(Seed, text="a")
    assert type(Leaf.from_bytes(document.to_bytes())) is Leaf
    open_one = dynamic("quire.document:BaseDocument", id="x", y=1)
    assert type(BaseDocument.from_bytes(open_one.to_bytes())) is BaseDocument


WRITER = """
import sys
sys.path.insert(0, {folder!r})
import secret_schemas
from quire import DocumentArray
author = secret_schemas.Author(id='a', name='n')
papers = [secret_schemas.Paper(id=str(i), title='t', author=author) for i in range(3)]
docs = DocumentArray[secret_schemas.Paper](papers)
open({folder!r} + '/doc.bin', 'wb').write(docs[0].to_bytes())
open({folder!r} + '/docs.bin', 'wb').write(docs.to_bytes())
open({folder!r} + '/batch.bin', 'wb').write(docs.stack().to_bytes())
docs.save_binary({folder!r} + '/docs.protobuf.gz')
"""
SCHEMAS = """
from pathlib import Path
Path(__file__).with_name('imported').touch()
from quire import BaseDocument, DocumentArray
class Author(BaseDocument):
    name: str
class Paper(BaseDocument):
    title: str
    author: Author
    others: DocumentArray[Author] = []
"""


def test_a_module_on_disk_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret_schemas.py").write_text(SCHEMAS)
    subprocess.run([sys.executable, "-c", WRITER.format(folder=str(tmp_path))], check=True)
    (tmp_path / "imported").unlink()
    monkeypatch.syspath_prepend(str(tmp_path))
    document = BaseDocument.from_bytes((tmp_path / "doc.bin").read_bytes())
    arrays = [
        DocumentArray.from_bytes((tmp_path / "docs.bin").read_bytes()),
        DocumentArray.from_bytes((tmp_path / "batch.bin").read_bytes()),
        DocumentArray.load_binary(tmp_path / "docs.protobuf.gz"),
        DocumentArray(DocumentArray.load_binary(tmp_path / "docs.protobuf.gz", streaming=True)),
    ]
    assert document.title == "t"
    assert [[row.author.name for row in array] for array in arrays] == [["n"] * 3] * 4
    assert {row.__quire_name__ for array in arrays for row in array} == {"secret_schemas:Paper"}
    assert not (tmp_path / "imported").exists()
    assert "secret_schemas" not in sys.modules
    # and once it is loaded, all of it is read as what it was
    import secret_schemas  # type: ignore[import-not-found]

    for array in arrays:
        back = DocumentArray.from_bytes(array.to_bytes())
        assert type(back[0]) is secret_schemas.Paper
        assert type(back[0].author) is secret_schemas.Author
    sys.modules.pop("secret_schemas")


def test_dynamic_document_has_its_id() -> None:
    got = BaseDocument.from_bytes(dynamic("a:B", id="x").to_bytes())
    assert got.id == "x"
    got.id = "y"
    assert BaseDocument.from_bytes(got.to_bytes()).id == "y"
    assert BaseDocument.from_bytes(dynamic("a:B").to_bytes()).id is None


def test_a_dynamic_document_without_fields_keeps_its_name() -> None:
    for document in (BaseDocument.from_bytes(dynamic("a:B").to_bytes()), DynamicDocument.model_construct()):
        again = BaseDocument.from_bytes(document.to_bytes())
        assert again.__quire_name__ == document.__quire_name__
        assert again.__pydantic_extra__ == {}


def test_batch_of_documents_of_any_class_round_trips(forget: Any) -> None:
    docs = DocumentArray([Inner(id="1"), Deeper(id="2"), Leaf(id="3", text="x"), BaseDocument(id="4")])
    data = docs.stack().to_bytes()
    assert exact(DocumentArray.from_bytes(data), docs)
    forget(Inner, Deeper)
    got = DocumentArray.from_bytes(data)
    assert [type(doc) for doc in got] == [DynamicDocument, DynamicDocument, Leaf, BaseDocument]
    assert [doc.id for doc in got] == ["1", "2", "3", "4"]
    assert exact(DocumentArray.from_bytes(got.to_bytes(), types=[Inner, Deeper]), docs)


def test_batch_of_dynamic_documents_round_trips() -> None:
    docs = DocumentArray([dynamic("a:B", id="1", x=1), dynamic("a:B", id="2", x=2)])
    got = DocumentArray.from_bytes(docs.stack().to_bytes())
    assert [(doc.id, doc.x) for doc in got] == [("1", 1), ("2", 2)]
    assert [doc.__quire_name__ for doc in got] == ["a:B", "a:B"]


class Trunk(BaseDocument):
    rings: int


def trunks_with_bark() -> bytes:
    class Bark(Trunk):
        color: str

    Bark.__qualname__ = "Bark"
    return DocumentArray[Trunk]([Trunk(rings=1), Bark(rings=2, color="grey")]).to_bytes()


def test_rows_of_an_unloaded_subclass_keep_all_fields() -> None:
    data = trunks_with_bark()
    gc.collect()
    read = DocumentArray.from_bytes(data)
    assert type(read) is DocumentArray
    assert type(read[0]) is Trunk
    assert (read[1].rings, read[1].color) == (2, "grey")

    class Bark(Trunk):
        color: str

    Bark.__qualname__ = "Bark"
    again = DocumentArray[Trunk].from_bytes(read.to_bytes(), types=[Bark])
    assert again == DocumentArray[Trunk]([Trunk(rings=1), Bark(rings=2, color="grey")])
