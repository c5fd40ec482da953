"""Documents and arrays in a notebook: tables and galleries of plain HTML with embedded images and audio.

Everything that comes from data is escaped. Nothing is fetched, neither while rendering nor by the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from quire._protocols import is_document_type
from quire.display._previews import render_audio, render_thumbnail
from quire.display._text import MAX_FIELDS, nested_rows, short_value

_LEVELS = 4
_CARD = "display:inline-block;vertical-align:top;width:180px;margin:4px;padding:6px;border:1px solid #8884;"
_CARD += "border-radius:6px;font-size:85%;overflow-wrap:anywhere"
_PICTURE = "max-width:128px;max-height:128px;image-rendering:auto;border-radius:3px"
GALLERY = 24
"""Maximum number of cards in a gallery."""
_ROWS = 10
"""Maximum number of rows in a table."""


def render_html(document: Any, levels: int = _LEVELS) -> str:
    """Render a document as a table of its fields."""
    rows = nested_rows(document) or []
    cells = "".join(
        f"<tr><th>{escape(name)}</th><td>{_render_cell(value, levels)}</td></tr>" for name, value in rows[:MAX_FIELDS]
    )
    if len(rows) > MAX_FIELDS:
        cells += f"<tr><th>…</th><td>{len(rows) - MAX_FIELDS:,} more fields</td></tr>"
    player = _render_player(document)
    cells += f"<tr><th>♪</th><td>{player}</td></tr>" if player else ""
    return f"<table><caption>{escape(type(document).__name__)}</caption>{cells}</table>"


def render_rows_html(title: str, names: Sequence[str], rows: Sequence[Sequence[Any]], total: int) -> str:
    """Render rows as a gallery if the first one has an image or audio, otherwise as a table.

    The caption states the total number of rows.
    """
    if any(_render_media(value) is not None for row in rows[:1] for value in row):
        cards = "".join(_render_card(names, row) for row in rows[:GALLERY])
        return f"<div><p>{_caption(title, len(rows[:GALLERY]), total)}</p>{cards}</div>"
    rows = rows[:_ROWS]
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join("<tr>" + "".join(f"<td>{_render_cell(value)}</td>" for value in row) + "</tr>" for row in rows)
    return f"<table><caption>{_caption(title, len(rows), total)}</caption><tr>{head}</tr>{body}</table>"


def _caption(title: str, shown: int, total: int) -> str:
    more = "" if shown == total else f", first {shown}"
    return f"{escape(title)} ({total:,} rows{more})"


def _render_card(names: Sequence[str], row: Sequence[Any]) -> str:
    """Render a row as a card: images and audio first, then the other values as text."""
    media, words = [], []
    for name, value in zip(names, row, strict=True):
        medium = _render_media(value)
        if medium is not None:
            media.append(f'<div title="{escape(name)}">{medium}</div>')
        elif value is not None and name != "id":
            text = value if isinstance(value, str) and len(value) <= 60 else repr(short_value(value))
            words.append(f"<div><b>{escape(name)}</b> {escape(text)}</div>")
    return f'<div style="{_CARD}">{"".join(media)}{"".join(words)}</div>'


def _render_cell(value: Any, levels: int = _LEVELS) -> str:
    if is_document_type(type(value)):
        return render_html(value, levels - 1) if levels else escape(f"<{type(value).__name__}> …")
    medium = _render_media(value, 0)
    return escape(repr(short_value(value))) if medium is None else medium


def _render_media(value: Any, levels: int = 1) -> str | None:
    """Render a value as an image or an audio player; for a document, its first field that is one."""
    thumbnail = render_thumbnail(value)
    if thumbnail is not None:
        return f'<img style="{_PICTURE}" alt="{escape(repr(short_value(value)))}" src="{thumbnail}">'
    player = _render_player(value)
    if player is not None or not levels or not is_document_type(type(value)):
        return player
    fields = (_render_media(inner, levels - 1) for _, inner in nested_rows(value) or ())
    return next((medium for medium in fields if medium is not None), None)


def _render_player(value: Any) -> str | None:
    audio = render_audio(value)
    if audio is None:
        return None
    source, description = audio
    return (
        f'<audio controls preload="none" style="max-width:170px" src="{source}"></audio> '
        f"<small>{escape(description)}</small>"
    )
