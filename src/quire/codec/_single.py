"""Single values as bytes: a message `quire.v1.Document` with one value and no name."""

from __future__ import annotations

from typing import Any

from quire.codec._context import Reader, ReadOptions, Writer
from quire.codec._decode import decode_value
from quire.codec._match import match
from quire.codec._values import encode_value
from quire.codec._wire import DELIMITED, delimited, fields, join
from quire.errors import DecodeError
from quire.schema import Field


def value_message(value: Any, *, allow_pickle: bool = False) -> bytes:
    """A value of any type that has a form on the wire."""
    writer = Writer(allow_pickle)
    head = delimited(4, encode_value(value, writer))
    return b"".join(join(head, writer.buffers)) if writer.buffers else head


def value_from_message(data: Any, field: Field, options: ReadOptions) -> Any:
    """The value again, for the field that it is of."""
    reader = Reader(memoryview(data), options)
    for number, kind, start, end in fields(reader.data, 0, len(reader.data)):
        if number == 4 and kind == DELIMITED:
            return match(field, decode_value(reader, start, end, field))
    raise DecodeError("the message of a value holds none.")
