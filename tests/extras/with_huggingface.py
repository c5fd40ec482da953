"""Open a dataset on a small server that answers as the Hugging Face Hub does."""

from __future__ import annotations

import io
import json
import os
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pyarrow as pa
import pyarrow.parquet as pq

COMMIT = "0" * 40
file = io.BytesIO()
pq.write_table(pa.table({"number": [1, 2, 3]}), file)
CONTENT = file.getvalue()
ENTRY = {"type": "file", "path": "train.parquet", "size": len(CONTENT), "oid": "1" * 40}
MAIN = {"name": "main", "ref": "refs/heads/main", "targetCommit": COMMIT}


class Hub(BaseHTTPRequestHandler):
    """Answers the three calls that opening a dataset takes."""

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        """Answer a request."""
        status, body = 200, json.dumps({"branches": [MAIN], "tags": [], "converts": []}).encode()
        if "/tree/" in self.path:
            body = json.dumps([ENTRY]).encode()
        elif "/resolve/" in self.path:
            start, end = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
            status, body = 206, CONTENT[start : end + 1]
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


server = HTTPServer(("127.0.0.1", 0), Hub)
threading.Thread(target=server.serve_forever, daemon=True).start()
os.environ["HF_ENDPOINT"] = f"http://127.0.0.1:{server.server_address[1]}"

from quire.storage import open_dataset  # noqa: E402 - huggingface_hub reads the environment when it is imported

with tempfile.TemporaryDirectory() as folder:
    dataset = open_dataset("hf://datasets/owner/numbers", split="train", cache=folder)
    assert [row.number for row in dataset] == [1, 2, 3]
    assert dataset[2].number == 3
