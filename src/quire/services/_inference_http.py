"""The Open Inference Protocol over HTTP: endpoints of a service as routes of a FastAPI application."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from quire._optional import require
from quire.errors import DecodeError
from quire.services._batching import Batcher, close_batchers
from quire.services._endpoints import Endpoint, collect_endpoints
from quire.services._errors import error_to_status, translate_failures
from quire.services._inference import InferenceModels, parse_json_request, split_json_response
from quire.services._limits import Limits
from quire.services._request_ids import REQUEST_ID, accept_request_id, use_request_id

require("fastapi", extra="fastapi", needed_for="quire.services.mount_open_inference()")
from fastapi import APIRouter, FastAPI, HTTPException, Request, Response  # noqa: E402 - after the check
from starlette.concurrency import run_in_threadpool  # noqa: E402

from quire.services._http import LimitedRequest, RequestGate  # noqa: E402
from quire.services._http_mount import SHUTDOWN_GRACE, blocking_function  # noqa: E402

_HEADER_LENGTH = "inference-header-content-length"
_JSON, _BINARY = "application/json", "application/octet-stream"
_MOST_DIGITS = 18  # of a number of bytes
_LARGE = 1 << 16  # bytes; reading and writing more would delay other requests on the event loop


def mount_open_inference(
    app: FastAPI | APIRouter,
    service: object,
    prefix: str = "",
    *,
    endpoints: list[str] | None = None,
    limits: Limits | None = None,
    **options: Any,
) -> None:
    """Add the routes of the Open Inference Protocol to an application: `{prefix}/v2/models/{name}/infer` and others.

    The service is what `serve` takes, and its endpoints are the models, or only those that are named. Clients of KServe
    and Triton call them, with tensors in JSON or as binary data.

    `options` are those of `include_router`: dependencies, tags, ... Limits are those of `DocumentRoute`.
    """
    models = InferenceModels(collect_endpoints(service), True if endpoints is None else endpoints)
    routes = _Routes(models, limits or Limits())
    router = APIRouter(lifespan=routes.lifespan)
    model = "/v2/models/{name}"
    for path, respond in {
        "/v2/health/live": routes.answer_health,
        "/v2/health/ready": routes.answer_health,
        "/v2": routes.answer_server,
        **dict.fromkeys((model, f"{model}/versions/{{version}}"), routes.answer_model),
        **dict.fromkeys((f"{model}/ready", f"{model}/versions/{{version}}/ready"), routes.answer_ready),
        **dict.fromkeys((f"{model}/infer", f"{model}/versions/{{version}}/infer"), routes.infer),
    }.items():
        method = "POST" if path.endswith("/infer") else "GET"
        router.add_api_route(path, _make_route(respond), methods=[method], name=path, response_class=Response)
    app.include_router(router, prefix=prefix, **options)


def _make_route(respond: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """Return a route that answers with the id of the request, and with errors in the form of the protocol."""

    async def route(request: Request) -> Response:
        request_id = accept_request_id(request.headers.get(REQUEST_ID))
        with use_request_id(request_id):
            try:
                response = await respond(request)
            except Exception as error:  # noqa: BLE001 - the caller gets it
                response = _error_response(error)
        response.headers[REQUEST_ID] = request_id
        return response

    return route


class _Routes:
    """The functions of the routes, and the batchers of models with dynamic batching."""

    def __init__(self, models: InferenceModels, limits: Limits) -> None:
        self._models, self._gate = models, RequestGate(limits)
        self._batchers = {
            name: Batcher(model.endpoint, blocking_function(model.endpoint))
            for name, model in models.models.items()
            if model.endpoint.batched
        }

    @asynccontextmanager
    async def lifespan(self, _: object) -> AsyncIterator[None]:
        """Answer waiting calls when the application shuts down. It may start again."""
        for batcher in self._batchers.values():
            batcher.open()
        try:
            yield
        finally:
            await asyncio.to_thread(close_batchers, self._batchers.values(), SHUTDOWN_GRACE)

    async def answer_health(self, _: Request) -> Response:
        """Answer that the server is live, or ready."""
        return Response()

    async def answer_server(self, _: Request) -> Response:
        """Answer with the metadata of the server."""
        return _json_response(self._models.server_metadata())

    async def answer_model(self, request: Request) -> Response:
        """Answer with the metadata of a model."""
        return _json_response(self._models.find(**request.path_params).metadata())

    async def answer_ready(self, request: Request) -> Response:
        """Answer that a model is ready."""
        self._models.find(**request.path_params)
        return Response()

    async def infer(self, request: Request) -> Response:
        """Call a model."""
        model = self._models.find(**request.path_params)
        async with self._gate.enter() as account:
            if request.headers.get("content-encoding", "identity") != "identity":
                raise HTTPException(415, "the body is compressed; send it without a Content-Encoding.")
            body = await LimitedRequest(request, self._gate.limits, account, None).body()
            version = request.path_params.get("version", "")
            parse = partial(parse_json_request, model.endpoint.name, version, body, _header_length(request))
            endpoint = model.bind(await _call(parse, in_thread=len(body) > _LARGE))
            data = await self._run(endpoint, nbytes=len(body))
        head, content = split_json_response(data)
        headers = {_HEADER_LENGTH: str(head)} if head else None
        return Response(bytes(content), media_type=_BINARY if head else _JSON, headers=headers)

    async def _run(self, endpoint: Endpoint, *, nbytes: int) -> bytes:
        """Return the encoded response of an endpoint that is bound to a request."""
        is_large = nbytes > _LARGE
        read = partial(endpoint.input.decode_request, b"")
        if endpoint.batched:
            submit = partial(self._batchers[endpoint.name].submit, read, nbytes)
            value = await asyncio.wrap_future(await _call(submit, in_thread=is_large))
        elif endpoint.is_async:
            argument = await _call(read, in_thread=is_large)
            with translate_failures(endpoint.name):
                value = await endpoint.function(argument)
        else:
            argument = await _call(read, in_thread=is_large)
            value = await run_in_threadpool(_call_function, endpoint, argument)
        return bytes(await _call(partial(_encode, endpoint, value), in_thread=is_large))


def _call_function(endpoint: Endpoint, argument: Any) -> Any:
    with translate_failures(endpoint.name):
        return endpoint.function(argument)


def _encode(endpoint: Endpoint, value: Any) -> bytes:
    with translate_failures(endpoint.name):
        return endpoint.output.encode(endpoint.output.convert(value, f"{endpoint.name}()"))


async def _call(function: Callable[[], Any], *, in_thread: bool) -> Any:
    return await asyncio.to_thread(function) if in_thread else function()


def _header_length(request: Request) -> int | None:
    text = request.headers.get(_HEADER_LENGTH)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS):
        raise DecodeError(f"Inference-Header-Content-Length: {text!r} is no number of bytes.")
    return int(text)


def _json_response(value: Any, status: int = 200) -> Response:
    return Response(json.dumps(value), status, media_type=_JSON)


def _error_response(error: Exception) -> Response:
    """Return an error in the form of the protocol, which asks for 400 where the request is wrong."""
    if isinstance(error, HTTPException):
        return _json_response({"error": str(error.detail)}, error.status_code)
    status = error_to_status(error)
    code = 400 if status.http_code == 422 else status.http_code
    return _json_response({"error": status.message}, code)
