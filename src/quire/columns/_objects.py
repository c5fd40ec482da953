"""Columns of Python objects: text, dates, lists, unions, sparse tensors, whatever has no array form."""

from __future__ import annotations

from collections.abc import Sequence
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
    """Values in an array of references, which picks rows faster than a list; None where there is none."""

    __slots__ = ("objects",)

    def __init__(self, field: Field, objects: list[Any] | NDArray[np.object_]) -> None:
        self.field, self.validity = field, None
        self.objects = objects if isinstance(objects, np.ndarray) else np.fromiter(objects, np.object_, len(objects))

    def __len__(self) -> int:
        return len(self.objects)

    def values(self) -> list[Any]:
        items: list[Any] = self.objects.tolist()
        return items

    def value(self, index: int) -> Any:
        return self.objects[index]

    def take(self, indices: NDArray[np.int64]) -> Self:
        return type(self)(self.field, self.objects.take(indices))

    def slice(self, rows: slice) -> Self:
        return type(self)(self.field, self.objects[rows])

    def concat(self, others: Sequence[Self]) -> Self | None:
        return type(self)(self.field, np.concatenate([column.objects for column in (self, *others)]))

    def map_tensors(self, change: TensorMap) -> Self:
        if self.field.kind not in _MAY_HOLD_TENSORS:
            return self
        items = self.values()
        frameworks = {tp: framework_of_type(tp) for tp in set(map(type, items))}
        pairs = [(frameworks[type(item)], item) for item in items]
        return type(self)(self.field, [item if fw is None else change(fw, item)[1] for fw, item in pairs])

    def valid_rows(self) -> NDArray[np.bool_]:
        return np.fromiter((item is not None for item in self.objects), np.bool_, len(self.objects))

    def payload(self) -> dict[str, Any]:
        return {"validity": None, "objects": self.values()}

    @classmethod
    def restore(cls, field: Field, payload: dict[str, Any]) -> Self:
        return cls(field, payload["objects"])
