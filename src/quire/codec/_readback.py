"""Check that JSON, CSV and dicts will be read back as the values that were written.

These forms carry less information than Python: a tuple in a field of `Any` becomes a list, a secret is hidden, and a
document in a union is a mapping that another class of the union may accept. Fields whose form is unambiguous are not
checked. The others are read back and compared when they are written, unless their values show that nothing is lost.
So are extra fields, which have no type: those of a class with `extra='allow'`, and those kept by `unknown='keep'`;
and moments whose offset from UTC has seconds, as in cities before time zones existed: in JSON, offsets have minutes.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, Literal, get_args

from pydantic import BaseModel, PlainSerializer, SecretBytes, SecretStr, SerializeAsAny, WrapSerializer

from quire._equality import is_unchanged
from quire._protocols import DocumentLike, is_array_type, is_document_type
from quire.codec._kinds import KINDS
from quire.errors import DecodeError, EncodeError
from quire.schema import Field, FieldKind, Schema, has_ambiguous_keys, takes_names
from quire.tensors import describe

TextForm = Literal["JSON", "CSV", "a dict"]
_PLAIN_TYPES = (str, int, bool, type(None))


def uncertain_fields(schema: Schema) -> tuple[Field, ...]:
    """Return the fields whose values may be read back as others, except those that a class serializes itself."""
    fields: tuple[Field, ...] | None = schema.notes.get("uncertain")
    if fields is None:
        schema.notes["uncertain"] = ()  # a recursive document is as certain as its other fields
        custom, every = _custom_fields(schema.document_type), _is_read_by_alias(schema.document_type)
        duck_typed = _duck_typed_fields(schema)
        fields = tuple(
            field
            for field in schema.fields
            if field.name not in custom and (every or field.name in duck_typed or not _is_certain(field, set()))
        )
        schema.notes["uncertain"] = fields
    return fields


def _is_read_by_alias(document_type: type[Any]) -> bool:
    """Return whether a class takes its fields by aliases only, and not by the names that are written."""
    return not takes_names(document_type) and has_ambiguous_keys(document_type)


def _custom_fields(document_type: type[Any]) -> set[str]:
    """Return the names of the fields that a class serializes itself; their form is not checked."""
    decorators = document_type.__pydantic_decorators__
    if decorators.model_serializers:
        return set(document_type.model_fields)
    names = {name for serializer in decorators.field_serializers.values() for name in serializer.info.fields}
    if "*" in names:
        return set(document_type.model_fields)
    serializers = (PlainSerializer, WrapSerializer)
    return names | {
        name
        for name, info in document_type.model_fields.items()
        if info.exclude or any(isinstance(item, serializers) for item in info.metadata)
    }


def _duck_typed_fields(schema: Schema) -> set[str]:
    """Return the names of the fields that are written with what a subclass adds, which their own class refuses."""
    names: set[str] | None = schema.notes.get("duck typed")
    if names is None:
        fields = schema.document_type.model_fields.items()
        names = {name for name, info in fields if any(map(_is_duck_typed, (*info.metadata, info.annotation)))}
        schema.notes["duck typed"] = names
    return names


def _is_duck_typed(annotation: object) -> bool:
    marker: Any = SerializeAsAny
    return isinstance(annotation, marker) or any(map(_is_duck_typed, get_args(annotation)))


def _is_certain(field: Field, seen: set[Any]) -> bool:
    """Return whether the type of a field alone shows that every value is read back unchanged.

    `seen` are the document classes that contain the field, so that recursive documents end.
    """
    if field.decodes_input:
        return False
    if field.kind not in (FieldKind.DOCUMENT, FieldKind.DOCUMENTS):
        return KINDS[field.kind].is_certain(field) and all(_is_certain(item, seen) for item in field.items)
    document_type = field.document_type
    if document_type in seen:
        return True
    schema = document_type.document_schema()
    if _is_read_by_alias(document_type) or _duck_typed_fields(schema):
        return False
    custom = _custom_fields(document_type)
    return all(part.name in custom or _is_certain(part, seen | {document_type}) for part in schema.fields)


def _visited_fields(schema: Schema) -> tuple[tuple[Field, ...], tuple[Field, ...]]:
    """Return the fields that may hold documents or moments; and those of them that are certain.

    Without the fields that a class serializes itself.
    """
    entry: tuple[tuple[Field, ...], tuple[Field, ...]] | None = schema.notes.get("visited fields")
    if entry is None:
        custom, uncertain = _custom_fields(schema.document_type), uncertain_fields(schema)
        fields = tuple(field for field in schema.fields if field.name not in custom and _is_visited(field))
        entry = fields, tuple(field for field in fields if field not in uncertain)
        schema.notes["visited fields"] = entry
    return entry


def _is_always_kept(schema: Schema) -> bool:
    """Return whether no field of a class needs a look at its value: the usual case, decided once per class."""
    kept: bool | None = schema.notes.get("always kept")
    if kept is None:
        kept = schema.notes["always kept"] = not uncertain_fields(schema) and not _visited_fields(schema)[0]
    return kept


def _is_visited(field: Field) -> bool:
    return field.kind in (FieldKind.DOCUMENT, FieldKind.DOCUMENTS, FieldKind.DATETIME) or any(
        map(_is_visited, field.items)
    )


def _may_change(document: DocumentLike, form: TextForm) -> list[Field]:
    """Return the fields of a document whose values may be read back as others."""
    schema, content, changing = type(document).document_schema(), document.__dict__, []
    fields = uncertain_fields(schema)
    if fields:
        if _is_read_by_alias(type(document)):
            return list(fields)
        duck_typed = _duck_typed_fields(schema)
        changing = [
            field
            for field in fields
            if field.name in content and (field.name in duck_typed or not _is_kept(field, content[field.name], form))
        ]
    for field in _visited_fields(schema)[1]:
        if _holds_changing_parts(content.get(field.name), form):
            changing.append(field)
    return changing


def _extras_may_change(document: Any, form: TextForm) -> bool:
    """Return whether the extra fields of a document may be read back as others, or not at all."""
    extras = document.__pydantic_extra__
    document_type = type(document)
    if not extras or document_type.__pydantic_decorators__.model_serializers:
        return False
    classes = document_type.__mro__[: document_type.__mro__.index(BaseModel)]
    is_typed = any("__pydantic_extra__" in vars(cls).get("__annotations__", ()) for cls in classes)
    if is_typed or document_type.model_config.get("extra") != "allow":  # typed: validated by their annotation
        return True
    accepted = document_type.document_schema().accepted
    if any(name in accepted for name in extras):
        return True
    # A dict holds Python objects, so only models change; JSON and CSV keep nothing but JSON's own types.
    return any(map(_holds_models, extras.values())) if form == "a dict" else not _is_plain(extras)


def _holds_changing_parts(value: Any, form: TextForm) -> bool:
    """Return whether a value of a certain field contains a moment or extra fields that may be read back as others."""
    pending = [value]
    while pending:
        value = pending.pop()
        if isinstance(value, datetime):
            if form != "a dict" and _has_seconds_in_offset(value):
                return True
        elif is_document_type(type(value)):
            if value.__pydantic_extra__ and _extras_may_change(value, form):
                return True
            content = value.__dict__
            pending += [content.get(field.name) for field in _visited_fields(type(value).document_schema())[0]]
        elif is_array_type(type(value)):
            pending += value._documents
        elif isinstance(value, Mapping):
            pending += value.values()
        elif isinstance(value, (list, tuple, set, frozenset)):
            pending += value
    return False


def _is_kept(field: Field, value: Any, form: TextForm) -> bool:
    """Return whether a value of an uncertain field shows that nothing is lost."""
    if value is None and field.nullable:
        return True
    if field.decodes_input:
        return False
    if field.kind is FieldKind.ANY and field.type in (Any, object):
        return not _holds_models(value) if form == "a dict" else _is_plain(value)
    if field.kind is FieldKind.UNION:
        scalars = all(item.type in (bool, int, float, str) for item in field.items)
        return scalars and not field.constrained and type(value) in (bool, int, str, float) and _is_plain(value)
    if field.kind is FieldKind.LIST and field.type is list and len(field.items) == 1:
        return all(_is_kept(field.items[0], item, form) for item in value)
    if field.kind is FieldKind.DICT and field.type is dict and len(field.items) == 2 and field.items[0].type is str:
        return all(_is_kept(field.items[1], item, form) for item in value.values())
    return _is_certain(field, set())


def _has_seconds_in_offset(value: object) -> bool:
    offset = value.utcoffset() if isinstance(value, datetime) and value.tzinfo is not None else None
    return offset is not None and bool(offset.seconds % 60 or offset.microseconds)


def _is_plain(value: object) -> bool:
    """Return whether JSON has this kind of value itself."""
    if type(value) in _PLAIN_TYPES:
        return True
    if type(value) is float:
        return math.isfinite(value)
    if type(value) is list:
        return all(map(_is_plain, value))
    return type(value) is dict and all(type(key) is str and _is_plain(item) for key, item in value.items())


def _holds_models(value: object) -> bool:
    """Return whether a value is or contains an object that becomes a dict or a list when it is dumped."""
    if isinstance(value, Mapping):
        return any(map(_holds_models, value.values()))
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return type(value) not in (list, tuple, set, frozenset) or any(map(_holds_models, value))
    return isinstance(value, BaseModel) or is_array_type(type(value)) or dataclasses.is_dataclass(value)


def check_read_back(
    document: Any, read: Callable[[], Any], form: TextForm, where: str, more: Iterable[Field] = ()
) -> None:
    """Raise an error if a field of a document would be read back as another value than the document has.

    What was written is read back only if the values of the document may change, or if there are `more` fields to check.
    """
    if not more and not document.__pydantic_extra__ and _is_always_kept(type(document).document_schema()):
        return
    changing = [*_may_change(document, form), *more]
    if not changing and not (document.__pydantic_extra__ and _extras_may_change(document, form)):
        return
    owner = f"{type(document).__name__}{where}"
    try:
        again = read()
    except DecodeError as error:
        raise EncodeError(f"{owner}: what would be written as {form} could not be read back: {error}") from error
    for field in changing:
        value, other = document.__dict__[field.name], again.__dict__.get(field.name)
        if not is_unchanged(value, other):
            extra = _changed_extra(value, other, form)
            if extra is None:
                place, value, other = _find_change(value, other)
                extra = place, _difference(value, other, form)
            raise EncodeError(f"{owner}, {field.name}{extra[0]}: {extra[1]}")
    extras, others = document.__pydantic_extra__ or {}, again.__pydantic_extra__ or {}
    if not is_unchanged(extras, others):
        extra = _changed_extra(document, again, form)
        if extra is not None:
            raise EncodeError(f"{owner}, {extra[0][1:]}: {extra[1]}")
        raise EncodeError(f"{owner}: its extra fields in {_difference(extras, others, form)}")  # a field is read as one


def _find_change(value: Any, other: Any) -> tuple[str, Any, Any]:
    """Return the path of the first value inside of documents and lists that is read back as another, and both."""
    path = ""
    while type(value) is type(other):
        pairs: Iterable[tuple[Any, Any, Any]] = ()
        if is_document_type(type(value)):
            names = type(value).model_fields
            pairs = [(name, value.__dict__.get(name), other.__dict__.get(name)) for name in names]
        elif is_array_type(type(value)) and len(value) == len(other):
            pairs = zip(range(len(value)), value._documents, other._documents, strict=True)
        elif type(value) is list and len(value) == len(other):
            pairs = zip(range(len(value)), value, other, strict=True)
        changed = next((pair for pair in pairs if not is_unchanged(pair[1], pair[2])), None)
        if changed is None:
            break
        path, (_, value, other) = f"{path}.{changed[0]}", changed
    return path, value, other


_ABSENT: Any = object()


def _changed_extra(value: Any, other: Any, form: TextForm) -> tuple[str, str] | None:
    """Find the first extra field inside of a value that is read back as another; return its path and the difference."""
    if type(value) is not type(other):
        return None
    pairs: Iterable[tuple[Any, Any, Any]] = ()
    if is_document_type(type(value)):
        extras, others = value.__pydantic_extra__ or {}, other.__pydantic_extra__ or {}
        for name, item in extras.items():
            if not is_unchanged(item, others.get(name, _ABSENT)):
                return f".{name}", _extra_difference(type(value), item, others.get(name, _ABSENT), form)
        pairs = [(name, value.__dict__.get(name), other.__dict__.get(name)) for name in type(value).model_fields]
    elif is_array_type(type(value)):
        return _changed_extra(value._documents, other._documents, form)
    elif isinstance(value, Mapping):
        pairs = [(key, item, other.get(key)) for key, item in value.items()]
    elif isinstance(value, (list, tuple)):
        pairs = zip(range(len(value)), value, other, strict=False)
    for key, item, again in pairs:
        extra = _changed_extra(item, again, form)
        if extra is not None:
            return f".{key}{extra[0]}", extra[1]
    return None


def _extra_difference(document_type: type[Any], value: object, other: object, form: TextForm) -> str:
    if other is _ABSENT:
        return (
            f"{form} would leave out {describe(value)[:80]}, because {document_type.__name__} has no such field. "
            "Add a field for it, or write with to_bytes()."
        )
    return (
        f"{form} would be read back as {describe(other)[:80]}, and not as {describe(value)[:80]}. "
        f"Add a field of this type to {document_type.__name__}, or write with to_bytes()."
    )


def _difference(value: object, other: object, form: TextForm) -> str:
    if isinstance(value, (SecretStr, SecretBytes)):
        return (
            f"{form} would hide the secret, and could not be read back. Write it with to_bytes(allow_pickle=True), or "
            "give the class a field_serializer that reveals it. model_dump_json() writes it hidden."
        )
    if _has_seconds_in_offset(value):
        return (
            f"{form} has offsets of whole minutes, and {value} would be read back as {other}. Convert it with "
            "astimezone(timezone.utc), or write with to_bytes()."
        )
    shown, again = (describe(value), describe(other)) if type(value) is not type(other) else (repr(value), repr(other))
    change = f"{form} would be read back as {again[:80]}, and not as {shown[:80]}"
    if is_document_type(type(value)):
        return f"{change}. Distinguish the classes by a field with a Literal, or write with to_bytes()."
    return f"{change}. Annotate the field with the type that it holds, or write with to_bytes()."
