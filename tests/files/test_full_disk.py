"""Files that cannot be written or opened: errors that name the path, and no partial files."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import BaseDocument, DocumentArray
from quire.errors import OptionError, StorageError, StorageNotFoundError
from quire.files import open_source, open_target
from quire.typing import NdArray

resource = pytest.importorskip("resource")  # a limit of file sizes acts like a full disk; not on Windows


class Row(BaseDocument):
    text: str
    values: NdArray


ROWS = DocumentArray[Row](Row(text="x" * 5000, values=np.arange(5000)) for _ in range(4))
WRITERS: dict[str, Callable[[Path], Any]] = {
    "save_binary": ROWS.save_binary,
    "save_binary, compressed": lambda path: ROWS.save_binary(path, compress="gzip"),
    "save_binary of a batch": lambda path: ROWS.stack().save_binary(path),
    "save_binary_stream": lambda path: DocumentArray[Row].save_binary_stream(iter(ROWS), path),
    "to_csv": ROWS.to_csv,
    "to_ndjson": ROWS.to_ndjson,
}


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """Limit the size of files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    writes_no_bytecode = sys.dont_write_bytecode
    sys.dont_write_bytecode = True  # it would be truncated, and other processes could not import it
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        sys.dont_write_bytecode = writes_no_bytecode


@pytest.mark.parametrize("size", [0, 1000])
@pytest.mark.parametrize("name", WRITERS)
def test_full_disk_raises_storage_error_and_keeps_old_file(name: str, size: int, tmp_path: Path) -> None:
    path = tmp_path / "rows.bin"
    path.write_bytes(b"old")
    with pytest.raises(StorageError) as caught, full_disk(size):
        WRITERS[name](path)
    assert str(caught.value) == f"{path}: the file cannot be written: File too large."
    assert caught.value.errno == errno.EFBIG
    assert [file.name for file in tmp_path.iterdir()] == ["rows.bin"]
    assert path.read_bytes() == b"old"


@pytest.mark.parametrize("name", WRITERS)
def test_missing_folder_error_names_folder(name: str, tmp_path: Path) -> None:
    path = tmp_path / "missing" / "rows.bin"
    with pytest.raises(StorageNotFoundError) as caught:
        WRITERS[name](path)
    assert str(caught.value) == f"{path}: there is no folder {str(path.parent)!r}."
    assert isinstance(caught.value, FileNotFoundError)


def test_folder_instead_of_file_error_names_path(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=f"^{tmp_path}: the file cannot be written: "):
        ROWS.save_binary(tmp_path)
    with pytest.raises(StorageError, match=f"^{tmp_path}: the file cannot be opened: "):
        DocumentArray[Row].load_binary(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", WRITERS)
def test_pipe_is_written_to_and_not_replaced(name: str, tmp_path: Path) -> None:
    """The same holds for devices such as /dev/stdout, which a test must not risk to replace."""
    file, pipe = tmp_path / "rows.bin", tmp_path / "pipe.bin"
    WRITERS[name](file)
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as pool:
        content = pool.submit(pipe.read_bytes)
        WRITERS[name](pipe)
        assert len(content.result(60)) == file.stat().st_size
    assert pipe.is_fifo()


def test_error_of_a_pipe_names_it(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with (
            pytest.raises(StorageError, match=f"^{pipe}: the file cannot be written: No space left"),
            open_target(pipe),
        ):
            raise OSError(errno.ENOSPC, "No space left on device")
        with pytest.raises(ConnectionError, match="the source is gone"), open_target(pipe):
            raise ConnectionError("the source is gone")
    finally:
        os.close(reader)
    assert pipe.is_fifo()


def test_load_binary_names_missing_file(tmp_path: Path) -> None:
    with pytest.raises(StorageNotFoundError, match=f"^{tmp_path / 'rows.bin'}: there is no such file.$"):
        DocumentArray[Row].load_binary(tmp_path / "rows.bin")


def test_open_target_passes_errors_of_the_caller_on(tmp_path: Path) -> None:
    with pytest.raises(ConnectionError, match="the source is gone"), open_target(tmp_path / "a"):
        raise ConnectionError("the source is gone")
    with pytest.raises(FileNotFoundError) as caught, open_target(tmp_path / "a"):
        (tmp_path / "other").read_bytes()
    assert not isinstance(caught.value, StorageError)
    with pytest.raises(OptionError, match="expected a path or a file object"), open_source(5):  # type: ignore[arg-type]
        pass
    assert list(tmp_path.iterdir()) == []
