"""Additions of quire to the core schema that pydantic compiles for a document class.

- A field annotated with a framework's own tensor class is validated like one of quire's tensor types.
- Named dimensions that appear in several fields of a document must agree.
- Bytes are base64 in JSON, so that any bytes can be written; pydantic alone writes only those that are UTF-8.
- The values of computed fields, which documents write, are ignored when documents are read.
- A class with a main field accepts that field's value in place of a document.
- If aliases and names of fields are ambiguous, every field has an additional key, which decoders use.
- Members of enums in a `Literal` are read from their values in JSON, which pydantic alone writes but rejects.
- `Json[...]` accepts the parsed value from decoders, and is written as text again if the output will be read. The same
  holds for `Base64Bytes` and similar types, which pydantic alone would decode a second time.
"""

from __future__ import annotations

import base64
import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from enum import Enum
from functools import partial
from typing import Annotated, Any, NamedTuple, get_args, get_origin

import numpy as np
from pydantic import EncodedBytes, EncodedStr, SerializationInfo, ValidationError, ValidationInfo
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, PydanticCustomError, PydanticKnownError, core_schema, to_json

from quire.schema import (
    ROUND_TRIP,
    FieldKind,
    StoredContext,
    field_tensor_type,
    find_fields,
    find_model,
    has_ambiguous_keys,
    stored_key,
    takes_names,
    written_names,
)
from quire.tensors import (
    NdArray,
    TensorType,
    describe,
    expand_alias,
    format_shape,
    framework_of,
    native_tensor_type,
    tensor_type_of,
)

_ModelContent = tuple[dict[str, Any], Any, set[str]]
"""What pydantic validates a model to: the values of fields, extra values, and the names of fields that were set."""
_Resolve = Callable[[Any], Any]


# A core schema is a tree of dicts. pydantic compiles it after this module has changed it, and a dict of the tree may be
# referred to from several places, so nodes are changed in place (`_replace_content`) and not exchanged. The trees of
# nested documents end the recursion: each class is completed by itself.


def complete_core_schema(document_type: type[Any], schema: CoreSchema, resolve: _Resolve) -> CoreSchema:
    """Return the core schema of a class with quire's additions; `resolve` follows a reference."""
    model = find_model(resolve(schema), document_type)
    if model is not None:
        fields = find_fields(model["schema"])
        for name, field in fields.items():
            info = document_type.model_fields[name]
            hint = field_tensor_type(info)
            _replace_native(field, iter(_array_types(info.annotation) if hint is None else [hint]), resolve)
            _prepare_default(field, info)
            _encode_bytes(field["schema"])
            _accept_output(field["schema"])
        if has_ambiguous_keys(document_type):
            _add_stored_keys(document_type, fields)
        tensors = {name: tp for name, field in fields.items() if (tp := _tensor_type(field)) is not None}
        _compare_dimensions(model, tensors)
        _drop_computed_fields(document_type, model)
    if document_type.__quire_main__:
        return core_schema.no_info_before_validator_function(_accept_main_value(document_type), schema)
    return schema


def _replace_content(schema: dict[str, Any], content: Mapping[str, Any]) -> None:
    """Replace a node of a core schema in place."""
    schema.clear()
    schema.update(content)


def _drop_computed_fields(document_type: type[Any], model: dict[str, Any]) -> None:
    """Let a class read its own output: the values of computed fields are ignored, and are no extra values.

    pydantic can only forbid, ignore or keep all extra values. So all are kept, and checked after the fields.
    """
    decorators = document_type.__pydantic_decorators__.computed_fields
    names = {*decorators, *(field.info.alias for field in decorators.values() if field.info.alias)}
    extra = document_type.model_config.get("extra")
    fields = model["schema"]
    while isinstance(fields, dict) and fields["type"] != "model-fields":
        fields = fields.get("schema")
    if not isinstance(fields, dict) or not names or extra not in ("forbid", "allow"):
        return

    def check(content: _ModelContent) -> _ModelContent:
        values, extras, set_names = content
        kept = {name: value for name, value in (extras or {}).items() if name not in names}
        if kept and extra == "forbid":
            problems: Any = [{"type": "extra_forbidden", "loc": (name,), "input": kept[name]} for name in kept]
            raise ValidationError.from_exception_data(document_type.__name__, problems)
        return values, kept if extra == "allow" else None, set_names - names

    model["config"] = {**model.get("config", {}), "extra_fields_behavior": "allow"}
    plain: Any = dict(fields)
    _replace_content(fields, core_schema.no_info_after_validator_function(check, plain))


def _replace_native(schema: Any, arrays: Iterator[TensorType], resolve: _Resolve) -> None:
    """Replace bare isinstance checks of tensor classes in a field by quire's validation.

    The core schema does not have the dtype of an `NDArray[np.float32]`; `arrays` has the types of the annotation, in
    order.
    """
    if isinstance(schema, (list, tuple)):
        for item in schema:
            _replace_native(item, arrays, resolve)
    elif isinstance(schema, dict):
        target = schema
        if schema.get("type") == "definition-ref":  # NDArray may be an alias
            with suppress(LookupError):  # a document whose schema is being compiled right now
                target = resolve(schema)
        if target.get("type") == "is-instance":
            tensor_type = native_tensor_type(target["cls"])
            if tensor_type is not None:
                tensor_type = next(arrays, tensor_type) if tensor_type is NdArray else tensor_type
                _replace_content(schema, tensor_type.core_schema())
        elif schema.get("type") != "model":  # nested documents have their own additions
            for key, value in schema.items():
                if key != "metadata":
                    _replace_native(value, arrays, resolve)
            _prefer_exact_tensors(schema)


def _prefer_exact_tensors(schema: dict[str, Any]) -> None:
    """Let a union use the member that a tensor already fits, and for JSON the member of the tensor's framework.

    pydantic alone would try to convert the tensor for the members before that one.
    """
    choices = schema["choices"] if schema.get("type") == "union" else ()
    members = [tp for choice in choices if (tp := _tensor_type(choice)) is not None]

    def take(value: object, handler: Callable[[Any], Any]) -> object:
        if framework_of(value) is not None and any(isinstance(value, tp) for tp in members):
            return value
        if isinstance(value, Mapping) and "framework" in value:
            for member in members:
                with suppress(PydanticCustomError):
                    return member._read(value)
        return handler(value)

    if members:
        union: Any = dict(schema)
        _replace_content(schema, core_schema.no_info_wrap_validator_function(take, union))


def _encode_bytes(schema: Any) -> None:
    """Let the bytes of a field be base64 in JSON, except for types that have their own serialization."""
    if isinstance(schema, (list, tuple)):
        for item in schema:
            _encode_bytes(item)
    if not isinstance(schema, dict) or "serialization" in schema or schema.get("type") == "model":
        return
    if schema.get("type") == "bytes":
        plain: Any = dict(schema)
        either = core_schema.json_or_python_schema(
            core_schema.no_info_before_validator_function(_read_base64, plain),
            plain,
            serialization=core_schema.plain_serializer_function_ser_schema(
                _write_base64, return_schema=core_schema.str_schema(), when_used="json"
            ),
        )
        _replace_content(schema, either)
        return
    for key, value in schema.items():
        if key != "metadata":
            _encode_bytes(value)


def _write_base64(value: object) -> object:
    return base64.b64encode(value).decode("ascii") if isinstance(value, (bytes, bytearray, memoryview)) else value


def _read_base64(value: str | bytes) -> bytes:
    try:
        return base64.b64decode(value, validate=True)
    except (ValueError, TypeError):
        raise PydanticCustomError("base64", "expected bytes in base64") from None


def _add_stored_keys(document_type: type[Any], fields: dict[str, Any]) -> None:
    """Add an unambiguous key to each field, and let the name of a field take precedence over an equal alias.

    JSON and dicts that quire writes have the names of fields, and pydantic alone looks for aliases first.
    """
    # pydantic takes the first alias that the input has. An alias that is also the name of another field would take the
    # value of that field: the own name of a field then comes first. The stored key, which no input of users has, comes
    # last; decoders use it, and nothing else.
    written = written_names(document_type)
    for name, field in fields.items():
        alias = field.get("validation_alias")  # a name, a path, or a list of paths
        if alias is None:
            choices = [[name]]
        elif isinstance(alias, str):
            choices = [[alias]]
        else:
            choices = [list(choice) for choice in alias] if isinstance(alias[0], list) else [list(alias)]
        collides = any(choice != [name] and choice[0] in written for choice in choices)
        own = [[name]] if collides and takes_names(document_type) else []
        field["validation_alias"] = [*own, *choices, [stored_key(name)]]


def _accept_output(schema: Any) -> None:
    """Let literals, `Json` and base64 in a field accept their own output, except for types with own serialization."""
    if isinstance(schema, (list, tuple)):
        for item in schema:
            _accept_output(item)
    if not isinstance(schema, dict) or schema.get("type") == "model":
        return
    for key, value in schema.items():  # also inside of types with own serialization, such as Sequence
        if key not in ("metadata", "serialization"):
            _accept_output(value)
    if schema.get("type") == "function-after":
        _take_decoded(schema["function"])
    if "serialization" in schema:
        return
    if schema.get("type") == "literal":
        _read_members(schema)
    elif schema.get("type") == "json":
        _take_parsed_json(schema)


def _read_members(schema: dict[str, Any]) -> None:
    """Let a literal accept the values of enum members, which stand for the members in JSON."""
    expected = schema["expected"]
    members = {repr(item.value): item for item in reversed(expected) if isinstance(item, Enum) and item != item.value}
    if not members:
        return
    literal = dict(schema)
    expected_text = " or ".join(map(repr, expected))

    def read_member(value: object, handler: Callable[[Any], Any]) -> object:
        # A member of another enum may be equal to the value, as those of IntEnum are, and is not what was meant.
        if isinstance(value, Enum):
            raise PydanticKnownError("literal_error", {"expected": expected_text})
        return members[repr(handler(value))]

    values: Any = core_schema.literal_schema([member.value for member in members.values()])
    by_value = core_schema.no_info_wrap_validator_function(read_member, values)
    union = core_schema.union_schema(
        [literal, by_value],
        mode="left_to_right",
        custom_error_type="literal_error",
        custom_error_context={"expected": expected_text},
        serialization=core_schema.wrap_serializer_function_ser_schema(lambda value, handler: handler(value)),
        metadata={"pydantic_js_functions": [lambda _, handler: handler(literal)]},  # the JSON schema stays the same
    )
    _replace_content(schema, union)


class _Parsed(NamedTuple):
    """Marks the value of a `Json` field that a decoder has parsed, so that it is not parsed again."""

    value: Any


def _take_parsed_json(schema: dict[str, Any]) -> None:
    """Let a field of `Json` accept parsed values from decoders, and be written as text if it will be read again."""
    text: Any = dict(schema)
    inner = core_schema.no_info_before_validator_function(
        lambda parsed: parsed.value, text.get("schema") or core_schema.any_schema()
    )

    def take(value: object, handler: Callable[[Any], Any], info: ValidationInfo) -> object:
        if isinstance(info.context, StoredContext):
            return handler(_Parsed(value))
        try:
            return handler(value)
        except ValidationError as error:
            first: Any = error.errors()[0]
            if first["loc"] != ("text",):
                raise
            # The same error without the tag of the union in its location, which users do not know.
            raise PydanticKnownError(first["type"], first.get("ctx")) from None

    def write(value: object, handler: Callable[[Any], Any], info: SerializationInfo) -> object:
        written = handler(value)
        if isinstance(info.context, Mapping) and info.context.get(ROUND_TRIP):
            return to_json(written, inf_nan_mode="strings").decode()
        return written

    either = core_schema.tagged_union_schema(
        {"parsed": inner, "text": text},
        lambda value: "parsed" if isinstance(value, _Parsed) else "text",
        from_attributes=False,
    )
    node = core_schema.with_info_wrap_validator_function(
        take,
        either,
        serialization=core_schema.wrap_serializer_function_ser_schema(write, info_arg=True, schema=text),
        metadata={"pydantic_js_functions": [lambda _, handler: handler(text)]},
    )
    _replace_content(schema, node)


def _take_decoded(function: dict[str, Any]) -> None:
    """Let a field of `Base64Bytes` or a similar type accept its value from decoders: bytes that are decoded already."""
    # pydantic decodes in a method of an EncodedBytes or EncodedStr, which is the only trace of the type in the schema.
    decode = function["function"]
    owner = getattr(decode, "__self__", None)
    if not isinstance(owner, (EncodedBytes, EncodedStr)):
        return

    def take(value: object, info: ValidationInfo) -> object:
        if not isinstance(info.context, StoredContext):
            return decode(value, info)
        if isinstance(owner, EncodedStr) and isinstance(value, bytes):  # older pydantic has made bytes of a str
            return value.decode()
        return value

    function["function"] = take


def _array_types(annotation: Any) -> list[TensorType]:
    """Return the types of numpy arrays in an annotation, without those that `Shape` or `DType` refine."""
    annotation = expand_alias(annotation)
    if (get_origin(annotation) or annotation) is np.ndarray:
        return [native_tensor_type(annotation) or NdArray]
    arguments = get_args(annotation)
    if get_origin(annotation) is Annotated:
        refined = tensor_type_of(arguments[0], arguments[1:]) is not tensor_type_of(arguments[0])
        return [] if refined else _array_types(arguments[0])
    return [tp for argument in arguments for tp in _array_types(argument)]


def _prepare_default(field: dict[str, Any], info: FieldInfo) -> None:
    """Validate a default like a value: [] becomes an array if the field is one, and documents do not share it.

    The default of a field of URLs or encoded media is converted to their class.
    """
    schema = field["schema"]
    if schema["type"] != "default":
        return
    wrapper = _find_metadata(schema, "quire_wrapper") if isinstance(info.default, (str, bytes)) else None
    if wrapper is not None:
        info.default = schema["default"] = wrapper.__quire_wrap__(info.default)
    if schema["schema"]["type"] == "json":  # its input is text, and its default is the parsed value
        return
    default = info.default
    if framework_of(default) is not None:
        # pydantic copies only those defaults that have no hash. A tensor of torch has one, and would be shared.
        schema.pop("default", None)
        schema["default_factory"] = partial(copy.deepcopy, default)
    wrapped = isinstance(default, (str, bytes)) and _has_wrapped_member(schema["schema"])
    if framework_of(default) is not None or isinstance(default, (list, tuple, dict)) or wrapped:
        schema["validate_default"] = True


def _has_wrapped_member(schema: Any) -> bool:
    """Return whether a union has a member that converts texts or blobs to a class of its own, like `ImageUrl`."""
    while isinstance(schema, dict) and schema.get("type") != "union":
        schema = schema.get("schema")
    choices = schema["choices"] if isinstance(schema, dict) else ()
    return any(_find_metadata(choice, "quire_wrapper") is not None for choice in choices)


def _tensor_type(schema: Any) -> TensorType | None:
    tensor_type: TensorType | None = _find_metadata(schema, "quire_tensor")
    return tensor_type


def _find_metadata(schema: Any, name: str) -> Any:
    """Return an entry in the metadata of a core schema or of the schemas inside of it."""
    while isinstance(schema, dict):
        entry = schema.get("metadata", {}).get(name)
        if entry is not None:
            return entry
        schema = schema.get("schema")
    return None


def _compare_dimensions(model: dict[str, Any], tensors: dict[str, TensorType]) -> None:
    """Let a class compare the sizes of named dimensions that several of its fields have."""
    counts = Counter(name for tensor_type in tensors.values() for name in tensor_type.spec.names)
    fields = {field: tp for field, tp in tensors.items() if any(counts[name] > 1 for name in tp.spec.names)}

    def check(content: _ModelContent) -> _ModelContent:
        sizes: dict[str, int] = {}
        for name, tensor_type in fields.items():
            value = content[0].get(name)
            framework = framework_of(value)
            known = dict(sizes)  # for the message: `bind` also adds the sizes of a tensor that does not fit
            if framework is not None and not tensor_type.spec.bind(framework.shape(value), sizes):
                expected = f"{name} of shape {format_shape(tensor_type.spec.shape or ())} with " + ", ".join(
                    f"{dim}={size}" for dim, size in known.items() if dim in tensor_type.spec.names
                )
                context = {"expected": expected, "got": describe(value)}
                raise PydanticCustomError("tensor", "expected {expected} (from another field), got {got}", context)
        return content

    if fields:
        model["schema"] = core_schema.no_info_after_validator_function(check, model["schema"])


_PLAIN: dict[FieldKind, Any] = {FieldKind.TEXT: str, FieldKind.BYTES: bytes}


def _accept_main_value(document_type: type[Any]) -> Callable[[Any], Any]:
    """Return a validator that makes 'abc' to {'text': 'abc'}."""

    def wrap(value: object) -> object:
        if isinstance(value, (dict, document_type)) or hasattr(type(value), "document_schema"):
            return value
        name = find_main_field(document_type, value)
        return value if name is None else {name: value}

    return wrap


def find_main_field(document_type: type[Any], value: object) -> str | None:
    """Return the first main field of a document class whose type takes the value as it is."""
    for name in document_type.__quire_main__:
        field = document_type.document_schema().by_name[name]
        if isinstance(field.type, TensorType):
            takes = framework_of(value) is not None
        else:
            takes = isinstance(value, _PLAIN.get(field.kind, field.type))
        if takes:
            return str(name)
    return None
