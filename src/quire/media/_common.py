"""Tensor conversion, output files and limit errors, shared by all media."""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
from collections.abc import Callable
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from quire._optional import is_installed
from quire.errors import DecodeError, TensorError
from quire.files import Target, display_uri, open_target
from quire.tensors import format_shape, framework_of, get_framework

if TYPE_CHECKING:
    from numpy.typing import NDArray

_NARROWER = {"float64": np.float32, "int64": np.int32}  # JAX has no 64-bit types unless it is configured to


@functools.cache
def is_available(module: str) -> bool:
    """Return whether a decoder library can be imported; it is looked for once in a process."""
    return is_installed(module)


def as_numpy(tensor: object) -> NDArray[Any]:
    """Convert a tensor of any framework, or nested lists, to numpy; raise if the conversion would lose something."""
    framework = framework_of(tensor)
    if framework is None:
        return np.asarray(tensor)
    reason = framework.convertible(tensor)
    if reason is not None:
        raise TensorError(f"the tensor cannot be written as media: {reason}.")
    return framework.to_numpy(tensor)


def as_tensor(array: Any, framework: str | None) -> Any:
    """Convert an array to a tensor of a framework (None: numpy); 64 bits become 32 where the framework has no 64."""
    if framework is None or framework == "numpy" or array is None:
        return array
    from_numpy = get_framework(framework).from_numpy
    try:
        return from_numpy(array)
    except TensorError:
        if array.dtype.name not in _NARROWER:
            raise
        return from_numpy(array.astype(_NARROWER[array.dtype.name]))


def channels_last(array: NDArray[Any], channel_axis: int) -> NDArray[Any]:
    """Return a view of the array with its channels on the last axis."""
    if not -array.ndim <= channel_axis < array.ndim:
        raise TensorError(f"a tensor of shape {format_shape(array.shape)} has no axis {channel_axis}.")
    return np.moveaxis(array, channel_axis, -1)


def suffix_of(file: Target, default: str) -> str:
    """Return the format that the suffix of a file name implies."""
    name = os.fspath(file) if isinstance(file, (str, os.PathLike)) else ""
    return os.path.splitext(name)[1][1:] or default  # noqa: PTH122 - the name may be a URL


def write_bytes(file: Target, content: bytes) -> None:
    """Write bytes to a file, given by path or as an object."""
    with open_target(file) as target:
        target.write(content)


def write_seekable(file: Target, write: Callable[[IO[bytes]], None]) -> None:
    """Let a function write to a file that it can seek in: containers go back to fill in their headers.

    Output that cannot be sought in (a pipe, a remote upload) is written to a temporary file first.
    """
    with open_target(file) as target:
        seekable = target.seekable() if hasattr(target, "seekable") else False
        if seekable is True:  # a mock or a broken wrapper may return something else
            write(target)
            return
        with tempfile.TemporaryFile() as buffer:
            write(buffer)
            buffer.seek(0)
            shutil.copyfileobj(buffer, target, 1 << 20)


def limit_error(where: str, size: str, name: str, limit: float) -> DecodeError:
    """Return the error for media that exceeds a limit: what it has, the limit, and how to raise it."""
    return DecodeError(
        f"{display_uri(where)}: {size}, and the limit is {name}={limit:,}. If you trust it, pass a larger {name}."
    )
