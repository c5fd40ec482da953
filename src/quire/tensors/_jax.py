"""jax arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from quire.errors import TensorError
from quire.tensors._framework import DTypeObject, Framework, Tensor, arrays_equal, common_dtype
from quire.tensors._numpy import native_array

if TYPE_CHECKING:
    from numpy.typing import NDArray

_config: Any = jax.config
_WIDE = ("float64", "int64", "uint64", "complex128")  # narrowed by jax unless jax_enable_x64 is set


class JaxFramework(Framework):
    """jax.Array."""

    name = "jax"
    native = jax.Array

    @property
    def default_dtypes(self) -> dict[str, str]:  # type: ignore[override]
        return {"f": "float32", "i": "int64" if _config.jax_enable_x64 else "int32", "c": "complex64"}

    def handles(self, tp: type[Any]) -> bool:
        return issubclass(tp, (jax.Array, jax.core.Tracer))

    def dtype(self, value: Tensor) -> str:
        return str(value.dtype.name)

    def native_dtype(self, name: str) -> DTypeObject:
        return common_dtype(name)

    def device(self, value: Tensor) -> str:
        return str(value.device)

    def to_numpy(self, value: Tensor) -> NDArray[Any]:
        if _is_key(value):
            raise TensorError(f"numpy has no dtype {self.dtype(value)!r} (use jax.random.key_data).")
        return np.asarray(value)

    def from_numpy(self, array: NDArray[Any]) -> Tensor:
        array = native_array(array, "jax")
        if array.dtype.name in _WIDE and not _config.jax_enable_x64:
            raise TensorError(
                f"jax would cut {array.dtype.name} to 32 bits. Switch its 64-bit types on "
                "(jax.config.update('jax_enable_x64', True)) or cast the values before."
            )
        return jnp.asarray(array)

    def stack(self, values: Sequence[Any]) -> Tensor:
        return jnp.stack(values)

    def concat(self, columns: Sequence[Any]) -> Tensor:
        return jnp.concatenate(columns)

    def take(self, column: Tensor, indices: NDArray[np.int64]) -> Tensor:
        return column[indices]

    def zeros(self, shape: tuple[int, ...], dtype: str, like: Tensor = None) -> Tensor:
        return self.from_numpy(np.zeros(shape, common_dtype(dtype)))

    def equal(self, a: Tensor, b: Tensor) -> bool:
        if a.dtype != b.dtype or a.shape != b.shape or a.devices() != b.devices():
            return False
        if _is_key(a):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        return arrays_equal(np.asarray(a), np.asarray(b))

    def to_device(self, value: Tensor, device: object, *, non_blocking: bool = False) -> Tensor:
        return jax.device_put(value, jax.devices(device)[0] if isinstance(device, str) else device)

    def cast(self, value: Tensor, dtype: str) -> Tensor:
        return value.astype(self.native_dtype(dtype))

    def unstack(self, column: Tensor) -> list[Any]:
        return list(column)

    def convertible(self, value: Tensor) -> str | None:
        if isinstance(value, jax.core.Tracer):
            return "it is traced, inside a jax transformation"
        if any(device.platform != "cpu" for device in value.devices()):
            return f"it is on {self.device(value)} (use jax.device_put)"
        return super().convertible(value)


def _is_key(value: Tensor) -> bool:
    return bool(jnp.issubdtype(value.dtype, jax.dtypes.prng_key))


framework = JaxFramework()
