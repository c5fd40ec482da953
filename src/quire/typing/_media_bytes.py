"""Encoded media as field types: `bytes` with a `load` method."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any, ClassVar

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, PydanticSerializationUnexpectedValue, core_schema
from typing_extensions import Self, Unpack

from quire.media import Clip, Frame, Mesh, Points, Sound
from quire.tensors import Tensor
from quire.typing import _decoding
from quire.typing._decoding import (
    AudioDecoding,
    ImageDecoding,
    MeshDecoding,
    PointDecoding,
    StreamDecoding,
    VideoDecoding,
)


class MediaBytes(bytes):
    """Encoded media: `bytes` in every way, and base64 in JSON."""

    __slots__ = ()
    __quire_plain__: ClassVar[bool] = True  # any bytes are valid

    @classmethod
    def __quire_wrap__(cls, value: object) -> Self:
        """Return a value as this class, unchanged if it is of it already."""
        if isinstance(value, cls):
            return value
        if isinstance(value, (bytes, bytearray, memoryview)):
            return cls(value)
        raise PydanticCustomError("media_bytes", "expected bytes")

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.json_or_python_schema(
            core_schema.no_info_after_validator_function(cls._from_base64, core_schema.str_schema()),
            core_schema.no_info_plain_validator_function(cls.__quire_wrap__),
            serialization=core_schema.plain_serializer_function_ser_schema(
                _to_base64, return_schema=core_schema.str_schema(), when_used="json"
            ),
            metadata={"quire_wrapper": cls},
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: object) -> dict[str, Any]:
        return {"type": "string", "format": "binary", "contentEncoding": "base64"}

    @classmethod
    def _from_base64(cls, text: str) -> Self:
        try:
            return cls(base64.b64decode(text, validate=True))
        except ValueError:
            raise PydanticCustomError("base64", "expected bytes in base64") from None


def _to_base64(value: object) -> str:
    if not isinstance(value, bytes):  # leaves the value to another member of a union
        raise PydanticSerializationUnexpectedValue(f"{type(value).__name__} is not bytes")
    return base64.b64encode(value).decode("ascii")


class ImageBytes(MediaBytes):
    """An encoded image."""

    __slots__ = ()

    def load(self, framework: str | None = None, **options: Unpack[ImageDecoding]) -> Tensor:
        """Decode the image to a tensor, like `ImageUrl.load`."""
        return _decoding.load_image(self, "the bytes of an image", framework, **options)


class AudioBytes(MediaBytes):
    """Encoded audio."""

    __slots__ = ()

    def load(self, framework: str | None = None, **options: Unpack[AudioDecoding]) -> Sound:
        """Decode the samples and their rate, like `AudioUrl.load`."""
        return _decoding.load_audio(self, "the bytes of a sound", framework, **options)


class VideoBytes(MediaBytes):
    """An encoded video."""

    __slots__ = ()

    def load(self, framework: str | None = None, **options: Unpack[VideoDecoding]) -> Clip:
        """Decode all frames, like `VideoUrl.load`."""
        return _decoding.load_video(self, "the bytes of a video", framework, **options)

    def frames(self, framework: str | None = None, **options: Unpack[StreamDecoding]) -> Iterator[Frame]:
        """Decode the video frame by frame, like `VideoUrl.frames`."""
        return _decoding.load_frames(self, "the bytes of a video", framework, **options)


class TextBytes(MediaBytes):
    """An encoded text."""

    __slots__ = ()

    def load(self, charset: str = "utf-8") -> str:
        """Decode the text."""
        return _decoding.load_text(self, "the bytes of a text", charset)


class Mesh3DBytes(MediaBytes):
    """An encoded mesh."""

    __slots__ = ()

    def load(self, framework: str | None = None, **options: Unpack[MeshDecoding]) -> Mesh:
        """Decode the vertices and faces, like `Mesh3DUrl.load`."""
        return _decoding.load_mesh(self, "the bytes of a mesh", framework, **options)


class PointCloud3DBytes(MediaBytes):
    """An encoded point cloud."""

    __slots__ = ()

    def load(self, framework: str | None = None, **options: Unpack[PointDecoding]) -> Points:
        """Decode the points and colors, like `PointCloud3DUrl.load`."""
        return _decoding.load_points(self, "the bytes of points", framework, **options)
