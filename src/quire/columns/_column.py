"""What every column can do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.errors import ColumnError
from quire.schema import Field
from quire.tensors import Framework, get_framework

if TYPE_CHECKING:
    from numpy.typing import NDArray

Validity = np.ndarray[Any, np.dtype[np.bool_]] | None
"""False where a row has no value; None where every row has one."""

TensorMap = Callable[[Framework, Any], tuple[Framework, Any]]
"""What is done to every tensor of a batch: moving it, converting it, pinning it."""


class Column(ABC):
    """The values of one field in a number of rows. A column does not change; setting one makes a new column."""

    __slots__ = ("field", "validity")

    def __init__(self, field: Field, validity: Validity = None) -> None:
        self.field = field
        self.validity = None if validity is None or validity.all() else validity

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def values(self) -> list[Any]:
        """The values of all rows as a document holds them, sharing memory with the column; None where there is none."""

    @abstractmethod
    def take(self, indices: NDArray[np.int64]) -> Column:
        """Rows by position, copied."""

    @abstractmethod
    def slice(self, rows: slice) -> Column:
        """A run of rows, sharing memory with the column."""

    def concat(self, others: Sequence[Any]) -> Column | None:
        """The column with others of its kind behind it; None where they do not join as they are."""
        return None

    def value(self, index: int) -> Any:
        """The value of one row."""
        return self.slice(slice(index, index + 1)).values()[0]

    def map_tensors(self, change: TensorMap) -> Column:
        """The column with every tensor in it changed."""
        return self

    def masked(self, values: list[Any]) -> list[Any]:
        """The values with None in the rows that have none."""
        if self.validity is None:
            return values
        return [value if there else None for value, there in zip(values, self.validity.tolist(), strict=True)]

    def valid_rows(self) -> NDArray[np.bool_]:
        """Which rows have a value."""
        return np.ones(len(self), np.bool_) if self.validity is None else self.validity

    def payload(self) -> dict[str, Any]:
        """Everything but the field: what a pickle of the column carries."""
        names = [name for cls in type(self).__mro__ for name in cls.__dict__.get("__slots__", ())]
        return {name: getattr(self, name) for name in names if name != "field"}

    @classmethod
    def restore(cls, field: Field, payload: dict[str, Any]) -> Column:
        """The column again, for the field of the reader's schema."""
        made = cls.__new__(cls)
        for name, value in {"field": field, **payload}.items():
            setattr(made, name, value)
        return made

    def _validity_of(self, rows: Any) -> Validity:
        return None if self.validity is None else self.validity[rows]


def joined_validity(columns: Sequence[Column]) -> Validity:
    """The validity of columns put one behind the other."""
    if all(column.validity is None for column in columns):
        return None
    return np.concatenate([column.valid_rows() for column in columns])


def dense_framework(name: str) -> Framework:
    """The framework of that name, if its tensors make columns."""
    if name == "scipy":
        raise ColumnError("scipy has sparse matrices only, and columns are dense: use framework='numpy'.")
    return get_framework(name)
