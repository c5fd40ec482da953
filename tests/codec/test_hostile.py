"""Untrusted bytes: decoders return a value or raise DecodeError, and nothing else."""

from __future__ import annotations

import io
import lzma
import time
from collections.abc import Iterator
from functools import cache
from random import Random
from typing import Any

import numpy as np
import pytest

from quire import BaseDocument, DocumentArray, DocumentBatch
from quire.codec import _compression
from quire.codec._blocks import BATCH, INDEX, PICKLE, encode_stream, pack_segment
from quire.codec._wire import encode_delimited, encode_text, encode_uint
from quire.errors import DecodeError
from tests.codec.hostile import (
    CLASSES,
    DECODERS,
    Book,
    Note,
    Page,
    attempt,
    damage_bytes,
    forged,
    messages,
    packers,
    repair_checksums,
    some_notes,
)

COMPRESSIONS = [
    *("gzip", "bz2", "lzma"),
    pytest.param("zstd", marks=pytest.mark.needs("zstandard")),
    pytest.param("lz4", marks=pytest.mark.needs("lz4")),
]
SECONDS = 5
"""No input may take longer, on a machine that has other things to do."""
_FORGED = {"document": 0, "typed": 0, "array": 1, "typed_array": 2, "batch": 2, "typed_batch": 2}


@cache
def seeds() -> dict[str, list[bytes]]:
    return messages()


def inputs(decoder: str, random: Random) -> Iterator[bytes]:
    """Some hundreds of inputs for a decoder."""
    valid = seeds()[decoder]
    every = [data for samples in seeds().values() for data in samples]
    for _ in range(250):
        yield damage_bytes(random.choice(valid), random, random.choice(every))
    for _ in range(40):
        yield random.randbytes(random.randrange(200))
    for _ in range(100 if decoder in _FORGED else 0):
        yield list(forged(random))[_FORGED[decoder]]
    for _ in range(60 if decoder == "protobuf" else 0):
        yield random.choice(list(forged(random)))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("decoder", DECODERS)
def test_corrupted_data_raises_only_decode_errors(decoder: str, seed: int) -> None:
    for number, data in enumerate(inputs(decoder, Random(f"{decoder} {seed}"))):
        start = time.monotonic()
        try:
            attempt(DECODERS[decoder], data)
        except Exception as error:
            raise AssertionError(f"input {number} of {decoder}, {data.hex()}") from error
        assert time.monotonic() - start < SECONDS, data.hex()


@pytest.mark.parametrize("decoder", DECODERS)
def test_inputs_are_valid_before_they_are_corrupted(decoder: str) -> None:
    if decoder not in ("packed", "protobuf", "base64", "stream", "typed_array"):
        assert all(attempt(DECODERS[decoder], data) for data in seeds()[decoder])


@pytest.mark.parametrize("decoder", ["document", "array", "batch", "stream"])
def test_every_prefix_of_a_message_raises_only_decode_errors(decoder: str) -> None:
    for data in seeds()[decoder][:4]:
        for end in range(0, len(data), max(1, len(data) // 120)):
            attempt(DECODERS[decoder], data[:end])


@pytest.mark.parametrize("compress", COMPRESSIONS)
def test_corrupted_data_in_valid_compression_raises_only_decode_errors(compress: str) -> None:
    pack = packers()[compress]
    random = Random(compress)
    for _ in range(30):
        attempt(DECODERS["packed"], pack(repair_checksums(damage_bytes(random.choice(seeds()["stream"]), random, b""))))
        attempt(DECODERS["packed"], pack(damage_bytes(random.choice(seeds()["document"]), random, b"")))


# --- what was found once


def a_stream(*blocks: tuple[bytes, int, bytes], name: str = "") -> bytes:
    parts = encode_stream(name, "", [(kind, count, [data]) for kind, count, data in blocks], None, checksums=True)
    return b"".join(part for segment in parts for part in segment)


def name_of(cls: type[Any]) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def refused(data: bytes, *classes: Any, **reading: Any) -> None:
    for cls in classes:
        with pytest.raises(DecodeError):
            cls.from_bytes(data, **reading)


def test_stream_is_read_by_the_classes_of_its_documents() -> None:
    page = Page(text="x").to_bytes()
    rows = encode_delimited(3, page)
    read = DocumentArray.from_bytes(a_stream((b"A", 1, rows), name=name_of(Book)))
    assert type(read) is DocumentArray  # of any class, as it is not what was named
    assert type(read[0]) is Page
    twice = encode_text(2, name_of(Book)) + encode_uint(3, 0) + encode_text(2, name_of(Page))
    assert not DocumentArray.from_bytes(twice)


def test_rows_without_a_document_are_rejected() -> None:
    data = (
        b"\x08\x01"
        + encode_text(2, name_of(Note))
        + encode_uint(3, 2)
        + encode_uint(4, 1)
        + encode_delimited(15, b"\x01\x00")
    )
    refused(data, DocumentArray, DocumentArray[Note], DocumentBatch[Note])
    refused(a_stream((BATCH, 2, data)), DocumentArray, DocumentArray[Note], DocumentBatch[Note])


def test_stream_without_a_header_is_rejected() -> None:
    segment = b"".join(pack_segment(INDEX, 0, [b""]))
    refused(segment, DocumentArray, DocumentBatch[Note])
    with pytest.raises(DecodeError):
        list(DocumentArray.load_binary(io.BytesIO(segment), streaming=True))
    with pytest.raises(DecodeError):
        list(DocumentBatch[Note].load_binary(io.BytesIO(segment), streaming=True))


def test_index_with_wrong_counts_is_rejected() -> None:
    good = DocumentArray[Note](some_notes(5)).to_bytes()
    for counts in (b"\xff\xff\xff\xff\xff\xff\xff\xff\x7f", b"\x06", b"\x00"):
        position = int.from_bytes(good[-8:], "little")
        index = encode_delimited(1, (128).to_bytes(1, "little") + b"\x01") + encode_delimited(2, counts)
        altered = good[:position] + b"".join(pack_segment(INDEX, 5, [index])) + good[-16:]
        for rows in (slice(None), slice(None, None, -1), slice(0, 2)):
            try:
                DocumentArray[Note].load_binary(io.BytesIO(altered), rows=rows)
            except DecodeError:
                continue
            assert counts == b"\x00"


def test_pickles_are_rejected_everywhere() -> None:
    import pickle

    data = pickle.dumps(some_notes(1))
    refused(data, BaseDocument, DocumentArray, DocumentBatch[Note])
    refused(a_stream((PICKLE, 1, data)), DocumentArray, DocumentBatch[Note])
    refused(b"\x08\x01" + encode_text(3, "x") + encode_delimited(4, encode_delimited(26, data)), BaseDocument)


def test_pickle_of_another_type_is_rejected() -> None:
    import pickle

    data = a_stream((PICKLE, 1, pickle.dumps([1])))
    refused(data, DocumentArray[Note], DocumentArray, allow_pickle=True)


def test_no_class_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.delitem(sys.modules, "this", raising=False)
    read = BaseDocument.from_bytes(b"\x08\x01" + encode_text(2, "this:Zen"))
    assert "this" not in sys.modules
    assert read.to_bytes() == b"\x08\x01" + encode_text(2, "this:Zen")


def test_many_numbers_of_one_hash_are_rejected_early() -> None:
    prime = (1 << 61) - 1
    parts = [encode_delimited(1, encode_delimited(15, (i * prime).to_bytes(12, "little"))) for i in range(1, 30_000)]
    start = time.monotonic()
    refused(encode_text(3, "x") + encode_delimited(4, encode_delimited(12, b"".join(parts))), BaseDocument)
    assert time.monotonic() - start < SECONDS


def test_overflowing_shapes_are_rejected() -> None:
    flat = encode_delimited(1, encode_text(1, "uint8") + encode_delimited(2, b"\x00"))
    column = encode_text(1, "vector") + encode_delimited(5, flat + encode_uint(2, 1) + encode_uint(3, 2))
    sizes = np.full(255, 1 << 62, "<i8").tobytes()
    head = encode_uint(3, 1) + encode_delimited(5, column) + encode_delimited(15, b"\xff") + encode_delimited(15, sizes)
    refused(head, DocumentBatch[Note], DocumentArray)


def test_valid_data_is_read() -> None:
    for document in [*some_notes(3), Page(text="x")]:
        assert BaseDocument.from_bytes(document.to_bytes(), types=CLASSES) == document


# --- bombs


@pytest.fixture
def few_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the ratio count from the first MiB, so that small bombs do."""
    monkeypatch.setattr(_compression, "UNRATIONED_BYTES", 1 << 20)


@pytest.mark.usefixtures("few_free")
@pytest.mark.parametrize("compress", COMPRESSIONS)
def test_bomb_is_rejected_unless_the_limit_is_raised(compress: str) -> None:
    bomb = packers()[compress](encode_delimited(15, bytes(12 << 20)))
    with pytest.raises(DecodeError, match="max_ratio"):
        BaseDocument.from_bytes(bomb, max_ratio=20)
    with pytest.raises(DecodeError, match="max_bytes"):
        BaseDocument.from_bytes(bomb, max_bytes=1 << 20, max_ratio=1e9)
    assert type(BaseDocument.from_bytes(bomb, max_ratio=1e9, max_expansion=1)) is not None


@pytest.mark.usefixtures("few_free")
@pytest.mark.parametrize("compress", COMPRESSIONS)
def test_bomb_in_a_stream_is_rejected(compress: str) -> None:
    pack = packers()[compress]
    data = DocumentArray[Note]([Note(data=bytes(12 << 20))]).to_bytes()
    bomb = pack(data)
    for file in (io.BytesIO(bomb), Unseekable(bomb)):
        with pytest.raises(DecodeError, match="max_ratio"):
            list(DocumentArray[Note].load_binary(file, streaming=True, max_ratio=20))
    with pytest.raises(DecodeError, match="max_bytes"):
        list(DocumentArray[Note].load_binary(io.BytesIO(bomb), streaming=True, max_bytes=1 << 20))
    assert len(DocumentArray[Note].from_bytes(bomb, max_ratio=1e9)) == 1


class Unseekable(io.BytesIO):
    """Like a pipe."""

    def seekable(self) -> bool:
        return False


def test_dict_larger_than_memory_is_not_created() -> None:
    filters = [{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 30}]
    try:
        packed = lzma.compress(Note().to_bytes(), lzma.FORMAT_XZ, filters=filters)
    except MemoryError:
        return
    attempt(DECODERS["packed"], packed)
