"""Benchmark typed services compared with plain gRPC, dynamic batching, and HTTP.

    python benchmarks/services.py --rows unary_1mb batching --rounds 5 --keep

Every row is one interleaved run (see measure.py); its result is a ratio of wall times, because throughput
matters. `--size` has no effect.
"""

from __future__ import annotations

import atexit
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import quantiles
from typing import Any

import numpy as np
import services_http
from contest import Builder, parse_options, run
from measure import Contestant, Loop, Row, repeated

from quire import BaseDocument, DocumentArray, DocumentBatch
from quire.services import Client, endpoint, serve
from quire.typing import NdArray, float32, uint8

PACKAGES = ("quire", "grpcio", "protobuf", "fastapi", "numpy", "pydantic")


class Vector(BaseDocument):
    """512 floats."""

    embedding: NdArray[float32, 512]


class Picture(BaseDocument):
    """An image."""

    pixels: NdArray[uint8, 3, 208, 208]


def vectors(number: int) -> DocumentArray[Vector]:
    """Create documents with random vectors."""
    values = np.random.default_rng(0).random((number, 512), np.float32)
    return DocumentArray[Vector]([Vector(embedding=value) for value in values])


# --- 1 MB batches, one client


def echo(docs: DocumentBatch[Vector]) -> DocumentBatch[Vector]:
    """Return the batch."""
    return docs


def echo_rows(docs: DocumentArray[Vector]) -> DocumentArray[Vector]:
    """Return the documents."""
    return docs


def echo_images(docs: DocumentBatch[Picture]) -> DocumentBatch[Picture]:
    """Return the images."""
    return docs


def bare(data: bytes, *options: str) -> Loop:
    """Return a loop that sends the bytes with gRPC alone, both sides in one process that does not import quire."""
    file = Path(tempfile.mkdtemp(prefix="quire-"), "data")
    file.write_bytes(data)
    atexit.register(shutil.rmtree, file.parent)
    command = [sys.executable, str(Path(__file__).with_name("services_bare.py")), str(file), *options]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(process.kill)
    assert process.stdin is not None
    assert process.stdout is not None
    commands, answers = process.stdin, process.stdout
    assert answers.readline() == "ready\n"

    def loop(calls: int) -> None:
        commands.write(f"{calls}\n")
        commands.flush()
        assert answers.readline() == "done\n"

    return loop


def unary_row(_: int) -> Row:
    """Compare `client.echo(batch)` with the same bytes over plain gRPC, without and with memory reuse as in quire."""
    docs = vectors(500)
    batch = docs.stack()
    data = batch.to_bytes()
    pixels = np.random.default_rng(0).integers(0, 255, (8, 3, 208, 208), np.uint8)
    images = DocumentBatch[Picture].from_columns({"pixels": pixels})
    server = serve([echo, echo_rows, echo_images])
    atexit.register(server.stop, 0)
    client = Client(server.address)
    atexit.register(client.close)
    assert client.echo(batch) == batch
    remote, remote_rows, remote_images = client.echo, client.echo_rows, client.echo_images
    return Row(
        title="1 MB batches, unary, one client",
        what=(
            f"500 documents of 512 floats, {len(data) / 1e6:.2f} MB, round trip; both sides in one process, and "
            "plain gRPC in a process of its own, whose CPU time is not counted."
        ),
        quire=Contestant("quire", repeated(lambda: remote(batch))),
        reference=Contestant("plain gRPC, the same bytes", bare(data)),
        peers=[
            Contestant("plain gRPC with memory reuse", bare(data, "keep")),
            Contestant("quire, 8 images of 130 KB", repeated(lambda: remote_images(images))),
            Contestant("quire, documents one by one", repeated(lambda: remote_rows(docs))),
        ],
        target=1 / 0.8,
        faster=True,
        also=("plain gRPC with memory reuse",),
        unit="ms",
        calls=20,
        turns=3,
        by_wall=True,
    )


# --- 64 clients with one document each, and a model that takes 5 ms per call

CLIENTS, TURNS, MODEL_SECONDS = 64, 4, 0.005
_device = threading.Lock()


def model(docs: DocumentArray[Vector]) -> DocumentArray[Vector]:
    """Simulate a model: 5 ms for any number of rows, one call at a time, as on an accelerator."""
    with _device:
        time.sleep(MODEL_SECONDS)
    return docs


@endpoint(max_batch_size=64, max_wait=0.005)
def together(docs: DocumentArray[Vector]) -> DocumentArray[Vector]:
    """Call the model with dynamic batching."""
    return model(docs)


def alone(docs: DocumentArray[Vector]) -> DocumentArray[Vector]:
    """Call the model once per request."""
    return model(docs)


def start_server() -> str:
    """Start a process that serves both endpoints, and return its address."""
    command = [sys.executable, "-m", "quire", "serve", "services:together", "services:alone", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=__file__.rpartition("/")[0] or ".")
    atexit.register(process.kill)
    assert process.stdout is not None
    return process.stdout.readline().removeprefix("serving on ").strip()


def crowd(remote: Any, pool: ThreadPoolExecutor, docs: DocumentArray[Vector]) -> list[float]:
    """Let every client send `TURNS` requests; return the latencies in seconds."""

    def one(_: int) -> list[float]:
        spent = []
        for _ in range(TURNS):
            start = time.perf_counter()
            assert len(remote(docs)) == 1
            spent.append(time.perf_counter() - start)
        return spent

    return [seconds for spent in pool.map(one, range(CLIENTS)) for seconds in spent]


def batching_row(_: int) -> Row:
    """Compare dynamic batching with one call per request."""
    client, pool, docs = Client(start_server()), ThreadPoolExecutor(CLIENTS), vectors(1)
    atexit.register(client.close)
    on, off = client.together, client.alone
    latency = {}
    for name, remote in (("on", on), ("off", off)):
        crowd(remote, pool, docs)
        spent = [seconds for _ in range(5) for seconds in crowd(remote, pool, docs)]
        latency[name] = (
            f"p50 {1e3 * quantiles(spent, n=100)[49]:.0f} ms, p99 {1e3 * quantiles(spent, n=100)[98]:.0f} ms"
        )
    return Row(
        title="64 clients with one document each, a model that takes 5 ms",
        what=(
            f"{CLIENTS * TURNS} requests; the model takes one call at a time. The server is a process of its own. "
            f"Latency with batching: {latency['on']}; without: {latency['off']}."
        ),
        quire=Contestant("batching on", repeated(lambda: crowd(on, pool, docs))),
        reference=Contestant("batching off", repeated(lambda: crowd(off, pool, docs))),
        peers=[],
        target=1 / 3,
        faster=True,
        unit="ms",
        by_wall=True,
    )


ROWS: dict[str, Builder] = {"unary_1mb": unary_row, "batching": batching_row, **services_http.BUILDERS}

if __name__ == "__main__":
    sys.exit(run("services", ROWS, parse_options(str(__doc__), ROWS), PACKAGES))
