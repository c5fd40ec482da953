"""The recipes "Add a compression" and "Add a format" of CONTRIBUTING.md: one entry each."""

from __future__ import annotations

import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest

from quire import BaseDocument, DocumentArray
from quire.codec import _compression
from quire.codec._compression import Compression
from quire.errors import DecodeError
from quire.typing import NdArray, float32


class Point(BaseDocument):
    place: NdArray[float32, 2]
    name: str


POINTS = DocumentArray[Point]([Point(place=np.full(2, i, np.float32), name=f"point {i}") for i in range(100)])

# --- a compression: compress a piece, open a stream of compressed pieces

MAGIC = b"PIEC"


def compress(data: Any) -> bytes:
    compressed = zlib.compress(bytes(data))
    return MAGIC + len(compressed).to_bytes(4, "little") + compressed


def open_stream(stream: IO[bytes]) -> io.BufferedReader:
    class Pieces(io.RawIOBase):
        rest = b""

        def readable(self) -> bool:
            return True

        def readinto(self, target: Any) -> int:
            while not self.rest and stream.read(4):
                self.rest = zlib.decompress(stream.read(int.from_bytes(stream.read(4), "little")))
            part, self.rest = self.rest[: len(target)], self.rest[len(target) :]
            target[: len(part)] = part
            return len(part)

    return io.BufferedReader(Pieces())


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add an entry to COMPRESSIONS."""
    entry = Compression("pieces", MAGIC, (".pcs",), compress, open_stream)
    monkeypatch.setitem(_compression.COMPRESSIONS, entry.name, entry)


@pytest.mark.usefixtures("pieces")
def test_compression_is_selected_by_name_suffix_and_first_bytes(tmp_path: Path) -> None:
    by_suffix, by_name = tmp_path / "points.protobuf.pcs", tmp_path / "points"
    POINTS.save_binary(by_suffix)
    POINTS.save_binary(by_name, compress="pieces")
    assert MAGIC in by_suffix.read_bytes()
    assert DocumentArray[Point].load_binary(by_suffix).identical(POINTS)
    assert DocumentArray[Point].load_binary(by_name).identical(POINTS)
    assert DocumentArray[Point].from_bytes(POINTS.to_bytes(compress="pieces")).identical(POINTS)
    assert len(list(DocumentArray[Point].load_binary(by_suffix, streaming=True))) == 100


@pytest.mark.usefixtures("pieces")
def test_damaged_compressed_data_raises_a_decode_error() -> None:
    data = bytearray(POINTS.to_bytes(compress="pieces"))
    data[len(data) // 2] ^= 0xFF
    with pytest.raises(DecodeError):
        DocumentArray[Point].from_bytes(bytes(data))


# --- a format: a class, and rows from any start row


@pytest.mark.needs("pyarrow")
def test_import_dataset_reads_a_new_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.storage import import_dataset
    from quire.storage.importers import _import
    from quire.storage.importers._source import ForeignDataset, ImportOptions, validate_rows

    def read_points(source: Any, document_type: type[Any] | None, options: ImportOptions) -> ForeignDataset:
        lines = Path(source).read_text().splitlines()

        def rows(first: int) -> Iterator[Any]:
            records = ((f"{source}, line {number}", json.loads(lines[number])) for number in range(first, len(lines)))
            return validate_rows(document_type or Point, records, options.extra)

        return ForeignDataset(document_type or Point, rows, len(lines))

    monkeypatch.setitem(_import.IMPORTERS, "points", read_points)  # type: ignore[arg-type]
    file = tmp_path / "points.txt"
    file.write_text("\n".join(json.dumps({"place": [i, i], "name": f"point {i}"}) for i in range(100)))
    dataset = import_dataset(file, tmp_path / "dataset", "points")  # type: ignore[arg-type]
    assert dataset.read().unstack() == POINTS
    file.write_text('{"place": [1, 2, 3], "name": "too long"}')
    with pytest.raises(DecodeError, match=r"points.txt, line 0: place"):
        import_dataset(file, tmp_path / "other", "points")  # type: ignore[arg-type]
