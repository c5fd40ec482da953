"""Small bytes that ask for much memory; run as a program, it tells what reading one of them costs.

python attacks.py NAME BYTES -> the outcome, the size of the input, and by how many bytes the peak grew
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from quire import BaseDocument, DocumentArray, DocumentBatch
from quire.codec._wire import encode_delimited, encode_packed, encode_text, encode_uint, join_buffers
from quire.errors import DecodeError, MissingDependencyError
from quire.typing import AnyTensor, NdArray


class Bag(BaseDocument):
    items: list[Any] = []


class Note(BaseDocument):
    title: str = ""
    year: int = 0
    vector: NdArray | None = None


class Shelf(BaseDocument):
    bags: DocumentArray[Bag] = []
    bag: Bag | None = None


class Wide(BaseDocument):
    a: str = "a"
    b: list[str] = []
    c: dict[str, int] = {}
    d: NdArray | None = None
    e: AnyTensor | None = None
    f: Any = None
    g: int = 0


Attack = tuple[Callable[[bytes], Any], bytes]
ATTACKS: dict[str, Callable[[int], Attack]] = {}


def attack(make: Callable[[int], Attack]) -> Callable[[int], Attack]:
    """Give an attack its name."""
    ATTACKS[make.__name__] = make
    return make


def class_name(cls: type[Any]) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def document(values: bytes, name: str = "no:Such") -> bytes:
    """A document with one field, of these bytes of a value."""
    return b"\x08\x01" + encode_text(2, name) + encode_text(3, "items") + encode_delimited(4, values)


def many(part: bytes, size: int) -> bytes:
    """A value: a list of as many of the parts as there is room for."""
    item = encode_delimited(1, part)
    return encode_delimited(10, item * max(1, size // len(item)))


SMALL = {
    "none": b"\x08\x00",
    "int": b"\x18\x02",
    "int8": b"\x18\xfe\xff\xff\xff\xff\xff\xff\x7f",
    "float": b"\x21" + bytes(8),
    "text": encode_delimited(5, b""),
    "char": encode_delimited(5, "é".encode()),
    "wide_char": encode_delimited(5, "😀".encode()),
    "blob": encode_delimited(6, b""),
    "tensor": encode_delimited(7, b""),
    "tensor_float32": encode_delimited(7, encode_text(1, "float32") + encode_packed(2, [0])),
    "tensor_one": encode_delimited(7, encode_text(1, "int8") + encode_packed(2, [1]) + encode_delimited(5, b"x")),
    "document": encode_delimited(8, b""),
    "document_one": encode_delimited(8, encode_delimited(3, b"a") + encode_delimited(4, b"\x08\x00")),
    "array": encode_delimited(9, b""),
    "array_one": encode_delimited(9, encode_delimited(3, b"")),
    "list": encode_delimited(10, b""),
    "tuple": encode_delimited(11, b""),
    "tuple_one": encode_delimited(11, encode_delimited(1, b"\x08\x00")),
    "set": encode_delimited(12, b""),
    "set_one": encode_delimited(12, encode_delimited(1, b"\x08\x00")),
    "set_five": encode_delimited(12, b"".join(encode_delimited(1, bytes([0x18, i])) for i in range(6))),
    "frozen_set": encode_delimited(13, b""),
    "dict": encode_delimited(14, b""),
    "dict_one": encode_delimited(14, encode_delimited(1, b"\x08\x00") + encode_delimited(2, b"\x08\x00")),
    "dict_six": encode_delimited(
        14, b"".join(encode_delimited(1, bytes([0x18, i])) + encode_delimited(2, b"\x08\x00") for i in range(6))
    ),
    "big_integer": encode_delimited(15, b""),
    "big_integer_one": encode_delimited(15, b"\x7f" * 9),
    "complex": encode_delimited(16, b""),
    "datetime": encode_delimited(17, encode_text(1, "2024-01-01")),
    "date": encode_delimited(18, b"2024-01-01"),
    "time": encode_delimited(19, encode_text(1, "12")),
    "timedelta": encode_delimited(20, b""),
    "uuid": encode_delimited(21, bytes(16)),
    "decimal": encode_delimited(22, b"1"),
    "path": encode_delimited(23, b"a"),
    "path_empty": encode_delimited(23, b""),
    "path_long": encode_delimited(23, b"a/" * 30),
    "member": encode_delimited(24, b""),
    "scalar": encode_delimited(25, encode_text(1, "int8") + encode_delimited(5, b"x")),
    "nested": encode_delimited(
        10, encode_delimited(1, encode_delimited(10, encode_delimited(1, encode_delimited(10, b""))))
    ),
}


def _of(part: bytes) -> Callable[[int], Attack]:
    return lambda size: (BaseDocument.from_bytes, document(many(part, size)))


def _typed_of(part: bytes) -> Callable[[int], Attack]:
    return lambda size: (Bag.from_bytes, document(many(part, size), class_name(Bag)))


for _name, _part in SMALL.items():
    ATTACKS[f"list_of_{_name}"] = _of(_part)
for _name in ("none", "dict", "set", "document", "tensor", "path"):
    ATTACKS[f"typed_list_of_{_name}"] = _typed_of(SMALL[_name])


@attack
def many_names(size: int) -> Attack:
    """Names that are all different."""
    count = size // 13
    names = b"".join(encode_delimited(3, f"{i:06}".encode()) for i in range(count))
    return BaseDocument.from_bytes, b"\x08\x01" + names + encode_delimited(4, b"\x08\x00") * count


@attack
def same_names(size: int) -> Attack:
    """Names that are all empty."""
    return BaseDocument.from_bytes, b"\x08\x01" + encode_delimited(3, b"") * (size // 6) + encode_delimited(
        4, b"\x08\x00"
    ) * (size // 6)


@attack
def names_alone(size: int) -> Attack:
    """Names without values."""
    return BaseDocument.from_bytes, encode_delimited(3, b"a") * (size // 3)


@attack
def unknown_fields(size: int) -> Attack:
    """Fields that the class does not have, to be kept."""
    count = size // 13
    names = b"".join(encode_delimited(3, f"{i:06}".encode()) for i in range(count))
    return lambda data: Bag.from_bytes(data, unknown="keep"), names + encode_delimited(4, b"\x08\x00") * count


@attack
def many_documents(size: int) -> Attack:
    """An array of empty documents of no class."""
    return DocumentArray.from_bytes, b"\x08\x01" + encode_delimited(3, b"") * (size // 2)


@attack
def typed_documents(size: int) -> Attack:
    """An array of empty documents of a class with defaults."""
    return DocumentArray[Wide].from_bytes, b"\x08\x01" + encode_delimited(3, b"") * (size // 2)


@attack
def many_columns(size: int) -> Attack:
    """Columns without content."""
    return DocumentArray.from_bytes, b"\x08\x01\x18\x01" + encode_delimited(5, b"") * (size // 2)


@attack
def named_columns(size: int) -> Attack:
    """Columns of no rows, all with names."""
    count = size // 14
    columns = b"".join(encode_delimited(5, encode_text(1, f"{i:06}") + encode_delimited(8, b"")) for i in range(count))
    return DocumentArray.from_bytes, b"\x08\x01" + encode_uint(3, 0) + columns


@attack
def unknown_columns(size: int) -> Attack:
    """Columns that the class does not have, to be kept."""
    count = size // 17
    columns = b"".join(
        encode_delimited(5, encode_text(1, f"{i:06}") + encode_delimited(8, encode_delimited(1, b"\x08\x00")))
        for i in range(count)
    )
    return lambda data: DocumentArray[Bag].from_bytes(data, unknown="keep"), encode_uint(3, 1) + columns


@attack
def rows_without_columns(size: int) -> Attack:
    """More rows than bytes."""
    return DocumentArray[Wide].from_bytes, encode_uint(3, 1 << 40) + encode_delimited(9, bytes(size))


@attack
def rows_as_allowed(size: int) -> Attack:
    """As many rows as the size of the message lets through."""
    return DocumentArray[Wide].from_bytes, encode_uint(3, size // 40) + encode_delimited(9, bytes(size))


@attack
def rows_of_no_class(size: int) -> Attack:
    """As many rows as the size of the message lets through, of no class."""
    return DocumentArray.from_bytes, encode_uint(3, size // 40) + encode_delimited(9, bytes(size))


@attack
def batch_rows(size: int) -> Attack:
    """The same as columns."""
    return DocumentBatch[Wide].from_bytes, encode_uint(3, size // 30) + encode_delimited(9, bytes(size))


@attack
def empty_tensor_rows(size: int) -> Attack:
    """A column of tensors of no elements."""
    rows = size
    column = encode_text(1, "vector") + encode_delimited(3, encode_text(1, "float32") + encode_packed(2, [rows, 0]))
    return DocumentBatch[Note].from_bytes, encode_uint(3, rows) + encode_delimited(5, column) + encode_delimited(
        9, bytes(size)
    )


@attack
def huge_shape(size: int) -> Attack:
    """A shape of no elements in which other axes are huge."""
    tensor = encode_delimited(7, encode_text(1, "float64") + encode_packed(2, [0, 1 << 40, 1 << 20]))
    return BaseDocument.from_bytes, document(many(tensor, size))


@attack
def huge_strings_dtype(size: int) -> Attack:
    """A dtype of a GB an element, and none of them."""
    tensor = encode_delimited(7, encode_text(1, "str999999999") + encode_packed(2, [0]))
    return BaseDocument.from_bytes, document(many(tensor, size))


@attack
def string_tensor(size: int) -> Attack:
    """A tensor of empty strings."""
    count = size // 2
    tensor = encode_text(1, "string") + encode_packed(2, [count]) + encode_delimited(8, b"") * count
    return BaseDocument.from_bytes, document(encode_delimited(7, tensor))


@attack
def text_tensor(size: int) -> Attack:
    """A tensor of texts of one character each."""
    count = size // 4
    tensor = (
        encode_text(1, "object")
        + encode_packed(2, [count])
        + encode_uint(11, 1)
        + encode_delimited(8, "é".encode()) * count
    )
    return BaseDocument.from_bytes, document(encode_delimited(7, tensor))


@attack
def many_axes(size: int) -> Attack:
    """A tensor of more axes than there can be."""
    return BaseDocument.from_bytes, document(
        encode_delimited(7, encode_text(1, "int8") + encode_packed(2, [300] * (size // 2)))
    )


def _sparse(layout: str, framework: str = "scipy") -> Callable[[int], Attack]:
    def make(size: int) -> Attack:
        entries = size // 24
        indices = np.zeros((2, entries), "<i8")
        indices[0] = np.arange(entries)
        tensor = (
            encode_text(1, "float64")
            + encode_packed(2, [size // 4, size // 4])
            + encode_text(3, framework)
            + encode_text(4, layout)
        )
        tensor += encode_uint(12, 2) + encode_delimited(7, indices.tobytes()) + encode_delimited(5, bytes(8 * entries))
        return BaseDocument.from_bytes, document(encode_delimited(7, tensor))

    return make


for _layout in ("csr", "csc", "lil", "dok", "dia", "bsr", "coo"):
    ATTACKS[f"sparse_{_layout}"] = _sparse(f"matrix:{_layout}")


@attack
def sparse_huge(size: int) -> Attack:
    """Many rows, and one entry."""
    tensor = (
        encode_text(1, "float64")
        + encode_packed(2, [1 << 40, 1 << 40])
        + encode_text(3, "scipy")
        + encode_text(4, "matrix:csr")
    )
    tensor += encode_uint(12, 2) + encode_delimited(7, bytes(16)) + encode_delimited(5, bytes(8))
    return BaseDocument.from_bytes, document(many(encode_delimited(7, tensor), size))


@attack
def deep(size: int) -> Attack:
    """Lists in lists, as deep as they may lie, many times."""
    part = b"\x08\x00"
    for _ in range(90):
        part = encode_delimited(10, encode_delimited(1, part))
    return BaseDocument.from_bytes, document(many(part, size))


@attack
def too_deep(size: int) -> Attack:
    """Lists in lists, deeper than they may lie."""
    part = b"\x08\x00"
    while len(part) < min(size, 100_000):
        part = encode_delimited(10, encode_delimited(1, part))
    return BaseDocument.from_bytes, document(part + bytes(0))


@attack
def empty_buffers(size: int) -> Attack:
    """Buffers of no bytes."""
    return BaseDocument.from_bytes, b"\x08\x01" + encode_delimited(15, b"") * (size // 2)


@attack
def split_buffers(size: int) -> Attack:
    """Buffers with something else between them."""
    return BaseDocument.from_bytes, b"\x08\x01" + (encode_delimited(15, b"") + b"\x08\x01") * (size // 4)


def _column_bytes(cls: Any, rows: int, column: bytes, *buffers: bytes) -> bytes:
    return b"".join(
        join_buffers(
            b"\x08\x01" + encode_text(2, class_name(cls)) + encode_uint(3, rows) + encode_delimited(5, column), buffers
        )
    )


@attack
def text_rows(size: int) -> Attack:
    """Empty texts: eight bytes of offset each."""
    rows = size // 8
    column = encode_text(1, "title") + encode_delimited(6, encode_uint(1, 1) + encode_uint(2, 2))
    return DocumentArray[Note].from_bytes, _column_bytes(Note, rows, column, b"", bytes(8 * (rows + 1)))


@attack
def text_columns(size: int) -> Attack:
    """The same text column under many names, and of no class."""
    rows = 1000
    column = encode_delimited(6, encode_uint(1, 1) + encode_uint(2, 2))
    columns = b"".join(encode_delimited(5, encode_text(1, f"{i:06}") + column) for i in range(size // 16))
    head = b"\x08\x01" + encode_uint(3, rows) + columns
    return DocumentArray.from_bytes, b"".join(join_buffers(head, [b"", bytes(8 * (rows + 1))]))


@attack
def wide_text(size: int) -> Attack:
    """A column of one text with one character that takes four bytes."""
    data = b"a" * size + "😀".encode()
    column = encode_text(1, "title") + encode_delimited(6, encode_uint(1, 1) + encode_uint(2, 2))
    offsets = np.array([0, len(data)], "<i8").tobytes()
    return DocumentArray[Note].from_bytes, _column_bytes(Note, 1, column, data, offsets)


@attack
def shared_text(size: int) -> Attack:
    """One long text in many columns."""
    data = b"a" * (size // 2)
    offsets = np.array([0, len(data)], "<i8").tobytes()
    column = encode_delimited(6, encode_uint(1, 1) + encode_uint(2, 2))
    columns = b"".join(encode_delimited(5, encode_text(1, f"{i:06}") + column) for i in range(size // 32))
    return DocumentArray.from_bytes, b"".join(join_buffers(b"\x08\x01" + encode_uint(3, 1) + columns, [data, offsets]))


@attack
def shared_tensor(size: int) -> Attack:
    """One large buffer as the elements of many tensors."""
    data = bytes(size // 2)
    tensor = encode_delimited(7, encode_text(1, "uint8") + encode_packed(2, [len(data)]) + encode_uint(6, 1))
    head = document(many(tensor, size // 2))
    return BaseDocument.from_bytes, b"".join(join_buffers(head, [data]))


@attack
def shared_column(size: int) -> Attack:
    """One large buffer as a column under many names."""
    rows = size // 2
    column = encode_delimited(4, encode_text(1, "uint8") + encode_packed(2, [rows]) + encode_uint(6, 1))
    columns = b"".join(encode_delimited(5, encode_text(1, f"{i:06}") + column) for i in range(size // 64))
    return DocumentArray.from_bytes, b"".join(join_buffers(b"\x08\x01" + encode_uint(3, rows) + columns, [bytes(rows)]))


@attack
def same_column(size: int) -> Attack:
    """One large buffer as the same column, again and again."""
    rows = size // 2
    column = encode_text(1, "vector") + encode_delimited(
        3, encode_text(1, "uint8") + encode_packed(2, [rows, 1]) + encode_uint(6, 1)
    )
    columns = encode_delimited(5, column) * (size // 64)
    return DocumentBatch[Note].from_bytes, b"".join(
        join_buffers(b"\x08\x01" + encode_uint(3, rows) + columns, [bytes(rows)])
    )


@attack
def number_rows(size: int) -> Attack:
    """Documents of one small number each."""
    column = encode_text(1, "year") + encode_delimited(
        4, encode_text(1, "uint8") + encode_packed(2, [size]) + encode_uint(6, 1)
    )
    return DocumentArray[Note].from_bytes, _column_bytes(Note, size, column, bytes(size))


@attack
def number_rows_of_no_class(size: int) -> Attack:
    """Dynamic documents of one small number each."""
    column = encode_text(1, "year") + encode_delimited(
        4, encode_text(1, "uint8") + encode_packed(2, [size]) + encode_uint(6, 1)
    )
    head = b"\x08\x01" + encode_uint(3, size) + encode_delimited(5, column)
    return DocumentArray.from_bytes, b"".join(join_buffers(head, [bytes(size)]))


@attack
def bit_rows(size: int) -> Attack:
    """Tensors of one byte each."""
    column = encode_text(1, "vector") + encode_delimited(
        3, encode_text(1, "uint8") + encode_packed(2, [size, 1]) + encode_uint(6, 1)
    )
    return DocumentArray[Note].from_bytes, _column_bytes(Note, size, column, bytes(size))


@attack
def bit_rows_of_a_batch(size: int) -> Attack:
    """The same as a batch."""
    column = encode_text(1, "vector") + encode_delimited(
        3, encode_text(1, "uint8") + encode_packed(2, [size, 1]) + encode_uint(6, 1)
    )
    return DocumentBatch[Note].from_bytes, _column_bytes(Note, size, column, bytes(size))


@attack
def ragged_ranks(size: int) -> Attack:
    """Ragged rows of no axes."""
    flat = encode_delimited(1, encode_text(1, "uint8") + encode_packed(2, [size // 2]) + encode_uint(6, 3))
    column = encode_text(1, "vector") + encode_delimited(5, flat + encode_uint(2, 1) + encode_uint(3, 2))
    rows = size // 2
    return DocumentBatch[Note].from_bytes, _column_bytes(Note, rows, column, bytes(rows), b"", bytes(rows))


@attack
def ragged_sizes(size: int) -> Attack:
    """One ragged row, of huge axes."""
    flat = encode_delimited(1, encode_text(1, "uint8") + encode_packed(2, [0]))
    column = encode_text(1, "vector") + encode_delimited(5, flat + encode_uint(2, 1) + encode_uint(3, 2))
    rows = size // 18
    sizes = np.full((rows, 2), 1 << 62, "<i8")
    sizes[:, 1] = 0
    return DocumentBatch[Note].from_bytes, _column_bytes(Note, rows, column, b"\x02" * rows, sizes.tobytes())


@attack
def ragged_deep(size: int) -> Attack:
    """Ragged rows of 255 axes of 2 to the 62."""
    flat = encode_delimited(1, encode_text(1, "uint8") + encode_packed(2, [0]))
    column = encode_text(1, "vector") + encode_delimited(5, flat + encode_uint(2, 1) + encode_uint(3, 2))
    rows = size // (8 * 255)
    sizes = np.full((rows, 255), 1 << 62, "<i8")
    return DocumentBatch[Note].from_bytes, _column_bytes(Note, rows, column, b"\xff" * rows, sizes.tobytes())


@attack
def empty_arrays(size: int) -> Attack:
    """Arrays of no documents."""
    rows = size // 8
    column = encode_text(1, "bags") + encode_delimited(10, encode_delimited(1, b"") + encode_uint(2, 1))
    return DocumentArray[Shelf].from_bytes, _column_bytes(Shelf, rows, column, bytes(8 * (rows + 1)))


@attack
def empty_arrays_of_no_class(size: int) -> Attack:
    """Arrays of no documents, of no class."""
    rows = size // 8
    column = encode_text(1, "bags") + encode_delimited(10, encode_delimited(1, b"") + encode_uint(2, 1))
    head = b"\x08\x01" + encode_uint(3, rows) + encode_delimited(5, column)
    return DocumentArray.from_bytes, b"".join(join_buffers(head, [bytes(8 * (rows + 1))]))


@attack
def nested_rows(size: int) -> Attack:
    """Nested documents without columns."""
    rows = size // 64
    column = encode_text(1, "bag") + encode_delimited(9, encode_uint(3, rows))
    return DocumentArray[Shelf].from_bytes, _column_bytes(Shelf, rows, column, bytes(size))


@attack
def remainders(size: int) -> Attack:
    """Rows with a remainder that is nearly empty."""
    rows = size // 4
    head = (
        b"\x08\x01" + encode_text(2, class_name(Note)) + encode_uint(3, rows) + encode_delimited(6, b"\x08\x01") * rows
    )
    return DocumentArray[Note].from_bytes, head


@attack
def dynamic_remainders(size: int) -> Attack:
    """The same of no class."""
    rows = size // 4
    return DocumentArray.from_bytes, b"\x08\x01" + encode_uint(3, rows) + encode_delimited(6, b"\x08\x01") * rows


@attack
def empty_remainders(size: int) -> Attack:
    """Rows with a remainder that is empty."""
    rows = size // 2
    return DocumentBatch[Note].from_bytes, b"\x08\x01" + encode_uint(3, rows) + encode_delimited(6, b"") * rows


@attack
def objects(size: int) -> Attack:
    """A column of values that are None."""
    rows = size // 4
    column = encode_text(1, "items") + encode_delimited(8, encode_delimited(1, encode_delimited(10, b"")) * rows)
    return DocumentArray[Bag].from_bytes, b"\x08\x01" + encode_uint(3, rows) + encode_delimited(5, column)


@attack
def same_hash(size: int) -> Attack:
    """Numbers that all have the same hash."""
    prime = (1 << 61) - 1
    parts = [
        encode_delimited(1, encode_delimited(15, (i * prime).to_bytes(12, "little"))) for i in range(1, size // 16)
    ]
    return BaseDocument.from_bytes, document(encode_delimited(12, b"".join(parts)))


@attack
def zones(size: int) -> Attack:
    """Every time zone that there is."""
    import zoneinfo

    names = sorted(zoneinfo.available_timezones())
    parts = [
        encode_delimited(1, encode_delimited(17, encode_text(1, "2024-01-01") + encode_text(2, name))) for name in names
    ]
    whole = b"".join(parts)
    return BaseDocument.from_bytes, document(encode_delimited(10, whole * max(1, size // len(whole))))


@attack
def blank_stream(size: int) -> Attack:
    """A stream of blocks that are nearly empty."""
    from quire.codec._blocks import BATCH, encode_stream

    blocks = ((BATCH, 0, [b"\x08\x01"]) for _ in range(size // 128))
    parts = encode_stream("", "", blocks, None, checksums=True)
    return DocumentArray.from_bytes, b"".join(part for segment in parts for part in segment)


@attack
def rows_in_blocks(size: int) -> Attack:
    """A stream of blocks, each of as many rows as its first half MiB of credit lets through."""
    from quire.codec._blocks import BATCH, encode_stream

    head = b"\x08\x01" + encode_uint(3, 300)
    blocks = ((BATCH, 300, [head]) for _ in range(size // 128))
    parts = encode_stream("", "", blocks, None, checksums=True)
    return DocumentArray[Note].from_bytes, b"".join(part for segment in parts for part in segment)


@attack
def batches_in_blocks(size: int) -> Attack:
    """The same as a batch."""
    _, data = rows_in_blocks(size)
    return DocumentBatch[Note].from_bytes, data


# --- what is good


def _tiny(count: int) -> list[Note]:
    return [Note(title="", year=i % 100) for i in range(count)]


LEGITIMATE: dict[str, Callable[[], Attack]] = {
    "documents_as_rows": lambda: (
        DocumentArray[Note].from_protobuf,
        DocumentArray[Note](_tiny(100_000)).to_protobuf(),
    ),
    "documents_as_blocks": lambda: (DocumentArray[Note].from_bytes, DocumentArray[Note](_tiny(100_000)).to_bytes()),
    "documents_as_columns": lambda: (
        DocumentBatch[Note].from_bytes,
        DocumentArray[Note](_tiny(100_000)).stack().to_bytes(),
    ),
    "documents_of_no_class": lambda: (
        DocumentArray.from_bytes,
        renamed(DocumentArray[Note](_tiny(100_000)).to_bytes()),
    ),
    "small_integers": lambda: (Bag.from_bytes, Bag(items=[i % 100 for i in range(200_000)]).to_bytes()),
    "nulls": lambda: (Bag.from_bytes, Bag(items=[None] * 200_000).to_bytes()),
    "short_texts": lambda: (Bag.from_bytes, Bag(items=["ab", "c", ""] * 70_000).to_bytes()),
    "empty_lists": lambda: (Bag.from_bytes, Bag(items=[[] for _ in range(200_000)]).to_bytes()),
    "dicts": lambda: (Bag.from_bytes, Bag(items=[{"a": i, "b": None} for i in range(10_000)]).to_bytes()),
    "empty_dicts": lambda: (Bag.from_bytes, Bag(items=[{} for _ in range(10_000)]).to_bytes()),
    "small_sets": lambda: (Bag.from_bytes, Bag(items=[{i} for i in range(10_000)]).to_bytes()),
    "small_documents": lambda: (Bag.from_bytes, Bag(items=_tiny(10_000)).to_bytes()),
    "wide_rows": lambda: (DocumentArray.from_protobuf, _wide_rows().to_protobuf()),
    "wide_blocks": lambda: (DocumentArray.from_bytes, _wide_rows().to_bytes()),
    "small_tensors": lambda: (Bag.from_bytes, Bag(items=[np.ones(2) for _ in range(10_000)]).to_bytes()),
    "big_set": lambda: (
        Bag.from_bytes,
        Bag(items=[set(range(100_000)), {2.0**i for i in range(-1000, 1000)}]).to_bytes(),
    ),
}


def _wide_rows() -> Any:
    from pydantic import create_model

    fields: dict[str, Any] = {f"field{i}": (int | None if i % 2 else str, None if i % 2 else "") for i in range(50)}
    cls = create_model("Fifty", __base__=BaseDocument, __module__=__name__, **fields)
    globals()["Fifty"] = cls
    return DocumentArray[cls]([cls() for _ in range(2000)])  # type: ignore[valid-type]


def renamed(data: bytes) -> bytes:
    """A stream of a class that is not loaded."""
    from tests.codec.hostile import repair_checksums

    return repair_checksums(data.replace(b":Note", b":Nono"))


# --- measured


def warm_up() -> None:
    """Import and compile whatever reading needs."""
    for make in ATTACKS.values():
        decode, data = make(400)
        with suppress(*REFUSALS):
            decode(data)


REFUSALS = (DecodeError, MissingDependencyError)
"""What may come out of an attack; the second where it names a framework that is not installed."""


def high_water() -> int:
    """The most memory that this process had since the peak began anew, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def measure(name: str, size: int) -> str:
    """Run one attack: return how much the peak memory grew, the size of the input, CPU seconds and the outcome."""
    decode, small = ATTACKS[name](2000)  # once on a small scale: a fork has touched no page of the code yet
    with suppress(*REFUSALS):
        decode(small)
    decode, data = ATTACKS[name](size)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, start = high_water(), time.process_time()
    try:
        value = decode(data)
        outcome = "read"
    except REFUSALS as error:
        value, outcome = None, f"refused: {str(error)[:60]}"
    seconds = time.process_time() - start
    grown = high_water() - before
    del value
    return f"{grown} {len(data)} {seconds:.2f} {outcome}"


def in_a_fork(name: str, size: int) -> str:
    """The same in a process of its own, which begins warm."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writing, measure(name, size).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        output = answer.read()
    os.waitpid(child, 0)
    return output or "0 1 0 died"


if __name__ == "__main__":
    warm_up()
    for _name in sys.argv[2:]:
        print(_name, in_a_fork(_name, int(sys.argv[1])), flush=True)  # noqa: T201 - it is a program
