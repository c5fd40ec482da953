"""Benchmark typed services compared with plain gRPC, dynamic batching, and HTTP.

    python benchmarks/services.py --rows unary_1mb batching --rounds 5 --keep

Every row is one interleaved run (see measure.py); its result is a ratio of wall times, because throughput
matters. `--size` has no effect.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from statistics import quantiles
from typing import Any

import services_grpc
import services_http
from contest import Builder, parse_options, run
from measure import Contestant, Row, repeated
from services_grpc import Vector, start, vectors

from quire import DocumentArray
from quire.services import Client, endpoint

PACKAGES = ("quire", "grpcio", "protobuf", "pyarrow", "fastapi", "numpy", "pydantic")


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
    return start("-m", "quire", "serve", "services:together", "services:alone", "--port", "0")[0]


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


ROWS: dict[str, Builder] = {**services_grpc.BUILDERS, "batching": batching_row, **services_http.BUILDERS}

if __name__ == "__main__":
    sys.exit(run("services", ROWS, parse_options(str(__doc__), ROWS), PACKAGES))
