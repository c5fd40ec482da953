"""A document class for rows that have none: made of what all of their values are."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from itertools import islice
from typing import Annotated, Any, ClassVar
from uuid import UUID

import numpy as np
from pydantic import Field, create_model

from quire._typing import is_array_type, is_document_type
from quire.array import DocumentArray
from quire.document import BaseDocument, field_name
from quire.tensors import DType, Shape, framework_of

_PLAIN = (bool, int, float, str, bytes, datetime, date, time, timedelta, Decimal, UUID)
_WORDS = {bool, int, float, str}


class Row(BaseDocument):
    """A row without an id of its own."""

    id: ClassVar[None] = None  # type: ignore[assignment,misc]


class Kinds:
    """What the values at one place of all rows are."""

    def __init__(self) -> None:
        self.found: set[Any] = set()
        self.count = self.nones = 0
        self.fields: dict[str, Kinds] = {}
        self.documents = 0
        self.items: Kinds | None = None
        self.dtypes: set[str] = set()
        self.shapes: set[tuple[int, ...]] = set()

    def expect(self, row: Mapping[str, Any]) -> None:
        """Know of fields before a row has them."""
        for name, item in row.items():
            inner = self.fields.setdefault(name, Kinds())
            if isinstance(item, Mapping):
                inner.found.add("document")
                inner.expect(item)

    def add(self, value: Any) -> None:
        """Take the value of another row."""
        self.count += 1
        if value is None:
            self.nones += 1
        elif isinstance(value, _PLAIN):
            self.found.add(_plain_type(value))
        elif isinstance(value, Mapping):
            self._add_mapping(value)
        elif is_document_type(type(value)):
            self._add_mapping(contents(value))
        elif isinstance(value, (list, tuple)) or is_array_type(type(value)):
            self._add_items(value)
        else:
            self._add_tensor(value)

    def _add_mapping(self, value: Mapping[str, Any]) -> None:
        if {"dtype", "shape", "data"} <= value.keys():  # a tensor as JSON has it
            self._add_shape(str(value["dtype"]), value["shape"])
            return
        self.found.add("document")
        self.documents += 1
        for name, item in value.items():
            self.fields.setdefault(str(name), Kinds()).add(item)

    def _add_items(self, values: Iterable[Any]) -> None:
        self.found.add("list")
        self.items = self.items or Kinds()
        for item in values:
            self.items.add(item)

    def _add_tensor(self, value: Any) -> None:
        framework = framework_of(value)
        if framework is None or framework.is_sparse(value):
            self.found.add(object)
        else:
            self._add_shape(framework.dtype(value), framework.shape(value))

    def _add_shape(self, dtype: str, shape: Iterable[int]) -> None:
        self.found.add("tensor")
        self.dtypes.add(dtype)
        self.shapes.add(tuple(shape))

    def annotation(self, name: str, *, text: bool = False) -> Any:
        """The type of the values; of `text`, a mixture of words and numbers is words."""
        found = self._type(name, text=text)
        return found if found is Any or not self.nones else found | None

    def _type(self, name: str, *, text: bool) -> Any:
        found = self.found
        if found == {"document"}:
            return self.document_type(name, text=text)
        if found == {"list"} and self.items is not None:
            return self._list(self.items, name)
        if found == {"tensor"}:
            return self._tensor()
        if found in ({int, float}, {float}):
            return float
        if text and found and found <= _WORDS:
            return found.copy().pop() if len(found) == 1 else str
        return found.copy().pop() if len(found) == 1 and found <= {*_PLAIN} else str if text and not found else Any

    def _list(self, items: Kinds, name: str) -> Any:
        if items.found == {"document"} and not items.nones:
            return DocumentArray[items.document_type(name)]  # type: ignore[misc]
        return list[items.annotation(name)] if items.count else list[Any]  # type: ignore[misc]

    def _tensor(self) -> Any:
        found: Any = np.ndarray
        if len(self.shapes) == 1:
            found = Annotated[found, Shape(*next(iter(self.shapes)))]
        return Annotated[found, DType(next(iter(self.dtypes)))] if len(self.dtypes) == 1 else found

    def document_type(self, name: str, *, text: bool = False) -> Any:
        """A class with a field for each name that some row has; those that not all have may be None."""
        made: dict[str, Any] = {}
        for key, kinds in self.fields.items():
            own = field_name(key, made)
            kinds.nones += self.documents - kinds.count
            found = kinds.annotation(f"{name}_{own}", text=text)
            default: dict[str, Any] = {"default": None} if kinds.nones or found is Any else {}
            made[own] = (found, Field(**default) if own == key else Field(alias=key, **default))
        base = BaseDocument if "id" in made else Row
        return create_model(_class_name(name), __base__=base, **made)


def _plain_type(value: Any) -> Any:
    if type(value) is int and not -(1 << 63) <= value < 1 << 63:
        return object  # no column has such numbers
    return type(value) if type(value) in _PLAIN else next(known for known in _PLAIN if isinstance(value, known))


def contents(document: Any) -> dict[str, Any]:
    """All that a document holds, by name."""
    return {**document.__dict__, **(document.__pydantic_extra__ or {})}


def plain(value: Any) -> Any:
    """A document of a class that is not loaded as a dict, and those inside it."""
    if is_document_type(type(value)):
        return {name: plain(item) for name, item in contents(value).items()}
    if is_array_type(type(value)) or isinstance(value, list):
        return [plain(item) for item in value]
    return value


def inferred(rows: Iterable[Any], name: str, sample: int | None = None) -> tuple[Any, int | None]:
    """The class of rows, mappings or documents, and how many there are; of a sample of them, no one knows."""
    kinds = Kinds()
    for row in islice(rows, sample):
        kinds.add(row)
    return kinds.document_type(name), None if kinds.count == sample else kinds.count


def inferred_table(rows: Iterator[Mapping[str, Any]], name: str, sample: int | None = None) -> tuple[Any, int | None]:
    """The class of the rows of a table, the first of which only tells the columns; a mixture is text."""
    kinds = Kinds()
    kinds.expect(next(rows))
    for row in islice(rows, sample):
        kinds.add(row)
    return kinds.document_type(name, text=True), None if kinds.count == sample else kinds.count


def _class_name(name: str) -> str:
    words = re.findall(r"[^\W_]+", name)
    made = "".join(word[0].upper() + word[1:] for word in words)
    return made if made[:1].isalpha() else f"Row{made}"
