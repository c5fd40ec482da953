"""What a call carries: a document, an array or a batch, and the messages that it is sent in.

Two kinds of messages carry the same values. `Payload` uses the messages of quire.v1 (columns), between programs that
use quire. `ProtoPayload` uses the messages that `quire proto` writes for a document class, for other languages.

Values that are larger than one gRPC message are sent as a stream of `quire.v1.Part` messages:
`bytes content = 1; bool more = 2;`. The last part of a value has no `more`.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar, cast, get_args, get_origin

from quire import codec
from quire._protocols import is_array_type, is_document_type
from quire.array import DocumentArray, DocumentBatch, array_from_message, batch_from_message
from quire.codec import DELIMITED, VARINT, DecodeOptions, encode_delimited, encode_uint, iter_fields
from quire.document import BaseDocument
from quire.errors import ColumnError, DecodeError, DocumentTypeError, EncodeError, SchemaError
from quire.services._limits import RequestAccount, ResponseAllowance

T = TypeVar("T")
PayloadKind = Literal["document", "array", "batch"]
Rows: TypeAlias = "DocumentArray[Any] | DocumentBatch[Any]"
Value: TypeAlias = "BaseDocument | Rows"
InT = TypeVar("InT", bound=Value)
OutT = TypeVar("OutT", bound=Value)
"""What an endpoint takes and returns. For type checkers, arrays and batches have every attribute, so they would also
pass as iterators: overloads with these variables come before those with streams."""
STREAM_TYPES = (Iterator, Iterable, AsyncIterator, AsyncIterable)
_MANY_ROWS, _MANY_BYTES = 1 << 8, 1 << 20

# Nothing is unpickled, no class is imported, and values are checked against their fields. With `lend`, large tensors
# stay in the message until they are read, so columns that a function only passes on are never copied.
_READ_OPTIONS = DecodeOptions(unknown="drop", lend=True)


@dataclass(frozen=True)
class Payload:
    """The argument or the result of an endpoint: documents of one class, once or as a stream."""

    document_type: type[Any]
    kind: PayloadKind
    stream: bool = False

    @property
    def python_type(self) -> Any:
        """The class of one value."""
        if self.kind == "document":
            return self.document_type
        origin: Any = DocumentArray if self.kind == "array" else DocumentBatch
        return origin if self.document_type is origin.document_type else origin[self.document_type]

    def convert(self, value: object, where: str) -> Any:
        """Return the value as an instance of `python_type`: rows become columns and columns rows where needed."""
        expected = self.python_type
        if isinstance(value, expected):
            return value
        if (
            self.kind == "array"
            and isinstance(value, DocumentBatch)
            and issubclass(value.document_type, self.document_type)
        ):
            return value.unstack()
        if self.kind != "document" and isinstance(value, (DocumentArray, list, tuple)):
            try:
                return expected(value)
            except DocumentTypeError as error:
                raise DocumentTypeError(f"{where}: {error}") from None
        raise DocumentTypeError(f"{where}: expected {expected.__name__}, got {type(value).__name__}.")

    def encode(self, value: Any) -> bytes:
        """Encode a value as one message of quire.v1: a Document, a Batch or an Array."""
        if self.kind == "document":
            return codec.encode_document_message(value)
        if self.kind == "batch":
            return codec.encode_columns_message(value._columns)
        try:
            return codec.encode_rows_message(value._documents, self.document_type.document_schema())
        except RecursionError as error:
            raise EncodeError("values are nested too deeply.") from error

    def decode(self, data: bytes) -> Any:
        """Decode the value of a message."""
        if self.kind == "document":
            expected = None if self.document_type.document_schema().is_open else self.document_type
            return codec.decode_document_message(data, expected, _READ_OPTIONS)
        if self.kind == "batch":
            return batch_from_message(self.python_type, data, _READ_OPTIONS)
        return array_from_message(self.python_type, data, _READ_OPTIONS)

    def decode_request(self, data: bytes) -> Any:
        """Decode the argument of a function; see `guard_missing`."""
        return guard_missing(self.decode(data))

    def __str__(self) -> str:
        name = self.python_type.__name__
        return f"a stream of {name}" if self.stream else name


@dataclass(frozen=True)
class ProtoPayload(Payload):
    """A payload in the messages of its class's own `.proto`; an array is a message with the documents as field 1."""

    previous: str | None = None

    def encode(self, value: Any) -> bytes:
        """Encode a value as a message of the class, or as an array of them."""
        if self.kind == "document":
            return self._encode_document(value)
        rows = value.unstack() if self.kind == "batch" else value
        return b"".join([encode_delimited(1, self._encode_document(document)) for document in rows])

    def _encode_document(self, document: BaseDocument) -> bytes:
        data: bytes = codec.to_typed(document, self.previous).SerializeToString()
        return data

    def decode(self, data: bytes) -> Any:
        """Decode the value of a message."""
        if self.kind == "document":
            return codec.from_typed(self.document_type, data, self.previous)
        documents = [
            codec.from_typed(self.document_type, data[start:end], self.previous)
            for number, wire_type, start, end in iter_fields(data, 0, len(data))
            if number == 1 and wire_type == DELIMITED
        ]
        rows = DocumentArray[self.document_type]._trusted(documents)  # type: ignore[name-defined]
        try:
            return rows.stack(shapes="ragged") if self.kind == "batch" else rows
        except ColumnError as error:
            raise DecodeError(f"the documents do not form a batch: {error}") from error


def is_large(value: object) -> bool:
    """Return whether encoding a value may take milliseconds, in which an event loop would serve nobody else."""
    if isinstance(value, DocumentBatch):
        return len(value) > _MANY_ROWS or value._columns.nbytes > _MANY_BYTES
    return isinstance(value, (DocumentArray, list, tuple)) and len(value) > _MANY_ROWS


def guard_missing(value: T) -> T:
    """Return the value so that reading a batch's column with missing numbers or tensors raises MissingValueError.

    Otherwise a function would read zeros where the caller left values out.
    """
    return cast("T", value._guard_missing()) if isinstance(value, DocumentBatch) else value


def parse_payload(annotation: Any, where: str) -> Payload:
    """Return the payload of an annotation: a document class, an array, a batch, or an iterator of one of them."""
    if get_origin(annotation) in STREAM_TYPES:
        item = parse_payload(get_args(annotation)[0], where)
        if item.stream:
            raise SchemaError(f"{where}: a stream of streams cannot be sent.")
        return Payload(item.document_type, item.kind, stream=True)
    is_class = isinstance(annotation, type) and get_origin(annotation) is None  # list[int] is a type on Python 3.10
    if is_class and issubclass(annotation, DocumentBatch):
        return Payload(annotation.document_type, "batch")
    if is_array_type(annotation):
        return Payload(annotation.document_type, "array")
    if is_document_type(annotation):
        return Payload(annotation, "document")
    name = getattr(annotation, "__name__", annotation)
    raise SchemaError(
        f"{where}: {name} cannot be sent. Use a document class, DocumentArray[T], DocumentBatch[T], "
        "or an Iterator of one of them."
    )


# --- values larger than a message
#
# A value is sent as a sequence of `quire.v1.Part` messages. Field 1 of a part is a piece of the value, and field 2 is
# true if another part follows.

_PART_OVERHEAD = 64  # more than the tags and lengths of a part take
_MORE = encode_uint(2, 1)


def split_parts(data: bytes, max_message_bytes: int) -> Iterator[bytes]:
    """Split the bytes of a value into messages of at most `max_message_bytes`, and at most 1 MiB."""
    size = max(1, min(max_message_bytes, 1 << 20) - _PART_OVERHEAD)
    view = memoryview(data)
    for start in range(0, max(1, len(view)), size):
        content = encode_delimited(1, view[start : start + size])  # the only copy: it takes the view as it is
        yield _MORE + content if start + size < len(view) else content


class PartJoiner:
    """Joins parts to values, and counts their bytes in an account."""

    def __init__(self, account: RequestAccount | ResponseAllowance) -> None:
        self._account = account
        self._pieces: list[memoryview] = []

    def add(self, part: bytes) -> Any:
        """Return the bytes of the value if this is its last part; those of a single part are a view of it."""
        self._account.take(len(part))
        view = memoryview(part)
        more = False
        for number, wire_type, start, end in iter_fields(view, 0, len(view)):
            if number == 1 and wire_type == DELIMITED:
                self._pieces.append(view[start:end])
            elif number == 2 and wire_type == VARINT:
                more = bool(start)
        if more:
            return None
        pieces, self._pieces = self._pieces, []
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def finish(self) -> None:
        """Raise an error if the stream ends inside a value."""
        if self._pieces:
            raise DecodeError("the stream ends in the middle of a value.")
