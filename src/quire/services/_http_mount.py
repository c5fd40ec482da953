"""A service as routes of a FastAPI application."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from quire._optional import require
from quire.services._batching import Batcher
from quire.services._endpoints import Endpoint, collect_endpoints
from quire.services._errors import FUNCTION_FAILURES, as_call_error, error_to_status
from quire.services._limits import Limits
from quire.services._payloads import Payload

require("fastapi", extra="fastapi", needed_for="quire.services.mount()")
from fastapi import APIRouter, FastAPI, HTTPException  # noqa: E402 - after the check that it is installed
from starlette.concurrency import run_in_threadpool  # noqa: E402

from quire.services._http import DocumentRoute  # noqa: E402

_SHUTDOWN_GRACE = 30.0
"""How many seconds batches in the queue have to finish when the application shuts down."""
_HTTP_STATUS = {
    "INVALID_ARGUMENT": 422,
    "FAILED_PRECONDITION": 422,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "RESOURCE_EXHAUSTED": 503,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
    "UNIMPLEMENTED": 501,
}


def mount(
    app: FastAPI | APIRouter, service: object, prefix: str = "", *, limits: Limits | None = None, **options: Any
) -> None:
    """Add a route `POST {prefix}/{name}` to an application or a router for each endpoint of a service.

    The service is what `serve` takes. A stream that goes in is one body; one that comes out is sent while it runs.
    `options` are those of `include_router`: dependencies, tags, ... When the application shuts down, calls in the
    queue of dynamic batching are answered first.
    """
    route_class = type("ServiceRoute", (DocumentRoute,), {"limits": limits or Limits()})
    endpoints = collect_endpoints(service).values()
    batchers: dict[str, Batcher] = {}
    for endpoint in endpoints:
        if endpoint.batched:
            function = endpoint.function
            # A batcher calls the function in its own thread, where no event loop runs.
            call = partial(_run_async, function) if endpoint.is_async else function
            batchers[endpoint.name] = Batcher(endpoint, call)

    @asynccontextmanager
    async def run_batchers(_: object) -> AsyncIterator[None]:
        # An application may start and stop more than once.
        for batcher in batchers.values():
            batcher.open()
        try:
            yield
        finally:
            for batcher in batchers.values():
                await run_in_threadpool(batcher.close, _SHUTDOWN_GRACE)

    router = APIRouter(route_class=route_class, lifespan=run_batchers)
    for endpoint in endpoints:
        route = _make_route(endpoint, batchers.get(endpoint.name))
        path = f"/{endpoint.name}"
        router.add_api_route(path, route, methods=["POST"], name=endpoint.name, description=endpoint.summary)
    app.include_router(router, prefix=prefix, **options)


def _run_async(function: Callable[..., Any], docs: Any) -> Any:
    return asyncio.run(function(docs))


def _make_route(endpoint: Endpoint, batcher: Batcher | None) -> Callable[..., Awaitable[Any]]:
    """Return the endpoint as a function that FastAPI understands."""
    takes_items = endpoint.input.stream and endpoint.input.kind == "document"

    async def route(docs: Any) -> Any:
        try:
            if batcher is not None:
                # A function that fails is called again, so each call gets a copy. The first one is made here: in a
                # thread, because it may be large, and not in one of FastAPI's, which plain functions occupy.
                future = await asyncio.to_thread(batcher.submit, partial(copy.deepcopy, docs))
                return await asyncio.wrap_future(future)
            argument = docs
            if endpoint.input.stream:
                values = iter(docs) if takes_items else iter([docs])
                argument = _iterate_async(values) if endpoint.is_async else values
            if not endpoint.is_async:
                return await run_in_threadpool(endpoint.function, argument)
            result = endpoint.function(argument)
            return await result if isinstance(result, Awaitable) else result
        except FUNCTION_FAILURES as error:
            failure = error.__cause__ if batcher is not None else error
            if isinstance(failure, HTTPException):  # how a function refuses a call over HTTP
                raise failure from None
            status = error_to_status(as_call_error(endpoint.name, error))
            raise HTTPException(_HTTP_STATUS.get(status.code, 500), status.message) from error

    output = endpoint.output
    # HTTP has no streams of requests: a stream of documents is an array, and other streams have one value.
    body = Payload(endpoint.input.document_type, "array" if takes_items else endpoint.input.kind)
    returns = Iterator[output.python_type] if output.stream else output.python_type  # type: ignore[name-defined]
    route.__annotations__ = {"docs": body.python_type, "return": returns}
    route.__name__ = route.__qualname__ = endpoint.name
    return route


async def _iterate_async(values: Iterator[Any]) -> AsyncIterator[Any]:
    for value in values:
        yield value
