"""All columns of a number of documents, and columns of nested documents."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import compress, pairwise, repeat
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
from pydantic import BaseModel
from typing_extensions import Self

from quire._protocols import MODEL_SLOTS
from quire.columns._column import Column, TensorMap, Validity
from quire.columns._tensor import spread
from quire.errors import ColumnError, TensorError
from quire.schema import Field, Schema
from quire.tensors import Framework

if TYPE_CHECKING:
    from numpy.typing import NDArray

# A model's parts are set past its validation: the descriptors themselves are the fastest way.
_SETTERS = tuple(BaseModel.__dict__[slot].__set__ for slot in MODEL_SLOTS)


class ExtraState(NamedTuple):
    """What a document holds beyond the fields of the schema that it was stacked with."""

    document_type: type[Any]
    fields: dict[str, Any]
    extra: dict[str, Any] | None
    private: dict[str, Any] | None


@dataclass(eq=False, slots=True)
class Columns:
    """The columns of a number of documents, by field name.

    `validity` is False in rows that stand for no document at all (a nested document that is None). `extra_states` holds
    what documents of subclasses have beyond the schema.
    """

    schema: Schema
    columns: dict[str, Column]
    length: int
    validity: Validity = None
    extra_states: list[ExtraState | None] | None = None
    is_deferred: ClassVar[bool] = False
    """Whether the columns are gathered only when somebody looks at them."""

    def __len__(self) -> int:
        return self.length

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        packed = self.map_tensors(lambda framework, value: (framework, framework.to_pickle(value)))
        return _restore, packed._arguments()

    def _arguments(self) -> tuple[Any, ...]:
        parts = {name: (type(column), column.payload()) for name, column in self.columns.items()}
        own = self.schema.document_type.document_schema() is self.schema
        fields = None if own else self.schema.fields
        return self.schema.document_type, fields, parts, self.length, self.validity, self.extra_states

    def __deepcopy__(self, memo: dict[int, Any]) -> Columns:
        def remember(framework: Framework, value: Any) -> tuple[Framework, Any]:
            if id(value) not in memo:
                memo[id(value)] = framework.copy_alone(value, memo)
            return framework, memo[id(value)]

        self.map_tensors(remember)  # first, because copy.deepcopy refuses tensors that are part of a gradient graph
        return _restore(*copy.deepcopy(self._arguments(), memo))

    def take(self, indices: NDArray[np.int64]) -> Columns:
        """Rows by position, copied."""
        extra_states = None if self.extra_states is None else [self.extra_states[i] for i in indices.tolist()]
        return Columns(
            self.schema,
            {name: column.take(indices) for name, column in self.columns.items()},
            len(indices),
            None if self.validity is None else self.validity[indices],
            extra_states,
        )

    def slice(self, rows: slice) -> Columns:
        """A run of rows, sharing memory."""
        return Columns(
            self.schema,
            {name: column.slice(rows) for name, column in self.columns.items()},
            len(range(*rows.indices(self.length))),
            None if self.validity is None else self.validity[rows],
            None if self.extra_states is None else self.extra_states[rows],
        )

    def map_tensors(self, change: TensorMap) -> Columns:
        """The columns with every tensor in them changed."""
        changed = {}
        for name, column in self.columns.items():
            try:
                changed[name] = column.map_tensors(change)
            except TensorError as error:
                raise ColumnError(f"{self.schema.name}.{name}: {error}") from error
        return replace(self, columns=changed)

    def set_column(self, column: Column) -> None:
        """Put another column in the place of a field's."""
        name = column.field.name
        if len(column) != self.length:
            raise ColumnError(f"{self.schema.name}.{name}: the batch has {self.length} rows, got {len(column)} values.")
        self.columns[name] = column

    def document(self, index: int) -> Any:
        """One row as a document."""
        if self.validity is not None and not self.validity[index]:
            return None
        row = {name: column.value(index) for name, column in self.columns.items()}
        return next(self._make([row], self.extra_states and [self.extra_states[index]]))

    def documents(self) -> list[Any]:
        """All rows as documents, which share memory with the columns; None where a row stands for none."""
        return list(self.iter_documents(self.length or 1))

    def iter_documents(self, chunk: int = 1024) -> Iterator[Any]:
        """The rows as documents, made a chunk at a time."""
        for start in range(0, self.length, chunk):
            part = self if chunk >= self.length else self.slice(slice(start, start + chunk))
            if part.validity is None:
                yield from part._make(part._rows(), part.extra_states)
            else:
                valid = part.validity.tolist()
                extra_states = part.extra_states and list(compress(part.extra_states, valid))
                made = part._make(compress(part._rows(), valid), extra_states)
                yield from (next(made) if there else None for there in valid)

    def _rows(self) -> Iterator[dict[str, Any]]:
        if not self.columns:
            return ({} for _ in range(self.length))
        values = zip(*(column.values() for column in self.columns.values()), strict=True)
        return map(dict, map(zip, repeat(tuple(self.columns)), values))

    def _make(self, rows: Any, extra_states: list[ExtraState | None] | None) -> Iterator[Any]:
        """Documents without validation: the values come from documents that were validated."""
        if extra_states is not None:
            return map(_make_one, repeat(self.schema), rows, extra_states)
        if self.schema.keeps_more:
            return map(_make_one, repeat(self.schema), rows, repeat(None))
        return _make_plain(self.schema.document_type, rows, set(self.columns))


def _restore(
    document_type: Any,
    fields: tuple[Field, ...] | None,
    parts: dict[str, tuple[type[Column], dict[str, Any]]],
    length: int,
    *rest: Any,
) -> Columns:
    schema: Schema = document_type.document_schema()
    if fields is not None:
        schema = replace(schema, fields=fields)
    columns = {name: kind.restore(schema.resolve((name,))[0], payload) for name, (kind, payload) in parts.items()}
    return Columns(schema, columns, length, *rest)


def _make_plain(document_type: type[Any], rows: Any, names: set[str]) -> Iterator[Any]:
    new, (put_dict, put_names, put_extra, put_private) = object.__new__, _SETTERS
    for row in rows:
        document = new(document_type)
        put_dict(document, row)
        put_names(document, names)  # shared: it holds every name already, and so never changes
        put_extra(document, None)
        put_private(document, None)
        yield document


def _make_one(schema: Schema, row: dict[str, Any], remainder: ExtraState | None) -> Any:
    document_type = schema.document_type
    extra: dict[str, Any] | None = {} if document_type.model_config.get("extra") == "allow" else None
    private: dict[str, Any] | None = None
    if remainder is not None:
        document_type, more, extra, private = remainder
        row = {**row, **more}
    document = object.__new__(document_type)
    state = (
        row,
        {*row, *(extra or ())},
        None if extra is None else dict(extra),
        None if private is None else dict(private),
    )
    for put, value in zip(_SETTERS, state, strict=True):
        put(document, value)
    if private is None and document_type.__private_attributes__:
        document_type.model_post_init(document, None)  # gives private attributes their defaults
    return document


class DocumentColumn(Column):
    """Nested documents: their own columns, a row a document."""

    __slots__ = ("columns",)

    def __init__(self, field: Field, columns: Columns) -> None:
        super().__init__(field, columns.validity)
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns)

    def values(self) -> list[Any]:
        return self.columns.documents()

    def value(self, index: int) -> Any:
        return self.columns.document(index)

    def take(self, indices: NDArray[np.int64]) -> Self:
        return type(self)(self.field, self.columns.take(indices))

    def slice(self, rows: slice) -> Self:
        return type(self)(self.field, self.columns.slice(rows))

    def map_tensors(self, change: TensorMap) -> Self:
        return type(self)(self.field, self.columns.map_tensors(change))


class DocumentsColumn(Column):
    """Nested arrays: the columns of all their documents, and where each row's begin and end."""

    __slots__ = ("flat", "offsets")

    def __init__(self, field: Field, flat: Columns, offsets: NDArray[np.int64], validity: Validity = None) -> None:
        super().__init__(field, validity)
        self.flat, self.offsets = flat, offsets

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def values(self) -> list[Any]:
        documents, ends = self.flat.documents(), self.offsets.tolist()
        arrays = [self.field.type._trusted(documents[a:b]) for a, b in pairwise(ends)]
        return self.masked(arrays)

    def take(self, indices: NDArray[np.int64]) -> Self:
        sizes = self.offsets[indices + 1] - self.offsets[indices]
        offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        return type(self)(
            self.field, self.flat.take(spread(self.offsets, indices)), offsets, self._validity_of(indices)
        )

    def slice(self, rows: slice) -> Self:
        start, stop, step = rows.indices(len(self))
        if step != 1:
            return self.take(np.arange(start, stop, step))
        offsets = self.offsets[start : max(start, stop) + 1]
        flat = self.flat.slice(slice(int(offsets[0]), int(offsets[-1])))
        return type(self)(self.field, flat, offsets - offsets[0], self._validity_of(rows))

    def map_tensors(self, change: TensorMap) -> Self:
        return type(self)(self.field, self.flat.map_tensors(change), self.offsets, self.validity)
