"""The second set of methods, for other languages: messages of the documents' own classes, as `quire proto` writes them.

An array is a message with the documents as its field 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from quire import codec
from quire.array import DocumentArray
from quire.codec import ReadOptions
from quire.codec._wire import DELIMITED, delimited, fields
from quire.errors import ColumnError, DecodeError
from quire.services._endpoints import Endpoint
from quire.services._forms import Side


@dataclass(frozen=True)
class TypedSide(Side):
    """A side whose messages are those of a `.proto` of its class."""

    previous: str | None = None

    def encode(self, value: Any) -> bytes:
        """A message of the class, or of many."""
        if self.form == "document":
            return self._message(value)
        rows = value.unstack() if self.form == "batch" else value
        return b"".join([delimited(1, self._message(document)) for document in rows])

    def _message(self, document: Any) -> bytes:
        data: bytes = codec.to_typed(document, self.previous).SerializeToString()
        return data

    def decode(self, data: Any, options: ReadOptions) -> Any:  # noqa: ARG002 - messages of protobuf have their own
        """The value of a message."""
        if self.form == "document":
            return codec.from_typed(self.document_type, data, self.previous)
        rows = DocumentArray[self.document_type]._trusted(self._documents(data))  # type: ignore[name-defined]
        try:
            return rows.stack(shapes="ragged") if self.form == "batch" else rows
        except ColumnError as error:
            raise DecodeError(f"the documents make no batch: {error}") from error

    def _documents(self, data: bytes) -> list[Any]:
        found = []
        for number, kind, start, end in fields(data, 0, len(data)):
            if number == 1 and kind == DELIMITED:
                found.append(codec.from_typed(self.document_type, data[start:end], self.previous))
        return found


def typed_endpoint(made: Endpoint, previous: str | None) -> Endpoint:
    """The endpoint with its messages of the documents' own classes."""
    takes, gives = (
        TypedSide(side.document_type, side.form, side.stream, previous) for side in (made.takes, made.gives)
    )
    return replace(made, takes=takes, gives=gives)
