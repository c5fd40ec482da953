"""The block table of a shard: where each column of each block is stored, and a checksum for every byte of the file.

A *block* is a Parquet row group or an Arrow record batch. A *region* is a run of bytes with one checksum (xxh3); the
regions of a file do not overlap, and cover all of it but the table itself. A column of a block is one region, or
several if it is large. The regions that belong to no column are the *frame*: schema, metadata of blocks, footer.

The table is stored directly before the footer of the file, where neither Parquet nor Arrow readers look. It has a
header, a directory of named sections, the sections (arrays of little-endian 64-bit integers, and the column names as
JSON), and a trailer with the checksum and length of the table. The log of the dataset has the checksum of the table, so
a reader that trusts the log can verify any byte of the shard. docs/decisions/0015-storage-format-2.md specifies it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from quire._optional import require
from quire.errors import DecodeError, StorageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAGIC = b"QUIRETBL"
VERSION = 2
_HEADER = struct.Struct("<8sIIQII")
"""Magic, version, number of sections, bytes of the file, number of blocks, number of columns."""
_SECTION = struct.Struct("<8sQQQ")
"""Name, flags, offset in the table, length."""
_TRAILER = struct.Struct("<QQ8s")
"""Checksum of the table up to here, length of the table, magic."""
TRAILER_BYTES = _TRAILER.size
REGION_BYTES = 24
"""Of an entry in the section of regions: offset, bytes, checksum."""
_REQUIRED = 1
"""The flag of a section that readers must understand."""
# In the order in which they are written. All but the last are required.
_KNOWN = ("blocks", "columns", "regions", "nulls", "names", "lengths")
_FOOTER_MAGIC = {"parquet": b"PAR1", "arrow": b"ARROW1"}
_PADDING = 64
"""Arrow pads buffers by fewer bytes than this."""
PIECE = 1 << 16
"""The bytes of a piece, a region of the data of a large column; rounded down to whole rows."""
WIDE_ROW = 1 << 13
"""Rows of at least this number of bytes are a piece each: the copy of a row is compared with its checksum."""


def checksum(*parts: Any) -> int:
    """Compute the xxh3 of bytes, passed in one or several parts."""
    if len(parts) == 1:
        return int(_xxhash().xxh3_64_intdigest(parts[0]))
    total = hasher()
    for part in parts:
        total.update(part)
    return int(total.intdigest())


def hasher() -> Any:
    """Return an xxh3 hash that takes its input in parts."""
    return _xxhash().xxh3_64()


@cache
def digest_function() -> Callable[[Any], int]:
    """Return the function that computes the xxh3 of bytes."""
    digest: Callable[[Any], int] = _xxhash().xxh3_64_intdigest
    return digest


@cache
def _xxhash() -> Any:
    return require("xxhash", extra="parquet", needed_for="the checksum of a shard")


class Pieces(NamedTuple):
    """The regions of a column's data that is verified piece by piece: `first` to `end`, of `size` bytes each.

    The last region has the rest of the data, and its padding. `entries` are the regions in the block table,
    `REGION_BYTES` each.
    """

    first: int
    end: int
    size: int
    entries: NDArray[np.uint64]


@dataclass(frozen=True)
class BlockTable:
    """A parsed block table; arrays have one row per block, and one column per column of the file."""

    file_bytes: int
    blocks: NDArray[np.uint64]
    """For each block: rows, offset, bytes, bytes of its metadata."""
    columns: NDArray[np.uint64]
    """For each block and column: offset, bytes."""
    regions: NDArray[np.uint64]
    """Sorted: offset, bytes, xxh3."""
    nulls: NDArray[np.int64]
    names: tuple[str, ...]
    """The paths of the columns."""
    lengths: memoryview | None = None
    """The section with the lengths of rows; see `row_lengths`."""

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """The rows of each block."""
        return tuple(self.blocks[:, 0].tolist())

    def row_lengths(self, path: str) -> NDArray[np.int64] | None:
        """Return the length of each row of a list or tensor; None if the table does not have it."""
        if self.lengths is None:
            return None
        # JSON ends where its only object does; the arrays begin at the next multiple of 8 bytes.
        places, end = json.JSONDecoder().raw_decode(bytes(self.lengths).decode("latin-1"))
        if path not in places:
            return None
        offset, width = places[path]
        rows, start = sum(self.rows), end + -end % 8 + offset
        lengths: NDArray[Any] = np.frombuffer(self.lengths[start : start + rows * width], f"<u{width}")
        return lengths.astype(np.int64)

    def null_counts(self) -> dict[str, int]:
        """Return the number of nulls of each column; -1 if some block does not have it."""
        sums = np.where((self.nulls < 0).any(axis=0), -1, self.nulls.sum(axis=0)).tolist()
        return dict(zip(self.names, sums, strict=True))

    @cached_property
    def _span_array(self) -> NDArray[np.intp]:
        """For each block and column, its first region and the one after its last."""
        # Regions are sorted and none crosses the border of a column, so those of a column are the ones from its first
        # byte up to the first byte after it. A column without bytes has none.
        starts = np.ascontiguousarray(self.regions[:, 0])
        begins, sizes = self.columns[..., 0], self.columns[..., 1]
        first = np.searchsorted(starts, begins)
        last = np.where(sizes == 0, first, np.searchsorted(starts, begins + sizes))
        return np.stack([first, last], axis=-1)

    @cached_property
    def _spans(self) -> list[list[list[int]]]:
        """`_span_array` as lists, whose elements are read faster."""
        spans: list[list[list[int]]] = self._span_array.tolist()
        return spans

    @cached_property
    def _columns(self) -> list[list[list[int]]]:
        columns: list[list[list[int]]] = self.columns.tolist()
        return columns

    @cached_property
    def _split_columns(self) -> dict[int, tuple[int, int]]:
        """For columns of several regions, by the offset where data may begin: the first region of data, and the end.

        The data of a column begins with its first region, or with the second one if validity or offsets are before it.
        """
        # The table does not say which of both it is. Readers know the offset of the data from Arrow, so both are keys;
        # `pieces_at` then checks the sizes. `place` is 0 for the first region, and 1 for the second.
        spans = self._span_array.reshape(-1, 2)
        several = spans[spans[:, 1] - spans[:, 0] > 1]
        offsets = self.regions[np.stack([several[:, 0], several[:, 0] + 1]), 0].tolist()
        return {
            offset: (first + place, last)
            for place, line in enumerate(offsets)
            for offset, (first, last) in zip(line, several.tolist(), strict=True)
        }

    def pieces_at(self, offset: int, width: int) -> Pieces | None:
        """Return the pieces of the data at an offset; None if it was not split, or not between rows of `width` bytes.

        A width of 0 stands for rows of any length, which may cross pieces.
        """
        first, end = self._split_columns.get(offset, (0, 0))
        if end - first < 2:
            return None
        # The pieces are found again by division, `offset // size`, so all but the last must have one size. The last has
        # the padding of the buffer as well. If another writer split the data otherwise, it is verified as a whole.
        sizes = self.regions[first:end, 1]
        size, last = int(sizes[0]), int(sizes[-1])
        is_even = bool((sizes[:-1] == size).all()) and last < size + _PADDING and (not width or size % width == 0)
        return Pieces(first, end, size, self.regions[first:end]) if is_even else None

    def column_ranges(self, block: int, columns: Sequence[int], pieces: Mapping[int, int]) -> list[tuple[int, int]]:
        """Return the offsets and bytes of columns of a block, without pieces that `check_column` leaves out."""
        ranges, spans = self._columns[block], self._spans[block]
        return [(ranges[column][0], ranges[column][1]) for column in columns if spans[column][1] not in pieces]

    @cached_property
    def frame(self) -> NDArray[np.intp]:
        """The regions that belong to no column: schema, metadata of blocks, page index, footer."""
        is_frame = np.ones(len(self.regions), np.bool_)
        for block in self._spans:
            for first, last in block:
                is_frame[first:last] = False
        return np.flatnonzero(is_frame)

    def check_frame(self, content: memoryview) -> None:
        """Verify everything in a file but its columns."""
        digest = digest_function()
        for offset, size, expected in self.regions[self.frame].tolist():
            if digest(content[offset : offset + size]) != expected:
                raise DecodeError(_mismatch("its metadata"))

    def check_column(
        self, content: memoryview, block: int, column: int, pieces: Mapping[int, int] | None = None, base: int = 0
    ) -> None:
        """Verify a column of a block; `pieces` maps the end of a column to the first of its regions to leave out.

        `content` are the bytes of the file from the offset `base` on.
        """
        first, last = self._spans[block][column]
        digest = digest_function()
        for offset, size, expected in self.regions[first : pieces.get(last, last) if pieces else last].tolist():
            if digest(content[offset - base : offset - base + size]) != expected:
                raise DecodeError(_mismatch(f"{self.names[column]!r} in block {block}"))

    def check_block_metadata(self, content: memoryview, block: int) -> None:
        """Verify the metadata at the beginning of an Arrow block, of which these are the bytes."""
        # The writer gives the metadata of a block a region of its own, and regions are sorted by their offsets.
        _, start, _, size = self.blocks[block].tolist()
        number = int(np.searchsorted(self.regions[:, 0], start))
        offset, length, expected = self.regions[number].tolist() if number < len(self.regions) else (-1, 0, 0)
        if (offset, length) != (start, size) or checksum(content[:size]) != expected:
            raise DecodeError(_mismatch(f"the metadata of block {block}"))

    def describe(self, region: int) -> str:
        """Return the message about a region of a column whose checksum is wrong."""
        spans = self._span_array
        block, column = np.argwhere((spans[..., 0] <= region) & (region < spans[..., 1]))[0].tolist()
        return _mismatch(f"{self.names[column]!r} in block {block}")

    def check_all(self, content: memoryview) -> None:
        """Verify every byte of a file, except for the table itself."""
        self.check_frame(content)
        for block in range(len(self.blocks)):
            for column in range(len(self.names)):
                self.check_column(content, block, column)

    def check_footer(self, tail: memoryview, start: int) -> None:
        """Verify the last region, the footer; `tail` is the end of the file, from `start` on."""
        offset, size, expected = self.regions[-1].tolist()
        if checksum(tail[offset - start : offset - start + size]) != expected:
            raise DecodeError(_mismatch("its footer"))


def _mismatch(what: str) -> str:
    return f"the checksum of {what} differs from what was written"


def count_regions(table_bytes: int) -> int:
    """Return the number of regions that a table of this length has at most."""
    return table_bytes // REGION_BYTES


def parse_table(data: memoryview) -> BlockTable:
    """Verify the checksum of a table, and parse it."""
    if len(data) < _HEADER.size + TRAILER_BYTES:
        raise DecodeError("its block table is truncated")
    own, size, magic = _TRAILER.unpack_from(data, len(data) - TRAILER_BYTES)
    if magic != MAGIC or size != len(data) or checksum(data[:-TRAILER_BYTES]) != own:
        raise DecodeError(_mismatch("its block table"))
    magic, version, count, file_bytes, blocks, columns = _HEADER.unpack_from(data)
    if magic != MAGIC or version != VERSION:
        raise StorageError("a later version of quire wrote this shard; update quire to read it.")
    sections: dict[str, memoryview] = {}
    for number in range(count):
        raw, flags, offset, length = _SECTION.unpack_from(data, _HEADER.size + number * _SECTION.size)
        name = raw.rstrip(b"\0").decode("ascii", "replace")
        if flags & _REQUIRED and name not in _KNOWN:  # others may be ignored, so later versions can add some
            raise StorageError(f"the shard uses {name!r}, which this version of quire does not know; update quire.")
        sections[name] = data[offset : offset + length]
    return BlockTable(
        file_bytes,
        np.frombuffer(sections["blocks"], "<u8").reshape(blocks, 4),
        np.frombuffer(sections["columns"], "<u8").reshape(blocks, columns, 2),
        np.frombuffer(sections["regions"], "<u8").reshape(-1, 3),
        np.frombuffer(sections["nulls"], "<i8").reshape(blocks, columns),
        tuple(json.loads(bytes(sections["names"]))),
        sections.get("lengths"),
    )


Read = Callable[[int, int], Any]
"""A function that returns the bytes of a file from one offset to another."""


def footer_start(read: Read, size: int, kind: str) -> int:
    """Return the offset of the footer of a Parquet or Arrow file of a size."""
    # Files of both formats end with the footer, its length in 4 bytes, and a magic number.
    magic = _FOOTER_MAGIC[kind]
    end = size - len(magic) - 4
    tail = bytes(read(end, size)) if end >= 0 else b""
    if tail[4:] != magic:
        raise DecodeError(f"it does not end like {'a Parquet' if kind == 'parquet' else 'an Arrow'} file")
    start = end - int.from_bytes(tail[:4], "little")
    if start < 0:
        raise DecodeError("its footer is damaged")
    return start


def find_table(read: Read, size: int, kind: str) -> tuple[int, int] | None:
    """Return the offset and length of the table in a file that no log describes; None if it has none."""
    end = footer_start(read, size, kind)
    if end < TRAILER_BYTES:
        return None
    _, length, magic = _TRAILER.unpack(bytes(read(end - TRAILER_BYTES, end)))
    return (end - length, length) if magic == MAGIC and length <= end else None


def read_from(content: memoryview) -> Read:
    """Return a function that reads ranges of a file in memory."""
    return lambda start, stop: content[start:stop]


# --- writing


@dataclass
class TableBuilder:
    """Collects the blocks and regions of a file while it is written."""

    names: Sequence[str]
    regions: list[tuple[int, int, int]] = field(default_factory=list)
    blocks: list[tuple[int, int, int, int]] = field(default_factory=list)
    columns: list[list[tuple[int, int]]] = field(default_factory=list)
    nulls: list[list[int]] = field(default_factory=list)
    lengths: dict[str, list[NDArray[np.int64]]] = field(default_factory=dict)
    """By path, the lengths of the rows of each block."""

    def add_lengths(self, path: str, lengths: NDArray[np.int64]) -> None:
        """Note the lengths of a list or tensor in the rows of a block."""
        self.lengths.setdefault(path, []).append(lengths)

    def add_region(self, offset: int, *parts: Any) -> None:
        """Note the checksum of bytes at an offset, passed in one or several parts."""
        size = sum(memoryview(part).nbytes for part in parts)
        if size:
            self.regions.append((offset, size, checksum(*parts)))

    def add_block(self, place: tuple[int, int, int, int], columns: list[tuple[int, int]], nulls: list[int]) -> None:
        """Note a block: (rows, offset, bytes, bytes of metadata), its columns, and their nulls."""
        self.blocks.append(place)
        self.columns.append(columns)
        self.nulls.append(nulls)

    def add_pieces(self, offset: int, data: memoryview, size: int) -> None:
        """Note the checksums of consecutive pieces of `size` bytes at an offset."""
        digest = digest_function()
        starts = range(0, data.nbytes, size)
        self.regions += [(offset + start, size, digest(data[start : start + size])) for start in starts]

    def encode(self, offset: int, footer: bytes) -> bytes:
        """Encode the table, for a file that has it at an offset, followed by the footer."""
        names = json.dumps(list(self.names)).encode()
        names += b" " * (-len(names) % 8)
        lengths = self._encode_lengths()
        count = len(self.regions) + 1
        cells = sum(map(len, self.columns))
        sizes = [len(self.blocks) * 32, cells * 16, count * REGION_BYTES, cells * 8, len(names)]
        if lengths:
            sizes.append(len(lengths))
        # The last region is the footer, which begins where the table ends. So the length of the table must be known
        # before its regions are, and it is: it depends on their number alone.
        directory = _HEADER.size + len(sizes) * _SECTION.size
        size = directory + sum(sizes) + TRAILER_BYTES
        regions = [*self.regions, (offset + size, len(footer), checksum(footer))]
        places = np.cumsum([directory, *sizes]).tolist()
        parts = [
            _HEADER.pack(MAGIC, VERSION, len(sizes), offset + size + len(footer), len(self.blocks), len(self.names)),
            *(
                _SECTION.pack(name.encode(), _REQUIRED if name != "lengths" else 0, place, length)
                for name, place, length in zip(_KNOWN, places, sizes, strict=False)
            ),
            np.array(self.blocks, "<u8").tobytes(),
            np.array(self.columns, "<u8").tobytes(),
            np.array(regions, "<u8").tobytes(),
            np.array(self.nulls, "<i8").tobytes(),
            names,
            lengths,
        ]
        table = b"".join(parts)
        return table + _TRAILER.pack(checksum(table), size, MAGIC)

    def _encode_lengths(self) -> bytes:
        """Encode the lengths of rows: where each path is, then the numbers, of as few bytes as the largest needs."""
        places: dict[str, tuple[int, int]] = {}
        arrays = list[bytes]()
        offset = 0
        for path, parts in self.lengths.items():
            lengths = np.concatenate(parts)
            # Most sequences have fewer than 65,536 elements: 2 bytes a row instead of 8.
            width = np.min_scalar_type(int(lengths.max(initial=0))).itemsize
            content = lengths.astype(f"<u{width}").tobytes()
            places[path] = offset, width
            arrays += [content, bytes(-len(content) % 8)]
            offset += len(content) + -len(content) % 8
        header = json.dumps(places).encode() if places else b""
        return b"".join([header, b" " * (-len(header) % 8), *arrays])


# --- Arrow data


def arrow_children(arrow_type: pa.DataType) -> list[pa.Field]:
    """Return the fields inside an Arrow type."""
    if pa.types.is_struct(arrow_type):
        return [arrow_type.field(i) for i in range(arrow_type.num_fields)]
    if pa.types.is_list(arrow_type) or pa.types.is_fixed_size_list(arrow_type):
        return [arrow_type.value_field]
    return []


def count_nodes(arrow_type: pa.DataType) -> int:
    """Count the field nodes of a column of a type: its own, and those of all fields inside."""
    return 1 + sum(count_nodes(child.type) for child in arrow_children(arrow_type))


@dataclass(frozen=True)
class MessageLayout:
    """Where the parts of an encapsulated Arrow message with a record batch are."""

    metadata_bytes: int
    """Of the length, the flatbuffer and its padding."""
    body_bytes: int
    rows: int
    nodes: list[tuple[int, int]]
    """For each field node in depth-first order: length, nulls."""
    buffers: list[tuple[int, int]]
    """For each buffer: offset in the body, bytes."""


def read_message_layout(message: bytes) -> MessageLayout:
    """Read the flatbuffer of a record batch message; pyarrow does not expose where buffers are stored.

    A message begins with 0xFFFFFFFF and the length of its metadata, followed by a flatbuffer. The root table is
    `Message` (field 2: header, field 3: body length), its header `RecordBatch` (field 0: rows, 1: nodes, 2: buffers). A
    flatbuffer table starts with the distance back to its vtable, which lists the offset of each field in the table.
    """
    size = 8 + int.from_bytes(message[4:8], "little")
    root = 8 + _u32(message, 8)
    header = _indirect(message, root, 2)
    [body] = struct.unpack_from("<q", message, _slot(message, root, 3))
    [rows] = struct.unpack_from("<q", message, place) if (place := _slot(message, header, 0)) else [0]
    return MessageLayout(size, body, rows, list(_pairs(message, header, 1)), list(_pairs(message, header, 2)))


def read_footer_blocks(footer: bytes, footer_start: int) -> list[tuple[int, int]]:
    """Return where the record batches of an Arrow file begin and end, from its footer; pyarrow does not expose that.

    The root table is `Footer` (field 3: record batches), whose elements are structs of 24 bytes: the offset of the
    message, the length of its metadata (4 bytes, and 4 of padding), and that of its body.
    """
    try:
        root = _u32(footer, 0)
        if not _slot(footer, root, 3):
            return []
        vector = _indirect(footer, root, 3)
        if 24 * _u32(footer, vector) > len(footer):  # before a loop that a damaged length would make long
            raise DecodeError("its footer is damaged")
        blocks = [struct.unpack_from("<qi4xq", footer, vector + 4 + 24 * n) for n in range(_u32(footer, vector))]
    except struct.error as error:
        raise DecodeError("its footer is damaged") from error
    for offset, metadata, body in blocks:
        if min(offset, metadata, body) < 0 or offset + metadata + body > footer_start:
            raise DecodeError("its footer is damaged: a block is outside of the file")
    return [(offset, offset + metadata + body) for offset, metadata, body in blocks]


def _u32(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 4], "little")


def _slot(data: bytes, table: int, number: int) -> int:
    """Return the position of a field of a flatbuffer table; 0 if it has the default value."""
    vtable = table - struct.unpack_from("<i", data, table)[0]
    if 4 + 2 * number >= int.from_bytes(data[vtable : vtable + 2], "little"):
        return 0
    offset = int.from_bytes(data[vtable + 4 + 2 * number : vtable + 6 + 2 * number], "little")
    return table + offset if offset else 0


def _indirect(data: bytes, table: int, number: int) -> int:
    """Return the position that a field refers to: tables and vectors are stored elsewhere, by a relative offset."""
    place = _slot(data, table, number)
    return place + _u32(data, place)


def _pairs(data: bytes, table: int, number: int) -> Iterator[tuple[int, int]]:
    """Yield the elements of a vector of structs of two 64-bit integers, after the number of elements."""
    if not _slot(data, table, number):
        return
    vector = _indirect(data, table, number)
    for index in range(_u32(data, vector)):
        yield struct.unpack_from("<qq", data, vector + 4 + 16 * index)
