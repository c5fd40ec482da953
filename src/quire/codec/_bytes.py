"""Documents, arrays and batches as bytes: single messages, pickles, and streams of blocks."""

from __future__ import annotations

import pickle
from base64 import b64decode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from quire._class_registry import class_name
from quire._protocols import ArrayLike, DocumentLike, is_array_type, is_document_type
from quire.codec._blocks import BATCH, PICKLE, ROWS, Block, Segment, encode_stream, is_stream
from quire.codec._columns import decode_columns, decode_rows, encode_columns, encode_rows
from quire.codec._compression import check_compression, check_protocol, decompress, get_compression
from quire.codec._context import DecodeOptions, MemoryBudget, Reader, Writer
from quire.codec._messages import ArrayField, BatchField, DocumentField
from quire.codec._values import (
    decode_array,
    decode_document,
    decode_partial,
    encode_array,
    encode_document,
    encode_documents,
    encode_partial,
    unpickle,
)
from quire.codec._wire import DELIMITED, Bytes, iter_fields, join_buffers, read_text
from quire.columns import Columns
from quire.errors import ColumnError, DecodeError, EncodeError, OptionError
from quire.schema import Schema

BLOCK_BYTES = 8 << 20
"""The approximate size of a block; a quarter of it with compression, so that more cores have work."""
_MAX_BLOCK_ROWS = 1 << 16
_ItemT = TypeVar("_ItemT")
_RowsT = TypeVar("_RowsT", Columns, list[Any])


# --- single messages


def encode_document_message(document: DocumentLike, *, allow_pickle: bool = False) -> bytes:
    """Encode a document as one message."""
    return _encode_message(encode_document, document, allow_pickle=allow_pickle)


def encode_partial_message(document: DocumentLike, names: Sequence[str]) -> bytes:
    """Encode some fields of a document as one message, which `decode_partial_message` reads with the others."""
    return _encode_message(lambda item, writer: encode_partial(item, names, writer), document, allow_pickle=False)


def encode_array_message(array: ArrayLike, *, allow_pickle: bool = False) -> bytes:
    """Encode an array as one message, document by document."""
    return _encode_message(encode_array, array, allow_pickle=allow_pickle)


def encode_columns_message(columns: Columns, *, allow_pickle: bool = False) -> bytes:
    """Encode a batch as one message."""
    return _encode_message(encode_columns, columns, allow_pickle=allow_pickle)


def encode_rows_message(documents: list[Any], schema: Schema) -> bytes:
    """Encode documents as one message: as columns, or one by one if their class does not determine their fields."""
    return b"".join(_encode_block(documents, schema, allow_pickle=False)[2])


def _encode_message(encode: Callable[[_ItemT, Writer], bytes], value: _ItemT, *, allow_pickle: bool) -> bytes:
    head, buffers = _encode_with_buffers(encode, value, allow_pickle=allow_pickle)
    return b"".join(join_buffers(head, buffers)) if buffers else head


def _encode_parts(encode: Callable[..., bytes], *arguments: Any, allow_pickle: bool) -> list[Any]:
    return join_buffers(*_encode_with_buffers(encode, *arguments, allow_pickle=allow_pickle))


def _encode_with_buffers(encode: Callable[..., bytes], *arguments: Any, allow_pickle: bool) -> tuple[bytes, list[Any]]:
    """Return the small part of a message, and its buffers."""
    writer = Writer(allow_pickle)
    try:
        return encode(*arguments, writer), writer.buffers
    except RecursionError as error:
        raise EncodeError("values are nested too deep, or one contains itself.") from error


def decode_document_message(data: Bytes, document_type: type[Any] | None, options: DecodeOptions) -> Any:
    """Decode the document of one message."""
    return _decode_message(decode_document, data, document_type, options)


def decode_partial_message(
    data: Bytes, document_type: type[Any], others: Mapping[str, Any], options: DecodeOptions
) -> Any:
    """Decode the document of one message, with the values of the fields that the message does not have."""

    def decode(reader: Reader, start: int, end: int, expected: Any) -> Any:
        return decode_partial(reader, start, end, expected, others)

    return _decode_message(decode, data, document_type, options)


def decode_columns_message(data: Bytes, document_type: type[Any], options: DecodeOptions) -> Columns:
    """Decode the columns of one message."""
    return _decode_message(decode_columns, data, document_type, options)


def decode_documents_message(
    data: Bytes, document_type: type[Any] | None, options: DecodeOptions
) -> tuple[list[Any], str]:
    """Decode the documents of one message, a batch or an array; return them and the name of their class."""
    name = read_type_name(data)
    if is_batch_message(data):
        return _decode_message(decode_rows, data, document_type, options), name
    return _decode_message(decode_array, data, document_type, options)._documents, name


def _decode_message(
    decode: Callable[[Reader, int, int, Any], _ItemT],
    data: Bytes,
    document_type: type[Any] | None,
    options: DecodeOptions,
    budget: MemoryBudget | None = None,
) -> _ItemT:
    budget = budget or MemoryBudget()
    try:
        reader = Reader(memoryview(data).cast("B"), options, budget.left)
        value = decode(reader, 0, len(reader.data), document_type)
    except RecursionError as error:
        raise DecodeError("values are nested too deep.") from error
    except MemoryError as error:
        raise DecodeError("the values take more memory than there is.") from error
    budget.left = reader.left
    return value


def read_type_name(data: Bytes) -> str:
    """Read the name of the document class from a message."""
    view = memoryview(data).cast("B")
    for number, wire_type, a, b in iter_fields(view, 0, len(view)):
        if number == DocumentField.TYPE and wire_type == DELIMITED:
            return read_text(bytes(view[a:b]), 0, b - a)
        if number > DocumentField.TYPE:
            break
    return ""


def is_batch_message(data: Bytes) -> bool:
    """Return whether a message is a batch, and not an array.

    Field 3 is the number of rows in a batch and a document in an array, and only a batch has a field 5. An array
    without documents has neither.
    """
    view = memoryview(data).cast("B")
    for number, wire_type, _, _ in iter_fields(view, 0, len(view)):
        if number == BatchField.COLUMNS:
            return True
        if number == ArrayField.DOCUMENTS:
            return wire_type != DELIMITED
    return False


# --- protocols and compressions of single values


def dump(value: object, encode: Callable[[], bytes], protocol: str | None, compress: str | None) -> bytes:
    """Return a value as a message, which `encode` returns, or as a pickle, compressed if requested."""
    if check_protocol(protocol) == "pickle":
        return dump_pickle(value, compress)
    compression = get_compression(compress)
    return encode() if compression is None else compression.compress(encode())


def dump_pickle(value: object, compress: str | None) -> bytes:
    """Return a value as a pickle, compressed if requested."""
    data, compression = pickle.dumps(value, protocol=5), get_compression(compress)
    return data if compression is None else compression.compress(data)


def view_bytes(data: Bytes) -> memoryview:
    """Return a view of an argument that must be bytes."""
    try:
        return memoryview(data).cast("B")
    except TypeError as error:  # not bytes, or a view with gaps
        name = type(data).__name__
        hint = " JSON is read by from_json()." if name == "str" else ""
        raise OptionError(f"expected bytes, got {name}: {error}.{hint}") from error


def load(data: Bytes, protocol: str | None, compress: str | None, options: DecodeOptions) -> tuple[memoryview, bool]:
    """Return data without its compression, and whether it is a pickle.

    The first bytes determine both; an error is raised if they are not what was requested.
    """
    view = view_bytes(data)
    if not view.nbytes:
        raise DecodeError("there are no bytes; even an empty array has some. The data was cut off, or never written.")
    compression = check_compression(bytes(view[:8]), compress)
    if compression is not None:
        view = memoryview(decompress(view, compression, options.max_bytes, options.max_ratio))
    # A pickle of protocol 2 or later starts with the opcode 0x80 and the protocol. No message does: 0x80 would be the
    # first byte of the tag of a field 16 or later, and messages start with lower fields.
    is_pickle = len(view) > 1 and view[0] == 0x80 and view[1] <= pickle.HIGHEST_PROTOCOL
    if protocol is not None and (check_protocol(protocol) == "pickle") != is_pickle and not is_stream(bytes(view[:8])):
        raise DecodeError(
            f"protocol={protocol!r} was asked for, but the data is {'' if is_pickle else 'not '}a pickle."
        )
    return view, is_pickle


def load_document(
    cls: type[Any],
    expected: type[Any] | None,
    data: Bytes,
    protocol: str | None,
    compress: str | None,
    options: DecodeOptions,
) -> Any:
    """Read a document from a message or a pickle."""
    view, is_pickle = load(data, protocol, compress, options)
    if is_stream(bytes(view[:8])):
        raise DecodeError(
            f"these are the bytes of an array: read them with DocumentArray[{cls.__name__}].from_bytes()."
        )
    if not is_pickle:
        return decode_document_message(view, expected, options)
    value = unpickle(view, allow=options.allow_pickle)
    if not isinstance(value, cls):
        raise DecodeError(f"the pickle holds a {type(value).__name__}, and not a {cls.__name__}.")
    return value


def from_base64(data: str | bytes) -> bytes:
    """Decode base64."""
    try:
        return b64decode(data, validate=True)
    except ValueError as error:
        raise DecodeError(f"this is not base64: {error}.") from error


# --- writing streams


def encode_documents_stream(  # noqa: PLR0913
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
    """Yield the segments of a stream of documents; `workers` threads encode and compress the blocks."""

    def encode(block: list[Any]) -> Block:
        if is_pickle:
            return PICKLE, len(block), [pickle.dumps(block, protocol=5)]
        return _encode_block(block, schema, allow_pickle=allow_pickle)

    is_pickle = check_protocol(protocol) == "pickle"
    compression = get_compression(compress)
    blocks = _plan_blocks(encode, split_blocks(documents, _block_size(compress)), workers)
    name = name or class_name(schema.document_type)
    return encode_stream(name, "", blocks, compression, checksums=checksums, workers=workers)


def encode_columns_stream(
    batches: Iterable[Columns],
    document_type: type[Any],
    protocol: str | None,
    compress: str | None,
    *,
    allow_pickle: bool,
    workers: int | None = None,
) -> Iterator[list[Any]]:
    """Yield the segments of a stream of batches; `workers` threads encode and compress the blocks."""

    def encode(columns: Columns) -> Block:
        if is_pickle:
            return PICKLE, len(columns), [pickle.dumps(columns.documents(), protocol=5)]
        return BATCH, len(columns), _encode_parts(encode_columns, columns, allow_pickle=allow_pickle)

    def slice_columns() -> Iterator[Columns]:
        for columns in batches:
            if len(columns):  # the first row stands for the size of all
                first = columns.slice(slice(0, 1)).documents()[0]
                rows = max(1, min(_MAX_BLOCK_ROWS, _block_size(compress) // approximate_size(first)))
                yield from (columns.slice(slice(start, start + rows)) for start in range(0, len(columns), rows))

    is_pickle = check_protocol(protocol) == "pickle"
    compression = get_compression(compress)
    blocks = _plan_blocks(encode, slice_columns(), workers)
    return encode_stream(class_name(document_type), "", blocks, compression, checksums=True, workers=workers)


def _plan_blocks(
    encode: Callable[[_ItemT], Block], items: Iterable[_ItemT], workers: int | None
) -> Iterable[Block | Callable[[], Block]]:
    """Encode blocks one by one, or return functions that encode them if there are workers to call these."""
    return map(encode, items) if workers is None else (partial(encode, item) for item in items)


def _encode_block(documents: list[Any], schema: Schema, *, allow_pickle: bool) -> Block:
    if schema.is_open:
        name = class_name(schema.document_type)
        return ROWS, len(documents), _encode_parts(encode_documents, name, documents, allow_pickle=allow_pickle)
    try:
        return BATCH, len(documents), _encode_parts(encode_rows, schema, documents, allow_pickle=allow_pickle)
    except ColumnError as error:
        raise EncodeError(str(error)) from error


def _block_size(compress: str | None) -> int:
    return BLOCK_BYTES if get_compression(compress) is None else BLOCK_BYTES // 4


def split_blocks(documents: Iterable[Any], block_bytes: int) -> Iterator[list[Any]]:
    """Split documents into lists of about `block_bytes` bytes."""
    block: list[Any] = []
    size = 0
    for document in documents:
        block.append(document)
        size += approximate_size(document)
        if size >= block_bytes or len(block) >= _MAX_BLOCK_ROWS:
            yield block
            block, size = [], 0
    if block:
        yield block


_SMALL_TYPES = (int, float, bool)


def approximate_size(document: DocumentLike | None) -> int:
    """Return the approximate number of bytes of a document."""
    size = 64
    for value in () if document is None else document.__dict__.values():
        tp = type(value)
        if tp is str or tp is bytes:
            size += len(value)
        elif value is not None and tp not in _SMALL_TYPES:
            size += _approximate_value_size(value)
    return size


def _approximate_value_size(value: Any) -> int:
    # The class is asked first: an array of documents takes `nbytes` for a misspelled field and looks for similar names,
    # which takes longer than encoding it.
    if not hasattr(type(value), "nbytes"):
        if is_document_type(type(value)):
            return approximate_size(value)
        if is_array_type(type(value)):
            return sum(map(approximate_size, value._documents))
        if isinstance(value, (list, tuple, set)):
            return sum(map(_approximate_value_size, value)) + 16
        if isinstance(value, dict):
            return sum(map(_approximate_value_size, value.values())) + 64
        if isinstance(value, (str, bytes)):
            return len(value)
    try:
        nbytes = getattr(value, "nbytes", None)
    except RuntimeError:  # sparse tensors of torch have no `nbytes`
        nbytes = value._nnz() * (value.element_size() + 8 * value.ndim)
    return nbytes if isinstance(nbytes, int) else 16


# --- reading streams


def decode_block_documents(
    segment: Segment, document_type: type[Any] | None, options: DecodeOptions, budget: MemoryBudget | None = None
) -> list[Any]:
    """Decode the documents of one block; blocks whose documents are in memory at once share a budget."""
    return _decode_block(segment, decode_rows, document_type, options, budget)


def decode_block_columns(
    segment: Segment, document_type: type[Any], options: DecodeOptions, budget: MemoryBudget | None = None
) -> Columns | list[Any]:
    """Decode the columns of one block, or its documents if it is no batch."""
    return _decode_block(segment, decode_columns, document_type, options, budget)


def _decode_block(
    segment: Segment,
    decode_batch: Callable[[Reader, int, int, Any], _RowsT],
    document_type: type[Any] | None,
    options: DecodeOptions,
    budget: MemoryBudget | None,
) -> _RowsT | list[Any]:
    try:
        content: _RowsT | list[Any]
        if segment.kind == PICKLE:
            content = unpickle(segment.payload, allow=options.allow_pickle)
        elif segment.kind == ROWS:
            content = _decode_message(decode_array, segment.payload, document_type, options, budget)._documents
        else:
            content = _decode_message(decode_batch, segment.payload, document_type, options, budget)
    except DecodeError as error:
        raise DecodeError(f"{segment.where}: {error}") from error
    if len(content) != segment.count:
        raise DecodeError(f"{segment.where}: a block of {segment.count} documents has {len(content)}.")
    return content
