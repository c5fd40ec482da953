"""Memory by address: rows of any number of mapped files in one call, mapping files, and advice to the system.

`RawMemory` gathers rows. numpy gathers rows of one array (`array[index]`). Here that array is the whole address space
of the process, declared through the array interface and never read as a whole: element i is the memory at address
`_LOWEST + i`. Rows of many mapped files then need one index of addresses and one call, instead of a call for each file.
Nothing checks the addresses. Callers must pass only those of memory that is mapped, and keep it mapped until the call
returns; `AddressTable` does both, by checking offsets against the sizes of buffers and by holding their owners.

`CheckedMemory` does the same from buffers that it knows, with checked bounds and a copy for each row.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import pyarrow as pa

from quire._lowlevel import is_safe
from quire._lowlevel.forks import ForkSafeLock
from quire._lowlevel.pool import take_buffer

if TYPE_CHECKING:
    from numpy.typing import NDArray

_LOWEST, _HIGHEST = 1 << 12, 1 << 48
"""The addresses of the window: user space on 64-bit systems, without the first page, which is never mapped."""
_WIDE = 1 << 12
"""Rows of at least this size are copied one by one, which costs little per row, into memory that was used before."""


class _Window:
    """The memory of the process as numpy's array interface describes it: an element of `width` bytes at every address.

    The stride is one byte, so elements overlap, and any address is an index.
    """

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
    """Return all memory as elements of `width` bytes."""
    return np.asarray(_Window(width))


@cache
def _view() -> memoryview:
    return memoryview(_window(1).view(np.uint8))  # type: ignore[arg-type]


class RawMemory:
    """The memory of the process. Nothing checks the addresses."""

    def add(self, owner: pa.RecordBatch) -> None:
        """Make the buffers of a record batch known; here, all memory is."""

    def add_buffer(self, content: Any) -> None:
        """Make the memory of a bytes-like object known, such as an array."""

    def fetch(self, addresses: NDArray[np.int64], width: int) -> NDArray[np.uint8]:
        """Copy `width` bytes at each address into an array of shape (addresses, width)."""
        count = len(addresses)
        if not width or not count:
            return np.empty((count, width), np.uint8)
        # One call of numpy for narrow rows: a loop in Python would cost more per row than the copy itself.
        if width < _WIDE:
            gathered: NDArray[np.uint8] = _window(width)[addresses - _LOWEST].view(np.uint8).reshape(count, width)
            return gathered
        rows = take_buffer(count * width)
        view, target = _view(), memoryview(rows)  # type: ignore[arg-type]
        for place, source in zip(range(0, rows.nbytes, width), (addresses - _LOWEST).tolist(), strict=True):
            target[place : place + width] = view[source : source + width]
        return rows.reshape(count, width)

    def fetch_verified(
        self,
        addresses: NDArray[np.int64],
        width: int,
        checksums: Sequence[int | None],
        digest: Callable[[Any], int],
    ) -> tuple[NDArray[np.uint8], int | None]:
        """Copy `width` bytes at each address, and compare each copy with its checksum, unless that is None.

        Returns the array of shape (addresses, width), and the number of the first row whose checksum differs; None if
        there is none. A row is hashed right after it was copied, when it is in the cache of the processor: reading it
        from memory takes several times as long as hashing it.
        """
        rows = take_buffer(len(addresses) * width)
        view, target = _view(), memoryview(rows)  # type: ignore[arg-type]
        sources = (addresses - _LOWEST).tolist()
        damaged = None
        for place, source, checksum in zip(range(0, rows.nbytes, width), sources, checksums, strict=True):
            copy = target[place : place + width]
            copy[:] = view[source : source + width]
            if checksum is not None and digest(copy) != checksum:
                damaged = place // width
                break
        return rows.reshape(len(addresses), width), damaged

    def fetch_ranges(
        self,
        addresses: NDArray[np.int64],
        sizes: NDArray[np.int64],
        room: NDArray[np.int64],
        before: NDArray[np.int64],
    ) -> bytes:
        """Copy ranges of any size, concatenated.

        `room` is the number of bytes that may be read from each address on, and `before` the number in front of it.
        Short ranges of similar sizes are copied all at once, as rows of the longest size, and the bytes around them are
        cut off. A range at the end of its buffer is extended to the front instead (`lead`).
        """
        if not len(sizes):
            return b""
        longest, total = int(sizes.max()), int(sizes.sum())
        lead = np.maximum(longest - room, 0)
        # At most four times the wanted bytes are copied, which one call of numpy does faster than a slice per range.
        # `before` and `room` keep every row within its buffer: the byte after it may belong to no mapping at all.
        if longest * len(sizes) <= 4 * total + 4096 and longest < _WIDE and (before >= lead).all():
            rows = self.fetch(addresses - lead, longest)
            if total == rows.size:
                return rows.tobytes()
            columns = np.arange(longest)
            kept = columns < (lead + sizes)[:, None]
            if lead.any():
                kept &= columns >= lead[:, None]
            return rows[kept].tobytes()
        # Slices of a memoryview copy nothing; `join` allocates the result once and copies each range to its place.
        starts, ends = (addresses - _LOWEST).tolist(), (addresses - _LOWEST + sizes).tolist()
        view = _view()
        return b"".join([view[start:end] for start, end in zip(starts, ends, strict=True)])

    def copy_ranges(
        self,
        addresses: NDArray[np.int64],
        sizes: NDArray[np.int64],
        target: NDArray[np.uint8],
        places: NDArray[np.int64],
    ) -> None:
        """Copy ranges of any size into an array of bytes, each to its place."""
        view, output = _view(), memoryview(target)  # type: ignore[arg-type]
        ranges = zip((addresses - _LOWEST).tolist(), sizes.tolist(), places.tolist(), strict=True)
        for source, size, place in ranges:
            output[place : place + size] = view[source : source + size]


class CheckedMemory(RawMemory):
    """The buffers of record batches by address. Every read is checked against the bounds of its buffer."""

    def __init__(self) -> None:
        self._buffers: list[tuple[int, pa.Buffer]] = []

    def add(self, owner: pa.RecordBatch) -> None:
        """Make the buffers of a record batch known."""
        self._add([buffer for column in owner.columns for buffer in column.buffers() if buffer is not None])

    def add_buffer(self, content: Any) -> None:
        """Make the memory of a bytes-like object known, such as an array."""
        self._add([pa.py_buffer(content)])

    def _add(self, buffers: list[pa.Buffer]) -> None:
        entries = [(buffer.address, buffer) for buffer in buffers if buffer.size]
        self._buffers = sorted([*self._buffers, *entries], key=_address)  # a new list: others may be reading the old

    def _read(self, address: int, size: int) -> memoryview:
        buffers = self._buffers
        place = bisect_right(buffers, address, key=_address) - 1
        start, buffer = buffers[max(place, 0)] if buffers else (0, pa.py_buffer(b""))
        if not start <= address <= address + size <= start + buffer.size:
            raise IndexError(f"{size} bytes at address {address} are in no buffer.")
        return memoryview(buffer)[address - start : address - start + size]

    def fetch(self, addresses: NDArray[np.int64], width: int) -> NDArray[np.uint8]:
        """Copy `width` bytes at each address into an array of shape (addresses, width)."""
        rows = np.empty((len(addresses), width), np.uint8)
        for row, address in enumerate(addresses.tolist() if width else ()):
            rows[row] = np.frombuffer(self._read(address, width), np.uint8)
        return rows

    def fetch_verified(
        self,
        addresses: NDArray[np.int64],
        width: int,
        checksums: Sequence[int | None],
        digest: Callable[[Any], int],
    ) -> tuple[NDArray[np.uint8], int | None]:
        """Copy `width` bytes at each address, and compare each copy with its checksum, unless that is None."""
        rows = self.fetch(addresses, width)
        pairs = enumerate(zip(rows, checksums, strict=True))
        return rows, next((row for row, (copy, sum_) in pairs if sum_ is not None and digest(copy) != sum_), None)

    def fetch_ranges(
        self,
        addresses: NDArray[np.int64],
        sizes: NDArray[np.int64],
        room: NDArray[np.int64],  # noqa: ARG002 - bytes around a range are not read
        before: NDArray[np.int64],  # noqa: ARG002
    ) -> bytes:
        """Copy ranges of any size, concatenated."""
        ranges = zip(addresses.tolist(), sizes.tolist(), strict=True)
        return b"".join([self._read(address, size) for address, size in ranges if size])

    def copy_ranges(
        self,
        addresses: NDArray[np.int64],
        sizes: NDArray[np.int64],
        target: NDArray[np.uint8],
        places: NDArray[np.int64],
    ) -> None:
        """Copy ranges of any size into an array of bytes, each to its place."""
        for address, size, place in zip(addresses.tolist(), sizes.tolist(), places.tolist(), strict=True):
            if size:
                target[place : place + size] = np.frombuffer(self._read(address, size), np.uint8)


def _address(entry: tuple[int, pa.Buffer]) -> int:
    return entry[0]


_raw_memory = RawMemory()


def open_memory() -> RawMemory:
    """Return the memory in which a table of addresses finds its rows."""
    return CheckedMemory() if is_safe() else _raw_memory


# --- files


def map_file(file: BinaryIO) -> pa.Buffer:
    """Map an open file into memory. The file can be closed, so the number of descriptors does not limit mappings."""
    size = os.fstat(file.fileno()).st_size
    if not size:
        return pa.py_buffer(b"")
    if not _has_libc():
        return pa.py_buffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    address = _libc().mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
    # mmap reports failure as -1 and not as NULL, which ctypes gives as None.
    if address in (None, ctypes.c_void_p(-1).value):
        code = ctypes.get_errno()
        raise OSError(code, f"{os.strerror(code)}, while it was mapped", file.name)
    mapping = _Mapping(address, size)
    with _mapped_lock:
        _mapped.add(mapping)
    # The buffer owns the mapping: it is unmapped when the last array that points into it is gone.
    return pa.foreign_buffer(address, size, mapping)


class _Mapping:
    """Unmaps its memory when nothing refers to it any more."""

    def __init__(self, address: int, size: int) -> None:
        self._address, self._size, self._unmap = address, size, _libc().munmap

    def drop_pages(self) -> None:
        """Remove the pages from the memory of this process."""
        _libc().madvise(self._address, self._size, mmap.MADV_DONTNEED)

    def __del__(self) -> None:
        self._unmap(self._address, self._size)


class SharedMemory:
    """Zeroed memory that forked processes share, or that of a file of the same size, which other processes map."""

    def __init__(self, size: int, path: Path | None = None) -> None:
        self.size, self.is_file = size, False
        if not _has_libc():
            self._map_plainly(path)
            return
        if path is not None:
            with suppress(OSError), path.open("r+b") as file:
                if os.fstat(file.fileno()).st_size == size:
                    self._map(mmap.MAP_SHARED, file.fileno())
                    self.is_file = True
        if not self.is_file:
            self._map(mmap.MAP_SHARED | mmap.MAP_ANONYMOUS, -1)
        # Not at exit: other threads may still write to the memory then, and the system unmaps it anyway.
        content: Any = (ctypes.c_uint8 * size).from_address(self._address)
        self.array: NDArray[np.uint8] = np.frombuffer(content, np.uint8)
        weakref.finalize(self.array, _libc().munmap, self._address, size).atexit = False

    def _map_plainly(self, path: Path | None) -> None:
        """Map memory with Python's `mmap`, which keeps the file open."""
        memory = None
        if path is not None:
            with suppress(OSError), path.open("r+b") as file:
                if os.fstat(file.fileno()).st_size == self.size:
                    memory, self.is_file = mmap.mmap(file.fileno(), self.size), True
        self.array = np.frombuffer(mmap.mmap(-1, self.size) if memory is None else memory, np.uint8)

    def _map(self, flags: int, handle: int, address: int | None = None) -> None:
        start = _libc().mmap(address, self.size, mmap.PROT_READ | mmap.PROT_WRITE, flags, handle, 0)
        if start in (None, ctypes.c_void_p(-1).value):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        self._address: int = start

    def move_to(self, path: Path) -> None:
        """Replace the anonymous memory by a file, at the same address and with the same content.

        MAP_FIXED replaces the mapping in one step, so arrays that point into it stay valid. Python's `mmap` cannot do
        that: then the file gets the content of this moment, and later changes of the memory stay in this process.
        """
        with path.open("r+b") as file:
            file.truncate(self.size)
            for start in range(0, self.size, _CHUNK):  # leaves holes in the file where all is zero
                content = self.array[start : start + _CHUNK].tobytes()
                if content.strip(b"\0"):
                    file.seek(start)
                    file.write(content)
            file.flush()
            if not _has_libc():
                return
            self._map(mmap.MAP_SHARED | _MAP_FIXED, file.fileno(), self._address)
        self.is_file = True


_MAP_FIXED, _CHUNK = 0x10, 1 << 16
_mapped: weakref.WeakSet[_Mapping] = weakref.WeakSet()
_mapped_lock = ForkSafeLock()


def drop_mapped_pages() -> None:
    """Remove all pages of mapped files from the memory of this process; the system mostly keeps them in its cache.

    Reading one byte can map two megabytes around it, which count as memory of the process until they are dropped.
    """
    if _has_libc() and hasattr(mmap, "MADV_DONTNEED"):
        with _mapped_lock:
            mappings = list(_mapped)
        for mapping in mappings:
            mapping.drop_pages()


# --- advice to the system


def read_ahead(addresses: NDArray[np.int64], sizes: NDArray[np.int64]) -> None:
    """Ask the system to read ranges of mapped files in the background, and nothing around them.

    A page fault makes it read around the missing page, on some machines many megabytes, which a process with little
    memory loses again before it needs them.
    """
    if not (_has_libc() and hasattr(mmap, "MADV_WILLNEED")) or _are_resident(addresses):
        return
    libc, page = _libc(), mmap.PAGESIZE
    # madvise takes addresses of pages only, so each range begins at its page, and is longer by what that adds.
    starts = addresses // page * page
    for start, size in zip(starts.tolist(), (addresses + sizes - starts).tolist(), strict=True):
        libc.madvise(start, size, mmap.MADV_WILLNEED)


def read_ranges_ahead(ranges: Iterable[tuple[int, int]]) -> None:
    """Ask the system to read ranges (address, bytes) of mapped files; those on adjacent pages are one request."""
    merged: list[list[int]] = []
    for address, size in sorted(ranges):
        if merged and address - merged[-1][1] < mmap.PAGESIZE:
            merged[-1][1] = max(merged[-1][1], address + size)
        else:
            merged.append([address, address + size])
    if merged:
        starts, ends = np.array(merged, np.int64).T
        read_ahead(starts, ends - starts)


def _are_resident(addresses: NDArray[np.int64]) -> bool:
    """Whether the first pages of a sample of the ranges are in memory, as when a dataset was read before."""
    some = addresses[:: max(1, len(addresses) // _SAMPLE)] // mmap.PAGESIZE * mmap.PAGESIZE
    answer = ctypes.create_string_buffer(1)
    return all(not _libc().mincore(start, 1, answer) and answer.raw[0] & 1 for start in some.tolist())


_SAMPLE = 32


def advise_random(buffer: pa.Buffer, *, on: bool = True) -> pa.Buffer:
    """Advise the system to read nothing around missing pages of mapped memory; with `on=False`, to do so again."""
    if buffer.size and _has_libc() and hasattr(mmap, "MADV_RANDOM"):
        _libc().madvise(buffer.address, buffer.size, mmap.MADV_RANDOM if on else mmap.MADV_NORMAL)
    return buffer


@cache
def _has_libc() -> bool:
    """Whether libc's functions on memory are used: not on Windows, nor with `QUIRE_SAFE`."""
    return sys.platform != "win32" and not is_safe()


@cache
def _libc() -> Any:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_size_t)
    library.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    library.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
    return library
