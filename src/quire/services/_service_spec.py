"""The gRPC methods of a service, its `.proto` for other languages, and the descriptors for reflection."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire._optional import require
from quire.codec import (
    ProtoPlan,
    check_package,
    encode_delimited,
    file_descriptor,
    load_generated_messages,
    plan_service,
    to_camel_case,
    write_proto,
)
from quire.errors import SchemaError
from quire.services._description import describe_service
from quire.services._endpoints import Endpoint, collect_endpoints, service_name
from quire.services._limits import Limits
from quire.services._payloads import Payload

if TYPE_CHECKING:
    from types import ModuleType

    from google.protobuf.descriptor_pb2 import FileDescriptorProto
    from google.protobuf.descriptor_pool import DescriptorPool


SERVICE = "quire.v1.Documents"
"""The service whose methods carry documents as columns, between programs that use quire."""
STREAM_SUFFIX = "_stream"
DESCRIBE = "Describe"


# --- methods with messages of the documents' own classes


@dataclass(frozen=True)
class ProtoMethod:
    """One method in the `.proto` of a service; `input` and `output` name messages."""

    name: str
    endpoint: Endpoint
    input: str
    output: str
    streams: tuple[bool, bool]

    def __str__(self) -> str:
        request, response = (
            f"stream {message}" if stream else message
            for stream, message in zip(self.streams, (self.input, self.output), strict=True)
        )
        return f"  rpc {self.name}({request}) returns ({response});"


@dataclass(frozen=True)
class ProtoService:
    """The messages and methods in the `.proto` of a service."""

    name: str
    messages: ProtoPlan
    methods: tuple[ProtoMethod, ...]

    @property
    def full_name(self) -> str:
        """The name with the package."""
        return f"{self.messages.package}.{self.name}" if self.messages.package else self.name

    def to_proto(self) -> str:
        """Return the text of the `.proto`."""
        lines = []
        for method in self.methods:
            if method.endpoint.summary and not method.name.endswith("Stream"):
                lines.append(f"  // {method.endpoint.summary}")
            lines.append(str(method))
        return write_proto(self.messages) + "\n" + "\n".join([f"service {self.name} {{", *lines, "}\n"])

    def to_descriptor(self) -> FileDescriptorProto:
        """Return the file descriptor that protoc would produce for the text."""
        file: FileDescriptorProto = file_descriptor(self.messages)
        file.name = f"{self.full_name}.proto"
        service = file.service.add(name=self.name)
        prefix = f".{self.messages.package}." if self.messages.package else "."
        for method in self.methods:
            service.method.add(
                name=method.name,
                input_type=prefix + method.input,
                output_type=prefix + method.output,
                client_streaming=method.streams[0],
                server_streaming=method.streams[1],
            )
        return file


def service_proto(
    service: object, previous: str | None = None, *, package: str | None = None, name: str | None = None
) -> str:
    """Return the `.proto` of a service, for clients in other languages: the messages of its documents and its methods.

    With the previous `.proto`, every field keeps its number, and the package stays unless another one is passed.
    """
    endpoints = collect_endpoints(service, construct=False)
    return plan_proto_service(name or service_name(service), endpoints, previous, package).to_proto()


def plan_proto_service(
    name: str, endpoints: Mapping[str, Endpoint], previous: str | None, package: str | None = None
) -> ProtoService:
    """Plan the methods: `Embed` for each endpoint, and `EmbedStream` for those that take and return single values."""
    check_package(package)
    if any(endpoint.is_open for endpoint in endpoints.values()):
        raise SchemaError(f"{name}: documents of any class have no .proto: name the class in the signatures.")
    payloads = [payload for endpoint in endpoints.values() for payload in (endpoint.input, endpoint.output)]
    array_types = [payload.document_type for payload in payloads if payload.kind != "document"]
    document_types = [payload.document_type for payload in payloads]
    plan, document_messages, array_messages = plan_service(document_types, array_types, previous, package)

    def message_of(payload: Payload) -> str:
        messages = document_messages if payload.kind == "document" else array_messages
        return messages[payload.document_type]

    methods: dict[str, ProtoMethod] = {}
    for endpoint in endpoints.values():
        arities = {to_camel_case(endpoint.name): (endpoint.input.stream, endpoint.output.stream)}
        if endpoint.is_unary:
            arities[f"{to_camel_case(endpoint.name)}Stream"] = (True, True)
        for method_name, streams in arities.items():
            if method_name in methods:
                raise SchemaError(
                    f"{name}: two methods would be called {method_name}. "
                    f"Rename {methods[method_name].endpoint.name} with @endpoint(name=)."
                )
            methods[method_name] = ProtoMethod(
                method_name, endpoint, message_of(endpoint.input), message_of(endpoint.output), streams
            )
    service = to_camel_case(name)
    if service in {*plan.messages, *plan.enums}:
        service = f"{service}Service"
    return ProtoService(re.sub(r"\W", "", service), plan, tuple(methods.values()))


# --- all methods


@dataclass(frozen=True)
class MethodSpec:
    """One gRPC method: its service, its endpoint, and whether requests and responses are streams.

    The messages of `framed` streams are parts of values; those of other streams are values.
    """

    service: str
    name: str
    endpoint: Endpoint
    streams: tuple[bool, bool]
    framed: bool = False


@dataclass(frozen=True)
class ServiceSpec:
    """Everything of a service that does not depend on the server."""

    name: str
    endpoints: dict[str, Endpoint]
    proto: ProtoService | None
    previous: str | None
    description: bytes

    @classmethod
    def build(cls, service: object, limits: Limits, name: str | None, previous: str | None) -> ServiceSpec:
        """Build the spec of a function, a class, an object or a list of them."""
        endpoints = collect_endpoints(service)
        for endpoint in endpoints:
            other = endpoint.removesuffix(STREAM_SUFFIX)  # every endpoint has a method with this suffix
            if other != endpoint and other in endpoints:
                raise SchemaError(f"{endpoint!r} is the name of the stream method of {other!r}: rename it.")
        name = name or service_name(service)
        is_open = any(endpoint.is_open for endpoint in endpoints.values())
        # Clients that use quire read documents of any class, but a `.proto` needs to know their fields.
        proto = None if is_open else plan_proto_service(name, endpoints, previous)
        description = json.dumps(describe_service(name, endpoints, limits)).encode()
        return cls(name, endpoints, proto, previous, encode_delimited(1, description))

    def methods(self) -> Iterator[MethodSpec]:
        """Yield every method that can be called."""
        for endpoint in self.endpoints.values():
            if endpoint.is_unary:
                yield MethodSpec(SERVICE, endpoint.name, endpoint, (False, False))
            yield MethodSpec(SERVICE, endpoint.name + STREAM_SUFFIX, endpoint, (True, True), framed=True)
        if self.proto is not None:
            for method in self.proto.methods:
                endpoint = method.endpoint.with_proto_messages(self.previous)
                yield MethodSpec(self.proto.full_name, method.name, endpoint, method.streams)

    @property
    def service_names(self) -> list[str]:
        """The full names of the gRPC services."""
        return [SERVICE, *([self.proto.full_name] if self.proto else [])]

    # --- reflection

    def descriptor_pool(self) -> DescriptorPool:
        """Return a pool with the descriptors of all services and messages."""
        pool = _protobuf("descriptor_pool").DescriptorPool()
        quire = load_generated_messages().DESCRIPTOR
        health = require("grpc_health.v1.health_pb2", extra="grpc", needed_for="a gRPC service")
        # A file can be added only after the files that it imports.
        pool.AddSerializedFile(quire.serialized_pb)
        pool.AddSerializedFile(self._describe_documents_service(quire.name).SerializeToString())
        pool.AddSerializedFile(health.DESCRIPTOR.serialized_pb)
        if self.proto is not None:
            if self.proto.messages.needs_duration:
                pool.AddSerializedFile(_protobuf("duration_pb2").DESCRIPTOR.serialized_pb)
            pool.AddSerializedFile(self.proto.to_descriptor().SerializeToString())
        return pool

    def _describe_documents_service(self, quire_file: str) -> FileDescriptorProto:
        """Return the file descriptor of `quire.v1.Documents`, with its messages Part, Description and Nothing."""
        file = _protobuf("descriptor_pb2").FileDescriptorProto(
            name="quire/documents.proto", package="quire.v1", syntax="proto3", dependency=[quire_file]
        )
        file.message_type.add(name="Nothing")
        for name, fields in (("Part", {"content": "BYTES", "more": "BOOL"}), ("Description", {"json": "STRING"})):
            message = file.message_type.add(name=name)
            for number, (field, field_type) in enumerate(fields.items(), 1):
                added = message.field.add(name=field, number=number, label=1)
                added.type = getattr(added, f"TYPE_{field_type}")
        service = file.service.add(name=SERVICE.rpartition(".")[2])
        service.method.add(name=DESCRIBE, input_type=".quire.v1.Nothing", output_type=".quire.v1.Description")
        for method in self.methods():
            if method.service == SERVICE:
                request, response = (
                    "Part" if method.framed else "Document" if payload.kind == "document" else "Batch"
                    for payload in (method.endpoint.input, method.endpoint.output)
                )
                service.method.add(
                    name=method.name,
                    input_type=f".quire.v1.{request}",
                    output_type=f".quire.v1.{response}",
                    client_streaming=method.framed,
                    server_streaming=method.framed,
                )
        return file


def _protobuf(module: str) -> ModuleType:
    return require(f"google.protobuf.{module}", extra="grpc", needed_for="a gRPC service")
