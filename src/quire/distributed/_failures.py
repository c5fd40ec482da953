"""Errors on their way from a worker to the caller: how they pass an engine that carries nothing but text."""

from __future__ import annotations

import base64
import json
import re
from typing import Any

from quire.errors import PartitionError

_MARK = re.compile(r"<quire-error ([A-Za-z0-9+/=]+)>")
_KEPT = ("partition", "document", "id", "field", "traceback")


def error_to_text(error: PartitionError) -> str:
    """The error as text that `error_from_text` finds in a longer one: Spark carries nothing else from its workers."""
    content = {"message": str(error), **{name: getattr(error, name) for name in _KEPT}}
    packed = base64.b64encode(json.dumps(content).encode()).decode()
    return f"{error}\n<quire-error {packed}>"


def error_from_text(text: str) -> PartitionError | None:
    """The error that is in the text of another one, if there is one."""
    found = _MARK.search(text)
    return None if found is None else _made(json.loads(base64.b64decode(found[1])))


def _made(content: dict[str, Any]) -> PartitionError:
    error = PartitionError(content["message"])
    for name in _KEPT:
        setattr(error, name, content[name])
    return error
