"""The generated message classes, for the protobuf runtime that is installed. The only module that names either package.

quire itself reads and writes bytes; the classes are for those who hand messages on, to gRPC or to their own code. They
are loaded when the first message is asked for: importing quire does not import protobuf.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

from quire._optional import require
from quire.errors import DecodeError, EncodeError, MissingDependencyError

_LIMIT = (1 << 31) - 1


@cache
def generated() -> Any:
    """The module of the generated classes."""
    version = require("google.protobuf", extra="", needed_for="a protobuf message").__version__
    major, minor = (int(part) for part in version.split(".")[:2])
    if (major, minor) < (3, 20):
        raise MissingDependencyError(f"quire needs protobuf 3.20 or later, not {version}: pip install 'protobuf>=3.20'")
    return importlib.import_module("quire_proto3.quire_pb2" if major < 4 else "quire_proto4.quire_pb2")


def to_message(kind: str, data: bytes) -> Any:
    """Bytes as a message of that kind: Document, Array or Batch."""
    if len(data) > _LIMIT:
        raise EncodeError(f"the message has {len(data)} bytes, and protobuf takes 2 GiB at most: use to_bytes().")
    try:
        return getattr(generated(), kind).FromString(data)
    except Exception as error:  # protobuf's own error class differs between its versions
        raise EncodeError(
            f"protobuf refuses the message: {error}. Where it is nested too deep for protobuf, use to_bytes()."
        ) from error


def from_message(message: Any, *kinds: str) -> bytes:
    """The bytes of a message of one of the kinds."""
    name = getattr(getattr(message, "DESCRIPTOR", None), "full_name", None)
    if name not in {f"quire.v1.{kind}" for kind in kinds}:
        got = name or type(message).__name__
        raise DecodeError(f"expected a message quire.v1.{' or '.join(kinds)}, got {got}.")
    data: bytes = message.SerializeToString()
    return data
