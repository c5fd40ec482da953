"""Functions on documents as services, over gRPC and HTTP.

>>> from quire.services import Client, serve
>>> with serve(embed) as server, Client(f'localhost:{server.port}') as client:
...     client.embed(docs)
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.services._async_client import AsyncClient
    from quire.services._async_server import AsyncServer, serve_async
    from quire.services._client import Client
    from quire.services._endpoints import endpoint
    from quire.services._http import DocumentRoute
    from quire.services._http_mount import mount
    from quire.services._inference_http import mount_open_inference
    from quire.services._limits import Limits
    from quire.services._ray_serve import RayServeClient, RayService, ray_serve
    from quire.services._request_ids import current_request_id, use_request_id
    from quire.services._security import Caller, Tls
    from quire.services._serve import serve
    from quire.services._server import Server
    from quire.services._service_spec import service_proto
    from quire.services._workers import WorkerServer

__all__ = [
    "AsyncClient",
    "AsyncServer",
    "Caller",
    "Client",
    "DocumentRoute",
    "Limits",
    "RayServeClient",
    "RayService",
    "Server",
    "Tls",
    "WorkerServer",
    "current_request_id",
    "endpoint",
    "mount",
    "mount_open_inference",
    "ray_serve",
    "serve",
    "serve_async",
    "service_proto",
    "use_request_id",
]

# gRPC and FastAPI are extras, so modules that need them are imported when a name of theirs is used.
_MODULES = {
    "AsyncClient": "_async_client",
    "AsyncServer": "_async_server",
    "Caller": "_security",
    "Client": "_client",
    "DocumentRoute": "_http",
    "Limits": "_limits",
    "RayServeClient": "_ray_serve",
    "RayService": "_ray_serve",
    "Server": "_server",
    "Tls": "_security",
    "WorkerServer": "_workers",
    "current_request_id": "_request_ids",
    "endpoint": "_endpoints",
    "mount": "_http_mount",
    "mount_open_inference": "_inference_http",
    "ray_serve": "_ray_serve",
    "serve": "_serve",
    "serve_async": "_async_server",
    "service_proto": "_service_spec",
    "use_request_id": "_request_ids",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"quire.services.{_MODULES[name]}"), name)
