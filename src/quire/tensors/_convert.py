"""Conversions that lose nothing; everything else is a TensorError that says what would be lost."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.errors import TensorError
from quire.tensors._framework import DEEPEST, Framework, array_of, cast_numbers, common_dtype
from quire.tensors._json import tensor_from_json
from quire.tensors._registry import framework_of, get_framework

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quire.tensors._spec import TensorSpec

_PICTURES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
_LONGEST = 200  # characters of a name in a message


def to_framework(value: Any, target: Framework) -> Any:
    """A tensor as another framework's, of the same dtype and shape."""
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
    """Refuse what cannot become a tensor, before a framework is imported for it."""
    if not isinstance(value, (list, tuple, Mapping, np.generic)) and framework_of(value) is None:
        raise TensorError(f"{type(value).__name__} is not a tensor{_advice(value)}")


def _advice(value: object) -> str:
    """How the name of a picture becomes a tensor; nothing for any other value."""
    name = str(value) if isinstance(value, (str, PurePath)) else ""
    if not name.lower().endswith(_PICTURES):
        return ""
    return f"; ImageUrl({name!r}).load() reads the picture" if len(name) <= _LONGEST else ""


def coerce(value: Any, target: Framework | None, spec: TensorSpec) -> Any:
    """What a field of a tensor type makes of a value that is not such a tensor; `None` takes any framework."""
    if isinstance(value, (list, tuple)):
        return _from_list(value, target or get_framework("numpy"), spec)
    if isinstance(value, Mapping):
        return tensor_from_json(value, target)
    if isinstance(value, np.generic):
        value = np.asarray(value)
    return value if target is None else to_framework(value, target)


def _from_list(values: list[Any] | tuple[Any, ...], target: Framework, spec: TensorSpec) -> Any:
    first = _first(values)
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
        array = _with_axes(array, spec)
    elif array.dtype.kind not in "biufc":
        raise TensorError("the list holds something else than numbers")
    if framework is not None or _has_width(first):
        return target.from_numpy(array)
    dtype = spec.dtype or target.default_dtypes.get(array.dtype.kind, array.dtype.name)
    return target.from_numpy(cast_numbers(array, common_dtype(dtype)))


def _first(values: Any) -> Any:
    """The first thing in nested lists that is not a list."""
    for _ in range(DEEPEST):
        if not isinstance(values, (list, tuple)) or not values:
            break
        values = values[0]
    return values


def _has_width(value: object) -> bool:
    """Whether a number has a dtype to keep: np.float32(0.5) has, and 0.5, which np.float64(0.5) is as well, has not."""
    return isinstance(value, np.generic) and value.dtype.name not in ("bool", "int64", "float64", "complex128")


def _with_axes(array: NDArray[Any], spec: TensorSpec) -> NDArray[Any]:
    """An empty list says nothing of the axes behind its first, so they are taken from the spec."""
    if array.ndim != 1 or not spec.shape or Ellipsis in spec.shape:
        return array
    return array.reshape(0, *(size if isinstance(size, int) else 0 for size in spec.shape[1:]))
