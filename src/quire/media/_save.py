"""Tensors of any framework as encoded bytes, and as files."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from typing import IO, Any

import numpy as np

from quire.errors import OptionError, TensorError
from quire.files import Target, open_target
from quire.media._audio import encode_audio, write_audio
from quire.media._images import encode_image
from quire.media._meshes import encode_mesh, encode_points
from quire.media._tensors import as_numpy
from quire.media._video_files import encode_video, write_video
from quire.tensors import format_shape, framework_of


def to_image_bytes(tensor: Any, image_format: str = "png", *, channel_axis: int = -1) -> bytes:
    """An image, uint8 of rows, columns and 1 to 4 channels, as encoded bytes; `channel_axis=0` if they are in front."""
    array = as_numpy(tensor)
    return encode_image(array if array.ndim == 2 else _behind(array, channel_axis), image_format)


def save_image(tensor: Any, file: Target, *, image_format: str | None = None, channel_axis: int = -1) -> None:
    """Write an image to a file, in the format that is asked for or that the file's name tells."""
    content = to_image_bytes(tensor, image_format or suffix_of(file, "png"), channel_axis=channel_axis)
    with open_target(file) as target:
        target.write(content)


def to_audio_bytes(tensor: Any, rate: int, audio_format: str = "wav", *, channel_axis: int = -1) -> bytes:
    """A sound of (frames, channels) or (frames,) as encoded bytes: 'wav', 'flac', 'mp3', 'ogg', 'm4a', ..."""
    return encode_audio(_sound(tensor, channel_axis), rate, audio_format)


def save_audio(
    tensor: Any, file: Target, rate: int, *, audio_format: str | None = None, channel_axis: int = -1
) -> None:
    """Write a sound to a file, in the format that is asked for or that the file's name tells."""
    array, name = _sound(tensor, channel_axis), audio_format or suffix_of(file, "wav")
    _write(file, lambda target: write_audio(array, target, rate, name))


def to_video_bytes(
    frames: Any, rate: float, video_format: str = "mp4", *, channel_axis: int = -1, **options: Any
) -> bytes:
    """Frames as an encoded video: a tensor, or any iterable of them. `options`: codec, codec_options, audio."""
    return encode_video(_frames(frames, channel_axis), rate, video_format, **options)


def save_video(
    frames: Any,
    file: Target,
    rate: float,
    *,
    video_format: str | None = None,
    channel_axis: int = -1,
    **options: Any,
) -> None:
    """Write frames to a file while they come: a tensor, or any iterable of frames, of which one is held at a time.

    `options`: codec and codec_options, which are FFmpeg's, and audio, a `Sound`.
    """
    name = video_format or suffix_of(file, "mp4")
    _write(file, lambda target: write_video(_frames(frames, channel_axis), target, rate, name, **options))


def save_mesh(vertices: Any, faces: Any, file: Target, *, file_type: str | None = None) -> None:
    """Write a mesh to a file."""
    content = encode_mesh(as_numpy(vertices), as_numpy(faces), file_type or suffix_of(file, "ply"))
    with open_target(file) as target:
        target.write(content)


def save_points(points: Any, file: Target, *, colors: Any = None, file_type: str | None = None) -> None:
    """Write a cloud of points to a file."""
    shades = None if colors is None else as_numpy(colors)
    content = encode_points(as_numpy(points), shades, file_type or suffix_of(file, "ply"))
    with open_target(file) as target:
        target.write(content)


def suffix_of(file: Target, otherwise: str) -> str:
    """The format that the name of a file tells."""
    name = os.fspath(file) if isinstance(file, (str, os.PathLike)) else ""
    return os.path.splitext(name)[1][1:] or otherwise  # noqa: PTH122 - of a name that may be no path


def _behind(array: Any, channel_axis: int) -> Any:
    """The array with its channels as the last axis."""
    if not -array.ndim <= channel_axis < array.ndim:
        raise TensorError(f"a tensor of shape {format_shape(array.shape)} has no axis {channel_axis}.")
    return np.moveaxis(array, channel_axis, -1)


def _sound(tensor: Any, channel_axis: int) -> Any:
    array = as_numpy(tensor)
    return array if array.ndim == 1 else _behind(array, channel_axis)


def _frames(frames: Any, channel_axis: int) -> Any:
    """Frames whose channels are behind; `channel_axis` counts in a tensor of all, and in each frame of an iterable."""
    if channel_axis == -1:
        return frames
    if framework_of(frames) is not None:
        return _behind(as_numpy(frames), channel_axis)
    if isinstance(frames, (str, bytes)) or not isinstance(frames, Iterable):
        raise OptionError(f"frames are a tensor or an iterable of tensors, got {type(frames).__name__}.")
    return (_behind(as_numpy(getattr(frame, "pixels", frame)), channel_axis) for frame in frames)


def _write(file: Target, write: Callable[[IO[bytes]], None]) -> None:
    """Write to a file; by way of another where it cannot be sought in, as the writers go back to their first bytes."""
    with open_target(file) as target:
        if _seekable(target):
            write(target)
            return
        with tempfile.TemporaryFile() as part:
            write(part)
            part.seek(0)
            shutil.copyfileobj(part, target, 1 << 20)


def _seekable(file: Any) -> bool:
    return isinstance(file.seekable(), bool) and file.seekable() if hasattr(file, "seekable") else False
