"""Codecs between columns and Arrow arrays: the base class, and the codecs of fields that are not nested.

`quire.storage._layout` chooses the codec of a field. A codec knows the Arrow type of its field, turns a column into an
array (`encode`), and copies rows of arrays into a column (`gather`).
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum
from importlib import import_module
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar
from uuid import UUID
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import numpy as np
import pyarrow as pa
from pydantic_core import TzInfo

from quire import codec as wire
from quire.columns import (
    Column,
    ObjectColumn,
    PackedColumn,
    ScalarColumn,
    Validity,
    pack,
    validate_values,
    validity_of,
)
from quire.errors import CodecError, ColumnError, DecodeError, EncodeError
from quire.schema import Field, FieldKind, Schema
from quire.storage._block_table import count_nodes
from quire.storage._row_locations import RowLocations
from quire.tensors import get_framework

if TYPE_CHECKING:
    from numpy.typing import NDArray


EXTENSION_NAME, EXTENSION_METADATA = "ARROW:extension:name", "ARROW:extension:metadata"
"""The keys of an Arrow field's metadata where codecs keep what the Arrow type does not say."""
KIND_KEY = "quire.kind"
"""The key of an Arrow field's metadata that says which kind of field wrote values of a plain Arrow type.

Such values need no validation. It is not an extension name: some tools, such as polars, do not compute with the values
of extension types.
"""


class ArrowCodec(ABC):
    """Converts one field between columns and Arrow arrays.

    Gathering does not go through Arrow. Every array is described by a few integers, its *parts*: the addresses of its
    buffers, and the sizes that indexes into them are checked against. `locate` returns the parts of an array, and an
    `AddressTable` holds those of many record batches, so that the rows of any number of files are gathered by address
    arithmetic in one call. `first` is the number of the codec's first part, which is always the validity: the address
    of its first bit, counted in bits, or 0 if no row is null.
    """

    __slots__ = ("field", "first", "path", "type")
    own_parts = 2
    """The number of parts of the codec itself, without its children."""
    needs_extension: ClassVar[bool] = False
    """Whether data of the same Arrow type means something else unless it has the extension name of this codec."""
    stores_framework: ClassVar[bool] = False
    """Whether rows may name the framework of their tensors, which then differs from the one that a reader asks for."""

    def __init__(self, field: Field, path: str, arrow_type: pa.DataType) -> None:
        self.field, self.path, self.type, self.first = field, path, arrow_type, 0

    @abstractmethod
    def encode(self, column: Column) -> pa.Array:
        """Return the column as an Arrow array that shares its memory where it can."""

    @abstractmethod
    def gather(self, rows: RowLocations) -> Column:
        """Copy rows into a column."""

    def gather_parts(self, rows: RowLocations, spans: Iterable[slice]) -> Iterator[Column]:
        """Copy several spans of rows, each when its column is needed."""
        return (self.gather(rows.select(span)) for span in spans)

    @abstractmethod
    def locate_own(self, array: pa.Array) -> list[int]:
        """Return the parts of an array after its validity, without those of its children."""

    @property
    def children(self) -> Sequence[ArrowCodec]:
        """The codecs of nested arrays."""
        return ()

    def child_arrays(self, array: pa.Array) -> list[pa.Array]:
        """Return the nested arrays, one for each child."""
        return []

    @property
    def is_large(self) -> bool:
        """Whether rows are so large that gathering them for several batches at once does not pay."""
        return any(child.is_large for child in self.children)

    @property
    def keeps_order(self) -> bool:
        """Whether values compare as the stored ones do, so that the statistics of a row group apply to them."""
        return False

    def to_statistics(self, value: Any) -> list[Any]:
        """Return a value of a query in the forms that the statistics of a row group may have."""
        return [value]

    @property
    def metadata(self) -> dict[str, str] | None:
        """The metadata of the Arrow field."""
        return None

    @property
    def allows_nulls(self) -> bool:
        """Whether rows may have no value; None is a value of a field of `Any`, also as a member of a union."""
        field = self.field
        members = field.items if field.kind is FieldKind.UNION else (field,)
        return field.nullable or any(member.kind is FieldKind.ANY for member in members)

    def arrow_field(self) -> pa.Field:
        """Return the field of the Arrow schema."""
        return pa.field(self.field.name, self.type, nullable=self.allows_nulls, metadata=self.metadata)

    def field_of_type(self, arrow_type: pa.DataType) -> pa.Field:
        """Return the field of the Arrow schema for data in one of the types that the codec can read."""
        field = self.arrow_field()
        return field if field.type == arrow_type else field.with_type(arrow_type)

    def to_own_type(self, array: pa.Array) -> pa.Array:
        """Convert an array of a type that the codec can read to its own type."""
        return array

    def can_read(self, field: pa.Field) -> bool:
        """Whether an Arrow field needs no conversion: it has the type, and no extension name of another codec."""
        extension = read_extension(field)
        # Data of other tools has no extension name, and is read if its type alone says what it is.
        is_own = extension == read_extension(self.arrow_field()) or (extension is None and not self.needs_extension)
        return bool(field.type == self.type) and is_own

    def field_nodes(self, arrow_type: pa.DataType, first: int) -> list[int]:
        """Return the numbers of the Arrow field nodes that the codec reads, if `first` is that of its own."""
        return list(range(first, first + count_nodes(arrow_type)))

    def assign_parts(self, first: int) -> int:
        """Number the parts of the codec and its children from `first` on, and return the next free number."""
        self.first = first
        first += self.own_parts
        for child in self.children:
            first = child.assign_parts(first)
        return first

    def own_data_parts(self) -> list[tuple[int, int]]:
        """Return the parts that may be verified piece by piece, with the bytes of a row (0 if rows differ in size).

        Only `RowLocations.gather_fixed` and `gather_ranges` may read them: these verify the pieces that they read.
        """
        return []

    def data_parts(self) -> list[tuple[int, int]]:
        """Return the `own_data_parts` of the codec and of its children."""
        return [*self.own_data_parts(), *(part for child in self.children for part in child.data_parts())]

    def locate(self, array: pa.Array) -> list[int]:
        """Return the parts of an array and of those nested in it."""
        # A slice of an array shares its buffers, so every address includes the offset of the slice. Validity is counted
        # in bits, because a slice may begin within a byte. Bits that say that all rows are valid are not read at all.
        bits = array.buffers()[0]
        has_nulls = bits is not None and array.null_count
        parts = [address_of(bits) * 8 + array.offset if has_nulls else 0, *self.locate_own(array)]
        for child, nested in zip(self.children, self.child_arrays(array), strict=True):
            parts += child.locate(nested)
        return parts

    def encode_error(self, reason: object) -> EncodeError:
        """Return the error about a value that cannot be stored."""
        return EncodeError(f"{self.path}: {reason}")


def read_extension(field: pa.Field) -> tuple[str, Any] | None:
    """Return the extension name and metadata of a field that quire wrote; None for other fields."""
    metadata = field.metadata or {}
    name = metadata.get(EXTENSION_NAME.encode(), b"").decode("utf-8", "replace")
    if not name.startswith("quire."):
        return None
    try:
        return name, json.loads(metadata.get(EXTENSION_METADATA.encode(), b"null"))
    except ValueError as error:
        raise DecodeError(f"{field.name}: the metadata of the Arrow field is not JSON.") from error


def read_kind(field: pa.Field) -> str:
    """Return the kind of field that wrote the values of an Arrow field; empty if other tools wrote them."""
    kind: bytes = (field.metadata or {}).get(KIND_KEY.encode(), b"")
    return kind.decode("utf-8", "replace")


def address_of(buffer: pa.Buffer | None) -> int:
    """Return the address of a buffer; 0 if there is none."""
    return 0 if buffer is None else int(buffer.address)


def validity_bitmap(validity: Validity) -> pa.Buffer | None:
    """Return validity as an Arrow bitmap."""
    return None if validity is None else pa.py_buffer(np.packbits(validity, bitorder="little"))


def array_validity(array: pa.Array) -> Validity:
    """Return which rows of an array have a value; None if all have."""
    return np.asarray(array.is_valid()) if array.null_count else None


def to_offsets(sizes: Any) -> NDArray[np.int64]:
    """Return where each row begins if rows of these sizes are concatenated, and at last where all of them end."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])


def mask_missing(values: list[Any], validity: Validity) -> list[Any]:
    """Return the values, with None in rows that have none."""
    if validity is None:
        return values
    return [value if valid else None for value, valid in zip(values, validity.tolist(), strict=True)]


def clear_missing(data: NDArray[Any], validity: Validity) -> None:
    """Set rows without a value to zero: other writers leave anything in their place."""
    if validity is not None:
        data[~validity] = 0


def arrow_compute() -> Any:
    """Import Arrow's compute functions, which takes longer than opening a dataset of quire, where none is needed."""
    return import_module("pyarrow.compute")


def is_list_type(arrow_type: pa.DataType) -> bool:
    """Whether a type is one of Arrow's lists: of any length, of long ones, or of a fixed length."""
    types = pa.types
    return bool(types.is_list(arrow_type) or types.is_large_list(arrow_type) or types.is_fixed_size_list(arrow_type))


def _first_refused(values: list[Any], arrow_type: pa.DataType) -> str:
    """Return the first value that Arrow does not take, in brackets."""
    for value in values:
        try:
            pa.array([value], arrow_type)
        except (pa.ArrowException, OverflowError, TypeError):
            return f" ({value!r:.60})"
    return ""


# --- values of a fixed width


class NumberCodec(ArrowCodec):
    """Numbers as int64, float64 or bits."""

    __slots__ = ("number_type",)
    types: ClassVar = {int: (pa.int64(), np.int64), float: (pa.float64(), np.float64), bool: (pa.bool_(), np.bool_)}

    def __init__(self, field: Field, path: str, number_type: type | None = None) -> None:
        self.number_type: type = number_type or field.type
        super().__init__(field, path, self.types[self.number_type][0])

    @property
    def keeps_order(self) -> bool:
        return True

    def encode(self, column: Column) -> pa.Array:
        if isinstance(column, ScalarColumn):  # an array already, whose memory Arrow shares
            array = column.framework.to_numpy(column.data)
            mask = None if column.validity is None else ~column.validity
            return pa.array(np.ascontiguousarray(array), self.type, mask=mask)
        values = column.values()
        try:
            return pa.array(values, self.type)
        except (pa.ArrowException, OverflowError, TypeError) as error:
            raise self.encode_error(
                "numbers of more than 64 bits, or of other types, cannot be stored as numbers"
                f"{_first_refused(values, self.type)}. A field of Decimal or str holds any number."
            ) from error

    def locate_own(self, array: pa.Array) -> list[int]:
        # Arrow stores booleans as bits, so their address is counted in bits, like that of the validity.
        start = address_of(array.buffers()[1])
        return [start * 8 + array.offset if self.number_type is bool else start + array.offset * 8]

    def own_data_parts(self) -> list[tuple[int, int]]:
        # `gather_bits` reads without verifying pieces, so a column of booleans is verified as a whole. It is small.
        return [] if self.number_type is bool else [(self.first + 1, 8)]

    def gather_numbers(self, rows: RowLocations) -> NDArray[Any]:
        """Copy the numbers of rows."""
        if self.number_type is bool:
            return rows.gather_bits(self.first + 1)
        numbers: NDArray[Any] = rows.gather_fixed(self.first + 1, 8).view(self.types[self.number_type][1])[:, 0]
        return numbers

    def gather(self, rows: RowLocations) -> Column:
        data = self.gather_numbers(rows)
        framework, validity = rows.framework or get_framework("numpy"), rows.validity(self.first)
        clear_missing(data, validity)
        return ScalarColumn(self.field, framework.from_numpy(data), framework, validity)


_EPOCH = date(1970, 1, 1).toordinal()


class FixedWidthCodec(ArrowCodec):
    """Dates, times, durations and UUIDs: a few bytes each, read as Python objects."""

    __slots__ = ("_width",)
    types: ClassVar[dict[FieldKind, pa.DataType]] = {
        FieldKind.DATE: pa.date32(),
        FieldKind.TIME: pa.time64("us"),
        FieldKind.TIMEDELTA: pa.duration("us"),
        FieldKind.UUID: pa.binary(16),
    }

    def __init__(self, field: Field, path: str) -> None:
        super().__init__(field, path, self.types[field.kind])
        self._width: int = self.type.bit_width // 8

    @property
    def keeps_order(self) -> bool:
        return self.field.kind in (FieldKind.DATE, FieldKind.TIME)

    def encode(self, column: Column) -> pa.Array:
        values = column.values()
        if self.field.kind is FieldKind.UUID:
            values = [None if value is None else value.bytes for value in values]
        elif any(getattr(value, "tzinfo", None) is not None for value in values):
            raise self.encode_error("a time of day with a time zone cannot be stored; use a datetime, or text.")
        try:
            return pa.array(values, self.type)
        except (pa.ArrowException, OverflowError, TypeError) as error:
            raise self.encode_error(f"{error}{_first_refused(values, self.type)}.") from error

    def locate_own(self, array: pa.Array) -> list[int]:
        return [address_of(array.buffers()[1]) + array.offset * self._width]

    def own_data_parts(self) -> list[tuple[int, int]]:
        return [(self.first + 1, self._width)]

    def gather(self, rows: RowLocations) -> Column:
        data = rows.gather_fixed(self.first + 1, self._width)
        validity = rows.validity(self.first)
        clear_missing(data, validity)
        try:
            return ObjectColumn(self.field, mask_missing(self._to_values(data), validity))
        except (ValueError, OverflowError) as error:
            raise DecodeError(f"{self.path}: a stored number is not a valid {self.field}: {error}.") from error

    def _to_values(self, data: NDArray[np.uint8]) -> list[Any]:
        kind = self.field.kind
        if kind is FieldKind.UUID:
            content = data.tobytes()
            return [UUID(bytes=content[at : at + 16]) for at in range(0, len(content), 16)]
        numbers = data.view(f"i{self._width}")[:, 0].tolist()
        if kind is FieldKind.DATE:
            return [date.fromordinal(_EPOCH + day) for day in numbers]
        if kind is FieldKind.TIMEDELTA:
            return [timedelta(microseconds=number) for number in numbers]
        parts = [divmod(number, 1_000_000) for number in numbers]
        return [time(s // 3600, s // 60 % 60, s % 60, micro) for s, micro in parts]


_WALL_EPOCH = datetime(1970, 1, 1)  # noqa: DTZ001 - local times, as all others here
NAIVE, UTC = pa.timestamp("us"), pa.timestamp("us", "UTC")
"""The types of datetimes without a time zone, and of those in UTC."""
# The last part of `DatetimeCodec`: what a record batch has, structs with a zone or timestamps.
_ZONED, _NAIVE, _UTC = range(3)
_UTC_ZONES = {"UTC", "UTC#0", "+00:00"}
"""What `DatetimeCodec` writes for times in UTC: of `timezone.utc`, `ZoneInfo('UTC')`, and of pydantic's zone."""


class DatetimeCodec(ArrowCodec):
    """Datetimes as the local time and the name or offset of its zone, which is null for naive datetimes.

    Shards have timestamps instead where that loses nothing: where no time has a zone, or all are in UTC (`narrow`). The
    codec reads all three types. The parts are the validity, the address of the times, and which of the types it is.
    """

    __slots__ = ("_zone",)
    own_parts = 3

    def __init__(self, field: Field, path: str) -> None:
        fields = [pa.field("at", NAIVE, nullable=False), pa.field("zone", pa.string())]
        super().__init__(field, path, pa.struct(fields))
        self._zone = TextCodec(Field("zone", FieldKind.TEXT, str, nullable=True), f"{path}.zone")

    @property
    def children(self) -> tuple[ArrowCodec, ...]:
        return (self._zone,)

    @property
    def keeps_order(self) -> bool:
        return True  # of timestamps; of structs, there are no statistics at the path of the field

    def to_statistics(self, value: Any) -> list[Any]:
        # Python compares two times of one ZoneInfo by the clock on the wall, which is not their order when clocks are
        # set back. None cannot be compared with statistics, and so rules nothing out.
        is_fixed = value.tzinfo is None or isinstance(value.tzinfo, (timezone, TzInfo))
        return [value if is_fixed else None]

    def can_read(self, field: pa.Field) -> bool:
        if field.type in (NAIVE, UTC):
            return read_kind(field) == "datetime"
        return super().can_read(field)

    def field_of_type(self, arrow_type: pa.DataType) -> pa.Field:
        field = super().field_of_type(arrow_type)
        return field.with_metadata({KIND_KEY: "datetime"}) if arrow_type in (NAIVE, UTC) else field

    def locate(self, array: pa.Array) -> list[int]:
        if pa.types.is_struct(array.type):
            return super().locate(array)
        # Timestamps have no zones: zeros stand for the parts of the codec that reads them.
        bits, data = array.buffers()
        validity = address_of(bits) * 8 + array.offset if bits is not None and array.null_count else 0
        kind = _UTC if array.type.tz else _NAIVE
        return [validity, address_of(data) + array.offset * 8, kind, *[0] * self._zone.own_parts]

    def child_arrays(self, array: pa.Array) -> list[pa.Array]:
        return [array.field(1)]

    def locate_own(self, array: pa.Array) -> list[int]:
        at = array.field(0)
        return [address_of(at.buffers()[1]) + at.offset * 8, _ZONED]

    def own_data_parts(self) -> list[tuple[int, int]]:
        return [(self.first + 1, 8)]

    def encode(self, column: Column) -> pa.Array:
        values = column.values()
        validity = validity_of(values)
        # The local time is stored, and not the time in UTC: the rules of a time zone may change until it is read.
        wall = [_WALL_EPOCH if value is None else value.replace(tzinfo=None, fold=0) for value in values]
        at = np.array(wall, "datetime64[us]").astype(np.int64)
        zone = self._zone.encode(ObjectColumn(self._zone.field, [self._zone_of(value) for value in values]))
        times = pa.Array.from_buffers(NAIVE, len(at), [None, pa.py_buffer(at)])
        return pa.Array.from_buffers(self.type, len(at), [validity_bitmap(validity)], children=[times, zone])

    def _zone_of(self, value: datetime | None) -> str | None:
        """Return 'UTC', the name of a zone and the fold ('Europe/Berlin#1'), or an offset ('+02:00')."""
        if value is None or value.tzinfo is None:
            return None
        if isinstance(value.tzinfo, ZoneInfo) and value.tzinfo.key:
            return f"{value.tzinfo.key}#{value.fold}"
        if value.utcoffset() is None:
            raise self.encode_error(f"the time zone of {value!r} has no offset from UTC.")
        wall = value.replace(tzinfo=None).isoformat()
        return "UTC" if value.tzinfo is timezone.utc else value.isoformat()[len(wall) :]

    @staticmethod
    def _with_zone(at: Any, zone: str | None) -> datetime:
        """Return a local time in the zone that `_zone_of` wrote."""
        if not isinstance(at, datetime):
            raise TypeError(f"{at} microseconds are outside of the years that a datetime can have")
        if zone is None:
            return at
        if zone == "UTC":
            return at.replace(tzinfo=timezone.utc)
        name, sharp, fold = zone.partition("#")
        if sharp:
            return at.replace(tzinfo=ZoneInfo(name), fold=int(fold))
        return datetime.fromisoformat(at.isoformat() + zone)

    def narrowest_type(self, array: pa.Array) -> pa.DataType | None:
        """Return the timestamp type that holds an array of structs without loss, or its own type; None without values.

        A struct that is null has no value, whatever its fields are.
        """
        zone = array.field(1)
        if array.null_count:
            zone = zone.filter(array.is_valid())
        if not len(zone):
            return None
        if zone.null_count == len(zone):
            return NAIVE
        return UTC if set(zone.unique().to_pylist()) <= _UTC_ZONES else self.type

    def narrow(self, array: pa.Array, arrow_type: pa.DataType) -> pa.Array:
        """Return an array of structs as timestamps of its narrowest type; the times are not copied."""
        at = array.field(0)
        data = at.buffers()[1]
        if data is not None:
            data = data.slice(at.offset * 8, len(at) * 8)
        return pa.Array.from_buffers(arrow_type, len(at), [validity_bitmap(array_validity(array)), data])

    def to_own_type(self, array: pa.Array) -> pa.Array:
        if pa.types.is_struct(array.type):
            return array
        data = array.buffers()[1]
        if data is not None:
            data = data.slice(array.offset * 8, len(array) * 8)
        times = pa.Array.from_buffers(NAIVE, len(array), [None, data])
        zone = pa.repeat("UTC", len(array)) if array.type.tz else pa.nulls(len(array), pa.string())
        bits = validity_bitmap(array_validity(array))
        return pa.Array.from_buffers(self.type, len(array), [bits], children=[times, zone])

    def gather(self, rows: RowLocations) -> Column:
        validity = rows.validity(self.first)
        at = rows.gather_fixed(self.first + 1, 8).view("datetime64[us]")[:, 0]
        clear_missing(at, validity)
        kinds = rows.part(self.first + 2)  # record batches of one dataset may have different types
        zones: list[Any] = ["UTC" if is_utc else None for is_utc in (kinds == _UTC).tolist()]
        zoned = np.flatnonzero(kinds == _ZONED)
        try:
            if len(zoned):
                own = self._zone.gather(rows.select(zoned)).values()
                for row, zone in zip(zoned.tolist(), own, strict=True):
                    zones[row] = zone
            values = list(map(self._with_zone, at.tolist(), zones))
        except (ValueError, TypeError, OverflowError, ZoneInfoNotFoundError) as error:
            raise DecodeError(f"{self.path}: a stored time is not a valid {self.field}: {error}.") from error
        return ObjectColumn(self.field, mask_missing(values, validity))


# --- values of any length


class BinaryCodec(ArrowCodec):
    """Rows of any number of bytes: texts, blobs, and whatever subclasses turn into them.

    The parts are the validity, the offsets, the number of bytes in the array, and the address of the first of them.
    """

    __slots__ = ()
    own_parts = 4

    def encode(self, column: Column) -> pa.Array:
        if isinstance(column, PackedColumn):
            return self.from_packed(*column.join_rows(), column.validity)
        values = column.values()
        validity = validity_of(values)
        try:
            data, offsets = pack(self.dump_values(values, validity))
        except UnicodeEncodeError as error:
            raise self.encode_error(
                f"a lone surrogate is not a character and cannot be stored: {error.object[:40]!r}. "
                "Clean texts with text.encode(errors='replace').decode()."
            ) from error
        except TypeError as error:
            raise self.encode_error(f"the value cannot be stored as bytes: {error}.") from error
        return self.from_packed(data, offsets, validity)

    def dump_values(self, values: list[Any], validity: Validity) -> list[Any]:
        """Return the values as texts or bytes; empty where there is none."""
        empty: Any = b"" if self.type == pa.binary() else ""
        return values if validity is None else [empty if value is None else value for value in values]

    def load_column(self, column: PackedColumn) -> Column:
        """Return the column of the field, from that of its texts or bytes."""
        return column

    def from_packed(self, data: Any, offsets: NDArray[np.int64], validity: Validity) -> pa.Array:
        """Return the array of concatenated rows."""
        if offsets[-1] >= 1 << 31:  # the offsets of Arrow's binary type have 32 bits
            raise self.encode_error("one record batch would hold 2 GiB or more; write fewer rows at a time.")
        if self.type == pa.string():
            # Packed columns of a batch may hold bytes that nobody has decoded yet. Arrow would write them unchecked.
            try:
                self.check_utf8(data, offsets, validity)
            except DecodeError as error:
                raise EncodeError(str(error)) from error
        buffers = [validity_bitmap(validity), pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(data)]
        return pa.Array.from_buffers(self.type, len(offsets) - 1, buffers)

    def check_utf8(self, data: Any, offsets: NDArray[np.int64], validity: Validity) -> None:
        """Raise a DecodeError unless every row of a column of texts is UTF-8.

        Texts are decoded lazily, where nothing is known about the shard that they came from, so they are checked here.
        All rows are decoded at once: if none begins in the middle of a character, each is valid by itself.
        """
        content = data if isinstance(data, bytes) else bytes(data)
        if content.isascii():  # the common case, and much faster than decoding
            return
        starts = offsets[:-1][offsets[:-1] < len(content)]
        try:
            content.decode()
            if ((np.frombuffer(content, np.uint8)[starts] & 0xC0) != 0x80).all():  # 0b10xxxxxx continues a character
                return
        except UnicodeDecodeError:
            pass
        for row, (start, end) in enumerate(pairwise(offsets.tolist())):
            if validity is None or validity[row]:  # other writers leave anything in rows without a value
                try:
                    content[start:end].decode()
                except UnicodeDecodeError as error:
                    raise DecodeError(f"{self.path}: a text is not UTF-8: {error.reason}.") from error

    def locate_own(self, array: pa.Array) -> list[int]:
        _, offsets, data = array.buffers()
        return [address_of(offsets) + array.offset * 4, 0 if data is None else data.size, address_of(data)]

    def own_data_parts(self) -> list[tuple[int, int]]:
        return [(self.first + 3, 0)]

    def gather(self, rows: RowLocations) -> Column:
        return self.load_column(self.gather_packed(rows))

    def gather_packed(self, rows: RowLocations) -> PackedColumn:
        """Copy the texts or bytes of rows."""
        try:
            data, offsets = rows.gather_bytes(self.first + 1)
        except DecodeError as error:
            raise DecodeError(f"{self.path}: {error}") from error
        validity = rows.validity(self.first)
        if self.type == pa.string():
            self.check_utf8(data, offsets, validity)
        return PackedColumn.from_offsets(self.field, data, offsets, validity)


class TextCodec(BinaryCodec):
    """Texts; values of subclasses of `str` are created again when they are read."""

    __slots__ = ()

    def __init__(self, field: Field, path: str) -> None:
        super().__init__(field, path, pa.string())

    @property
    def keeps_order(self) -> bool:
        return self.field.type is str

    def load_column(self, column: PackedColumn) -> Column:
        if self.field.type is str or self.field.wrapper or not isinstance(self.field.type, type):
            return column
        return ObjectColumn(self.field, [None if text is None else self.field.type(text) for text in column.values()])


class BytesCodec(BinaryCodec):
    """Blobs and encoded media."""

    __slots__ = ()

    def __init__(self, field: Field, path: str) -> None:
        super().__init__(field, path, pa.binary())


class AsTextCodec(BinaryCodec):
    """Paths and decimals as their text."""

    __slots__ = ()

    def __init__(self, field: Field, path: str) -> None:
        super().__init__(field, path, pa.string())

    def dump(self, value: Any) -> str:
        """Return the text of a value."""
        return str(value)

    def load(self, text: str) -> Any:
        """Return the value of a text."""
        return Decimal(text) if self.field.kind is FieldKind.DECIMAL else self.field.type(text)

    def dump_values(self, values: list[Any], validity: Validity) -> list[Any]:
        try:
            return ["" if value is None else self.dump(value) for value in values]
        except (KeyError, ValueError, TypeError) as error:
            raise self.encode_error(f"the value is not a valid {self.field}: {error}.") from error

    def load_column(self, column: PackedColumn) -> Column:
        try:
            return ObjectColumn(self.field, [None if text is None else self.load(text) for text in column.values()])
        except (KeyError, ValueError, ArithmeticError) as error:
            raise DecodeError(f"{self.path}: a stored text is not a valid {self.field}: {error}.") from error


class EnumCodec(AsTextCodec):
    """Members of enums by name, where Arrow has no type for their values.

    The extension name distinguishes them from the texts of other writers, which are values.
    """

    __slots__ = ()
    needs_extension = True

    @property
    def metadata(self) -> dict[str, str]:
        return {EXTENSION_NAME: "quire.enum"}

    def dump(self, value: Any) -> str:
        name: str = self.field.type(value).name
        return name

    def load(self, text: str) -> Any:
        return self.field.type[text]


class EnumTextCodec(AsTextCodec):
    """Members of enums whose values are texts, by value."""

    __slots__ = ()

    @property
    def metadata(self) -> dict[str, str]:
        return {KIND_KEY: "enum"}

    @property
    def keeps_order(self) -> bool:
        return True

    def to_statistics(self, value: Any) -> list[Any]:
        try:
            member = self.field.type(value)
        except ValueError:
            return []  # a text that members are compared with ($gt), and that is none of them
        return [member.value, member.name]  # earlier files have names

    def can_read(self, field: pa.Field) -> bool:
        # Other texts are converted, which validates them: they may be no values of the enum.
        return read_kind(field) == "enum" and super().can_read(field)

    def dump(self, value: Any) -> str:
        text: str = self.field.type(value).value
        return text

    def load(self, text: str) -> Any:
        return self.field.type(text)


class EnumNumberCodec(NumberCodec):
    """Members of enums whose values are numbers, by value."""

    __slots__ = ()

    @property
    def metadata(self) -> dict[str, str]:
        return {KIND_KEY: "enum"}

    def to_statistics(self, value: Any) -> list[Any]:
        return [value.value if isinstance(value, Enum) else value]  # the names in earlier files compare with no number

    def can_read(self, field: pa.Field) -> bool:
        return read_kind(field) == "enum" and super().can_read(field)

    def encode(self, column: Column) -> pa.Array:
        try:
            numbers = [None if value is None else self.field.type(value).value for value in column.values()]
        except ValueError as error:
            raise self.encode_error(f"the value is not a valid {self.field}: {error}.") from error
        return super().encode(ObjectColumn(self.field, numbers))

    def gather(self, rows: RowLocations) -> Column:
        numbers = mask_missing(self.gather_numbers(rows).tolist(), rows.validity(self.first))
        # There are few members and many rows: look up each member once.
        members: dict[Any, Any] = {None: None}
        try:
            for number in set(numbers) - {None}:
                members[number] = self.field.type(number)
        except ValueError as error:
            raise DecodeError(f"{self.path}: a stored number is not a valid {self.field}: {error}.") from error
        return ObjectColumn(self.field, [members[number] for number in numbers])


def enum_value_type(enum: type[Enum]) -> type | None:
    """Return the type of the values of all members, if Arrow has it and a value identifies its member; else None."""
    values = [member.value for member in enum.__members__.values()]
    types = set(map(type, values))
    value_type = types.pop() if len(types) == 1 else None
    if value_type not in (str, int, float, bool):
        return None
    if value_type is int and not all(-(1 << 63) <= value < 1 << 63 for value in values):
        return None
    return None if any(value != value for value in values) else value_type  # NaN finds no member


class MessageCodec(BinaryCodec):
    """Values without a column type, each as a message of quire's wire format.

    A message describes the value that was written, not the type that it was written for, so values are validated
    against the class when they are read.
    """

    __slots__ = ("_schema",)
    needs_extension = True
    stores_framework = True

    def __init__(self, field: Field, path: str, schema: Schema) -> None:
        super().__init__(field, path, pa.binary())
        self._schema = schema

    @property
    def metadata(self) -> dict[str, str]:
        return {EXTENSION_NAME: "quire.value"}

    def dump_values(self, values: list[Any], validity: Validity) -> list[bytes]:
        try:
            # A message does not name the member of a union. Values that would be read as another one are errors now.
            if wire.has_ambiguous_union(self.field):
                wire.check_unions(self._schema, self.field, values, allow_pickle=False)
            return [b"" if value is None else wire.value_message(value) for value in values]
        except CodecError as error:
            raise self.encode_error(error) from error

    def load_column(self, column: PackedColumn) -> Column:
        # A message names the class of an enum; only those that the field declares are used, and none is imported.
        options = wire.DecodeOptions(types=_enums_of(self.field))
        view = memoryview(column.data)  # slices of a view are not copied
        spans = zip(column.starts.tolist(), column.ends.tolist(), strict=True)
        messages = mask_missing([view[start:end] for start, end in spans], column.validity)
        try:
            values = [
                None if message is None else wire.value_from_message(message, self.field, options)
                for message in messages
            ]
        except CodecError as error:
            raise DecodeError(f"{self.path}: {error}") from error
        values = [_wrap(self.field, value) for value in values]
        try:
            return ObjectColumn(
                self.field,
                validate_values(self._schema, self.field, values, self.path, column.validity, "ignore", stored=True),
            )
        except ColumnError as error:
            raise DecodeError(f"{error}, and the field is {self.field}.") from error


def _wrap(field: Field, value: Any) -> Any:
    """Return the value with its texts and bytes as classes like `ImageUrl` where the field has them."""
    if field.wrapper is not None and isinstance(value, (str, bytes)):
        return field.wrapper(value)
    if not any(map(_has_wrapper, field.items)) or value is None:
        return value
    if field.kind is FieldKind.DICT and len(field.items) == 2:
        return {_wrap(field.items[0], key): _wrap(field.items[1], item) for key, item in value.items()}
    if field.kind is FieldKind.UNION:
        # The first member that takes a value of this type: pydantic validates the result against all of them.
        kind = FieldKind.TEXT if type(value) is str else FieldKind.BYTES if type(value) is bytes else None
        member = next((item for item in field.items if item.kind is kind or item.type is type(value)), None)
        return value if member is None else _wrap(member, value)
    if field.kind is FieldKind.LIST:
        items = field.items if len(field.items) > 1 else field.items * len(value)
        return type(value)(map(_wrap, items, value))
    return value


def _has_wrapper(field: Field) -> bool:
    return field.wrapper is not None or any(map(_has_wrapper, field.items))


def _enums_of(field: Field) -> list[type[Any]]:
    """Return the enums that values of a field may be members of."""
    own = [field.type] if field.kind is FieldKind.ENUM else []
    return own + [enum for item in field.items for enum in _enums_of(item)]
