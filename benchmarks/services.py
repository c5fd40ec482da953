"""What a typed service costs over bare gRPC, what putting calls together gains, and what HTTP takes.

    python benchmarks/services.py --rows unary_1mb batching --rounds 5 --keep

Every row is one interleaved run (see measure.py); its result is a ratio of wall times, as throughput is what is asked
for. `--size` is of no consequence.
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
    """So many of them."""
    values = np.random.default_rng(0).random((number, 512), np.float32)
    return DocumentArray[Vector]([Vector(embedding=value) for value in values])


# --- 1 MB batches, one client


def echo(docs: DocumentBatch[Vector]) -> DocumentBatch[Vector]:
    """The batch again."""
    return docs


def echo_rows(docs: DocumentArray[Vector]) -> DocumentArray[Vector]:
    """The documents again."""
    return docs


def echo_images(docs: DocumentBatch[Picture]) -> DocumentBatch[Picture]:
    """The images again."""
    return docs


def bare(data: bytes, *options: str) -> Loop:
    """The same bytes through gRPC alone, both sides in one process that knows nothing of quire."""
    file = Path(tempfile.mkdtemp(prefix="quire-"), "data")
    file.write_bytes(data)
    atexit.register(shutil.rmtree, file.parent)
    command = [sys.executable, str(Path(__file__).with_name("services_bare.py")), str(file), *options]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(process.kill)
    assert process.stdin is not None
    assert process.stdout is not None
    tell, hear = process.stdin, process.stdout
    assert hear.readline() == "ready\n"

    def loop(calls: int) -> None:
        tell.write(f"{calls}\n")
        tell.flush()
        assert hear.readline() == "done\n"

    return loop


def unary_row(_: int) -> Row:
    """`client.echo(batch)`, against the same bytes through gRPC alone, as it is and with memory kept as quire does."""
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
            f"500 documents of 512 floats, {len(data) / 1e6:.2f} MB, there and back; both sides in one process, "
            "and gRPC alone in one of its own, whose CPU time is not counted."
        ),
        quire=Contestant("quire", repeated(lambda: remote(batch))),
        reference=Contestant("bare gRPC, the same bytes", bare(data)),
        peers=[
            Contestant("bare gRPC that keeps its memory, too", bare(data, "keep")),
            Contestant("quire, 8 images of 130 KB", repeated(lambda: remote_images(images))),
            Contestant("quire, documents one by one", repeated(lambda: remote_rows(docs))),
        ],
        target=1 / 0.8,
        faster=True,
        also=("bare gRPC that keeps its memory, too",),
        unit="ms",
        calls=20,
        turns=3,
        by_wall=True,
    )


# --- 64 clients with a document each, and a model that takes 5 ms a call

CLIENTS, TURNS, MODEL_SECONDS = 64, 4, 0.005
_device = threading.Lock()


def model(docs: DocumentArray[Vector]) -> DocumentArray[Vector]:
    """A call of a model: 5 ms, however many rows, and one at a time, as on an accelerator."""
    with _device:
        time.sleep(MODEL_SECONDS)
    return docs


@endpoint(max_batch_size=64, max_wait=0.005)
def together(docs: DocumentArray[Vector]) -> DocumentArray[Vector]:
    """The model, for calls that are put together."""
    return model(docs)


def alone(docs: DocumentArray[Vector]) -> DocumentArray[Vector]:
    """The model, for each call."""
    return model(docs)


def start_server() -> str:
    """A process with both; its address."""
    command = [sys.executable, "-m", "quire", "serve", "services:together", "services:alone", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=__file__.rpartition("/")[0] or ".")
    atexit.register(process.kill)
    assert process.stdout is not None
    return process.stdout.readline().removeprefix("serving on ").strip()


def crowd(remote: Any, pool: ThreadPoolExecutor, docs: DocumentArray[Vector]) -> list[float]:
    """Every client asks so many times; the seconds that each answer took."""

    def one(_: int) -> list[float]:
        spent = []
        for _ in range(TURNS):
            start = time.perf_counter()
            assert len(remote(docs)) == 1
            spent.append(time.perf_counter() - start)
        return spent

    return [seconds for spent in pool.map(one, range(CLIENTS)) for seconds in spent]


def batching_row(_: int) -> Row:
    """Calls put together, against each alone."""
    client, pool, docs = Client(start_server()), ThreadPoolExecutor(CLIENTS), vectors(1)
    atexit.register(client.close)
    on, off = client.together, client.alone
    late = {}
    for name, remote in (("on", on), ("off", off)):
        crowd(remote, pool, docs)
        spent = [seconds for _ in range(5) for seconds in crowd(remote, pool, docs)]
        late[name] = f"p50 {1e3 * quantiles(spent, n=100)[49]:.0f} ms, p99 {1e3 * quantiles(spent, n=100)[98]:.0f} ms"
    return Row(
        title="64 clients, a document each, a model of 5 ms",
        what=(
            f"{CLIENTS * TURNS} requests; the model takes one call at a time. The server is a process of its own. "
            f"An answer takes, with batching, {late['on']}; without, {late['off']}."
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
