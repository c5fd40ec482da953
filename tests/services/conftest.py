"""Fixtures that several tests of services use."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest


@pytest.fixture
def spans(exporter: Any) -> Iterator[Callable[[int], dict[tuple[str, str], Any]]]:
    """A function that waits for a number of spans, and returns them by name and kind."""
    exporter.clear()

    def read(number: int) -> dict[tuple[str, str], Any]:
        deadline = time.monotonic() + 60
        while len(exporter.get_finished_spans()) < number:
            assert time.monotonic() < deadline, exporter.get_finished_spans()
            time.sleep(0.02)
        finished = exporter.get_finished_spans()
        return {(span.name.rpartition("/")[2], span.kind.name): span for span in finished}

    yield read
    exporter.clear()
