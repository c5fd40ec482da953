"""Documents without the values that columns of an engine hold, so that a vector is stored once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from quire import codec
from quire.index._plan import FilterColumn, IndexPlan, VectorRows, digest, gather, measure
from quire.schema import FieldKind

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MARK = b"\xff"
"""The first byte of a compact document; messages of whole documents start with another one."""
_BLOCK = 256
"""Vectors that are compared at a time: their copies as float64 stay in the cache of the processor."""
_FLOAT32 = np.dtype(np.float32)


class CompactRow(NamedTuple):
    """A document as an engine that `returns_columns` reads it: bytes, and values by the names of columns."""

    data: bytes
    values: Mapping[str, Any]


class CompactDocuments:
    """The documents of a plan, without the fields of their own that columns hold exactly: text, int, bool and vectors.

    A document is stored whole if one of its values would not come back as it was: a vector that is not a numpy array
    of float32, a subclass, extra fields.

    Vectors of the length 1 are multiplied by their original length when they are read. Both operations round, so
    numbers may differ from the original ones by one unit in the last place. Two bits for each number, after the length
    in the bytes of the document, correct that: the original vector takes 4 bytes a number, and they 1/4.
    """

    def __init__(self, plan: IndexPlan, *, unit: bool) -> None:
        self._type, self._unit = plan.document_type, unit
        by_name = plan.schema.by_name
        self.filters = [each for each in plan.filters if len(each.path) == 1 and _is_kept(each)]
        self.vectors = [
            each
            for each in plan.vectors
            if each.table is None and len(each.path) == 1 and by_name[each.path[0]].spec.dtype in (None, "float32")
        ]
        kept = {path[0] for path in (*(each.path for each in self.filters), *(each.path for each in self.vectors))}
        self._fields = tuple(by_name)
        self._rest = tuple(name for name in by_name if name not in kept)

    @property
    def columns(self) -> list[str]:
        """The names of the columns without which documents cannot be read."""
        return [*(each.name for each in self.filters), *(each.name for each in self.vectors)]

    def encode(
        self,
        documents: Sequence[Any],
        filters: Mapping[str, list[Any]],
        original: Mapping[str, VectorRows],
        scaled: Mapping[str, VectorRows],
    ) -> tuple[list[bytes], list[int]]:
        """Return the bytes of documents and checksums; the engine stores `scaled` instead of the `original` vectors."""
        exact: NDArray[np.bool_] = np.fromiter(map(self._is_regular, documents), np.bool_, len(documents))
        for column in self.filters:
            values = gather(documents, column.path)
            # The encoders of text, int and bool return the same object, unless it is of a subclass.
            exact &= np.fromiter(map(is_, values, filters[column.name]), np.bool_, len(documents))
        tails: list[Sequence[bytes]] = []
        for vector in self.vectors:
            values = gather(documents, vector.path)
            exact &= np.fromiter(map(_is_float32, values), np.bool_, len(documents))
            if self._unit:
                rows = original[vector.name]
                corrections, restorable = _correct(rows.vectors, scaled[vector.name].vectors)
                exact[rows.owners[~restorable]] = False
                tails.append(_spread(corrections, rows.owners, len(documents)))
        data: list[bytes] = []
        digests: list[int] = []
        contents = self._iter_contents(len(documents), filters, original)
        rest: bytes | None = None
        for row, (document, content) in enumerate(zip(documents, contents, strict=True)):
            if not exact[row]:
                data.append(document.to_bytes())
                digests.append(digest(data[-1]))
                continue
            if self._rest or rest is None:  # a message without fields is the same for all documents
                rest = codec.encode_partial_message(document, self._rest)
            data.append(b"".join([_MARK, *[tail[row] for tail in tails], rest]))
            digests.append(digest(rest + content))
        return data, digests

    def decode(self, row: CompactRow) -> Any:
        """Return the document of a row."""
        if not row.data.startswith(_MARK):
            return self._type.from_bytes(row.data)
        values = {column.path[0]: row.values[column.name] for column in self.filters}
        place = len(_MARK)
        for column in self.vectors:
            vector = row.values[column.name]
            if self._unit:
                tail = row.data[place : place + _tail_size(column.width)]
                place += len(tail)
                vector = None if vector is None else _restore(vector, tail)
            values[column.path[0]] = vector
        return codec.decode_partial_message(row.data[place:], self._type, values, codec.read_options({}))

    def _is_regular(self, document: Any) -> bool:
        """Return whether a document has exactly the fields of the class."""
        return (
            type(document) is self._type
            and document.__pydantic_extra__ is None
            and tuple(document.__dict__) == self._fields
        )

    def _iter_contents(
        self, count: int, filters: Mapping[str, list[Any]], original: Mapping[str, VectorRows]
    ) -> Iterator[bytes]:
        """Yield what columns hold of each document, for its checksum."""
        vectors = []
        for column in self.vectors:
            rows = original[column.name]
            vectors.append(_spread(rows.vectors, rows.owners, count, missing=b"-"))
        plain = [filters[column.name] for column in self.filters]
        for row in range(count):
            yield b"".join([repr([values[row] for values in plain]).encode(), *[values[row] for values in vectors]])


def _is_kept(column: FilterColumn) -> bool:
    item = column.field
    types = {FieldKind.TEXT: (str,), FieldKind.SCALAR: (int, bool)}
    return item.type in types.get(item.kind, ()) and not item.decodes_input


def _is_float32(value: Any) -> bool:
    return value is None or (type(value) is np.ndarray and value.dtype == _FLOAT32)


def _tail_size(width: int) -> int:
    return 8 + 2 * -(-width // 8)


def _correct(original: NDArray[np.float32], scaled: NDArray[np.float32]) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """Return what `_restore` needs to convert scaled vectors to the original ones, and for which it is enough."""
    tails = np.empty((len(original), _tail_size(original.shape[1])), np.uint8)
    enough = np.empty(len(original), np.bool_)
    for start in range(0, len(original), _BLOCK):
        part = slice(start, start + _BLOCK)
        lengths = measure(original[part])
        product = (scaled[part] * lengths[:, None]).astype(np.float32)
        # Neighbours among floats are neighbours among the integers that have their bits.
        difference = original[part].view(np.int32) - product.view(np.int32)
        signs = [np.packbits(difference == sign, axis=1) for sign in (1, -1)]
        tails[part] = np.concatenate([lengths[:, None].astype("<f8").view(np.uint8), *signs], axis=1)
        enough[part] = (np.abs(difference) <= 1).all(axis=1)
    return tails, enough


def _restore(scaled: NDArray[np.float32], tail: bytes) -> NDArray[np.float32]:
    length = np.frombuffer(tail, "<f8", 1)[0]
    bits = np.frombuffer(tail, np.uint8, offset=8).reshape(2, -1)
    up, down = np.unpackbits(bits, axis=1, count=len(scaled)).astype(np.int32)
    product = (scaled * length).astype(np.float32)
    vector: NDArray[np.float32] = (product.view(np.int32) + up - down).view(np.float32)
    return vector


def _spread(matrix: NDArray[Any], owners: NDArray[np.int64], count: int, missing: bytes | None = None) -> list[bytes]:
    """Return the bytes of each document's row; `missing`, by default zeros, for those that have none."""
    data, size = matrix.tobytes(), matrix.shape[1] * matrix.itemsize
    rows = [data[start : start + size] for start in range(0, len(data), size)]
    if len(rows) == count:
        return rows
    result = [bytes(size) if missing is None else missing] * count
    for owner, row in zip(owners.tolist(), rows, strict=True):
        result[owner] = row
    return result
