"""DocumentBatch[T]: documents as columns."""

from __future__ import annotations

import csv
import os
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, NamedTuple, TypeVar, overload

import numpy as np
from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema
from typing_extensions import Self, Unpack

from quire import _class_registry, codec
from quire._equality import equal_values
from quire._extra_fields import Extra
from quire._parametrize import ParametrizedMeta
from quire._protocols import is_document_type
from quire.array import _parallel, _serialization
from quire.array._array import DocumentArray, Found, bind, check_method_typo, html, name_framework, resolve_annotation
from quire.array._dataframe import columns_from_frame
from quire.array._find import FieldNames, Metric, NearestRows, explain_vector_field, vector_field
from quire.array._insert import admit
from quire.array._positions import (
    batches,
    resolve_index,
    resolve_positions,
    sample_positions,
    shuffle_positions,
    split_positions,
)
from quire.array._pytree import ALL as EVERY_PYTREE
from quire.array._pytree import register_pytree
from quire.array._query import compile_filter
from quire.array._serialization import Pulling, Pushing, Url, require_document_type
from quire.array._torch_interop import columns_to_tensordict, jagged_tensor, values_from_tensordict
from quire.codec import (
    CsvOptions,
    Reading,
    TensorForm,
    TextSource,
    TextTarget,
    check_json,
    find_present_columns,
    flatten_columns,
    iter_csv,
    make_dataframe,
    rows_from_dict,
    rows_from_json,
    to_csv,
)
from quire.columns import (
    Column,
    Columns,
    DocumentColumn,
    DocumentsColumn,
    ObjectColumn,
    RaggedColumn,
    ShapePolicy,
    StackOptions,
    TensorColumn,
    apply_to_tensors,
    concat_columns,
    default_column,
    dense_framework,
    fill_columns,
    make_column,
    present_rows,
    retype_columns,
    share_columns,
    stack,
    tensor_paths,
    wrap_rows,
)
from quire.display import GALLERY, facts_table, print_facts, track
from quire.document import BaseDocument
from quire.errors import (
    ColumnError,
    DocumentTypeError,
    MissingValueError,
    OptionError,
    PathError,
    QueryError,
    did_you_mean,
    reject_unknown_options,
)
from quire.files import Source, Target
from quire.schema import Schema, join_path, parse_path
from quire.tensors import (
    Framework,
    Tensor,
    describe,
    dtype_name,
    framework_of,
    get_framework,
    to_framework,
)

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    import torch
    from numpy.typing import NDArray
    from rich.console import Group
    from tensordict import TensorDict

DocT = TypeVar("DocT", bound=BaseDocument)
OtherT = TypeVar("OtherT", bound=BaseDocument)
R = TypeVar("R")


class Guard(NamedTuple):
    """How reading missing values of a batch raises: the name of the batch in the error, and the rows that count."""

    name: str
    skips_none: bool = False
    """Whether rows without a document are ignored: their values have no effect."""


class DocumentBatch(Generic[DocT], metaclass=ParametrizedMeta):
    """Documents as columns: `batch.image` is one tensor whose first axis is the rows.

    Numbers are vectors, text and objects are lists, nested documents are batches, and arrays of documents are a batch
    of all their documents with offsets. `validity()` shows which rows have a value. `batch[i]` is an ordinary document
    whose tensors share memory with the columns; setting its fields changes only that document.

    Batches that datasets deliver for training, and that services and predictions pass to functions, do not show zeros
    for missing values: reading a column of numbers or tensors in which some rows have no value raises
    MissingValueError, and one in which no row has a value reads as None. `fill_missing()` chooses a value.

    A batch is a pytree of torch, optree and JAX, whose leaves are its tensors.
    """

    __slots__ = ("_columns", "_guard", "_state")
    __hash__ = None  # type: ignore[assignment]
    document_type: ClassVar[type[Any]] = BaseDocument
    _pytrees: ClassVar[int] = 0
    """The libraries whose registries of pytrees have this class; see `_pytree`."""

    _columns: Columns
    _guard: Guard | None
    """How reading missing values raises; None if it gives zeros."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._pytrees = 0  # each class is registered on its own

    def __init__(
        self,
        documents: Iterable[DocT] = (),
        *,
        framework: str | None = None,
        shapes: ShapePolicy = "error",
        tensor_type: type[Any] | None = None,
    ) -> None:
        """Stack documents; see `DocumentArray.stack`."""
        framework = name_framework(framework, tensor_type)
        rows = admit(type(self), documents)
        self._set(stack(self.document_type.document_schema(), rows, StackOptions(framework, shapes)))

    @classmethod
    def from_columns(cls, columns: Mapping[str, Any], *, shapes: ShapePolicy = "error") -> Self:
        """Make a batch from a tensor, an array or a list for each field. Other fields take their defaults."""
        schema: Schema = cls.document_type.document_schema()
        for name in columns:
            schema.resolve((name,))
        by_name = {name: make_column(schema, schema.by_name[name], values, shapes) for name, values in columns.items()}
        lengths = {name: len(column) for name, column in by_name.items()}
        if len(set(lengths.values())) > 1:
            raise ColumnError(f"{schema.name}: columns of different lengths: {lengths}.")
        length = next(iter(lengths.values()), 0)
        for field in schema.fields:
            if field.name not in by_name:
                by_name[field.name] = default_column(schema, field, length)
        return cls._wrap(Columns(schema, {field.name: by_name[field.name] for field in schema.fields}, length))

    @classmethod
    def _bind(cls, parameter: Any) -> dict[str, Any]:
        return bind(cls, parameter)

    @classmethod
    def _wrap(cls, columns: Columns, guard: Guard | None = None) -> Self:
        """Make a batch of columns, without a copy."""
        batch = object.__new__(cls)
        batch._set(columns, guard)
        return batch

    def _with(self, columns: Columns) -> Self:
        """Make a batch of the same rows in another form, with the same state of its stream."""
        batch = self._derive(columns)
        object.__setattr__(batch, "_state", getattr(self, "_state", None))
        return batch

    def _derive(self, columns: Columns) -> Self:
        """Make a batch of other rows; reading its missing values raises if it does here."""
        batch = object.__new__(type(self))
        batch._set(columns, self._guard)
        return batch

    @classmethod
    def _deliver(cls, columns: Columns, guard: Guard | None) -> Self:
        """Make a batch of a dataset, whose class is a pytree of all libraries that are loaded."""
        register_pytree(cls)
        batch = object.__new__(cls)
        object.__setattr__(batch, "_columns", columns)
        object.__setattr__(batch, "_guard", guard)
        return batch

    def _guard_missing(self) -> Self:
        """Make reading missing values of this batch raise, and return the batch."""
        object.__setattr__(self, "_guard", Guard(self._columns.schema.name))
        return self

    def _set(self, columns: Columns, guard: Guard | None = None) -> None:
        # `batch.name = values` sets a column, so attributes of the batch itself are set past `__setattr__`.
        object.__setattr__(self, "_columns", columns)
        object.__setattr__(self, "_guard", guard)
        if type(self)._pytrees != EVERY_PYTREE:
            register_pytree(type(self), columns)

    @classmethod
    def _make_guard(cls, columns: Columns) -> Guard:
        return Guard(columns.schema.name)

    @staticmethod
    def _of(document_type: type[Any]) -> type[DocumentBatch[Any]]:
        """Return `DocumentBatch[document_type]`, by steps that torch.compile can trace."""
        notes = document_type.document_schema().notes
        if "batch_type" not in notes:
            notes["batch_type"] = DocumentBatch[document_type]  # type: ignore[valid-type]
        batch_type: type[DocumentBatch[Any]] = notes["batch_type"]
        return batch_type

    @property
    def schema(self) -> Schema:
        """The schema of the rows."""
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
    def __getitem__(self, key: Any) -> object:
        """Get a document by position, a batch by slice (a view), list, mask or tensor, or a column by path."""
        if isinstance(key, str):
            return self._get_column(key)
        columns = self._columns
        rows = resolve_index(key, columns.length)
        if isinstance(rows, int):
            return columns.document(rows)
        if isinstance(rows, slice):
            if rows.step is None or rows.step > 0:
                return self._derive(columns.slice(rows))
            rows = resolve_positions(rows, columns.length)  # torch has no views with a negative stride
        return self._derive(columns.take(rows))

    def take(self, indices: Any) -> Self:
        """Return the rows at these positions, copied: an int, a slice, a list, an array or a mask."""
        columns = self._columns
        rows = resolve_index(indices, columns.length)
        if type(rows) is not np.ndarray:
            rows = resolve_positions(rows, columns.length)
        # A training loop may take rows for every step, when caches are cold, so this calls few functions. The class is
        # registered as a pytree already, with the libraries of the same tensors.
        batch = object.__new__(type(self))
        object.__setattr__(batch, "_columns", columns.take(rows))
        object.__setattr__(batch, "_guard", self._guard)
        return batch

    @reject_unknown_options
    def batch(
        self, batch_size: int, *, shuffle: bool = False, seed: int | None = None, drop_last: bool = False
    ) -> Iterator[Self]:
        """Yield batches of `batch_size` rows, in order or shuffled."""
        return map(self.take, batches(len(self), batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last))

    def shuffle(self, seed: int | None = None) -> Self:
        """Return the rows in random order."""
        return self.take(shuffle_positions(len(self), seed))

    def sample(self, n: int | None = None, seed: int | None = None, *, fraction: float | None = None) -> Self:
        """Return n different rows, or a fraction of them, chosen at random, in random order."""
        return self.take(sample_positions(len(self), n, fraction, seed))

    @reject_unknown_options
    def split(self, *parts: float, by: str | None = None, shuffle: bool = False, seed: int | None = None) -> list[Self]:
        """Split the rows, which are copied, by fractions or by counts; see `DocumentArray.split`."""
        rows = split_positions(len(self), parts, by, self._values_at, shuffle=shuffle, seed=seed)
        return [self.take(positions) for positions in rows]

    def _values_at(self, path: str) -> list[Any]:
        return find_column(self._columns, path).values()

    @classmethod
    def concat(cls, batches: Iterable[Self], *, shapes: ShapePolicy = "error") -> Self:
        """Concatenate batches of one document class."""
        parts = list(batches)
        if not parts:
            return cls()
        batch_type = type(parts[0]) if cls.document_type is BaseDocument else cls
        for index, batch in enumerate(parts):
            if not isinstance(batch, DocumentBatch) or batch.document_type is not batch_type.document_type:
                name = batch_type.__name__
                raise DocumentTypeError(f"{name}.concat: item {index}: expected a {name}, got {describe(batch)}.")
        joined = batch_type._wrap(concat_columns([batch._columns for batch in parts], shapes))
        return joined._guard_missing() if any(batch._guard is not None for batch in parts) else joined

    def unstack(self) -> DocumentArray[DocT]:
        """Return the rows as documents, whose tensors share memory with the columns. The batch is not changed."""
        return DocumentArray[self.document_type]._trusted(self._columns.documents())  # type: ignore[name-defined]

    def filter(self, query: Callable[[DocT], Any] | Mapping[str, Any]) -> Self:
        """Return the rows for which a function is true, or that match a query: `{'price': {'$lt': 5}}`."""
        schema = None if self._columns.schema.document_type is BaseDocument else self._columns.schema
        return self.take(compile_filter(query, schema).rows(self._columns))

    def find(
        self,
        query: Any,
        field: str = "embedding",
        *,
        metric: Metric = "cosine",
        limit: int = 10,
        **names: Unpack[FieldNames],
    ) -> Found[DocT]:
        """Find the nearest rows to a vector, or to a document by its own field; exact."""
        return self.find_batch([query], field, metric=metric, limit=limit, **names)[0]

    def find_batch(
        self,
        queries: Any,
        field: str = "embedding",
        *,
        metric: Metric = "cosine",
        limit: int = 10,
        **names: Unpack[FieldNames],
    ) -> list[Found[DocT]]:
        """Find the nearest rows to each of many vectors, or documents; rows without a vector are left out."""
        field = vector_field(field, names, self._columns.schema)
        search = NearestRows(queries, field, metric, limit)
        search.add(*self._vectors(field))
        return [Found(self.take(nearest).unstack(), scores) for nearest, scores in search.results()]

    def _vectors(self, field: str) -> tuple[NDArray[np.int64], Any]:
        """Return the positions of the rows that have a vector, and the vectors."""
        with explain_vector_field():
            column = self.column(field)
        if len(column) != len(self):
            raise QueryError(f"{field}: a search goes over one vector a row, not over the documents of arrays.")
        rows = np.flatnonzero(column.valid_rows())
        if isinstance(column, TensorColumn):
            data = column.framework.to_numpy(column.data)
            return rows, data if len(rows) == len(data) else data[rows]
        values = column.values()
        return rows, [values[row] for row in rows.tolist()]

    # --- parallel work

    def map(self, func: Callable[[DocT], R], **how: Unpack[_parallel.MapWork]) -> Iterator[R]:
        """Yield the result of a function for each row as a document; see `DocumentArray.map`."""
        return _parallel.map_documents(self, len(self), func, how)

    def map_batch(
        self,
        func: Callable[[Self], R],
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int | None = None,
        **how: Unpack[_parallel.MapWork],
    ) -> Iterator[R]:
        """Yield the result of a function for each batch of `batch_size` rows; see `DocumentArray.map`."""
        items = _parallel.Batches(self.take, len(self), batch_size, shuffle=shuffle, seed=seed)
        return _parallel.map_batches(items, func, how)

    # --- columns

    def __getattr__(self, name: str) -> Any:
        """Get a column. Methods come first: a field called 'take' is read as batch['take']."""
        if name.startswith("_"):  # never a field
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        column = self._columns.columns.get(name)
        if column is not None:
            return self._read_column(column, name)
        try:
            return self[name]
        except PathError:
            check_method_typo(type(self), self._columns.schema, name)
            raise

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *self._columns.schema.by_name})

    def __setattr__(self, name: str, values: Any) -> None:
        schema = self._columns.schema
        if name not in schema.by_name:
            raise PathError(f"{schema.name} has no field {name!r}. {did_you_mean(name, schema.by_name)}")
        if hasattr(type(self), name):
            raise PathError(
                f"{name!r} is a method of {type(self).__name__}: set the column by batch[{name!r}] = values."
            )
        self[name] = values

    def __setitem__(self, key: Any, values: Any) -> None:
        """Set a column by path, or rows: a document by position, or documents by slice, list, mask or tensor.

        The values are validated first. Columns are replaced: tensors that were read from the batch before, and slices
        of it, keep their rows.
        """
        if isinstance(key, str):
            self._set_path(key, values)
        else:
            self._set_rows(resolve_index(key, len(self)), values)

    def _set_rows(self, rows: int | slice | NDArray[np.int64], values: Any) -> None:
        columns = self._columns
        documents = admit(type(self), [values] if isinstance(rows, int) else values)
        positions = resolve_positions(rows, len(columns))
        if len(positions) != len(documents):
            raise ColumnError(f"{type(self).__name__}: {len(positions)} rows, but {len(documents)} documents.")
        if columns.schema is not self.document_type.document_schema():
            raise ColumnError(
                f"{type(self).__name__}: only some fields were read, and rows can be set with all of them."
            )
        incoming = stack(columns.schema, documents, StackOptions(shapes="ragged"))
        incoming = _convert_frameworks(incoming, columns)
        # Row i of the result is row i of the batch, or one of the incoming rows, which follow those of the batch.
        order = np.arange(len(columns))
        order[positions] = len(columns) + np.arange(len(documents))
        replaced = concat_columns([columns, incoming]).take(order)
        # In place, because the batch of a nested field shares its columns with the batch that it belongs to.
        for column in replaced.columns.values():
            columns.set_column(column)
        columns.validity, columns.extra_states = replaced.validity, replaced.extra_states

    def _set_path(self, path: str, values: Any) -> None:
        *parents, name = parse_path(path) or ("",)
        columns = self._columns
        columns.schema.resolve((*parents, name))
        for parent in parents:
            children = find_column(columns, parent).children
            if not children:
                raise PathError(f"{parent!r} is held as objects, so {path!r} is not a column.")
            columns = children[0]
        field = columns.schema.resolve((name,))[0]
        columns.set_column(make_column(columns.schema, field, values, "error", columns.validity))

    def _get_column(self, path: str) -> Any:
        """Return the data of a column: a tensor, a list, a batch, or a `BatchList`."""
        return self._read_column(find_column(self._columns, path), path) if path else self

    def _read_column(self, column: Column, path: str) -> Any:
        # torch.compile traces this method: it must not take locks, nor look at values.
        guard = self._guard
        if isinstance(column, TensorColumn):
            if guard is not None and reads_as_none(self, column, path):
                return None
            if column.framework.name != "tensorflow":
                return column.data
            return wrap_rows(column.field, column.framework, [column.data])[0]
        if isinstance(column, (DocumentColumn, DocumentsColumn)):
            batch_type = self._of(column.field.document_type)
            if type(self)._pytrees & ~batch_type._pytrees:
                register_pytree(batch_type)
            batch = object.__new__(batch_type)
            object.__setattr__(batch, "_columns", column.columns if isinstance(column, DocumentColumn) else column.flat)
            object.__setattr__(batch, "_guard", None if guard is None else Guard(f"{guard.name}.{path}"))
            return batch if isinstance(column, DocumentColumn) else BatchList(column, batch)
        if guard is not None and reads_as_none(self, column, path):
            return None
        return column.values() if isinstance(column, ObjectColumn) else column

    def keys(self) -> list[str]:
        """Return the names of the fields, so that `dict(batch)` has the columns by name. Iteration gives documents."""
        return list(self._columns.columns)

    def tensors(self, *paths: str) -> dict[str, Tensor]:
        """Return the tensor columns at some paths by path, for `model(**batch.tensors('image', 'label'))`.

        Without paths, all columns that are one tensor, also those of nested documents; a column without a value in any
        row is left out.
        """
        if not paths:
            columns = {path: find_column(self._columns, path) for path in tensor_paths(self._columns)}
            dense = {path: column for path, column in columns.items() if isinstance(column, TensorColumn)}
            values = {path: self._read_column(column, path) for path, column in dense.items()}
            return {path: value for path, value in values.items() if value is not None}
        tensors = {}
        for path in paths:
            try:
                column = find_column(self._columns, path)
            except PathError as error:
                raise ColumnError(f"tensors: {error}") from None
            tensors[path] = self._read_column(column, path) if isinstance(column, TensorColumn) else None
            if tensors[path] is None:
                raise ColumnError(self._explain_no_tensor(column, path))
        return tensors

    def _explain_no_tensor(self, column: Column, path: str) -> str:
        """Return the message about a column that is not one tensor."""
        name = f"tensors: {self._columns.schema.name}.{path}"
        if isinstance(column, TensorColumn):
            return f"{name} has no value in any row, so there is no tensor."
        if isinstance(column, RaggedColumn):
            return f"{name} has rows of mixed shapes: use batch.nested({path!r}), or stack with shapes='pad'."
        others = [other for other in tensor_paths(self._columns) if other.startswith(f"{path}.")]
        known = others or list(tensor_paths(self._columns))
        return f"{name} is {column.field}, not one tensor. Columns with tensors: {', '.join(known) or 'none'}."

    def nested(self, path: str) -> torch.Tensor:
        """Return tensors of mixed lengths as one nested tensor of torch (layout `jagged`), with a part for each row.

        The column is one of `shapes='ragged'`, or one of the documents in an array, as 'clips.frames': then a part
        has the tensors, or numbers, of all documents of a row. These share memory with the batch; a padded column is
        copied. Rows without a value have no elements.
        """
        column = find_column(self._columns, path)
        if self._guard is not None and reads_as_none(self, column, path):
            raise ColumnError(f"nested: {self._columns.schema.name}.{path} has no value in any row.")
        return jagged_tensor(self._columns, path)

    def column(self, path: str) -> Column:
        """Return a column as it is held: data, validity, offsets, shapes."""
        return find_column(self._columns, path)

    @overload
    def with_columns(self, document_type: type[OtherT], /, **columns: object) -> DocumentBatch[OtherT]: ...
    @overload
    def with_columns(self, document_type: None = None, /, **columns: object) -> Self: ...
    def with_columns(self, document_type: type[BaseDocument] | None = None, /, **columns: object) -> DocumentBatch[Any]:
        """Return a batch with other columns, as documents of another class if one is passed; this one is not changed.

        `batch.with_columns(Predicted, score=scores)` has the columns of this batch that Predicted declares, which
        share their memory, the columns that are passed, and the defaults of all other fields. Ids are kept. A column
        is a tensor, an array, a list, a batch of nested documents, or a column of another batch. Its length, and the
        type, shape and dtype of its values are checked. As with `from_columns`, validators of the class are not run.
        """
        source = self._columns
        if document_type is None:
            declared = self.document_type.document_schema()
            schema = source.schema
            absent = [name for name in columns if name not in schema.by_name and name in declared.by_name]
            if absent:  # fields of the class that the batch was read without
                fields = {field.name: schema.by_name.get(field.name, field) for field in declared.fields}
                names = {*schema.by_name, *absent}
                schema = replace(schema, fields=tuple(field for name, field in fields.items() if name in names))
        elif is_document_type(document_type):
            schema = document_type.document_schema()
        else:
            raise DocumentTypeError(
                f"with_columns takes a document class and columns by name, got {describe(document_type)}: write "
                "batch.with_columns(Predicted, score=scores)."
            )
        for name in columns:
            if name not in schema.by_name:
                hint = did_you_mean(name, schema.by_name)
                if document_type is None:
                    hint += " For more fields, declare a class with them: batch.with_columns(Predicted, ...)."
                raise PathError(f"with_columns: {schema.name} has no field {name!r}. {hint}")
        new: dict[str, Column] = {}
        for name, values in columns.items():
            new[name] = make_column(schema, schema.by_name[name], values, "error", source.validity)
            if len(new[name]) != len(source):
                raise ColumnError(
                    f"{schema.name}.{name}: the batch has {len(source)} rows, got {len(new[name])} values. Pass a "
                    "value for each row, in the order of the rows."
                )
        if document_type is None:
            kept = share_columns(source)
            by_name = {**kept.columns, **new}
            kept.schema, kept.columns = schema, {field.name: by_name[field.name] for field in schema.fields}
            return self._with(kept)
        guard = None if self._guard is None else Guard(schema.name)
        batch_type = DocumentBatch[document_type]  # type: ignore[valid-type]
        batch: DocumentBatch[Any] = batch_type._wrap(retype_columns(source, schema, new), guard)
        object.__setattr__(batch, "_state", getattr(self, "_state", None))
        return batch

    def validity(self, path: str) -> Tensor:
        """Return for each row whether it has a value at a path, as bools in the column's framework."""
        column = self.column(path)
        return _leaf_framework([column]).from_mask(column.valid_rows())

    def mask(self, path: str = "") -> Tensor:
        """Return the padding mask of a column: True for real elements, in the column's framework.

        Without a path, the mask of the rows: False for those that fill up the last batch of a `StreamingDataset`.
        """
        if not path:
            columns = self._columns
            rows = np.ones(len(columns), np.bool_) if columns.validity is None else columns.validity
            return _leaf_framework(columns.columns.values()).from_mask(rows)
        column = self.column(path)
        if not isinstance(column, TensorColumn):
            raise ColumnError(
                f"{column.field.name}: only a tensor column has a mask; it is held as {type(column).__name__}."
            )
        return column.framework.from_numpy(column.mask())

    def fill_missing(self, values: Mapping[str, Any]) -> Self:
        """Return a batch with these values, by path, for missing numbers and tensors: `{'label': -100, 'pixels': 0}`.

        A tensor column takes a number, or a tensor of the shape of a row. `validity()` of this batch, which is not
        changed, shows which rows had a value; in the new one they all have.
        """
        if not isinstance(values, Mapping):
            raise ColumnError(f"fill_missing: give values by path, as {{'label': -100}}; got {describe(values)}.")
        for path in values:
            self.column(path)  # raises an error that names the nearest fields
        return self._with(fill_columns(self._columns, {parse_path(path): value for path, value in values.items()}))

    @property
    def state(self) -> dict[str, Any] | None:
        """The state from which the `StreamingDataset` of the batch continues after it; None for other batches."""
        state: Any = getattr(self, "_state", None)
        return None if state is None else state.to_dict()

    @property
    def sources(self) -> Tensor | None:
        """The number of the dataset that each row comes from, for batches of a `MixedDataset`; None for other batches.

        A vector of integers in the framework of the batch. Numbers are positions in the `datasets` of the mix.
        """
        find = getattr(getattr(self, "_state", None), "sources", None)
        return None if find is None else _leaf_framework(self._columns.columns.values()).from_numpy(find())

    # --- tensors

    def to(self, device: object = None, *, dtype: object = None, non_blocking: bool = False) -> Self:
        """Return the batch with its tensors on another device; numpy columns stay in main memory.

        `dtype`, a floating one of any framework or its name, is for floating columns only, as in `nn.Module.to`:
        integers and booleans keep theirs.
        """
        name = None if dtype is None else dtype_name(dtype)
        if name is not None and not name.startswith(("float", "bfloat")):
            raise OptionError(
                f"to: dtype={name} is not a floating dtype. Only floating columns are cast; for others, use "
                "batch.apply()."
            )

        def move(framework: Framework, value: Tensor) -> tuple[Framework, Tensor]:
            if device is not None:
                value = framework.to_device(value, device, non_blocking=non_blocking)
            return framework, value

        def cast(value: Tensor) -> Tensor:
            framework = framework_of(value)
            assert framework is not None
            assert name is not None
            own = framework.dtype(value)
            return framework.cast(value, name) if own != name and own.startswith(("float", "bfloat")) else value

        columns = self._columns.map_tensors(move)
        return self._with(columns if name is None else apply_to_tensors(columns, cast))

    def apply(self, func: Callable[[Tensor], Tensor]) -> Self:
        """Return the batch with the results of a function of each tensor column, also those of nested documents.

        The results must have the same rows; texts and objects stay. The function gets the flat tensor of a ragged
        column, and must keep its shape. Missing values are zeros, as in `column.data`, and stay missing.
        """
        return self._with(apply_to_tensors(self._columns, func))

    def to_tensordict(self, *paths: str) -> TensorDict:
        """Return the columns, or those of some fields, as a TensorDict, which shares the memory of the tensors.

        Nested documents are nested TensorDicts, texts and objects a `NonTensorStack`, ragged columns jagged tensors.
        Missing values are an error, because a TensorDict cannot mark them.
        """
        columns = self._columns
        if paths:
            for path in paths:
                columns.schema.resolve((path,))
            columns = replace(columns, columns={path: columns.columns[path] for path in paths})
        return columns_to_tensordict(columns)

    @classmethod
    def from_tensordict(cls, content: Any) -> Self:
        """Make a batch from a TensorDict or a tensorclass; other fields take their defaults, as in `from_columns`."""
        require_document_type(cls, "from_tensordict()")
        return cls.from_columns(values_from_tensordict(cls, content), shapes="ragged")

    def to_framework(self, framework: str) -> Self:
        """Return the batch with every tensor and number column converted; memory is shared if possible.

        Sparse tensors, which are not held as columns, are not converted.
        """
        target = dense_framework(framework)

        def convert(source: Framework, value: Tensor) -> tuple[Framework, Tensor]:
            return (source, value) if source.is_sparse(value) else (target, to_framework(value, target))

        return self._with(self._columns.map_tensors(convert))

    def pin_memory(self) -> Self:
        """Return the batch with its torch tensors in pinned memory; unchanged without an accelerator."""
        return self._with(self._columns.map_tensors(lambda framework, value: (framework, framework.pin(value))))

    def share_memory_(self) -> Self:
        """Move the torch tensors, in place, into memory that other processes can map."""

        def share(framework: Framework, value: Tensor) -> tuple[Framework, Tensor]:
            return framework, value if framework.is_sparse(value) else framework.share(value)

        self._columns.map_tensors(share)
        return self

    # --- bytes and files

    def to_protobuf(self) -> Any:
        """Encode as a protobuf message, `quire.v1.Batch`."""
        return codec.to_message("Batch", codec.encode_columns_message(self._columns))

    @classmethod
    def from_protobuf(cls, message: Any, **reading: Unpack[Reading]) -> Self:
        """Decode a protobuf message, a Batch or an Array."""
        data = codec.from_message(message, "Batch", "Array")
        return _serialization.batch_from_message(cls, data, codec.read_options(reading))

    def to_bytes(
        self, protocol: str | None = None, compress: str | None = None, *, allow_pickle: bool = False
    ) -> bytes:
        """Encode the columns as bytes."""
        return _serialization.batch_to_bytes(self, protocol, compress, allow_pickle=allow_pickle)

    @classmethod
    def from_bytes(
        cls, data: Any, protocol: str | None = None, compress: str | None = None, **reading: Unpack[Reading]
    ) -> Self:
        """Decode columns; with `copy=False` the tensors are views of the bytes."""
        return _serialization.batch_from_bytes(cls, data, protocol, compress, reading)

    def to_base64(self, protocol: str | None = None, compress: str | None = None, *, allow_pickle: bool = False) -> str:
        """Encode the bytes of `to_bytes` as text."""
        return b64encode(self.to_bytes(protocol, compress, allow_pickle=allow_pickle)).decode()

    @classmethod
    def from_base64(
        cls, data: str | bytes, protocol: str | None = None, compress: str | None = None, **reading: Unpack[Reading]
    ) -> Self:
        """Decode the text of `to_base64`."""
        return cls.from_bytes(codec.from_base64(data), protocol, compress, **reading)

    @reject_unknown_options
    def save_binary(
        self,
        file: Target,
        protocol: str | None = None,
        compress: str | None = None,
        *,
        allow_pickle: bool = False,
        show_progress: bool | None = None,
    ) -> None:
        """Write the rows to a file; by default, its suffixes decide protocol and compression."""
        _serialization.save_batch(
            self, file, protocol, compress, allow_pickle=allow_pickle, show_progress=show_progress
        )

    @overload
    @classmethod
    def load_binary(
        cls,
        file: Source,
        protocol: str | None = None,
        compress: str | None = None,
        *,
        streaming: Literal[False] = False,
        show_progress: bool | None = None,
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
        show_progress: bool | None = None,
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
        show_progress: bool | None = None,
        **reading: Unpack[Reading],
    ) -> Self | Iterator[Self]:
        """Read the rows in a file: all as one batch, or a batch for each block of the file (`streaming`)."""
        if streaming:
            batches = _serialization.iterate_batches(cls, file, protocol, compress, reading)
            return track(batches, "loading", show=show_progress, size=len) if show_progress else batches
        return _serialization.load_batch(cls, file, protocol, compress, reading, show_progress=show_progress)

    @overload
    def to_csv(
        self,
        file: None = None,
        *,
        delimiter: str | None = None,
        dialect: str | type[csv.Dialect] = "excel",
        encoding: str = "utf-8",
    ) -> str: ...
    @overload
    def to_csv(
        self,
        file: TextTarget,
        *,
        delimiter: str | None = None,
        dialect: str | type[csv.Dialect] = "excel",
        encoding: str = "utf-8",
    ) -> None: ...
    @reject_unknown_options
    def to_csv(
        self,
        file: TextTarget | None = None,
        *,
        delimiter: str | None = None,
        dialect: str | type[csv.Dialect] = "excel",
        encoding: str = "utf-8",
    ) -> str | None:
        """Write a table with a row for each document; see `DocumentArray.to_csv`."""
        options = CsvOptions(delimiter, dialect, encoding)
        return to_csv(self._columns.schema, self._columns.documents(), file, options)

    @classmethod
    @reject_unknown_options
    def from_csv(
        cls,
        source: TextSource | None = None,
        *,
        text: str | bytes | None = None,
        delimiter: str | None = None,
        dialect: str | type[csv.Dialect] = "excel",
        encoding: str = "utf-8",
        extra: Extra = "forbid",
        shapes: ShapePolicy = "error",
    ) -> Self:
        """Make a batch from the rows of a table; see `DocumentArray.from_csv`."""
        options = CsvOptions(delimiter, dialect, encoding)
        return cls(iter_csv(require_document_type(cls, "from_csv()"), source, options, extra, text), shapes=shapes)

    def push(self, url: Url, **how: Unpack[Pushing]) -> None:
        """Write the rows to an address; blocks are encoded while others are sent. See `DocumentArray.push`."""
        _serialization.push_batches(type(self), [self], url, how)

    @classmethod
    def push_stream(cls, batches: Iterable[Self], url: Url, **how: Unpack[Pushing]) -> None:
        """`push` for batches from any iterable, as they come: some blocks of them are in memory."""
        _serialization.push_batches(cls, batches, url, how)

    @classmethod
    def pull(cls, url: Url, **how: Unpack[Pulling]) -> Self:
        """Read the rows of a file that was pushed, or written by `save_binary`, by a batch or by an array."""
        return _serialization.pull_batch(cls, url, how)

    @classmethod
    def pull_stream(cls, url: Url, **how: Unpack[Pulling]) -> Iterator[Self]:
        """Yield the rows of `pull` while they are received, a batch for each block of the file."""
        return _serialization.pull_batches(cls, url, how)

    def save_parquet(self, path: str | os.PathLike[str], **options: Any) -> None:
        """Write one Parquet file if the path ends with .parquet, else a dataset; `options` as of `write_dataset`."""
        from quire.storage import save_parquet

        save_parquet(self, self.document_type, path, **options)

    @classmethod
    def load_parquet(cls, path: str | os.PathLike[str], **options: Any) -> Self:
        """Read the rows of a Parquet file or a dataset; `options` as of `open_dataset`: columns, where, ..."""
        from quire.storage import load_parquet

        return load_parquet(cls.document_type, path, **options)  # type: ignore[no-any-return]

    def push_to_hub(self, repo_id: str, *, show_progress: bool | None = None, **options: Any) -> str:
        """Write the rows as a split of a dataset on the Hugging Face Hub; see `DocumentArray.push_to_hub`."""
        from quire.storage import push_to_hub

        return push_to_hub(self, self.schema, len(self), repo_id, show_progress=show_progress, **options)

    # --- text and tables

    @reject_unknown_options
    def to_json(self, *, indent: int | None = None, tensors: TensorForm = "lists") -> str:
        """Encode the rows as a JSON list; tensors as nested lists, or as 'base64' of their bytes."""
        return self.unstack().to_json(indent=indent, tensors=tensors)

    @classmethod
    @reject_unknown_options
    def from_json(cls, text: str | bytes, *, extra: Extra = "forbid", shapes: ShapePolicy = "error") -> Self:
        """Parse a JSON list of rows: the text itself, not the path of a file.

        `extra` as of `BaseDocument.from_json`.
        """
        document_type = require_document_type(cls, "from_json()")
        check_json(document_type, text)
        return cls(rows_from_json(document_type, text, extra=extra), shapes=shapes)

    def to_dict(self) -> list[dict[str, Any]]:
        """Convert the rows to dicts; see `BaseDocument.to_dict`."""
        return self.unstack().to_dict()

    @classmethod
    @reject_unknown_options
    def from_dict(
        cls, rows: Iterable[Mapping[str, Any]], *, extra: Extra = "forbid", shapes: ShapePolicy = "error"
    ) -> Self:
        """Make a batch from mappings of fields; `extra` as of `BaseDocument.from_json`."""
        return cls(rows_from_dict(require_document_type(cls, "from_dict()"), rows, extra=extra), shapes=shapes)

    def to_dataframe(self) -> pd.DataFrame:
        """Convert to a pandas data frame; a number column becomes one array."""
        return make_dataframe(flatten_columns(self._columns), len(self), find_present_columns(self._columns))

    @classmethod
    @reject_unknown_options
    def from_dataframe(cls, frame: Any, *, extra: Extra = "ignore", shapes: ShapePolicy = "error") -> Self:
        """Make a batch from the rows of a data frame; unknown columns are ignored, or errors (`extra='forbid'`)."""
        document_type = require_document_type(cls, "from_dataframe()")
        return cls._wrap(columns_from_frame(document_type, frame, extra, shapes))

    def to_arrow(self, columns: Iterable[str] | None = None) -> pa.Table:
        """Convert to a table of pyarrow, with all columns or those at some paths.

        Numbers and tensors in main memory are not copied: the table shares the memory of the batch. Tensors are lists
        of numbers, nested documents structs, enums their values, datetimes timestamps. A field that Arrow has no type
        for is an EncodeError.
        """
        from quire.storage import to_arrow

        require_document_type(type(self), "to_arrow()")
        return to_arrow(self._columns, columns)

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        """Return the table of `to_arrow` as a PyCapsule, for libraries that take Arrow data: polars, DuckDB, pandas."""
        return self.to_arrow().__arrow_c_stream__(requested_schema)

    @classmethod
    def from_arrow(cls, data: Any, *, extra: Extra = "ignore") -> Self:
        """Make a batch from Arrow data: a table, or any object with `__arrow_c_stream__`, such as a polars data frame.

        The data is copied and validated. Missing columns take their defaults; unknown columns are ignored, or errors
        (`extra='forbid'`).
        """
        from quire.storage import from_arrow

        return cls._wrap(from_arrow(require_document_type(cls, "from_arrow()"), data, extra))

    # --- equality, display, pickling, pydantic

    def __eq__(self, other: object) -> bool:
        return self._equals(other) if isinstance(other, DocumentBatch) else NotImplemented

    def identical(self, other: object) -> bool:
        """Return whether the other batch holds equal rows with the same ids."""
        return isinstance(other, DocumentBatch) and self._equals(other, ids=True)

    def _equals(self, other: DocumentBatch[Any], *, ids: bool = False) -> bool:
        if self.document_type is not other.document_type or len(self) != len(other):
            return False
        return equal_values(self._columns.documents(), other._columns.documents(), ids=ids)

    def summary(self) -> None:
        """Print the type, the length, the fields, and the values of the first row."""
        print_facts(type(self).__name__, {"rows": len(self)}, self.schema, self[0] if len(self) else None)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self)}>"

    def __rich__(self) -> Group:
        return facts_table(type(self).__name__, {"rows": len(self)}, self.schema, self[0] if len(self) else None)

    def _repr_html_(self) -> str:
        return html(type(self).__name__, self.schema, self[:GALLERY], len(self))

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
    def __get_pydantic_core_schema__(cls, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Accept a batch as it is, or values that become an array, which is stacked."""
        batch_type = resolve_annotation(cls, source)
        rows = handler.generate_schema(DocumentArray[batch_type.document_type])  # type: ignore[name-defined]

        def validate(value: object, inner: Callable[[object], object]) -> object:
            return value if isinstance(value, batch_type) else batch_type(inner(value))

        return core_schema.no_info_wrap_validator_function(
            validate,
            rows,
            serialization=core_schema.wrap_serializer_function_ser_schema(
                lambda batch, inner: inner(batch.unstack()), schema=rows
            ),
        )


def _make_decoded_batch(document_type: type[Any], documents: list[Any]) -> DocumentBatch[Any]:
    return DocumentBatch[document_type](documents)  # type: ignore[valid-type]


_class_registry.provide("batch", _make_decoded_batch)


class BatchList:
    """The arrays in a column: a batch of all their documents (`flat`), and where each row begins and ends (`offsets`).

    Its fields are those of `flat`; `batch.authors[i]` is the batch of one row's documents.
    """

    __slots__ = ("_column", "flat")
    _column: DocumentsColumn
    flat: DocumentBatch[Any]

    def __init__(self, column: DocumentsColumn, flat: DocumentBatch[Any]) -> None:
        object.__setattr__(self, "_column", column)
        object.__setattr__(self, "flat", flat)

    @property
    def offsets(self) -> NDArray[np.int64]:
        """Row i has the documents offsets[i] to offsets[i + 1] of `flat`."""
        return self._column.offsets

    def __len__(self) -> int:
        return len(self._column)

    def __getitem__(self, index: int) -> DocumentBatch[Any] | None:
        row = resolve_index(index, len(self))
        if not isinstance(row, int):
            raise ColumnError("a column of arrays is indexed by one position; use .flat and .offsets for more.")
        if self._column.validity is not None and not self._column.validity[row]:
            return None
        return self.flat[int(self.offsets[row]) : int(self.offsets[row + 1])]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # never a field
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.flat, name)

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *self.flat.schema.by_name})

    def __setattr__(self, name: str, values: Any) -> None:
        setattr(self.flat, name, values)

    def __repr__(self) -> str:
        return f"<{len(self)} arrays with {len(self.flat)} {self.flat.schema.name} in all>"


def _leaf_framework(columns: Iterable[Column]) -> Framework:
    """Return the framework of the first column of tensors or numbers; numpy if there is none."""
    for column in columns:
        if not column.children:
            for framework in column.frameworks:
                return framework
    return get_framework("numpy")


def find_column(columns: Columns, path: str) -> Column:
    """Return the column at a path; through arrays, the column of all their documents."""
    parts = parse_path(path)
    columns.schema.resolve(parts)
    if not parts:
        raise PathError("the empty path means the whole batch, which is not a column.")
    column = columns.columns[parts[0]]
    for depth, name in enumerate(parts[1:], start=1):
        if not column.children:
            raise PathError(f"{join_path(parts[:depth])!r} is held as objects, so {path!r} is not a column.")
        inner = column.children[0].columns
        if name not in inner:  # the schema has all fields of a nested class, of which a dataset may read some
            read = ", ".join(inner)
            raise PathError(f"{path!r} was not read: of {join_path(parts[:depth])!r}, the batch has {read}.")
        column = inner[name]
    return column


def _convert_frameworks(incoming: Columns, columns: Columns) -> Columns:
    """Convert the tensors and numbers of incoming rows to the frameworks that the columns of a batch have."""
    targets = iter([leaf.framework if isinstance(leaf, TensorColumn) else None for leaf in columns.leaves()])

    def convert(leaf: Column) -> Column:
        target = next(targets)
        if target is None or not isinstance(leaf, TensorColumn) or leaf.framework is target:
            return leaf
        return leaf.map_tensors(lambda _, data: (target, to_framework(data, target)))

    return incoming.map_leaves(convert)


def reads_as_none(batch: DocumentBatch[Any], column: Column, path: str) -> bool:
    """Return whether a column of a guarded batch has no value at all; raise an error if only some rows have none."""
    present, guard = present_rows(column), batch._guard
    if present is None or not present.any():
        return present is not None
    assert guard is not None
    documents = batch._columns.validity
    if guard.skips_none and documents is not None and len(documents) == len(present):
        present = present | ~documents
        if present.all():
            return False
    row, missing = int(np.argmin(present)), int(len(present) - present.sum())
    row_name = f"row {row}"
    ids = batch._columns.columns.get("id")
    if ids is not None and len(ids) == len(present):
        row_name += f" (id {ids.value(row)})"
    raise MissingValueError(
        f"{guard.name}.{path}: {row_name} has no value ({missing} of {len(present)} are missing), and reading the "
        f"column would give zeros in their place. batch.validity({path!r}) shows which rows have a value, and "
        f"batch.fill_missing({{{path!r}: value}}) fills the others."
    )
