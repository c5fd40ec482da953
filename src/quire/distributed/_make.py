"""What the calls of DocumentShards do that make shards: of documents, of arrays, of another engine's object."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa

from quire.array import DocumentBatch
from quire.distributed._batches import CHUNK_BYTES, rebatch_by_bytes, split_evenly
from quire.distributed._encoding import DocumentLayout, layout_from_arrow
from quire.distributed._engine import Engine, Frame, engine_of
from quire.distributed._stages import AppendKeys, ConformRows, UserFunction
from quire.document import BaseDocument
from quire.errors import OptionError, SchemaError
from quire.schema import FieldKind, parse_path
from quire.storage import iter_columns, resolve_document_type

Grouping = Literal["none", "whole", "broken"]
"""Whether partitions hold all rows with equal keys, as after `partition_by`, and so go to functions as a whole.
'broken': they did, until `union` added other rows, or Ray cut them for `cache`."""


class Rows(NamedTuple):
    """A frame on its engine, the layout of its rows, and how many there are, if that is known."""

    engine: Engine
    frame: Frame[Any]
    layout: DocumentLayout
    total: int | None = None
    grouping: Grouping = "none"

    def kept(self, frame: Frame[Any], *, total: bool = True) -> Rows:
        """Other rows of the same kind; or the same rows elsewhere, so that their number is kept."""
        return self._replace(frame=frame, total=self.total if total else None)


def known_class(document_type: type[Any], schema: type[Any] | None) -> type[Any] | None:
    """The class that was said: by `DocumentShards[Student]`, or by `schema=`."""
    if document_type is BaseDocument or schema is None:
        return schema if document_type is BaseDocument else document_type
    if schema is not document_type:
        raise OptionError(f"schema={schema.__name__}, but the shards are of {document_type.__name__}: say one of them.")
    return schema


def check_partitions(partitions: int | None) -> int | None:
    """A number of partitions that can be made."""
    if partitions is not None and partitions < 1:
        raise OptionError(f"{partitions} partitions: at least one is needed.")
    return partitions


def from_documents(engine: Engine, documents: Any, schema: type[Any] | None, partitions: int | None) -> Rows:
    """Documents, batches, or what a generator gives of them, in partitions of one size."""
    items, document_type = resolve_document_type(documents, schema)
    layout = DocumentLayout(document_type)
    columns = iter_columns(items, layout.layout.schema, CHUNK_BYTES)
    batches = list(rebatch_by_bytes(layout.layout.encode(part) for part in columns))
    parts = split_evenly(batches, check_partitions(partitions) or engine.workers)
    return Rows(engine, engine.from_batches(parts, layout.fields), layout, sum(map(len, batches)))


def partitioned(engine: Engine, data: Any, schema: type[Any] | None, partitions: int | None) -> Rows:
    """`from_documents`, also of arrays: by the names of fields, or in their order."""
    if schema is not None and _is_arrays(data):
        data = DocumentBatch[schema].from_columns(_named(data, schema), shapes="ragged")  # type: ignore[valid-type]
    elif _is_arrays(data):
        raise SchemaError("arrays need the class whose fields they are: DocumentShards[Student].partition(...).")
    return from_documents(engine, data, schema, partitions)


def _is_arrays(data: Any) -> bool:
    if isinstance(data, Mapping):
        return True
    return isinstance(data, (list, tuple)) and bool(data) and all(map(_is_array, data))


def _is_array(item: Any) -> bool:
    return hasattr(item, "shape") and not isinstance(item, BaseDocument)


def _named(data: Any, schema: type[Any]) -> Mapping[str, Any]:
    if isinstance(data, Mapping):
        return data
    names = [field.name for field in schema.document_schema().fields if field.name != "id"]
    if len(names) < len(data):
        raise OptionError(f"{len(data)} arrays for the {len(names)} fields of {schema.__name__}: {', '.join(names)}.")
    return dict(zip(names, data, strict=False))


def from_native(engine: Engine | None, native: Any, schema: type[Any] | None) -> Rows:
    """The rows of an engine's own object as documents of a class, or of one that is made for them."""
    engine = engine or engine_of(native)
    frame = engine.from_native(native)
    layout = layout_from_arrow(frame.schema, schema)
    if not frame.schema.equals(layout.fields, check_metadata=True):
        frame = engine.run(frame, ConformRows(layout))
    return Rows(engine, frame, layout)


def moved(rows: Rows, engine: Engine) -> Rows:
    """The same rows on another engine; they go through this process."""
    if engine is rows.engine:
        return rows
    if engine.name == rows.engine.name == "local":
        return rows._replace(engine=engine)
    parts = split_evenly(list(rows.engine.iter_batches(rows.frame)), rows.engine.num_partitions(rows.frame))
    return rows._replace(engine=engine, frame=engine.from_batches(parts, rows.layout.fields))


def first_rows(rows: Rows, number: int) -> list[pa.RecordBatch]:
    """The first rows."""
    return list(rows.engine.iter_batches(rows.engine.limit(rows.frame, number)))


# --- what a function gives
def target_of(rows: Rows, call: UserFunction, schema: type[Any] | None) -> DocumentLayout:
    """Return the layout of the documents that a function returns: `schema`, its annotation, or the class of the shards.

    Nothing runs here. A function without an annotation that returns another class is an error of the job, which asks
    for the class.
    """
    declared = schema or call.returns()
    whole = schema is not None and rows.layout.paths is not None  # all fields, where only some were selected
    if declared is None or (declared is rows.layout.document_type and not whole):
        return rows.layout
    return DocumentLayout(declared)


# --- keys
def partition_by(rows: Rows, columns: str | Iterable[str], partitions: int) -> Rows:
    """Move rows that are equal in some fields into one partition. Keys may be fields of nested documents."""
    paths = key_paths(rows.layout, columns)
    if all(len(path) == 1 for path in paths):
        frame = rows.engine.partition_by(rows.frame, [path[0] for path in paths], partitions)
    else:
        # Engines partition by columns: nested values become columns of their own for as long as rows move.
        stage = AppendKeys(rows.layout, paths)
        moved = rows.engine.partition_by(rows.engine.run(rows.frame, stage), stage.names, partitions)
        frame = rows.engine.select(moved, rows.layout.fields.names)
    return rows.kept(frame)._replace(grouping="whole")


def key_paths(layout: DocumentLayout, columns: str | Iterable[str]) -> tuple[tuple[str, ...], ...]:
    """Return the paths of the fields to partition by, if each holds one value a row that can be compared."""
    names = [columns] if isinstance(columns, str) else list(columns)
    if not names or not all(names):
        raise OptionError(f"partition_by({columns!r}): names or paths of fields are needed.")
    paths = [parse_path(name) for name in names]
    for name, path in zip(names, paths, strict=True):
        layout.layout.schema.resolve(path)
        arrow_type = layout.fields.field(path[0]).type
        for part in path[1:]:
            arrow_type = arrow_type.field(part).type if pa.types.is_struct(arrow_type) else None
            if arrow_type is None:
                break
        if arrow_type is None or pa.types.is_nested(arrow_type):
            found = "in a list of documents" if arrow_type is None else f"a {arrow_type}"
            raise OptionError(f"partition_by({name!r}): a field with one value a row is needed, and it is {found}.")
    return tuple(paths)


def comparable(layout: DocumentLayout, path: str) -> DocumentLayout:
    """The layout itself, if values at the path can be told apart by what they are."""
    field = layout.layout.schema.resolve(parse_path(path))[-1]
    plain = field.kind not in (FieldKind.TENSOR, FieldKind.DOCUMENT, FieldKind.DICT)
    if not plain or field.type in (list, set, dict, bytearray):
        raise OptionError(f"unique({path!r}): a field with one plain value a row is needed, it is {field}.")
    return layout


def sorted_values(values: Iterable[Any]) -> list[Any]:
    """The values in order, None first; as they are where they cannot be compared."""
    found = list(values)
    there = [value for value in found if value is not None]
    try:
        there.sort()
    except TypeError:
        return found
    return [None] * (len(found) - len(there)) + there


def check_fractions(fractions: Iterable[float]) -> list[float]:
    """Parts of one; the bounds between them."""
    parts = list(fractions)
    if not parts or min(parts) < 0 or abs(sum(parts) - 1) > 1e-9:
        raise OptionError(f"the parts of a split are fractions that make 1, got {tuple(parts)}.")
    return [0.0, *np.cumsum(parts[:-1]).tolist(), 1.0]
