"""Stages: what workers do to the record batches of a partition.

`MapRows` and `MapChunks` call the user's function on documents; the others pass rows on without encoding them again. A
partition is never in memory as a whole: about `CHUNK_BYTES` of it are documents at a time, and about `BLOCK_BYTES` of
results wait to be encoded.
"""

from __future__ import annotations

import inspect
import os
import threading
import typing
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, get_args, get_origin

import numpy as np
import pyarrow as pa

from quire._protocols import is_document_type
from quire.array import DocumentBatch, compile_filter, find_column, hash_fraction
from quire.columns import Columns
from quire.distributed._batches import CHUNK_BYTES, rebatch_by_bytes, rebatch_by_multiples
from quire.distributed._encoding import (
    ChunkRows,
    DocumentLayout,
    Encoder,
    Failed,
    OnError,
    RowResult,
    attempt,
    wrong_type_error,
)
from quire.distributed._failures import partition_error
from quire.distributed._prefetch import until_stopped
from quire.distributed._resources import Resources
from quire.document import BaseDocument
from quire.errors import DocumentTypeError, OptionError, PartitionError
from quire.storage import count_rows_within
from quire.tensors import describe

if TYPE_CHECKING:
    from numpy.typing import NDArray


_MAX_INSTANCES = 8
"""The most instances that a thread keeps; the least recently used is dropped."""


# By thread, so that instances of user classes need not be thread-safe.
class _ThreadInstances(threading.local):
    """The instances of user classes that belong to one thread, that is, to one worker."""

    def __init__(self) -> None:
        self.instances: OrderedDict[str, Any] = OrderedDict()


_instances = _ThreadInstances()


@dataclass(frozen=True)
class UserFunction:
    """A function that the user passed, with the arguments that follow the first.

    If it is a class, each worker creates one instance with these arguments, and calls it.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    resources: Resources | None = None
    """What the workers that call it need."""
    token: str = field(default_factory=lambda: os.urandom(8).hex())
    """Identifies the instances of this function in the workers."""

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise OptionError(f"a function or a class is needed, got {self.function!r}.")
        if self.stateful and not defines_call(self.function):
            raise OptionError(f"{self.name}: instances of a class that is passed as a function need __call__().")

    @property
    def stateful(self) -> bool:
        """Whether it is a class, of which each worker keeps an instance."""
        return isinstance(self.function, type)

    @property
    def name(self) -> str:
        """The name in messages."""
        return getattr(self.function, "__qualname__", None) or repr(self.function)

    @property
    def short_name(self) -> str:
        """The name in dashboards and plans: without the functions that it was defined in."""
        function = self.function.func if isinstance(self.function, partial) else self.function
        name = getattr(function, "__qualname__", None) or type(function).__name__
        return str(name).rpartition("<locals>.")[2]

    def bind(self) -> Callable[[Any], Any]:
        """Return a function of one argument; of a class, the instance that this worker keeps."""
        if not self.stateful:
            bound = partial(self.function, **self.kwargs) if self.kwargs else self.function
            return bound if not self.args else lambda value: bound(value, *self.args)
        instances = _instances.instances
        if self.token not in instances:
            instances[self.token] = self.function(*self.args, **self.kwargs)
            while len(instances) > _MAX_INSTANCES:
                instances.popitem(last=False)
        instances.move_to_end(self.token)
        instance: Callable[[Any], Any] = instances[self.token]
        return instance

    def return_type(self) -> type[Any] | None:
        """Return the document class in the return annotation, if there is one."""
        function: Any = inspect.unwrap(self.function)
        if isinstance(function, partial):
            function = function.func
        if not inspect.isroutine(function):
            function = (function if isinstance(function, type) else type(function)).__call__
        try:
            return _document_type_in(typing.get_type_hints(function).get("return"))
        except Exception:  # noqa: BLE001 - annotations may name what only a type checker can import
            return None


def find_target(layout: DocumentLayout, function: UserFunction, document_type: type[Any] | None) -> DocumentLayout:
    """Return the layout of what a function returns: of `document_type`, its annotation, or the shards' own.

    Nothing runs here. A function without an annotation that returns another class fails when the job runs, with an
    error that asks for the class.
    """
    declared = document_type or function.return_type()
    whole = document_type is not None and layout.paths is not None  # all fields, where only some were selected
    if declared is None or (declared is layout.document_type and not whole):
        return layout
    return DocumentLayout(declared)


def defines_call(cls: Any) -> bool:
    """Whether instances of a class can be called."""
    return any("__call__" in base.__dict__ for base in cls.__mro__)


def _document_type_in(hint: object) -> type[Any] | None:
    """Return the document class in an annotation: Student, DocumentArray[Student], Iterator[Student], ..."""
    if is_document_type(hint):
        return None if hint is BaseDocument else hint
    inner = getattr(hint, "document_type", None)
    if isinstance(inner, type):
        return None if inner is BaseDocument else inner
    origin, arguments = get_origin(hint), get_args(hint)
    if isinstance(origin, type) and issubclass(origin, Iterable) and not issubclass(origin, Mapping) and arguments:
        return _document_type_in(arguments[0])
    return None


class PartitionStage(ABC):
    """A stage that raises only PartitionErrors, which name the partition."""

    stateful = False

    @property
    @abstractmethod
    def schema(self) -> pa.Schema:
        """The schema of the record batches it yields."""

    @abstractmethod
    def work(self, partition: int, batches: Iterator[pa.RecordBatch], /) -> Iterator[pa.RecordBatch]:
        """Yield the record batches that it makes of a partition."""

    def __call__(self, partition: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        try:
            yield from until_stopped(self.work(partition, batches))
        except PartitionError:
            raise
        except Exception as error:
            raise partition_error(error, partition) from error


@dataclass(frozen=True)
class _FunctionStage(PartitionStage):
    """Call a user's function with documents, and encode what it returns."""

    call: UserFunction
    source: DocumentLayout
    target: DocumentLayout
    on_error: OnError = "raise"

    @property
    def schema(self) -> pa.Schema:
        return self.target.fields

    @property
    def stateful(self) -> bool:  # type: ignore[override]
        return self.call.stateful

    @property
    def resources(self) -> Resources | None:
        return self.call.resources

    @property
    def name(self) -> str:
        return self.call.short_name


class MapRows(_FunctionStage):
    """Call a function with each document; it returns one."""

    def work(self, partition: int, batches: Iterator[pa.RecordBatch], /) -> Iterator[pa.RecordBatch]:
        return Encoder(self.target, self.source, partition, self.on_error).encode(self._results(batches))

    def _results(self, batches: Iterator[pa.RecordBatch]) -> Iterator[RowResult]:
        function, first = self.call.bind(), 0
        for chunk in rebatch_by_bytes(batches):
            rows = ChunkRows(self.source, chunk, first)
            for row, document in enumerate(self.source.decode(chunk).iter_documents()):
                yield rows.result_of(row, attempt(function, document))
            first += len(chunk)


@dataclass(frozen=True)
class MapChunks(_FunctionStage):
    """Call a function with many documents, as an array or as a batch; it returns any number of documents.

    If it fails and rows may be lost, it is called for each row alone.
    """

    rows: int | None = None
    """The rows of a chunk; None for as many as have about CHUNK_BYTES."""
    columns: bool = False
    """Whether the function takes a DocumentBatch instead of a DocumentArray."""
    whole: bool = False
    """Whether the function gets a partition as a whole, however large, because it holds groups."""

    def work(self, partition: int, batches: Iterator[pa.RecordBatch], /) -> Iterator[pa.RecordBatch]:
        function, first = self.call.bind(), 0
        encoder = Encoder(self.target, self.source, partition, self.on_error)
        for chunk, columns in self._chunks(batches):
            yield from self._chunk(function, columns, ChunkRows(self.source, chunk, first), encoder)
            first += len(chunk)

    def _chunks(self, batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[pa.RecordBatch, Columns]]:
        if self.whole:
            if partition := list(batches):
                try:
                    chunk = pa.concat_batches(partition)
                except pa.ArrowInvalid as error:
                    size = sum(batch.nbytes for batch in partition)
                    raise OptionError(
                        f"a partition of {size:,} bytes does not fit into one Arrow record batch, and after "
                        f"partition_by() functions get whole partitions: use more partitions. ({error})"
                    ) from error
                yield chunk, self.source.decode(chunk)
            return
        if self.rows is None:
            yield from ((chunk, self.source.decode(chunk)) for chunk in rebatch_by_bytes(batches))
            return
        # Many batches are located at once and then cut: locating rows has a fixed cost per record batch.
        for several in rebatch_by_multiples(batches, self.rows):
            for number, columns in enumerate(self.source.decode_parts(several, self.rows)):
                yield several.slice(number * self.rows, self.rows), columns

    def _chunk(
        self, function: Callable[[Any], Any], columns: Columns, rows: ChunkRows, encoder: Encoder
    ) -> Iterator[pa.RecordBatch]:
        result = attempt(
            function,
            self.argument(columns),
            lambda result: result if isinstance(result, DocumentBatch) else list_documents(result),
        )
        if isinstance(result, DocumentBatch):  # its columns are encoded without creating documents
            result = attempt(self.encode_batch, result)
            if not isinstance(result, Failed):
                yield from result
                return
        if not isinstance(result, Failed):
            yield from encoder.encode(rows.results_of(result))
        elif self.on_error == "raise":
            raise encoder.make_error(result.error, rows.result_of(0, None), len(rows.chunk)) from result.error
        else:
            yield from encoder.encode(self._one_by_one(function, rows))

    def argument(self, columns: Columns) -> Any:
        return self.source.batch(columns) if self.columns else self.source.array(columns)

    def encode_batch(self, batch: DocumentBatch[Any]) -> list[pa.RecordBatch]:
        if batch.document_type is not self.target.document_type:
            raise wrong_type_error(self.target, batch)
        encoded = self.target.layout.encode(batch._columns)
        rows = count_rows_within(encoded, CHUNK_BYTES)
        return [encoded.slice(start, rows) for start in range(0, len(encoded), rows)]

    def _one_by_one(self, function: Callable[[Any], Any], rows: ChunkRows) -> Iterator[RowResult]:
        for row in range(len(rows.chunk)):
            alone = ChunkRows(self.source, rows.chunk.slice(row, 1), rows.first + row)
            result = attempt(function, self.argument(self.source.decode(alone.chunk)), list_documents)
            yield from alone.results_of(result)


def list_documents(result: object) -> list[Any]:
    """Return the documents that a function returned; it may be a generator."""
    if result is None or isinstance(result, (str, bytes, Mapping)) or not isinstance(result, Iterable):
        raise DocumentTypeError(f"the function must return an array of documents, but returned {describe(result)}.")
    if is_document_type(type(result)):
        raise DocumentTypeError("the function returned one document instead of an array of them. Use map() instead.")
    return list(until_stopped(result))


COUNTS = pa.schema([pa.field("rows", pa.int64(), nullable=False)])


@dataclass(frozen=True)
class FilterRows(PartitionStage):
    """Keep the rows for which a function is true, or that match a query."""

    query: UserFunction | Mapping[str, Any]
    source: DocumentLayout
    on_error: OnError = "raise"

    @property
    def schema(self) -> pa.Schema:
        return self.source.fields

    @property
    def stateful(self) -> bool:  # type: ignore[override]
        return isinstance(self.query, UserFunction) and self.query.stateful

    @property
    def name(self) -> str:
        fields = self.query.short_name if isinstance(self.query, UserFunction) else ", ".join(self.query)
        return f"filter({fields})"

    def work(self, partition: int, batches: Iterator[pa.RecordBatch], /) -> Iterator[pa.RecordBatch]:
        query: Any = self.query.bind() if isinstance(self.query, UserFunction) else self.query
        test, first = compile_filter(query, self.source.layout.schema), 0
        for chunk in rebatch_by_bytes(batches):
            columns = self._narrow.decode(chunk)
            mask = test.mask(columns)
            if mask is None:
                mask = self._test_rows(columns, test, partition, ChunkRows(self.source, chunk, first))
            first += len(chunk)
            if mask.any():
                yield chunk if mask.all() else chunk.filter(pa.array(mask))

    @cached_property
    def _narrow(self) -> DocumentLayout:
        """The layout of the fields to decode: those that a query names, or all for a function."""
        if isinstance(self.query, UserFunction) or self.source.paths is not None:
            return self.source
        return replace(self.source, paths=[path[:1] for path in compile_filter(self.query, None).paths] or None)

    def _test_rows(
        self, columns: Columns, test: Callable[[Any], Any], partition: int, rows: ChunkRows
    ) -> NDArray[np.bool_]:
        mask = np.zeros(len(columns), np.bool_)
        for row, document in enumerate(until_stopped(columns.iter_documents())):
            result = attempt(test, document)
            if isinstance(result, Failed):
                if self.on_error == "raise":
                    item = rows.result_of(row, None)
                    raise partition_error(result.error, partition, item.row, item.id) from result.error
                result = False
            mask[row] = result
        return mask


@dataclass(frozen=True)
class SampleRows(PartitionStage):
    """Keep the rows whose hash, a number from 0 to 1, is in a range: the same ones on every engine."""

    source: DocumentLayout
    path: str
    seed: int | None
    low: float
    high: float

    @property
    def schema(self) -> pa.Schema:
        return self.source.fields

    @cached_property
    def _narrow(self) -> DocumentLayout:
        return self.source.select([self.path])

    def work(self, _: int, batches: Iterator[pa.RecordBatch], /) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            hashes = _hash_rows(self._narrow, batch, self.path, self.seed)
            mask = (hashes >= self.low) & (hashes < self.high)
            if mask.any():
                yield batch.filter(pa.array(mask))


HASHES = pa.schema([pa.field("hash", pa.float64(), nullable=False)])


@dataclass(frozen=True)
class LowestHashes(PartitionStage):
    """Replace a partition by the n lowest hashes of its rows, and the next one, which shows whether there are ties."""

    source: DocumentLayout
    path: str
    seed: int
    n: int

    @property
    def schema(self) -> pa.Schema:
        return HASHES

    @cached_property
    def _narrow(self) -> DocumentLayout:
        return self.source.select([self.path])

    def work(self, _: int, batches: Iterator[pa.RecordBatch], /) -> Iterator[pa.RecordBatch]:
        lowest = np.zeros(0)
        for batch in batches:
            hashes = _hash_rows(self._narrow, batch, self.path, self.seed)
            lowest = np.sort(np.concatenate([lowest, hashes]))[: self.n + 1]
        yield pa.record_batch([pa.array(lowest)], schema=HASHES)


def _hash_rows(narrow: DocumentLayout, batch: pa.RecordBatch, path: str, seed: int | None) -> NDArray[np.float64]:
    values = find_column(narrow.decode(batch), path).values()
    return np.fromiter((hash_fraction(value, seed) for value in values), np.float64, len(batch))


@dataclass(frozen=True)
class DistinctValues(PartitionStage):
    """Keep one row for each value at a path, with that field alone."""

    source: DocumentLayout
    path: str

    @cached_property
    def target(self) -> DocumentLayout:
        return self.source.select([self.path])

    @property
    def schema(self) -> pa.Schema:
        return self.target.fields

    def work(self, _: int, batches: Iterator[pa.RecordBatch], /) -> Iterator[pa.RecordBatch]:
        seen: set[Any] = set()
        for batch in batches:
            narrow = self.target.conform(batch)
            new = []
            for row, value in enumerate(self.values(narrow)):
                if value not in seen:
                    seen.add(value)
                    new.append(row)
            if new:
                yield narrow.take(pa.array(new))

    def values(self, batch: pa.RecordBatch) -> list[Any]:
        """Return the value of each row."""
        return find_column(self.target.decode(batch), self.path).values()


@dataclass(frozen=True)
class ConformRows(PartitionStage):
    """Convert rows of any origin to the layout of a class, or of some of its fields."""

    target: DocumentLayout

    @property
    def schema(self) -> pa.Schema:
        return self.target.fields

    def work(self, _: int, batches: Iterator[pa.RecordBatch], /) -> Iterator[pa.RecordBatch]:
        return map(self.target.conform, batches)


@dataclass(frozen=True)
class CountRows(PartitionStage):
    """Yield the number of rows."""

    schema = COUNTS

    def work(self, _: int, batches: Iterator[pa.RecordBatch], /) -> Iterator[pa.RecordBatch]:
        yield pa.record_batch([pa.array([sum(map(len, batches))])], schema=COUNTS)


def sum_counts(batches: Iterable[pa.RecordBatch]) -> int:
    """Return the sum of what `CountRows` counted in all partitions."""
    return sum(sum(batch.column("rows").to_pylist()) for batch in batches)
