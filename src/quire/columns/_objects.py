"""Columns of Python objects: text, dates, lists, unions, sparse tensors, whatever has no array form."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
from typing_extensions import Self

from quire.columns._column import Column
from quire.schema import Field

if TYPE_CHECKING:
    from numpy.typing import NDArray


class ObjectColumn(Column):
    """A list of values; None where there is none."""

    __slots__ = ("items",)

    def __init__(self, field: Field, items: list[Any]) -> None:
        super().__init__(field)
        self.items = items

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

    def valid_rows(self) -> NDArray[np.bool_]:
        return np.fromiter((item is not None for item in self.items), np.bool_, len(self.items))
