"""The functions that users pass: plain ones, lambdas, closures, and classes whose instances are kept in the worker."""

from __future__ import annotations

import hashlib
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
import pyarrow.compute as pc

from quire._protocols import is_document_type
from quire.array import DocumentBatch, compile_filter, find_column
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
from quire.document import BaseDocument
from quire.errors import DocumentTypeError, OptionError, PartitionError
from quire.storage import count_rows_within
from quire.tensors import describe

if TYPE_CHECKING:
    from numpy.typing import NDArray


_MAX_INSTANCES = 8
"""So many instances are kept in a thread at most; the one that was not used for longest goes."""


class _ThreadInstances(threading.local):
    """The instances of a thread, which is what a worker is."""

    def __init__(self) -> None:
        self.instances: OrderedDict[str, Any] = OrderedDict()


_instances = _ThreadInstances()


@dataclass(frozen=True)
class UserFunction:
    """A function with the arguments behind the first; of a class, these are what its instances are made with."""

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    token: str = field(default_factory=lambda: os.urandom(8).hex())
    """What tells the instances of this call from those of another."""

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise OptionError(f"a function or a class is needed, got {self.function!r}.")
        if self.stateful and not _defines_call(self.function):
            raise OptionError(f"{self.name}: instances of a class that is passed as a function have __call__().")

    @property
    def stateful(self) -> bool:
        """Whether it is a class, one instance of which each worker makes and keeps."""
        return isinstance(self.function, type)

    @property
    def name(self) -> str:
        """What messages call it."""
        return getattr(self.function, "__qualname__", None) or repr(self.function)

    def ready(self) -> Callable[[Any], Any]:
        """A function of one argument; in a worker that had this call before, the instance that it has made then."""
        if not self.stateful:
            bound = partial(self.function, **self.kwargs) if self.kwargs else self.function
            return bound if not self.args else lambda value: bound(value, *self.args)
        instances = _instances.instances
        if self.token not in instances:
            instances[self.token] = self.function(*self.args, **self.kwargs)
            while len(instances) > _MAX_INSTANCES:
                instances.popitem(last=False)
        instances.move_to_end(self.token)
        made: Callable[[Any], Any] = instances[self.token]
        return made

    def returns(self) -> type[Any] | None:
        """The document class that the annotation of what it gives tells of; None where it tells none."""
        function: Any = inspect.unwrap(self.function)
        if isinstance(function, partial):
            function = function.func
        if not inspect.isroutine(function):
            function = (function if isinstance(function, type) else type(function)).__call__
        try:
            return _document_type_in(typing.get_type_hints(function).get("return"))
        except Exception:  # noqa: BLE001 - names that only a checker sees, and whatever else annotations may be
            return None


def _defines_call(cls: Any) -> bool:
    return any("__call__" in base.__dict__ for base in cls.__mro__)


def _document_type_in(hint: Any) -> type[Any] | None:
    """The class of the documents in an annotation: Student, DocumentArray[Student], Iterator[Student], ..."""
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
    """A stage whose errors are all PartitionErrors, and tell where they happened."""

    stateful = False

    @property
    @abstractmethod
    def schema(self) -> pa.Schema:
        """Of the record batches that it gives."""

    @abstractmethod
    def work(self, partition: int, batches: Iterator[pa.RecordBatch], /) -> Iterator[pa.RecordBatch]:
        """The record batches that it makes of a partition."""

    def __call__(self, partition: int, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The same, with the partition named by whatever goes wrong."""
        try:
            yield from until_stopped(self.work(partition, batches))
        except PartitionError:
            raise
        except Exception as error:
            raise partition_error(error, partition) from error


@dataclass(frozen=True)
class MapRows(PartitionStage):
    """A function of one document, which gives one."""

    call: UserFunction
    source: DocumentLayout
    target: DocumentLayout
    on_error: OnError = "raise"

    @property
    def schema(self) -> pa.Schema:
        """That of what the function gives."""
        return self.target.fields

    @property
    def stateful(self) -> bool:  # type: ignore[override]
        """Whether the function is a class."""
        return self.call.stateful

    def work(self, partition: int, batches: Iterator[pa.RecordBatch], /) -> Iterator[pa.RecordBatch]:
        """Each document goes through the function alone."""
        return Encoder(self.target, self.source, partition, self.on_error).encode(self._given(batches))

    def _given(self, batches: Iterator[pa.RecordBatch]) -> Iterator[RowResult]:
        function, first = self.call.ready(), 0
        for chunk in rebatch_by_bytes(batches):
            sources = ChunkRows(self.source, chunk, first)
            for row, document in enumerate(self.source.decode(chunk).iter_documents()):
                yield sources.given(row, attempt(function, document))
            first += len(chunk)


@dataclass(frozen=True)
class MapChunks(PartitionStage):
    """A function of many documents, as an array or as a batch, which gives any number of documents.

    Where it fails and rows may be lost, it is called for each row alone.
    """

    call: UserFunction
    source: DocumentLayout
    target: DocumentLayout
    on_error: OnError = "raise"
    rows: int | None = None
    """The rows of a chunk; None for as many as make about CHUNK_BYTES."""
    columns: bool = False
    """Whether the function takes a DocumentBatch, or a DocumentArray."""
    whole: bool = False
    """Whether the function gets a partition as a whole, however large: it holds groups, which must not be split."""

    @property
    def schema(self) -> pa.Schema:
        """That of what the function gives."""
        return self.target.fields

    @property
    def stateful(self) -> bool:  # type: ignore[override]
        """Whether the function is a class."""
        return self.call.stateful

    def work(self, partition: int, batches: Iterator[pa.RecordBatch], /) -> Iterator[pa.RecordBatch]:
        """Each chunk goes through the function."""
        function, first = self.call.ready(), 0
        encoder = Encoder(self.target, self.source, partition, self.on_error)
        for chunk, columns in self._chunks(batches):
            yield from self._chunk(function, columns, ChunkRows(self.source, chunk, first), encoder)
            first += len(chunk)

    def _chunks(self, batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[pa.RecordBatch, Columns]]:
        if self.whole:
            if partition := list(batches):
                chunk = _concat_partition(partition)
                yield chunk, self.source.decode(chunk)
            return
        if self.rows is None:
            yield from ((chunk, self.source.decode(chunk)) for chunk in rebatch_by_bytes(batches))
            return
        for several in rebatch_by_multiples(batches, self.rows):
            for place, columns in enumerate(self.source.decode_parts(several, self.rows)):
                yield several.slice(place * self.rows, self.rows), columns

    def _chunk(self, function: Any, columns: Columns, sources: ChunkRows, encoder: Encoder) -> Iterator[pa.RecordBatch]:
        given = attempt(function, self._argument(columns), _check_chunk_result)
        if isinstance(given, DocumentBatch):
            given = attempt(self._encode_batch, given)
            if not isinstance(given, Failed):
                yield from given
                return
        if not isinstance(given, Failed):
            yield from encoder.encode(sources.all_given(given))
        elif self.on_error == "raise":
            raise encoder.failed(given.error, sources.given(0, None), len(sources.chunk)) from given.error
        else:
            yield from encoder.encode(self._one_by_one(function, sources))

    def _argument(self, columns: Columns) -> Any:
        return self.source.batch(columns) if self.columns else self.source.array(columns)

    def _encode_batch(self, batch: DocumentBatch[Any]) -> list[pa.RecordBatch]:
        if batch.document_type is not self.target.document_type:
            raise wrong_type_error(self.target, batch)
        made = self.target.layout.encode(batch._columns)
        rows = count_rows_within(made, CHUNK_BYTES)
        return [made.slice(start, rows) for start in range(0, len(made), rows)]

    def _one_by_one(self, function: Any, sources: ChunkRows) -> Iterator[RowResult]:
        for row in range(len(sources.chunk)):
            alone = ChunkRows(self.source, sources.chunk.slice(row, 1), sources.first + row)
            given = attempt(function, self._argument(self.source.decode(alone.chunk)), _list_documents)
            yield from alone.all_given(given)


def _concat_partition(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    try:
        return pa.concat_batches(batches)
    except pa.ArrowInvalid as error:
        size = sum(batch.nbytes for batch in batches)
        raise OptionError(
            f"a partition of {size:,} bytes does not fit into one Arrow record batch, and after partition_by() "
            f"functions get whole partitions: use more of them. ({error})"
        ) from error


def _check_chunk_result(given: Any) -> Any:
    """What a function gave for a chunk: a batch, or documents, which a generator may give."""
    return given if isinstance(given, DocumentBatch) else _list_documents(given)


def _list_documents(given: Any) -> list[Any]:
    if given is None or isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Iterable):
        raise DocumentTypeError(f"the function must give an array of documents, but gave {describe(given)}.")
    if is_document_type(type(given)):
        raise DocumentTypeError("the function gave one document; it must give an array of them. Use map() instead.")
    return list(until_stopped(given))


COUNTS = pa.schema([pa.field("rows", pa.int64(), nullable=False)])


@dataclass(frozen=True)
class FilterRows(PartitionStage):
    """The rows for which a function is true, or that match a query."""

    query: UserFunction | Mapping[str, Any]
    source: DocumentLayout
    on_error: OnError = "raise"

    @property
    def schema(self) -> pa.Schema:
        """That of the rows."""
        return self.source.fields

    @property
    def stateful(self) -> bool:  # type: ignore[override]
        """Whether the function is a class."""
        return isinstance(self.query, UserFunction) and self.query.stateful

    def work(self, partition: int, batches: Iterator[pa.RecordBatch], /) -> Iterator[pa.RecordBatch]:
        """Each document is looked at."""
        query: Any = self.query.ready() if isinstance(self.query, UserFunction) else self.query
        test, first = compile_filter(query, self.source.layout.schema), 0
        for chunk in rebatch_by_bytes(batches):
            columns = self._looked_at.decode(chunk)
            kept = test.mask(columns)
            if kept is None:
                kept = self._rows(columns, test, partition, ChunkRows(self.source, chunk, first))
            first += len(chunk)
            if kept.any():
                yield chunk if kept.all() else chunk.filter(pa.array(kept))

    @cached_property
    def _looked_at(self) -> DocumentLayout:
        """What must be decoded: of a query, the fields that it names."""
        if isinstance(self.query, UserFunction) or self.source.paths is not None:
            return self.source
        return replace(self.source, paths=[path[:1] for path in compile_filter(self.query, None).paths] or None)

    def _rows(self, columns: Columns, test: Any, partition: int, sources: ChunkRows) -> NDArray[np.bool_]:
        kept = np.zeros(len(columns), np.bool_)
        for row, document in enumerate(until_stopped(columns.iter_documents())):
            found = attempt(test, document)
            if isinstance(found, Failed):
                if self.on_error == "raise":
                    given = sources.given(row, None)
                    raise partition_error(found.error, partition, given.row, given.id) from found.error
                found = False
            kept[row] = found
        return kept


@dataclass(frozen=True)
class SampleRows(PartitionStage):
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
            places = np.fromiter((_hash_fraction(value, salt) for value in values), np.float64, len(batch))
            kept = (places >= self.low) & (places < self.high)
            if kept.any():
                yield batch.filter(pa.array(kept))


def _hash_fraction(value: Any, salt: bytes) -> float:
    digest = hashlib.blake2b(str(value).encode("utf-8", "surrogatepass"), digest_size=8, key=salt).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53


@dataclass(frozen=True)
class DistinctValues(PartitionStage):
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
            fresh = [row for row, values in enumerate(self.values(narrow)) if _add_new(seen, values)]
            if fresh:
                yield narrow.take(pa.array(fresh))

    def values(self, batch: pa.RecordBatch) -> list[Any]:
        """The value of each row."""
        return find_column(self.target.decode(batch), self.path).values()


def _add_new(seen: set[Any], value: Any) -> bool:
    if value in seen:
        return False
    seen.add(value)
    return True


@dataclass(frozen=True)
class ConformRows(PartitionStage):
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
class CountRows(PartitionStage):
    """How many rows there are."""

    schema = COUNTS

    def work(self, _: int, batches: Iterator[pa.RecordBatch], /) -> Iterator[pa.RecordBatch]:
        """One number."""
        yield pa.record_batch([pa.array([sum(map(len, batches))])], schema=COUNTS)


def sum_counts(batches: Iterable[pa.RecordBatch]) -> int:
    """What the partitions counted, in sum."""
    return sum(sum(batch.column("rows").to_pylist()) for batch in batches)
