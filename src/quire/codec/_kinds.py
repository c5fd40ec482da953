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
    is_certain: Callable[[Field], bool] = lambda _: False
    """Whether JSON, CSV and dicts keep every value of a field; the values of other fields are read back. The items of a
    container are checked by their own kinds."""
    cell: CellForm = CellForm.TEXT
    series: Callable[[ModuleType, list[Any]], pd.Series[Any] | None] | None = None
    """Make a series of pandas from values; None, also as a result, means a series of objects."""
    make_scalar_form: Callable[[Field], ScalarForm | None] | None = None
    """Make the form of values that are a single scalar in protobuf; None, also as a result, for messages and enums."""

    def scalar_form(self, field: Field) -> ScalarForm | None:
        """Return the form of a field whose values are a single scalar in protobuf; None for others."""
        return None if self.make_scalar_form is None else self.make_scalar_form(field)


def _accept_instances(*types: type[Any]) -> Callable[[Field, object], bool]:
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
    FieldKind.TENSOR: KindRules(
        lambda _, value: framework_of(value) is not None, is_certain=lambda _: True, cell=CellForm.TREE
    ),
    FieldKind.SCALAR: KindRules(
        _accept_number,
        self_describing=(bool, int, float, complex),
        is_certain=_is_one_of(bool, int, float),
        cell=CellForm.NUMBER,
        make_scalar_form=number_form,
    ),
    FieldKind.TEXT: KindRules(
        _accept_instances(str),
        self_describing=(str,),
        is_certain=_is_one_of(str),
        make_scalar_form=lambda field: ScalarForm("string", str if field.type is str else str.__str__, field.type),
    ),
    FieldKind.BYTES: KindRules(
        _accept_instances(bytes),
        self_describing=(bytes,),
        is_certain=_is_one_of(bytes),
        make_scalar_form=lambda field: ScalarForm("bytes", bytes, field.type),
    ),
    FieldKind.ENUM: KindRules(_accept_instances(Enum), is_certain=_is_certain_enum, make_scalar_form=flag_form),
    FieldKind.DATETIME: KindRules(
        _accept_instances(datetime),
        is_certain=lambda _: True,
        series=_datetime_series,
        make_scalar_form=iso_form(datetime, "date and time in ISO 8601, with the offset if known"),
    ),
    FieldKind.DATE: KindRules(
        lambda _, value: isinstance(value, date) and not isinstance(value, datetime),
        is_certain=lambda _: True,
        make_scalar_form=iso_form(date, "date in ISO 8601"),
    ),
    # A time is read back: pydantic reads the offset of its zone, but no zone.
    FieldKind.TIME: KindRules(_accept_instances(time), make_scalar_form=iso_form(time, "time of day in ISO 8601")),
    FieldKind.TIMEDELTA: KindRules(_accept_instances(timedelta), is_certain=lambda _: True, series=_timedelta_series),
    FieldKind.UUID: KindRules(
        _accept_instances(UUID),
        is_certain=lambda _: True,
        make_scalar_form=text_form("UUID, 8-4-4-4-12 hexadecimal digits"),
    ),
    FieldKind.DECIMAL: KindRules(
        _accept_instances(Decimal), is_certain=_is_one_of(Decimal), make_scalar_form=text_form("decimal number")
    ),
    FieldKind.PATH: KindRules(
        _accept_instances(PurePath),
        is_certain=lambda field: issubclass(field.type, PurePath),
        make_scalar_form=text_form("path"),
    ),
    # Whether a document is certain depends on its class, see `_readback`.
    FieldKind.DOCUMENT: KindRules(lambda _, value: is_document_type(type(value)), cell=CellForm.TREE),
    FieldKind.DOCUMENTS: KindRules(lambda _, value: is_array_type(type(value)), cell=CellForm.TREE),
    FieldKind.LIST: KindRules(
        _accept_instances(list, tuple, set, frozenset),
        self_describing=(list, tuple, set, frozenset),
        is_certain=lambda field: field.type in (list, tuple, set, frozenset) and bool(field.items),
        cell=CellForm.TREE,
        make_scalar_form=list_form,
    ),
    FieldKind.DICT: KindRules(
        _accept_instances(Mapping),
        self_describing=(dict,),
        is_certain=_is_certain_dict,
        cell=CellForm.TREE,
        make_scalar_form=dict_form,
    ),
    FieldKind.UNION: KindRules(lambda *_: True, cell=CellForm.JSON),
    FieldKind.ANY: KindRules(
        lambda *_: True,
        self_describing=(Any, object, None, type(None)),
        cell=CellForm.JSON,
        make_scalar_form=any_form,
    ),
}
