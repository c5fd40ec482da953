"""Documents as JSON and as plain Python values: pydantic's own forms, with quire's errors.

Fields are written by name and read by name or alias. Tensors are objects (see `quire.tensors`): nested lists, or
base64 of the bytes; which of the two is told by the object itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import pydantic
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError

from quire.codec._errors import decode_error
from quire.errors import DecodeError, EncodeError
from quire.tensors import describe

TensorForm = Literal["lists", "base64"]
_LATE = tuple(map(int, pydantic.VERSION.split(".")[:2])) >= (2, 11)
_NAMES: dict[str, Any] = {"by_alias": True, "by_name": True} if _LATE else {}  # before, the class's config decides


def to_json(document: BaseModel, indent: int | None, tensors: TensorForm, where: str = "") -> str:
    """A document as JSON."""
    if tensors not in ("lists", "base64"):
        raise EncodeError(f"tensors={tensors!r} is not a form of tensors in JSON: use 'lists' or 'base64'.")
    try:
        return document.model_dump_json(indent=indent, context={"tensors": tensors})
    except (PydanticSerializationError, UnicodeError) as error:
        place, told = _at_fault(document, tensors, error)
        raise EncodeError(f"{type(document).__name__}{where}{place}: {told}") from error


_SEAM = re.compile(r"^(Error serializing to JSON: )?(\w+: )?(Error calling function `\w+`: )?(?=\w+Error: )")
"""What pydantic says before the error that a serializer of quire has raised."""


def _at_fault(document: BaseModel, tensors: TensorForm, error: Exception) -> tuple[str, str]:
    """The field that cannot be written, where it is one alone, and why."""
    for name in type(document).model_fields:
        try:
            document.model_dump_json(include={name}, context={"tensors": tensors})
        except (PydanticSerializationError, UnicodeError) as found:
            return f", {name}", _SEAM.sub("", str(found))
    return "", _SEAM.sub("", str(error))


def from_json(document_type: type[Any], text: str | bytes, where: str = "") -> Any:
    """The document in a JSON object."""
    try:
        return document_type.model_validate_json(text, **_NAMES)
    except ValidationError as error:
        raise decode_error(f"{document_type.__name__}{where}", error) from error


def rows_to_json(documents: Iterable[Any], indent: int | None, tensors: TensorForm) -> str:
    """Documents as a JSON list, each by its own class."""
    rows = [to_json(document, indent, tensors, f", row {row}") for row, document in enumerate(documents)]
    if indent is None or not rows:
        return f"[{','.join(rows)}]"
    margin = "\n" + " " * indent
    return f"[{margin}{f',{margin}'.join(row.replace(chr(10), margin) for row in rows)}\n]"


def rows_from_json(document_type: type[Any], text: str | bytes) -> list[Any]:
    """The documents in a JSON list."""
    rows = TypeAdapter(list[document_type])  # type: ignore[valid-type]
    try:
        return rows.validate_json(text, **_NAMES)
    except ValidationError as error:
        raise decode_error(document_type.__name__, error, rows=True) from error


def to_dict(document: BaseModel) -> dict[str, Any]:
    """A document as a dict: nested documents are dicts, arrays lists of dicts, and all else stays what it is."""
    return document.model_dump()


def from_dict(document_type: type[Any], values: Mapping[str, Any], where: str = "") -> Any:
    """The document in a dict."""
    if not isinstance(values, Mapping):
        raise DecodeError(f"{document_type.__name__}{where}: expected a mapping of fields, got {describe(values)}.")
    try:
        return document_type.model_validate(values, **_NAMES)
    except ValidationError as error:
        raise decode_error(f"{document_type.__name__}{where}", error) from error


def rows_from_dict(document_type: type[Any], rows: Iterable[Mapping[str, Any]]) -> list[Any]:
    """The documents in an iterable of dicts."""
    if isinstance(rows, (str, bytes, Mapping)) or not isinstance(rows, Iterable):
        raise DecodeError(f"{document_type.__name__}: expected an iterable of dicts, got {describe(rows)}.")
    return [from_dict(document_type, values, f", row {row}") for row, values in enumerate(rows)]
