"""What a document must hold before something can be made of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quire.errors import DecodeError, EncodeError, TensorError, UriError

if TYPE_CHECKING:
    from quire.documents._document import Document

_ERRORS = {"uri": UriError, "blob": DecodeError, "text": EncodeError, "tensor": TensorError}
_HOW = {
    "uri": "Set `uri` to a path or an address",
    "blob": "Set `blob`, or fill it by load_uri_to_blob()",
    "text": "Set `text`, or fill it by load_uri_to_text()",
    "tensor": "Set `tensor`, or fill it by load_uri_to_image_tensor()",
}


def held(document: Document, name: str) -> Any:
    """The value of a field; an error that says how to fill it, if there is none."""
    value = getattr(document, name)
    if value is None:
        raise _ERRORS[name](f"{whose(document)} has no {name}. {_HOW[name]} first.")
    return value


def whose(document: Document) -> str:
    """A document as messages show it: by class and id."""
    return f"{type(document).__name__} {document.id}"
