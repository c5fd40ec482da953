"""Columns as pandas data frames, and series as values of columns.

Numbers are converted as one array. Optional numbers have pandas' nullable dtypes, in which a missing number and NaN
differ and integers stay integers. Times without a zone or in UTC become datetime64, durations timedelta64
(`KindRules.series`); everything else is a series of objects.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import BaseModel

from quire._equality import is_unchanged
from quire._optional import require
from quire._protocols import is_array_type
from quire.codec._json import to_dict
from quire.codec._kinds import KINDS
from quire.codec._table_columns import check_all_in_columns, describe_missing_column, is_spread
from quire.codec._values import EXACT_INTEGERS
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
)
from quire.errors import ColumnError, DecodeError, EncodeError
from quire.schema import ROUND_TRIP, Field, FieldKind, FieldPath, Schema, join_path
from quire.tensors import describe

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import NDArray
    from pandas.api.extensions import ExtensionArray

_MIXED_KINDS = (FieldKind.UNION, FieldKind.ANY)
_DTYPE_KINDS = {bool: "b", int: "iuf", float: "fiu", complex: "cfiu"}
"""The dtypes of series that fields of numbers accept without a look at each value."""
_PYTHON_TYPES = {str, int, float, bool, type(None)}


def _get_pandas(needed_for: str) -> ModuleType:
    return require("pandas", extra="pandas", needed_for=needed_for)


# --- writing

Presence = Iterable[tuple[FieldPath, "NDArray[np.bool_]"]]
"""Optional documents by path, and the rows that have one."""


def make_dataframe(parts: Iterable[tuple[FieldPath, Column]], length: int, present: Presence) -> pd.DataFrame:
    """Return a data frame with a column for each path."""
    pandas = _get_pandas("to_dataframe()")
    series = {join_path(path): _make_series(pandas, column) for path, column in parts}
    frame: pd.DataFrame = pandas.DataFrame(series, index=pandas.RangeIndex(length))
    for path, rows in present:
        # A document is read back as None if all its columns are missing: pandas has no missing documents.
        inside = [name for name in frame.columns if name.startswith(f"{join_path(path)}.")]
        empty = np.flatnonzero(rows & ~frame[inside].notna().to_numpy().any(axis=1))
        if len(empty):
            raise EncodeError(
                f"row {empty[0]}: {join_path(path)!r} is a document without any value, and would be read back as None. "
                "Give it a field that always has one, such as an id, or use to_json()."
            )
    return frame


def find_present_documents(schema: Schema, documents: Sequence[Any], prefix: FieldPath = ()) -> Presence:
    """Yield the optional documents among the fields of documents, of which some may be None."""
    for field in filter(is_spread, schema.fields):
        path = (*prefix, field.name)
        values = [None if document is None else document.__dict__.get(field.name) for document in documents]
        if field.nullable:
            yield path, np.fromiter((value is not None for value in values), np.bool_, len(values))
        yield from find_present_documents(field.document_type.document_schema(), values, path)


def find_present_columns(columns: Columns, prefix: FieldPath = ()) -> Presence:
    """Yield the optional documents among the columns of a batch."""
    for name, column in columns.columns.items():
        if isinstance(column, DocumentColumn) and is_spread(column.field):
            if column.field.nullable:
                yield (*prefix, name), column.valid_rows()
            yield from find_present_columns(column.columns, (*prefix, name))


def flatten_documents(
    schema: Schema, documents: Sequence[Any], prefix: FieldPath = ()
) -> Iterator[tuple[FieldPath, Column]]:
    """Yield the columns of a table of documents, of which some may be None."""
    check_all_in_columns(schema, documents, prefix, deep=False)
    rows = [None if document is None else document.__dict__ for document in documents]
    for field in schema.fields:
        path = (*prefix, field.name)
        values = [None if row is None else row.get(field.name) for row in rows]
        if is_spread(field):
            yield from flatten_documents(field.document_type.document_schema(), values, path)
        elif field.decodes_input:
            present = np.fromiter((row is not None for row in rows), np.bool_, len(rows))
            yield path, ObjectColumn(field, _encode_inputs(schema, field, values, present))
        elif field.kind is FieldKind.SCALAR:
            yield path, stack_values(field, values, StackOptions(), join_path(path))
        else:
            yield path, ObjectColumn(field, values)


def flatten_columns(
    columns: Columns, prefix: FieldPath = (), present: NDArray[np.bool_] | None = None
) -> Iterator[tuple[FieldPath, Column]]:
    """Yield the columns of a table of a batch; of a nested document, with the rows that have one."""
    present = np.ones(len(columns), np.bool_) if present is None else present
    if any(state is not None and (state.fields or state.extra) for state in columns.extra_states or ()):
        raise EncodeError(describe_missing_column(columns.schema, prefix))
    for name, column in columns.columns.items():
        if isinstance(column, DocumentColumn) and is_spread(column.field):
            yield from flatten_columns(column.columns, (*prefix, name), present & column.valid_rows())
        elif column.field.decodes_input:
            texts = _encode_inputs(columns.schema, column.field, column.values(), present)
            yield (*prefix, name), ObjectColumn(column.field, texts)
        else:
            yield (*prefix, name), column


def _encode_inputs(schema: Schema, field: Field, values: list[Any], present: NDArray[np.bool_]) -> list[Any]:
    """Return the values of a field of `Json` or base64 as the texts that it accepts as input.

    `present` are the rows that have a document; the others have no text. In a document, None may be the JSON text null.
    """

    def dump(value: Any) -> Any:
        document = schema.document_type.model_construct()
        document.__dict__[field.name] = value  # by name, which aliases might confuse
        return document.model_dump(include={field.name}, context={ROUND_TRIP: True})[field.name]

    texts = [
        None if not exists or (value is None and field.nullable) else dump(value)
        for value, exists in zip(values, present, strict=True)
    ]
    try:
        decoded = validate_values(schema, field, texts, field.name, present)
    except ColumnError as error:
        raise EncodeError(f"{schema.name}.{field.name}: a data frame of it could not be read back: {error}") from error
    if not is_unchanged(values, decoded):
        raise EncodeError(
            f"{schema.name}.{field.name}: its texts in a data frame would be read back as other values. Use to_bytes()."
        )
    return texts


def _make_series(pandas: ModuleType, column: Column) -> pd.Series[Any] | ExtensionArray | NDArray[Any]:
    if isinstance(column, ScalarColumn):
        data = column.framework.to_numpy(column.data)
        if not column.field.nullable and column.validity is None:
            return data
        arrays = pandas.arrays
        masked = {
            "b": arrays.BooleanArray,
            "i": arrays.IntegerArray,
            "u": arrays.IntegerArray,
            "f": arrays.FloatingArray,
        }
        if data.dtype.kind in masked and data.dtype != np.float16:  # of which pandas has no nullable array
            return masked[data.dtype.kind](data.copy(), ~column.valid_rows())
    values = column.values()
    if column.field.nullable and column.field.kind not in _MIXED_KINDS:
        for row, value in enumerate(values):
            if isinstance(value, (complex, Decimal)) and value != value:
                raise EncodeError(
                    f"{column.field.name}, row {row}: a data frame cannot hold NaN and None in one column."
                )
    if column.field.kind in (FieldKind.DOCUMENT, FieldKind.DOCUMENTS):
        values = list(map(_dump_documents, values))
    make = KINDS[column.field.kind].series
    series = None if make is None else make(pandas, values)
    return pandas.Series(np.fromiter(values, np.object_, len(values)), dtype=object) if series is None else series


def _dump_documents(value: object) -> object:
    """Return a document as a dict, an array as a list of dicts, and other values as they are."""
    if is_array_type(type(value)):
        return list(map(to_dict, value))  # type: ignore[call-overload]
    return to_dict(value) if isinstance(value, BaseModel) else value


# --- reading


def to_pandas(table: object) -> pd.DataFrame:
    """Return a data frame of pandas, polars or Arrow as one of pandas."""
    pandas = _get_pandas("from_dataframe()")
    frame = table
    if not isinstance(table, pandas.DataFrame) and hasattr(table, "to_pandas"):
        frame = table.to_pandas()
    if not isinstance(frame, pandas.DataFrame):
        raise DecodeError(f"from_dataframe() takes a data frame, got {describe(frame)}.")
    return frame


def read_numbers(series: pd.Series[Any], field: Field) -> tuple[NDArray[Any], Validity] | None:
    """Return a series of numbers as an array, and the rows that have one; None if each value must be looked at."""
    dtype, missing = series.dtype, series.isna().to_numpy()
    target = dtype if isinstance(dtype, np.dtype) else getattr(dtype, "numpy_dtype", None)
    if not isinstance(target, np.dtype) or target.kind not in _DTYPE_KINDS.get(field.type, ""):
        return None
    if isinstance(dtype, np.dtype):
        data = series.to_numpy()
        missing = missing & field.nullable  # NaN is a number if the field does not accept None
    else:
        data = series.to_numpy(dtype=target, na_value=target.type())
    if target.kind == "f" and field.type is int:  # pandas has integers with missing values as floats
        data = np.where(missing, 0, data)
        if not (np.isfinite(data) & (data == np.trunc(data)) & (abs(data) <= EXACT_INTEGERS)).all():
            return None
        data = data.astype(np.int64)
    wider = {float: np.float64, complex: np.complex128}.get(field.type)
    data = data.astype(wider) if wider is not None and target.kind != np.dtype(wider).kind else data.copy()
    return data, ~missing if missing.any() else None


def read_objects(series: pd.Series[Any], field: Field) -> list[Any]:
    """Return the values of a series as Python objects, and None for missing ones."""
    if getattr(series.dtype, "kind", "O") in "mM":
        return _read_times(series)
    values: list[Any] = series.tolist()
    missing = series.isna().to_numpy()
    if missing.any():
        keeps_nan = field.kind in _MIXED_KINDS or (field.type in (float, complex, Decimal) and not field.nullable)
        values = [
            None if is_missing and not (keeps_nan and isinstance(value, (float, complex, Decimal))) else value
            for is_missing, value in zip(missing.tolist(), values, strict=True)
        ]
    if field.kind is FieldKind.TENSOR or set(map(type, values)) <= _PYTHON_TYPES:
        return values
    for row, value in enumerate(values):
        if isinstance(value, np.generic):
            values[row] = value.item()
            continue
        convert = getattr(value, "to_pydatetime", None) or getattr(value, "to_pytimedelta", None)
        if convert is not None and value == value:  # NaT has these methods, too
            values[row] = convert()
    return values


def _read_times(series: pd.Series[Any]) -> list[Any]:
    """Return datetime64 and timedelta64 as Python's own types, which hold nothing finer than a microsecond."""
    zone = getattr(series.dtype, "tz", None)
    data = (series if zone is None else series.dt.tz_convert("UTC").dt.tz_localize(None)).to_numpy()
    # Converted to microseconds and back: the times that differ had nanoseconds.
    coarse = data.astype(f"{'datetime64' if data.dtype.kind == 'M' else 'timedelta64'}[us]")
    finer = np.flatnonzero((coarse.astype(data.dtype) != data) & ~np.isnat(data))
    if len(finer):
        raise DecodeError(f"row {finer[0]}: {data[finer[0]]} has nanoseconds, which Python's times do not hold.")
    times: list[Any] = coarse.astype(object).tolist()
    bad = next((row for row, time in enumerate(times) if not isinstance(time, (datetime, timedelta, type(None)))), None)
    if bad is not None:
        raise DecodeError(f"row {bad}: {data[bad]} is beyond the range of Python's times.")
    if zone is None:
        return times
    utc = [None if time is None else time.replace(tzinfo=timezone.utc) for time in times]
    return utc if str(zone) == "UTC" else [None if time is None else time.astimezone(zone) for time in utc]
