"""Where tensors lie in a file of Arrow data.

Arrow lays buffers at multiples of eight bytes. Large rows that begin at such a place take a quarter longer to be copied
than those that begin with a line of the processor's cache. What is told with a record batch stands in front of its
buffers, so that its length moves them.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

_LINE = 64
_STEP = 8
_LARGE = 1 << 12
_KEY = "quire.padding"
_MAGIC = 8


class AlignedWriter:
    """Writes record batches such that their large tensors begin with a line, as far as they can all at once."""

    def __init__(self, file: Any, schema: pa.Schema) -> None:
        self._writer, self._schema = pa.ipc.new_file(file, schema), schema
        self._file = file
        self._columns = [place for place, field in enumerate(schema) if _is_large(field.type)]
        self._header = _MAGIC + schema.serialize().size
        self._padding: int = 0

    def write_batch(self, batch: pa.RecordBatch) -> None:
        """Write a record batch."""
        if not self._columns or not len(batch):
            self._writer.write_batch(batch)
            return
        start = (self._file.tell() or self._header) - self._header
        self._padding = self._best(batch, start)
        self._writer.write_batch(batch, custom_metadata=_told(self._padding))

    def close(self) -> None:
        """Write the footer."""
        self._writer.close()

    def _best(self, batch: pa.RecordBatch, start: int) -> int:
        """The length of what is told that lets most bytes begin with a line; that of the last time, if it will do."""
        sizes: dict[int, int] = dict(_span(batch.column(place)) for place in self._columns)
        aligned = dict[int, int]()
        tries: list[int] = [self._padding, *range(0, _LINE + _STEP, _STEP)]
        for padding in tries:
            places = self._places(batch, padding)
            aligned[padding] = sum(size for at, size in sizes.items() if (start + places[at]) % _LINE == 0)
            if aligned[padding] == sum(sizes.values()):
                return padding
        return max(aligned, key=lambda padding: aligned[padding])

    def _places(self, batch: pa.RecordBatch, padding: int) -> dict[int, int]:
        """Where each run of memory would lie in a file of this batch alone."""
        nowhere = _Nowhere()
        pa.ipc.new_file(nowhere, self._schema).write_batch(batch, custom_metadata=_told(padding))
        return nowhere.places


class _Nowhere:
    """A file that keeps nothing but where each run of memory would lie."""

    closed = False

    def __init__(self) -> None:
        self._size, self.places = 0, dict[int, int]()

    def write(self, data: Any) -> int:
        """Take bytes, and forget them."""
        buffer = pa.py_buffer(data)
        self.places[buffer.address] = self._size
        self._size += buffer.size
        return int(buffer.size)

    def tell(self) -> int:
        """How many bytes there were."""
        return self._size

    def writable(self) -> bool:
        """It is for nothing else."""
        return True

    def readable(self) -> bool:
        """It is not."""
        return False

    seekable = readable

    def flush(self) -> None:
        """There is nothing to do."""

    close = flush


def _is_large(arrow_type: pa.DataType) -> bool:
    return bool(pa.types.is_fixed_size_binary(arrow_type)) and arrow_type.byte_width >= _LARGE


def _span(rows: pa.Array) -> tuple[int, int]:
    """Where the bytes of rows of one width begin in memory, and how many they are."""
    width = rows.type.byte_width
    return rows.buffers()[1].address + rows.offset * width, len(rows) * width


def _told(padding: int) -> dict[str, str] | None:
    return {_KEY: " " * padding} if padding else None
