"""An application on a real server on loopback, and a minimal client."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn

JSON = "application/json"
PROTOBUF = "application/x-protobuf"


@dataclass(frozen=True)
class Answer:
    """The response to a request."""

    status: int
    type: str
    body: bytes
    headers: dict[str, str]

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class Site:
    """A running application."""

    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def request(self, path: str, body: Any = None, method: str = "POST", **headers: str) -> Answer:
        """Send a request. Underscores in header names become hyphens, and an iterator is sent in chunks."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with closing(connection):
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body, named, encode_chunked=isinstance(body, Iterator))
            response = connection.getresponse()
            response_headers = dict(response.getheaders())
            content_type = response_headers.get("content-type", "")
            return Answer(response.status, content_type, response.read(), response_headers)


@contextmanager
def run_app(app: Any, *, lifespan: str = "off") -> Iterator[Site]:
    with closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan=lifespan, ws="none"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            yield Site(listener.getsockname()[1])
        finally:
            server.should_exit = True
            thread.join(20)
