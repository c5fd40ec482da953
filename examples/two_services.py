"""Run two gRPC services, one in Python and one in Node, that exchange documents with a `.proto` of the class.

The service in Node (examples/node/search.js) stores photos and finds the nearest one. For embeddings, it calls the
service in Python, which has the model. This program calls the service in Node.

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
    """The document that both services exchange."""

    label: str
    pixels: NdArray[float32, 3, 8, 8]
    embedding: NdArray[float32, 6] | None = None


class Album(BaseDocument):
    """Photos, and the number of photos that the service knows."""

    photos: DocumentArray[Photo] = DocumentArray[Photo]()
    known: int = 0


class Match(BaseDocument):
    """The nearest photo that the service knows."""

    label: str
    distance: float


# --- service in Python


def embed(photos: DocumentArray[Photo]) -> DocumentArray[Photo]:
    """Compute embeddings: the mean and the standard deviation of each colour."""
    for photo in photos:
        flat = photo.pixels.reshape(3, -1)
        photo.embedding = np.concatenate([flat.mean(axis=1), flat.std(axis=1)])
    return photos


# --- service in Node


class Search:
    """The interface of the service, from which its `.proto` is generated."""

    def remember(self, album: Album) -> Album:
        """Store photos, and return the number of known photos."""
        raise NotImplementedError

    def nearest(self, photo: Photo) -> Match:
        """Return the most similar known photo."""
        raise NotImplementedError


@contextmanager
def search_in_node(folder: Path, embedder: str) -> Iterator[str]:
    """Run the service and yield its address; it ends when its standard input is closed."""
    command = [shutil.which("node") or "node", str(SCRIPT), str(folder), embedder]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as node:  # noqa: S603
        assert node.stdout is not None
        port = node.stdout.readline().strip()
        if not port:
            raise SystemExit("the service in Node did not start; are its packages installed?")
        yield f"127.0.0.1:{port}"
        node.communicate(timeout=30)


def call(channel: grpc.Channel, method: str, document: BaseDocument, returns: type[BaseDocument]) -> Any:
    """Call a service in another language with a message of the class, and decode the answer."""
    remote = channel.unary_unary(
        f"/art.Search/{method}", lambda message: message.SerializeToString(), returns.from_typed_protobuf
    )
    return remote(document.to_typed_protobuf(), timeout=30)


# --- program


def photo_of(label: str, colour: tuple[float, float, float], random: np.random.Generator) -> Photo:
    """Create a photo of one colour with noise."""
    noise = random.normal(scale=0.05, size=(3, 8, 8))
    return Photo(label=label, pixels=(np.array(colour)[:, None, None] + noise).astype(np.float32))


COLOURS = {"poppy": (0.9, 0.1, 0.1), "meadow": (0.2, 0.8, 0.2), "sky": (0.3, 0.5, 1.0), "snow": (1.0, 1.0, 1.0)}


def main() -> None:
    """Start both services, store photos, and search for similar ones."""
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
            print(f"Node at {address} knows {known} photos, embedded by Python at {embedder.address}")
            assert known == len(COLOURS)
            for label, colour in COLOURS.items():
                match = call(channel, "Nearest", photo_of("unknown", colour, random), Match)
                print(f"a photo of {label}: nearest to {match.label}, at {match.distance:.3f}")
                assert match.label == label


if __name__ == "__main__":
    main()
