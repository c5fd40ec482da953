"""`Origin[T]` as a real class: one per (origin, T), pickled by recipe.

A generated class is an ordinary subclass, so `isinstance` and `issubclass` work. It is never pickled by name,
because the process that reads the pickle may not have made it yet: a reducer registered for the metaclass writes
"subscript this origin with this type" instead. cloudpickle asks first whether the class can be found by name, so this
module answers the name of every live generated class; it then takes the same way.

Generated classes are held weakly: one that nobody uses any more goes, and the type it was made for goes with it.
"""

from __future__ import annotations

import copyreg
import itertools
import os
import sys
import threading
import types
from abc import ABCMeta
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, ForwardRef, Literal, TypeVar, Union, get_args, get_origin
from weakref import WeakValueDictionary

from quire.errors import PickleError, SchemaError

_classes: WeakValueDictionary[tuple[int, int], ParametrizedMeta] = WeakValueDictionary()
_names: WeakValueDictionary[str, type] = WeakValueDictionary()
_serial = itertools.count(2)
_making = threading.RLock()


def _renew_lock() -> None:
    global _making  # noqa: PLW0603
    _making = threading.RLock()


if hasattr(os, "register_at_fork"):  # another thread may have held it, and there is none such in the child
    os.register_at_fork(after_in_child=_renew_lock)


class ParametrizedMeta(ABCMeta):
    """The metaclass of classes that can be subscripted with one type.

    A class of this kind says in `_bind(parameter)` which types it takes and what a class made for one is given.
    """

    _parameter: Any
    _origin: ParametrizedMeta | None

    def __new__(mcls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **kwargs: Any) -> ParametrizedMeta:
        namespace.setdefault("_origin", None)
        return super().__new__(mcls, name, bases, namespace, **kwargs)

    if not TYPE_CHECKING:  # a checker takes DocumentArray[Student] for what it is, a generic class with its type

        def __getitem__(cls, parameter: Any) -> Any:
            return _subscripted(cls, parameter)

    def __repr__(cls) -> str:
        return f"<class '{cls.__module__}.{cls.__qualname__}'>" if cls._origin is None else cls.__name__


def _subscripted(cls: ParametrizedMeta, parameter: Any) -> Any:
    if isinstance(parameter, tuple) and len(parameter) == 1:
        return types.GenericAlias(cls, parameter)  # typing takes an alias apart and puts it together again so
    if isinstance(parameter, str):
        parameter = ForwardRef(parameter)
    if isinstance(parameter, (ForwardRef, TypeVar)):
        return types.GenericAlias(cls, (parameter,))  # resolved later, by whoever knows the names
    found = _classes.get((id(cls), id(parameter)))
    if found is None:
        with _making:  # two threads that ask at once get one class
            found = _classes.get((id(cls), id(parameter))) or _make(cls, parameter)
    return found


def _make(origin: ParametrizedMeta, parameter: Any) -> ParametrizedMeta:
    if getattr(origin, "_parameter", None) is not None:
        raise SchemaError(f"{origin.__name__}[{parameter!r}]: {origin.__name__} has its type already.")
    bound: dict[str, Any] = origin._bind(parameter)  # type: ignore[attr-defined]
    name = f"{origin.__name__}[{parameter.__name__}]"
    namespace = {
        "__module__": __name__,
        "__qualname__": publish(f"{origin.__name__}[{parameter.__module__}:{parameter.__qualname__}]"),
        "__doc__": origin.__doc__,
        "__slots__": (),
        "_parameter": parameter,
        "_origin": origin,
        **bound,
    }
    made: ParametrizedMeta = type(origin)(name, (origin,), namespace)
    _names[made.__qualname__] = made
    _classes[id(origin), id(parameter)] = made  # ids stay taken while the class lives: it holds both
    return made


def with_open_aliases(annotation: Any) -> Any:
    """An annotation in which `Origin[Box[T]]` is an alias again, whose type variables pydantic can substitute.

    pydantic substitutes type variables in aliases and in models, and takes every other class for finished.
    """
    if isinstance(annotation, ParametrizedMeta) and _has_type_variables(getattr(annotation, "_parameter", None)):
        return types.GenericAlias(annotation._origin or annotation, (annotation._parameter,))
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal or not arguments:
        return annotation
    replaced = tuple(with_open_aliases(argument) for argument in arguments)
    if all(new is old for new, old in zip(replaced, arguments, strict=True)):
        return annotation
    if origin in (Union, types.UnionType):
        return Union[replaced]  # noqa: UP007 - of members that are known only here
    if origin is Annotated:
        annotated: Any = Annotated
        return annotated[replaced]
    if hasattr(annotation, "copy_with"):
        return annotation.copy_with(replaced)
    return origin[replaced]


def _has_type_variables(parameter: Any) -> bool:
    return bool(getattr(parameter, "__pydantic_generic_metadata__", {}).get("parameters"))


def publish(qualname: str) -> str:
    """A name for a generated class under which this module will find it: no dots, and not taken."""
    name = qualname.replace(".", "/")
    return name if name not in _names else f"{name}#{next(_serial)}"


def register(made: type) -> None:
    """Let this module answer for a generated class, so that cloudpickle does not copy it."""
    _names[made.__qualname__] = made


def __getattr__(name: str) -> type:
    try:
        return _names[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None


def subscript(origin: Any, parameter: Any) -> Any:
    """`origin[parameter]`, as a function that a pickle can name."""
    return origin[parameter]


def _reduce(cls: ParametrizedMeta) -> str | tuple[Callable[..., Any], tuple[Any, ...]]:
    if cls._origin is not None:
        return subscript, (cls._origin, cls._parameter)
    return global_name(cls)


def global_name(cls: type) -> str:
    """The name by which pickle can find a class again, or an error that says why there is none."""
    found: Any = sys.modules.get(cls.__module__)
    for part in cls.__qualname__.split("."):
        found = getattr(found, part, None)
    if found is cls:
        return str(cls.__qualname__)
    where = "inside a function" if "<locals>" in cls.__qualname__ else "under a name that now means something else"
    raise PickleError(
        f"{cls.__module__}.{cls.__qualname__} cannot be pickled: it was defined {where}, so another process could not "
        "find it. Define it at the top level of a module, or use cloudpickle, which carries the class itself."
    )


copyreg.pickle(ParametrizedMeta, _reduce)
