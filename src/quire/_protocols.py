"""The protocols by which lower floors know documents and arrays without importing them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeGuard

if TYPE_CHECKING:
    from quire.schema import Schema

MODEL_SLOTS = ("__dict__", "__pydantic_fields_set__", "__pydantic_extra__", "__pydantic_private__")
"""What makes up a pydantic model."""


class DocumentLike(Protocol):
    """What a document is to the floors below `quire.document`."""

    __dict__: dict[str, Any]
    __pydantic_extra__: dict[str, Any] | None
    __pydantic_private__: dict[str, Any] | None

    @classmethod
    def document_schema(cls) -> Schema: ...


class ArrayLike(Protocol):
    """What an array of documents is to the floors below `quire.array`."""

    document_type: ClassVar[type[Any]]
    _documents: list[Any]

    @classmethod
    def _trusted(cls, documents: list[Any]) -> ArrayLike: ...


def is_document_type(tp: object) -> TypeGuard[type[DocumentLike]]:
    """Whether the object is a document class."""
    return isinstance(tp, type) and hasattr(tp, "document_schema")


def is_array_type(tp: object) -> TypeGuard[type[ArrayLike]]:
    """Whether the object is a class of arrays of documents (rows)."""
    return isinstance(tp, type) and hasattr(tp, "document_type") and hasattr(tp, "_trusted")
