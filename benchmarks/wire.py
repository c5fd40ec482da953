"""Benchmark bytes and files, compared with a copy of the payload, with pickle and with other libraries.

    python benchmarks/wire.py --rows batch_to_bytes document --rounds 9 --size 10000 --keep

Every row is one interleaved run (see measure.py); its result is a ratio. Peers that are not installed are marked.
`--size` is the number of passages (a text and 512 float32); photos are uint8 (3, 224, 224), a fifth as many.
"""

from __future__ import annotations

import gzip
import pickle
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from contest import parse_options, run
from measure import Contestant, Loop, Row, peer, repeated

from quire import BaseDocument, DocumentArray
from quire.typing import NdArray

PACKAGES = ("quire", "pydantic", "numpy", "protobuf", "docarray", "safetensors")


class Passage(BaseDocument):
    """A text and its embedding."""

    text: str
    embedding: NdArray[512]


class Photo(BaseDocument):
    """A text and an image."""

    text: str
    image: NdArray[3, 224, 224]


def passage_rows(size: int) -> list[dict[str, Any]]:
    """Return the fields of passages."""
    numbers = np.random.default_rng(0)
    return [
        {"text": f"the text of passage {i}", "embedding": numbers.random(512, dtype=np.float32)} for i in range(size)
    ]


def photo_rows(size: int) -> list[dict[str, Any]]:
    """Return the fields of photos."""
    numbers = np.random.default_rng(0)
    shape = (3, 224, 224)
    return [{"text": f"photo {i}", "image": numbers.integers(0, 256, shape, dtype=np.uint8)} for i in range(size // 5)]


KINDS: dict[str, tuple[Any, Callable[[int], list[dict[str, Any]]], str]] = {
    "passages": (Passage, passage_rows, "embedding"),
    "photos": (Photo, photo_rows, "image"),
}


def documents(kind: str, size: int) -> DocumentArray[Any]:
    """Create documents of a kind."""
    schema, rows, _ = KINDS[kind]
    return DocumentArray[schema](schema(**row) for row in rows(size))


def tensors_of(batch: Any, kind: str) -> dict[str, Any]:
    """Return the columns of a batch as plain arrays; texts and ids as their bytes."""
    texts = {name: np.frombuffer("".join(batch[name]).encode(), np.uint8) for name in ("id", "text")}
    return {**texts, KINDS[kind][2]: batch[KINDS[kind][2]]}


# --- batches


def batch_to_bytes_row(size: int, kind: str) -> Row:
    """Encode a batch. The reference copies the payload once into fresh memory, as `bytes` requires."""
    docs = documents(kind, size)
    batch = docs.stack()
    payload = batch.to_bytes()
    columns = tensors_of(batch, kind)
    texts = {name: batch[name] for name in ("id", "text")}

    def docarray(theirs: Any) -> Loop:
        own = theirs.documents(getattr(theirs, KINDS[kind][0].__name__), KINDS[kind][1](size)).to_doc_vec()
        return repeated(lambda: own.to_protobuf().SerializeToString())

    return Row(
        title=f"DocumentBatch.to_bytes, {len(docs):,} {kind}",
        what=f"`batch.to_bytes()` of {len(payload) / 1e6:.0f} MB. The reference is one copy of these bytes, "
        "`bytes(view)`.",
        quire=Contestant("quire", repeated(batch.to_bytes)),
        reference=Contestant("one copy", copied(payload)),
        peers=[
            peer("safetensors.save", "safetensors", lambda theirs: repeated(lambda: theirs.save(columns))),
            Contestant("pickle5 of the columns", repeated(lambda: pickle.dumps((columns, texts), protocol=5))),
            peer("DocArray DocVec", "docarray", docarray),
        ],
        target=2.5,
        known="DocArray 49x, pickle5 2x, safetensors 2.2x",
        unit="ms",
    )


def safetensors_row(size: int, kind: str) -> Row:
    """Encode a batch, with safetensors as the reference."""
    batch = documents(kind, size).stack()
    columns = tensors_of(batch, kind)
    return Row(
        title=f"DocumentBatch.to_bytes compared with safetensors, {len(batch):,} {kind}",
        what="`batch.to_bytes()`. The reference saves the same columns; its texts and ids are bytes already.",
        quire=Contestant("quire", repeated(batch.to_bytes)),
        reference=peer("safetensors.save", "safetensors", lambda theirs: repeated(lambda: theirs.save(columns))),
        peers=[],
        target=1.0,
        unit="ms",
    )


def batch_from_bytes_row(size: int, kind: str) -> Row:
    """Decode a batch. The reference copies the bytes once."""
    batch = documents(kind, size).stack()
    payload = batch.to_bytes()
    batch_type = type(batch)
    columns = tensors_of(batch, kind)

    def docarray(theirs: Any) -> Loop:
        from docarray import DocVec

        schema = getattr(theirs, KINDS[kind][0].__name__)
        message = theirs.documents(schema, KINDS[kind][1](size)).to_doc_vec().to_protobuf()
        return repeated(lambda: DocVec[schema].from_protobuf(message))

    def safetensors(theirs: Any) -> Loop:
        data = theirs.save(columns)
        return repeated(lambda: theirs.load(data))

    return Row(
        title=f"DocumentBatch.from_bytes, {len(batch):,} {kind}",
        what=f"`from_bytes` of {len(payload) / 1e6:.0f} MB. The reference is one copy of these bytes, `bytes(view)`.",
        quire=Contestant("quire", repeated(lambda: batch_type.from_bytes(payload))),
        reference=Contestant("one copy", copied(payload)),
        peers=[
            Contestant("quire, copy=False", repeated(lambda: batch_type.from_bytes(payload, copy=False))),
            peer("safetensors.load", "safetensors", safetensors),
            peer("DocArray DocVec (from a parsed message)", "docarray", docarray),
        ],
        target=1.3,
        known="DocArray 320x, safetensors 1.2x",
        unit="ms",
    )


def copied(payload: bytes) -> Loop:
    """Return a loop that copies the payload into fresh memory."""
    view = memoryview(payload)
    return repeated(lambda: bytes(view))


# --- rows


def rows_to_bytes_row(size: int, kind: str) -> Row:
    """Encode documents. The reference pickles the same documents with protocol 5."""
    docs = documents(kind, size)

    def docarray(theirs: Any) -> Loop:
        own = theirs.documents(getattr(theirs, KINDS[kind][0].__name__), KINDS[kind][1](size))
        return repeated(lambda: own.to_bytes(protocol="protobuf-array"))

    return Row(
        title=f"DocumentArray.to_bytes, {len(docs):,} {kind}",
        what="`documents.to_bytes()`: rows, written as blocks of columns.",
        quire=Contestant("quire", repeated(docs.to_bytes)),
        reference=Contestant("pickle5 of the rows", repeated(lambda: pickle.dumps(docs, protocol=5))),
        peers=[peer("DocArray protobuf-array", "docarray", docarray)],
        target={"passages": 0.5, "photos": 1.5}[kind],
        known="DocArray 44x (passages)",
        unit="ms",
    )


def rows_from_bytes_row(size: int, kind: str) -> Row:
    """Decode documents. The reference is DocArray, which reads the message of the same documents."""
    docs = documents(kind, size)
    payload, array_type = docs.to_bytes(), type(docs)
    pickled = pickle.dumps(docs, protocol=5)

    def docarray(theirs: Any) -> Loop:
        from docarray import DocList

        schema = getattr(theirs, KINDS[kind][0].__name__)
        data = theirs.documents(schema, KINDS[kind][1](size)).to_bytes(protocol="protobuf-array")
        return repeated(lambda: DocList[schema].from_bytes(data, protocol="protobuf-array"))

    return Row(
        title=f"DocumentArray.from_bytes, {len(docs):,} {kind}",
        what="`from_bytes`: columns, read into documents.",
        quire=Contestant("quire", repeated(lambda: array_type.from_bytes(payload))),
        reference=peer("DocArray protobuf-array", "docarray", docarray),
        peers=[Contestant("pickle5 of the rows", repeated(lambda: pickle.loads(pickled)))],
        target=1 / 30,
        faster=True,
        unit="ms",
    )


def document_row(_: int) -> Row:
    """Encode and decode one document."""
    passage = Passage(**passage_rows(1)[0])
    data = passage.to_bytes()

    def docarray(theirs: Any) -> Loop:
        own = theirs.documents(theirs.Passage, passage_rows(1))[0]
        return repeated(lambda: theirs.Passage.from_bytes(own.to_bytes()))

    return Row(
        title="one document to_bytes + from_bytes, {id, title, 512 float32}",
        what=f"`Passage.from_bytes(passage.to_bytes())`, {len(data)} bytes. The reference pickles the same document.",
        quire=Contestant("quire", repeated(lambda: Passage.from_bytes(passage.to_bytes()))),
        reference=Contestant("pickle5", repeated(lambda: pickle.loads(pickle.dumps(passage, protocol=5)))),
        peers=[peer("DocArray", "docarray", docarray)],
        target=2.0,
        known="DocArray 400 us",
        calls=100,
        turns=20,
    )


# --- files


def gzip_row(size: int, *, write: bool) -> Row:
    """Write or read a file of passages. The reference is one gzip stream with the same bytes and level."""
    docs = documents("passages", size)
    raw = docs.to_bytes()
    folder = Path(tempfile.mkdtemp())
    ours, theirs = folder / "ours.protobuf.gz", folder / "theirs.gz"
    docs.save_binary(ours)
    theirs.write_bytes(gzip.compress(raw, 6))

    def one_stream() -> None:
        if write:
            with gzip.open(folder / "written.gz", "wb", compresslevel=6) as file:
                file.write(docs.to_bytes())
        else:
            with gzip.open(theirs, "rb") as file:
                DocumentArray[Passage].from_bytes(file.read())

    def in_blocks() -> None:
        if write:
            docs.save_binary(folder / "written.protobuf.gz")
        else:
            DocumentArray[Passage].load_binary(ours)

    return Row(
        title=f".gz file {'written' if write else 'read'}, {len(docs):,} passages",
        what=f"`{'save' if write else 'load'}_binary` of {ours.stat().st_size / 1e6:.0f} MB compressed, on all cores.",
        quire=Contestant("quire", repeated(in_blocks)),
        reference=Contestant("one gzip stream", repeated(one_stream)),
        peers=[],
        target=1 / 1.5,
        faster=True,
        unit="ms",
        by_wall=True,
    )


def both(build: Callable[[int, str], Row], name: str) -> dict[str, Callable[[int], Row]]:
    """Return a builder for passages and one for photos."""
    return {f"{name}_{kind}": lambda size, kind=kind: build(size, kind) for kind in KINDS}  # type: ignore[misc]


BUILDERS: dict[str, Callable[[int], Row]] = {
    **both(batch_to_bytes_row, "batch_to_bytes"),
    **both(safetensors_row, "safetensors"),
    **both(batch_from_bytes_row, "batch_from_bytes"),
    **both(rows_to_bytes_row, "rows_to_bytes"),
    **both(rows_from_bytes_row, "rows_from_bytes"),
    "document": document_row,
    "gzip_written": lambda size: gzip_row(size, write=True),
    "gzip_read": lambda size: gzip_row(size, write=False),
}


if __name__ == "__main__":
    sys.exit(run("wire", BUILDERS, parse_options(__doc__ or "", BUILDERS), PACKAGES))
