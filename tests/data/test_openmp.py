"""The data path enters no OpenMP region of torch, whose threads wait for each other on busy machines."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.needs("torch", "pyarrow"), pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]

# The first region that torch enters starts a second thread, so the number of threads shows whether there was one.
PREPARE = """
import os, sys
from pathlib import Path
import numpy as np
import torch
from torch.utils.data import DataLoader
from quire import BaseDocument, DocumentArray, DocumentBatch
from quire.data import MultiModalDataset, StreamingDataset, batched
from quire.storage import write_dataset
from quire.typing import TorchTensor

def threads():
    return len(os.listdir('/proc/self/task'))

class Meta(BaseDocument):
    mask: TorchTensor[64, 64]

class Picture(BaseDocument):
    image: TorchTensor[3, 128, 128]
    half: TorchTensor[1024]
    label: int | None = None
    text: str = ''
    meta: Meta

class Clip(BaseDocument):
    frames: TorchTensor['n', 8192]

def make(count):
    return DocumentArray[Picture](
        Picture(
            image=torch.from_numpy(np.full((128, 128, 3), n, np.float32)).permute(2, 0, 1),
            half=torch.from_numpy(np.full(1024, n, np.int16)).view(torch.bfloat16),
            label=None if n % 5 == 0 else n,
            text=f'text {n}',
            meta=Meta(mask=torch.from_numpy(np.ones((64, 64), np.uint8))),
        )
        for n in range(count)
    )

torch.set_num_threads(2)
documents = make(64)
clips = DocumentArray[Clip](Clip(frames=torch.from_numpy(np.ones((8192, 8 + n % 3), np.float32).T)) for n in range(64))
before = threads()
"""

PATHS = {
    "stack and take": """
batch = documents.stack(framework='torch')
assert batch.take(np.arange(64)).image.shape == (64, 3, 128, 128)
batch.shuffle(0), batch[::2].take([1, 2] * 40), batch[torch.arange(60)]
DocumentBatch[Picture].concat([batch, batch])
batch.fill_missing({'label': -1})
""",
    "padded and ragged columns": """
padded = clips.stack(shapes='pad')
padded.take(np.arange(40)), padded.mask('frames')
ragged = clips.stack(shapes='ragged')
ragged.take(np.arange(40))
""",
    "missing tensors": """
class Optional(BaseDocument):
    image: TorchTensor[3, 128, 128] | None = None
rows = DocumentArray[Optional](Optional(image=None if n % 2 else documents[n].image) for n in range(32))
batch = rows.stack()
batch.fill_missing({'image': 1.0})
MultiModalDataset[Optional](rows, missing={'image': 0.5}).__getitems__(list(range(32)))
""",
    "MultiModalDataset": """
@batched
def keep(column):
    return column
dataset = MultiModalDataset[Picture](documents, {'image': keep, 'meta.mask': lambda mask: mask}, missing={'label': 0})
for seed in range(2):
    for batch in dataset.iter_batches(32, shuffle=True, seed=seed):
        assert batch.image.shape[1:] == (3, 128, 128)
for batch in DataLoader(dataset, 32, shuffle=True, collate_fn=dataset.collate_fn):
    pass
dataset.collate_fn([dataset[n] for n in range(32)])
dataset.preprocess(documents[:40])
""",
    "StreamingDataset": """
import tempfile
folder = tempfile.mkdtemp()
write_dataset(documents, folder, document_type=Picture, format='arrow')
before = threads()  # pyarrow has threads of its own
stream = StreamingDataset[Picture](folder, batch_size=32, seed=1, missing={'label': 0})
for _ in range(2):
    for batch in stream:
        assert batch.image.shape[1:] == (3, 128, 128)
""",
    "batches of workers": """
# torch gives workers one thread each; the trainer receives their batches.
dataset = MultiModalDataset[Picture](documents, missing={'label': 0})
loader = DataLoader(dataset, 16, collate_fn=dataset.collate_fn, num_workers=1, multiprocessing_context='fork')
batches = iter(loader)
before = threads()  # a fork ends threads of BLAS, and the queue to the worker has one
assert [len(next(batches).image) for _ in range(3)] == [16] * 3
""",
    "pickles of rows": """
import pickle
batch = documents.stack(framework='torch')
pickle.loads(pickle.dumps(batch[:64]))
pickle.dumps([document for document in batch])
""",
}


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PREPARE + code],
        env={**os.environ, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize("path", PATHS)
def test_data_path_starts_no_threads_of_torch(path: str) -> None:
    result = run(PATHS[path] + "\nassert threads() == before, (before, threads())\n")
    assert result.returncode == 0, result.stderr


def test_a_region_of_torch_starts_a_thread() -> None:
    """The test above can fail: a gather of torch's own starts a thread that it would count."""
    code = """
column = torch.zeros(0).new_empty(128, 3, 64, 64)
column.index_select(0, torch.arange(64))
assert threads() == before, (before, threads())
"""
    assert "AssertionError: (" in run(code).stderr
