"""`serve`: a service on threads of this process, or in several processes."""

from __future__ import annotations

from typing import overload

from typing_extensions import Unpack

from quire.services._server import ServeKeywords, ServeOptions, Server
from quire.services._workers import WorkerServer


@overload
def serve(
    service: object, host: str = ..., port: int = ..., *, workers: None = None, **options: Unpack[ServeKeywords]
) -> Server: ...
@overload
def serve(
    service: object, host: str = ..., port: int = ..., *, workers: int, **options: Unpack[ServeKeywords]
) -> WorkerServer: ...
def serve(
    service: object,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    workers: int | None = None,
    **options: Unpack[ServeKeywords],
) -> Server | WorkerServer:
    """Serve a function on documents, a class of such functions, or a list of both, over gRPC.

    The server runs on threads of this process, on a free port unless one is passed, until its `with` block ends or
    `stop()` is called. `wait()` waits until the process receives SIGTERM. The default host accepts only connections
    from this machine.

    workers: the number of processes that share the port, each with a copy of the service. They are supervised, and
        replaced when they end. The limits are those of each process.
    limits: what the server accepts.
    tls: its certificate; callers then need TLS too.
    authorize: a function that receives the `Caller` and returns whether the call is allowed.
    name: the name of the service for other languages, by default that of the class or function.
    proto: the `.proto` whose numbers and package other languages use, as `quire proto --service` wrote it.
    reflection: whether tools may ask for the methods; by default where there is no `authorize`.
    grace: how many seconds running calls have to finish when the server stops.
    keepalive: after how many silent seconds a client is asked whether it is still there; None for never.
    max_connection_age: after how many seconds clients have to connect again, so that a load balancer can distribute
        them anew; running calls have `grace` seconds to finish.
    interceptors: interceptors of gRPC, which see all calls that the limits admit.
    options: options of gRPC itself, as pairs; they replace those that quire sets.
    metrics: True, or a port, to serve Prometheus metrics over HTTP at `server.metrics_url`.
    tracing: whether calls are recorded as spans of OpenTelemetry, as children of the spans of their callers.
    open_inference: True, or the names of endpoints, to serve them as models of the Open Inference Protocol too.
    """
    serve_options = ServeOptions.from_keywords("serve", options)
    if workers is None:
        return Server(service, host, port, serve_options)
    return WorkerServer(service, host, port, workers, serve_options)
