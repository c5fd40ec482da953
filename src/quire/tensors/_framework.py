"""What quire asks of a tensor framework: one small class each, all with the same verbs."""

from __future__ import annotations

import copy
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from quire._optional import require
from quire.errors import TensorError
from quire.tensors._spec import DTYPES

if TYPE_CHECKING:
    from numpy.typing import NDArray


DEEPEST = 65  # one more axis than numpy has


class Framework(ABC):
    """One tensor framework. Values are its own tensors; dtypes are told by their common names ('bfloat16')."""

    name: str
    native: type[Any]
    """The class that a dense tensor of the framework is an instance of."""
    default_dtypes: ClassVar[dict[str, str]] = {"f": "float32", "i": "int64", "c": "complex64"}
    """The dtype of a tensor made from plain Python numbers, by kind (float, int, complex)."""
    refuses_some = False
    """Whether documents hold some values of the framework's own class and refuse others, so that each must be asked."""

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

    def fill_rows(self, column: Any, rows: NDArray[np.bool_], value: NDArray[Any]) -> Any:
        """A copy of a column with a value, of its dtype, in the rows that are marked."""
        array = np.array(self.to_numpy(column))
        array[rows] = value
        return self.from_numpy(array)

    def take_shared(self, column: Any, indices: NDArray[np.int64]) -> Any:
        """Rows by position, in memory that other processes can map, where the framework has such."""
        return self.take(column, indices)

    def unwrap(self, value: Any) -> Any:
        """The framework's own object, where quire has a wrapper of it."""
        return value

    def wrap(self, value: Any) -> Any:
        """quire's wrapper of the framework's own object, where it has one."""
        return value

    def refusal(self, value: Any) -> str | None:
        """Why a document cannot hold the tensor; None when it can."""
        return None

    def pin(self, value: Any) -> Any:
        """The tensor in pinned memory, from which accelerators read faster; itself where that means nothing."""
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

    def memory(self, value: Any) -> int | None:
        """The address of the memory that a tensor lies in, where copies and pickles take all of it along; else None."""
        return None

    def copy_alone(self, value: Any, memo: dict[int, Any]) -> Any:
        """An independent copy, without the memory around the tensor."""
        return self.copy(value, memo)

    def packed(self, value: Any) -> Any:
        """What a pickle carries for a tensor: the tensor, or what becomes one without the memory around it."""
        return value

    def convertible(self, value: Any) -> str | None:
        """Why the tensor cannot become another framework's without loss or a move; None when it can."""
        reason = self.refusal(value)
        return f"its layout is {self.layout(value)}, not dense" if reason is None and self.is_sparse(value) else reason

    def is_sparse(self, value: Any) -> bool:
        """Whether the tensor is sparse; a sparse tensor is never stacked."""
        return self.layout(value) != "dense"


def common_dtype(name: str) -> np.dtype[Any]:
    """numpy's dtype of a common name; the short floats come from ml_dtypes."""
    text = re.fullmatch(r"(str|bytes)(\d+)", name)  # what numpy calls the dtypes of its texts, and does not understand
    try:
        if text is not None:
            return np.dtype(f"U{int(text[2]) // 32}" if text[1] == "str" else f"S{int(text[2]) // 8}")
        return np.dtype(name)
    except TypeError:
        pass
    if name not in DTYPES:
        raise TensorError(f"numpy has no dtype {name!r}.")
    ml_dtypes = require("ml_dtypes", extra="torch", needed_for=f"dtype {name} in numpy")
    scalar = getattr(ml_dtypes, name, None)
    if scalar is None:
        raise TensorError(f"numpy has no dtype {name!r}.")
    found: np.dtype[Any] = np.dtype(scalar)
    return found


def array_of(values: Any) -> NDArray[Any]:
    """Nested lists as an array of numbers; of objects, where there is anything else.

    numpy alone would give every item the room of the longest text, which may be all the memory there is, and would make
    floats of integers of which some are beyond int64.
    """
    types = _types_in(values)
    if any(issubclass(tp, (str, bytes)) for tp in types):
        return np.array(values, dtype=object)
    array = np.array(values)
    if array.dtype == np.float64 and float not in types and (np.abs(array) >= 2.0**63).any():
        exact = np.array(values, dtype=object)
        if all(isinstance(number, int) for number in exact.flat):
            return exact.astype(np.uint64) if all(0 <= number < 2**64 for number in exact.flat) else exact
    return array


def _types_in(values: Any) -> set[type]:
    """The types of all that is in nested lists."""
    level: list[Any] = [[values]]
    found: set[type] = set()
    for _ in range(DEEPEST):
        types = set(map(type, chain.from_iterable(level)))
        found |= types
        if not any(issubclass(tp, (list, tuple)) for tp in types):
            break
        level = [item for row in level for item in row if isinstance(item, (list, tuple))]
    return found


def cast_numbers(array: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Plain numbers as a dtype. They have no width, so floats may be rounded; nothing overflows, no fraction is cut."""
    if array.dtype == dtype:
        return array
    kinds = array.dtype.kind + dtype.kind
    if array.size and (kinds[0] not in "biufc" or kinds[1] == "b" or kinds in ("fi", "fu", "ci", "cu", "cf", "cV")):
        raise TensorError(f"the numbers do not fit dtype {dtype.name}")
    with np.errstate(all="ignore"):
        cast = array.astype(dtype)
        if array.size and not _kept(array, cast):
            raise TensorError(f"the numbers do not fit dtype {dtype.name}")
    return cast


def _kept(array: NDArray[Any], cast: NDArray[Any]) -> bool:
    kind = array.dtype.kind
    if kind == "b":
        return True
    if cast.dtype.kind in "iu":
        return bool(((cast.astype(array.dtype) == array) & ((cast < 0) == (array < 0))).all())
    wide = cast.astype(np.complex128 if cast.dtype.kind == "c" else np.float64)
    if kind in "fc":
        return bool(((np.isnan(wide) == np.isnan(array)) & (np.isfinite(wide) == np.isfinite(array))).all())
    limit = 2.0**64 if kind == "u" else 2.0**63  # what a float that large is as an integer, no one knows
    return bool(((wide.real < limit) & (wide.real.astype(array.dtype) == array)).all())


def arrays_equal(a: NDArray[Any], b: NDArray[Any]) -> bool:
    """Equal dtype, shape and values; NaN equals NaN, and the order of bytes in memory does not count."""
    if a.shape != b.shape or a.dtype.newbyteorder("=") != b.dtype.newbyteorder("="):
        return False
    if a.dtype.kind in "fcmMV" and a.dtype.names is None:  # 'V' holds the short floats
        return bool(np.array_equal(a, b) or ((a == b) | ((a != a) & (b != b))).all())
    return bool(np.array_equal(a, b))
