"""What a function gave as an answer: JSON by FastAPI, protobuf, or a stream of either."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple

from anyio import from_thread
from fastapi import Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.concurrency import run_in_threadpool

from quire.array import DocumentArray
from quire.array._wire import _stream
from quire.codec._json import to_json
from quire.files import in_pieces
from quire.services._forms import Side
from quire.services._http_media import LINES, PROTOBUF

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
    return (to_json(row, None, "lists", check=False) + "\n").encode()


def _file(gives: Side, rows: Iterable[Any]) -> Iterator[bytes]:
    array_type: Any = DocumentArray[gives.document_type]  # type: ignore[name-defined]
    parts = _stream(array_type, rows, None, None, allow_pickle=False, checksums=True, workers=1)
    return map(bytes, in_pieces(chain.from_iterable(parts)))
