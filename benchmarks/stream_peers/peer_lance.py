"""Lance: fixed-size lists, rows by number with `take`, in order with `to_batches`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import torch
from protocol import Columns, Rows, Task, run

SHAPES = {"emb": (128,), "mask": (32, 32), "feat": (32,)}


def make(task: Task, batches: Iterable[Columns]) -> None:
    """Write record batches, one file per shard."""
    ready = (_record_batch(columns) for columns in batches)
    first = _record_batch(next(task.workload.batches(1)))
    reader = pa.RecordBatchReader.from_batches(first.schema, ready)
    lance.write_dataset(reader, str(task.folder), max_rows_per_file=task.workload.shard_rows, mode="overwrite")


def _record_batch(columns: Columns) -> pa.RecordBatch:
    made = {name: _array(values) for name, values in columns.items() if name not in {"source", "ts", "tags", "mask"}}
    if "mask" in columns:
        nested = {"source": pa.array(columns["source"]), "ts": pa.array(columns["ts"])}
        nested["tags"] = pa.array(columns["tags"], pa.list_(pa.string()))
        made["meta"] = pa.StructArray.from_arrays(nested.values(), nested.keys())
        del made["has_mask"]
        made["mask"] = _array(columns["mask"], pa.array(~columns["has_mask"]))
    return pa.RecordBatch.from_arrays(list(made.values()), names=list(made))


def _array(values: Any, missing: pa.Array | None = None) -> pa.Array:
    if not isinstance(values, np.ndarray) or values.ndim == 1:
        return pa.array(values)
    flat = pa.array(np.ascontiguousarray(values).reshape(-1))
    return pa.FixedSizeListArray.from_arrays(flat, values[0].size, mask=missing)


# --- read


def take(task: Task) -> Callable[[Rows], Columns]:
    """Take rows, with columns as torch tensors."""
    dataset = lance.dataset(str(task.folder))
    return lambda rows: _columns(dataset.take(rows))


def read(task: Task) -> Iterator[tuple[Rows, Columns]]:
    """Yield a permutation by `take`, or the scanner in order."""
    if not task.shuffle:
        for batch in lance.dataset(str(task.folder)).to_batches(batch_size=task.batch):
            columns = _columns(pa.Table.from_batches([batch]))
            yield columns["row"].numpy(), columns
        return
    get = take(task)
    order = np.random.default_rng(task.seed).permutation(task.workload.rows)
    for start in range(0, len(order), task.batch):
        columns = get(order[start : start + task.batch])
        yield columns["row"].numpy(), columns


def _columns(table: pa.Table) -> Columns:
    made: Columns = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        array = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
        if name == "meta":
            made["source"], made["ts"], made["tags"] = (
                array.field("source").to_pylist(),
                torch.from_numpy(array.field("ts").to_numpy()),
                array.field("tags").to_pylist(),
            )
        elif name == "mask":
            made["has_mask"] = torch.from_numpy(array.is_valid().to_numpy(zero_copy_only=False))
            made["mask"] = _tensor(name, array) * made["has_mask"][:, None, None]
        else:
            made[name] = array.to_pylist() if pa.types.is_string(array.type) else _tensor(name, array)
    return made


def _tensor(name: str, array: pa.Array) -> torch.Tensor:
    if not pa.types.is_fixed_size_list(array.type):
        return torch.from_numpy(array.to_numpy())
    size = array.type.list_size
    shape = SHAPES.get(name) or ((3, 64, 64) if size == 12288 else (3, 32, 32))
    flat = array.values.to_numpy()[array.offset * size : (array.offset + len(array)) * size]
    return torch.from_numpy(flat.reshape(-1, *shape))


if __name__ == "__main__":
    sys.exit(run(sys.modules[__name__]))
