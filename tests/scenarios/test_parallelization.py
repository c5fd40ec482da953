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
    """Work for a scaled second; the documents record when, by a clock that all processes share."""
    start = time.monotonic()
    time.sleep(1 * SCALE)
    for doc in docs:
        doc.tags = {"start": start, "end": time.monotonic(), "process": os.getpid()}
    return docs


def gpu_job(docs: Any) -> dict[str, float]:
    """Work for two scaled seconds."""
    start = time.monotonic()
    time.sleep(2 * SCALE)
    return {**docs[0].tags, "gpu start": start, "gpu end": time.monotonic()}


def documents() -> DocumentArray[Document]:
    return DocumentArray.empty(1024)


def test_apply_finishes_before_the_next_step_starts() -> None:
    da = documents()
    da.apply_batch(cpu_job, batch_size=16, num_worker=4)
    results = [gpu_job(batch) for batch in da.batch(batch_size=16)]
    assert len(results) == BATCHES
    assert max(times["end"] for times in results) <= results[0]["gpu start"]


@pytest.mark.parametrize("backend", ["thread", "process"])
def test_map_batch_overlaps_with_the_next_step(backend: Backend) -> None:
    with Workers(4, backend).warm_up() as pool:
        results = [gpu_job(batch) for batch in documents().map_batch(cpu_job, batch_size=16, pool=pool)]
    assert len(results) == BATCHES
    assert all(times["end"] <= times["gpu start"] for times in results)
    assert (os.getpid() in {times["process"] for times in results}) == (backend == "thread")
    ahead = [times["start"] < before["gpu end"] for before, times in pairwise(results)]
    assert sum(ahead) > BATCHES / 2  # all, where the machine has time for its workers; none, if nothing overlapped


@pytest.mark.parametrize("backend", ["thread", "process"])
def test_byte_stream_is_encoded_while_it_is_consumed(backend: Backend) -> None:
    da = DocumentArray[Document](Document(text=f"text {i}") for i in range(100))

    def chunk(batch: Any) -> tuple[bytes, int]:
        return batch.to_bytes(protocol="protobuf", compress="gzip"), len(batch)

    sent = list(da.map_batch(chunk, batch_size=32, backend=backend, num_worker=2))
    assert [number for _, number in sent] == [32, 32, 32, 4]
    texts = [doc.text for data, _ in sent for doc in DocumentArray[Document].from_bytes(data)]
    assert texts == da.text
