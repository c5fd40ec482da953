"""Files that were cut, altered, or whose writer died; and files that are whole but come in unusual ways."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import re
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import BaseDocument, DocumentArray
from quire.codec import _bytes
from quire.errors import DecodeError
from quire.typing import NdArray, float32

WHERE = re.compile(r"block (\d+) \(byte \d+")


class Row(BaseDocument):
    number: int
    vector: NdArray[float32, 16] = np.zeros(16, np.float32)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_bytes, "BLOCK_BYTES", 1024)


def rows(count: int = 40) -> Iterator[Row]:
    rng = np.random.default_rng(0)
    return (Row(id=f"{i:032}", number=i, vector=rng.random(16, np.float32)) for i in range(count))


def saved(folder: Path, suffix: str) -> Path:
    path = folder / f"rows.protobuf{suffix}"
    DocumentArray[Row](rows()).save_binary(path)
    return path


def read(data: bytes) -> tuple[list[Row], DecodeError | None]:
    """What can be read, and the error that ended it."""
    documents: list[Row] = []
    try:
        for row in DocumentArray[Row].load_binary(io.BytesIO(data), streaming=True):
            documents.append(row)  # noqa: PERF402 - what came before an error counts
    except DecodeError as error:
        return documents, error
    return documents, None


def bounds(path: Path) -> tuple[list[int], list[int], int]:
    """Where blocks end in the file, how many rows are read when each is, and where the index begins."""
    from quire.codec._blocks import read_index
    from quire.codec._context import DEFAULT_OPTIONS

    with path.open("rb") as file:
        index = read_index(file, DEFAULT_OPTIONS)
    assert index is not None
    counts = np.cumsum(index.counts).tolist()
    return [*index.offsets[1:], index.end], counts, index.end


def check(documents: list[Row], error: DecodeError | None, at: int, path: Path) -> None:
    """Every whole block before the damage was read, the rows are right, and the error tells where."""
    ends, counts, index = bounds(path)
    whole = max((count for end, count in zip(ends, counts, strict=True) if end <= at), default=0)
    assert [row.number for row in documents] == list(range(len(documents)))
    assert len(documents) >= whole
    assert at < index or len(documents) == 40
    if error is not None and at >= 128:  # before it, what makes it a stream may be lost
        assert WHERE.search(str(error)), str(error)


SUFFIXES = [
    *("", ".gz", ".bz2", ".xz"),
    pytest.param(".zst", marks=pytest.mark.needs("zstandard")),
    pytest.param(".lz4", marks=pytest.mark.needs("lz4")),
]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_truncated_files_yield_complete_blocks(tmp_path: Path, suffix: str) -> None:
    path = saved(tmp_path, suffix)
    data = path.read_bytes()
    index = bounds(path)[2]
    for at in {*range(0, len(data), max(1, len(data) // 150)), *range(len(data) - 40, len(data))}:
        documents, error = read(data[:at]) if at > 8 else ([], DecodeError("block 0 (byte 0)"))
        check(documents, error, at, path)
        assert error is not None or at >= index


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_files_with_a_flipped_bit_raise_only_decode_errors(tmp_path: Path, suffix: str) -> None:
    path = saved(tmp_path, suffix)
    data = bytearray(path.read_bytes())
    step = max(1, len(data) // 300)
    for number, at in enumerate(range(8, len(data), step)):
        data[at] ^= 1 << number % 8
        documents, error = read(bytes(data))
        data[at] ^= 1 << number % 8
        check(documents, error, at, path)


def test_flipped_bit_of_a_payload_is_always_detected(tmp_path: Path) -> None:
    path = saved(tmp_path, "")
    data = bytearray(path.read_bytes())
    ends, counts, _ = bounds(path)
    for block, end in enumerate(ends[:-1]):
        data[end + 70] ^= 4
        documents, error = read(bytes(data))
        data[end + 70] ^= 4
        assert len(documents) == counts[block]
        assert f"block {block + 2} (byte {end})" in str(error)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_file_with_a_damaged_index_is_read_in_order(tmp_path: Path, suffix: str) -> None:
    path = saved(tmp_path, suffix)
    data = bytearray(path.read_bytes())
    data[-3] ^= 255
    path.write_bytes(data)
    assert len(list(DocumentArray[Row].load_binary(path, streaming=True))) == 40
    if suffix != "":
        return
    assert len(DocumentArray[Row].load_binary(path)) == 40
    with pytest.raises(DecodeError, match="index"):
        DocumentArray[Row].load_binary(path, rows=[1])


# --- other tools, other ways

TOOLS: dict[str, Any] = {".gz": gzip.decompress, ".bz2": bz2.decompress, ".xz": lzma.decompress}


@pytest.mark.parametrize("suffix", TOOLS)
def test_compressed_files_decompress_with_the_usual_tools(tmp_path: Path, suffix: str) -> None:
    plain = TOOLS[suffix](saved(tmp_path, suffix).read_bytes())
    documents, error = read(plain)
    assert (len(documents), error) == (40, None)


def test_files_decompress_with_gzip(tmp_path: Path) -> None:
    path = saved(tmp_path, ".gz")
    subprocess.run(["gzip", "-d", str(path)], check=True)
    assert len(DocumentArray[Row].load_binary(path.with_suffix(""))) == 40


@pytest.mark.needs("zstandard")
def test_files_decompress_with_zstandard(tmp_path: Path) -> None:
    import zstandard

    packed = io.BytesIO(saved(tmp_path, ".zst").read_bytes())
    plain = zstandard.ZstdDecompressor().stream_reader(packed, read_across_frames=True).read()
    assert len(read(plain)[0]) == 40


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_pipe_is_read(tmp_path: Path, suffix: str) -> None:
    data = saved(tmp_path, suffix).read_bytes()
    reading, writing = os.pipe()

    def write() -> None:
        with os.fdopen(writing, "wb") as out:
            out.write(data)

    thread = threading.Thread(target=write)
    thread.start()
    with os.fdopen(reading, "rb") as source:
        documents = list(DocumentArray[Row].load_binary(source, streaming=True))
        assert not source.closed
    thread.join()
    assert [row.number for row in documents] == list(range(40))


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_concatenated_files_are_read_as_the_first_or_rejected(tmp_path: Path, suffix: str) -> None:
    data = saved(tmp_path, suffix).read_bytes()
    documents, error = read(data + data)
    assert error is not None or len(documents) == 40


def test_file_objects_are_left_open(tmp_path: Path) -> None:
    file = io.BytesIO()
    DocumentArray[Row](rows()).save_binary(file)
    file.seek(0)
    assert len(DocumentArray[Row].load_binary(file)) == 40
    assert not file.closed
    with (tmp_path / "x.gz").open("wb+") as disk:
        DocumentArray[Row](rows()).save_binary(disk)
        disk.seek(0)
        assert len(DocumentArray[Row].load_binary(disk)) == 40
        assert not disk.closed


def test_links_are_kept(tmp_path: Path) -> None:
    real = tmp_path / "real.protobuf"
    real.write_bytes(b"old")
    real.chmod(0o640)
    link = tmp_path / "link.protobuf"
    link.symlink_to(real)
    DocumentArray[Row](rows()).save_binary(link)
    assert link.is_symlink()
    assert len(DocumentArray[Row].load_binary(real)) == 40
    assert stat.S_IMODE(real.stat().st_mode) == 0o640


def test_unwritable_paths_raise_the_error_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        DocumentArray[Row](rows()).save_binary(tmp_path / "no" / "such" / "folder.protobuf")
    with pytest.raises(OSError):
        DocumentArray[Row](rows()).save_binary(tmp_path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_full_disk_raises_an_error() -> None:
    with open("/dev/full", "wb", buffering=0) as full, pytest.raises(OSError, match="space"):  # noqa: PTH123
        DocumentArray[Row](rows()).save_binary(full)


def test_a_file_that_grows_too_large_leaves_the_old_one(tmp_path: Path) -> None:
    path = saved(tmp_path, "")
    old = path.read_bytes()
    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        # Otherwise Python would write truncated bytecode, which other processes cannot import.
        "sys.dont_write_bytecode = True;"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000));"
        "from tests.codec.test_damaged_files import Row, rows; from quire import DocumentArray;"
        "DocumentArray[Row](rows(2000)).save_binary(sys.argv[1])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False)
    assert "File too large" in done.stderr
    assert path.read_bytes() == old
    assert os.listdir(tmp_path) == [path.name]  # noqa: PTH208


def test_an_error_of_the_iterable_leaves_the_old_file(tmp_path: Path) -> None:
    path = saved(tmp_path, "")
    old = path.read_bytes()

    def failing() -> Iterator[Row]:
        yield from rows(100)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        DocumentArray[Row].save_binary_stream(failing(), path)
    assert path.read_bytes() == old
    assert os.listdir(tmp_path) == [path.name]  # noqa: PTH208


# --- processes

_SAVE = """
import sys
from quire.codec import _bytes
_bytes.BLOCK_BYTES = 1 << 16
from tests.codec.test_damaged_files import Row, rows
from quire import DocumentArray
def endless():
    for number, row in enumerate(rows(10**9)):
        if number == 2000:
            print("busy", flush=True)
        yield row
WRITE
"""


@pytest.mark.parametrize("wait", [0.0, 0.05, 0.2])
def test_a_writer_that_is_killed_leaves_the_old_file(tmp_path: Path, wait: float) -> None:
    path = saved(tmp_path, ".gz")
    old = path.read_bytes()
    code = _SAVE.replace("WRITE", "DocumentArray[Row].save_binary_stream(endless(), sys.argv[1])")
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"busy\n"
        time.sleep(wait)
        process.send_signal(signal.SIGKILL)
    assert path.read_bytes() == old
    assert len(DocumentArray[Row].load_binary(path)) == 40
    leftovers = [name for name in os.listdir(tmp_path) if name != path.name]  # noqa: PTH208
    assert all(name.startswith(".") and name.endswith(".part") for name in leftovers)
    DocumentArray[Row](rows(3)).save_binary(path)
    assert len(DocumentArray[Row].load_binary(path)) == 3


_STREAM = """
import sys
from pathlib import Path
import numpy as np
from tests.codec.test_damaged_files import Row
from tests.codec.attacks import high_water
from quire import BaseDocument, DocumentArray, DocumentBatch
from quire.typing import NdArray

class Image(BaseDocument):
    number: int
    pixels: NdArray

def images(count):
    rng = np.random.default_rng(0)
    return (Image(number=i, pixels=rng.integers(0, 64, 100_000, np.uint8)) for i in range(count))

path = sys.argv[1]
DocumentArray[Image].save_binary_stream(images(200), path)
before = high_water()
DocumentArray[Image].save_binary_stream(images(4000), path)
written = high_water() - before
total = sum(image.pixels.nbytes for image in DocumentArray[Image].load_binary(path, streaming=True))
batches = sum(len(batch) for batch in DocumentBatch[Image].load_binary(path, streaming=True))
print(total, batches, written, high_water() - before)
"""


@pytest.mark.parametrize("suffix", ["", pytest.param(".zst", marks=pytest.mark.needs("zstandard"))])
def test_memory_is_bounded_by_the_block(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"images.protobuf{suffix}"
    command = [sys.executable, "-c", _STREAM, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240)
    total, batches, written, grown = map(int, done.stdout.split())
    assert (total, batches) == (400_000_000, 4000)
    assert written < 100_000_000
    assert grown < 150_000_000
