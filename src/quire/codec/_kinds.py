"""What each kind of field means to the codec: one entry in `KINDS` for all forms of documents.

The entry of a kind says which values it has on the wire, in JSON, in CSV, in data frames and in protobuf messages. How
a value is written to the wire is not part of it, because values are encoded by their own type and not by a field
(`_values`), and neither are nested columns (`_columns`) and nested messages (`_proto_schema`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, Flag
from pathlib import PurePath
from typing import TYPE_CHECKING, Any
from uuid import UUID

import numpy as np

from quire._protocols import is_array_type, is_document_type
from quire.codec._proto_plan import (
    ScalarForm,
    any_form,
    dict_form,
    flag_form,
    iso_form,
    list_form,
    number_form,
    string_form,
    text_form,
)
from quire.schema import Field, FieldKind
from quire.tensors import framework_of

if TYPE_CHECKING:
    from types import ModuleType

    import pandas as pd


class CellForm(Enum):
    """How the values of a column are written in the cells of a CSV file."""

    TEXT = "text"  # the text of the JSON value, without quotation marks
    NUMBER = "number"
    TREE = "tree"  # a JSON object or list
    JSON = "json"  # JSON also for texts, by which a union distinguishes the text "1" from the number


@dataclass(frozen=True, slots=True)
class KindRules:
    """What a kind of field means to the codec."""

    accepts: Callable[[Field, object], bool]
    """Whether a value that was decoded from the wire is of the kind of a field."""
    self_describing: tuple[Any, ...] | None = None
    """The types whose encoding identifies them; None: every type of the kind. Others share an encoding with these."""
    certain: Callable[[Field], bool] | bool = False
    """Whether JSON, CSV and dicts keep every value of a field; the values of other fields are read back. The items of a
    container are checked by their own kinds."""
    cell: CellForm = CellForm.TEXT
    series: Callable[[ModuleType, list[Any]], pd.Series[Any] | None] | None = None
    """Make a series of pandas from values; None, also as a result, means a series of objects."""
    scalar: Callable[[Field], ScalarForm | None] | None = None
    """Make the form of values that are a single scalar in protobuf; None, also as a result, for messages and enums."""

    def is_certain(self, field: Field) -> bool:
        """Return whether JSON, CSV and dicts keep every value of a field of this kind."""
        return self.certain(field) if callable(self.certain) else self.certain

    def scalar_form(self, field: Field) -> ScalarForm | None:
        """Return the form of a field whose values are a single scalar in protobuf; None for others."""
        return None if self.scalar is None else self.scalar(field)


def _instances(*types: type[Any]) -> Callable[[Field, object], bool]:
    return lambda _, value: isinstance(value, types)


def _is_one_of(*types: type[Any]) -> Callable[[Field], bool]:
    return lambda field: field.type in types or field.wrapper is not None


_NUMBERS: dict[type[Any], tuple[type[Any], ...]] = {  # a field may have been widened since its values were written
    bool: (bool,),
    int: (int,),
    float: (float, int),
    complex: (complex, float, int),
}


def _accept_number(field: Field, value: object) -> bool:
    base = next((base for base in _NUMBERS if issubclass(field.type, base)), field.type)
    return isinstance(value, _NUMBERS.get(base, (base,))) and isinstance(value, bool) == (base is bool)


def _is_certain_enum(field: Field) -> bool:
    values = {type(member.value) for member in field.type} if issubclass(field.type, Enum) else set()
    return not issubclass(field.type, Flag) and values in ({str}, {int})


def _is_certain_dict(field: Field) -> bool:
    is_plain = field.type is dict and len(field.items) == 2
    return is_plain and field.items[0].type in (str, int) and not field.items[0].nullable


def _datetime_series(pandas: ModuleType, values: list[Any]) -> pd.Series[Any] | None:
    """Return datetime64 if nothing is lost, that is if all times are without a zone or all in UTC; else None."""
    present = [value for value in values if value is not None]
    zones = {None if value.tzinfo is None else str(value.tzinfo) for value in present}
    if any(type(value) is not datetime or value.fold or value.utcoffset() for value in present):
        return None
    if len(zones) > 1 or not zones <= {None, "UTC"}:
        return None
    naive = [None if value is None else value.replace(tzinfo=None) for value in values]
    series: pd.Series[Any] = pandas.Series(np.array(naive, "datetime64[us]"))
    return series.dt.tz_localize("UTC") if zones == {"UTC"} else series


_MAX_TIMEDELTA = timedelta(microseconds=2**63 - 1)


def _timedelta_series(pandas: ModuleType, values: list[Any]) -> pd.Series[Any] | None:
    if any(value is not None and abs(value) > _MAX_TIMEDELTA for value in values):
        return None
    series: pd.Series[Any] = pandas.Series(np.array(values, "timedelta64[us]"))
    return series


KINDS: dict[FieldKind, KindRules] = {
    FieldKind.TENSOR: KindRules(lambda _, value: framework_of(value) is not None, certain=True, cell=CellForm.TREE),
    FieldKind.SCALAR: KindRules(
        _accept_number,
        self_describing=(bool, int, float, complex),
        certain=_is_one_of(bool, int, float),
        cell=CellForm.NUMBER,
        scalar=number_form,
    ),
    FieldKind.TEXT: KindRules(_instances(str), self_describing=(str,), certain=_is_one_of(str), scalar=string_form),
    FieldKind.BYTES: KindRules(
        _instances(bytes),
        self_describing=(bytes,),
        certain=_is_one_of(bytes),
        scalar=lambda field: ScalarForm("bytes", bytes, field.type),
    ),
    FieldKind.ENUM: KindRules(_instances(Enum), certain=_is_certain_enum, scalar=flag_form),
    # Except for offsets with seconds, see `_readback`.
    FieldKind.DATETIME: KindRules(
        _instances(datetime),
        certain=True,
        series=_datetime_series,
        scalar=iso_form(datetime, "date and time in ISO 8601, with the offset if known"),
    ),
    FieldKind.DATE: KindRules(
        lambda _, value: isinstance(value, date) and not isinstance(value, datetime),
        certain=True,
        scalar=iso_form(date, "date in ISO 8601"),
    ),
    # JSON has the offset of a time, but a named zone has none without a date, and would be dropped.
    FieldKind.TIME: KindRules(_instances(time), scalar=iso_form(time, "time of day in ISO 8601")),
    FieldKind.TIMEDELTA: KindRules(_instances(timedelta), certain=True, series=_timedelta_series),
    FieldKind.UUID: KindRules(_instances(UUID), certain=True, scalar=text_form("UUID, 8-4-4-4-12 hexadecimal digits")),
    FieldKind.DECIMAL: KindRules(_instances(Decimal), certain=_is_one_of(Decimal), scalar=text_form("decimal number")),
    FieldKind.PATH: KindRules(
        _instances(PurePath), certain=lambda field: issubclass(field.type, PurePath), scalar=text_form("path")
    ),
    # Whether a document is certain depends on its class, see `_readback`.
    FieldKind.DOCUMENT: KindRules(lambda _, value: is_document_type(type(value)), cell=CellForm.TREE),
    FieldKind.DOCUMENTS: KindRules(lambda _, value: is_array_type(type(value)), cell=CellForm.TREE),
    FieldKind.LIST: KindRules(
        _instances(list, tuple, set, frozenset),
        self_describing=(list, tuple, set, frozenset),
        certain=lambda field: field.type in (list, tuple, set, frozenset) and bool(field.items),
        cell=CellForm.TREE,
        scalar=list_form,
    ),
    FieldKind.DICT: KindRules(
        _instances(Mapping), self_describing=(dict,), certain=_is_certain_dict, cell=CellForm.TREE, scalar=dict_form
    ),
    FieldKind.UNION: KindRules(lambda *_: True, cell=CellForm.JSON),
    FieldKind.ANY: KindRules(
        lambda *_: True, self_describing=(Any, object, None, type(None)), cell=CellForm.JSON, scalar=any_form
    ),
}
