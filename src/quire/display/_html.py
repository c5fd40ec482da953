"""Documents and arrays in a notebook: plain HTML tables, nothing to install."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from quire.display._text import nested_rows, short_value


def render_html(document: Any) -> str:
    """A document as a table of its fields."""
    rows = "".join(
        f"<tr><th>{escape(name)}</th><td>{_cell(value)}</td></tr>" for name, value in nested_rows(document) or []
    )
    return f"<table><caption>{escape(type(document).__name__)}</caption>{rows}</table>"


def render_rows_html(title: str, names: Sequence[str], rows: Sequence[Sequence[Any]], total: int) -> str:
    """Documents as a table with a row each; the caption tells how many there are in all."""
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join("<tr>" + "".join(f"<td>{_cell(value)}</td>" for value in row) + "</tr>" for row in rows)
    more = "" if len(rows) == total else f", first {len(rows)}"
    return f"<table><caption>{escape(title)} ({total} rows{more})</caption><tr>{head}</tr>{body}</table>"


def _cell(value: Any) -> str:
    return render_html(value) if hasattr(type(value), "document_schema") else escape(repr(short_value(value)))
