"""Sample documents, and an HTTP client of a running viewer, with and without its cookie."""

from __future__ import annotations

import http.client
import io
import json
import wave
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum
from functools import cache
from typing import Any
from urllib.parse import urlencode, urlsplit

import numpy as np
from PIL import Image as Pillow

from quire import BaseDocument, DocumentArray
from quire.media import encode_video
from quire.typing import NdArray
from quire.viewer import Viewer

HOSTILE = '<img src=x onerror="document.title=\'taken\'"><script>document.title="taken"</script>'


class Kind(Enum):
    hill = 1
    lake = 2
    town = 3


class Sound(BaseDocument):
    tensor: NdArray[4000, np.float32]
    rate: int = 8000


class Author(BaseDocument):
    name: str
    born: int | None = None


class Place(BaseDocument):
    picture: bytes
    caption: str
    kind: Kind
    score: float | None = None
    visits: int
    open: bool
    taken: datetime
    relief: NdArray[12, 16, np.float32]
    pixels: NdArray[3, 16, 16, np.uint8]
    embedding: NdArray[8, np.float32]
    sound: Sound | None = None
    recording: bytes | None = None
    film: bytes | None = None
    link: str
    file: str
    author: Author
    authors: DocumentArray[Author]
    tags: list[str]
    more: dict[str, Any]


def png(colour: tuple[int, int, int], size: tuple[int, int] = (60, 40)) -> bytes:
    buffer = io.BytesIO()
    Pillow.new("RGB", size, colour).save(buffer, "PNG")
    return buffer.getvalue()


def wav(seconds: float = 0.5, rate: int = 8000) -> bytes:
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((np.sin(np.arange(int(rate * seconds)) / 6) * 9000).astype("<i2").tobytes())
    return buffer.getvalue()


@cache
def film() -> bytes:  # the encoder returns different bytes each time
    frames = np.zeros((12, 48, 64, 3), np.uint8)
    for i, frame in enumerate(frames):
        frame[:, i * 5 : i * 5 + 8] = 220
    return encode_video(frames, 12, "webm")


def places(count: int = 300) -> list[Place]:
    chance, clip, sound = np.random.default_rng(3), film(), wav()
    centres = {kind: chance.normal(size=8) * 4 for kind in Kind}
    documents = []
    for i in range(count):
        kind = list(Kind)[i % 3]
        place = Place(
            id=f"place-{i}",
            picture=png((i % 256, 90, 255 - i % 256)),
            caption=HOSTILE if i == 1 else f"A {kind.name} number {i}" + (", with a view" if i % 4 == 0 else ""),
            kind=kind,
            score=None if i % 10 == 9 else float(chance.random()),
            visits=int(chance.integers(0, 1000)),
            open=i % 2 == 0,
            taken=datetime.fromisoformat("2024-01-01") + timedelta(days=i),
            relief=chance.normal(size=(12, 16)).astype(np.float32),
            pixels=chance.integers(0, 255, (3, 16, 16)).astype(np.uint8),
            embedding=(centres[kind] + chance.normal(size=8)).astype(np.float32),
            sound=None if i % 5 == 4 else Sound(id="s", tensor=np.sin(np.arange(4000) / 9).astype(np.float32)),
            recording=sound if i % 2 == 0 else None,
            film=clip if i % 3 == 0 else None,
            link="https://nowhere.invalid/picture.png",
            file="../../secret.png" if i % 2 else "inside/picture.png",
            author=Author(id="a", name=["Ada", "Grace"][i % 2], born=None if i % 3 else 1815),
            authors=DocumentArray[Author]([Author(id=f"b{j}", name=f"author {j}") for j in range(i % 3)]),
            tags=["wide", "calm"][: i % 3],
            more={"nested": {"list": [1, 2, {"deep": HOSTILE}]}, "picture": png((9, 9, 9))} if i < 3 else {},
        )
        documents.append(place)
    return documents


@dataclass(frozen=True)
class Answer:
    """A response of the server."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Client:
    """An HTTP client of a viewer; `enter` gives it a session."""

    viewer: Viewer
    cookie: str = ""

    def get(
        self, address: str, /, *, method: str = "GET", headers: dict[str, str] | None = None, **query: Any
    ) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.viewer.port, timeout=30)
        defaults = {"Host": f"127.0.0.1:{self.viewer.port}", **({"Cookie": self.cookie} if self.cookie else {})}
        target = f"{address}?{urlencode(query)}" if query else address
        try:
            connection.putrequest(method, target, skip_host=True)
            for name, value in {**defaults, **(headers or {})}.items():
                if value is not None:
                    connection.putheader(name, value)
            connection.endheaders()
            answer = connection.getresponse()
            received = {name.lower(): value for name, value in answer.getheaders()}
            return Answer(answer.status, received, answer.read())
        finally:
            connection.close()

    def enter(self, url: str | None = None) -> Answer:
        """Exchange the token of an address for a session cookie."""
        parts = urlsplit(url or self.viewer.url)
        answer = self.get(f"/?{parts.query}")
        if answer.status == 200:
            self.cookie = answer.headers["set-cookie"].partition(";")[0]
        return answer

    def get_json(self, route: str, /, **query: Any) -> Any:
        """Return the JSON of an API route, which must succeed."""
        answer = self.get(f"/api/{route}", **query)
        assert answer.status == 200, answer.body
        return answer.json


@contextmanager
def open_client(source: Any, **options: Any) -> Iterator[Client]:
    """Start a viewer, and yield a client with a session."""
    with Viewer(source, **options) as viewer:
        client = Client(viewer)
        client.enter()
        yield client
