"""Document ids: random, cheap, and safe to create in threads and forked processes."""

from __future__ import annotations

import os
from typing import Annotated, Any
from uuid import UUID

from pydantic_core import CoreSchema, core_schema

from quire._lowlevel.forks import at_fork

_BLOCK = 256
_ready: list[str] = []


def new_id() -> str:
    """Return 32 random hexadecimal digits.

    The random bytes come from the operating system, 256 ids at a time: one system call per id would dominate the cost
    of creating a document. `list.pop` is atomic, so threads never get the same id.
    """
    try:
        return _ready.pop()
    except IndexError:
        digits = os.urandom(16 * _BLOCK).hex()
        _ready.extend(digits[i : i + 32] for i in range(32, len(digits), 32))
        return digits[:32]


# Without this, the parent and the child would hand out the same ids from their copies of the block.
at_fork(after_in_child=_ready.clear)


class _IDSchema:
    """Validate an id: a string; an int or a UUID is converted to one."""

    __quire_plain__ = True  # every string is valid

    def __get_pydantic_core_schema__(self, source: object, handler: object) -> CoreSchema:
        number = core_schema.no_info_after_validator_function(str, core_schema.int_schema(strict=True))
        unique = core_schema.no_info_after_validator_function(UUID.__str__, core_schema.uuid_schema(strict=True))
        lax = core_schema.union_schema([core_schema.str_schema(), number, unique], mode="left_to_right")
        return core_schema.lax_or_strict_schema(
            lax, core_schema.str_schema(), serialization=core_schema.to_string_ser_schema()
        )

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: object) -> dict[str, Any]:
        return {"type": "string"}


ID = Annotated[str, _IDSchema()]
"""The type of a document's id: a string."""
