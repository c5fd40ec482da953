"""Datasets of earlier versions of the format stay readable."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from quire.storage import open_dataset, write_dataset
from tests.codec.round_trips import exact
from tests.storage.golden import FOLDER, Golden, Values, document, documents, value_documents

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
def test_golden_versions_are_read(tmp_path: Path, kind: Any) -> None:
    shutil.copytree(FOLDER / "v2-versions" / kind, tmp_path / "rows")
    written, changed = documents(), document(3)
    changed.part = 0.5
    expected = {
        "written": written,
        "before": [written[1], written[2], written[5], changed, written[4]],
        "latest": [written[1], written[2], written[5], changed, written[4], written[0]],
    }
    for tag, rows in expected.items():
        dataset = open_dataset(tmp_path / "rows", Golden, version=tag, cache=tmp_path / "cache")
        assert exact(list(dataset), rows)
        assert exact(list(dataset[:].unstack()), rows)
    dataset = open_dataset(tmp_path / "rows", Golden, cache=tmp_path / "cache")
    kinds = ["write", "tag", "delete", "update", "upsert", "tag", "compact", "append", *["tag", "untag"] * 5]
    assert [version.kind for version in dataset.versions()] == kinds
    assert len(open_dataset(tmp_path / "rows", Golden, version=3, cache=tmp_path / "cache")) == 5
    assert [row.id for row in dataset.diff("before", "latest").added] == ["d0"]
    assert dataset.delete({"number": 0}) == 1
    assert exact(list(dataset), [row for row in expected["latest"] if row.number])


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_layout_of_a_class_does_not_change(tmp_path: Path, kind: Any) -> None:
    write_dataset(documents(), tmp_path / "now", format=kind)
    [now] = open_dataset(tmp_path / "now", Golden, cache=tmp_path).shards
    for version in ("v1", "v2"):
        shards = open_dataset(FOLDER / version / kind, Golden, cache=tmp_path).shards
        assert {shard.layout for shard in shards} == {now.layout}
