"""The stream of blocks: its version, its index, and what is read when either is damaged."""

from __future__ import annotations

import io

import pytest

from quire import BaseDocument, DocumentArray
from quire.codec._blocks import read_index
from quire.codec._context import ReadOptions
from quire.errors import DecodeError
from tests.codec.hostile import repaired


class Line(BaseDocument):
    number: int


def lines(count: int = 5) -> DocumentArray[Line]:
    return DocumentArray[Line](Line(number=number) for number in range(count))


def with_version(version: int) -> bytes:
    """A stream whose header states another version, with right checksums."""
    data = bytearray(lines().to_bytes())
    assert data[64:66] == b"\x08\x01"
    data[65] = version
    return repaired(bytes(data))


def test_the_version_of_a_stream_is_checked() -> None:
    for version in (0, 1):
        assert DocumentArray[Line].from_bytes(with_version(version)).number == list(range(5))
    for version in (2, 3, 100):
        with pytest.raises(DecodeError, match=rf"version {version} of the format, this quire reads up to 1"):
            DocumentArray[Line].from_bytes(with_version(version))
        with pytest.raises(DecodeError, match=rf"version {version} of the format"):
            list(DocumentArray[Line].load_binary(io.BytesIO(with_version(version)), streaming=True))


def test_the_index_knows_where_every_block_begins() -> None:
    data = lines(7).to_bytes()
    index = read_index(io.BytesIO(data), ReadOptions())
    assert index is not None
    assert sum(index.counts) == 7
    assert index.offsets == sorted(index.offsets)
    assert all(data[offset : offset + 8] == data[:8] for offset in (*index.offsets, index.end))
    pieces = list(index.pieces(io.BytesIO(data)))
    assert [number for number, _, _ in pieces] == list(range(len(index.offsets) + 1))
    assert b"".join(piece for _, _, piece in pieces) == data[: index.end]


def test_the_index_is_found_behind_other_data_and_the_file_stays_where_it_was() -> None:
    file = io.BytesIO(b"before" + lines().to_bytes())
    file.seek(6)
    index = read_index(file, ReadOptions())
    assert index is not None
    assert index.base == 6
    assert file.tell() == 6


@pytest.mark.parametrize("cut", [1, 8, 16, 17, 64, 100])
def test_a_stream_that_was_cut_has_no_index_and_gives_what_is_whole(cut: int) -> None:
    data = lines().to_bytes()[:-cut]
    file = io.BytesIO(data)
    assert read_index(file, ReadOptions()) is None
    assert file.tell() == 0
    stream = DocumentArray[Line].load_binary(file, streaming=True)
    assert [next(stream).number for _ in range(5)] == list(range(5))


def test_every_flipped_bit_of_a_head_is_noticed() -> None:
    data = lines().to_bytes()
    for position in range(64):
        damaged = bytearray(data)
        damaged[position] ^= 1
        with pytest.raises(DecodeError):
            DocumentArray[Line].from_bytes(bytes(damaged))
