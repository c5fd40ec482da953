"""Images."""

from __future__ import annotations

from quire.document import BaseDocument
from quire.typing import AnyTensor, ImageBytes, ImageUrl


class Image(BaseDocument, main=("url", "tensor", "bytes_")):
    """An image as an address, a tensor or encoded bytes, and its embedding. A field typed `Image` takes any of them."""

    url: ImageUrl | None = None
    tensor: AnyTensor | None = None
    embedding: AnyTensor | None = None
    bytes_: ImageBytes | None = None
