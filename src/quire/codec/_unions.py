"""Unions whose members look alike on the wire: a value is written only if it will be read back unchanged.

The encoding of most values includes their kind. Some are encoded as another kind, as a URL is as text, and the type of
the field restores them. In a union, another member may accept that encoding.
"""

from __future__ import annotations

from typing import Any

from quire.codec._context import ReadOptions
from quire.codec._readback import is_unchanged
from quire.codec._single import value_from_message, value_message
from quire.columns import validate_values
from quire.errors import ColumnError, DecodeError, EncodeError
from quire.schema import Field, FieldKind, Schema
from quire.tensors import describe

_OWN_TYPES: dict[FieldKind, tuple[Any, ...]] = {
    FieldKind.SCALAR: (bool, int, float, complex),
    FieldKind.TEXT: (str,),
    FieldKind.BYTES: (bytes,),
    FieldKind.LIST: (list, tuple, set, frozenset),
    FieldKind.DICT: (dict,),
    FieldKind.ANY: (Any, object, None, type(None)),
}


def ambiguous_fields(schema: Schema) -> tuple[Field, ...]:
    """Return the fields with a union, also inside lists and dicts, in which a member is encoded as another type."""
    fields: tuple[Field, ...] | None = schema.notes.get("ambiguous_unions")
    if fields is None:
        fields = schema.notes["ambiguous_unions"] = tuple(filter(has_ambiguous_union, schema.fields))
    return fields


def has_ambiguous_union(field: Field) -> bool:
    """Return whether a field is or contains a union in which a member is encoded as another type."""
    if field.kind is FieldKind.UNION and any(map(_is_encoded_as_other_type, field.items)):
        return True
    return any(map(has_ambiguous_union, field.items))


def _is_encoded_as_other_type(field: Field) -> bool:
    plain = field.type in _OWN_TYPES.get(field.kind, (field.type,)) and field.wrapper is None
    return not plain or field.decodes_input or any(map(_is_encoded_as_other_type, field.items))


def check_values(schema: Schema, field: Field, values: list[Any], *, allow_pickle: bool) -> None:
    """Raise an error for the first value that would be read back as another one."""
    options = ReadOptions(allow_pickle=allow_pickle)
    for value in values:
        if value is None:
            continue
        message = value_message(value, allow_pickle=allow_pickle)
        try:
            again = value_from_message(message, field, options)
            [again] = validate_values(schema, field, [again], field.name, None, stored=True)
        except (DecodeError, ColumnError) as error:
            raise EncodeError(f"{describe(value)} could not be read back as {field}: {error}") from error
        if not is_unchanged(value, again):
            raise EncodeError(
                f"{describe(value)} would be read back as {describe(again)}: they look alike on the wire, and the "
                f"field is {field}. Use a union of types that can be distinguished."
            )
