"""Programs that tests of faults run in processes of their own, because they kill or fork them."""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np

from quire import BaseDocument, DocumentArray
from quire.errors import SearchError
from quire.index import DocumentIndex
from quire.typing import NdArray


class Chunk(BaseDocument):
    embedding: NdArray[4]


class Photo(BaseDocument):
    title: str
    version: int
    embedding: NdArray[8]
    chunks: DocumentArray[Chunk]


def photos(version: int, count: int = 300) -> DocumentArray[Photo]:
    """Documents of a version; each version has other vectors, texts and numbers of chunks."""
    rng = np.random.default_rng(version)
    return DocumentArray[Photo](
        Photo(
            id=f"p{n}",
            title=f"number{n} version{version}",
            version=version,
            embedding=rng.normal(size=8),
            chunks=[Chunk(id=f"p{n}c{k}", embedding=rng.normal(size=4)) for k in range((n + version) % 4)],
        )
        for n in range(count)
    )


def upsert_for_ever(url: str, name: str) -> None:
    index: Any = DocumentIndex[Photo](url, name=name)
    version = 0
    while True:
        version += 1
        sys.stdout.write(f"{version}\n")
        sys.stdout.flush()
        index.upsert(photos(version))


def fork(url: str, name: str) -> None:
    """Use an index in a forked child: write what happens in the child, and then in the parent."""
    index: Any = DocumentIndex[Photo](url, name=name)
    index.upsert(photos(1, 20))
    query = photos(1, 20)[7]
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        outcomes = []
        for use in (lambda: index, lambda: DocumentIndex[Photo](url, name=name)):
            try:
                outcomes.append(use().search(query, field="embedding", limit=1).documents.id[0])
            except SearchError as error:
                outcomes.append(f"SearchError {'spawn' in str(error)}")
        os.write(writer, ",".join(outcomes).encode())
        os._exit(0)
    os.close(writer)
    status = os.waitpid(child, 0)[1]
    mine = index.search(query, field="embedding", limit=1).documents.id[0]
    sys.stdout.write(f"{os.read(reader, 1000).decode()};{status};{mine}\n")
    index.close()


if __name__ == "__main__":
    {"upsert_for_ever": upsert_for_ever, "fork": fork}[sys.argv[1]](*sys.argv[2:])
