"""Errors across the line: a QuireError becomes a status of gRPC, and a status the same QuireError again."""

from __future__ import annotations

import logging
import re
from concurrent.futures import CancelledError
from typing import Any, NamedTuple

from quire import errors
from quire.errors import (
    CodecError,
    DocumentTypeError,
    FunctionError,
    MissingValueError,
    PathError,
    QuireError,
    SchemaError,
    ServiceAccessError,
    ServiceError,
    ServiceLimitError,
    ServiceTimeoutError,
    ServiceUnavailableError,
)
from quire.services._limits import answer_too_large

log = logging.getLogger("quire.services")
KIND = "quire-error"
"""The name of the metadata that tells which error it was."""
FAILURES = (Exception, SystemExit)
"""What a function may fail with. A function that would end the process ends its call: somebody waits for an answer."""
REFUSALS = (ServiceError, MissingValueError)
"""What a function fails with because of what it was called with: the caller gets the error itself.

A ServiceError is the function's own refusal; a MissingValueError comes from a column that it reads, and the caller left
empty.
"""
_LONGEST = 1500
_TOO_LARGE = re.compile(r"(?<!SERVER: )Received message larger than max \(\d+ vs\. (\d+)\)")
"""How gRPC tells of an answer that the client does not want; its requests are never too large."""
_CODES: tuple[tuple[type[BaseException], str], ...] = (
    (ServiceLimitError, "RESOURCE_EXHAUSTED"),
    (ServiceAccessError, "PERMISSION_DENIED"),
    (ServiceTimeoutError, "DEADLINE_EXCEEDED"),
    (ServiceUnavailableError, "UNAVAILABLE"),
    (CodecError, "INVALID_ARGUMENT"),
    (DocumentTypeError, "INVALID_ARGUMENT"),
    (MissingValueError, "INVALID_ARGUMENT"),
    (SchemaError, "FAILED_PRECONDITION"),
    (PathError, "UNIMPLEMENTED"),
    (FunctionError, "INTERNAL"),
    (CancelledError, "CANCELLED"),
)
_LEAVES: dict[str, type[QuireError]] = {
    "UNAVAILABLE": ServiceUnavailableError,
    "DEADLINE_EXCEEDED": ServiceTimeoutError,
    "RESOURCE_EXHAUSTED": ServiceLimitError,
    "UNAUTHENTICATED": ServiceAccessError,
    "PERMISSION_DENIED": ServiceAccessError,
    "UNIMPLEMENTED": PathError,
}
_KINDS = {name: getattr(errors, name) for name in errors.__all__}


class Status(NamedTuple):
    """How a call ended: the code, the message, and the name of the error."""

    code: str
    message: str
    kind: str


def status_of(error: BaseException) -> Status:
    """The status that tells a caller of an error."""
    for known, code in _CODES:
        if isinstance(error, known):
            own = error.code if isinstance(error, ServiceError) and error.code != "UNKNOWN" else code
            return Status(own, str(error)[:_LONGEST], type(error).__name__)
    log.error("a call failed inside the server", exc_info=error)
    return Status("INTERNAL", "the call failed inside the server, which has logged why.", "ServiceError")


def error_of(status: Status, where: str) -> QuireError:
    """The error that a status tells of."""
    fallback = _LEAVES.get(status.code, ServiceError)
    leaf = _KINDS.get(status.kind, fallback)
    message = status.message or status.code
    if message.startswith(where) or leaf is not ServiceUnavailableError:
        made: QuireError = leaf(message)
    else:
        made = leaf(f"{where}: {message}")
    if isinstance(made, ServiceError):
        made.code = status.code
    return made


def function_failed(name: str, error: BaseException) -> FunctionError:
    """What callers are told of a function that failed: the kind and the message, but not where in the server."""
    log.warning("%s failed", name, exc_info=error)
    return FunctionError(f"{name} failed: {type(error).__name__}: {error}")


def error_of_rpc(rpc: Any, where: str) -> QuireError:
    """The error that gRPC's own tells of."""
    kind = ""
    for key, value in rpc.trailing_metadata() or ():
        if key == KIND:
            kind = value if isinstance(value, str) else value.decode(errors="replace")
    status = Status(rpc.code().name, rpc.details() or "", kind)
    if status.code == "DEADLINE_EXCEEDED" and not kind:
        status = Status(status.code, f"{where}: no answer in time. Give it more, as timeout=120 (in seconds).", kind)
    too_large = _TOO_LARGE.search(status.message)
    if too_large is not None:
        status = Status("RESOURCE_EXHAUSTED", str(answer_too_large(int(too_large[1]))), "")
    return error_of(status, where)
