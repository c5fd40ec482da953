"""Bytes that were written once, by each version of the format, are read for ever; today's writer makes the same."""

from __future__ import annotations

import gzip
from typing import Any

import pytest

from quire import BaseDocument, DocumentArray, DocumentBatch
from quire.codec._messages import load_generated_messages
from tests.codec.golden import FOLDER, Paper, contents, papers
from tests.codec.round_trips import exact

NAMES = sorted(path.name for path in FOLDER.iterdir())
WRITTEN = contents()


def test_all_golden_files_exist() -> None:
    assert sorted([*WRITTEN, "stream.gz.bin"]) == NAMES


@pytest.mark.parametrize("name", list(WRITTEN))
def test_writer_reproduces_the_golden_bytes(name: str) -> None:
    assert WRITTEN[name] == (FOLDER / name).read_bytes()


def test_compressed_golden_stream_has_the_same_segments() -> None:
    packed = gzip.decompress((FOLDER / "stream.gz.bin").read_bytes())
    again = gzip.decompress(papers().to_bytes(compress="gzip"))
    assert packed[:64] == again[:64]
    assert len(packed) == len(again)


@pytest.mark.parametrize("name", ["document.bin", "plain.bin"])
def test_golden_documents_are_read(name: str) -> None:
    data = (FOLDER / name).read_bytes()
    expected = papers()[0 if name == "document.bin" else 2]
    for cls in (Paper, BaseDocument):
        assert exact(cls.from_bytes(data), expected)
    message = load_generated_messages().Document.FromString(data)
    assert exact(Paper.from_protobuf(message), expected)
    assert exact(Paper.from_bytes(message.SerializeToString()), expected)


@pytest.mark.parametrize("name", ["array.bin", "batch.bin", "stream.bin", "stream.gz.bin"])
def test_golden_arrays_are_read(name: str) -> None:
    data = (FOLDER / name).read_bytes()
    for cls in (DocumentArray[Paper], DocumentArray):
        assert exact(cls.from_bytes(data), papers())
    for cls in (DocumentBatch[Paper], DocumentBatch):
        assert exact(cls.from_bytes(data).unstack(), papers())
    assert exact(DocumentArray.load_binary(FOLDER / name), papers())


def test_other_golden_files_are_read() -> None:
    assert exact(DocumentArray.from_bytes((FOLDER / "empty.bin").read_bytes()), DocumentArray[Paper]())
    batch: Any = DocumentBatch[Paper].from_bytes((FOLDER / "padded.bin").read_bytes())
    assert batch.identical(papers()[:1].stack(shapes="pad"))


@pytest.mark.parametrize(
    ("kind", "name"), [("Document", "document.bin"), ("Array", "array.bin"), ("Batch", "batch.bin")]
)
def test_generated_classes_read_and_write_the_golden_files(kind: str, name: str) -> None:
    data = (FOLDER / name).read_bytes()
    message = getattr(load_generated_messages(), kind).FromString(data)
    assert len(message.SerializeToString()) == len(data)
    if kind == "Batch":
        assert [column.name for column in message.columns] == list(Paper.model_fields)
        assert message.rows == 3
    if kind == "Document":
        assert message.version == 1
        assert message.type == "tests.codec.golden:Paper"
        assert dict(zip(message.names, message.values, strict=True))["number"].integer == 2**40
