"""Columns of Python objects: text, dates, lists, unions, sparse tensors, whatever has no array form."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
from typing_extensions import Self

from quire.columns._column import Column, TensorMap
from quire.schema import Field, FieldKind
from quire.tensors import framework_of_type

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MAY_HOLD_TENSORS = (FieldKind.TENSOR, FieldKind.UNION, FieldKind.ANY)


class ObjectColumn(Column):
    """A list of values; None where there is none."""

    __slots__ = ("items",)

    def __init__(self, field: Field, items: list[Any]) -> None:
        self.field, self.validity, self.items = field, None, items

    def __len__(self) -> int:
        return len(self.items)

    def values(self) -> list[Any]:
        return self.items

    def value(self, index: int) -> Any:
        return self.items[index]

    def take(self, indices: NDArray[np.int64]) -> Self:
        if len(indices) < 2:
            return type(self)(self.field, [self.items[i] for i in indices.tolist()])
        return type(self)(self.field, list(itemgetter(*indices.tolist())(self.items)))

    def slice(self, rows: slice) -> Self:
        return type(self)(self.field, self.items[rows])

    def concat(self, others: Sequence[Self]) -> Self | None:
        return type(self)(self.field, [item for column in (self, *others) for item in column.items])

    def map_tensors(self, change: TensorMap) -> Self:
        if self.field.kind not in _MAY_HOLD_TENSORS:
            return self
        frameworks = {tp: framework_of_type(tp) for tp in set(map(type, self.items))}
        pairs = [(frameworks[type(item)], item) for item in self.items]
        return type(self)(self.field, [item if fw is None else change(fw, item)[1] for fw, item in pairs])

    def valid_rows(self) -> NDArray[np.bool_]:
        return np.fromiter((item is not None for item in self.items), np.bool_, len(self.items))
