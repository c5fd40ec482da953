"""torch tensors, dense and sparse (COO, CSR, CSC).

torch spreads a copy, cast or gather of more than 32,768 elements over its OpenMP threads. If other processes keep the
cores busy, the threads of such a region wait for each other, and copying the rows of a batch takes many times as long
as on one thread. So the copies of the data path (`take`, `take_into`, `copy_into`, `fill_rows`, `zeros`, `pad`) are
made by numpy, which has no threads, on the memory of the tensors. So are those of `stack` and `concat`, for which torch
uses its threads if a single tensor is that large.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from quire.errors import TensorError
from quire.tensors._framework import DTypeObject, Framework, Tensor, common_dtype
from quire.tensors._numpy import native_array

if TYPE_CHECKING:
    from numpy.typing import NDArray

_CARRIERS = {1: (torch.uint8, np.uint8), 2: (torch.int16, np.int16)}
"""Types that numpy and torch share, by item size: bfloat16 and float8 are viewed as these between the two."""

_LACKING = frozenset(
    dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and (dtype is torch.bfloat16 or (dtype.is_floating_point and dtype.itemsize == 1))
)
"""The types that numpy does not have: bfloat16 and float8."""

_SERIAL_SIZE = 32_768
"""The number of elements up to which torch itself uses one thread."""

_HUGE_SIZE = 1 << 22
"""The size from which on numpy asks the system for huge pages."""

_LAYOUTS = {
    torch.strided: "dense",
    torch.sparse_coo: "coo",
    torch.sparse_csr: "csr",
    torch.sparse_csc: "csc",
}


@cache  # numpy composes the name of a dtype anew each time, which takes longer than the rest of `from_numpy`
def _is_ml_dtype(dtype: np.dtype[Any]) -> bool:
    return bool(dtype.name.startswith(("bfloat", "float8")))


class TorchFramework(Framework):
    """torch.Tensor and its subclasses."""

    name = "torch"
    native = torch.Tensor

    def handles(self, tp: type[Any]) -> bool:
        return issubclass(tp, torch.Tensor)

    def dtype(self, value: Tensor) -> str:
        return str(value.dtype)[len("torch.") :]

    def native_dtype(self, name: str) -> DTypeObject:
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype):
            raise TensorError(f"torch has no dtype {name!r}.")
        return dtype

    def device(self, value: Tensor) -> str:
        return str(value.device)

    def shape(self, value: Tensor) -> tuple[int, ...]:
        if value.is_nested:  # its parts may differ in all other axes: torch has symbols for their sizes, or none
            return (value.size(0), *(-1,) * (value.dim() - 1))
        return tuple(value.shape)

    def layout(self, value: Tensor) -> str:
        return "nested" if value.is_nested else _LAYOUTS.get(value.layout, str(value.layout))

    def to_coo(self, value: Tensor) -> tuple[NDArray[np.int64], NDArray[Any]]:
        if value.is_nested or value.layout not in _LAYOUTS:
            raise TensorError(f"a torch tensor of layout {self.layout(value)} has no COO form here.")
        # Coalesced entries are sorted, and each index occurs once: equal tensors have equal parts and equal bytes.
        coo = value.detach().to_sparse_coo().coalesce()
        return coo.indices().cpu().numpy(), self.to_numpy(coo.values())

    def from_coo(self, indices: NDArray[np.int64], values: NDArray[Any], shape: tuple[int, ...], layout: str) -> Tensor:
        torch_layout = next((known for known, name in _LAYOUTS.items() if name == layout and layout != "dense"), None)
        if torch_layout is None:
            raise TensorError(f"torch has no sparse layout {layout!r}.")
        parts = torch.from_numpy(indices), self.from_numpy(values)
        coo = torch.sparse_coo_tensor(*parts, shape, check_invariants=True).coalesce()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sparse CS. tensor support is in beta state")
            return coo if torch_layout is torch.sparse_coo else coo.to_sparse(layout=torch_layout)

    def to_numpy(self, value: Tensor) -> NDArray[Any]:
        if _numpy_lacks(value.dtype):
            carrier, _ = _CARRIERS[value.dtype.itemsize]
            array: NDArray[Any] = value.detach().view(carrier).numpy(force=True)
            return array.view(common_dtype(self.dtype(value)))
        try:
            # `force` also detaches, copies from a device, and resolves the lazy bits of conjugated tensors.
            plain: NDArray[Any] = value.numpy(force=True)
        except TypeError as error:  # complex32, quantised
            raise TensorError(f"numpy has no dtype {self.dtype(value)!r}.") from error
        return plain

    def from_numpy(self, array: NDArray[Any]) -> Tensor:
        array = native_array(array, "torch")
        if _is_ml_dtype(array.dtype):
            _, carrier = _CARRIERS[array.dtype.itemsize]
            return torch.from_numpy(array.view(carrier)).view(self.native_dtype(array.dtype.name))
        try:
            return torch.from_numpy(array)
        except TypeError as error:
            raise TensorError(f"torch has no tensors of dtype {array.dtype}.") from error

    def stack(self, values: Sequence[Any]) -> Tensor:
        # A worker process of a DataLoader sends the batch through shared memory, so it is stacked there at once.
        if torch.utils.data.get_worker_info() is None or values[0].requires_grad or not values[0].is_cpu:
            return self.stack_into(values, None)
        shape, dtype = (len(values), *values[0].shape), values[0].dtype
        storage = torch.UntypedStorage._new_shared(math.prod(shape) * dtype.itemsize)  # type: ignore[no-untyped-call]
        return self.stack_into(values, torch.empty(0, dtype=dtype).set_(storage).view(shape))

    def stack_into(self, values: Sequence[Any], out: Tensor) -> Tensor:
        # numpy casts and broadcasts where torch raises an error, so it only gets tensors of one shape and dtype.
        if values[0].numel() > _SERIAL_SIZE and len({(value.shape, value.dtype) for value in values}) == 1:
            arrays = [_view_memory(value) for value in values]
            target = None if out is None else _view_memory(out)
            if all(array is not None for array in arrays):
                stacked = np.stack(arrays, out=target)  # type: ignore[arg-type]
                return _wrap_memory(stacked, values[0].dtype) if out is None else out
        return torch.stack(values, out=out)  # type: ignore[arg-type]

    def stack_for_gathering(self, values: Sequence[Any]) -> Tensor:
        room = _empty_huge_pages(values)
        if room is None:
            return self.stack(values)
        try:
            return self.stack_into(values, room)
        except RuntimeError:  # a gradient, another device; several shapes raise the error once more
            return self.stack(values)

    def concat(self, columns: Sequence[Any]) -> Tensor:
        if any(column.numel() > _SERIAL_SIZE for column in columns) and len({column.dtype for column in columns}) == 1:
            arrays = [_view_memory(column) for column in columns]
            if all(array is not None for array in arrays) and len({column.shape[1:] for column in columns}) == 1:
                return _wrap_memory(np.concatenate(arrays), columns[0].dtype)  # type: ignore[arg-type]
        return torch.cat(columns)  # type: ignore[arg-type]

    def reshape(self, value: Tensor, shape: tuple[int, ...]) -> Tensor:
        if value.numel() > _SERIAL_SIZE and not value.is_contiguous():
            array = _view_memory(value)
            if array is not None:
                return _wrap_memory(array.reshape(shape), value.dtype)
        return value.reshape(shape)

    def take(self, column: Tensor, indices: NDArray[np.int64]) -> Tensor:
        source = _view_memory(column)
        if source is None:
            positions = torch.from_numpy(indices)
            return column.index_select(0, positions if column.is_cpu else positions.to(column.device))
        # `take` would copy the whole of a source that is not contiguous.
        rows = source.take(indices, 0) if source.flags.c_contiguous else source[indices]
        return _wrap_memory(rows, column.dtype) if column.dtype in _LACKING else torch.from_numpy(rows)

    def take_into(self, column: Tensor, indices: NDArray[np.int64], out: Tensor) -> Tensor:
        source, target = _view_memory(column), _view_memory(out)
        if source is None or target is None:
            return torch.index_select(column, 0, torch.from_numpy(indices), out=out)
        if source.flags.c_contiguous:
            # With any other mode, numpy would copy the rows twice: first into a buffer, for the case of a wrong index.
            source.take(indices, axis=0, out=target, mode="clip")
        else:
            target[:] = source[indices]
        return out

    def view_memory(self, value: Tensor) -> NDArray[Any] | None:
        return _view_memory(value)

    def memory_wrapper(self, value: Tensor) -> Callable[[NDArray[Any]], Tensor]:
        return partial(_wrap_memory, dtype=value.dtype) if _numpy_lacks(value.dtype) else torch.from_numpy

    def copy_into(self, value: Tensor, out: Tensor) -> Tensor:
        source, target = _view_memory(value), _view_memory(out)
        if source is None or target is None:
            return out.copy_(value)
        np.copyto(target, source)
        return out

    def fill_rows(self, column: Tensor, rows: NDArray[np.bool_], value: NDArray[Any]) -> Tensor:
        source = _view_memory(column)
        if source is None:
            filled = column.clone()
            marked, filler = torch.from_numpy(rows), self.from_numpy(np.array(value))
            filled[marked.to(column.device)] = filler.to(column.device)
            return filled
        array = source.copy()
        array[rows] = np.asarray(value).view(array.dtype)
        return _wrap_memory(array, column.dtype)

    def zeros(self, shape: tuple[int, ...], dtype: str, like: Tensor = None) -> Tensor:
        native, size = self.native_dtype(dtype), math.prod(shape)
        if size <= _SERIAL_SIZE or (like is not None and not like.is_cpu):
            return torch.zeros(shape, dtype=native, device=None if like is None else like.device)
        # numpy gets zeroed pages from the system when they are first written; torch would write them here.
        return torch.from_numpy(np.zeros(size * native.itemsize, np.uint8)).view(native).view(shape)

    def pin(self, value: Tensor) -> Tensor:
        if hasattr(torch, "accelerator"):
            return value.pin_memory() if torch.accelerator.is_available() else value
        # Before torch 2.6. For Apple's devices (mps), these versions cannot pin memory.
        if torch.cuda.is_available():
            return value.pin_memory()
        has_xpu = hasattr(torch, "xpu") and torch.xpu.is_available()
        return value.pin_memory("xpu") if has_xpu else value

    def share(self, value: Tensor) -> Tensor:
        return value.share_memory_()

    def equal(self, a: Tensor, b: Tensor) -> bool:
        if a.dtype is not b.dtype or a.layout is not b.layout or a.device != b.device or self.shape(a) != self.shape(b):
            return False
        if a is b or a.is_meta:
            return a is b
        with torch.no_grad():
            return all(_equal(x, y) for x, y in zip(_parts(a), _parts(b), strict=True))

    def to_device(self, value: Tensor, device: object, *, non_blocking: bool = False) -> Tensor:
        return value.to(device, non_blocking=non_blocking)

    def from_mask(self, mask: NDArray[np.bool_]) -> Tensor:
        return torch.from_numpy(mask.copy())  # torch.compile traces this

    def is_tracing(self) -> bool:
        return torch.compiler.is_compiling()

    def cast(self, value: Tensor, dtype: str) -> Tensor:
        return value.to(self.native_dtype(dtype))

    def unstack(self, column: Tensor) -> list[Any]:
        return list(column.unbind(0))

    def pad(self, value: Tensor, shape: tuple[int, ...]) -> Tensor:
        source, inside = _view_memory(value), tuple(slice(size) for size in value.shape)
        if source is None:
            padded = value.new_zeros(shape)
            padded[inside] = value
            return padded
        array = np.zeros(shape, source.dtype)
        array[inside] = source
        return _wrap_memory(array, value.dtype)

    def copy(self, value: Tensor, memo: dict[int, Any]) -> Tensor:
        # torch refuses to deep-copy the result of an operation that has a gradient, and some sparse layouts.
        if value.is_leaf and value.layout in (torch.strided, torch.sparse_coo, torch.jagged):
            return super().copy(value, memo)
        return memo.setdefault(id(value), value.detach().clone().requires_grad_(value.requires_grad))

    # torch copies and pickles the whole storage of a tensor: for a row of a column, the whole column.
    def memory(self, value: Tensor) -> int | None:
        address: int | None = value.untyped_storage().data_ptr() if _is_plain(value) else None
        return address

    def copy_alone(self, value: Tensor, memo: dict[int, Any]) -> Tensor:
        return memo.setdefault(id(value), _clone(value)) if _is_view(value) else self.copy(value, memo)

    def to_pickle(self, value: Tensor, memo: dict[Any, Any], *, alone: bool) -> Any:
        if not isinstance(value, torch.Tensor):  # a stand-in already, also one of the workers of a DataLoader
            return value
        is_cut = alone and _is_view(value)
        if not is_cut and not _is_pickled_untyped(value.dtype):
            return value
        return memo.setdefault(id(value), _StandIn(value, memo, is_cut=is_cut))

    def convertible(self, value: Tensor) -> str | None:
        if value.requires_grad:
            return "it is part of a gradient graph (use .detach())"
        if value.device.type != "cpu":
            return f"it is on {value.device} (use .cpu())"
        return super().convertible(value)


def _is_view(value: Tensor) -> bool:
    """Return whether the tensor's storage is larger than the tensor, as for the rows of a column."""
    return _is_plain(value) and value.untyped_storage().nbytes() > value.nbytes


def _is_plain(value: Tensor) -> bool:
    plain = type(value) is torch.Tensor and value.layout is torch.strided
    return plain and not value.is_nested and not value.is_meta


def _view_memory(value: torch.Tensor) -> NDArray[Any] | None:
    """Return an array on the memory of a tensor, for copies; None if it needs torch: another device, a gradient.

    Types that numpy lacks are viewed as integers of the same size.
    """
    if type(value) is not torch.Tensor:
        return None
    try:
        if value.dtype in _LACKING:
            value = value.view(_CARRIERS[value.dtype.itemsize][0])
        return value.numpy()
    except (RuntimeError, TypeError):  # a device, a gradient, a layout, complex32, quantized, conjugated, inside vmap
        return None


def _wrap_memory(array: NDArray[Any], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of a dtype on the memory of an array that `_view_memory` returned, or of a copy of one."""
    tensor = torch.from_numpy(array)
    return tensor.view(dtype) if _numpy_lacks(dtype) else tensor


def _empty_huge_pages(values: Sequence[Any]) -> torch.Tensor | None:
    """Return memory for a stack of many tensors of one dtype in huge pages; None if it is small.

    numpy asks the system for huge pages, torch does not. Gathering random rows of 12 KiB takes a fifth less time from
    them: with pages of 4 KiB, the processor has to look up the address of each page, mostly from main memory. But huge
    pages may take twice as long to fill at first: the system has to find free ones, and in a virtual machine the host
    may have to provide the memory once more. So they are for columns that are gathered from in every epoch.
    """
    first = values[0]
    size = len(values) * first.nbytes if first.is_cpu and _is_plain(first) else 0
    if size < _HUGE_SIZE or {value.dtype for value in values} != {first.dtype}:
        return None
    return torch.from_numpy(np.empty(size, np.uint8)).view(first.dtype).view(len(values), *first.shape)


def _clone(value: torch.Tensor) -> torch.Tensor:
    """Return a copy outside of the gradient graph, which requires a gradient if the tensor does."""
    array = _view_memory(value.detach())
    copied = value.detach().clone() if array is None else _wrap_memory(array.copy(order="K"), value.dtype)
    return copied.requires_grad_(value.requires_grad)


# --- pickles


class _StandIn:
    """Stands for a tensor in a pickle. With `is_cut`, only the tensor is pickled: torch would write its whole storage.

    torch pickles a tensor of float8, uint16, uint32 or uint64 with an untyped storage, and then cannot load that
    storage. In place of the storage, the pickle gets one that can be loaded.
    """

    __slots__ = ("is_cut", "memo", "tensor")

    def __init__(self, tensor: torch.Tensor, memo: dict[Any, Any], *, is_cut: bool) -> None:
        self.tensor, self.memo, self.is_cut = tensor, memo, is_cut

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        tensor = self.tensor
        if self.is_cut:
            tensor = _clone(tensor)
        if not _is_pickled_untyped(tensor.dtype):
            return _identity, (tensor,)
        function, arguments, *rest = tensor.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]
        return function, _replace_storages(arguments, self.memo), *rest


def _replace_storages(value: Tensor, memo: dict[Any, Any]) -> Any:
    """Replace untyped storages in the arguments of torch's functions; views of one storage share what replaces it."""
    if type(value) is tuple:
        return tuple(_replace_storages(item, memo) for item in value)
    if isinstance(value, torch.Tensor):  # in the arguments of a Parameter or a sparse tensor
        return framework.to_pickle(value, memo, alone=False)
    if isinstance(value, torch.UntypedStorage) and value.device.type == "cpu":
        return memo.setdefault(("storage", value.data_ptr()), _Storage(value))
    return value


class _Storage:
    """Stands for an untyped storage in a pickle."""

    __slots__ = ("storage",)

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage

    def __reduce__(self) -> tuple[Any, ...]:
        return _reduce_storage(self.storage)


@cache
def _is_pickled_untyped(dtype: torch.dtype) -> bool:
    # Which dtypes these are depends on the version of torch, so it is asked.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # complex32 is experimental
        arguments = torch.empty(0, dtype=dtype).__reduce_ex__(2)[1]  # type: ignore[no-untyped-call]
    return isinstance(arguments[0], torch.UntypedStorage)


def _identity(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _reduce_storage(storage: torch.UntypedStorage) -> tuple[Any, ...]:
    if storage.device.type != "cpu":
        return storage.__reduce__()  # type: ignore[no-untyped-call, no-any-return]
    content = torch.empty(0, dtype=torch.uint8).set_(storage)
    return _load_storage, (content.numpy().tobytes(),)


def _load_storage(content: bytes) -> Any:
    tensor = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
    typed: Any = torch.TypedStorage  # torch's loader expects a typed storage
    return typed(wrap_storage=tensor.untyped_storage(), dtype=torch.uint8, _internal=True)


def _numpy_lacks(dtype: torch.dtype) -> bool:
    return dtype in _LACKING


def _parts(value: torch.Tensor) -> list[torch.Tensor]:
    """Return the dense tensors that make up a tensor of any layout."""
    if value.is_nested:
        return list(value.unbind())
    if value.layout is torch.sparse_coo:
        value = value.coalesce()
        return [value.indices(), value.values()]
    if value.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [value.crow_indices(), value.col_indices(), value.values()]
    if value.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [value.ccol_indices(), value.row_indices(), value.values()]
    return [value]


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape:
        return False
    if a.dtype is not b.dtype:  # the indices of two sparse tensors
        a, b = a.long(), b.long()
    if a.dtype.is_floating_point and a.dtype.itemsize == 1:
        a, b = a.float(), b.float()  # torch does not compare float8
    if a.dtype is torch.complex32:
        a, b = a.to(torch.complex64), b.to(torch.complex64)  # nor complex32
    if torch.equal(a, b):
        return True
    if not (a.dtype.is_floating_point or a.dtype.is_complex):
        return False
    return bool(((a == b) | ((a != a) & (b != b))).all())


# ForkingPickler sends a handle to the shared storage, so nothing is copied.
ForkingPickler.register(_StandIn, lambda stand_in: (_identity, (stand_in.tensor,)))
TorchFramework.reducers = {torch.UntypedStorage: _reduce_storage}
framework = TorchFramework()
