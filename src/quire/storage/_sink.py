"""Files of shards: what is written to them is counted and summed up on its way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import IO, Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from quire._optional import require
from quire.files import Folder
from quire.storage._layout import Layout
from quire.storage._manifest import Shard
from quire.storage._tensors import TensorForm

Format = Literal["parquet", "arrow"]


def hasher() -> Any:
    """What sums up the bytes of a shard."""
    xxhash: Any = require("xxhash", extra="parquet", needed_for="the checksums of shards")
    return xxhash.xxh3_64()


class _Summing:
    """A file that knows how many bytes went into it, and their checksum."""

    closed = False

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.size, self.sum = file, 0, hasher()

    def write(self, data: Any) -> int:
        """Take bytes, as they are."""
        view = memoryview(data)
        self.sum.update(view)
        self._file.write(view)
        self.size += view.nbytes
        return view.nbytes

    def writable(self) -> bool:
        """It is for nothing else."""
        return True

    def readable(self) -> bool:
        """It is not."""
        return False

    def seekable(self) -> bool:
        """It is not."""
        return False

    def tell(self) -> int:
        """How many bytes there are."""
        return self.size

    def flush(self) -> None:
        """Let the system have all of it."""
        self._file.flush()

    def close(self) -> None:
        """It is closed by who opened it."""


class ShardFile:
    """One shard on its way to the folder; it is there when `finish` returns, or not at all."""

    def __init__(self, folder: Folder, name: str, layout: Layout, options: Mapping[str, Any]) -> None:
        self._target: AbstractContextManager[IO[bytes]] = folder.open_for_write(name)
        self._file = _Summing(self._target.__enter__())
        self.name, self._layout, self.groups = name, layout, list[int]()
        schema = layout.arrow_schema
        if name.endswith(".parquet"):
            self._writer: Any = pq.ParquetWriter(self._file, schema, **parquet_options(layout, options))
        else:
            self._writer = pa.ipc.new_file(self._file, schema)

    @property
    def size(self) -> int:
        """The bytes that were written so far."""
        return self._file.size

    def write(self, batch: pa.RecordBatch) -> None:
        """A row group, or a record batch."""
        batch = batch.replace_schema_metadata(self._layout.arrow_schema.metadata)
        self._writer.write_batch(batch)
        self.groups.append(len(batch))

    def finish(self) -> Shard:
        """Write what is left, and let the file take its name."""
        self._writer.close()
        self._target.__exit__(None, None, None)
        total, groups = sum(self.groups), tuple(self.groups)
        return Shard(self.name, total, self.size, groups, self._file.sum.hexdigest(), self._layout.fingerprint)

    def abandon(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        """Leave nothing behind."""
        self._target.__exit__(kind, error, traceback)


def parquet_options(layout: Layout, options: Mapping[str, Any]) -> dict[str, Any]:
    """How columns are packed: tensors as they are, which is what makes them fast, and the rest with zstd."""
    packed = {**dict.fromkeys(_leaves(layout.forms, ()), "zstd"), **dict.fromkeys(_tensors(layout.forms, ()), "none")}
    packed |= options.get("compression") or {}
    plain = [name for name, how in packed.items() if how == "none"]
    return {
        "compression": packed,
        "use_dictionary": [name for name in packed if name not in plain],
        "write_statistics": [name for name in packed if name not in plain],
        "store_schema": True,
        "write_page_index": True,
    }


def _leaves(forms: Sequence[Any], before: tuple[str, ...]) -> list[str]:
    schema = pa.schema([form.arrow_field() for form in forms])
    return _paths(schema, before)


def _paths(fields: Any, before: tuple[str, ...]) -> list[str]:
    found: list[str] = []
    for field in fields:
        found += _paths_of(field.type, (*before, field.name))
    return found


def _paths_of(arrow_type: pa.DataType, path: tuple[str, ...]) -> list[str]:
    if pa.types.is_struct(arrow_type):
        return _paths([arrow_type.field(i) for i in range(arrow_type.num_fields)], path)
    if pa.types.is_list(arrow_type) or pa.types.is_fixed_size_list(arrow_type):
        return _paths_of(arrow_type.value_type, (*path, "list", "element"))
    return [".".join(path)]


def _tensors(forms: Sequence[Any], before: tuple[str, ...]) -> list[str]:
    found: list[str] = []
    for form in forms:
        path = (*before, form.field.name)
        if isinstance(form, TensorForm) and form.storage != "list":
            found.append(".".join(path))
        inner = [*path, "list", "element"] if pa.types.is_list(form.type) else path
        for child in form.children:
            nested = child.children if child.field.name == "item" else [child]
            found += _tensors(nested, tuple(inner))
    return found
