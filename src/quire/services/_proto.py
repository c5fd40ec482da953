"""The definition of a service for other languages: its messages and methods, as a `.proto` and as descriptors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.codec._proto_names import camel
from quire.codec._proto_plan import ProtoPlan
from quire.codec._proto_schema import plan_service
from quire.codec._proto_text import check_package, write_proto
from quire.codec._typed import file_descriptor
from quire.errors import SchemaError
from quire.services._endpoints import Endpoint, endpoints_of, service_name
from quire.services._forms import Side


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
