"""Search by vectors and words in a folder, with LanceDB."""

from __future__ import annotations

import tempfile

import numpy as np

from quire import BaseDocument
from quire.index import DocumentIndex
from quire.typing import NdArray


class Photo(BaseDocument):
    title: str
    embedding: NdArray[4]


with tempfile.TemporaryDirectory() as folder, DocumentIndex[Photo](f"lance://{folder}/index") as index:
    index.upsert([Photo(id=str(n), title=f"photo {n}", embedding=np.eye(4)[n]) for n in range(4)])
    assert index.search(np.eye(4)[2], limit=1).documents.id == ["2"]
    assert index.search(text="3").documents.id == ["3"]
