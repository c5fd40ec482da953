"""What a server offers over gRPC: paths and what answers them, reflection, health."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from quire._optional import require
from quire.codec._messages import generated
from quire.codec._wire import delimited
from quire.errors import SchemaError
from quire.services._describe import describe_service
from quire.services._endpoints import Endpoint, endpoints_of, service_name
from quire.services._limits import Limits
from quire.services._proto import ServicePlan, plan_methods
from quire.services._typed import typed_endpoint

SERVICE = "quire.v1.Documents"
"""The service whose methods carry documents as columns, between programs that use quire."""
STREAM = "_stream"
DESCRIBE = "Describe"


@dataclass(frozen=True)
class Offered:
    """One method: which service it is of, what it calls, which of its sides are streams, and of parts or of values."""

    service: str
    name: str
    endpoint: Endpoint
    streams: tuple[bool, bool]
    framed: bool = False


@dataclass(frozen=True)
class Offer:
    """A service, ready to be served."""

    name: str
    endpoints: dict[str, Endpoint]
    typed: ServicePlan | None
    previous: str | None
    description: bytes

    def methods(self) -> Iterator[Offered]:
        """Everything that can be called."""
        for made in self.endpoints.values():
            if made.is_unary:
                yield Offered(SERVICE, made.name, made, (False, False))
            yield Offered(SERVICE, made.name + STREAM, made, (True, True), framed=True)
        if self.typed is not None:
            for method in self.typed.methods:
                typed = typed_endpoint(method.endpoint, self.previous)
                yield Offered(self.typed.full_name, method.name, typed, method.streams)

    @property
    def service_names(self) -> list[str]:
        """The services of gRPC."""
        return [SERVICE, *([self.typed.full_name] if self.typed else [])]


def make_offer(service: Any, limits: Limits, name: str | None, previous: str | None) -> Offer:
    """Everything of a service that does not depend on the server."""
    endpoints = endpoints_of(service)
    for made in endpoints:
        if made.endswith(STREAM) and made.removesuffix(STREAM) in endpoints:
            raise SchemaError(f"{made!r} is what the stream of {made.removesuffix(STREAM)!r} is called: rename it.")
    name = name or service_name(service)
    is_open = any(
        side.document_type.document_schema().is_open for e in endpoints.values() for side in (e.takes, e.gives)
    )
    typed = None if is_open else plan_methods(name, endpoints, previous)
    told = json.dumps(describe_service(name, endpoints, limits)).encode()
    return Offer(name, endpoints, typed, previous, delimited(1, told))


def describe_for_reflection(offer: Offer) -> Any:
    """A pool with the descriptors of everything that is served."""
    pool = _protobuf("descriptor_pool").DescriptorPool()
    quire = generated().DESCRIPTOR
    pool.AddSerializedFile(quire.serialized_pb)
    pool.AddSerializedFile(_documents_file(offer, quire.name).SerializeToString())
    pool.AddSerializedFile(_health_pb2().DESCRIPTOR.serialized_pb)
    if offer.typed is not None:
        if offer.typed.messages.needs_duration:
            pool.AddSerializedFile(_protobuf("duration_pb2").DESCRIPTOR.serialized_pb)
        pool.AddSerializedFile(offer.typed.descriptor().SerializeToString())
    return pool


def _documents_file(offer: Offer, quire_file: str) -> Any:
    """The service between programs that use quire, with its messages Part, Description and Nothing."""
    file = _protobuf("descriptor_pb2").FileDescriptorProto(
        name="quire/documents.proto", package="quire.v1", syntax="proto3", dependency=[quire_file]
    )
    file.message_type.add(name="Nothing")
    for name, fields in (("Part", ("content", "more")), ("Description", ("json",))):
        message = file.message_type.add(name=name)
        for number, field in enumerate(fields, 1):
            kind = {"content": "BYTES", "more": "BOOL", "json": "STRING"}[field]
            added = message.field.add(name=field, number=number, label=1)
            added.type = getattr(added, f"TYPE_{kind}")
    service = file.service.add(name=SERVICE.rpartition(".")[2])
    service.method.add(name=DESCRIBE, input_type=".quire.v1.Nothing", output_type=".quire.v1.Description")
    for offered in offer.methods():
        if offered.service == SERVICE:
            sides = offered.endpoint.takes, offered.endpoint.gives
            takes, gives = ("Part" if offered.framed else _message(side.form) for side in sides)
            service.method.add(
                name=offered.name,
                input_type=f".quire.v1.{takes}",
                output_type=f".quire.v1.{gives}",
                client_streaming=offered.framed,
                server_streaming=offered.framed,
            )
    return file


def _message(form: str) -> str:
    return "Document" if form == "document" else "Batch"


def _protobuf(module: str) -> Any:
    return require(f"google.protobuf.{module}", extra="grpc", needed_for="a gRPC service")


def _health_pb2() -> Any:
    return require("grpc_health.v1.health_pb2", extra="grpc", needed_for="a gRPC service")
