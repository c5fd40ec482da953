"""Encoded media as tensors of any framework: what addresses and bytes of one kind do alike."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from quire import media
from quire.errors import DecodeError
from quire.files import shown
from quire.media import Clip, Frame, Mesh, Points, Sound, as_tensor


def load_image(content: bytes, where: str, framework: str | None, channel_axis: int = -1, **options: Any) -> Any:
    """An image as a tensor, with its colours at an axis."""
    array = media.decode_image(content, where, **options)
    return as_tensor(array if channel_axis in (-1, 2) else np.moveaxis(array, -1, channel_axis).copy(), framework)


def load_audio(source: Any, where: str, framework: str | None, **options: Any) -> Sound:
    """A sound, its samples as a tensor."""
    sound = media.decode_audio(source, where, **options)
    return Sound(as_tensor(sound.samples, framework), sound.rate)


def load_video(source: Any, where: str, framework: str | None, **options: Any) -> Clip:
    """All frames of a video."""
    frames, times, keys, sound = media.decode_video(source, where, **options)
    audio = None if sound is None else Sound(as_tensor(sound.samples, framework), sound.rate)
    return Clip(as_tensor(frames, framework), as_tensor(times, framework), as_tensor(keys, framework), audio)


def load_frames(source: Any, where: str, framework: str | None, **options: Any) -> Iterator[Frame]:
    """The frames of a video one after the other."""
    for frame in media.stream_frames(source, where, **options):
        yield frame if framework is None else frame._replace(pixels=as_tensor(frame.pixels, framework))


def load_text(content: bytes, where: str, charset: str) -> str:
    """A text."""
    try:
        return content.decode(charset)
    except (UnicodeDecodeError, LookupError) as error:
        raise DecodeError(f"{shown(where)}: not text in {charset} ({error}). Say which charset it is in.") from error


def load_mesh(content: bytes, where: str, framework: str | None, **options: Any) -> Mesh:
    """A mesh."""
    return Mesh(*(as_tensor(part, framework) for part in media.decode_mesh(content, where, **options)))


def load_points(content: bytes, where: str, framework: str | None, **options: Any) -> Points:
    """A cloud of points."""
    return Points(*(as_tensor(part, framework) for part in media.decode_points(content, where, **options)))
