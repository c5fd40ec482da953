"""Media types: what a body is, and what a client would like to get."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
