"""What the calls of DocumentShards do that make shards: of documents, of arrays, of another engine's object."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from quire._paths import parse_path
from quire.array import DocumentBatch
from quire.distributed._calls import Call
from quire.distributed._chunks import CHUNK_BYTES, by_bytes, evenly
from quire.distributed._contract import Engine, Frame
from quire.distributed._engines import engine_of
from quire.distributed._layouts import DocumentLayout, layout_from_arrow
from quire.distributed._row_stages import Conform
from quire.document import BaseDocument
from quire.errors import OptionError, SchemaError
from quire.schema import FieldKind
from quire.storage._write import _typed, columns_in


class Rows(NamedTuple):
    """A frame on its engine, the layout of its rows, and how many there are, if that is known."""

    engine: Engine
    frame: Frame[Any]
    layout: DocumentLayout
    total: int | None = None

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
    items, document_type = _typed(documents, schema)
    layout = DocumentLayout(document_type)
    columns = columns_in(items, layout.layout.schema, CHUNK_BYTES)
    batches = list(by_bytes(layout.layout.encode(part) for part in columns))
    parts = evenly(batches, check_partitions(partitions) or engine.workers)
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
        frame = engine.run(frame, Conform(layout))
    return Rows(engine, frame, layout)


def moved(rows: Rows, engine: Engine) -> Rows:
    """The same rows on another engine; they go through this process."""
    if engine is rows.engine:
        return rows
    if engine.name == rows.engine.name == "local":
        return rows._replace(engine=engine)
    parts = evenly(list(rows.engine.iter_batches(rows.frame)), rows.engine.num_partitions(rows.frame))
    return rows._replace(engine=engine, frame=engine.from_batches(parts, rows.layout.fields))


def first_rows(rows: Rows, number: int) -> list[pa.RecordBatch]:
    """The first rows."""
    return list(rows.engine.iter_batches(rows.engine.limit(rows.frame, number)))


# --- what a function gives


def target_of(rows: Rows, call: Call, schema: type[Any] | None, form: str) -> DocumentLayout:
    """The layout of what a function gives: as is said, as it is annotated, or as it gives for the first row.

    `form` is what it takes: a 'document', an 'array' or a 'batch'.
    """
    found = schema or call.returns() or _tried(rows, call, form)
    whole = schema is not None and rows.layout.paths is not None  # all fields, where there were some
    return DocumentLayout(found) if found and (whole or found is not rows.layout.document_type) else rows.layout


def _tried(rows: Rows, call: Call, form: str) -> type[Any] | None:
    batches = first_rows(rows, 1)
    if not batches:
        return None
    columns = rows.layout.decode(batches[0])
    one, array = form == "document", form == "array"
    value = columns.document(0) if one else rows.layout.array(columns) if array else rows.layout.batch(columns)
    try:
        given = call.ready()(value)
        first: Any = given if one or isinstance(given, DocumentBatch) else next(iter(given), None)
    except Exception:  # noqa: BLE001 - it will fail again where rows are worked on, and be told there
        return None
    found: type[Any] = first.document_type if isinstance(first, DocumentBatch) else type(first)
    return found if issubclass(found, BaseDocument) else None


# --- keys


def key_columns(layout: DocumentLayout, columns: str | Iterable[str]) -> list[str]:
    """The names of columns to partition by, if they hold values that can be compared."""
    names = [columns] if isinstance(columns, str) else list(columns)
    if not names:
        raise OptionError("partition_by() needs the names of fields.")
    for name in names:
        layout.layout.schema.resolve((name,))
        arrow_type = layout.fields.field(name).type
        if pa.types.is_nested(arrow_type):
            raise OptionError(f"partition_by({name!r}): a field with one value a row is needed, it is {arrow_type}.")
    return names


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
