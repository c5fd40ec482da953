"""Columns whose rows are tensors: of one shape, padded to one shape, or ragged; and columns of numbers."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from typing_extensions import Self

from quire.columns._column import Column, TensorMap, Validity, joined_validity
from quire.errors import TensorError
from quire.schema import Field
from quire.tensors import Framework, NativeTensorFlow, TensorType, to_framework

if TYPE_CHECKING:
    from numpy.typing import NDArray


class TensorColumn(Column):
    """One tensor for all rows: its first axis is the rows.

    `shapes` holds the rows' own shapes where they were padded to the largest.
    """

    __slots__ = ("data", "framework", "shapes")

    def __init__(
        self,
        field: Field,
        data: Any,
        framework: Framework,
        validity: Validity = None,
        shapes: NDArray[np.int64] | None = None,
    ) -> None:
        self.field, self.data, self.framework, self.shapes = field, data, framework, shapes
        self.validity = None if validity is None or validity.all() else validity

    def __len__(self) -> int:
        return self.framework.shape(self.data)[0]

    @property
    def dtype(self) -> Any:
        """The framework's own dtype of the elements."""
        return self.data.dtype

    def values(self) -> list[Any]:
        framework, data = as_declared(self.field, self.framework, self.data)
        rows = framework.unstack(data)
        if self.shapes is not None:
            cuts = [tuple(slice(size) for size in shape) for shape in self.shapes.tolist()]
            rows = [row[cut] for row, cut in zip(rows, cuts, strict=True)]
        return self.masked(wrap_rows(self.field, framework, rows))

    def value(self, index: int) -> Any:
        if self.validity is not None and not self.validity[index]:
            return None
        row = self.framework.row(self.data, index)
        if self.shapes is not None:
            row = row[tuple(slice(size) for size in self.shapes[index].tolist())]
        framework, row = as_declared(self.field, self.framework, row)
        return wrap_rows(self.field, framework, [row])[0]

    def take(self, indices: NDArray[np.int64]) -> Self:
        data = self.framework.take(self.data, indices)
        shapes = None if self.shapes is None else self.shapes[indices]
        return type(self)(self.field, data, self.framework, self._validity_of(indices), shapes)

    def slice(self, rows: slice) -> Self:
        data = self.data[rows]
        shapes = None if self.shapes is None else self.shapes[rows]
        return type(self)(self.field, data, self.framework, self._validity_of(rows), shapes)

    def concat(self, others: Sequence[Self]) -> Self | None:
        columns = [self, *others]
        if any(not self._joins(other) for other in others):
            return None
        data = self.framework.concat([column.data for column in columns])
        if data.dtype != self.dtype:
            return None  # numpy brings other byte orders to its own
        shapes = None if self.shapes is None else np.concatenate([column.shapes for column in columns])
        return type(self)(self.field, data, self.framework, joined_validity(columns), shapes)

    def _joins(self, other: Self) -> bool:
        return (
            self.framework is other.framework
            and self.dtype == other.dtype
            and self.framework.shape(self.data)[1:] == self.framework.shape(other.data)[1:]
            and (self.shapes is None) == (other.shapes is None)
        )

    def map_tensors(self, change: TensorMap) -> Self:
        framework, data = change(self.framework, self.data)
        return type(self)(self.field, data, framework, self.validity, self.shapes)

    def mask(self) -> NDArray[np.bool_]:
        """True where an element is real, False where it is padding or its row has no value."""
        shape = self.framework.shape(self.data)
        mask = np.ones(shape, np.bool_)
        for row, sizes in enumerate([] if self.shapes is None else self.shapes.tolist()):
            for axis, size in enumerate(sizes):
                mask[row].swapaxes(0, axis)[size:] = False
        mask[~self.valid_rows()] = False
        return mask


class LentColumn(TensorColumn):
    """A tensor in memory that is not its own, such as that of a message, until somebody asks for it.

    Then it is copied, and the column is a plain one. So nobody can tell, but what is only passed on is never copied.
    """

    __slots__ = ()

    @classmethod
    def lend(cls, column: TensorColumn) -> TensorColumn:
        """The column, whose data is an array of numpy that must not change, of whatever framework it is to be."""
        column.__class__ = cls
        return column

    def __len__(self) -> int:
        return len(_DATA.__get__(self))

    @property
    def data(self) -> Any:
        """The tensor, in memory of its own."""
        with _copying:
            if type(self) is LentColumn:
                own = self.framework.from_numpy(_DATA.__get__(self).copy())
                _DATA.__set__(self, own)
                self.__class__ = TensorColumn  # type: ignore[assignment]
        return _DATA.__get__(self)

    def peek(self) -> NDArray[Any] | None:
        """The array that was lent, to look at; None where the column has its own by now."""
        with _copying:
            return _DATA.__get__(self) if type(self) is LentColumn else None


_DATA: Any = TensorColumn.__dict__["data"]
_copying = threading.Lock()


class ScalarColumn(TensorColumn):
    """Numbers in one vector; a row's value is a plain Python number."""

    __slots__ = ()

    def values(self) -> list[Any]:
        return self.masked(self.framework.to_numpy(self.data).tolist())

    def value(self, index: int) -> Any:
        return self.slice(slice(index, index + 1)).values()[0]


class RaggedColumn(Column):
    """Tensors of mixed shapes: their elements in one flat tensor, and each row's shape."""

    __slots__ = ("flat", "framework", "offsets", "shapes")

    def __init__(
        self, field: Field, flat: Any, framework: Framework, shapes: list[tuple[int, ...]], validity: Validity = None
    ) -> None:
        super().__init__(field, validity)
        self.flat, self.framework, self.shapes = flat, framework, shapes
        self.offsets = np.concatenate([[0], np.cumsum([int(np.prod(shape)) for shape in shapes], dtype=np.int64)])

    def __len__(self) -> int:
        return len(self.shapes)

    def __getitem__(self, index: int) -> Any:
        return self.value(range(len(self))[index])

    @property
    def dtype(self) -> Any:
        """The framework's own dtype of the elements."""
        return self.flat.dtype

    def values(self) -> list[Any]:
        return [self.value(i) for i in range(len(self))]

    def value(self, index: int) -> Any:
        if self.validity is not None and not self.validity[index]:
            return None
        flat = self.flat[int(self.offsets[index]) : int(self.offsets[index + 1])]
        framework, row = as_declared(self.field, self.framework, self.framework.reshape(flat, self.shapes[index]))
        return wrap_rows(self.field, framework, [row])[0]

    def take(self, indices: NDArray[np.int64]) -> Self:
        flat = self.framework.take(self.flat, spread(self.offsets, indices))
        shapes = [self.shapes[i] for i in indices.tolist()]
        return type(self)(self.field, flat, self.framework, shapes, self._validity_of(indices))

    def slice(self, rows: slice) -> Self:
        start, stop, step = rows.indices(len(self))
        if step != 1:
            return self.take(np.arange(start, stop, step))
        flat = self.flat[int(self.offsets[start]) : int(self.offsets[max(start, stop)])]
        return type(self)(self.field, flat, self.framework, self.shapes[rows], self._validity_of(rows))

    def concat(self, others: Sequence[Self]) -> Self | None:
        columns = [self, *others]
        if len({(column.framework.name, column.dtype) for column in columns}) > 1:
            return None
        flat = self.framework.concat([column.flat for column in columns])
        shapes = [shape for column in columns for shape in column.shapes]
        return type(self)(self.field, flat, self.framework, shapes, joined_validity(columns))

    def map_tensors(self, change: TensorMap) -> Self:
        framework, flat = change(self.framework, self.flat)
        return type(self)(self.field, flat, framework, self.shapes, self.validity)


def as_declared(field: Field, framework: Framework, data: Any) -> tuple[Framework, Any]:
    """A column's tensor in the framework that the field is typed with, where that costs no loss and no move."""
    declared = field.type.framework if isinstance(field.type, TensorType) else None
    if declared is None or declared is framework or framework.convertible(data) is not None:
        return framework, data
    try:
        return declared, to_framework(data, declared)
    except TensorError:
        return framework, data


def wrap_rows(field: Field, framework: Framework, rows: list[Any]) -> list[Any]:
    """TensorFlow's tensors in quire's wrapper, where the field is typed with it."""
    if (
        framework.name != "tensorflow"
        or not isinstance(field.type, TensorType)
        or field.type.framework is not framework
    ):
        return rows
    plain = field.type._plain
    return rows if plain is NativeTensorFlow else [plain(row) for row in rows]


def spread(offsets: NDArray[np.int64], indices: NDArray[np.int64]) -> NDArray[np.int64]:
    """The positions of all elements of the rows, where row i has the elements offsets[i] to offsets[i + 1]."""
    starts, sizes = offsets[indices], offsets[indices + 1] - offsets[indices]
    before = np.cumsum(sizes) - sizes
    return np.repeat(starts - before, sizes) + np.arange(int(sizes.sum()), dtype=np.int64)
