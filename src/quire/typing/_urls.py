"""URLs as field types: strings with a `load` method, which `Schemes` restricts to some URL schemes."""

from __future__ import annotations

import copyreg
import io
import os
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any, ClassVar, Union, cast, get_args, get_origin

import numpy as np
from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, PydanticSerializationUnexpectedValue, core_schema
from typing_extensions import Self, Unpack

from quire import _parametrize
from quire._optional import require
from quire.errors import DecodeError, OptionError, SchemaError, UriError, check_options
from quire.files import (
    MAX_BYTES,
    FetchOptions,
    allowed_schemes,
    display_uri,
    fetch,
    guess_type,
    open_seekable,
    scheme_of,
    uri_too_large,
)
from quire.media import Clip, Frame, Mesh, Points, Sound
from quire.tensors import Tensor, get_framework, to_framework
from quire.typing import _decoding
from quire.typing._decoding import (
    AudioOptions,
    FrameStreamOptions,
    ImageOptions,
    MeshOptions,
    PointOptions,
    VideoOptions,
)

_FETCHING = frozenset({"timeout", "max_bytes", "retries", "schemes", "storage_options"})
_MESH_SUFFIXES = ("glb", "obj", "off", "ply", "stl", "xyz")


class UrlMeta(type):
    """The metaclass of URLs, so that classes restricted to some schemes can be pickled by recipe."""

    _origin: type[Url] | None
    schemes: frozenset[str] | None


class Url(str, metaclass=UrlMeta):
    """A URL: a local path, or file://, http(s)://, data:, or any scheme that fsspec knows.

    It is a `str` in every way. `Annotated[ImageUrl, Schemes('https')]` allows only some schemes.
    """

    __slots__ = ()
    __quire_plain__: ClassVar[bool] = True  # every string is valid
    _origin: ClassVar[Any] = None
    schemes: ClassVar[frozenset[str] | None] = None

    def load_bytes(self, **fetching: Unpack[FetchOptions]) -> bytes:
        """Read the bytes at the URL.

        `timeout` is in seconds, for all of it, with retries (60; None for no limit), and `max_bytes` limits the size (1
        GiB). A download that fails for a transient reason is retried up to `retries` times (2). `schemes` allows only
        some schemes, also for redirects; local paths are refused then.
        """
        check_options("load_bytes()", fetching, FetchOptions.__annotations__)
        return fetch(str.__str__(self), **self._restrict(fetching))

    def _restrict(self, fetching: FetchOptions) -> FetchOptions:
        """Intersect the requested schemes with those of the type."""
        own, requested = type(self).schemes, fetching.get("schemes")
        if own is None:
            return fetching
        return {**fetching, "schemes": own if requested is None else own & {scheme.lower() for scheme in requested}}

    def __repr__(self) -> str:
        return str.__repr__(self)

    @classmethod
    def __quire_wrap__(cls, value: object) -> Self:
        """Return a string or a path as this class, unchanged if it is of it already; check its scheme."""
        if not isinstance(value, str):
            if not isinstance(value, os.PathLike):
                raise PydanticCustomError("url", "expected an address: a text or a path")
            value = str(value)
        if cls.schemes is not None:
            try:
                allowed_schemes(str.__str__(value), cls.schemes)
            except UriError as error:
                raise PydanticCustomError("url_scheme", "{reason}", {"reason": str(error)}) from None
        return value if isinstance(value, cls) else cls(str.__str__(value))

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.json_or_python_schema(
            core_schema.no_info_after_validator_function(cls.__quire_wrap__, core_schema.str_schema()),
            core_schema.no_info_plain_validator_function(cls.__quire_wrap__),
            serialization=core_schema.plain_serializer_function_ser_schema(
                _serialize_url, return_schema=core_schema.str_schema(), when_used="json"
            ),
            metadata={"quire_wrapper": cls},
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: object) -> dict[str, Any]:
        return {"type": "string", "format": "uri"}


def _serialize_url(value: object) -> str:
    if isinstance(value, str):
        return value
    raise PydanticSerializationUnexpectedValue(f"{type(value).__name__} is not an address")  # of another union member


# --- restriction to schemes


@dataclass(frozen=True, init=False)
class Schemes:
    """`Annotated[ImageUrl, Schemes('https')]`: URLs from untrusted sources, which may only have these schemes.

    Local paths and file:// are refused unless 'file' is listed, and so are redirects to other schemes. The values of
    the field are of a class that carries the restriction, so `load` enforces it without further arguments.
    """

    names: tuple[str, ...]

    def __init__(self, *names: str) -> None:
        if not names or "" in names:
            raise SchemaError(f"Schemes are names of schemes, like Schemes('https'), got {names}.")
        object.__setattr__(self, "names", names)

    def __quire_refine__(self, annotation: object) -> object:
        """Return the restricted type for an annotation; annotations that are not URLs are returned unchanged."""
        if get_origin(annotation) in (Union, types.UnionType):
            return Union[tuple(map(self.__quire_refine__, get_args(annotation)))]  # noqa: UP007 - built from a tuple
        return restrict_url(annotation, self.names) if isinstance(annotation, UrlMeta) else annotation

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        refined = self.__quire_refine__(source)
        if refined is source:
            raise SchemaError(f"Schemes are for URL types, like ImageUrl, not for {source}.")
        return handler.generate_schema(refined)


_restricted: dict[tuple[UrlMeta, frozenset[str]], UrlMeta] = {}


def restrict_url(url_type: UrlMeta, schemes: tuple[str, ...]) -> UrlMeta:
    """Return the subclass of a URL type that allows only some schemes; the same class for the same schemes."""
    origin = url_type._origin or url_type
    allowed = frozenset(scheme.lower() for scheme in schemes)
    if url_type.schemes is not None:
        allowed &= url_type.schemes
    cls = _restricted.get((origin, allowed))
    if cls is None:
        name = f"{origin.__name__}[{', '.join(sorted(allowed))}]"
        namespace = {
            "__slots__": (),
            "__module__": _parametrize.__name__,
            "__qualname__": _parametrize.publish(f"{origin.__module__}:{name}"),
            "__doc__": origin.__doc__,
            "_origin": origin,
            "schemes": allowed,
        }
        # Threads may race to this point; setdefault keeps the class of the first.
        cls = _restricted.setdefault((origin, allowed), UrlMeta(name, (origin,), namespace))
        _parametrize.register(cls)
    return cls


def _reduce(cls: UrlMeta) -> str | tuple[Callable[..., UrlMeta], tuple[Any, ...]]:
    if cls._origin is not None:
        return restrict_url, (cls._origin, tuple(sorted(cls.schemes or ())))
    return _parametrize.global_name(cls)


copyreg.pickle(UrlMeta, _reduce)


# --- one class per medium


class AnyUrl(Url):
    """The URL of anything: `load_bytes()` reads it."""

    __slots__ = ()


class ImageUrl(Url):
    """The URL of an image."""

    __slots__ = ()

    def load(
        self, framework: str | None = None, *, axis_layout: Sequence[str] | None = None, **options: Unpack[ImageOptions]
    ) -> Tensor:
        """Decode the image, or its first frame, to a tensor: uint8 of rows, columns and RGB.

        `width` and `height` resize, and `channel_axis=0` puts the channels first; `axis_layout` gives the order of all
        axes, as ('C', 'H', 'W'). The tensor is a numpy array unless `framework` is 'torch' or another. More than
        `max_pixels`, or more than Pillow allows, is a DecodeError. The other options are those of `load_bytes`.
        """
        fetching, decoding = _split_options(options, ImageOptions)
        if axis_layout is None:
            return _decoding.load_image(self.load_bytes(**fetching), self, framework, **decoding)
        if sorted(axis_layout) != ["C", "H", "W"] or "channel_axis" in decoding:
            raise OptionError(
                f"axis_layout={axis_layout!r}: it is an order of 'C', 'H' and 'W', and replaces channel_axis."
            )
        image = _decoding.load_image(self.load_bytes(**fetching), self, None, **decoding)
        image = np.ascontiguousarray(image.transpose(["HWC".index(axis) for axis in axis_layout]))
        return image if framework is None else to_framework(image, get_framework(framework))

    def load_pil(self, **fetching: Unpack[FetchOptions]) -> Any:
        """Open the image with Pillow: a `PIL.Image.Image`, in the mode in which it is stored."""
        image: Any = require("PIL.Image", extra="image", needed_for="load_pil()")
        content = self.load_bytes(**fetching)
        try:
            opened = image.open(io.BytesIO(content))
            opened.load()
        except (OSError, ValueError, SyntaxError, image.DecompressionBombError) as error:
            raise DecodeError(f"{display_uri(self)}: it is not an image that can be read ({error}).") from error
        return opened


class AudioUrl(Url):
    """The URL of audio."""

    __slots__ = ()

    def load(self, framework: str | None = None, **options: Unpack[AudioOptions]) -> Sound:
        """Decode the samples, float32 of shape (frames, channels) between -1 and 1, and their rate.

        `rate` resamples, `mono` averages the channels, `native` keeps the stored sample type. More than `max_seconds`
        (an hour) or `max_samples` is a DecodeError. The other options are those of `load_bytes`.
        """
        fetching, decoding = _split_options(options, AudioOptions)
        return _decoding.load_audio(self.load_bytes(**fetching), self, framework, **decoding)


class VideoUrl(Url):
    """The URL of a video."""

    __slots__ = ()

    def load(self, framework: str | None = None, **options: Unpack[VideoOptions]) -> Clip:
        """Decode all frames, uint8 of shape (frames, rows, columns, channels), with their times and key frames.

        Takes the options of `frames`, and `audio=True` for the audio. More than `max_frames`, `max_seconds` (an hour)
        or, over all frames, `max_pixels` is a DecodeError.
        """
        fetching, decoding = _split_options(options, VideoOptions)
        with self._open(fetching, fetching.get("max_bytes", MAX_BYTES)) as file:
            return _decoding.load_video(file, self, framework, **decoding)

    def frames(self, framework: str | None = None, **options: Unpack[FrameStreamOptions]) -> Iterator[Frame]:
        """Decode the video frame by frame, each with its time; the file is read as the frames are consumed.

        Frames from `start` to before `end`, in seconds; every `stride`-th; resized by `width` and `height`; with
        `key_frames` only the key frames. A frame of more than `max_pixels` is a DecodeError. The size of the file is
        not limited unless `max_bytes` is given. The other options are those of `load_bytes`.
        """
        fetching, decoding = _split_options(options, FrameStreamOptions)
        with self._open(fetching, fetching.get("max_bytes")) as file:
            yield from _decoding.load_frames(file, self, framework, **decoding)

    @contextmanager
    def _open(self, fetching: FetchOptions, max_bytes: int | None) -> Iterator[IO[bytes]]:
        with open_seekable(str.__str__(self), **self._restrict(fetching)) as file:
            size = file.seek(0, os.SEEK_END) if max_bytes is not None else 0
            if max_bytes is not None and size > max_bytes:
                raise uri_too_large(self, f"the file has {size:,} bytes", max_bytes)
            yield file


class TextUrl(Url):
    """The URL of a text."""

    __slots__ = ()

    def load(self, charset: str = "utf-8", **fetching: Unpack[FetchOptions]) -> str:
        """Read the text; the options are those of `load_bytes`."""
        return _decoding.load_text(self.load_bytes(**fetching), self, charset)


class Mesh3DUrl(Url):
    """The URL of a mesh: glb, obj, off, ply or stl."""

    __slots__ = ()

    def load(self, framework: str | None = None, **options: Unpack[MeshOptions]) -> Mesh:
        """Decode the vertices, float64 of shape (n, 3), and the faces, int64 of shape (m, 3).

        More than `max_points` of either is a DecodeError. The other options are those of `load_bytes`.
        """
        fetching, decoding = _split_options(options, MeshOptions)
        decoding.setdefault("file_type", _mesh_type(self))
        return _decoding.load_mesh(self.load_bytes(**fetching), self, framework, **decoding)


class PointCloud3DUrl(Url):
    """The URL of a point cloud or of a mesh: glb, obj, off, ply, stl or xyz."""

    __slots__ = ()

    def load(self, framework: str | None = None, **options: Unpack[PointOptions]) -> Points:
        """Decode the points, float64 of shape (n, 3), and their colors, if there are any.

        `samples` draws n points from the faces of a mesh, reproducibly for the same `seed`. More than `max_points` is
        a DecodeError. The other options are those of `load_bytes`.
        """
        fetching, decoding = _split_options(options, PointOptions)
        decoding.setdefault("file_type", _mesh_type(self))
        return _decoding.load_points(self.load_bytes(**fetching), self, framework, **decoding)


def _split_options(options: Mapping[str, Any], known: type[Any]) -> tuple[FetchOptions, dict[str, Any]]:
    """Split the options of a `load` method into those for reading and those for decoding, before anything is read."""
    check_options("load()", options, known.__annotations__)
    fetching = {name: value for name, value in options.items() if name in _FETCHING}
    decoding = {name: value for name, value in options.items() if name not in _FETCHING}
    return cast("FetchOptions", fetching), decoding


def _mesh_type(uri: str) -> str | None:
    """Return the format that the URL implies; None to detect it from the content."""
    if scheme_of(uri) == "data":
        name = (guess_type(uri) or "").rpartition("/")[2].removeprefix("x-")
    else:
        name = uri.partition("#")[0].partition("?")[0].rpartition(".")[2].lower()
    return name if name in _MESH_SUFFIXES else None
