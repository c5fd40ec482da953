"""Values as bytes and back: messages, streams of blocks, files."""

from quire._loaded import find
from quire.codec._blocks import Header, Segment
from quire.codec._bytes import (
    Purse,
    array_message,
    block_columns,
    block_documents,
    check_protocol,
    columns_from_message,
    columns_message,
    columns_stream,
    document_from_bytes,
    document_from_message,
    document_message,
    documents_from_message,
    dumped,
    from_base64,
    is_batch,
    loaded,
    message_type_name,
    rows_message,
    stream,
)
from quire.codec._context import Reading, ReadOptions, read_options
from quire.codec._decode import unpickle
from quire.codec._files import (
    Rows,
    check_asked,
    memory_starts_stream,
    segments_of,
    selected_blocks,
    starts_stream,
    write_parts,
)
from quire.codec._match import check_exact
from quire.codec._messages import from_message, to_message
from quire.codec._proto_text import proto_schema
from quire.codec._single import value_from_message, value_message
from quire.codec._suffixes import from_suffixes
from quire.codec._typed import from_typed, to_typed
from quire.codec._unions import check_values, has_ambiguous_union

__all__ = [
    "Header",
    "Purse",
    "ReadOptions",
    "Reading",
    "Rows",
    "Segment",
    "array_message",
    "block_columns",
    "block_documents",
    "check_asked",
    "check_exact",
    "check_protocol",
    "check_values",
    "columns_from_message",
    "columns_message",
    "columns_stream",
    "document_from_bytes",
    "document_from_message",
    "document_message",
    "documents_from_message",
    "dumped",
    "find",
    "from_base64",
    "from_message",
    "from_suffixes",
    "from_typed",
    "has_ambiguous_union",
    "is_batch",
    "loaded",
    "memory_starts_stream",
    "message_type_name",
    "proto_schema",
    "read_options",
    "rows_message",
    "segments_of",
    "selected_blocks",
    "starts_stream",
    "stream",
    "to_message",
    "to_typed",
    "unpickle",
    "value_from_message",
    "value_message",
    "write_parts",
]
