"""How much is read from one address and how long it may take, and the errors that say so."""

from __future__ import annotations

import re

from typing_extensions import TypedDict

from quire.errors import UriError

MAX_BYTES = 1 << 30
"""The most that is read from one address, unless told otherwise: 1 GiB."""
TIMEOUT = 60.0
"""The seconds that a download may take, unless told otherwise."""

_PASSWORD = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*://)[^/?#]*@")


class Limits(TypedDict, total=False):
    """What reading from an address may take: `timeout` in seconds (None for any), and `max_bytes`."""

    timeout: float | None
    max_bytes: int


def shown(uri: str) -> str:
    """An address as messages show it: without a password, and a long one is cut."""
    plain = _PASSWORD.sub(r"\1...@", uri)
    return plain if len(plain) <= 200 else f"{plain[:80]}... ({len(uri):,} characters)"


def too_large(uri: str, found: str, max_bytes: int) -> UriError:
    """The error of an address that holds more than may be read."""
    return UriError(f"{shown(uri)}: {found}, and the limit is {max_bytes:,} bytes. Pass a larger max_bytes to read it.")
