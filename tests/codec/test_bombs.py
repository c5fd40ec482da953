"""What a bomb costs, a few packed bytes that unpack to very many: no more than what may come out of so few."""

from __future__ import annotations

import bz2
import lzma
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.codec._compression import UNRATIONED_BYTES
from quire.codec._context import DecodeOptions

PIECE = bytes(1 << 20)
PIECES = 300
ROOM = 16 << 20
"""For the state of the decompressors, and what the allocator rounds up."""


def zstandard() -> Any:
    import zstandard

    return zstandard.ZstdCompressor().compressobj()


def lz4() -> Any:
    import lz4.frame

    packer = lz4.frame.LZ4FrameCompressor()
    start = packer.begin()

    class Packer:
        def compress(self, data: bytes) -> bytes:
            nonlocal start
            begun, start = start, b""
            return begun + bytes(packer.compress(data))

        def flush(self) -> bytes:
            return bytes(packer.flush())

    return Packer()


PACKERS: dict[str, Callable[[], Any]] = {
    "gzip": lambda: zlib.compressobj(wbits=31),
    "bz2": bz2.BZ2Compressor,
    "lzma": lambda: lzma.LZMACompressor(preset=0),
    "zstd": zstandard,
    "lz4": lz4,
}
WAYS = {
    "document": "BaseDocument.from_bytes(data, **options)",
    "batch": "DocumentBatch.from_bytes(data, **options)",
    "streamed": "list(DocumentArray.load_binary(path, streaming=True, **options))",
}
SCRIPT = """
import sys
from pathlib import Path
from quire import BaseDocument, DocumentArray, DocumentBatch
from quire.errors import DecodeError

path, options = Path(sys.argv[1]), {{"max_ratio": float(sys.argv[2])}}
data = path.read_bytes()

def most():  # of this program alone: getrusage also counts the process that started it
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

before = most()
try:
    {way}
except DecodeError as error:
    assert "max_ratio" in str(error), error
    print(most() - before)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bombs")


def bomb(folder: Path, packed: str) -> Path:
    path = folder / packed
    if not path.exists():
        packer = PACKERS[packed]()
        path.write_bytes(b"".join([*(packer.compress(PIECE) for _ in range(PIECES)), packer.flush()]))
    return path


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "packed",
    [
        "gzip",
        "bz2",
        "lzma",
        pytest.param("zstd", marks=pytest.mark.needs("zstandard")),
        pytest.param("lz4", marks=pytest.mark.needs("lz4")),
    ],
)
def test_memory_of_rejected_bombs_is_bounded(folder: Path, packed: str, way: str) -> None:
    path = bomb(folder, packed)
    ratio = 50.0 if packed == "lz4" else DecodeOptions().max_ratio  # lz4 packs zeros 255 times at most
    allowed = UNRATIONED_BYTES + ratio * path.stat().st_size
    command = [sys.executable, "-c", SCRIPT.format(way=WAYS[way]), str(path), str(ratio)]
    grown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    assert PIECES * len(PIECE) > 1.5 * (allowed + ROOM)
    assert int(grown) * 1024 <= allowed + ROOM


def test_gzip_data_with_a_wrong_size_takes_no_more_memory(folder: Path) -> None:
    data = bytearray(bomb(folder, "gzip").read_bytes())
    allowed = UNRATIONED_BYTES + DecodeOptions().max_ratio * len(data)
    for claim in (0, 1 << 20, int(allowed) // 2, int(allowed), (1 << 32) - 1):
        data[-4:] = claim.to_bytes(4, "little")
        path = folder / f"claims {claim}"
        path.write_bytes(data)
        command = [sys.executable, "-c", SCRIPT.format(way=WAYS["document"]), str(path), str(DecodeOptions().max_ratio)]
        grown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
        assert int(grown) * 1024 <= allowed + ROOM
