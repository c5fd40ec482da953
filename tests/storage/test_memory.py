"""Runs of bytes by their address, at the edges of the memory that may be read, too."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.storage._memory import fetch_texts
from tests.strategies import laws

pytestmark = pytest.mark.needs("pyarrow", "xxhash", "fsspec")


@given(st.binary(min_size=1, max_size=300), st.data())
@laws
def test_runs_are_read_whatever_is_around_them(content: bytes, data: st.DataObject) -> None:
    spans = data.draw(
        st.lists(st.tuples(st.integers(0, len(content)), st.integers(0, len(content))).map(sorted), max_size=20)
    )
    memory = np.frombuffer(content, np.uint8)
    starts = np.array([start for start, _ in spans], np.int64)
    sizes = np.array([end - start for start, end in spans], np.int64)
    address = memory.ctypes.data
    found = fetch_texts(address + starts, sizes, len(content) - starts, starts)
    assert found == b"".join(content[start:end] for start, end in spans)


def test_nothing_is_read_outside() -> None:
    """Two pages, and behind them none: a byte too many ends the process."""
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 3 * page)
    array = np.frombuffer(memory, np.uint8)
    array[: 2 * page] = np.arange(2 * page) % 251
    address = array.ctypes.data
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + 2 * page), page, 0) == 0
    sizes = np.array([40, 3, 1, 0, 17], np.int64)
    starts = 2 * page - sizes
    found = fetch_texts(address + starts, sizes, sizes, starts)
    assert found == b"".join(bytes(array[start : 2 * page]) for start in starts.tolist())
