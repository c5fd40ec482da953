"""JSON for the page: the tree of columns, the cells of the grid, and the tree of one document.

A cell is null, a number, a boolean, a text, or an object whose `t` is its type. Cells are small: media are described,
and the page requests their content when they come into view.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from datetime import date, datetime, time, timedelta
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np

from quire._protocols import is_array_type, is_document_type
from quire.media import data_uri_family, detect_media_type
from quire.schema import Field, FieldKind, FieldPath, Schema, join_path
from quire.storage import BytesPreview, ItemCount, TensorPreview
from quire.tensors import framework_of
from quire.viewer._row_order import SORTABLE
from quire.viewer._tensor_display import sample_rate_field, tensor_display

if TYPE_CHECKING:
    from numpy.typing import NDArray

Json = Any

# --- columns

_MAX_COLUMN_DEPTH = 6
_ROLES = {
    FieldKind.TEXT: "text",
    FieldKind.BYTES: "bytes",
    FieldKind.ENUM: "name",
    FieldKind.DATETIME: "moment",
    FieldKind.DATE: "moment",
    FieldKind.TIME: "moment",
    FieldKind.TIMEDELTA: "moment",
    FieldKind.UUID: "text",
    FieldKind.DECIMAL: "number",
    FieldKind.PATH: "text",
    FieldKind.DOCUMENT: "document",
    FieldKind.DOCUMENTS: "documents",
    FieldKind.LIST: "list",
    FieldKind.DICT: "object",
}


def column_tree(schema: Schema, above: FieldPath = ()) -> list[dict[str, Any]]:
    """Describe the fields of a schema, with those of nested documents as children."""
    nodes = []
    for field in schema.fields:
        path, role = (*above, field.name), _column_role(field, schema)
        node: dict[str, Any] = {
            "name": field.name,
            "path": join_path(path),
            "kind": field.kind.value,
            "type": str(field),
            "role": role,
            "nullable": field.nullable,
            "sortable": field.kind in SORTABLE and field.type is not complex,
        }
        if role in ("document", "documents") and not field.recursive and len(path) < _MAX_COLUMN_DEPTH:
            node["children"] = column_tree(field.document_type.document_schema(), path)
        nodes.append(node)
    return nodes


def _column_role(field: Field, schema: Schema) -> str:
    """Return how the page shows a column."""
    if field.kind is FieldKind.TENSOR:
        if sample_rate_field(field.name, schema) is not None:
            return "audio"
        shape, dtype = field.spec.fixed_shape, field.spec.dtype
        if shape is not None and dtype is not None:
            return tensor_display(shape, dtype)
        return "vector" if "embedding" in field.name or "vector" in field.name else "tensor"
    if field.kind is FieldKind.SCALAR:
        return "flag" if field.type is bool else "number"
    if field.recursive:
        return "object" if field.kind is FieldKind.DOCUMENT else "documents"
    return _ROLES.get(field.kind, "object")


def grid_columns(tree: list[dict[str, Any]]) -> list[str]:
    """Return the paths of the columns of the grid: nested documents are replaced by their fields."""
    paths: list[str] = []
    for node in tree:
        paths += grid_columns(node["children"]) if node["role"] == "document" and "children" in node else [node["path"]]
    return paths


# --- cells

_MAX_SAFE_INTEGER = 1 << 53
"""JavaScript rounds larger integers."""
_SPARKLINE_POINTS, _SHOWN_VALUES = 64, 32
_LIST_ITEMS, _TEXT_LENGTH, _LINE_LENGTH = 12, 400, 240
_SMALL_TENSOR = 4096
_HEAD_BYTES = 64
"""Bytes that are enough to detect a media type."""


def preview_cell(value: object, *, is_text: bool, is_audio: bool = False) -> Json:
    """Return the cell of what `Pages.brief` returns for a value."""
    if isinstance(value, BytesPreview):
        if not is_text:
            return bytes_cell(value.content, value.size)
        text = value.content.decode("utf-8", "ignore")
        if data_uri_family(text) is not None:
            return _data_uri_cell(text, value.size)
        return text if value.size <= len(value.content) else {"t": "text", "v": text, "n": value.size}
    if isinstance(value, TensorPreview):
        return _dense_tensor_cell(value.shape, value.dtype, value.values, is_audio=is_audio)
    if isinstance(value, ItemCount):
        return {"t": "docs", "n": value.items}
    return value_cell(value)


def _data_uri_cell(text: str, size: int) -> dict[str, Any]:
    return {"t": data_uri_family(text), "n": size, "mime": text[5:40].partition(";")[0].partition(",")[0]}


def bytes_cell(head: bytes, size: int) -> dict[str, Any]:
    """Return the cell of bytes: an image, audio, a video, or their beginning in hexadecimal."""
    media_type = detect_media_type(head)
    if media_type is None:
        return {"t": "bytes", "n": size, "v": head[:16].hex(" ")}
    return {"t": media_type.partition("/")[0], "n": size, "mime": media_type}


def tensor_cell(value: Any, *, is_audio: bool = False) -> dict[str, Any]:
    """Return the cell of a tensor of any framework."""
    framework = framework_of(value)
    assert framework is not None
    shape, dtype = tuple(framework.shape(value)), framework.dtype(value)
    if framework.is_sparse(value):
        return {"t": "tensor", "shape": list(shape), "dtype": dtype, "v": framework.layout(value)}
    values = framework.to_numpy(value) if math.prod(shape) <= _SMALL_TENSOR else None
    return _dense_tensor_cell(shape, dtype, values, is_audio=is_audio)


def _dense_tensor_cell(
    shape: tuple[int, ...], dtype: str, values: NDArray[Any] | None, *, is_audio: bool
) -> dict[str, Any]:
    cell: dict[str, Any] = {"t": tensor_display(shape, dtype), "shape": list(shape), "dtype": dtype}
    if is_audio and shape and len(shape) <= 2 and 0 not in shape:
        cell["t"] = "audio"
    elif values is not None and values.size and values.dtype.kind in "biuf":
        if cell["t"] == "vector":
            cell["v"] = _sparkline(values)
        if values.size <= _SHOWN_VALUES:
            cell["values"] = [value_cell(_round(each)) for each in values.reshape(-1).tolist()]
    return cell


def _sparkline(values: NDArray[Any]) -> list[float]:
    """Reduce a vector to a few points: of each run of elements, the one furthest from zero."""
    numbers = np.nan_to_num(values.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)
    if len(numbers) > _SPARKLINE_POINTS:
        # The mean of a run would hide single peaks, which a reader of a sparkline looks for.
        runs = np.array_split(numbers, _SPARKLINE_POINTS)
        numbers = np.array([run[np.abs(run).argmax()] for run in runs])
    return [_round(float(each)) for each in numbers]


def _round(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value


def value_cell(value: Any) -> Json:
    """Return the cell of any value: the value itself, or a short description."""
    if value is None or isinstance(value, (bool, np.bool_)):
        return None if value is None else bool(value)
    if isinstance(value, Enum):
        return {"t": "name", "v": value.name}
    if isinstance(value, (int, np.integer)):
        return int(value) if abs(int(value)) < _MAX_SAFE_INTEGER else {"t": "number", "v": str(value)}
    if isinstance(value, (float, np.floating)):
        return float(value) if math.isfinite(value) else {"t": "number", "v": str(float(value))}
    if isinstance(value, str):
        return _text_cell(value, _TEXT_LENGTH)
    if isinstance(value, (datetime, date, time)):
        return {"t": "moment", "v": value.isoformat(" ") if isinstance(value, datetime) else value.isoformat()}
    if isinstance(value, timedelta):
        return {"t": "moment", "v": str(value)}
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes_cell(bytes(value[:_HEAD_BYTES]), len(value))
    return _collection_cell(value)


def _collection_cell(value: Any) -> Json:
    if framework_of(value) is not None:
        return tensor_cell(value)
    if is_array_type(type(value)):
        return {"t": "docs", "n": len(value)}
    if isinstance(value, (list, tuple, set, frozenset)):
        items = list(value)
        return {"t": "list", "n": len(items), "v": [to_line(item) for item in items[:_LIST_ITEMS]]}
    return {"t": "object", "v": to_line(value)}


def _text_cell(value: str, limit: int) -> Json:
    return str(value) if len(value) <= limit else {"t": "text", "v": value[:limit], "n": len(value)}


def to_line(value: Any, limit: int = _LINE_LENGTH) -> str:
    """Describe a value in one line of about `limit` characters."""
    framework = framework_of(value)
    if framework is not None:
        return f"{framework.dtype(value)}{list(framework.shape(value))}"
    if isinstance(value, Mapping):
        return "{" + _join((f"{key}: {to_line(item, 60)}" for key, item in value.items()), limit) + "}"
    if isinstance(value, (list, tuple, set, frozenset)):
        return "[" + _join((to_line(item, 60) for item in value), limit) + "]"
    if is_array_type(type(value)):
        return f"{len(value)} documents"
    if is_document_type(type(value)):
        return to_line(dict(value), limit)
    if isinstance(value, (bytes, bytearray)):
        return f"{len(value):,} bytes"
    text = value.name if isinstance(value, Enum) else str(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _join(parts: Iterable[str], limit: int) -> str:
    shown, length = [], 0
    for part in parts:
        if length > limit:
            shown.append("…")
            break
        shown.append(part)
        length += len(part) + 2
    return ", ".join(shown)


# --- one document

_DOCUMENT_TEXT = 200_000
_DOCUMENT_ITEMS, _MAX_DOCUMENT_DEPTH = 100, 12


def document_tree(document: Any, path: str = "", depth: int = 0) -> dict[str, Any]:
    """Describe a document with all of its fields and nested documents; long lists are cut."""
    schema = type(document).document_schema()
    fields = []
    for name, value in {**document.__dict__, **(document.__pydantic_extra__ or {})}.items():
        is_audio = framework_of(value) is not None and sample_rate_field(name, schema) is not None
        fields.append(_tree_item(name, value, path, depth, is_audio=is_audio))
    return {"t": "document", "name": type(document).__name__, "fields": fields}


def _tree_item(name: str, value: Any, above: str, depth: int, *, is_audio: bool = False) -> dict[str, Any]:
    path = f"{above}.{name}" if above else name
    return {"name": name, "path": path, "value": _tree_value(value, path, depth, is_audio=is_audio)}


def _tree_value(value: Any, path: str, depth: int, *, is_audio: bool) -> Json:
    if isinstance(value, str):
        if data_uri_family(value) is not None:
            return _data_uri_cell(value, len(value))
        return _text_cell(value, _DOCUMENT_TEXT)
    if isinstance(value, (bytes, bytearray)):
        return bytes_cell(bytes(value[:_HEAD_BYTES]), len(value))
    if framework_of(value) is not None:
        return tensor_cell(value, is_audio=is_audio)
    if depth >= _MAX_DOCUMENT_DEPTH:
        return value_cell(value)
    if is_document_type(type(value)):
        return document_tree(value, path, depth + 1)
    if is_array_type(type(value)):
        documents = enumerate(value[:_DOCUMENT_ITEMS])
        items = [document_tree(item, f"{path}.{i}", depth + 1) for i, item in documents]
        return {"t": "docs", "n": len(value), "items": items}
    if isinstance(value, Mapping):
        entries = list(value.items())[:_DOCUMENT_ITEMS]
        fields = [_tree_item(str(key), item, path, depth + 1) for key, item in entries]
        return {"t": "dict", "n": len(value), "fields": fields}
    if isinstance(value, (list, tuple)):
        fields = [_tree_item(str(i), item, path, depth + 1) for i, item in enumerate(value[:_DOCUMENT_ITEMS])]
        return {"t": "items", "n": len(value), "fields": fields}
    return value_cell(value)
