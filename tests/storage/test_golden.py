"""Datasets of earlier versions of the format stay readable."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from quire.storage import open_dataset, write_dataset
from tests.codec.round_trips import exact
from tests.storage.golden import FOLDER, Golden, Values, documents, value_documents

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
@pytest.mark.parametrize("version", ["v2-names", "v2-values"])
@pytest.mark.parametrize("verify", ["first_touch", "always", "never"])
def test_golden_enums_and_datetimes_of_all_versions_are_read(
    tmp_path: Path, version: str, kind: str, verify: Any
) -> None:
    dataset = open_dataset(FOLDER / version / kind, Values, cache=tmp_path, verify=verify)
    dataset.verify()
    assert exact([dataset[n] for n in range(6)], value_documents())
    assert exact(list(dataset.read().unstack()), value_documents())
    for where, rows in (
        ({"color": "red"}, 3),
        ({"level": 5}, 2),
        ({"utc": {"$gte": "2024-01-03T00:00:00Z"}}, 3),
        ({"naive": {"$lt": "2024-01-01T00:00:00"}}, 1),
    ):
        assert len(open_dataset(FOLDER / version / kind, Values, where=where, cache=tmp_path)) == rows


def test_golden_dataset_is_appended_to_with_values_and_timestamps(tmp_path: Path) -> None:
    shutil.copytree(FOLDER / "v2-names" / "arrow", tmp_path / "rows")
    write_dataset(value_documents(), tmp_path / "rows", Values, format="arrow", mode="append")
    dataset = open_dataset(tmp_path / "rows", Values, cache=tmp_path / "cache")
    assert exact(list(dataset[[7, 1, 0, 11, 5]].unstack()), [value_documents()[n % 6] for n in (7, 1, 0, 11, 5)])


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_layout_of_a_class_does_not_change(tmp_path: Path, kind: Any) -> None:
    write_dataset(documents(), tmp_path / "now", format=kind)
    [now] = open_dataset(tmp_path / "now", Golden, cache=tmp_path).shards
    for version in ("v1", "v2"):
        shards = open_dataset(FOLDER / version / kind, Golden, cache=tmp_path).shards
        assert {shard.layout for shard in shards} == {now.layout}
