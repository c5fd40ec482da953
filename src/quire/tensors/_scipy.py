"""scipy's sparse matrices and arrays: kept as they are, compared by value, never stacked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import scipy.sparse

from quire.errors import TensorError
from quire.tensors._framework import DTypeObject, Framework, Tensor, arrays_equal, common_dtype

if TYPE_CHECKING:
    from numpy.typing import NDArray

_FORMATS = ("bsr", "coo", "csc", "csr", "dia", "dok", "lil")


class ScipyFramework(Framework):
    """scipy.sparse matrices and arrays of every format."""

    name = "scipy"
    native = scipy.sparse.spmatrix

    def handles(self, tp: type[Any]) -> bool:
        return issubclass(tp, (scipy.sparse.spmatrix, scipy.sparse.sparray))

    def dtype(self, value: Tensor) -> str:
        return str(value.dtype.name)

    def native_dtype(self, name: str) -> DTypeObject:
        return common_dtype(name)

    def layout(self, value: Tensor) -> str:
        return ("array:" if isinstance(value, scipy.sparse.sparray) else "matrix:") + str(value.format)

    def to_coo(self, value: Tensor) -> tuple[NDArray[np.int64], NDArray[Any]]:
        coo = _canonical(value)
        return np.stack(coo.coords).astype(np.int64), coo.data

    def from_coo(self, indices: NDArray[np.int64], values: NDArray[Any], shape: tuple[int, ...], layout: str) -> Tensor:
        kind, _, form = layout.partition(":")
        if kind not in ("array", "matrix") or form not in _FORMATS:
            raise TensorError(f"scipy has no sparse layout {layout!r}.")
        coo_type = scipy.sparse.coo_array if kind == "array" else scipy.sparse.coo_matrix
        return coo_type((values, tuple(indices)), shape=shape).asformat(form)

    def equal(self, a: Tensor, b: Tensor) -> bool:
        if type(a) is not type(b) or a.dtype != b.dtype or a.shape != b.shape:
            return False
        return all(arrays_equal(x, y) for x, y in zip(_entries(a), _entries(b), strict=True))

    def to_numpy(self, value: Tensor) -> NDArray[Any]:
        _refuse("converted")

    def from_numpy(self, array: NDArray[Any]) -> Tensor:
        _refuse("made from a dense array")

    def stack(self, values: Sequence[Any]) -> Tensor:
        _refuse("stacked")

    def concat(self, columns: Sequence[Any]) -> Tensor:
        _refuse("joined")

    def take(self, column: Tensor, indices: NDArray[np.int64]) -> Tensor:
        _refuse("stacked")

    def zeros(self, shape: tuple[int, ...], dtype: str, like: Tensor = None) -> Tensor:
        _refuse("stacked")

    def to_device(self, value: Tensor, device: object, *, non_blocking: bool = False) -> Tensor:
        return value


def _canonical(value: Tensor) -> Tensor:
    coo = value.tocoo().copy()
    coo.sum_duplicates()
    return coo


def _entries(value: Tensor) -> list[NDArray[Any]]:
    coo = _canonical(value)
    coo.eliminate_zeros()  # some formats store explicit zeros
    return [*(axis.astype(np.int64) for axis in coo.coords), coo.data]


def _refuse(action: str) -> NoReturn:
    raise TensorError(f"A scipy sparse matrix cannot be {action} without becoming dense. Call .toarray() yourself.")


framework = ScipyFramework()
