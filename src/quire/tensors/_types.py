"""Tensor types for annotations: `TorchTensor[3, 'h', 'w']`, and `Annotated[torch.Tensor, Shape(3, 'h', 'w')]`.

A tensor type is a class without instances of its own, whose values are the framework's own tensors:
`isinstance(x, TorchTensor[3, 'h', 'w'])` checks whether x is such a torch tensor, calling the type validates a value
(and converts it where nothing is lost), and pydantic does the same for a field.
"""

from __future__ import annotations

import copyreg
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import UnionType
from typing import Any, Union, get_args, get_origin
from weakref import WeakValueDictionary

import numpy as np
from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, PydanticSchemaGenerationError, SerializationInfo
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from quire import _parametrize
from quire._protocols import Annotation
from quire.errors import SchemaError, TensorError
from quire.tensors._convert import check_source, coerce
from quire.tensors._framework import DTypeObject, Framework, Tensor
from quire.tensors._jaxtyping import is_jaxtyping, spec_of_jaxtyping
from quire.tensors._json import json_schema, tensor_to_json
from quire.tensors._registry import framework_of, framework_of_type, get_framework
from quire.tensors._spec import Dimension, TensorSpec, dtype_name, format_shape, looks_like_dtype

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
        if "_spec" not in namespace:  # the plain type; parametrised ones inherit everything but the spec
            cls._framework_name, cls._spec, cls._plain = framework, TensorSpec(), cls
        return cls

    def __init__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **_: Any) -> None:
        super().__init__(name, bases, namespace)

    def __getitem__(cls, parameters: Any) -> TensorType:
        if cls._spec != TensorSpec():
            raise SchemaError(f"{cls.__name__} has its shape and dtype already.")
        return cls._with(parse_parameters(parameters if isinstance(parameters, tuple) else (parameters,)))

    def _with(cls, spec: TensorSpec) -> TensorType:
        """Return the type of the same framework with another spec; the same class for equal specs."""
        if spec == TensorSpec():
            return cls._plain
        tensor_type = _types.get((cls._plain, spec))
        if tensor_type is None:
            with _parametrize._making:  # concurrent threads get the same class
                tensor_type = _types.get((cls._plain, spec)) or _create_type(cls._plain, spec)
        return tensor_type

    def __instancecheck__(cls, value: object) -> bool:
        return cls._explain(value) is None

    def __call__(cls, value: Any) -> Tensor:
        """Validate and convert a value as in a field."""
        try:
            return cls._validate(value)
        except PydanticCustomError as error:
            raise TensorError(f"{cls.__name__}: {error.message()}") from None

    def __repr__(cls) -> str:
        return cls.__name__

    @property
    def spec(cls) -> TensorSpec:
        """The shape and dtype that the type requires."""
        return cls._spec

    @property
    def framework(cls) -> Framework | None:
        """The framework of the type's values, imported if necessary; None for any."""
        return get_framework(cls._framework_name, needed_for=cls.__name__) if cls._framework_name else None

    def _holds(cls, value: object) -> bool:
        """Return whether the value is a tensor of the type's framework, whatever its shape."""
        framework = framework_of(value)
        if framework is None or cls._framework_name is None:
            return framework is not None
        return framework.name == cls._framework_name and framework.unwrap(value) is value

    def _explain(cls, value: object) -> str | None:
        """Return why the value is not of this type; None if it is."""
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

    def _check(cls, value: Any) -> Tensor:
        """Return the value if it is of this type; pydantic calls this in strict mode."""
        actual = cls._explain(value)
        if actual is not None:
            raise cls._mismatch(actual)
        return value

    def _check_json(cls, value: Any) -> Tensor:
        """Validate a tensor in its own JSON form, which counts as strict in JSON."""
        return cls._validate(value) if isinstance(value, Mapping) else cls._check(value)

    def _validate(cls, value: Any) -> Tensor:
        """Return the value, converted if nothing is lost; pydantic calls this in lax mode."""
        if not cls._holds(value):
            actual = describe(value)
            try:
                check_source(value)
                value = cls._coerce(value)
            except TensorError as error:
                raise cls._mismatch(f"{actual}: {error}") from None
        return cls._check(value)

    def _read(cls, content: Mapping[str, Any]) -> Tensor:
        """Read a tensor in JSON that this type's framework wrote; reject those of other frameworks."""
        if cls._framework_name not in (None, content.get("framework")):
            raise cls._mismatch(f"a tensor of {content.get('framework')!r}")
        return cls._validate(content)

    def _coerce(cls, value: Any) -> Tensor:
        return coerce(value, cls.framework, cls._spec)

    def _mismatch(cls, actual: str) -> PydanticCustomError:
        expected = f"{cls._plain.__name__} {cls._spec}"
        return PydanticCustomError("tensor", "expected {expected}, got {got}", {"expected": expected, "got": actual})

    def _validator(cls) -> Callable[[Any], Any]:
        """Return the lax validator, with a fast path for the common case.

        The first value goes the slow way and fixes the framework's class and dtype. After that a value of exactly this
        class, with the fixed shape and dtype of the spec, needs three comparisons. Frameworks of which documents refuse
        some values (`refuses_some`) always go the slow way.
        """
        shape, dtype, slow = cls._spec.fixed_shape, cls._spec.dtype, cls._validate
        native: Any = None
        native_dtype: Any = None

        def learn(value: Any) -> Tensor:
            nonlocal native, native_dtype
            checked = slow(value)
            framework = cls.framework
            if framework is not None and not framework.refuses_some and cls._holds(checked):
                native, native_dtype = type(checked), framework.native_dtype(dtype) if dtype else None
            return checked

        def fixed_shape(value: Tensor) -> Tensor:
            if type(value) is native and value.shape == shape and (dtype is None or value.dtype == native_dtype):
                return value
            return learn(value)

        def any_shape(value: Tensor) -> Tensor:
            if type(value) is native:
                return value
            return learn(value)

        if shape is not None and cls._spec.dtypes is None:
            return fixed_shape
        return any_shape if cls._spec == TensorSpec() else slow

    def core_schema(cls) -> CoreSchema:
        """Return pydantic's schema for a field of this type."""

        def describe_json(_: CoreSchema, __: GetJsonSchemaHandler) -> dict[str, Any]:
            return json_schema(cls.__name__, cls._spec)

        return core_schema.lax_or_strict_schema(
            lax_schema=core_schema.no_info_plain_validator_function(cls._validator()),
            strict_schema=core_schema.json_or_python_schema(
                core_schema.no_info_plain_validator_function(cls._check_json),
                core_schema.no_info_plain_validator_function(cls._check),
            ),
            serialization=core_schema.plain_serializer_function_ser_schema(_serialize, info_arg=True, when_used="json"),
            metadata={"quire_tensor": cls, "pydantic_js_functions": [describe_json]},
        )

    def __get_pydantic_core_schema__(cls, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return cls.core_schema()


def _serialize(value: Tensor, info: SerializationInfo) -> object:
    """Write a tensor as JSON, in the form that the serialization context states: `{'tensors': 'base64'}`."""
    context = info.context
    return tensor_to_json(value, context.get("tensors") if isinstance(context, Mapping) else None)


def _create_type(plain: TensorType, spec: TensorSpec) -> TensorType:
    shape = ["()"] if spec.shape == () else ["..." if d is Ellipsis else repr(d) for d in spec.shape or ()]
    name = f"{plain.__name__}[{', '.join(([spec.dtype_text] if spec.dtype_text else []) + shape)}]"
    namespace = {
        "_spec": spec,
        "__module__": _parametrize.__name__,
        "__qualname__": _parametrize.publish(name),
        "__doc__": plain.__doc__,
        "__slots__": (),
    }
    tensor_type = _types[plain, spec] = type(plain)(name, (plain,), namespace)
    _parametrize.register(tensor_type)
    return tensor_type


def _rebuild(plain: TensorType, spec: TensorSpec) -> TensorType:
    return plain._with(spec)


def reduce_tensor_type(cls: TensorType) -> str | tuple[Callable[..., Any], tuple[Any, ...]]:
    """Pickle parametrised types by recipe, plain ones by name."""
    return (_rebuild, (cls._plain, cls._spec)) if cls is not cls._plain else cls.__qualname__


copyreg.pickle(TensorType, reduce_tensor_type)


def parse_parameters(parameters: tuple[Any, ...]) -> TensorSpec:
    """Parse (float32, 3, 'h', 'w') to a spec: at most one dtype, and dimensions; (float32, ()) has no dimensions."""
    dtypes = [p for p in parameters if looks_like_dtype(p)]
    if len(dtypes) > 1:
        raise SchemaError(f"A tensor has one dtype, got {', '.join(map(repr, dtypes))}.")
    shape = tuple(p for p in parameters if not looks_like_dtype(p))
    if not dtypes:
        return TensorSpec(shape)
    return TensorSpec(() if shape == ((),) else shape or None, dtype_name(dtypes[0]))


def describe(value: object) -> str:
    """Describe a value for an error message: dtype, shape and framework of a tensor, else its type and a short repr."""
    framework = framework_of(value)
    if framework is not None:
        shape, layout = format_shape(framework.shape(value)), framework.layout(value)
        return f"{framework.dtype(value)} {shape} of {framework.name}" + ("" if layout == "dense" else f", {layout}")
    if isinstance(value, type):
        return f"the class {value.__name__}"
    text = repr(value) if isinstance(value, (str, bytes, int, float, bool, type(None))) else ""
    return f"{type(value).__name__} {text[:40]}".strip()


# --- one type per framework; TensorFlow's is a wrapper and is defined in _tensorflow.py


class NdArray(metaclass=TensorType, framework="numpy"):
    """A numpy array: `NdArray`, `NdArray[3, 'h', 'w']`, `NdArray[float32, 3, ...]`."""


class TorchTensor(metaclass=TensorType, framework="torch"):
    """A torch tensor: `TorchTensor`, `TorchTensor[3, 'h', 'w']`, `TorchTensor[float32, 3, ...]`."""


class JaxArray(metaclass=TensorType, framework="jax"):
    """A jax array: `JaxArray`, `JaxArray[3, 'h', 'w']`, `JaxArray[float32, 3, ...]`."""


class PaddleTensor(metaclass=TensorType, framework="paddle"):
    """A paddle tensor: `PaddleTensor`, `PaddleTensor[3, 'h', 'w']`, `PaddleTensor[float32, 3, ...]`."""


class NativeTensorFlow(metaclass=TensorType, framework="tensorflow"):
    """A TensorFlow tensor without quire's wrapper: the value of a field annotated `tf.Tensor`."""


class AnyTensor(metaclass=TensorType):
    """A tensor of any framework, kept as it is; a list becomes a numpy array."""


_PLAIN_TYPES: dict[str, TensorType] = {
    "numpy": NdArray,
    "torch": TorchTensor,
    "jax": JaxArray,
    "paddle": PaddleTensor,
    "tensorflow": NativeTensorFlow,
}


def plain_tensor_type(framework: str) -> TensorType:
    """Return the type of all tensors of a framework."""
    return _PLAIN_TYPES.get(framework, AnyTensor)


# --- `Annotated[torch.Tensor, Shape(3, 224, 224), DType('float32')]`, which static type checkers understand


class _SpecPart(ABC):
    """A part of a tensor's spec, written inside `Annotated`."""

    __slots__ = ()
    __quire_plain__ = True  # the tensor type checks it

    @abstractmethod
    def refine(self, spec: TensorSpec) -> TensorSpec:
        """Return the spec with this part replaced."""

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        members = get_args(source) if get_origin(source) in (Union, UnionType) else ()
        if len(members) == 2 and members[1] is type(None):
            return core_schema.nullable_schema(self.__get_pydantic_core_schema__(members[0], handler))
        try:
            inner = handler(source)
        except PydanticSchemaGenerationError:  # pydantic has no schema for torch.Tensor, and none is needed
            inner = {}
        tensor_type = inner.get("metadata", {}).get("quire_tensor") or native_tensor_type(source)
        if tensor_type is None:
            raise SchemaError(f"{self!r} describes a tensor, but {source!r} is none.")
        return tensor_type._with(self.refine(tensor_type.spec)).core_schema()


@dataclass(frozen=True, init=False)
class Shape(_SpecPart):
    """The shape of an annotated tensor: sizes, names, and `...` for any number of dimensions."""

    dimensions: tuple[Dimension, ...]

    def __init__(self, *dimensions: Dimension) -> None:
        TensorSpec(dimensions)  # raises for invalid dimensions
        object.__setattr__(self, "dimensions", dimensions)

    def refine(self, spec: TensorSpec) -> TensorSpec:
        return replace(spec, shape=self.dimensions)


@dataclass(frozen=True, init=False)
class DType(_SpecPart):
    """The dtype of an annotated tensor, by its common name or as any framework's dtype object."""

    name: str

    def __init__(self, dtype: DTypeObject) -> None:
        object.__setattr__(self, "name", dtype_name(dtype))

    def refine(self, spec: TensorSpec) -> TensorSpec:
        return replace(spec, dtype=self.name, dtypes=None)


def tensor_type_of(annotation: Any, metadata: Iterable[Any] = ()) -> TensorType | None:
    """Return the tensor type of an annotation with its metadata, or None if it is not a tensor."""
    tensor_type = annotation if isinstance(annotation, TensorType) else native_tensor_type(annotation)
    for extra in metadata:
        if tensor_type is not None and isinstance(extra, _SpecPart):
            tensor_type = tensor_type._with(extra.refine(tensor_type.spec))
    return tensor_type


def native_tensor_type(annotation: Any) -> TensorType | None:
    """Return the tensor type of a framework's own class.

    torch.Tensor is TorchTensor, NDArray[np.uint8] is NdArray[uint8], and jaxtyping's Float32[torch.Tensor, "3 h"] is
    TorchTensor[float32, 3, 'h']. A numpy scalar type that is no dtype of tensors, like np.floating, is ignored.
    """
    annotation = expand_alias(annotation)
    if is_jaxtyping(annotation):
        tensor_type = AnyTensor if annotation.array_type is Any else native_tensor_type(annotation.array_type)
        if tensor_type is None:
            raise SchemaError(f"{annotation!r}: {annotation.array_type!r} is not a class of tensors.")
        return tensor_type._with(spec_of_jaxtyping(annotation))
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is np.ndarray:
        scalar = next(iter(get_args(arguments[-1])), None)
        try:
            return NdArray._with(TensorSpec(dtype=dtype_name(scalar)))
        except SchemaError:
            return NdArray
    if not isinstance(annotation, type) or isinstance(annotation, TensorType):
        return None
    framework = framework_of_type(annotation)
    if framework is None or annotation is not framework.native:
        return None
    return _PLAIN_TYPES.get(framework.name)


def expand_alias(annotation: Any) -> Annotation:
    """Return what a type alias (`type Pair[T] = tuple[T, T]`, numpy's NDArray) stands for; others are unchanged."""
    if not hasattr(annotation, "__value__"):
        return annotation
    value, arguments = annotation.__value__, get_args(annotation)
    bound = dict(zip(getattr(annotation, "__type_params__", ()), arguments, strict=False))
    parameters = getattr(value, "__parameters__", ())
    if not bound or not parameters:
        return value
    return value[tuple(bound.get(parameter, parameter) for parameter in parameters)]
