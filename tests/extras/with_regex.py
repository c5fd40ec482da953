"""Query with regular expressions that need a linear-time matcher."""

from __future__ import annotations

from quire import BaseDocument, DocumentArray


class Note(BaseDocument):
    text: str


notes = DocumentArray[Note]([Note(text="a" * 50 + "!"), Note(text="aaa")])
assert notes.filter({"text": {"$regex": "(a+)+$"}}).text == ["aaa"]
