"""Codecs of data for other libraries: every field as the Arrow type that they compute with, or an error.

Shards store what Arrow has no type for as messages of quire's wire format, and tensors as bytes. Data for other
libraries has lists of numbers, maps and timestamps instead. Some of these types depend on the values: the first values
of a column decide, and all others must fit.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from itertools import chain
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa

from quire.codec import to_wire_array
from quire.columns import Column, ObjectColumn, RaggedColumn, TensorColumn, Validity, validity_of
from quire.errors import CodecError, TensorError
from quire.schema import Field
from quire.storage._arrow_codec import KIND_KEY, NAIVE, UTC, ArrowCodec, to_offsets, validity_bitmap
from quire.storage._nested_codecs import OffsetsCodec
from quire.storage._row_locations import RowLocations
from quire.storage._tensor_codecs import dense_framework
from quire.tensors import common_dtype

if TYPE_CHECKING:
    from numpy.typing import NDArray

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_MICROSECOND = timedelta(microseconds=1)
_FIRST = (datetime.min.replace(tzinfo=timezone.utc) - _EPOCH) // _MICROSECOND
_LAST = (datetime.max.replace(tzinfo=timezone.utc) - _EPOCH) // _MICROSECOND
LISTABLE = re.compile(r"bool|u?int\d+|float(16|32|64)")
"""The dtypes that Arrow lists can have."""


class OutputCodec(ArrowCodec):
    """A codec that only encodes: rows of its arrays are never gathered by address."""

    __slots__ = ()

    def gather(self, rows: RowLocations) -> Column:
        raise TypeError(f"{self.path}: data for other libraries is read by its Arrow schema.")

    def locate_own(self, array: pa.Array) -> list[int]:
        raise TypeError(f"{self.path}: data for other libraries is read by its Arrow schema.")


class InferredCodec(OutputCodec):
    """A codec whose Arrow type depends on values; `inferred` is that type as soon as there was a value."""

    __slots__ = ("inferred",)

    def __init__(self, field: Field, path: str, arrow_type: pa.DataType) -> None:
        super().__init__(field, path, arrow_type)
        self.inferred: pa.DataType | None = None


class TimestampCodec(InferredCodec):
    """Datetimes as timestamps: without a zone, or with the zone that all of them have, or else in UTC.

    With `in_utc`, all times that have a zone are in UTC, so that the type does not depend on which zone it is.
    """

    __slots__ = ("in_utc",)

    def __init__(self, field: Field, path: str, *, in_utc: bool) -> None:
        super().__init__(field, path, NAIVE)
        self.in_utc = in_utc

    def field_of_type(self, arrow_type: pa.DataType) -> pa.Field:
        field = super().field_of_type(arrow_type)
        return field.with_metadata({KIND_KEY: "datetime"}) if arrow_type in (NAIVE, UTC) else field

    def encode(self, column: Column) -> pa.Array:
        values: list[datetime | None] = column.values()
        present = [value for value in values if value is not None]
        if self.inferred is None and present:
            self.inferred = self._infer(present)
        arrow_type = self.inferred or self.type
        for value in present:
            if (value.tzinfo is None) != (arrow_type.tz is None):
                kinds = ("have a", "has none") if value.tzinfo is None else ("have no", "has one")
                raise self.encode_error(
                    f"the first times {kinds[0]} time zone, and {value.isoformat()} {kinds[1]}. A column of timestamps "
                    "has one kind of time: give all of them a zone, or none."
                )
        if arrow_type.tz is None:
            naive = [None if value is None else value.replace(fold=0) for value in values]
            data = np.array(naive, "datetime64[us]").astype(np.int64)
        else:
            data = np.array([0 if value is None else self._since_epoch(value) for value in values], np.int64)
        return pa.Array.from_buffers(
            arrow_type, len(values), [validity_bitmap(validity_of(values)), pa.py_buffer(data)]
        )

    def _infer(self, values: Sequence[datetime]) -> pa.DataType:
        if values[0].tzinfo is None:
            return NAIVE
        # One zone for all rows: Arrow keeps it in the type. Times of several zones are the same moments in UTC.
        zones = {self._zone_name(value) for value in values}
        zone = zones.pop() if len(zones) == 1 and not self.in_utc else None
        return pa.timestamp("us", zone or "UTC")

    @staticmethod
    def _zone_name(value: datetime) -> str | None:
        """Return the name of a zone that Arrow knows; None if there is none."""
        if isinstance(value.tzinfo, ZoneInfo):
            return value.tzinfo.key
        offset = value.utcoffset()
        if offset is None or offset % timedelta(minutes=1):
            return None
        return value.strftime("%z")[:3] + ":" + value.strftime("%z")[3:5] if offset else "UTC"

    def _since_epoch(self, value: datetime) -> int:
        if value.utcoffset() is None:
            raise self.encode_error(f"the time zone of {value!r} has no offset from UTC.")
        since = (value - _EPOCH) // _MICROSECOND
        if not _FIRST <= since <= _LAST:
            raise self.encode_error(f"{value.isoformat()} is outside of the years 1 to 9999 in UTC.")
        return since


class TensorListCodec(InferredCodec):
    """Tensors of any shape as nested lists of numbers; all rows have one dtype and one number of axes.

    Lists of an axis whose size the field declares have a fixed size.
    """

    __slots__ = ()

    def __init__(self, field: Field, path: str) -> None:
        super().__init__(field, path, pa.null())

    @property
    def allows_nulls(self) -> bool:
        return True  # a column without values has the type null

    def encode(self, column: Column) -> pa.Array:
        flat, shapes, validity = self._flatten(column)
        if flat is None:
            return pa.nulls(len(column), self.inferred or self.type)
        if shapes.shape[1]:
            array = self._nest(pa.array(flat), shapes, validity)
        else:
            array = pa.array(flat, mask=None if validity is None else ~validity)
        if self.inferred is None:
            self.inferred = array.type
        elif array.type != self.inferred:
            raise self.encode_error(f"the first tensors are {self.inferred}, and others are {array.type}.")
        return array

    def _nest(self, items: pa.Array, shapes: NDArray[np.int64], validity: Validity) -> pa.Array:
        """Put lists around the elements of all tensors, from the last axis to the first."""
        axes = shapes.shape[1]
        # Axes whose size the field declares become lists of that size, which other libraries read faster.
        declared = self.field.spec.shape or (None,) * axes
        sizes = [size if isinstance(size, int) and size and len(declared) == axes else None for size in declared]
        for axis in reversed(range(axes)):
            # Axis k of a tensor has a list for each element of the axes before it.
            lists = shapes[:, :axis].prod(axis=1)
            bits = None if axis else validity_bitmap(validity)
            if len(sizes) == axes and sizes[axis] is not None:
                arrow_type = pa.list_(items.type, sizes[axis])
                items = pa.Array.from_buffers(arrow_type, int(lists.sum()), [bits], children=[items])
                continue
            if axis and ((lists == 0) & valid_rows(validity, len(shapes))).any():
                raise self.encode_error(
                    "a list without items has no lists in it that could have a size, so that the shape of a tensor "
                    "such as (0, 4) would be lost. Declare the size in the type of the field."
                )
            lengths = np.repeat(shapes[:, axis], lists)
            offsets = to_offsets(lengths)
            if offsets[-1] >= 1 << 31:
                raise self.encode_error("the tensors have 2,147,483,648 elements or more; convert fewer rows.")
            buffers = [bits, pa.py_buffer(offsets.astype(np.int32))]
            items = pa.Array.from_buffers(pa.list_(items.type), len(lengths), buffers, children=[items])
        return items

    def _flatten(self, column: Column) -> tuple[NDArray[Any] | None, NDArray[np.int64], Validity]:
        """Return the elements of all tensors, without a copy if the column has them, and the shape of each."""
        if isinstance(column, TensorColumn) and column.shapes is None and len(column):
            array = self._to_numpy(column.framework, column.data, "the batch")
            shapes = np.tile(np.array(array.shape[1:], np.int64), (len(array), 1))
            return array.reshape(-1), shapes, column.validity
        if isinstance(column, RaggedColumn) and column.validity is None and len({*map(len, column.shapes)}) == 1:
            flat = self._to_numpy(column.framework, column.flat, "the batch")
            return flat, np.array(column.shapes, np.int64).reshape(len(column), -1), None
        values = column.values()
        arrays: list[NDArray[Any] | None] = []
        for row, value in enumerate(values):
            if value is None:
                arrays.append(None)
                continue
            framework = dense_framework(self, row, value)
            arrays.append(self._to_numpy(framework, value, f"row {row}").reshape(framework.shape(value)))
        present = [array for array in arrays if array is not None]
        if not present:
            return None, np.zeros((len(values), 0), np.int64), None
        if len({array.ndim for array in present}) > 1:
            raise self.encode_error("the tensors have different numbers of axes, and Arrow has no type for them.")
        if len({array.dtype for array in present}) > 1:
            names = ", ".join(sorted({array.dtype.name for array in present}))
            raise self.encode_error(f"the tensors have several dtypes: {names}.")
        # Rows without a value: a list that is null has no items, a list of a fixed size has them nevertheless.
        missing = [size if isinstance(size, int) else 0 for size in self.field.spec.shape or ()]
        shape = missing if len(missing) == present[0].ndim else [0] * present[0].ndim
        empty = np.zeros(shape, present[0].dtype)
        rows = [empty if array is None else array for array in arrays]
        shapes = np.array([array.shape for array in rows], np.int64).reshape(len(rows), present[0].ndim)
        return np.concatenate([array.reshape(-1) for array in rows]), shapes, validity_of(values)

    def _to_numpy(self, framework: Any, value: Any, where: str) -> NDArray[Any]:
        name = framework.dtype(value)
        if not LISTABLE.fullmatch(name):
            raise self.encode_error(f"{where}: Arrow has no numbers of the dtype {name}.")
        declared = self.field.spec.dtype
        if declared is not None and name != declared:
            raise self.encode_error(f"{where}: the field has {common_dtype(declared).name}, got {name}.")
        try:
            return to_wire_array(framework.to_numpy(value))
        except (TensorError, CodecError, RuntimeError) as error:
            raise self.encode_error(f"{where}: {error}") from error


def valid_rows(validity: Validity, rows: int) -> NDArray[np.bool_]:
    """Return for each row whether it has a value."""
    return np.ones(rows, np.bool_) if validity is None else validity


class ValueListCodec(OffsetsCodec):
    """Lists, sets and tuples of any length, of values that have a codec."""

    __slots__ = ()

    def __init__(self, field: Field, path: str, item: ArrowCodec) -> None:
        super().__init__(field, path, item, item.arrow_field().with_name("item"))

    gather, locate_own = OutputCodec.gather, OutputCodec.locate_own

    def encode(self, column: Column) -> pa.Array:
        values = column.values()
        lists = [() if value is None else list(value) for value in values]
        items = self.item.encode(ObjectColumn(self.item.field, list(chain.from_iterable(lists))))
        return self.from_items(items, to_offsets([*map(len, lists)]), validity_of(values))


class MapCodec(OutputCodec):
    """Dicts as maps."""

    __slots__ = ("_key", "_value")

    def __init__(self, field: Field, path: str, key: ArrowCodec, value: ArrowCodec) -> None:
        self._key, self._value = key, value
        super().__init__(field, path, pa.map_(key.type, value.arrow_field().with_name("value")))

    @property
    def children(self) -> Sequence[ArrowCodec]:
        return self._key, self._value

    def encode(self, column: Column) -> pa.Array:
        dicts = [{} if value is None else value for value in column.values()]
        keys = self._key.encode(ObjectColumn(self._key.field, [key for each in dicts for key in each]))
        items = self._value.encode(ObjectColumn(self._value.field, [item for each in dicts for item in each.values()]))
        value_field = self._value.field_of_type(items.type).with_name("value")
        arrow_type = pa.map_(keys.type, value_field)
        entries = pa.Array.from_buffers(
            pa.struct([arrow_type.key_field, value_field]), len(keys), [None], children=[keys, items]
        )
        offsets = to_offsets([*map(len, dicts)])
        if offsets[-1] >= 1 << 31:
            raise self.encode_error("the dicts have 2,147,483,648 entries or more; convert fewer rows.")
        buffers = [validity_bitmap(validity_of(column.values())), pa.py_buffer(offsets.astype(np.int32))]
        return pa.Array.from_buffers(arrow_type, len(dicts), buffers, children=[entries])
