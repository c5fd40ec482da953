"""A small store on loopback with the interface of S3, which fails on demand and enforces conditions of writes.

It also has what the XML interface of Google Cloud Storage adds: generations of objects, and conditions on them.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from quire.files import RemoteOptions
from tests.files.http_server import LoopbackServer


class Fault(NamedTuple):
    """What happens to the next request of a method whose query contains a text.

    `kind` is a status, 'cut' for a body that breaks off, 'stall' for one that never ends, or 'lost' for a request that
    is carried out and not answered. A range may be answered by a later one of the same length ('shifted'), by its first
    half ('short'), or by the whole file ('whole').
    """

    method: str
    kind: int | str
    query: str = ""


class S3Server(LoopbackServer):
    """Objects by '/bucket/key'. Uploads in parts appear when they are completed."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, bytes] = {}
        self.generations: dict[str, int] = {}
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.faults: list[Fault] = []
        self.seen: list[tuple[str, str, str]] = []
        self.headers: list[dict[str, str]] = []
        self.released = threading.Event()
        self.lock = threading.Lock()
        self.numbers = itertools.count(1)
        self.gate: Callable[[], None] | None = None
        self.endpoint = f"http://127.0.0.1:{self.server_port}"

    def options(self, **more: Any) -> RemoteOptions:
        keys = {"key": "key", "secret": "secret", "endpoint_url": self.endpoint, "skip_instance_cache": True}
        return RemoteOptions(storage_options={**keys, "client_kwargs": {"region_name": "us-east-1"}}, **more)

    def put(self, path: str, content: bytes) -> None:
        """Store an object, which gets the next generation."""
        self.objects[path] = content
        self.generations[path] = next(self.numbers)

    def methods(self) -> list[str]:
        return [method for method, _, _ in self.seen]

    def next_fault(self, method: str, query: str) -> int | str | None:
        with self.lock:
            for fault in self.faults:
                if fault.method == method and fault.query in query:
                    self.faults.remove(fault)
                    return fault.kind
        return None


@contextmanager
def run_s3_server() -> Iterator[S3Server]:
    server = S3Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.released.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: S3Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_: object) -> None:
        pass

    def _begin(self) -> tuple[str, dict[str, list[str]], bytes]:
        """Read a request; return its path, query and body."""
        parts = urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.seen.append((self.command, unquote(parts.path), parts.query))
        self.server.headers.append({name.lower(): value for name, value in self.headers.items()})
        self.fault = self.server.next_fault(self.command, parts.query)
        if self.server.gate is not None:
            self.server.gate()
        return unquote(parts.path), parse_qs(parts.query, keep_blank_values=True), body

    def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        if self.fault == "lost":
            self.close_connection = True
            return
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        half = len(body) // 2
        if self.command == "HEAD":
            return
        if self.fault in ("cut", "stall"):
            self.wfile.write(body[:half])
            self.wfile.flush()
            if self.fault == "stall":
                self.server.released.wait()
            self.close_connection = True
            return
        self.wfile.write(body)

    def _error(self, status: int, code: str) -> None:
        self._answer(status, f"<Error><Code>{code}</Code><Message>about {code}</Message></Error>".encode())

    def _is_refused(self) -> bool:
        if isinstance(self.fault, int):
            self._error(self.fault, "Injected")
            return True
        return False

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path, query, _ = self._begin()
        if self._is_refused():
            return
        if "list-type" in query or path.count("/") == 1:
            self._list(path, query.get("prefix", [""])[0])
            return
        content = self.server.objects.get(path)
        if content is None:
            self._error(404, "NoSuchKey")
            return
        generation = str(self.server.generations.get(path, 0))
        common = {"ETag": etag(content), "Last_Modified": "Tue, 03 Nov 2026 10:00:00 GMT"}
        common["x_goog_generation"] = generation
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
        if match is None or self.fault == "whole":
            self._answer(200, content, **common)
            return
        start, stop = int(match[1]), min(int(match[2]) + 1, len(content))
        if self.fault == "shifted":
            start, stop = start + 7, stop + 7
        elif self.fault == "short":
            stop = (start + stop) // 2
        if start >= len(content):
            self._error(416, "InvalidRange")
            return
        self._answer(206, content[start:stop], Content_Range=f"bytes {start}-{stop - 1}/{len(content)}", **common)

    def _list(self, bucket: str, prefix: str) -> None:
        start = f"{bucket.rstrip('/')}/"
        items = "".join(
            f"<Contents><Key>{escape(path[len(start) :])}</Key><Size>{len(content)}</Size>"
            "<LastModified>2026-11-03T10:00:00.000Z</LastModified><ETag>x</ETag></Contents>"
            for path, content in sorted(self.server.objects.items())
            if path.startswith(start + prefix)
        )
        self._answer(200, f"<ListBucketResult><IsTruncated>false</IsTruncated>{items}</ListBucketResult>".encode())

    def do_PUT(self) -> None:
        path, query, body = self._begin()
        if self._is_refused():
            return
        if "partNumber" in query:
            self.server.uploads[query["uploadId"][0]][int(query["partNumber"][0])] = body
            self._answer(200, ETag=etag(body))
            return
        with self.server.lock:
            before = self.server.objects.get(path)
            expected = self.headers.get("If-Match")
            fails = self.headers.get("If-None-Match") == "*" and before is not None
            fails = fails or (expected is not None and (before is None or etag(before) != expected))
            generation = self.headers.get("x-goog-if-generation-match")  # 0: there is no object
            current = 0 if before is None else self.server.generations.get(path, 0)
            fails = fails or (generation is not None and int(generation) != current)
            if not fails:
                self.server.put(path, body)
        if fails:
            self._error(412, "PreconditionFailed")
        else:
            self._answer(200, ETag=etag(body), x_goog_generation=str(self.server.generations[path]))

    def do_POST(self) -> None:
        path, query, _ = self._begin()
        if self._is_refused():
            return
        if "uploads" in query:
            upload = f"upload-{next(self.server.numbers)}"
            self.server.uploads[upload] = {}
            self._answer(200, f"<R><UploadId>{upload}</UploadId></R>".encode())
            return
        parts = self.server.uploads.pop(query["uploadId"][0])
        content = b"".join(parts[number] for number in sorted(parts))
        self.server.put(path, content)
        self._answer(200, f"<R><ETag>{etag(content)}</ETag></R>".encode(), x_goog_generation="1")

    def do_DELETE(self) -> None:
        path, query, _ = self._begin()
        if self._is_refused():
            return
        if "uploadId" in query:
            self.server.uploads.pop(query["uploadId"][0], None)
        else:
            self.server.objects.pop(path, None)
        self._answer(204)


def etag(content: bytes) -> str:
    return f'"{hashlib.sha256(content).hexdigest()[:32]}"'
