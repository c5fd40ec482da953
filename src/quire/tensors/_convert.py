"""Lossless conversions; everything else is a TensorError that says what would be lost."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.errors import TensorError
from quire.tensors._framework import MAX_DEPTH, Framework, Tensor, array_of, cast_numbers, common_dtype
from quire.tensors._json import tensor_from_json
from quire.tensors._registry import framework_of, get_framework

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quire.tensors._spec import TensorSpec

_IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
_MAX_NAME = 200  # characters of a name in a message


def to_framework(value: Tensor, target: Framework) -> Tensor:
    """Convert a tensor to another framework, with the same dtype and shape."""
    source = framework_of(value)
    if source is None:
        raise TensorError(f"{type(value).__name__} is not a tensor.")
    if source is target:
        return source.unwrap(value)
    reason = source.convertible(value)
    if reason is not None:
        raise TensorError(f"a {source.name} tensor cannot become a {target.name} tensor as it is: {reason}.")
    return target.from_numpy(source.to_numpy(value))


def check_source(value: object) -> None:
    """Raise for a value that cannot become a tensor, before a framework is imported for it."""
    if isinstance(value, (list, tuple, Mapping, np.generic)) or framework_of(value) is not None:
        return
    name = str(value) if isinstance(value, (str, PurePath)) else ""
    is_image = name.lower().endswith(_IMAGE_SUFFIXES) and len(name) <= _MAX_NAME
    advice = f"; ImageUrl({name!r}).load() reads the picture" if is_image else ""
    raise TensorError(f"{type(value).__name__} is not a tensor{advice}")


def coerce(value: Any, target: Framework | None, spec: TensorSpec) -> Tensor:
    """Convert a value that is not such a tensor for a field of a tensor type; `None` accepts any framework."""
    if isinstance(value, (list, tuple)):
        return _from_list(value, target or get_framework("numpy"), spec)
    if isinstance(value, Mapping):
        return tensor_from_json(value, target)
    if isinstance(value, np.generic):
        value = np.asarray(value)
    return value if target is None else to_framework(value, target)


def _from_list(values: list[Any] | tuple[Any, ...], target: Framework, spec: TensorSpec) -> Tensor:
    # The first number decides for all: a list of tensors is converted by numpy, a list of plain numbers by us.
    first: Any = values
    for _ in range(MAX_DEPTH):
        if not isinstance(first, (list, tuple)) or not first:
            break
        first = first[0]
    framework = framework_of(first)
    reason = None if framework is None else framework.convertible(first)
    if reason is not None:
        raise TensorError(f"the list holds a tensor that cannot be copied as it is: {reason}")
    try:
        array = np.array(values) if framework is not None else array_of(values)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise TensorError(f"the list does not make a tensor ({error})") from None
    if array.size and target.name == "tensorflow" and all(isinstance(item, str) for item in array.flat):
        return target.from_numpy(array)
    if not array.size:
        # An empty list cannot express the further axes of the spec.
        if array.ndim == 1 and spec.shape and Ellipsis not in spec.shape:
            array = array.reshape(0, *(size if isinstance(size, int) else 0 for size in spec.shape[1:]))
    elif array.dtype.kind not in "biufc":
        raise TensorError("the list holds something else than numbers")
    # np.float32(0.5) has a dtype to keep; np.float64(0.5) is a plain 0.5.
    keeps_dtype = isinstance(first, np.generic) and first.dtype.name not in ("bool", "int64", "float64", "complex128")
    if framework is not None or keeps_dtype:
        return target.from_numpy(array)
    return target.from_numpy(cast_numbers(array, common_dtype(spec.dtype or _default_dtype(array, target, spec))))


def _default_dtype(array: NDArray[Any], target: Framework, spec: TensorSpec) -> str:
    """Return the framework's dtype for numbers of this kind, or for a wider kind if the spec does not accept it."""
    own: str = target.default_dtypes.get(array.dtype.kind, array.dtype.name)
    wider = {"i": "fc", "u": "fc", "f": "c"}.get(array.dtype.kind, "")
    names = [own, *(target.default_dtypes[kind] for kind in wider)]
    return next((name for name in names if spec.accepts(name)), names[0])
