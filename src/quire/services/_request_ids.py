"""Request ids: one id for a call in the logs of its caller, of the service, and of the services that it calls.

The id is sent as metadata of gRPC and as a header of HTTP, both named `x-request-id`.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from quire.errors import OptionError

REQUEST_ID = "x-request-id"
"""The key of the metadata, and the name of the header."""
# Ids are written to logs: no line breaks, and no text of any length that a caller chooses.
_VALID = re.compile(r"[\x21-\x7e]{1,128}")
_current: ContextVar[str | None] = ContextVar("quire_request_id", default=None)


def current_request_id() -> str | None:
    """Return the id of the call that this function serves; None outside of calls, and where one batch serves several.

    Calls of a `Client` send this id, so that it also appears in the logs of the services that a function calls.
    """
    return _current.get()


@contextmanager
def use_request_id(request_id: str | None) -> Iterator[None]:
    """Use an id for the calls of clients inside the block: 1 to 128 visible ASCII characters."""
    if request_id is not None and not _VALID.fullmatch(request_id):
        raise OptionError(f"request id {request_id!r}: use 1 to 128 visible ASCII characters, without spaces.")
    token = _current.set(request_id)
    try:
        yield
    finally:
        _current.reset(token)


class AcceptedRequestId:
    """Makes an id that was accepted the current one inside a block; a server does so for every call.

    A class, and not a generator, because entering and leaving it takes a third of the time.
    """

    __slots__ = ("_request_id", "_token")

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id

    def __enter__(self) -> None:
        self._token = _current.set(self._request_id)

    def __exit__(self, *_: object) -> None:
        _current.reset(self._token)


def choose_request_id() -> str:
    """Return the current id, or a new one, for a call that a client makes."""
    return _current.get() or os.urandom(8).hex()


def accept_request_id(value: object) -> str:
    """Return the id that a caller has sent, or a new one if there is none that can be logged."""
    return value if isinstance(value, str) and _VALID.fullmatch(value) else os.urandom(8).hex()


def find_request_id(metadata: Iterable[Any] | None) -> str | None:
    """Return the id in the metadata of gRPC."""
    return next((pair[1] for pair in metadata or () if pair[0] == REQUEST_ID), None)


class RequestIdFilter(logging.Filter):
    """Adds `request_id` to log records, for formats such as `%(request_id)s`; '-' outside of calls."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the id of the current call."""
        record.request_id = _current.get() or "-"
        return True
