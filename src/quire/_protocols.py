"""Protocols of documents and arrays for the packages below them, which must not import them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias, TypeGuard

if TYPE_CHECKING:
    from quire.schema import Schema

Annotation: TypeAlias = Any
"""A type annotation: a class, an alias such as `list[int]`, a union, a type variable, or a name that is resolved later.

Python has no class that all of them share, so type checkers know nothing about one.
"""

MODEL_SLOTS = ("__dict__", "__pydantic_fields_set__", "__pydantic_extra__", "__pydantic_private__")
"""The slots that hold the state of a pydantic model."""


class DocumentLike(Protocol):
    """The parts of a document that packages below `quire.document` use."""

    __dict__: dict[str, Any]
    __pydantic_extra__: dict[str, Any] | None
    __pydantic_private__: dict[str, Any] | None

    @classmethod
    def document_schema(cls) -> Schema: ...


class ArrayLike(Protocol):
    """The parts of an array that packages below `quire.array` use."""

    document_type: ClassVar[type[Any]]
    _documents: list[Any]
    _declared: str | None

    @classmethod
    def _trusted(cls, documents: list[Any]) -> ArrayLike: ...


class StoredDocuments(Protocol):
    """Documents on disk, which an array or a dataset in memory reads: the parts of `quire.storage.StoredDataset`."""

    document_type: ClassVar[type[Any]]

    def __iter__(self) -> Iterator[Any]: ...

    def _open_as(self, document_type: type[Any], caller: str) -> StoredDocuments:
        """Return the same rows for a container of a class, or raise an error that names the caller."""

    def read(self) -> Any:
        """Read all rows into one batch."""


def is_document_type(tp: object) -> TypeGuard[type[DocumentLike]]:
    """Return whether an object is a document class."""
    return isinstance(tp, type) and hasattr(tp, "document_schema")


def is_array_type(tp: object) -> TypeGuard[type[ArrayLike]]:
    """Return whether an object is a class of arrays of documents."""
    return isinstance(tp, type) and hasattr(tp, "document_type") and hasattr(tp, "_trusted")


def is_batch_type(tp: object) -> bool:
    """Return whether an object is a class of batches: documents as columns."""
    return isinstance(tp, type) and hasattr(tp, "document_type") and hasattr(tp, "_wrap")


def is_stored(value: object) -> TypeGuard[StoredDocuments]:
    """Return whether an object is a dataset of documents on disk."""
    return hasattr(type(value), "_open_as")
