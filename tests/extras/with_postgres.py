"""The packages for PostgreSQL are installed; without a server, an index is an error that says so."""

from __future__ import annotations

from quire import BaseDocument
from quire.errors import SearchUnavailableError
from quire.index import DocumentIndex
from quire.typing import NdArray


class Photo(BaseDocument):
    embedding: NdArray[4]


try:
    DocumentIndex[Photo]("postgresql://127.0.0.1:1/photos", timeout=1)
except SearchUnavailableError as error:
    assert "did not answer within 1 s" in str(error)
else:
    raise AssertionError("there is no server")
