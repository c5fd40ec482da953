"""TensorFlow tensors, dense and sparse, and quire's wrapper, which TensorFlow accepts as a tensor.

TensorFlow's eager tensor cannot be subclassed, so a field typed `TensorFlowTensor` holds a wrapper. The wrapper derives
from TensorFlow's abstract tensor and implements its conversion protocol (`__tf_tensor__`).
"""

from __future__ import annotations

import copy
import copyreg
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from quire.errors import TensorError
from quire.tensors._framework import DTypeObject, Framework, Tensor, arrays_equal
from quire.tensors._numpy import native_array
from quire.tensors._types import TensorType, reduce_tensor_type

if TYPE_CHECKING:
    from numpy.typing import NDArray

_AbstractTensor: Any = tf.__internal__.types.Tensor


class TensorFlowFramework(Framework):
    """tf.Tensor, tf.Variable, tf.SparseTensor, tf.RaggedTensor and quire's wrapper of them."""

    name = "tensorflow"
    native = tf.Tensor

    def handles(self, tp: type[Any]) -> bool:
        return issubclass(tp, (_AbstractTensor, tf.SparseTensor, tf.RaggedTensor))

    def shape(self, value: Tensor) -> tuple[int, ...]:
        return tuple(-1 if size is None else size for size in unwrap(value).shape)

    def dtype(self, value: Tensor) -> str:
        return str(value.dtype.name)

    def native_dtype(self, name: str) -> DTypeObject:
        try:
            return tf.dtypes.as_dtype(name)
        except TypeError:
            raise TensorError(f"tensorflow has no dtype {name!r}.") from None

    def device(self, value: Tensor) -> str:
        return str(unwrap(value).device)

    def layout(self, value: Tensor) -> str:
        value = unwrap(value)
        if isinstance(value, tf.SparseTensor):
            return "coo"
        return "ragged" if isinstance(value, tf.RaggedTensor) else "dense"

    def unwrap(self, value: Tensor) -> Tensor:
        return unwrap(value)

    def wrap(self, value: Tensor) -> Tensor:
        return TensorFlowTensor(value)

    def to_coo(self, value: Tensor) -> tuple[NDArray[np.int64], NDArray[Any]]:
        value = unwrap(value)
        if not isinstance(value, tf.SparseTensor):
            raise TensorError("A ragged tensor has no sparse form; call .to_sparse() or .to_tensor() yourself.")
        value = tf.sparse.reorder(value)
        return np.ascontiguousarray(value.indices.numpy().T), value.values.numpy()

    def from_coo(self, indices: NDArray[np.int64], values: NDArray[Any], shape: tuple[int, ...], layout: str) -> Tensor:
        if layout != "coo":
            raise TensorError(f"tensorflow has no sparse layout {layout!r}.")
        return tf.SparseTensor(np.ascontiguousarray(indices.T), self.from_numpy(values), shape)

    def to_numpy(self, value: Tensor) -> NDArray[Any]:
        value = unwrap(value)
        array: NDArray[Any] = np.asarray(value.numpy(), dtype=object if value.dtype == tf.string else None)
        return array

    def from_numpy(self, array: NDArray[Any]) -> Tensor:
        if array.dtype.kind == "O":
            return tf.constant(array, dtype=tf.string)
        return tf.constant(native_array(array, "tensorflow"), dtype=self.native_dtype(array.dtype.name))

    def stack(self, values: Sequence[Any]) -> Tensor:
        return tf.stack([unwrap(value) for value in values])

    def concat(self, columns: Sequence[Any]) -> Tensor:
        return tf.concat(columns, axis=0)

    def take(self, column: Tensor, indices: NDArray[np.int64]) -> Tensor:
        return tf.gather(column, indices)

    def zeros(self, shape: tuple[int, ...], dtype: str, like: Tensor = None) -> Tensor:
        return tf.zeros(shape, self.native_dtype(dtype))

    def equal(self, a: Tensor, b: Tensor) -> bool:
        a, b = unwrap(a), unwrap(b)
        if type(a) is not type(b) or a.dtype != b.dtype or self.shape(a) != self.shape(b):
            return False
        if isinstance(a, tf.SparseTensor):
            return all(arrays_equal(x, y) for x, y in zip(self.to_coo(a), self.to_coo(b), strict=True))
        if isinstance(a, tf.RaggedTensor):
            parts = zip([a.flat_values, *a.nested_row_splits], [b.flat_values, *b.nested_row_splits], strict=True)
            return all(arrays_equal(x.numpy(), y.numpy()) for x, y in parts)
        return a.device == b.device and arrays_equal(self.to_numpy(a), self.to_numpy(b))

    def cast(self, value: Tensor, dtype: str) -> Tensor:
        return tf.cast(value, self.native_dtype(dtype))

    def to_device(self, value: Tensor, device: object, *, non_blocking: bool = False) -> Tensor:
        with tf.device(device):
            return tf.identity(value)

    def unstack(self, column: Tensor) -> list[Any]:
        return list(tf.unstack(column))

    def reshape(self, value: Tensor, shape: tuple[int, ...]) -> Tensor:
        return tf.reshape(unwrap(value), shape)

    def pad(self, value: Tensor, shape: tuple[int, ...]) -> Tensor:
        value = unwrap(value)
        return tf.pad(value, [(0, want - have) for want, have in zip(shape, value.shape, strict=True)])

    def convertible(self, value: Tensor) -> str | None:
        if value.dtype == tf.string:
            return "it holds strings"
        value = unwrap(value)
        if isinstance(value, tf.Variable):
            return "it is a tf.Variable, which changes (use tf.convert_to_tensor)"
        if not tf.is_symbolic_tensor(value) and self.layout(value) == "dense" and "CPU" not in value.device:
            return f"it is on {value.device} (use tf.identity under tf.device)"
        return "it is symbolic, inside a tf.function" if tf.is_symbolic_tensor(value) else super().convertible(value)


class TensorFlowType(TensorType):
    """The metaclass of the wrapper: its values are wrappers, not TensorFlow's own objects."""

    def _holds(cls, value: object) -> bool:
        return type.__instancecheck__(TensorFlowTensor, value)

    def _coerce(cls, value: Any) -> Tensor:
        if isinstance(value, (tf.Tensor, tf.Variable, tf.SparseTensor, tf.RaggedTensor)):
            return TensorFlowTensor(value)
        return TensorFlowTensor(super()._coerce(value))

    def __call__(cls, tensor: Tensor) -> Tensor:
        if cls is not TensorFlowTensor:
            return TensorType.__call__(cls, tensor)
        return type.__call__(cls, tensor)


class TensorFlowTensor(_AbstractTensor, metaclass=TensorFlowType, framework="tensorflow"):  # type: ignore[misc]
    """A TensorFlow tensor in a field: `TensorFlowTensor`, `TensorFlowTensor[3, 'h', 'w']`.

    TensorFlow functions, operators on both sides, `tf.function`, `tf.GradientTape`, Keras and `tf.data` accept it
    directly. `.tensor` and `.unwrap()` return the wrapped object: a dense tensor (strings included), a
    `tf.SparseTensor`, or a `tf.Variable`, which is referenced, not copied: a later `assign` is visible. Ragged tensors
    are refused, because most of TensorFlow does not accept them as tensors; a field typed `AnyTensor` holds one.
    """

    __slots__ = ("tensor",)
    __hash__ = None  # type: ignore[assignment]
    __array_priority__ = 100  # so that numpy's operators leave the work to __radd__ and the like

    def __init__(self, tensor: Tensor) -> None:
        tensor = unwrap(tensor)
        if isinstance(tensor, tf.RaggedTensor):
            raise TensorError(
                "TensorFlowTensor holds no ragged tensor: call .to_tensor() to pad it, or type the field AnyTensor."
            )
        if not isinstance(tensor, (tf.Tensor, tf.Variable, tf.SparseTensor)):
            tensor = TensorType._coerce(TensorFlowTensor, tensor)
        object.__setattr__(self, "tensor", tensor)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"A TensorFlowTensor does not change: make a new one instead of setting {name!r}.")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"A TensorFlowTensor does not change: {name!r} cannot be deleted.")

    def unwrap(self) -> Tensor:
        """Return TensorFlow's own object."""
        return self.tensor

    @property
    def shape(self) -> tf.TensorShape:
        return self.tensor.shape

    @property
    def dtype(self) -> DTypeObject:
        return self.tensor.dtype

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "tensor"), name)

    def __tf_tensor__(self, dtype: DTypeObject = None, name: str | None = None) -> Tensor:
        return tf.convert_to_tensor(self.tensor, dtype=dtype, name=name)

    def __tf_flatten__(self) -> tuple[Any, tuple[Any, ...]]:
        return (), (self.tensor,)  # so that a GradientTape watches the wrapped tensor

    @classmethod
    def __tf_unflatten__(cls, metadata: object, components: Sequence[Any]) -> Tensor:
        return components[0]

    def __array__(self, dtype: DTypeObject = None, copy: bool | None = None) -> NDArray[Any]:
        array = np.asarray(self.tensor.numpy(), dtype=dtype)
        return array.copy() if copy else array

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return TensorFlowTensor, (self.tensor,)

    def __copy__(self) -> TensorFlowTensor:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorFlowTensor:
        return TensorFlowTensor(copy.deepcopy(self.tensor, memo))

    def __len__(self) -> int:
        return len(self.tensor)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.tensor)

    def __repr__(self) -> str:
        return f"TensorFlowTensor({self.tensor!r})"


_OPERATORS = (
    *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "floordiv", "rfloordiv", "mod", "rmod"),
    *("pow", "rpow", "matmul", "rmatmul", "and", "rand", "or", "ror", "xor", "rxor", "neg", "abs", "invert"),
    *("eq", "ne", "lt", "le", "gt", "ge", "getitem", "bool", "float", "int", "index", "complex", "format"),
)


def _create_operator(name: str) -> Callable[..., Any]:
    def apply(self: TensorFlowTensor, *others: Any) -> Tensor:
        return getattr(self.tensor, name)(*(unwrap(other) for other in others))

    apply.__name__ = name
    return apply


for _name in _OPERATORS:
    setattr(TensorFlowTensor, f"__{_name}__", _create_operator(f"__{_name}__"))


def unwrap(value: Tensor) -> Tensor:
    """Return TensorFlow's own object of a wrapper; other values are unchanged."""
    return value.tensor if type.__instancecheck__(TensorFlowTensor, value) else value


copyreg.pickle(TensorFlowType, reduce_tensor_type)
framework = TensorFlowFramework()
