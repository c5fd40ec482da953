"""The kinds of columns: tensors, numbers, ragged tensors, Python objects, and packed texts.

Columns of nested documents are in `_columns`, next to the `Columns` that they contain.
"""

from __future__ import annotations

import io
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from typing_extensions import Self

from quire._lowlevel.forks import ForkSafeLock
from quire.errors import ColumnError, TensorError
from quire.schema import Field, FieldKind
from quire.tensors import (
    DTypeObject,
    Framework,
    NativeTensorFlow,
    Tensor,
    TensorType,
    framework_of_type,
    get_framework,
    to_framework,
    to_picklable,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quire.columns._columns import Columns

Validity = np.ndarray[Any, np.dtype[np.bool_]] | None
"""False in rows without a value; None if every row has one."""

TensorMap = Callable[[Framework, Any], tuple[Framework, Any]]
"""A change to a tensor of a batch, such as a move, a conversion or pinning: framework and tensor, before and after."""

_MAY_HOLD_TENSORS = (FieldKind.TENSOR, FieldKind.UNION, FieldKind.ANY)
_OBJECT_BYTES = 64  # a rough size of a small Python object with its reference


class Column(ABC):
    """The values of one field in a number of rows. Columns are immutable; an assignment replaces the column.

    Columns form a tree: those of nested documents contain `Columns`, all others are leaves. `children`, `map_children`
    and `map_leaves` walk that tree, so that code outside this package need not test for classes of columns.
    """

    __slots__ = ("field", "validity")

    def __init__(self, field: Field, validity: Validity = None) -> None:
        self.field = field
        self.validity = None if validity is None or validity.all() else validity

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def values(self) -> list[Any]:
        """Return the values of all rows as a document holds them, sharing memory with the column; None if missing."""

    @abstractmethod
    def take(self, indices: NDArray[np.int64]) -> Column:
        """Copy rows by position."""

    @abstractmethod
    def slice(self, rows: slice) -> Column:
        """Return a range of rows that shares memory with the column."""

    def concat(self, others: Sequence[Any]) -> Column | None:
        """Append columns of the same class; None if they have to be stacked again from their values."""
        return None

    def value(self, index: int) -> Any:
        """Return the value of one row."""
        return self.slice(slice(index, index + 1)).values()[0]

    @property
    def children(self) -> tuple[Columns, ...]:
        """The columns of nested documents; empty for a leaf."""
        return ()

    def map_children(self, change: Callable[[Columns], Columns]) -> Column:
        """Return the column with the columns of its nested documents changed; a leaf returns itself."""
        return self

    def map_leaves(self, change: Callable[[Column], Column]) -> Column:
        """Return the column with every leaf of the tree below it changed; for a leaf, the changed column."""
        if self.children:
            return self.map_children(lambda columns: columns.map_leaves(change))
        return change(self)

    def map_tensors(self, change: TensorMap) -> Column:
        """Return the column with every tensor in it changed."""
        return self.map_children(lambda columns: columns.map_tensors(change))

    @property
    def nbytes(self) -> int:
        """The approximate size of the values in memory."""
        return sum(columns.nbytes for columns in self.children)

    @property
    def frameworks(self) -> set[Framework]:
        """The frameworks of the tensors and numbers that are held as arrays, including those of nested documents."""
        return {framework for columns in self.children for framework in columns.frameworks}

    def valid_rows(self) -> NDArray[np.bool_]:
        """Return for each row whether it has a value."""
        return np.ones(len(self), np.bool_) if self.validity is None else self.validity

    def payload(self) -> dict[str, Any]:
        """Return everything but the field: the content of a pickle of the column."""
        # The slots of every class of a column are its whole state.
        names = [name for cls in type(self).__mro__ for name in cls.__dict__.get("__slots__", ())]
        return {name: getattr(self, name) for name in names if name != "field"}

    def to_picklable(self, memo: dict[Any, Any]) -> Column:
        """Return the column with stand-ins for tensors that are not pickled as they are; see `Framework.to_pickle`."""
        return self.map_tensors(lambda framework, value: (framework, framework.to_pickle(value, memo, alone=True)))

    @classmethod
    def restore(cls, field: Field, payload: dict[str, Any]) -> Column:
        """Build the column from `payload`, for the field of the reader's schema."""
        column = cls.__new__(cls)
        for name, value in {"field": field, **payload}.items():
            setattr(column, name, value)
        return column

    def with_field(self, field: Field) -> Self:
        """Return the same values as a column of another field that takes them unchanged. The memory is shared."""
        column = type(self).__new__(type(self))
        # The slots themselves are copied: reading the attributes would load columns that are read on first use.
        for cls in type(self).__mro__:
            for name in cls.__dict__.get("__slots__", ()):
                slot = cls.__dict__[name]
                try:
                    slot.__set__(column, slot.__get__(self))
                except AttributeError:
                    continue  # a slot without a value
        column.field = field
        return column

    def _select_validity(self, rows: Any) -> Validity:
        if self.validity is None:
            return None
        selected: NDArray[np.bool_] = self.validity[rows]
        return None if selected.all() else selected

    def mask_values(self, values: list[Any]) -> list[Any]:
        """Replace values by None in the rows that have none."""
        if self.validity is None:
            return values
        return [value if valid else None for value, valid in zip(values, self.validity.tolist(), strict=True)]


def concat_validity(columns: Sequence[Column]) -> Validity:
    """Concatenate the validity of columns."""
    if all(column.validity is None for column in columns):
        return None
    return np.concatenate([column.valid_rows() for column in columns])


def dense_framework(name: str) -> Framework:
    """Return the framework of a name, or raise an error if its tensors cannot be columns."""
    if name == "scipy":
        raise ColumnError("scipy has sparse matrices only, and columns are dense: use framework='numpy'.")
    return get_framework(name)


# --- tensors


class TensorColumn(Column):
    """One tensor for all rows; its first axis is the rows.

    `shapes` holds the rows' own shapes if they were padded to the largest.
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
    def dtype(self) -> DTypeObject:
        """The framework's own dtype of the elements."""
        return self.data.dtype

    def __dlpack__(self, **options: Any) -> Any:
        """Return the data as a DLPack capsule, for `torch.from_dlpack`, `np.from_dlpack` and others; see `data`.

        Memory is shared. Rows without a value are zeros, as in `data`.
        """
        return self.data.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return the type and number of the device that the data is on."""
        device: tuple[int, int] = self.data.__dlpack_device__()
        return device

    @property
    def nbytes(self) -> int:
        return int(getattr(self.data, "nbytes", 0))

    @property
    def frameworks(self) -> set[Framework]:
        return {self.framework}

    def values(self) -> list[Any]:
        framework, data = _as_declared(self.field, self.framework, self.data)
        rows = framework.unstack(data)
        if self.shapes is not None:
            cuts = [tuple(slice(size) for size in shape) for shape in self.shapes.tolist()]
            rows = [row[cut] for row, cut in zip(rows, cuts, strict=True)]
        return self.mask_values(wrap_rows(self.field, framework, rows))

    def value(self, index: int) -> Any:
        if self.validity is not None and not self.validity[index]:
            return None
        row = self.framework.row(self.data, index)
        if self.shapes is not None:
            row = row[tuple(slice(size) for size in self.shapes[index].tolist())]
        framework, row = _as_declared(self.field, self.framework, row)
        return wrap_rows(self.field, framework, [row])[0]

    def take(self, indices: NDArray[np.int64]) -> TensorColumn:
        # After a copy of many rows, code and objects have to come from memory again: with caches that are cold, setting
        # the attributes here takes half the time of `__init__`.
        column = object.__new__(type(self))
        column.field, column.framework = self.field, self.framework
        column.data = self.framework.take(self.data, indices)
        column.shapes = None if self.shapes is None else self.shapes[indices]
        column.validity = self._select_validity(indices)
        return column

    def slice(self, rows: slice) -> TensorColumn:
        data = self.data[rows]
        shapes = None if self.shapes is None else self.shapes[rows]
        return type(self)(self.field, data, self.framework, self._select_validity(rows), shapes)

    def concat(self, others: Sequence[TensorColumn]) -> TensorColumn | None:
        columns = [self, *others]
        if any(not self._joins(other) for other in others):
            return None
        data = self.framework.concat([column.data for column in columns])
        if data.dtype != self.dtype:
            return None  # numpy converts other byte orders to its own
        shapes = None
        if any(column.shapes is not None for column in columns):
            shapes = np.concatenate([column._row_shapes() for column in columns])
        return self.with_data(data, concat_validity(columns), shapes)

    def _row_shapes(self) -> NDArray[np.int64]:
        """Return the shape of each row without padding."""
        if self.shapes is not None:
            return self.shapes
        shape = self.framework.shape(self.data)
        return np.tile(np.array(shape[1:], np.int64), (shape[0], 1))

    def _joins(self, other: TensorColumn) -> bool:
        return (
            self.framework is other.framework
            and self.dtype == other.dtype
            and self.framework.shape(self.data)[1:] == self.framework.shape(other.data)[1:]
        )

    def map_tensors(self, change: TensorMap) -> TensorColumn:
        framework, data = change(self.framework, self.data)
        return self.with_data(data, self.validity, self.shapes, framework)

    def with_data(
        self, data: Any, validity: Validity, shapes: NDArray[np.int64] | None, framework: Framework | None = None
    ) -> TensorColumn:
        """Return a column of the same field and class with other data."""
        return type(self)(self.field, data, framework or self.framework, validity, shapes)

    def mask(self) -> NDArray[np.bool_]:
        """Return the padding mask: False for elements that are padding and in rows without a value."""
        shape = self.framework.shape(self.data)
        mask = np.ones(shape, np.bool_)
        for row, sizes in enumerate([] if self.shapes is None else self.shapes.tolist()):
            for axis, size in enumerate(sizes):
                # With the axis moved to the front, its padding is one slice.
                mask[row].swapaxes(0, axis)[size:] = False
        mask[~self.valid_rows()] = False
        return mask


class LentColumn(TensorColumn):
    """A tensor column whose data is borrowed, such as the buffer of a message, and copied when it is first read.

    A service that passes a batch on writes the borrowed array (`peek`) and never copies it. Reading `data` copies it
    once into memory of its own, in the column's framework; from then on the column behaves like any `TensorColumn`,
    and columns derived from it are plain ones.
    """

    __slots__ = ("_borrowed", "_own")

    _borrowed: NDArray[Any] | None
    _own: Any

    @classmethod
    def lend(cls, column: TensorColumn) -> LentColumn:
        """Make a lent column from a column whose data is an array of numpy that must not be written to."""
        lent = cls.__new__(cls)
        lent.field, lent.framework, lent.validity, lent.shapes = (
            column.field,
            column.framework,
            column.validity,
            column.shapes,
        )
        lent._borrowed, lent._own = column.data, None
        return lent

    def __len__(self) -> int:
        borrowed = self._borrowed
        return super().__len__() if borrowed is None else len(borrowed)

    @property
    def data(self) -> Tensor:
        """The tensor, in memory of its own."""
        if self._own is None:
            if self.framework.is_tracing():
                # torch.compile traces neither the lock nor an array that is read-only, as a message is.
                raise ColumnError(
                    f"the column {self.field.name!r} is borrowed from a message, and a compiled function cannot be the "
                    f"first to read it: read it before the call, for instance with batch.tensors()."
                )
            # One lock for all columns: two threads that read a column at once must get the same tensor.
            with _copying:
                if self._borrowed is not None:
                    self._own = self.framework.from_numpy(self._borrowed.copy())
                    self._borrowed = None
        return self._own

    @property
    def nbytes(self) -> int:
        borrowed = self._borrowed
        return super().nbytes if borrowed is None else borrowed.nbytes

    def peek(self) -> NDArray[Any] | None:
        """Return the borrowed array, for reading only; None if the column has its own data by now."""
        return self._borrowed

    def with_data(
        self, data: Any, validity: Validity, shapes: NDArray[np.int64] | None, framework: Framework | None = None
    ) -> TensorColumn:
        return TensorColumn(self.field, data, framework or self.framework, validity, shapes)

    def _to_plain(self) -> TensorColumn:
        return TensorColumn(self.field, self.data, self.framework, self.validity, self.shapes)

    def take(self, indices: NDArray[np.int64]) -> TensorColumn:
        return self._to_plain().take(indices)

    def slice(self, rows: slice) -> TensorColumn:
        return self._to_plain().slice(rows)

    def payload(self) -> dict[str, Any]:
        return self._to_plain().payload()

    @classmethod
    def restore(cls, field: Field, payload: dict[str, Any]) -> Column:
        return TensorColumn.restore(field, payload)


_copying = ForkSafeLock()


class ScalarColumn(TensorColumn):
    """Numbers in one vector; the value of a row is a Python number."""

    __slots__ = ()

    def values(self) -> list[Any]:
        return self.mask_values(self.framework.to_numpy(self.data).tolist())

    def value(self, index: int) -> Any:
        return self.slice(slice(index, index + 1)).values()[0]


class RaggedColumn(Column):
    """Tensors of mixed shapes: their elements in one flat tensor, and the shape of each row."""

    __slots__ = ("flat", "framework", "offsets", "shapes")

    def __init__(
        self, field: Field, flat: Any, framework: Framework, shapes: list[tuple[int, ...]], validity: Validity = None
    ) -> None:
        super().__init__(field, validity)
        self.flat, self.framework, self.shapes = flat, framework, shapes
        self.offsets = np.concatenate([[0], np.cumsum([math.prod(shape) for shape in shapes], dtype=np.int64)])

    def __len__(self) -> int:
        return len(self.shapes)

    def __getitem__(self, index: int) -> Any:
        return self.value(range(len(self))[index])

    @property
    def dtype(self) -> DTypeObject:
        """The framework's own dtype of the elements."""
        return self.flat.dtype

    @property
    def nbytes(self) -> int:
        return int(getattr(self.flat, "nbytes", 0))

    @property
    def frameworks(self) -> set[Framework]:
        return {self.framework}

    def values(self) -> list[Any]:
        return [self.value(i) for i in range(len(self))]

    def value(self, index: int) -> Any:
        if self.validity is not None and not self.validity[index]:
            return None
        flat = self.flat[int(self.offsets[index]) : int(self.offsets[index + 1])]
        framework, row = _as_declared(self.field, self.framework, self.framework.reshape(flat, self.shapes[index]))
        return wrap_rows(self.field, framework, [row])[0]

    def take(self, indices: NDArray[np.int64]) -> Self:
        flat = self.framework.take(self.flat, element_positions(self.offsets, indices))
        shapes = [self.shapes[i] for i in indices.tolist()]
        return type(self)(self.field, flat, self.framework, shapes, self._select_validity(indices))

    def slice(self, rows: slice) -> Self:
        start, stop, step = rows.indices(len(self))
        if step != 1:
            return self.take(np.arange(start, stop, step))
        flat = self.flat[int(self.offsets[start]) : int(self.offsets[max(start, stop)])]
        return type(self)(self.field, flat, self.framework, self.shapes[rows], self._select_validity(rows))

    def concat(self, others: Sequence[Self]) -> Self | None:
        columns = [self, *others]
        if len({(column.framework.name, column.dtype) for column in columns}) > 1:
            return None
        flat = self.framework.concat([column.flat for column in columns])
        shapes = [shape for column in columns for shape in column.shapes]
        return type(self)(self.field, flat, self.framework, shapes, concat_validity(columns))

    def map_tensors(self, change: TensorMap) -> Self:
        framework, flat = change(self.framework, self.flat)
        return type(self)(self.field, flat, framework, self.shapes, self.validity)


def _as_declared(field: Field, framework: Framework, data: Any) -> tuple[Framework, Any]:
    """Convert a tensor to the framework that the field is annotated with, unless that needs a copy to another device.

    Tensors that the declared framework cannot represent stay in the framework of the column.
    """
    declared = field.type.framework if isinstance(field.type, TensorType) else None
    if declared is None or declared is framework or framework.convertible(data) is not None:
        return framework, data
    try:
        return declared, to_framework(data, declared)
    except TensorError:
        return framework, data


def wrap_rows(field: Field, framework: Framework, rows: list[Any]) -> list[Any]:
    """Wrap TensorFlow tensors in quire's class if the field is annotated with it; return other tensors as they are."""
    if (
        framework.name != "tensorflow"
        or not isinstance(field.type, TensorType)
        or field.type.framework is not framework
    ):
        return rows
    plain = field.type._plain
    return rows if plain is NativeTensorFlow else [plain(row) for row in rows]


def element_positions(offsets: NDArray[np.int64], indices: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the positions of all elements of some rows, where row i has the elements offsets[i] to offsets[i + 1].

    The result counts up by one (`arange`) and jumps at each row from the end of the row before to the row's own start:
    the jump is `start - before`, where `before` is the number of elements of all rows before it in the result.
    """
    starts, sizes = offsets[indices], offsets[indices + 1] - offsets[indices]
    before = np.cumsum(sizes) - sizes
    return np.repeat(starts - before, sizes) + np.arange(int(sizes.sum()), dtype=np.int64)


# --- objects


class ObjectColumn(Column):
    """Python objects, such as dates, lists, unions and sparse tensors; None if missing.

    They are in an array of references, from which numpy selects rows faster than from a list.
    """

    __slots__ = ("objects",)
    objects: NDArray[np.object_]

    def __init__(self, field: Field, objects: list[Any] | NDArray[np.object_]) -> None:
        self.field, self.validity = field, None
        self.objects = objects if isinstance(objects, np.ndarray) else np.fromiter(objects, np.object_, len(objects))

    def __getattr__(self, name: str) -> NDArray[np.object_]:
        # Called for attributes that are not set: subclasses have other data, and make `objects` of it on first use.
        if name != "objects":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self.objects = np.fromiter(self.values(), np.object_, len(self))
        return self.objects

    def __len__(self) -> int:
        return len(self.objects)

    @property
    def nbytes(self) -> int:
        return _OBJECT_BYTES * len(self)

    def values(self) -> list[Any]:
        items: list[Any] = self.objects.tolist()
        return items

    def value(self, index: int) -> Any:
        return self.objects[index]

    def take(self, indices: NDArray[np.int64]) -> ObjectColumn:
        column = object.__new__(ObjectColumn)  # as in `TensorColumn.take`
        column.field, column.validity, column.objects = self.field, None, self.objects.take(indices)
        return column

    def slice(self, rows: slice) -> ObjectColumn:
        return ObjectColumn(self.field, self.objects[rows])

    def concat(self, others: Sequence[Any]) -> ObjectColumn | None:
        return ObjectColumn(self.field, np.concatenate([column.objects for column in (self, *others)]))

    def map_tensors(self, change: TensorMap) -> ObjectColumn:
        if self.field.kind not in _MAY_HOLD_TENSORS:
            return self
        items = self.values()
        frameworks = {tp: framework_of_type(tp) for tp in set(map(type, items))}
        pairs = [(frameworks[type(item)], item) for item in items]
        return ObjectColumn(self.field, [item if fw is None else change(fw, item)[1] for fw, item in pairs])

    def to_picklable(self, memo: dict[Any, Any]) -> Column:
        if not self.field.may_contain_tensors:
            return self
        items = super().to_picklable(memo).values()
        return ObjectColumn(self.field, to_picklable(items, memo))

    def valid_rows(self) -> NDArray[np.bool_]:
        return np.fromiter((item is not None for item in self.objects), np.bool_, len(self.objects))

    def payload(self) -> dict[str, Any]:
        return {"validity": None, "objects": self.values()}

    @classmethod
    def restore(cls, field: Field, payload: dict[str, Any]) -> ObjectColumn:
        return cls(field, payload["objects"])


class ListColumn(ObjectColumn):
    """The values of documents in the list they were gathered in, for an encoder that reads them once.

    It is what `stack` makes of values that it would only copy: an encoder writes tensors and texts into its own buffer.
    """

    __slots__ = ("_items",)

    def __init__(self, field: Field, items: list[Any]) -> None:
        self.field, self.validity, self._items = field, None, items

    def __len__(self) -> int:
        return len(self._items)

    def values(self) -> list[Any]:
        return self._items


class PackedColumn(ObjectColumn):
    """Texts or bytes in one buffer; Python objects are made when they are read.

    `data` is a contiguous buffer of bytes; row i has those from starts[i] to ends[i].
    """

    __slots__ = ("data", "ends", "starts")

    def __init__(
        self, field: Field, data: Any, starts: NDArray[np.int64], ends: NDArray[np.int64], validity: Validity = None
    ) -> None:
        Column.__init__(self, field, validity)
        self.data, self.starts, self.ends = data, starts, ends

    @classmethod
    def from_offsets(cls, field: Field, data: Any, offsets: NDArray[np.int64], validity: Validity = None) -> Self:
        """Make a column whose row i has the bytes from offsets[i] to offsets[i + 1]."""
        return cls(field, data, offsets[:-1], offsets[1:], validity)

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def nbytes(self) -> int:
        return len(self.data)

    def values(self) -> list[Any]:
        items, wrapper = self._read_items(), self.field.wrapper
        return items if wrapper is None else [None if item is None else wrapper(item) for item in items]

    def _read_items(self) -> list[Any]:
        is_text = self.field.kind is not FieldKind.BYTES
        if self._is_contiguous:
            data = memoryview(self.data)[int(self.starts[0]) : int(self.ends[-1])]
            whole: Any = str(data, "utf-8") if is_text else bytes(data)
            # With one byte for each character, a position in the bytes is one in the text: decode everything at once
            # and read piece after piece, which takes half the time of slicing each text.
            if len(whole) == len(data):
                read = (io.StringIO if is_text else io.BytesIO)(whole).read
                return self.mask_values([*map(read, (self.ends - self.starts).tolist())])
        view = memoryview(self.data)
        spans = zip(self.starts.tolist(), self.ends.tolist(), strict=True)
        return self.mask_values([str(view[a:b], "utf-8") if is_text else bytes(view[a:b]) for a, b in spans])

    def value(self, index: int) -> Any:
        return self.slice(slice(index, index + 1)).values()[0]

    def take(self, indices: NDArray[np.int64]) -> ObjectColumn:
        starts, ends = self.starts[indices], self.ends[indices]
        return PackedColumn(self.field, self.data, starts, ends, self._select_validity(indices))

    def slice(self, rows: slice) -> ObjectColumn:
        return PackedColumn(self.field, self.data, self.starts[rows], self.ends[rows], self._select_validity(rows))

    def valid_rows(self) -> NDArray[np.bool_]:
        return Column.valid_rows(self)

    @property
    def _is_contiguous(self) -> bool:
        """Whether each row starts where the row before it ends."""
        return len(self.starts) > 0 and bool((self.starts[1:] == self.ends[:-1]).all())

    def join_rows(self) -> tuple[Any, NDArray[np.int64]]:
        """Return the bytes of the rows in order, without gaps, and the offsets of the rows in them."""
        # Rows may be anywhere in the buffer, in any order: their sizes determine where they are in the result.
        offsets = np.zeros(len(self) + 1, np.int64)
        np.cumsum(self.ends - self.starts, out=offsets[1:])
        view = memoryview(self.data)
        if self._is_contiguous:
            start, end = int(self.starts[0]), int(self.ends[-1])
            return self.data if (start, end) == (0, len(view)) else view[start:end], offsets
        spans = zip(self.starts.tolist(), self.ends.tolist(), strict=True)
        return b"".join([view[a:b] for a, b in spans]), offsets

    def payload(self) -> dict[str, Any]:
        data, offsets = self.join_rows()
        return {"validity": self.validity, "data": data if isinstance(data, bytes) else bytes(data), "offsets": offsets}

    @classmethod
    def restore(cls, field: Field, payload: dict[str, Any]) -> Self:
        return cls.from_offsets(field, payload["data"], payload["offsets"], payload["validity"])


def pack(items: list[Any]) -> tuple[bytes, NDArray[np.int64]]:
    """Concatenate texts, or bytes, and return the bytes and the offsets of the items in them."""
    if not items or isinstance(items[0], bytes):
        data = b"".join(items)
    else:
        whole = "".join(items)
        data = whole.encode()
        if len(data) != len(whole):  # some characters take more than a byte
            items = [item.encode() for item in items]
    offsets = np.zeros(len(items) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, items), np.int64, len(items)), out=offsets[1:])
    return data, offsets
