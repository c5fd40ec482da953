"""Columns as pandas data frames, and series as what columns are made from.

Numbers go over as one array. Optional numbers have pandas' nullable dtypes, in which a missing number and NaN differ
and integers stay integers. Times without a zone or in UTC are datetime64; everything else is a column of objects.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import numpy as np

from quire._optional import require
from quire.codec._flat import check_nothing_more, is_spread, no_column
from quire.codec._json import to_dict
from quire.codec._readback import is_unchanged
from quire.columns import (
    Column,
    Columns,
    DocumentColumn,
    ObjectColumn,
    ScalarColumn,
    StackOptions,
    Validity,
    stack_values,
    validate_values,
    validity_of,
)
from quire.errors import ColumnError, DecodeError, EncodeError
from quire.schema import ROUND_TRIP, Field, FieldKind, FieldPath, Schema, join_path
from quire.tensors import describe

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MIXED = (FieldKind.UNION, FieldKind.ANY)
_KINDS = {bool: "b", int: "iuf", float: "fiu", complex: "cfiu"}
_OWN = {str, int, float, bool, type(None)}
_LONGEST = timedelta(microseconds=2**63 - 1)
_EXACT = 2**53  # floats hold every integer up to it


def get_pandas(needed_for: str) -> Any:
    """pandas, or an error that tells how to install it."""
    return require("pandas", extra="pandas", needed_for=needed_for)


# --- writing


def to_frame(parts: Iterable[tuple[FieldPath, Column]], length: int, present: Presence) -> Any:
    """A data frame with a column for each path."""
    pandas = get_pandas("to_dataframe()")
    series = {join_path(path): _series(pandas, column) for path, column in parts}
    frame = pandas.DataFrame(series, index=pandas.RangeIndex(length))
    for path, rows in present:
        inside = [name for name in frame.columns if name.startswith(f"{join_path(path)}.")]
        empty = np.flatnonzero(rows & ~frame[inside].notna().to_numpy().any(axis=1))
        if len(empty):
            raise EncodeError(
                f"row {empty[0]}: {join_path(path)!r} is a document without any value, and would be read back as None. "
                "Give it a field that always has one, such as an id, or use to_json()."
            )
    return frame


Presence = Iterable[tuple[FieldPath, "NDArray[np.bool_]"]]
"""Optional documents by path, and the rows that have one."""


def document_presence(schema: Schema, documents: Sequence[Any], prefix: FieldPath = ()) -> Presence:
    """The optional documents among the fields of documents, of which some may be None."""
    for field in filter(is_spread, schema.fields):
        path = (*prefix, field.name)
        values = [None if document is None else document.__dict__.get(field.name) for document in documents]
        if field.nullable:
            yield path, np.fromiter((value is not None for value in values), np.bool_, len(values))
        yield from document_presence(field.document_type.document_schema(), values, path)


def column_presence(columns: Columns, prefix: FieldPath = ()) -> Presence:
    """The optional documents among the columns of a batch."""
    for name, column in columns.columns.items():
        if isinstance(column, DocumentColumn) and is_spread(column.field):
            if column.field.nullable:
                yield (*prefix, name), column.valid_rows()
            yield from column_presence(column.columns, (*prefix, name))


def document_parts(
    schema: Schema, documents: Sequence[Any], prefix: FieldPath = ()
) -> Iterator[tuple[FieldPath, Column]]:
    """The columns of a table of documents, of which some may be None."""
    check_nothing_more(schema, documents, prefix, deep=False)
    rows = [None if document is None else document.__dict__ for document in documents]
    for field in schema.fields:
        path = (*prefix, field.name)
        values = [None if row is None else row.get(field.name) for row in rows]
        if is_spread(field):
            yield from document_parts(field.document_type.document_schema(), values, path)
        elif field.decodes_input:
            yield path, ObjectColumn(field, _input_texts(schema, field, values))
        elif field.kind is FieldKind.SCALAR:
            yield path, stack_values(field, values, StackOptions(), join_path(path))
        else:
            yield path, ObjectColumn(field, values)


def column_parts(columns: Columns, prefix: FieldPath = ()) -> Iterator[tuple[FieldPath, Column]]:
    """The columns of a table of a batch."""
    if any(rest is not None and (rest.fields or rest.extra) for rest in columns.extra_states or ()):
        raise EncodeError(no_column(columns.schema, prefix))
    for name, column in columns.columns.items():
        if isinstance(column, DocumentColumn) and is_spread(column.field):
            yield from column_parts(column.columns, (*prefix, name))
        elif column.field.decodes_input:
            texts = _input_texts(columns.schema, column.field, column.values())
            yield (*prefix, name), ObjectColumn(column.field, texts)
        else:
            yield (*prefix, name), column


def _input_texts(schema: Schema, field: Field, values: list[Any]) -> list[Any]:
    """The values of a field of `Json` or base64 as the texts that it takes."""

    def dump(value: Any) -> Any:
        document = schema.document_type.model_construct()
        document.__dict__[field.name] = value  # by name, which aliases might confuse
        return document.model_dump(include={field.name}, context={ROUND_TRIP: True})[field.name]

    texts = [None if value is None and field.nullable else dump(value) for value in values]
    rows = validity_of(values)
    try:
        again = validate_values(schema, field, texts, field.name, rows)
    except ColumnError as error:
        raise EncodeError(f"{schema.name}.{field.name}: a data frame of it could not be read back: {error}") from error
    if not is_unchanged(values, again):
        raise EncodeError(
            f"{schema.name}.{field.name}: its texts in a data frame would be read back as other values. Use to_bytes()."
        )
    return texts


def _series(pandas: Any, column: Column) -> Any:
    if isinstance(column, ScalarColumn):
        return _numbers(pandas, column)
    values, kind = column.values(), column.field.kind
    made = None
    if kind is FieldKind.DATETIME:
        made = _datetimes(pandas, values)
    elif kind is FieldKind.TIMEDELTA:
        made = _timedeltas(pandas, values)
    elif kind in (FieldKind.DOCUMENT, FieldKind.DOCUMENTS):
        values = [_plain(value) for value in values]
    _check_nan(column, values)
    return _objects(pandas, values) if made is None else made


def _check_nan(column: Column, values: list[Any]) -> None:
    """Refuse NaN where pandas cannot tell it from None."""
    if column.field.nullable and column.field.kind not in _MIXED:
        for row, value in enumerate(values):
            if isinstance(value, (complex, Decimal)) and value != value:
                raise EncodeError(
                    f"{column.field.name}, row {row}: a data frame cannot hold NaN and None in one column."
                )


def _objects(pandas: Any, values: list[Any]) -> Any:
    return pandas.Series(np.fromiter(values, np.object_, len(values)), dtype=object)


def _plain(value: Any) -> Any:
    """A document as a dict, an array as a list of dicts."""
    if value is None or isinstance(value, dict):
        return value
    return [to_dict(item) for item in value] if hasattr(type(value), "_trusted") else to_dict(value)


def _numbers(pandas: Any, column: ScalarColumn) -> Any:
    data = column.framework.to_numpy(column.data)
    if not column.field.nullable and column.validity is None:
        return data
    arrays = pandas.arrays
    masked = {"b": arrays.BooleanArray, "i": arrays.IntegerArray, "u": arrays.IntegerArray, "f": arrays.FloatingArray}
    if data.dtype.kind not in masked or data.dtype.itemsize == 2 and data.dtype.kind == "f":  # noqa: RUF021
        _check_nan(column, column.values())
        return _objects(pandas, column.values())
    return masked[data.dtype.kind](data.copy(), ~column.valid_rows())


def _datetimes(pandas: Any, values: list[Any]) -> Any:
    """datetime64 where nothing is lost: all without a zone, or all in UTC."""
    present = [value for value in values if value is not None]
    zones = {None if value.tzinfo is None else str(value.tzinfo) for value in present}
    if any(type(value) is not datetime or value.fold or value.utcoffset() for value in present):
        return None
    if len(zones) > 1 or not zones <= {None, "UTC"}:
        return None
    naive = [None if value is None else value.replace(tzinfo=None) for value in values]
    series = pandas.Series(np.array(naive, "datetime64[us]"))
    return series.dt.tz_localize("UTC") if zones == {"UTC"} else series


def _timedeltas(pandas: Any, values: list[Any]) -> Any:
    if any(value is not None and abs(value) > _LONGEST for value in values):
        return None
    return pandas.Series(np.array(values, "timedelta64[us]"))


# --- reading


def as_frame(table: Any) -> Any:
    """A pandas data frame; that of polars or Arrow is converted."""
    pandas = get_pandas("from_dataframe()")
    if not isinstance(table, pandas.DataFrame) and hasattr(table, "to_pandas"):
        table = table.to_pandas()
    if not isinstance(table, pandas.DataFrame):
        raise DecodeError(f"from_dataframe() takes a data frame, got {describe(table)}.")
    return table


def read_numbers(series: Any, field: Field) -> tuple[NDArray[Any], Validity] | None:
    """A series of numbers as an array, and which rows have one; None where that needs a look at each value."""
    dtype, missing = series.dtype, series.isna().to_numpy()
    target = dtype if isinstance(dtype, np.dtype) else getattr(dtype, "numpy_dtype", None)
    if not isinstance(target, np.dtype) or target.kind not in _KINDS.get(field.type, ""):
        return None
    if isinstance(dtype, np.dtype):
        data = series.to_numpy()
        missing = missing & field.nullable  # NaN is a number where there is no None
    else:
        data = series.to_numpy(dtype=target, na_value=target.type())
    if target.kind == "f" and field.type is int:
        data = np.where(missing, 0, data)
        if not (np.isfinite(data) & (data == np.trunc(data)) & (abs(data) <= _EXACT)).all():
            return None
        data = data.astype(np.int64)
    wider = {float: np.float64, complex: np.complex128}.get(field.type)
    data = data.astype(wider) if wider is not None and target.kind != np.dtype(wider).kind else data.copy()
    return data, ~missing if missing.any() else None


def read_objects(series: Any, field: Field) -> list[Any]:
    """The values of a series as Python objects, and None where there is none."""
    if getattr(series.dtype, "kind", "O") in "mM":
        return _read_times(series)
    values: list[Any] = series.tolist()
    missing = series.isna().to_numpy()
    if missing.any():
        keeps_nan = field.kind in _MIXED or (field.type in (float, complex, Decimal) and not field.nullable)
        gone = zip(missing.tolist(), values, strict=True)
        values = [None if m and not (keeps_nan and isinstance(v, (float, complex, Decimal))) else v for m, v in gone]
    if field.kind is FieldKind.TENSOR or set(map(type, values)) <= _OWN:
        return values
    return [_python(value) for value in values]


def _python(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    convert = getattr(value, "to_pydatetime", None) or getattr(value, "to_pytimedelta", None)
    return value if convert is None or value != value else convert()


def _read_times(series: Any) -> list[Any]:
    """datetime64 and timedelta64 as Python's own; finer than a microsecond is more than those can hold."""
    zone = getattr(series.dtype, "tz", None)
    data = (series if zone is None else series.dt.tz_convert("UTC").dt.tz_localize(None)).to_numpy()
    coarse = data.astype(f"{'datetime64' if data.dtype.kind == 'M' else 'timedelta64'}[us]")
    finer = np.flatnonzero((coarse.astype(data.dtype) != data) & ~np.isnat(data))
    if len(finer):
        raise DecodeError(f"row {finer[0]}: {data[finer[0]]} has nanoseconds, which Python's times do not hold.")
    times: list[Any] = coarse.astype(object).tolist()
    bad = next((row for row, time in enumerate(times) if not isinstance(time, (datetime, timedelta, type(None)))), None)
    if bad is not None:
        raise DecodeError(f"row {bad}: {data[bad]} lies beyond what Python's times hold.")
    if zone is None:
        return times
    utc = [None if time is None else time.replace(tzinfo=timezone.utc) for time in times]
    return utc if str(zone) == "UTC" else [None if time is None else time.astimezone(zone) for time in utc]
