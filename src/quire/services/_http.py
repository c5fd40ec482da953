"""Documents, arrays and batches as bodies and answers of FastAPI's routes, in JSON or protobuf."""

from __future__ import annotations

import asyncio
import inspect
import time
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, MutableMapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, nullcontext
from contextvars import ContextVar
from copy import copy
from functools import partial
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, Union, get_args, get_origin
from weakref import WeakKeyDictionary

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError, PydanticUndefined

from quire._extra_fields import unknown_field
from quire._optional import require
from quire.errors import MissingDependencyError, OptionError, QuireError, SchemaError, ServiceLimitError
from quire.services._endpoints import resolve_hints
from quire.services._errors import REFUSALS, error_to_status
from quire.services._limits import Limits, RequestAccount, RequestBudget, call_too_large
from quire.services._payloads import Payload, guard_missing, parse_payload
from quire.services._request_ids import REQUEST_ID, accept_request_id, use_request_id
from quire.tensors import describe, plain_json_tensors

require("fastapi", extra="fastapi", needed_for="quire.services over HTTP")
from fastapi import Body, HTTPException, Request, Response  # noqa: E402 - after the check that it is installed
from fastapi.dependencies.utils import get_typed_return_annotation, get_typed_signature  # noqa: E402
from fastapi.exceptions import RequestValidationError  # noqa: E402
from fastapi.params import Body as BodyInfo  # noqa: E402
from fastapi.params import Depends, Form, Param  # noqa: E402
from fastapi.routing import APIRoute  # noqa: E402
from starlette.concurrency import run_in_threadpool  # noqa: E402

from quire.services._http_responses import (  # noqa: E402
    FILE,
    JSON,
    NDJSON,
    PROTOBUF,
    NdjsonResponse,
    ResponseFormat,
    make_response,
    make_response_async,
    negotiate,
    parse_media_type,
)

JsonTensors: TypeAlias = Literal["objects", "lists"]
_BINARY = {"schema": {"type": "string", "format": "binary"}}
_HANDLER_ATTRIBUTE = "__quire_http__"
_UNTIL_SENT = "quire.until_sent"
"""The key of a request's scope with the stack of what is released when the response has been sent."""
_LARGE_BODY = 1 << 16  # bytes
_POLL_SECONDS = 0.1
_gates: WeakKeyDictionary[type[Any], RequestGate] = WeakKeyDictionary()
_decoded_body: ContextVar[tuple[bytes, Callable[[], object]] | None] = ContextVar("quire_decoded_body", default=None)
"""The body that was decoded before FastAPI validates it, and a function that returns its value or raises its error."""


# --- limits


class _Places:
    """The places of running requests on one event loop; requests wait for one, but not for open streams."""

    def __init__(self, limits: Limits) -> None:
        self._limits, self._semaphore = limits, asyncio.Semaphore(limits.max_concurrency)
        self._streams, self._changed = 0, 0.0  # the number of streamed responses, and the time when it changed

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        """Wait for a place, and hold it."""
        if self._semaphore.locked():
            await self._wait()
        else:
            await self._semaphore.acquire()
        try:
            yield
        finally:
            self._semaphore.release()

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Count the holder of a place as a stream, which may go on for as long as its client wants."""
        self._streams, self._changed = self._streams + 1, time.monotonic()
        try:
            yield
        finally:
            self._streams, self._changed = self._streams - 1, time.monotonic()

    async def _wait(self) -> None:
        """Wait for a place; raise 503 when streams have held all of them for `max_stream_wait` seconds."""
        count, patience = self._limits.max_concurrency, self._limits.max_stream_wait
        # One task for the whole time, since a request that gave up and tried again would lose its turn.
        turn = asyncio.ensure_future(self._semaphore.acquire())
        has_place = False
        try:
            while not turn.done():
                seconds = max(patience, _POLL_SECONDS)
                if self._streams >= count:
                    seconds = self._changed + patience - time.monotonic()
                    if seconds <= 0:
                        break
                await asyncio.wait({turn}, timeout=seconds)
            has_place = turn.done()
        finally:  # also if the client disconnects
            if not has_place and not turn.cancel():
                self._semaphore.release()
        if not has_place:
            raise _busy(
                f"open streams hold all {count} places (max_concurrency), and released none for {patience:g} s "
                "(max_stream_wait)"
            )


class RequestGate:
    """Counts the requests of a class of routes: those beyond the limit wait, those beyond the queue get 503."""

    def __init__(self, limits: Limits) -> None:
        self.limits, self._budget, self._requests = limits, RequestBudget(limits), 0
        self._places: WeakKeyDictionary[Any, _Places] = weakref.WeakKeyDictionary()  # by event loop

    @property
    def places(self) -> _Places:
        """The places on the running event loop: an application may run on several, and a semaphore belongs to one."""
        return self._places.setdefault(asyncio.get_running_loop(), _Places(self.limits))

    @asynccontextmanager
    async def enter(self) -> AsyncIterator[RequestAccount]:
        """Wait for a turn; the account counts the bytes of the request."""
        if self._requests >= self.limits.max_calls:
            raise _busy(f"{self._requests} requests are running or waiting already")
        self._requests += 1
        try:
            async with self.places.hold():
                with self._budget.account() as account:
                    yield account
        finally:
            self._requests -= 1


class LimitedRequest(Request):  # type: ignore[misc]
    """A request whose body is read up to a limit, whether or not `Content-Length` announces its size."""

    def __init__(
        self, request: Request, limits: Limits, account: RequestAccount, decode: Callable[[Any], object] | None
    ) -> None:
        super().__init__(request.scope, request._receive, request._send)
        self._limit, self._account, self._decode = limits.max_request_bytes, account, decode

    async def body(self) -> bytes:
        """Return the body; a large one in protobuf is decoded in a thread.

        FastAPI validates bodies on the event loop, where decoding would delay all other requests.
        """
        data: bytes = await super().body()
        is_json = parse_media_type(self.headers.get("content-type", "")) == JSON
        if self._decode is not None and not is_json and len(data) > _LARGE_BODY:
            decoding: Future[object] = Future()
            try:
                decoding.set_result(await run_in_threadpool(self._decode, data))
            except Exception as error:  # noqa: BLE001 - raised where FastAPI validates the body
                decoding.set_exception(error)
            _decoded_body.set((data, decoding.result))
        return data

    async def stream(self) -> AsyncIterator[bytes]:
        """Yield the body as it arrives; FastAPI reads every body through this."""
        announced = self.headers.get("content-length", "")
        if announced.isdigit() and int(announced) > self._limit:
            raise self._too_large(f"{int(announced):,} bytes")
        size = 0
        async for part in super().stream():
            size += len(part)
            if size > self._limit:
                raise self._too_large("more")
            try:
                self._account.take(len(part))
            except ServiceLimitError as error:
                raise as_http_error(error) from error
            yield part

    def _too_large(self, size: str) -> HTTPException:
        return as_http_error(call_too_large(f"the body has {size}, and the limit is {self._limit:,} bytes."))


def _busy(why: str) -> HTTPException:
    return as_http_error(ServiceLimitError(f"{why}: try again later."))


def as_http_error(error: BaseException) -> HTTPException:
    """Return the response for an error, by the same rules as over gRPC."""
    status = error_to_status(error)
    return HTTPException(status.http_code, status.message, {"Retry-After": "1"} if status.http_code == 503 else None)


# --- routes


class DocumentRoute(APIRoute):  # type: ignore[misc]
    """A route that speaks JSON and protobuf: `APIRouter(route_class=DocumentRoute)`.

    An argument that is a document, a `DocumentArray[T]` or a `DocumentBatch[T]` is the body. The result is sent as
    `Accept` asks: `application/json`, or `application/x-protobuf`, which `from_bytes` reads. An iterator of documents
    is sent while it runs: as lines of JSON, or as the file that `pull_stream` reads. A body may also be such a file
    (`application/octet-stream`), as `push` sends it.
    """

    limits: ClassVar[Limits] = Limits()
    """The limits of all routes of the class: bodies larger than `max_request_bytes` get 413.

    A response that is streamed holds its place, and the bytes of its request are counted, until it has been sent.
    """
    tensors: ClassVar[JsonTensors] = "objects"
    """How tensors are written to JSON: as objects with dtype and shape, or as plain nested lists.

    Bodies may have both. Sparse tensors are always objects.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        if self.tensors not in get_args(JsonTensors):
            raise OptionError(f"{type(self).__name__}.tensors={self.tensors!r}: use 'objects' or 'lists'.")
        # FastAPI creates the routes again when a router is included; the endpoint is then a wrapped function already.
        self._handler = getattr(endpoint, _HANDLER_ATTRIBUTE, None) or _Handler(
            endpoint, options.get("response_model"), self.limits
        )
        super().__init__(path, self._handler.endpoint, **self._handler.add_openapi(options))

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return FastAPI's own handler, within the limits and for the media types that the route supports."""
        fastapi_handler, handler = super().get_route_handler(), self._handler
        gate = _gates.setdefault(type(self), RequestGate(self.limits))

        async def handle(request: Request) -> Response:
            handler.check_accept(request)
            handler.check_body(request)
            async with AsyncExitStack() as stack:
                account = await stack.enter_async_context(gate.enter())
                if handler.is_stream:  # already now, since the first value may take long, too
                    stack.enter_context(gate.places.stream())
                try:
                    response: Response = await fastapi_handler(
                        LimitedRequest(request, gate.limits, account, handler.decode)
                    )
                except RequestValidationError as error:
                    raise RequestValidationError(handler.explain(error.errors())) from error
                except REFUSALS as error:
                    raise as_http_error(error) from error
                if getattr(response, "body", None) is None:  # it is produced while it is sent, after this function
                    if not handler.is_stream:  # a response that the route made itself
                        stack.enter_context(gate.places.stream())
                    request.scope[_UNTIL_SENT].push_async_callback(stack.pop_all().aclose)
            return response

        return handle

    async def handle(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        """Answer a request, as an ASGI application."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        request_id = accept_request_id(headers.get(REQUEST_ID))

        async def send_with_id(message: MutableMapping[str, Any]) -> None:
            # Here, and not where the response is made, since FastAPI makes those of errors.
            if message["type"] == "http.response.start":
                own = [(name, value) for name, value in message["headers"] if name.lower() != REQUEST_ID.encode()]
                message = {**message, "headers": [*own, (REQUEST_ID.encode(), request_id.encode())]}
            await send(message)

        json_form = plain_json_tensors() if self.tensors == "lists" else nullcontext()
        with use_request_id(request_id), json_form:
            async with AsyncExitStack() as stack:
                scope[_UNTIL_SENT] = stack
                await super().handle(scope, receive, send_with_id)


class _Parameter:
    """A parameter of a route, and what its annotation means."""

    def __init__(self, parameter: inspect.Parameter) -> None:
        self.name, self.parameter = parameter.name, parameter
        self.type, self.metadata = _split_annotated(parameter.annotation)
        markers = [*self.metadata, parameter.default]
        self.body_info = next((marker for marker in markers if isinstance(marker, BodyInfo)), None)
        tp = self.type
        if get_origin(tp) in (Union, UnionType):  # an optional body is one of the class, if there is one
            members = [member for member in get_args(tp) if member is not type(None)]
            tp = members[0] if len(members) == 1 else tp
        self.payload = _find_payload(tp)
        is_dependency = any(isinstance(marker, Depends) for marker in markers)
        if not is_dependency:
            self._check(tp, markers)
        self.is_documents = self.payload is not None and not is_dependency

    def _check(self, tp: Any, markers: Sequence[Any]) -> None:
        """Raise SchemaError for documents that a request cannot carry; FastAPI would take them for something else."""
        if self.payload is not None and self.payload.stream:
            raise SchemaError(
                f"{self.name}: a request has one body, and no stream of them. Take an array: "
                f"`{self.name}: DocumentArray[{self.payload.document_type.__name__}]`."
            )
        members = get_args(tp) if get_origin(tp) in (Union, UnionType) else (tp,)
        document_types = [member for member in members if _find_payload(member) is not None]
        if len(members) > 1 and document_types:
            raise SchemaError(
                f"{self.name}: a body is a document, an array or a batch of one class, and this is a union with "
                f"{', '.join(member.__name__ for member in document_types)}. Write a route for each class."
            )
        marker = next((marker for marker in markers if isinstance(marker, (Param, Form))), None)
        if self.payload is not None and marker is not None:
            raise SchemaError(
                f"{self.name}: documents are the body of a request, and cannot be sent as {type(marker).__name__}(). "
                f"Leave it out, or write Annotated[{members[0].__name__}, Body()]."
            )

    def as_body(self, decode: Callable[[Any], Any] | None) -> inspect.Parameter:
        """Return the parameter as FastAPI is to see it: the JSON of documents, after `decode` if there is one."""
        default = self.parameter.default
        body: list[Any] = []
        if not any(isinstance(item, BodyInfo) for item in self.metadata):
            if isinstance(default, BodyInfo):  # next to `= Body(...)`, FastAPI ignores validators of the annotation
                moved = copy(default)
                moved.default = PydanticUndefined
                body, default = [moved], self.parameter.empty if default.is_required() else default.default
            else:
                body = [Body()]
        validators = [] if decode is None else [BeforeValidator(decode)]
        parts = (self.type, *self.metadata, *body, *validators)
        return self.parameter.replace(annotation=Annotated[parts], default=default)


class _Handler:
    """A route's function, with its documents decoded from the body and its result encoded as the answer."""

    def __init__(self, function: Callable[..., Any], response_model: object, limits: Limits) -> None:
        self._status = 200
        parameters, self._returns = self._read_signature(function)
        self._output = _find_payload(response_model) or _find_payload(self._returns)
        documents = [parameter for parameter in parameters if parameter.is_documents]
        self._document_types = {each.name: each.payload.document_type for each in documents if each.payload is not None}
        # The documents are the whole body unless it is an object of several values, or of one that is embedded. Only a
        # whole body can be protobuf.
        is_whole_body = len(documents) == 1 and not any(
            parameter.body_info is not None and (parameter is not documents[0] or parameter.body_info.embed)
            for parameter in parameters
        )
        self._input = documents[0].payload if is_whole_body else None
        self.endpoint = function
        self.decode = None
        if self._input is not None:
            self.decode = partial(_decode_body, self._input, limits.max_request_bytes)
        if documents or self._output:
            seen_by_fastapi = [
                each.as_body(self.decode) if each.is_documents else each.parameter for each in parameters
            ]
            self.endpoint = self._wrap(function, seen_by_fastapi)

    @property
    def is_stream(self) -> bool:
        """Whether documents are sent while the function runs."""
        return self._output is not None and self._output.stream

    @staticmethod
    def _read_signature(function: Callable[..., Any]) -> tuple[list[_Parameter], Any]:
        """Return the parameters and the return type; FastAPI resolves names that are unknown here."""
        try:
            hints = resolve_hints(function, "the route")
        except SchemaError:
            parameters = list(get_typed_signature(function).parameters.values())
            returns = get_typed_return_annotation(function)
        else:
            signature = inspect.signature(function).parameters.values()
            parameters = [each.replace(annotation=hints.get(each.name, each.annotation)) for each in signature]
            returns = hints.get("return", inspect.Signature.empty)
        return [_Parameter(parameter) for parameter in parameters], returns

    def _wrap(self, function: Callable[..., Any], parameters: Sequence[inspect.Parameter]) -> Any:
        """Return a function for FastAPI that takes the request too, which has the Accept header."""
        wrapped: Any
        if inspect.iscoroutinefunction(function):

            async def wrapped(*, quire_request: Request, **values: Any) -> Any:
                result = await function(**_guard_values(values))
                return await make_response_async(self._output, result, self._negotiate(quire_request))

        else:

            def wrapped(*, quire_request: Request, **values: Any) -> Any:
                return make_response(self._output, function(**_guard_values(values)), self._negotiate(quire_request))

        # FastAPI takes everything it needs from the signature: the body, the schema of the response, and the request.
        keyword_only = inspect.Parameter.KEYWORD_ONLY
        all_parameters = [parameter.replace(kind=keyword_only) for parameter in parameters]
        all_parameters.append(inspect.Parameter("quire_request", keyword_only, annotation=Request))
        returns = inspect.Signature.empty if self.is_stream else self._returns  # FastAPI has no schema for an iterator
        wrapped.__signature__ = inspect.Signature(all_parameters, return_annotation=returns)
        for name in ("__name__", "__qualname__", "__module__", "__doc__"):
            setattr(wrapped, name, getattr(function, name, None))
        setattr(wrapped, _HANDLER_ATTRIBUTE, self)
        return wrapped

    def explain(self, errors: Sequence[Any]) -> list[dict[str, Any]]:
        """Return FastAPI's errors of a request, with the nearest names for unknown fields.

        Values are replaced by descriptions: they may be large, and may not exist in JSON.
        """
        problems = []
        for error in errors:
            problem = {name: value for name, value in error.items() if name != "ctx"}
            if "input" in problem:
                problem["input"] = describe(problem["input"])
            if problem["type"] == "extra_forbidden" and problem["loc"][0] == "body":
                problem["msg"] = self._explain_unknown_field(list(problem["loc"][1:])) or problem["msg"]
            problems.append(problem)
        return problems

    def _explain_unknown_field(self, location: list[int | str]) -> str | None:
        name = str(location.pop(0)) if self._input is None else next(iter(self._document_types))
        if name not in self._document_types:
            return None
        if isinstance(location[0], int):  # the row of an array
            location.pop(0)
        return unknown_field(self._document_types[name], tuple(location))

    # --- media types

    @property
    def _body_types(self) -> list[str]:
        if self._input is None:
            return []
        return [JSON, PROTOBUF] if self._input.kind == "document" else [JSON, PROTOBUF, FILE]

    @property
    def _answer_types(self) -> list[str]:
        if self._output is None:
            return []
        return [NDJSON, FILE] if self._output.stream else [JSON, PROTOBUF]

    @property
    def _acceptable_types(self) -> list[str]:
        """The media types that an Accept header may name; a client that asks for protobuf gets a stream as a file."""
        types = self._answer_types
        return [*types, PROTOBUF] if FILE in types else types

    def check_body(self, request: Request) -> None:
        """Raise 415 if the body has a media type that the route does not support."""
        supported, headers = self._body_types, request.headers
        media_type = parse_media_type(headers.get("content-type", ""))
        is_empty = headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers
        if supported and media_type not in supported and not (is_empty and not media_type):
            raise HTTPException(
                415, f"the body is {media_type or 'of no type'}; this route takes {', '.join(supported)}."
            )

    def check_accept(self, request: Request) -> None:
        """Raise 406 if the client accepts none of the media types of the answer."""
        types = self._answer_types
        if types and negotiate(request.headers.get("accept"), self._acceptable_types) is None:
            raise HTTPException(406, f"this route returns {', '.join(types)}.")

    def _negotiate(self, request: Request) -> ResponseFormat:
        media_type = negotiate(request.headers.get("accept"), self._acceptable_types or [JSON]) or JSON
        if media_type == PROTOBUF and FILE in self._answer_types:
            media_type = FILE
        return ResponseFormat(media_type, self._status)

    def add_openapi(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options of the route with the media types of bodies and answers for OpenAPI."""
        extra: dict[str, Any] = {}
        self._status = int(options.get("status_code") or 200)
        if binary := self._body_types[1:]:
            extra["requestBody"] = {"content": dict.fromkeys(binary, _BINARY)}
        if binary := self._answer_types[1:]:
            extra["responses"] = {str(self._status): {"content": dict.fromkeys(binary, _BINARY)}}
        if self._output is not None and self._output.stream:
            options = {**options, "response_model": self._output.document_type, "response_class": NdjsonResponse}
        if extra:
            options = {**options, "openapi_extra": {**extra, **(options.get("openapi_extra") or {})}}
        return options


def _guard_values(values: dict[str, Any]) -> dict[str, Any]:
    return {name: guard_missing(value) for name, value in values.items()}


def _decode_body(payload: Payload, max_bytes: int, value: object) -> object:
    """Decode the bytes of a body, be it a message or a file; values that came from JSON are left to pydantic."""
    if not isinstance(value, bytes):
        return value
    decoded = _decoded_body.get()
    if decoded is not None and decoded[0] is value:
        _decoded_body.set(None)  # the value must not outlive the request in the context of its task
        return decoded[1]()
    try:
        return payload.python_type.from_bytes(value, max_bytes=max_bytes)
    except MissingDependencyError:
        raise
    except QuireError as error:
        raise PydanticCustomError("documents", "{reason}", {"reason": str(error)}) from error


def _split_annotated(annotation: object) -> tuple[Any, tuple[Any, ...]]:
    """Return the type of an annotation, and its metadata if it is `Annotated`."""
    if get_origin(annotation) is not Annotated:
        return annotation, ()
    tp, *metadata = get_args(annotation)
    return tp, tuple(metadata)


def _find_payload(annotation: object) -> Payload | None:
    try:
        return parse_payload(_split_annotated(annotation)[0], "")
    except SchemaError:
        return None
