"""Memory by its address: rows that lie in any number of mapped files are gathered in one call.

numpy gathers rows of one array. Here the array is all of the memory that a process can address, so that rows of many
files, one behind the other in each of them, are one index. Who asks must know that every address is that of memory
which is there, and keep it there until the call returns.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import pyarrow as pa

from quire._fork import ForkSafeLock

if TYPE_CHECKING:
    from numpy.typing import NDArray

_LOWEST, _HIGHEST = 1 << 12, 1 << 48
_WIDE = 1 << 12
"""Rows of so many bytes are copied one by one, which costs them little, into memory that was used before."""
_KEPT = 128 << 20
"""So many bytes are kept for later at most."""
_LINE = 64
"""Rows go to a multiple of so many bytes. Large memory is given out sixteen bytes behind the begin of a page, and rows
that lie as pages do in their file take a third longer to be copied there."""


class _Span:
    """A run of memory as numpy's array interface tells of it."""

    def __init__(self, width: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (_LOWEST, True),
            "shape": (_HIGHEST - _LOWEST - width + 1,),
            "strides": (1,),
            "typestr": f"|V{width}",
        }


@cache
def _window(width: int) -> NDArray[Any]:
    """All memory as rows of so many bytes, one at every address."""
    return np.asarray(_Span(width))


@cache
def _view() -> memoryview:
    return memoryview(_window(1).view(np.uint8))  # type: ignore[arg-type]


def fetch(addresses: NDArray[np.int64], width: int) -> NDArray[np.uint8]:
    """The bytes at each address, a row each, copied."""
    count = len(addresses)
    if not width or not count:
        return np.empty((count, width), np.uint8)
    if width < _WIDE:
        found: NDArray[np.uint8] = _window(width)[addresses - _LOWEST].view(np.uint8).reshape(count, width)
        return found
    rows = take_buffer(count * width)
    fetch_into(rows, addresses, width)
    return rows.reshape(count, width)


def fetch_into(target: NDArray[np.uint8], addresses: NDArray[np.int64], width: int) -> None:
    """Copy the bytes at each address, one row behind the other."""
    view, rows = _view(), memoryview(target)  # type: ignore[arg-type]
    for place, source in zip(range(0, target.nbytes, width), (addresses - _LOWEST).tolist(), strict=True):
        rows[place : place + width] = view[source : source + width]


class _Reuse:
    """Memory of batches that are gone, for those that come: fresh memory costs more than what is copied into it."""

    def __init__(self) -> None:
        self._free: dict[int, list[tuple[bytearray, int]]] = {}
        self._kept = 0

    def take(self, size: int) -> NDArray[np.uint8]:
        """So many bytes; they come back when nothing refers to the array any more."""
        try:
            memory, start = self._free[size].pop()
            self._kept -= size
        except (KeyError, IndexError):
            memory, start = _aligned(size)
        array = np.frombuffer(memory, np.uint8, size, start)  # views of it keep it: what it is a view of is no array
        weakref.finalize(array, self._give, memory, start, size).atexit = False
        return array

    def _give(self, memory: bytearray, start: int, size: int) -> None:
        if self._kept + size <= _KEPT:
            self._free.setdefault(size, []).append((memory, start))
            self._kept += size


def _aligned(size: int) -> tuple[bytearray, int]:
    memory = bytearray(size + _LINE)
    return memory, -np.frombuffer(memory, np.uint8).ctypes.data % _LINE


take_buffer = _Reuse().take


def fetch_ranges(
    addresses: NDArray[np.int64], sizes: NDArray[np.int64], room: NDArray[np.int64], before: NDArray[np.int64]
) -> bytes:
    """The bytes of runs of any size, one behind the other.

    `room` is how many may be read at each address, and `before` how many in front of it. Short runs of about one size
    are taken all at once, with what is around them, which is then left out.
    """
    if not len(sizes):
        return b""
    longest, total = int(sizes.max()), int(sizes.sum())
    lead = np.maximum(longest - room, 0)
    if longest * len(sizes) <= 4 * total + 4096 and longest < _WIDE and (before >= lead).all():
        return _cut(fetch(addresses - lead, longest), lead, sizes, total)
    starts, ends = (addresses - _LOWEST).tolist(), (addresses - _LOWEST + sizes).tolist()
    view = _view()
    return b"".join([view[start:end] for start, end in zip(starts, ends, strict=True)])


def _cut(rows: NDArray[np.uint8], lead: NDArray[np.int64], sizes: NDArray[np.int64], total: int) -> bytes:
    """Of each row so many bytes, behind those that lead it."""
    if total == rows.size:
        return rows.tobytes()
    places = np.arange(rows.shape[1])
    kept = places < (lead + sizes)[:, None]
    if lead.any():
        kept &= places >= lead[:, None]
    return rows[kept].tobytes()


# --- files


def map_file(file: BinaryIO) -> pa.Buffer:
    """The bytes of an open file, mapped; it can be closed, so that any number of files can be mapped."""
    size = os.fstat(file.fileno()).st_size
    if not size:
        return pa.py_buffer(b"")
    address = _libc().mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
    if address in (None, ctypes.c_void_p(-1).value):
        code = ctypes.get_errno()
        raise OSError(code, f"{os.strerror(code)}, while it was mapped", file.name)
    mapping = _Mapping(address, size)
    with _mapped_lock:
        _mapped.add(mapping)
    return pa.foreign_buffer(address, size, mapping)


class _Mapping:
    """Unmaps its memory when nobody needs it any more."""

    def __init__(self, address: int, size: int) -> None:
        self._address, self._size, self._unmap = address, size, _libc().munmap

    def drop_mapped_pages(self) -> None:
        """Take the pages out of this process."""
        _libc().madvise(self._address, self._size, mmap.MADV_DONTNEED)

    def __del__(self) -> None:
        self._unmap(self._address, self._size)


class SharedMemory:
    """Memory of zeros that forked processes share, or that of a file of the same size, which others map too."""

    def __init__(self, size: int, path: Path | None = None) -> None:
        self.size, self.is_file = size, False
        if path is not None:
            with suppress(OSError), path.open("r+b") as file:
                if os.fstat(file.fileno()).st_size == size:
                    self._map(mmap.MAP_SHARED, file.fileno())
                    self.is_file = True
        if not self.is_file:
            self._map(mmap.MAP_SHARED | mmap.MAP_ANONYMOUS, -1)
        content: Any = (ctypes.c_uint8 * size).from_address(self._address)
        self.array: NDArray[np.uint8] = np.frombuffer(content, np.uint8)
        weakref.finalize(self.array, _libc().munmap, self._address, size).atexit = False

    def _map(self, flags: int, handle: int, address: int | None = None) -> None:
        found = _libc().mmap(address, self.size, mmap.PROT_READ | mmap.PROT_WRITE, flags, handle, 0)
        if found in (None, ctypes.c_void_p(-1).value):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        self._address: int = found

    def move_to(self, path: Path) -> None:
        """Let a file take the place of anonymous memory, at the same address, with the same content."""
        with path.open("r+b") as file:
            file.truncate(self.size)
            for start in range(0, self.size, _CHUNK):  # leaves holes where nothing was noted
                content = self.array[start : start + _CHUNK].tobytes()
                if content.strip(b"\0"):
                    os.pwrite(file.fileno(), content, start)
            self._map(mmap.MAP_SHARED | _MAP_FIXED, file.fileno(), self._address)
        self.is_file = True


_MAP_FIXED, _CHUNK = 0x10, 1 << 16
_mapped: weakref.WeakSet[_Mapping] = weakref.WeakSet()
_mapped_lock = ForkSafeLock()


def drop_mapped_pages() -> None:
    """Take all pages of mapped files out of this process; who looks at one gets it again, as a rule without the disk.

    A look at one byte can map two megabytes around it, which count as memory of the process until it lets go of them.
    """
    if hasattr(mmap, "MADV_DONTNEED"):
        with _mapped_lock:
            mappings = list(_mapped)
        for mapping in mappings:
            mapping.drop_mapped_pages()


# --- what is read ahead


def read_ahead(addresses: NDArray[np.int64], sizes: NDArray[np.int64]) -> None:
    """Let the system read runs of mapped files, and no more than they are, before they are needed.

    Left to itself it reads around every page that is missing, on some machines many megabytes, which a process with
    little memory has to let go of again before it comes to them.
    """
    if not hasattr(mmap, "MADV_WILLNEED") or _are_resident(addresses):
        return
    libc, page = _libc(), mmap.PAGESIZE
    starts = addresses // page * page
    for start, size in zip(starts.tolist(), (addresses + sizes - starts).tolist(), strict=True):
        libc.madvise(start, size, mmap.MADV_WILLNEED)


def _are_resident(addresses: NDArray[np.int64]) -> bool:
    """Whether the first pages of some of the runs are in memory, as where a dataset was read before."""
    some = addresses[:: max(1, len(addresses) // _SAMPLE)] // mmap.PAGESIZE * mmap.PAGESIZE
    answer = ctypes.create_string_buffer(1)
    return all(not _libc().mincore(start, 1, answer) and answer.raw[0] & 1 for start in some.tolist())


_SAMPLE = 32


def advise_random(buffer: pa.Buffer, *, on: bool = True) -> pa.Buffer:
    """Mapped memory that is read in any order: around what is missing, nothing else is read. Or as usual again."""
    if buffer.size and hasattr(mmap, "MADV_RANDOM"):
        _libc().madvise(buffer.address, buffer.size, mmap.MADV_RANDOM if on else mmap.MADV_NORMAL)
    return buffer


@cache
def _libc() -> Any:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_size_t)
    library.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    library.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
    return library
