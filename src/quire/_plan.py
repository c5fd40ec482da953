"""What quire adds to pydantic's plan of a document class (its core schema).

- A field annotated with a framework's own tensor class is checked like one of quire's tensor types.
- Named dimensions that appear in several fields of a document must agree.
- Bytes are base64 in JSON, so that any bytes can be written; pydantic alone writes those that are UTF-8.
- A class with a main field accepts that field's value in place of a document.
"""

from __future__ import annotations

import base64
import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Annotated, Any, get_args, get_origin

import numpy as np
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from quire.schema import FieldKind, field_tensor_type
from quire.tensors import NdArray, TensorType, describe, format_shape, framework_of, tensor_type_of
from quire.tensors._annotations import expand_alias, native_tensor_type

_ModelContent = tuple[dict[str, Any], Any, set[str]]
_Resolve = Callable[[Any], Any]


def complete_core_schema(document_type: type[Any], schema: CoreSchema, resolve: _Resolve) -> CoreSchema:
    """pydantic's plan with quire's additions; `resolve` follows a reference."""
    model = _find_model(resolve(schema), document_type)
    if model is not None:
        fields = _find_fields(model["schema"])
        for name, field in fields.items():
            info = document_type.model_fields[name]
            hint = field_tensor_type(info)
            _replace_native(field, iter(_array_types(info.annotation) if hint is None else [hint]), resolve)
            _wrap_default(field, info)
            _check_default(field, info.default)
            _encode_bytes(field["schema"])
        tensors = {name: found for name, field in fields.items() if (found := _tensor_type(field)) is not None}
        shared = _sharing_names(tensors)
        if shared:
            check = _shared_dimensions(shared)
            model["schema"] = core_schema.no_info_after_validator_function(check, model["schema"])
    main: tuple[str, ...] = document_type.__quire_main__
    if main:
        return core_schema.no_info_before_validator_function(_main_value(document_type, main), schema)
    return schema


def _find_model(schema: Any, document_type: type[Any]) -> dict[str, Any] | None:
    while isinstance(schema, dict):
        if schema["type"] == "model" and schema["cls"] is document_type:
            return schema
        schema = schema.get("schema")
    return None


def _find_fields(schema: Any) -> dict[str, Any]:
    while isinstance(schema, dict):
        if schema["type"] == "model-fields":
            found: dict[str, Any] = schema["fields"]
            return found
        schema = schema.get("schema")
    return {}


def _replace_native(schema: Any, arrays: Iterator[TensorType], resolve: _Resolve) -> None:
    """Put quire's check in the place of a bare isinstance check, wherever a tensor class stands in a field.

    pydantic's plan has forgotten the dtype of an NDArray[np.float32]; `arrays` tells those of the annotation, in order.
    """
    if isinstance(schema, (list, tuple)):
        for item in schema:
            _replace_native(item, arrays, resolve)
    elif isinstance(schema, dict):
        target = schema
        if schema.get("type") == "definition-ref":  # NDArray may be an alias
            with suppress(LookupError):  # or a document whose plan is being made right now
                target = resolve(schema)
        if target.get("type") == "is-instance":
            tensor_type = native_tensor_type(target["cls"])
            if tensor_type is not None:
                schema.clear()
                schema.update((next(arrays, tensor_type) if tensor_type is NdArray else tensor_type).core_schema())
        elif schema.get("type") != "model":  # nested documents have seen to themselves
            for key, value in schema.items():
                if key != "metadata":
                    _replace_native(value, arrays, resolve)
            _keep_what_fits(schema)


def _keep_what_fits(schema: dict[str, Any]) -> None:
    """A union gives a tensor to the member that it fits, and one in JSON to the member of its framework.

    pydantic alone would try conversions for the members before that one.
    """
    choices = schema["choices"] if schema.get("type") == "union" else ()
    members = [tp for choice in choices if (tp := _tensor_type(choice)) is not None]

    def take(value: Any, handler: Callable[[Any], Any]) -> Any:
        if framework_of(value) is not None and any(isinstance(value, tp) for tp in members):
            return value
        if isinstance(value, Mapping) and "framework" in value:
            for member in members:
                with suppress(PydanticCustomError):
                    return member._read(value)
        return handler(value)

    if members:
        union = dict(schema)
        schema.clear()
        schema.update(core_schema.no_info_wrap_validator_function(take, union))


def _encode_bytes(schema: Any) -> None:
    """Have every bytes of a field, but for those that serialise themselves, written and read as base64 in JSON."""
    if isinstance(schema, (list, tuple)):
        for item in schema:
            _encode_bytes(item)
    if not isinstance(schema, dict) or "serialization" in schema or schema.get("type") == "model":
        return
    if schema.get("type") == "bytes":
        plain: Any = dict(schema)
        schema.clear()
        schema |= core_schema.json_or_python_schema(
            core_schema.no_info_before_validator_function(_read_base64, plain),
            plain,
            serialization=core_schema.plain_serializer_function_ser_schema(
                _write_base64, return_schema=core_schema.str_schema(), when_used="json"
            ),
        )
        return
    for key, value in schema.items():
        if key != "metadata":
            _encode_bytes(value)


def _write_base64(value: Any) -> Any:
    return base64.b64encode(value).decode("ascii") if isinstance(value, (bytes, bytearray, memoryview)) else value


def _read_base64(value: Any) -> Any:
    try:
        return base64.b64decode(value, validate=True)
    except (ValueError, TypeError):
        raise PydanticCustomError("base64", "expected bytes in base64") from None


def _array_types(annotation: Any) -> list[TensorType]:
    """The types of numpy's arrays in an annotation, without those that Shape or DType refine."""
    annotation = expand_alias(annotation)
    if (get_origin(annotation) or annotation) is np.ndarray:
        return [native_tensor_type(annotation) or NdArray]
    arguments = get_args(annotation)
    if get_origin(annotation) is Annotated:
        refined = tensor_type_of(arguments[0], arguments[1:]) is not tensor_type_of(arguments[0])
        return [] if refined else _array_types(arguments[0])
    return [found for argument in arguments for found in _array_types(argument)]


def _wrap_default(field: dict[str, Any], info: FieldInfo) -> None:
    """A default of a field of addresses or encoded media is of their class, like its values."""
    schema = field["schema"]
    wrapper = _noted(schema, "quire_wrapper") if isinstance(info.default, (str, bytes)) else None
    if wrapper is not None and schema["type"] == "default":
        info.default = schema["default"] = wrapper._checked(info.default)


def _check_default(field: dict[str, Any], default: Any) -> None:
    """A default is taken like a value: [] becomes an array where the field is one, and no two documents share it."""
    schema = field["schema"]
    if schema["type"] != "default":
        return
    if framework_of(default) is not None:
        schema.pop("default", None)
        schema["default_factory"] = partial(copy.deepcopy, default)
    if framework_of(default) is not None or isinstance(default, (list, tuple, dict)):
        schema["validate_default"] = True


def _tensor_type(schema: Any) -> TensorType | None:
    found: TensorType | None = _noted(schema, "quire_tensor")
    return found


def _noted(schema: Any, name: str) -> Any:
    """What a type has noted in its plan."""
    while isinstance(schema, dict):
        found = schema.get("metadata", {}).get(name)
        if found is not None:
            return found
        schema = schema.get("schema")
    return None


def _sharing_names(tensors: dict[str, TensorType]) -> dict[str, TensorType]:
    """The fields with a named dimension that another field has too."""
    counts: dict[str, int] = {}
    for tensor_type in tensors.values():
        for name in tensor_type.spec.names:
            counts[name] = counts.get(name, 0) + 1
    return {field: tp for field, tp in tensors.items() if any(counts[name] > 1 for name in tp.spec.names)}


def _shared_dimensions(fields: dict[str, TensorType]) -> Callable[[_ModelContent], _ModelContent]:
    def check(content: _ModelContent) -> _ModelContent:
        sizes: dict[str, int] = {}
        for name, tensor_type in fields.items():
            value = content[0].get(name)
            framework = framework_of(value)
            known = dict(sizes)
            if framework is not None and not tensor_type.spec.bind(framework.shape(value), sizes):
                expected = f"{name} of shape {format_shape(tensor_type.spec.shape or ())} with " + ", ".join(
                    f"{dim}={size}" for dim, size in known.items() if dim in tensor_type.spec.names
                )
                context = {"expected": expected, "got": describe(value)}
                raise PydanticCustomError("tensor", "expected {expected} (from another field), got {got}", context)
        return content

    return check


_PLAIN: dict[FieldKind, Any] = {FieldKind.TEXT: str, FieldKind.BYTES: bytes}


def _main_value(document_type: type[Any], main: tuple[str, ...]) -> Callable[[Any], Any]:
    """'abc' -> {'text': 'abc'}: the first main field whose type takes the value as it is."""

    def wrap(value: Any) -> Any:
        if isinstance(value, (dict, document_type)) or hasattr(type(value), "document_schema"):
            return value
        for name in main:
            field = document_type.document_schema().by_name[name]
            tensor = framework_of(value) is not None
            plain = _PLAIN.get(field.kind, field.type)
            if tensor if isinstance(field.type, TensorType) else isinstance(value, plain):
                return {name: value}
        return value

    return wrap
