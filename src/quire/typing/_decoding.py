"""How URLs and encoded bytes of one medium are decoded to tensors, and the options of their `load` methods."""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO, Any

import numpy as np
from typing_extensions import TypedDict

from quire import media
from quire.errors import DecodeError, check_options
from quire.files import FetchOptions, display_uri
from quire.media import Clip, Frame, FrameOptions, Mesh, Points, Sound, as_tensor
from quire.tensors import Tensor

# --- options: those of decoding for bytes, and with those of reading (`FetchOptions`) for URLs


class ImageDecoding(TypedDict, total=False):
    """`width` and `height` resize; `channel_axis` places the channels; more than `max_pixels` is an error."""

    width: int | None
    height: int | None
    channel_axis: int
    max_pixels: int | None


class ImageOptions(ImageDecoding, FetchOptions, total=False):
    """Options to read and decode an image."""


class AudioDecoding(TypedDict, total=False):
    """`rate` resamples; `mono` mixes the channels; `native` keeps the stored sample type.

    More than `max_seconds` or `max_samples` is an error.
    """

    rate: int | None
    mono: bool
    native: bool
    max_seconds: float
    max_samples: int


class AudioOptions(AudioDecoding, FetchOptions, total=False):
    """Options to read and decode audio."""


class StreamDecoding(FrameOptions, total=False):
    """The frames to decode, and their size; a frame of more than `max_pixels` is an error."""

    max_pixels: int


class FrameStreamOptions(StreamDecoding, FetchOptions, total=False):
    """Options to read a video and to decode it frame by frame."""


class VideoDecoding(StreamDecoding, total=False):
    """`audio` decodes the audio, too. More than `max_frames`, `max_seconds` or, in total, `max_pixels` is an error."""

    audio: bool
    max_frames: int
    max_seconds: float


class VideoOptions(VideoDecoding, FetchOptions, total=False):
    """Options to read and decode a video."""


class MeshDecoding(TypedDict, total=False):
    """`file_type` defaults to the suffix or the content; more than `max_points` is an error."""

    file_type: str | None
    max_points: int


class MeshOptions(MeshDecoding, FetchOptions, total=False):
    """Options to read and decode a mesh."""


class PointDecoding(MeshDecoding, total=False):
    """`samples` draws n points from the faces, reproducibly for the same `seed`."""

    samples: int | None
    seed: int | None


class PointOptions(PointDecoding, FetchOptions, total=False):
    """Options to read and decode a point cloud."""


# --- decoding to tensors of a framework


def load_image(content: bytes, where: str, framework: str | None, channel_axis: int = -1, **options: Any) -> Tensor:
    """Decode an image to a tensor, with its channels at an axis."""
    check_options("load()", options, ImageDecoding.__annotations__)
    array = media.decode_image(content, where, **options)
    return as_tensor(array if channel_axis in (-1, 2) else np.moveaxis(array, -1, channel_axis).copy(), framework)


def load_audio(content: bytes, where: str, framework: str | None, **options: Any) -> Sound:
    """Decode audio, with the samples as a tensor."""
    check_options("load()", options, AudioDecoding.__annotations__)
    sound = media.decode_audio(content, where, **options)
    return Sound(as_tensor(sound.samples, framework), sound.rate)


def load_video(source: bytes | IO[bytes], where: str, framework: str | None, **options: Any) -> Clip:
    """Decode all frames of a video to one tensor."""
    check_options("load()", options, VideoDecoding.__annotations__)
    frames, times, keys, sound = media.decode_video(source, where, **options)
    audio = None if sound is None else Sound(as_tensor(sound.samples, framework), sound.rate)
    return Clip(as_tensor(frames, framework), as_tensor(times, framework), as_tensor(keys, framework), audio)


def load_frames(source: bytes | IO[bytes], where: str, framework: str | None, **options: Any) -> Iterator[Frame]:
    """Decode a video frame by frame."""
    check_options("load()", options, StreamDecoding.__annotations__)
    for frame in media.stream_frames(source, where, **options):
        yield frame if framework is None else frame._replace(pixels=as_tensor(frame.pixels, framework))


def load_text(content: bytes, where: str, charset: str) -> str:
    """Decode a text."""
    try:
        return content.decode(charset)
    except (UnicodeDecodeError, LookupError) as error:
        raise DecodeError(f"{display_uri(where)}: not text in {charset} ({error}). Pass the right charset.") from error


def load_mesh(content: bytes, where: str, framework: str | None, **options: Any) -> Mesh:
    """Decode a mesh to tensors."""
    check_options("load()", options, MeshDecoding.__annotations__)
    return Mesh(*(as_tensor(part, framework) for part in media.decode_mesh(content, where, **options)))


def load_points(content: bytes, where: str, framework: str | None, **options: Any) -> Points:
    """Decode a point cloud to tensors."""
    check_options("load()", options, PointDecoding.__annotations__)
    return Points(*(as_tensor(part, framework) for part in media.decode_points(content, where, **options)))
