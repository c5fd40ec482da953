"""What quire asks of a tensor framework: one small class each, all with the same verbs."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from quire._optional import require
from quire.errors import TensorError

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Framework(ABC):
    """One tensor framework. Values are its own tensors; dtypes are told by their common names ('bfloat16')."""

    name: str
    native: type[Any]
    """The class that a dense tensor of the framework is an instance of."""
    default_dtypes: dict[str, str] = {"f": "float32", "i": "int64"}
    """The dtype of a tensor made from plain Python numbers, by kind (float, int)."""

    def __reduce__(self) -> str:
        return "framework"  # each framework's module holds one

    @abstractmethod
    def handles(self, tp: type[Any]) -> bool:
        """Whether values of this type are tensors of the framework, dense or sparse."""

    @abstractmethod
    def dtype(self, value: Any) -> str:
        """The dtype's common name."""

    @abstractmethod
    def native_dtype(self, name: str) -> Any:
        """The framework's own dtype of that name; TensorError where it has none."""

    @abstractmethod
    def to_numpy(self, value: Any) -> NDArray[Any]:
        """A dense tensor as numpy, without a copy where the memory can be shared."""

    @abstractmethod
    def from_numpy(self, array: NDArray[Any]) -> Any:
        """A tensor of the same dtype and shape, without a copy where the memory can be shared."""

    @abstractmethod
    def stack(self, values: Sequence[Any]) -> Any:
        """Dense tensors of one shape and dtype as one tensor with a new first axis."""

    @abstractmethod
    def concat(self, columns: Sequence[Any]) -> Any:
        """Join along the first axis."""

    @abstractmethod
    def take(self, column: Any, indices: NDArray[np.int64]) -> Any:
        """Rows by position, as a new tensor."""

    @abstractmethod
    def zeros(self, shape: tuple[int, ...], dtype: str, like: Any = None) -> Any:
        """A tensor of zeros, on the device of another tensor where one is given."""

    @abstractmethod
    def equal(self, a: Any, b: Any) -> bool:
        """Whether two tensors of the framework have one dtype, shape, device and layout, and equal values.

        NaN equals NaN.
        """

    @abstractmethod
    def to_device(self, value: Any, device: Any, *, non_blocking: bool = False) -> Any:
        """The tensor on another device."""

    def pin(self, value: Any) -> Any:
        """The tensor in pinned memory, from which it moves to an accelerator faster; itself where that means nothing."""
        return value

    def share(self, value: Any) -> Any:
        """The tensor moved, in place, into memory that other processes can map; itself where that means nothing."""
        return value

    def shape(self, value: Any) -> tuple[int, ...]:
        """The shape as plain integers."""
        return tuple(value.shape)

    def device(self, value: Any) -> str:
        """Where the tensor lives."""
        return "cpu"

    def layout(self, value: Any) -> str:
        """How the values lie in memory: 'dense', or the name of a sparse layout ('coo', 'csr')."""
        return "dense"

    def to_coo(self, value: Any) -> tuple[NDArray[np.int64], NDArray[Any]]:
        """Indices (dimensions, entries) and values of a sparse tensor."""
        raise TensorError(f"{self.name} has no sparse tensors here.")

    def from_coo(self, indices: NDArray[np.int64], values: NDArray[Any], shape: tuple[int, ...], layout: str) -> Any:
        """A sparse tensor of that layout from indices and values."""
        raise TensorError(f"{self.name} has no sparse tensors here.")

    def unstack(self, column: Any) -> list[Any]:
        """The rows of a column, sharing its memory where the framework can."""
        return [column[i] for i in range(len(column))]

    def row(self, column: Any, index: int) -> Any:
        """One row of a column, sharing its memory where the framework can."""
        return column[index]

    def reshape(self, value: Any, shape: tuple[int, ...]) -> Any:
        """The same values in another shape, sharing memory where the framework can."""
        return value.reshape(shape)

    def pad(self, value: Any, shape: tuple[int, ...]) -> Any:
        """The tensor with zeros behind it along each axis, up to the shape."""
        array = self.to_numpy(value)
        return self.from_numpy(np.pad(array, [(0, want - have) for want, have in zip(shape, array.shape, strict=True)]))

    def copy(self, value: Any, memo: dict[int, Any]) -> Any:
        """An independent copy, as `copy.deepcopy` makes it; a tensor inside a gradient graph leaves the graph."""
        return copy.deepcopy(value, memo)

    def convertible(self, value: Any) -> str | None:
        """Why the tensor cannot become another framework's without loss or a move; None when it can."""
        return f"it is sparse ({self.layout(value)})" if self.is_sparse(value) else None

    def is_sparse(self, value: Any) -> bool:
        """Whether the tensor is sparse; a sparse tensor is never stacked."""
        return self.layout(value) != "dense"


def common_dtype(name: str) -> np.dtype[Any]:
    """numpy's dtype of a common name; the short floats come from ml_dtypes."""
    try:
        return np.dtype(name)
    except TypeError:
        pass
    ml_dtypes = require("ml_dtypes", extra="torch", needed_for=f"dtype {name} in numpy")
    try:
        return np.dtype(getattr(ml_dtypes, name))
    except AttributeError:
        raise TensorError(f"numpy has no dtype {name!r}.") from None


def arrays_equal(a: NDArray[Any], b: NDArray[Any]) -> bool:
    """Equal dtype, shape and values; NaN equals NaN."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.dtype.kind in "fcmMV" and a.dtype.names is None:  # 'V' holds the short floats
        return bool(np.array_equal(a, b) or ((a == b) | ((a != a) & (b != b))).all())
    return bool(np.array_equal(a, b))
