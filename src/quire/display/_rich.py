"""Trees with rich, which is imported when something is shown."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from quire.display._text import MOST_FIELDS, MOST_LEVELS, nested_rows, one_line, schema_rows, short_value
from quire.schema import Schema

if TYPE_CHECKING:
    from rich.tree import Tree

_PIPE_WIDTH = 1000
"""Columns of what is not a terminal."""


def document_tree(document: Any) -> Tree:
    """A document as a tree of its fields and values."""
    from rich.text import Text
    from rich.tree import Tree

    tree = Tree(Text(type(document).__name__, style="bold cyan"))
    _add_rows(tree, nested_rows(document) or [], MOST_LEVELS)
    return tree


def schema_tree(schema: Schema, levels: int = MOST_LEVELS) -> Tree:
    """A schema as a tree of its fields and types; ↻ marks documents that lead back to those that hold them."""
    from rich.text import Text
    from rich.tree import Tree

    tree = Tree(Text(schema.name, style="bold cyan"))
    _add_schema(tree, schema, levels)
    return tree


def print_document(document: Any) -> None:
    """Show a document."""
    print_rich(document_tree(document))


def print_schema(schema: Schema) -> None:
    """Show a schema."""
    print_rich(schema_tree(schema))


def print_rich(thing: Any) -> None:
    """Show something of rich's; in a pipe it may be wider than a terminal."""
    from rich.console import Console

    class Output(Console):
        """Lets the caller know that who read the output has gone; rich itself would end the process."""

        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    Output(width=None if sys.stdout.isatty() else _PIPE_WIDTH).print(thing)


def _add_rows(tree: Tree, rows: list[tuple[str, Any]], levels: int) -> None:
    from rich.text import Text

    for name, value in rows[:MOST_FIELDS]:
        inner = nested_rows(value)
        label = (one_line(name), "dim" if name.startswith("…") else "green")
        if inner is None:
            tree.add(Text.assemble(label, "" if name.startswith("…") else f" = {short_value(value)!r}"))
        elif not levels:
            tree.add(Text.assemble(label, f": {type(value).__name__}", (" …", "dim")))
        else:
            _add_rows(tree.add(Text.assemble(label, f": {type(value).__name__}")), inner, levels - 1)
    if len(rows) > MOST_FIELDS:
        tree.add(Text(f"… {len(rows) - MOST_FIELDS:,} more fields", style="dim"))


def _add_schema(tree: Tree, schema: Schema, levels: int) -> None:
    from rich.text import Text

    rows = schema_rows(schema)
    for name, kind, nested in rows[:MOST_FIELDS]:
        end = " …" if nested is not None and not levels else ""
        branch = tree.add(Text.assemble((one_line(name), "green"), f": {kind}", (end, "dim")))
        if nested is not None and levels:
            _add_schema(branch, nested, levels - 1)
    if len(rows) > MOST_FIELDS:
        tree.add(Text(f"… {len(rows) - MOST_FIELDS:,} more fields", style="dim"))
