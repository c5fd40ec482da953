"""From a typed function to an endpoint: its name, what it takes and gives, and how it may be called."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, get_type_hints, overload

from quire.errors import OptionError, SchemaError, check_options
from quire.services._payloads import Side, TypedSide, side_of

F = TypeVar("F", bound=Callable[..., Any])
_MARK = "__quire_endpoint__"


@dataclass(frozen=True)
class EndpointOptions:
    """How an endpoint may be called; see `endpoint`."""

    idempotent: bool = False
    max_batch_size: int = 0
    max_wait: float = 0.005
    name: str | None = None

    def __post_init__(self) -> None:
        if self.max_batch_size < 0:
            raise OptionError(f"max_batch_size={self.max_batch_size}: use 0 for no batching, or a number of rows.")
        if self.max_wait < 0:
            raise OptionError(f"max_wait={self.max_wait}: use seconds, 0 or more.")
        if self.name is not None and not self.name.isidentifier():
            raise OptionError(f"name={self.name!r}: an endpoint has the name of a function.")


@overload
def endpoint(function: F) -> F: ...
@overload
def endpoint(
    *, idempotent: bool = False, max_batch_size: int = 0, max_wait: float = 0.005, name: str | None = None
) -> Callable[[F], F]: ...
def endpoint(function: Any = None, **options: Any) -> Any:
    """Mark a function or a method as an endpoint.

    idempotent: a call may be repeated, so clients do so when the server goes away in the middle.
    max_batch_size: concurrent calls are put together until there are so many rows; 0 for never. The function must then
        give a row for each row that it got. It is called again with fewer callers' rows when it fails.
    max_wait: how many seconds the first call waits for others.
    name: the endpoint's name, unless it is that of the function.
    """
    check_options("endpoint", options, EndpointOptions.__dataclass_fields__)
    chosen = EndpointOptions(**options)

    def mark(target: Any) -> Any:
        setattr(target, _MARK, chosen)
        return target

    return mark if function is None else mark(function)


@dataclass(frozen=True)
class Endpoint:
    """One function of a service."""

    name: str
    function: Callable[..., Any]
    takes: Side
    gives: Side
    options: EndpointOptions = field(default_factory=EndpointOptions)
    is_async: bool = False
    about: str = ""

    @property
    def is_unary(self) -> bool:
        """Whether one value makes one value."""
        return not (self.takes.stream or self.gives.stream)

    @property
    def batched(self) -> bool:
        """Whether concurrent calls are put together."""
        return self.options.max_batch_size > 0

    def __str__(self) -> str:
        return f"{self.name}({self.takes}) -> {self.gives}"


def endpoints_of(service: Any, *, construct: bool = True) -> dict[str, Endpoint]:
    """The endpoints of a function, a class, an object or a list of such, by name.

    With `construct=False` a class is not called, and its endpoints serve for their signatures alone: a client must not
    load a model in order to know the types.
    """
    found: dict[str, Endpoint] = {}
    for made in _collected(service, construct=construct):
        if made.name in found:
            raise SchemaError(f"two endpoints are called {made.name!r}: give one of them a name with @endpoint(name=).")
        found[made.name] = made
    if not found:
        raise SchemaError(
            f"{_name_of(service)} has no endpoint: write a public method with types, as "
            "`def embed(self, docs: DocumentArray[Image]) -> DocumentArray[Image]`."
        )
    return found


def service_name(service: Any) -> str:
    """What a service is called: the class, the function, or 'Service' for a list."""
    if isinstance(service, (list, tuple)):
        return service_name(service[0]) if len(service) == 1 else "Service"
    words = _name_of(service).split("_")
    return "".join(word[:1].upper() + word[1:] for word in words if word) or "Service"


def _name_of(service: Any) -> str:
    named = service if inspect.isroutine(service) or isinstance(service, type) else type(service)
    return str(getattr(named, "__name__", "Service"))


def _collected(service: Any, *, construct: bool) -> Iterable[Endpoint]:
    if isinstance(service, (list, tuple)):
        return [made for part in service for made in _collected(part, construct=construct)]
    if inspect.isroutine(service):
        return [make_endpoint(service)]
    instance = service
    if isinstance(service, type):
        instance = service() if construct else object.__new__(service)
    # Looked up on the class first, so that no property runs.
    names = [name for name in dir(type(instance)) if not name.startswith("_")]
    methods = [getattr(instance, name) for name in names if inspect.isroutine(getattr(type(instance), name))]
    found = [make_endpoint(method) for method in methods if _is_meant(method)]
    if not found and callable(instance) and not isinstance(service, type):
        return [make_endpoint(instance)]
    return found


def _is_meant(method: Any) -> bool:
    """Whether a method is an endpoint: it is marked, or its types say that documents go in and come out."""
    if hasattr(method, _MARK):
        return True
    try:
        make_endpoint(method)
    except SchemaError:
        return False
    return True


def make_endpoint(function: Callable[..., Any]) -> Endpoint:
    """The endpoint of one function, by its signature."""
    called = function if inspect.isroutine(function) else type(function).__call__
    options: EndpointOptions = getattr(called, _MARK, None) or EndpointOptions()
    name = options.name or _function_name(function)
    takes, gives = _sides(function, called, name)
    is_async = inspect.iscoroutinefunction(called) or inspect.isasyncgenfunction(called)
    made = Endpoint(name, function, takes, gives, options, is_async, (inspect.getdoc(called) or "").partition("\n")[0])
    _check_batching(made)
    return made


def _function_name(function: Any) -> str:
    name = str(getattr(function, "__name__", type(function).__name__))
    if not name.isidentifier():
        raise SchemaError(f"{name} has no name that can be called: name it with @endpoint(name=...).")
    return name


def _sides(function: Any, called: Any, name: str) -> tuple[Side, Side]:
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
    hints = _hints(called, name)
    missing = [what for what in (parameters[0].name, "return") if what not in hints]
    if missing:
        raise SchemaError(
            f"{name}: no type for {missing[0]!r}. Write it as `def {name}(docs: DocumentArray[T]) -> DocumentArray[U]`."
        )
    return side_of(hints[parameters[0].name], f"{name}({parameters[0].name})"), side_of(hints["return"], f"{name}()")


def _hints(called: Any, name: str) -> dict[str, Any]:
    known = dict(inspect.getclosurevars(inspect.unwrap(called)).nonlocals) if inspect.isfunction(called) else {}
    try:
        return get_type_hints(called, localns=known or None, include_extras=True)
    except NameError as error:
        raise SchemaError(f"{name}: a type in its signature is not known: {error}.") from error


def _check_batching(made: Endpoint) -> None:
    if not made.batched:
        return
    if not made.is_unary or "document" in (made.takes.form, made.gives.form):
        raise SchemaError(
            f"{made}: calls can be put together only where an array or a batch makes an array or a batch. "
            "Leave out max_batch_size, or change the types."
        )


def typed_endpoint(made: Endpoint, previous: str | None) -> Endpoint:
    """The endpoint with its messages of the documents' own classes."""
    takes, gives = (
        TypedSide(side.document_type, side.form, side.stream, previous) for side in (made.takes, made.gives)
    )
    return replace(made, takes=takes, gives=gives)
