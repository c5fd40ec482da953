"""JSON that is nested too deeply is a DecodeError, and never a RecursionError; and is not written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from quire import BaseDocument, DocumentArray, DocumentBatch
from quire.errors import DecodeError, EncodeError


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


class Node(BaseDocument):
    child: Node | None = None


def _nested_value(depth: int) -> Holder:
    value: Any = None
    for _ in range(depth - 1):  # the document is a level, too
        value = [value]
    return Holder(value=value)


def _nested_documents(depth: int) -> Node:
    node = Node(id="leaf")
    for _ in range(depth - 1):
        node = Node.model_construct(id="node", child=node)  # validation limits the levels, too
    return node


def _nested_extra(depth: int) -> BaseDocument:
    class Open(BaseDocument, extra="allow"):
        pass

    return Open(extra=_nested_value(depth).value)


TREES: dict[str, Callable[[int], Any]] = {
    "values": _nested_value,
    "documents": _nested_documents,
    "extra fields": _nested_extra,
}
ROUND_TRIPS: dict[str, Callable[[Any], Any]] = {
    "csv": lambda docs: type(docs).from_csv(text=docs.to_csv()),
    "ndjson": lambda docs: type(docs).from_ndjson(text=docs.to_ndjson()),
    "json": lambda docs: type(docs[0]).from_json(docs[0].to_json()),
    "json list": lambda docs: type(docs).from_json(docs.to_json()),
}


@pytest.mark.parametrize("form", ROUND_TRIPS)
@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("depth", [150, 198, 199, 200, 201, 230, 300])
def test_deep_values_are_read_back_or_not_written(name: str, form: str, depth: int) -> None:
    document = TREES[name](depth)
    docs = DocumentArray[type(document)]([document])  # type: ignore[misc]
    if depth <= 199 and (name, form) != ("extra fields", "csv"):  # tables have no columns for extra fields
        ROUND_TRIPS[form](docs)
    else:
        with pytest.raises(EncodeError, match=type(document).__name__):
            ROUND_TRIPS[form](docs)
