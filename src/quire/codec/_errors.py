"""pydantic's and Python's errors at the seam, as quire's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from quire._extra_fields import unknown_field
from quire.errors import DecodeError, EncodeError
from quire.schema import Schema
from quire.tensors import describe


def below(place: str, error: Exception) -> str:
    """A message behind the place where it came from. Where documents lie deep in their like, some are left out."""
    told = str(error)
    if told.count(f"{place}: ") < 3:
        return f"{place}: {told}"
    return told if ": ... " in told else f"{place}: ... {told}"


def is_document(value: Any) -> bool:
    """Whether a value has fields, of whichever class: one that was unpickled may be a twin of the schema's."""
    return hasattr(type(value), "model_fields")


def no_document(schema: Schema, documents: Sequence[Any]) -> EncodeError:
    """Return the error about the first value that is no document, such as a dict that `model_copy(update=)` has set."""
    row, value = next((row, item) for row, item in enumerate(documents) if item is not None and not is_document(item))
    return EncodeError(f"row {row}: expected a {schema.name}, got {describe(value)}; it was set without validation.")


def decode_error(
    document_type: type[Any], error: ValidationError, where: str = "", *, rows: bool = False
) -> DecodeError:
    """What pydantic refused: the place, the reason and the value. With `rows`, locations begin with the row.

    An unknown field is reported before other problems: it often is the reason why another field is missing.
    """
    where = f"{document_type.__name__}{where}"
    found = error.errors(include_url=False)
    first = next((problem for problem in found if problem["type"] == "extra_forbidden"), found[0])
    more = f" And {len(found) - 1} more." if len(found) > 1 else ""
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
