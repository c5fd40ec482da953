"""pydantic's and Python's errors at the seam, as quire's own."""

from __future__ import annotations

from pydantic import ValidationError

from quire.errors import DecodeError
from quire.tensors import describe


def below(place: str, error: Exception) -> str:
    """A message behind the place where it came from. Where documents lie deep in their like, some are left out."""
    told = str(error)
    if told.count(f"{place}: ") < 3:
        return f"{place}: {told}"
    return told if ": ... " in told else f"{place}: ... {told}"


def decode_error(where: str, error: ValidationError, *, rows: bool = False) -> DecodeError:
    """What pydantic refused: the place, the reason, and what was there; with `rows`, a place begins with its row."""
    found = error.errors(include_url=False)
    first = found[0]
    names = first["loc"]
    if rows and names:
        where, names = f"{where}, row {names[0]}", names[1:]
    place = ".".join(map(str, names))
    text = f"{where}{f', {place}' if place else ''}: {first['msg']}"
    if first["type"] not in ("json_invalid", "missing") and ", got " not in first["msg"]:
        text += f" (got {describe(first['input'])})"
    more = f" And {len(found) - 1} more." if len(found) > 1 else ""
    return DecodeError(f"{text}.{more}")
