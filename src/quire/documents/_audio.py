"""Sound."""

from __future__ import annotations

from quire.document import BaseDocument
from quire.typing import AnyTensor, AudioBytes, AudioUrl


class Audio(BaseDocument, main=("url", "tensor", "bytes_")):
    """A sound as an address, a tensor of (frames, channels) or encoded bytes, and its embedding.

    `rate` is the number of frames that make a second. A field typed `Audio` takes an address, a tensor or bytes.
    """

    url: AudioUrl | None = None
    tensor: AnyTensor | None = None
    rate: int | None = None
    embedding: AnyTensor | None = None
    bytes_: AudioBytes | None = None
