"""Values that are larger than a message: cut into parts, and joined again.

A part is a message `quire.v1.Part`: `bytes content = 1; bool more = 2;`. A value ends with the part without more.
"""

from __future__ import annotations

from collections.abc import Iterator

from quire.codec._wire import DELIMITED, VARINT, delimited, fields, uint
from quire.errors import DecodeError
from quire.services._limits import Account, Allowance

_OVERHEAD = 64
"""More than what a part takes beside its content."""
_MORE = uint(2, 1)


def parts_of(data: bytes, max_message_bytes: int) -> Iterator[bytes]:
    """A value's bytes in messages of at most so many."""
    size = max(1, min(max_message_bytes, 1 << 20) - _OVERHEAD)
    view = memoryview(data)
    for start in range(0, max(1, len(view)), size):
        more = _MORE if start + size < len(view) else b""
        yield more + delimited(1, bytes(view[start : start + size]))


class Joiner:
    """Puts parts together; what they take is taken from the account."""

    def __init__(self, account: Account | Allowance | None = None) -> None:
        self._account = account
        self._pieces: list[memoryview] = []

    def add(self, part: bytes) -> bytes | None:
        """The value's bytes, when the part was its last."""
        if self._account is not None:
            self._account.take(len(part))
        view = memoryview(part)
        more = False
        for number, kind, start, end in fields(view, 0, len(view)):
            if number == 1 and kind == DELIMITED:
                self._pieces.append(view[start:end])
            elif number == 2 and kind == VARINT:
                more = bool(start)
        if more:
            return None
        joined, self._pieces = b"".join(self._pieces), []
        return joined

    def finish(self) -> None:
        """The stream has ended; a value in the middle of it is an error."""
        if self._pieces:
            raise DecodeError("the stream ends in the middle of a value.")
