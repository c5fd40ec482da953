"""Untrusted input: valid messages, ways to damage them, and all decoders by name.

Shared by the tests and the fuzz target.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import struct
import zlib
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum
from functools import partial
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from random import Random
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import numpy as np

from quire import BaseDocument, DocumentArray, DocumentBatch
from quire.codec._messages import load_generated_messages
from quire.errors import DecodeError, MissingDependencyError
from quire.typing import AnyTensor, NdArray, float32, uint8

# --- classes


class Color(Enum):
    RED = "red"
    BLUE = 2


class Page(BaseDocument):
    text: str
    number: int = 0
    weight: float | None = None
    flag: bool = False
    vector: NdArray[float32, 3] = [0.0, 0.0, 0.0]


class Sheet(Page):
    """A page with extra fields."""

    marks: dict[str, int] = {}
    ring: NdArray | None = None


class Open(BaseDocument, extra="allow"):
    """A document with extra fields."""

    size: complex = 0j


class Book(BaseDocument):
    """A document with every kind of field."""

    color: Color = Color.RED
    when: datetime | None = None
    day: date | None = None
    hour: time | None = None
    span: timedelta = timedelta()
    price: Decimal | None = None
    key: UUID | None = None
    path: PurePosixPath = PurePosixPath()
    blob: bytes = b""
    words: list[str] = []
    pair: tuple[int, str] | None = None
    tags: dict[int, Any] = {}
    names: set[str] = set()
    either: Page | Open | int | None = None
    page: Page
    spare: Page | None = None
    pages: DocumentArray[Page] = []
    more: DocumentArray[Page] | None = None
    image: NdArray[uint8, 2, 3] | None = None
    shaped: NdArray[float32] | None = None
    anything: AnyTensor | None = None
    rest: Any = None
    next: Book | None = None


class Note(BaseDocument):
    """A small document with a column of each simple kind."""

    title: str = ""
    data: bytes = b""
    year: int = 0
    score: float | None = None
    vector: NdArray[float32] | None = None


CLASSES: tuple[type[BaseDocument], ...] = (Book, Note, Page, Sheet, Open)


# --- valid messages


def a_book(number: int = 0) -> Book:
    """Return a book with a value in every field."""
    page = Page(text=f"page {number} é", number=number, weight=0.5, flag=True, vector=[1, 2, 3])
    sheet = Sheet(text="sheet", marks={"a": 1}, ring=np.ones((2, number % 3)))
    return Book(
        color=Color.BLUE,
        when=datetime(2024, 2, 29, 12, tzinfo=ZoneInfo("Europe/Paris")),
        day=date(2024, 2, 29),
        hour=time(12, 30, tzinfo=timezone.utc),
        span=timedelta(1, 2, 3),
        price=Decimal("1.50"),
        key=UUID(int=number),
        path=PurePosixPath("a/b"),
        blob=b"\x00\xff",
        words=["one", "two"],
        pair=(1, "x"),
        tags={1: [1, 2.5, "x", None, b"y", True, 2**70], 2: {"a": {1, 2}, 3: frozenset({4}), (1, 2): 1j}},
        names={"x"},
        either=Open(size=1j, more=[np.float32(1), Path("p"), Color.RED]) if number % 2 else sheet,
        page=page,
        spare=None if number % 2 else sheet,
        pages=[page, sheet],
        more=[page] * (number % 3) if number % 2 else None,
        image=np.arange(6, dtype=np.uint8).reshape(2, 3) if number % 2 else None,
        shaped=np.ones((number % 4, 2), np.float32),
        anything=np.array(["a", "b"], dtype=object) if number % 2 else np.arange(3, dtype=np.int16),
        rest=[1, (2, {3}), {"k": datetime(2024, 1, 1, tzinfo=timezone.utc)}, DocumentArray[Page]([page])],
        next=Book(page=page) if number % 2 else None,
    )


def some_notes(count: int = 5) -> list[Note]:
    """Return notes, some with missing values."""
    return [
        Note(
            title=f"n{i}é",
            data=bytes(i),
            year=i,
            score=None if i % 2 else float(i),
            vector=None if i % 3 == 2 else np.ones(i % 3 + 1, np.float32),
        )
        for i in range(count)
    ]


def tensors() -> list[Any]:
    """Return dense and sparse tensors of every installed framework."""
    values: list[Any] = [np.arange(4.0), np.array([], np.int64), np.array("2024-01-01", "M8[D]"), np.array(["ab", "c"])]
    if find_spec("scipy"):
        import scipy.sparse

        values += [
            scipy.sparse.csr_matrix(np.eye(3)),
            scipy.sparse.coo_array(np.eye(2)),
            scipy.sparse.dok_array((3, 2)),
        ]
    if find_spec("torch"):
        import torch

        values += [torch.ones(2, requires_grad=True), torch.eye(2).to_sparse(), torch.ones(2).bfloat16()]
    return values


def documents() -> list[BaseDocument]:
    """Return documents that are encoded one by one."""
    return [a_book(0), a_book(1), *some_notes(3), Open(size=2j, a=1, t=tensors()), Page(text="x")]


def messages(books: int = 3) -> dict[str, list[bytes]]:
    """Return valid input for every decoder, made of that many books."""
    shelf = DocumentArray[Book]([a_book(i) for i in range(books)])
    notes = DocumentArray[Note](some_notes())
    mixed = DocumentArray[Page]([Page(text="a"), Sheet(text="b", marks={"x": 1})])
    every = [shelf, notes, mixed, DocumentArray([a_book(1), *some_notes(2)])]
    single = [document.to_bytes() for document in documents()]
    arrays = [array.to_protobuf().SerializeToString() for array in every]
    batches = [array.stack(shapes="ragged").to_bytes() for array in (shelf, notes, mixed)]
    streams = [array.to_bytes() for array in every]
    packed = [pack(data) for data in (single[0], streams[1]) for pack in packers().values()]
    return {
        "document": single,
        "typed": [a_book(0).to_bytes(), a_book(1).to_bytes()],
        "array": arrays + batches,
        "typed_array": [arrays[1], batches[1], streams[1]],
        "batch": [*batches, arrays[1]],
        "typed_batch": [batches[0], arrays[0]],
        "stream": streams,
        "packed": packed,
        "protobuf": single + arrays + batches,
        "base64": [b64encode(data) for data in (single[2], arrays[1], batches[1])],
    }


def packers() -> dict[str, Callable[[bytes], bytes]]:
    """Return the functions of all installed compressions."""
    compressors: dict[str, Callable[[bytes], bytes]] = {
        "gzip": gzip.compress,
        "bz2": bz2.compress,
        "lzma": lzma.compress,
    }
    if find_spec("zstandard"):
        import zstandard

        compressors["zstd"] = zstandard.ZstdCompressor().compress
    if find_spec("lz4"):
        import lz4.frame

        compressors["lz4"] = lz4.frame.compress
    return compressors


# --- decoders


def _document(data: bytes) -> None:
    survive(BaseDocument.from_bytes(data))
    survive(BaseDocument.from_bytes(data, missing="numpy", copy=False))


def _typed(data: bytes) -> None:
    survive(Book.from_bytes(data, unknown="keep"))


def _array(data: bytes) -> None:
    survive(DocumentArray.from_bytes(data))


def _typed_array(data: bytes) -> None:
    survive(DocumentArray[Note].from_bytes(data, unknown="keep"))


def _batch(data: bytes) -> None:
    survive(DocumentBatch.from_bytes(data, types=CLASSES))


def _typed_batch(data: bytes) -> None:
    survive(DocumentBatch[Book].from_bytes(data))


def _stream(data: bytes) -> None:
    whole = repair_checksums(data)
    every(
        lambda: list(DocumentArray.load_binary(io.BytesIO(data), streaming=True)),
        lambda: survive(DocumentArray.from_bytes(whole)),
        lambda: survive(DocumentArray[Note].load_binary(io.BytesIO(whole), rows=slice(0, 3))),
        lambda: [survive(batch) for batch in DocumentBatch[Note].load_binary(io.BytesIO(whole), streaming=True)],
    )


def every(*tries: Callable[[], Any]) -> None:
    """Call each function, then raise the first DecodeError if there was one."""
    errors = []
    for attempt in tries:
        try:
            attempt()
        except DecodeError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _packed(data: bytes) -> None:
    every(
        lambda: survive(DocumentArray.from_bytes(data)),
        lambda: survive(BaseDocument.from_bytes(data)),
        lambda: list(DocumentArray[Note].load_binary(io.BytesIO(data), streaming=True)),
        lambda: survive(DocumentArray.load_binary(io.BytesIO(data), rows=[0])),
    )


def _protobuf(data: bytes) -> None:
    from google.protobuf.message import DecodeError as Unparsed

    quire_pb2 = load_generated_messages()

    def read(kind: str, cls: Any) -> None:
        with suppress(Unparsed, SystemError, UnicodeDecodeError):  # the runtimes 3.20 say so of text that is no UTF-8
            message = getattr(quire_pb2, kind).FromString(data)
            survive(cls.from_protobuf(message))

    pairs = (("Document", BaseDocument), ("Array", DocumentArray), ("Batch", DocumentBatch), ("Batch", DocumentArray))
    every(*(partial(read, *pair) for pair in pairs))


def _base64(data: bytes) -> None:
    survive(DocumentArray.from_base64(data))


DECODERS: dict[str, Callable[[bytes], None]] = {
    "document": _document,
    "typed": _typed,
    "array": _array,
    "typed_array": _typed_array,
    "batch": _batch,
    "typed_batch": _typed_batch,
    "stream": _stream,
    "packed": _packed,
    "protobuf": _protobuf,
    "base64": _base64,
}


def survive(value: Any) -> None:
    """Check that a decoded value can be shown, unstacked and encoded again."""
    repr(value)
    value.to_bytes()
    if isinstance(value, DocumentBatch):
        for document in value.unstack():
            repr(document)


def attempt(decode: Callable[[bytes], None], data: bytes) -> bool:
    """Return whether the bytes could be decoded; errors other than DecodeError are raised."""
    try:
        decode(data)
    except DecodeError:
        return False
    except MissingDependencyError as error:
        module = (error.name or "").split(".")[0]
        if find_spec(module or "tensorflow") is not None:
            raise
        return False
    return True


# --- streams whose checksums are right again

_HEAD = struct.Struct("<8scxxxIQQ28xI")


def repair_checksums(stream: bytes) -> bytes:
    """Return a stream with correct checksums of its segments, as an attacker would send it."""
    data = bytearray(stream)
    position = 0
    while position + _HEAD.size <= len(data):
        *_, length, _, _ = _HEAD.unpack_from(data, position)
        start = position + _HEAD.size
        payload = data[start : start + length] if length <= len(data) else b""
        data[position + 12 : position + 16] = zlib.crc32(payload).to_bytes(4, "little")
        data[position + 60 : position + 64] = zlib.crc32(data[position : position + 60]).to_bytes(4, "little")
        position = start + length + -length % 64
    return bytes(data)


# --- damaged bytes


def damage_bytes(data: bytes, random: Random, other: bytes) -> bytes:
    """Return the bytes with one to four random changes."""
    content = bytearray(data)
    for _ in range(random.randint(1, 4)):
        _DAMAGES[random.randrange(len(_DAMAGES))](content, random, other)
    return bytes(content)


def _flip(data: bytearray, random: Random, _: bytes) -> None:
    if data:
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)


def _byte(data: bytearray, random: Random, _: bytes) -> None:
    if data:
        data[random.randrange(len(data))] = random.choice((0, 1, 127, 128, 255, random.randrange(256)))


def _cut(data: bytearray, random: Random, _: bytes) -> None:
    del data[random.randrange(len(data) + 1) :]


def _remove(data: bytearray, random: Random, _: bytes) -> None:
    start = random.randrange(len(data) + 1)
    del data[start : start + random.randint(1, 16)]


def _insert(data: bytearray, random: Random, _: bytes) -> None:
    start = random.randrange(len(data) + 1)
    data[start:start] = random.randbytes(random.randint(1, 8))


def _double(data: bytearray, random: Random, _: bytes) -> None:
    start = random.randrange(len(data) + 1)
    data[start:start] = data[start : start + random.randint(1, 64)]


def _splice(data: bytearray, random: Random, other: bytes) -> None:
    start = random.randrange(len(other) + 1)
    at = random.randrange(len(data) + 1)
    data[at : at + random.randint(0, 32)] = other[start : start + random.randint(1, 128)]


def _grow(data: bytearray, random: Random, _: bytes) -> None:
    """Replace a number, perhaps a length, by a very large one."""
    if data:
        at = random.randrange(len(data))
        data[at : at + 1] = random.choice(
            (b"\xff\xff\xff\xff\x07", b"\x80\x80\x80\x80\x80\x80\x80\x80\x40", b"\xff" * 9)
        )


_DAMAGES = (_flip, _flip, _byte, _cut, _remove, _insert, _double, _splice, _grow)


# --- well-formed messages with inconsistent content


class MessageGenerator:
    """Random messages of the generated protobuf classes: kinds, sizes and numbers of buffers vary."""

    def __init__(self, random: Random) -> None:
        quire_pb2 = load_generated_messages()

        self.random, self.messages = random, quire_pb2

    def number(self) -> int:
        """Return a number: mostly small, sometimes at the limits of its type."""
        small = self.random.randrange(4)
        return self.random.choice((small, small, small, 255, 1 << 31, (1 << 40) + 1, (1 << 63) - 1))

    def content(self) -> bytes:
        """Return a few random bytes."""
        return self.random.randbytes(self.random.choice((0, 1, 3, 4, 8, 16, 24, 32)))

    def text(self) -> str:
        """Return a word that has a meaning in some message."""
        return self.random.choice(_WORDS)

    def fill(self, message: Any, depth: int = 0) -> Any:
        """Set random fields of a message, and return it."""
        for field in message.DESCRIPTOR.fields:
            if field.name in ("buffers", "version") or self.random.random() < 0.5:
                continue
            self._set(message, field, depth)
        return message

    def _set(self, message: Any, field: Any, depth: int) -> None:
        many = _is_many(message, field)
        if field.message_type is not None:
            if depth > 6:
                return
            if many:
                for _ in range(self.random.randrange(3)):
                    self.fill(getattr(message, field.name).add(), depth + 1)
            else:
                inner = getattr(message, field.name)
                inner.SetInParent()
                self.fill(inner, depth + 1)
        elif many:
            getattr(message, field.name).extend(self._plain(field) for _ in range(self.random.randrange(4)))
        else:
            setattr(message, field.name, self._plain(field))

    def _plain(self, field: Any) -> Any:
        if field.type == field.TYPE_STRING:
            return self.text()
        if field.type == field.TYPE_BYTES:
            return self.content()
        if field.type == field.TYPE_BOOL:
            return self.random.random() < 0.5
        if field.type == field.TYPE_ENUM:
            return 0
        if field.type == field.TYPE_DOUBLE:
            return self.random.choice((0.0, 1.5, float("nan"), float("inf")))
        number = self.number()
        return min(number, (1 << 32) - 1) if field.type == field.TYPE_UINT32 else number

    def document(self) -> bytes:
        """Return an encoded document with a name for each value."""
        message = self.fill(self.messages.Document())
        del message.names[:]
        message.type = self.random.choice(("", "no:Such", *(f"{c.__module__}:{c.__qualname__}" for c in CLASSES)))
        message.names.extend(self.text() for _ in message.values)
        message.buffers.extend(self.content() for _ in range(3))
        return bytes(message.SerializeToString())

    def array(self) -> bytes:
        """Return an encoded array of random documents."""
        message = self.messages.Array(type=self.random.choice(_WORDS))
        for _ in range(self.random.randrange(4)):
            message.documents.add().MergeFromString(self.document())
        return bytes(message.SerializeToString())

    def batch(self) -> bytes:
        """Return an encoded batch whose columns may or may not have its number of rows."""
        rows = self.random.choice((0, 1, 2, 3, 3, 1 << 40))
        cls = self.random.choice(CLASSES)
        message = self.messages.Batch(type=f"{cls.__module__}:{cls.__qualname__}", rows=rows)
        count = min(rows, 4)
        offsets = np.sort(np.array([0, *(self.random.randrange(9) for _ in range(count))], "<i8"))
        message.buffers.extend(
            [bytes(offsets[-1]), offsets.tobytes(), b"\x01" * count, self.content(), bytes(4 * count)]
        )
        for name in {self.random.choice((*cls.model_fields, "x")) for _ in range(self.random.randrange(6))}:
            self._column(message.columns.add(name=name), count)
        for _ in range(count if self.random.random() < 0.2 else 0):
            message.remainders.add().MergeFromString(self.document())
        return bytes(message.SerializeToString())

    def _column(self, column: Any, rows: int) -> None:
        column.validity = self.random.choice((0, 0, 0, 3, 1))
        form = self.random.randrange(6)
        if form == 0:
            self._elements(column.tensor, rows, self.random.choice((1, 2, 0)))
        elif form == 1:
            self._elements(column.scalars, rows, None)
        elif form in (2, 3):
            strings = column.text if form == 2 else column.blobs
            strings.data, strings.offsets = self.random.choice(((1, 2), (1, 2), (3, 2), (0, 1)))
        elif form == 4:
            for _ in range(rows):
                self.fill(column.objects.values.add(), 4)
        else:
            self.fill(column, 3)

    def _elements(self, tensor: Any, rows: int, width: int | None) -> None:
        dtype = self.random.choice(("float32", "int64", "bool", "uint8", "complex64", "float16"))
        shape = (rows,) if width is None else (rows, width)
        tensor.dtype, tensor.framework = dtype, "numpy"
        tensor.shape.extend(shape)
        tensor.data = np.zeros(shape, dtype).tobytes()


def _is_many(message: Any, field: Any) -> bool:
    return hasattr(getattr(message, field.name), "extend") and not isinstance(
        getattr(message, field.name), (str, bytes)
    )


_WORDS = (
    *("", "x", "id", "text", "number", "float32", "int64", "string", "object", "bfloat16", "str2", "datetime64[s]"),
    *("numpy", "numpy", "scipy", "torch", "matrix:csr", "array:coo", "sparse_coo", "matrix:dia", "array:dok"),
    *("2024-02-29", "2024-02-29T12:00:00", "12:30", "1e400", "NaN", "sNaN", "Europe/Paris", "../x", "a/b"),
    *("title", "year", "page", "either", "RED", "tests.codec.hostile:Color", "\x00", "é", "uint8", "complex64"),
)


def forged(random: Random) -> Iterator[bytes]:
    """Return an encoded document, array and batch."""
    forger = MessageGenerator(random)
    yield forger.document()
    yield forger.array()
    yield forger.batch()
