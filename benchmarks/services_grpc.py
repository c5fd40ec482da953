"""Rows about calls over gRPC: quire compared with gRPC alone and with Arrow Flight.

Every server is a process of its own, whose CPU time counts. The clients are in one process, which keeps the memory of
messages, so the server of plain gRPC keeps it too.
"""

from __future__ import annotations

import atexit
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

import grpc
import numpy as np
import pyarrow as pa
from contest import Builder
from measure import Contestant, Row, cpu_seconds_of, repeated
from pyarrow import flight
from results import Goal, Section

from quire import BaseDocument, DocumentArray, DocumentBatch
from quire.services import Client, Limits, endpoint, serve
from quire.typing import NdArray, float32

FOLDER = Path(__file__).parent
STREAMED = 16
"""The batches of a stream."""


class Vector(BaseDocument):
    """512 floats: 2 KB."""

    embedding: NdArray[float32, 512]


def vectors(number: int) -> DocumentArray[Vector]:
    """Create documents with random vectors."""
    values = np.random.default_rng(0).random((number, 512), np.float32)
    return DocumentArray[Vector]([Vector(embedding=value) for value in values])


def echo(docs: DocumentBatch[Vector]) -> DocumentBatch[Vector]:
    """Return the batch."""
    return docs


def echo_rows(docs: DocumentArray[Vector]) -> DocumentArray[Vector]:
    """Return the documents."""
    return docs


def echo_one(doc: Vector) -> Vector:
    """Return the document."""
    return doc


@endpoint(max_batch_size=64, max_wait=0.001)
def scale(docs: DocumentBatch[Vector]) -> DocumentBatch[Vector]:
    """Work for about as long as the rows take to be copied, with dynamic batching."""
    docs.embedding = docs.embedding * 2
    return docs


def pass_on(docs: Iterator[Vector]) -> Iterator[Vector]:
    """Yield what arrives."""
    yield from docs


def start(*command: str) -> tuple[str, int]:
    """Start a server, and return its address and its process id."""
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True, cwd=FOLDER)
    atexit.register(process.kill)
    assert process.stdout is not None
    line = process.stdout.readline().removeprefix("serving on ").strip()
    return (line if ":" in line else f"127.0.0.1:{line}"), process.pid


def start_quire(*options: str) -> tuple[Client, int]:
    """Start a process that serves the functions, and return a client and the process id."""
    names = [f"services_grpc:{name}" for name in ("echo", "echo_rows", "echo_one", "scale")]
    address, pid = start("-m", "quire", "serve", *names, "--port", "0", *options)
    client = Client(address)
    atexit.register(client.close)
    return client, pid


def start_bare(*options: str) -> tuple[Any, int]:
    """Start a process that serves bytes with gRPC alone, and return a channel and the process id."""
    address, pid = start("services_bare.py", "grpc", *options)
    channel = grpc.insecure_channel(address, [("grpc.max_receive_message_length", 64 << 20)])
    atexit.register(channel.close)
    return channel, pid


def open_flight() -> tuple[Any, int]:
    """Start a process that serves Arrow Flight, and return a client and the process id."""
    address, pid = start("services_bare.py", "flight")
    return flight.connect(f"grpc://{address}"), pid


def as_record_batch(batch: DocumentBatch[Vector]) -> Any:
    """Return the same data as Arrow holds it: the vectors, and the ids."""
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(batch.embedding.ravel()), 512)
    return pa.record_batch({"id": pa.array(batch["id"]), "embedding": vectors})


def exchange(client: Any, table: Any, number: int = 1) -> None:
    """Send batches in an exchange of Arrow Flight, and read them back."""
    writer, reader = client.do_exchange(flight.FlightDescriptor.for_path("echo"))
    with writer:
        writer.begin(table.schema)
        for _ in range(number):
            writer.write_batch(table)
            assert reader.read_chunk().data.num_rows == table.num_rows
        writer.done_writing()


def unary_row(_: int) -> Row:
    """Compare `client.echo(batch)` with the same bytes over gRPC alone."""
    docs = vectors(500)
    batch = docs.stack()
    data, table = batch.to_bytes(), as_record_batch(batch)
    client, pid = start_quire()
    bare, bare_pid = start_bare("keep")
    fresh, fresh_pid = start_bare()
    arrow, arrow_pid = open_flight()
    assert client.echo(batch) == batch
    call, call_fresh = (channel.unary_unary("/bare.Service/Echo") for channel in (bare, fresh))
    echo_batch, echo_documents = client.echo, client.echo_rows
    copying, head, rest = bare.unary_unary("/bare.Service/Copy"), data[:64], memoryview(data)[64:]
    return Row(
        title="1 MB batches, unary, one client",
        what=f"500 documents of 512 floats, {len(data) / 1e6:.2f} MB, round trip.",
        quire=Contestant("quire", repeated(lambda: echo_batch(batch)), processes=[pid]),
        reference=Contestant("gRPC, the same bytes", repeated(lambda: call(data)), processes=[bare_pid]),
        peers=[
            Contestant(
                "gRPC, one copy on each side", repeated(lambda: copying(b"".join((head, rest)))), processes=[bare_pid]
            ),
            Contestant("gRPC, fresh memory", repeated(lambda: call_fresh(data)), processes=[fresh_pid]),
            Contestant("Arrow Flight", repeated(partial(exchange, arrow, table)), processes=[arrow_pid]),
            Contestant("quire, documents one by one", repeated(lambda: echo_documents(docs)), processes=[pid]),
        ],
        target=1.1,
        cpu_target=1.15,
        unit="ms",
        calls=20,
        turns=3,
        by_wall=True,
    )


def stream_row(_: int) -> Row:
    """Compare a stream of batches with a stream of the same bytes."""
    batch = vectors(500).stack()
    data, table = batch.to_bytes(), as_record_batch(batch)
    client, pid = start_quire()
    bare, bare_pid = start_bare("keep")
    arrow, arrow_pid = open_flight()
    stream, echo_stream = bare.stream_stream("/bare.Service/EchoStream"), client.echo.stream

    def with_grpc() -> None:
        assert sum(1 for _ in stream(iter([data] * STREAMED))) == STREAMED

    def with_quire() -> None:
        assert sum(len(answer) for answer in echo_stream([batch] * STREAMED)) == 500 * STREAMED

    return Row(
        title=f"A stream of {STREAMED} batches of 1 MB",
        what="Both directions, one client. Arrow Flight sends the next batch when the one before has come back.",
        quire=Contestant("quire", repeated(with_quire), processes=[pid]),
        reference=Contestant("gRPC, the same bytes", repeated(with_grpc), processes=[bare_pid]),
        peers=[Contestant("Arrow Flight", repeated(partial(exchange, arrow, table, STREAMED)), processes=[arrow_pid])],
        target=1.15,
        unit="ms",
        calls=2,
        turns=3,
        by_wall=True,
    )


def document_row(_: int) -> Row:
    """Compare a call with one document of 2 KB with the same bytes."""
    doc = vectors(1)[0]
    client, pid = start_quire()
    bare, bare_pid = start_bare("keep")
    call, data, echo_document = bare.unary_unary("/bare.Service/Echo"), doc.to_bytes(), client.echo_one
    one = vectors(1).stack()
    echo_batch = client.echo
    return Row(
        title="One document of 2 KB, unary, one client",
        what="The median of single calls.",
        quire=Contestant("quire", repeated(lambda: echo_document(doc)), processes=[pid]),
        reference=Contestant("gRPC, the same bytes", repeated(lambda: call(data)), processes=[bare_pid]),
        peers=[Contestant("quire, a batch of one row", repeated(lambda: echo_batch(one)), processes=[pid])],
        target=1.3,
        unit="us",
        turns=300,
        by_wall=True,
    )


def metrics_section(_: int) -> Section:
    """Compare servers with metrics with servers without.

    Two processes that serve the same differ by more than the metrics take, so there are several of each, and only their
    own CPU time counts.
    """
    batch, calls = vectors(500).stack(), 60
    kinds = {"without metrics": (), "with metrics": ("--metrics", "0")}
    servers = [(kind, *start_quire(*options)) for _ in range(3) for kind, options in kinds.items()]
    rounds: list[dict[str, list[float]]] = []
    for _ in range(15):
        rounds.append({kind: [] for kind in kinds})
        for kind, client, pid in servers:
            client.echo(batch)
            before = cpu_seconds_of(pid)
            for _ in range(calls):
                client.echo(batch)
            rounds[-1][kind].append(1e3 * (cpu_seconds_of(pid) - before) / calls)
    ratios = [mean(each["with metrics"]) / mean(each["without metrics"]) for each in rounds]
    lines = [
        [kind, f"{median(mean(each[kind]) for each in rounds):.3f}", f"{min(min(each[kind]) for each in rounds):.3f}"]
        for kind in kinds
    ]
    return Section(
        "metrics",
        "Metrics of 1 MB batches",
        f"CPU milliseconds of the server for a call, of 3 servers each. 15 rounds, calls per round: {calls}.",
        ["", "median", "min"],
        lines,
        [Goal("with metrics", "without metrics", ratios, "CPU", at_most=1.01)],
        {},
    )


# --- latencies of callers next to others


def latencies(call: Callable[[], object], callers: int, seconds: float) -> list[float]:
    """Let callers call for some seconds, with pauses, and return the milliseconds of all calls."""
    end = time.perf_counter() + seconds

    def run(_: int) -> list[float]:
        spent = []
        while time.perf_counter() < end:
            began = time.perf_counter()
            call()
            spent.append(1e3 * (time.perf_counter() - began))
            time.sleep(0.002)
        return spent

    with ThreadPoolExecutor(callers) as pool:
        return [each for spent in pool.map(run, range(callers)) for each in spent]


def percentile_99(values: Sequence[float]) -> float:
    """Return the 99th percentile."""
    return quantiles(values, n=100)[98]


def fairness_section(_: int) -> Section:
    """Compare small calls alone with small calls next to requests of 4,096 rows, which fill the same batches."""
    client, _ = start_quire()
    other = Client(client.target)
    one, huge = vectors(1).stack(), vectors(4096).stack()
    client.scale(huge)

    def next_to_huge() -> list[float]:
        done = threading.Event()

        def send() -> None:
            while not done.is_set():
                other.scale(huge)

        thread = threading.Thread(target=send)
        thread.start()
        try:
            return latencies(lambda: client.scale(one), 16, 3)
        finally:
            done.set()
            thread.join()

    return _latency_section(
        "fairness",
        "16 callers of one row next to requests of 4,096 rows",
        "Dynamic batching with batches of 64 rows. The clients and the server share two cores.",
        ("alone", "next to 4,096 rows"),
        lambda: latencies(lambda: client.scale(one), 16, 3),
        next_to_huge,
    )


def open_streams_section(_: int) -> Section:
    """Compare unary calls alone with unary calls while idle streams are open up to the limit."""
    server = serve([echo_one, pass_on], limits=Limits(max_streams=64))
    atexit.register(server.stop, 0)
    client, doc = Client(server.address), vectors(1)[0]
    client.echo_one(doc)

    def next_to_streams() -> list[float]:
        gate = threading.Event()

        def values() -> Any:
            yield doc
            gate.wait()

        with Client(server.address) as streams:
            opened = [streams.pass_on(values()) for _ in range(64)]
            for stream in opened:
                next(stream)
            try:
                return latencies(lambda: client.echo_one(doc), 8, 3)
            finally:
                gate.set()
                for stream in opened:
                    stream.close()

    return _latency_section(
        "open_streams",
        "Unary calls next to 64 idle streams",
        "As many streams as `max_streams` allows, opened by one client; 8 unary callers.",
        ("alone", "next to streams"),
        lambda: latencies(lambda: client.echo_one(doc), 8, 3),
        next_to_streams,
    )


def _latency_section(
    name: str,
    title: str,
    text: str,
    names: tuple[str, str],
    alone: Callable[[], list[float]],
    beside: Callable[[], list[float]],
) -> Section:
    """Measure two situations in turns, and compare their 99th percentiles; at most twice as long is the target."""
    rounds = [(alone(), beside()) for _ in range(5)]
    ratios = [percentile_99(after) / percentile_99(before) for before, after in rounds]
    lines = [
        [label, *(f"{quantiles(all_values, n=100)[part - 1]:.1f}" for part in (50, 99)), f"{len(all_values):,}"]
        for label, all_values in zip(
            names, ([v for pair in rounds for v in pair[side]] for side in (0, 1)), strict=True
        )
    ]
    goal = Goal(f"p99 {names[1]}", f"p99 {names[0]}", ratios, "wall", at_most=2.0)
    return Section(
        name, title, f"{text} 5 rounds of 3 seconds each.", ["", "p50 ms", "p99 ms", "calls"], lines, [goal], {}
    )


BUILDERS: dict[str, Builder] = {
    "unary_1mb": unary_row,
    "stream_1mb": stream_row,
    "document_2kb": document_row,
    "metrics": metrics_section,
    "fairness": fairness_section,
    "open_streams": open_streams_section,
}
