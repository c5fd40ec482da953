"""Encoded images, sound, videos, texts and meshes: bytes that know how to be decoded."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any, ClassVar

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, PydanticSerializationUnexpectedValue, core_schema
from typing_extensions import Unpack

from quire.media import Clip, Frame, Mesh, Points, Sound
from quire.typing import _media_load
from quire.typing._loading import (
    AudioDecoding,
    ImageDecoding,
    MeshDecoding,
    PointDecoding,
    StreamDecoding,
    VideoDecoding,
)


class MediaBytes(bytes):
    """Encoded media: `bytes` in every way. In JSON they are base64."""

    __slots__ = ()
    __quire_plain__: ClassVar[bool] = True  # any bytes will do

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        python = core_schema.no_info_plain_validator_function(cls._taken)
        text = core_schema.no_info_after_validator_function(cls._read, core_schema.str_schema())
        return core_schema.json_or_python_schema(
            text,
            python,
            serialization=core_schema.plain_serializer_function_ser_schema(
                _write, return_schema=core_schema.str_schema(), when_used="json"
            ),
            metadata={"quire_wrapper": cls},
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: Any) -> dict[str, Any]:
        return {"type": "string", "format": "binary", "contentEncoding": "base64"}

    @classmethod
    def _taken(cls, value: Any) -> Any:
        """Bytes of this kind as they are; others as such."""
        if isinstance(value, cls):
            return value
        if isinstance(value, (bytes, bytearray, memoryview)):
            return cls(value)
        raise PydanticCustomError("media_bytes", "expected bytes")

    _checked = _taken

    @classmethod
    def _read(cls, text: str) -> Any:
        try:
            return cls(base64.b64decode(text, validate=True))
        except ValueError:
            raise PydanticCustomError("base64", "expected bytes in base64") from None


def _write(value: Any) -> str:
    if not isinstance(value, bytes):  # but for another member of a union
        raise PydanticSerializationUnexpectedValue(f"{type(value).__name__} is not bytes")
    return base64.b64encode(value).decode("ascii")


class ImageBytes(MediaBytes):
    """An encoded image."""

    __slots__ = ()

    def load(self, framework: str | None = None, **options: Unpack[ImageDecoding]) -> Any:
        """The image as a tensor, as `ImageUrl.load` does."""
        return _media_load.load_image(self, "the bytes of an image", framework, **options)


class AudioBytes(MediaBytes):
    """An encoded sound."""

    __slots__ = ()

    def load(self, framework: str | None = None, **options: Unpack[AudioDecoding]) -> Sound:
        """The samples and how many make a second, as `AudioUrl.load` does."""
        return _media_load.load_audio(self, "the bytes of a sound", framework, **options)


class VideoBytes(MediaBytes):
    """An encoded video."""

    __slots__ = ()

    def load(self, framework: str | None = None, **options: Unpack[VideoDecoding]) -> Clip:
        """All frames, as `VideoUrl.load` does."""
        return _media_load.load_video(self, "the bytes of a video", framework, **options)

    def frames(self, framework: str | None = None, **options: Unpack[StreamDecoding]) -> Iterator[Frame]:
        """The frames one after the other, as `VideoUrl.frames` does."""
        return _media_load.load_frames(self, "the bytes of a video", framework, **options)


class TextBytes(MediaBytes):
    """An encoded text."""

    __slots__ = ()

    def load(self, charset: str = "utf-8") -> str:
        """The text."""
        return _media_load.load_text(self, "the bytes of a text", charset)


class Mesh3DBytes(MediaBytes):
    """An encoded mesh."""

    __slots__ = ()

    def load(self, framework: str | None = None, **options: Unpack[MeshDecoding]) -> Mesh:
        """The vertices and faces, as `Mesh3DUrl.load` does."""
        return _media_load.load_mesh(self, "the bytes of a mesh", framework, **options)


class PointCloud3DBytes(MediaBytes):
    """An encoded cloud of points."""

    __slots__ = ()

    def load(self, framework: str | None = None, **options: Unpack[PointDecoding]) -> Points:
        """The points and colours, as `PointCloud3DUrl.load` does."""
        return _media_load.load_points(self, "the bytes of points", framework, **options)
