"""Errors across the network: a QuireError becomes a gRPC status, and a status becomes the same QuireError."""

from __future__ import annotations

import logging
import re
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, NamedTuple

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
from quire.services._limits import response_too_large

if TYPE_CHECKING:
    from grpc import RpcError


log = logging.getLogger("quire.services")
ERROR_METADATA = "quire-error"
"""The key of the trailing metadata that names the class of an error."""
FUNCTION_FAILURES = (Exception, SystemExit)
"""What a function may fail with. SystemExit ends the call and not the process, since a caller waits for the answer."""
REFUSALS = (ServiceError, MissingValueError)
"""Errors of a function that are the caller's, who gets the error itself.

A ServiceError is raised by the function to refuse a call. A MissingValueError is raised by a column that the function
reads and the caller left empty.
"""
_MAX_MESSAGE_LENGTH = 1500
# What gRPC says about an answer that is larger than the client accepts. Requests are never too large: they are split.
_TOO_LARGE = re.compile(r"(?<!SERVER: )Received message larger than max \(\d+ vs\. (\d+)\)")
# The first class that matches decides, so subclasses come before their bases.
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
_ERRORS_BY_CODE: dict[str, type[QuireError]] = {
    "UNAVAILABLE": ServiceUnavailableError,
    "DEADLINE_EXCEEDED": ServiceTimeoutError,
    "RESOURCE_EXHAUSTED": ServiceLimitError,
    "UNAUTHENTICATED": ServiceAccessError,
    "PERMISSION_DENIED": ServiceAccessError,
    "UNIMPLEMENTED": PathError,
}
_ERRORS_BY_NAME = {name: getattr(errors, name) for name in errors.__all__}


class Status(NamedTuple):
    """How a call ended: the gRPC code, the message, and the name of the error class."""

    code: str
    message: str
    error_name: str


def error_to_status(error: BaseException) -> Status:
    """Return the status that reports an error to a caller; an unexpected error is logged and not shown."""
    for error_type, code in _CODES:
        if isinstance(error, error_type):
            own_code = error.code if isinstance(error, ServiceError) and error.code != "UNKNOWN" else code
            return Status(own_code, str(error)[:_MAX_MESSAGE_LENGTH], type(error).__name__)
    log.error("a call failed inside the server", exc_info=error)
    return Status("INTERNAL", "the call failed inside the server; the server's log has the reason.", "ServiceError")


def status_to_error(status: Status, where: str) -> QuireError:
    """Return the error that a status reports."""
    # Servers in other languages send no name, and a newer server may send one that is unknown here.
    error_type = _ERRORS_BY_NAME.get(status.error_name) or _ERRORS_BY_CODE.get(status.code, ServiceError)
    message = status.message or status.code
    if error_type is ServiceUnavailableError and not message.startswith(where):
        message = f"{where}: {message}"
    error: QuireError = error_type(message)
    if isinstance(error, ServiceError):
        error.code = status.code
    return error


def rpc_to_error(rpc: RpcError, where: str) -> QuireError:
    """Return the error that a `grpc.RpcError` reports."""
    name = ""
    for key, value in rpc.trailing_metadata() or ():
        if key == ERROR_METADATA:
            name = value if isinstance(value, str) else value.decode(errors="replace")
    status = Status(rpc.code().name, rpc.details() or "", name)
    if status.code == "DEADLINE_EXCEEDED" and not name:
        message = f"{where}: no answer in time. Allow more, as timeout=120 (in seconds)."
        status = status._replace(message=message)
    too_large = _TOO_LARGE.search(status.message)
    if too_large is not None:
        status = Status("RESOURCE_EXHAUSTED", str(response_too_large(int(too_large[1]))), "")
    return status_to_error(status, where)


def function_error(name: str, error: BaseException) -> FunctionError:
    """Log the failure of a function, and return the error for its caller: the kind and message, but no traceback."""
    log.warning("%s failed", name, exc_info=error)
    return FunctionError(f"{name} failed: {type(error).__name__}: {error}")
