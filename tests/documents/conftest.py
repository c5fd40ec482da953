"""An HTTP server on loopback with good and bad responses, and an empty working directory."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.files.http_server import LoopbackServer

BODY = b"0123456789" * 1000


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        name = re.split(r"[/?.]", self.path)[1]
        getattr(self, f"_{name}", self._missing)()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Suppress the log."""

    def _send(self, content: bytes, *, announced: int | None = None, code: int = 200, **headers: str) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content) if announced is None else announced))
        self.end_headers()
        self.wfile.write(content)

    def _missing(self) -> None:
        self._send(b"nothing", code=404)

    def _broken(self) -> None:
        self._send(b"ouch", code=500)

    def _body(self) -> None:
        self._send(BODY)

    def _picture(self) -> None:
        self._send(self.server.picture)  # type: ignore[attr-defined]

    def _echo(self) -> None:
        self._send(self.path.encode())

    def _agent(self) -> None:
        self._send(str(self.headers["User-Agent"]).encode())

    def _chunked(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for start in range(0, len(BODY), 1000):
            self.wfile.write(b"3E8\r\n" + BODY[start : start + 1000] + b"\r\n")
        self.wfile.write(b"0\r\n\r\n")

    def _halfchunk(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.write(b"3E8\r\n" + BODY[:500])
        self.close_connection = True

    def _short(self) -> None:
        self._send(BODY[:500], announced=len(BODY))
        self.close_connection = True

    def _moved(self) -> None:
        self._send(b"", code=302, Location="/body")

    def _trap(self) -> None:
        self._send(b"", code=302, Location="file:///etc/hostname")

    def _silent(self) -> None:
        self.server.released.wait(10)  # type: ignore[attr-defined]
        self.close_connection = True

    def _drip(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        for _ in range(1000):
            if self.server.released.is_set():  # type: ignore[attr-defined]
                break
            try:
                self.wfile.write(b"x")
            except OSError:
                break
            time.sleep(0.05)
        self.close_connection = True


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadingHTTPServer]:
    """Start a server with good and faulty responses; `server.picture` is the body of /picture.png."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    httpd = LoopbackServer(("127.0.0.1", 0), _Handler)
    httpd.daemon_threads = True
    httpd.released = threading.Event()  # type: ignore[attr-defined]
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield httpd
    httpd.released.set()  # type: ignore[attr-defined]
    httpd.shutdown()
    httpd.server_close()
    thread.join()


@pytest.fixture
def address(server: ThreadingHTTPServer) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to an empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
