"""Documents and arrays in a notebook: tables and galleries of plain HTML with embedded images and audio.

Everything that comes from data is escaped. Nothing is fetched, neither while rendering nor by the page: data URIs, and
local files that an `ImageUrl` names, are the only addresses that are read. Images are decoded and encoded again, so
only their pixels reach the page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from quire._protocols import is_document_type
from quire.display._text import MAX_FIELDS, nested_rows, readable_value, short_value
from quire.errors import QuireError
from quire.files import to_data_uri
from quire.media import (
    as_audio_frames,
    data_uri_family,
    decode_image,
    detect_media_type,
    encode_image,
    encode_wav,
    read_media_uri,
)
from quire.tensors import framework_of
from quire.typing import ImageUrl

if TYPE_CHECKING:
    from numpy.typing import NDArray

_LEVELS = 4
_CARD = "display:inline-block;vertical-align:top;width:180px;margin:4px;padding:6px;border:1px solid #8884;"
_CARD += "border-radius:6px;font-size:85%;overflow-wrap:anywhere"
_PICTURE = "max-width:128px;max-height:128px;image-rendering:auto;border-radius:3px"
GALLERY = 8
"""Maximum number of cards in a gallery."""
_ROWS = GALLERY
"""Maximum number of rows in a table."""


def render_html(document: object, levels: int = _LEVELS) -> str:
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


def render_rows_html(
    title: str,
    names: Sequence[str],
    rows: Sequence[Sequence[Any]],
    total: int,
    *,
    types: Sequence[str] = (),
    facts: Mapping[str, object] | None = None,
    scores: Sequence[float] = (),
) -> str:
    """Render rows as a gallery if the first one has an image or audio, otherwise as a table.

    The caption states the total number of rows and the facts; the types of the fields come below it, or below the names
    of the columns. Each row may have a score.
    """
    details = "".join(f" · {escape(name)} {escape(str(value))}" for name, value in (facts or {}).items())
    if any(_render_media(value) is not None for row in rows[:1] for value in row):
        rows = rows[:GALLERY]
        schema = " · ".join(f"<b>{escape(name)}</b> {escape(kind)}" for name, kind in zip(names, types, strict=False))
        cards = "".join(_render_card(names, row, scores[i : i + 1]) for i, row in enumerate(rows))
        caption = f"<p>{_caption(title, len(rows), total)}{details}<br><small>{schema}</small></p>"
        return f"<div>{caption}{cards}</div>"
    rows = rows[:_ROWS]
    kinds = [f"<br><small>{escape(kind)}</small>" for kind in types] or [""] * len(names)
    head = "".join(f"<th>{escape(name)}{kind}</th>" for name, kind in zip(names, kinds, strict=True))
    head = f"<th>score</th>{head}" if len(scores) else head
    body = ""
    for i, row in enumerate(rows):
        score = f"<td>{_format_score(scores[i])}</td>" if len(scores) else ""
        body += f"<tr>{score}" + "".join(f"<td>{_render_cell(value)}</td>" for value in row) + "</tr>"
    return f"<table><caption>{_caption(title, len(rows), total)}{details}</caption><tr>{head}</tr>{body}</table>"


def render_facts_html(title: str, facts: Sequence[tuple[str, str]], note: str) -> str:
    """Render names and values as a table with two columns."""
    cells = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in facts)
    return f"<table><caption>{escape(title)}</caption>{cells}</table><small>{escape(note)}</small>"


def _format_score(score: float) -> str:
    return f"{float(score):.4g}"


def _caption(title: str, shown: int, total: int) -> str:
    more = "" if shown == total else f", first {shown}"
    return f"{escape(title)} ({total:,} rows{more})"


def _render_card(names: Sequence[str], row: Sequence[Any], scores: Sequence[float] = ()) -> str:
    """Render a row as a card: images and audio first, then the other values as text."""
    media, words = [], []
    for name, value in zip(names, row, strict=True):
        medium = _render_media(value)
        if medium is not None:
            media.append(f'<div title="{escape(name)}">{medium}</div>')
        elif value is not None and name != "id":
            words.append(f"<div><b>{escape(name)}</b> {escape(readable_value(value))}</div>")
    words += [f"<div><b>score</b> {_format_score(score)}</div>" for score in scores]
    return f'<div style="{_CARD}">{"".join(media)}{"".join(words)}</div>'


def _render_cell(value: object, levels: int = _LEVELS) -> str:
    if is_document_type(type(value)):
        return render_html(value, levels - 1) if levels else escape(f"<{type(value).__name__}> …")
    medium = _render_media(value, 0)
    return escape(readable_value(value)) if medium is None else medium


def _render_media(value: object, levels: int = 1) -> str | None:
    """Render a value as an image or an audio player; for a document, its first field that is one."""
    thumbnail = render_thumbnail(value)
    if thumbnail is not None:
        return f'<img style="{_PICTURE}" alt="{escape(repr(short_value(value)))}" src="{thumbnail}">'
    player = _render_player(value)
    if player is not None or not levels or not is_document_type(type(value)):
        return player
    fields = (_render_media(inner, levels - 1) for _, inner in nested_rows(value) or ())
    return next((medium for medium in fields if medium is not None), None)


def _render_player(value: object) -> str | None:
    audio = render_audio(value)
    if audio is None:
        return None
    source, description = audio
    return (
        f'<audio controls preload="none" style="max-width:170px" src="{source}"></audio> '
        f"<small>{escape(description)}</small>"
    )


# --- images and audio as data URIs

_THUMBNAIL_SIDE = 128
"""Pixels of the longer side of a thumbnail."""
_MIN_SIDE = 8
"""A matrix with fewer rows or columns is not shown as an image."""
_MAX_BYTES, _MAX_PIXELS = 32 << 20, 40_000_000
_MAX_AUDIO_BYTES = 1 << 20
"""Bytes of audio per value; longer audio is truncated."""


def as_picture(array: NDArray[Any]) -> NDArray[np.uint8] | None:
    """Return an array as (rows, columns, channels) or (rows, columns) if it looks like an image, otherwise None.

    An image is uint8, with 1, 3 or 4 channels on the first or last axis.
    """
    if array.dtype != np.uint8 or array.ndim not in (2, 3) or not array.size:
        return None
    if array.ndim == 3 and array.shape[-1] not in (1, 3, 4):
        if array.shape[0] not in (1, 3, 4):
            return None
        array = np.moveaxis(array, 0, -1)
    if min(array.shape[:2]) < _MIN_SIDE:
        return None
    return array[:, :, 0] if array.ndim == 3 and array.shape[-1] == 1 else array


def render_thumbnail(value: object) -> str | None:
    """Return a small image of a value as a data URI; None if it is not an image, or if Pillow is not installed."""
    try:
        if isinstance(value, ImageUrl) and data_uri_family(value) is None:
            value = _read_local_image(value)
        elif isinstance(value, str):
            value = read_media_uri(value, _MAX_BYTES) if data_uri_family(value) == "image" else None
        framework = framework_of(value)
        pixels = None
        if isinstance(value, (bytes, bytearray)):
            if len(value) <= _MAX_BYTES and (detect_media_type(value) or "").startswith("image/"):
                pixels = decode_image(bytes(value), max_pixels=_MAX_PIXELS)
        elif framework is not None and framework.dtype(value) == "uint8" and framework.layout(value) == "dense":
            pixels = as_picture(framework.to_numpy(value))
        if pixels is None:
            return None
        # Every n-th pixel is enough for a thumbnail, and takes no time, unlike resampling.
        step = -(-max(pixels.shape[:2]) // _THUMBNAIL_SIDE)
        content = encode_image(np.ascontiguousarray(pixels[::step, ::step]), "png")
        return to_data_uri(content, "image/png", base64=True)
    except (QuireError, ValueError):
        return None  # the value is shown as text


def _read_local_image(url: str) -> bytes | None:
    """Return the content of a local file that a field for images names; other addresses are not opened."""
    if "://" in url:
        return None
    with suppress(OSError, ValueError):  # no such file, or no valid path
        path = Path(url)
        if path.is_file() and path.stat().st_size <= _MAX_BYTES:
            return path.read_bytes()
    return None


def render_audio(value: Any) -> tuple[str, str] | None:
    """Return audio as a data URI with a description; None if the value is not audio.

    Audio is encoded bytes, or a document with samples in `tensor` and a `rate`.
    """
    try:
        if isinstance(value, str):
            value = read_media_uri(value, _MAX_BYTES) if data_uri_family(value) == "audio" else None
        if isinstance(value, (bytes, bytearray)):
            media_type = detect_media_type(value) or ""
            if not media_type.startswith("audio/") or len(value) > _MAX_AUDIO_BYTES:
                return None
            return to_data_uri(bytes(value), media_type, base64=True), f"{len(value):,} bytes"
        fields = value.__dict__ if is_document_type(type(value)) else {}
        samples, rate = fields.get("tensor"), fields.get("rate")
        framework = framework_of(samples)
        if framework is None or not isinstance(rate, int):
            return None
        frames = as_audio_frames(framework.to_numpy(samples))
        max_frames = _MAX_AUDIO_BYTES // (2 * frames.shape[1])  # of 16-bit samples
        content = encode_wav(frames[:max_frames], rate)
        description = f"{len(frames) / rate:.1f} s"
        if len(frames) > max_frames:
            description += f", first {max_frames / rate:.1f} s"
        return to_data_uri(content, "audio/wav", base64=True), description
    except (QuireError, ValueError):
        return None
