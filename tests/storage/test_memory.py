"""Copying memory by address, also at the edges of memory that may be read."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire import BaseDocument
from quire._lowlevel import addresses
from quire._lowlevel.addresses import CheckedMemory, RawMemory
from quire.storage import open_dataset
from quire.storage._layout import Layout
from quire.typing import NdArray, uint8
from tests.strategies import laws

pytestmark = pytest.mark.needs("pyarrow", "xxhash", "fsspec")


@given(st.binary(min_size=1, max_size=300), st.data())
@laws
def test_fetch_ranges_reads_ranges_whatever_is_around_them(content: bytes, data: st.DataObject) -> None:
    spans = data.draw(
        st.lists(st.tuples(st.integers(0, len(content)), st.integers(0, len(content))).map(sorted), max_size=20)
    )
    memory = np.frombuffer(content, np.uint8)
    starts = np.array([start for start, _ in spans], np.int64)
    sizes = np.array([end - start for start, end in spans], np.int64)
    address = memory.ctypes.data
    content_ranges = RawMemory().fetch_ranges(address + starts, sizes, len(content) - starts, starts)
    assert content_ranges == b"".join(content[start:end] for start, end in spans)


def test_fetch_ranges_reads_nothing_outside_of_buffers() -> None:
    """Two pages followed by an unmapped one: reading a byte too many ends the process."""
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 3 * page)
    array = np.frombuffer(memory, np.uint8)
    array[: 2 * page] = np.arange(2 * page) % 251
    address = array.ctypes.data
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + 2 * page), page, 0) == 0
    sizes = np.array([40, 3, 1, 0, 17], np.int64)
    starts = 2 * page - sizes
    content_ranges = RawMemory().fetch_ranges(address + starts, sizes, sizes, starts)
    assert content_ranges == b"".join(bytes(array[start : 2 * page]) for start in starts.tolist())


class Maybe(BaseDocument):
    pixels: NdArray[uint8, 4] | None = None
    count: int | None = None
    flag: bool | None = None


def test_missing_values_are_gathered_as_zeros(tmp_path: Path) -> None:
    there = np.array([True, False, False, True])
    bits = pa.py_buffer(np.packbits(there, bitorder="little").tobytes())
    junk = pa.py_buffer(b"\xff" * 64)
    layout = Layout(Maybe.document_schema())
    ids = pa.array(["a", "b", "c", "d"])
    fields = layout.arrow_schema
    arrays = [ids if field.name == "id" else pa.Array.from_buffers(field.type, 4, [bits, junk]) for field in fields]
    with pa.ipc.new_file(tmp_path / "rows.arrow", fields) as file:
        file.write_batch(pa.RecordBatch.from_arrays(arrays, schema=fields))
    batch = open_dataset(tmp_path, Maybe).read()
    for name in ("pixels", "count", "flag"):
        column = np.asarray(batch[name])
        assert batch.validity(name).tolist() == there.tolist()
        assert (column[there] != 0).all()
        assert (column[~there] == 0).all()


def test_read_ranges_ahead_merges_ranges_on_adjacent_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[list[int], list[int]]] = []
    monkeypatch.setattr(addresses, "read_ahead", lambda starts, sizes: asked.append((starts.tolist(), sizes.tolist())))
    page = mmap.PAGESIZE
    addresses.read_ranges_ahead([])
    assert asked == []
    ranges = [(10 * page, 5), (2 * page, 100), (2 * page + 20, 10), (3 * page, 7), (5 * page, page)]
    addresses.read_ranges_ahead(ranges)
    assert asked == [([2 * page, 5 * page, 10 * page], [page + 7, page, 5])]


@pytest.mark.parametrize("memory_type", [RawMemory, CheckedMemory])
def test_fetch_verified_returns_the_first_row_that_differs(memory_type: type[RawMemory]) -> None:
    array = np.arange(40, dtype=np.uint8)
    memory = memory_type()
    memory.add_buffer(array)
    starts = np.array([0, 20, 10, 30])
    at = array.ctypes.data + starts
    sums = [int(array[start : start + 10].sum()) for start in starts]

    def digest(row: Any) -> int:
        return sum(memoryview(row))

    rows, damaged = memory.fetch_verified(at, 10, sums, digest)
    assert damaged is None
    assert rows[:, 0].tolist() == starts.tolist()
    assert memory.fetch_verified(at, 10, [None, None, None, None], digest)[1] is None
    assert memory.fetch_verified(at, 10, [sums[0], 1, None, 1], digest)[1] == 1
    assert memory.fetch_verified(at, 10, [None, None, None, 1], digest)[1] == 3


def test_checked_memory_knows_added_buffers_only() -> None:
    array, other = np.arange(40, dtype=np.uint8), np.arange(40, dtype=np.uint8)
    memory = CheckedMemory()
    memory.add_buffer(array)
    assert memory.fetch(array.ctypes.data + np.array([30]), 10).tolist() == [list(range(30, 40))]
    for address in (other.ctypes.data, array.ctypes.data + 31):
        with pytest.raises(IndexError, match="are in no buffer"):
            memory.fetch(np.array([address]), 10)
