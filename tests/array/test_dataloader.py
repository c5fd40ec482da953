"""DocumentArray.dataloader: functions on the batches of a file while it is read."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quire
from quire import BaseDocument, DocumentArray
from quire.array import _serialization
from quire.errors import DecodeError, FunctionError, OptionError
from quire.parallel import Workers
from quire.typing import NdArray


class Picture(BaseDocument):
    number: int
    pixels: NdArray[8, 8]


def pictures(count: int) -> Iterator[Picture]:
    return (Picture(number=i, pixels=np.full((8, 8), i % 256, np.uint8)) for i in range(count))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    created = tmp_path_factory.mktemp("files") / "da.protobuf.gz"
    DocumentArray[Picture].save_binary_stream(pictures(1000), created)
    return created


def numbers(docs: DocumentArray[Picture]) -> list[int]:
    assert type(docs) is DocumentArray[Picture]
    return docs.number


def same(docs: DocumentArray[Picture]) -> DocumentArray[Picture]:
    return docs


def brighten(docs: DocumentArray[Picture]) -> DocumentArray[Picture]:
    for doc in docs:
        doc.pixels += 1
    return docs


def test_dataloader_yields_batches_in_file_order(path: Path) -> None:
    """Processes return results in the order of the file."""
    result = list(DocumentArray[Picture].dataloader(path, func=brighten, batch_size=64, num_worker=2))
    assert [len(docs) for docs in result] == [64] * 15 + [40]
    assert [number for docs in result for number in docs.number] == list(range(1000))
    assert result[1][0].pixels[0, 0] == 65


def test_dataloader_runs_in_threads_and_pools(path: Path) -> None:
    loader = DocumentArray[Picture].dataloader
    expected = [list(range(600)), list(range(600, 1000))]
    assert list(loader(str(path), numbers, 600, backend="thread", num_workers=2)) == expected
    with Workers(1, "process") as pool:
        assert list(loader(path, lambda docs: docs.number, 600, pool=pool)) == expected
    assert list(DocumentArray.dataloader(path, len, 600, backend="thread")) == [600, 400]


def test_dataloader_shuffle_repeats_with_seed(path: Path) -> None:
    def order(seed: int) -> list[int]:
        parts = DocumentArray[Picture].dataloader(path, numbers, 10, backend="thread", shuffle=True, seed=seed)
        return [number for part in parts for number in part]

    assert order(1) == order(1) != order(2)
    assert sorted(order(1)) == list(range(1000))
    assert order(1)[:10] != list(range(10))


def test_dataloader_accepts_protocol_and_reading_options(tmp_path: Path) -> None:
    DocumentArray[Picture](pictures(10)).save_binary(
        tmp_path / "data", protocol="pickle", compress="gz", allow_pickle=True
    )
    loader = DocumentArray[Picture].dataloader
    with pytest.raises(DecodeError, match="allow_pickle"):
        list(loader(tmp_path / "data", numbers, 5, "pickle", "gz", backend="thread"))
    result = list(loader(tmp_path / "data", numbers, 5, "pickle", "gz", backend="thread", allow_pickle=True))
    assert result == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


def test_dataloader_rejects_wrong_options_at_the_call(path: Path) -> None:
    with pytest.raises(OptionError, match="batch_size=0"):
        DocumentArray[Picture].dataloader(path, numbers, 0)
    with pytest.raises(TypeError, match="num_wokers"):
        DocumentArray[Picture].dataloader(path, numbers, 5, num_wokers=1)  # type: ignore[call-arg]


def test_dataloader_reads_no_further_than_the_window(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    def counted(*arguments: Any) -> Iterator[Any]:
        for document in iterate(*arguments):
            read.append(document.number)
            yield document

    iterate = _serialization.iterate_documents
    monkeypatch.setattr("quire.array._array.iterate_documents", counted)
    parts = DocumentArray[Picture].dataloader(path, numbers, 10, backend="thread", num_workers=2, window=3)
    for consumed, _ in enumerate(parts):
        assert len(read) <= 10 * (consumed + 3)
    assert len(read) == 1000


def test_dataloader_errors_name_the_batch(path: Path) -> None:
    def fail(docs: DocumentArray[Picture]) -> None:
        assert 130 not in docs.number, "there it is"

    with pytest.raises(FunctionError, match="^batch 13: AssertionError: there it is"):
        list(DocumentArray[Picture].dataloader(path, fail, 10))


def test_dataloader_yields_documents_before_damage(tmp_path: Path) -> None:
    file = tmp_path / "da.protobuf"
    DocumentArray[Picture].save_binary_stream(pictures(120_000), file)
    data = bytearray(file.read_bytes())
    data[len(data) * 9 // 10] ^= 255
    file.write_bytes(data)
    counts = [0, 0]
    with pytest.raises(DecodeError):
        for _ in DocumentArray[Picture].load_binary(file, streaming=True):
            counts[0] += 1
    with pytest.raises(DecodeError):
        for size in DocumentArray[Picture].dataloader(file, len, 1000, backend="thread"):
            counts[1] += size
    assert counts[0] == counts[1] > 0


MEMORY = """
import sys
import numpy as np
from quire import BaseDocument, DocumentArray
from quire.array import _serialization
from quire.typing import NdArray

class Picture(BaseDocument):
    number: int
    pixels: NdArray[64, 64]

def pictures():
    random = np.random.default_rng(0)
    for number in range(int(sys.argv[3])):
        yield Picture(number=number, pixels=np.tile(random.integers(0, 256, 64, np.uint8), (64, 1)))

def peak():  # MiB, of this program alone: getrusage also counts the process that started it
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) // 1024

def job(docs):
    return docs

if __name__ == "__main__":
    if sys.argv[1] == "write":
        DocumentArray[Picture].save_binary_stream(pictures(), sys.argv[2])
    else:
        count = sum(len(docs) for docs in DocumentArray[Picture].dataloader(sys.argv[2], job, 64, num_worker=2))
        print(count, peak())
"""


def test_dataloader_memory_is_bounded_by_the_window(tmp_path: Path) -> None:
    """Reading files of 8 and 80 MB (decompressed) takes about the same memory."""
    (tmp_path / "program.py").write_text(MEMORY)

    def run(*arguments: str) -> str:
        environment = {**os.environ, "PYTHONPATH": str(Path(quire.__file__).parents[1])}
        command = [sys.executable, str(tmp_path / "program.py"), *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120).stdout

    peaks = {}
    for count in (2_000, 20_000):
        file = str(tmp_path / f"{count}.protobuf.gz")
        run("write", file, str(count))
        result, peaks[count] = map(int, re.findall(r"\d+", run("read", file, str(count))))
        assert result == count
    assert peaks[20_000] < peaks[2_000] + 40
