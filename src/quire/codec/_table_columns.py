"""Nested documents as columns of one table, named by dotted paths; shared by CSV and data frames."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import PydanticUndefined

from quire._extra_fields import Extra, check_extra, extra_rule
from quire.columns import describe_non_document
from quire.errors import DecodeError, EncodeError, PathError, did_you_mean
from quire.schema import Field, FieldKind, FieldPath, Schema, join_path, parse_path


@dataclass(frozen=True)
class Leaf:
    """One column of a table: a field, its path, and the class that has it."""

    path: FieldPath
    field: Field
    owner: Schema

    @property
    def name(self) -> str:
        """The name of the column: the dotted path."""
        return join_path(self.path)

    @property
    def is_unknown(self) -> bool:
        """Whether the class has no field for the column, and keeps its values (`extra='allow'`)."""
        return self.field.name not in self.owner.by_name

    @property
    def default(self) -> Any:
        """The default of the field; undefined if there is none, or a factory."""
        info = self.owner.document_type.model_fields[self.field.name]
        return info.default if info.default_factory is None else PydanticUndefined


def leaves(schema: Schema, prefix: FieldPath = ()) -> list[Leaf]:
    """Return the columns of a table of documents, in order."""
    columns: list[Leaf] = []
    for field in schema.fields:
        path = (*prefix, field.name)
        if is_spread(field):
            columns += leaves(field.document_type.document_schema(), path)
        else:
            columns.append(Leaf(path, field, schema))
    return columns


def is_spread(field: Field) -> bool:
    """Return whether a field is a document whose fields are columns."""
    return field.kind is FieldKind.DOCUMENT and not field.recursive and bool(field.document_type.model_fields)


def input_keys(schema: Schema, path: FieldPath) -> FieldPath:
    """Return the unambiguous keys under which pydantic accepts the value at a path."""
    keys: list[str] = []
    for depth, name in enumerate(path):
        field, key = schema.accepted[name]
        keys.append(key)
        if depth < len(path) - 1:
            schema = field.document_type.document_schema()
    return tuple(keys)


@dataclass(frozen=True)
class OptionalDocument:
    """A nested document that may be missing; it is missing in rows where none of its columns has a value."""

    path: FieldPath
    nullable: bool
    columns: list[int]


def optional_documents(
    schema: Schema, columns: Sequence[Leaf | None], prefix: FieldPath = ()
) -> list[OptionalDocument]:
    """Return the nested documents that may be missing, outer ones before inner ones."""
    documents: list[OptionalDocument] = []
    for field in filter(is_spread, schema.fields):
        path = (*prefix, field.name)
        inside = [
            index
            for index, leaf in enumerate(columns)
            if leaf is not None and leaf.path[: len(path)] == path and leaf.path != path
        ]
        if inside and (field.nullable or not field.required):
            documents.append(OptionalDocument(path, field.nullable, inside))
        documents += optional_documents(field.document_type.document_schema(), columns, path) if inside else []
    return documents


def check_all_in_columns(
    schema: Schema, documents: Sequence[Any], prefix: FieldPath = (), *, deep: bool = True
) -> None:
    """Raise an error for documents with values that have no column: fields of a subclass, and extra values."""
    for row, document in enumerate(documents):
        if document is None or (type(document) is schema.document_type and not document.__pydantic_extra__):
            continue
        if not hasattr(type(document), "model_fields"):
            raise EncodeError(f"{join_path(prefix)}, {describe_non_document(schema, documents)}")
        if document.__pydantic_extra__ or any(name not in schema.by_name for name in type(document).model_fields):
            raise EncodeError(f"row {row}: {describe_missing_column(schema, prefix)}")
    for field in filter(is_spread, schema.fields if deep else ()):
        values = [None if document is None else document.__dict__.get(field.name) for document in documents]
        check_all_in_columns(field.document_type.document_schema(), values, (*prefix, field.name))


def describe_missing_column(schema: Schema, prefix: FieldPath) -> str:
    """Return the error message about documents with values that have no column."""
    what = f"{join_path(prefix)!r} holds" if prefix else "the array holds"
    return f"{what} values that {schema.name} has no field for, and a table has columns for fields only. Use to_json()."


# --- reading the header of a table


def read_header(schema: Schema, names: Iterable[Any], extra: Extra, where: str) -> list[Leaf | None]:
    """Return the field of each column of a table; None for columns that are ignored."""
    check_extra(extra)
    known = leaves(schema)
    names = list(names)
    columns = [_find_column(schema, known, name, extra, where) for name in names]
    paths = [leaf.path for leaf in columns if leaf is not None]
    for path in paths:
        if paths.count(path) > 1:
            raise DecodeError(f"{where}: the column {join_path(path)!r} is there twice.")
        whole = next((path[:depth] for depth in range(1, len(path)) if path[:depth] in paths), None)
        if whole is not None:
            raise DecodeError(f"{where}: {join_path(path)!r} is part of {join_path(whole)!r}, which is there too.")
    ignored = [str(name) for name, leaf in zip(names, columns, strict=True) if leaf is None]
    _check_required(schema, paths, where, ignored)
    # Otherwise a class with defaults would be read from any table; an id says nothing about the class.
    if ignored and known and all(path == ("id",) for path in paths) and (not paths or len(known) > 1):
        hint = did_you_mean(ignored[0], [leaf.name for leaf in known])
        raise DecodeError(f"{where}: {schema.name} has none of the columns {ignored[:5]}. {hint}")
    return columns


def _find_column(schema: Schema, known: list[Leaf], name: Any, extra: Extra, where: str) -> Leaf | None:
    own_name = schema.accepted[name][0].name if name in schema.accepted else name  # the column may be named by an alias
    leaf = next((leaf for leaf in known if leaf.name == own_name), None)
    if leaf is not None:
        return leaf
    try:  # a whole document in one cell
        fields = schema.resolve(parse_path(name))
        if fields and all(is_spread(field) for field in fields):
            owner = schema if len(fields) == 1 else fields[-2].document_type.document_schema()
            return Leaf(parse_path(name), fields[-1], owner)
    except (PathError, AttributeError, TypeError):
        pass
    owner, path = _find_owner(schema, str(name))
    rule = extra_rule(owner.document_type, extra)
    if rule == "allow" or owner.document_type.__quire_collects__:
        return Leaf(path, Field(path[-1], FieldKind.ANY, Any, nullable=True, required=False), owner)
    if "__" in str(name):  # the paths of DocArray: of a field that exists, this is not an unknown column
        leaf = next((leaf for leaf in known if leaf.name == name.replace("__", ".")), None)
        if leaf is not None:
            return leaf
    if rule == "ignore":
        return None
    hint = did_you_mean(str(name), [leaf.name for leaf in known])
    chosen = owner.document_type.__quire_extra__
    way_out = "Or pass extra='ignore'." if chosen is None else f"{owner.name} sets extra={chosen!r}."
    raise DecodeError(f"{where}: {schema.name} has no column {name!r}. {hint} {way_out}")


def _find_owner(schema: Schema, name: str) -> tuple[Schema, FieldPath]:
    """Return the class that an unknown column would belong to, and the path that the column would have."""
    path: FieldPath = ()
    # "thesis.pages.x" belongs to the class of `thesis.pages` if both are documents, else it is one long name.
    while (part := name.partition("."))[1] and (field := schema.by_name.get(part[0])) and is_spread(field):
        schema, path, name = field.document_type.document_schema(), (*path, part[0]), part[2]
    return schema, (*path, name)


def _check_required(
    schema: Schema, paths: list[FieldPath], where: str, ignored: list[str], prefix: FieldPath = ()
) -> None:
    """Raise an error if a field without a default has no column.

    The fields of an optional document may have none, if the whole document has none.
    """
    for field in schema.fields:
        path = (*prefix, field.name)
        has_columns = any(column[: len(path)] == path for column in paths)
        if field.required and not has_columns:
            near = difflib.get_close_matches(join_path(path), ignored, n=1)
            hint = f" The column {near[0]!r} is ignored." if near else ""
            raise DecodeError(
                f"{where}: there is no column {join_path(path)!r}, and {schema.name} has no default for it.{hint}"
            )
        if has_columns and path not in paths:
            _check_required(field.document_type.document_schema(), paths, where, ignored, path)
