"""Codecs of tensors: of one shape, as bytes of one length; of any shape, as bytes with their shape next to them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from quire._lowlevel.addresses import read_ahead
from quire.codec import to_wire_array
from quire.columns import Column, ObjectColumn, RaggedColumn, TensorColumn, Validity, validity_of
from quire.errors import CodecError, DecodeError, TensorError
from quire.schema import Field, FieldKind
from quire.storage._arrow_codec import (
    EXTENSION_METADATA,
    EXTENSION_NAME,
    ArrowCodec,
    BytesCodec,
    TextCodec,
    address_of,
    array_validity,
    clear_missing,
    mask_missing,
    to_offsets,
    validity_bitmap,
)
from quire.storage._nested_codecs import ListCodec
from quire.storage._row_locations import FixedRows, RowLocations
from quire.tensors import (
    FRAMEWORKS,
    Framework,
    common_dtype,
    format_shape,
    framework_of,
    get_framework,
    stored_framework,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray


_LARGE = 2048
"""Tensors of at least this number of bytes are gathered for one batch at a time, and read ahead."""


class TensorCodec(ArrowCodec):
    """Tensors of one dtype and shape."""

    __slots__ = ("dtype", "shape", "storage", "width")

    def __init__(self, field: Field, path: str, dtype: str, shape: tuple[int, ...], storage: str = "fixed") -> None:
        self.dtype, self.shape, self.storage = common_dtype(dtype), shape, storage
        self.width = self.dtype.itemsize * math.prod(shape)
        super().__init__(field, path, self._stored_type())

    def _stored_type(self) -> pa.DataType:
        if self.storage == "binary":
            return pa.binary()
        if self.storage == "fixed":
            return pa.binary(self.width)
        arrow_type = pa.from_numpy_dtype(self.dtype)
        for size in reversed(self.shape):
            arrow_type = pa.list_(arrow_type, size)
        return arrow_type

    @property
    def metadata(self) -> dict[str, str] | None:
        if self.storage == "list":
            return None
        details = {"dtype": self.dtype.name, "shape": list(self.shape)}
        return {EXTENSION_NAME: "quire.tensor", EXTENSION_METADATA: json.dumps(details)}

    @property
    def is_large(self) -> bool:
        return self.width >= _LARGE

    def encode(self, column: Column) -> pa.Array:
        data, validity = self._stack(column)
        if self.storage == "list":
            return self._nest(data, validity)
        if self.storage == "binary":
            offsets = np.arange(len(data) + 1, dtype=np.int64) * self.width
            return BytesCodec(self.field, self.path).from_packed(data.reshape(-1).view(np.uint8), offsets, validity)
        return pa.Array.from_buffers(self.type, len(data), [validity_bitmap(validity), pa.py_buffer(data)])

    def _nest(self, array: NDArray[Any], validity: Validity) -> pa.Array:
        """Return an array of nested fixed-size lists: the innermost level first, then one level around another."""
        if not self.shape:
            return pa.array(array, self.type, mask=None if validity is None else ~validity)
        types = [self.type]
        while pa.types.is_fixed_size_list(types[-1]):
            types.append(types[-1].value_type)
        level = pa.array(array.reshape(-1), types[-1])
        for level_type in reversed(types[1:-1]):
            level = pa.Array.from_buffers(level_type, len(level) // level_type.list_size, [None], children=[level])
        return pa.Array.from_buffers(self.type, len(array), [validity_bitmap(validity)], children=[level])

    def _stack(self, column: Column) -> tuple[NDArray[Any], Validity]:
        """Return the tensors of all rows as one array, without a copy where the column has it."""
        # Columns of batches have one shape already. Others, of documents or of padded tensors, are copied row by row;
        # zeros stand where a row has no value.
        if isinstance(column, TensorColumn) and column.shapes is None:
            array = self._to_numpy(column.framework, column.data, "the batch")
            if array.shape[1:] == self.shape:
                return array, column.validity
        values = column.values()
        array = np.zeros((len(values), *self.shape), self.dtype)
        for row, value in enumerate(values):
            if value is None:
                continue
            framework = dense_framework(self, row, value)
            if framework.shape(value) != self.shape:
                shape = format_shape(framework.shape(value))
                raise self.encode_error(f"row {row}: expected a tensor of {format_shape(self.shape)}, got {shape}.")
            array[row] = self._to_numpy(framework, value, f"row {row}")
        return array, validity_of(values)

    def from_lists(self, array: pa.Array) -> pa.Array | None:
        """Return nested lists of one length, or Arrow's tensors, as bytes without a copy; None if they do not fit."""
        if isinstance(array.type, pa.FixedShapeTensorType):
            if tuple(array.type.shape) != self.shape or array.type.permutation not in (None, [*range(len(self.shape))]):
                return None
            array, sizes = array.storage, [math.prod(self.shape)]
        else:
            sizes = list(self.shape)
        validity = array_validity(array)
        # Go down one list per axis. A slice of a list array shares its items, so each level is cut to the items of the
        # rows above. Missing rows are fine, as they have items nevertheless; a missing list within a tensor is not.
        level, is_outer = array, True
        for size in sizes:
            if not pa.types.is_fixed_size_list(level.type) or level.type.list_size != size:
                return None
            if level.null_count and not is_outer:
                return None
            level, is_outer = level.values.slice(level.offset * size, len(level) * size), False
        # Booleans do not fit: Arrow has bits for them, and a tensor bytes.
        is_number = pa.types.is_integer(level.type) or pa.types.is_floating(level.type)
        is_own = is_number and np.dtype(level.type.to_pandas_dtype()) == self.dtype
        if self.storage != "fixed" or is_outer or level.null_count or not is_own:
            return None
        width = self.dtype.itemsize
        data = level.buffers()[1].slice(level.offset * width, len(level) * width)
        return pa.Array.from_buffers(self.type, len(array), [validity_bitmap(validity), data])

    def _to_numpy(self, framework: Framework, value: Any, where: str) -> NDArray[Any]:
        if framework.dtype(value) != self.dtype.name:
            raise self.encode_error(f"{where}: the shards hold {self.dtype.name}, got {framework.dtype(value)}.")
        try:
            return to_wire_array(framework.to_numpy(value))
        except (TensorError, CodecError, RuntimeError) as error:
            raise self.encode_error(error) from error

    def locate_own(self, array: pa.Array) -> list[int]:
        # A reader's layout always has the storage 'fixed': data in another storage is converted when a shard is opened.
        return [address_of(array.buffers()[1]) + array.offset * self.width]

    def own_data_parts(self) -> list[tuple[int, int]]:
        return [(self.first + 1, self.width)]

    def gather(self, rows: RowLocations) -> Column:
        [column] = self.gather_parts(rows, [slice(None)])
        return column

    def gather_parts(self, rows: RowLocations, spans: Iterable[slice]) -> Iterator[Column]:
        framework = rows.framework or self.field.type.framework or get_framework("numpy")
        # Addresses and validity are computed for all spans at once; the tensors are copied span by span, because those
        # of all batches would take too much memory.
        fixed = FixedRows(rows, self.first + 1, self.width)
        all_validity = rows.validity(self.first)
        for span in spans:
            data = fixed.copy(span)
            validity = None if all_validity is None or all_validity[span].all() else all_validity[span]
            clear_missing(data, validity)
            shape = (len(data), *self.shape)
            array = data.view(self.dtype).reshape(shape) if self.width else np.zeros(shape, self.dtype)
            yield TensorColumn(self.field, framework.from_numpy(array), framework, validity)
            del data, array  # so that the caller alone decides when the memory is used again

    def read_ahead(self, rows: RowLocations, counts: NDArray[np.int64]) -> None:
        """Let the system read `counts` rows from each of these on."""
        read_ahead(rows.part(self.first + 1) + rows.positions * self.width, counts * self.width)


class ComplexCodec(TensorCodec):
    """Complex numbers as tensors without an axis."""

    __slots__ = ()

    def __init__(self, field: Field, path: str) -> None:
        super().__init__(field, path, "complex128", ())

    def gather(self, rows: RowLocations) -> Column:
        data = rows.gather_fixed(self.first + 1, self.width).view(self.dtype)[:, 0]
        return ObjectColumn(self.field, mask_missing(data.tolist(), rows.validity(self.first)))

    def encode(self, column: Column) -> pa.Array:
        values = column.values()
        data = np.array([0 if value is None else value for value in values], np.complex128)
        buffers = [validity_bitmap(validity_of(values)), pa.py_buffer(data)]
        return pa.Array.from_buffers(self.type, len(values), buffers)


def dense_framework(codec: ArrowCodec, row: int, value: Any) -> Framework:
    """Return the framework of the dense tensor in a row, or raise an error."""
    framework = framework_of(value)
    if framework is None:
        raise codec.encode_error(f"row {row}: a {type(value).__name__} is not a tensor.")
    if framework.is_sparse(value):
        raise codec.encode_error(f"row {row}: sparse tensors cannot be stored; store them dense, or in a dict.")
    return framework


class RaggedTensorCodec(ArrowCodec):
    """Tensors of any shape as a struct: the bytes, the shape, and the dtype and framework unless the field has them."""

    __slots__ = ("data", "dtype", "dtypes", "frameworks", "shape")
    own_parts = 1
    stores_framework = True

    def __init__(self, field: Field, path: str) -> None:
        self.data = BytesCodec(Field("data", FieldKind.BYTES, bytes), f"{path}.data")
        item = Field("item", FieldKind.SCALAR, int)
        self.shape = ListCodec(Field("shape", FieldKind.LIST, list, items=(item,)), f"{path}.shape")
        self.dtype = field.spec.dtype
        """The dtype of all rows; None if each row has its own, which `dtypes` reads."""
        self.dtypes = _name_codec("dtype", path) if self.dtype is None else None
        self.frameworks = _name_codec("framework", path) if field.type.framework is None else None
        super().__init__(field, path, pa.struct([pa.field(c.field.name, c.type) for c in self.children]))

    @property
    def metadata(self) -> dict[str, str]:
        return {EXTENSION_NAME: "quire.ragged_tensor", EXTENSION_METADATA: json.dumps({"dtype": self.dtype})}

    @property
    def children(self) -> tuple[ArrowCodec, ...]:
        names = [codec for codec in (self.dtypes, self.frameworks) if codec is not None]
        return (self.data, self.shape, *names)

    @property
    def is_large(self) -> bool:
        return True  # the field does not say

    def child_arrays(self, array: pa.Array) -> list[pa.Array]:
        return [array.field(i) for i in range(array.type.num_fields)]

    def locate_own(self, array: pa.Array) -> list[int]:
        return []

    def encode(self, column: Column) -> pa.Array:
        rows: list[tuple[str, Any]] = [
            ("", None) if value is None else self._to_numpy(row, value) for row, value in enumerate(column.values())
        ]
        # Views are joined, so the elements of each tensor are copied once. An array without elements has no view.
        sizes = [0 if array is None else array.nbytes for _, array in rows]
        offsets = to_offsets(sizes)
        data = b"".join([memoryview(a.reshape(-1).view(np.uint8)) for _, a in rows if a is not None and a.size])
        shapes = [[] if array is None else list(array.shape) for _, array in rows]
        arrays = [
            self.data.from_packed(data, offsets, None),
            self.shape.encode(ObjectColumn(self.shape.field, shapes)),
        ]
        if self.dtypes is not None:
            dtypes = ["" if array is None else array.dtype.name for _, array in rows]
            arrays.append(self.dtypes.encode(ObjectColumn(self.dtypes.field, dtypes)))
        if self.frameworks is not None:
            arrays.append(self.frameworks.encode(ObjectColumn(self.frameworks.field, [name for name, _ in rows])))
        validity = column.valid_rows()
        bits = None if validity.all() else validity_bitmap(validity)
        return pa.Array.from_buffers(self.type, len(rows), [bits], children=arrays)

    def _to_numpy(self, row: int, value: Any) -> tuple[str, NDArray[Any]]:
        """Return the name of the framework of a tensor, and the tensor as an array of numpy."""
        framework = dense_framework(self, row, value)
        if self.dtype is not None and framework.dtype(value) != self.dtype:
            raise self.encode_error(f"row {row}: the shards hold {self.dtype}, got {framework.dtype(value)}.")
        try:
            array = framework.to_numpy(value)
            return framework.name, to_wire_array(array).reshape(array.shape)  # to_wire_array adds an axis to a scalar
        except (TensorError, CodecError, RuntimeError) as error:
            raise self.encode_error(f"row {row}: {error}") from error

    def gather(self, rows: RowLocations) -> Column:
        packed = self.data.gather_packed(rows)
        shapes = self.gather_shapes(rows)
        dtypes: Any = None if self.dtypes is None else self.dtypes.gather(rows).values()
        frameworks: Any = None if self.frameworks is None else self.frameworks.gather(rows).values()
        validity = rows.validity(self.first)
        if validity is None and len(set(frameworks or ())) < 2 and len(set(dtypes or ())) < 2 and len(rows):
            # One dtype and framework: the rows are stacked if they have one shape, else ragged.
            framework = self._framework(frameworks and frameworks[0])
            flat = self._elements(packed.data, dtypes and dtypes[0], shapes)
            if len(set(shapes)) == 1:
                stacked = flat.reshape(len(shapes), *shapes[0])
                return TensorColumn(self.field, framework.from_numpy(stacked), framework)
            return RaggedColumn(self.field, framework.from_numpy(flat), framework, shapes)
        values: list[Any] = [None] * len(rows)
        for row, (start, end) in enumerate(zip(packed.starts.tolist(), packed.ends.tolist(), strict=True)):
            if validity is None or validity[row]:
                flat = self._elements(packed.data[start:end], dtypes and dtypes[row], [shapes[row]])
                values[row] = self._framework(frameworks and frameworks[row]).from_numpy(flat.reshape(shapes[row]))
        return ObjectColumn(self.field, values)

    def gather_shapes(self, rows: RowLocations) -> list[tuple[int, ...]]:
        """Copy the shapes of the tensors."""
        return [tuple(shape or ()) for shape in self.shape.gather(rows).values()]

    def _elements(self, data: bytes, dtype: str | None, shapes: Sequence[tuple[int, ...]]) -> NDArray[Any]:
        """Return the elements of tensors, whose number must be that of the shapes."""
        numpy_dtype = self._numpy_dtype(dtype)
        count = sum(math.prod(shape) for shape in shapes)
        if count * numpy_dtype.itemsize != len(data) or any(size < 0 for shape in shapes for size in shape):
            raise DecodeError(f"{self.path}: the shapes of the tensors do not fit their {len(data):,} bytes.")
        # A bytearray, because arrays of immutable bytes are read-only, and users change tensors in place.
        return np.frombuffer(bytearray(data), numpy_dtype) if data else np.zeros(count, numpy_dtype)

    def _framework(self, name: str | None) -> Framework:
        declared: Framework | None = self.field.type.framework
        if declared is None and name not in FRAMEWORKS:
            raise DecodeError(f"{self.path}: {name!r} is not a framework of stored tensors.")
        return declared or stored_framework(name or "numpy")

    def _numpy_dtype(self, name: str | None) -> np.dtype[Any]:
        """Return the dtype of a row. The name comes from the data, and may be anything."""
        try:
            dtype = common_dtype(self.dtype or name or "")
        except (TensorError, ValueError) as error:
            raise DecodeError(f"{self.path}: {error}") from error
        if dtype.hasobject or dtype.names is not None or dtype.subdtype is not None:
            raise DecodeError(f"{self.path}: {name!r} is not a dtype of stored tensors.")
        return dtype


def _name_codec(name: str, path: str) -> TextCodec:
    return TextCodec(Field(name, FieldKind.TEXT, str), f"{path}.{name}")


def has_mixed_tensors(codecs: Sequence[ArrowCodec]) -> bool:
    """Whether rows may have tensors of another framework than a reader asks for, because each row names its own."""
    return any(codec.stores_framework or has_mixed_tensors(codec.children) for codec in codecs)
