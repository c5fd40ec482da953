"""Documents in record batches: decoded for the user's function, and encoded from what it returned.

A function creates new tensors for every document. Holding them until a record batch is full would allocate fresh memory
all the time, which costs more than computing in it. `TensorBuffer` copies large tensors as they come into memory that
was used before, directly in the layout of the column, and the function's own tensors are free at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Optional, TypeAlias

import numpy as np
import pyarrow as pa
from pydantic import create_model

from quire._lowlevel.pool import take_buffer
from quire._protocols import is_document_type
from quire.array import DocumentArray, DocumentBatch
from quire.codec import approximate_size
from quire.columns import (
    MODEL_SETTERS,
    Columns,
    ObjectColumn,
    StackOptions,
    TensorColumn,
    stack,
)
from quire.distributed._batches import BLOCK_BYTES
from quire.distributed._failures import partition_error
from quire.distributed._prefetch import until_stopped
from quire.document import BaseDocument
from quire.errors import DecodeError, DocumentTypeError, OptionError, PartitionError
from quire.schema import Field, FieldKind, FieldPath, parse_path
from quire.storage import (
    Layout,
    Paths,
    TensorCodec,
    class_from_arrow,
    conform_batch,
    loaded_class,
    register_class,
    resolve_columns,
    stored_class_name,
)
from quire.tensors import describe, get_framework

if TYPE_CHECKING:
    from numpy.typing import NDArray


OnError = Literal["raise", "skip", "null"]
"""What happens to a row on which a function fails: an error, no row, or a row whose optional fields are None."""
StackedTensors: TypeAlias = "Mapping[str, NDArray[Any]]"
"""The tensors of all documents in one array, by field name."""
_RAGGED = StackOptions(shapes="ragged")
_made_classes: dict[object, type[Any]] = {}
"""Classes made at run time, by what they were made of, so that each is created once in a process."""


class TensorBuffer:
    """A buffer for the large tensors of the documents that wait to be encoded."""

    def __init__(self, layout: Layout, size: int) -> None:
        self._codecs = [codec for codec in layout.codecs if type(codec) is TensorCodec and codec.is_large]
        self._rows = max(1, size // max(1, sum(codec.width for codec in self._codecs)))
        self._type = layout.schema.document_type
        self._data: dict[str, NDArray[Any]] = {}
        self._used = 0
        self._complete = True

    @property
    def is_full(self) -> bool:
        return bool(self._codecs) and self._used >= self._rows

    def add(self, document: Any) -> Any:
        """Return the document with its large tensors moved into the buffer, or as it is if they do not fit."""
        values = document.__dict__
        if not (
            self._complete
            and self._codecs
            and type(document) is self._type
            and all(
                type(value := values.get(codec.field.name)) is np.ndarray
                and value.dtype == codec.dtype
                and value.shape == codec.shape
                for codec in self._codecs
            )
        ):
            self._complete = False
            return document
        # A document made by hand: the constructor would validate every value again.
        copy, content = object.__new__(self._type), values.copy()
        put_content, put_names, put_extra, put_private = MODEL_SETTERS
        for codec in self._codecs:
            name = codec.field.name
            data = self._data.get(name)
            if data is None:
                data = self._data[name] = self._allocate(codec)
            data[self._used] = values[name]
            content[name] = data[self._used]
        put_content(copy, content)
        put_names(copy, document.__pydantic_fields_set__)
        put_extra(copy, document.__pydantic_extra__)
        put_private(copy, document.__pydantic_private__)
        self._used += 1
        return copy

    def _allocate(self, codec: TensorCodec) -> NDArray[Any]:
        elements: NDArray[Any] = take_buffer(self._rows * codec.width).view(codec.dtype)
        return elements.reshape(self._rows, *codec.shape)

    def take_columns(self) -> StackedTensors:
        """Return the tensors of all documents by field, if all were moved, and empty the buffer."""
        columns = {name: data[: self._used] for name, data in self._data.items()} if self._complete else {}
        self._data, self._used, self._complete = {}, 0, True
        return columns


@dataclass(frozen=True, eq=False)
class DocumentLayout:
    """How documents of a class, or some of their fields, are stored in record batches.

    It is sent to workers. A class that was made at run time cannot be imported there, so what it was made of
    (`origin`) is sent instead.
    """

    document_type: type[Any]
    paths: Paths = None
    origin: ArrowClass | DerivedClass | None = None

    @cached_property
    def layout(self) -> Layout:
        """The storage layout: how each field is encoded."""
        return Layout(self.document_type.document_schema(), paths=self.paths)

    @property
    def fields(self) -> pa.Schema:
        """The Arrow schema of the record batches."""
        return self.layout.fields

    def __reduce__(self) -> tuple[Callable[..., DocumentLayout], tuple[Any, ...]]:
        if self.origin is None:
            return DocumentLayout, (self.document_type, self.paths)
        return _from_origin, (self.origin, self.paths)

    def matches(self, other: DocumentLayout) -> bool:
        """Whether record batches of both layouts are the same."""
        return self.document_type is other.document_type and self.fields.equals(other.fields, check_metadata=True)

    def select(self, columns: Iterable[str]) -> DocumentLayout:
        """Return the layout of some of the fields, by path."""
        paths = resolve_columns(self.layout.schema, columns)
        return DocumentLayout(self.document_type, paths, self.origin)

    def check_path(self, path: str) -> None:
        """Raise unless a field at the path holds one value a row."""
        fields = self.layout.schema.resolve(parse_path(path))
        if not fields or any(field.kind is FieldKind.DOCUMENTS for field in fields):
            raise OptionError(f"{path!r}: the path of a field with one value a row is needed.")

    # --- out of record batches

    def conform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return a record batch of any origin in this layout; no copy if it has it already."""
        if batch.schema.equals(self.fields, check_metadata=True):
            return batch
        names = batch.schema.names
        if len(set(names)) < len(names):
            duplicate = next(name for name in names if names.count(name) > 1)
            raise DecodeError(f"the data has two columns {duplicate!r}. Rename one of them.")
        return conform_batch(self.layout, batch)

    def decode(self, batch: pa.RecordBatch) -> Columns:
        """Copy the columns out of a record batch."""
        return self.layout.decode(self.conform(batch))

    def decode_parts(self, batch: pa.RecordBatch, rows: int) -> Iterator[Columns]:
        """Decode `rows` rows at a time; large columns are copied when a part is requested."""
        sizes = [min(rows, len(batch) - start) for start in range(0, len(batch), rows)]
        return self.layout.gather_parts(self.layout.locate_rows(self.conform(batch)), sizes)

    def batch(self, columns: Columns) -> DocumentBatch[Any]:
        return DocumentBatch[self.document_type]._wrap(columns)  # type: ignore[name-defined]

    def array(self, columns: Columns) -> DocumentArray[Any]:
        return DocumentArray[self.document_type]._trusted(columns.documents())  # type: ignore[name-defined]

    # --- into record batches

    def encode(
        self, documents: list[Any], ids: list[Any] | None = None, tensors: StackedTensors | None = None
    ) -> pa.RecordBatch:
        """Encode documents as a record batch, with other ids than their own if `ids` are passed.

        `tensors` are the fields whose tensors are stacked already.
        """
        schema = self.layout.schema
        numpy = get_framework("numpy")
        stacked = {name: TensorColumn(schema.by_name[name], data, numpy) for name, data in (tensors or {}).items()}
        columns = stack(schema, documents, _RAGGED, stacked=stacked)
        if ids is not None:
            columns.set_column(ObjectColumn(columns.columns["id"].field, ids))
        return self.layout.encode(columns)

    @cached_property
    def has_text_id(self) -> bool:
        """Whether documents have an id of type str."""
        field = self.layout.schema.by_name.get("id")
        return field is not None and field.type is str


def layout_from_arrow(schema: pa.Schema, document_type: type[Any] | None = None) -> DocumentLayout:
    """Return the layout for an Arrow schema.

    It is that of `document_type`; without one, of the class that the schema names if it is loaded, else of a class
    inferred from the schema.
    """
    known = document_type or loaded_class(schema)
    if known is not None:
        return DocumentLayout(known)
    return _from_origin(ArrowClass(schema.serialize().to_pybytes(), stored_class_name(schema)), None)


class ArrowClass(NamedTuple):
    """A class inferred from an Arrow schema."""

    schema: bytes
    name: str

    def make(self) -> type[Any]:
        # BaseDocument as the base gives the rows ids.
        return class_from_arrow(pa.ipc.read_schema(pa.py_buffer(self.schema)), self.name, BaseDocument)


class DerivedField(NamedTuple):
    """A field of a class that a group or a join makes: like a field of another class, or of a plain type."""

    name: str
    source: DocumentLayout | type[Any]
    path: FieldPath = ()
    nullable: bool = False

    def annotation(self) -> Any:
        if not isinstance(self.source, DocumentLayout):
            return self.source | None if self.nullable else self.source
        owner = self.source.document_type
        for part in self.path[:-1]:
            owner = owner.document_schema().by_name[part].document_type
        info = owner.model_fields[self.path[-1]]
        form: Any = Annotated
        parts = (info.annotation, *info.metadata)
        annotation = form[parts] if info.metadata else info.annotation
        return Optional[annotation] if self.nullable else annotation  # noqa: UP045 - jaxtyping's have no `|`

    def key(self) -> object:
        """Return what distinguishes it from other fields."""
        source = self.source.document_type if isinstance(self.source, DocumentLayout) else self.source
        return self.name, source, self.path, self.nullable


class DerivedClass(NamedTuple):
    """A class whose fields are those of other classes, and plain values."""

    name: str
    fields: tuple[DerivedField, ...]

    def make(self) -> type[Any]:
        fields: dict[str, Any] = {
            field.name: (field.annotation(), None if field.nullable else ...) for field in self.fields
        }
        return register_class(create_model(self.name, __base__=BaseDocument, **fields))

    def layout(self) -> DocumentLayout:
        return _from_origin(self, None)


def _from_origin(origin: ArrowClass | DerivedClass, paths: Paths) -> DocumentLayout:
    key: object = origin
    if isinstance(origin, DerivedClass):
        key = origin.name, tuple(field.key() for field in origin.fields)
    if key not in _made_classes:
        _made_classes[key] = origin.make()
    return DocumentLayout(_made_classes[key], paths, origin)


def check_nullable(target: DocumentLayout, source: DocumentLayout) -> None:
    """Raise unless a row can be made from the document that a function failed on alone."""
    for field in target.layout.schema.fields:
        same = source.layout.schema.by_name.get(field.name)
        is_taken_over = same is not None and same.kind is field.kind and same.type is field.type and not same.nullable
        if field.required and not is_taken_over and not _can_be_none(field):
            raise OptionError(
                f"on_error='null': {target.document_type.__name__}.{field.name} cannot be None, and "
                f"{source.document_type.__name__} has no such field to take it from. Make it optional, or pass 'skip'."
            )


def make_null_document(target: DocumentLayout, document: Any) -> Any:
    """Create a document whose optional fields are None, and whose others are those of `document`."""
    values: dict[str, Any] = {}
    for field in target.layout.schema.fields:
        if field.name == "id" and hasattr(document, "id"):
            values["id"] = document.id
        elif _can_be_none(field):
            values[field.name] = None
        elif field.name in document.__dict__:
            values[field.name] = document.__dict__[field.name]
    return target.document_type(**values)


def _can_be_none(field: Field) -> bool:
    return field.nullable or field.kind is FieldKind.ANY


class RowResult(NamedTuple):
    """What a function returned: a document or a failure, and the row it stands for, if it stands for one."""

    result: Any
    row: int
    id: str | None = None
    chunk: ChunkRows | None = None
    """The chunk of the row."""


class ChunkRows:
    """The rows of a chunk that a function was called with: their ids, and their documents if needed."""

    def __init__(self, layout: DocumentLayout, chunk: pa.RecordBatch, first: int) -> None:
        self._layout, self.chunk, self.first = layout, chunk, first

    @cached_property
    def ids(self) -> list[Any]:
        """The id of each row; None if rows have no ids."""
        return self.chunk.column("id").to_pylist() if self._layout.has_text_id else [None] * len(self.chunk)

    def result_of(self, row: int, result: Any) -> RowResult:
        return RowResult(result, self.first + row, self.ids[row], self)

    def results_of(self, results: list[Any] | Failed) -> Iterator[RowResult]:
        """Pair results with rows, if there is one for each; else they stand for no row."""
        if isinstance(results, Failed):
            yield self.result_of(0, results)
        elif len(results) == len(self.chunk):
            yield from (self.result_of(row, result) for row, result in enumerate(results))
        else:
            yield from (RowResult(result, self.first) for result in results)

    def document(self, row: int) -> Any:
        """Decode the document of a row again, as it was before the function could change it."""
        return self._layout.decode(self.chunk.slice(row - self.first, 1)).document(0)


class Failed(NamedTuple):
    """An error of the user's function, kept until it is known what to do about it."""

    error: Exception


def attempt(function: Callable[..., Any], value: Any, then: Callable[..., Any] | None = None) -> Any:
    """Call a function, and then another with its result; return the result, or `Failed`."""
    try:
        return function(value) if then is None else then(function(value))
    except Exception as error:  # noqa: BLE001 - it is the user's function
        return Failed(error)


class Encoder:
    """Encodes the results of a function as record batches, and handles the rows on which it failed."""

    def __init__(self, target: DocumentLayout, source: DocumentLayout, partition: int, on_error: OnError) -> None:
        self._target, self._partition, self._on_error = target, partition, on_error
        self._keeps_ids = target.has_text_id and source.has_text_id

    def encode(self, results: Iterable[RowResult]) -> Iterator[pa.RecordBatch]:
        """Yield record batches of about BLOCK_BYTES."""
        block: list[RowResult] = []
        size, expected = 0, self._target.document_type
        buffer = TensorBuffer(self._target.layout, BLOCK_BYTES)
        for item in until_stopped(results):
            row = item if type(item.result) is expected else self._check_result(item)
            if row is None:
                continue
            size += approximate_size(row.result)
            block.append(RowResult(buffer.add(row.result), *row[1:]))
            if size >= BLOCK_BYTES or buffer.is_full:
                yield from self._encode_block(block, buffer.take_columns())
                block, size = [], 0
        yield from self._encode_block(block, buffer.take_columns())

    def _check_result(self, item: RowResult) -> RowResult | None:
        """Return the row with a document of the class; None if it is skipped."""
        self._check_class(item)
        result = item.result
        if not isinstance(result, Failed):
            result = attempt(self._to_document, result)
        return self._handle_failure(item, result.error) if isinstance(result, Failed) else item._replace(result=result)

    def _to_document(self, result: Any) -> Any:
        if isinstance(result, Mapping):
            return self._target.document_type.model_validate(result)
        if not isinstance(result, self._target.document_type):
            raise wrong_type_error(self._target, result)
        return result

    def _check_class(self, item: RowResult) -> None:
        """Raise for a document of another class: a mistake in the program, which `on_error` does not apply to.

        A subclass with more fields is one, too: they have no column and would be lost.
        """
        result, expected = item.result, self._target.document_type
        if not isinstance(result, BaseDocument) or type(result) is expected:
            return
        if not isinstance(result, expected) or type(result).model_fields.keys() - expected.model_fields.keys():
            error = wrong_type_error(self._target, result)
            raise self.make_error(error, item) from error

    def _handle_failure(self, item: RowResult, error: Exception) -> RowResult | None:
        if self._on_error == "skip":
            return None
        if self._on_error == "raise" or item.chunk is None:
            raise self.make_error(error, item) from error
        return item._replace(result=make_null_document(self._target, item.chunk.document(item.row)))

    def _encode_block(self, block: list[RowResult], tensors: StackedTensors | None = None) -> Iterator[pa.RecordBatch]:
        """Yield the record batch of some rows; if encoding fails, one for each row, to find those at fault."""
        if not block:
            return
        encoded = attempt(lambda rows: self._encode_rows(rows, tensors), block)
        if not isinstance(encoded, Failed):
            yield encoded
        elif len(block) == 1:
            row = self._handle_failure(block[0], encoded.error)
            if row is not None:
                yield self._encode_rows([row])
        else:
            for item in block:
                yield from self._encode_block([item])

    def _encode_rows(self, block: list[RowResult], tensors: StackedTensors | None = None) -> pa.RecordBatch:
        ids: list[Any] | None = None
        if self._keeps_ids:
            # A document keeps the id of its row unless the function has set one. An id that the document got by default
            # would be a new one in each attempt at a partition.
            ids = [
                item.result.id if item.id is None or "id" in item.result.model_fields_set else item.id for item in block
            ]
        return self._target.encode([item.result for item in block], ids, tensors)

    def make_error(self, error: Exception, item: RowResult, rows: int = 1) -> PartitionError:
        """Return the error for the caller; `rows` is how many rows the function was called with."""
        return partition_error(error, self._partition, item.row, item.id, rows)


def wrong_type_error(target: DocumentLayout, item: Any) -> DocumentTypeError:
    """Return the error for a result that is not a document of the expected class."""
    name = target.document_type.__name__
    returned = item.document_type if isinstance(item, DocumentBatch) else type(item)
    if not is_document_type(returned):
        return DocumentTypeError(f"the function must return documents of {name}, but returned {describe(item)}.")
    subclass = f", a subclass of {name} with more fields" if issubclass(returned, target.document_type) else ""
    return DocumentTypeError(
        f"the function must return documents of {name}, but returned {returned.__name__}{subclass}. If that is what it "
        f"is to return, declare it: annotate the function's return type, or pass document_type={returned.__name__}."
    )
