"""Documents, arrays and batches as bytes, in memory or in a file."""

from __future__ import annotations

import pickle
from base64 import b64decode
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from quire._class_registry import class_name
from quire.codec._batches import encode_columns, encode_rows
from quire.codec._blocks import BATCH, PICKLE, ROWS, Segment, is_stream, stream_parts
from quire.codec._columns import decode_columns, decode_rows
from quire.codec._compression import check_compression, get_compression, unpack
from quire.codec._context import CREDIT, Reader, ReadOptions, Writer
from quire.codec._decode import decode_array, decode_document, unpickle
from quire.codec._values import encode_array, encode_document, encode_documents
from quire.codec._wire import DELIMITED, fields, join, read_text
from quire.columns import Columns
from quire.errors import CodecError, ColumnError, DecodeError, EncodeError, did_you_mean
from quire.schema import Schema

PROTOCOLS = ("protobuf", "pickle")
BLOCK_BYTES = 8 << 20
"""About so many bytes of documents go into a block; a quarter of it where blocks are packed, one on each core."""
_BLOCK_ROWS = 1 << 16


def check_protocol(protocol: str | None) -> str:
    """The protocol, if there is such a one; protobuf unless another is asked for."""
    if protocol is not None and protocol not in PROTOCOLS:
        raise CodecError(f"{protocol!r} is not a protocol. {did_you_mean(protocol, PROTOCOLS)}")
    return protocol or "protobuf"


# --- one message


def document_message(document: Any, *, allow_pickle: bool = False) -> bytes:
    """A document as one message."""
    writer = Writer(allow_pickle)
    return _whole(_guarded(encode_document, document, writer), writer)


def array_message(array: Any, *, allow_pickle: bool = False) -> bytes:
    """An array as one message, document by document."""
    writer = Writer(allow_pickle)
    return _whole(_guarded(encode_array, array, writer), writer)


def columns_message(columns: Columns, *, allow_pickle: bool = False) -> bytes:
    """A batch as one message."""
    writer = Writer(allow_pickle)
    return _whole(_guarded(encode_columns, columns, writer), writer)


def rows_message(documents: list[Any], schema: Schema) -> bytes:
    """Documents as one message: of columns, or one by one where their class says nothing of what they hold."""
    return b"".join(_encoded(documents, schema, allow_pickle=False)[2])


def _whole(head: bytes, writer: Writer) -> bytes:
    return b"".join(join(head, writer.buffers)) if writer.buffers else head


def _guarded(encode: Any, *arguments: Any) -> bytes:
    try:
        content: bytes = encode(*arguments)
    except RecursionError as error:
        raise EncodeError("values lie too deep inside each other, or one contains itself.") from error
    return content


def dumped(value: Any, message: Any, protocol: str | None, compress: str | None) -> bytes:
    """A message, or a pickle of the value in its place, packed."""
    data: bytes = pickle.dumps(value, protocol=5) if check_protocol(protocol) == "pickle" else message()
    compression = get_compression(compress)
    return data if compression is None else compression.pack(data)


def loaded(data: Any, protocol: str | None, compress: str | None, options: ReadOptions) -> tuple[Any, bool]:
    """The data without its compression, which the first bytes tell, and whether it is a pickle.

    What is asked for and what is there must agree.
    """
    view = memoryview(data).cast("B")
    if not view.nbytes:
        raise DecodeError("there are no bytes; even an empty array has some. The data was cut off, or never written.")
    compression = check_compression(bytes(view[:8]), compress)
    if compression is not None:
        view = memoryview(unpack(view, compression, options.max_bytes, options.max_ratio))
    pickled = len(view) > 1 and view[0] == 0x80 and view[1] <= pickle.HIGHEST_PROTOCOL
    if protocol is not None and (check_protocol(protocol) == "pickle") != pickled and not is_stream(bytes(view[:8])):
        raise DecodeError(f"protocol={protocol!r} was asked for, but the data is {'' if pickled else 'not '}a pickle.")
    return view, pickled


def document_from_message(data: Any, document_type: type[Any] | None, options: ReadOptions) -> Any:
    """The document of one message."""
    return _decoded(decode_document, data, document_type, options)


def document_from_bytes(
    cls: type[Any],
    expected: type[Any] | None,
    data: Any,
    protocol: str | None,
    compress: str | None,
    options: ReadOptions,
) -> Any:
    """The document of a message or of a pickle."""
    view, pickled = loaded(data, protocol, compress, options)
    if is_stream(bytes(view[:8])):
        raise DecodeError(
            f"these are the bytes of an array: read them with DocumentArray[{cls.__name__}].from_bytes()."
        )
    if not pickled:
        return document_from_message(view, expected, options)
    value = unpickle(view, allow=options.allow_pickle)
    if not isinstance(value, cls):
        raise DecodeError(f"the pickle holds a {type(value).__name__}, and not a {cls.__name__}.")
    return value


def from_base64(data: str | bytes) -> bytes:
    """Bytes that were written as text."""
    try:
        return b64decode(data, validate=True)
    except ValueError as error:
        raise DecodeError(f"this is not base64: {error}.") from error


def columns_from_message(data: Any, document_type: type[Any], options: ReadOptions) -> Columns:
    """The columns of one message."""
    columns: Columns = _decoded(decode_columns, data, document_type, options)
    return columns


def documents_from_message(data: Any, document_type: type[Any] | None, options: ReadOptions) -> tuple[list[Any], str]:
    """The documents of one message, a batch or an array, and the name of their class."""
    name = message_type_name(data)
    if is_batch(data):
        return _decoded(decode_rows, data, document_type, options), name
    return _decoded(decode_array, data, document_type, options)._documents, name


def message_type_name(data: Any) -> str:
    """The name of the document class that a message has."""
    view = memoryview(data).cast("B")
    for number, kind, a, b in fields(view, 0, len(view)):
        if number == 2 and kind == DELIMITED:
            return read_text(bytes(view[a:b]), 0, b - a)
        if number > 2:
            break
    return ""


def is_batch(data: Any) -> bool:
    """Whether a message is a batch, and not an array: only a batch has numbers or columns there."""
    view = memoryview(data).cast("B")
    for number, kind, _, _ in fields(view, 0, len(view)):
        if number in (3, 5):
            return number == 5 or kind != DELIMITED
    return False


class Purse:
    """What the blocks of one stream may still take in memory together, beyond what their sizes allow."""

    __slots__ = ("left",)

    def __init__(self) -> None:
        self.left: float = CREDIT


def _decoded(
    decode: Any, data: Any, document_type: type[Any] | None, options: ReadOptions, purse: Purse | None = None
) -> Any:
    purse = purse or Purse()
    try:
        reader = Reader(memoryview(data).cast("B"), options, purse.left)
        value = decode(reader, 0, len(reader.data), document_type)
    except RecursionError as error:
        raise DecodeError("values lie too deep inside each other.") from error
    except MemoryError as error:
        raise DecodeError("the values take more memory than there is.") from error
    purse.left = reader.left
    return value


# --- streams


def stream(  # noqa: PLR0913
    documents: Iterable[Any],
    schema: Schema,
    protocol: str | None,
    compress: str | None,
    *,
    allow_pickle: bool,
    checksums: bool,
    name: str | None = None,
    workers: int | None = None,
) -> Iterator[list[Any]]:
    """Documents as a stream of blocks, in parts; with `workers`, so many make and pack the blocks."""
    pickled = check_protocol(protocol) == "pickle"
    compression = get_compression(compress)

    def encode(block: list[Any]) -> tuple[bytes, int, list[Any]]:
        if pickled:
            return PICKLE, len(block), [pickle.dumps(block, protocol=5)]
        return _encoded(block, schema, allow_pickle=allow_pickle)

    found = in_blocks(documents, _block_bytes(compress))
    blocks = map(encode, found) if workers is None else (partial(encode, block) for block in found)
    name = name or class_name(schema.document_type)
    return stream_parts(name, "", blocks, compression, checksums=checksums, workers=workers)


def _encoded(block: list[Any], schema: Schema, *, allow_pickle: bool) -> tuple[bytes, int, list[Any]]:
    writer = Writer(allow_pickle)
    if schema.is_open:
        head = _guarded(encode_documents, class_name(schema.document_type), block, writer)
        return ROWS, len(block), join(head, writer.buffers)
    try:
        head = _guarded(encode_rows, schema, block, writer)
    except ColumnError as error:
        raise EncodeError(str(error)) from error
    return BATCH, len(block), join(head, writer.buffers)


def columns_stream(
    batches: Iterable[Columns],
    document_type: type[Any],
    protocol: str | None,
    compress: str | None,
    *,
    allow_pickle: bool,
    workers: int | None = None,
) -> Iterator[list[Any]]:
    """Batches as a stream of blocks, in parts; with `workers`, so many make and pack the blocks."""
    pickled = check_protocol(protocol) == "pickle"

    def encode(part: Columns) -> tuple[bytes, int, list[Any]]:
        if pickled:
            return PICKLE, len(part), [pickle.dumps(part.documents(), protocol=5)]
        writer = Writer(allow_pickle)
        return BATCH, len(part), join(_guarded(encode_columns, part, writer), writer.buffers)

    parts = (part for columns in batches for part in _sliced(columns, _block_bytes(compress)))
    blocks = map(encode, parts) if workers is None else (partial(encode, part) for part in parts)
    compression = get_compression(compress)
    return stream_parts(class_name(document_type), "", blocks, compression, checksums=True, workers=workers)


def _sliced(columns: Columns, block_bytes: int) -> Iterator[Columns]:
    if not len(columns):
        return
    first = columns.slice(slice(0, 1)).documents()[0]
    rows = max(1, min(_BLOCK_ROWS, block_bytes // approximate_size(first)))
    for start in range(0, len(columns), rows):
        yield columns.slice(slice(start, start + rows))


def _block_bytes(compress: str | None) -> int:
    return BLOCK_BYTES if get_compression(compress) is None else BLOCK_BYTES // 4


def in_blocks(documents: Iterable[Any], block_bytes: int) -> Iterator[list[Any]]:
    """Documents in blocks of about so many bytes."""
    block: list[Any] = []
    size = 0
    for document in documents:
        block.append(document)
        size += approximate_size(document)
        if size >= block_bytes or len(block) >= _BLOCK_ROWS:
            yield block
            block, size = [], 0
    if block:
        yield block


def approximate_size(document: Any) -> int:
    """About how many bytes a document takes."""
    size = 64
    for value in () if document is None else document.__dict__.values():
        tp = type(value)
        if tp is str or tp is bytes:
            size += len(value)
        elif value is not None and tp not in _SMALL_TYPES:
            found = _nbytes(value)
            size += _size_inside(value) if found is None else found
    return size


def _nbytes(value: Any) -> int | None:
    """The bytes of a tensor, if the value is one; torch's sparse ones refuse to tell."""
    try:
        found = getattr(value, "nbytes", None)
    except RuntimeError:
        found = value._nnz() * (value.element_size() + 8 * value.ndim)
    return found if isinstance(found, int) else None


_SMALL_TYPES = (int, float, bool)


def _size_inside(value: Any) -> int:
    if hasattr(type(value), "document_schema"):
        return approximate_size(value)
    if isinstance(value, (list, tuple, set)):
        return sum(map(_size_inside, value)) + 16
    if isinstance(value, dict):
        return sum(map(_size_inside, value.values())) + 64
    if isinstance(value, (str, bytes)):
        return len(value)
    if hasattr(value, "_documents"):
        return sum(map(approximate_size, value._documents))
    return _nbytes(value) or 16


def block_documents(
    segment: Segment, document_type: type[Any] | None, options: ReadOptions, purse: Purse | None = None
) -> list[Any]:
    """The documents of one block; where those of several are held at once, they pay from one purse."""
    try:
        if segment.kind == PICKLE:
            documents = unpickle(segment.payload, allow=options.allow_pickle)
        elif segment.kind == ROWS:
            documents = _decoded(decode_array, segment.payload, document_type, options, purse)._documents
        else:
            documents = _decoded(decode_rows, segment.payload, document_type, options, purse)
    except DecodeError as error:
        raise DecodeError(f"{segment.where}: {error}") from error
    if len(documents) != segment.count:
        raise DecodeError(f"{segment.where}: a block of {segment.count} documents has {len(documents)}.")
    return documents  # type: ignore[no-any-return]


def block_columns(
    segment: Segment, document_type: type[Any], options: ReadOptions, purse: Purse | None = None
) -> Columns | list[Any]:
    """The columns of one block; its documents, where it has no columns."""
    if segment.kind != BATCH:
        return block_documents(segment, document_type, options, purse)
    try:
        columns: Columns = _decoded(decode_columns, segment.payload, document_type, options, purse)
    except DecodeError as error:
        raise DecodeError(f"{segment.where}: {error}") from error
    if len(columns) != segment.count:
        raise DecodeError(f"{segment.where}: a block of {segment.count} documents has {len(columns)}.")
    return columns
