"""Read an Iceberg table without rows: writing some would need a catalog, and that more packages than the extra has."""

from __future__ import annotations

import tempfile
from pathlib import Path

from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC
from pyiceberg.schema import Schema
from pyiceberg.table.metadata import new_table_metadata
from pyiceberg.table.sorting import UNSORTED_SORT_ORDER
from pyiceberg.types import LongType, NestedField

from quire import BaseDocument
from quire.storage import import_dataset


class Row(BaseDocument):
    number: int


with tempfile.TemporaryDirectory() as folder:
    schema = Schema(NestedField(1, "number", LongType(), required=True))
    metadata = new_table_metadata(schema, UNPARTITIONED_PARTITION_SPEC, UNSORTED_SORT_ORDER, f"{folder}/table")
    Path(folder, "table", "metadata").mkdir(parents=True)
    Path(folder, "table", "metadata", "v1.metadata.json").write_text(metadata.model_dump_json())
    dataset = import_dataset(f"{folder}/table", f"{folder}/rows")
    assert (len(dataset), [field.name for field in dataset.schema.fields]) == (0, ["number"])
