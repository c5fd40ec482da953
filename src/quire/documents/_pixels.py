"""Arithmetic on arrays of pixels. Nothing here knows documents, Pillow or any framework but numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.errors import TensorError
from quire.tensors import format_shape

if TYPE_CHECKING:
    from numpy.typing import NDArray


def move_axis(array: NDArray[Any], original: int, new: int) -> NDArray[Any]:
    """A view of the array with one axis elsewhere."""
    for axis in (original, new):
        check_axis(array, axis)
    return array if original == new else np.moveaxis(array, original, new)


def check_axis(array: NDArray[Any], axis: int) -> int:
    """The axis counted from the front; an error if the array has no such axis."""
    if not -array.ndim <= axis < array.ndim:
        raise TensorError(f"a tensor of shape {format_shape(array.shape)} has no axis {axis}.")
    return axis % array.ndim


def normalized(
    array: NDArray[Any], channel_axis: int, mean: Sequence[float], std: Sequence[float]
) -> NDArray[np.float32]:
    """An image of bytes as floats: (pixel / 255 - mean) / std, channel by channel."""
    _check_image(array, "u1", "uint8", "an image that was normalised already is undone by the inverse call")
    mean_, std_ = _constants(array, channel_axis, mean, std)
    scale, shift = _spread(array, channel_axis, 1 / (255 * std_)), _spread(array, channel_axis, -mean_ / std_)
    made = array.astype(np.float32)
    made *= scale
    made += shift
    return made


def denormalized(
    array: NDArray[Any], channel_axis: int, mean: Sequence[float], std: Sequence[float]
) -> NDArray[np.uint8]:
    """An image of floats as bytes again: rounded, and cut to what a byte holds."""
    _check_image(array, "f", "floats", "only an image that was normalised can be undone")
    mean_, std_ = _constants(array, channel_axis, mean, std)
    made = array.astype(np.float32)
    made *= _spread(array, channel_axis, 255 * std_)
    made += _spread(array, channel_axis, 255 * mean_)
    return np.rint(made, out=made).clip(0, 255, out=made).astype(np.uint8)


def resized(array: NDArray[Any], height: int, width: int, channel_axis: int) -> NDArray[Any]:
    """The image in another size, each pixel being the nearest one of the old image."""
    image = move_axis(_check_image(array), channel_axis, -1)
    if min(height, width) < 1 or 0 in image.shape[:2]:
        raise TensorError(f"an image of shape {format_shape(array.shape)} cannot become {height} x {width} pixels.")
    rows, columns = _nearest(image.shape[0], height), _nearest(image.shape[1], width)
    return move_axis(image[rows[:, None], columns], -1, channel_axis)


def windows(
    array: NDArray[Any], window: tuple[int, int], strides: tuple[int, int], channel_axis: int, *, padding: bool
) -> tuple[NDArray[Any], list[tuple[int, int]]]:
    """Windows that slide over an image, (windows, *image axes), and where each starts, (row, column).

    Only windows that lie within the image; with `padding` all that start in it, zeros behind its edges.
    """
    if min(*window, *strides) < 1:
        raise TensorError(f"windows and strides are of 1 pixel and more, got {window} and {strides}.")
    image = move_axis(_check_image(array), channel_axis, -1)
    starts = [_starts(*sizes, padding=padding) for sizes in zip(image.shape[:2], window, strides, strict=True)]
    if not all(starts):
        raise TensorError(
            f"no window of {window[0]} x {window[1]} pixels fits an image of shape {format_shape(array.shape)}. "
            "Use smaller windows, or padding=True."
        )
    image = _padded(image, [places[-1] + length for places, length in zip(starts, window, strict=True)])
    view = np.lib.stride_tricks.sliding_window_view(image, window, axis=(0, 1))[:: strides[0], :: strides[1]]
    view = view[: len(starts[0]), : len(starts[1])]  # (rows, columns, channels, height, width)
    made = np.array(np.moveaxis(view, 2, -1), order="C").reshape(-1, *window, image.shape[-1])
    axis = check_axis(array, channel_axis) + 1
    return move_axis(made, -1, axis), [(row, column) for row in starts[0] for column in starts[1]]


def _padded(image: NDArray[Any], sizes: list[int]) -> NDArray[Any]:
    """The image with rows and columns of zeros behind it, up to these sizes."""
    missing = [max(0, want - have) for want, have in zip(sizes, image.shape[:2], strict=True)]
    return np.pad(image, [(0, missing[0]), (0, missing[1]), (0, 0)]) if any(missing) else image


def _starts(size: int, window: int, stride: int, *, padding: bool) -> range:
    return range(0, size if padding else size - window + 1, stride)


def _nearest(old: int, new: int) -> NDArray[np.intp]:
    """For each pixel of a new row, the one of the old row that its middle falls on."""
    return ((np.arange(new) + 0.5) * (old / new)).astype(np.intp).clip(0, old - 1)


def _check_image(
    array: NDArray[Any], kind: str = "", wanted: str = "", why: str = "an image has rows, columns and channels"
) -> NDArray[Any]:
    """The array, if it has three axes and its dtype is of the kind."""
    if array.ndim != 3 or not (array.dtype.kind + str(array.dtype.itemsize)).startswith(kind):
        expected = f"{wanted} of three axes" if wanted else "three axes"
        raise TensorError(f"expected {expected}, got {array.dtype} {format_shape(array.shape)}: {why}.")
    return array


def _constants(
    array: NDArray[Any], channel_axis: int, mean: Sequence[float], std: Sequence[float]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    channels = array.shape[check_axis(array, channel_axis)]
    if not len(mean) == len(std) == channels:
        raise TensorError(
            f"axis {channel_axis} of a tensor of shape {format_shape(array.shape)} has {channels} channels, but there "
            f"are {len(mean)} means and {len(std)} deviations. Say where the channels are by channel_axis."
        )
    return np.asarray(mean, np.float64), np.asarray(std, np.float64)


def _spread(array: NDArray[Any], channel_axis: int, values: NDArray[np.float64]) -> NDArray[np.float32]:
    """One value a channel, laid out like one row of the image: ten times faster than a broadcast over three items."""
    axis = check_axis(array, channel_axis)
    column = values.astype(np.float32).reshape([-1 if at == axis else 1 for at in range(array.ndim)])
    return column if axis == 0 else np.ascontiguousarray(np.broadcast_to(column, (1, *array.shape[1:])))
