"""`Annotated[torch.Tensor, Shape(3, 224, 224), DType('float32')]`: the spelling that static checkers understand."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from types import UnionType
from typing import Any, Union, get_args, get_origin

import numpy as np
from pydantic import PydanticSchemaGenerationError
from pydantic_core import CoreSchema, core_schema

from quire.errors import SchemaError
from quire.tensors._registry import framework_of_type
from quire.tensors._spec import Dimension, TensorSpec, dtype_name
from quire.tensors._type import TensorType
from quire.tensors._types import AnyTensor, JaxArray, NativeTensorFlow, NdArray, PaddleTensor, TorchTensor

_PLAIN_TYPES: dict[str, TensorType] = {
    "numpy": NdArray,
    "torch": TorchTensor,
    "jax": JaxArray,
    "paddle": PaddleTensor,
    "tensorflow": NativeTensorFlow,
}


def plain_tensor_type(framework: str) -> TensorType:
    """The type of all tensors of a framework."""
    return _PLAIN_TYPES.get(framework, AnyTensor)


class _Annotation(ABC):
    """A part of a tensor's spec, written inside `Annotated`."""

    __slots__ = ()
    __quire_plain__ = True  # part of the tensor type, so nothing more to check

    @abstractmethod
    def refine(self, spec: TensorSpec) -> TensorSpec:
        """The spec with this part put in."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        members = get_args(source) if get_origin(source) in (Union, UnionType) else ()
        if len(members) == 2 and members[1] is type(None):
            return core_schema.nullable_schema(self.__get_pydantic_core_schema__(members[0], handler))
        try:
            inner = handler(source)
        except PydanticSchemaGenerationError:  # pydantic takes no torch.Tensor, and it need not
            inner = {}
        known = inner.get("metadata", {}).get("quire_tensor") or native_tensor_type(source)
        if known is None:
            raise SchemaError(f"{self!r} describes a tensor, but {source!r} is none.")
        return known._with(self.refine(known.spec)).core_schema()


@dataclass(frozen=True, init=False)
class Shape(_Annotation):
    """The shape of an annotated tensor: sizes, names, and `...` for any number of dimensions."""

    dimensions: tuple[Dimension, ...]

    def __init__(self, *dimensions: Dimension) -> None:
        TensorSpec(dimensions)  # refuses what is not a dimension
        object.__setattr__(self, "dimensions", dimensions)

    def refine(self, spec: TensorSpec) -> TensorSpec:
        return replace(spec, shape=self.dimensions)


@dataclass(frozen=True, init=False)
class DType(_Annotation):
    """The dtype of an annotated tensor, by its common name or as any framework's dtype object."""

    name: str

    def __init__(self, dtype: Any) -> None:
        object.__setattr__(self, "name", dtype_name(dtype))

    def refine(self, spec: TensorSpec) -> TensorSpec:
        return replace(spec, dtype=self.name)


def native_tensor_type(annotation: Any) -> TensorType | None:
    """The tensor type of a framework's own class: torch.Tensor is TorchTensor, NDArray[np.uint8] is NdArray[uint8]."""
    annotation = expand_alias(annotation)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is np.ndarray:
        return _array_type(*get_args(arguments[-1]))
    if not isinstance(annotation, type) or isinstance(annotation, TensorType):
        return None
    framework = framework_of_type(annotation)
    if framework is None or annotation is not framework.native:
        return None
    return _PLAIN_TYPES.get(framework.name)


def expand_alias(annotation: Any) -> Any:
    """What a type alias (`type Pair[T] = tuple[T, T]`, and numpy's NDArray) stands for; anything else as it is."""
    if not hasattr(annotation, "__value__"):
        return annotation
    value, arguments = annotation.__value__, get_args(annotation)
    given = dict(zip(getattr(annotation, "__type_params__", ()), arguments, strict=False))
    wanted = getattr(value, "__parameters__", ())
    return value[tuple(given.get(parameter, parameter) for parameter in wanted)] if given and wanted else value


def _array_type(scalar: Any = None) -> TensorType:
    """The type of arrays of a numpy scalar: one that is no dtype of tensors, like np.floating, says nothing."""
    try:
        return NdArray._with(TensorSpec(dtype=dtype_name(scalar)))
    except SchemaError:
        return NdArray


def tensor_type_of(annotation: Any, metadata: Iterable[Any] = ()) -> TensorType | None:
    """The tensor type that an annotation with its metadata means, or None if it is not a tensor."""
    found = annotation if isinstance(annotation, TensorType) else native_tensor_type(annotation)
    for extra in metadata:
        if found is not None and isinstance(extra, _Annotation):
            found = found._with(extra.refine(found.spec))
    return found
