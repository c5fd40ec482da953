"""Documents, arrays and batches as bodies of FastAPI's routes: JSON or protobuf, as the client likes."""

from __future__ import annotations

import asyncio
import inspect
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from copy import copy
from functools import partial
from types import UnionType
from typing import Annotated, Any, ClassVar, Union, get_args, get_origin
from weakref import WeakKeyDictionary

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError, PydanticUndefined

from quire._extra_fields import unknown_field
from quire._optional import require
from quire.errors import MissingDependencyError, MissingValueError, QuireError, SchemaError, ServiceLimitError
from quire.services._endpoints import _hints
from quire.services._http_responses import FILE, JSON, LINES, PROTOBUF, chosen, media_type
from quire.services._limits import Account, Budget, Limits
from quire.services._payloads import Side, guard_missing, side_of
from quire.tensors import describe

require("fastapi", extra="fastapi", needed_for="quire.services over HTTP")
from fastapi import Body, HTTPException, Request, Response  # noqa: E402 - whether it is there was looked at above
from fastapi.dependencies.utils import get_typed_return_annotation, get_typed_signature  # noqa: E402
from fastapi.exceptions import RequestValidationError  # noqa: E402
from fastapi.params import Body as BodyInfo  # noqa: E402
from fastapi.params import Depends  # noqa: E402
from fastapi.routing import APIRoute  # noqa: E402

from quire.services._http_responses import LinesOf, Wanted, answer, answer_async  # noqa: E402

_BINARY = {"schema": {"type": "string", "format": "binary"}}
_DONE = "__quire_http__"
_gates: WeakKeyDictionary[type[Any], Gate] = WeakKeyDictionary()


class Gate:
    """The requests in work. Those beyond the limit wait, and those beyond the queue are sent away with 503."""

    def __init__(self, limits: Limits) -> None:
        self.limits, self._budget, self._inside = limits, Budget(limits), 0
        self._turns: weakref.WeakKeyDictionary[Any, asyncio.Semaphore] = weakref.WeakKeyDictionary()

    @asynccontextmanager
    async def enter(self) -> AsyncIterator[Account]:
        """Wait for a turn; what the request takes in memory is told to the account."""
        if self._inside >= self.limits.max_concurrency + self.limits.max_queue:
            raise busy(f"{self._inside} requests are in work or wait already")
        turn = self._turns.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self.limits.max_concurrency))
        self._inside += 1
        try:
            async with turn:
                with self._budget.account() as account:
                    yield account
        finally:
            self._inside -= 1


class LimitedRequest(Request):  # type: ignore[misc]
    """A request whose body is read up to a limit; `Content-Length` is believed when it says too much."""

    def __init__(self, request: Request, limits: Limits, account: Account) -> None:
        super().__init__(request.scope, request._receive, request._send)
        self._limit, self._account = limits.max_request_bytes, account

    async def stream(self) -> AsyncIterator[bytes]:
        """The body as it comes."""
        told = self.headers.get("content-length", "")
        if told.isdigit() and int(told) > self._limit:
            raise self._too_large(f"{int(told):,} bytes")
        size = 0
        async for part in super().stream():
            size += len(part)
            if size > self._limit:
                raise self._too_large("more")
            try:
                self._account.take(len(part))
            except ServiceLimitError as error:
                raise busy(str(error)) from error
            yield part

    def _too_large(self, found: str) -> HTTPException:
        return HTTPException(413, f"the body has {found}, and the limit is {self._limit:,} bytes.")


def busy(why: str) -> HTTPException:
    """The error of a server that has enough to do."""
    return HTTPException(503, f"{why}: try again later.", {"Retry-After": "1"})


class DocumentRoute(APIRoute):  # type: ignore[misc]
    """A route that speaks JSON and protobuf: `APIRouter(route_class=DocumentRoute)`.

    An argument that is a document, a `DocumentArray[T]` or a `DocumentBatch[T]` is the body. What the function gives is
    sent as `Accept` asks: `application/json`, or `application/x-protobuf`, which `from_bytes` reads. An iterator of
    documents is sent while it runs: as lines of JSON, or as the file that `pull_stream` reads. A body may also be such
    a file (`application/octet-stream`), as `push` sends it.
    """

    limits: ClassVar[Limits] = Limits()
    """What is taken on at most: bodies larger than `max_request_bytes` get 413."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        self._plan = getattr(endpoint, _DONE, None) or _Plan(endpoint, options.get("response_model"), self.limits)
        super().__init__(path, self._plan.endpoint, **self._plan.described(options))

    @classmethod
    def _gate(cls) -> Gate:
        """The gate before all routes of the class."""
        return _gates.setdefault(cls, Gate(cls.limits))

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's own, behind the limits and for the media types that are known."""
        inner, plan, gate = super().get_route_handler(), self._plan, self._gate()

        async def handle(request: Request) -> Response:
            plan.check_accept(request)
            plan.check_body(request)
            async with gate.enter() as account:
                try:
                    answer: Response = await inner(LimitedRequest(request, gate.limits, account))
                except RequestValidationError as error:
                    raise RequestValidationError(plan.explain(error.errors())) from error
                except MissingValueError as error:  # of a column that the client left empty, and the function reads
                    raise HTTPException(422, str(error)) from error
            return answer

        return handle


class _Plan:
    """A function whose documents come from the body and go to the answer."""

    def __init__(self, function: Callable[..., Any], response_model: Any, limits: Limits) -> None:
        self._max_bytes = limits.max_request_bytes
        self._status = 200
        given, self._returns = _typed(function)
        self._gives = _side(response_model) or _side(self._returns)
        bodies = [parameter.name for parameter in given if _is_body(parameter)]
        sides = {parameter.name: _body_side(parameter) for parameter in given if parameter.name in bodies}
        alone = len(bodies) == 1 and not _embeds(given, bodies[0])
        self._takes = sides[bodies[0]] if alone else None
        self._document_types = {name: side.document_type for name, side in sides.items() if side is not None}
        parameters = [self._as_body(each) if each.name in bodies else each for each in given]
        self.endpoint = self._wrapped(function, parameters) if bodies or self._gives else function

    def _as_body(self, parameter: inspect.Parameter) -> inspect.Parameter:
        """The parameter as FastAPI sees it: the JSON of the documents; what is not JSON is decoded before."""
        kind, more = _apart(parameter.annotation)
        told, default = _told_of_body(parameter, more)
        before = [] if self._takes is None else [BeforeValidator(partial(_decoded, self._takes, self._max_bytes))]
        parts = (kind, *more, *told, *before)
        return parameter.replace(annotation=Annotated[parts], default=default)

    def _wrapped(self, function: Callable[..., Any], parameters: list[inspect.Parameter]) -> Any:
        made: Any
        if inspect.iscoroutinefunction(function):

            async def made(*, quire_request: Request, **values: Any) -> Any:
                given = await function(**_guarded(values))
                return await answer_async(self._gives, given, self._wanted(quire_request))

        else:

            def made(*, quire_request: Request, **values: Any) -> Any:
                return answer(self._gives, function(**_guarded(values)), self._wanted(quire_request))

        by_name = inspect.Parameter.KEYWORD_ONLY
        asked = [parameter.replace(kind=by_name) for parameter in parameters]
        asked.append(inspect.Parameter("quire_request", by_name, annotation=Request))
        streams = self._gives is not None and self._gives.stream
        returns = inspect.Signature.empty if streams else self._returns
        made.__signature__ = inspect.Signature(asked, return_annotation=returns)
        for name in ("__name__", "__qualname__", "__module__", "__doc__"):
            setattr(made, name, getattr(function, name, None))
        setattr(made, _DONE, self)
        return made

    def explain(self, errors: Any) -> list[Any]:
        """What is wrong with a request, with the nearest names for unknown fields.

        The values are left out: they may be large and may have no form in JSON.
        """
        problems = []
        for error in errors:
            problem = {name: value for name, value in error.items() if name != "ctx"}
            if "input" in problem:
                problem["input"] = describe(problem["input"])
            if problem["type"] == "extra_forbidden" and problem["loc"][0] == "body":
                problem["msg"] = self._unknown_field(list(problem["loc"][1:])) or problem["msg"]
            problems.append(problem)
        return problems

    def _unknown_field(self, location: list[int | str]) -> str | None:
        name = str(location.pop(0)) if self._takes is None else next(iter(self._document_types))
        if name not in self._document_types:
            return None
        if isinstance(location[0], int):  # the row of an array
            location.pop(0)
        return unknown_field(self._document_types[name], tuple(location))

    # --- media types

    def body_types(self) -> list[str]:
        """What a body may be."""
        if self._takes is None:
            return []
        return [JSON, PROTOBUF] if self._takes.form == "document" else [JSON, PROTOBUF, FILE]

    def answer_types(self) -> list[str]:
        """What an answer may be."""
        if self._gives is None:
            return []
        return [LINES, FILE] if self._gives.stream else [JSON, PROTOBUF]

    def check_body(self, request: Request) -> None:
        """415 if the body is nothing that is known."""
        types, headers = self.body_types(), request.headers
        found = media_type(headers.get("content-type", ""))
        empty = headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers
        if types and found not in types and not (empty and not found):
            raise HTTPException(415, f"the body is {found or 'of no type'}; this takes {', '.join(types)}.")

    def check_accept(self, request: Request) -> None:
        """406 if nothing that can be given is liked."""
        types = self.answer_types()
        if types and chosen(request.headers.get("accept"), self._offers()) is None:
            raise HTTPException(406, f"this gives {', '.join(types)}.")

    def _offers(self) -> list[str]:
        types = self.answer_types()
        return [*types, PROTOBUF] if FILE in types else types

    def _wanted(self, request: Request) -> Wanted:
        found = chosen(request.headers.get("accept"), self._offers() or [JSON]) or JSON
        return Wanted(FILE if found == PROTOBUF and FILE in self.answer_types() else found, self._status)

    def described(self, options: dict[str, Any]) -> dict[str, Any]:
        """The options of the route, with what OpenAPI is to tell of media types."""
        extra: dict[str, Any] = {}
        self._status = int(options.get("status_code") or 200)
        if binary := self.body_types()[1:]:
            extra["requestBody"] = {"content": dict.fromkeys(binary, _BINARY)}
        if binary := self.answer_types()[1:]:
            extra["responses"] = {str(self._status): {"content": dict.fromkeys(binary, _BINARY)}}
        if self._gives is not None and self._gives.stream:
            options = {**options, "response_model": self._gives.document_type, "response_class": LinesOf}
        if extra:
            options = {**options, "openapi_extra": {**extra, **(options.get("openapi_extra") or {})}}
        return options


def _guarded(values: dict[str, Any]) -> dict[str, Any]:
    return {name: guard_missing(value) for name, value in values.items()}


def _decoded(takes: Side, max_bytes: int, value: Any) -> Any:
    """Bytes of a body as documents, be it a message or a file; what JSON gave is left to pydantic."""
    if not isinstance(value, bytes):
        return value
    try:
        return takes.python_type.from_bytes(value, max_bytes=max_bytes)
    except MissingDependencyError:
        raise
    except QuireError as error:
        raise PydanticCustomError("documents", "{reason}", {"reason": str(error)}) from error


def _typed(function: Callable[..., Any]) -> tuple[list[inspect.Parameter], Any]:
    """The parameters with their types, and the type of what comes out; FastAPI tells, where names are not known."""
    try:
        hints = _hints(function, "the route")
    except SchemaError:
        return list(get_typed_signature(function).parameters.values()), get_typed_return_annotation(function)
    given = inspect.signature(function).parameters.values()
    typed = [each.replace(annotation=hints.get(each.name, each.annotation)) for each in given]
    return typed, hints.get("return", inspect.Signature.empty)


def _apart(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    """An annotation, and what is said beside it."""
    if get_origin(annotation) is not Annotated:
        return annotation, ()
    kind, *more = get_args(annotation)
    return kind, tuple(more)


def _side(annotation: Any) -> Side | None:
    try:
        return side_of(_apart(annotation)[0], "")
    except SchemaError:
        return None


def _body_side(parameter: inspect.Parameter) -> Side | None:
    """What a parameter is, or may be if it may be None."""
    kind = _apart(parameter.annotation)[0]
    if get_origin(kind) in (Union, UnionType):
        kinds = [each for each in get_args(kind) if each is not type(None)]
        kind = kinds[0] if len(kinds) == 1 else kind
    return _side(kind)


def _is_body(parameter: inspect.Parameter) -> bool:
    """Whether a parameter is documents that no dependency gives."""
    side = _body_side(parameter)
    said = [*_apart(parameter.annotation)[1], parameter.default]
    return side is not None and not side.stream and not any(isinstance(item, Depends) for item in said)


def _told_of_body(parameter: inspect.Parameter, more: tuple[Any, ...]) -> tuple[list[Any], Any]:
    """What to say of the body beside the type, and the default: beside `= Body(...)`, FastAPI sees no validators."""
    told = parameter.default
    if any(isinstance(item, BodyInfo) for item in more):
        return [], told
    if not isinstance(told, BodyInfo):
        return [Body()], told
    moved = copy(told)
    moved.default = PydanticUndefined
    return [moved], parameter.empty if told.is_required() else told.default


def _embeds(parameters: list[inspect.Parameter], body: str) -> bool:
    """Whether the body is an object of several values, or of one that was asked to be in one."""
    for parameter in parameters:
        said = [*_apart(parameter.annotation)[1], parameter.default]
        told = [item for item in said if isinstance(item, BodyInfo)]
        if told and (parameter.name != body or told[0].embed):
            return True
    return False
