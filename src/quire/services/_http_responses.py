"""Content negotiation, and responses in JSON or protobuf, whole or streamed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

from anyio import from_thread
from fastapi import Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.concurrency import run_in_threadpool

from quire import codec
from quire.files import in_pieces
from quire.services._payloads import Side

JSON = "application/json"
LINES = "application/x-ndjson"
PROTOBUF = "application/x-protobuf"
FILE = "application/octet-stream"
"""A file of documents, as `save_binary` and `push` write it."""
_SPELLINGS = {
    "application/protobuf": PROTOBUF,
    "application/vnd.google.protobuf": PROTOBUF,
    "application/jsonl": LINES,
    "application/jsonlines": LINES,
    "application/ndjson": LINES,
}


def media_type(header: str) -> str:
    """The type that a Content-Type names, in the spelling that is used here."""
    name = header.partition(";")[0].strip().lower()
    if name.startswith("application/") and name.endswith("+json"):
        return JSON
    return _SPELLINGS.get(name, name)


def chosen(accept: str | None, offers: Sequence[str]) -> str | None:
    """The offer that a client likes best, the first of those it likes alike; None if it likes none."""
    if not accept or not accept.strip():
        return offers[0]
    wishes = list(_wishes(accept))
    weights = [_weight(offer, wishes) for offer in offers]
    best = max(weights)
    return offers[weights.index(best)] if best > 0 else None


def _wishes(accept: str) -> Iterator[tuple[str, float]]:
    for part in accept.split(","):
        name, *parameters = (piece.strip() for piece in part.split(";"))
        weight = next((text[2:] for text in parameters if text.lower().startswith("q=")), "1")
        try:
            yield media_type(name), float(weight)
        except ValueError:
            yield media_type(name), 0.0


def _weight(offer: str, wishes: Sequence[tuple[str, float]]) -> float:
    """What the most exact of the wishes says of an offer."""
    for pattern in (offer, f"{offer.partition('/')[0]}/*", "*/*"):
        for name, weight in wishes:
            if name == pattern:
                return weight
    return 0.0


_LARGE = 1 << 10
"""So many documents are made bytes in another thread, so that the event loop goes on."""


class LinesOf(JSONResponse):  # type: ignore[misc]
    """What FastAPI tells of a stream: its media type, and that its schema is one of JSON."""

    media_type = LINES


class Wanted(NamedTuple):
    """The media type that a client likes best, and the status of a route that did its work."""

    media_type: str
    status: int


def answer(gives: Side | None, value: Any, wanted: Wanted) -> Any:
    """The response; or the value itself, of which FastAPI makes JSON. A response that was made already stays."""
    if gives is None or isinstance(value, Response):
        return value
    if gives.stream:
        return _streamed(gives, value, wanted)
    if wanted.media_type != PROTOBUF:
        return value if gives.form == "document" else gives.check(value, "the answer")
    return Response(gives.encode(gives.check(value, "the answer")), wanted.status, media_type=PROTOBUF)


async def answer_async(gives: Side | None, value: Any, wanted: Wanted) -> Any:
    """The same on the event loop."""
    if gives is not None and not gives.stream and gives.form != "document" and _is_large(value):
        return await run_in_threadpool(answer, gives, value, wanted)
    return answer(gives, value, wanted)


def _is_large(value: Any) -> bool:
    return not isinstance(value, Response) and len(value) > _LARGE


def _streamed(gives: Side, values: Any, wanted: Wanted) -> StreamingResponse:
    """Bytes while the function runs; they are made in a thread, also where the values come from the event loop."""
    rows = _rows(gives, _waited_for(values) if isinstance(values, AsyncIterator) else values)
    parts = map(_line, rows) if wanted.media_type == LINES else _file(gives, rows)
    return StreamingResponse(parts, wanted.status, media_type=wanted.media_type)


def _waited_for(values: AsyncIterator[Any]) -> Iterator[Any]:
    while True:
        try:
            yield from_thread.run(values.__anext__)
        except StopAsyncIteration:
            return


def _rows(gives: Side, values: Iterable[Any]) -> Iterator[Any]:
    checked = (gives.check(value, "the answer") for value in values)
    return checked if gives.form == "document" else chain.from_iterable(checked)


def _line(row: Any) -> bytes:
    return (codec.to_json(row, None, "lists", check=False) + "\n").encode()


def _file(gives: Side, rows: Iterable[Any]) -> Iterator[bytes]:
    schema = gives.document_type.document_schema()
    parts = codec.stream(rows, schema, None, None, allow_pickle=False, checksums=True, workers=1)
    return map(bytes, in_pieces(chain.from_iterable(parts)))
