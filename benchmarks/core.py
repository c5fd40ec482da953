"""Benchmark documents, arrays and batches, compared with plain torch and pydantic, and with other libraries.

    python benchmarks/core.py --rows construct take --rounds 9 --size 10000 --keep

Every row is one interleaved run (see measure.py); its result is a ratio. Peers that are not installed are marked.
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

import numpy as np
import torch
import torch.utils._pytree as pytree
from contest import parse_options, run
from measure import Contestant, Loop, Row, peer, repeated
from pydantic import BaseModel, ConfigDict, Field

from quire import BaseDocument, DocumentArray
from quire.typing import TorchTensor

PACKAGES = ("quire", "pydantic", "numpy", "torch", "docarray", "tensordict")


# --- schemas, in quire and in pydantic alone; the peers have their own modules


class Author(BaseDocument):
    """A nested document."""

    name: str


class Article(BaseDocument):
    """The document that is constructed."""

    title: str
    tensor: TorchTensor[512]
    author: Author


class Picture(BaseDocument):
    """The document that is stacked, taken and iterated."""

    image: TorchTensor[3, 64, 64]
    label: int
    text: str


def random_hex() -> str:
    """Return an id as hand-written code creates it."""
    return os.urandom(16).hex()


class PlainAuthor(BaseModel):
    """`Author` in pydantic alone."""

    id: str = Field(default_factory=random_hex)
    name: str


class PlainArticle(BaseModel):
    """`Article` in pydantic alone: the type of the tensor is checked, its shape is not."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    id: str = Field(default_factory=random_hex)
    title: str
    tensor: torch.Tensor
    author: PlainAuthor


def picture_rows(size: int) -> list[dict[str, Any]]:
    """Return the fields of pictures; the images are allocated one by one, as a reader of files does."""
    return [{"image": torch.rand(3, 64, 64), "label": i % 10, "text": f"the text of picture {i}"} for i in range(size)]


# --- rows


def construct_row(_: int) -> Row:
    """Construct a nested document from a nested dict."""
    raw = {"title": "On Computable Numbers", "tensor": torch.rand(512), "author": {"name": "Alan"}}

    def docarray(theirs: Any) -> Loop:
        own = {**raw, "tensor": torch.rand(512)}
        return repeated(lambda: theirs.Article.model_validate(own))

    return Row(
        title="construct {id, str, TorchTensor[512], nested document} from a dict",
        what="`model_validate` of a dict. The reference creates both ids with `os.urandom(16).hex()` and "
        "checks no shape.",
        quire=Contestant("quire", repeated(lambda: Article.model_validate(raw))),
        reference=Contestant("pydantic with torch.Tensor", repeated(lambda: PlainArticle.model_validate(raw))),
        peers=[peer("DocArray TorchTensor[512]", "docarray", docarray)],
        target=1.3,
        known="DocArray 16x",
        calls=100,
        turns=20,
    )


def stack_row(size: int) -> Row:
    """Stack documents. All contestants write into fresh memory; at full size, most of the time is page faults."""
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
        what="`documents.stack()`. The reference stacks the same image tensors, without labels, texts and ids.",
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
    """Take 64 random rows of every column; the reference takes the image column alone.

    The work is a copy of 3 MB from rows that are spread over 490 MB, so page faults and caches decide. Results are
    dropped at once: every call reuses the memory that the previous one freed, and no contestant pays for fresh pages.
    All contestants use the same index tensors, which cover far more rows than the caches hold, and each starts at a
    different one, so that none finds rows in the cache that another has read. The copy also evicts code and objects
    from the caches: every other step costs about three times what it costs in a loop of its own. A turn has several
    calls, because the first one follows the code of another contestant and costs more than in a real loop.
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


class Thumbnail(BaseDocument):
    """A document of 12 KiB."""

    image: TorchTensor[3, 32, 32]
    label: int
    text: str


def take_small_row(size: int) -> Row:
    """Take 64 random rows of 12 KiB, where the overhead per call counts more; the reference is written by hand."""
    images = np.random.default_rng(0).random((size, 3, 32, 32), np.float32)
    documents = (Thumbnail(image=torch.from_numpy(x), label=i % 10, text=f"text {i}") for i, x in enumerate(images))
    batch = DocumentArray[Thumbnail](documents).stack()
    column: Any = batch.image.numpy()
    numbers = np.random.default_rng(1)
    indices = [numbers.integers(0, size, 64) for _ in range(60)]
    first, second = cycle(indices).__next__, cycle(indices[30:] + indices[:30]).__next__
    third = cycle([torch.from_numpy(rows) for rows in indices[15:] + indices[:15]]).__next__
    return Row(
        title=f"take 64 random rows of 12 KiB of a batch of {size:,}",
        what="`batch.take(rows)`, every column. The reference is `torch.from_numpy(np.take(column, rows, 0))` of the "
        "image column alone.",
        quire=Contestant("quire", repeated(lambda: batch.take(first()))),
        reference=Contestant("np.take and a tensor", repeated(lambda: torch.from_numpy(np.take(column, second(), 0)))),
        peers=[Contestant("torch.index_select", repeated(lambda: torch.index_select(batch.image, 0, third())))],
        target=1.3,
        known="quire 0.1 1.96x of index_select",
        calls=20,
        turns=12,
    )


# --- batches as trees


def batch_of_pictures(size: int = 64) -> Any:
    """Return a batch of torch's tensors, with texts."""
    return DocumentArray[Picture](Picture(**row) for row in picture_rows(size)).stack(framework="torch")


def tree_map_row(_: int) -> Row:
    """Take a batch apart and assemble it with a function that does nothing."""
    batch = batch_of_pictures()

    def same(tensor: Any) -> Any:
        return tensor

    def tensorclass(theirs: Any) -> Loop:
        pictures = theirs.stacked(picture_rows(64))
        return repeated(lambda: pytree.tree_map(same, pictures))

    return Row(
        title="tree_map of a batch",
        what="`torch.utils._pytree.tree_map` of a function that returns its argument; image, label, and 64 texts.",
        quire=Contestant("quire", repeated(lambda: pytree.tree_map(same, batch))),
        reference=peer("tensorclass", "tensordict", tensorclass),
        peers=[],
        target=1.1,
        calls=50,
        turns=20,
    )


def compiled_row(_: int) -> Row:
    """Call a compiled function of a batch; checking that the batch fits the graph is the overhead."""
    # Each contestant compiles a function of its own: the cache of graphs belongs to the code of a function.
    compiled: Any = torch.compile(lambda batch: batch.image.mean() + batch.label.sum(), fullgraph=True, backend="eager")
    batch = batch_of_pictures()

    def tensorclass(theirs: Any) -> Loop:
        own: Any = torch.compile(lambda batch: batch.image.mean() + batch.label.sum(), fullgraph=True, backend="eager")
        pictures = theirs.stacked(picture_rows(64))
        return repeated(lambda: own(pictures))

    return Row(
        title="compiled function of a batch",
        what="`torch.compile(fullgraph=True, backend='eager')` of a function that reads two columns.",
        quire=Contestant("quire", repeated(lambda: compiled(batch))),
        reference=peer("tensorclass", "tensordict", tensorclass),
        peers=[],
        target=1.1,
        calls=20,
        turns=20,
    )


def iterate_row(size: int) -> Row:
    """Convert every row to a document, and drop it."""
    rows = picture_rows(size)
    batch = DocumentArray[Picture](Picture(**row) for row in rows).stack()
    images, labels, texts = batch.image, torch.as_tensor(batch.label), batch.text

    def tuples() -> None:
        for _ in zip(images.unbind(0), labels.tolist(), texts, strict=False):
            pass

    def docarray(theirs: Any) -> Loop:
        return repeated(iterator_over(theirs.pictures(rows).to_doc_vec()))

    return Row(
        title=f"iterate {size:,} rows of a batch as documents",
        what="`for _ in batch: pass`. The reference is the same over `zip(X.unbind(0), y.tolist(), texts)`. "
        "Times are for all rows.",
        quire=Contestant("quire", repeated(iterator_over(batch))),
        reference=Contestant("zip of plain columns", repeated(tuples)),
        peers=[peer("DocArray DocVec", "docarray", docarray)],
        target=3.0,
        known="DocArray 6 to 11 us per row",
        unit="ms",
        turns=4,
    )


def iterator_over(rows: Any) -> Callable[[], None]:
    """Return a function that iterates over the rows."""

    def iterate() -> None:
        for _ in rows:
            pass

    return iterate


def add_row(_: int) -> Row:
    """Compare loops that differ only in the expression, without a function call around it."""
    tensor = torch.rand(512)

    def bare(calls: int) -> None:
        for _ in repeat(None, calls):
            tensor + 1

    def docarray(theirs: Any) -> Loop:
        return loop_of_additions(theirs.Article(title="", tensor=torch.rand(512), author={"name": ""}))

    return Row(
        title="doc.tensor + 1, 512 floats",
        what="The expression in a loop. The reference is `tensor + 1` with a variable.",
        quire=Contestant("quire", loop_of_additions(Article(title="", tensor=tensor, author=Author(name="")))),
        reference=Contestant("torch", bare),
        peers=[peer("DocArray", "docarray", docarray)],
        target=1.05,
        known="DocArray 12x",
        calls=200,
        turns=50,
    )


def loop_of_additions(document: Any) -> Loop:
    """Return a loop that evaluates `document.tensor + 1`."""

    def loop(calls: int) -> None:
        for _ in repeat(None, calls):
            document.tensor + 1

    return loop


def import_row(_: int) -> Row:
    """Start fresh interpreters.

    Both pydantic and quire import their names lazily, so two more contestants use them: one imports all names of quire,
    the other defines a model.
    """
    fresh = FreshPython()
    return Row(
        title="import quire",
        what="`python -c 'import quire'` in a fresh interpreter with compiled bytecode, minus the time of "
        "`python -c pass`.",
        quire=Contestant("quire", fresh.running("import quire")),
        reference=Contestant("import pydantic, numpy", fresh.running("import pydantic, numpy")),
        peers=[
            Contestant("from quire import *", fresh.running("from quire import *")),
            Contestant("numpy and a pydantic model", fresh.running(A_MODEL)),
            peer("DocArray", "docarray", lambda _: fresh.running("import docarray")),
        ],
        floor=Contestant("python -c pass (subtracted)", fresh.running("pass")),
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
    """Interpreters that share a folder of compiled bytecode, which the warm-up turn fills."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._environment = {**os.environ, "PYTHONPYCACHEPREFIX": self._folder.name}
        self._environment.pop("PYTHONDONTWRITEBYTECODE", None)

    def running(self, code: str) -> Loop:
        """Return a loop that starts an interpreter per call."""
        return repeated(lambda: subprocess.run([sys.executable, "-c", code], check=True, env=self._environment))


ROWS: dict[str, Callable[[int], Row]] = {
    "construct": construct_row,
    "stack": stack_row,
    "take": take_row,
    "take_small": take_small_row,
    "tree_map": tree_map_row,
    "compiled": compiled_row,
    "iterate": iterate_row,
    "add": add_row,
    "import": import_row,
}

if __name__ == "__main__":
    options = parse_options(__doc__ or "", ROWS)
    torch.set_num_threads(options.threads)
    sys.exit(run("core", ROWS, options, PACKAGES))
