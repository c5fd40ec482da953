"""docs/architecture.md: every operation calls the functions that the page lists, in this order."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from quire import BaseDocument, DocumentArray
from quire.data import MultiModalDataset, StreamingDataset
from quire.distributed import DocumentShards
from quire.storage import write_dataset
from quire.typing import TorchTensor

pytestmark = pytest.mark.needs("torch", "pyarrow", "fsspec", "xxhash")

ROOT = Path(__file__).parents[2]
PACKAGE = f"{ROOT / 'src' / 'quire'}/"
PAGE = (ROOT / "docs" / "architecture.md").read_text()
MAX_FUNCTIONS = 12


class Photo(BaseDocument):
    pixels: TorchTensor[3, 8, 8]
    caption: str
    label: int | None = None


def read_walks() -> dict[str, list[tuple[str, str]]]:
    """Return the functions of each operation: (module, qualified name), by the code in front of the list."""
    walks: dict[str, list[tuple[str, str]]] = {}
    for line in PAGE.splitlines():
        if match := re.match(r"`(.+?)`(?:,| on |$)", line):
            walks[match[1]] = functions = []
        elif match := re.match(r"\d+\. `(\S+)` in `(\S+)`: \S", line):
            functions.append((match[2], match[1]))
    return walks


WALKS = read_walks()


def photos(count: int = 40) -> DocumentArray[Photo]:
    return DocumentArray[Photo](Photo(pixels=torch.zeros(3, 8, 8), caption="a", label=1) for _ in range(count))


def keep(photo: Photo) -> Photo:
    return photo


def operations(folder: Path) -> dict[str, Callable[[], object]]:
    array = photos()
    batch = array.stack()
    dataset = MultiModalDataset[Photo](array, preprocessing={"caption": len})
    write_dataset(array, folder)
    shards = DocumentShards[Photo].from_documents(array, num_partitions=2)
    return {
        "photos.to_bytes()": array.to_bytes,
        "batch = photos.stack()": array.stack,
        "batch[[1, 2]]": lambda: batch[[1, 2]],
        "dataset.__getitems__([0, 1, 2])": lambda: dataset.__getitems__([0, 1, 2]),
        "for batch in dataset": lambda: list(StreamingDataset[Photo](str(folder), batch_size=8)),
        "shards.map(function).collect()": lambda: shards.map(keep).collect(),
    }


def record_calls(operation: Callable[[], object]) -> list[tuple[str, str]]:
    """Return the functions of quire that an operation calls, in any thread, by their first call."""
    calls: dict[tuple[str, str], None] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        code: Any = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            calls.setdefault((code.co_filename[len(PACKAGE) :], code.co_qualname))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        operation()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return list(calls)


def test_page_lists_every_operation_in_few_functions(tmp_path: Path) -> None:
    assert WALKS.keys() == operations(tmp_path / "d").keys()
    assert {name: len(functions) for name, functions in WALKS.items() if len(functions) > MAX_FUNCTIONS} == {}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="code objects have no qualified name")
@pytest.mark.parametrize("name", WALKS)
def test_operation_calls_the_listed_functions_in_order(name: str, tmp_path: Path) -> None:
    calls = record_calls(operations(tmp_path / "d")[name])
    assert [function for function in WALKS[name] if function not in calls] == []
    assert sorted(WALKS[name], key=calls.index) == WALKS[name]
