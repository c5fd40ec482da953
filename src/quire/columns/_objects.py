"""Columns of Python objects: text, dates, lists, unions, sparse tensors, whatever has no array form."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from typing_extensions import Self

from quire.columns._column import Column, TensorMap, Validity
from quire.schema import Field, FieldKind
from quire.tensors import framework_of_type

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MAY_HOLD_TENSORS = (FieldKind.TENSOR, FieldKind.UNION, FieldKind.ANY)


class ObjectColumn(Column):
    """Values in an array of references, which picks rows faster than a list; None where there is none."""

    __slots__ = ("objects",)
    objects: NDArray[np.object_]

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

    def take(self, indices: NDArray[np.int64]) -> ObjectColumn:
        return ObjectColumn(self.field, self.objects.take(indices))

    def slice(self, rows: slice) -> ObjectColumn:
        return ObjectColumn(self.field, self.objects[rows])

    def concat(self, others: Sequence[Any]) -> ObjectColumn | None:
        return ObjectColumn(self.field, np.concatenate([column.objects for column in (self, *others)]))

    def map_tensors(self, change: TensorMap) -> ObjectColumn:
        if self.field.kind not in _MAY_HOLD_TENSORS:
            return self
        items = self.values()
        frameworks = {tp: framework_of_type(tp) for tp in set(map(type, items))}
        pairs = [(frameworks[type(item)], item) for item in items]
        return ObjectColumn(self.field, [item if fw is None else change(fw, item)[1] for fw, item in pairs])

    def valid_rows(self) -> NDArray[np.bool_]:
        return np.fromiter((item is not None for item in self.objects), np.bool_, len(self.objects))

    def payload(self) -> dict[str, Any]:
        return {"validity": None, "objects": self.values()}

    @classmethod
    def restore(cls, field: Field, payload: dict[str, Any]) -> ObjectColumn:
        return cls(field, payload["objects"])


class PackedColumn(ObjectColumn):
    """Texts or blobs one behind the other, cut out when they are looked at.

    `data` is anything with its bytes in one run; row i has those from starts[i] to ends[i].
    """

    __slots__ = ("data", "ends", "starts")

    def __init__(
        self, field: Field, data: Any, starts: NDArray[np.int64], ends: NDArray[np.int64], validity: Validity = None
    ) -> None:
        Column.__init__(self, field, validity)
        self.data, self.starts, self.ends = data, starts, ends

    @classmethod
    def from_offsets(cls, field: Field, data: Any, offsets: NDArray[np.int64], validity: Validity = None) -> Self:
        """A column whose row i has the bytes from offsets[i] to offsets[i + 1]."""
        return cls(field, data, offsets[:-1], offsets[1:], validity)

    def __getattr__(self, name: str) -> Any:
        if name != "objects":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self.objects = np.fromiter(self.values(), np.object_, len(self))
        return self.objects

    def __len__(self) -> int:
        return len(self.starts)

    def values(self) -> list[Any]:
        found, wrapper = self._texts(), self.field.wrapper
        return found if wrapper is None else [None if item is None else wrapper(item) for item in found]

    def _texts(self) -> list[Any]:
        text = self.field.kind is not FieldKind.BYTES
        if self._is_run:
            start, end = self._bounds()
            data = memoryview(self.data)[start:end]
            whole: Any = str(data, "utf-8") if text else bytes(data)
            if len(whole) == len(data):  # else some characters take more than a byte
                read = (io.StringIO if text else io.BytesIO)(whole).read  # twice as fast as to cut each of them out
                return self.masked([*map(read, (self.ends - self.starts).tolist())])
        view = memoryview(self.data)
        spans = zip(self.starts.tolist(), self.ends.tolist(), strict=True)
        return self.masked([str(view[a:b], "utf-8") if text else bytes(view[a:b]) for a, b in spans])

    def value(self, index: int) -> Any:
        return self.slice(slice(index, index + 1)).values()[0]

    def take(self, indices: NDArray[np.int64]) -> ObjectColumn:
        return PackedColumn(self.field, self.data, self.starts[indices], self.ends[indices], self._validity_of(indices))

    def slice(self, rows: slice) -> ObjectColumn:
        return PackedColumn(self.field, self.data, self.starts[rows], self.ends[rows], self._validity_of(rows))

    def valid_rows(self) -> NDArray[np.bool_]:
        return Column.valid_rows(self)

    @property
    def _is_run(self) -> bool:
        """Whether the rows lie one behind the other."""
        return len(self.starts) > 0 and bool((self.starts[1:] == self.ends[:-1]).all())

    def _bounds(self) -> tuple[int, int]:
        return int(self.starts[0]), int(self.ends[-1])

    def packed(self) -> tuple[Any, NDArray[np.int64]]:
        """The bytes of the rows one behind the other, and where each begins and ends."""
        offsets = np.zeros(len(self) + 1, np.int64)
        np.cumsum(self.ends - self.starts, out=offsets[1:])
        view = memoryview(self.data)
        if self._is_run:
            start, end = self._bounds()
            return self.data if (start, end) == (0, len(view)) else view[start:end], offsets
        spans = zip(self.starts.tolist(), self.ends.tolist(), strict=True)
        return b"".join([view[a:b] for a, b in spans]), offsets

    def payload(self) -> dict[str, Any]:
        data, offsets = self.packed()
        return {"validity": self.validity, "data": data if isinstance(data, bytes) else bytes(data), "offsets": offsets}

    @classmethod
    def restore(cls, field: Field, payload: dict[str, Any]) -> Self:
        return cls.from_offsets(field, payload["data"], payload["offsets"], payload["validity"])


def pack(items: list[Any]) -> tuple[bytes, NDArray[np.int64]]:
    """Texts, or blobs, one behind the other, and where each ends."""
    if not items or isinstance(items[0], bytes):
        data = b"".join(items)
    else:
        whole = "".join(items)
        data = whole.encode()
        if len(data) != len(whole):  # some characters take more than a byte
            items = [item.encode() for item in items]
    offsets = np.zeros(len(items) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, items), np.int64, len(items)), out=offsets[1:])
    return data, offsets
