"""A real HTTP server on loopback that accepts uploads in chunks and fails on demand."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tests.files.http_server import FileHandler, Site


class UploadServer(Site):
    """Stores uploaded files by path once they are complete. See `Site`.

    `breaks` has the numbers of bytes after which the next bodies are broken off, without an answer; `refuses` is the
    number of bytes after which a body is too large. `etags` are the ETags of the next answers. `reads` is cleared to
    stop reading, and `rate` limits the bytes per second.
    """

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(files)
        self.RequestHandlerClass = _UploadHandler
        self.breaks: list[int] = []
        self.refuses: int | None = None
        self.rate: float | None = None
        self.reads = threading.Event()
        self.reads.set()
        self.received = 0
        self.headers: list[dict[str, str]] = []
        self.unfinished = 0
        self.some = threading.Event()
        self.etags: list[str] = []


@contextmanager
def run_upload_server() -> Iterator[UploadServer]:
    site = UploadServer({})
    thread = threading.Thread(target=site.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield site
    finally:
        site.released.set()
        site.reads.set()
        site.shutdown()
        site.server_close()
        thread.join()


class _UploadHandler(FileHandler):
    server: UploadServer

    def do_PUT(self) -> None:  # noqa: N802 - http.server looks for it
        site = self.server
        site.seen.append((self.command, self.path, None))
        site.headers.append(dict(self.headers))
        if site.failures:
            site.failures -= 1
            self.close_connection = True
            return self._send(site.status, b"", {})
        if site.hangs:
            site.released.wait()
        content = bytearray()
        stop = site.breaks.pop(0) if site.breaks else None
        began = time.monotonic()
        while chunk := self._read_chunk():
            content += chunk
            site.received += len(chunk)
            site.some.set()
            site.reads.wait()
            if stop is not None and len(content) >= stop:
                self.close_connection = True
                return None
            if site.refuses is not None and len(content) >= site.refuses:
                self.close_connection = True
                return self._send(413, b"", {})
            if site.rate is not None:
                time.sleep(max(0.0, began + len(content) / site.rate - time.monotonic()))
        if chunk is None:
            site.unfinished += 1
            self.close_connection = True
            return None
        site.files[self.path] = bytes(content)
        return self._send(201, b"", {})

    def _send(self, status: int, content: bytes, head: dict[str, str]) -> None:
        etag = {"ETag": self.server.etags.pop(0)} if self.server.etags else {}
        super()._send(status, content, {**head, **etag})

    def _read_chunk(self) -> bytes | None:
        """Return the next chunk, an empty one at the end; None if the client has disconnected."""
        size = self.rfile.readline().strip()
        if not size:
            return None
        chunk = self.rfile.read(int(size, 16))
        return chunk if len(chunk) == int(size, 16) and self.rfile.readline() else None
