"""The tensors of columns: a function on each of them, and columns without them, the structure of a pytree.

`split_tensors` takes columns apart, `join_tensors` assembles them with other tensors. What a function does to the
tensors in between is its own affair: it may change their number of rows (`vmap` removes that axis), or replace them by
other objects, such as shapes. Columns are assembled in any case, because libraries assemble trees of placeholders, too.
If the tensors do not have the rows of the texts next to them any more, everything that needs rows raises an error.

A compiler (`jax.jit`, `torch.export`) traces a function once, with placeholders of tensors, and assembles the results
of later calls with the structure of the traced call. The texts, ids and missing values of that call must not show up in
those results. So columns that are assembled with placeholders have `Lost` objects in their place, which raise an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NoReturn

from quire.columns._column import Column, ObjectColumn, RaggedColumn, ScalarColumn, TensorColumn
from quire.columns._columns import Columns, DocumentColumn, DocumentsColumn
from quire.columns._retype import relax_field, with_fields
from quire.errors import ColumnError
from quire.schema import Field, FieldKind, Schema
from quire.tensors import Framework, describe, format_shape, framework_of, get_framework

Key = tuple[Any, ...]
"""The structure of columns: names, kinds of columns, and which of them have missing values. Nested tuples."""

_TENSOR, _RAGGED, _DOCUMENT, _DOCUMENTS, _OBJECT = "tensor", "ragged", "document", "documents", "object"


class Lost:
    """Stands for a part of a batch that is not available in a compiled function; every use raises an error."""

    __slots__ = ("_part",)

    def __init__(self, part: str) -> None:
        self._part = part

    def __reduce__(self) -> tuple[type[Lost], tuple[str]]:
        return Lost, (self._part,)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # protocols that this object does not have
            raise AttributeError(name)
        self._raise()

    def _raise(self, *_: object, **__: object) -> NoReturn:
        raise ColumnError(
            f"{self._part}: not available in a function that jax.jit or torch.export traces, nor in the batches that "
            "it returns: only tensors are. Read it outside of the function, and pass it as an argument of its own."
        )

    __len__ = __iter__ = __getitem__ = __array__ = __bool__ = __invert__ = __and__ = __or__ = _raise


class UnevenColumns(Columns):
    """Columns whose tensors were replaced by others with another number of rows, or by other objects.

    They can be read, and be the result of `vmap`. Their length is an error, and so is everything that needs it.
    """

    __slots__ = ("rows",)
    rows: int
    """The number of rows before the tensors were replaced."""

    @property
    def length(self) -> int:  # type: ignore[override]
        """Raise the error that explains why there is none."""
        shapes = {path: list(getattr(leaf, "shape", ())) for path, leaf in zip(*self._leaves(), strict=True)}
        raise ColumnError(
            f"{self.schema.name}: the tensors of this batch were replaced, and do not have its {self.rows} rows any "
            f"more: their shapes are {shapes}. Columns can be read, but there are no rows and no documents."
        )

    def _leaves(self) -> tuple[list[str], list[Any]]:
        leaves: list[Any] = []
        return list(tensor_paths(split_tensors(self, leaves))), leaves


# --- taking apart


def _kind_of(column: Column) -> str:
    """Return what a column is in a tree. A dict is several times faster than `isinstance` of abstract classes."""
    kind = _KINDS.get(type(column))
    if kind is None:
        kind = next((kind for known, kind in tuple(_KINDS.items()) if isinstance(column, known)), _OBJECT)
        _KINDS[type(column)] = kind
    # Nested documents without tensors that are gathered when they are read stay as they are.
    if kind in (_DOCUMENT, _DOCUMENTS) and column.children[0].is_deferred:
        return _OBJECT
    return kind


_KINDS: dict[type[Column], str] = {
    TensorColumn: _TENSOR,
    ScalarColumn: _TENSOR,
    RaggedColumn: _RAGGED,
    DocumentColumn: _DOCUMENT,
    DocumentsColumn: _DOCUMENTS,
    ObjectColumn: _OBJECT,
}


def split_tensors(columns: Columns, leaves: list[Any]) -> Columns:
    """Append the tensors of columns to a list, and return columns without tensors, which keep none of their memory."""
    rest: dict[str, Column] = {}
    column: Any
    for name, column in columns.columns.items():
        kind = _kind_of(column)
        if kind is _OBJECT:
            rest[name] = column
        elif kind is _TENSOR:
            leaves.append(column.data)
            rest[name] = _make_tensor_column(column, None, column.framework)
        elif kind is _RAGGED:
            leaves.append(column.flat)
            rest[name] = _make_ragged_column(column, None, column.framework)
        elif kind is _DOCUMENT:
            rest[name] = _make_document_column(column, split_tensors(column.columns, leaves))
        else:
            rest[name] = _make_documents_column(column, split_tensors(column.flat, leaves))
    length = columns.rows if isinstance(columns, UnevenColumns) else columns.length
    return Columns(columns.schema, rest, length, columns.validity, columns.extra_states)


def tensor_paths(columns: Columns, path: str = "") -> Iterator[str]:
    """Yield the paths of the tensors that `split_tensors` appends, in the same order."""
    for name, column in columns.columns.items():
        kind = _kind_of(column)
        if kind in (_TENSOR, _RAGGED):
            yield path + name
        elif kind is not _OBJECT:
            yield from tensor_paths(column.children[0], f"{path}{name}.")


# --- assembling


def join_tensors(columns: Columns, leaves: Iterator[Any], *, traced: bool = False) -> Columns:
    """Return the columns with tensors, or other objects, in place of those that were split from them.

    With `traced`, the tensors are placeholders of a compiler: their number of rows may be a symbol, which must not be
    compared with a number.
    """
    joined: dict[str, Column] = {}
    length, is_even = columns.length, True
    column: Any
    for name, column in columns.columns.items():
        kind = _kind_of(column)
        if kind is _OBJECT:
            joined[name] = column
        elif kind is _TENSOR:
            leaf = next(leaves)
            shape = getattr(leaf, "shape", None)
            if traced and shape:
                length = shape[0]
            elif not shape or shape[0] != length:
                is_even = False
            joined[name] = _make_tensor_column(column, leaf, framework_of(leaf) or column.framework)
        elif kind is _RAGGED:
            leaf = next(leaves)
            joined[name] = _make_ragged_column(column, leaf, framework_of(leaf) or column.framework)
        else:
            inner = join_tensors(column.children[0], leaves, traced=traced)
            is_even = is_even and not isinstance(inner, UnevenColumns)
            make = _make_document_column if kind is _DOCUMENT else _make_documents_column
            joined[name] = make(column, inner)
    if is_even:
        return Columns(columns.schema, joined, length, columns.validity, columns.extra_states)
    uneven = object.__new__(UnevenColumns)
    uneven.schema, uneven.columns, uneven.rows = columns.schema, joined, columns.length
    uneven.validity, uneven.extra_states = columns.validity, columns.extra_states
    return uneven


def mark_lost(columns: Columns, path: str = "") -> Columns:
    """Return columns without tensors in which everything else is lost, for a function that a compiler traces."""
    path = path or columns.schema.name
    lost = {name: _mark_column_lost(column, f"{path}.{name}") for name, column in columns.columns.items()}
    return Columns(
        columns.schema, lost, columns.length, _mark_part_lost(columns.validity, f"{path}: rows without a document")
    )


def _mark_column_lost(column: Any, path: str) -> Column:
    kind, validity = _kind_of(column), _mark_part_lost(column.validity, f"{path}: missing values")
    if kind is _TENSOR:
        tensor = _make_tensor_column(column, None, column.framework)
        tensor.validity, tensor.shapes = validity, _mark_part_lost(column.shapes, f"{path}: the shapes of rows")
        return tensor
    if kind is _RAGGED:
        ragged = _make_ragged_column(column, None, column.framework)
        ragged.validity, ragged.shapes = validity, _mark_part_lost(column.shapes, f"{path}: the shapes of rows")
        ragged.offsets = _mark_part_lost(column.offsets, f"{path}: offsets")
        return ragged
    if kind is _DOCUMENT:
        return _make_document_column(column, mark_lost(column.columns, path))
    if kind is _DOCUMENTS:
        documents = _make_documents_column(column, mark_lost(column.flat, path))
        documents.validity, documents.offsets = validity, _mark_part_lost(column.offsets, f"{path}: offsets")
        return documents
    return _make_lost_column(column.field, path)


def _mark_part_lost(part: Any, name: str) -> Any:
    """Return what replaces a part of a column in a compiled function; None stays None."""
    return None if part is None else Lost(name)


def _make_tensor_column(column: TensorColumn, data: Any, framework: Framework) -> TensorColumn:
    """Return a column with other data. This sets the slots, because `__init__` looks at all missing values."""
    new: TensorColumn = object.__new__(ScalarColumn if type(column) is ScalarColumn else TensorColumn)
    new.field, new.validity, new.shapes = column.field, column.validity, column.shapes
    new.data, new.framework = data, framework
    return new


def _make_ragged_column(column: RaggedColumn, flat: Any, framework: Framework) -> RaggedColumn:
    new: RaggedColumn = object.__new__(RaggedColumn)
    new.field, new.validity, new.shapes, new.offsets = column.field, column.validity, column.shapes, column.offsets
    new.flat, new.framework = flat, framework
    return new


def _make_document_column(column: DocumentColumn, columns: Columns) -> DocumentColumn:
    new: DocumentColumn = object.__new__(DocumentColumn)
    new.field, new.validity, new.columns = column.field, columns.validity, columns
    return new


def _make_documents_column(column: DocumentsColumn, flat: Columns) -> DocumentsColumn:
    new: DocumentsColumn = object.__new__(DocumentsColumn)
    new.field, new.validity, new.offsets, new.flat = column.field, column.validity, column.offsets, flat
    return new


def _make_lost_column(field: Field, path: str) -> ObjectColumn:
    column: ObjectColumn = object.__new__(ObjectColumn)
    lost: Any = Lost(path)
    column.field, column.validity, column.objects = field, None, lost
    return column


# --- the structure as a value


def structure_key(columns: Columns) -> Key:
    """Return the structure of columns without tensors, as a value that can be compared and hashed.

    The number of rows, texts and ids are not part of it: compiled functions are used for other batches again. Whether a
    column has missing values is: a guarded batch raises an error for them when the function is traced.
    """
    return (columns.validity is not None, *(_column_key(name, column) for name, column in columns.columns.items()))


def _column_key(name: str, column: Any) -> Key:
    kind = _kind_of(column)
    if kind is _TENSOR:
        return name, kind, column.validity is not None, column.shapes is not None, type(column) is ScalarColumn
    if kind is _RAGGED:
        return name, kind, column.validity is not None
    if kind is _DOCUMENT:
        return name, kind, structure_key(column.columns)
    if kind is _DOCUMENTS:
        return name, kind, column.validity is not None, structure_key(column.flat)
    return name, kind


def columns_from_key(schema: Schema, key: Any, path: str = "") -> Columns:
    """Return columns of a structure without any data, such as one that was stored with a compiled function."""
    has_validity, *entries = key
    path = path or schema.name
    columns = {entry[0]: _column_from_key(schema, entry, f"{path}.{entry[0]}") for entry in entries}
    validity: Any = Lost(f"{path}: the rows without a document") if has_validity else None
    return Columns(schema, columns, 0, validity)


def _column_from_key(schema: Schema, entry: Any, path: str) -> Column:
    name, kind, *parts = entry
    field = schema.by_name.get(name) or Field(name, FieldKind.ANY, object)
    lost: Any = Lost(f"{path}: the missing values and the shapes of the rows")
    if kind == _TENSOR:
        has_validity, has_shapes, is_scalar = parts
        tensor: TensorColumn = object.__new__(ScalarColumn if is_scalar else TensorColumn)
        tensor.field, tensor.framework, tensor.data = field, get_framework("numpy"), None
        tensor.validity, tensor.shapes = lost if has_validity else None, lost if has_shapes else None
        return tensor
    if kind == _RAGGED:
        ragged: RaggedColumn = object.__new__(RaggedColumn)
        ragged.field, ragged.framework, ragged.flat = field, get_framework("numpy"), None
        ragged.validity, ragged.shapes, ragged.offsets = lost if parts[0] else None, lost, lost
        return ragged
    if kind == _DOCUMENT:
        document: DocumentColumn = object.__new__(DocumentColumn)
        document.field = field
        document.columns = columns_from_key(field.document_type.document_schema(), parts[0], path)
        document.validity = document.columns.validity
        return document
    if kind == _DOCUMENTS:
        documents: DocumentsColumn = object.__new__(DocumentsColumn)
        documents.field, documents.validity, documents.offsets = field, lost if parts[0] else None, lost
        documents.flat = columns_from_key(field.document_type.document_schema(), parts[1], path)
        return documents
    return _make_lost_column(field, path)


# --- functions


def apply_to_tensors(columns: Columns, func: Callable[[Any], Any], path: str = "") -> Columns:
    """Return the columns with the results of a function of each tensor; they must have the same rows."""
    changed: dict[str, Column] = {}
    for name, column in columns.columns.items():
        where = f"{path or columns.schema.name}.{name}"
        if any(child.is_deferred for child in column.children):  # without tensors
            changed[name] = column
        elif column.children:
            changed[name] = column.map_children(lambda inner, where=where: apply_to_tensors(inner, func, where))  # type: ignore[misc]
        elif isinstance(column, (TensorColumn, RaggedColumn)):
            changed[name] = _apply(column, func, where)
        else:
            changed[name] = column
    return replace(columns, columns=changed, schema=with_fields(columns.schema, changed.values()))


def _apply(column: TensorColumn | RaggedColumn, func: Callable[[Any], Any], path: str) -> Column:
    data = column.data if isinstance(column, TensorColumn) else column.flat
    result = func(data)
    framework = framework_of(result)
    if framework is None or framework.is_sparse(result):
        raise ColumnError(f"apply: {path}: the function must return a dense tensor, got {describe(result)}.")
    result = framework.unwrap(result)
    before, after = column.framework.shape(data), framework.shape(result)
    if isinstance(column, RaggedColumn) or column.shapes is not None:
        if before != after:
            raise ColumnError(
                f"apply: {path}: its rows have several shapes, so the function must return the shape that it gets, "
                f"{format_shape(before)}; got {format_shape(after)}."
            )
    elif isinstance(column, ScalarColumn) and len(after) != 1:
        raise ColumnError(
            f"apply: {path}: a column of numbers has one number in each row, got a tensor of {format_shape(after)}. "
            "Make a batch of a class with a tensor field by batch.with_columns(...)."
        )
    if not after or before[0] != after[0]:
        raise ColumnError(
            f"apply: {path}: the batch has {before[0]} rows here, and the function returned {format_shape(after)}: the "
            "first axis must stay the rows. Select rows by batch[...] or batch.take(...)."
        )
    if isinstance(column, TensorColumn):
        return relax_field(_make_tensor_column(column, result, framework))
    return relax_field(_make_ragged_column(column, result, framework))
