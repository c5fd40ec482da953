"""The functions that users pass: plain ones, lambdas, closures, and classes whose instances are kept in the worker."""

from __future__ import annotations

import inspect
import os
import threading
import typing
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, get_args, get_origin

from quire._protocols import is_document_type
from quire.document import BaseDocument
from quire.errors import OptionError

_KEPT = 8
"""So many instances are kept in a thread at most; the one that was not used for longest goes."""


class _Kept(threading.local):
    """The instances of a thread, which is what a worker is."""

    def __init__(self) -> None:
        self.instances: OrderedDict[str, Any] = OrderedDict()


_kept = _Kept()


@dataclass(frozen=True)
class Call:
    """A function with the arguments behind the first; of a class, these are what its instances are made with."""

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    token: str = field(default_factory=lambda: os.urandom(8).hex())
    """What tells the instances of this call from those of another."""

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise OptionError(f"a function or a class is needed, got {self.function!r}.")
        if self.stateful and not _has_call(self.function):
            raise OptionError(f"{self.name}: instances of a class that is passed as a function have __call__().")

    @property
    def stateful(self) -> bool:
        """Whether it is a class, one instance of which each worker makes and keeps."""
        return isinstance(self.function, type)

    @property
    def name(self) -> str:
        """What messages call it."""
        return getattr(self.function, "__qualname__", None) or repr(self.function)

    def ready(self) -> Callable[[Any], Any]:
        """A function of one argument; in a worker that had this call before, the instance that it has made then."""
        if not self.stateful:
            bound = partial(self.function, **self.kwargs) if self.kwargs else self.function
            return bound if not self.args else lambda value: bound(value, *self.args)
        instances = _kept.instances
        if self.token not in instances:
            instances[self.token] = self.function(*self.args, **self.kwargs)
            while len(instances) > _KEPT:
                instances.popitem(last=False)
        instances.move_to_end(self.token)
        made: Callable[[Any], Any] = instances[self.token]
        return made

    def returns(self) -> type[Any] | None:
        """The document class that the annotation of what it gives tells of; None where it tells none."""
        function: Any = inspect.unwrap(self.function)
        if isinstance(function, partial):
            function = function.func
        if not inspect.isroutine(function):
            function = (function if isinstance(function, type) else type(function)).__call__
        try:
            return _class_in(typing.get_type_hints(function).get("return"))
        except Exception:  # noqa: BLE001 - names that only a checker sees, and whatever else annotations may be
            return None


def _has_call(cls: Any) -> bool:
    return any("__call__" in base.__dict__ for base in cls.__mro__)


def _class_in(hint: Any) -> type[Any] | None:
    """The class of the documents in an annotation: Student, DocumentArray[Student], Iterator[Student], ..."""
    if is_document_type(hint):
        return None if hint is BaseDocument else hint
    inner = getattr(hint, "document_type", None)
    if isinstance(inner, type):
        return None if inner is BaseDocument else inner
    origin, arguments = get_origin(hint), get_args(hint)
    if isinstance(origin, type) and issubclass(origin, Iterable) and not issubclass(origin, Mapping) and arguments:
        return _class_in(arguments[0])
    return None
