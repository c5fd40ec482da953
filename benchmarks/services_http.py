"""Benchmark documents over HTTP: pushed to a server while they are encoded, and sent to a FastAPI route.

services.py runs these rows. The servers are separate processes on loopback. Wall time decides, because the work is
spread over processes and threads.
"""

from __future__ import annotations

import http.client
import multiprocessing
import socket
import time
from collections.abc import Callable
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from typing import Any

import numpy as np
from measure import Contestant, Row, repeated

from quire import BaseDocument, DocumentArray
from quire.array._serialization import encode_stream
from quire.files import Pieces, RemoteOptions, send, split_pieces
from quire.typing import NdArray

MB = 1_000_000
RATE = 100 * MB
PUSHED, PUSHED_GZIP = 200 * MB, 50 * MB  # gzip is slow; zstd takes about as long as sending the compressed bytes
WORKERS = 2
PROTOBUF = "application/x-protobuf"


class Passage(BaseDocument):
    """A text with its embedding."""

    text: str
    embedding: NdArray[512]


class Recording(BaseDocument):
    """64 KB of samples."""

    samples: NdArray[16384]


# --- servers


class _Taker(BaseHTTPRequestHandler):
    """Receives chunked bodies at `RATE` bytes per second, and drops them."""

    protocol_version = "HTTP/1.1"

    def do_PUT(self) -> None:
        began, size = time.perf_counter(), 0
        while length := int(self.rfile.readline(), 16):
            self.rfile.read(length + 2)
            size += length
            time.sleep(max(0.0, began + size / RATE - time.perf_counter()))
        self.rfile.readline()
        self.send_response(201)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Log nothing."""


def _serve_taker(port: Any) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Taker)
    port.send(server.server_port)
    server.serve_forever()


def _serve_routes(port: Any) -> None:
    import uvicorn
    from fastapi import FastAPI

    from quire.services import DocumentRoute

    app = FastAPI()
    app.router.route_class = DocumentRoute
    app.post("/echo")(_echo)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    port.send(listener.getsockname()[1])
    uvicorn.Server(uvicorn.Config(app, log_level="error")).run([listener])


def _echo(docs: DocumentArray[Passage]) -> DocumentArray[Passage]:
    return docs


def start_server(serve: Callable[[Any], None]) -> int:
    """Start a server in a process that ends with this one, and return its port."""
    ours, theirs = multiprocessing.Pipe()
    multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,), daemon=True).start()
    port: int = ours.recv()
    return port


# --- rows


def push_row(compress: str | None) -> Row:
    """Compare a push with its two halves, each alone: encoding the bytes, and sending existing bytes."""
    rows = np.random.default_rng(0).integers(0, 4096, (200, 16384)).astype(np.float32)
    count = (PUSHED_GZIP if compress == "gzip" else PUSHED) // rows[0].nbytes
    docs = DocumentArray[Recording](Recording(samples=rows[i % len(rows)]) for i in range(count))
    url = f"http://127.0.0.1:{start_server(_serve_taker)}/docs"

    def make() -> Pieces:
        options = {"checksums": True, "allow_pickle": False, "workers": WORKERS}
        return split_pieces(chain.from_iterable(encode_stream(docs, docs._documents, None, compress, **options)))

    ready = [bytes(piece) for piece in make()]

    def encode_only() -> None:
        for _ in make():
            pass

    def send_only() -> None:
        send(url, lambda: iter(ready), RemoteOptions())

    halves = sorted(
        [Contestant("encoding only", repeated(encode_only)), Contestant("sending only", repeated(send_only))],
        key=_wall,
    )
    name = compress or "uncompressed"
    size = sum(map(len, ready)) / MB
    return Row(
        title=f"Push, {name}",
        what=f"{count * rows[0].nbytes / MB:.0f} MB of tensors, {size:.0f} MB sent, to a server that accepts "
        f"100 MB/s, {WORKERS} workers; compared with the slower half.",
        quire=Contestant(
            "quire push",
            repeated(lambda: docs.push(url, compress=compress, num_workers=WORKERS, show_progress=False)),
        ),
        reference=halves[-1],
        peers=halves[:-1],
        target=1.1,
        unit="ms",
        by_wall=True,
    )


def _wall(contestant: Contestant) -> float:
    """Return the shortest of three turns."""
    assert contestant.loop is not None
    spent = []
    for _ in range(3):
        began = time.perf_counter()
        contestant.loop(1)
        spent.append(time.perf_counter() - began)
    return min(spent)


def fastapi_row(size: int) -> Row:
    """Compare the round trip of an array in both media types, including encoding and decoding in the client."""
    count = min(size, 256)
    rows = np.random.default_rng(0).random((count, 512), np.float32)
    docs = DocumentArray[Passage](Passage(text=f"passage {i}", embedding=row) for i, row in enumerate(rows))
    port = start_server(_serve_routes)

    def ask(body: Any, media_type: str) -> bytes:
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
            connection.request("POST", "/echo", body, {"Content-Type": media_type, "Accept": media_type})
            answer = connection.getresponse()
            content = answer.read()
            assert answer.status == 200, content
            return content

    def by_json() -> DocumentArray[Passage]:
        return DocumentArray[Passage].from_json(ask(docs.to_json(), "application/json"))

    def by_protobuf() -> DocumentArray[Passage]:
        return DocumentArray[Passage].from_bytes(ask(docs.to_bytes(), PROTOBUF))

    assert by_protobuf() == docs
    assert len(by_json()) == count
    return Row(
        title="FastAPI route",
        what=f"{count} documents with 512 floats, round trip.",
        quire=Contestant("application/x-protobuf", repeated(by_protobuf)),
        reference=Contestant("application/json", repeated(by_json)),
        peers=[],
        target=0.1,
        faster=True,
        unit="ms",
        calls=5,
        by_wall=True,
    )


BUILDERS: dict[str, Callable[[int], Row]] = {
    "push": lambda _: push_row(None),
    "push-zstd": lambda _: push_row("zstd"),
    "push-gzip": lambda _: push_row("gzip"),
    "fastapi": fastapi_row,
}
