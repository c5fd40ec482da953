"""The columns of a dataset as the page knows them: a tree of fields, and what can be done with each."""

from __future__ import annotations

from typing import Any

from quire._paths import FieldPath, join_path
from quire.schema import Field, FieldKind, Schema
from quire.view._orders import SORTED
from quire.view._sniff import tensor_look

_DEEPEST = 6
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
RATES = ("rate", "sample_rate", "sampling_rate", "samplerate", "frame_rate")
_SOUNDS = ("tensor", "audio", "waveform", "samples", "signal", "wave", "sound")


def column_tree(schema: Schema, above: FieldPath = ()) -> list[dict[str, Any]]:
    """The fields of a schema, those of nested documents inside theirs."""
    return [_node(field, schema, (*above, field.name)) for field in schema.fields]


def _node(field: Field, schema: Schema, path: FieldPath) -> dict[str, Any]:
    role = _role(field, schema)
    node: dict[str, Any] = {
        "name": field.name,
        "path": join_path(path),
        "kind": field.kind.value,
        "type": str(field),
        "role": role,
        "nullable": field.nullable,
        "sortable": field.kind in SORTED and field.type is not complex,
    }
    if role in ("document", "documents") and not field.recursive and len(path) < _DEEPEST:
        node["children"] = column_tree(field.document_type.document_schema(), path)
    return node


def _role(field: Field, schema: Schema) -> str:
    if field.kind is FieldKind.TENSOR:
        return _tensor_role(field, schema)
    if field.kind is FieldKind.SCALAR:
        return "flag" if field.type is bool else "number"
    if field.recursive:
        return "object" if field.kind is FieldKind.DOCUMENT else "documents"
    return _ROLES.get(field.kind, "object")


def _tensor_role(field: Field, schema: Schema) -> str:
    if rate_field(field.name, schema) is not None:
        return "audio"
    shape, dtype = field.spec.fixed_shape, field.spec.dtype
    if shape is not None and dtype is not None:
        return tensor_look(shape, dtype)
    return "vector" if "embedding" in field.name or "vector" in field.name else "tensor"


def rate_field(name: str, schema: Schema) -> str | None:
    """The field that tells how many samples a second a tensor beside it has, if it is a sound."""
    field = schema.by_name.get(name)
    if field is None or field.kind is not FieldKind.TENSOR or name not in _SOUNDS:
        return None
    kinds = (FieldKind.SCALAR, FieldKind.ANY, FieldKind.UNION)
    return next((rate for rate in RATES if rate in schema.by_name and schema.by_name[rate].kind in kinds), None)


def leaves(nodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The columns of the grid: all fields, and those of nested documents instead of these."""
    found: list[dict[str, Any]] = []
    for node in nodes:
        found += leaves(node["children"]) if node["role"] == "document" and "children" in node else [node]
    return found
