"""Functions on documents as services: over gRPC, and over HTTP.

>>> from quire.services import Client, serve
>>> with serve(embed) as server, Client(f'localhost:{server.port}') as client:
...     client.embed(docs)
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.services._aio import AsyncServer
    from quire.services._client import Client
    from quire.services._client_aio import AsyncClient
    from quire.services._endpoints import endpoint
    from quire.services._http import DocumentRoute
    from quire.services._http_mount import mount
    from quire.services._limits import Limits
    from quire.services._proto import service_proto
    from quire.services._security import Caller, Tls
    from quire.services._serve import serve, serve_async
    from quire.services._server import Server

__all__ = [
    "AsyncClient",
    "AsyncServer",
    "Caller",
    "Client",
    "DocumentRoute",
    "Limits",
    "Server",
    "Tls",
    "endpoint",
    "mount",
    "serve",
    "serve_async",
    "service_proto",
]

_HOMES = {
    "AsyncClient": "_client_aio",
    "AsyncServer": "_aio",
    "Caller": "_security",
    "Client": "_client",
    "DocumentRoute": "_http",
    "Limits": "_limits",
    "Server": "_server",
    "Tls": "_security",
    "endpoint": "_endpoints",
    "mount": "_http_mount",
    "serve": "_serve",
    "serve_async": "_serve",
    "service_proto": "_proto",
}
"""Where names are; what needs gRPC or a web framework, which are extras, is imported when it is used."""


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"quire.services.{_HOMES[name]}"), name)
