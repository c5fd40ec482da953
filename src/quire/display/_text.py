"""Values as one short line of text: a tensor shows its dtype and shape, long text is truncated."""

from __future__ import annotations

from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import PurePath
from typing import Any
from uuid import UUID

from quire._protocols import is_array_type, is_document_type
from quire.media import detect_media_type
from quire.schema import Schema
from quire.tensors import framework_of

_MAX_LENGTH = 60
_LONGEST_TEXT = 200
MAX_FIELDS = 60
"""Fields that are shown per level."""
MAX_LEVELS = 6
"""Levels of nested documents that are shown."""


class _Label:
    """A text that is its own repr, without quotes."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def short_value(value: Any) -> object:
    """Return the value, or a placeholder whose repr is short."""
    framework = framework_of(value)
    if framework is not None:
        shape = ", ".join(str(size) for size in framework.shape(value))
        layout = "" if framework.layout(value) == "dense" else f" {framework.layout(value)}"
        return _Label(f"<{framework.name} {framework.dtype(value)}[{shape}]{layout}>")
    if isinstance(value, (str, bytes)) and len(value) > _MAX_LENGTH:
        return _Label(f"{value[:_MAX_LENGTH]!r}… ({len(value)})")
    if is_array_type(type(value)):
        return _Label(f"<{type(value).__name__} of {len(value)}>")
    if isinstance(value, (list, tuple, dict, set)) and len(value) > 10:
        return _Label(f"<{type(value).__name__} of {len(value)}>")
    if type(value) in (list, tuple, set):
        return type(value)(short_value(item) for item in value)
    if type(value) is dict:
        return {short_value(key): short_value(item) for key, item in value.items()}
    return value


def readable_value(value: Any) -> str:
    """Format a value for a page: the name of an enum, a date without its class, the size of bytes, a rounded float."""
    if value is None:
        return "missing"
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, (bool, int, timedelta, Decimal, UUID, PurePath)):
        return str(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, datetime):
        return value.isoformat(" ", "auto" if value.microsecond else "seconds")
    if isinstance(value, (date, time)):
        return value.isoformat()
    if isinstance(value, (bytes, bytearray)):
        media_type = detect_media_type(value[:64])
        return f"{media_type}, {format_bytes(len(value))}" if media_type else format_bytes(len(value))
    if isinstance(value, str):
        return value if len(value) <= _LONGEST_TEXT else f"{value[:_LONGEST_TEXT]}… ({len(value):,})"
    return repr(short_value(value))


def one_line(value: object, max_length: int = _MAX_LENGTH) -> str:
    """Format a value for a table cell: text without quotes, control characters escaped, truncated to a length."""
    if isinstance(value, str):
        text = value[: max_length + 1]
    elif is_document_type(type(value)):
        text = f"<{type(value).__name__}>"
    else:
        text = repr(short_value(value))
    # Control characters of the data must not reach the terminal, which would obey them.
    text = "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
    return text if len(text) <= max_length else f"{text[: max_length - 1]}…"


def nested_rows(value: Any) -> list[tuple[str, Any]] | None:
    """Return the fields of a document, or the first documents of an array, as (name, value); None for other values."""
    if is_document_type(type(value)):
        fields = type(value).model_fields
        shown = [(name, item) for name, item in value.__dict__.items() if name in fields and fields[name].repr]
        return [*shown, *(value.__pydantic_extra__ or {}).items()]
    if is_array_type(type(value)):
        more = [(f"… {len(value) - 3:,} more", None)] if len(value) > 3 else []
        return [*((str(index), document) for index, document in enumerate(value[:3])), *more]
    return None


def schema_rows(schema: Schema) -> list[tuple[str, str, Schema | None]]:
    """Return the name, type and nested schema of each field; recursive fields are marked by ↻ and not expanded."""
    rows = []
    for field in schema.fields:
        nested, mark = None, ""
        if field.kind in ("document", "documents"):
            nested, mark = (None, " ↻") if field.recursive else (field.document_type.document_schema(), "")
        rows.append((field.name, f"{one_line(str(field), 100)}{mark}", nested))
    return rows


def format_bytes(count: float) -> str:
    """Format a number of bytes in powers of 1,000, as '512 bytes' or '33.5 MB'."""
    if abs(count) < 1000:
        return f"{count:,.0f} bytes"
    unit = next((power for power in (1, 2, 3) if abs(count) < 1000 ** (power + 1)), 4)
    return f"{count / 1000**unit:,.1f} {'kMGT'[unit - 1]}B"
