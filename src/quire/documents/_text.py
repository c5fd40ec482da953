"""Text."""

from __future__ import annotations

from quire.document import BaseDocument
from quire.typing import AnyTensor, TextBytes, TextUrl


class Text(BaseDocument, main=("text", "bytes_")):
    """A piece of text, where it comes from, and its embedding. A field typed `Text` takes a plain string."""

    text: str | None = None
    url: TextUrl | None = None
    embedding: AnyTensor | None = None
    bytes_: TextBytes | None = None
