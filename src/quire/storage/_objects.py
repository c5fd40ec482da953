"""Forms of objects that are written as text or as messages."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timezone
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import numpy as np
import pyarrow as pa

from quire import codec
from quire.columns import Column, ObjectColumn, PackedColumn, Validity, validate_values, validity_of
from quire.errors import CodecError, ColumnError, DecodeError
from quire.schema import Field, FieldKind, Schema
from quire.storage._form import EXTENSION, BinaryForm, Form, address_of, bitmap, masked
from quire.storage._rows import Rows


class TextForm(BinaryForm):
    """Texts; subclasses of `str` are made again when they are read."""

    __slots__ = ()

    def __init__(self, field: Field, path: str) -> None:
        super().__init__(field, path, pa.string())

    def read(self, column: PackedColumn) -> Column:
        if self.field.type is str or self.field.wrapper or not isinstance(self.field.type, type):
            return column
        return ObjectColumn(self.field, [None if text is None else self.field.type(text) for text in column.values()])


class BytesForm(BinaryForm):
    """Blobs, and encoded media."""

    __slots__ = ()

    def __init__(self, field: Field, path: str) -> None:
        super().__init__(field, path, pa.binary())


class NamedForm(BinaryForm):
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


class EnumForm(NamedForm):
    """Members of enums: their names, so that other writers' texts, which are values, are told apart by the mark."""

    __slots__ = ()
    needs_mark = True

    @property
    def metadata(self) -> dict[str, str]:
        return {EXTENSION: "quire.enum"}


def _as_text(field: Field) -> tuple[Callable[[Any], str], Callable[[str], Any]]:
    if field.kind is FieldKind.ENUM:
        return lambda member: field.type(member).name, lambda name: field.type[name]  # `str` has a __getitem__ too
    return str, Decimal if field.kind is FieldKind.DECIMAL else field.type


class ValueForm(BinaryForm):
    """Whatever has no columns of its own, each value a message of quire's wire format.

    A message tells what was written, and not for which type: what is read is checked against the class of today.
    """

    __slots__ = ("_schema",)
    needs_mark = True

    def __init__(self, field: Field, path: str, schema: Schema) -> None:
        super().__init__(field, path, pa.binary())
        self._schema = schema

    @property
    def metadata(self) -> dict[str, str]:
        return {EXTENSION: "quire.value"}

    def written(self, values: list[Any], validity: Validity) -> list[bytes]:
        try:
            if codec.has_ambiguous_union(self.field):
                codec.check_values(self._schema, self.field, values, allow_pickle=False)
            return [b"" if value is None else codec.value_message(value) for value in values]
        except CodecError as error:
            raise self.fail(error) from error

    def read(self, column: PackedColumn) -> Column:
        options = codec.ReadOptions(types=_enums_of(self.field))
        try:
            values = [
                None if data is None else codec.value_from_message(data, self.field, options)
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


class DatetimeForm(Form):
    """Moments as the clock on the wall showed them, and the zone of that clock; naive ones have none."""

    __slots__ = ("_zone",)
    own_parts = 2

    def __init__(self, field: Field, path: str) -> None:
        fields = [pa.field("at", pa.timestamp("us"), nullable=False), pa.field("zone", pa.string())]
        super().__init__(field, path, pa.struct(fields))
        self._zone = TextForm(Field("zone", FieldKind.TEXT, str, nullable=True), f"{path}.zone")

    @property
    def children(self) -> tuple[Form, ...]:
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
        return pa.Array.from_buffers(self.type, len(at), [bitmap(validity)], children=[moments, zone])

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

    def gather(self, rows: Rows) -> Column:
        there = rows.validity(self.first)
        at = rows.fixed(self.first + 1, 8).view("datetime64[us]")[:, 0]
        if there is not None:
            at[~there] = 0  # whatever lies there
        try:
            found = list(map(_in_zone, at.tolist(), self._zone.gather(rows).values()))
        except (ValueError, TypeError, OverflowError, ZoneInfoNotFoundError) as error:
            raise DecodeError(f"{self.path}: a moment in the data is no {self.field}: {error}.") from error
        return ObjectColumn(self.field, masked(found, there))


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
