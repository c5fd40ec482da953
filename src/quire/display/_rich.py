"""Trees and tables for the terminal, drawn by rich, which is imported on first use."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from quire.display._text import MAX_FIELDS, MAX_LEVELS, nested_rows, one_line, schema_rows, short_value
from quire.schema import Schema

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.tree import Tree

    from quire._protocols import DocumentLike

_PIPE_WIDTH = 1000
"""Columns of output that is not a terminal."""
_TABLE_LEVELS = 3
_MAX_COLUMN = 40
_BORDER = 3
"""Characters between two columns."""


def print_rich(renderable: RenderableType) -> None:
    """Print something with rich; output to a pipe may be wider than a terminal."""
    from rich.console import Console

    class Output(Console):
        """Raise BrokenPipeError when the reader of the output is gone; rich itself would exit the process."""

        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    Output(width=None if sys.stdout.isatty() else _PIPE_WIDTH).print(renderable)


# --- trees


def print_document(document: object) -> None:
    """Print a document as a tree."""
    print_rich(document_tree(document))


def print_schema(schema: Schema) -> None:
    """Print a schema as a tree."""
    print_rich(schema_tree(schema))


def document_tree(document: object) -> Tree:
    """Build a tree of the fields and values of a document."""
    from rich.text import Text
    from rich.tree import Tree

    tree = Tree(Text(type(document).__name__, style="bold cyan"))
    _add_values(tree, nested_rows(document) or [], MAX_LEVELS)
    return tree


def _add_values(tree: Tree, rows: list[tuple[str, Any]], levels: int) -> None:
    from rich.text import Text

    for name, value in rows[:MAX_FIELDS]:
        inner = nested_rows(value)
        label = (one_line(name), "dim" if name.startswith("…") else "green")
        if inner is None:
            tree.add(Text.assemble(label, "" if name.startswith("…") else f" = {short_value(value)!r}"))
        elif not levels:
            tree.add(Text.assemble(label, f": {type(value).__name__}", (" …", "dim")))
        else:
            _add_values(tree.add(Text.assemble(label, f": {type(value).__name__}")), inner, levels - 1)
    if len(rows) > MAX_FIELDS:
        tree.add(Text(f"… {len(rows) - MAX_FIELDS:,} more fields", style="dim"))


def schema_tree(schema: Schema, levels: int = MAX_LEVELS) -> Tree:
    """Build a tree of the fields and types of a schema; ↻ marks recursive fields."""
    from rich.text import Text
    from rich.tree import Tree

    tree = Tree(Text(schema.name, style="bold cyan"))
    _add_fields(tree, schema, levels)
    return tree


def _add_fields(tree: Tree, schema: Schema, levels: int) -> None:
    from rich.text import Text

    rows = schema_rows(schema)
    for name, kind, nested in rows[:MAX_FIELDS]:
        end = " …" if nested is not None and not levels else ""
        branch = tree.add(Text.assemble((one_line(name), "green"), f": {kind}", (end, "dim")))
        if nested is not None and levels:
            _add_fields(branch, nested, levels - 1)
    if len(rows) > MAX_FIELDS:
        tree.add(Text(f"… {len(rows) - MAX_FIELDS:,} more fields", style="dim"))


# --- tables


def print_facts(title: str, facts: dict[str, Any], schema: Schema, first: DocumentLike | None = None) -> None:
    """Print the summary of an array, a batch or a dataset."""
    print_rich(facts_table(title, facts, schema, first))


def facts_table(title: str, facts: dict[str, Any], schema: Schema, first: DocumentLike | None = None) -> Group:
    """Build the summary of an array, a batch or a dataset: facts, then one row per field with its first value."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    words = (f"{name} {fact:,}" if isinstance(fact, int) else f"{name} {fact}" for name, fact in facts.items())
    table = Table()
    table.add_column("field", style="green", overflow="fold")
    table.add_column("type", overflow="fold")
    if first is not None:
        table.add_column("first", overflow="ellipsis", no_wrap=True)
    rows = list(_field_rows(schema, first, 0))
    for row in rows[:MAX_FIELDS]:
        # Text, because rich reads markup in plain strings
        table.add_row(*(Text(cell) for cell in (row if first is not None else row[:2])))
    if len(rows) > MAX_FIELDS:
        table.add_row(Text(f"… {len(rows) - MAX_FIELDS:,} more", style="dim"), Text(""))
    return Group(Text(f"{title}  ({', '.join(words)})"), table)


def _field_rows(schema: Schema, document: DocumentLike | None, level: int) -> Iterator[tuple[str, str, str]]:
    """Yield the name, type and value of each field, and of the fields of nested documents."""
    for name, kind, nested in schema_rows(schema):
        value = None if document is None else document.__dict__.get(name)
        expanded = nested is not None and level < _TABLE_LEVELS
        is_document = hasattr(value, "model_fields_set")
        yield (
            f"{'  ' * level}{one_line(name)}",
            kind,
            "" if value is None or (expanded and is_document) else one_line(value),
        )
        if expanded and nested is not None:
            yield from _field_rows(nested, value if is_document else None, level + 1)


def rows_table(title: str, names: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> Group:
    """Build a table of short texts; columns that do not fit into the width are listed below it."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    sizes = [min(_MAX_COLUMN, max([len(name), *(len(row[at]) for row in rows)])) for at, name in enumerate(names)]
    ends = [1 + sum(size + _BORDER for size in sizes[: at + 1]) for at in range(len(sizes))]
    count = next((at for at, end in enumerate(ends) if end > width and at >= 2), len(sizes))  # at least two
    table = Table()
    for name in names[:count]:
        table.add_column(Text(name, style="green"), overflow="ellipsis", no_wrap=True, max_width=_MAX_COLUMN)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row[:count]))
    rest = ", ".join(names[count:])
    more = f"… {len(names) - count} more columns: {one_line(rest, max(width - 30, 20))}" if rest else ""
    return Group(Text(one_line(title, width)), table, *([Text(more, style="dim")] if more else []))
