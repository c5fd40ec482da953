"""Stages: the user's function on the documents of a partition, record batches in and record batches out.

A partition is never in memory as a whole: about `CHUNK_BYTES` of it are documents at a time, and `BLOCK_BYTES` of what
the function gave wait to be encoded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import pyarrow as pa

from quire._protocols import is_document_type
from quire.array import DocumentBatch
from quire.codec._bytes import approximate_size
from quire.columns import Columns
from quire.distributed._arenas import Arena, Tensors
from quire.distributed._calls import Call
from quire.distributed._chunks import BLOCK_BYTES, CHUNK_BYTES, by_bytes, by_multiples
from quire.distributed._failures import partition_error
from quire.distributed._lanes import until_stopped
from quire.distributed._layouts import DocumentLayout
from quire.distributed._nulls import null_document
from quire.document import BaseDocument
from quire.errors import DocumentTypeError, OptionError, PartitionError
from quire.storage import count_rows_within
from quire.tensors import describe

OnError = Literal["raise", "skip", "null"]
"""What becomes of a row on which a function fails: an error, no row, or a row whose fields are None where they can."""


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


class Given(NamedTuple):
    """What a function gave: a document or a failure, and the row that it stands for, if it stands for one."""

    result: Any
    row: int
    id: str | None = None
    sources: Sources | None = None
    """Where the document of the row is."""


@dataclass(frozen=True)
class MapRows(PartitionStage):
    """A function of one document, which gives one."""

    call: Call
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

    def _given(self, batches: Iterator[pa.RecordBatch]) -> Iterator[Given]:
        function, first = self.call.ready(), 0
        for chunk in by_bytes(batches):
            sources = Sources(self.source, chunk, first)
            for row, document in enumerate(self.source.decode(chunk).iter_documents()):
                yield sources.given(row, attempted(function, document))
            first += len(chunk)


@dataclass(frozen=True)
class MapChunks(PartitionStage):
    """A function of many documents, as an array or as a batch, which gives any number of documents.

    Where it fails and rows may be lost, it is called for each row alone.
    """

    call: Call
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
            yield from self._chunk(function, columns, Sources(self.source, chunk, first), encoder)
            first += len(chunk)

    def _chunks(self, batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[pa.RecordBatch, Columns]]:
        if self.whole:
            if partition := list(batches):
                chunk = _concat(partition)
                yield chunk, self.source.decode(chunk)
            return
        if self.rows is None:
            yield from ((chunk, self.source.decode(chunk)) for chunk in by_bytes(batches))
            return
        for several in by_multiples(batches, self.rows):
            for place, columns in enumerate(self.source.decode_parts(several, self.rows)):
                yield several.slice(place * self.rows, self.rows), columns

    def _chunk(self, function: Any, columns: Columns, sources: Sources, encoder: Encoder) -> Iterator[pa.RecordBatch]:
        given = attempted(function, self._argument(columns), _taken)
        if isinstance(given, DocumentBatch):
            given = attempted(self._encode_batch, given)
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
            raise wrong_type(self.target, batch)
        made = self.target.layout.encode(batch._columns)
        rows = count_rows_within(made, CHUNK_BYTES)
        return [made.slice(start, rows) for start in range(0, len(made), rows)]

    def _one_by_one(self, function: Any, sources: Sources) -> Iterator[Given]:
        for row in range(len(sources.chunk)):
            alone = Sources(self.source, sources.chunk.slice(row, 1), sources.first + row)
            given = attempted(function, self._argument(self.source.decode(alone.chunk)), _listed)
            yield from alone.all_given(given)


def _concat(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    try:
        return pa.concat_batches(batches)
    except pa.ArrowInvalid as error:
        size = sum(batch.nbytes for batch in batches)
        raise OptionError(
            f"a partition of {size:,} bytes does not fit into one Arrow record batch, and after partition_by() "
            f"functions get whole partitions: use more of them. ({error})"
        ) from error


class Sources:
    """The rows of a chunk that a function had in hand: their ids, and their documents if need be."""

    def __init__(self, layout: DocumentLayout, chunk: pa.RecordBatch, first: int) -> None:
        self._layout, self.chunk, self.first = layout, chunk, first

    @cached_property
    def ids(self) -> list[Any]:
        """Of each row; None where rows have none."""
        return self.chunk.column("id").to_pylist() if self._layout.has_text_id else [None] * len(self.chunk)

    def given(self, row: int, result: Any) -> Given:
        """What a function gave for a row."""
        return Given(result, self.first + row, self.ids[row], self)

    def all_given(self, results: list[Any] | Failed) -> Iterator[Given]:
        """What it gave for all of them; if it is one for each, each stands for its row."""
        if isinstance(results, Failed):
            yield self.given(0, results)
        elif len(results) == len(self.chunk):
            yield from (self.given(row, result) for row, result in enumerate(results))
        else:
            yield from (Given(result, self.first) for result in results)

    def document(self, row: int) -> Any:
        """The document of a row, as it was before the function had it."""
        return self._layout.decode(self.chunk.slice(row - self.first, 1)).document(0)


class Failed(NamedTuple):
    """An error of the user's function, on its way to where it is known what to do about it."""

    error: Exception


def attempted(function: Any, value: Any, then: Any = None) -> Any:
    """What a function gives, or its failure."""
    try:
        return function(value) if then is None else then(function(value))
    except Exception as error:  # noqa: BLE001 - it is the user's function
        return Failed(error)


def _taken(given: Any) -> Any:
    """What a function gave for a chunk: a batch, or documents, which a generator may give."""
    return given if isinstance(given, DocumentBatch) else _listed(given)


def _listed(given: Any) -> list[Any]:
    if given is None or isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Iterable):
        raise DocumentTypeError(f"the function must give an array of documents, but gave {describe(given)}.")
    if is_document_type(type(given)):
        raise DocumentTypeError("the function gave one document; it must give an array of them. Use map() instead.")
    return list(until_stopped(given))


class Encoder:
    """Documents that a function gave on their way into record batches, and what becomes of the rows that fail."""

    def __init__(self, target: DocumentLayout, source: DocumentLayout, partition: int, on_error: OnError) -> None:
        self._target, self._partition, self._on_error = target, partition, on_error
        self._keeps_ids = target.has_text_id and source.has_text_id

    def encode(self, given: Iterable[Given]) -> Iterator[pa.RecordBatch]:
        """Record batches of about BLOCK_BYTES."""
        block: list[Given] = []
        size, wanted, arena = 0, self._target.document_type, Arena(self._target.layout, BLOCK_BYTES)
        for item in until_stopped(given):
            kept = item if type(item.result) is wanted else self._checked(item)
            if kept is None:
                continue
            size += approximate_size(kept.result)
            block.append(Given(arena.taken(kept.result), *kept[1:]))
            if size >= BLOCK_BYTES or arena.is_full:
                yield from self._block(block, arena.columns())
                block, size = [], 0
        yield from self._block(block, arena.columns())

    def _checked(self, given: Given) -> Given | None:
        """The row with a document in it; None if there is to be no row."""
        self._check_class(given)
        result = given.result
        if not isinstance(result, Failed):
            result = attempted(self._document, result)
        return self._rescued(given, result.error) if isinstance(result, Failed) else given._replace(result=result)

    def _document(self, item: Any) -> Any:
        if isinstance(item, Mapping):
            return self._target.document_type.model_validate(item)
        if not isinstance(item, self._target.document_type):
            raise wrong_type(self._target, item)
        return item

    def _check_class(self, given: Given) -> None:
        """Raise for a document of another class: a mistake in the program, which `on_error` does not apply to.

        A subclass is one, too: its own fields have no place in the rows and would be lost.
        """
        result, expected = given.result, self._target.document_type
        if not isinstance(result, BaseDocument) or type(result) is expected:
            return
        if not isinstance(result, expected) or type(result).model_fields.keys() - expected.model_fields.keys():
            error = wrong_type(self._target, result)
            raise self.failed(error, given) from error

    def _rescued(self, given: Given, error: Exception) -> Given | None:
        if self._on_error == "skip":
            return None
        if self._on_error == "raise" or given.sources is None:
            raise self.failed(error, given) from error
        return given._replace(result=null_document(self._target, given.sources.document(given.row)))

    def _block(self, block: list[Given], tensors: Tensors | None = None) -> Iterator[pa.RecordBatch]:
        """The record batch of rows, or of each of them alone where that fails; some of their tensors may be in one."""
        if not block:
            return
        made = attempted(lambda rows: self._encoded(rows, tensors), block)
        if not isinstance(made, Failed):
            yield made
        elif len(block) == 1:
            rescued = self._rescued(block[0], made.error)
            if rescued is not None:
                yield self._encoded([rescued])
        else:
            for item in block:
                yield from self._block([item])

    def _encoded(self, block: list[Given], tensors: Tensors | None = None) -> pa.RecordBatch:
        return self._target.encode([item.result for item in block], self._ids(block), tensors)

    def _ids(self, block: list[Given]) -> list[Any] | None:
        """Documents that were made of others have their ids, unless the function gave them some.

        So ids do not change from one attempt to the next.
        """
        if not self._keeps_ids:
            return None
        return [
            item.result.id if item.id is None or "id" in item.result.model_fields_set else item.id for item in block
        ]

    def failed(self, error: Exception, given: Given, rows: int = 1) -> PartitionError:
        """The error for the caller; `rows` is how many the function had in hand."""
        return partition_error(error, self._partition, given.row, given.id, rows)


def wrong_type(target: DocumentLayout, item: Any) -> DocumentTypeError:
    """Return the error for a result that is not a document of the class that the shards are of."""
    name = target.document_type.__name__
    returned = item.document_type if isinstance(item, DocumentBatch) else type(item)
    if not is_document_type(returned):
        return DocumentTypeError(f"the function must return documents of {name}, but returned {describe(item)}.")
    subclass = f", a subclass of {name} with more fields" if issubclass(returned, target.document_type) else ""
    return DocumentTypeError(
        f"the function must return documents of {name}, but returned {returned.__name__}{subclass}. If that is what it "
        f"is to return, declare it: annotate the function's return type, or pass schema={returned.__name__}."
    )
