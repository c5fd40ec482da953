"""Bit rot is detected when a row is read: checksums of format 2, and flags of what was verified."""

from __future__ import annotations

import ctypes
import json
import mmap
import multiprocessing
import os
import pickle
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire import BaseDocument, DocumentArray
from quire._lowlevel import addresses
from quire.data import StreamingDataset
from quire.errors import DecodeError, EncodeError, OptionError, ShardError, StorageError
from quire.files import open_folder
from quire.files._folder import LocalFolder
from quire.storage import (
    ReadOptions,
    Shard,
    StoredDataset,
    _block_table,
    _row_locations,
    _row_reader,
    _tensor_codecs,
    column_statistics,
    open_dataset,
    write_dataset,
)
from quire.storage._arrow_codec import BinaryCodec
from quire.storage._block_table import (
    _TRAILER,
    BlockTable,
    checksum,
    find_table,
    parse_table,
    read_footer_blocks,
    read_from,
    read_message_layout,
)
from quire.storage._manifest import decode_line, encode_line
from quire.storage._pages import Pages
from quire.storage._shard_reader import read_table
from quire.storage._verification import BlockCheck
from quire.typing import NdArray, uint8
from tests.codec.round_trips import exact
from tests.storage import bitrot, golden

pytestmark = pytest.mark.needs("pyarrow")


class Row(BaseDocument):
    n: int
    s: str


class Picture(BaseDocument):
    pixels: NdArray[uint8, 3, 8, 8]
    label: int


class Item(BaseDocument):
    picture: Picture
    label: int
    note: str | None = None


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path_factory.mktemp("cache")))


def rows(count: int, start: int = 0) -> list[Row]:
    return [Row(n=1000 + k, s="SSSSSS") for k in range(start, start + count)]


def items(count: int) -> list[Item]:
    pixels = [np.full((3, 8, 8), 7 + k, np.uint8) for k in range(count)]
    return [
        Item(picture=Picture(pixels=pixels[k], label=k), label=k, note=None if k % 2 else "x") for k in range(count)
    ]


def shard_files(folder: Path) -> list[Path]:
    return sorted([*folder.glob("*.arrow"), *folder.glob("*.parquet")])


def flip(file: Path, content: bytes, mask: int = 0x80) -> None:
    """Flip a bit of the first byte of this content."""
    place = file.read_bytes().find(content)
    assert place >= 0
    bitrot.flip_byte(file, place, mask)


def table_of(folder: Path) -> tuple[Path, BlockTable]:
    """Return the first shard, and its block table."""
    shard = open_dataset(folder).shards[0]
    table = read_table(open_folder(folder), shard)
    assert table is not None
    return folder / shard.name, table


# --- damage


@pytest.mark.parametrize("content", [(1010).to_bytes(8, "little"), b"SSSSSS"], ids=["number", "text"])
@pytest.mark.parametrize("on_error", ["raise", "skip", "replace"])
def test_flipped_bit_in_a_value_is_a_shard_error(tmp_path: Path, content: bytes, on_error: Any) -> None:
    write_dataset(rows(50), tmp_path, document_type=Row, format="arrow")
    write_dataset(rows(50, 50), tmp_path, document_type=Row, format="arrow", mode="append")
    file = shard_files(tmp_path)[0]
    flip(file, content)
    for read in (lambda: open_dataset(tmp_path, Row)[10], lambda: open_dataset(tmp_path, Row).read()):
        with pytest.raises(ShardError, match=f"{file.name}.*checksum"):
            read()
    stream = StreamingDataset[Row](tmp_path, 8, on_error=on_error, framework="numpy")
    if on_error == "raise":
        with pytest.raises(ShardError, match=file.name):
            list(stream)
        return
    pairs = [(int(row.n), row.s) for batch in stream for row in batch.unstack()]
    assert set(pairs) == {(1000 + k, "SSSSSS") for k in range(50, 100)}
    assert len(pairs) == (50 if on_error == "skip" else 100)
    [error] = stream.errors
    assert file.name in error


@pytest.mark.parametrize("kind", ["arrow", "parquet"])
def test_table_and_its_regions_cover_every_byte_of_a_shard(tmp_path: Path, kind: Any) -> None:
    write_dataset(items(30), tmp_path, format=kind, group_bytes=2000)
    [shard] = open_dataset(tmp_path, Item).shards
    file, table = table_of(tmp_path)
    assert shard.table is not None
    regions = sorted([*table.regions[:, :2].tolist(), list(shard.table)])
    end = 0
    for offset, size in regions:
        assert offset == end
        end = offset + size
    assert end == table.file_bytes == file.stat().st_size
    assert sum(table.rows) == 30
    assert len(table.blocks) == shard.blocks > 2
    for _, offset, size, metadata in table.blocks.tolist():
        own = table.columns[(table.columns[:, :, 0] >= offset) & (table.columns[:, :, 0] < offset + size)]
        assert metadata + int(own[:, 1].sum()) == size


@pytest.mark.parametrize("kind", ["arrow", "parquet"])
def test_damage_in_every_part_of_a_shard_is_detected(tmp_path: Path, kind: Any) -> None:
    write_dataset(items(30), tmp_path, format=kind, group_bytes=2000)
    file, table = table_of(tmp_path)
    [shard] = open_dataset(tmp_path, Item).shards
    assert shard.table is not None
    places = [offset + size // 2 for offset, size, _ in table.regions.tolist()]
    for place in [*places, shard.table[0] + 40, sum(shard.table) - 1]:
        bitrot.flip_byte(file, place, 1)
        with pytest.raises(ShardError, match=file.name):
            open_dataset(tmp_path, Item).read()
        with pytest.raises(ShardError, match=file.name):
            open_dataset(tmp_path, Item).verify()
        bitrot.flip_byte(file, place, 1)
    assert len(open_dataset(tmp_path, Item).read()) == 30


@pytest.mark.parametrize("kind", ["arrow", "parquet"])
def test_reading_one_column_ignores_damage_in_another(tmp_path: Path, kind: Any) -> None:
    write_dataset(items(30), tmp_path, format=kind, group_bytes=2000)
    file, table = table_of(tmp_path)
    column = table.names.index("picture.pixels")
    offset, size = table.columns[1, column].tolist()
    bitrot.flip_byte(file, offset + size // 2, 0x10)
    labels = open_dataset(tmp_path, Item, columns=["label", "picture.label"])
    assert labels.read().label.tolist() == list(range(30))
    assert labels[::-1].picture.label.tolist() == list(range(30))[::-1]
    assert len(open_dataset(tmp_path, Item, columns=["label"], where={"label": {"$gte": 20}})) == 10
    assert column_statistics(open_dataset(tmp_path, Item, columns=["label"]))["label"].maximum == 29
    damaged = open_dataset(tmp_path, Item)
    assert damaged.null_count("label") == 0
    with pytest.raises(ShardError, match=f"{file.name}.*'picture.pixels' in block 1"):
        damaged.read()
    if kind == "arrow":  # Parquet is converted as a whole to pick rows
        assert damaged[0].label == 0
        with pytest.raises(ShardError, match="block 1"):
            damaged[table.rows[0]]


def test_blocks_are_verified_once(tmp_path: Path) -> None:
    write_dataset(rows(50), tmp_path, document_type=Row, format="arrow")
    [file] = shard_files(tmp_path)
    first, always = open_dataset(tmp_path, Row), open_dataset(tmp_path, Row, verify="always")
    assert first[10].n == always[10].n == 1010
    flip(file, (1010).to_bytes(8, "little"))
    assert first[10].n == 1010 ^ 0x80
    for dataset in (always, open_dataset(tmp_path, Row)):
        with pytest.raises(ShardError):
            dataset[10]
    assert open_dataset(tmp_path, Row, verify="never")[10].n == 1010 ^ 0x80
    assert StreamingDataset[Row](tmp_path, 50, verify="never", shuffle=False)[10].n == 1010 ^ 0x80


def test_verify_is_an_option_of_everything_that_opens_a_dataset(tmp_path: Path) -> None:
    write_dataset(rows(5), tmp_path, document_type=Row)
    assert StoredDataset[Row](tmp_path, verify="never").options.verify == "never"
    dataset = open_dataset(tmp_path, Row, options=ReadOptions(verify="always"))
    assert dataset._row_reader.shard_reader.verify == "always"
    assert StreamingDataset[Row](tmp_path, 2, verify="always").stored.options.verify == "always"
    assert StreamingDataset[Row](tmp_path, 2).stored.options.verify == "first_touch"
    wrong: Any = "sometimes"
    for call in (
        lambda: open_dataset(tmp_path, Row, verify=wrong),
        lambda: StreamingDataset[Row](tmp_path, 2, verify=wrong),
    ):
        with pytest.raises(OptionError, match="'first_touch', 'always' or 'never'"):
            call()
    with pytest.raises(OptionError, match="open already"):
        StreamingDataset[Row](open_dataset(tmp_path, Row), 2, verify="never")


def test_opening_a_dataset_reads_no_block_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_dataset(rows(500), tmp_path, document_type=Row, format="arrow", group_bytes=512, shard_bytes=1024)
    names: list[str] = []
    for method in ("read", "read_range"):
        plain: Callable[..., bytes] = getattr(LocalFolder, method)

        def spy(self: Any, name: str, *args: int, plain: Callable[..., bytes] = plain) -> bytes:
            names.append(name)
            return plain(self, name, *args)

        monkeypatch.setattr(LocalFolder, method, spy)
    dataset = open_dataset(tmp_path, Row)
    assert len(dataset.shards) > 3
    assert [name for name in names if name.endswith(".arrow")] == []


@pytest.mark.parametrize("kind", ["arrow", "parquet"])
def test_single_file_is_verified_by_its_own_table(tmp_path: Path, kind: str) -> None:
    file = tmp_path / "rows.parquet"
    DocumentArray[Row](rows(20)).save_parquet(file)
    if kind == "arrow":
        write_dataset(rows(20), tmp_path / "d", document_type=Row, format="arrow")
        file = tmp_path / "rows.arrow"
        shard_files(tmp_path / "d")[0].rename(file)
    assert open_dataset(file, Row)[3].n == 1003
    content = file.read_bytes()
    place = find_table(read_from(memoryview(content)), len(content), kind)
    assert place is not None
    table = parse_table(memoryview(content)[place[0] : sum(place)])
    offset, size = table.columns[0, table.names.index("n")].tolist()
    bitrot.flip_byte(file, offset + size - 9, 1)
    with pytest.raises(ShardError, match=file.name):
        open_dataset(file, Row).read()


# --- pieces of large columns


class Sample(BaseDocument):
    number: int
    picture: Picture
    blob: bytes
    text: str
    ragged: NdArray[uint8]
    flag: bool
    maybe: NdArray[uint8, 40] | None
    parts: DocumentArray[Picture]


def sample(k: int) -> Sample:
    pixels = np.full((3, 8, 8), k, np.uint8)
    parts = DocumentArray[Picture]([Picture(id=f"{k}/{n}", pixels=pixels, label=k) for n in range(k % 3)])
    return Sample(
        id=f"sample number {k}",
        number=k,
        picture=Picture(id=f"{k}", pixels=pixels, label=k),
        blob=bytes([k]) * (k * 37 % 300),
        text=f"{k} é" * (k % 50),
        ragged=np.full(k * 11 % 200, k, np.uint8),
        flag=k % 2 == 0,
        maybe=None if k % 5 == 0 else np.full(40, k, np.uint8),
        parts=parts,
    )


@pytest.fixture
def samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A dataset of 200 rows in two blocks, whose columns have pieces of about 256 bytes."""
    monkeypatch.setattr(_block_table, "PIECE", 256)
    write_dataset([sample(k) for k in range(200)], tmp_path / "samples", format="arrow", group_bytes=100_000)
    return tmp_path / "samples"


SPLIT = [
    *("id", "number", "picture.pixels", "picture.label", "blob", "text", "ragged.data", "maybe"),
    *("parts.item.pixels", "parts.item.label"),
]


def pieces_of(table: BlockTable, block: int, name: str) -> list[tuple[int, int]]:
    """Return the offset and size of the regions of a column of a block."""
    offset, size = table.columns[block, table.names.index(name)].tolist()
    return [(at, length) for at, length, _ in table.regions.tolist() if offset <= at < offset + size]


def test_large_columns_are_split_into_pieces_of_whole_rows(samples: Path) -> None:
    _, table = table_of(samples)
    assert len(table.blocks) == 2
    for name in SPLIT:
        assert len(pieces_of(table, 0, name)) > 2, name
    assert len(pieces_of(table, 0, "flag")) == 1
    sizes = {name: [size for _, size in pieces_of(table, 0, name)][:-1] for name in SPLIT}
    assert set(sizes["picture.pixels"]) == {192}
    assert set(sizes["number"]) == {256}
    assert set(sizes["maybe"][1:]) == {240}  # after its validity
    assert set(sizes["blob"][1:]) == {256}  # after its offsets


@pytest.mark.parametrize("name", SPLIT)
def test_damaged_piece_is_detected_only_by_its_rows(samples: Path, name: str) -> None:
    file, table = table_of(samples)
    expected = [sample(k) for k in range(200)]
    pieces = pieces_of(table, 1, name)
    first_row = table.rows[0]
    for offset, size in (pieces[0], pieces[len(pieces) // 2], pieces[-2]):
        bitrot.flip_byte(file, offset + size // 2, 1)
        dataset = open_dataset(samples, Sample)
        bad = set()
        for k in range(first_row, 200):
            try:
                document = dataset[k]
            except ShardError as error:
                assert file.name in str(error)
                assert f"{name!r} in block 1" in str(error)
                bad.add(k)
            else:
                assert exact(document, expected[k])
        assert bad
        if offset != pieces[0][0]:  # validity and offsets are needed by all rows
            assert len(bad) < 40
        with pytest.raises(ShardError, match=file.name):
            dataset[:]
        assert exact(dataset[3], expected[3])  # which is in the other block
        bitrot.flip_byte(file, offset + size // 2, 1)
    assert len(open_dataset(samples, Sample)[:]) == 200


def record_checks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that receives an element for each piece, and each row that is a piece, when it is verified."""
    checked: list[int] = []
    check_piece = BlockCheck.check_piece
    memory = type(addresses.open_memory())
    fetch_verified = memory.fetch_verified

    def check_and_record(self: BlockCheck, flag: int) -> None:
        checked.append(flag)
        check_piece(self, flag)

    def fetch_and_record(self: Any, places: Any, width: int, checksums: Any, digest: Any) -> Any:
        checked.extend(value for value in checksums if value is not None)
        return fetch_verified(self, places, width, checksums, digest)

    monkeypatch.setattr(BlockCheck, "check_piece", check_and_record)
    monkeypatch.setattr(memory, "fetch_verified", fetch_and_record)
    return checked


def test_reading_a_few_rows_verifies_a_few_pieces_once(samples: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = record_checks(monkeypatch)
    labels = open_dataset(samples, Sample, columns=["number", "picture.label"])
    assert labels[[7, 8]].picture.label.tolist() == [7, 8]
    assert len(checked) == 2  # a piece of each of the two columns
    assert labels[[7, 8]].number.tolist() == [7, 8]
    assert len(checked) == 2
    whole = open_dataset(samples, Sample)
    assert whole.read().number.tolist() == whole[:].number.tolist() == list(range(200))
    every = int(whole._row_reader.verified.pieces.sum()) - 1
    assert len(checked) == 2 + every
    assert whole[::-1].number.tolist() == list(range(200))[::-1]
    assert len(checked) == 2 + every
    assert whole._row_reader._addresses._passed_runs == len(whole._row_reader._addresses._runs) > 0
    always = open_dataset(samples, Sample, columns=["number"], verify="always")
    for count in (1, 2, 3):
        assert always[[7, 7, 8]].number.tolist() == [7, 7, 8]
        assert len(checked) == 2 + every + count


class Wide(BaseDocument):
    """A document with a wide row, whose bytes are no multiple of Arrow's padding."""

    pixels: NdArray[uint8, 8195]
    label: int


@pytest.fixture
def wide_rows(tmp_path: Path) -> Path:
    """A dataset of 24 rows in three blocks."""
    documents = [Wide(pixels=np.full(8195, k, np.uint8), label=k) for k in range(24)]
    write_dataset(documents, tmp_path / "wide", format="arrow", group_bytes=8 * 8300)
    return tmp_path / "wide"


def test_wide_rows_are_pieces_of_one_row(wide_rows: Path) -> None:
    _, table = table_of(wide_rows)
    assert len(table.blocks) > 1
    for block, rows in enumerate(table.rows):
        sizes = [size for _, size in pieces_of(table, block, "pixels")]
        assert len(sizes) == rows
        assert set(sizes[:-1]) == {8195}
        assert 8195 < sizes[-1] < 8195 + 64  # with its padding


@pytest.mark.parametrize("verify", ["first_touch", "always"])
def test_damaged_wide_row_is_detected_when_it_is_copied(wide_rows: Path, verify: Any) -> None:
    file, table = table_of(wide_rows)
    last = table.rows[0] - 1
    for row in (0, 3, last):  # the last row of a block shares its checksum with the padding
        offset, size = pieces_of(table, 0, "pixels")[row]
        for place in (0, 8194, size - 1):
            bitrot.flip_byte(file, offset + place, 1)
            dataset = open_dataset(wide_rows, Wide, verify=verify)
            others = [k for k in range(24) if k != row]
            assert dataset[others].pixels[:, 0].tolist() == others
            for rows in ([row], [5, row, 2], list(range(24))):
                with pytest.raises(ShardError, match=r"'pixels' in block 0 differs"):
                    dataset[rows]
            stream = StreamingDataset[Wide](wide_rows, 4, shuffle=False, verify=verify)
            with pytest.raises(ShardError, match=r"'pixels' in block 0 differs"):
                list(stream)
            bitrot.flip_byte(file, offset + place, 1)
    assert len(list(StreamingDataset[Wide](wide_rows, 4, verify=verify))) == 6


def test_wide_rows_are_verified_once(wide_rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = record_checks(monkeypatch)
    dataset = open_dataset(wide_rows, Wide)
    assert dataset[[3, 7]].label.tolist() == [3, 7]
    assert len(checked) == 2
    assert dataset[[7, 3, 4]].label.tolist() == [7, 3, 4]
    assert len(checked) == 3
    for _ in range(2):
        assert dataset[:].pixels[:, 8194].tolist() == list(range(24))
        assert len(checked) == 24
    assert dataset._row_reader._addresses._passed_runs == len(dataset._row_reader._addresses._runs) > 0
    always = open_dataset(wide_rows, Wide, verify="always")
    for count in (1, 2):
        assert always[[3, 7]].label.tolist() == [3, 7]
        assert len(checked) == 24 + 2 * count


def test_verification_requests_all_due_columns_at_once(wide_rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[tuple[int, int]]] = []
    monkeypatch.setattr(_row_locations, "read_ranges_ahead", lambda ranges: asked.append(list(ranges)))
    _, table = table_of(wide_rows)
    labels = table.columns[:, table.names.index("label"), 1].tolist()
    dataset = open_dataset(wide_rows, Wide, columns=["label"])
    for _ in range(2):
        assert dataset[:].label.tolist() == list(range(24))
    assert [[size for _, size in ranges] for ranges in asked] == [labels]


def test_worker_processes_share_the_pieces_that_were_verified(samples: Path) -> None:
    dataset = open_dataset(samples, Sample)
    child = os.fork()
    if child == 0:
        dataset[[5, 150]]
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    shared = int(dataset._row_reader.verified.pieces.sum())
    assert shared > 2 * 5
    assert int(pickle.loads(pickle.dumps(dataset))._row_reader.verified.pieces.sum()) == shared
    file, table = table_of(samples)
    offset, _ = table.columns[0, table.names.index("number")].tolist()
    bitrot.flip_byte(file, offset + 5 * 8, 1)
    assert dataset[5].number == 4  # the worker verified it: nobody looks again
    with pytest.raises(ShardError):
        open_dataset(samples, Sample)[5]


def test_pieces_are_requested_at_once(samples: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(
        _row_locations, "read_ranges_ahead", lambda ranges: asked.extend([len(ranges)] if ranges else [])
    )
    monkeypatch.setattr(_row_locations, "read_ahead", lambda starts, _: asked.append(len(starts)))
    monkeypatch.setattr(_row_reader, "_LARGE", 1)
    monkeypatch.setattr(_tensor_codecs, "_LARGE", 1)
    dataset = open_dataset(samples, Sample, columns=["maybe", "number"])
    for _ in range(2):
        assert dataset[[3, 50, 150]].number.tolist() == [3, 50, 150]
        assert asked == [3, 3]  # the pieces of each column
    dataset._row_reader.read_ahead(np.array([0]), np.array([200]))
    assert len(dataset[:]) == 200
    assert asked[:2] == [3, 3]
    assert len(asked) == 3  # the tensors were asked for already, by the reader of all rows


def test_preview_of_large_values_verifies_what_it_reads(samples: Path) -> None:
    file, table = table_of(samples)
    pages = Pages(open_dataset(samples, Sample))
    heads = pages.preview(np.arange(200), head=10)
    assert heads["blob",][8].content == bytes([8]) * 10
    offset, size = pieces_of(table, 0, "blob")[3]
    bitrot.flip_byte(file, offset + size // 2, 1)
    assert pages.preview(np.arange(200), head=10).keys() == heads.keys()
    with pytest.raises(ShardError, match="'blob' in block 0"):
        Pages(open_dataset(samples, Sample)).preview(np.arange(200), head=10)


def test_opening_a_shard_reads_only_its_metadata(tmp_path: Path) -> None:
    class Block(BaseDocument):
        data: NdArray[uint8, 1 << 20]

    blocks = [Block(data=np.zeros(1 << 20, np.uint8)) for _ in range(16)]
    write_dataset(blocks, tmp_path, document_type=Block, format="arrow", group_bytes=1 << 20)
    [file] = shard_files(tmp_path)
    with file.open("rb") as opened:
        content = addresses.map_file(opened)
        for _ in range(50):  # pages that are being written stay in memory for a moment
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            if resident_pages(content) == 0:
                break
            time.sleep(0.1)
        else:
            return  # tmpfs keeps every page in memory, so that there is nothing to read from a disk
    dataset = open_dataset(tmp_path, Block)
    dataset._row_reader.locate(np.zeros(1, np.int64))
    assert 0 < resident_pages(content) * mmap.PAGESIZE < content.size // 4


def resident_pages(content: pa.Buffer) -> int:
    """Return the pages of a mapped file that are in memory."""
    answer = ctypes.create_string_buffer(-(-content.size // mmap.PAGESIZE))
    assert addresses._libc().mincore(content.address, content.size, answer) == 0
    return sum(byte & 1 for byte in answer.raw)


# --- texts


@pytest.mark.parametrize("verify", ["first_touch", "never"])
def test_reading_text_that_is_not_utf8_is_a_shard_error(tmp_path: Path, verify: Any) -> None:
    write_dataset([Row(n=k, s="é" * 3) for k in range(5)], tmp_path, format="arrow")
    [file] = shard_files(tmp_path)
    flip(file, "éé".encode())
    dataset = open_dataset(tmp_path, Row, verify=verify)
    for read in (lambda: dataset[:], dataset.read, lambda: dataset[0]):
        with pytest.raises(ShardError, match=file.name):
            read()


def test_row_that_begins_inside_a_character_is_an_error() -> None:
    form = BinaryCodec(Row.document_schema().fields[2], "Row.s", pa.string())
    content, cut = "aéb".encode(), np.array([0, 2, 4])
    with pytest.raises(Exception, match="not UTF-8"):
        form.check_utf8(content, cut, None)
    form.check_utf8(content, cut, np.array([False, False]))
    form.check_utf8(content, np.array([0, 1, 4]), None)


def test_writing_text_that_is_not_utf8_is_an_error() -> None:
    form = BinaryCodec(Row.document_schema().fields[2], "Row.s", pa.string())
    with pytest.raises(EncodeError, match="Row.s.*UTF-8"):
        form.from_packed(b"\xff", np.array([0, 1]), None)


# --- copies in the cache


def test_damaged_copy_in_the_cache_is_written_again(tmp_path: Path) -> None:
    write_dataset(rows(50), tmp_path / "d", document_type=Row, format="parquet")
    cache = tmp_path / "cache"
    assert open_dataset(tmp_path / "d", Row, cache=cache)[10].n == 1010
    [copy] = [path for path in cache.iterdir() if path.is_file()]
    for place in range(0, copy.stat().st_size, 97):
        bitrot.flip_byte(copy, place, 1)
        dataset = open_dataset(tmp_path / "d", Row, cache=cache)
        assert [dataset[k].n for k in (10, 11)] == [1010, 1011]
    dataset = open_dataset(tmp_path / "d", Row, cache=cache, verify="always")
    assert dataset[10].n == 1010
    flip(copy, (1010).to_bytes(8, "little"))
    assert dataset[10].n == 1010


def test_damaged_row_numbers_in_the_cache_are_computed_again(tmp_path: Path) -> None:
    write_dataset(rows(50), tmp_path / "d", document_type=Row, format="arrow")
    cache = tmp_path / "cache"
    for _ in range(3):
        assert len(open_dataset(tmp_path / "d", Row, where={"n": {"$gte": 1045}}, cache=cache)) == 5
        [kept] = [path for path in cache.iterdir() if path.is_file()]
        bitrot.flip_byte(kept, 12, 1)


# --- processes


def _verify_some(dataset: StoredDataset[Row], count: int) -> None:
    assert dataset[np.arange(count)].n.tolist() == [1000 + k for k in range(count)]


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("kind", ["arrow", "parquet"])
def test_worker_processes_share_what_was_verified(tmp_path: Path, method: str, kind: Any) -> None:
    write_dataset(rows(500), tmp_path / "d", document_type=Row, format=kind, group_bytes=4096)
    dataset = open_dataset(tmp_path / "d", Row, cache=tmp_path / "cache")
    if kind == "parquet":
        open_dataset(tmp_path / "d", Row, cache=tmp_path / "cache")[0]
    assert not dataset._row_reader.verified.flags.any()
    if method == "fork":
        child = os.fork()
        if child == 0:
            _verify_some(dataset, 100)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    else:
        worker = multiprocessing.get_context("spawn").Process(target=_verify_some, args=(dataset, 100))
        worker.start()
        worker.join()
        assert worker.exitcode == 0
    flags = dataset._row_reader.verified.flags.all(axis=1)
    assert flags[0]
    assert not flags.all()
    if kind == "arrow":
        [file] = shard_files(tmp_path / "d")
        flip(file, (1010).to_bytes(8, "little"))
        assert dataset[10].n == 1010 ^ 0x80  # the worker verified it: nobody looks again


def test_dataset_of_an_ended_process_verifies_by_itself(tmp_path: Path) -> None:
    write_dataset(rows(5), tmp_path / "d", document_type=Row, format="arrow")
    code = (
        "import pickle, sys; from quire.storage import open_dataset; from tests.storage.test_verify import Row;"
        f"d = open_dataset({str(tmp_path / 'd')!r}, Row); d[0]; sys.stdout.buffer.write(pickle.dumps(d))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    dataset = pickle.loads(done.stdout)
    assert not dataset._row_reader.verified.flags.any()
    assert dataset[3].n == 1003
    assert dataset._row_reader.verified.flags.all()


# --- logs and versions


def test_flipped_bytes_of_a_log_are_detected_or_harmless(tmp_path: Path) -> None:
    write_dataset(rows(20), tmp_path, document_type=Row, format="arrow", group_bytes=256, shard_bytes=512)
    [log] = (tmp_path / "_quire").glob("*.jsonl")
    errors = 0
    for place in range(log.stat().st_size):
        bitrot.flip_byte(log, place, 1 << place % 8)
        try:
            assert [int(n) for n in open_dataset(tmp_path, Row).read().n] == [1000 + k for k in range(20)]
        except StorageError as error:
            assert log.name in str(error)
            errors += 1
        bitrot.flip_byte(log, place, 1 << place % 8)
    assert errors >= log.stat().st_size - 1  # the last line break


def test_only_an_incomplete_last_line_is_ignored(tmp_path: Path) -> None:
    write_dataset(rows(20), tmp_path, document_type=Row, format="arrow", group_bytes=256, shard_bytes=512)
    [log] = (tmp_path / "_quire").glob("*.jsonl")
    whole = log.read_bytes()
    *before, last, _ = whole.split(b"\n")
    counts = [json.loads(line).get("rows", 0) for line in (*before, last)]
    for size in range(len(whole) - len(last) - 1, len(whole)):
        log.write_bytes(whole[:size])
        assert len(open_dataset(tmp_path, Row)) == sum(counts) - (0 if size == len(whole) - 1 else counts[-1])
    log.write_bytes(b"\n".join([before[0], before[1][:-3], *before[2:], last, b""]))
    with pytest.raises(ShardError, match=r"line 2 of the log is damaged"):
        open_dataset(tmp_path, Row)


def test_log_lines_are_refused_by_readers_of_format_1(tmp_path: Path) -> None:
    write_dataset(rows(20), tmp_path, document_type=Row, group_bytes=256, shard_bytes=512)
    write_dataset(rows(20), tmp_path, document_type=Row, mode="overwrite")
    [log] = (tmp_path / "_quire").glob("*.jsonl")
    for line in log.read_text().splitlines():
        assert json.loads(line).get("version", 1) != 1  # what quire 0.1 compares


def _rewrite(log: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    lines = [decode_line(line) for line in log.read_bytes().splitlines()]
    plain = [{name: value for name, value in line.items() if name != "sum"} for line in lines]
    log.write_text("".join(f"{encode_line(change(line))}\n" for line in plain))


def test_unknown_required_features_are_errors_and_additions_are_ignored(tmp_path: Path) -> None:
    write_dataset(rows(20), tmp_path, document_type=Row)
    [log] = (tmp_path / "_quire").glob("*.jsonl")
    whole = log.read_bytes()
    _rewrite(log, lambda line: {**line, "lanes": 8, "deletes": {"rows": 0}})
    assert len(open_dataset(tmp_path, Row)) == 20
    log.write_bytes(whole + encode_line({"tag": "train-1"}).encode() + b"\n")
    assert len(open_dataset(tmp_path, Row)) == 20
    for place in (lambda line: "name" in line, lambda line: "name" not in line):
        log.write_bytes(whole)
        _rewrite(log, lambda line, place=place: {**line, "requires": ["deletes"]} if place(line) else line)
        with pytest.raises(StorageError, match="requires deletes, which this version of quire does not support"):
            open_dataset(tmp_path, Row)


def test_unknown_required_section_is_an_error(tmp_path: Path) -> None:
    write_dataset(rows(20), tmp_path, document_type=Row)
    [shard] = open_dataset(tmp_path, Row).shards
    assert shard.table is not None
    table = (tmp_path / shard.name).read_bytes()[shard.table[0] : sum(shard.table)]
    at = table.index(b"nulls\0")
    later = parse_with(table, at, b"deletes\0", 1)
    with pytest.raises(StorageError, match="'deletes'.*update quire"):
        later()
    with pytest.raises(KeyError):  # ignored, so that what it replaced here is missing
        parse_with(table, at, b"deletes\0", 0)()


def parse_with(table: bytes, at: int, name: bytes, flags: int) -> Callable[[], BlockTable]:
    """Parse a table whose section has another name and other flags."""
    body = table[:at] + name + flags.to_bytes(8, "little") + table[at + 16 : -_TRAILER.size]
    sealed = body + _TRAILER.pack(checksum(body), len(table), b"QUIRETBL")
    return lambda: parse_table(memoryview(sealed))


@pytest.mark.parametrize("kind", ["arrow", "parquet"])
def test_dataset_of_format_1_can_be_appended_to(tmp_path: Path, kind: Any) -> None:
    shutil.copytree(golden.FOLDER / "v1" / kind, tmp_path / "d")
    write_dataset(golden.documents()[:2], tmp_path / "d", mode="append", format=kind)
    dataset = open_dataset(tmp_path / "d", golden.Golden)
    assert [shard.table is None for shard in dataset.shards] == [True, False]
    assert exact(list(dataset.read().unstack()), [*golden.documents(), *golden.documents()[:2]])
    assert exact(dataset[6], golden.document(0))
    dataset.verify()


def test_damage_in_format_1_is_detected_when_the_whole_shard_is_read(tmp_path: Path) -> None:
    for kind in ("arrow", "parquet"):
        shutil.copytree(golden.FOLDER / "v1" / kind, tmp_path / kind)
        [file] = shard_files(tmp_path / kind)
        bitrot.flip_byte(file, 2000 if kind == "arrow" else 9, 1)
        for read in (
            lambda kind=kind: open_dataset(tmp_path / kind, golden.Golden).read(),
            lambda kind=kind: open_dataset(tmp_path / kind, golden.Golden, verify="always")[0],
            lambda kind=kind: open_dataset(tmp_path / kind, golden.Golden).verify(),
        ):
            with pytest.raises(ShardError, match=file.name):
                read()


# --- what the table and the schema record


def test_message_layout_matches_the_buffers_of_arrow() -> None:
    arrays = [pa.array([1, None, 3]), pa.array(["a", "bc", None]), pa.array([[1], None, [2, 3]])]
    batch = pa.record_batch(arrays, names=["a", "b", "c"])
    message = batch.serialize()
    layout = read_message_layout(message.to_pybytes())
    assert layout.rows == 3
    assert layout.nodes == [(3, 1), (3, 1), (3, 1), (3, 0)]
    read = pa.ipc.read_record_batch(message, batch.schema)
    for number, buffer in ((1, read["a"].buffers()[1]), (4, read["b"].buffers()[2])):
        offset, size = layout.buffers[number]
        assert layout.metadata_bytes + offset == buffer.address - message.address
        assert size <= buffer.size


def arrow_file(rows: list[int]) -> tuple[bytes, int, list[pa.RecordBatch]]:
    """Return an Arrow file, the offset of its footer, and its record batches."""
    batches = [pa.record_batch({"a": list(range(n)), "b": [f"text {i}" for i in range(n)]}) for n in rows]
    sink = pa.BufferOutputStream()
    schema = pa.schema([("a", pa.int64()), ("b", pa.string())])
    with pa.ipc.new_file(sink, schema) as writer:
        for batch in batches:
            writer.write_batch(batch.cast(schema))
    content = sink.getvalue().to_pybytes()
    return content, len(content) - 10 - int.from_bytes(content[-10:-6], "little"), batches


@given(st.lists(st.integers(1, 30), max_size=8))
def test_footer_blocks_are_the_messages_of_arrow(rows: list[int]) -> None:
    content, start, batches = arrow_file(rows)
    places = read_footer_blocks(content[start:], start)
    messages = [pa.ipc.read_message(content[first:last]) for first, last in places]
    schema = pa.ipc.open_file(content).schema
    assert [pa.ipc.read_record_batch(message, schema).to_pydict() for message in messages] == [
        batch.to_pydict() for batch in batches
    ]


@given(st.data())
def test_damaged_footer_gives_blocks_of_the_file_or_an_error(data: st.DataObject) -> None:
    content, start, _ = arrow_file([3, 5])
    footer = bytearray(content[start:])
    at = data.draw(st.integers(0, len(footer) - 8))
    footer[at : at + 8] = data.draw(st.binary(min_size=8, max_size=8))
    with suppress(DecodeError):
        for first, last in read_footer_blocks(bytes(footer), start):
            assert 0 <= first <= last <= start


@pytest.mark.parametrize("kind", ["arrow", "parquet"])
def test_null_counts_come_from_metadata(tmp_path: Path, kind: Any) -> None:
    write_dataset(items(31), tmp_path, format=kind, group_bytes=2000)
    dataset = open_dataset(tmp_path, Item)
    assert dataset.null_count("note") == 15
    assert dataset.null_count("label") == dataset.null_count("picture.label") == 0
    assert open_dataset(tmp_path, Item, where={"label": 3}).null_count("note") is None
    folder = golden.FOLDER / "v1" / kind
    assert open_dataset(folder, bitrot.Part).null_count("size") is None  # of another class


def test_enums_and_nested_classes_are_recorded(tmp_path: Path) -> None:
    bitrot.write(tmp_path / "lists", "lists", "arrow")
    bitrot.write(tmp_path / "nested", "nested", "parquet")
    lists = pa.ipc.open_file(shard_files(tmp_path / "lists")[0]).schema.metadata
    assert lists[b"quire.format"] == b"2"
    enums = json.loads(lists[b"quire.enums"])
    assert enums == {"color": {"class": "tests.storage.bitrot:Color", "members": {"RED": "red", "BLUE": 2}}}
    nested = pa.parquet.read_schema(shard_files(tmp_path / "nested")[0]).metadata
    assert json.loads(nested[b"quire.classes"]) == dict.fromkeys(
        ("part", "maybe", "parts"), "tests.storage.bitrot:Part"
    )


def test_shards_of_format_1_keep_their_lines() -> None:
    old = Shard("a.arrow", 3, 10, (2, 1), "0" * 16, "1" * 16)
    assert Shard.from_dict(old.to_dict()) == old
    new = Shard("a.arrow", 3, 10, xxh3="0" * 16, blocks=2, table=(1, 2))
    assert Shard.from_dict(json.loads(json.dumps(new.to_dict()))) == new


# --- the campaign


@pytest.mark.timeout(1200)
def test_flipped_bytes_give_correct_values_or_an_error(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.storage.bitrot", "--stride", "61", "--work", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    report = json.loads(done.stdout) if done.stdout else {"wrong": [done.stderr[-2000:]]}
    assert report["wrong"] == []
    assert done.returncode == 0
    assert report["flips"] > 2000
    assert report["counts"]["arrow: error"] > 500
    assert report["counts"]["pieces: error"] > 500
    assert report["counts"]["parquet: error"] > 500
