"""Values of Parquet pages in place: tensors of a fixed size need no decoding if their pages are plain bytes.

quire writes tensors as uncompressed FIXED_LEN_BYTE_ARRAY columns with PLAIN encoding. A page is then a header and the
values, one after another, as Arrow stores them. Decoding would copy every byte into new memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from quire.errors import DecodeError

_DATA_PAGE, _PLAIN = 0, 0
_TYPE, _SIZE, _STORED_SIZE, _DATA_PAGE_HEADER = 1, 2, 3, 5
"""Field numbers of `PageHeader` in parquet.thrift."""
_NUM_VALUES, _ENCODING = 1, 2
"""Field numbers of `DataPageHeader`."""
_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _STRUCT = 1, 2, 3, 7, 8, 9, 10, 12
_MAX_DEPTH = 8


def plain_values(chunk: pa.Buffer, width: int, rows: int) -> list[pa.Buffer] | None:
    """Return the values of each page of a column chunk without nulls, in place; None if they have to be decoded.

    `chunk` are the bytes of the chunk, `width` those of a value. The pages must have `rows` values in all.
    """
    pages, count = list[pa.Buffer](), 0
    for header, values in _read_pages(chunk):
        data: Any = header.get(_DATA_PAGE_HEADER)
        if header.get(_TYPE) != _DATA_PAGE or not isinstance(data, dict) or data.get(_ENCODING) != _PLAIN:
            return None
        number = data.get(_NUM_VALUES)
        if header.get(_SIZE) != values.size or number is None or number * width != values.size:
            raise DecodeError(f"a page of {values.size:,} bytes has {number} values of {width:,} bytes")
        count += number
        pages.append(values)
    if count != rows:
        raise DecodeError(f"the pages of a column have {count:,} values, and its row group has {rows:,} rows")
    return pages


def _read_pages(chunk: pa.Buffer) -> Iterator[tuple[dict[int, Any], pa.Buffer]]:
    """Yield the header of each page of a column chunk, and what follows it."""
    view, position = memoryview(chunk).cast("B"), 0  # Arrow exports signed bytes
    while position < len(view):
        reader = _CompactReader(view, position)
        header = reader.read_struct()
        size = header.get(_STORED_SIZE)
        if not isinstance(size, int) or not 0 <= size <= len(view) - reader.position:
            raise DecodeError("the header of a page is damaged")
        yield header, chunk.slice(reader.position, size)
        position = reader.position + size


class _CompactReader:
    """Reads structures in the compact protocol of Thrift: as dicts of field numbers and values."""

    def __init__(self, content: memoryview, position: int) -> None:
        self._content, self.position = content, position

    def read_struct(self, depth: int = 0) -> dict[int, Any]:
        if depth > _MAX_DEPTH:
            raise DecodeError("the header of a page is damaged")
        fields: dict[int, Any] = {}
        number = 0
        while head := self._read_byte():
            kind, delta = head & 15, head >> 4
            number = number + delta if delta else self._read_int()
            fields[number] = kind == _TRUE if kind in (_TRUE, _FALSE) else self._read_value(kind, depth)
        return fields

    def _read_value(self, kind: int, depth: int) -> Any:
        if kind in (_TRUE, _FALSE, _BYTE):
            return self._read_byte()
        if _BYTE < kind < _DOUBLE:
            return self._read_int()
        if kind in (_DOUBLE, _BINARY):
            return self._skip(8 if kind == _DOUBLE else self._read_varint())
        if kind == _STRUCT:
            return self.read_struct(depth + 1)
        if kind in (_LIST, _SET):
            head = self._read_byte()
            count = head >> 4 if head >> 4 != 15 else self._read_varint()
            if count > len(self._content) - self.position:
                raise DecodeError("the header of a page is damaged")
            return [self._read_value(head & 15, depth + 1) for _ in range(count)]
        raise DecodeError("the header of a page is damaged")

    def _read_byte(self) -> int:
        if self.position >= len(self._content):
            raise DecodeError("the header of a page is truncated")
        byte = self._content[self.position]
        self.position += 1
        return byte

    def _read_varint(self) -> int:
        value = shift = 0
        while shift < 64:
            byte = self._read_byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7
        raise DecodeError("the header of a page is damaged")

    def _read_int(self) -> int:
        value = self._read_varint()
        return value >> 1 ^ -(value & 1)

    def _skip(self, size: int) -> None:
        if size > len(self._content) - self.position:
            raise DecodeError("the header of a page is truncated")
        self.position += size
