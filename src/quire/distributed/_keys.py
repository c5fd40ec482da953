"""Keys of rows: which rows are equal, how they are ordered, and which partition they belong to.

This is the only place where keys are hashed, compared and sorted, so that all engines agree. Values are compared as
Python compares them: -0.0 equals 0.0, a Decimal 1.0 equals 1.00, and times with a zone are equal if they are the same
instant. Beyond that, None equals None, and NaN equals NaN. In ascending order, None comes first and NaN last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from quire._optional import require
from quire.array import find_column
from quire.errors import OptionError
from quire.schema import Field, FieldKind, FieldPath, join_path, parse_path

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quire.distributed._encoding import DocumentLayout

_KEY_KINDS = frozenset(
    {
        FieldKind.SCALAR,
        FieldKind.TEXT,
        FieldKind.BYTES,
        FieldKind.ENUM,
        FieldKind.DATETIME,
        FieldKind.DATE,
        FieldKind.TIME,
        FieldKind.TIMEDELTA,
        FieldKind.UUID,
        FieldKind.DECIMAL,
        FieldKind.PATH,
    }
)
"""The kinds of fields that can be keys."""
_EPOCH = datetime(1970, 1, 1)  # noqa: DTZ001 - that of naive times
_UTC_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_MICROSECOND = timedelta(microseconds=1)
_NULL_HASH = np.uint64(0x9AE16A3B2F90404F)


@dataclass(frozen=True)
class Keys:
    """The fields of a layout that rows are grouped, joined or sorted by."""

    source: DocumentLayout
    paths: tuple[FieldPath, ...]

    @classmethod
    def resolve(cls, source: DocumentLayout, names: Sequence[Any], call: str) -> Keys:
        """Return the keys at these paths; raise unless each field has one value a row that can be compared."""
        if not names:
            raise OptionError(f"{call}() needs the names or paths of fields.")
        for name in names:
            if not isinstance(name, str) or not name:
                raise OptionError(f"{call}({name!r}): the name or path of a field is needed.")
            fields = source.layout.schema.resolve(parse_path(name))
            inside = any(field.kind is not FieldKind.DOCUMENT or field.recursive for field in fields[:-1])
            if inside or fields[-1].kind not in _KEY_KINDS or fields[-1].type is complex:
                actual = "inside of a list or a union" if inside else str(fields[-1])
                raise OptionError(
                    f"{call}({name!r}): a field with one plain value a row is needed, and it is {actual}."
                )
        return cls(source, tuple(parse_path(name) for name in names))

    def __str__(self) -> str:
        return ", ".join(repr(join_path(path)) for path in self.paths)

    @property
    def fields(self) -> list[Field]:
        """The field of each key."""
        return [self.source.layout.schema.resolve(path)[-1] for path in self.paths]

    def check_order(self) -> None:
        """Raise unless the values of all keys have an order."""
        for path, field in zip(self.paths, self.fields, strict=True):
            is_text_enum = field.kind is FieldKind.ENUM and not issubclass(field.type, int)
            if is_text_enum or field.kind is FieldKind.DECIMAL:
                raise OptionError(
                    f"sort({join_path(path)!r}): {field} has no order in the stored form. Sort by a number or a text, "
                    "which map() can add to the documents."
                )

    def order_directions(self, descending: Sequence[bool]) -> list[bool]:
        """Return the direction of each of the `order_columns` of the canonical keys, given that of each key."""
        widths = [4 if field.kind is FieldKind.DATETIME else 2 for field in self.fields]
        return [is_down for is_down, width in zip(descending, widths, strict=True) for _ in range(width)]

    def values(self, batch: pa.RecordBatch) -> list[pa.Array]:
        """Return the stored value of each key, null where it or the document that has it is None."""
        columns = []
        for path in self.paths:
            column = batch.column(path[0])
            columns.append(column if len(path) == 1 else pc.struct_field(column, list(path[1:])))
        return columns

    def canonical(self, batch: pa.RecordBatch) -> list[pa.Array]:
        """Return arrays of numbers, texts and bytes that are equal, and ordered, as the values of the keys are."""
        columns: list[pa.Array] = []
        for path, field, array in zip(self.paths, self.fields, self.values(batch), strict=True):
            if field.kind is FieldKind.DATETIME:
                columns += self._instants(path, batch, array)
            elif field.kind is FieldKind.DECIMAL:
                columns.append(_map_distinct(array, lambda text: str(Decimal(text).normalize() + 0)))
            elif pa.types.is_floating(array.type):
                plain = pc.add(array.cast(pa.float64()), pa.scalar(0.0))  # -0.0 + 0.0 is 0.0
                columns.append(pc.if_else(pc.is_nan(plain), pa.scalar(np.nan), plain))
            elif pa.types.is_fixed_size_binary(array.type):
                columns.append(array.cast(pa.binary()))
            elif pa.types.is_string(array.type) or pa.types.is_binary(array.type):
                columns.append(array)
            elif pa.types.is_date32(array.type):
                columns.append(array.cast(pa.int32()).cast(pa.int64()))
            else:
                columns.append(array.cast(pa.int64()))
        return columns

    def _instants(self, path: FieldPath, batch: pa.RecordBatch, array: pa.Array) -> list[pa.Array]:
        """Return whether times have a zone, and their microseconds since 1970."""
        zones = pc.struct_field(array, ["zone"])
        if zones.null_count == len(zones):
            naive = pc.struct_field(array, ["at"]).cast(pa.int64())
            return [pc.if_else(naive.is_valid(), pa.scalar(0, pa.int64()), pa.scalar(None, pa.int64())), naive]
        narrow = self.source.select([join_path(path)])
        times = find_column(narrow.decode(batch.select(narrow.fields.names)), join_path(path)).values()
        aware = [None if at is None else int(at.tzinfo is not None) for at in times]
        moments = [
            None if at is None else (at - (_EPOCH if at.tzinfo is None else _UTC_EPOCH)) // _MICROSECOND for at in times
        ]
        return [pa.array(aware, pa.int64()), pa.array(moments, pa.int64())]


def _map_distinct(array: pa.Array, function: Any) -> pa.Array:
    encoded = array.dictionary_encode()
    texts = pa.array([function(text) for text in encoded.dictionary.to_pylist()], pa.string())
    return texts.take(encoded.indices)


def hash_keys(arrays: Sequence[pa.Array], seed: int = 0) -> NDArray[np.uint64]:
    """Return a hash of 64 bits for the canonical keys of each row: the same in every process and on every engine."""
    xxhash: Any = require("xxhash", extra="parquet", needed_for="grouping rows")
    hashes = np.full(len(arrays[0]), mix_bits(np.array([seed & (2**64 - 1)], np.uint64))[0], np.uint64)
    for array in arrays:
        if pa.types.is_integer(array.type) or pa.types.is_floating(array.type):
            values = mix_bits(_bits(array).fill_null(0).to_numpy(zero_copy_only=False).view(np.uint64))
        else:
            encoded = array.dictionary_encode()
            data = encoded.dictionary.cast(pa.binary()).to_pylist()
            digests = np.fromiter(map(xxhash.xxh3_64_intdigest, data), np.uint64, len(data))
            places = encoded.indices.fill_null(0).to_numpy(zero_copy_only=False)
            values = digests[places] if len(digests) else np.zeros(len(array), np.uint64)
        if array.null_count:
            values = np.where(array.is_null().to_numpy(zero_copy_only=False), _NULL_HASH, values)
        with np.errstate(over="ignore"):
            hashes = mix_bits(hashes * np.uint64(31) + values)
    return hashes


def mix_bits(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix the bits of numbers: the finalizer of splitmix64, a bijection."""
    with np.errstate(over="ignore"):
        values = values + np.uint64(0x9E3779B97F4A7C15)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed: NDArray[np.uint64] = values ^ (values >> np.uint64(31))
    return mixed


def _bits(array: pa.Array) -> pa.Array:
    """Return numbers as int64: floats by their bits, so that NaN equals NaN."""
    return array.view(pa.int64()) if pa.types.is_floating(array.type) else array


def partition_of_hash(hashes: NDArray[np.uint64], partitions: int) -> NDArray[np.int64]:
    """Return the partition of each hash. Partitions are ranges of hashes, so their order is that of the hashes."""
    assigned: NDArray[np.int64] = ((hashes >> np.uint64(32)) * np.uint64(partitions) >> np.uint64(32)).astype(np.int64)
    return assigned


def number_groups(arrays: Sequence[pa.Array]) -> NDArray[np.int64]:
    """Return the same number for rows with equal canonical keys: the place of the first such row."""
    codes = np.zeros(len(arrays[0]), np.int64)
    for array in arrays:
        encoded = _bits(array).dictionary_encode("encode")
        codes = codes * (len(encoded.dictionary) + 1) + encoded.indices.to_numpy(zero_copy_only=False)
        codes = np.unique(codes, return_inverse=True)[1].reshape(-1)  # small again, so that the next cannot overflow
    _, firsts, inverse = np.unique(codes, return_index=True, return_inverse=True)
    numbers: NDArray[np.int64] = firsts[inverse.reshape(-1)]
    return numbers


def order_columns(arrays: Sequence[pa.Array]) -> list[pa.Array]:
    """Return columns without nulls and NaN that are ordered like canonical keys."""
    columns = []
    for array in arrays:
        # 0 for None, 1 for a value, 2 for NaN: Arrow itself would put both missing values at the same end.
        classes = pc.cast(array.is_valid(), pa.int8())
        if pa.types.is_floating(array.type):
            is_nan = pc.fill_null(pc.is_nan(array), False)  # noqa: FBT003
            classes = pc.add(classes, pc.cast(is_nan, pa.int8()))
            array = pc.if_else(is_nan, pa.scalar(0.0), array)  # noqa: PLW2901
        zero: Any = 0 if pa.types.is_integer(array.type) or pa.types.is_floating(array.type) else ""
        columns += [
            classes,
            pc.fill_null(array, pa.scalar(b"" if pa.types.is_binary(array.type) else zero, array.type)),
        ]
    return columns


def sort_rows(columns: Sequence[pa.Array], descending: Sequence[bool]) -> NDArray[np.int64]:
    """Return the rows in the order of columns of `order_columns`; equal rows stay in their order."""
    names = [str(i) for i in range(len(columns))]
    directions = ["descending" if is_down else "ascending" for is_down in descending]
    table = pa.table(list(columns), names)
    order: NDArray[np.int64] = (
        pc.sort_indices(table, sort_keys=list(zip(names, directions, strict=True))).to_numpy().astype(np.int64)
    )
    return order
