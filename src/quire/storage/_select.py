"""Which fields of a class are read: paths, and what they leave of a schema."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from quire.errors import OptionError
from quire.schema import FieldPath, Schema, parse_path

Paths = Sequence[FieldPath] | None
"""The paths of the fields that are read; None for all of them."""


def chosen_paths(schema: Schema, columns: Iterable[str] | None) -> Paths:
    """The paths that users write; one that is not there is an error."""
    if columns is None:
        return None
    if isinstance(columns, str):
        raise OptionError(f"columns is a list of paths, as in ['image', 'meta.source'], got {columns!r}.")
    paths = [parse_path(path) for path in columns]
    if not paths:
        raise OptionError(f"columns=[] reads nothing: name fields of {schema.name}, or leave it out to read all.")
    for path in paths:
        schema.resolve(path)
    return None if () in paths else paths


def chosen_schema(schema: Schema, paths: Paths) -> Schema:
    """The schema with the fields that paths begin with, in the order of the class."""
    if paths is None:
        return schema
    names = {path[0] for path in paths}
    return replace(schema, fields=tuple(field for field in schema.fields if field.name in names))


def paths_below(name: str, paths: Paths) -> Paths:
    """What is read of a nested document; all of it where its own path is named."""
    below = None if paths is None else [path[1:] for path in paths if path[0] == name]
    return None if below is None or () in below else below
