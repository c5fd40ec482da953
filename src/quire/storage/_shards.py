"""Opening shards: record batches in the layout of the class, mapped into memory, from the cache where they must be."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from quire.columns import Columns
from quire.errors import DecodeError, ShardError, StorageError, StorageNotFoundError
from quire.files import Folder, shown
from quire.schema import Schema
from quire.storage._alignment import AlignedWriter
from quire.storage._cache import ShardCache, cache_key
from quire.storage._carried import told_batch, told_schema
from quire.storage._foreign import conform_fields, fits, stored_names
from quire.storage._form import Form
from quire.storage._layout import FINGERPRINT_KEY, Layout, json_schema, layout_fingerprint
from quire.storage._manifest import Shard
from quire.storage._memory import at_random, map_file
from quire.storage._nested import DocumentForm
from quire.storage._rows import Rows
from quire.storage._sink import hasher
from quire.storage._tensors import TensorForm

_ROWS, _BYTES = 8192, 16 << 20
"""Of a row group of another writer, so many rows, or bytes, are read at a time."""
_TAIL = 1 << 16


class ShardReader:
    """Reads the shards of one folder in one layout."""

    def __init__(self, folder: Folder, layout: Layout, cache: ShardCache) -> None:
        self.folder, self.layout, self.cache = folder, layout, cache
        self.at_random = False

    def open(self, shard: Shard) -> list[pa.RecordBatch]:
        """The record batches of a shard, mapped into memory."""
        with told(self.folder, shard):
            batches = self._mapped(shard)
            if batches is None:
                batches = self._from_cache(shard)
        self._check_rows(shard, sum(map(len, batches)))
        return batches

    def _mapped(self, shard: Shard) -> list[pa.RecordBatch] | None:
        """The shard itself, if it can be mapped as it is."""
        path = self.folder.local_path(shard.name)
        if shard.format != "arrow" or path is None:
            return None
        buffer = self._buffer(path, shard)
        reader = pa.ipc.open_file(at_random(buffer) if self.at_random else buffer)
        return self._selected(reader) if self._in_layout(reader.schema) else None

    def _buffer(self, path: Path, shard: Shard) -> pa.Buffer:
        with path.open("rb") as file:
            buffer = map_file(file)
        self._check_size(shard, buffer.size)
        return buffer

    def _in_layout(self, schema: pa.Schema) -> bool:
        places = [(form, schema.get_all_field_indices(form.field.name)) for form in self.layout.forms]
        return all(len(found) == 1 and fits(form, schema.field(found[0])) for form, found in places)

    def _selected(self, reader: Any) -> list[pa.RecordBatch]:
        names = [form.field.name for form in self.layout.forms]
        batches = [reader.get_batch(i).select(names) for i in range(reader.num_record_batches)]
        for batch in batches:
            batch.validate()  # that the buffers are as long as the rows ask for
        return batches

    def _from_cache(self, shard: Shard) -> list[pa.RecordBatch]:
        with self.cache.open(self._key(shard), lambda target: self._transcode(shard, target)) as file:
            return self._selected(pa.ipc.open_file(map_file(file)))

    def _key(self, shard: Shard) -> str:
        """What is in the cache depends on the class too where the shard is not in its layout: on aliases, defaults."""
        layout, whole = self.layout, self.layout.schema.document_type.document_schema()
        same = shard.layout in (layout.fingerprint, layout_fingerprint(whole))
        where = "" if shard.xxh3 else self.folder.url
        return cache_key(where, *shard.identity, layout.fingerprint, "" if same else json_schema(layout.schema))

    def _transcode(self, shard: Shard, target: Path) -> None:
        """Write a shard anew as Arrow, in the layout of the class."""
        schema = self.layout.arrow_schema
        with pa.OSFile(str(target), "wb") as file, closing(AlignedWriter(file, schema)) as writer:
            for batch in self.read(shard):
                writer.write_batch(batch.replace_schema_metadata(schema.metadata))

    def read(self, shard: Shard) -> Iterator[pa.RecordBatch]:
        """The record batches of a shard in the layout of the class, one at a time, whatever its format."""
        rows = 0
        with told(self.folder, shard):
            for batch in self.raw(shard):
                rows += len(batch)
                yield self.conformed(batch, shard)
        self._check_rows(shard, rows)

    def raw(self, shard: Shard, groups: Sequence[int] | None = None) -> Iterator[pa.RecordBatch]:
        """The record batches of a shard as they are; or those of some of its row groups."""
        with told(self.folder, shard), self._local(shard) as path:
            yield from self._batches(path, shard, groups)

    def _batches(self, path: Path, shard: Shard, groups: Sequence[int] | None = None) -> Iterator[pa.RecordBatch]:
        if shard.format == "parquet":
            file = self._parquet(path, shard)
            rows = _rows_at_once(file.metadata, self.layout)
            yield from file.iter_batches(rows, groups, self._wanted(file.schema_arrow))
            return
        reader = pa.ipc.open_file(self._buffer(path, shard))
        checked = self._in_layout(reader.schema)  # then each row is looked at when it is gathered
        for number in range(reader.num_record_batches) if groups is None else groups:
            batch = reader.get_batch(number)
            batch.validate(full=not checked)
            yield batch

    def _parquet(self, path: Path, shard: Shard) -> pq.ParquetFile:
        self._check_size(shard, path.stat().st_size)
        return pq.ParquetFile(path, memory_map=True)

    def groups(self, shard: Shard, wanted: Callable[[Any], bool]) -> Iterator[tuple[int, Columns]]:
        """The row groups of a Parquet shard whose metadata are wanted: the number of the first row, and the columns."""
        with told(self.folder, shard), self._local(shard) as path:
            file = self._parquet(path, shard)
            names, first = self._wanted(file.schema_arrow), 0
            for number in range(file.num_row_groups):
                metadata = file.metadata.row_group(number)
                if wanted(metadata):
                    table = file.read_row_group(number, columns=names)
                    start = first
                    for batch in table.to_batches():
                        yield start, self.columns(self.conformed(batch, shard))
                        start += len(batch)
                first += metadata.num_rows

    def columns(self, batch: pa.RecordBatch) -> Columns:
        """The columns of a record batch in the layout of the class, copied."""
        addresses = self.layout.addresses()
        addresses.add(self.layout.locate(batch), batch)
        rows = np.arange(len(batch), dtype=np.int64)
        return self.layout.gather(Rows(addresses, np.zeros(len(batch), np.int64), rows))

    def _wanted(self, schema: pa.Schema) -> list[str]:
        """The columns of a Parquet file that the layout asks for, under any name that the class accepts."""
        return list(_columns_of(self.layout.forms, self.layout.schema, schema, ""))

    def conformed(self, batch: pa.RecordBatch, shard: Shard) -> pa.RecordBatch:
        """A record batch in the layout of the class."""
        batch = told_batch(batch)
        found = dict(zip(batch.schema.names, zip(batch.schema, batch.columns, strict=True), strict=True))
        for name, value in partitions(shard.name).items():
            array = pa.repeat(value, len(batch))
            found.setdefault(name, (pa.field(name, array.type), array))
        arrays = conform_fields(self.layout.forms, found, self.layout.schema, None, len(batch))
        return pa.RecordBatch.from_arrays(arrays, schema=self.layout.fields)

    @contextmanager
    def _local(self, shard: Shard) -> Iterator[Path]:
        """The shard as a local file; a remote one is there for as long as it is needed."""
        path = self.folder.local_path(shard.name)
        if path is not None:
            if not path.exists():
                raise StorageNotFoundError(f"{path}: there is no such file.")
            yield path
            return
        with tempfile.TemporaryDirectory(prefix=".fetched-", dir=self.cache.folder) as folder:
            target = Path(folder, "shard")
            self.folder.fetch(shard.name, target)
            yield target

    def _check_size(self, shard: Shard, size: int) -> None:
        if size != shard.bytes:
            raise self._altered(shard, f"it has {size:,} bytes, and the dataset says {shard.bytes:,}")

    def _check_rows(self, shard: Shard, rows: int) -> None:
        if shard.rows not in (-1, rows):
            raise self._altered(shard, f"it has {rows:,} rows, and the dataset says {shard.rows:,}")

    def _altered(self, shard: Shard, why: str) -> ShardError:
        """A shard that is not what was written."""
        name = shown(self.folder.join(shard.name))
        return ShardError(f"{name}: the shard was altered or cut off: {why}. Write it again.")

    def check(self, shard: Shard) -> None:
        """Read all of a shard, and compare its size, checksum and rows."""
        with told(self.folder, shard), self._local(shard) as path:
            buffer = self._buffer(path, shard)
            if shard.xxh3:
                found = hasher()
                found.update(memoryview(buffer))
                if found.hexdigest() != shard.xxh3:
                    raise self._altered(shard, "its checksum is another one")
            rows = 0
            for batch in self._batches(path, shard):
                batch.validate(full=True)
                rows += len(self.conformed(batch, shard))
            self._check_rows(shard, rows)


def _rows_at_once(metadata: pq.FileMetaData, layout: Layout) -> int:
    """How many rows of a Parquet file are read at a time: about so many bytes, whatever its row groups are."""
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    tensors = sum(form.width for form in layout.forms if isinstance(form, TensorForm))  # a page may hold one many times
    widest: int = max([tensors, *(group.total_byte_size // max(group.num_rows, 1) for group in groups)])
    return max(1, min(_ROWS, _BYTES // max(widest, 1)))


def _columns_of(forms: Sequence[Form], schema: Schema, fields: Any, before: str) -> Iterator[str]:
    """The columns that hold what forms ask for; of nested documents, only the parts that are read."""
    found = {field.name: field.type for field in fields}
    names = stored_names(schema, found)
    for form in forms:
        name = names.get(form.field.name)
        if name is None:
            continue
        inner = found[name]
        parts: list[str] = []
        if isinstance(form, DocumentForm) and pa.types.is_struct(inner) and form.is_narrow:
            children = [inner.field(i) for i in range(inner.num_fields)]
            parts = list(_columns_of(form.forms, form.schema, children, f"{before}{name}."))
        yield from parts or [f"{before}{name}"]


def partitions(name: str) -> dict[str, int | str | None]:
    """The columns that the folders of a file tell, as Spark and Hive name them: 'year=2024/lang=en/part-0.parquet'."""
    parts = [part.partition("=") for part in name.split("/")[:-1] if "=" in part]
    return {unquote(key): _partition_value(unquote(value)) for key, _, value in parts}


def _partition_value(text: str) -> int | str | None:
    if text == "__HIVE_DEFAULT_PARTITION__":
        return None
    return int(text) if re.fullmatch(r"-?\d{1,18}", text) else text


@contextmanager
def told(folder: Folder, shard: Shard) -> Iterator[None]:
    """Whatever goes wrong with a shard names it."""
    name = shown(folder.join(shard.name))
    try:
        yield
    except ShardError:
        raise
    except StorageNotFoundError as error:
        raise ShardError(
            f"{name}: the shard is missing. If the dataset was written anew meanwhile, open it again; else verify() "
            "tells whether others are."
        ) from error
    except (pa.ArrowException, DecodeError, ValueError, OverflowError, EOFError, MemoryError) as error:
        raise ShardError(f"{name}: the shard cannot be read: {error}") from error
    except StorageError as error:
        raise ShardError(f"{name}: {error}") from error
    except OSError as error:
        raise ShardError(f"{name}: {error.strerror or error}") from error


def counted(folder: Folder, shard: Shard) -> Shard:
    """A shard of another writer with its rows, which its footer tells."""
    if shard.rows >= 0:
        return shard
    with told(folder, shard), pa.PythonFile(Parts(folder, shard), "r") as file:
        if shard.format == "parquet":
            metadata = pq.read_metadata(file)
            groups = tuple(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups))
        else:
            opened = pa.ipc.open_file(file)
            groups = tuple(len(opened.get_batch(i)) for i in range(opened.num_record_batches))
        return replace(shard, rows=sum(groups), groups=groups, stamp=_stamp(folder, shard))


def _stamp(folder: Folder, shard: Shard) -> str:
    """The time of a local file; of a remote one, a checksum of its end, where the sizes of all of its parts are."""
    path = folder.local_path(shard.name)
    if path is not None:
        return str(path.stat().st_mtime_ns)
    end = hasher()
    end.update(folder.read_range(shard.name, max(0, shard.bytes - _TAIL), shard.bytes))
    return str(end.hexdigest())


def summed(folder: Folder, shard: Shard) -> Shard:
    """A whole file with all that a log tells of a shard."""
    found, total = counted(folder, shard), hasher()
    with told(folder, shard):
        for start in range(0, shard.bytes, _BYTES):
            total.update(folder.read_range(shard.name, start, min(start + _BYTES, shard.bytes)))
    metadata = arrow_schema_of(folder, shard).metadata or {}
    layout = metadata.get(FINGERPRINT_KEY, b"").decode()
    return replace(found, xxh3=total.hexdigest(), layout=layout, stamp="")


def arrow_schema_of(folder: Folder, shard: Shard) -> pa.Schema:
    """The Arrow schema in the footer of a shard."""
    with told(folder, shard), pa.PythonFile(Parts(folder, shard), "r") as file:
        return told_schema(pq.read_schema(file)) if shard.format == "parquet" else pa.ipc.open_file(file).schema


class Parts:
    """A file of a folder that is read in parts, for its footer."""

    closed = False

    def __init__(self, folder: Folder, shard: Shard) -> None:
        self._folder, self._shard, self._at = folder, shard, 0

    def seek(self, offset: int, whence: int = 0) -> int:
        """Go to a place."""
        self._at = offset + (0, self._at, self._shard.bytes)[whence]
        return self._at

    def tell(self) -> int:
        """Where it is."""
        return self._at

    def read(self, count: int = -1) -> bytes:
        """The next bytes."""
        end = self._shard.bytes if count < 0 else min(self._at + count, self._shard.bytes)
        content = self._folder.read_range(self._shard.name, self._at, end)
        self._at = end
        return content

    def size(self) -> int:
        """All of its bytes."""
        return self._shard.bytes

    def readable(self) -> bool:
        """It is for nothing else."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def close(self) -> None:
        """There is nothing to close."""
