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


def save_parquet(data: Any, document_type: type[Any], path: Any, options: dict[str, Any]) -> None:
    """`DocumentArray.save_parquet` and `DocumentBatch.save_parquet`."""
    from quire.storage import save_parquet

    save_parquet(data, document_type, path, **options)


def load_parquet(document_type: type[Any], path: Any, options: dict[str, Any]) -> Any:
    """`DocumentArray.load_parquet` and `DocumentBatch.load_parquet`."""
    from quire.storage import load_parquet

    return load_parquet(document_type, path, **options)
