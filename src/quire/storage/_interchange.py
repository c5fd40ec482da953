"""Batches and datasets as Arrow tables and streams of other libraries, and back.

Other libraries exchange Arrow data through the PyCapsule interface: an object with `__arrow_c_stream__`. polars, DuckDB
and pandas take such objects, and their data frames and relations are some.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from quire._extra_fields import Extra, check_extra
from quire.array import validate_columns
from quire.columns import Columns, concat_columns
from quire.errors import DecodeError, DocumentTypeError
from quire.schema import FieldPath, Schema
from quire.storage._layout import InterchangeLayout, Layout, resolve_columns
from quire.storage._schema_conversion import conform_batch, refuse_unknown_columns, stored_class_name
from quire.tensors import describe

if TYPE_CHECKING:
    from quire.storage._dataset import StoredDataset


def to_arrow(columns: Columns, selected: Iterable[str] | None = None) -> pa.Table:
    """Return columns, or some of them by path, as an Arrow table that shares their memory where Arrow has the type."""
    paths = list(_present_paths(columns))
    if selected is not None:
        paths = list(resolve_columns(columns.schema, selected) or paths)
    layout = InterchangeLayout(columns.schema, paths or None)
    return pa.Table.from_batches([layout.encode(columns)])


def _present_paths(columns: Columns) -> Iterator[FieldPath]:
    """Yield the paths of all columns: of a nested document with some of its fields only, those of these fields."""
    for name, column in columns.columns.items():
        for child in column.children:
            if set(child.columns) != set(child.schema.document_type.document_schema().by_name):
                yield from ((name, *path) for path in _present_paths(child))
                break
        else:
            yield (name,)


def open_stream(dataset: StoredDataset[Any]) -> pa.RecordBatchReader:
    """Return a reader of the rows of a dataset, in record batches of some megabytes; the cache is not used.

    An Arrow stream has one schema. Where it depends on values, they are read first, up to the first in each column.
    """
    schema, reader = dataset.document_type.document_schema(), dataset._row_reader
    layout = InterchangeLayout(schema, reader.layout.paths, in_utc=True)
    codecs = layout.inferred_codecs()
    if codecs and len(dataset):
        # Encode parts with another layout until each of its codecs has seen a value, and take over the types.
        prefix = f"{layout.schema.name}."
        columns = sorted({path.removeprefix(prefix).replace("[]", "") for path in codecs})
        narrow = dataset.narrow(columns)._row_reader
        probe = InterchangeLayout(schema, narrow.layout.paths, in_utc=True)
        probes = probe.inferred_codecs()
        for part in narrow.read_parts():
            probe.encode(part)
            if all(codec.inferred is not None for codec in probes.values()):
                break
        for path, codec in codecs.items():
            codec.inferred = probes[path].inferred
    empty = reader.layout.decode(reader.layout.empty_batch())
    batches = (layout.encode(columns) for columns in reader.read_parts())
    return pa.RecordBatchReader.from_batches(layout.encode(empty).schema, batches)


def from_arrow(document_type: type[Any], data: Any, extra: Extra) -> Columns:
    """Return the columns of a class from any object with Arrow data."""
    check_extra(extra)
    if hasattr(data, "__arrow_c_stream__"):
        reader = pa.RecordBatchReader.from_stream(data)
    elif hasattr(data, "__arrow_c_array__"):
        batch = pa.record_batch(data)
        reader = pa.RecordBatchReader.from_batches(batch.schema, [batch])
    else:
        raise DocumentTypeError(
            "from_arrow() takes an object with Arrow data (__arrow_c_stream__), such as a data frame of polars, a "
            f"table of pyarrow or a relation of DuckDB, got {describe(data)}. from_dataframe() reads pandas."
        )
    schema: Schema = document_type.document_schema()
    where = f"{schema.name} from {type(data).__name__}"
    names = reader.schema.names
    duplicate = next((name for name in names if names.count(name) > 1), None)
    if duplicate is not None:
        raise DecodeError(f"{where}: the data has two columns {duplicate!r}. Rename one of them.")
    refuse_unknown_columns(schema, reader.schema, extra, where, DecodeError)
    schema.check_related(names, stored_class_name(reader.schema, ""))
    layout = Layout(schema)
    parts = [_decode(layout, batch) for batch in reader]
    if not parts:
        parts = [_decode(layout, pa.RecordBatch.from_pylist([], reader.schema))]
    return validate_columns(concat_columns(parts, "ragged"))


def _decode(layout: Layout, batch: pa.RecordBatch) -> Columns:
    batch.validate(full=True)  # rows are gathered by address, and the data may come from anywhere
    return layout.decode(conform_batch(layout, batch))
