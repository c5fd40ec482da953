"""A service as routes of a FastAPI application."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from typing import Any

from quire._optional import require
from quire.errors import QuireError
from quire.services._batching import Batcher
from quire.services._endpoints import Endpoint, endpoints_of
from quire.services._errors import function_failed, status_of
from quire.services._forms import Side
from quire.services._limits import Limits

require("fastapi", extra="fastapi", needed_for="quire.services.mount()")
from fastapi import APIRouter, HTTPException  # noqa: E402 - whether it is there was looked at above
from starlette.concurrency import run_in_threadpool  # noqa: E402

from quire.services._http import DocumentRoute  # noqa: E402

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
    `options` are those of `include_router`: dependencies, tags, ...
    """
    kind = type("ServiceRoute", (DocumentRoute,), {"limits": limits or Limits()})
    router = APIRouter(route_class=kind)
    for endpoint in endpoints_of(service).values():
        about = {"name": endpoint.name, "description": endpoint.about}
        router.add_api_route(f"/{endpoint.name}", _route(endpoint), methods=["POST"], **about)
    app.include_router(router, prefix=prefix, **options)


def _route(endpoint: Endpoint) -> Callable[..., Awaitable[Any]]:
    """The endpoint as a function that FastAPI understands."""
    work = _batched(endpoint) if endpoint.batched else partial(_call, endpoint)

    async def route(docs: Any) -> Any:
        try:
            return await work(_given(endpoint, docs))
        except Exception as error:
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


def _batched(endpoint: Endpoint) -> Callable[[Any], Awaitable[Any]]:
    """Calls that come at about the same time are one call of the function."""
    function = endpoint.function
    batcher = Batcher(endpoint, (lambda docs: asyncio.run(function(docs))) if endpoint.is_async else function)

    async def work(docs: Any) -> Any:
        return await asyncio.wrap_future(batcher.submit(partial(copy.deepcopy, docs)))

    return work


def _told(endpoint: Endpoint, error: Exception) -> Exception:
    """The answer to a call that failed: the same words that gRPC has."""
    told: Exception = error
    if not isinstance(error, HTTPException):
        status = status_of(error if isinstance(error, QuireError) else function_failed(endpoint.name, error))
        told = HTTPException(_STATUS.get(status.code, 500), status.message)
    return told
