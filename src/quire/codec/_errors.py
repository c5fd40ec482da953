"""Errors of pydantic and Python, as errors of quire that name the place."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from quire._extra_fields import unknown_field
from quire.errors import DecodeError
from quire.tensors import describe


def prefix_place(place: str, error: Exception) -> str:
    """Return the message of an error after the place where it occurred.

    In deeply nested documents of one class, places after the third are left out.
    """
    message = str(error)
    if message.count(f"{place}: ") < 3:
        return f"{place}: {message}"
    return message if ": ... " in message else f"{place}: ... {message}"


def decode_error(
    document_type: type[Any], error: ValidationError, where: str = "", *, rows: bool = False
) -> DecodeError:
    """Return an error with the place, the reason and the value of a validation error.

    With `rows`, the locations in the validation error start with the row. An unknown field is reported before other
    problems: it often is the reason why another field is missing.
    """
    where = f"{document_type.__name__}{where}"
    problems = error.errors(include_url=False)
    first = next((problem for problem in problems if problem["type"] == "extra_forbidden"), problems[0])
    more = f" And {len(problems) - 1} more." if len(problems) > 1 else ""
    names = first["loc"]
    if rows and names:
        where, names = f"{where}, row {names[0]}", names[1:]
    if first["type"] == "extra_forbidden":
        message = unknown_field(document_type, names) or f"{'.'.join(map(str, names))}: {first['msg']}."
        way_out = " Or pass extra='ignore'." if document_type.__quire_extra__ is None else ""
        return DecodeError(f"{where}: {message}{way_out}{more}")
    place = ".".join(map(str, names))
    text = f"{where}{f', {place}' if place else ''}: {first['msg']}"
    if first["type"] not in ("json_invalid", "missing") and ", got " not in first["msg"]:
        text += f" (got {describe(first['input'])})"
    return DecodeError(f"{text}.{more}")
