"""Datasets that version 1 of the format wrote are read, now and later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.storage import open_dataset, write_dataset
from tests.codec.ways import exact
from tests.storage.golden import FOLDER, Golden, documents

pytestmark = pytest.mark.needs("pyarrow")


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_dataset_of_version_1_is_read(tmp_path: Path, kind: str) -> None:
    dataset = open_dataset(FOLDER / "v1" / kind, Golden, cache=tmp_path)
    dataset.verify()
    assert exact([dataset[n] for n in range(6)], documents())
    assert exact(list(dataset.read().unstack()), documents())
    assert len(open_dataset(FOLDER / "v1" / kind, Golden, where={"number": {"$gte": 0}}, cache=tmp_path)) == 4


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_the_layout_of_a_class_is_what_it_was(tmp_path: Path, kind: Any) -> None:
    write_dataset(documents(), tmp_path / "now", format=kind)
    [now] = open_dataset(tmp_path / "now", Golden, cache=tmp_path).shards
    assert {shard.layout for shard in open_dataset(FOLDER / "v1" / kind, Golden, cache=tmp_path).shards} == {now.layout}
