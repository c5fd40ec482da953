"""Documents in record batches: decoded for the user's function, and encoded from what it returned."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa

from quire._protocols import is_document_type
from quire.array import DocumentArray, DocumentBatch
from quire.codec._bytes import approximate_size
from quire.columns import (
    MODEL_SETTERS,
    Column,
    Columns,
    ObjectColumn,
    StackOptions,
    TensorColumn,
    collect_extra_states,
    gather,
    stack,
    stack_values,
)
from quire.distributed._batches import BLOCK_BYTES
from quire.distributed._failures import partition_error
from quire.distributed._prefetch import until_stopped
from quire.document import BaseDocument
from quire.errors import DecodeError, DocumentTypeError, OptionError, PartitionError
from quire.schema import Field, FieldKind, Schema, parse_path
from quire.storage import (
    CLASS_KEY,
    Layout,
    Paths,
    RowLocations,
    TensorCodec,
    class_from_arrow,
    conform_fields,
    loaded_class,
    resolve_columns,
    take_buffer,
)
from quire.tensors import describe, get_framework

if TYPE_CHECKING:
    from numpy.typing import NDArray


OnError = Literal["raise", "skip", "null"]
"""What becomes of a row on which a function fails: an error, no row, or a row whose fields are None where they can."""


StackedTensors: TypeAlias = "Mapping[str, NDArray[Any]]"
"""By the name of a field, the tensors of all documents in one array."""


_RAGGED = StackOptions(shapes="ragged")


class TensorBuffer:
    """Room for the large tensors of so many bytes of documents, and how many are in it."""

    def __init__(self, layout: Layout, size: int) -> None:
        self._forms = [form for form in layout.codecs if type(form) is TensorCodec and form.is_large]
        self._rows = max(1, size // max(1, sum(form.width for form in self._forms)))
        self._type = layout.schema.document_type
        self._data: dict[str, NDArray[Any]] = {}
        self._used = 0
        self._whole = True

    @property
    def is_full(self) -> bool:
        """Whether there is no room for another document."""
        return bool(self._forms) and self._used >= self._rows

    def taken(self, document: Any) -> Any:
        """The document, or another like it with its large tensors in here; not all of them can be."""
        values = document.__dict__
        if not self._whole or not self._forms or type(document) is not self._type:
            self._whole = False
            return document
        if not all(_fits_layout(form, values.get(form.field.name)) for form in self._forms):
            self._whole = False
            return document
        return self._copied(document, values)

    def _copied(self, document: Any, values: dict[str, Any]) -> Any:
        made, content = object.__new__(self._type), values.copy()
        put_content, put_names, put_extra, put_private = MODEL_SETTERS
        for form in self._forms:
            name = form.field.name
            data = self._data.get(name)
            if data is None:
                data = self._data[name] = self._room(form)
            data[self._used] = values[name]
            content[name] = data[self._used]
        put_content(made, content)
        put_names(made, document.__pydantic_fields_set__)
        put_extra(made, document.__pydantic_extra__)
        put_private(made, document.__pydantic_private__)
        self._used += 1
        return made

    def _room(self, form: TensorCodec) -> NDArray[Any]:
        found: NDArray[Any] = take_buffer(self._rows * form.width).view(form.dtype)
        return found.reshape(self._rows, *form.shape)

    def columns(self) -> StackedTensors:
        """The tensors of all documents by field, if all of them are in here; it is then as good as new."""
        found = {name: data[: self._used] for name, data in self._data.items()} if self._whole else {}
        self._data, self._used, self._whole = {}, 0, True
        return found


def _fits_layout(form: TensorCodec, value: Any) -> bool:
    return type(value) is np.ndarray and value.dtype == form.dtype and value.shape == form.shape


def stack_documents(schema: Schema, documents: list[Any], tensors: StackedTensors) -> Columns:
    """The columns of documents, some of whose tensors lie in columns already."""
    rows = [document.__dict__ for document in documents]
    numpy, columns = get_framework("numpy"), dict[str, Column]()
    for field in schema.fields:
        path = f"{schema.name}.{field.name}"
        if field.name in tensors:
            columns[field.name] = TensorColumn(field, tensors[field.name], numpy)
        else:
            columns[field.name] = stack_values(field, gather(rows, field.name, path, None), _RAGGED, path)
    return Columns(schema, columns, len(rows), None, collect_extra_states(schema, documents))


_RAGGED = StackOptions(shapes="ragged")


_inferred_classes: dict[tuple[bytes, str], type[Any]] = {}
"""Classes that were made from Arrow schemas, so that each is made once in a process."""


@dataclass(frozen=True, eq=False)
class DocumentLayout:
    """How documents of a class, or some of their fields, lie in record batches.

    It travels to workers. A class that was made from an Arrow schema is nowhere to be found there, and goes as that
    schema (`origin`) instead.
    """

    document_type: type[Any]
    paths: Paths = None
    origin: tuple[bytes, str] | None = None

    @cached_property
    def layout(self) -> Layout:
        """The forms of the fields."""
        return Layout(self.document_type.document_schema(), paths=self.paths)

    @property
    def fields(self) -> pa.Schema:
        """The Arrow schema of frames."""
        return self.layout.fields

    def __reduce__(self) -> tuple[Callable[..., DocumentLayout], tuple[Any, ...]]:
        if self.origin is None:
            return DocumentLayout, (self.document_type, self.paths)
        return _from_origin, (*self.origin, self.paths)

    def is_like(self, other: DocumentLayout) -> bool:
        """Whether record batches of the one are those of the other."""
        return self.document_type is other.document_type and self.fields.equals(other.fields, check_metadata=True)

    def chosen(self, columns: Iterable[str]) -> DocumentLayout:
        """Some of the fields, by their paths."""
        paths = resolve_columns(self.layout.schema, columns)
        return DocumentLayout(self.document_type, paths, self.origin)

    def checked(self, path: str) -> DocumentLayout:
        """The layout itself, if it has a field at the path that holds one value a row."""
        fields = self.layout.schema.resolve(parse_path(path))
        if not fields or any(field.kind is FieldKind.DOCUMENTS for field in fields):
            raise OptionError(f"{path!r}: the path of a field with one value a row is needed.")
        return self

    # --- out of record batches

    def conformed(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """A record batch in this layout, without a copy where it is in it already."""
        if batch.schema.equals(self.fields, check_metadata=True):
            return batch
        return conform_batch(self, batch)

    def decode(self, batch: pa.RecordBatch) -> Columns:
        """The columns of a record batch, copied."""
        return self.layout.gather(self._located(batch))

    def decode_parts(self, batch: pa.RecordBatch, rows: int) -> Iterator[Columns]:
        """The same for so many rows at a time; of their large columns, no more are copied than are asked for."""
        sizes = [min(rows, len(batch) - start) for start in range(0, len(batch), rows)]
        return self.layout.gather_parts(self._located(batch), sizes)

    def _located(self, batch: pa.RecordBatch) -> RowLocations:
        batch = self.conformed(batch)
        addresses = self.layout.addresses()
        addresses.add(self.layout.locate(batch), batch)
        return RowLocations(addresses, np.zeros(len(batch), np.int64), np.arange(len(batch), dtype=np.int64))

    def batch(self, columns: Columns) -> DocumentBatch[Any]:
        """Columns as users see them."""
        return DocumentBatch[self.document_type]._wrap(columns)  # type: ignore[name-defined]

    def array(self, columns: Columns) -> DocumentArray[Any]:
        """The documents of columns."""
        return DocumentArray[self.document_type]._trusted(columns.documents())  # type: ignore[name-defined]

    # --- into record batches

    def encode(
        self, documents: list[Any], ids: list[Any] | None = None, tensors: StackedTensors | None = None
    ) -> pa.RecordBatch:
        """Documents as a record batch; with other ids than their own, if some are given.

        `tensors` are those of all documents by field, where they lie one behind the other already.
        """
        columns = stack_documents(self.layout.schema, documents, tensors) if tensors else self._stacked(documents)
        if ids is not None:
            columns.set_column(ObjectColumn(columns.columns["id"].field, ids))
        return self.layout.encode(columns)

    def _stacked(self, documents: list[Any]) -> Columns:
        return stack(self.layout.schema, documents, _RAGGED)

    @cached_property
    def has_text_id(self) -> bool:
        """Whether documents have an id that is a text."""
        field = self.layout.schema.by_name.get("id")
        return field is not None and field.type is str


def conform_batch(target: DocumentLayout, batch: pa.RecordBatch) -> pa.RecordBatch:
    """A record batch of any origin in the layout of a class."""
    names = batch.schema.names
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DecodeError(f"the data has two columns {twice!r}. Give one of them another name.")
    found = dict(zip(names, zip(batch.schema, batch.columns, strict=True), strict=True))
    arrays = conform_fields(target.layout.codecs, found, target.layout.schema, None, len(batch))
    return target.layout.batch(arrays, len(batch))


def layout_from_arrow(schema: pa.Schema, document_type: type[Any] | None = None) -> DocumentLayout:
    """The layout of a class; without one, of that which the schema names if it is loaded, or else of one made of it."""
    name = (schema.metadata or {}).get(CLASS_KEY, b"").decode()
    known = document_type or loaded_class(schema)
    if known is not None:
        return DocumentLayout(known)
    return _from_origin(schema.serialize().to_pybytes(), name.rpartition(":")[2].rpartition(".")[2] or "Row", None)


def _from_origin(schema: bytes, name: str, paths: Paths) -> DocumentLayout:
    key = schema, name
    if key not in _inferred_classes:
        _inferred_classes[key] = class_from_arrow(
            pa.ipc.read_schema(pa.py_buffer(schema)), name, BaseDocument
        )  # with ids
    return DocumentLayout(_inferred_classes[key], paths, key)


def check_nullable(target: DocumentLayout, source: DocumentLayout) -> None:
    """Whether rows can be made with nothing but the document that a function failed on."""
    for field in target.layout.schema.fields:
        if not (_can_be_none(field) or _can_take_over(field, source) or not field.required):
            raise OptionError(
                f"on_error='null': {target.document_type.__name__}.{field.name} cannot be None, and "
                f"{source.document_type.__name__} has no such field to take it from. Make it optional, or pass 'skip'."
            )


def make_null_document(target: DocumentLayout, document: Any) -> Any:
    """A document of the class: its optional fields are None, the others are those of the document that failed."""
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


def _can_take_over(field: Field, source: DocumentLayout) -> bool:
    found = source.layout.schema.by_name.get(field.name)
    return found is not None and found.kind is field.kind and found.type is field.type and not found.nullable


class RowResult(NamedTuple):
    """What a function gave: a document or a failure, and the row that it stands for, if it stands for one."""

    result: Any
    row: int
    id: str | None = None
    sources: ChunkRows | None = None
    """Where the document of the row is."""


class ChunkRows:
    """The rows of a chunk that a function had in hand: their ids, and their documents if need be."""

    def __init__(self, layout: DocumentLayout, chunk: pa.RecordBatch, first: int) -> None:
        self._layout, self.chunk, self.first = layout, chunk, first

    @cached_property
    def ids(self) -> list[Any]:
        """Of each row; None where rows have none."""
        return self.chunk.column("id").to_pylist() if self._layout.has_text_id else [None] * len(self.chunk)

    def given(self, row: int, result: Any) -> RowResult:
        """What a function gave for a row."""
        return RowResult(result, self.first + row, self.ids[row], self)

    def all_given(self, results: list[Any] | Failed) -> Iterator[RowResult]:
        """What it gave for all of them; if it is one for each, each stands for its row."""
        if isinstance(results, Failed):
            yield self.given(0, results)
        elif len(results) == len(self.chunk):
            yield from (self.given(row, result) for row, result in enumerate(results))
        else:
            yield from (RowResult(result, self.first) for result in results)

    def document(self, row: int) -> Any:
        """The document of a row, as it was before the function had it."""
        return self._layout.decode(self.chunk.slice(row - self.first, 1)).document(0)


class Failed(NamedTuple):
    """An error of the user's function, on its way to where it is known what to do about it."""

    error: Exception


def attempt(function: Any, value: Any, then: Any = None) -> Any:
    """What a function gives, or its failure."""
    try:
        return function(value) if then is None else then(function(value))
    except Exception as error:  # noqa: BLE001 - it is the user's function
        return Failed(error)


class Encoder:
    """Documents that a function gave on their way into record batches, and what becomes of the rows that fail."""

    def __init__(self, target: DocumentLayout, source: DocumentLayout, partition: int, on_error: OnError) -> None:
        self._target, self._partition, self._on_error = target, partition, on_error
        self._keeps_ids = target.has_text_id and source.has_text_id

    def encode(self, given: Iterable[RowResult]) -> Iterator[pa.RecordBatch]:
        """Record batches of about BLOCK_BYTES."""
        block: list[RowResult] = []
        size, wanted, arena = 0, self._target.document_type, TensorBuffer(self._target.layout, BLOCK_BYTES)
        for item in until_stopped(given):
            kept = item if type(item.result) is wanted else self._checked(item)
            if kept is None:
                continue
            size += approximate_size(kept.result)
            block.append(RowResult(arena.taken(kept.result), *kept[1:]))
            if size >= BLOCK_BYTES or arena.is_full:
                yield from self._block(block, arena.columns())
                block, size = [], 0
        yield from self._block(block, arena.columns())

    def _checked(self, given: RowResult) -> RowResult | None:
        """The row with a document in it; None if there is to be no row."""
        self._check_class(given)
        result = given.result
        if not isinstance(result, Failed):
            result = attempt(self._document, result)
        return self._rescued(given, result.error) if isinstance(result, Failed) else given._replace(result=result)

    def _document(self, item: Any) -> Any:
        if isinstance(item, Mapping):
            return self._target.document_type.model_validate(item)
        if not isinstance(item, self._target.document_type):
            raise wrong_type_error(self._target, item)
        return item

    def _check_class(self, given: RowResult) -> None:
        """Raise for a document of another class: a mistake in the program, which `on_error` does not apply to.

        A subclass is one, too: its own fields have no place in the rows and would be lost.
        """
        result, expected = given.result, self._target.document_type
        if not isinstance(result, BaseDocument) or type(result) is expected:
            return
        if not isinstance(result, expected) or type(result).model_fields.keys() - expected.model_fields.keys():
            error = wrong_type_error(self._target, result)
            raise self.failed(error, given) from error

    def _rescued(self, given: RowResult, error: Exception) -> RowResult | None:
        if self._on_error == "skip":
            return None
        if self._on_error == "raise" or given.sources is None:
            raise self.failed(error, given) from error
        return given._replace(result=make_null_document(self._target, given.sources.document(given.row)))

    def _block(self, block: list[RowResult], tensors: StackedTensors | None = None) -> Iterator[pa.RecordBatch]:
        """The record batch of rows, or of each of them alone where that fails; some of their tensors may be in one."""
        if not block:
            return
        made = attempt(lambda rows: self._encoded(rows, tensors), block)
        if not isinstance(made, Failed):
            yield made
        elif len(block) == 1:
            rescued = self._rescued(block[0], made.error)
            if rescued is not None:
                yield self._encoded([rescued])
        else:
            for item in block:
                yield from self._block([item])

    def _encoded(self, block: list[RowResult], tensors: StackedTensors | None = None) -> pa.RecordBatch:
        return self._target.encode([item.result for item in block], self._ids(block), tensors)

    def _ids(self, block: list[RowResult]) -> list[Any] | None:
        """Documents that were made of others have their ids, unless the function gave them some.

        So ids do not change from one attempt to the next.
        """
        if not self._keeps_ids:
            return None
        return [
            item.result.id if item.id is None or "id" in item.result.model_fields_set else item.id for item in block
        ]

    def failed(self, error: Exception, given: RowResult, rows: int = 1) -> PartitionError:
        """The error for the caller; `rows` is how many the function had in hand."""
        return partition_error(error, self._partition, given.row, given.id, rows)


def wrong_type_error(target: DocumentLayout, item: Any) -> DocumentTypeError:
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
