"""Rows that stand for a failure: None wherever there can be one."""

from __future__ import annotations

from typing import Any

from quire.distributed._layouts import DocumentLayout
from quire.errors import OptionError
from quire.schema import Field, FieldKind


def check_nulls(target: DocumentLayout, source: DocumentLayout) -> None:
    """Whether rows can be made with nothing but the document that a function failed on."""
    for field in target.layout.schema.fields:
        if not (_can_be_none(field) or _taken_over(field, source) or not field.required):
            raise OptionError(
                f"on_error='null': {target.document_type.__name__}.{field.name} cannot be None, and "
                f"{source.document_type.__name__} has no such field to take it from. Make it optional, or pass 'skip'."
            )


def null_document(target: DocumentLayout, document: Any) -> Any:
    """A document of the class: its optional fields are None, the others are those of the document that failed."""
    values: dict[str, Any] = {}
    for field in target.layout.schema.fields:
        if field.name == "id" and hasattr(document, "id"):
            values["id"] = document.id
        elif _can_be_none(field):
            values[field.name] = None
        elif field.name in document.__dict__:
            values[field.name] = document.__dict__[field.name]
    return target.document_type(**values)


def _can_be_none(field: Field) -> bool:
    return field.nullable or field.kind is FieldKind.ANY


def _taken_over(field: Field, source: DocumentLayout) -> bool:
    found = source.layout.schema.by_name.get(field.name)
    return found is not None and found.kind is field.kind and found.type is field.type and not found.nullable
