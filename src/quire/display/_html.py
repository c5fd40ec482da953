"""Documents and arrays in a notebook: tables and galleries of plain HTML, with small pictures and sounds in it.

Everything that comes from data is escaped. Nothing is fetched: not when it is made, and not when it is looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from quire.display._pictures import sound, thumbnail
from quire.display._text import MOST_FIELDS, nested_rows, short_value

_LEVELS = 4
_CARD = "display:inline-block;vertical-align:top;width:180px;margin:4px;padding:6px;border:1px solid #8884;"
_CARD += "border-radius:6px;font-size:85%;overflow-wrap:anywhere"
_PICTURE = "max-width:128px;max-height:128px;image-rendering:auto;border-radius:3px"
GALLERY = 24
"""So many cards are in a gallery at most."""
ROWS = 10
"""So many rows are in a table at most."""


def render_html(document: Any, levels: int = _LEVELS) -> str:
    """A document as a table of its fields."""
    rows = nested_rows(document) or []
    cells = "".join(
        f"<tr><th>{escape(name)}</th><td>{_cell(value, levels)}</td></tr>" for name, value in rows[:MOST_FIELDS]
    )
    if len(rows) > MOST_FIELDS:
        cells += f"<tr><th>…</th><td>{len(rows) - MOST_FIELDS:,} more fields</td></tr>"
    heard = _player(document)
    cells += f"<tr><th>♪</th><td>{heard}</td></tr>" if heard else ""
    return f"<table><caption>{escape(type(document).__name__)}</caption>{cells}</table>"


def render_rows_html(title: str, names: Sequence[str], rows: Sequence[Sequence[Any]], total: int) -> str:
    """Documents as a gallery if they can be looked at or listened to, else as a table with a row each.

    The caption tells how many there are in all.
    """
    seen = [_seen(row) for row in rows[:1]]
    if any(seen):
        return _gallery(title, names, rows[:GALLERY], total)
    rows = rows[:ROWS]
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join("<tr>" + "".join(f"<td>{_cell(value)}</td>" for value in row) + "</tr>" for row in rows)
    return f"<table><caption>{_caption(title, len(rows), total)}</caption><tr>{head}</tr>{body}</table>"


def _caption(title: str, shown: int, total: int) -> str:
    more = "" if shown == total else f", first {shown}"
    return f"{escape(title)} ({total:,} rows{more})"


def _seen(row: Sequence[Any]) -> bool:
    """Whether there is something in a row to look at or listen to."""
    return any(_medium(value) is not None for value in row)


def _gallery(title: str, names: Sequence[str], rows: Sequence[Sequence[Any]], total: int) -> str:
    cards = "".join(_card(names, row) for row in rows)
    return f"<div><p>{_caption(title, len(rows), total)}</p>{cards}</div>"


def _card(names: Sequence[str], row: Sequence[Any]) -> str:
    """A row: first what can be looked at, and then the rest in words."""
    media, words = [], []
    for name, value in zip(names, row, strict=True):
        medium = _medium(value)
        if medium is not None:
            media.append(f'<div title="{escape(name)}">{medium}</div>')
        elif value is not None and name != "id":
            words.append(f"<div><b>{escape(name)}</b> {escape(_words(value))}</div>")
    return f'<div style="{_CARD}">{"".join(media)}{"".join(words)}</div>'


def _words(value: Any) -> str:
    return value if isinstance(value, str) and len(value) <= 60 else repr(short_value(value))


def _medium(value: Any, levels: int = 1) -> str | None:
    """A picture or a player of a value, or of the first field of a document that has one."""
    picture = thumbnail(value)
    if picture is not None:
        return f'<img style="{_PICTURE}" alt="{escape(repr(short_value(value)))}" src="{picture}">'
    heard = _player(value)
    if heard is not None or not levels or not hasattr(type(value), "document_schema"):
        return heard
    found = (_medium(inner, levels - 1) for _, inner in nested_rows(value) or ())
    return next((medium for medium in found if medium is not None), None)


def _player(value: Any) -> str | None:
    found = sound(value)
    if found is None:
        return None
    source, told = found
    return (
        f'<audio controls preload="none" style="max-width:170px" src="{source}"></audio> <small>{escape(told)}</small>'
    )


def _cell(value: Any, levels: int = _LEVELS) -> str:
    if hasattr(type(value), "document_schema"):
        return render_html(value, levels - 1) if levels else escape(f"<{type(value).__name__}> …")
    medium = _medium(value, 0)
    return escape(repr(short_value(value))) if medium is None else medium
