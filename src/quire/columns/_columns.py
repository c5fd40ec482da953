"""All columns of a number of documents, and the columns of nested documents."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import compress, pairwise, repeat
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
from pydantic import BaseModel
from typing_extensions import Self

from quire._protocols import MODEL_SLOTS, DocumentLike
from quire.columns._column import Column, TensorMap, Validity, element_positions
from quire.errors import ColumnError, TensorError
from quire.schema import Field, Schema
from quire.tensors import Framework, to_picklable

if TYPE_CHECKING:
    from numpy.typing import NDArray

MODEL_SETTERS = tuple(BaseModel.__dict__[slot].__set__ for slot in MODEL_SLOTS)
"""Set the state of a pydantic model without validation. Calling the slot descriptors is the fastest way to do that."""


class ExtraState(NamedTuple):
    """The state of a document beyond the fields of the schema: of a subclass, extra fields, private attributes."""

    document_type: type[Any]
    fields: dict[str, Any]
    extra: dict[str, Any] | None
    private: dict[str, Any] | None


@dataclass(eq=False, slots=True)
class Columns:
    """The columns of a number of documents, by field name.

    `validity` is False in rows without a document (a nested document that is None). `extra_states` has, for each row,
    the state that the columns do not hold; None if no document has any.
    """

    schema: Schema
    columns: dict[str, Column]
    length: int
    validity: Validity = None
    extra_states: list[ExtraState | None] | None = None
    is_deferred: ClassVar[bool] = False
    """Whether the columns are gathered when they are first read."""

    def __len__(self) -> int:
        return self.length

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        memo: dict[Any, Any] = {}
        # Columns of nested documents are pickled by this method, too.
        columns = {name: col if col.children else col.to_picklable(memo) for name, col in self.columns.items()}
        *arguments, states = replace(self, columns=columns)._restore_arguments()
        if states is not None:
            states = [None if state is None else ExtraState(*to_picklable(tuple(state), memo)) for state in states]
        return _restore, (*arguments, states)

    def _restore_arguments(self) -> tuple[Any, ...]:
        parts = {name: (type(column), column.payload()) for name, column in self.columns.items()}
        own = self.schema.document_type.document_schema() is self.schema
        fields = None if own else self.schema.fields
        return self.schema.document_type, fields, parts, self.length, self.validity, self.extra_states

    def __deepcopy__(self, memo: dict[int, Any]) -> Columns:
        def copy_tensor(framework: Framework, value: Any) -> tuple[Framework, Any]:
            if id(value) not in memo:
                memo[id(value)] = framework.copy_alone(value, memo)
            return framework, memo[id(value)]

        self.map_tensors(copy_tensor)  # first, because copy.deepcopy refuses tensors that are part of a gradient graph
        return _restore(*copy.deepcopy(self._restore_arguments(), memo))

    # --- the tree of columns

    @property
    def nbytes(self) -> int:
        """The approximate size of all values in memory."""
        return sum(column.nbytes for column in self.columns.values())

    @property
    def frameworks(self) -> set[Framework]:
        """The frameworks of the tensors and numbers that are held as arrays, including those of nested documents."""
        return {framework for column in self.columns.values() for framework in column.frameworks}

    def leaves(self) -> Iterator[Column]:
        """Yield the columns without nested columns, depth first."""
        for column in self.columns.values():
            if column.children:
                for child in column.children:
                    yield from child.leaves()
            else:
                yield column

    def map_leaves(self, change: Callable[[Column], Column]) -> Columns:
        """Return the columns with every leaf changed, including those of nested documents."""
        return replace(self, columns={name: column.map_leaves(change) for name, column in self.columns.items()})

    def map_tensors(self, change: TensorMap) -> Columns:
        """Return the columns with every tensor in them changed."""
        changed = {}
        for name, column in self.columns.items():
            try:
                changed[name] = column.map_tensors(change)
            except TensorError as error:
                raise ColumnError(f"{self.schema.name}.{name}: {error}") from error
        return replace(self, columns=changed)

    # --- rows

    def take(self, indices: NDArray[np.int64]) -> Columns:
        """Copy rows by position."""
        return Columns(
            self.schema,
            {name: column.take(indices) for name, column in self.columns.items()},
            len(indices),
            None if self.validity is None else self.validity[indices],
            None if self.extra_states is None else [self.extra_states[i] for i in indices.tolist()],
        )

    def slice(self, rows: slice) -> Columns:
        """Return a range of rows that shares memory with the columns."""
        return Columns(
            self.schema,
            {name: column.slice(rows) for name, column in self.columns.items()},
            len(range(*rows.indices(self.length))),
            None if self.validity is None else self.validity[rows],
            None if self.extra_states is None else self.extra_states[rows],
        )

    def set_column(self, column: Column) -> None:
        """Replace the column of a field."""
        name = column.field.name
        if len(column) != self.length:
            raise ColumnError(f"{self.schema.name}.{name}: the batch has {self.length} rows, got {len(column)} values.")
        self.columns[name] = column

    # --- documents

    def document(self, index: int) -> Any:
        """Return one row as a document; None if the row has none."""
        if self.validity is not None and not self.validity[index]:
            return None
        row = {name: column.value(index) for name, column in self.columns.items()}
        return next(self._make([row], self.extra_states and [self.extra_states[index]]))

    def documents(self) -> list[Any]:
        """Return all rows as documents, which share memory with the columns; None for rows without a document."""
        return list(self.iter_documents(self.length or 1))

    def iter_documents(self, chunk: int = 1024) -> Iterator[Any]:
        """Yield the rows as documents, made `chunk` rows at a time."""
        for start in range(0, self.length, chunk):
            part = self if chunk >= self.length else self.slice(slice(start, start + chunk))
            if part.validity is None:
                yield from part._make(part._rows(), part.extra_states)
            else:
                valid = part.validity.tolist()
                extra_states = part.extra_states and list(compress(part.extra_states, valid))
                documents = part._make(compress(part._rows(), valid), extra_states)
                yield from (next(documents) if is_valid else None for is_valid in valid)

    def _rows(self) -> Iterator[dict[str, Any]]:
        if not self.columns:
            return ({} for _ in range(self.length))
        values = zip(*(column.values() for column in self.columns.values()), strict=True)
        # Nested maps make the dict of each row without running Python code for it.
        return map(dict, map(zip, repeat(tuple(self.columns)), values))

    def _make(self, rows: Iterable[dict[str, Any]], extra_states: list[ExtraState | None] | None) -> Iterator[Any]:
        """Make documents without validation: the values come from documents that were validated."""
        if extra_states is not None:
            return map(_make_document, repeat(self.schema), rows, extra_states)
        if self.schema.keeps_more:
            return map(_make_document, repeat(self.schema), rows, repeat(None))
        return _make_plain_documents(self.schema.document_type, rows, set(self.columns))


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


def _make_plain_documents(document_type: type[Any], rows: Iterable[dict[str, Any]], names: set[str]) -> Iterator[Any]:
    # As `model_construct` of pydantic does, but without a look at each field: the rows have all of them. This makes
    # every document of `unstack` and of decoded bytes.
    new, (put_dict, put_names, put_extra, put_private) = object.__new__, MODEL_SETTERS
    for row in rows:
        document = new(document_type)
        put_dict(document, row)
        put_names(document, names)  # shared by all documents: it has every name already, so nothing is ever added
        put_extra(document, None)
        put_private(document, None)
        yield document


def _make_document(schema: Schema, row: dict[str, Any], extra_state: ExtraState | None) -> DocumentLike:
    document_type = schema.document_type
    extra: dict[str, Any] | None = {} if document_type.model_config.get("extra") == "allow" else None
    private: dict[str, Any] | None = None
    if extra_state is not None:
        document_type, more, extra, private = extra_state
        row = {**row, **more}
    document: DocumentLike = object.__new__(document_type)
    state = (
        row,
        {*row, *(extra or ())},
        None if extra is None else dict(extra),
        None if private is None else dict(private),
    )
    for put, value in zip(MODEL_SETTERS, state, strict=True):
        put(document, value)
    if private is None and document_type.__private_attributes__:
        document_type.model_post_init(document, None)  # sets the defaults of private attributes
    return document


# --- nested documents


class DocumentColumn(Column):
    """Nested documents: their own columns, with one row for each row of the column."""

    __slots__ = ("columns",)

    def __init__(self, field: Field, columns: Columns) -> None:
        super().__init__(field, columns.validity)
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns)

    @property
    def children(self) -> tuple[Columns, ...]:
        return (self.columns,)

    def map_children(self, change: Callable[[Columns], Columns]) -> Self:
        return type(self)(self.field, change(self.columns))

    def values(self) -> list[Any]:
        return self.columns.documents()

    def value(self, index: int) -> Any:
        return self.columns.document(index)

    def take(self, indices: NDArray[np.int64]) -> Self:
        return type(self)(self.field, self.columns.take(indices))

    def slice(self, rows: slice) -> Self:
        return type(self)(self.field, self.columns.slice(rows))


class DocumentsColumn(Column):
    """Arrays of documents: the columns of all their documents (`flat`); row i has offsets[i] to offsets[i + 1]."""

    __slots__ = ("flat", "offsets")

    def __init__(self, field: Field, flat: Columns, offsets: NDArray[np.int64], validity: Validity = None) -> None:
        super().__init__(field, validity)
        self.flat, self.offsets = flat, offsets

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def children(self) -> tuple[Columns, ...]:
        return (self.flat,)

    def map_children(self, change: Callable[[Columns], Columns]) -> Self:
        return type(self)(self.field, change(self.flat), self.offsets, self.validity)

    def values(self) -> list[Any]:
        documents, ends = self.flat.documents(), self.offsets.tolist()
        arrays = [self.field.type._trusted(documents[a:b]) for a, b in pairwise(ends)]
        return self.mask_values(arrays)

    def take(self, indices: NDArray[np.int64]) -> Self:
        sizes = self.offsets[indices + 1] - self.offsets[indices]
        offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        flat = self.flat.take(element_positions(self.offsets, indices))
        return type(self)(self.field, flat, offsets, self._select_validity(indices))

    def slice(self, rows: slice) -> Self:
        start, stop, step = rows.indices(len(self))
        if step != 1:
            return self.take(np.arange(start, stop, step))
        offsets = self.offsets[start : max(start, stop) + 1]
        flat = self.flat.slice(slice(int(offsets[0]), int(offsets[-1])))
        return type(self)(self.field, flat, offsets - offsets[0], self._select_validity(rows))
