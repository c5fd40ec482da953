"""Conversions that lose nothing; everything else is a TensorError that says what would be lost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.errors import TensorError
from quire.tensors._framework import Framework, common_dtype
from quire.tensors._json import tensor_from_json
from quire.tensors._registry import framework_of, get_framework

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quire.tensors._spec import TensorSpec


def to_framework(value: Any, target: Framework) -> Any:
    """A tensor as another framework's, of the same dtype and shape."""
    source = framework_of(value)
    if source is None:
        raise TensorError(f"{type(value).__name__} is not a tensor.")
    if source is target:
        return value
    reason = source.convertible(value)
    if reason is not None:
        raise TensorError(f"a {source.name} tensor cannot become a {target.name} tensor as it is: {reason}.")
    return target.from_numpy(source.to_numpy(value))


def coerce(value: Any, target: Framework | None, spec: TensorSpec) -> Any:
    """What a field of a tensor type makes of a value that is not such a tensor; `None` takes any framework."""
    if isinstance(value, (list, tuple)):
        return _from_list(value, target or get_framework("numpy"), spec)
    if isinstance(value, Mapping):
        return tensor_from_json(value, target)
    if isinstance(value, np.generic):
        value = np.asarray(value)
    elif framework_of(value) is None:
        raise TensorError(f"{type(value).__name__} is not a tensor")
    return value if target is None else to_framework(value, target)


def _from_list(values: list[Any] | tuple[Any, ...], target: Framework, spec: TensorSpec) -> Any:
    try:
        array = np.array(values)
    except (ValueError, TypeError, RuntimeError) as error:
        raise TensorError(f"the list does not make a tensor ({error})") from None
    if not values:
        array = array.reshape(0, *(spec.fixed_shape or (0,))[1:])
    elif array.dtype.kind not in "biufc":
        raise TensorError("the list holds something else than numbers")
    dtype = spec.dtype or target.default_dtypes.get(array.dtype.kind, array.dtype.name)
    return target.from_numpy(_cast_numbers(array, common_dtype(dtype)))


def _cast_numbers(array: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Plain Python numbers have no width: floats may be rounded, but nothing overflows and no fraction is cut."""
    if array.dtype == dtype:
        return array
    with np.errstate(all="ignore"):
        cast = array.astype(dtype)
        if array.dtype.kind == "f" and (dtype.kind in "fc" or dtype.kind == "V"):
            kept = np.isfinite(cast.astype(np.complex128)) == np.isfinite(array)
        else:
            kept = cast.astype(array.dtype) == array
    lossy_kind = (array.dtype.kind, dtype.kind) in {("f", "i"), ("f", "u"), ("c", "f"), ("c", "i"), ("c", "u")}
    if array.size and (lossy_kind or dtype.kind == "b" or not kept.all()):
        raise TensorError(f"the numbers do not fit dtype {dtype.name}")
    return cast
