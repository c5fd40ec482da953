"""Read documents from an HTTP URL."""

from __future__ import annotations

import http.server
import threading

from quire import BaseDocument, DocumentArray


class Sample(BaseDocument):
    number: int


content = DocumentArray[Sample](Sample(number=i) for i in range(3)).to_bytes()


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    documents = DocumentArray[Sample].pull(f"http://127.0.0.1:{server.server_port}/samples.bin")
    assert [sample.number for sample in documents] == [0, 1, 2]
    server.shutdown()
