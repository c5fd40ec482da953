"""What may enter an array: documents of its type; everything is checked before anything changes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from quire.document import BaseDocument
from quire.errors import DocumentTypeError, DuplicateIdError
from quire.tensors import describe


def admit(array_type: type[Any], items: Iterable[Any]) -> list[Any]:
    """The items as documents of the array's type. A mapping, or the main value of a document, becomes a document."""
    if isinstance(items, (str, bytes, Mapping, BaseDocument)) or not isinstance(items, Iterable):
        raise DocumentTypeError(f"{array_type.__name__} takes an iterable of documents, got {describe(items)}.")
    documents = list(items)
    wanted = array_type.document_type
    if set(map(type, documents)) <= {wanted}:
        return documents
    return [
        item if isinstance(item, wanted) else _convert(array_type, item, index) for index, item in enumerate(documents)
    ]


def _convert(array_type: type[Any], item: Any, index: int) -> Any:
    wanted: type[BaseDocument] = array_type.document_type
    if wanted is BaseDocument or isinstance(item, BaseDocument):
        raise DocumentTypeError(
            f"{array_type.__name__}: item {index}: expected a {wanted.__name__}, got {describe(item)}."
        )
    try:
        return wanted.model_validate(item)
    except ValidationError as error:
        if isinstance(item, Mapping):
            raise DocumentTypeError(f"{array_type.__name__}: item {index}: {error}") from error
        message = f"{array_type.__name__}: item {index}: expected a {wanted.__name__}, got {describe(item)}."
        raise DocumentTypeError(message) from None


def check_unique(documents: Iterable[Any]) -> None:
    """Refuse documents of which two have one id."""
    seen = set()
    for document in documents:
        key = document.__dict__.get("id")
        if key is not None and key in seen:
            raise DuplicateIdError(f"a document with the id {key!r} is in the array already.")
        seen.add(key)
