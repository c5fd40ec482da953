"""A web server on loopback that serves a folder, counts what it sends, and fails on demand; and samples to stream."""

from __future__ import annotations

import json
import random
import re
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from quire import BaseDocument
from quire.files import RemoteOptions, open_folder
from quire.storage import write_dataset
from quire.storage._block_table import checksum
from quire.storage._manifest import read_manifest
from quire.typing import NdArray, float32
from tests.files.http_server import LoopbackServer

QUICK = RemoteOptions(retries=8, deadline=20.0, timeout=10.0)


class Item(BaseDocument):
    number: int
    text: str = ""
    vector: NdArray[float32, 64]


def items(rows: int) -> Iterator[Item]:
    """Yield documents whose fields all contain their row number."""
    return (
        Item(id=f"id{i}", number=i, text=f"row {i}" * (i % 3), vector=np.full(64, i, np.float32)) for i in range(rows)
    )


def write_items(
    folder: Path, rows: int = 960, *, kind: Any = "arrow", shards: int = 4, block_bytes: int = 6000
) -> Path:
    """Write a dataset of shards of some blocks, of about 20 rows each."""
    documents, size = list(items(rows)), rows // shards
    for start in range(0, rows, size):
        write_dataset(documents[start : start + size], folder, mode="append", format=kind, group_bytes=block_bytes)
    return folder


def rewrite_as_format_1(folder: Path) -> Path:
    """Rewrite a dataset of Arrow shards as quire 0.1 wrote it: plain Arrow files, and one checksum for each file."""
    shards = read_manifest(open_folder(folder)).shards
    shutil.rmtree(folder / "_quire")
    lines = ['{"version": 1}']
    for shard in shards:
        path = folder / shard.name
        reader = pa.ipc.open_file(path.read_bytes())
        batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
        with pa.ipc.new_file(path, reader.schema) as writer:
            for batch in batches:
                writer.write_batch(batch)
        content = path.read_bytes()
        facts = {"name": shard.name, "rows": shard.rows, "bytes": len(content), "groups": [len(b) for b in batches]}
        lines.append(json.dumps({**facts, "xxh3": f"{checksum(content):016x}", "layout": shard.layout}))
    (folder / "_quire").mkdir()
    (folder / "_quire" / "18e88ca7e9519bd8-9ff4e695.jsonl").write_text("\n".join([*lines, ""]))
    index = {"version": 1, "logs": ["18e88ca7e9519bd8-9ff4e695.jsonl"]}
    (folder / "_quire" / "index.json").write_text(json.dumps(index))
    return folder


class Sent(NamedTuple):
    """An answer with content: the file, and the range."""

    name: str
    start: int
    stop: int


class BlockStore(LoopbackServer):
    """Serves the files of a folder.

    `latency` are the seconds before each answer. Of the answers with content, a share of `refused` gets `status`, and a
    share of `cut` breaks off in the middle; `gone` are names that are missing. If more than `most_at_once` of them are
    under way, further ones get 429.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.url = folder, f"http://127.0.0.1:{self.server_port}/data"
        self.latency, self.refused, self.cut, self.status = 0.0, 0.0, 0.0, 503
        self.most_at_once, self.under_way, self.throttled = 1 << 30, 0, 0
        self.gone: set[str] = set()
        self.sent: list[Sent] = []
        self.failures = 0
        self.random = random.Random(0)
        self.lock = threading.Lock()

    def shard_reads(self) -> Counter[Sent]:
        """Return how often each range of a shard was sent."""
        with self.lock:
            return Counter(sent for sent in self.sent if sent.name.endswith((".arrow", ".parquet")))

    def shard_bytes(self) -> int:
        """Return the bytes of shards that were sent."""
        return sum((sent.stop - sent.start) * count for sent, count in self.shard_reads().items())

    def clear(self) -> None:
        """Forget what was sent."""
        with self.lock:
            self.sent.clear()


@contextmanager
def serve_folder(folder: Path) -> Iterator[BlockStore]:
    store = BlockStore(folder)
    thread = threading.Thread(target=store.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield store
    finally:
        store.shutdown()
        store.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: BlockStore
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        path = self._path()
        self._answer(
            200 if path.is_file() else 404, {"Content-Length": str(path.stat().st_size if path.is_file() else 0)}
        )

    def do_GET(self) -> None:
        store, path = self.server, self._path()
        if not path.is_file() or path.name in store.gone:
            self._answer(404, {"Content-Length": "0"})
            return
        with store.lock:
            store.under_way += 1
            is_throttled = store.under_way > store.most_at_once
            store.throttled += is_throttled
        try:
            if is_throttled:
                self._answer(429, {"Content-Length": "0"})
                return
            self._send_content(path)
        finally:
            with store.lock:
                store.under_way -= 1

    def _send_content(self, path: Path) -> None:
        store, name = self.server, path.name
        time.sleep(store.latency)
        with store.lock:
            fate = store.random.random()
        if fate < store.refused:
            store.failures += 1
            self._answer(store.status, {"Content-Length": "0"})
            return
        content = path.read_bytes()
        byte_range = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        start, stop, status, head = 0, len(content), 200, {}
        if byte_range:
            start, stop = int(byte_range[1]), min(int(byte_range[2] or len(content) - 1) + 1, len(content))
            status, head = 206, {"Content-Range": f"bytes {start}-{stop - 1}/{len(content)}"}
        head["Content-Length"] = str(stop - start)
        if fate < store.refused + store.cut:
            store.failures += 1
            self.close_connection = True
            self._answer(status, {**head, "Connection": "close"}, content[start : (start + stop) // 2])
            return
        with store.lock:
            store.sent.append(Sent(name, start, stop))
        self._answer(status, head, content[start:stop])

    def _path(self) -> Path:
        return self.server.folder / self.path.removeprefix("/data").lstrip("/")

    def _answer(self, status: int, head: dict[str, str], content: bytes = b"") -> None:
        self.send_response(status)
        for name, value in head.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)
        self.wfile.flush()
