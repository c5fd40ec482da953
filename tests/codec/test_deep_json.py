"""JSON that is nested too deeply is a DecodeError, and never a RecursionError."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from quire import BaseDocument, DocumentArray, DocumentBatch
from quire.errors import DecodeError


class Holder(BaseDocument):
    value: Any = None
    values: list[Any] = []


READERS: dict[str, Callable[[str], Any]] = {
    "csv": lambda text: DocumentArray[Holder].from_csv(text=f"values\n{text}\n", delimiter="\t"),
    "ndjson": lambda text: DocumentArray[Holder].from_ndjson(text=f'{{"value": {text}}}'),
    "json": lambda text: Holder.from_json(f'{{"value": {text}}}'),
    "json list": lambda text: DocumentArray[Holder].from_json(f'[{{"value": {text}}}]'),
    "json batch": lambda text: DocumentBatch[Holder].from_json(f'[{{"value": {text}}}]'),
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("depth", [250, 1_000, 100_000])
def test_deep_json_raises_a_decode_error(name: str, depth: int) -> None:
    with pytest.raises(DecodeError):
        READERS[name]("[" * depth + "]" * depth)
    with pytest.raises(DecodeError):
        READERS[name]("[" * depth)


@pytest.mark.parametrize("name", READERS)
def test_json_of_common_depth_is_read(name: str) -> None:
    READERS[name]("[" * 50 + "]" * 50)
