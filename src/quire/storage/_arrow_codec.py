"""What every form of a field in Arrow can do, and the forms of rows that have one run of bytes each."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar
from uuid import UUID
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import numpy as np
import pyarrow as pa

from quire import codec as wire
from quire.columns import Column, ObjectColumn, PackedColumn, ScalarColumn, Validity, pack, validate_values, validity_of
from quire.errors import CodecError, ColumnError, DecodeError, EncodeError
from quire.schema import Field, FieldKind, Schema
from quire.storage._row_locations import RowLocations
from quire.tensors import get_framework

if TYPE_CHECKING:
    from numpy.typing import NDArray


EXTENSION_NAME, EXTENSION_METADATA = "ARROW:extension:name", "ARROW:extension:metadata"


class ArrowCodec(ABC):
    """How one field lies in Arrow data: its Arrow type, columns to arrays, and rows of arrays to columns.

    Rows are found by the addresses of the parts of arrays (`locate`); `first` is the number of the first part of this
    form among those of the whole table.
    """

    __slots__ = ("field", "first", "path", "type")
    own_parts = 2
    """How many parts the form itself has, the validity first."""

    def __init__(self, field: Field, path: str, arrow_type: pa.DataType) -> None:
        self.field, self.path, self.type, self.first = field, path, arrow_type, 0

    @abstractmethod
    def encode(self, column: Column) -> pa.Array:
        """The column as an Arrow array, without a copy where memory can be shared."""

    @abstractmethod
    def gather(self, rows: RowLocations) -> Column:
        """The column of rows, copied."""

    @abstractmethod
    def locate_own(self, array: pa.Array) -> list[int]:
        """The parts of an array behind its validity, without those of its children."""

    @property
    def children(self) -> Sequence[ArrowCodec]:
        """The forms inside this one."""
        return ()

    @property
    def is_large(self) -> bool:
        """Whether rows take so much memory that gathering them for several batches at a time does not pay."""
        return any(child.is_large for child in self.children)

    def child_arrays(self, array: pa.Array) -> list[pa.Array]:
        """The arrays of the forms inside this one."""
        return []

    @property
    def metadata(self) -> dict[str, str] | None:
        """What is said of the field beside its type."""
        return None

    def arrow_field(self) -> pa.Field:
        """The field of an Arrow schema."""
        nullable = self.field.nullable or self.field.kind is FieldKind.ANY  # which None is one of
        return pa.field(self.field.name, self.type, nullable=nullable, metadata=self.metadata)

    needs_extension: ClassVar = False
    """Whether data of the same Arrow type that is not marked as this form is something else."""

    def can_read(self, field: pa.Field) -> bool:
        """Whether the data of an Arrow field can be read as it is: it has the type and no mark of another form."""
        mark, own = read_extension(field), read_extension(self.arrow_field())
        return bool(field.type == self.type) and (mark == own or (mark is None and not self.needs_extension))

    def place(self, first: int) -> int:
        """Give parts their numbers, from this one on; the next free one is told."""
        self.first = first
        first += self.own_parts
        for child in self.children:
            first = child.place(first)
        return first

    def own_data(self) -> list[tuple[int, int]]:
        """The parts that may be verified piece by piece, and the bytes of a row of each; 0 if rows differ.

        They are read by `Rows.fixed` and `Rows.bytes_at`, which verify the pieces that they read, and by nothing else.
        """
        return []

    def data_parts(self) -> list[tuple[int, int]]:
        """Those of this form and of the forms inside it."""
        return [*self.own_data(), *(part for child in self.children for part in child.data_parts())]

    def locate(self, array: pa.Array) -> list[int]:
        """The parts of an array and of those inside it."""
        found = [_bit_address(array), *self.locate_own(array)]
        for child, inner in zip(self.children, self.child_arrays(array), strict=True):
            found += child.locate(inner)
        return found

    def fail(self, why: object) -> EncodeError:
        """What cannot be written."""
        return EncodeError(f"{self.path}: {why}")


def read_extension(field: pa.Field) -> tuple[str, Any] | None:
    """What a field says of itself beside its type: the name of its form, and what that knows."""
    metadata = field.metadata or {}
    name = metadata.get(EXTENSION_NAME.encode(), b"").decode("utf-8", "replace")
    if not name.startswith("quire."):
        return None
    try:
        return name, json.loads(metadata.get(EXTENSION_METADATA.encode(), b"null"))
    except ValueError as error:
        raise DecodeError(f"{field.name}: what the data says of it is no JSON.") from error


def address_of(buffer: pa.Buffer | None) -> int:
    """Where a buffer begins; nothing is there without one."""
    return 0 if buffer is None else int(buffer.address)


def _bit_address(array: pa.Array) -> int:
    bits = array.buffers()[0]
    return 0 if bits is None or not array.null_count else address_of(bits) * 8 + array.offset


def validity_bitmap(validity: Validity) -> pa.Buffer | None:
    """Validity as Arrow has it."""
    return None if validity is None else pa.py_buffer(np.packbits(validity, bitorder="little"))


def mask_missing(values: list[Any], validity: Validity) -> list[Any]:
    """The values, with None in rows that have none."""
    if validity is None:
        return values
    return [value if valid else None for value, valid in zip(values, validity.tolist(), strict=True)]


def clear_missing(data: NDArray[Any], there: Validity) -> None:
    """Zeros for what is not there: in its place, a file may have anything."""
    if there is not None:
        data[~there] = 0


def _first(values: list[Any], arrow_type: pa.DataType) -> str:
    """The first value that Arrow does not take, in brackets."""
    for value in values:
        try:
            pa.array([value], arrow_type)
        except (pa.ArrowException, OverflowError, TypeError):
            return f" ({value!r:.60})"
    return ""


class NumberCodec(ArrowCodec):
    """Numbers: int64, float64, or bits."""

    __slots__ = ()
    types: ClassVar = {int: (pa.int64(), np.int64), float: (pa.float64(), np.float64), bool: (pa.bool_(), np.bool_)}

    def __init__(self, field: Field, path: str) -> None:
        super().__init__(field, path, self.types[field.type][0])

    def encode(self, column: Column) -> pa.Array:
        if not isinstance(column, ScalarColumn):
            return self._encode_values(column.values())
        array = column.framework.to_numpy(column.data)
        mask = None if column.validity is None else ~column.validity
        return pa.array(np.ascontiguousarray(array), self.type, mask=mask)

    def _encode_values(self, values: list[Any]) -> pa.Array:
        try:
            return pa.array(values, self.type)
        except (pa.ArrowException, OverflowError, TypeError) as error:
            raise self.fail(
                f"numbers of more than 64 bits, or of other types, have no column here{_first(values, self.type)}. "
                "A Decimal or a text holds any."
            ) from error

    def locate_own(self, array: pa.Array) -> list[int]:
        start = address_of(array.buffers()[1])
        return [start * 8 + array.offset if self.field.type is bool else start + array.offset * 8]

    def own_data(self) -> list[tuple[int, int]]:
        return [] if self.field.type is bool else [(self.first + 1, 8)]

    def gather(self, rows: RowLocations) -> Column:
        if self.field.type is bool:
            data: NDArray[Any] = rows.bits(self.first + 1)
        else:
            data = rows.fixed(self.first + 1, 8).view(self.types[self.field.type][1])[:, 0]
        framework, there = rows.framework or get_framework("numpy"), rows.validity(self.first)
        clear_missing(data, there)
        return ScalarColumn(self.field, framework.from_numpy(data), framework, there)


_EPOCH = date(1970, 1, 1).toordinal()


def _dates(data: NDArray[np.uint8]) -> list[Any]:
    return [date.fromordinal(_EPOCH + day) for day in data.view(np.int32)[:, 0].tolist()]


def _times(data: NDArray[np.uint8]) -> list[Any]:
    parts = [divmod(each, 1_000_000) for each in data.view(np.int64)[:, 0].tolist()]
    return [time(s // 3600, s // 60 % 60, s % 60, micro) for s, micro in parts]


def _spans(data: NDArray[np.uint8]) -> list[Any]:
    return [timedelta(microseconds=each) for each in data.view(np.int64)[:, 0].tolist()]


def _uuids(data: NDArray[np.uint8]) -> list[Any]:
    whole = data.tobytes()
    return [UUID(bytes=whole[at : at + 16]) for at in range(0, len(whole), 16)]


class FixedWidthCodec(ArrowCodec):
    """Dates, times, durations and UUIDs: a few bytes each, and objects for those who read them."""

    __slots__ = ("_read", "_width")
    types: ClassVar[dict[FieldKind, tuple[pa.DataType, int, Callable[[NDArray[np.uint8]], list[Any]]]]] = {
        FieldKind.DATE: (pa.date32(), 4, _dates),
        FieldKind.TIME: (pa.time64("us"), 8, _times),
        FieldKind.TIMEDELTA: (pa.duration("us"), 8, _spans),
        FieldKind.UUID: (pa.binary(16), 16, _uuids),
    }

    def __init__(self, field: Field, path: str) -> None:
        arrow_type, self._width, self._read = self.types[field.kind]
        super().__init__(field, path, arrow_type)

    def encode(self, column: Column) -> pa.Array:
        values = column.values()
        if self.field.kind is FieldKind.UUID:
            values = [None if value is None else value.bytes for value in values]
        elif any(getattr(value, "tzinfo", None) is not None for value in values):
            raise self.fail("a time with a zone has no column here; use a datetime, or text.")
        try:
            return pa.array(values, self.type)
        except (pa.ArrowException, OverflowError, TypeError) as error:
            raise self.fail(f"{error}{_first(values, self.type)}.") from error

    def locate_own(self, array: pa.Array) -> list[int]:
        return [address_of(array.buffers()[1]) + array.offset * self._width]

    def own_data(self) -> list[tuple[int, int]]:
        return [(self.first + 1, self._width)]

    def gather(self, rows: RowLocations) -> Column:
        data = rows.fixed(self.first + 1, self._width)
        there = rows.validity(self.first)
        if there is not None:
            data[~there] = 0  # whatever lies there
        try:
            return ObjectColumn(self.field, mask_missing(self._read(data), there))
        except (ValueError, OverflowError) as error:
            raise DecodeError(f"{self.path}: a number in the data is no {self.field}: {error}.") from error


class BinaryCodec(ArrowCodec):
    """Rows of any number of bytes: texts, blobs, and what is written as such."""

    __slots__ = ()
    own_parts = 4  # validity, offsets, how much there is, content

    def __init__(self, field: Field, path: str, arrow_type: pa.DataType) -> None:
        super().__init__(field, path, arrow_type)

    def encode(self, column: Column) -> pa.Array:
        if isinstance(column, PackedColumn):
            return self.from_packed(*column.packed(), column.validity)
        values = column.values()
        validity = validity_of(values)
        return self.from_values(self.written(values, validity), validity)

    def written(self, values: list[Any], validity: Validity) -> list[Any]:
        """The values as texts or bytes; empty where there is none."""
        empty: Any = b"" if self.type == pa.binary() else ""
        return values if validity is None else [empty if value is None else value for value in values]

    def read(self, column: PackedColumn) -> Column:
        """The column of the field, from that of its texts or bytes."""
        return column

    def from_values(self, values: list[Any], validity: Validity) -> pa.Array:
        """The array of texts or bytes."""
        try:
            data, offsets = pack(values)
        except UnicodeEncodeError as error:
            half = f"half a character (a lone surrogate) has no form in a file: {error.object[:40]!r}"
            raise self.fail(f"{half}. Clean texts with text.encode(errors='replace').decode().") from error
        except TypeError as error:
            raise self.fail(f"the value has no form as bytes: {error}.") from error
        return self.from_packed(data, offsets, validity)

    def from_packed(self, data: Any, offsets: NDArray[np.int64], validity: Validity) -> pa.Array:
        """The array of bytes that lie one behind the other."""
        if offsets[-1] >= 1 << 31:
            raise self.fail("one record batch would hold 2 GiB or more; write fewer rows at a time.")
        if self.type == pa.string():
            try:
                self.check_utf8(data, offsets, validity)
            except DecodeError as error:
                raise EncodeError(str(error)) from error
        buffers = [validity_bitmap(validity), pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(data)]
        return pa.Array.from_buffers(self.type, len(offsets) - 1, buffers)

    def check_utf8(self, data: Any, offsets: NDArray[np.int64], validity: Validity) -> None:
        """Raise a DecodeError unless every row of a column of texts is UTF-8.

        Texts are decoded where nobody knows the shard that they came from, so they are checked here. All rows are
        decoded at once: if none begins in the middle of a character, each is valid by itself.
        """
        content = data if isinstance(data, bytes) else bytes(data)
        if content.isascii():
            return
        starts = offsets[:-1][offsets[:-1] < len(content)]
        try:
            content.decode()
            if ((np.frombuffer(content, np.uint8)[starts] & 0xC0) != 0x80).all():
                return
        except UnicodeDecodeError:
            pass
        for row, (start, end) in enumerate(pairwise(offsets.tolist())):
            if validity is None or validity[row]:  # where there is no value, other writers leave anything
                try:
                    content[start:end].decode()
                except UnicodeDecodeError as error:
                    raise DecodeError(f"{self.path}: a text is not UTF-8: {error.reason}.") from error

    def locate_own(self, array: pa.Array) -> list[int]:
        _, offsets, data = array.buffers()
        return [address_of(offsets) + array.offset * 4, 0 if data is None else data.size, address_of(data)]

    def own_data(self) -> list[tuple[int, int]]:
        return [(self.first + 3, 0)]

    def gather(self, rows: RowLocations) -> Column:
        return self.read(self.packed(rows))

    def packed(self, rows: RowLocations) -> PackedColumn:
        """The texts or bytes of rows."""
        try:
            data, offsets = rows.texts(self.first + 1)
        except DecodeError as error:
            raise DecodeError(f"{self.path}: {error}") from error
        validity = rows.validity(self.first)
        if self.type == pa.string():
            self.check_utf8(data, offsets, validity)
        return PackedColumn.from_offsets(self.field, data, offsets, validity)


class TextCodec(BinaryCodec):
    """Texts; subclasses of `str` are made again when they are read."""

    __slots__ = ()

    def __init__(self, field: Field, path: str) -> None:
        super().__init__(field, path, pa.string())

    def read(self, column: PackedColumn) -> Column:
        if self.field.type is str or self.field.wrapper or not isinstance(self.field.type, type):
            return column
        return ObjectColumn(self.field, [None if text is None else self.field.type(text) for text in column.values()])


class BytesCodec(BinaryCodec):
    """Blobs, and encoded media."""

    __slots__ = ()

    def __init__(self, field: Field, path: str) -> None:
        super().__init__(field, path, pa.binary())


class AsTextCodec(BinaryCodec):
    """Paths and decimals by their text."""

    __slots__ = ("_read", "_write")

    def __init__(self, field: Field, path: str) -> None:
        super().__init__(field, path, pa.string())
        self._write, self._read = _as_text(field)

    def written(self, values: list[Any], validity: Validity) -> list[Any]:
        try:
            return ["" if value is None else self._write(value) for value in values]
        except (KeyError, ValueError, TypeError) as error:
            raise self.fail(f"the value is no {self.field}: {error}.") from error

    def read(self, column: PackedColumn) -> Column:
        try:
            return ObjectColumn(self.field, [None if t is None else self._read(t) for t in column.values()])
        except (KeyError, ValueError, ArithmeticError) as error:
            raise DecodeError(f"{self.path}: a text in the data is no {self.field}: {error}.") from error


class EnumCodec(AsTextCodec):
    """Members of enums: their names, so that other writers' texts, which are values, are told apart by the mark."""

    __slots__ = ()
    needs_extension = True

    @property
    def metadata(self) -> dict[str, str]:
        return {EXTENSION_NAME: "quire.enum"}


def _as_text(field: Field) -> tuple[Callable[[Any], str], Callable[[str], Any]]:
    if field.kind is FieldKind.ENUM:
        return lambda member: field.type(member).name, lambda name: field.type[name]  # `str` has a __getitem__ too
    return str, Decimal if field.kind is FieldKind.DECIMAL else field.type


class MessageCodec(BinaryCodec):
    """Whatever has no columns of its own, each value a message of quire's wire format.

    A message tells what was written, and not for which type: what is read is checked against the class of today.
    """

    __slots__ = ("_schema",)
    needs_extension = True

    def __init__(self, field: Field, path: str, schema: Schema) -> None:
        super().__init__(field, path, pa.binary())
        self._schema = schema

    @property
    def metadata(self) -> dict[str, str]:
        return {EXTENSION_NAME: "quire.value"}

    def written(self, values: list[Any], validity: Validity) -> list[bytes]:
        try:
            if wire.has_ambiguous_union(self.field):
                wire.check_values(self._schema, self.field, values, allow_pickle=False)
            return [b"" if value is None else wire.value_message(value) for value in values]
        except CodecError as error:
            raise self.fail(error) from error

    def read(self, column: PackedColumn) -> Column:
        options = wire.ReadOptions(types=_enums_of(self.field))
        try:
            values = [
                None if data is None else wire.value_from_message(data, self.field, options)
                for data in self._blobs(column)
            ]
        except CodecError as error:
            raise DecodeError(f"{self.path}: {error}") from error
        values = [_wrapped(self.field, value) for value in values]
        try:
            return ObjectColumn(
                self.field,
                validate_values(self._schema, self.field, values, self.path, column.validity, "ignore", stored=True),
            )
        except ColumnError as error:
            raise DecodeError(f"{error}, and the field is {self.field}.") from error

    def _blobs(self, column: PackedColumn) -> list[Any]:
        view = memoryview(column.data)
        spans = zip(column.starts.tolist(), column.ends.tolist(), strict=True)
        return column.masked([view[start:end] for start, end in spans])


def _wrapped(field: Field, value: Any) -> Any:
    """The value, whose texts and bytes are of classes like `ImageUrl` where the field says so."""
    if field.wrapper is not None and isinstance(value, (str, bytes)):
        return field.wrapper(value)
    if not any(map(_wraps, field.items)) or value is None:
        return value
    if field.kind is FieldKind.DICT and len(field.items) == 2:
        return {_wrapped(field.items[0], key): _wrapped(field.items[1], item) for key, item in value.items()}
    if field.kind is FieldKind.UNION:
        kind = FieldKind.TEXT if type(value) is str else FieldKind.BYTES if type(value) is bytes else None
        found = next((item for item in field.items if item.kind is kind or item.type is type(value)), field)
        return value if found is field else _wrapped(found, value)
    if field.kind is FieldKind.LIST:
        items = field.items if len(field.items) > 1 else field.items * len(value)
        return type(value)(map(_wrapped, items, value))
    return value


def _wraps(field: Field) -> bool:
    return field.wrapper is not None or any(map(_wraps, field.items))


def _enums_of(field: Field) -> list[type[Any]]:
    """The enums that a field may hold."""
    own = [field.type] if field.kind is FieldKind.ENUM else []
    return own + [enum for item in field.items for enum in _enums_of(item)]


class DatetimeCodec(ArrowCodec):
    """Moments as the clock on the wall showed them, and the zone of that clock; naive ones have none."""

    __slots__ = ("_zone",)
    own_parts = 2

    def __init__(self, field: Field, path: str) -> None:
        fields = [pa.field("at", pa.timestamp("us"), nullable=False), pa.field("zone", pa.string())]
        super().__init__(field, path, pa.struct(fields))
        self._zone = TextCodec(Field("zone", FieldKind.TEXT, str, nullable=True), f"{path}.zone")

    @property
    def children(self) -> tuple[ArrowCodec, ...]:
        return (self._zone,)

    def child_arrays(self, array: pa.Array) -> list[pa.Array]:
        return [array.field(1)]

    def locate_own(self, array: pa.Array) -> list[int]:
        at = array.field(0)
        return [address_of(at.buffers()[1]) + at.offset * 8]

    def own_data(self) -> list[tuple[int, int]]:
        return [(self.first + 1, 8)]

    def encode(self, column: Column) -> pa.Array:
        values = column.values()
        validity = validity_of(values)
        wall = [_START if value is None else value.replace(tzinfo=None, fold=0) for value in values]
        at = np.array(wall, "datetime64[us]").astype(np.int64)
        zone = self._zone.encode(ObjectColumn(self._zone.field, [self._zone_of(value) for value in values]))
        moments = pa.Array.from_buffers(pa.timestamp("us"), len(at), [None, pa.py_buffer(at)])
        return pa.Array.from_buffers(self.type, len(at), [validity_bitmap(validity)], children=[moments, zone])

    def _zone_of(self, value: datetime | None) -> str | None:
        """The zone's name and fold, or the offset."""
        if value is None or value.tzinfo is None:
            return None
        if isinstance(value.tzinfo, ZoneInfo) and value.tzinfo.key:
            return f"{value.tzinfo.key}#{value.fold}"
        if value.utcoffset() is None:
            raise self.fail(f"the zone of {value!r} knows no offset.")
        wall = value.replace(tzinfo=None).isoformat()
        return "UTC" if value.tzinfo is timezone.utc else value.isoformat()[len(wall) :]

    def gather(self, rows: RowLocations) -> Column:
        there = rows.validity(self.first)
        at = rows.fixed(self.first + 1, 8).view("datetime64[us]")[:, 0]
        if there is not None:
            at[~there] = 0  # whatever lies there
        try:
            found = list(map(_in_zone, at.tolist(), self._zone.gather(rows).values()))
        except (ValueError, TypeError, OverflowError, ZoneInfoNotFoundError) as error:
            raise DecodeError(f"{self.path}: a moment in the data is no {self.field}: {error}.") from error
        return ObjectColumn(self.field, mask_missing(found, there))


_START = datetime(1970, 1, 1)  # noqa: DTZ001 - the wall's, as all others here


def _in_zone(at: Any, zone: str | None) -> datetime:
    if not isinstance(at, datetime):
        raise TypeError(f"{at} microseconds are beyond the years that a datetime has")
    if zone is None:
        return at
    if zone == "UTC":
        return at.replace(tzinfo=timezone.utc)
    name, sharp, fold = zone.partition("#")
    if sharp:
        return at.replace(tzinfo=ZoneInfo(name), fold=int(fold))
    return datetime.fromisoformat(at.isoformat() + zone)
