"""Two services talk over gRPC, one in Python and one in Node: both know the documents by a `.proto` of the class.

The service in Node (examples/node/search.js) remembers photos and finds the nearest one. It cannot see: for that it
calls the service in Python, where the model is. This program calls the one in Node.

npm install --prefix examples/node
python examples/two_services.py
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from quire import BaseDocument, DocumentArray
from quire.services import serve, service_proto
from quire.typing import NdArray, float32

SCRIPT = Path(__file__).with_name("node") / "search.js"


class Photo(BaseDocument):
    """What both services send each other."""

    label: str
    pixels: NdArray[float32, 3, 8, 8]
    embedding: NdArray[float32, 6] | None = None


class Album(BaseDocument):
    """Some photos, and how many the service knows."""

    photos: DocumentArray[Photo] = DocumentArray[Photo]()
    known: int = 0


class Match(BaseDocument):
    """The nearest photo that the service knows."""

    label: str
    distance: float


# --- the service in Python


def embed(photos: DocumentArray[Photo]) -> DocumentArray[Photo]:
    """What a model sees: here the mean and the spread of each colour."""
    for photo in photos:
        flat = photo.pixels.reshape(3, -1)
        photo.embedding = np.concatenate([flat.mean(axis=1), flat.std(axis=1)])
    return photos


# --- the service in Node


class Search:
    """What it offers. Only the types are here: they make the `.proto` that it is written against."""

    def remember(self, album: Album) -> Album:
        """Takes photos, and tells how many it knows now."""
        raise NotImplementedError

    def nearest(self, photo: Photo) -> Match:
        """The photo it knows that looks most like this one."""
        raise NotImplementedError


@contextmanager
def search_in_node(folder: Path, embedder: str) -> Iterator[str]:
    """The address of the service, while it runs; it ends when its standard input does."""
    command = [shutil.which("node") or "node", str(SCRIPT), str(folder), embedder]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as node:  # noqa: S603
        assert node.stdout is not None
        port = node.stdout.readline().strip()
        if not port:
            raise SystemExit("the service in Node did not start; are its packages installed?")
        yield f"127.0.0.1:{port}"
        node.communicate(timeout=30)


def call(channel: grpc.Channel, method: str, document: BaseDocument, gives: type[BaseDocument]) -> Any:
    """Call a service of another language: a message of the class goes there, and one comes back."""
    ask = channel.unary_unary(
        f"/art.Search/{method}", lambda message: message.SerializeToString(), gives.from_typed_protobuf
    )
    return ask(document.to_typed_protobuf(), timeout=30)


# --- the story


def photo_of(label: str, colour: tuple[float, float, float], random: np.random.Generator) -> Photo:
    """A photo with a colour, and noise."""
    noise = random.normal(scale=0.05, size=(3, 8, 8))
    return Photo(label=label, pixels=(np.array(colour)[:, None, None] + noise).astype(np.float32))


COLOURS = {"poppy": (0.9, 0.1, 0.1), "meadow": (0.2, 0.8, 0.2), "sky": (0.3, 0.5, 1.0), "snow": (1.0, 1.0, 1.0)}


def main() -> None:
    """Start both, teach the one in Node some photos, and ask it for others."""
    random = np.random.default_rng(0)
    album = Album(photos=[photo_of(label, colour, random) for label, colour in COLOURS.items()])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "embedder.proto").write_text(service_proto(embed, package="art", name="Embedder"))
        (folder / "search.proto").write_text(service_proto(Search, package="art"))
        with (
            serve(embed, name="Embedder", proto=folder / "embedder.proto") as embedder,
            search_in_node(folder, embedder.address) as address,
            grpc.insecure_channel(address) as channel,
        ):
            known = call(channel, "Remember", album, Album).known
            print(f"Node at {address} knows {known} photos, and saw them through Python at {embedder.address}")
            assert known == len(COLOURS)
            for label, colour in COLOURS.items():
                match = call(channel, "Nearest", photo_of("unknown", colour, random), Match)
                print(f"a photo of {label}: nearest to {match.label}, at {match.distance:.3f}")
                assert match.label == label


if __name__ == "__main__":
    main()
