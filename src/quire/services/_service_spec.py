"""The gRPC methods of a service, its `.proto` for other languages, and the descriptors for reflection."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from quire._optional import require
from quire.codec import (
    ProtoPlan,
    camel,
    check_package,
    delimited,
    file_descriptor,
    generated,
    plan_service,
    write_proto,
)
from quire.errors import SchemaError
from quire.services._description import describe_service
from quire.services._endpoints import Endpoint, endpoints_of, service_name, typed_endpoint
from quire.services._limits import Limits
from quire.services._payloads import Side


@dataclass(frozen=True)
class Method:
    """One method of the typed service."""

    name: str
    endpoint: Endpoint
    takes: str
    gives: str
    streams: tuple[bool, bool]

    @property
    def text(self) -> str:
        """Its line in the `.proto`."""
        sides = zip(("stream " if stream else "" for stream in self.streams), (self.takes, self.gives), strict=True)
        takes, gives = (stream + name for stream, name in sides)
        return f"  rpc {self.name}({takes}) returns ({gives});"


@dataclass(frozen=True)
class ServicePlan:
    """The messages and the methods of a service."""

    name: str
    messages: ProtoPlan
    methods: tuple[Method, ...]

    @property
    def full_name(self) -> str:
        """The name with the package."""
        return f"{self.messages.package}.{self.name}" if self.messages.package else self.name

    def text(self) -> str:
        """The `.proto`."""
        lines = []
        for method in self.methods:
            if method.endpoint.about and not method.name.endswith("Stream"):
                lines.append(f"  // {method.endpoint.about}")
            lines.append(method.text)
        return write_proto(self.messages) + "\n" + "\n".join([f"service {self.name} {{", *lines, "}\n"])

    def descriptor(self) -> Any:
        """What protoc would make of the text."""
        file = file_descriptor(self.messages)
        file.name = f"{self.full_name}.proto"
        service = file.service.add(name=self.name)
        prefix = f".{self.messages.package}." if self.messages.package else "."
        for method in self.methods:
            service.method.add(
                name=method.name,
                input_type=prefix + method.takes,
                output_type=prefix + method.gives,
                client_streaming=method.streams[0],
                server_streaming=method.streams[1],
            )
        return file


def service_proto(
    service: Any, previous: str | None = None, *, package: str | None = None, name: str | None = None
) -> str:
    """The `.proto` of a service: the messages of its documents and its methods, for clients in other languages.

    Given the previous one, every number stays in its place, and so does the package unless another is given.
    """
    return plan_methods(name or service_name(service), endpoints_of(service, construct=False), previous, package).text()


def plan_methods(
    name: str, endpoints: Mapping[str, Endpoint], previous: str | None, package: str | None = None
) -> ServicePlan:
    """The methods of the endpoints: for each `Embed`, and `EmbedStream` where it takes and gives single values."""
    check_package(package)
    sides = [side for made in endpoints.values() for side in (made.takes, made.gives)]
    if any(side.document_type.document_schema().is_open for side in sides):
        raise SchemaError(f"{name}: documents of any class have no .proto: name the class in the signatures.")
    arrays = [side.document_type for side in sides if side.form != "document"]
    plan, single, many = plan_service([side.document_type for side in sides], arrays, previous, package)

    def message(side: Side) -> str:
        return single[side.document_type] if side.form == "document" else many[side.document_type]

    methods = []
    for made in endpoints.values():
        takes, gives = message(made.takes), message(made.gives)
        methods.append(Method(camel(made.name), made, takes, gives, (made.takes.stream, made.gives.stream)))
        if made.is_unary:
            methods.append(Method(f"{camel(made.name)}Stream", made, takes, gives, (True, True)))
    _check_distinct(name, methods)
    taken = {*plan.messages, *plan.enums}
    free = camel(name) if camel(name) not in taken else f"{camel(name)}Service"
    return ServicePlan(re.sub(r"\W", "", free), plan, tuple(methods))


def _check_distinct(name: str, methods: list[Method]) -> None:
    names = [method.name for method in methods]
    for method in methods:
        if names.count(method.name) > 1:
            raise SchemaError(
                f"{name}: two methods would be called {method.name}. "
                f"Rename {method.endpoint.name} with @endpoint(name=)."
            )


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
