"""The description that a server gives of its endpoints, and how a client checks its classes against it.

A description is JSON: names, payloads and schemas. A schema is plain data, class by class, so that a client compares
it with its own classes field by field and names the field that differs. The keys are part of the protocol.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire._class_registry import class_name, find
from quire.array import DocumentArray, DocumentBatch
from quire.codec import DELIMITED, iter_fields, read_text
from quire.document import BaseDocument
from quire.errors import DecodeError, DocumentTypeError, PathError, SchemaError, did_you_mean
from quire.schema import Field, FieldKind
from quire.services._endpoints import Endpoint
from quire.services._limits import Limits, request_too_large
from quire.services._payloads import Payload

Json = dict[str, Any]
END = object()
"""What a stream of values ends with; None is a value, and not a document."""
_NUMBERS = (bool, int, float, complex)
_VALUE_DEPENDENT = ("any", "union", "enum")  # kinds of fields for which only a value shows whether it fits
_WIDER_NUMBERS = {"int": ("float", "complex"), "float": ("complex",)}


# --- servers


def describe_service(name: str, endpoints: Mapping[str, Endpoint], limits: Limits) -> Json:
    """Return everything that a client needs to know about a service."""
    return {
        "version": 1,
        "service": name,
        "max_message_bytes": limits.max_message_bytes,
        "max_request_bytes": limits.max_request_bytes,
        "endpoints": {
            endpoint.name: {
                "about": endpoint.summary,
                "signature": str(endpoint),
                "takes": _describe_payload(endpoint.input),
                "gives": _describe_payload(endpoint.output),
                "idempotent": endpoint.options.idempotent,
                "max_batch_size": endpoint.options.max_batch_size,
            }
            for endpoint in endpoints.values()
        },
    }


def _describe_payload(payload: Payload) -> Json:
    return {"form": payload.kind, "stream": payload.stream, **describe_schema(payload.document_type)}


def describe_schema(document_type: type[Any]) -> Json:
    """Return the fields of a class and of nested classes, with a fingerprint that is equal for equal fields."""
    schema = document_type.document_schema()
    notes: dict[str, Json] = schema.notes
    if "description" not in notes:
        classes: dict[str, list[Json]] = {}
        _describe_class(document_type, classes)
        notes["description"] = {
            "type": class_name(document_type),
            "open": schema.is_open,
            "classes": classes,
            "fingerprint": _fingerprint(classes),
        }
    return notes["description"]


def _describe_class(document_type: type[Any], classes: dict[str, list[Json]]) -> None:
    name = class_name(document_type)
    if name not in classes:
        classes[name] = described = []  # before its fields, which may be of the same class
        described += [_describe_field(field, classes) for field in document_type.document_schema().fields]


def _describe_field(field: Field, classes: dict[str, list[Json]]) -> Json:
    described: Json = {"name": field.name, "kind": field.kind.value, "text": str(field)}
    described |= {"required": field.required, "nullable": field.nullable}
    if field.kind is FieldKind.TENSOR:
        shape = field.spec.shape
        described["dtype"] = field.spec.dtype
        described["shape"] = None if shape is None else ["..." if size is Ellipsis else size for size in shape]
    elif field.kind is FieldKind.SCALAR:
        bases = (base.__name__ for base in _NUMBERS if issubclass(field.type, base))
        described["number"] = next(bases, field.type.__name__)
    elif field.kind in (FieldKind.DOCUMENT, FieldKind.DOCUMENTS):
        described["class"] = class_name(field.document_type)
        _describe_class(field.document_type, classes)
    elif field.items:
        described["items"] = [_describe_field(item, classes) for item in field.items]
    return described


def _fingerprint(classes: Mapping[str, list[Json]]) -> str:
    """Hash the fields alone: the classes may have other names in another program."""
    # Classes are in the order in which fields refer to them, so their numbers are the same in every program.
    numbers = {name: number for number, name in enumerate(classes)}

    def without_names(field: Json) -> Json:
        kept = {key: value for key, value in field.items() if key != "text"}
        if "class" in kept:
            kept["class"] = numbers[kept["class"]]
        if "items" in kept:
            kept["items"] = [without_names(item) for item in kept["items"]]
        return kept

    text = json.dumps([[without_names(field) for field in described] for described in classes.values()], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def contract_fingerprint(description: bytes) -> str:
    """Hash a description; servers send it with every response, so that clients notice an upgrade."""
    return hashlib.sha256(description).hexdigest()[:16]


# --- compatibility of schemas


def find_mismatch(writer: Json, reader: Json) -> str | None:
    """Return why documents of the writer's schema cannot be read with the reader's, or None if they can."""
    # Most calls end here. Open classes (`BaseDocument`) take any fields, so that only values can be checked.
    if writer["fingerprint"] == reader["fingerprint"] or writer["open"] or reader["open"]:
        return None
    return _Comparison(writer["classes"], reader["classes"]).compare_classes(writer["type"], reader["type"], "")


class _Comparison:
    """Compares the classes of a writer with those of a reader; each pair once, since classes may be recursive."""

    def __init__(self, writer: Json, reader: Json) -> None:
        self._writer, self._reader = writer, reader
        self._compared: set[tuple[str, str]] = set()

    def compare_classes(self, written: str, read: str, path: str) -> str | None:
        if (written, read) in self._compared:
            return None
        self._compared.add((written, read))
        written_fields = {field["name"]: field for field in self._writer[written]}
        parent = path or read.rpartition(":")[2]
        for field in self._reader[read]:
            where = f"{parent}.{field['name']}"
            mismatch = None
            if field["name"] in written_fields:
                mismatch = self._compare_fields(written_fields[field["name"]], field, where)
            elif field["required"]:
                mismatch = f"{where}: {field['text']} is required, and is not sent."
            if mismatch is not None:
                return mismatch
        return None

    def _compare_fields(self, written: Json, read: Json, where: str) -> str | None:
        if written["kind"] in _VALUE_DEPENDENT or read["kind"] in _VALUE_DEPENDENT:
            return None
        if written["kind"] != read["kind"] or not self._is_compatible(written, read):
            return f"{where}: {read['text']} is read, but {written['text']} is sent."
        if "class" in written:
            return self.compare_classes(written["class"], read["class"], where)
        pairs = zip(written.get("items", ()), read.get("items", ()), strict=False)
        mismatches = (self._compare_fields(*pair, where) for pair in pairs)
        return next((mismatch for mismatch in mismatches if mismatch is not None), None)

    @staticmethod
    def _is_compatible(written: Json, read: Json) -> bool:
        """Return whether values of a field can be read as another field of the same kind."""
        if written["kind"] == "scalar":
            return read["number"] in (written["number"], *_WIDER_NUMBERS.get(written["number"], ()))
        if written["kind"] != "tensor":
            return True
        if written["dtype"] and read["dtype"] and written["dtype"] != read["dtype"]:
            return False
        a, b = written["shape"], read["shape"]  # sizes are numbers, names like "h", or "..." for any sizes
        if a is None or b is None or "..." in (*a, *b):
            return True
        return len(a) == len(b) and all(
            x == y or isinstance(x, str) or isinstance(y, str) for x, y in zip(a, b, strict=True)
        )


# --- clients


@dataclass(frozen=True)
class CallPlan:
    """How an endpoint is called with documents of one class."""

    name: str
    input: Payload
    output: Payload
    idempotent: bool
    max_message_bytes: int
    max_request_bytes: int | None
    """The server's limit, None if it does not describe one."""

    def encode(self, value: object) -> bytes:
        """Encode an argument, converted to what the endpoint takes."""
        data = self.input.encode(self.input.convert(value, self.name))
        # The server checks it as well. Here it saves sending most of the request, and in gRPC for asyncio, a part that
        # cannot be sent because the server has ended the call may replace the status of the server by INTERNAL.
        if self.max_request_bytes is not None and len(data) > self.max_request_bytes:
            raise request_too_large(self.max_request_bytes)
        return data


class Contract:
    """The description of a server, checked against the classes of the client's program."""

    read_at: float = 0.0
    """When it was read last, on the clock of `time.monotonic`."""

    def __init__(self, description: bytes, local_endpoints: Mapping[str, Endpoint]) -> None:
        self._description = self._read(description)
        self.fingerprint = contract_fingerprint(description)
        self._local_endpoints = local_endpoints
        self._plans: dict[tuple[str, type[Any], Endpoint | None], CallPlan] = {}

    @staticmethod
    def _read(message: bytes) -> Json:
        """Return the JSON in field 1 of a `quire.v1.Description` message."""
        try:
            for number, wire_type, start, end in iter_fields(message, 0, len(message)):
                if number == 1 and wire_type == DELIMITED:
                    description: Json = json.loads(read_text(message, start, end))
                    return description
        except (ValueError, RecursionError) as error:
            raise DecodeError(f"the description of the service cannot be read: {error}") from error
        raise DecodeError("the service does not describe itself.")

    @property
    def signatures(self) -> dict[str, str]:
        """The signatures of the endpoints, by name."""
        return {name: endpoint["signature"] for name, endpoint in self._description["endpoints"].items()}

    def endpoint(self, name: str) -> Json:
        """Return the description of an endpoint."""
        endpoints: dict[str, Json] = self._description["endpoints"]
        if name not in endpoints:
            service = self._description["service"]
            raise PathError(f"{service} has no endpoint {name!r}. {did_you_mean(name, endpoints)}")
        return endpoints[name]

    def plan(self, name: str, value: object, local: Endpoint | None = None) -> CallPlan:
        """Return how to call an endpoint with such a value, once the schemas of both sides are known to fit.

        For `END` (an empty stream), the class is the one that the server names, if it is loaded here. `local` is
        a function with the types of the endpoint; by default, that of the client's service.
        """
        if value is END:
            document_type: type[Any] = find(self.endpoint(name)["takes"]["type"], None) or BaseDocument
        else:
            document_type = self._document_type_of(value, name)
        local = local or self._local_endpoints.get(name)
        # Once for each class: a comparison of schemas takes longer than a small call.
        key = name, document_type, local
        if key not in self._plans:
            self._plans[key] = self._make_plan(*key)
        return self._plans[key]

    def encode(self, name: str, value: object, local: Endpoint | None = None) -> tuple[CallPlan, bytes]:
        """Return how to call an endpoint with a value, and its bytes."""
        plan = self.plan(name, value, local)
        return plan, plan.encode(value)

    @staticmethod
    def _document_type_of(value: object, name: str) -> type[Any]:
        if isinstance(value, (DocumentArray, DocumentBatch)):
            if not value.document_type.document_schema().is_open or not len(value):
                return value.document_type
            return type(value[0])
        if isinstance(value, BaseDocument):
            return type(value)
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], BaseDocument):
            return type(value[0])
        got = type(value).__name__
        if isinstance(value, (list, tuple)):
            got = f"a {got} of {type(value[0]).__name__}" if value else f"an empty {got}: pass DocumentArray[T]([])"
        raise DocumentTypeError(f"{name}: expected a document, an array or a batch, got {got}.")

    def _make_plan(self, name: str, document_type: type[Any], local: Endpoint | None) -> CallPlan:
        remote = self.endpoint(name)
        if local is not None and not issubclass(document_type, local.input.document_type):
            expected = local.input.document_type.__name__
            raise DocumentTypeError(f"{name}: expected documents of {expected}, got {document_type.__name__}.")
        mismatch = find_mismatch(describe_schema(document_type), remote["takes"])
        if mismatch is not None:
            raise SchemaError(f"{name}: {document_type.__name__} does not fit what the service takes. {mismatch}")
        output = local.output if local is not None else self._choose_output(remote, document_type)
        mismatch = find_mismatch(remote["gives"], describe_schema(output.document_type))
        if mismatch is not None:
            raise SchemaError(
                f"{name}: what the service returns does not fit {output.document_type.__name__}. {mismatch}"
            )
        sent = Payload(document_type, remote["takes"]["form"], remote["takes"]["stream"])
        message_bytes, request_bytes = (
            self._description["max_message_bytes"],
            self._description.get("max_request_bytes"),
        )
        return CallPlan(name, sent, output, remote["idempotent"], message_bytes, request_bytes)

    @staticmethod
    def _choose_output(remote: Json, sent: type[Any]) -> Payload:
        """Return the payload of answers: of the sent class if the server has one class for both, else of its name."""
        output = remote["gives"]
        document_type = sent if output["type"] == remote["takes"]["type"] else find(output["type"], None)
        if document_type is None or document_type.document_schema().is_open:
            return Payload(BaseDocument, "document" if output["form"] == "document" else "array", output["stream"])
        return Payload(document_type, output["form"], output["stream"])
