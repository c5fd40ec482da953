"""What is sent in a call: a document, an array or a batch, and the messages that carry it."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from quire import codec
from quire._protocols import is_array_type, is_document_type
from quire.array import DocumentArray, DocumentBatch, array_from_message, batch_from_message
from quire.codec import DELIMITED, VARINT, ReadOptions, delimited, fields, uint
from quire.errors import ColumnError, DecodeError, DocumentTypeError, EncodeError, SchemaError
from quire.services._limits import Account, Allowance

Form = Literal["document", "array", "batch"]
STREAMS = (Iterator, Iterable, AsyncIterator, AsyncIterable)


@dataclass(frozen=True)
class Side:
    """What an endpoint takes, or what it gives: documents of a class, in a form, once or as a stream of such."""

    document_type: type[Any]
    form: Form
    stream: bool = False

    @property
    def python_type(self) -> Any:
        """The class of one value."""
        if self.form == "document":
            return self.document_type
        origin: Any = DocumentArray if self.form == "array" else DocumentBatch
        return origin if self.document_type is origin.document_type else origin[self.document_type]

    def check(self, value: Any, where: str) -> Any:
        """The value, if it is of the class; rows become columns and columns rows where that is what goes over."""
        expected = self.python_type
        if isinstance(value, expected):
            return value
        if (
            self.form == "array"
            and isinstance(value, DocumentBatch)
            and issubclass(value.document_type, self.document_type)
        ):
            return value.unstack()
        if self.form != "document" and isinstance(value, (DocumentArray, list, tuple)):
            try:
                return expected(value)
            except DocumentTypeError as error:
                raise DocumentTypeError(f"{where}: {error}") from None
        raise DocumentTypeError(f"{where}: expected {expected.__name__}, got {type(value).__name__}.")

    def encode(self, value: Any) -> bytes:
        """The value as one message of quire.v1: a Document, a Batch or an Array."""
        if self.form == "document":
            return codec.document_message(value)
        if self.form == "batch":
            return codec.columns_message(value._columns)
        try:
            return codec.rows_message(value._documents, self.document_type.document_schema())
        except RecursionError as error:
            raise EncodeError("values lie too deep inside each other.") from error

    def decode(self, data: Any, options: ReadOptions) -> Any:
        """The value in the bytes of a message."""
        if self.form == "document":
            expected = None if self.document_type.document_schema().is_open else self.document_type
            return codec.document_from_message(data, expected, options)
        if self.form == "batch":
            return batch_from_message(self.python_type, data, options)
        return array_from_message(self.python_type, data, options)

    def receive(self, data: Any, options: ReadOptions) -> Any:
        """The value in the bytes of a request, for a function: a batch of it does not show zeros for missing values."""
        return guard_missing(self.decode(data, options))

    def __str__(self) -> str:
        name = self.python_type.__name__
        return f"a stream of {name}" if self.stream else name


def guard_missing(value: Any) -> Any:
    """The value; reading a column of a batch in which numbers or tensors are missing raises MissingValueError."""
    return value._guarded() if isinstance(value, DocumentBatch) else value


def side_of(annotation: Any, where: str) -> Side:
    """What an annotation means: a document class, an array, a batch, or an iterator of one of them."""
    if get_origin(annotation) in STREAMS:
        inner = side_of(get_args(annotation)[0], where)
        if inner.stream:
            raise SchemaError(f"{where}: a stream of streams cannot be sent.")
        return Side(inner.document_type, inner.form, stream=True)
    is_class = isinstance(annotation, type) and get_origin(annotation) is None  # list[int] is a type on Python 3.10
    if is_class and issubclass(annotation, DocumentBatch):
        return Side(annotation.document_type, "batch")
    if is_array_type(annotation):
        return Side(annotation.document_type, "array")
    if is_document_type(annotation):
        return Side(annotation, "document")
    name = getattr(annotation, "__name__", annotation)
    raise SchemaError(
        f"{where}: {name} cannot be sent. Use a document class, DocumentArray[T], DocumentBatch[T], "
        "or an Iterator of one of them."
    )


@dataclass(frozen=True)
class TypedSide(Side):
    """A side whose messages are those of a `.proto` of its class."""

    previous: str | None = None

    def encode(self, value: Any) -> bytes:
        """A message of the class, or of many."""
        if self.form == "document":
            return self._message(value)
        rows = value.unstack() if self.form == "batch" else value
        return b"".join([delimited(1, self._message(document)) for document in rows])

    def _message(self, document: Any) -> bytes:
        data: bytes = codec.to_typed(document, self.previous).SerializeToString()
        return data

    def decode(self, data: Any, options: ReadOptions) -> Any:  # noqa: ARG002 - messages of protobuf have their own
        """The value of a message."""
        if self.form == "document":
            return codec.from_typed(self.document_type, data, self.previous)
        rows = DocumentArray[self.document_type]._trusted(self._documents(data))  # type: ignore[name-defined]
        try:
            return rows.stack(shapes="ragged") if self.form == "batch" else rows
        except ColumnError as error:
            raise DecodeError(f"the documents make no batch: {error}") from error

    def _documents(self, data: bytes) -> list[Any]:
        found = []
        for number, kind, start, end in fields(data, 0, len(data)):
            if number == 1 and kind == DELIMITED:
                found.append(codec.from_typed(self.document_type, data[start:end], self.previous))
        return found


_OVERHEAD = 64
"""More than what a part takes beside its content."""
_MORE = uint(2, 1)


def parts_of(data: bytes, max_message_bytes: int) -> Iterator[bytes]:
    """A value's bytes in messages of at most so many."""
    size = max(1, min(max_message_bytes, 1 << 20) - _OVERHEAD)
    view = memoryview(data)
    for start in range(0, max(1, len(view)), size):
        more = _MORE if start + size < len(view) else b""
        yield more + delimited(1, bytes(view[start : start + size]))


class Joiner:
    """Puts parts together; what they take is taken from the account."""

    def __init__(self, account: Account | Allowance | None = None) -> None:
        self._account = account
        self._pieces: list[memoryview] = []

    def add(self, part: bytes) -> bytes | None:
        """The value's bytes, when the part was its last."""
        if self._account is not None:
            self._account.take(len(part))
        view = memoryview(part)
        more = False
        for number, kind, start, end in fields(view, 0, len(view)):
            if number == 1 and kind == DELIMITED:
                self._pieces.append(view[start:end])
            elif number == 2 and kind == VARINT:
                more = bool(start)
        if more:
            return None
        joined, self._pieces = b"".join(self._pieces), []
        return joined

    def finish(self) -> None:
        """The stream has ended; a value in the middle of it is an error."""
        if self._pieces:
            raise DecodeError("the stream ends in the middle of a value.")
