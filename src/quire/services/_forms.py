"""What goes over the line: one document, an array or a batch, and how each is bytes."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from quire import codec
from quire._typing import is_array_type, is_document_type
from quire.array import DocumentArray, DocumentBatch
from quire.array._wire import array_from_message, batch_from_message
from quire.codec import ReadOptions
from quire.errors import DocumentTypeError, EncodeError, SchemaError

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
