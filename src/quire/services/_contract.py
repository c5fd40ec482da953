"""What a client knows of its server: the endpoints as they were described, held against the client's own classes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire import _loaded
from quire.array import DocumentArray, DocumentBatch
from quire.codec import ReadOptions
from quire.codec._wire import DELIMITED, fields, read_text
from quire.document import BaseDocument
from quire.errors import DecodeError, DocumentTypeError, PathError, SchemaError, did_you_mean
from quire.services._describe import Told, describe_schema, misfit
from quire.services._endpoints import Endpoint
from quire.services._forms import Side

OPTIONS = ReadOptions(unknown="drop", lend=True)


@dataclass(frozen=True)
class Plan:
    """How one endpoint is called with documents of one class."""

    name: str
    takes: Side
    gives: Side
    idempotent: bool


class Contract:
    """A server's description, and what has been checked against it."""

    def __init__(self, description: bytes, local: Mapping[str, Endpoint]) -> None:
        self.told = _read(description)
        self.max_message_bytes: int = self.told["max_message_bytes"]
        self._local = local
        self._plans: dict[tuple[str, Any], Plan] = {}

    def endpoint(self, name: str) -> Told:
        """What is told of an endpoint."""
        known = self.told["endpoints"]
        if name not in known:
            raise PathError(f"{self.told['service']} has no endpoint {name!r}. {did_you_mean(name, known)}")
        found: Told = known[name]
        return found

    def plan(self, name: str, value: Any) -> Plan:
        """How to call an endpoint with such a value, once it is known that the classes of both sides fit."""
        document_type = self._any(name) if value is None else _document_type(value, name)
        key = name, document_type
        if key not in self._plans:
            self._plans[key] = self._made(name, document_type)
        return self._plans[key]

    def _any(self, name: str) -> type[Any]:
        """The class of nothing: the server's own, if it is loaded."""
        return _loaded.find(self.endpoint(name)["takes"]["type"], None) or BaseDocument

    def _made(self, name: str, document_type: type[Any]) -> Plan:
        told = self.endpoint(name)
        mine = self._local.get(name)
        if mine is not None and not issubclass(document_type, mine.takes.document_type):
            expected = mine.takes.document_type.__name__
            raise DocumentTypeError(f"{name}: expected documents of {expected}, got {document_type.__name__}.")
        why = misfit(describe_schema(document_type), told["takes"])
        if why is not None:
            raise SchemaError(f"{name}: {document_type.__name__} does not fit what the service takes. {why}")
        takes = Side(document_type, told["takes"]["form"], told["takes"]["stream"])
        gives = mine.gives if mine is not None else self._answer(told, document_type)
        why = misfit(told["gives"], describe_schema(gives.document_type))
        if why is not None:
            raise SchemaError(f"{name}: what the service gives does not fit {gives.document_type.__name__}. {why}")
        return Plan(name, takes, gives, told["idempotent"])

    def _answer(self, told: Told, sent: type[Any]) -> Side:
        """The class of the answers: that of what is sent, where the server has one for both; else that of the name."""
        gives = told["gives"]
        found = _loaded.find(gives["type"], None)
        if gives["type"] == told["takes"]["type"]:
            found = sent
        if found is None or found.document_schema().is_open:
            return Side(BaseDocument, "document" if gives["form"] == "document" else "array", gives["stream"])
        return Side(found, gives["form"], gives["stream"])


def _document_type(value: Any, name: str) -> type[Any]:
    if isinstance(value, (DocumentArray, DocumentBatch)):
        if not value.document_type.document_schema().is_open or not len(value):
            return value.document_type
        return type(value[0])
    if isinstance(value, BaseDocument):
        return type(value)
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], BaseDocument):
        return type(value[0])
    raise DocumentTypeError(f"{name}: expected a document, an array or a batch, got {type(value).__name__}.")


def _read(description: bytes) -> Told:
    try:
        for number, kind, start, end in fields(description, 0, len(description)):
            if number == 1 and kind == DELIMITED:
                told: Told = json.loads(read_text(description, start, end))
                return told
    except (ValueError, RecursionError) as error:
        raise DecodeError(f"the service describes itself in a way that cannot be read: {error}") from error
    raise DecodeError("the service does not describe itself.")
