"""The bytes that quire writes by hand are ordinary protobuf: the generated classes read and write them too."""

# ruff: noqa: DTZ001 - datetimes without a zone are values too

from __future__ import annotations

import struct
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import numpy as np
import pytest
from hypothesis import example, given

from quire import BaseDocument, DocumentArray, DocumentBatch
from quire.codec._messages import load_generated_messages
from quire.errors import DecodeError, QuireError
from quire.typing import NdArray, float32
from tests.codec.round_trips import exact, written_whole
from tests.strategies import Branch, Leaf, Node, Seed, Tree, arrays, branches, laws, leaves, nodes, seeds, trees


class Tone(Enum):
    LOW = 1
    HIGH = 2


class Sound(BaseDocument):
    tone: Tone
    tones: list[Tone] = []


class Thing(BaseDocument):
    name: str = ""
    count: int = 0
    value: Any = None
    vector: NdArray[float32, 2] | None = None
    inner: Leaf | None = None


# --- what quire writes, the generated classes read


@given(leaves() | branches() | trees() | nodes() | seeds())
@example(Leaf(text="", weight=struct.unpack("<d", b"\1\0\0\0\0\0\xf8\xff")[0]))
@laws
def test_documents_are_messages(document: Any) -> None:
    message = load_generated_messages().Document.FromString(document.to_bytes())
    assert message.SerializeToString() == document.to_protobuf().SerializeToString()
    assert list(message.names) == [*document.__dict__, *(document.__pydantic_extra__ or {})]
    assert not unknown_fields(message)
    assert written_whole(type(document).from_protobuf(message), document)
    for data in (message.SerializeToString(), message.SerializeToString(deterministic=True)):
        assert written_whole(type(document).from_bytes(data), document)


@given(
    arrays(leaves(), Leaf)
    | arrays(branches(), Branch)
    | arrays(trees(), Tree)
    | arrays(nodes(), Node)
    | arrays(seeds(), Seed)
)
@laws
def test_arrays_and_batches_are_messages(docs: Any) -> None:
    array = docs.to_protobuf()
    assert all(message.names == doc.to_protobuf().names for message, doc in zip(array.documents, docs, strict=True))
    assert written_whole(type(docs).from_bytes(array.SerializeToString()), docs)
    batch = docs.stack(shapes="ragged")
    message = load_generated_messages().Batch.FromString(batch.to_bytes())
    assert not unknown_fields(message)
    assert message.rows == len(docs)
    assert [column.name for column in message.columns] == list(batch.schema.by_name)
    assert written_whole(type(batch).from_bytes(message.SerializeToString()).unstack(), docs)


def unknown_fields(message: Any) -> bool:
    """Whether a message or one inside it has fields that quire.proto does not have; padding is such a field."""
    copy = type(message)()
    copy.CopyFrom(message)
    copy.DiscardUnknownFields()
    return bool(copy.ByteSize() != message.ByteSize())


def test_buffers_are_aligned_by_a_field_that_readers_skip() -> None:
    docs = DocumentArray[Thing]([Thing(value=np.arange(1000.0)), Thing(value=np.arange(2000, dtype=np.int16))])
    for value in (docs[0], docs, docs.stack()):
        message = value.to_protobuf()
        assert message.buffers
        assert unknown_fields(message)
        assert exact_any(type(value).from_protobuf(message), value)
        message.DiscardUnknownFields()
        assert exact_any(type(value).from_protobuf(message), value)
    data = docs[0].to_bytes()
    assert data.index(np.arange(1000.0).tobytes()) % 64 == 0


def exact_any(a: Any, b: Any) -> bool:
    return exact(a.unstack(), b.unstack()) if isinstance(a, DocumentBatch) else exact(a, b)


# --- what another language writes, quire reads


def test_document_message_built_field_by_field_is_read() -> None:
    pb = load_generated_messages()
    message = pb.Document(names=["name", "count", "vector"])
    message.values.add().text = "x"
    message.values.add().integer = -5
    tensor = message.values.add().tensor
    tensor.dtype, tensor.framework = "float32", "numpy"
    tensor.shape.append(2)
    tensor.data = np.array([1, 2], "<f4").tobytes()
    got = Thing.from_protobuf(message)
    assert (got.name, got.count, got.vector.tolist()) == ("x", -5, [1.0, 2.0])
    assert Thing.from_bytes(message.SerializeToString()) == got
    message.type = "tests.nowhere:Missing"
    assert Thing.from_protobuf(message).count == -5


VALUES: list[tuple[dict[str, Any], Any]] = [
    ({"null": 0}, None),
    ({"boolean": True}, True),
    ({"boolean": False}, False),
    ({"integer": 0}, 0),
    ({"integer": -(2**63)}, -(2**63)),
    ({"integer": 2**63 - 1}, 2**63 - 1),
    ({"number": 0.0}, 0.0),
    ({"number": -1.5}, -1.5),
    ({"text": ""}, ""),
    ({"blob": b""}, b""),
    ({"list": {}}, []),
    ({"list": {"values": [{"integer": 1}, {"null": 0}]}}, [1, None]),
    ({"tuple": {"values": [{"text": "a"}]}}, ("a",)),
    ({"set": {"values": [{"integer": 1}]}}, {1}),
    ({"frozen_set": {"values": [{"integer": 1}]}}, frozenset({1})),
    ({"dict": {"keys": [{"integer": 1}], "values": [{"text": "a"}]}}, {1: "a"}),
    ({"dict": {}}, {}),
    ({"big_integer": (2**70).to_bytes(9, "little", signed=True)}, 2**70),
    ({"big_integer": b""}, 0),
    ({"complex": {"real": 1.0}}, 1 + 0j),
    ({"complex": {}}, 0j),
    ({"datetime": {"text": "2024-01-02T03:04:05"}}, datetime(2024, 1, 2, 3, 4, 5)),
    ({"datetime": {"text": "2024-01-02T03:04:05+00:00"}}, datetime(2024, 1, 2, 3, 4, 5, tzinfo=timezone.utc)),
    (
        {"datetime": {"text": "2024-10-27T02:30:00", "zone": "Europe/Paris", "fold": True}},
        datetime(2024, 10, 27, 2, 30, tzinfo=ZoneInfo("Europe/Paris"), fold=1),
    ),
    ({"datetime": {"text": "2024-01-02T03:04:05.123Z"}}, datetime(2024, 1, 2, 3, 4, 5, 123000, timezone.utc)),
    ({"date": "2024-02-29"}, date(2024, 2, 29)),
    ({"time": {"text": "01:02:03.000004"}}, time(1, 2, 3, 4)),
    ({"timedelta": {}}, timedelta()),
    ({"timedelta": {"days": -1, "microseconds": 1}}, timedelta(days=-1, microseconds=1)),
    ({"uuid": bytes(16)}, UUID(int=0)),
    ({"decimal": "1.10"}, Decimal("1.10")),
    ({"path": "a/b"}, Path("a/b")),
    ({"tensor": {"dtype": "int16", "shape": [0, 2]}}, np.zeros((0, 2), np.int16)),
    ({"tensor": {"dtype": "bool", "data": b"\x01"}}, np.array(True)),
    ({"tensor": {"dtype": "string", "shape": [1], "strings": [b"\xff"]}}, np.array([b"\xff"], object)),
    ({"tensor": {"dtype": "object", "shape": [1], "strings": ["ä".encode()], "text": True}}, np.array(["ä"], object)),
    ({"scalar": {"dtype": "float16", "data": np.float16(1.5).tobytes()}}, np.float16(1.5)),
]


@pytest.mark.parametrize(("content", "expected"), VALUES, ids=lambda value: str(value)[:60])
def test_value_message_built_field_by_field_is_read(content: dict[str, Any], expected: Any) -> None:
    message = load_generated_messages().Document(names=["value"], values=[content])
    assert exact(Thing.from_protobuf(message).value, expected)
    assert exact(Thing.from_bytes(message.SerializeToString()).value, expected)


def test_enum_message_built_field_by_field_is_read() -> None:
    pb = load_generated_messages()
    member = {"enum": {"name": "HIGH"}}
    by_value = {"enum": {"value": {"integer": 1}}}
    message = pb.Document(
        names=["tone", "tones"], values=[member, {"list": {"values": [{"enum": {"value": {"integer": 2}}}]}}]
    )
    assert Sound.from_protobuf(message).tone is Tone.HIGH
    assert Sound.from_protobuf(message).tones == [Tone.HIGH]
    assert Sound.from_protobuf(pb.Document(names=["tone"], values=[by_value])).tone is Tone.LOW


def test_nested_messages_built_field_by_field_are_read() -> None:
    pb = load_generated_messages()
    leaf = {"names": ["text"], "values": [{"text": "a"}]}
    message = pb.Document(names=["leaf", "leaves"], values=[{"document": leaf}, {"array": {"documents": [leaf, leaf]}}])
    got = Branch.from_protobuf(message)
    assert (got.leaf.text, got.leaves.text) == ("a", ["a", "a"])
    array = pb.Array(documents=[leaf, leaf])
    assert DocumentArray[Leaf].from_protobuf(array).text == ["a", "a"]
    assert DocumentArray[Leaf].from_bytes(array.SerializeToString()).text == ["a", "a"]
    assert DocumentBatch[Leaf].from_protobuf(array).text == ["a", "a"]


def test_batch_message_built_field_by_field_is_read() -> None:
    pb = load_generated_messages()
    message = pb.Batch(
        rows=2,
        columns=[
            {"name": "text", "text": {"data": 1, "offsets": 2}},
            {"name": "number", "scalars": {"dtype": "int64", "shape": [2], "framework": "numpy", "buffer": 3}},
            {
                "name": "weight",
                "validity": 4,
                "scalars": {"dtype": "float64", "shape": [2], "data": np.array([0.5, 0]).tobytes()},
            },
            {"name": "flag", "objects": {"values": [{"boolean": True}, {"boolean": False}]}},
            {
                "name": "vector",
                "tensor": {"dtype": "float32", "shape": [2, 3], "data": np.arange(6, dtype="<f4").tobytes()},
            },
        ],
        buffers=["aä".encode(), np.array([0, 1, 3], "<i8").tobytes(), np.array([1, 2], "<i8").tobytes(), b"\x01\x00"],
    )
    for got in (
        DocumentArray[Leaf].from_protobuf(message),
        DocumentBatch[Leaf].from_protobuf(message).unstack(),
        DocumentArray[Leaf].from_bytes(message.SerializeToString()),
    ):
        assert got.text == ["a", "ä"]
        assert got.number == [1, 2]
        assert [doc.weight for doc in got] == [0.5, None]
        assert [doc.flag for doc in got] == [True, False]
        assert got[1].vector.tolist() == [3, 4, 5]
        assert len({doc.id for doc in got}) == 2


def test_empty_messages_are_read() -> None:
    pb = load_generated_messages()
    assert len(DocumentArray[Leaf].from_protobuf(pb.Array())) == 0
    assert len(DocumentArray[Leaf].from_protobuf(pb.Batch())) == 0
    assert len(DocumentBatch[Leaf].from_protobuf(pb.Batch())) == 0
    assert Thing.from_protobuf(pb.Document()).count == 0


# --- what a later version adds, readers skip


def with_field(data: bytes) -> bytes:
    """A message with fields that this version does not know: a number, eight bytes, four bytes, a text."""
    return data + b"\xa0\x06\x05" + b"\xa9\x06" + bytes(8) + b"\xb5\x06" + bytes(4) + b"\xba\x06\x02hi"


def test_unknown_fields_are_skipped_at_the_top() -> None:
    thing = Thing(name="a", value=[1, np.ones(3)], vector=[1, 2], inner=Leaf(text="b"))
    docs = DocumentArray[Thing]([thing, thing])
    assert exact(Thing.from_bytes(with_field(thing.to_bytes())), thing)
    assert exact(DocumentArray[Thing].from_bytes(with_field(docs.to_protobuf().SerializeToString())), docs)
    assert exact(DocumentBatch[Thing].from_bytes(with_field(docs.stack().to_bytes())).unstack(), docs)


def _extended(message: Any) -> Any:
    """The message with unknown fields in it and in every message inside, but for values, which have one field."""
    for field, content in message.ListFields():
        if field.message_type is None:
            continue
        for part in content if hasattr(content, "append") or hasattr(content, "add") else [content]:
            part.CopyFrom(_extended(part))
    if message.DESCRIPTOR.name == "Value":
        return message
    return type(message).FromString(with_field(message.SerializeToString()))


@given(leaves() | branches() | trees() | nodes())
@laws
def test_unknown_fields_are_skipped_everywhere(document: Any) -> None:
    docs = DocumentArray[type(document)]([document, document])
    for source, message in (
        (document, document.to_protobuf()),
        (docs, docs.to_protobuf()),
        (docs, docs.stack(shapes="ragged").to_protobuf()),
    ):
        assert written_whole(type(source).from_protobuf(_extended(message)), source)


def test_unknown_kind_of_value_raises_an_error_with_the_field() -> None:
    message = load_generated_messages().Document(names=["value"])
    data = message.SerializeToString() + b"\x22\x03\xd8\x01\x05"  # values: field 27 of Value, a number
    with pytest.raises(DecodeError, match=r"Thing\.value: .*this version does not know"):
        Thing.from_bytes(data)


# --- messages of another kind


def test_other_messages_are_rejected() -> None:
    pb = load_generated_messages()
    for target, message in (
        (Leaf, pb.Array()),
        (DocumentArray[Leaf], pb.Document()),
        (DocumentBatch[Leaf], pb.Tensor()),
        (Leaf, object()),
        (Leaf, None),
    ):
        with pytest.raises(DecodeError, match="expected a message quire.v1"):
            target.from_protobuf(message)


def test_document_too_deep_for_protobuf_raises_an_error_with_advice() -> None:
    node = Node()
    for _ in range(40):
        node = Node(parent=node)
    assert exact(Node.from_bytes(node.to_bytes()), node)
    try:
        message = node.to_protobuf()
    except QuireError as error:
        assert "to_bytes" in str(error)
    else:
        assert exact(Node.from_protobuf(message), node)
