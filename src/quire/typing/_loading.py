"""The options of the calls that load media."""

from __future__ import annotations

from typing_extensions import TypedDict

from quire.files import Fetching
from quire.media import FrameOptions


class ImageDecoding(TypedDict, total=False):
    """`width` and `height` resize; `channel_axis` says where the colours go; more than `max_pixels` is an error."""

    width: int | None
    height: int | None
    channel_axis: int
    max_pixels: int | None


class ImageOptions(ImageDecoding, Fetching, total=False):
    """And how it is read."""


class AudioDecoding(TypedDict, total=False):
    """`rate` resamples; `mono` mixes; `native` keeps the samples as stored; longer than `max_seconds` is an error."""

    rate: int | None
    mono: bool
    native: bool
    max_seconds: float
    max_samples: int


class AudioOptions(AudioDecoding, Fetching, total=False):
    """And how it is read."""


class StreamDecoding(FrameOptions, total=False):
    """Which frames, and of which size; a frame of more than `max_pixels` is an error."""

    max_pixels: int


class StreamOptions(StreamDecoding, Fetching, total=False):
    """And how it is read."""


class VideoDecoding(StreamDecoding, total=False):
    """With `audio` also the sound; more than `max_frames`, `max_seconds` or, over all, `max_pixels` is an error."""

    audio: bool
    max_frames: int
    max_seconds: float


class VideoOptions(VideoDecoding, Fetching, total=False):
    """And how it is read."""


class MeshDecoding(TypedDict, total=False):
    """`file_type` is told by the name or the content unless given; more than `max_points` are an error."""

    file_type: str | None
    max_points: int


class MeshOptions(MeshDecoding, Fetching, total=False):
    """And how it is read."""


class PointDecoding(MeshDecoding, total=False):
    """`samples` are drawn from the faces, the same for the same `seed`."""

    samples: int | None
    seed: int | None


class PointOptions(PointDecoding, Fetching, total=False):
    """And how it is read."""
