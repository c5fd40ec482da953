"""The schema of a document class: its fields and their kinds, compiled once from the annotations.

Columns, bytes, files and display are loops over a `Schema`; nothing else interprets annotations. A schema is built on
first use, so that forward references and recursive documents can be resolved.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from dataclasses import field as dataclass_field
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from functools import cached_property
from pathlib import PurePath
from typing import Annotated, Any, ForwardRef, Literal, NewType, TypeVar, Union, get_args, get_origin
from uuid import UUID

import pydantic
from pydantic import AliasChoices, AliasPath, EncodedBytes, EncodedStr, Json, PydanticUndefinedAnnotation
from pydantic.fields import FieldInfo
from pydantic_core import SchemaValidator, core_schema

from quire._protocols import Annotation, is_array_type, is_document_type
from quire.errors import DecodeError, PathError, SchemaError, did_you_mean
from quire.tensors import TensorSpec, TensorType, expand_alias, tensor_type_of

__all__ = ["Field", "FieldKind", "Schema"]

FieldPath = tuple[str, ...]
"""The names of fields from a document to a nested value; the empty path is the document itself."""


def parse_path(path: str) -> FieldPath:
    """Return the names of a dotted path: 'thesis.title' -> ('thesis', 'title'), '' -> ()."""
    if not path:
        return ()
    parts = tuple(path.split("."))
    if not all(parts):
        raise PathError(f"{path!r} is not a path: a name is empty. Paths look like 'thesis.title'.")
    return parts


def join_path(parts: FieldPath) -> str:
    """Return the dotted path of some names: ('thesis', 'title') -> 'thesis.title'."""
    return ".".join(parts)


class FieldKind(str, Enum):
    """The kind of values of a field; each package has tables that say what a kind means to it."""

    TENSOR = "tensor"
    SCALAR = "scalar"
    TEXT = "text"
    BYTES = "bytes"
    ENUM = "enum"
    DATETIME = "datetime"
    DATE = "date"
    TIME = "time"
    TIMEDELTA = "timedelta"
    UUID = "uuid"
    DECIMAL = "decimal"
    PATH = "path"
    DOCUMENT = "document"
    DOCUMENTS = "documents"
    LIST = "list"
    DICT = "dict"
    UNION = "union"
    ANY = "any"


_SIMPLE_KINDS: tuple[tuple[type, FieldKind], ...] = (  # the first that matches: a datetime is a date too
    (Enum, FieldKind.ENUM),
    (bool, FieldKind.SCALAR),
    (int, FieldKind.SCALAR),
    (float, FieldKind.SCALAR),
    (complex, FieldKind.SCALAR),
    (str, FieldKind.TEXT),
    (bytes, FieldKind.BYTES),
    (datetime, FieldKind.DATETIME),
    (date, FieldKind.DATE),
    (time, FieldKind.TIME),
    (timedelta, FieldKind.TIMEDELTA),
    (UUID, FieldKind.UUID),
    (Decimal, FieldKind.DECIMAL),
    (PurePath, FieldKind.PATH),
    (Mapping, FieldKind.DICT),
    (AbstractSet, FieldKind.LIST),
    (Sequence, FieldKind.LIST),
)


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a document class.

    `type` is the class of the values: a nested document, an array, a tensor type, a scalar. `items` are the items of a
    list, the key and value of a dict, or the members of a union.
    """

    name: str
    kind: FieldKind
    type: Any
    nullable: bool = False
    required: bool = True
    recursive: bool = False
    """Whether the field has no columns of its own: its documents refer back to the class, or are of any class."""
    items: tuple[Field, ...] = ()
    constrained: bool = False
    """Whether values must satisfy more than their kind: a pattern, a bound, one of a few values."""
    decodes_input: bool = False
    """Whether the input of the field differs from its value: JSON text (`Json`), or base64 (`Base64Bytes`)."""
    choices: tuple[Any, ...] = dataclass_field(default=(), compare=False)
    """The values that a Literal allows."""

    @property
    def spec(self) -> TensorSpec:
        """The shape and dtype that a field requires of its tensors."""
        return self.type.spec if isinstance(self.type, TensorType) else TensorSpec()

    @property
    def may_contain_tensors(self) -> bool:
        """Whether values may have tensors in them, other than those of nested documents: a list of tensors, or Any."""
        if self.kind in (FieldKind.LIST, FieldKind.DICT, FieldKind.UNION) and self.items:
            return any(item.may_contain_tensors for item in self.items)
        return self.kind in (FieldKind.TENSOR, FieldKind.LIST, FieldKind.DICT, FieldKind.UNION, FieldKind.ANY)

    @property
    def wrapper(self) -> Any:
        """The class that each text or blob is converted to, like `ImageUrl`; None if it is not converted."""
        return self.type if getattr(self.type, "__quire_plain__", False) else None

    @property
    def document_type(self) -> Any:
        """The document class of a field of documents."""
        return self.type.document_type if self.kind is FieldKind.DOCUMENTS else self.type

    def __str__(self) -> str:
        """Return the field as its annotation is written."""
        if self.kind is FieldKind.UNION:
            text = " | ".join(str(replace(item, nullable=False)) for item in self.items)
        elif self.items and self.kind is not FieldKind.ANY:
            text = f"{self.type.__name__}[{', '.join(str(item) for item in self.items)}]"
        else:
            text = getattr(self.type, "__name__", str(self.type))
        return f"{text} | None" if self.nullable and text != "NoneType" else text


@dataclass(frozen=True)
class Schema:
    """The fields of a document class, in order."""

    document_type: type[Any]
    fields: tuple[Field, ...]
    keeps_more: bool = dataclass_field(default=False, compare=False)
    """Whether documents may hold more than their fields: extra values or private attributes."""
    by_name: dict[str, Field] = dataclass_field(init=False, repr=False, compare=False)
    """The fields by name."""
    notes: dict[Any, Any] = dataclass_field(default_factory=dict, init=False, repr=False, compare=False)
    """A cache for other modules of what they have derived from the schema."""

    def __post_init__(self) -> None:
        # Set here, not by a cached_property: batches read it, and torch.compile cannot trace the lock of one.
        object.__setattr__(self, "by_name", {field.name: field for field in self.fields})

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return Schema, (self.document_type, self.fields, self.keeps_more)  # without cached properties

    @property
    def name(self) -> str:
        """The name of the document class."""
        return self.document_type.__name__

    @property
    def is_open(self) -> bool:
        """Whether the class does not determine the fields of its documents, because it stands for any class."""
        return _is_open(self.document_type)

    @cached_property
    def accepted(self) -> dict[str, tuple[Field, str]]:
        """The fields by every name that stored data may use, each with the key that decoders pass to pydantic.

        The name of a field takes precedence over an equal alias of another field.
        """
        keyed = has_ambiguous_keys(self.document_type)
        accepted: dict[str, tuple[Field, str]] = {}
        for field in self.fields:
            entry = field, stored_key(field.name) if keyed else field.name
            for alias in field_aliases(self.document_type.model_fields[field.name]):
                if alias not in self.by_name:
                    accepted.setdefault(alias, entry)
            accepted[field.name] = entry
        return accepted

    def check_related(self, names: Iterable[str], stored_class: str = "") -> None:
        """Raise an error for data of another class that has none of the fields of this one, apart from the id.

        By the rules of schema evolution such data could be read: as documents of defaults, which look like values. So
        it is for two versions of one class, which have one name: `stored_class` is the name in the data, if any.
        """
        others = [name for name in names if name != "id"]
        if not others or any(name in self.accepted for name in others) or self.by_name.keys() <= {"id"}:
            return
        own_name = self.document_type.__qualname__.rpartition(".")[2]
        if stored_class.rpartition(":")[2].rpartition(".")[2] == own_name:
            return
        if any(field.required for field in self.fields):
            return  # an error of its own, which names the field
        if self.document_type.__quire_collects__ or self.document_type.model_config.get("extra") == "allow":
            return  # the class keeps fields that it does not declare
        raise DecodeError(
            f"{self.name} has none of the fields of the data, which are {', '.join(sorted(others)[:8])[:200]}: it was "
            "written from another class. Read it with that class, or add the old names of fields as aliases."
        )

    @cached_property
    def checks_rows(self) -> bool:
        """Whether fields must be validated together: the class has validators of its own, or shared dimensions."""
        decorators = self.document_type.__pydantic_decorators__
        names = [name for field in self.fields if field.kind is FieldKind.TENSOR for name in set(field.spec.names)]
        return bool(
            decorators.validators
            or decorators.field_validators
            or decorators.root_validators
            or decorators.model_validators
            or len(set(names)) < len(names)
        )

    def resolve(self, path: FieldPath) -> tuple[Field, ...]:
        """Return the fields along a path; raise an error that suggests the nearest names if there is none."""
        schema: Schema | None = self
        fields: list[Field] = []
        for depth, name in enumerate(path):
            if schema is None:
                here = join_path(path[:depth])
                raise PathError(
                    f"{self.name}.{here} is {fields[-1]}, which has no fields; {join_path(path)!r} goes on."
                )
            if name not in schema.by_name:
                hint = did_you_mean(name, schema.by_name)
                raise PathError(f"{schema.name} has no field {name!r} (in the path {join_path(path)!r}). {hint}")
            fields.append(schema.by_name[name])
            nested = fields[-1].kind in (FieldKind.DOCUMENT, FieldKind.DOCUMENTS)
            schema = fields[-1].document_type.document_schema() if nested else None
        return tuple(fields)

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{f.name}: {f}' for f in self.fields)})"


def build_schema(document_type: type[Any]) -> Schema:
    """Compile the schema of a document class."""
    _complete(document_type)
    fields = tuple(
        _compile(name, info.annotation, info.metadata, required=info.is_required(), owner=document_type)
        for name, info in document_type.model_fields.items()
    )
    more = document_type.model_config.get("extra") == "allow" or bool(document_type.__private_attributes__)
    return Schema(document_type, fields, keeps_more=more)


def find_main_text(document_type: type[Any]) -> str | None:
    """Return the main field of a document class that holds text, by which its documents compare with texts."""
    main: tuple[str, ...] = document_type.__quire_main__
    if not main:
        return None
    fields = document_type.document_schema().by_name
    return next((name for name in main if fields[name].kind is FieldKind.TEXT), None)


def field_aliases(info: FieldInfo) -> list[str]:
    """Return the aliases by which pydantic accepts a value for a field."""
    return [alias for alias in _alias_choices(info) if isinstance(alias, str)]


def _alias_choices(info: FieldInfo) -> list[str | AliasPath]:
    alias = info.validation_alias or info.alias
    if alias is None:
        return []
    return list(alias.choices) if isinstance(alias, AliasChoices) else [alias]


def takes_names(document_type: type[Any]) -> bool:
    """Return whether pydantic accepts the values of aliased fields by the names of the fields, too."""
    config = document_type.model_config
    return bool(config.get("populate_by_name") or config.get("validate_by_name"))


def first_keys(info: FieldInfo, except_for: str | None = None) -> set[str]:
    """Return the keys of a mapping in which pydantic looks for a field by its aliases, except for one alias."""
    choices = [alias for alias in _alias_choices(info) if alias != except_for]
    return {str(alias.path[0]) if isinstance(alias, AliasPath) else alias for alias in choices}


def has_ambiguous_keys(document_type: type[Any]) -> bool:
    """Return whether a name does not identify one field to pydantic.

    This is the case if an alias of one field is the name or an alias of another, or the name of a computed field, and
    if a class accepts its fields by alias only. Decoders then use a separate key for each field, see `stored_key`.
    """
    fields = document_type.model_fields
    if document_type.model_config.get("validate_by_alias") is False:
        return False
    aliases = {name: first_keys(info, except_for=name) for name, info in fields.items()}
    if not takes_names(document_type):
        return any(aliases.values())
    keys = [key for field_keys in aliases.values() for key in field_keys]
    return len(set(keys)) < len(keys) or not written_names(document_type).isdisjoint(keys)


def written_names(document_type: type[Any]) -> set[str]:
    """Return the keys in JSON and dicts of a class: the names of fields and of computed fields."""
    return {*document_type.model_fields, *document_type.__pydantic_decorators__.computed_fields}


def stored_key(name: str) -> str:
    """Return the key under which decoders pass the value of a field to pydantic; no name or alias is equal to it."""
    return f"{name}\0"


class StoredContext(dict[str, Any]):
    """The validation context of decoders: values are those that documents had, and not input for fields.

    A field of `Json[...]`, for example, accepts the parsed value instead of its text. For validators that look at their
    context, it is an empty dict.
    """


STORED = StoredContext()
_HAS_BY_NAME = tuple(map(int, pydantic.VERSION.split(".")[:2])) >= (2, 11)
NAMES_AND_ALIASES: dict[str, Any] = {"by_alias": True, "by_name": True} if _HAS_BY_NAME else {}
"""Options of validators that accept fields by both; before pydantic 2.11, the config of the class decides."""
ROUND_TRIP = "quire_round_trip"
"""A key of the serialization context: the output will be read again, so `Json` becomes text."""


def _complete(document_type: type[Any]) -> None:
    """Resolve the forward references of a document class."""
    if document_type.__pydantic_complete__:
        return
    try:
        document_type.model_rebuild()
    except PydanticUndefinedAnnotation as error:
        raise SchemaError(
            f"{document_type.__name__} names a type that is not defined yet: {error.name!r}. "
            "Define it, or call model_rebuild() where it is known."
        ) from error


def field_tensor_type(info: FieldInfo) -> TensorType | None:
    """Return the tensor type of a pydantic field, also if it is optional."""
    annotation, metadata = unwrap_annotation(info.annotation, tuple(info.metadata))
    members = [member for member in get_args(annotation) if member is not type(None)]
    if get_origin(annotation) in (Union, types.UnionType) and len(members) == 1:
        annotation, metadata = unwrap_annotation(members[0], metadata)
    return tensor_type_of(annotation, metadata)


def _compile(name: str, annotation: Any, metadata: Iterable[Any], *, required: bool, owner: type[Any]) -> Field:
    annotation, metadata = unwrap_annotation(annotation, tuple(metadata))
    if get_origin(annotation) in (Union, types.UnionType):
        none = (None, type(None))
        members = [member for member in get_args(annotation) if unwrap_annotation(member, ())[0] not in none]
        nullable = len(members) < len(get_args(annotation))
        if len(members) != 1:
            parts = tuple(_compile(name, member, (), required=True, owner=owner) for member in members)
            # A member may accept None without being `None` itself: Any, Literal[None], or a nested union.
            nullable = nullable or any(
                part.nullable or None in part.choices or (part.kind is FieldKind.ANY and part.type in (Any, object))
                for part in parts
            )
            constrained = _constrains(metadata) or any(part.constrained for part in parts)
            decodes = _decodes_input(annotation, metadata) or any(part.decodes_input for part in parts)
            return Field(
                name,
                FieldKind.UNION,
                annotation,
                nullable,
                required,
                items=parts,
                constrained=constrained,
                decodes_input=decodes,
            )
        inner = _compile(name, members[0], metadata, required=required, owner=owner)
        return replace(inner, nullable=nullable or inner.nullable)
    kind, tp = _kind(annotation, metadata)
    items: tuple[Field, ...] = ()
    # Items have the name of their field, so that errors about them name it.
    if kind in (FieldKind.LIST, FieldKind.DICT):
        arguments = [argument for argument in get_args(annotation) if argument is not Ellipsis]
        items = tuple(_compile(name, argument, (), required=True, owner=owner) for argument in arguments)
    elif get_origin(annotation) is Literal and kind is FieldKind.ANY:  # decoders look up enums here
        enums = {type(value): None for value in get_args(annotation) if isinstance(value, Enum)}
        items = tuple(_compile(name, enum, (), required=True, owner=owner) for enum in enums)
    nested = kind in (FieldKind.DOCUMENT, FieldKind.DOCUMENTS)
    recursive = nested and (_is_open(_nested_type(tp)) or _reaches(tp, owner))
    choices = get_args(annotation) if get_origin(annotation) is Literal else ()
    return Field(
        name,
        kind,
        tp,
        nullable=annotation in (None, type(None)),
        required=required,
        recursive=recursive,
        items=items,
        constrained=_constrains(metadata) or bool(choices) or any(item.constrained for item in items),
        decodes_input=_decodes_input(annotation, metadata) or any(item.decodes_input for item in items),
        choices=choices,
    )


def _decodes_input(annotation: Any, metadata: tuple[Any, ...]) -> bool:
    known: tuple[Any, ...] = (Json, EncodedBytes, EncodedStr)
    return annotation is Json or any(isinstance(item, known) for item in metadata)


def _constrains(metadata: tuple[Any, ...]) -> bool:
    """Return whether metadata restricts values, unlike the marks of quire's own types (`__quire_plain__`)."""
    return any(not getattr(item, "__quire_plain__", False) for item in metadata)


def unwrap_annotation(annotation: Any, metadata: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """Remove `Annotated`, `NewType` and type aliases; return the type and the collected metadata."""
    while True:
        if get_origin(annotation) is Annotated:
            annotation, *inner = get_args(annotation)
            metadata = (*inner, *metadata)
        elif isinstance(annotation, NewType):
            annotation = annotation.__supertype__
        elif hasattr(annotation, "__value__"):  # type X = ...
            annotation = expand_alias(annotation)
        else:
            return annotation, metadata


def _kind(annotation: Any, metadata: tuple[Any, ...]) -> tuple[FieldKind, Any]:
    tensor_type = tensor_type_of(annotation, metadata)
    if tensor_type is not None:
        return FieldKind.TENSOR, tensor_type
    for item in metadata:
        if hasattr(item, "__quire_refine__"):  # the metadata refines the type to another class
            annotation = item.__quire_refine__(annotation)
    origin = get_origin(annotation)
    if origin is Literal:
        types_ = {type(value) for value in get_args(annotation)}
        return _kind(types_.pop(), ()) if len(types_) == 1 else (FieldKind.ANY, annotation)
    if is_array_type(origin):
        # An alias such as DocumentArray['Node'], whose name is resolved by now; of a type variable, any array.
        [parameter] = get_args(annotation)
        array: Any = origin
        annotation = array if isinstance(parameter, TypeVar) else array[parameter]
    elif isinstance(annotation, (TypeVar, ForwardRef, str)):  # names in recursive aliases, such as JsonValue
        return FieldKind.ANY, Any
    if is_document_type(annotation):
        return FieldKind.DOCUMENT, annotation
    if is_array_type(annotation):
        return FieldKind.DOCUMENTS, annotation
    tp = origin or annotation
    kind = simple_kind(tp)
    return kind, annotation if kind is FieldKind.ANY else tp


def simple_kind(tp: object) -> FieldKind:
    """Return the kind of a class that is neither a tensor, a document nor an array."""
    return next(
        (kind for known, kind in _SIMPLE_KINDS if isinstance(tp, type) and issubclass(tp, known)), FieldKind.ANY
    )


def _is_open(document_type: type[Any]) -> bool:
    return "__quire_open__" in vars(document_type)


def _reaches(tp: Any, owner: type[Any]) -> bool:
    """Return whether a document class refers back to the owner: such a field nests without end and has no columns."""
    todo, seen = [_nested_type(tp)], set()
    while todo:
        current = todo.pop()
        if current is owner:
            return True
        if current is None or current in seen:
            continue
        seen.add(current)
        _complete(current)
        todo.extend(_nested_type(info.annotation) for info in current.model_fields.values())
    return False


def _nested_type(annotation: Any) -> Annotation:
    """Return the document class whose columns are nested in the column of a field; None for other kinds."""
    annotation, metadata = unwrap_annotation(annotation, ())
    if get_origin(annotation) in (Union, types.UnionType):
        members = [member for member in get_args(annotation) if member is not type(None)]
        return _nested_type(members[0]) if len(members) == 1 else None
    kind, tp = _kind(annotation, metadata)
    return {FieldKind.DOCUMENT: tp, FieldKind.DOCUMENTS: getattr(tp, "document_type", None)}.get(kind)


# --- core schemas


def field_validator(document_type: type[Any], name: str) -> SchemaValidator:
    """Return a validator of lists of values of one field, with everything that quire adds to its core schema."""
    schema: Any = document_type.__pydantic_core_schema__
    definitions = schema["definitions"] if schema["type"] == "definitions" else []
    inner = schema["schema"] if definitions else schema
    # A class that other classes refer to, or that refers to itself, is among the definitions.
    while inner["type"] == "definition-ref" or find_model(inner, document_type) is None:
        reference = inner["schema_ref"] if inner["type"] == "definition-ref" else None
        inner = next(item for item in definitions if item.get("ref") == reference)
    model = find_model(inner, document_type)
    assert model is not None
    field = find_fields(model["schema"])[name]["schema"]
    while field["type"] == "default":  # there is always a value
        field = field["schema"]
    values: Any = core_schema.list_schema(field)
    if definitions:
        values = core_schema.definitions_schema(values, definitions)
    return SchemaValidator(values, model.get("config"))


def find_model(schema: Any, document_type: type[Any]) -> dict[str, Any] | None:
    """Return the node of a document class in a core schema, inside of the validators around it."""
    while isinstance(schema, dict):
        if schema["type"] == "model" and schema["cls"] is document_type:
            return schema
        schema = schema.get("schema")
    return None


def find_fields(schema: Any) -> dict[str, Any]:
    """Return the fields in the core schema of a model."""
    while isinstance(schema, dict):
        if schema["type"] == "model-fields":
            fields: dict[str, Any] = schema["fields"]
            return fields
        schema = schema.get("schema")
    return {}
