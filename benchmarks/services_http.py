"""What documents cost over HTTP: pushed to a server while they are made, and through a route of FastAPI.

The rows are those of services.py, which runs them. The servers are processes of their own on loopback. Wall time
decides: the work is spread over processes and threads.
"""

from __future__ import annotations

import http.client
import multiprocessing
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
from measure import Contestant, Row, repeated

from quire import BaseDocument, DocumentArray
from quire.array._remote import _maker
from quire.files import RemoteOptions, send
from quire.typing import NdArray

MB = 1_000_000
RATE = 100 * MB
PUSHED, PACKED = 200 * MB, 50 * MB  # gzip is slow; zstd takes about as long as sending what is left
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
    """Takes bodies in chunks, so many bytes a second, and forgets them."""

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
        """Say nothing."""


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


def started(serve: Callable[[Any], None]) -> int:
    """The port of a server in a process that ends with this one."""
    ours, theirs = multiprocessing.Pipe()
    multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,), daemon=True).start()
    port: int = ours.recv()
    return port


# --- rows


def push_row(compress: str | None) -> Row:
    """Push beside its two halves, each alone: making the bytes, and sending bytes that are there."""
    rows = np.random.default_rng(0).integers(0, 4096, (200, 16384)).astype(np.float32)
    count = (PACKED if compress == "gzip" else PUSHED) // rows[0].nbytes
    docs = DocumentArray[Recording](Recording(samples=rows[i % len(rows)]) for i in range(count))
    url = f"http://127.0.0.1:{started(_serve_taker)}/docs"
    make = _maker(docs, docs._documents, url, {"compress": compress, "num_workers": WORKERS, "show_progress": False})
    ready = [bytes(piece) for piece in make()]

    def making() -> None:
        for _ in make():
            pass

    def sending() -> None:
        send(url, lambda: _given(ready), RemoteOptions())

    halves = sorted(
        [Contestant("making the bytes alone", repeated(making)), Contestant("sending them alone", repeated(sending))],
        key=_wall,
    )
    name = compress or "not packed"
    size = sum(map(len, ready)) / MB
    return Row(
        title=f"Push, {name}",
        what=f"{count * rows[0].nbytes / MB:.0f} MB of tensors, {size:.0f} MB on the line, to a server that takes "
        f"100 MB/s, {WORKERS} workers; against the slower half.",
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


def _given(ready: list[bytes]) -> Iterator[bytes]:
    yield from ready


def _wall(contestant: Contestant) -> float:
    """The shortest of three turns."""
    assert contestant.loop is not None
    spent = []
    for _ in range(3):
        began = time.perf_counter()
        contestant.loop(1)
        spent.append(time.perf_counter() - began)
    return min(spent)


def fastapi_row(size: int) -> Row:
    """One array there and back, by either media type; what the client does to make and read it is counted."""
    count = min(size, 256)
    rows = np.random.default_rng(0).random((count, 512), np.float32)
    docs = DocumentArray[Passage](Passage(text=f"passage {i}", embedding=row) for i, row in enumerate(rows))
    port = started(_serve_routes)

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
        what=f"{count} documents with 512 floats there and back.",
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
