"""Values in one short line: a tensor shows its dtype and shape, long text is cut."""

from __future__ import annotations

from typing import Any

from quire._typing import is_array_type, is_document_type
from quire.schema import Schema
from quire.tensors import framework_of

_LONGEST = 60


class Short:
    """A text that is its own repr."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def short_value(value: Any) -> Any:
    """The value, or something that stands for it on one line."""
    framework = framework_of(value)
    if framework is not None:
        shape = ", ".join(str(size) for size in framework.shape(value))
        layout = "" if framework.layout(value) == "dense" else f" {framework.layout(value)}"
        return Short(f"<{framework.name} {framework.dtype(value)}[{shape}]{layout}>")
    if isinstance(value, (str, bytes)) and len(value) > _LONGEST:
        return Short(f"{value[:_LONGEST]!r}… ({len(value)})")
    if is_array_type(type(value)):
        return Short(f"<{type(value).__name__} of {len(value._documents)}>")
    if isinstance(value, (list, tuple, dict, set)) and len(value) > 10:
        return Short(f"<{type(value).__name__} of {len(value)}>")
    if type(value) in (list, tuple, set):
        return type(value)(short_value(item) for item in value)
    if type(value) is dict:
        return {short_value(key): short_value(item) for key, item in value.items()}
    return value


def nested_rows(value: Any) -> list[tuple[str, Any]] | None:
    """The fields of a document or the first documents of an array, for a tree; None for a leaf."""
    if is_document_type(type(value)):
        fields = type(value).model_fields
        shown = [(name, item) for name, item in value.__dict__.items() if name in fields and fields[name].repr]
        return [*shown, *(value.__pydantic_extra__ or {}).items()]
    if is_array_type(type(value)):
        documents = value._documents
        more = [(f"… {len(documents) - 3} more", None)] if len(documents) > 3 else []
        return [*((str(i), document) for i, document in enumerate(documents[:3])), *more]
    return None


def schema_rows(schema: Schema) -> list[tuple[str, str, Schema | None]]:
    """Name, type and nested schema of each field."""
    rows = []
    for field in schema.fields:
        nested = None
        if field.kind in ("document", "documents") and not field.recursive:
            nested = field.document_type.document_schema()
        rows.append((field.name, str(field), nested))
    return rows
