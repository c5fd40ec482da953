"""Datasets of earlier versions of the format stay readable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.storage import open_dataset, write_dataset
from tests.codec.round_trips import exact
from tests.storage.golden import FOLDER, Golden, documents

pytestmark = pytest.mark.needs("pyarrow")


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.parametrize("version", ["v1", "v2"])
@pytest.mark.parametrize("verify", ["first_touch", "always", "never"])
def test_golden_datasets_of_all_versions_are_read(tmp_path: Path, version: str, kind: str, verify: Any) -> None:
    dataset = open_dataset(FOLDER / version / kind, Golden, cache=tmp_path, verify=verify)
    dataset.verify()
    assert exact([dataset[n] for n in range(6)], documents())
    assert exact(list(dataset.read().unstack()), documents())
    assert len(open_dataset(FOLDER / version / kind, Golden, where={"number": {"$gte": 0}}, cache=tmp_path)) == 4


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_layout_of_a_class_does_not_change(tmp_path: Path, kind: Any) -> None:
    write_dataset(documents(), tmp_path / "now", format=kind)
    [now] = open_dataset(tmp_path / "now", Golden, cache=tmp_path).shards
    for version in ("v1", "v2"):
        shards = open_dataset(FOLDER / version / kind, Golden, cache=tmp_path).shards
        assert {shard.layout for shard in shards} == {now.layout}
