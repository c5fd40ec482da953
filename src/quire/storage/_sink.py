"""Files of shards: what is written to them is counted and summed up on its way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import IO, Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from quire._optional import require
from quire._paths import parse_path
from quire.errors import StorageError
from quire.files import Folder, shown
from quire.storage._alignment import AlignedWriter
from quire.storage._form import mark_of
from quire.storage._layout import Layout
from quire.storage._manifest import Shard

Format = Literal["parquet", "arrow"]


def hasher() -> Any:
    """What sums up the bytes of a shard."""
    xxhash: Any = require("xxhash", extra="parquet", needed_for="the checksums of shards")
    return xxhash.xxh3_64()


Packing = Mapping[str, Any]
"""How the columns of Parquet files are packed, as pyarrow takes it."""


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

    def __init__(self, folder: Folder, name: str, layout: Layout, packing: Packing, *, durable: bool = True) -> None:
        self._where = shown(folder.join(name))
        self.name, self._layout, self.groups = name, layout, list[int]()
        with self._told():
            self._target: AbstractContextManager[IO[bytes]] = folder.open_for_write(name, durable=durable)
            self._file = _Summing(self._target.__enter__())
        try:
            self._writer = self._make_writer(packing)
        except BaseException as error:
            self._target.__exit__(type(error), error, error.__traceback__)
            raise

    def _make_writer(self, packing: Packing) -> Any:
        if self.name.endswith(".parquet"):
            return pq.ParquetWriter(self._file, self._layout.arrow_schema, **packing)
        return AlignedWriter(self._file, self._layout.arrow_schema)

    @property
    def size(self) -> int:
        """The bytes that were written so far."""
        return self._file.size

    def write(self, batch: pa.RecordBatch) -> None:
        """A row group, or a record batch."""
        batch = batch.replace_schema_metadata(self._layout.arrow_schema.metadata)
        with self._told():
            if self.name.endswith(".parquet"):
                self._writer.write_batch(batch, len(batch) or None)
            else:
                self._writer.write_batch(batch)
        self.groups.append(len(batch))

    def finish(self) -> Shard:
        """Write what is left, and let the file take its name."""
        try:
            with self._told():
                self._writer.close()
        except BaseException as error:
            self.abandon(error)
            raise
        with self._told():
            self._target.__exit__(None, None, None)
        total, groups = sum(self.groups), tuple(self.groups)
        return Shard(self.name, total, self.size, groups, self._file.sum.hexdigest(), self._layout.fingerprint)

    def abandon(self, error: BaseException) -> None:
        """Leave nothing behind."""
        with suppress(Exception):  # the disk may be full
            self._writer.close()
        with suppress(Exception):
            self._target.__exit__(type(error), error, error.__traceback__)

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Errors of the system, with the shard that they are about."""
        try:
            yield
        except StorageError:
            raise
        except OSError as error:
            raise StorageError(f"{self._where}: the shard cannot be written: {error.strerror or error}.") from error


def parquet_packing(layout: Layout, compression: Mapping[str, str]) -> Packing:
    """Tensors as they are, which is what makes them fast, and the rest with zstd; or what is said of a field."""
    leaves = [leaf for field in layout.fields for leaf in _leaves(field, (field.name,))]
    blobs = {path for path, field in leaves if _is_blob(field)}
    packed = {path: "none" if (mark_of(field) or ("",))[0] == "quire.tensor" else "zstd" for path, field in leaves}
    for chosen, how in sorted(compression.items()):  # what is said of a part comes after what is said of all
        layout.schema.resolve(parse_path(chosen))
        packed |= {path: how for path in packed if f"{path}.".startswith(f"{chosen}.")}
    rest = [path for path in packed if path not in blobs]
    return {
        "compression": packed,
        "use_dictionary": rest,
        "write_statistics": rest,
        "store_schema": True,
        "write_page_index": True,
    }


def _leaves(field: pa.Field, path: tuple[str, ...]) -> Iterator[tuple[str, pa.Field]]:
    """The columns of a Parquet file that a field makes."""
    arrow_type = field.type
    if pa.types.is_struct(arrow_type):
        for inner in [arrow_type.field(i) for i in range(arrow_type.num_fields)]:
            yield from _leaves(inner, (*path, inner.name))
    elif pa.types.is_list(arrow_type) or pa.types.is_fixed_size_list(arrow_type):
        yield from _leaves(arrow_type.value_field, (*path, "list", "element"))
    else:
        yield ".".join(path), field


def _is_blob(field: pa.Field) -> bool:
    """Whether the least and the greatest value tell nothing."""
    return bool(pa.types.is_binary(field.type) or pa.types.is_fixed_size_binary(field.type))
