"""The interface that quire needs of a tensor framework, and its numpy helpers."""

from __future__ import annotations

import copy
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np

from quire._optional import require
from quire.errors import TensorError
from quire.tensors._spec import DTYPES

if TYPE_CHECKING:
    from numpy.typing import NDArray


Tensor: TypeAlias = Any
"""A tensor of some framework: its own object, such as a `torch.Tensor` or an array of numpy.

The frameworks have no base class in common, and only `shape` means the same in all of them. So type checkers know
nothing about such a value, and code asks its `Framework`.
"""

DTypeObject: TypeAlias = Any
"""A dtype of some framework: its own object, such as `torch.float32` or `np.dtype('float32')`."""

MAX_DEPTH = 65  # of nested lists: one more than numpy has axes


class Framework(ABC):
    """One tensor framework. Values are its own tensors; dtypes are given by their common names ('bfloat16')."""

    name: str
    native: type[Any]
    """The class of dense tensors of the framework."""
    default_dtypes: ClassVar[dict[str, str]] = {"f": "float32", "i": "int64", "c": "complex64"}
    """The dtype of a tensor created from plain Python numbers, by kind (float, int, complex)."""
    reducers: ClassVar[dict[type, Callable[[Any], Any]]] = {}
    """How picklers of quire reduce what the framework itself cannot pickle, by class."""
    refuses_some = False
    """Whether documents refuse some values of the framework's own class (see `refusal`), so each must be checked."""

    def __reduce__(self) -> str:
        return "framework"  # the name of the instance in each framework's module

    @abstractmethod
    def handles(self, tp: type[Any]) -> bool:
        """Return whether values of this type are tensors of the framework, dense or sparse."""

    @abstractmethod
    def dtype(self, value: Tensor) -> str:
        """Return the common name of the dtype."""

    @abstractmethod
    def native_dtype(self, name: str) -> DTypeObject:
        """Return the framework's own dtype of that name; raise TensorError if it has none."""

    @abstractmethod
    def to_numpy(self, value: Tensor) -> NDArray[Any]:
        """Convert a dense tensor to numpy, without a copy where the memory can be shared."""

    @abstractmethod
    def from_numpy(self, array: NDArray[Any]) -> Tensor:
        """Convert an array to a tensor of the same dtype and shape, without a copy where the memory can be shared."""

    @abstractmethod
    def stack(self, values: Sequence[Any]) -> Tensor:
        """Stack dense tensors of one shape and dtype along a new first axis."""

    @abstractmethod
    def concat(self, columns: Sequence[Any]) -> Tensor:
        """Concatenate along the first axis."""

    @abstractmethod
    def take(self, column: Tensor, indices: NDArray[np.int64]) -> Tensor:
        """Copy rows by position to a new tensor."""

    @abstractmethod
    def zeros(self, shape: tuple[int, ...], dtype: str, like: Tensor = None) -> Tensor:
        """Create a tensor of zeros, on the device of another tensor if one is given."""

    @abstractmethod
    def equal(self, a: Tensor, b: Tensor) -> bool:
        """Return whether two tensors of the framework have the same dtype, shape, device, layout and values.

        NaN equals NaN.
        """

    @abstractmethod
    def to_device(self, value: Tensor, device: object, *, non_blocking: bool = False) -> Tensor:
        """Move the tensor to another device."""

    def fill_rows(self, column: Tensor, rows: NDArray[np.bool_], value: NDArray[Any]) -> Tensor:
        """Return a copy of a column with a value, of its dtype, in the marked rows."""
        array = np.array(self.to_numpy(column))
        array[rows] = value
        return self.from_numpy(array)

    def take_into(self, column: Tensor, indices: NDArray[np.int64], out: Tensor) -> Tensor:
        """Copy rows by position into a tensor of their shape and dtype, and return it.

        The positions must be valid: others copy some other row.
        """
        raise TensorError(f"{self.name} copies no rows into other tensors here.")

    def view_memory(self, value: Tensor) -> NDArray[Any] | None:
        """Return an array on the memory of a tensor, for copies by numpy; None if only the framework can copy it.

        Its dtype may be another one of the same size; `memory_wrapper` converts copies to that of the tensor.
        """
        return None

    def memory_wrapper(self, value: Tensor) -> Callable[[NDArray[Any]], Tensor]:
        """Return a function that makes tensors like `value` on the memory of copies of its `view_memory`."""
        raise TensorError(f"{self.name} makes no tensors on the memory of arrays here.")

    def stack_for_gathering(self, values: Sequence[Any]) -> Tensor:
        """Stack tensors whose rows will be gathered many times, in memory that suits it best."""
        return self.stack(values)

    def stack_into(self, values: Sequence[Any], out: Tensor) -> Tensor:
        """Stack tensors of one shape and dtype into a tensor, and return it; into a new one if it is None."""
        raise TensorError(f"{self.name} stacks no tensors into others here.")

    def copy_into(self, value: Tensor, out: Tensor) -> Tensor:
        """Copy a tensor into another one of its shape and dtype, and return that one."""
        raise TensorError(f"{self.name} copies no tensors into others here.")

    def from_mask(self, mask: NDArray[np.bool_]) -> Tensor:
        """Return a copy of a mask as a tensor."""
        return self.from_numpy(mask.copy())

    def is_tracing(self) -> bool:
        """Return whether a compiler traces the calling code, for instance torch.compile."""
        return False

    def cast(self, value: Tensor, dtype: str) -> Tensor:
        """Return the tensor in another floating dtype, rounded to its precision."""
        return self.from_numpy(self.to_numpy(value).astype(common_dtype(dtype)))

    def unwrap(self, value: Tensor) -> Tensor:
        """Return the framework's own object of quire's wrapper; other values are unchanged."""
        return value

    def wrap(self, value: Tensor) -> Tensor:
        """Return quire's wrapper of the framework's own object, if there is one."""
        return value

    def refusal(self, value: Tensor) -> str | None:
        """Return why a document cannot hold the tensor; None if it can."""
        return None

    def pin(self, value: Tensor) -> Tensor:
        """Copy the tensor to pinned memory, from which accelerators read faster; unchanged without an accelerator."""
        return value

    def share(self, value: Tensor) -> Tensor:
        """Move the tensor, in place, to shared memory; unchanged where the framework has none."""
        return value

    def shape(self, value: Tensor) -> tuple[int, ...]:
        """Return the shape as plain integers."""
        return tuple(value.shape)

    def device(self, value: Tensor) -> str:
        """Return the name of the tensor's device."""
        return "cpu"

    def layout(self, value: Tensor) -> str:
        """Return the memory layout: 'dense', or the name of a sparse layout ('coo', 'csr')."""
        return "dense"

    def to_coo(self, value: Tensor) -> tuple[NDArray[np.int64], NDArray[Any]]:
        """Return the indices, of shape (dimensions, entries), and the values of a sparse tensor."""
        raise TensorError(f"{self.name} has no sparse tensors here.")

    def from_coo(self, indices: NDArray[np.int64], values: NDArray[Any], shape: tuple[int, ...], layout: str) -> Tensor:
        """Create a sparse tensor of that layout from indices and values."""
        raise TensorError(f"{self.name} has no sparse tensors here.")

    def unstack(self, column: Tensor) -> list[Any]:
        """Return the rows of a column, which share its memory where the framework supports it."""
        return [column[i] for i in range(len(column))]

    def row(self, column: Tensor, index: int) -> Tensor:
        """Return one row of a column, which shares its memory where the framework supports it."""
        return column[index]

    def reshape(self, value: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return the same values in another shape, which share memory where the framework supports it."""
        return value.reshape(shape)

    def pad(self, value: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Pad the tensor with zeros at the end of each axis, up to the shape."""
        array = self.to_numpy(value)
        return self.from_numpy(np.pad(array, [(0, want - have) for want, have in zip(shape, array.shape, strict=True)]))

    def copy(self, value: Tensor, memo: dict[int, Any]) -> Tensor:
        """Return an independent copy, like `copy.deepcopy`; a tensor inside a gradient graph is detached."""
        return copy.deepcopy(value, memo)

    def memory(self, value: Tensor) -> int | None:
        """Return the address of the tensor's storage, if copies and pickles would include all of it; otherwise None."""
        return None

    def copy_alone(self, value: Tensor, memo: dict[int, Any]) -> Tensor:
        """Return an independent copy of the tensor alone, without the rest of its storage."""
        return self.copy(value, memo)

    def to_pickle(self, value: Tensor, memo: dict[Any, Any], *, alone: bool) -> Any:
        """Return what a pickle contains for a tensor: the tensor itself, or a stand-in that is loaded as the tensor.

        There are stand-ins for tensors that the framework cannot pickle and, with `alone`, for views of larger memory,
        all of which it would pickle. `memo` belongs to one pickle: it keeps what its tensors share.
        """
        return value

    def convertible(self, value: Tensor) -> str | None:
        """Return why the tensor cannot be converted to another framework without loss or a move; None if it can."""
        reason = self.refusal(value)
        return f"its layout is {self.layout(value)}, not dense" if reason is None and self.is_sparse(value) else reason

    def is_sparse(self, value: Tensor) -> bool:
        """Return whether the tensor is sparse; sparse tensors are never stacked."""
        return self.layout(value) != "dense"


def common_dtype(name: str) -> np.dtype[Any]:
    """Return numpy's dtype of a common name; bfloat16 and float8 come from ml_dtypes."""
    text = re.fullmatch(r"(str|bytes)(\d+)", name)  # numpy's names of its string dtypes, which it does not parse
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
    dtype: np.dtype[Any] = np.dtype(scalar)
    return dtype


def array_of(values: Any) -> NDArray[Any]:
    """Convert nested lists to an array of numbers, or of objects if they hold anything else.

    numpy alone would give every item the size of the longest text, which may exhaust the memory, and would convert
    integers to floats if some exceed int64.
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
    """Return the types of all items of nested lists."""
    level: list[Any] = [[values]]
    types: set[type] = set()
    # Level by level, since numpy has at most 64 axes: the time is linear, and no recursion follows hostile nesting.
    for _ in range(MAX_DEPTH):
        level_types = set(map(type, chain.from_iterable(level)))
        types |= level_types
        if not any(issubclass(tp, (list, tuple)) for tp in level_types):
            break
        level = [item for row in level for item in row if isinstance(item, (list, tuple))]
    return types


def cast_numbers(array: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Cast plain numbers to a dtype: floats may be rounded, but overflow and the loss of a fraction are errors."""
    if array.dtype == dtype:
        return array
    # numpy's kinds of both dtypes: bool, int, uint, float, complex, and V for bfloat16 and float8. Those listed would
    # cut a fraction or an imaginary part, or turn numbers into booleans.
    kinds = array.dtype.kind + dtype.kind
    if array.size and (kinds[0] not in "biufc" or kinds[1] == "b" or kinds in ("fi", "fu", "ci", "cu", "cf", "cV")):
        raise TensorError(f"the numbers do not fit dtype {dtype.name}")
    with np.errstate(all="ignore"):
        cast = array.astype(dtype)
        if array.size and not _is_lossless(array, cast):
            raise TensorError(f"the numbers do not fit dtype {dtype.name}")
    return cast


def _is_lossless(array: NDArray[Any], cast: NDArray[Any]) -> bool:
    kind = array.dtype.kind
    if kind == "b":
        return True
    if cast.dtype.kind in "iu":  # the signs, too: -1 as uint64 is 2**64 - 1, which casts back to -1
        return bool(((cast.astype(array.dtype) == array) & ((cast < 0) == (array < 0))).all())
    wide = cast.astype(np.complex128 if cast.dtype.kind == "c" else np.float64)
    if kind in "fc":  # floats may be rounded, but a finite number must not become infinite, nor NaN
        return bool(((np.isnan(wide) == np.isnan(array)) & (np.isfinite(wide) == np.isfinite(array))).all())
    limit = 2.0**64 if kind == "u" else 2.0**63  # casting a larger float to an integer is undefined
    return bool(((wide.real < limit) & (wide.real.astype(array.dtype) == array)).all())


def arrays_equal(a: NDArray[Any], b: NDArray[Any]) -> bool:
    """Return whether two arrays have equal dtype, shape and values; NaN equals NaN, byte order is ignored."""
    if a.shape != b.shape or a.dtype.newbyteorder("=") != b.dtype.newbyteorder("="):
        return False
    if a.dtype.kind in "fcmMV" and a.dtype.names is None:  # 'V' is the kind of bfloat16 and float8
        return bool(np.array_equal(a, b) or ((a == b) | ((a != a) & (b != b))).all())
    return bool(np.array_equal(a, b))
