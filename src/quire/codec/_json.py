"""Documents as JSON, lines of JSON, and plain Python values: pydantic's own forms, with quire's errors.

Fields are written by name and read by name or alias; a name wins over an alias that is spelled alike. A value that
would be read back as another one is an error (`_readback`). Tensors are objects with nested lists, or with base64 of
their bytes; the object itself says which of the two.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, TypeVar, cast

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticSerializationError
from pydantic_core import from_json as parse_json

from quire._extra_fields import Extra, document_validator, rows_validator
from quire.codec._errors import decode_error
from quire.codec._readback import check_read_back, uncertain_fields
from quire.codec._text_files import TextSource, TextTarget, source_name, text_lines, text_writer
from quire.errors import DecodeError, EncodeError, OptionError
from quire.schema import NAMES_AND_ALIASES, ROUND_TRIP, Field, FieldKind, Schema
from quire.tensors import describe

DocumentT = TypeVar("DocumentT")
TensorForm = Literal["lists", "base64"]
_CONTEXTS: dict[str | None, dict[str, Any]] = {
    "lists": {"tensors": "lists", ROUND_TRIP: True},
    "base64": {"tensors": "base64", ROUND_TRIP: True},
    None: {ROUND_TRIP: True},  # the form of the block: see `plain_json_tensors`
}


def to_json(
    document: BaseModel, indent: int | None, tensors: TensorForm | None, where: str = "", *, check: bool = True
) -> str:
    """Return a document as JSON; with `check`, raise an error if it would be read back as another."""
    context = _CONTEXTS.get(tensors)
    if context is None:
        raise EncodeError(f"tensors={tensors!r} is not a form of tensors in JSON: use 'lists' or 'base64'.")
    schema = type(document).document_schema()  # type: ignore[attr-defined]
    fields = uncertain_fields(schema)
    try:
        if fields:  # values that pydantic warns about could not be read back
            text = document.model_dump_json(indent=indent, context=context, by_alias=False, warnings="error")
        else:
            text = document.model_dump_json(indent=indent, context=context, by_alias=False)
    except (PydanticSerializationError, UnicodeError) as error:
        place, reason = _find_cause(document, tensors, error)
        raise EncodeError(f"{type(document).__name__}{where}{place}: {reason}") from error
    if not _has_limited_depth(schema) or document.__pydantic_extra__:
        _check_depth(document, text, where)
    if check:
        check_read_back(document, lambda: from_json(type(document), text), "JSON", where)
    return text


_MAX_DEPTH = 199
"""The levels of lists and objects that can be read back: pydantic's parser allows 200, and an array adds one."""


def _check_depth(document: BaseModel, text: str, where: str) -> None:
    """Raise an error for JSON that is nested too deeply to be read back; pydantic writes about 50 levels more."""
    if text.count("[") + text.count("{") <= _MAX_DEPTH:  # the usual case, without another look at the values
        return
    try:
        parse_json(f"[{text}]")
    except ValueError as error:
        raise EncodeError(
            f"{type(document).__name__}{where}: its values are nested more than {_MAX_DEPTH} levels deep, and JSON of "
            "that depth could not be read back. Keep deep trees as a list of documents that name their parents."
        ) from error


def _has_limited_depth(schema: Schema) -> bool:
    """Return whether the fields of a class alone limit how deeply its JSON is nested."""
    is_limited: bool | None = schema.notes.get("limited depth")
    if is_limited is None:
        is_limited = schema.notes["limited depth"] = not _may_nest(schema, frozenset())
    return is_limited


def _may_nest(schema: Schema, outer: frozenset[Any]) -> bool:
    outer |= {schema.document_type}
    if schema.document_type.model_config.get("extra") == "allow":
        return True

    def may_nest(field: Field) -> bool:
        if field.kind in (FieldKind.DOCUMENT, FieldKind.DOCUMENTS):
            nested = field.document_type
            return nested in outer or _may_nest(nested.document_schema(), outer)
        return field.kind is FieldKind.ANY or any(map(may_nest, field.items))

    return any(map(may_nest, schema.fields))


_WRAPPER_TEXT = re.compile(r"^(Error serializing to JSON: )?(\w+: )?(Error calling function `\w+`: )?(?=\w+Error: )")
"""The text that pydantic puts before the error of a serializer of quire."""


def _find_cause(document: BaseModel, tensors: TensorForm | None, error: Exception) -> tuple[str, str]:
    """Return the place of the field that cannot be written, if a single field is the cause, and the reason."""
    # pydantic does not say which field failed, so the fields are written one by one until one fails.
    for name in (*type(document).model_fields, *(document.__pydantic_extra__ or ())):
        try:
            document.model_dump_json(include={name}, context=_CONTEXTS[tensors], by_alias=False, warnings="error")
        except (PydanticSerializationError, UnicodeError) as cause:
            return f", {name}", _reason(cause)
    return "", _reason(error)


def _reason(error: Exception) -> str:
    _, warned, unexpected = str(error).partition("Pydantic serializer warnings:\n  ")
    first = unexpected.partition("\n")[0].removeprefix("PydanticSerializationUnexpectedValue(").removesuffix(")")
    return first if warned else _WRAPPER_TEXT.sub("", str(error))


def from_json(
    document_type: type[DocumentT], text: str | bytes, where: str = "", *, extra: Extra = "forbid"
) -> DocumentT:
    """Return the document of a JSON object."""
    try:
        return cast("DocumentT", document_validator(document_type, extra).validate_json(text, **NAMES_AND_ALIASES))
    except ValidationError as error:
        raise decode_error(document_type, error, where) from error


_PATH = re.compile(r"[~.]{0,2}[/\\]|[A-Za-z][A-Za-z0-9+.-]*:[/\\]|[^\s\"{}\[\]]*\.(?:json|jsonl|ndjson)(?:\.gz)?\s*$")
"""The start of a text that is a path or an address; no JSON value starts like this."""


def check_json(document_type: type[Any], text: object) -> None:
    """Raise an error for a path in place of JSON, without a look at the file system: the text may be untrusted."""
    if isinstance(text, (str, bytes, bytearray)):
        if text[:1] == ("{" if isinstance(text, str) else b"{"):  # the usual case
            return
        start = bytes(text[:300]).decode("utf-8", "replace") if not isinstance(text, str) else text[:300]
        if not _PATH.match(start):
            return
        path = start.strip()
    elif isinstance(text, os.PathLike):
        path = os.fspath(text)
    else:
        raise OptionError(f"{document_type.__name__}: from_json() takes JSON as str or bytes, got {describe(text)}.")
    raise OptionError(
        f"{document_type.__name__}: from_json() takes JSON itself, and {path!r} is a path. "
        f"Write from_json(Path({path!r}).read_text())."
    )


def rows_to_json(documents: Iterable[Any], indent: int | None, tensors: TensorForm) -> str:
    """Return documents as a JSON list, each as its own class serializes it."""
    rows = [to_json(document, indent, tensors, f", row {row}") for row, document in enumerate(documents)]
    if indent is None or not rows:
        return f"[{','.join(rows)}]"
    margin = "\n" + " " * indent
    return f"[{margin}{f',{margin}'.join(row.replace(chr(10), margin) for row in rows)}\n]"


def rows_from_json(document_type: type[Any], text: str | bytes, *, extra: Extra = "forbid") -> list[Any]:
    """Return the documents of a JSON list."""
    try:
        rows: list[Any] = rows_validator(document_type, extra).validate_json(text, **NAMES_AND_ALIASES)
    except ValidationError as error:
        raise decode_error(document_type, error, rows=True) from error
    return rows


def to_dict(document: BaseModel) -> dict[str, Any]:
    """Return a document as a dict; nested documents are dicts, arrays lists of dicts, other values are unchanged."""
    values = document.model_dump(by_alias=False, context=_CONTEXTS["lists"])
    check_read_back(document, lambda: from_dict(type(document), values), "a dict", "")
    return values


def from_dict(
    document_type: type[DocumentT], values: Mapping[str, Any], where: str = "", *, extra: Extra = "forbid"
) -> DocumentT:
    """Return the document of a dict."""
    if not isinstance(values, Mapping):
        raise DecodeError(f"{document_type.__name__}{where}: expected a mapping of fields, got {describe(values)}.")
    try:
        return cast("DocumentT", document_validator(document_type, extra).validate_python(values, **NAMES_AND_ALIASES))
    except ValidationError as error:
        raise decode_error(document_type, error, where) from error


def rows_from_dict(
    document_type: type[Any], rows: Iterable[Mapping[str, Any]], *, extra: Extra = "forbid"
) -> list[Any]:
    """Return the documents of an iterable of dicts."""
    if isinstance(rows, (str, bytes, Mapping)) or not isinstance(rows, Iterable):
        raise DecodeError(f"{document_type.__name__}: expected an iterable of dicts, got {describe(rows)}.")
    return [from_dict(document_type, values, f", row {row}", extra=extra) for row, values in enumerate(rows)]


# --- lines of JSON


def to_ndjson(documents: Iterable[Any], target: TextTarget | None, tensors: TensorForm) -> str | None:
    """Write a line for each document; without a target, return the text."""
    if target is None:
        text = io.StringIO(newline="")
        to_ndjson(documents, text, tensors)
        return text.getvalue()
    with text_writer(target, "utf-8") as file:
        for row, document in enumerate(documents):
            file.write(to_json(document, None, tensors, f", row {row}") + "\n")
    return None


def iter_ndjson(
    document_type: type[Any], source: TextSource | None, text: str | bytes | None = None, extra: Extra = "forbid"
) -> Iterator[Any]:
    """Yield the documents of a path or file, or of the content `text`, line by line; empty lines are skipped."""
    where = f" in {source_name(source, 'the text')}"
    with text_lines(source, "utf-8", text) as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield from_json(document_type, line, f"{where}, line {number}", extra=extra)
