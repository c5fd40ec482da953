"""The description that a server gives of its endpoints, and how a client checks its own classes against it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire import _class_registry
from quire._class_registry import class_name
from quire.array import DocumentArray, DocumentBatch
from quire.codec import DELIMITED, ReadOptions, fields, read_text
from quire.document import BaseDocument
from quire.errors import DecodeError, DocumentTypeError, PathError, SchemaError, did_you_mean
from quire.schema import Field, FieldKind
from quire.services._endpoints import Endpoint
from quire.services._limits import Limits
from quire.services._payloads import Side

Told = dict[str, Any]
_NESTED = (FieldKind.DOCUMENT, FieldKind.DOCUMENTS)
_NUMBERS = (bool, int, float, complex)
_LOOSE = ("any", "union", "enum")
"""Kinds of which only a value tells whether it fits."""
_WIDER = {"int": ("float", "complex"), "float": ("complex",)}


def describe_service(name: str, endpoints: Mapping[str, Endpoint], limits: Limits) -> Told:
    """Everything that a client wants to know."""
    return {
        "version": 1,
        "service": name,
        "max_message_bytes": limits.max_message_bytes,
        "endpoints": {made.name: _describe_endpoint(made) for made in endpoints.values()},
    }


def _describe_endpoint(made: Endpoint) -> Told:
    return {
        "about": made.about,
        "signature": str(made),
        "takes": describe_side(made.takes),
        "gives": describe_side(made.gives),
        "idempotent": made.options.idempotent,
        "max_batch_size": made.options.max_batch_size,
    }


def describe_side(side: Side) -> Told:
    """A side's form, stream or not, and its schema."""
    return {"form": side.form, "stream": side.stream, **describe_schema(side.document_type)}


def describe_schema(document_type: Any) -> Told:
    """The fields of a class and of the classes inside, and a fingerprint that is the same for the same fields."""
    known: dict[str, Told] = document_type.document_schema().notes
    if "told" not in known:
        classes: dict[str, list[Told]] = {}
        _describe_class(document_type, classes)
        root = class_name(document_type)
        is_open = document_type.document_schema().is_open
        known["told"] = {"type": root, "open": is_open, "classes": classes, "fingerprint": _fingerprint(classes)}
    return known["told"]


def _describe_class(document_type: Any, classes: dict[str, list[Told]]) -> None:
    name = class_name(document_type)
    if name in classes:
        return
    classes[name] = fields = []
    fields += [_describe_field(field, classes) for field in document_type.document_schema().fields]


def _describe_field(field: Field, classes: dict[str, list[Told]]) -> Told:
    told: Told = {"name": field.name, "kind": field.kind.value, "text": str(field)}
    told |= {"required": field.required, "nullable": field.nullable}
    if field.kind is FieldKind.TENSOR:
        shape = field.spec.shape
        told["dtype"] = field.spec.dtype
        told["shape"] = None if shape is None else ["..." if size is Ellipsis else size for size in shape]
    elif field.kind is FieldKind.SCALAR:
        told["number"] = next((base.__name__ for base in _NUMBERS if issubclass(field.type, base)), field.type.__name__)
    elif field.kind in _NESTED:
        told["class"] = class_name(field.document_type)
        _describe_class(field.document_type, classes)
    elif field.items:
        told["items"] = [_describe_field(item, classes) for item in field.items]
    return told


def _fingerprint(classes: Mapping[str, list[Told]]) -> str:
    """Of the fields alone: the classes may have other names in another program."""
    numbers = {name: number for number, name in enumerate(classes)}

    def plain(field: Told) -> Told:
        kept = {key: value for key, value in field.items() if key != "text"}
        if "class" in kept:
            kept["class"] = numbers[kept["class"]]
        if "items" in kept:
            kept["items"] = [plain(item) for item in kept["items"]]
        return kept

    told = json.dumps([[plain(field) for field in fields] for fields in classes.values()], sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()[:16]


# --- does it fit


def misfit(writer: Told, reader: Told) -> str | None:
    """Why documents of one schema cannot be read as those of another, with the field; None where they can."""
    if writer["fingerprint"] == reader["fingerprint"] or writer["open"] or reader["open"]:
        return None
    return _Comparison(writer["classes"], reader["classes"]).classes(writer["type"], reader["type"], "")


class _Comparison:
    def __init__(self, writer: Told, reader: Told) -> None:
        self._writer, self._reader = writer, reader
        self._seen: set[tuple[str, str]] = set()

    def classes(self, wrote: str, reads: str, path: str) -> str | None:
        if (wrote, reads) in self._seen:
            return None
        self._seen.add((wrote, reads))
        there = {field["name"]: field for field in self._writer[wrote]}
        here = path or reads.rpartition(":")[2]
        for field in self._reader[reads]:
            where = f"{here}.{field['name']}"
            if field["name"] in there:
                why = self.fields(there[field["name"]], field, where)
            else:
                why = f"{where}: {_text(field)} is required, and is not sent." if field["required"] else None
            if why is not None:
                return why
        return None

    def fields(self, wrote: Told, reads: Told, where: str) -> str | None:
        if wrote["kind"] in _LOOSE or reads["kind"] in _LOOSE:
            return None
        if wrote["kind"] != reads["kind"] or not _fits(wrote, reads):
            return f"{where}: {_text(reads)} is read, but {_text(wrote)} is sent."
        if "class" in wrote:
            return self.classes(wrote["class"], reads["class"], where)
        pairs = zip(wrote.get("items", ()), reads.get("items", ()), strict=False)
        return next((why for pair in pairs if (why := self.fields(*pair, where)) is not None), None)


def _fits(wrote: Told, reads: Told) -> bool:
    if wrote["kind"] == "scalar":
        return reads["number"] == wrote["number"] or reads["number"] in _WIDER.get(wrote["number"], ())
    if wrote["kind"] != "tensor":
        return True
    if wrote["dtype"] and reads["dtype"] and wrote["dtype"] != reads["dtype"]:
        return False
    a, b = wrote["shape"], reads["shape"]
    if a is None or b is None or "..." in (*a, *b):
        return True
    return len(a) == len(b) and all(
        x == y or isinstance(x, str) or isinstance(y, str) for x, y in zip(a, b, strict=True)
    )


def _text(field: Told) -> str:
    return str(field["text"])


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
        return _class_registry.find(self.endpoint(name)["takes"]["type"], None) or BaseDocument

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
        found = _class_registry.find(gives["type"], None)
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
