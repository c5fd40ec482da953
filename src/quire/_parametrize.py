"""`Origin[T]` as a real class: one per (origin, T), pickled by recipe.

A generated class is an ordinary subclass, so `isinstance` and `issubclass` work. It is never pickled by name, because
the process that reads the pickle may not have generated it yet: a reducer registered for the metaclass writes
"subscript this origin with this type" instead. cloudpickle first tries to look up a class by name, so the `__getattr__`
of this module returns every live generated class by its name; cloudpickle then uses the reducer, too.

Generated classes are referenced weakly, so that they and the types that they were generated for can be collected.
"""

from __future__ import annotations

import copyreg
import itertools
import sys
import types
from abc import ABCMeta
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Annotated, Any, ForwardRef, Literal, TypeVar, Union, get_args, get_origin
from uuid import uuid4
from weakref import WeakSet, WeakValueDictionary

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from quire._lowlevel.forks import ForkSafeLock
from quire._protocols import Annotation
from quire.errors import PickleError, SchemaError

_classes: WeakValueDictionary[tuple[int, int], ParametrizedMeta] = WeakValueDictionary()
"""Generated classes, by the ids of origin and parameter: a parameter may have no hash."""
_names: WeakValueDictionary[str, type] = WeakValueDictionary()
_serial = itertools.count(2)
_making = ForkSafeLock()


class ParametrizedMeta(ABCMeta):
    """The metaclass of classes that can be subscripted with one type.

    Such a class has a method `_bind(parameter)`, which checks the type and returns attributes of the generated class,
    and may have `_base_for(parameter)`, which returns a subclass of it as the base of the generated class.
    """

    _parameter: Any
    _origin: ParametrizedMeta | None

    def __new__(mcls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **kwargs: Any) -> ParametrizedMeta:
        namespace.setdefault("_origin", None)
        return super().__new__(mcls, name, bases, namespace, **kwargs)

    if not TYPE_CHECKING:  # for type checkers, DocumentArray is an ordinary generic class

        def __getitem__(cls, parameter: Any) -> Annotation:
            # typing disassembles an alias and assembles it again from a tuple.
            if isinstance(parameter, tuple) and len(parameter) == 1:
                return types.GenericAlias(cls, parameter)
            if isinstance(parameter, str):
                parameter = ForwardRef(parameter)
            if isinstance(parameter, (ForwardRef, TypeVar)):
                return types.GenericAlias(cls, (parameter,))  # resolved later, by code that knows the names
            generated = _classes.get((id(cls), id(parameter)))
            if generated is None:
                with _making:  # concurrent threads get the same class
                    generated = _classes.get((id(cls), id(parameter))) or _generate(cls, parameter)
            return generated

    def __repr__(cls) -> str:
        return f"<class '{cls.__module__}.{cls.__qualname__}'>" if cls._origin is None else cls.__name__


def _generate(origin: ParametrizedMeta, parameter: Any) -> ParametrizedMeta:
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
    base = origin._base_for(parameter) if hasattr(origin, "_base_for") else origin
    generated: ParametrizedMeta = type(origin)(name, (base,), namespace)
    _names[generated.__qualname__] = generated
    _classes[id(origin), id(parameter)] = generated  # it references both, so their ids are not reused while it lives
    return generated


def with_open_aliases(annotation: Any) -> Annotation:
    """Return an annotation in which `Origin[Box[T]]` is an alias again, whose type variables pydantic can substitute.

    pydantic substitutes type variables in aliases and in models, but not in other classes.
    """
    if isinstance(annotation, ParametrizedMeta):
        parameter: Any = getattr(annotation, "_parameter", None)
        if getattr(parameter, "__pydantic_generic_metadata__", {}).get("parameters"):  # type variables
            return types.GenericAlias(annotation._origin or annotation, (parameter,))
    arguments = () if get_origin(annotation) is Literal else get_args(annotation)
    return _with_arguments(annotation, tuple(with_open_aliases(argument) for argument in arguments))


def _with_arguments(annotation: Any, replaced: tuple[Any, ...]) -> Annotation:
    """Return the annotation with other arguments."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if not replaced or all(new is old for new, old in zip(replaced, arguments, strict=True)):
        return annotation
    if origin in (Union, types.UnionType):
        return Union[replaced]  # noqa: UP007 - of members that are known only here
    if origin is Annotated:
        annotated: Any = Annotated
        return annotated[replaced]
    if hasattr(annotation, "copy_with"):
        return annotation.copy_with(replaced)
    return origin[replaced]


# --- parameters with metadata
#
# pydantic hashes a `Field` by identity, so `Box[Annotated[int, Field(gt=0)]]`, written twice or unpickled, would make
# two classes, and a `Field(pattern=...)` cannot be pickled at all. Therefore a `Field` is replaced by the equal one of
# an existing class, and pickles hold its options. Functions, which cloudpickle may copy, are not equal to their copies:
# classes with such parameters are pickled with a token.

_classes_of_items: dict[str, WeakSet[type[BaseModel]]] = {}
"""The classes with an item in their parameters that is hashed by identity, by the repr of the item."""
_tokens: WeakValueDictionary[str, type[BaseModel]] = WeakValueDictionary()


_Constraints: type[Any] = type(FieldInfo(max_digits=1).metadata[0])
"""The class of those constraints of pydantic that have no public class, as in `condecimal`; it cannot be pickled."""


class FieldRecipe:
    """The options of a `Field` or of constraints, which replace it in a pickle."""

    def __init__(self, options: dict[str, Any], *, is_field: bool) -> None:
        self.options = options
        self.is_field = is_field

    def make(self) -> object:
        """Return the `Field` or the constraints with these options."""
        field = FieldInfo(**self.options)
        return field if self.is_field else field.metadata[0]


def register_parameters(cls: type[BaseModel]) -> None:
    """Let later parameters reuse each `Field` in the parameters of a generic class."""
    with _making:
        for item in _metadata(cls.__pydantic_generic_metadata__["args"]):
            if _is_hashed_by_identity(item):
                _classes_of_items.setdefault(repr(item), WeakSet()).add(cls)


def canonical_parameters(parameters: Any) -> Annotation:
    """Return parameters of a generic class in which each `Field` is replaced by an equal one of an existing class."""
    return _map_metadata(parameters, _canonical)


def _is_hashed_by_identity(item: object) -> bool:
    """Return whether equal items have different hashes, as a `Field` or `InstanceOf`."""
    methods: Any = type(item)
    return isinstance(item, (FieldInfo, _Constraints)) or (
        methods.__hash__ is object.__hash__ and methods.__eq__ is not object.__eq__
    )


def _canonical(item: Any) -> object:
    if isinstance(item, FieldRecipe):
        item = item.make()
    if not _is_hashed_by_identity(item):
        return item
    with _making:
        known = [_metadata(cls.__pydantic_generic_metadata__["args"]) for cls in _classes_of_items.get(repr(item), ())]
    equal = _are_equal_fields if isinstance(item, (FieldInfo, _Constraints)) else _is_same
    return next((other for items in known for other in items if equal(item, other)), item)


def _field_options(field: Any) -> dict[str, Any]:
    """Return the options that a `Field` was called with; pydantic has converted some of them to metadata."""
    if isinstance(field, _Constraints):
        return dict(vars(field))
    options = dict(field._attributes_set)
    for item in field.metadata:
        names = [option.name for option in fields(item)] if is_dataclass(item) else list(vars(item))
        options |= {name: getattr(item, name) for name in names}
    return options


def _are_equal_fields(field: Any, other: Any) -> bool:
    if type(field) is not type(other):
        return False
    options, others = _field_options(field), _field_options(other)
    return options.keys() == others.keys() and all(_is_same(options[name], others[name]) for name in options)


def _is_same(value: object, other: object) -> bool:
    """Return whether two items of metadata or options of a `Field` are equal and of one type: 1 and True are not."""
    return value is other or (type(value) is type(other) and repr(value) == repr(other) and bool(value == other))


def picklable_parameters(parameters: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return parameters of a generic class in a form that can be pickled."""

    def replace(item: object) -> object:
        if not isinstance(item, (FieldInfo, _Constraints)):
            return item
        return FieldRecipe(_field_options(item), is_field=isinstance(item, FieldInfo))

    replaced: tuple[Any, ...] = _map_metadata(parameters, replace)
    return replaced


def _map_metadata(annotation: Any, replace: Callable[[Any], Any]) -> Annotation:
    """Replace the metadata in each `Annotated` of an annotation, or of a tuple of annotations."""
    if isinstance(annotation, tuple):
        return tuple(_map_metadata(item, replace) for item in annotation)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return annotation
    if origin is Annotated:
        return _with_arguments(annotation, (_map_metadata(arguments[0], replace), *map(replace, arguments[1:])))
    return _with_arguments(annotation, _map_metadata(arguments, replace))


def _metadata(annotation: Any) -> list[Any]:
    items: list[Any] = []

    def collect(item: object) -> object:
        items.append(item)
        return item

    _map_metadata(annotation, collect)
    return items


def token_of(cls: type[BaseModel]) -> str | None:
    """Return a token for a generic class whose parameters may differ from their copies; None for other classes."""
    if not any(map(_may_differ_from_copy, _metadata(cls.__pydantic_generic_metadata__["args"]))):
        return None
    with _making:
        token: str = vars(cls).get("__quire_token__") or uuid4().hex
        _tokens[token] = cls
        type.__setattr__(cls, "__quire_token__", token)
    return token


def _may_differ_from_copy(item: Any) -> bool:
    if isinstance(item, type):
        return False
    if isinstance(item, (FieldInfo, _Constraints)):
        return any(map(_may_differ_from_copy, _field_options(item).values()))
    if isinstance(item, (list, tuple, set, frozenset)):
        return any(map(_may_differ_from_copy, item))
    if isinstance(item, dict):
        return any(map(_may_differ_from_copy, item.values()))
    if is_dataclass(item):
        return any(_may_differ_from_copy(getattr(item, field.name)) for field in fields(item))
    compare: Any = type(item).__eq__
    return compare is object.__eq__ and item is not None


def subscript_by_token(token: str, origin: Any, parameters: tuple[Any, ...]) -> type[BaseModel]:
    """Return the class of a token, or `origin[parameters]`, which then gets the token, as it may be sent back."""
    cls = _tokens.get(token)
    if cls is None:
        cls = origin[parameters]
        with _making:
            _tokens[token] = cls
            if "__quire_token__" not in vars(cls):
                type.__setattr__(cls, "__quire_token__", token)
    return cls


# --- names and pickles


def publish(qualname: str) -> str:
    """Return an unused name for a generated class, without dots, at which pickle would split it."""
    name = qualname.replace(".", "/")
    return name if name not in _names else f"{name}#{next(_serial)}"


def register(cls: type) -> None:
    """Make a generated class an attribute of this module, so that cloudpickle does not copy it."""
    _names[cls.__qualname__] = cls


def __getattr__(name: str) -> type:
    try:
        return _names[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None


def subscript(origin: Any, parameter: Any) -> type:
    """Return `origin[parameter]`; pickles refer to this function."""
    cls: type = origin[parameter]
    return cls


def _reduce(cls: ParametrizedMeta) -> str | tuple[Callable[..., Any], tuple[Any, ...]]:
    if cls._origin is not None:
        return subscript, (cls._origin, cls._parameter)
    return global_name(cls)


def global_name(cls: type) -> str:
    """Return the name by which pickle can look up a class, or raise an error that says why it cannot."""
    target: Any = sys.modules.get(cls.__module__)
    for part in cls.__qualname__.split("."):
        target = getattr(target, part, None)
    if target is cls:
        return str(cls.__qualname__)
    where = "inside a function" if "<locals>" in cls.__qualname__ else "under a name that now means something else"
    raise PickleError(
        f"{cls.__module__}.{cls.__qualname__} cannot be pickled: it was defined {where}, so another process could not "
        "find it. Define it at the top level of a module, or use cloudpickle, which carries the class itself."
    )


copyreg.pickle(ParametrizedMeta, _reduce)
