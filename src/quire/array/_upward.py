"""The calls that reach up: the closed list of imports inside functions, three lines each."""

from __future__ import annotations

from typing import Any


def stack(documents: list[Any], document_type: type[Any], framework: str | None, shapes: Any) -> Any:
    """`DocumentArray.stack`."""
    from quire.array._batch import DocumentBatch

    return DocumentBatch[document_type](documents, framework=framework, shapes=shapes)  # type: ignore[valid-type]


def default_document_type() -> type[Any]:
    """The document of an array without a type."""
    from quire.documents import Document

    return Document


def documents_of_files(array_type: type[Any], paths: list[str], read_mode: Any, *, to_dataturi: bool) -> Any:
    """`DocumentArray.from_files`."""
    from quire.documents import documents_of_files

    return documents_of_files(array_type, paths, read_mode=read_mode, to_dataturi=to_dataturi)
