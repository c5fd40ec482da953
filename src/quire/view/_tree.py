"""One document whole, as a tree that the page shows: fields, documents inside, items of lists and dicts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire._typing import is_array_type, is_document_type
from quire.tensors import framework_of
from quire.view._cells import bytes_cell, is_sound, plain_cell, tensor_cell

_TEXT = 200_000
_ITEMS, _DEEPEST = 100, 12


def document_tree(document: Any) -> dict[str, Any]:
    """The document, and everything in it; of long lists the first items."""
    return _document(document, "", 0)


def _document(document: Any, path: str, depth: int) -> dict[str, Any]:
    fields = {**document.__dict__, **(document.__pydantic_extra__ or {})}
    made = [
        {"name": name, "path": _below(path, name), "value": _value(value, _below(path, name), depth, (name, document))}
        for name, value in fields.items()
    ]
    return {"t": "document", "name": type(document).__name__, "fields": made}


def _below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _value(value: Any, path: str, depth: int, where: tuple[str, Any] | None = None) -> Any:
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, (bytes, bytearray)):
        return bytes_cell(bytes(value[:64]), len(value))
    if framework_of(value) is not None:
        return tensor_cell(value, sound=where is not None and is_sound(*where))
    if depth >= _DEEPEST:
        return plain_cell(value)
    if is_document_type(type(value)):
        return _document(value, path, depth + 1)
    if is_array_type(type(value)):
        items = [_document(item, _below(path, str(i)), depth + 1) for i, item in enumerate(value[:_ITEMS])]
        return {"t": "docs", "n": len(value), "items": items}
    if isinstance(value, Mapping):
        shown = list(value.items())[:_ITEMS]
        fields = [_item(str(key), item, path, depth) for key, item in shown]
        return {"t": "dict", "n": len(value), "fields": fields}
    if isinstance(value, (list, tuple)):
        fields = [_item(str(i), item, path, depth) for i, item in enumerate(value[:_ITEMS])]
        return {"t": "items", "n": len(value), "fields": fields}
    return plain_cell(value)


def _item(name: str, value: Any, path: str, depth: int) -> dict[str, Any]:
    below = _below(path, name)
    return {"name": name, "path": below, "value": _value(value, below, depth + 1)}


def _text(value: str) -> Any:
    if value.startswith("data:") and (kind := value[5:10]) in ("image", "audio", "video"):
        return {"t": kind, "n": len(value), "mime": value[5:40].partition(";")[0].partition(",")[0]}
    return str(value) if len(value) <= _TEXT else {"t": "text", "v": value[:_TEXT], "n": len(value)}
