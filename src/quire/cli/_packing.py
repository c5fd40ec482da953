"""How the columns of a dataset are packed, as the footers of its Parquet files tell."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from quire.storage import StoredDataset
from quire.storage._shards import Parts, shard_errors

_SHARDS = 8
"""So many footers are looked at."""


def packing_of(dataset: StoredDataset[Any]) -> dict[str, Any]:
    """The compression of the columns, and their bytes packed and not, of the first shards."""
    sizes: dict[str, list[Any]] = {}
    chosen = [shard for shard in dataset.shards if shard.format == "parquet"][:_SHARDS]
    for shard in chosen:
        with shard_errors(dataset.folder, shard), pa.PythonFile(Parts(dataset.folder, shard), "r") as file:
            metadata = pq.read_metadata(file)
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            for index in range(group.num_columns):
                column = group.column(index)
                found = sizes.setdefault(column.path_in_schema, [set(), 0, 0])
                found[0].add("none" if column.compression == "UNCOMPRESSED" else column.compression.lower())
                found[1] += column.total_compressed_size
                found[2] += column.total_uncompressed_size
    columns = {
        path: {"compression": "/".join(sorted(names)), "bytes": packed, "unpacked_bytes": unpacked}
        for path, (names, packed, unpacked) in sizes.items()
    }
    return {"columns": columns, "columns_of_shards": len(chosen)} if columns else {}
