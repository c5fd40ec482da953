"""Preprocessing: which functions run on which fields, worked out once."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from quire.errors import PathError, SchemaError
from quire.schema import Field, FieldKind, FieldPath, Schema, join_path, parse_path
from quire.tensors import TensorType

Function = Callable[[Any], Any]
Preprocessing = Mapping[Any, Function | Sequence[Function]]
"""Functions by dotted path, '' for the document itself, or by a document or field type."""
FunctionT = TypeVar("FunctionT", bound=Function)
EACH = ""
"""Behind the path of an array: each of its documents, which no path that users write can name."""


def batched(function: FunctionT) -> FunctionT:
    """Mark a function that takes a whole column: a tensor, a list, or a batch.

    The mark is set on the function itself, so that a decorated one is still found by its name in a worker. What takes
    no mark, such as `torch.sigmoid` or a method, is given back in a `functools.partial` that has it.
    """
    try:
        function.__quire_batched__ = True  # type: ignore[attr-defined]
    except (AttributeError, TypeError):
        function = functools.partial(function)  # type: ignore[assignment]
        function.__quire_batched__ = True  # type: ignore[attr-defined]
    return function


@dataclass(frozen=True)
class Step:
    """Functions that run one after the other on each value, or one that takes the whole column, and where."""

    path: FieldPath
    functions: tuple[Function, ...]

    @functools.cached_property
    def is_batched(self) -> bool:
        """Whether the function takes a whole column."""
        return _is_batched(self.functions[0])

    @functools.cached_property
    def named_path(self) -> str:
        """The path as users write it."""
        return join_path(tuple(part for part in self.path if part != EACH))

    @property
    def name(self) -> str:
        """What a message calls the step."""
        return self.name_of(*self.functions)

    def name_of(self, *functions: Function) -> str:
        """What a message calls some of the functions."""
        path = repr(self.named_path) if self.named_path else "'' (the document)"
        return f"preprocessing of {path} by {', '.join(map(_function_name, functions))}"


def _is_batched(function: Function) -> bool:
    inner = getattr(function, "func", function)  # of a partial
    return bool(getattr(function, "__quire_batched__", False) or getattr(inner, "__quire_batched__", False))


def _function_name(function: Function) -> str:
    inner = getattr(function, "func", function)
    return str(getattr(inner, "__name__", None) or repr(inner))


def plan_steps(schema: Schema, preprocessing: Preprocessing | None) -> tuple[Step, ...]:
    """The steps in order; a path that is not there is an error now."""
    if not isinstance(preprocessing or {}, Mapping):
        raise SchemaError(
            f"preprocessing: give functions by the path or type of what they change, as {{'photo.pixels': normalise}}; "
            f"'' is the document. Got {preprocessing!r}."
        )
    steps: list[Step] = []
    for key, given in (preprocessing or {}).items():
        runs = _runs(_functions(key, given))
        steps += [Step(path, functions) for path in _paths(schema, key) for functions in runs]
    return tuple(steps)


def _runs(functions: list[Function]) -> list[tuple[Function, ...]]:
    """Functions in groups that make one column: a batched one alone, others together."""
    runs: list[tuple[Function, ...]] = []
    for alone, group in itertools.groupby(functions, _is_batched):
        together = tuple(group)
        runs += [(function,) for function in together] if alone else [together]
    return runs


def _functions(key: Any, given: Any) -> list[Function]:
    listed = isinstance(given, (list, tuple)) and not callable(given)
    functions = list(given) if listed else [given]
    for function in functions:
        if not callable(function):
            raise SchemaError(f"preprocessing[{key!r}]: give a function or a list of functions, not {function!r}.")
    return functions


def _paths(schema: Schema, key: Any) -> list[FieldPath]:
    if isinstance(key, str):
        path = parse_path(key)
        schema.resolve(path)
        return [path]
    if not isinstance(key, type):
        raise SchemaError(f"preprocessing: a key is a path or a type, got {key!r}.")
    whole: list[FieldPath] = [()]
    found = whole if issubclass(schema.document_type, key) else list(_fields_of_type(schema, key, ()))
    if not found:
        raise PathError(f"preprocessing: {schema.name} has no field of the type {key.__name__}.")
    return found


def _fields_of_type(schema: Schema, tp: type, before: FieldPath) -> Iterator[FieldPath]:
    for field in schema.fields:
        path = (*before, field.name)
        if field.name == "id":  # a document stays known by it; who wants to change ids names their path
            continue
        if _is_of_type(field, tp):
            yield path
        elif field.kind is FieldKind.DOCUMENTS and not field.recursive and issubclass(field.document_type, tp):
            yield (*path, EACH)
        elif field.kind in (FieldKind.DOCUMENT, FieldKind.DOCUMENTS) and not field.recursive:
            yield from _fields_of_type(field.document_type.document_schema(), tp, path)


def _is_of_type(field: Field, tp: type) -> bool:
    if isinstance(field.type, TensorType) and isinstance(tp, TensorType):
        return field.type is tp or (tp is tp._plain and field.type._plain is tp)
    if field.kind is FieldKind.SCALAR:
        return field.type is tp  # a bool is no int here
    return isinstance(field.type, type) and issubclass(field.type, tp)
