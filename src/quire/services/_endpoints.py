"""From a typed function to an endpoint: its name, its payloads, and its options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import MethodType
from typing import Any, TypeVar, get_type_hints, overload

from quire._protocols import is_document_type
from quire.errors import OptionError, SchemaError, check_options
from quire.services._payloads import Payload, ProtoPayload, parse_payload
from quire.services._tokens import check_token_field

F = TypeVar("F", bound=Callable[..., Any])
_OPTIONS_ATTRIBUTE = "__quire_endpoint__"
_NO_INSTANCE = object()  # one for all, so that endpoints of one method are equal


@dataclass(frozen=True)
class EndpointOptions:
    """How an endpoint may be called; see `endpoint`."""

    idempotent: bool = False
    max_batch_size: int = 0
    max_wait: float = 0.005
    name: str | None = None
    max_batch_bytes: int = 0
    max_queue_time: float | None = None
    batch_workers: int = 1
    max_batch_tokens: int = 0
    tokens: str | None = None

    def __post_init__(self) -> None:
        if self.max_batch_size < 0:
            raise OptionError(f"max_batch_size={self.max_batch_size}: use 0 for no batching, or a number of rows.")
        if self.max_wait < 0:
            raise OptionError(f"max_wait={self.max_wait}: use seconds, 0 or more.")
        for name, what in (("max_batch_bytes", "bytes"), ("max_batch_tokens", "tokens")):
            if getattr(self, name) < 0:
                raise OptionError(f"{name}={getattr(self, name)}: use 0 for no limit, or a number of {what}.")
        if self.max_queue_time is not None and self.max_queue_time <= 0:
            raise OptionError(f"max_queue_time={self.max_queue_time}: use a positive number of seconds, or None.")
        if self.batch_workers < 1:
            raise OptionError(f"batch_workers={self.batch_workers}: use 1 or more.")
        self._check_batching()
        if self.name is not None and not self.name.isidentifier():
            raise OptionError(f"name={self.name!r}: use a name that a Python function could have.")

    def _check_batching(self) -> None:
        """Raise an error for options of dynamic batching that would have no effect."""
        if bool(self.max_batch_tokens) != (self.tokens is not None):
            raise OptionError("max_batch_tokens is a number, and tokens the field that is counted: pass both.")
        unused = [name for name in ("max_batch_bytes", "max_batch_tokens", "max_queue_time") if getattr(self, name)]
        if self.batch_workers > 1:
            unused.append("batch_workers")
        if unused and not self.max_batch_size:
            raise OptionError(f"{', '.join(unused)}: only with max_batch_size, which turns dynamic batching on.")


@overload
def endpoint(function: F) -> F: ...
@overload
def endpoint(
    *,
    idempotent: bool = False,
    max_batch_size: int = 0,
    max_wait: float = 0.005,
    name: str | None = None,
    max_batch_bytes: int = 0,
    max_queue_time: float | None = None,
    batch_workers: int = 1,
    max_batch_tokens: int = 0,
    tokens: str | None = None,
) -> Callable[[F], F]: ...
def endpoint(function: Any = None, **options: Any) -> object:
    """Mark a function or a method as an endpoint.

    idempotent: a call may be repeated, so clients retry it when the server becomes unavailable during the call.
    max_batch_size: concurrent calls are combined into one call of the function with at most this many rows; 0 turns
        dynamic batching off. The function must then return one row for each row it receives. When it fails, it is
        called again with the rows of fewer callers.
    max_wait: how many seconds the first call waits for others.
    name: the name of the endpoint, by default that of the function.
    max_batch_bytes: a limit for the size of the requests in a batch, in addition to its rows; 0 for none.
    max_queue_time: a call that has waited for more seconds when its turn comes is refused with ServiceLimitError.
    batch_workers: the number of batches that run at the same time; with more than one, the function must be safe to
        call from several threads.
    max_batch_tokens, tokens: a limit for the tokens in a batch, in addition to its rows. `tokens` names a field: of a
        list, a tensor or a text the length of the first dimension counts, and of a whole number its value.
    """
    check_options("endpoint", options, EndpointOptions.__dataclass_fields__)
    endpoint_options = EndpointOptions(**options)

    def mark(target: F) -> F:
        setattr(target, _OPTIONS_ATTRIBUTE, endpoint_options)
        return target

    return mark if function is None else mark(function)


@dataclass(frozen=True)
class Endpoint:
    """One function of a service."""

    name: str
    function: Callable[..., Any]
    input: Payload
    output: Payload
    options: EndpointOptions = field(default_factory=EndpointOptions)
    is_async: bool = False
    summary: str = ""

    @property
    def is_unary(self) -> bool:
        """Whether neither the argument nor the result is a stream."""
        return not (self.input.stream or self.output.stream)

    @property
    def batched(self) -> bool:
        """Whether concurrent calls are combined."""
        return self.options.max_batch_size > 0

    @property
    def is_open(self) -> bool:
        """Whether it takes or returns documents of any class."""
        return any(payload.document_type.document_schema().is_open for payload in (self.input, self.output))

    def with_proto_messages(self, previous: str | None) -> Endpoint:
        """Return the endpoint with the messages of its classes' own `.proto`, numbered as in the previous one."""
        input_payload, output_payload = (
            ProtoPayload(payload.document_type, payload.kind, payload.stream, previous)
            for payload in (self.input, self.output)
        )
        return replace(self, input=input_payload, output=output_payload)

    def __str__(self) -> str:
        return f"{self.name}({self.input}) -> {self.output}"


def collect_endpoints(service: object, *, construct: bool = True) -> dict[str, Endpoint]:
    """Return the endpoints of a function, a class, an object or a list of them, by name.

    With `construct=False` a class is not called, and its endpoints are only good for their signatures: a client must
    not load a model to know the types.
    """
    endpoints: dict[str, Endpoint] = {}
    for collected in _iter_endpoints(service, construct=construct):
        if collected.name in endpoints:
            raise SchemaError(
                f"two endpoints are called {collected.name!r}: give one of them another name with @endpoint(name=)."
            )
        endpoints[collected.name] = collected
    if not endpoints:
        raise SchemaError(
            f"{_own_name(service)} has no endpoint: write a public method with types, as "
            "`def embed(self, docs: DocumentArray[Image]) -> DocumentArray[Image]`."
        )
    return endpoints


def service_name(service: object) -> str:
    """Return the name of a service in CamelCase: that of the class or function, or 'Service' for a list."""
    if isinstance(service, (list, tuple)):
        return service_name(service[0]) if len(service) == 1 else "Service"
    words = _own_name(service).split("_")
    return "".join(word[:1].upper() + word[1:] for word in words if word) or "Service"


def _own_name(service: object) -> str:
    named = service if inspect.isroutine(service) or isinstance(service, type) else type(service)
    return str(getattr(named, "__name__", "Service"))


def _iter_endpoints(service: object, *, construct: bool) -> Iterable[Endpoint]:
    if isinstance(service, (list, tuple)):
        return [item for part in service for item in _iter_endpoints(part, construct=construct)]
    if inspect.isroutine(service):
        return [make_endpoint(service)]
    instance = service
    if is_document_type(service):
        raise SchemaError(
            f"{_own_name(service)} is a document class, and not a service: serve a function of documents, as "
            f"`def embed(docs: DocumentArray[{_own_name(service)}]) -> DocumentArray[{_own_name(service)}]`."
        )
    if isinstance(service, type):
        instance = service() if construct else object.__new__(service)
    # Names are looked up on the class first, so that no property runs: an object that was never initialised
    # (construct=False) has none that work.
    names = [name for name in dir(type(instance)) if not name.startswith("_")]
    methods = [getattr(instance, name) for name in names if inspect.isroutine(getattr(type(instance), name))]
    endpoints = []
    for method in methods:
        try:
            endpoints.append(make_endpoint(method))
        except SchemaError:
            if hasattr(method, _OPTIONS_ATTRIBUTE):
                raise  # marked as an endpoint, so the types are a mistake; other methods are just not endpoints
    if not endpoints and callable(instance) and not isinstance(service, type):
        return [make_endpoint(instance)]
    return endpoints


def make_endpoint(function: Callable[..., Any]) -> Endpoint:
    """Return the endpoint of one function, by its signature."""
    called = function if inspect.isroutine(function) else type(function).__call__  # an object with __call__
    options: EndpointOptions = getattr(called, _OPTIONS_ATTRIBUTE, None) or EndpointOptions()
    name = options.name or str(getattr(function, "__name__", type(function).__name__))
    if not name.isidentifier():
        raise SchemaError(f"{name} has no name that can be called: name it with @endpoint(name=...).")
    input_payload, output_payload = _parse_signature(function, called, name)
    is_async = inspect.iscoroutinefunction(called) or inspect.isasyncgenfunction(called)
    summary = (inspect.getdoc(called) or "").partition("\n")[0]
    result = Endpoint(name, function, input_payload, output_payload, options, is_async, summary)
    if result.batched and (not result.is_unary or "document" in (result.input.kind, result.output.kind)):
        raise SchemaError(
            f"{result}: calls can be combined only where an array or a batch is taken and an array or a batch is "
            "returned. Leave out max_batch_size, or change the types."
        )
    if result.options.tokens is not None:
        check_token_field(result.input.document_type.document_schema(), result.options.tokens, name)
    return result


def endpoint_of(function: Callable[..., Any]) -> Endpoint:
    """Return the endpoint of a function, or of a method of a class (`Model.embed`), to know its name and types."""
    if inspect.isfunction(function) and next(iter(inspect.signature(function).parameters), None) == "self":
        return make_endpoint(MethodType(function, _NO_INSTANCE))
    return make_endpoint(function)


def _parse_signature(function: Callable[..., Any], called: Callable[..., Any], name: str) -> tuple[Payload, Payload]:
    try:
        signature = inspect.signature(function)
    except ValueError as error:
        raise SchemaError(f"{name}: it is no function with types: {error}.") from error
    parameters = [p for p in signature.parameters.values() if p.default is p.empty]
    if len(parameters) != 1 or parameters[0].kind not in (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    ):
        raise SchemaError(f"{name}: an endpoint takes one argument, the documents; got {signature}.")
    hints = resolve_hints(called, name)
    argument = parameters[0].name
    for typed in (argument, "return"):
        if typed not in hints:
            raise SchemaError(
                f"{name}: no type for {typed!r}. Write it as `def {name}(docs: DocumentArray[T]) -> DocumentArray[U]`."
            )
    return parse_payload(hints[argument], f"{name}({argument})"), parse_payload(hints["return"], f"{name}()")


def resolve_hints(called: Callable[..., Any], name: str) -> dict[str, Any]:
    """Return the annotations of a function, with names of its closure resolved too."""
    # With postponed annotations, classes that a function in a function names are only known to its closure. A variable
    # that is assigned later (`server = serve(f)`, where `f` uses `server`) has an empty cell, which raises ValueError.
    nonlocals: dict[str, Any] = {}
    unwrapped = inspect.unwrap(called)
    if inspect.isfunction(unwrapped):
        for variable, cell in zip(unwrapped.__code__.co_freevars, unwrapped.__closure__ or (), strict=True):
            with suppress(ValueError):
                nonlocals[variable] = cell.cell_contents
    try:
        return get_type_hints(called, localns=nonlocals or None, include_extras=True)
    except NameError as error:
        raise SchemaError(f"{name}: a type in its signature is unknown: {error}.") from error
