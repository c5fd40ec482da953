"""Read a file from a store with the interface of S3, without fsspec."""

from __future__ import annotations

import http.server
import sys
import threading

from quire.files import RemoteOptions, open_folder

content = bytes(range(100))


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        first, last = self.headers["Range"].removeprefix("bytes=").split("-")
        part = content[int(first) : int(last) + 1]
        self.send_response(206)
        self.send_header("Content-Length", str(len(part)))
        self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
        self.send_header("Last-Modified", "Tue, 03 Nov 2026 10:00:00 GMT")
        self.send_header("ETag", '"1"')
        self.end_headers()
        self.wfile.write(part)

    def log_message(self, *_: object) -> None:
        pass


with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    if sys.version_info >= (3, 11):
        options = RemoteOptions(storage_options={"endpoint_url": address, "anon": True, "region": "us-east-1"})
        folder = open_folder("s3://bucket/data", options)
        assert "fsspec" not in sys.modules
    else:
        folder = open_folder(f"{address}/data")
    assert folder.read_range("a.bin", 10, 20) == content[10:20]
    server.shutdown()
