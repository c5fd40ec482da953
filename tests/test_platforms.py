"""quire on systems without fork, memory files and locks of files: the core works under a faked platform.

The tests remove what Windows and macOS lack before quire is imported. They do not replace a run on those systems.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

FAKE = """
import importlib.abc, os, sys
# What the interpreter and the dependencies need of the real platform is imported first.
import asyncio, concurrent.futures.process, concurrent.futures.thread, ctypes, logging.handlers, mmap
import multiprocessing.pool, multiprocessing.queues, multiprocessing.shared_memory, multiprocessing.util
import http.client, shutil, socket, ssl, subprocess, tempfile, urllib.request, uuid
import sysconfig; sysconfig.get_config_vars()
import numpy, rich.console, google.protobuf.message
from pydantic import BaseModel, TypeAdapter
{extra}

MISSING = {missing}
for name in {removed}:
    if hasattr(os, name):
        delattr(os, name)
for name in MISSING:
    sys.modules.pop(name, None)

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in MISSING:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Finder())
sys.platform = {platform!r}
if sys.platform == "win32":
    def refuse(*_):
        raise AttributeError("libc is not available")
    ctypes.CDLL = refuse
    for name in ("MAP_SHARED", "MAP_ANONYMOUS", "MAP_ANON", "MAP_PRIVATE", "PROT_READ", "PROT_WRITE"):
        if hasattr(mmap, name):
            delattr(mmap, name)
for name in [name for name in dir(mmap) if name.startswith("MADV_")]:
    delattr(mmap, name)
"""
POSIX_ONLY = [
    "fork",
    "forkpty",
    "register_at_fork",
    "memfd_create",
    "sched_getaffinity",
    "geteuid",
    "getuid",
    "pwrite",
    "pread",
    "posix_fadvise",
    "mkfifo",
]
PLATFORMS = {
    "win32": (POSIX_ONLY, ["fcntl", "resource", "pwd", "grp", "termios"]),
    "darwin": (["memfd_create", "sched_getaffinity", "posix_fadvise"], []),
}
CORE = """
import pickle
import numpy as np
import quire, quire.data, quire.documents, quire.errors, quire.files, quire.parallel, quire.schema, quire.typing
from quire import BaseDocument, DocumentArray
from quire._lowlevel.forks import ForkSafeLock
from quire._lowlevel.pool import take_buffer
from quire.parallel import parallel_map
from quire.typing import NdArray

class Row(BaseDocument):
    vector: NdArray[3]
    text: str = "a"

rows = DocumentArray[Row](Row(id=str(i), vector=[i, 1, 2]) for i in range(10))
assert len({Row(vector=[1, 2, 3]).id for _ in range(600)}) == 600
batch = rows.stack()
assert batch[[1, 2]].vector[:, 0].tolist() == [1, 2]
for encode, decode in (("to_bytes", "from_bytes"), ("to_json", "from_json")):
    assert getattr(DocumentArray[Row], decode)(getattr(rows, encode)()) == rows
assert pickle.loads(pickle.dumps(rows)) == rows
assert list(parallel_map(len, ["ab", "c"], num_workers=2)) == [2, 1]
with ForkSafeLock():
    assert take_buffer(1 << 20).nbytes == 1 << 20
"""
STORAGE = """
import tempfile
from quire.storage import open_dataset, write_dataset
from quire.data import StreamingDataset

with tempfile.TemporaryDirectory() as folder:
    write_dataset(rows, folder + "/d", format="arrow")
    dataset = open_dataset(folder + "/d", Row)
    assert dataset[[3, 9]].vector[:, 0].tolist() == [3, 9]
    try:
        batches = list(StreamingDataset[Row](folder + "/d", batch_size=4, framework="numpy"))
        assert sorted(id for batch in batches for id in batch.id) == sorted(rows.id)
    except quire.errors.StorageError as error:
        assert sys.platform == "win32" and "locked by flock, which this system does not have" in str(error)
    assert len(pickle.loads(pickle.dumps(dataset))[[1]]) == 1
"""


def run_on(platform: str, code: str, extra: str = "") -> None:
    removed, missing = PLATFORMS[platform]
    setup = FAKE.format(platform=platform, removed=removed, missing=missing, extra=extra)
    done = subprocess.run([sys.executable, "-c", f"{setup}\n{code}"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("platform", PLATFORMS)
def test_core_works_without_posix(platform: str) -> None:
    run_on(platform, CORE)


@pytest.mark.needs("pyarrow", "fsspec", "xxhash")
@pytest.mark.parametrize("platform", PLATFORMS)
def test_datasets_in_arrow_work_without_posix(platform: str) -> None:
    imports = "import pyarrow.dataset, pyarrow.parquet, pyarrow.fs, fsspec, fsspec.asyn, fsspec.core, xxhash\n"
    imports += "import contextlib\nwith contextlib.suppress(ImportError):\n    import torch.utils.data"
    run_on(platform, CORE + STORAGE, imports)


def test_faked_platform_lacks_fork() -> None:
    """Check that the tests above run without what they remove."""
    run_on("win32", "assert not hasattr(os, 'fork')")
    with pytest.raises(AssertionError, match="No module named 'fcntl'"):
        run_on("win32", "import fcntl")
