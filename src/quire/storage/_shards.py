"""Opening shards: record batches in the layout of the class, mapped into memory, from the cache where they must be."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from quire.columns import Columns
from quire.errors import DecodeError, ShardError, StorageError, StorageNotFoundError
from quire.files import Folder, shown
from quire.storage._cache import ShardCache, cache_key
from quire.storage._foreign import conform_fields, fits
from quire.storage._form import Form
from quire.storage._layout import Layout
from quire.storage._manifest import Shard
from quire.storage._memory import map_file
from quire.storage._nested import DocumentForm
from quire.storage._rows import Rows
from quire.storage._sink import hasher

_ROWS = 8192
"""Of a row group of another writer, so many rows are read at a time."""


class ShardReader:
    """Reads the shards of one folder in one layout."""

    def __init__(self, folder: Folder, layout: Layout, cache: ShardCache) -> None:
        self.folder, self.layout, self.cache = folder, layout, cache

    def open(self, shard: Shard) -> list[pa.RecordBatch]:
        """The record batches of a shard, mapped into memory."""
        with told(self.folder, shard):
            batches = self._mapped(shard) or self._from_cache(shard)
        rows = sum(map(len, batches))
        if shard.rows not in (-1, rows):
            raise self.altered(shard, f"it has {rows:,} rows, and the dataset says {shard.rows:,}")
        return batches

    def _mapped(self, shard: Shard) -> list[pa.RecordBatch] | None:
        """The shard itself, if it can be mapped as it is."""
        path = self.folder.local_path(shard.name)
        if shard.format != "arrow" or path is None:
            return None
        reader = pa.ipc.open_file(self._buffer(path, shard))
        return self._selected(reader) if self._in_layout(reader.schema) else None

    def _buffer(self, path: Path, shard: Shard) -> pa.Buffer:
        with path.open("rb") as file:
            buffer = map_file(file)
        if shard.bytes != buffer.size:
            raise self.altered(shard, f"it has {buffer.size:,} bytes, and the dataset says {shard.bytes:,}")
        return buffer

    def _in_layout(self, schema: pa.Schema) -> bool:
        return all(
            (at := schema.get_field_index(form.field.name)) >= 0 and fits(form, schema.field(at).type)
            for form in self.layout.forms
        )

    def _selected(self, reader: Any) -> list[pa.RecordBatch]:
        names = [form.field.name for form in self.layout.forms]
        batches = [reader.get_batch(i).select(names) for i in range(reader.num_record_batches)]
        for batch in batches:
            batch.validate()  # that the buffers are as long as the rows ask for
        return batches

    def _from_cache(self, shard: Shard) -> list[pa.RecordBatch]:
        key = cache_key(shard.xxh3 or self.folder.join(shard.name), shard.bytes, self.layout.fingerprint)
        with self.cache.open(key, lambda target: self._transcode(shard, target)) as file:
            return self._selected(pa.ipc.open_file(map_file(file)))

    def _transcode(self, shard: Shard, target: Path) -> None:
        """Write a shard anew as Arrow, in the layout of the class."""
        schema = self.layout.arrow_schema
        with pa.OSFile(str(target), "wb") as file, pa.ipc.new_file(file, schema) as writer:
            for batch in self.read(shard):
                writer.write_batch(batch.replace_schema_metadata(schema.metadata))

    def read(self, shard: Shard, rows: int = _ROWS) -> Iterator[pa.RecordBatch]:
        """The record batches of a shard in the layout of the class, one at a time, whatever its format."""
        with told(self.folder, shard), self._local(shard) as path:
            if shard.format == "arrow":
                reader = pa.ipc.open_file(self._buffer(path, shard))
                found: Any = (reader.get_batch(i) for i in range(reader.num_record_batches))
            else:
                if path.stat().st_size != shard.bytes:
                    raise self.altered(shard, f"it has {path.stat().st_size:,} bytes, not {shard.bytes:,}")
                file = pq.ParquetFile(path, memory_map=True)
                found = file.iter_batches(rows, columns=self._wanted(file.schema_arrow))
            for batch in found:
                yield self.conformed(batch, shard)

    def groups(self, shard: Shard, wanted: Callable[[Any], bool]) -> Iterator[tuple[int, Columns]]:
        """The row groups of a Parquet shard whose metadata are wanted: the number of the first row, and the columns."""
        with told(self.folder, shard), self._local(shard) as path:
            file = pq.ParquetFile(path, memory_map=True)
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
        accepted = self.layout.schema.accepted
        forms = {form.field.name: form for form in self.layout.forms}
        chosen = [(name, forms.get(accepted[name][0].name)) for name in schema.names if name in accepted]
        return [path for name, form in chosen if form is not None for path in _leaves(form, name)]

    def conformed(self, batch: pa.RecordBatch, shard: Shard) -> pa.RecordBatch:
        """A record batch in the layout of the class."""
        found = dict(zip(batch.schema.names, batch.columns, strict=True))
        where = f"shard {shard.name}"
        arrays = conform_fields(self.layout.forms, found, self.layout.schema, len(batch), where)
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

    def altered(self, shard: Shard, why: str) -> ShardError:
        """A shard that is not what was written."""
        name = shown(self.folder.join(shard.name))
        return ShardError(f"{name}: the shard was altered or cut off: {why}. Write it again.")

    def check(self, shard: Shard) -> None:
        """Read all of a shard, and compare its checksum."""
        with told(self.folder, shard), self._local(shard) as path:
            buffer = self._buffer(path, shard)
            if shard.xxh3:
                found = hasher()
                found.update(memoryview(buffer))
                if found.hexdigest() != shard.xxh3:
                    raise self.altered(shard, "its checksum is another one")
            for batch in self.read(shard):
                batch.validate(full=True)


def _leaves(form: Form, name: str) -> list[str]:
    """A column, or the parts of it that are read."""
    if isinstance(form, DocumentForm) and len(form.forms) < len(form.field.document_type.model_fields):
        return [path for child in form.forms for path in _leaves(child, f"{name}.{child.field.name}")]
    return [name]


@contextmanager
def told(folder: Folder, shard: Shard) -> Iterator[None]:
    """Whatever goes wrong with a shard names it."""
    name = shown(folder.join(shard.name))
    try:
        yield
    except ShardError:
        raise
    except StorageNotFoundError as error:
        raise ShardError(f"{name}: the shard is missing. verify() tells whether others are.") from error
    except (pa.ArrowException, DecodeError, ValueError, EOFError, MemoryError) as error:
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
    return replace(shard, rows=sum(groups), groups=groups)


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
