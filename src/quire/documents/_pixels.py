"""Image arithmetic on numpy arrays: axes, normalization, resizing and sliding windows.

Nothing here knows about documents, Pillow or other frameworks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.errors import TensorError
from quire.tensors import format_shape

if TYPE_CHECKING:
    from numpy.typing import NDArray


def move_axis(array: NDArray[Any], original: int, new: int) -> NDArray[Any]:
    """Return a view of the array with one axis moved."""
    for axis in (original, new):
        check_axis(array, axis)
    return array if original == new else np.moveaxis(array, original, new)


def check_axis(array: NDArray[Any], axis: int) -> int:
    """Return the axis counted from the front; raise if the array does not have it."""
    if not -array.ndim <= axis < array.ndim:
        raise TensorError(f"a tensor of shape {format_shape(array.shape)} has no axis {axis}.")
    return axis % array.ndim


def normalize(
    array: NDArray[Any], channel_axis: int, mean: Sequence[float], std: Sequence[float]
) -> NDArray[np.float32]:
    """Convert a uint8 image to float32: (pixel / 255 - mean) / std, per channel."""
    _check_image(array, "u1", "uint8", "a normalised image is reverted by set_image_tensor_inv_normalization()")
    means, stds = _channel_constants(array, channel_axis, mean, std)
    image = array.astype(np.float32)
    image *= _broadcast_channels(array, channel_axis, 1 / (255 * stds))
    image += _broadcast_channels(array, channel_axis, -means / stds)
    return image


def denormalize(
    array: NDArray[Any], channel_axis: int, mean: Sequence[float], std: Sequence[float]
) -> NDArray[np.uint8]:
    """Convert a normalized float image to uint8, rounded and clipped to 0-255."""
    _check_image(array, "f", "floats", "only a normalised image can be reverted")
    means, stds = _channel_constants(array, channel_axis, mean, std)
    image = array.astype(np.float32)
    image *= _broadcast_channels(array, channel_axis, 255 * stds)
    image += _broadcast_channels(array, channel_axis, 255 * means)
    return np.rint(image, out=image).clip(0, 255, out=image).astype(np.uint8)


def resize(array: NDArray[Any], height: int, width: int, channel_axis: int) -> NDArray[Any]:
    """Resize an image by nearest-neighbour interpolation."""
    image = move_axis(_check_image(array), channel_axis, -1)
    if min(height, width) < 1 or 0 in image.shape[:2]:
        raise TensorError(f"an image of shape {format_shape(array.shape)} cannot become {height} x {width} pixels.")
    rows, columns = _nearest(image.shape[0], height), _nearest(image.shape[1], width)
    return move_axis(image[rows[:, None], columns], -1, channel_axis)


def resample(array: NDArray[Any], ratio: float, channel_axis: int) -> NDArray[Any]:
    """Scale both sides of an image by a ratio, rounded down, by nearest-neighbour interpolation."""
    rows, columns = (int(size * ratio) for size in move_axis(_check_image(array), channel_axis, -1).shape[:2])
    return resize(array, rows, columns, channel_axis)


def sliding_windows(
    array: NDArray[Any], window: tuple[int, int], strides: tuple[int, int], channel_axis: int, *, padding: bool
) -> tuple[NDArray[Any], list[tuple[int, int]]]:
    """Cut an image into windows; return them as (windows, *image axes) with their (row, column) positions.

    Only windows that fit into the image are cut. With `padding`, all windows that start in the image are cut, and
    filled with zeros past its edges.
    """
    if min(*window, *strides) < 1:
        raise TensorError(f"windows and strides must be at least 1 pixel, got {window} and {strides}.")
    image = move_axis(_check_image(array), channel_axis, -1)
    starts = [
        range(0, size if padding else size - length + 1, stride)
        for size, length, stride in zip(image.shape[:2], window, strides, strict=True)
    ]
    if not all(starts):
        raise TensorError(
            f"no window of {window[0]} x {window[1]} pixels fits an image of shape {format_shape(array.shape)}. "
            "Use smaller windows, or padding=True."
        )
    missing = [
        max(0, positions[-1] + length - size)
        for positions, length, size in zip(starts, window, image.shape[:2], strict=True)
    ]
    if any(missing):
        image = np.pad(image, [(0, missing[0]), (0, missing[1]), (0, 0)])
    # The view has the axes (window rows, window columns, channels, height, width). It covers the padded image, whose
    # last positions may lie past the last start, so it is cut before the channels move to the end.
    view = np.lib.stride_tricks.sliding_window_view(image, window, axis=(0, 1))[:: strides[0], :: strides[1]]
    view = view[: len(starts[0]), : len(starts[1])]
    windows = np.array(np.moveaxis(view, 2, -1), order="C").reshape(-1, *window, image.shape[-1])
    axis = check_axis(array, channel_axis) + 1
    return move_axis(windows, -1, axis), [(row, column) for row in starts[0] for column in starts[1]]


def _nearest(old: int, new: int) -> NDArray[np.intp]:
    """Return, for each of the new pixels, the index of the old pixel under its centre."""
    return ((np.arange(new) + 0.5) * (old / new)).astype(np.intp).clip(0, old - 1)


def _check_image(
    array: NDArray[Any], kind: str = "", dtype: str = "", why: str = "an image has rows, columns and channels"
) -> NDArray[Any]:
    """Return the array if it has three axes and a dtype of the kind ('u1', 'f'); raise otherwise."""
    if array.ndim != 3 or not (array.dtype.kind + str(array.dtype.itemsize)).startswith(kind):
        expected = f"{dtype} of three axes" if dtype else "three axes"
        raise TensorError(f"expected {expected}, got {array.dtype} {format_shape(array.shape)}: {why}.")
    return array


def _channel_constants(
    array: NDArray[Any], channel_axis: int, mean: Sequence[float], std: Sequence[float]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    channels = array.shape[check_axis(array, channel_axis)]
    if not len(mean) == len(std) == channels:
        raise TensorError(
            f"axis {channel_axis} of a tensor of shape {format_shape(array.shape)} has {channels} channels, but there "
            f"are {len(mean)} means and {len(std)} deviations. Pass the axis of the channels as channel_axis."
        )
    return np.asarray(mean, np.float64), np.asarray(std, np.float64)


def _broadcast_channels(array: NDArray[Any], channel_axis: int, values: NDArray[np.float64]) -> NDArray[np.float32]:
    """Lay one value per channel out like one row of the image.

    Multiplying by a contiguous row is ten times faster than broadcasting over a last axis of three items.
    """
    axis = check_axis(array, channel_axis)
    column = values.astype(np.float32).reshape([-1 if index == axis else 1 for index in range(array.ndim)])
    return column if axis == 0 else np.ascontiguousarray(np.broadcast_to(column, (1, *array.shape[1:])))
