"""What the calls of `Document` for addresses, bytes and plain tensors do: each changes the document."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from quire.documents._held import held, whose
from quire.documents._images import array_of
from quire.errors import DecodeError, EncodeError
from quire.files import Limits, Target, guess_type, open_target, read_uri, scheme_of, shown, to_data_uri

if TYPE_CHECKING:
    from quire.documents._document import Document

ContentType = Literal["text", "tensor", "blob"]
CONTENT: tuple[ContentType, ...] = ("text", "tensor", "blob")


def load_blob(document: Document, limits: Limits) -> None:
    """The bytes at the uri as the blob, and their media type if the uri tells it."""
    uri = held(document, "uri")
    document.blob = read_uri(uri, **limits)
    document.mime_type = document.mime_type or guess_type(uri)


def load_text(document: Document, charset: str, limits: Limits) -> None:
    """The text at the uri."""
    uri = held(document, "uri")
    content = read_uri(uri, **limits)
    try:
        document.text = content.decode(charset)
    except (UnicodeDecodeError, LookupError) as error:
        raise DecodeError(f"{shown(uri)}: not text in {charset} ({error}). Say which charset it is in.") from error


def uri_to_data_uri(document: Document, charset: str, limits: Limits, *, base64: bool) -> None:
    """The content at the uri in the uri; one that holds it already stays."""
    uri = held(document, "uri")
    if scheme_of(uri) != "data":
        mime_type = document.mime_type or guess_type(uri) or "application/octet-stream"
        document.uri = _data_uri(read_uri(uri, **limits), mime_type, charset, base64=base64)


def text_to_data_uri(document: Document, charset: str, *, base64: bool) -> None:
    """The text in the uri."""
    try:
        content = held(document, "text").encode(charset)
    except (UnicodeEncodeError, LookupError) as error:
        raise EncodeError(f"the text of {whose(document)} cannot be written in {charset} ({error}).") from error
    document.uri = _data_uri(content, document.mime_type or "text/plain", charset, base64=base64)


def blob_to_data_uri(document: Document, charset: str, *, base64: bool) -> None:
    """The blob in the uri."""
    blob = held(document, "blob")
    if document.mime_type is None:
        raise EncodeError(f"{whose(document)} has no mime_type, which a data URI tells. Set it: 'image/png'.")
    document.uri = _data_uri(blob, document.mime_type, charset, base64=base64)


def content_to_data_uri(document: Document) -> None:
    """The text or the blob in the uri."""
    kind = content_type(document)
    if kind == "text":
        text_to_data_uri(document, "utf-8", base64=False)
    elif kind == "blob":
        blob_to_data_uri(document, "utf-8", base64=True)
    else:
        found = "nothing" if kind is None else "a tensor"
        raise EncodeError(
            f"{whose(document)} holds {found}, and only text or a blob becomes a data URI. "
            "An image does by convert_image_tensor_to_uri()."
        )


def _data_uri(content: bytes, mime_type: str, charset: str, *, base64: bool) -> str:
    text = mime_type.startswith("text/")
    return to_data_uri(content, mime_type, charset=charset if text else None, base64=base64)


def save_uri(document: Document, file: Target, limits: Limits) -> None:
    """The bytes at the uri in a file."""
    save(read_uri(held(document, "uri"), **limits), file)


def save_blob(document: Document, file: Target) -> None:
    """The blob in a file."""
    save(held(document, "blob"), file)


def save(content: bytes, file: Target) -> None:
    """Bytes in a file."""
    with open_target(file) as target:
        target.write(content)


def blob_to_tensor(document: Document, dtype: Any, count: int, offset: int) -> None:
    """The blob, which holds plain numbers, as a tensor of one axis."""
    try:
        array = np.frombuffer(held(document, "blob"), dtype=dtype or np.float64, count=count, offset=offset)
    except (ValueError, TypeError) as error:
        raise DecodeError(
            f"the blob of {whose(document)} does not hold numbers of {dtype or 'float64'}: {error}."
        ) from error
    document.tensor = array.copy()  # the memory of bytes cannot be written to


def tensor_to_blob(document: Document) -> None:
    """The numbers of the tensor, row by row, as the blob."""
    document.blob = array_of(document).tobytes()


def content(document: Document) -> Any:
    """The text, the tensor or the blob."""
    kind = content_type(document)
    return None if kind is None else getattr(document, kind)


def content_type(document: Document) -> ContentType | None:
    """Which of the three the document holds; the first, where it holds several."""
    return next((name for name in CONTENT if getattr(document, name) is not None), None)


def set_content(document: Document, value: Any) -> None:
    """The value in the field that is meant for its type, and nothing in the other two."""
    kind = "text" if isinstance(value, str) else "blob" if isinstance(value, (bytes, bytearray)) else "tensor"
    setattr(document, kind, value)
    for name in CONTENT:
        if name != kind:
            setattr(document, name, None)
