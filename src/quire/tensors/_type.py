"""`TorchTensor[3, 'h', 'w']` and its kin: checked types whose values are the framework's own tensors.

A tensor type is a class that has no instances of its own: `isinstance(x, TorchTensor[3, 'h', 'w'])` asks whether x is
such a torch tensor, calling it checks (and converts, where nothing is lost), and pydantic does the same for a field.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakValueDictionary

from pydantic import GetJsonSchemaHandler, SerializationInfo
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from quire import _parametrize
from quire.errors import SchemaError, TensorError
from quire.tensors._convert import check_source, coerce
from quire.tensors._framework import Framework
from quire.tensors._json import json_schema, tensor_to_json
from quire.tensors._registry import framework_of, get_framework
from quire.tensors._spec import TensorSpec, dtype_name, format_shape, looks_like_dtype

_types: WeakValueDictionary[tuple[type, TensorSpec], TensorType] = WeakValueDictionary()


class TensorType(type):
    """The metaclass of tensor types: a framework (None: any) and a spec."""

    _framework_name: str | None
    _spec: TensorSpec
    _plain: TensorType

    def __new__(
        mcls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], framework: str | None = None
    ) -> TensorType:
        cls = super().__new__(mcls, name, bases, namespace)
        if "_spec" not in namespace:  # the plain type; parametrised ones inherit all but the spec
            cls._framework_name, cls._spec, cls._plain = framework, TensorSpec(), cls
        return cls

    def __init__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **_: Any) -> None:
        super().__init__(name, bases, namespace)

    def __getitem__(cls, parameters: Any) -> TensorType:
        if cls._spec != TensorSpec():
            raise SchemaError(f"{cls.__name__} has its shape and dtype already.")
        return cls._with(parse_parameters(parameters if isinstance(parameters, tuple) else (parameters,)))

    def _with(cls, spec: TensorSpec) -> TensorType:
        """The type of the same framework with another spec: one class for equal specs."""
        if spec == TensorSpec():
            return cls._plain
        found = _types.get((cls._plain, spec))
        if found is None:
            with _parametrize._making:  # two threads that ask at once get one class
                found = _types.get((cls._plain, spec)) or _make(cls._plain, spec)
        return found

    def __instancecheck__(cls, value: object) -> bool:
        return cls._explain(value) is None

    def __call__(cls, value: Any) -> Any:
        """The value, checked and converted as in a field."""
        try:
            return cls._validate(value)
        except PydanticCustomError as error:
            raise TensorError(f"{cls.__name__}: {error.message()}") from None

    def __repr__(cls) -> str:
        return cls.__name__

    @property
    def spec(cls) -> TensorSpec:
        """The shape and dtype that the type asks for."""
        return cls._spec

    @property
    def framework(cls) -> Framework | None:
        """The framework of the type's values, imported now if need be; None for any."""
        return get_framework(cls._framework_name, needed_for=cls.__name__) if cls._framework_name else None

    def _holds(cls, value: object) -> bool:
        """Whether the value is a tensor of the type's framework, whatever its shape."""
        found = framework_of(value)
        if found is None or cls._framework_name is None:
            return found is not None
        return found.name == cls._framework_name and found.unwrap(value) is value

    def _explain(cls, value: object) -> str | None:
        """Why the value is not of this type; None when it is."""
        if not cls._holds(value):
            return describe(value)
        framework = framework_of(value)
        assert framework is not None
        reason = framework.refusal(value)
        if reason is not None:
            return f"{describe(value)}: {reason}"
        if cls._spec.fits(framework.shape(value), framework.dtype(value)):
            return None
        return describe(value)

    def _fit(cls, value: Any) -> Any:
        """The value itself, if it is of this type: what pydantic calls in strict mode."""
        got = cls._explain(value)
        if got is not None:
            raise _mismatch(cls, got)
        return value

    def _fit_json(cls, value: Any) -> Any:
        """A tensor in its own JSON form: in JSON that is as strict as it gets."""
        return cls._validate(value) if isinstance(value, Mapping) else cls._fit(value)

    def _validate(cls, value: Any) -> Any:
        """The value, or what it becomes without loss: what pydantic calls in lax mode."""
        if not cls._holds(value):
            got = describe(value)
            try:
                check_source(value)
                value = cls._coerce(value)
            except TensorError as error:
                raise _mismatch(cls, f"{got}: {error}") from None
        return cls._fit(value)

    def _read(cls, content: Mapping[str, Any]) -> Any:
        """A tensor in JSON that was written by this type's framework; any other does not fit."""
        if cls._framework_name not in (None, content.get("framework")):
            raise _mismatch(cls, f"a tensor of {content.get('framework')!r}")
        return cls._validate(content)

    def _coerce(cls, value: Any) -> Any:
        return coerce(value, cls.framework, cls._spec)

    def _validator(cls) -> Callable[[Any], Any]:
        """The lax validator, with the common case in front: the framework's own class, and the exact shape."""
        shape, dtype, slow = cls._spec.fixed_shape, cls._spec.dtype, cls._validate
        native: Any = None
        native_dtype: Any = None

        def first(value: Any) -> Any:
            nonlocal native, native_dtype
            checked = slow(value)
            framework = cls.framework
            if framework is not None and not framework.refuses_some and cls._holds(checked):
                native, native_dtype = type(checked), framework.native_dtype(dtype) if dtype else None
            return checked

        def exact(value: Any) -> Any:
            if type(value) is native and value.shape == shape and (dtype is None or value.dtype == native_dtype):
                return value
            return first(value)

        def any_shape(value: Any) -> Any:
            if type(value) is native:
                return value
            return first(value)

        if shape is not None:
            return exact
        return any_shape if cls._spec == TensorSpec() else slow

    def core_schema(cls) -> CoreSchema:
        """pydantic's plan for a field of this type."""

        def describe_json(_: CoreSchema, __: GetJsonSchemaHandler) -> dict[str, Any]:
            return json_schema(cls.__name__, cls._spec)

        return core_schema.lax_or_strict_schema(
            lax_schema=core_schema.no_info_plain_validator_function(cls._validator()),
            strict_schema=core_schema.json_or_python_schema(
                core_schema.no_info_plain_validator_function(cls._fit_json),
                core_schema.no_info_plain_validator_function(cls._fit),
            ),
            serialization=core_schema.plain_serializer_function_ser_schema(_serialize, info_arg=True, when_used="json"),
            metadata={"quire_tensor": cls, "pydantic_js_functions": [describe_json]},
        )

    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> CoreSchema:
        return cls.core_schema()


def _serialize(value: Any, info: SerializationInfo) -> dict[str, Any]:
    """A tensor in JSON, in the form that the serialization context asks for: `{'tensors': 'base64'}`."""
    context = info.context
    return tensor_to_json(value, context.get("tensors", "lists") if isinstance(context, Mapping) else "lists")


def _make(plain: TensorType, spec: TensorSpec) -> TensorType:
    name = f"{plain.__name__}[{_format_parameters(spec)}]"
    namespace = {
        "_spec": spec,
        "__module__": _parametrize.__name__,
        "__qualname__": _parametrize.publish(name),
        "__doc__": plain.__doc__,
        "__slots__": (),
    }
    made = _types[plain, spec] = type(plain)(name, (plain,), namespace)
    _parametrize.register(made)
    return made


def parse_parameters(parameters: tuple[Any, ...]) -> TensorSpec:
    """(float32, 3, 'h', 'w') -> a spec: at most one dtype, and the dimensions; (float32, ()) has no dimensions."""
    dtypes = [p for p in parameters if looks_like_dtype(p)]
    if len(dtypes) > 1:
        raise SchemaError(f"A tensor has one dtype, got {', '.join(map(repr, dtypes))}.")
    shape = tuple(p for p in parameters if not looks_like_dtype(p))
    if not dtypes:
        return TensorSpec(shape)
    return TensorSpec(() if shape == ((),) else shape or None, dtype_name(dtypes[0]))


def describe(value: object) -> str:
    """A value in an error message: dtype, shape and framework of a tensor, else its type and a glimpse."""
    framework = framework_of(value)
    if framework is not None:
        shape, layout = format_shape(framework.shape(value)), framework.layout(value)
        return f"{framework.dtype(value)} {shape} of {framework.name}" + ("" if layout == "dense" else f", {layout}")
    text = repr(value) if isinstance(value, (str, bytes, int, float, bool, type(None))) else ""
    return f"{type(value).__name__} {text[:40]}".strip()


def _format_parameters(spec: TensorSpec) -> str:
    shape = ["()"] if spec.shape == () else ["..." if d is Ellipsis else repr(d) for d in spec.shape or ()]
    return ", ".join(([spec.dtype] if spec.dtype else []) + shape)


def _mismatch(cls: TensorType, got: str) -> PydanticCustomError:
    expected = f"{cls._plain.__name__} {cls._spec}"
    return PydanticCustomError("tensor", "expected {expected}, got {got}", {"expected": expected, "got": got})


def _rebuild(plain: TensorType, spec: TensorSpec) -> TensorType:
    return plain._with(spec)


def reduce_tensor_type(cls: TensorType) -> Any:
    """Parametrised types pickle by recipe, plain ones by name."""
    return (_rebuild, (cls._plain, cls._spec)) if cls is not cls._plain else cls.__qualname__


copyreg.pickle(TensorType, reduce_tensor_type)
