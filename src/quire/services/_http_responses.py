"""Content negotiation, and responses in JSON or protobuf, whole or streamed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

from anyio import from_thread
from fastapi import Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.concurrency import run_in_threadpool

from quire import codec
from quire.array import DocumentArray, DocumentBatch
from quire.errors import SchemaError
from quire.files import split_pieces
from quire.services._payloads import Payload, is_large

JSON = "application/json"
NDJSON = "application/x-ndjson"
PROTOBUF = "application/x-protobuf"
FILE = "application/octet-stream"
"""A file of documents, as `save_binary` and `push` write it."""
_SYNONYMS = {
    "application/protobuf": PROTOBUF,
    "application/vnd.google.protobuf": PROTOBUF,
    "application/jsonl": NDJSON,
    "application/jsonlines": NDJSON,
    "application/ndjson": NDJSON,
}


# --- content negotiation


def parse_media_type(header: str) -> str:
    """Return the media type that a Content-Type names, with synonyms replaced."""
    name = header.partition(";")[0].strip().lower()
    if name.startswith("application/") and name.endswith("+json"):
        return JSON
    return _SYNONYMS.get(name, name)


def negotiate(accept: str | None, available: Sequence[str]) -> str | None:
    """Return the media type that an Accept header prefers, the first of equals; None if it accepts none of them."""
    if not accept or not accept.strip():
        return available[0]
    preferences: dict[str, float] = {}
    for part in accept.split(","):
        name, *parameters = (piece.strip() for piece in part.split(";"))
        quality = next((text[2:] for text in parameters if text.lower().startswith("q=")), "1")
        try:
            preferences.setdefault(parse_media_type(name), float(quality))
        except ValueError:
            preferences.setdefault(parse_media_type(name), 0.0)

    def quality_of(media_type: str) -> float:
        # An exact type is more specific than application/*, and that is more specific than */* (RFC 9110).
        patterns = (media_type, f"{media_type.partition('/')[0]}/*", "*/*")
        return next((preferences[pattern] for pattern in patterns if pattern in preferences), 0.0)

    best = max(available, key=quality_of)
    return best if quality_of(best) > 0 else None


# --- responses


class NdjsonResponse(JSONResponse):  # type: ignore[misc]
    """Tells OpenAPI the media type of a stream of JSON lines."""

    media_type = NDJSON


class ResponseFormat(NamedTuple):
    """The negotiated media type, and the status of a route that succeeded."""

    media_type: str
    status: int


def make_response(payload: Payload | None, value: Any, response_format: ResponseFormat) -> Any:
    """Return the response for a route's result, or the result itself where FastAPI makes the JSON.

    A response that the route made itself is not changed.
    """
    if payload is None and isinstance(value, (DocumentArray, DocumentBatch)):
        name = type(value).__name__
        raise SchemaError(f"the route returns {name}, which FastAPI can only write if it is declared: add `-> {name}`.")
    if payload is None or isinstance(value, Response):
        return value
    media_type, status = response_format
    if payload.stream:
        # The bytes are produced in a thread while the function runs, also where its values come from the event loop.
        values = _iterate_in_thread(value) if isinstance(value, AsyncIterator) else value
        converted = (payload.convert(item, "the answer") for item in values)
        rows = converted if payload.kind == "document" else chain.from_iterable(converted)
        # The first document comes before the response starts: a function that refuses the call, or fails, then still
        # determines the status code. After that, an error can only cut the connection.
        rows = chain(list(islice(rows, 1)), rows)
        if media_type == NDJSON:
            parts: Iterable[bytes] = ((codec.to_json(row, None, None, check=False) + "\n").encode() for row in rows)
        else:
            schema = payload.document_type.document_schema()
            blocks = codec.encode_documents_stream(
                rows, schema, None, None, allow_pickle=False, checksums=True, workers=1
            )
            parts = map(bytes, split_pieces(chain.from_iterable(blocks)))
        return StreamingResponse(parts, status, media_type=media_type)
    if media_type != PROTOBUF:
        return value if payload.kind == "document" else payload.convert(value, "the answer")
    return Response(payload.encode(payload.convert(value, "the answer")), status, media_type=PROTOBUF)


async def make_response_async(payload: Payload | None, value: Any, response_format: ResponseFormat) -> Any:
    """Return the response like `make_response`; streams and many documents in a thread, so the event loop goes on."""
    if payload is not None and (payload.stream or is_large(value)):
        return await run_in_threadpool(make_response, payload, value, response_format)
    return make_response(payload, value, response_format)


def _iterate_in_thread(values: AsyncIterator[Any]) -> Iterator[Any]:
    while True:
        try:
            yield from_thread.run(values.__anext__)
        except StopAsyncIteration:
            return
