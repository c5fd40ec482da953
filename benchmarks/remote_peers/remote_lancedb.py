"""LanceDB: a table by S3, read by its StreamingDataset.

Rows are shuffled one by one, which is its default; the variant `clumps` shuffles groups of 85 rows (1 MiB), which its
documentation recommends for object stores. It has no cache.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import lancedb
import pyarrow as pa
from lancedb.streaming import StreamingDataset
from remote_protocol import Columns, RemoteTask, Rows, run
from torch.utils.data import DataLoader

# isort: split
from peer_lance import _columns as columns_of
from peer_lance import _record_batch as record_batch_of

TABLE = "pictures"
CLUMP = 85


def make(task: RemoteTask, batches: Iterable[Columns]) -> None:
    """Write the table in one call, with the default sizes of files."""
    table = pa.Table.from_batches([record_batch_of(columns) for columns in batches])
    lancedb.connect(str(task.folder)).create_table(TABLE, table, mode="overwrite")


# --- read


def open_dataset(task: RemoteTask) -> Any:
    """Open the table."""
    options = {"endpoint": task.endpoint, "allow_http": "true", "region": "us-east-1"}
    return lancedb.connect(f"s3://{task.key}", storage_options=options).open_table(TABLE)


def _rows(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Return rows of tensors, cut from the columns of a record batch: much faster than Python lists of numbers."""
    columns = columns_of(pa.Table.from_batches([batch]))
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def epoch(task: RemoteTask, opened: Any, number: int) -> Iterator[tuple[Rows, Columns]]:
    """Yield an epoch."""
    clumps = {"shuffle_clump_size": CLUMP} if task.variant == "clumps" else {}
    dataset = StreamingDataset(
        opened,
        shuffle=True,
        shuffle_seed=task.seed,
        epoch=number,
        transform=_rows,
        num_splits=max(1, task.workers),
        **clumps,
    )
    context = "spawn" if task.workers else None  # its threads do not survive a fork
    for columns in DataLoader(
        dataset, batch_size=task.batch, num_workers=task.workers, multiprocessing_context=context
    ):
        yield columns["row"].numpy(), columns


if __name__ == "__main__":
    run(sys.modules[__name__])
