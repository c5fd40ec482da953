"""Demo: a schema, a dataset on disk, training, protobuf, and a service in another process.

    pip install 'quire-ml[torch,grpc,view]'
    python examples/demo.py                    # writes to the folder quire-demo, or to the given one

The program creates its data: a few hundred small JPEG images of circles, squares and triangles, which a small network
learns to classify. A second run replaces the files of the first.
"""

from __future__ import annotations

import io
import multiprocessing
import random
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal, get_args

import torch
from PIL import Image, ImageDraw
from rich.progress import track
from torch import nn
from torch.utils.data import DataLoader

from quire import BaseDocument, DocumentArray, DocumentBatch, Text
from quire.data import MultiModalDataset, batched
from quire.services import Client, serve
from quire.storage import open_dataset, write_dataset
from quire.typing import ImageBytes, TorchTensor

# 1. The schema: nested pydantic models. ImageBytes holds an encoded image, like a file.

Kind = Literal["circle", "square", "triangle"]
KINDS = get_args(Kind)


class Camera(BaseDocument):
    """The camera that took a picture."""

    name: str
    exposure: float


class Photo(BaseDocument):
    """An encoded picture and the camera that took it."""

    image: ImageBytes
    camera: Camera


class Example(BaseDocument):
    """A picture, its caption and, in training data, the kind of shape that it shows."""

    photo: Photo
    caption: Text
    kind: Kind | None = None


class Prediction(BaseDocument):
    """The model's answer for one example."""

    scores: TorchTensor[len(KINDS)]
    kind: Kind


# 2. The data: pictures drawn with Pillow, compressed as JPEG.


def draw(kind: Kind, generator: random.Random) -> ImageBytes:
    """Draw a shape of random colour, size and place on a noisy background, as the bytes of a JPEG file."""
    picture = Image.frombytes("RGB", (32, 32), generator.randbytes(3 * 32 * 32)).point(lambda value: value // 3)
    canvas = ImageDraw.Draw(picture)
    radius = generator.randint(6, 11)
    x, y = generator.randint(radius, 31 - radius), generator.randint(radius, 31 - radius)
    colour = tuple(generator.randint(120, 255) for _ in range(3))
    box = (x - radius, y - radius, x + radius, y + radius)
    if kind == "circle":
        canvas.ellipse(box, fill=colour)
    elif kind == "square":
        canvas.rectangle(box, fill=colour)
    else:
        canvas.polygon([(x, y - radius), (x - radius, y + radius), (x + radius, y + radius)], fill=colour)
    file = io.BytesIO()
    picture.save(file, "jpeg", quality=90)
    return ImageBytes(file.getvalue())


def make_examples(number: int) -> DocumentArray[Example]:
    """Create examples of all kinds in turn, the same ones in every run."""
    generator = random.Random(0)  # noqa: S311 - not for secrets
    examples = DocumentArray[Example]()
    for i in track(range(number), "drawing "):
        kind = KINDS[i % len(KINDS)]
        camera = Camera(name=f"camera {i % 4}", exposure=generator.uniform(0.001, 0.1))
        photo = Photo(image=draw(kind, generator), camera=camera)
        examples.append(Example(photo=photo, caption=f"a {kind}, picture {i}", kind=kind))
    return examples


# 3. The model and its inputs: images as tensors, kinds as numbers.


class Classifier(nn.Module):
    """A small convolutional network."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(32 * 8 * 8, 64), nn.ReLU(), nn.Linear(64, len(KINDS)),
        )  # fmt: skip

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Compute the scores of each kind for pictures of shape (rows, 3, 32, 32)."""
        scores: torch.Tensor = self.layers(images)
        return scores


def decode(image: ImageBytes) -> torch.Tensor:
    """Decode one picture into floats around zero, channels first."""
    return torch.from_numpy(image.load()).permute(2, 0, 1) / 255 - 0.3


@batched
def to_numbers(kinds: list[Kind]) -> torch.Tensor:
    """Convert the kinds of a whole batch to numbers."""
    return torch.tensor([KINDS.index(kind) for kind in kinds])


def make_loader(examples: DocumentBatch[Example], *, shuffle: bool) -> DataLoader[DocumentBatch[Example]]:
    """Create a DataLoader whose two worker processes decode the pictures."""
    dataset = MultiModalDataset[Example](examples, preprocessing={"photo.image": decode, "kind": to_numbers})
    return DataLoader(
        dataset, batch_size=16, shuffle=shuffle, num_workers=2, persistent_workers=True, collate_fn=dataset.collate_fn
    )


def train(model: Classifier, examples: DocumentBatch[Example], epochs: int) -> float:
    """Train on four fifths of the examples, and return the accuracy on the others."""
    size = len(examples) * 4 // 5
    training, testing = make_loader(examples[:size], shuffle=True), make_loader(examples[size:], shuffle=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for epoch in range(1, epochs + 1):
        model.train()
        total = 0.0
        for batch in track(training, f"epoch {epoch} "):  # a DocumentBatch[Example]
            loss = nn.functional.cross_entropy(model(batch.photo.image), batch.kind)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(batch)
        test_accuracy = accuracy(model, testing)
        print(f"         loss {total / size:.3f}   accuracy {test_accuracy:.1%}")
    return test_accuracy


@torch.no_grad()
def accuracy(model: Classifier, loader: DataLoader[DocumentBatch[Example]]) -> float:
    """Compute the fraction of examples that the model classifies correctly."""
    model.eval()
    is_correct = [model(batch.photo.image).argmax(1) == batch.kind for batch in loader]
    return torch.cat(is_correct).float().mean().item()


# 4. The service: a class with typed methods. It runs in another process, which loads the weights from a file.


class ShapeService:
    """The trained model behind one endpoint, `classify`."""

    def __init__(self, weights: Path) -> None:
        self.model = Classifier().eval()
        self.model.load_state_dict(torch.load(weights, weights_only=True))

    @torch.no_grad()
    def classify(self, examples: DocumentBatch[Example]) -> DocumentBatch[Prediction]:
        """Predict the kind of each example."""
        images = torch.stack([decode(image) for image in examples.photo.image])
        scores = self.model(images).softmax(1)
        kinds = [KINDS[number] for number in scores.argmax(1).tolist()]
        predictions = (Prediction(scores=row, kind=kind) for row, kind in zip(scores, kinds, strict=True))
        return DocumentArray[Prediction](predictions).stack()


def run_service(weights: Path, address: Connection) -> None:
    """Send the address, and serve the model until this process is terminated."""
    with serve(ShapeService(weights)) as server:
        address.send(server.address)
        server.wait()


@contextmanager
def service_process(weights: Path) -> Iterator[str]:
    """Start the service in another process, and yield its address."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=run_service, args=(weights, sender))
    process.start()
    sender.close()  # so that recv() raises EOFError instead of waiting if the process fails before it sends
    try:
        yield receiver.recv()
    finally:
        process.terminate()
        process.join()


def main(folder: Path) -> None:
    """Run the demo, and keep the data in the folder."""
    start = time.perf_counter()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # more threads are slower for such a small model
    folder.mkdir(parents=True, exist_ok=True)

    print("1. The schema\n")
    Example.schema_summary()

    print("\n2. Create examples, write a dataset, and open it\n")
    examples = make_examples(600)
    data = folder / "shapes"
    write_dataset(examples, data, document_type=Example, mode="overwrite")
    dataset = open_dataset(data, Example)
    assert dataset[7] == examples[7]
    print(f"{len(dataset)} rows, {dataset.nbytes / 1e6:.1f} MB in {data}")

    print("\n3. Train with a DataLoader with 2 workers\n")
    model = Classifier()
    test_accuracy = train(model, dataset.read(), epochs=6)
    weights = folder / "weights.pt"
    torch.save(model.state_dict(), weights)

    print("\n4. Save and load as protobuf\n")
    file = folder / "shapes.pb"
    examples.save_binary(file)
    assert DocumentArray[Example].load_binary(file) == examples
    print(f"{len(examples)} documents, {file.stat().st_size / 1e6:.1f} MB in {file}, equal after loading")

    print("\n5. Call the trained model in another process\n")
    unknown = [Example(photo=example.photo, caption=example.caption) for example in examples[-6:]]
    batch = DocumentArray[Example](unknown).stack()
    with service_process(weights) as address, Client(address, ShapeService) as client:
        answer = client.classify(batch)  # a DocumentBatch[Prediction]
        times = []
        for _ in range(20):
            call_start = time.perf_counter()
            client.classify(batch)
            times.append(time.perf_counter() - call_start)
    for caption, kind, scores in zip(batch.caption.text, answer.kind, answer.scores, strict=True):
        print(f"{caption:25} -> {kind:8} {float(scores.max()):.1%}")
    round_trip = 1000 * statistics.median(times)
    print(f"round trip of a batch of {len(batch)}: {round_trip:.1f} ms (median of {len(times)} calls)")

    seconds = time.perf_counter() - start
    results = f"accuracy {test_accuracy:.1%}, round trip {round_trip:.1f} ms"
    print(f"\nDone in {seconds:.0f} s: {len(dataset)} examples, {results}")
    print(f"Look at the data: {sys.executable} -m quire view {data}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "quire-demo"))
