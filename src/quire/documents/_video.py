"""Videos."""

from __future__ import annotations

from quire.document import BaseDocument
from quire.documents._audio import Audio
from quire.typing import AnyTensor, VideoBytes, VideoUrl


class Video(BaseDocument, main=("url", "tensor", "bytes_")):
    """A video as an address, a tensor of (frames, rows, columns, channels) or encoded bytes, and its embedding.

    `times` are those of the frames, in seconds, and `key_frames` the numbers of those that stand for themselves. A
    field typed `Video` takes an address, a tensor or bytes.
    """

    url: VideoUrl | None = None
    tensor: AnyTensor | None = None
    times: AnyTensor | None = None
    key_frames: AnyTensor | None = None
    audio: Audio | None = None
    embedding: AnyTensor | None = None
    bytes_: VideoBytes | None = None
