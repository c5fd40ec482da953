"""DocumentBatch[T]: documents as columns."""

from __future__ import annotations

import os
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar, overload

from pydantic_core import CoreSchema
from typing_extensions import Self, Unpack

from quire import codec
from quire._extra_fields import Extra
from quire._parametrize import ParametrizedMeta
from quire.array import _columns_view as _view
from quire.array import _order, _parallel, _remote, _rows, _tables, _upward, _wire
from quire.array._array import DocumentArray, Found
from quire.array._find import Metric
from quire.array._index import resolve_index
from quire.array._insert import admit
from quire.codec import Reading
from quire.codec._frames import column_parts, column_presence, to_frame
from quire.codec._json import TensorForm, check_json, rows_from_dict, rows_from_json
from quire.columns import Column, Columns, ShapePolicy, StackOptions, stack
from quire.display import GALLERY, facts_table, print_facts
from quire.document import BaseDocument
from quire.files import Source, Target
from quire.schema import Schema

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import NDArray

DocT = TypeVar("DocT", bound=BaseDocument)
R = TypeVar("R")


class DocumentBatch(Generic[DocT], metaclass=ParametrizedMeta):
    """Documents as columns: `batch.image` is one tensor whose first axis is the rows.

    Numbers are vectors, text and objects are lists, nested documents are batches, and arrays of documents are a batch
    of all their documents with offsets. Rows without a value are told by `validity()`. `batch[i]` is an ordinary
    document whose tensors share memory with the columns; setting its fields changes only that document.

    Batches that datasets deliver for training, and that services and predictions hand to functions, do not show zeros
    for missing values: reading a column of numbers or tensors in which some rows have no value raises
    MissingValueError, and one in which no row has a value reads as None. `fill_missing()` chooses a value.
    """

    __slots__ = ("_columns", "_guard", "_state")
    __hash__ = None  # type: ignore[assignment]
    document_type: ClassVar[type[Any]] = BaseDocument

    _columns: Columns
    _guard: _view.Guard | None
    """How reading missing values raises; None where it gives zeros."""

    def __init__(
        self, documents: Iterable[DocT] = (), *, framework: str | None = None, shapes: ShapePolicy = "error"
    ) -> None:
        """Stack documents; see `DocumentArray.stack`."""
        rows = admit(type(self), documents)
        self._set(stack(self.document_type.document_schema(), rows, StackOptions(framework, shapes)))

    @classmethod
    def from_columns(cls, columns: Mapping[str, Any], *, shapes: ShapePolicy = "error") -> Self:
        """A batch from a tensor, an array or a list for each field. Fields that are left out take their defaults."""
        return cls._wrap(_view.columns_from(cls.document_type.document_schema(), columns, shapes))

    @classmethod
    def _bind(cls, parameter: Any) -> dict[str, Any]:
        return _rows.bind(cls, parameter)

    @classmethod
    def _wrap(cls, columns: Columns) -> Self:
        made = object.__new__(cls)
        object.__setattr__(made, "_columns", columns)
        object.__setattr__(made, "_guard", None)
        return made

    def _with(self, columns: Columns) -> Self:
        """The same rows in another form, from the same place of a stream."""
        made = self._derive(columns)
        object.__setattr__(made, "_state", getattr(self, "_state", None))
        return made

    def _derive(self, columns: Columns) -> Self:
        """Other rows of the batch, whose missing values are read as those of this one."""
        made = object.__new__(type(self))
        made._set(columns, self._guard)
        return made

    def _guarded(self) -> Self:
        """The batch, where reading missing values raises."""
        object.__setattr__(self, "_guard", _view.Guard(self._columns.schema.name))
        return self

    def _set(self, columns: Columns, guard: _view.Guard | None = None) -> None:
        object.__setattr__(self, "_columns", columns)
        object.__setattr__(self, "_guard", guard)

    @property
    def schema(self) -> Schema:
        """The plan of the rows."""
        return self._columns.schema

    # --- rows

    def __len__(self) -> int:
        return len(self._columns)

    def __iter__(self) -> Iterator[DocT]:
        return self._columns.iter_documents()

    @overload
    def __getitem__(self, key: int) -> DocT: ...
    @overload
    def __getitem__(self, key: str) -> Any: ...
    @overload
    def __getitem__(self, key: slice | Sequence[int] | Sequence[bool] | NDArray[Any]) -> Self: ...
    def __getitem__(self, key: Any) -> Any:
        """A document by position, a batch by slice (a view), list, mask or tensor, a column by path."""
        if isinstance(key, str):
            return _view.get_column(self, key, _batch_of)
        return _view.select(self, resolve_index(key, len(self)))

    def take(self, indices: Any) -> Self:
        """The rows at these positions, copied."""
        columns = self._columns
        return self._derive(columns.take(_view.positions(indices, columns.length)))

    def batch(
        self, batch_size: int, *, shuffle: bool = False, seed: int | None = None, drop_last: bool = False
    ) -> Iterator[Self]:
        """Batches of so many rows, in order or shuffled."""
        return map(self.take, _order.batches(len(self), batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last))

    def shuffle(self, seed: int | None = None) -> Self:
        """The rows in random order."""
        return self.take(_order.shuffled(len(self), seed))

    def sample(self, k: int, seed: int | None = None) -> Self:
        """k different rows, chosen at random."""
        return self.take(_order.sampled(len(self), k, seed))

    @classmethod
    def concat(cls, batches: Iterable[Self], *, shapes: ShapePolicy = "error") -> Self:
        """Batches put one behind the other."""
        made: Self = _view.concat(cls, batches, shapes)
        return made

    def unstack(self) -> DocumentArray[DocT]:
        """The rows as documents, whose tensors share memory with the columns. The batch stays as it is."""
        return DocumentArray[self.document_type]._trusted(self._columns.documents())  # type: ignore[name-defined]

    def filter(self, query: Callable[[DocT], Any] | Mapping[str, Any]) -> Self:
        """The rows for which a function is true, or that match a query: `{'price': {'$lt': 5}}`."""
        return self.take(_view.matching(self._columns, query))

    def find(self, query: Any, field: str = "embedding", *, metric: Metric = "cosine", limit: int = 10) -> Found[DocT]:
        """The nearest rows to a vector, or to a document by its own field; exact."""
        return self.find_batch([query], field, metric=metric, limit=limit)[0]

    def find_batch(
        self, queries: Any, field: str = "embedding", *, metric: Metric = "cosine", limit: int = 10
    ) -> list[Found[DocT]]:
        """The nearest rows to each of many vectors, or documents."""
        found = _view.find(self._columns, queries, field, metric, limit)
        return [Found(self.take(rows).unstack(), scores) for rows, scores in found]

    # --- work on several cores

    def map(self, func: Callable[[DocT], R], **how: Unpack[_parallel.MapWork]) -> Iterator[R]:
        """What a function makes of each row as a document; see `DocumentArray.map`."""
        return _parallel.map_documents(self, func, how)

    def map_batch(
        self,
        func: Callable[[Self], R],
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int | None = None,
        **how: Unpack[_parallel.MapWork],
    ) -> Iterator[R]:
        """What a function makes of each batch of so many rows; see `DocumentArray.map`."""
        batches = _parallel.Batches(self.take, len(self), batch_size, shuffle=shuffle, seed=seed)
        return _parallel.map_batches(batches, func, how)

    # --- columns

    def __getattr__(self, name: str) -> Any:
        return _view.attribute(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        _view.set_attribute(self, name, value)

    def __setitem__(self, path: str, values: Any) -> None:
        _view.set_column(self._columns, path, values)

    def column(self, path: str) -> Column:
        """A column as it is held: data, validity, offsets, shapes."""
        return _view.find_column(self._columns, path)

    def validity(self, path: str) -> Any:
        """Which rows have a value at a path: one bool a row, in the column's framework."""
        return _view.validity(self.column(path))

    def mask(self, path: str = "") -> Any:
        """Which elements of a padded column are real: a bool for each, in the column's framework.

        Without a path, which rows are: those that fill up the last batch of a `StreamingDataset` are not.
        """
        return _view.mask(self.column(path)) if path else _view.row_mask(self._columns)

    def fill_missing(self, values: Mapping[str, Any]) -> Self:
        """A batch with these values, by path, for missing numbers and tensors: `{'label': -100, 'image.pixels': 0}`.

        A tensor column takes a number, or a tensor of the shape of a row. `validity()` of this batch, which
        stays as it is, shows which rows had a value; in the new one they all have.
        """
        return self._with(_view.fill_missing(self._columns, values))

    @property
    def state(self) -> dict[str, Any] | None:
        """Where the `StreamingDataset` that gave the batch goes on behind it; None for other batches."""
        state: Any = getattr(self, "_state", None)
        return None if state is None else state.to_dict()

    # --- tensors

    def to(self, device: Any, *, non_blocking: bool = False) -> Self:
        """The batch with its tensors on another device; numpy columns stay in main memory."""
        return self._with(self._columns.map_tensors(_view.mover(device, non_blocking=non_blocking)))

    def to_framework(self, framework: str) -> Self:
        """The batch with every tensor and number column converted; memory is shared where it can be."""
        return self._with(self._columns.map_tensors(_view.converter(framework)))

    def pin_memory(self) -> Self:
        """The batch with its torch tensors in pinned memory; the same where there is no accelerator."""
        return self._with(self._columns.map_tensors(lambda framework, value: (framework, framework.pin(value))))

    def share_memory_(self) -> Self:
        """Move the torch tensors, in place, into memory that other processes can map."""
        self._columns.map_tensors(_view.sharer())
        return self

    # --- bytes and files

    def to_protobuf(self) -> Any:
        """A protobuf message, `quire.v1.Batch`."""
        return codec.to_message("Batch", codec.columns_message(self._columns))

    @classmethod
    def from_protobuf(cls, message: Any, **reading: Unpack[Reading]) -> Self:
        """The batch of a protobuf message, a Batch or an Array."""
        return _wire.batch_from_protobuf(cls, message, reading)  # type: ignore[no-any-return]

    def to_bytes(
        self, protocol: str | None = None, compress: str | None = None, *, allow_pickle: bool = False
    ) -> bytes:
        """The columns as bytes."""
        return _wire.batch_to_bytes(self, protocol, compress, allow_pickle=allow_pickle)

    @classmethod
    def from_bytes(
        cls, data: Any, protocol: str | None = None, compress: str | None = None, **reading: Unpack[Reading]
    ) -> Self:
        """The columns of bytes; with `copy=False` tensors are views of them."""
        return _wire.batch_from_bytes(cls, data, protocol, compress, reading)  # type: ignore[no-any-return]

    def to_base64(self, protocol: str | None = None, compress: str | None = None, *, allow_pickle: bool = False) -> str:
        """The bytes of `to_bytes` as text."""
        return b64encode(self.to_bytes(protocol, compress, allow_pickle=allow_pickle)).decode()

    @classmethod
    def from_base64(
        cls, data: str | bytes, protocol: str | None = None, compress: str | None = None, **reading: Unpack[Reading]
    ) -> Self:
        """The columns of `to_base64`."""
        return cls.from_bytes(codec.from_base64(data), protocol, compress, **reading)

    def save_binary(
        self,
        file: Target,
        protocol: str | None = None,
        compress: str | None = None,
        *,
        allow_pickle: bool = False,
        show_progress: bool | None = None,
    ) -> None:
        """Write the rows to a file; its suffixes tell protocol and compression that are not given."""
        _wire.save_batch(self, file, protocol, compress, allow_pickle=allow_pickle, show_progress=show_progress)

    @overload
    @classmethod
    def load_binary(
        cls,
        file: Source,
        protocol: str | None = None,
        compress: str | None = None,
        *,
        streaming: Literal[False] = False,
        **reading: Unpack[Reading],
    ) -> Self: ...
    @overload
    @classmethod
    def load_binary(
        cls,
        file: Source,
        protocol: str | None = None,
        compress: str | None = None,
        *,
        streaming: Literal[True],
        **reading: Unpack[Reading],
    ) -> Iterator[Self]: ...
    @classmethod
    def load_binary(
        cls,
        file: Source,
        protocol: str | None = None,
        compress: str | None = None,
        *,
        streaming: bool = False,
        **reading: Unpack[Reading],
    ) -> Any:
        """The rows in a file: all as one batch, or a batch for each block of the file (`streaming`)."""
        load = _wire.iterate_batches if streaming else _wire.load_batch
        return load(cls, file, protocol, compress, reading)

    def push(self, url: _remote.Url, **how: Unpack[_remote.Pushing]) -> None:
        """Write the rows to an address, packed on workers while others are sent; see `DocumentArray.push`."""
        _remote.push_batch(self, url, how)

    @classmethod
    def push_stream(cls, batches: Iterable[Self], url: _remote.Url, **how: Unpack[_remote.Pushing]) -> None:
        """`push` for batches from any source, as they come: some blocks of them are in memory."""
        _remote.push_batches(cls, batches, url, how)

    @classmethod
    def pull(cls, url: _remote.Url, **how: Unpack[_remote.Pulling]) -> Self:
        """The rows of a file that was pushed, or written by `save_binary`, by a batch or by an array."""
        return _remote.pull_batch(cls, url, how)  # type: ignore[no-any-return]

    @classmethod
    def pull_stream(cls, url: _remote.Url, **how: Unpack[_remote.Pulling]) -> Iterator[Self]:
        """The rows of `pull` while they come, a batch for each block of the file."""
        return _remote.pull_batches(cls, url, how)

    def save_parquet(self, path: str | os.PathLike[str], **options: Any) -> None:
        """Write one Parquet file if the path ends with .parquet, else a dataset; `options` as of `write_dataset`."""
        _upward.save_parquet(self, self.document_type, path, options)

    @classmethod
    def load_parquet(cls, path: str | os.PathLike[str], **options: Any) -> Self:
        """The rows of a Parquet file or a dataset; `options` as of `open_dataset`: columns, where, ..."""
        return _upward.load_parquet(cls.document_type, path, options)  # type: ignore[no-any-return]

    # --- text and tables

    def to_json(self, *, indent: int | None = None, tensors: TensorForm = "lists") -> str:
        """The rows as a JSON list; tensors as nested lists, or as 'base64' of their bytes."""
        return self.unstack().to_json(indent=indent, tensors=tensors)

    @classmethod
    def from_json(cls, text: str | bytes, *, extra: Extra = "forbid", shapes: ShapePolicy = "error") -> Self:
        """The rows that were written as a JSON list: the text itself, and not the path of a file.

        `extra` as of `BaseDocument.from_json`.
        """
        document_type = _tables.row_type(cls, "from_json()")
        check_json(document_type, text)
        return cls(rows_from_json(document_type, text, extra=extra), shapes=shapes)

    def to_dict(self) -> list[dict[str, Any]]:
        """The rows as dicts; see `BaseDocument.to_dict`."""
        return self.unstack().to_dict()

    @classmethod
    def from_dict(
        cls, rows: Iterable[Mapping[str, Any]], *, extra: Extra = "forbid", shapes: ShapePolicy = "error"
    ) -> Self:
        """A batch of rows with the fields in mappings; `extra` as of `BaseDocument.from_json`."""
        return cls(rows_from_dict(_tables.row_type(cls, "from_dict()"), rows, extra=extra), shapes=shapes)

    def to_dataframe(self) -> pd.DataFrame:
        """A pandas data frame of the rows; number columns go over as one array."""
        return to_frame(column_parts(self._columns), len(self), column_presence(self._columns))

    @classmethod
    def from_dataframe(cls, frame: Any, *, extra: Extra = "ignore", shapes: ShapePolicy = "error") -> Self:
        """A batch of the rows of a data frame; unknown columns are ignored, or refused with `extra='forbid'`."""
        return cls._wrap(_tables.columns_from_frame(cls, frame, extra, shapes))

    # --- equality, display, pickling, pydantic

    def __eq__(self, other: object) -> bool:
        return _view.equal(self, other) if isinstance(other, DocumentBatch) else NotImplemented

    def identical(self, other: object) -> bool:
        """Whether the other batch holds equal rows with the same ids."""
        return isinstance(other, DocumentBatch) and _view.equal(self, other, ids=True)

    def summary(self) -> None:
        """Print the type, the length, the fields, and what the first row has in them."""
        print_facts(type(self).__name__, {"rows": len(self)}, self.schema, _rows.first(self))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self)}>"

    def __rich__(self) -> Any:
        return facts_table(type(self).__name__, {"rows": len(self)}, self.schema, _rows.first(self))

    def _repr_html_(self) -> str:
        return _rows.html(type(self).__name__, self.schema, list(self[:GALLERY]), len(self))

    def __copy__(self) -> Self:
        return self._derive(self._columns.slice(slice(None)))

    def __getstate__(self) -> tuple[Any, ...]:
        state = getattr(self, "_state", None)
        if self._guard is not None:
            return self._columns, state, self._guard
        return (self._columns,) if state is None else (self._columns, state)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._set(state[0], state[2] if len(state) > 2 else None)
        if len(state) > 1:
            object.__setattr__(self, "_state", state[1])

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> CoreSchema:
        return _view.core_schema_of(cls, source, handler, DocumentArray)


def _batch_of(document_type: type[Any], columns: Columns, guard: _view.Guard | None) -> DocumentBatch[Any]:
    made: DocumentBatch[Any] = object.__new__(DocumentBatch[document_type])  # type: ignore[valid-type]
    made._set(columns, guard)
    return made
