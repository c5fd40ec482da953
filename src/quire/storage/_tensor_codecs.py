"""Forms of tensors: of one shape, a run of bytes each; of any shape, bytes and the shape beside them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from quire.codec._tensors import plain_array
from quire.columns import Column, ObjectColumn, RaggedColumn, TensorColumn, Validity, validity_of
from quire.errors import CodecError, DecodeError, TensorError
from quire.schema import Field, FieldKind
from quire.storage._arrow_codec import (
    EXTENSION_METADATA,
    EXTENSION_NAME,
    ArrowCodec,
    BytesCodec,
    MessageCodec,
    TextCodec,
    address_of,
    clear_missing,
    mask_missing,
    validity_bitmap,
)
from quire.storage._memory import read_ahead
from quire.storage._nested_codecs import ListCodec
from quire.storage._row_locations import RowLocations
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


class TensorCodec(ArrowCodec):
    """Tensors of one dtype and shape; complex numbers too, which are tensors without an axis."""

    __slots__ = ("dtype", "shape", "storage", "width")

    def __init__(self, field: Field, path: str, dtype: str, shape: tuple[int, ...], storage: str = "fixed") -> None:
        self.dtype, self.shape, self.storage = common_dtype(dtype), shape, storage
        self.width = self.dtype.itemsize * math.prod(shape)
        super().__init__(field, path, _stored_type(self.dtype, shape, self.width, storage))

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
        data, validity = self._rows_of(column)
        if self.storage == "list":
            return _lists(data, self.type, validity)
        if self.storage == "binary":
            offsets = np.arange(len(data) + 1, dtype=np.int64) * self.width
            return BytesCodec(self.field, self.path).from_packed(data.reshape(-1).view(np.uint8), offsets, validity)
        return pa.Array.from_buffers(self.type, len(data), [validity_bitmap(validity), pa.py_buffer(data)])

    def _rows_of(self, column: Column) -> tuple[NDArray[Any], Validity]:
        """The elements of all rows, one behind the other."""
        if isinstance(column, TensorColumn) and column.shapes is None:
            array = self._plain(column.framework, column.data, "the batch")
            if array.shape[1:] == self.shape:
                return array, column.validity
        values = column.values()
        validity = validity_of(values)
        array = np.zeros((len(values), *self.shape), self.dtype)
        for row, value in enumerate(values):
            if value is None:
                continue
            framework = _dense_framework(self, row, value)
            if framework.shape(value) != self.shape:
                got = format_shape(framework.shape(value))
                raise self.fail(f"row {row}: expected a tensor of {format_shape(self.shape)}, got {got}.")
            array[row] = self._plain(framework, value, f"row {row}")
        return array, validity

    def _plain(self, framework: Framework, value: Any, where: str) -> NDArray[Any]:
        if framework.dtype(value) != self.dtype.name:
            raise self.fail(f"{where}: the shards hold {self.dtype.name}, got {framework.dtype(value)}.")
        try:
            return plain_array(framework.to_numpy(value))
        except (TensorError, CodecError, RuntimeError) as error:
            raise self.fail(error) from error

    def locate_own(self, array: pa.Array) -> list[int]:
        return [address_of(array.buffers()[1]) + array.offset * self.width]

    def own_data(self) -> list[tuple[int, int]]:
        return [(self.first + 1, self.width)]

    def gather(self, rows: RowLocations) -> Column:
        framework = rows.framework or _declared(self.field) or get_framework("numpy")
        data = rows.fixed(self.first + 1, self.width)
        there = rows.validity(self.first)
        clear_missing(data, there)
        array = data.view(self.dtype).reshape(len(rows), *self.shape) if self.width else self._empty(len(rows))
        return TensorColumn(self.field, framework.from_numpy(array), framework, there)

    def read_ahead(self, rows: RowLocations, counts: NDArray[np.int64]) -> None:
        """Let the system read `counts` rows from each of these on."""
        read_ahead(*rows.spans(self.first + 1, self.width, counts))

    def _empty(self, count: int) -> NDArray[Any]:
        return np.zeros((count, *self.shape), self.dtype)


class ComplexCodec(TensorCodec):
    """Complex numbers."""

    __slots__ = ()

    def __init__(self, field: Field, path: str) -> None:
        super().__init__(field, path, "complex128", ())

    def gather(self, rows: RowLocations) -> Column:
        data = rows.fixed(self.first + 1, self.width).view(self.dtype)[:, 0]
        return ObjectColumn(self.field, mask_missing(data.tolist(), rows.validity(self.first)))

    def encode(self, column: Column) -> pa.Array:
        values = column.values()
        validity = validity_of(values)
        data = np.array([0 if value is None else value for value in values], np.complex128)
        return pa.Array.from_buffers(self.type, len(values), [validity_bitmap(validity), pa.py_buffer(data)])


def _stored_type(dtype: np.dtype[Any], shape: tuple[int, ...], width: int, storage: str) -> pa.DataType:
    if storage == "binary":
        return pa.binary()
    if storage == "fixed":
        return pa.binary(width)
    arrow_type = pa.from_numpy_dtype(dtype)
    for size in reversed(shape):
        arrow_type = pa.list_(arrow_type, size)
    return arrow_type


def _lists(array: NDArray[Any], arrow_type: pa.DataType, validity: Validity) -> pa.Array:
    """Nested lists of one length each."""
    types = [arrow_type]
    while pa.types.is_fixed_size_list(types[-1]):
        types.append(types[-1].value_type)
    made = pa.array(array.reshape(-1), types[-1])
    for level in reversed(types[1:-1]):
        made = pa.Array.from_buffers(level, len(made) // level.list_size, [None], children=[made])
    if len(types) == 1:
        return pa.array(array, arrow_type, mask=None if validity is None else ~validity)
    return pa.Array.from_buffers(arrow_type, len(array), [validity_bitmap(validity)], children=[made])


def _dense_framework(codec: ArrowCodec, row: int, value: Any) -> Framework:
    framework = framework_of(value)
    if framework is None:
        raise codec.fail(f"row {row}: a {type(value).__name__} is no tensor.")
    if framework.is_sparse(value):
        raise codec.fail(f"row {row}: sparse tensors have no column here; store them dense, or in a dict.")
    return framework


def _declared(field: Field) -> Framework | None:
    framework: Framework | None = field.type.framework
    return framework


class RaggedTensorCodec(ArrowCodec):
    """Tensors of any shape; where the field does not say them, each row tells its dtype and framework too."""

    __slots__ = ("_data", "_dtype", "_names", "_shape")
    own_parts = 1

    def __init__(self, field: Field, path: str) -> None:
        self._data = BytesCodec(Field("data", FieldKind.BYTES, bytes), f"{path}.data")
        item = Field("item", FieldKind.SCALAR, int)
        self._shape = ListCodec(Field("shape", FieldKind.LIST, list, items=(item,)), f"{path}.shape")
        self._dtype = field.spec.dtype
        more = ["dtype"] if self._dtype is None else []
        more += ["framework"] if field.type.framework is None else []
        self._names = {name: TextCodec(Field(name, FieldKind.TEXT, str), f"{path}.{name}") for name in more}
        codecs = [self._data, self._shape, *self._names.values()]
        super().__init__(field, path, pa.struct([pa.field(codec.field.name, codec.type) for codec in codecs]))

    @property
    def metadata(self) -> dict[str, str]:
        return {EXTENSION_NAME: "quire.ragged_tensor", EXTENSION_METADATA: json.dumps({"dtype": self._dtype})}

    @property
    def children(self) -> tuple[ArrowCodec, ...]:
        return (self._data, self._shape, *self._names.values())

    @property
    def is_large(self) -> bool:
        return True  # no one knows

    def child_arrays(self, array: pa.Array) -> list[pa.Array]:
        return [array.field(i) for i in range(array.type.num_fields)]

    def locate_own(self, array: pa.Array) -> list[int]:
        return []

    def encode(self, column: Column) -> pa.Array:
        validity = column.valid_rows()
        shapes, data, offsets, names = self._parts(column)
        inner: list[Column] = [
            ObjectColumn(self._shape.field, [list(shape) for shape in shapes]),
            *(ObjectColumn(codec.field, names[name]) for name, codec in self._names.items()),
        ]
        arrays = [codec.encode(part) for codec, part in zip(self.children[1:], inner, strict=True)]
        content = self._data.from_packed(data, offsets, None)
        marks = None if validity.all() else validity_bitmap(validity)
        return pa.Array.from_buffers(self.type, len(shapes), [marks], children=[content, *arrays])

    def _parts(self, column: Column) -> tuple[list[Any], Any, NDArray[np.int64], dict[str, list[str]]]:
        """The shapes of all rows, their bytes one behind the other and where each ends, their dtypes and frameworks."""
        rows = self._plain_rows(column)
        shapes = [() if array is None else array.shape for _, array in rows]
        sizes = [0 if array is None else array.nbytes for _, array in rows]
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])
        data = b"".join([memoryview(a.reshape(-1).view(np.uint8)) for _, a in rows if a is not None and a.size])
        names = {
            "dtype": ["" if array is None else array.dtype.name for _, array in rows],
            "framework": [framework for framework, _ in rows],
        }
        return shapes, data, offsets, names

    def _plain_rows(self, column: Column) -> list[tuple[str, Any]]:
        values = enumerate(column.values())
        return [("", None) if value is None else self._plain(row, value) for row, value in values]

    def _plain(self, row: int, value: Any) -> tuple[str, NDArray[Any]]:
        framework = _dense_framework(self, row, value)
        if self._dtype is not None and framework.dtype(value) != self._dtype:
            raise self.fail(f"row {row}: the shards hold {self._dtype}, got {framework.dtype(value)}.")
        try:
            array = framework.to_numpy(value)
            return framework.name, plain_array(array).reshape(array.shape)  # which makes an axis where there is none
        except (TensorError, CodecError, RuntimeError) as error:
            raise self.fail(f"row {row}: {error}") from error

    def gather(self, rows: RowLocations) -> Column:
        packed = self._data.packed(rows)
        shapes = [tuple(shape or ()) for shape in self._shape.gather(rows).values()]
        names = {name: codec.gather(rows).values() for name, codec in self._names.items()}
        there = rows.validity(self.first)
        frameworks: Any = names.get("framework")
        dtypes: Any = names.get("dtype")
        if there is None and len(set(frameworks or ())) < 2 and len(set(dtypes or ())) < 2 and len(rows):
            return self._whole(packed.data, shapes, frameworks, dtypes)
        bounds = zip(packed.starts.tolist(), packed.ends.tolist(), strict=True)
        values = [
            self._tensor(packed.data[a:b], shapes[row], frameworks and frameworks[row], dtypes and dtypes[row])
            if there is None or there[row]
            else None
            for row, (a, b) in enumerate(bounds)
        ]
        return ObjectColumn(self.field, values)

    def _whole(self, data: bytes, shapes: list[Any], frameworks: Any, dtypes: Any) -> Column:
        """One column of rows of one dtype: stacked if they have one shape, else ragged."""
        framework = self._framework(frameworks and frameworks[0])
        flat = self._flat(data, dtypes and dtypes[0], shapes)
        if len(set(shapes)) == 1:
            stacked = flat.reshape(len(shapes), *shapes[0])
            return TensorColumn(self.field, framework.from_numpy(stacked), framework)
        return RaggedColumn(self.field, framework.from_numpy(flat), framework, shapes)

    def _tensor(self, data: bytes, shape: Any, framework: str | None, dtype: str | None) -> Any:
        flat = self._flat(data, dtype, [shape])
        return self._framework(framework).from_numpy(flat.reshape(shape))

    def _flat(self, data: bytes, dtype: str | None, shapes: list[Any]) -> NDArray[Any]:
        """The elements, as many as the shapes ask for."""
        numpy_dtype = self._numpy_dtype(dtype)
        count = sum(math.prod(shape) for shape in shapes)
        if count * numpy_dtype.itemsize != len(data) or any(size < 0 for shape in shapes for size in shape):
            raise DecodeError(f"{self.path}: the shapes of the tensors do not fit their {len(data):,} bytes.")
        return np.frombuffer(bytearray(data), numpy_dtype) if data else np.zeros(count, numpy_dtype)

    def _framework(self, name: str | None) -> Framework:
        declared = _declared(self.field)
        if declared is None and name not in FRAMEWORKS:
            raise DecodeError(f"{self.path}: {name!r} is not a framework of stored tensors.")
        return declared or stored_framework(name or "numpy")

    def _numpy_dtype(self, name: str | None) -> np.dtype[Any]:
        """The dtype of a row; what the data names may be anything."""
        try:
            found = common_dtype(self._dtype or name or "")
        except (TensorError, ValueError) as error:
            raise DecodeError(f"{self.path}: {error}") from error
        if found.hasobject or found.names is not None or found.subdtype is not None:
            raise DecodeError(f"{self.path}: {name!r} is not a dtype of stored tensors.")
        return found


def has_mixed_tensors(codecs: Sequence[ArrowCodec]) -> bool:
    """Whether tensors may come in another framework than was asked for: those that say themselves what they are of."""
    return any(
        isinstance(codec, (RaggedTensorCodec, MessageCodec)) or has_mixed_tensors(codec.children) for codec in codecs
    )
