"""The way in: a function, a class or a list of them becomes a server."""

from __future__ import annotations

from typing import Any

from typing_extensions import Unpack

from quire.services._aio import AsyncServer
from quire.services._methods import make_offer
from quire.services._options import ServeOptions, Serving
from quire.services._server import Server


def serve(service: Any, host: str = "127.0.0.1", port: int = 0, **how: Unpack[Serving]) -> Server:
    """Serve a function on documents, a class of such, or a list, over gRPC; on a free port unless one is given.

    The server runs on threads of this process, until its `with` block ends or `stop()` is called. `wait()` waits until
    the process is asked to end. Other machines reach it only through a `host` that is not this machine's own.
    """
    options = ServeOptions.of("serve", how)
    return Server(make_offer(service, options.limits, options.name, options.previous), host, port, options)


def serve_async(service: Any, host: str = "127.0.0.1", port: int = 0, **how: Unpack[Serving]) -> AsyncServer:
    """Serve on the running event loop, inside of `async with`; else as `serve` does."""
    options = ServeOptions.of("serve_async", how)
    return AsyncServer(make_offer(service, options.limits, options.name, options.previous), host, port, options)
