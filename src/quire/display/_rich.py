"""Trees and tables with rich, which is imported when something is shown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quire.display._text import nested_rows, schema_rows, short_value
from quire.schema import Schema

if TYPE_CHECKING:
    from rich.table import Table
    from rich.tree import Tree


def document_tree(document: Any) -> Tree:
    """A document as a tree of its fields and values."""
    from rich.text import Text
    from rich.tree import Tree

    tree = Tree(Text(type(document).__name__, style="bold cyan"))
    _add_rows(tree, nested_rows(document) or [])
    return tree


def schema_tree(schema: Schema) -> Tree:
    """A schema as a tree of its fields and types."""
    from rich.text import Text
    from rich.tree import Tree

    tree = Tree(Text(schema.name, style="bold cyan"))
    _add_schema(tree, schema)
    return tree


def facts_table(title: str, facts: dict[str, Any], schema: Schema) -> Table:
    """A short table about an array or a batch: facts first, then a row a field."""
    from rich.table import Table
    from rich.text import Text

    heading = f"{title}  ({', '.join(f'{name} {fact}' for name, fact in facts.items())})"
    table = Table("field", "type", title=Text(heading))
    for name, kind, _ in schema_rows(schema):
        table.add_row(Text(name), Text(kind))  # as text: brackets are no markup here
    return table


def print_document(document: Any) -> None:
    """Show a document."""
    _print(document_tree(document))


def print_schema(schema: Schema) -> None:
    """Show a schema."""
    _print(schema_tree(schema))


def print_facts(title: str, facts: dict[str, Any], schema: Schema) -> None:
    """Show what an array or a batch is."""
    _print(facts_table(title, facts, schema))


def _print(thing: Any) -> None:
    from rich.console import Console

    Console().print(thing)


def _add_rows(tree: Tree, rows: list[tuple[str, Any]]) -> None:
    from rich.text import Text

    for name, value in rows:
        inner = nested_rows(value)
        if inner is None:
            end = "" if name.startswith("…") else f" = {short_value(value)!r}"
            tree.add(Text.assemble((name, "green"), end))
        else:
            _add_rows(tree.add(Text.assemble((name, "green"), f": {type(value).__name__}")), inner)


def _add_schema(tree: Tree, schema: Schema) -> None:
    from rich.text import Text

    for name, kind, nested in schema_rows(schema):
        branch = tree.add(Text.assemble((name, "green"), f": {kind}"))
        if nested is not None:
            _add_schema(branch, nested)
