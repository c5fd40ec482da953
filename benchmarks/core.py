"""What documents, arrays and batches cost, against bare torch and pydantic, and beside the peers.

    python benchmarks/core.py --rows construct take --rounds 9 --size 10000 --keep

Every row is one interleaved run (see measure.py); its result is a ratio. A peer that is not installed is shown so.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from itertools import cycle, repeat
from typing import Any

import torch
from contest import parse_options, run
from measure import Contestant, Loop, Row, peer, repeated
from pydantic import BaseModel, ConfigDict, Field

from quire import BaseDocument, DocumentArray
from quire.typing import TorchTensor

PACKAGES = ("quire", "pydantic", "numpy", "torch", "docarray", "tensordict")


# --- schemas, in quire and in pydantic alone; the peers have modules of their own


class Author(BaseDocument):
    """The nested document."""

    name: str


class Article(BaseDocument):
    """What is constructed."""

    title: str
    tensor: TorchTensor[512]
    author: Author


class Picture(BaseDocument):
    """What is stacked, taken and iterated."""

    image: TorchTensor[3, 64, 64]
    label: int
    text: str


def random_hex() -> str:
    """An id as one makes it by hand."""
    return os.urandom(16).hex()


class PlainAuthor(BaseModel):
    """`Author` in pydantic alone."""

    id: str = Field(default_factory=random_hex)
    name: str


class PlainArticle(BaseModel):
    """`Article` in pydantic alone: that the tensor is one is checked, its shape is not."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    id: str = Field(default_factory=random_hex)
    title: str
    tensor: torch.Tensor
    author: PlainAuthor


def picture_rows(size: int) -> list[dict[str, Any]]:
    """What pictures are made from; the images are allocated one by one, as a reader of files does."""
    return [{"image": torch.rand(3, 64, 64), "label": i % 10, "text": f"the text of picture {i}"} for i in range(size)]


# --- rows


def construct_row(_: int) -> Row:
    """A dict with a dict in it becomes a document with a document in it."""
    raw = {"title": "On Computable Numbers", "tensor": torch.rand(512), "author": {"name": "Alan"}}

    def docarray(theirs: Any) -> Loop:
        own = {**raw, "tensor": torch.rand(512)}
        return repeated(lambda: theirs.Article.model_validate(own))

    return Row(
        title="construct {id, str, TorchTensor[512], nested document} from a dict",
        what="`model_validate` of a dict. The reference makes both ids by `os.urandom(16).hex()` and checks no shape.",
        quire=Contestant("quire", repeated(lambda: Article.model_validate(raw))),
        reference=Contestant("pydantic with torch.Tensor", repeated(lambda: PlainArticle.model_validate(raw))),
        peers=[peer("DocArray TorchTensor[512]", "docarray", docarray)],
        target=1.3,
        known="DocArray 16x",
        calls=100,
        turns=20,
    )


def stack_row(size: int) -> Row:
    """All write into fresh memory; at full size its page faults are most of the time, for everybody."""
    rows = picture_rows(size)
    images = [row["image"] for row in rows]
    documents = DocumentArray[Picture](Picture(**row) for row in rows)

    def docarray(theirs: Any) -> Loop:
        return repeated(theirs.pictures(rows).to_doc_vec)

    def tensorclass(theirs: Any) -> Loop:
        pictures = theirs.pictures(rows)
        return repeated(lambda: torch.stack(pictures))

    return Row(
        title=f"stack {size:,} documents of (3, 64, 64) float32, label and text",
        what="`documents.stack()`. The reference stacks the same image tensors, and neither label, text nor id.",
        quire=Contestant("quire", repeated(documents.stack)),
        reference=Contestant("torch.stack of the images", repeated(lambda: torch.stack(images))),
        peers=[
            peer("DocArray to_doc_vec", "docarray", docarray),
            peer("tensorclass torch.stack", "tensordict", tensorclass),
        ],
        target=1.15,
        known="DocArray 2.3x, tensorclass 1.27x",
        unit="ms",
    )


def take_row(size: int) -> Row:
    """64 random rows of every column; the reference takes the image column alone.

    The work is a copy of 3 MB from rows that lie all over 490 MB, so page faults and caches decide. Results are dropped
    at once: the memory that one call frees is there for the next, whoever makes it, and nobody pays for fresh pages.
    All go through the same index tensors, which name far more rows than caches hold, and each begins at another: nobody
    finds cached what another has read. The copy also drives code and objects out of the caches, so that every step
    beside it costs about three times what it costs in a loop of its own. A turn has some calls more than one, because
    the first comes after the code of another contestant and costs still more, which a program's own loop would not see.
    """
    rows = picture_rows(size)
    batch = DocumentArray[Picture](Picture(**row) for row in rows).stack()
    images, labels = batch.image, torch.as_tensor(batch.label)
    numbers = random.Random(0)
    indices = [torch.tensor(numbers.choices(range(size), k=64)) for _ in range(60)]

    def index_from(place: int, chosen: list[Any] = indices) -> Callable[[], Any]:
        start = place * len(chosen) // 5
        return cycle(chosen[start:] + chosen[:start]).__next__

    def tensordict(theirs: Any) -> Loop:
        columns, index = theirs.columns(images, labels), index_from(3)
        return repeated(lambda: columns[index()])

    def docarray(theirs: Any) -> Loop:
        vector, index = theirs.pictures(rows).to_doc_vec(), index_from(4, [index.tolist() for index in indices])
        return repeated(lambda: vector[index()])

    first, second, third = index_from(0), index_from(1), index_from(2)
    return Row(
        title=f"take 64 random rows of a batch of {size:,}",
        what="`batch.take(index)`, every column. The reference is `index_select` of the image column, with the same "
        "index tensors in another order. TensorDict has image and label, no text and no id.",
        quire=Contestant("quire", repeated(lambda: batch.take(first()))),
        reference=Contestant("torch.index_select", repeated(lambda: torch.index_select(images, 0, second()))),
        peers=[
            Contestant("torch images[index]", repeated(lambda: images[third()])),
            peer("TensorDict[index]", "tensordict", tensordict),
            peer("DocArray DocVec[list]", "docarray", docarray),
        ],
        target=1.3,
        known="TensorDict 6x, DocArray 7x",
        calls=10,
        turns=12,
    )


def iterate_row(size: int) -> Row:
    """Every row becomes an ordinary document, and is dropped."""
    rows = picture_rows(size)
    batch = DocumentArray[Picture](Picture(**row) for row in rows).stack()
    images, labels, texts = batch.image, torch.as_tensor(batch.label), batch.text

    def tuples() -> None:
        for _ in zip(images.unbind(0), labels.tolist(), texts, strict=False):
            pass

    def docarray(theirs: Any) -> Loop:
        return repeated(passing_over(theirs.pictures(rows).to_doc_vec()))

    return Row(
        title=f"iterate {size:,} rows of a batch as documents",
        what="`for _ in batch: pass`. The reference is the same over `zip(X.unbind(0), y.tolist(), texts)`. "
        "Times are for all rows.",
        quire=Contestant("quire", repeated(passing_over(batch))),
        reference=Contestant("zip of bare columns", repeated(tuples)),
        peers=[peer("DocArray DocVec", "docarray", docarray)],
        target=3.0,
        known="DocArray 6 to 11 us a row",
        unit="ms",
        turns=4,
    )


def passing_over(rows: Any) -> Callable[[], None]:
    """Goes through the rows and does nothing with them."""

    def iterate() -> None:
        for _ in rows:
            pass

    return iterate


def add_row(_: int) -> Row:
    """Loops that differ in the expression alone, without a call around it."""
    tensor = torch.rand(512)

    def bare(calls: int) -> None:
        for _ in repeat(None, calls):
            tensor + 1

    def docarray(theirs: Any) -> Loop:
        return adding_to(theirs.Article(title="", tensor=torch.rand(512), author={"name": ""}))

    return Row(
        title="doc.tensor + 1, 512 floats",
        what="The expression in a loop. The reference is `tensor + 1` with a variable.",
        quire=Contestant("quire", adding_to(Article(title="", tensor=tensor, author=Author(name="")))),
        reference=Contestant("torch", bare),
        peers=[peer("DocArray", "docarray", docarray)],
        target=1.05,
        known="DocArray 12x",
        calls=200,
        turns=50,
    )


def adding_to(document: Any) -> Loop:
    """Evaluates `document.tensor + 1`."""

    def loop(calls: int) -> None:
        for _ in repeat(None, calls):
            document.tensor + 1

    return loop


def import_row(_: int) -> Row:
    """Fresh interpreters, one after the other.

    Both pydantic and quire import their names when these are asked for, so two more contestants do ask: one for all
    names of quire, the other for a model.
    """
    fresh = FreshPython()
    return Row(
        title="import quire",
        what="`python -c 'import quire'` in a fresh interpreter that finds compiled bytecode, net of `python -c pass`.",
        quire=Contestant("quire", fresh.running("import quire")),
        reference=Contestant("import pydantic, numpy", fresh.running("import pydantic, numpy")),
        peers=[
            Contestant("from quire import *", fresh.running("from quire import *")),
            Contestant("numpy and a pydantic model", fresh.running(A_MODEL)),
            peer("DocArray", "docarray", lambda _: fresh.running("import docarray")),
        ],
        floor=Contestant("python -c pass (taken off)", fresh.running("pass")),
        target=1.5,
        unit="ms",
        least_rounds=11,
    )


A_MODEL = """
import numpy
from pydantic import BaseModel
class Author(BaseModel):
    name: str
"""


class FreshPython:
    """Interpreters that share a folder of compiled bytecode, which is filled by the turn that does not count."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._environment = {**os.environ, "PYTHONPYCACHEPREFIX": self._folder.name}
        self._environment.pop("PYTHONDONTWRITEBYTECODE", None)

    def running(self, code: str) -> Loop:
        """Starts an interpreter for each call."""
        return repeated(lambda: subprocess.run([sys.executable, "-c", code], check=True, env=self._environment))


ROWS: dict[str, Callable[[int], Row]] = {
    "construct": construct_row,
    "stack": stack_row,
    "take": take_row,
    "iterate": iterate_row,
    "add": add_row,
    "import": import_row,
}

if __name__ == "__main__":
    options = parse_options(__doc__ or "", ROWS)
    torch.set_num_threads(options.threads)
    sys.exit(run("core", ROWS, options, PACKAGES))
