"""The messages of `proto/quire.proto`: the numbers of their fields, and the generated classes.

The codec reads and writes bytes itself and needs only the field numbers. The generated classes are for callers who hand
messages to gRPC or to their own code. They are loaded on first use, so importing quire does not import protobuf.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

from quire._optional import require
from quire.errors import DecodeError, EncodeError, MissingDependencyError

VERSION = 1
"""The version of the wire format; a reader rejects a later one."""


# --- field numbers
#
# One class for each message of quire.proto, with plain integers, since they are compared in inner loops.
# tests/codec/test_wire_format.py compares them with the compiled descriptors.


class TensorField:
    """Fields of `Tensor`."""

    DTYPE = 1
    SHAPE = 2
    FRAMEWORK = 3
    LAYOUT = 4
    DATA = 5
    BUFFER = 6
    INDICES = 7
    STRINGS = 8
    REQUIRES_GRAD = 9
    WRAPPED = 10
    TEXT = 11
    SPARSE_AXES = 12


class ValueField:
    """Fields of `Value`, of which a message has one: the kind of the value."""

    NULL = 1
    BOOLEAN = 2
    INTEGER = 3
    NUMBER = 4
    TEXT = 5
    BLOB = 6
    TENSOR = 7
    DOCUMENT = 8
    ARRAY = 9
    LIST = 10
    TUPLE = 11
    SET = 12
    FROZEN_SET = 13
    DICT = 14
    BIG_INTEGER = 15
    COMPLEX = 16
    DATETIME = 17
    DATE = 18
    TIME = 19
    TIMEDELTA = 20
    UUID = 21
    DECIMAL = 22
    PATH = 23
    ENUM = 24
    SCALAR = 25
    PICKLED = 26


class ValuesField:
    """Fields of `Values`: the items of a list, tuple, set or column of objects."""

    VALUES = 1


class EntriesField:
    """Fields of `Entries`, a dict."""

    KEYS = 1
    VALUES = 2


class ComplexField:
    """Fields of `Complex`."""

    REAL = 1
    IMAGINARY = 2


class MomentField:
    """Fields of `Moment`, a datetime or a time."""

    TEXT = 1
    ZONE = 2
    FOLD = 3


class DurationField:
    """Fields of `Duration`, a timedelta."""

    DAYS = 1
    SECONDS = 2
    MICROSECONDS = 3


class MemberField:
    """Fields of `Member`, a member of an enum."""

    TYPE = 1
    NAME = 2
    VALUE = 3


class DocumentField:
    """Fields of `Document`."""

    VERSION = 1
    TYPE = 2
    NAMES = 3
    VALUES = 4


class ArrayField:
    """Fields of `Array`, documents one by one."""

    VERSION = 1
    TYPE = 2
    DOCUMENTS = 3


class BatchField:
    """Fields of `Batch`, documents as columns."""

    VERSION = 1
    TYPE = 2
    ROWS = 3
    VALIDITY = 4
    COLUMNS = 5
    REMAINDERS = 6


class ColumnField:
    """Fields of `Column`; those from TENSOR to ARRAYS are its forms, of which a message has one."""

    NAME = 1
    VALIDITY = 2
    TENSOR = 3
    SCALARS = 4
    RAGGED = 5
    TEXT = 6
    BLOBS = 7
    OBJECTS = 8
    DOCUMENTS = 9
    ARRAYS = 10
    SHAPES = 11


class RaggedField:
    """Fields of `Ragged`, tensors of mixed shapes."""

    FLAT = 1
    RANKS = 2
    SIZES = 3


class StringsField:
    """Fields of `Strings`, texts or blobs in one buffer."""

    DATA = 1
    OFFSETS = 2


class NestedField:
    """Fields of `Nested`, arrays of documents in one batch."""

    FLAT = 1
    OFFSETS = 2


class HeaderField:
    """Fields of `Header`, at the start of a stream of blocks."""

    VERSION = 1
    TYPE = 2
    SCHEMA = 3


class IndexField:
    """Fields of `Index`, at the end of a stream of blocks."""

    OFFSETS = 1
    COUNTS = 2


VERSION_FIELD = bytes([DocumentField.VERSION << 3, VERSION])
"""The encoded field `version`, the first of every document, array, batch and header."""


def check_version(version: int, what: str = "bytes have") -> None:
    """Raise an error for a message that a later version of quire wrote, since this one would misread it."""
    if version > VERSION:
        raise DecodeError(
            f"the {what} version {version} of the format, this quire reads up to {VERSION}: update quire."
        )


# --- generated classes

_MAX_MESSAGE_SIZE = (1 << 31) - 1


@cache
def load_generated_messages() -> Any:
    """Return the module with the generated classes for the installed protobuf runtime."""
    version = require("google.protobuf", extra="", needed_for="a protobuf message").__version__
    major, minor = (int(part) for part in version.split(".")[:2])
    if (major, minor) < (3, 20):
        raise MissingDependencyError(f"quire needs protobuf 3.20 or later, not {version}: pip install 'protobuf>=3.20'")
    return importlib.import_module("quire_proto3.quire_pb2" if major < 4 else "quire_proto4.quire_pb2")


def to_message(kind: str, data: bytes) -> Any:
    """Parse bytes as a generated message: 'Document', 'Array' or 'Batch'."""
    if len(data) > _MAX_MESSAGE_SIZE:
        raise EncodeError(f"the message has {len(data)} bytes, and protobuf takes 2 GiB at most: use to_bytes().")
    try:
        return getattr(load_generated_messages(), kind).FromString(data)
    except Exception as error:  # protobuf's own error class differs between its versions
        raise EncodeError(
            f"protobuf refuses the message: {error}. Where it is nested too deep for protobuf, use to_bytes()."
        ) from error


def from_message(message: Any, *kinds: str) -> bytes:
    """Return the bytes of a generated message of one of the kinds."""
    name = getattr(getattr(message, "DESCRIPTOR", None), "full_name", None)
    if name not in {f"quire.v1.{kind}" for kind in kinds}:
        got = name or type(message).__name__
        raise DecodeError(f"expected a message quire.v1.{' or '.join(kinds)}, got {got}.")
    data: bytes = message.SerializeToString()
    return data
