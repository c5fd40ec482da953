"""A real HTTP server on loopback that serves files and fails on demand."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class LoopbackServer(ThreadingHTTPServer):
    """A server that prints no traceback when a client disconnects during an answer."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class Site(LoopbackServer):
    """Files by path.

    The first `failures` requests get `status` and, if it is not empty, the header `retry_after`. `hangs` never answers,
    and the next `cuts` bodies break off. The next `wrong_ranges` ranges begin `shift` bytes later than requested (None:
    the header is missing), and ranges have at most `longest_range` bytes.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), FileHandler)
        self.files = {f"/data/{name}": content for name, content in files.items()}
        self.failures, self.status, self.retry_after = 0, 503, ""
        self.ranges, self.lengths, self.hangs, self.cuts = True, True, False, 0
        self.wrong_ranges, self.longest_range = 0, 1 << 30
        self.shift: int | None = 0
        self.released = threading.Event()
        self.seen: list[tuple[str, str, str | None]] = []
        self.url = f"http://127.0.0.1:{self.server_port}/data"


@contextmanager
def serve_files(files: dict[str, bytes]) -> Iterator[Site]:
    site = Site(files)
    thread = threading.Thread(target=site.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield site
    finally:
        site.released.set()
        site.shutdown()
        site.server_close()
        thread.join()


class FileHandler(BaseHTTPRequestHandler):
    server: Site
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, *, body: bool) -> None:
        site = self.server
        site.seen.append((self.command, self.path, self.headers.get("Range")))
        if site.hangs:
            site.released.wait()
        if site.failures:
            site.failures -= 1
            return self._send(site.status, b"", {"Retry-After": site.retry_after} if site.retry_after else {})
        if self.path.rstrip("/") == "/data":
            links = "".join(f'<a href="{name.removeprefix("/data/")}">x</a>' for name in site.files)
            return self._send(200, links.encode() if body else b"", {"Content-Type": "text/html"})
        content = site.files.get(self.path)
        if content is None:
            return self._send(404, b"", {})
        return self._send_file(content, body=body)

    def _send_file(self, content: bytes, *, body: bool) -> None:
        site = self.server
        byte_range = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        status, head = 200, {"Content-Length": str(len(content))}
        if byte_range and site.ranges:
            start, stop = int(byte_range[1]), int(byte_range[2] or len(content) - 1) + 1
            stop = min(stop, start + site.longest_range)
            if body and site.wrong_ranges:
                start += site.shift or 0
            head = {"Content-Range": f"bytes {start}-{stop - 1}/{len(content)}"}
            if body and site.wrong_ranges:
                site.wrong_ranges -= 1
                if site.shift is None:
                    del head["Content-Range"]
            status, content = 206, content[start:stop]
            head["Content-Length"] = str(len(content))
        if not site.lengths:
            del head["Content-Length"]
            self.close_connection = True
        if body and site.cuts:
            site.cuts -= 1
            content = content[: len(content) // 2]
            self.close_connection = True
        self._send(status, content if body else b"", head)

    def _send(self, status: int, content: bytes, head: dict[str, str]) -> None:
        self.send_response(status)
        if "Content-Length" not in head and self.server.lengths:
            head["Content-Length"] = str(len(content))
        for name, value in head.items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content)
