"""Stages that give some rows as they are: no document is encoded again."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from quire.array import compile_filter, find_column
from quire.columns import Columns
from quire.distributed._calls import Call
from quire.distributed._chunks import by_bytes
from quire.distributed._failures import partition_error
from quire.distributed._lanes import until_stopped
from quire.distributed._layouts import DocumentLayout
from quire.distributed._stage import Failed, OnError, PartitionStage, Sources, attempted

if TYPE_CHECKING:
    from numpy.typing import NDArray

COUNTS = pa.schema([pa.field("rows", pa.int64(), nullable=False)])


@dataclass(frozen=True)
class FilterRows(PartitionStage):
    """The rows for which a function is true, or that match a query."""

    query: Call | Mapping[str, Any]
    source: DocumentLayout
    on_error: OnError = "raise"

    @property
    def schema(self) -> pa.Schema:
        """That of the rows."""
        return self.source.fields

    @property
    def stateful(self) -> bool:  # type: ignore[override]
        """Whether the function is a class."""
        return isinstance(self.query, Call) and self.query.stateful

    def work(self, partition: int, batches: Iterator[pa.RecordBatch], /) -> Iterator[pa.RecordBatch]:
        """Each document is looked at."""
        query: Any = self.query.ready() if isinstance(self.query, Call) else self.query
        test, first = compile_filter(query, self.source.layout.schema), 0
        for chunk in by_bytes(batches):
            columns = self._looked_at.decode(chunk)
            kept = test.mask(columns)
            if kept is None:
                kept = self._rows(columns, test, partition, Sources(self.source, chunk, first))
            first += len(chunk)
            if kept.any():
                yield chunk if kept.all() else chunk.filter(pa.array(kept))

    @cached_property
    def _looked_at(self) -> DocumentLayout:
        """What must be decoded: of a query, the fields that it names."""
        if isinstance(self.query, Call) or self.source.paths is not None:
            return self.source
        return replace(self.source, paths=[path[:1] for path in compile_filter(self.query, None).paths] or None)

    def _rows(self, columns: Columns, test: Any, partition: int, sources: Sources) -> NDArray[np.bool_]:
        kept = np.zeros(len(columns), np.bool_)
        for row, document in enumerate(until_stopped(columns.iter_documents())):
            found = attempted(test, document)
            if isinstance(found, Failed):
                if self.on_error == "raise":
                    given = sources.given(row, None)
                    raise partition_error(found.error, partition, given.row, given.id) from found.error
                found = False
            kept[row] = found
        return kept


@dataclass(frozen=True)
class DrawRows(PartitionStage):
    """The rows whose hash, a number from 0 to 1, is in a range: the same ones on every engine, in any partition."""

    source: DocumentLayout
    path: str
    seed: int
    low: float
    high: float

    @property
    def schema(self) -> pa.Schema:
        """That of the rows."""
        return self.source.fields

    @cached_property
    def _narrow(self) -> DocumentLayout:
        return self.source.chosen([self.path])

    def work(self, _: int, batches: Iterator[pa.RecordBatch], /) -> Iterator[pa.RecordBatch]:
        """Each value is hashed with the seed."""
        salt = self.seed.to_bytes(16, "little", signed=True)
        for batch in batches:
            values = find_column(self._narrow.decode(batch), self.path).values()
            places = np.fromiter((_fraction(value, salt) for value in values), np.float64, len(batch))
            kept = (places >= self.low) & (places < self.high)
            if kept.any():
                yield batch.filter(pa.array(kept))


def _fraction(value: Any, salt: bytes) -> float:
    digest = hashlib.blake2b(str(value).encode("utf-8", "surrogatepass"), digest_size=8, key=salt).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53


@dataclass(frozen=True)
class Distinct(PartitionStage):
    """A row for each value at a path that a partition has."""

    source: DocumentLayout
    path: str

    @cached_property
    def target(self) -> DocumentLayout:
        """The one field that is left."""
        return self.source.chosen([self.path])

    @property
    def schema(self) -> pa.Schema:
        """That of the one field."""
        return self.target.fields

    def work(self, _: int, batches: Iterator[pa.RecordBatch], /) -> Iterator[pa.RecordBatch]:
        """Each value is looked at."""
        seen: set[Any] = set()
        for batch in batches:
            narrow = self.target.conformed(batch)
            fresh = [row for row, values in enumerate(self.values(narrow)) if _added(seen, values)]
            if fresh:
                yield narrow.take(pa.array(fresh))

    def values(self, batch: pa.RecordBatch) -> list[Any]:
        """The value of each row."""
        return find_column(self.target.decode(batch), self.path).values()


def _added(seen: set[Any], value: Any) -> bool:
    if value in seen:
        return False
    seen.add(value)
    return True


@dataclass(frozen=True)
class Conform(PartitionStage):
    """Rows of any origin in the layout of a class, or with some of its fields alone."""

    target: DocumentLayout

    @property
    def schema(self) -> pa.Schema:
        """That of the class."""
        return self.target.fields

    def work(self, _: int, batches: Iterator[pa.RecordBatch], /) -> Iterator[pa.RecordBatch]:
        """Each record batch is read as the class has it."""
        return map(self.target.conformed, batches)


@dataclass(frozen=True)
class AppendKeys(PartitionStage):
    """Adds columns with the values of fields of nested documents, for engines to partition by."""

    source: DocumentLayout
    paths: tuple[tuple[str, ...], ...]

    @property
    def names(self) -> list[str]:
        """The names of the columns to partition by: the added ones, and fields of the document itself."""
        return [path[0] if len(path) == 1 else f"quire key {i}" for i, path in enumerate(self.paths)]

    @cached_property
    def schema(self) -> pa.Schema:
        """That of the rows, and the keys."""
        schema = self.source.fields
        for name, path in self._added():
            arrow_type = schema.field(path[0]).type
            for part in path[1:]:
                arrow_type = arrow_type.field(part).type
            schema = schema.append(pa.field(name, arrow_type))
        return schema

    def _added(self) -> list[tuple[str, tuple[str, ...]]]:
        return [(name, path) for name, path in zip(self.names, self.paths, strict=True) if len(path) > 1]

    def work(self, _: int, batches: Iterator[pa.RecordBatch], /) -> Iterator[pa.RecordBatch]:
        """Each record batch with its keys; None where the nested document is None."""
        for batch in batches:
            keys = [pc.struct_field(batch.column(path[0]), list(path[1:])) for _, path in self._added()]
            yield pa.RecordBatch.from_arrays([*batch.columns, *keys], schema=self.schema)


@dataclass(frozen=True)
class RowCount(PartitionStage):
    """How many rows there are."""

    schema = COUNTS

    def work(self, _: int, batches: Iterator[pa.RecordBatch], /) -> Iterator[pa.RecordBatch]:
        """One number."""
        yield pa.record_batch([pa.array([sum(map(len, batches))])], schema=COUNTS)


def counted(batches: Iterable[pa.RecordBatch]) -> int:
    """What the partitions counted, in sum."""
    return sum(sum(batch.column("rows").to_pylist()) for batch in batches)
