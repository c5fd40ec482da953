"""One document class per modality: text, images, audio, video and 3D geometry.

The signatures under TYPE_CHECKING are what type checkers need for `Image('a.png')`: pydantic converts text to
`ImageUrl`, and a main value comes without a name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quire.document import BaseDocument
from quire.typing import (
    AnyTensor,
    AudioBytes,
    AudioUrl,
    ImageBytes,
    ImageUrl,
    Mesh3DBytes,
    Mesh3DUrl,
    PointCloud3DBytes,
    PointCloud3DUrl,
    TextBytes,
    TextUrl,
    VideoBytes,
    VideoUrl,
)


class AnyDocument(BaseDocument, extra="allow"):
    """A document with any fields: they are kept as they are passed, without types, and without columns of their own."""

    if TYPE_CHECKING:

        def __init__(self, **fields: Any) -> None: ...

        def __getattr__(self, name: str) -> Any: ...


class Text(BaseDocument, main=("text", "bytes_")):
    """A text with its URL and its embedding. A field typed `Text` accepts a plain string or bytes."""

    text: str | None = None
    url: TextUrl | None = None
    embedding: AnyTensor | None = None
    bytes_: TextBytes | None = None

    if TYPE_CHECKING:

        def __init__(
            self,
            main: str | bytes = ...,
            /,
            *,
            id: str = ...,
            text: str | None = None,
            url: str | None = None,
            embedding: AnyTensor | None = None,
            bytes_: bytes | None = None,
        ) -> None: ...


class Image(BaseDocument, main=("url", "tensor", "bytes_")):
    """An image as a URL, a tensor or encoded bytes, and its embedding. A field typed `Image` accepts any of them."""

    url: ImageUrl | None = None
    tensor: AnyTensor | None = None
    embedding: AnyTensor | None = None
    bytes_: ImageBytes | None = None

    if TYPE_CHECKING:

        def __init__(
            self,
            main: str | bytes | AnyTensor = ...,
            /,
            *,
            id: str = ...,
            url: str | None = None,
            tensor: AnyTensor | None = None,
            embedding: AnyTensor | None = None,
            bytes_: bytes | None = None,
        ) -> None: ...


class Audio(BaseDocument, main=("url", "tensor", "bytes_")):
    """Audio as a URL, a tensor of shape (frames, channels) or encoded bytes, and its embedding.

    `rate` is the sample rate in frames per second. A field typed `Audio` accepts a URL, a tensor or bytes.
    """

    url: AudioUrl | None = None
    tensor: AnyTensor | None = None
    rate: int | None = None
    embedding: AnyTensor | None = None
    bytes_: AudioBytes | None = None

    if TYPE_CHECKING:

        def __init__(
            self,
            main: str | bytes | AnyTensor = ...,
            /,
            *,
            id: str = ...,
            url: str | None = None,
            tensor: AnyTensor | None = None,
            rate: int | None = None,
            embedding: AnyTensor | None = None,
            bytes_: bytes | None = None,
        ) -> None: ...


class Video(BaseDocument, main=("url", "tensor", "bytes_")):
    """A video as a URL, a tensor of shape (frames, rows, columns, channels) or encoded bytes, and its embedding.

    `times` holds the time of each frame in seconds, and `key_frames` the indices of the key frames. A field typed
    `Video` accepts a URL, a tensor or bytes.
    """

    url: VideoUrl | None = None
    tensor: AnyTensor | None = None
    times: AnyTensor | None = None
    key_frames: AnyTensor | None = None
    audio: Audio | None = None
    embedding: AnyTensor | None = None
    bytes_: VideoBytes | None = None

    if TYPE_CHECKING:

        def __init__(
            self,
            main: str | bytes | AnyTensor = ...,
            /,
            *,
            id: str = ...,
            url: str | None = None,
            tensor: AnyTensor | None = None,
            times: AnyTensor | None = None,
            key_frames: AnyTensor | None = None,
            audio: Audio | None = None,
            embedding: AnyTensor | None = None,
            bytes_: bytes | None = None,
        ) -> None: ...


class Mesh3D(BaseDocument, main=("url", "bytes_")):
    """A triangle mesh as a URL, as vertices and faces, or as encoded bytes, and its embedding.

    `vertices` has shape (n, 3). `faces` has shape (m, 3) and holds the vertex indices of each triangle. A field typed
    `Mesh3D` accepts a URL or bytes.
    """

    url: Mesh3DUrl | None = None
    vertices: AnyTensor | None = None
    faces: AnyTensor | None = None
    embedding: AnyTensor | None = None
    bytes_: Mesh3DBytes | None = None

    if TYPE_CHECKING:

        def __init__(
            self,
            main: str | bytes = ...,
            /,
            *,
            id: str = ...,
            url: str | None = None,
            vertices: AnyTensor | None = None,
            faces: AnyTensor | None = None,
            embedding: AnyTensor | None = None,
            bytes_: bytes | None = None,
        ) -> None: ...


class PointCloud3D(BaseDocument, main=("url", "points", "bytes_")):
    """A point cloud as a URL, a tensor of shape (n, 3) or encoded bytes, and its embedding.

    `colors` has shape (n, 3) or (n, 4). A field typed `PointCloud3D` accepts a URL, a tensor of points or bytes.
    """

    url: PointCloud3DUrl | None = None
    points: AnyTensor | None = None
    colors: AnyTensor | None = None
    embedding: AnyTensor | None = None
    bytes_: PointCloud3DBytes | None = None

    if TYPE_CHECKING:

        def __init__(
            self,
            main: str | bytes | AnyTensor = ...,
            /,
            *,
            id: str = ...,
            url: str | None = None,
            points: AnyTensor | None = None,
            colors: AnyTensor | None = None,
            embedding: AnyTensor | None = None,
            bytes_: bytes | None = None,
        ) -> None: ...
