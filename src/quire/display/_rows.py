"""Tables with rich, which is imported when something is shown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from quire.display._rich import print_rich
from quire.display._text import MOST_FIELDS, one_line, schema_rows
from quire.schema import Schema

if TYPE_CHECKING:
    from rich.console import Group

_LEVELS = 3
_WIDEST = 40
_EDGES = 3
"""Signs between two columns."""


def facts_table(title: str, facts: dict[str, Any], schema: Schema, first: Any = None) -> Group:
    """A table about an array, a batch or a dataset: facts, then a row a field, with what is in the first document."""
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
    for row in rows[:MOST_FIELDS]:
        table.add_row(*(Text(cell) for cell in (row if first is not None else row[:2])))  # as text: no markup here
    if len(rows) > MOST_FIELDS:
        table.add_row(Text(f"… {len(rows) - MOST_FIELDS:,} more", style="dim"), Text(""))
    return Group(Text(f"{title}  ({', '.join(words)})"), table)


def _field_rows(schema: Schema, document: Any, level: int) -> Iterator[tuple[str, str, str]]:
    """Name, type and value of each field, and of those of documents inside."""
    for name, kind, nested in schema_rows(schema):
        value = None if document is None else document.__dict__.get(name)
        inner = nested is not None and level < _LEVELS
        shown = "" if value is None or (inner and hasattr(value, "model_fields_set")) else one_line(value)
        yield f"{'  ' * level}{one_line(name)}", kind, shown
        if inner and nested is not None:
            yield from _field_rows(nested, value if hasattr(value, "model_fields_set") else None, level + 1)


def rows_table(title: str, names: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> Group:
    """Rows of short texts; columns that have no room are named below."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    sizes = [min(_WIDEST, max([len(name), *(len(row[at]) for row in rows)])) for at, name in enumerate(names)]
    fitting = _fitting(sizes, width)
    table = Table()
    for name in names[:fitting]:
        table.add_column(Text(name, style="green"), overflow="ellipsis", no_wrap=True, max_width=_WIDEST)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row[:fitting]))
    left = ", ".join(names[fitting:])
    more = f"… {len(names) - fitting} more columns: {one_line(left, max(width - 30, 20))}" if left else ""
    return Group(Text(one_line(title, width)), table, *([Text(more, style="dim")] if more else []))


def _fitting(sizes: list[int], width: int) -> int:
    """How many columns have room, two of them in any case."""
    used = 1
    for number, size in enumerate(sizes):
        used += size + _EDGES
        if used > width and number >= 2:
            return number
    return len(sizes)


def print_facts(title: str, facts: dict[str, Any], schema: Schema, first: Any = None) -> None:
    """Show what an array, a batch or a dataset is."""
    print_rich(facts_table(title, facts, schema, first))
