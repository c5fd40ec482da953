"""Work on arrays in parallel: which steps overlap, and in which order."""

from __future__ import annotations

import os
import time
from itertools import pairwise
from typing import Any

import pytest

from quire import DocumentArray
from quire.documents import Document
from quire.parallel import Backend, Workers

SCALE = 1 / 20
BATCHES = 1024 // 16


def cpu_job(docs: Any) -> Any:
    """A second of work, scaled; the documents tell when it was, by a clock that all processes share."""
    start = time.monotonic()
    time.sleep(1 * SCALE)
    for doc in docs:
        doc.tags = {"start": start, "end": time.monotonic(), "process": os.getpid()}
    return docs


def gpu_job(docs: Any) -> dict[str, float]:
    """Two seconds of work, scaled."""
    start = time.monotonic()
    time.sleep(2 * SCALE)
    return {**docs[0].tags, "gpu start": start, "gpu end": time.monotonic()}


def documents() -> DocumentArray[Document]:
    return DocumentArray.empty(1024)


def test_applied_first_the_two_are_one_after_the_other() -> None:
    da = documents()
    da.apply_batch(cpu_job, batch_size=16, num_worker=4)
    found = [gpu_job(batch) for batch in da.batch(batch_size=16)]
    assert len(found) == BATCHES
    assert max(times["end"] for times in found) <= found[0]["gpu start"]


@pytest.mark.parametrize("backend", ["thread", "process"])
def test_mapped_they_overlap(backend: Backend) -> None:
    with Workers(4, backend).warm_up() as pool:
        found = [gpu_job(batch) for batch in documents().map_batch(cpu_job, batch_size=16, pool=pool)]
    assert len(found) == BATCHES
    assert all(times["end"] <= times["gpu start"] for times in found)
    assert (os.getpid() in {times["process"] for times in found}) == (backend == "thread")
    ahead = [times["start"] < before["gpu end"] for before, times in pairwise(found)]
    assert sum(ahead) > BATCHES / 2  # all, where the machine has time for its workers; none, if nothing overlapped


@pytest.mark.parametrize("backend", ["thread", "process"])
def test_a_stream_of_bytes_is_made_while_it_is_sent(backend: Backend) -> None:
    da = DocumentArray[Document](Document(text=f"text {i}") for i in range(100))

    def chunk(batch: Any) -> tuple[bytes, int]:
        return batch.to_bytes(protocol="protobuf", compress="gzip"), len(batch)

    sent = list(da.map_batch(chunk, batch_size=32, backend=backend, num_worker=2))
    assert [number for _, number in sent] == [32, 32, 32, 4]
    texts = [doc.text for data, _ in sent for doc in DocumentArray[Document].from_bytes(data)]
    assert texts == da.text
