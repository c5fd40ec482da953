"""Errors across the network: a QuireError becomes a gRPC or HTTP status, and a gRPC status the same QuireError.

This module decides whose error it is, for both gRPC servers, for streams and for HTTP routes:

- What is wrong with the request itself (its bytes, its schema, its size, its caller) is the caller's error.
- A function refuses a call with an error in `REFUSALS`, which the caller gets as it is.
- Whatever else a function raises is its own failure, also an error that would be the caller's if it came from the
  request: the caller gets a FunctionError. See `as_call_error`.
- Everything else is a fault of the server. It is logged, and the caller does not get its message.

`error_to_status` maps the results to codes of gRPC, and `Status.http_code` those to HTTP.
"""

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
from quire.services._request_ids import RequestIdFilter, current_request_id

if TYPE_CHECKING:
    from grpc import RpcError


log = logging.getLogger("quire.services")
log.addFilter(RequestIdFilter())
ERROR_METADATA = "quire-error"
"""The key of the trailing metadata that names the class of an error."""
RETRY_METADATA = "quire-retry"
"""The key of the trailing metadata that is 'no' if another attempt would fail in the same way."""
CONTRACT_METADATA = "quire-contract"
"""The key of the trailing metadata that has the fingerprint of the server's description."""
IDLE_METADATA = "quire-idle-timeout"
"""The key of the initial metadata of a stream with the seconds after which the server cancels it if it is idle."""
FUNCTION_FAILURES = (Exception, SystemExit)
"""What a function may fail with. SystemExit ends the call and not the process, since a caller waits for the answer."""
REFUSALS = (ServiceError, MissingValueError)
"""Errors of a function that are the caller's, who gets the error itself.

A ServiceError is raised by the function to refuse a call, or comes from a service that it calls itself. A
MissingValueError is raised by a column that the function reads and the caller left empty.
"""
_MAX_MESSAGE_LENGTH = 1500
# What gRPC says about an answer that is larger than the client accepts. Requests are never too large: they are split.
_TOO_LARGE = re.compile(r"(?<!SERVER: )Received message larger than max \(\d+ vs\. (\d+)\)")
# What gRPC for asyncio says if a part of a request cannot be sent because the server has ended the call. The status of
# the server arrives a moment later, and is dropped.
_ENDED_WHILE_SENDING = "Internal error from Core"
# What a client gets if its call reaches a server that begins to stop: gRPC drops the call without a status. Calls that
# this side cancels have other details.
_DROPPED = "CANCELLED"
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
    (ServiceError, "FAILED_PRECONDITION"),
    (CancelledError, "CANCELLED"),
)
_HTTP_CODES = {  # of all codes that a call may fail with
    "CANCELLED": 499,
    "UNKNOWN": 500,
    "INVALID_ARGUMENT": 422,
    "DEADLINE_EXCEEDED": 504,
    "NOT_FOUND": 404,
    "ALREADY_EXISTS": 409,
    "PERMISSION_DENIED": 403,
    "RESOURCE_EXHAUSTED": 503,
    "FAILED_PRECONDITION": 422,
    "ABORTED": 409,
    "OUT_OF_RANGE": 422,
    "UNIMPLEMENTED": 501,
    "INTERNAL": 500,
    "UNAVAILABLE": 503,
    "DATA_LOSS": 500,
    "UNAUTHENTICATED": 401,
}
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

    @property
    def http_code(self) -> int:
        """The status code of an HTTP response; a request that stays too large is 413 instead of 503."""
        is_too_large = self.code == "RESOURCE_EXHAUSTED" and not self.retryable
        return 413 if is_too_large else _HTTP_CODES[self.code]


def error_to_status(error: BaseException) -> Status:
    """Return the status that reports an error to a caller; an unexpected error is logged and not shown."""
    for error_type, code in _CODES:
        if isinstance(error, error_type):
            if isinstance(error, ServiceError) and error.code in _HTTP_CODES and error.code != "UNKNOWN":
                code = error.code  # noqa: PLW2901 - the function chose it
            retryable = not isinstance(error, ServiceLimitError) or error.retryable
            return Status(code, str(error)[:_MAX_MESSAGE_LENGTH], type(error).__name__, retryable)
    log.error("a call failed inside the server%s", _of_request(), exc_info=error)
    message = f"the call failed inside the server; the server's log has the reason{_of_request()}."
    return Status("INTERNAL", message, "ServiceError")


def _of_request() -> str:
    """Return the end of a message that names the current call."""
    request_id = current_request_id()
    return "" if request_id is None else f" (request {request_id})"


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
    if status.message == _ENDED_WHILE_SENDING and not name:
        message = "the server ended the call while the request was being sent."
        status = status._replace(code="UNAVAILABLE", message=message)
    if status.code == status.message == _DROPPED and not metadata:
        message = "the server dropped the call, because it is stopping."
        status = status._replace(code="UNAVAILABLE", message=message)
    too_large = _TOO_LARGE.search(status.message)
    if too_large is not None:
        status = Status("RESOURCE_EXHAUSTED", str(response_too_large(int(too_large[1]))), "", retryable=False)
    return status_to_error(status, where)


def idle_stream_error(seconds: float | str) -> ServiceTimeoutError:
    """Return the error for a stream that the server has ended because its caller was silent."""
    error = ServiceTimeoutError(
        f"the stream was idle for {seconds} s, so the server has ended it. Close streams that are not in use, or serve "
        "with a longer Limits(stream_idle_timeout=...)."
    )
    error.code = "DEADLINE_EXCEEDED"
    return error


def as_call_error(name: str, error: BaseException) -> BaseException:
    """Return the error that the caller of a function gets for what the function raised.

    Refusals are the caller's, and a FunctionError has a message for the caller already: both are returned as they are.
    Anything else is the function's own failure, also a CodecError or a SchemaError, which would be the caller's if
    they came from the request. It is logged, and the caller gets its kind and message, but no traceback.
    """
    if isinstance(error, (*REFUSALS, FunctionError)):
        return error
    log.warning("%s failed%s", name, _of_request(), exc_info=error)
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
