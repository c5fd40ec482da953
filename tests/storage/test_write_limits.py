"""Writing with limited memory and disk space."""

from __future__ import annotations

import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import BaseDocument
from quire.errors import StorageNotFoundError
from quire.storage import open_dataset, write_dataset
from quire.typing import NdArray
from tests.storage.sample_documents import Photo

pytestmark = pytest.mark.needs("pyarrow")

_FULL = """
import resource, signal, sys
sys.dont_write_bytecode = True  # Python would write truncated bytecode, which other processes cannot import
from quire.errors import StorageError
from quire.storage import write_dataset
from tests.storage.sample_documents import Photo, photos
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    write_dataset(photos(500), sys.argv[1], format=sys.argv[2])
except StorageError as error:
    print(error)
"""


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_full_disk_is_a_storage_error_that_names_the_shard(tmp_path: Path, kind: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _FULL, str(tmp_path / "d"), kind], capture_output=True, text=True, check=True
    )
    assert f"00000.{kind}: the shard cannot be written: File too large" in done.stdout
    assert done.stderr == ""
    with pytest.raises(StorageNotFoundError):
        open_dataset(tmp_path / "d", Photo)
    assert not [file for file in (tmp_path / "d").rglob("*") if file.is_file()]


# --- memory

_GENERATES = """
import sys
import numpy as np
from quire import BaseDocument
from quire.storage import write_dataset
from quire.typing import NdArray, uint8

class Big(BaseDocument):
    number: int
    data: NdArray[uint8, 262144]

page = np.arange(262144, dtype=np.uint8)
def rows(count):
    for number in range(count):
        yield Big(number=number, data=page + np.uint8(number % 7))

def peak():  # MiB, of this program alone: getrusage also counts the process that started it
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) // 1024

write_dataset(rows(64), sys.argv[1] + "/warm", document_type=Big, format=sys.argv[2], shard_bytes=8 << 20)
before = peak()
write_dataset(rows(3000), sys.argv[1] + "/cold", document_type=Big, format=sys.argv[2], shard_bytes=32 << 20)
print(peak() - before)
"""


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_memory_is_bounded_while_a_generator_is_written(tmp_path: Path, kind: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _GENERATES, str(tmp_path), kind], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 48  # MiB, of 750
    assert sum(file.stat().st_size for file in (tmp_path / "cold").iterdir()) > 700 << 20


def test_large_documents_are_not_collected(tmp_path: Path) -> None:
    class Big(BaseDocument):
        data: NdArray

    references: list[weakref.ref[Any]] = []

    def rows() -> Iterator[Big]:
        for _ in range(12):
            array = np.zeros(1 << 18)
            references.append(weakref.ref(array))
            yield Big(data=array)
            alive.append(sum(known() is not None for known in references))

    alive: list[int] = []
    write_dataset(rows(), tmp_path, document_type=Big)
    assert max(alive) <= 6
