"""Values in one short line: a tensor shows its dtype and shape, long text is cut."""

from __future__ import annotations

from typing import Any

from quire._typing import is_array_type, is_document_type
from quire.schema import Schema
from quire.tensors import framework_of

_LONGEST = 60
MOST_FIELDS = 60
"""Of more fields on one level, the first are shown."""
MOST_LEVELS = 6
"""Documents inside documents are shown so deep."""


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


def one_line(value: Any, longest: int = _LONGEST) -> str:
    """A value for a cell of a table: texts without their quotes, nothing that moves the cursor, not too long."""
    if isinstance(value, str):
        text = value[: longest + 1]
    elif is_document_type(type(value)):
        text = f"<{type(value).__name__}>"
    else:
        text = repr(short_value(value))
    text = "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in text)
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def nested_rows(value: Any) -> list[tuple[str, Any]] | None:
    """The fields of a document or the first documents of an array, for a tree; None for a leaf."""
    if is_document_type(type(value)):
        fields = type(value).model_fields
        shown = [(name, item) for name, item in value.__dict__.items() if name in fields and fields[name].repr]
        return [*shown, *(value.__pydantic_extra__ or {}).items()]
    if is_array_type(type(value)):
        documents = value._documents
        more = [(f"… {len(documents) - 3:,} more", None)] if len(documents) > 3 else []
        return [*((str(i), document) for i, document in enumerate(documents[:3])), *more]
    return None


def schema_rows(schema: Schema) -> list[tuple[str, str, Schema | None]]:
    """Name, type and nested schema of each field; those that lead back to where they are have a sign."""
    rows = []
    for field in schema.fields:
        nested, sign = None, ""
        if field.kind in ("document", "documents"):
            nested, sign = (None, " ↻") if field.recursive else (field.document_type.document_schema(), "")
        rows.append((field.name, f"{one_line(str(field), 100)}{sign}", nested))
    return rows
