"""Addresses of images, sound, videos, texts and meshes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

from typing_extensions import Unpack

from quire.files import MAX_BYTES, Fetching, guess_type, open_seekable, scheme_of
from quire.files._limits import too_large
from quire.media import Clip, Frame, Mesh, Points, Sound
from quire.typing import _media_load
from quire.typing._loading import AudioOptions, ImageOptions, MeshOptions, PointOptions, StreamOptions, VideoOptions
from quire.typing._url_types import Url, split_options


class ImageUrl(Url):
    """The address of an image."""

    __slots__ = ()

    def load(self, framework: str | None = None, **options: Unpack[ImageOptions]) -> Any:
        """The image as a tensor: uint8 of rows, columns and red, green, blue; its first frame, if it has several.

        `width` and `height` resize, and `channel_axis=0` puts the colours in front. A tensor of numpy unless
        `framework` is 'torch' or another. More than `max_pixels`, or more than Pillow allows, is a DecodeError. The
        other options are those of `load_bytes`.
        """
        fetching, rest = split_options(options)
        return _media_load.load_image(self.load_bytes(**fetching), self, framework, **rest)


class AudioUrl(Url):
    """The address of a sound."""

    __slots__ = ()

    def load(self, framework: str | None = None, **options: Unpack[AudioOptions]) -> Sound:
        """The samples, float32 of (frames, channels) between -1 and 1, and how many frames make a second.

        `rate` resamples, `mono` takes the mean of all channels, `native` keeps samples as they are stored. More than
        `max_seconds` (an hour) or `max_samples` is a DecodeError. The other options are those of `load_bytes`.
        """
        fetching, rest = split_options(options)
        return _media_load.load_audio(self.load_bytes(**fetching), self, framework, **rest)


class VideoUrl(Url):
    """The address of a video."""

    __slots__ = ()

    def load(self, framework: str | None = None, **options: Unpack[VideoOptions]) -> Clip:
        """All frames, uint8 of (frames, rows, columns, channels), with their times and key frames.

        The options of `frames`, and `audio=True` for the sound. More than `max_frames`, `max_seconds` (an hour) or
        `max_pixels`, over all frames, is a DecodeError.
        """
        fetching, rest = split_options(options)
        with self._opened(fetching, fetching.get("max_bytes", MAX_BYTES)) as file:
            return _media_load.load_video(file, self, framework, **rest)

    def frames(self, framework: str | None = None, **options: Unpack[StreamOptions]) -> Iterator[Frame]:
        """The frames one after the other, each with its time; the file is read on as they are asked for.

        From `start` to before `end`, in seconds; each `stride`-th; of another `width` and `height`; with `key_frames`
        those alone. A frame of more than `max_pixels` is a DecodeError. The file may be of any size, unless `max_bytes`
        is given. The other options are those of `load_bytes`.
        """
        fetching, rest = split_options(options)
        with self._opened(fetching, fetching.get("max_bytes")) as file:
            yield from _media_load.load_frames(file, self, framework, **rest)

    @contextmanager
    def _opened(self, fetching: Fetching, max_bytes: int | None) -> Iterator[IO[bytes]]:
        with open_seekable(str.__str__(self), **self._fetching(fetching)) as file:
            size = file.seek(0, os.SEEK_END) if max_bytes is not None else 0
            if max_bytes is not None and size > max_bytes:
                raise too_large(self, f"the file has {size:,} bytes", max_bytes)
            yield file


class TextUrl(Url):
    """The address of a text."""

    __slots__ = ()

    def load(self, charset: str = "utf-8", **fetching: Unpack[Fetching]) -> str:
        """The text at the address; the options are those of `load_bytes`."""
        return _media_load.load_text(self.load_bytes(**fetching), self, charset)


class Mesh3DUrl(Url):
    """The address of a mesh: glb, obj, off, ply or stl."""

    __slots__ = ()

    def load(self, framework: str | None = None, **options: Unpack[MeshOptions]) -> Mesh:
        """The vertices, float64 of (n, 3), and the faces, int64 of (m, 3).

        More than `max_points` of either are a DecodeError. The other options are those of `load_bytes`.
        """
        fetching, rest = split_options(options)
        rest.setdefault("file_type", _suffix(self))
        return _media_load.load_mesh(self.load_bytes(**fetching), self, framework, **rest)


class PointCloud3DUrl(Url):
    """The address of a cloud of points, or of a mesh: glb, obj, off, ply, stl or xyz."""

    __slots__ = ()

    def load(self, framework: str | None = None, **options: Unpack[PointOptions]) -> Points:
        """The points, float64 of (n, 3), and their colours, if there are any.

        `samples` are drawn from the faces of a mesh, the same for the same `seed`. More than `max_points` are a
        DecodeError. The other options are those of `load_bytes`.
        """
        fetching, rest = split_options(options)
        rest.setdefault("file_type", _suffix(self))
        return _media_load.load_points(self.load_bytes(**fetching), self, framework, **rest)


_KNOWN = ("glb", "obj", "off", "ply", "stl", "xyz")


def _suffix(uri: str) -> str | None:
    """The format that the address tells; None leaves it to the content."""
    if scheme_of(uri) == "data":
        name = (guess_type(uri) or "").rpartition("/")[2].removeprefix("x-")
    else:
        name = uri.partition("#")[0].partition("?")[0].rpartition(".")[2].lower()
    return name if name in _KNOWN else None
