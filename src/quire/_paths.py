"""Dotted paths to fields: 'thesis.title'. The empty path is the document itself."""

from __future__ import annotations

from quire.errors import PathError

FieldPath = tuple[str, ...]


def parse_path(path: str) -> FieldPath:
    """'thesis.title' -> ('thesis', 'title'); '' -> ()."""
    if not path:
        return ()
    parts = tuple(path.split("."))
    if not all(parts):
        raise PathError(f"{path!r} is not a path: a name is empty. Paths look like 'thesis.title'.")
    return parts


def join_path(parts: FieldPath) -> str:
    """('thesis', 'title') -> 'thesis.title'."""
    return ".".join(parts)
