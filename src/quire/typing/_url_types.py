"""Addresses as a type: strings that know how to be read, and from where they may be."""

from __future__ import annotations

import copyreg
import os
import types
from dataclasses import dataclass
from typing import Any, ClassVar, Union, get_args, get_origin

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, PydanticSerializationUnexpectedValue, core_schema
from typing_extensions import Unpack

from quire import _parametrize
from quire.errors import SchemaError, UriError
from quire.files import Fetching, allowed_schemes, fetch

_FETCHING = frozenset({"timeout", "max_bytes", "retries", "schemes", "storage_options"})


class UrlMeta(type):
    """The metaclass of addresses: those that are restricted to schemes are pickled by recipe."""

    _origin: Any
    schemes: frozenset[str] | None


class Url(str, metaclass=UrlMeta):
    """An address: a local path, or file://, http(s)://, data:, or whatever fsspec knows.

    It is a `str` in every way. `Annotated[ImageUrl, Schemes('https')]` allows some schemes alone.
    """

    __slots__ = ()
    __quire_plain__: ClassVar[bool] = True  # every string will do
    _origin: ClassVar[Any] = None
    schemes: ClassVar[frozenset[str] | None] = None

    def load_bytes(self, **fetching: Unpack[Fetching]) -> bytes:
        """The bytes at the address.

        `timeout` is in seconds, for all attempts (60; None for any), and `max_bytes` the most that is read (1 GiB). A
        download that fails for a reason that may pass is tried again up to `retries` times (2). With `schemes`, other
        addresses are refused, paths among them, and so are redirects to them.
        """
        return fetch(str.__str__(self), **self._fetching(fetching))

    def _fetching(self, given: Fetching) -> Fetching:
        """What was asked for, within what the type allows."""
        own, asked = type(self).schemes, given.get("schemes")
        if own is None:
            return given
        return {**given, "schemes": own if asked is None else own & {scheme.lower() for scheme in asked}}

    def __repr__(self) -> str:
        return str.__repr__(self)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        text = core_schema.no_info_after_validator_function(cls._checked, core_schema.str_schema())
        python = core_schema.no_info_plain_validator_function(cls._taken)
        written = core_schema.plain_serializer_function_ser_schema(
            _written, return_schema=core_schema.str_schema(), when_used="json"
        )
        return core_schema.json_or_python_schema(text, python, serialization=written, metadata={"quire_wrapper": cls})

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: Any) -> dict[str, Any]:
        return {"type": "string", "format": "uri"}

    @classmethod
    def _taken(cls, value: Any) -> Any:
        """An address of this kind as it is; a text or a path as one."""
        if isinstance(value, cls):
            return value if cls.schemes is None else cls._checked(value)
        if isinstance(value, str):
            return cls._checked(str.__str__(value))
        if isinstance(value, os.PathLike):
            return cls._checked(str(value))
        raise PydanticCustomError("url", "expected an address: a text or a path")

    @classmethod
    def _checked(cls, text: str) -> Any:
        if cls.schemes is not None:
            try:
                allowed_schemes(text, cls.schemes)
            except UriError as error:
                raise PydanticCustomError("url_scheme", "{reason}", {"reason": str(error)}) from None
        return text if isinstance(text, cls) else cls(text)


def _written(value: Any) -> str:
    """The text itself; what is none is left to the other members of a union."""
    if isinstance(value, str):
        return value
    raise PydanticSerializationUnexpectedValue(f"{type(value).__name__} is not an address")


_restricted: dict[tuple[Any, frozenset[str]], Any] = {}


def restricted(url_type: Any, schemes: tuple[str, ...]) -> Any:
    """The type of those addresses of a type that have one of the schemes."""
    origin = url_type._origin or url_type
    allowed = frozenset(scheme.lower() for scheme in schemes)
    if url_type.schemes is not None:
        allowed &= url_type.schemes
    made = _restricted.get((origin, allowed))
    if made is None:
        name = f"{origin.__name__}[{', '.join(sorted(allowed))}]"
        content = {
            "__slots__": (),
            "__module__": _parametrize.__name__,
            "__qualname__": _parametrize.publish(f"{origin.__module__}:{name}"),
            "__doc__": origin.__doc__,
            "_origin": origin,
            "schemes": allowed,
        }
        made = _restricted.setdefault((origin, allowed), UrlMeta(name, (origin,), content))
        _parametrize.register(made)
    return made


def _reduce(cls: UrlMeta) -> Any:
    if cls._origin is not None:
        return restricted, (cls._origin, tuple(sorted(cls.schemes or ())))
    return _parametrize.global_name(cls)


copyreg.pickle(UrlMeta, _reduce)


@dataclass(frozen=True, init=False)
class Schemes:
    """`Annotated[ImageUrl, Schemes('https')]`: addresses of strangers, which may have these schemes and no others.

    Paths and file:// are refused then, unless 'file' is among them, and so are redirects to other schemes. The values
    of the field keep to it wherever they go, so `load` does not need to be told again.
    """

    names: tuple[str, ...]

    def __init__(self, *names: str) -> None:
        if not names or "" in names:
            raise SchemaError(f"Schemes are names of schemes, like Schemes('https'), got {names}.")
        object.__setattr__(self, "names", names)

    def __quire_refine__(self, annotation: Any) -> Any:
        """The type that is meant by the annotated one."""
        if get_origin(annotation) in (Union, types.UnionType):
            return Union[tuple(map(self.__quire_refine__, get_args(annotation)))]  # noqa: UP007 - of a tuple
        return restricted(annotation, self.names) if isinstance(annotation, UrlMeta) else annotation

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        refined = self.__quire_refine__(source)
        if refined is source:
            raise SchemaError(f"Schemes are for the types of addresses, like ImageUrl, not for {source}.")
        return handler.generate_schema(refined)


def split_options(options: Any) -> tuple[Fetching, dict[str, Any]]:
    """The options of a call that loads: those for reading from the address, and those for what is read."""
    fetching: Any = {name: value for name, value in options.items() if name in _FETCHING}
    return fetching, {name: value for name, value in options.items() if name not in _FETCHING}
