"""Documents as lines of JSON."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from typing import Any

from quire._extra_fields import Extra
from quire.codec._json import TensorForm, from_json, to_json
from quire.codec._text_files import TextSource, TextTarget, source_name, text_lines, text_writer


def to_ndjson(documents: Iterable[Any], target: TextTarget | None, tensors: TensorForm) -> str | None:
    """Write a line for each document; without a target, give the text."""
    if target is None:
        text = io.StringIO(newline="")
        to_ndjson(documents, text, tensors)
        return text.getvalue()
    with text_writer(target, "utf-8") as file:
        for row, document in enumerate(documents):
            file.write(to_json(document, None, tensors, f", row {row}") + "\n")
    return None


def iter_ndjson(
    document_type: type[Any], source: TextSource | None, text: str | bytes | None = None, extra: Extra = "forbid"
) -> Iterator[Any]:
    """The documents of a path or file, or of content given as `text`, read line by line; empty lines are skipped."""
    where = f" in {source_name(source, 'the text')}"
    with text_lines(source, "utf-8", text) as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield from_json(document_type, line, f"{where}, line {number}", extra=extra)
