"""The names of enum members in a dataset that is opened without its class.

Files of format 2 hold the values of enums in their columns, and the names of the members in their metadata. Without the
class, such a column is one of texts or numbers; the page shows the names, and filters take them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from quire.schema import FieldKind, parse_path
from quire.storage import ENUMS_KEY, StoredDataset, read_arrow_schema

EnumNames = Mapping[str, Mapping[str, Any]]
"""The values of members by their names, for each path of a column."""


def read_enum_names(dataset: StoredDataset[Any]) -> dict[str, dict[str, Any]]:
    """Return the members of the columns that hold the values of an enum whose class is unknown."""
    if not dataset.shards:
        return {}
    metadata = read_arrow_schema(dataset.folder, dataset.shards[0]).metadata or {}
    stored: dict[str, dict[str, Any]] = json.loads(metadata.get(ENUMS_KEY, b"{}"))
    schema = dataset.document_type.document_schema()
    names = {}
    for path, enum in stored.items():
        name, *below = parse_path(path)
        field = schema.by_name.get(name)
        for part in below:
            is_nested = field is not None and field.kind in (FieldKind.DOCUMENT, FieldKind.DOCUMENTS)
            field = field.document_type.document_schema().by_name.get(part) if field and is_nested else None
        if field is not None and field.kind in (FieldKind.TEXT, FieldKind.SCALAR):
            names[path] = dict(enum["members"])
    return names


def name_of(value: Any, members: Mapping[str, Any]) -> str | None:
    """Return the name of the member with a value; of several names, the first."""
    return next((name for name, known in members.items() if known == value and type(known) is type(value)), None)
