"""The messages of `proto/quire.proto`: the numbers of their fields, and the generated classes.

The codec reads and writes bytes itself and needs only the field numbers. The generated classes are for callers who hand
messages to gRPC or to their own code. They are loaded on first use, so importing quire does not import protobuf.
"""

from __future__ import annotations

import importlib
from functools import cache
from types import ModuleType
from typing import Any, Protocol, cast

from typing_extensions import Self

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

    DTYPE, SHAPE, FRAMEWORK, LAYOUT, DATA, BUFFER, INDICES, STRINGS = 1, 2, 3, 4, 5, 6, 7, 8
    REQUIRES_GRAD, WRAPPED, TEXT, SPARSE_AXES = 9, 10, 11, 12


class ValueField:
    """Fields of `Value`, of which a message has one: the kind of the value."""

    NULL, BOOLEAN, INTEGER, NUMBER, TEXT, BLOB = 1, 2, 3, 4, 5, 6
    TENSOR, DOCUMENT, ARRAY = 7, 8, 9
    LIST, TUPLE, SET, FROZEN_SET, DICT = 10, 11, 12, 13, 14
    BIG_INTEGER, COMPLEX, DATETIME, DATE, TIME, TIMEDELTA = 15, 16, 17, 18, 19, 20
    UUID, DECIMAL, PATH, ENUM, SCALAR, PICKLED = 21, 22, 23, 24, 25, 26


class ValuesField:
    """Fields of `Values`: the items of a list, tuple, set or column of objects."""

    VALUES = 1


class EntriesField:
    """Fields of `Entries`, a dict."""

    KEYS, VALUES = 1, 2


class ComplexField:
    """Fields of `Complex`."""

    REAL, IMAGINARY = 1, 2


class MomentField:
    """Fields of `Moment`, a datetime or a time."""

    TEXT, ZONE, FOLD = 1, 2, 3


class DurationField:
    """Fields of `Duration`, a timedelta."""

    DAYS, SECONDS, MICROSECONDS = 1, 2, 3


class MemberField:
    """Fields of `Member`, a member of an enum."""

    TYPE, NAME, VALUE = 1, 2, 3


class DocumentField:
    """Fields of `Document`."""

    VERSION, TYPE, NAMES, VALUES = 1, 2, 3, 4


class ArrayField:
    """Fields of `Array`, documents one by one."""

    VERSION, TYPE, DOCUMENTS = 1, 2, 3


class BatchField:
    """Fields of `Batch`, documents as columns."""

    VERSION, TYPE, ROWS, VALIDITY, COLUMNS, REMAINDERS = 1, 2, 3, 4, 5, 6


class ColumnField:
    """Fields of `Column`; those from TENSOR to ARRAYS are its forms, of which a message has one."""

    NAME, VALIDITY = 1, 2
    TENSOR, SCALARS, RAGGED, TEXT, BLOBS, OBJECTS, DOCUMENTS, ARRAYS = 3, 4, 5, 6, 7, 8, 9, 10
    SHAPES = 11


class RaggedField:
    """Fields of `Ragged`, tensors of mixed shapes."""

    FLAT, RANKS, SIZES = 1, 2, 3


class StringsField:
    """Fields of `Strings`, texts or blobs in one buffer."""

    DATA, OFFSETS = 1, 2


class NestedField:
    """Fields of `Nested`, arrays of documents in one batch."""

    FLAT, OFFSETS = 1, 2


class HeaderField:
    """Fields of `Header`, at the start of a stream of blocks."""

    VERSION, TYPE, SCHEMA = 1, 2, 3


class IndexField:
    """Fields of `Index`, at the end of a stream of blocks."""

    OFFSETS, COUNTS = 1, 2


VERSION_FIELD = bytes([DocumentField.VERSION << 3, VERSION])
"""The encoded field `version`, the first of every document, array, batch and header."""


def check_version(version: int, what: str = "bytes have") -> None:
    """Raise an error for a message that a later version of quire wrote, since this one would misread it."""
    if version > VERSION:
        raise DecodeError(
            f"the {what} version {version} of the format, this quire reads up to {VERSION}: update quire."
        )


# --- generated classes


class ProtobufMessage(Protocol):
    """The parts of a message of the protobuf runtime that do not depend on its fields; its classes have no types."""

    DESCRIPTOR: Any

    @classmethod
    def FromString(cls, data: bytes) -> Self: ...  # noqa: N802

    def SerializeToString(self) -> bytes: ...  # noqa: N802

    def HasField(self, name: str) -> bool: ...  # noqa: N802

    def WhichOneof(self, name: str) -> str | None: ...  # noqa: N802

    def SetInParent(self) -> None: ...  # noqa: N802


_MAX_MESSAGE_SIZE = (1 << 31) - 1


@cache
def load_generated_messages() -> ModuleType:
    """Return the module with the generated classes for the installed protobuf runtime."""
    version = require("google.protobuf", extra="", needed_for="a protobuf message").__version__
    major, minor = (int(part) for part in version.split(".")[:2])
    if (major, minor) < (3, 20):
        raise MissingDependencyError(f"quire needs protobuf 3.20 or later, not {version}: pip install 'protobuf>=3.20'")
    return importlib.import_module("quire_proto3.quire_pb2" if major < 4 else "quire_proto4.quire_pb2")


def to_message(kind: str, data: bytes) -> ProtobufMessage:
    """Parse bytes as a generated message: 'Document', 'Array' or 'Batch'."""
    if len(data) > _MAX_MESSAGE_SIZE:
        raise EncodeError(f"the message has {len(data)} bytes, and protobuf takes 2 GiB at most: use to_bytes().")
    try:
        message: ProtobufMessage = getattr(load_generated_messages(), kind).FromString(data)
    except Exception as error:  # protobuf's own error class differs between its versions
        raise EncodeError(
            f"protobuf refuses the message: {error}. Where it is nested too deep for protobuf, use to_bytes()."
        ) from error
    return message


def from_message(message: object, *kinds: str) -> bytes:
    """Return the bytes of a generated message of one of the kinds."""
    name = getattr(getattr(message, "DESCRIPTOR", None), "full_name", None)
    if name not in {f"quire.v1.{kind}" for kind in kinds}:
        got = name or type(message).__name__
        raise DecodeError(f"expected a message quire.v1.{' or '.join(kinds)}, got {got}.")
    return cast("ProtobufMessage", message).SerializeToString()
