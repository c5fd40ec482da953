"""A service as routes of a FastAPI application."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any

from quire._optional import require
from quire.errors import OptionError
from quire.services._batching import Batcher, close_batchers
from quire.services._endpoints import Endpoint, collect_endpoints
from quire.services._errors import FUNCTION_FAILURES, as_call_error
from quire.services._limits import Limits
from quire.services._payloads import Payload

require("fastapi", extra="fastapi", needed_for="quire.services.mount()")
from fastapi import APIRouter, FastAPI, HTTPException, Response  # noqa: E402 - after the check that it is installed
from starlette.concurrency import run_in_threadpool  # noqa: E402

from quire.services._http import DocumentRoute, JsonTensors, as_http_error  # noqa: E402

SHUTDOWN_GRACE = 30.0
"""How many seconds batches in the queue have to finish when the application shuts down."""


def mount(
    app: FastAPI | APIRouter,
    service: object,
    prefix: str = "",
    *,
    limits: Limits | None = None,
    tensors: JsonTensors = "objects",
    **options: Any,
) -> None:
    """Add a route `POST {prefix}/{name}` to an application or a router for each endpoint of a service.

    The service is what `serve` takes. A stream that goes in is one body; one that comes out is sent while it runs.
    `tensors` is that of `DocumentRoute`: 'lists' for plain nested lists in JSON.

    `options` are those of `include_router`: dependencies, tags, ... When the application shuts down, calls in the
    queue of dynamic batching are answered first.
    """
    route_class = type("ServiceRoute", (DocumentRoute,), {"limits": limits or Limits(), "tensors": tensors})
    endpoints = collect_endpoints(service).values()
    batchers: dict[str, Batcher] = {}
    for endpoint in endpoints:
        if endpoint.batched:
            if endpoint.options.max_batch_bytes:
                raise OptionError(
                    f"{endpoint.name}: HTTP routes do not know the bytes of a request, so max_batch_bytes would be "
                    "ignored. Use max_batch_size alone."
                )
            batchers[endpoint.name] = Batcher(endpoint, blocking_function(endpoint))

    @asynccontextmanager
    async def run_batchers(_: object) -> AsyncIterator[None]:
        # An application may start and stop more than once.
        for batcher in batchers.values():
            batcher.open()
        try:
            yield
        finally:
            await asyncio.to_thread(close_batchers, batchers.values(), SHUTDOWN_GRACE)

    router = APIRouter(route_class=route_class, lifespan=run_batchers)
    for endpoint in endpoints:
        route = _make_route(endpoint, batchers.get(endpoint.name))
        path = f"/{endpoint.name}"
        router.add_api_route(path, route, methods=["POST"], name=endpoint.name, description=endpoint.summary)
    app.include_router(router, prefix=prefix, **options)


def blocking_function(endpoint: Endpoint) -> Callable[[Any], Any]:
    """Return the function for the thread of a batcher, where no event loop runs."""
    if not endpoint.is_async:
        return endpoint.function
    return lambda docs: asyncio.run(endpoint.function(docs))


def _make_route(endpoint: Endpoint, batcher: Batcher | None) -> Callable[..., Awaitable[Any]]:
    """Return the endpoint as a function that FastAPI understands."""
    output, takes_items = endpoint.output, endpoint.input.stream and endpoint.input.kind == "document"

    async def route(docs: Any) -> Any:
        with _http_errors(endpoint.name):
            if batcher is not None:
                # A function that fails is called again, so each call gets a copy. The first one is made here: in a
                # thread, because it may be large, and not in one of FastAPI's, which plain functions occupy.
                future = await asyncio.to_thread(batcher.submit, partial(copy.deepcopy, docs))
                return await asyncio.wrap_future(future)
            argument = docs
            if endpoint.input.stream:
                values = iter(docs) if takes_items else iter([docs])
                argument = _iterate_async(values) if endpoint.is_async else values
            if endpoint.is_async:
                result = endpoint.function(argument)
                result = await result if isinstance(result, Awaitable) else result
            else:
                result = await run_in_threadpool(endpoint.function, argument)
            if output.stream:
                return _stream_async(endpoint.name, result) if endpoint.is_async else _stream(endpoint.name, result)
            if isinstance(result, (output.python_type, Response)):
                return result
            # A value of another type than the function declares is its failure, as over gRPC.
            return await run_in_threadpool(output.convert, result, f"{endpoint.name}()")

    # HTTP has no streams of requests: a stream of documents is an array, and other streams have one value.
    body = Payload(endpoint.input.document_type, "array" if takes_items else endpoint.input.kind)
    returns = Iterator[output.python_type] if output.stream else output.python_type  # type: ignore[name-defined]
    route.__annotations__ = {"docs": body.python_type, "return": returns}
    route.__name__ = route.__qualname__ = endpoint.name
    return route


@contextmanager
def _http_errors(name: str) -> Iterator[None]:
    """Raise what a function raises inside the block as the response that its caller gets."""
    try:
        yield
    except FUNCTION_FAILURES as error:
        for failure in (error, error.__cause__):  # a batcher has made it the cause of a FunctionError
            if isinstance(failure, HTTPException):  # how a function refuses a call over HTTP
                raise failure from None
        raise as_http_error(as_call_error(name, error)) from error


def _stream(name: str, values: Iterable[Any]) -> Iterator[Any]:
    with _http_errors(name):
        yield from values


async def _stream_async(name: str, values: AsyncIterator[Any]) -> AsyncIterator[Any]:
    with _http_errors(name):
        async for value in values:
            yield value


async def _iterate_async(values: Iterator[Any]) -> AsyncIterator[Any]:
    for value in values:
        yield value
