"""Errors across the network: a QuireError becomes a gRPC status, and a status becomes the same QuireError."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
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
RETRY_METADATA = "quire-retry"
"""The key of the trailing metadata that is 'no' if another attempt would fail in the same way."""
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
    """How a call ended: the gRPC code, the message, the name of the error class, and whether a retry may help."""

    code: str
    message: str
    error_name: str
    retryable: bool = True

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The trailing metadata with which a server sends what gRPC's own status has no place for."""
        retry = () if self.retryable else ((RETRY_METADATA, "no"),)
        return ((ERROR_METADATA, self.error_name), *retry)


def error_to_status(error: BaseException) -> Status:
    """Return the status that reports an error to a caller; an unexpected error is logged and not shown."""
    for error_type, code in _CODES:
        if isinstance(error, error_type):
            own_code = error.code if isinstance(error, ServiceError) and error.code != "UNKNOWN" else code
            retryable = not isinstance(error, ServiceLimitError) or error.retryable
            return Status(own_code, str(error)[:_MAX_MESSAGE_LENGTH], type(error).__name__, retryable)
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
    if isinstance(error, ServiceLimitError):
        error.retryable = status.retryable
    return error


def rpc_to_error(rpc: RpcError, where: str) -> QuireError:
    """Return the error that a `grpc.RpcError` reports."""
    metadata = {
        key: value if isinstance(value, str) else value.decode(errors="replace")
        for key, value in rpc.trailing_metadata() or ()
    }
    name = metadata.get(ERROR_METADATA, "")
    status = Status(rpc.code().name, rpc.details() or "", name, metadata.get(RETRY_METADATA) != "no")
    if status.code == "DEADLINE_EXCEEDED" and not name:
        message = f"{where}: no answer in time. Allow more, as timeout=120 (in seconds)."
        status = status._replace(message=message)
    too_large = _TOO_LARGE.search(status.message)
    if too_large is not None:
        status = Status("RESOURCE_EXHAUSTED", str(response_too_large(int(too_large[1]))), "", retryable=False)
    return status_to_error(status, where)


def as_call_error(name: str, error: BaseException) -> BaseException:
    """Return the error that the caller of a function gets for what the function raised.

    Refusals are the caller's, and a FunctionError has a message for the caller already: both are returned as they are.
    Anything else is the function's own failure, also a CodecError or a SchemaError, which would be the caller's if
    they came from the request. It is logged, and the caller gets its kind and message, but no traceback.
    """
    if isinstance(error, (*REFUSALS, FunctionError)):
        return error
    log.warning("%s failed", name, exc_info=error)
    failure = FunctionError(f"{name} failed: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


@contextmanager
def translate_failures(name: str) -> Iterator[None]:
    """Raise what a function raises inside the block as the error that its caller gets."""
    try:
        yield
    except FUNCTION_FAILURES as error:
        failure = as_call_error(name, error)
        raise failure from failure.__cause__  # not from `error`, which it may be itself
