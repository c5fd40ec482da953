"""Serve an index of photos over gRPC and over HTTP, with one function for both.

python examples/search_service.py

Photos have a vector and a title; a request has one of them or both. The index is a folder (LanceDB). For PostgreSQL,
pass its address: `python examples/search_service.py postgresql://user@host/database`.
"""

from __future__ import annotations

import json
import socket
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import uvicorn
from fastapi import FastAPI

from quire import BaseDocument, DocumentArray
from quire.index import DocumentIndex
from quire.services import Client, DocumentRoute, serve
from quire.typing import NdArray, float32

COLOURS = {"poppy": (0.9, 0.1, 0.1), "meadow": (0.2, 0.8, 0.2), "sky": (0.3, 0.5, 1.0), "snow": (1.0, 1.0, 1.0)}


class Photo(BaseDocument):
    """A photo in the index."""

    title: str
    price: float
    embedding: NdArray[float32, 3]


class Request(BaseDocument):
    """What to search for."""

    text: str | None = None
    vector: NdArray[float32, 3] | None = None
    cheaper_than: float | None = None
    limit: int = 3


class Answer(BaseDocument):
    """The photos, best first, and their scores."""

    photos: DocumentArray[Photo]
    scores: list[float]


def photos(count: int) -> Iterator[Photo]:
    """Yield photos of four colours, with noise."""
    random = np.random.default_rng(0)
    for number in range(count):
        kind = list(COLOURS)[number % len(COLOURS)]
        colour = np.array(COLOURS[kind]) + random.normal(scale=0.02, size=3)
        yield Photo(
            id=f"photo{number}", title=f"{kind} {number}", price=number % 50, embedding=colour.astype(np.float32)
        )


@contextmanager
def serve_http(app: FastAPI) -> Iterator[str]:
    """Run an application in a thread and yield its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join()


def main() -> None:
    """Build the index, and search it by both protocols."""
    with tempfile.TemporaryDirectory() as folder:
        place = sys.argv[1] if len(sys.argv) > 1 else f"lance://{folder}/index"
        index = DocumentIndex[Photo](place, metric="euclidean")
        index.sync(photos(400))

        def search(request: Request) -> Answer:
            where = None if request.cheaper_than is None else {"price": {"$lt": request.cheaper_than}}
            found = index.search(request.vector, text=request.text, where=where, limit=request.limit)
            return Answer(photos=found.documents, scores=found.scores.tolist())

        app = FastAPI()
        app.router.route_class = DocumentRoute
        app.post("/search")(search)
        with serve(search) as service, Client(service.address) as client, serve_http(app) as address:
            answer = client.search(Request(vector=[0.3, 0.5, 1.0], cheaper_than=10))
            print(f"gRPC: {len(answer.photos)} photos near the colour of the sky: {', '.join(answer.photos.title)}")
            assert all(title.startswith("sky") for title in answer.photos.title)
            assert all(price < 10 for price in answer.photos.price)
            request = urllib.request.Request(  # noqa: S310 - the address is our own
                f"{address}/search",
                data=Request(text="snow", vector=[1.0, 1.0, 1.0]).to_json().encode(),
                headers={"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request) as response:  # noqa: S310
                titles = [photo["title"] for photo in json.load(response)["photos"]]
            print(f"HTTP: {len(titles)} photos of snow: {', '.join(titles)}")
            assert all(title.startswith("snow") for title in titles)
        index.close()


if __name__ == "__main__":
    main()
