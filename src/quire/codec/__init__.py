"""Values as bytes and back: messages, streams of blocks, files."""

from quire._class_registry import find
from quire.codec._blocks import Header, Segment, is_stream, read_index
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
from quire.codec._compression import COMPRESSIONS, compression_of
from quire.codec._context import Reading, ReadOptions, read_options
from quire.codec._csv import CsvOptions, iter_csv, table_records, write_csv
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
from quire.codec._flat import Leaf, leaves
from quire.codec._json import TensorForm, from_dict, rows_from_json, to_json
from quire.codec._match import check_exact
from quire.codec._messages import from_message, generated, to_message
from quire.codec._ndjson import iter_ndjson, to_ndjson
from quire.codec._proto_names import camel
from quire.codec._proto_plan import ProtoPlan
from quire.codec._proto_schema import plan_service
from quire.codec._proto_text import check_package, proto_schema, write_proto
from quire.codec._single import value_from_message, value_message
from quire.codec._suffixes import from_suffixes
from quire.codec._text_files import text_lines
from quire.codec._typed import file_descriptor, from_typed, to_typed
from quire.codec._unions import check_values, has_ambiguous_union
from quire.codec._wire import DELIMITED, VARINT, delimited, fields, read_text, uint

__all__ = [
    "COMPRESSIONS",
    "DELIMITED",
    "VARINT",
    "CsvOptions",
    "Header",
    "Leaf",
    "ProtoPlan",
    "Purse",
    "ReadOptions",
    "Reading",
    "Rows",
    "Segment",
    "TensorForm",
    "array_message",
    "block_columns",
    "block_documents",
    "camel",
    "check_asked",
    "check_exact",
    "check_package",
    "check_protocol",
    "check_values",
    "columns_from_message",
    "columns_message",
    "columns_stream",
    "compression_of",
    "delimited",
    "document_from_bytes",
    "document_from_message",
    "document_message",
    "documents_from_message",
    "dumped",
    "fields",
    "file_descriptor",
    "find",
    "from_base64",
    "from_dict",
    "from_message",
    "from_suffixes",
    "from_typed",
    "generated",
    "has_ambiguous_union",
    "is_batch",
    "is_stream",
    "iter_csv",
    "iter_ndjson",
    "leaves",
    "loaded",
    "memory_starts_stream",
    "message_type_name",
    "plan_service",
    "proto_schema",
    "read_index",
    "read_options",
    "read_text",
    "rows_from_json",
    "rows_message",
    "segments_of",
    "selected_blocks",
    "starts_stream",
    "stream",
    "table_records",
    "text_lines",
    "to_json",
    "to_message",
    "to_ndjson",
    "to_typed",
    "uint",
    "unpickle",
    "value_from_message",
    "value_message",
    "write_csv",
    "write_parts",
    "write_proto",
]
