"""The document for when there is no schema yet."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from quire.array import DocumentArray
from quire.document import BaseDocument
from quire.typing import AnyTensor


def _no_documents() -> DocumentArray[Document]:
    return DocumentArray[Document]()


class Document(BaseDocument):
    """A document that holds whatever comes: text, a tensor, bytes, tags, and documents below and beside it."""

    parent_id: str | None = None
    uri: str | None = None
    mime_type: str | None = None
    text: str | None = None
    tensor: AnyTensor | None = None
    embedding: AnyTensor | None = None
    blob: bytes | None = None
    tags: dict[str, Any] = Field(default_factory=dict)
    weight: float | None = None
    modality: str | None = None
    location: list[float] | None = None
    offset: float | None = None
    scores: dict[str, Any] = Field(default_factory=dict)
    chunks: DocumentArray[Document] = Field(default_factory=_no_documents)
    matches: DocumentArray[Document] = Field(default_factory=_no_documents)
