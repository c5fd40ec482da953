"""Unknown fields: input that a document class has no field for.

A class refuses unknown fields (`extra='forbid'`, which `BaseDocument` sets), and the error names the nearest fields.
Readers of other people's data may ask for unknown fields to be ignored instead. pydantic compiles that choice into a
class's validator, so such readers use a second validator, in which every class that did not choose `extra` itself
ignores what it does not know.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, cast, get_args

from pydantic import ValidationError
from pydantic_core import CoreSchema, PydanticCustomError, SchemaValidator, core_schema

from quire._lowlevel.forks import ForkSafeLock
from quire.errors import OptionError, did_you_mean
from quire.schema import Field, FieldKind, first_keys, takes_names

Extra = Literal["forbid", "ignore"]
"""How a reader treats fields and columns that a class does not have; a class that sets `extra` wins."""

_FORBIDDEN = "Extra inputs are not permitted"
"""The message of pydantic about an unknown field."""
_MOST_EXPLAINED = 1000
_ERROR_TYPES = frozenset(get_args(core_schema.ErrorType))
_NOT_SCHEMAS = ("metadata", "serialization", "default", "expected", "config", "cls")
"""The keys of a core schema whose values are not core schemas."""
_hiding = ForkSafeLock()
"""Held while the classes of a validator are marked as incomplete; see `_compile`."""


def check_extra(extra: str) -> None:
    """Raise an error for an unknown value of the option `extra`."""
    if extra not in get_args(Extra):
        raise OptionError(f"extra={extra!r} is not a rule for unknown fields: use 'forbid' or 'ignore'.")


def extra_rule(document_type: type[Any], extra: Extra) -> Literal["forbid", "ignore", "allow"]:
    """Return the rule for unknown fields: that of the class if it sets one, else that of the reader."""
    return document_type.__quire_extra__ or extra


# --- errors


def explain_unknown_fields(document_type: type[Any], error: ValidationError) -> ValidationError:
    """Return the error with messages about unknown fields that name the class and its nearest fields.

    An error with very many problems is returned as it is: pydantic reports one for each item of a large wrong input,
    and the dicts that describe them take twice the memory of the error.
    """
    if error.error_count() > _MOST_EXPLAINED:
        return error
    problems = error.errors(include_url=False)
    if not any(problem["msg"] == _FORBIDDEN for problem in problems):
        return error
    hide_input = bool(document_type.model_config.get("hide_input_in_errors"))
    # An error of pydantic cannot be changed: a new one is made of the same problems. Those of a type that pydantic does
    # not know itself, which custom validators raise, need their message as well.
    details: list[Any] = []
    for problem in problems:
        kind: Any = problem["type"]
        if problem["msg"] == _FORBIDDEN:
            message: Any = unknown_field(document_type, problem["loc"])
            kind = PydanticCustomError("extra_forbidden", message) if message else kind
        elif kind not in _ERROR_TYPES:
            kind = PydanticCustomError(kind, cast("Any", problem["msg"]), problem.get("ctx"))
        details.append({"type": kind, "loc": problem["loc"], "input": problem["input"], "ctx": problem.get("ctx", {})})
    return ValidationError.from_exception_data(error.title, details, hide_input=hide_input)


def unknown_field(document_type: type[Any], location: tuple[int | str, ...]) -> str | None:
    """Describe an unknown field at a location in the input; None if no single class is at fault there."""
    *path, name = location
    nodes: list[Any] = [document_type]
    for part in path:
        nodes = [inner for node in nodes for inner in _inside(node, part)]
    owners: list[Any] = [node if isinstance(node, type) else node.type for node in nodes if _is_document(node)]
    if len(set(owners)) != 1:
        return None
    return f"{owners[0].__name__} has no field {name!r}. {did_you_mean(str(name), _input_names(owners[0]))}"


def _input_names(document_type: type[Any]) -> list[str]:
    """List the names by which a class accepts the values of its fields: their own, their aliases, or both."""
    names: list[str] = []
    for name, info in document_type.model_fields.items():
        aliases = sorted(first_keys(info) - {name})
        names += [name, *aliases] if takes_names(document_type) or not aliases else aliases
    return names


def _is_document(node: Any) -> bool:
    return isinstance(node, type) or (isinstance(node, Field) and node.kind is FieldKind.DOCUMENT)


def _inside(node: Any, part: int | str) -> Iterator[Any]:
    """Yield the classes and fields that one part of an error's location may refer to, inside a class or a field.

    pydantic's locations have a part for each field, index and key, and one for the member of a union.
    """
    if _is_document(node):
        document_type: Any = node if isinstance(node, type) else node.type
        accepted = document_type.document_schema().accepted
        if part in accepted:
            yield accepted[part][0]
        elif part == document_type.__name__:
            yield document_type
    elif node.kind is FieldKind.DOCUMENTS:
        yield node.document_type
    elif node.kind is FieldKind.UNION:
        members = [item for item in node.items if _is_document(item) and item.type.__name__ == part]
        yield from members or [item for item in node.items if not _is_document(item)]
    elif node.items:
        yield node.items[min(part, len(node.items) - 1) if isinstance(part, int) else -1]


# --- a validator that ignores unknown fields


def document_validator(document_type: type[Any], extra: Extra) -> SchemaValidator:
    """Return the validator of a document, with a rule for unknown fields in it and in nested documents."""
    check_extra(extra)
    if extra == "forbid":
        return cast("SchemaValidator", document_type.__pydantic_validator__)
    notes = document_type.document_schema().notes
    if "tolerant validator" not in notes:
        notes["tolerant validator"] = build_tolerant_validator(document_type.__pydantic_core_schema__)
    return cast("SchemaValidator", notes["tolerant validator"])


def rows_validator(document_type: type[Any], extra: Extra) -> SchemaValidator:
    """Return the validator of a list of documents, with a rule for unknown fields."""
    check_extra(extra)
    notes = document_type.document_schema().notes
    key = "validator of rows", extra
    if key not in notes:
        schema = _as_list(document_type.__pydantic_core_schema__)
        notes[key] = SchemaValidator(schema) if extra == "forbid" else build_tolerant_validator(schema)
    return cast("SchemaValidator", notes[key])


def build_tolerant_validator(schema: CoreSchema) -> SchemaValidator:
    """Build a validator in which the classes that do not set `extra` ignore unknown fields."""
    return _compile(_relax(schema))


def _as_list(schema: Any) -> CoreSchema:
    if schema["type"] == "definitions":
        return core_schema.definitions_schema(core_schema.list_schema(schema["schema"]), schema["definitions"])
    return core_schema.list_schema(schema)


def _relax(schema: Any) -> Any:
    """Copy a core schema so that the classes that do not set `extra` ignore unknown fields."""
    if isinstance(schema, (list, tuple)):
        return type(schema)(_relax(item) for item in schema)
    if not isinstance(schema, dict):
        return schema
    relaxed: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _NOT_SCHEMAS:
            relaxed[key] = value
        elif key in ("fields", "choices") and isinstance(value, dict):
            # By name, and a name may be one of _NOT_SCHEMAS: a field may be called 'default'.
            relaxed[key] = {name: _relax(item) for name, item in value.items()}
        else:
            relaxed[key] = _relax(value)
    if schema.get("type") == "model" and getattr(schema["cls"], "__quire_extra__", "") is None:
        relaxed["config"] = {**schema.get("config", {}), "extra_fields_behavior": "ignore"}
    return relaxed


def _compile(schema: CoreSchema) -> SchemaValidator:
    """Build a validator from the schema alone.

    Since 2.11, pydantic uses the validator that a nested class has already; since 2.12 an option turns that off. In
    between, it must not find the nested classes complete.
    """
    try:
        return SchemaValidator(schema, _use_prebuilt=False)  # type: ignore[call-arg,unused-ignore]
    except TypeError:
        pass
    classes = [tp for tp in _model_classes(schema) if tp.__dict__.get("__pydantic_complete__")]
    with _hiding:
        try:
            for tp in classes:
                tp.__pydantic_complete__ = False
            return SchemaValidator(schema)
        finally:
            for tp in classes:
                tp.__pydantic_complete__ = True


def _model_classes(schema: Any) -> set[type[Any]]:
    if isinstance(schema, (list, tuple)):
        return {tp for item in schema for tp in _model_classes(item)}
    if not isinstance(schema, dict):
        return set()
    inside = {tp for key, value in schema.items() if key not in _NOT_SCHEMAS for tp in _model_classes(value)}
    return inside | {schema["cls"]} if schema.get("type") == "model" else inside
