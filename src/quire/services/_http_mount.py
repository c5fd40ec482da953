"""A service as routes of a FastAPI application."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from quire._optional import require
from quire.errors import QuireError
from quire.services._batching import Batcher
from quire.services._endpoints import Endpoint, endpoints_of
from quire.services._errors import FAILURES, function_failed, status_of
from quire.services._limits import Limits
from quire.services._payloads import Side

require("fastapi", extra="fastapi", needed_for="quire.services.mount()")
from fastapi import APIRouter, HTTPException  # noqa: E402 - whether it is there was looked at above
from starlette.concurrency import run_in_threadpool  # noqa: E402

from quire.services._http import DocumentRoute  # noqa: E402

_GRACE = 30.0
"""So many seconds calls have that wait for others, when the application shuts down."""
_STATUS = {
    "INVALID_ARGUMENT": 422,
    "FAILED_PRECONDITION": 422,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "RESOURCE_EXHAUSTED": 503,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
    "UNIMPLEMENTED": 501,
}


def mount(app: Any, service: Any, prefix: str = "", *, limits: Limits | None = None, **options: Any) -> None:
    """Add a route `POST {prefix}/{name}` to an application, or a router, for each endpoint of a service.

    The service is what `serve` takes. A stream that goes in is one body; one that comes out is sent while it runs.
    `options` are those of `include_router`: dependencies, tags, ... When the application shuts down, calls that wait
    for others are answered, and the threads of their functions end.
    """
    kind = type("ServiceRoute", (DocumentRoute,), {"limits": limits or Limits()})
    endpoints = endpoints_of(service).values()
    batchers = {endpoint.name: _batcher(endpoint) for endpoint in endpoints if endpoint.batched}
    router = APIRouter(route_class=kind, lifespan=partial(_lifespan, list(batchers.values())))
    for endpoint in endpoints:
        about = {"name": endpoint.name, "description": endpoint.about}
        route = _route(endpoint, batchers.get(endpoint.name))
        router.add_api_route(f"/{endpoint.name}", route, methods=["POST"], **about)
    app.include_router(router, prefix=prefix, **options)


@asynccontextmanager
async def _lifespan(batchers: Sequence[Batcher], _: Any) -> AsyncIterator[None]:
    """While an application runs, calls are put together; it may run more than once."""
    for batcher in batchers:
        batcher.open()
    try:
        yield
    finally:
        for batcher in batchers:
            await run_in_threadpool(batcher.close, _GRACE)


def _route(endpoint: Endpoint, batcher: Batcher | None) -> Callable[..., Awaitable[Any]]:
    """The endpoint as a function that FastAPI understands."""
    work = partial(_call, endpoint) if batcher is None else partial(_together, batcher)

    async def route(docs: Any) -> Any:
        try:
            return await work(_given(endpoint, docs))
        except FAILURES as error:
            raise _told(endpoint, error) from error

    takes, gives = endpoint.takes, endpoint.gives
    takes = Side(takes.document_type, "array" if takes.stream and takes.form == "document" else takes.form)
    returns = Iterator[gives.python_type] if gives.stream else gives.python_type  # type: ignore[name-defined]
    route.__annotations__ = {"docs": takes.python_type, "return": returns}
    route.__name__ = route.__qualname__ = endpoint.name
    return route


def _given(endpoint: Endpoint, docs: Any) -> Any:
    """What the function wants: the documents, or a stream of them."""
    takes = endpoint.takes
    if not takes.stream:
        return docs
    values = iter(docs) if takes.form == "document" else iter([docs])
    return _slowly(values) if endpoint.is_async else values


async def _slowly(values: Iterator[Any]) -> AsyncIterator[Any]:
    for value in values:
        yield value


async def _call(endpoint: Endpoint, docs: Any) -> Any:
    if not endpoint.is_async:
        return await run_in_threadpool(endpoint.function, docs)
    found = endpoint.function(docs)
    return await found if isinstance(found, Awaitable) else found


def _batcher(endpoint: Endpoint) -> Batcher:
    function = endpoint.function
    return Batcher(endpoint, (lambda docs: asyncio.run(function(docs))) if endpoint.is_async else function)


async def _together(batcher: Batcher, docs: Any) -> Any:
    """Calls that come at about the same time are one call of the function."""
    return await asyncio.wrap_future(batcher.submit(partial(copy.deepcopy, docs)))


def _told(endpoint: Endpoint, error: BaseException) -> Exception:
    """The answer to a call that failed: the same words that gRPC has."""
    told: Any = error
    if not isinstance(error, HTTPException):
        status = status_of(error if isinstance(error, QuireError) else function_failed(endpoint.name, error))
        told = HTTPException(_STATUS.get(status.code, 500), status.message)
    return told  # type: ignore[no-any-return]
