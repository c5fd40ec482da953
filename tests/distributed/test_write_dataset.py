"""Writing shards as datasets: each document once, and nothing of failed attempts."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from quire.distributed import DocumentShards, PartitionError
from quire.distributed._write import WriteShards
from quire.errors import OptionError, StorageError
from quire.storage import WriteOptions, open_dataset
from tests.distributed.sample_documents import Good, dearer, goods, rated
from tests.distributed.sample_stages import Everything, everything

pytestmark = [pytest.mark.needs("pyarrow", "ray", "pyspark", "ml_dtypes"), pytest.mark.filterwarnings("ignore")]
ROWS = 20


def shards_of(rows: int, engine: Any = "local") -> DocumentShards[Good]:
    return DocumentShards[Good].from_documents(goods(rows), num_partitions=3, engine=engine)


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.*"))


def test_write_dataset_writes_a_readable_dataset(engine: Any, tmp_path: Path) -> None:
    documents = [everything(number) for number in range(9)]
    DocumentShards[Everything].from_documents(documents, num_partitions=2, engine=engine).write_dataset(
        tmp_path / "all"
    )
    dataset = open_dataset(tmp_path / "all", Everything)
    assert list(dataset.read()) == documents
    dataset.verify()
    shards_of(ROWS, engine).map(dearer).write_dataset(tmp_path / "goods", format="arrow")
    assert open_dataset(tmp_path / "goods", Good).read().price.tolist() == list(range(1, ROWS + 1))


def test_write_dataset_appends_and_overwrites(engine: Any, tmp_path: Path) -> None:
    shards = shards_of(4, engine)
    shards.write_dataset(tmp_path)
    with pytest.raises(
        StorageError, match="there is a dataset already. Pass mode='append' to add to it, or 'overwrite'"
    ):
        shards.write_dataset(tmp_path)
    shards.map(dearer, 10).write_dataset(tmp_path, mode="append")
    assert open_dataset(tmp_path, Good).read().price.tolist() == [0, 1, 2, 3, 10, 11, 12, 13]
    shards.map(dearer, 20).write_dataset(tmp_path, mode="overwrite")
    assert open_dataset(tmp_path, Good).read().price.tolist() == [20, 21, 22, 23]
    assert len(files_in(tmp_path)) == len(open_dataset(tmp_path, Good).shards)


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_deleted_rows_are_not_read(engine: Any, tmp_path: Path, kind: Any) -> None:
    options = {"format": kind, "group_bytes": 500, "shard_bytes": 2000}
    shards_of(100, engine).map(dearer).write_dataset(tmp_path, **options)
    dataset = open_dataset(tmp_path, Good)
    assert sum(shard.blocks for shard in dataset.shards) > 5
    deleted = {1, 2, 3, 50, *range(60, 90), 100}
    assert dataset.delete({"price": {"$in": sorted(deleted)}}) == len(deleted)
    left = [price for price in range(1, 101) if price not in deleted]
    read = DocumentShards[Good].read_parquet(tmp_path, engine=engine)
    assert sorted(good.price for good in read.collect()) == left
    shards_of(4, engine).write_dataset(tmp_path, mode="append")
    assert len(open_dataset(tmp_path, Good)) == len(left) + 4
    assert [version.kind for version in open_dataset(tmp_path, Good).versions()] == ["write", "delete", "append"]


def test_failed_write_leaves_the_dataset_unchanged(engine: Any, tmp_path: Path) -> None:
    shards = shards_of(ROWS, engine)
    with pytest.raises(PartitionError, match="good 007"):
        shards.map(rated).write_dataset(tmp_path / "new")
    assert files_in(tmp_path / "new") == []
    shards.write_dataset(tmp_path / "old")
    before = files_in(tmp_path / "old")
    with pytest.raises(PartitionError, match="good 007"):
        shards.map(_refusing).write_dataset(tmp_path / "old", mode="overwrite")
    assert files_in(tmp_path / "old") == before
    assert open_dataset(tmp_path / "old", Good).read().id == goods(ROWS).id


def _refusing(document: Good) -> Good:
    if document.price == 7:
        raise ValueError("seven")
    return document


def test_files_of_lost_workers_are_removed(start_engine: Any, tmp_path: Path) -> None:
    mark = tmp_path / "mark"

    def deadly(document: Good) -> Good:
        """Kill the process once, in the second partition, after a part of it is written."""
        if document.price == 12 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return document

    shards = DocumentShards[Good].from_documents(goods(ROWS), num_partitions=2, engine=start_engine("processes"))
    shards.map_batch(lambda batch: batch, 1).map(deadly).write_dataset(tmp_path / "set", shard_bytes=1, group_bytes=1)
    assert mark.exists()
    dataset = open_dataset(tmp_path / "set", Good)
    assert dataset.read().id == goods(ROWS).id
    assert files_in(tmp_path / "set") == sorted(shard.name for shard in dataset.shards)


def test_late_attempts_do_not_count(tmp_path: Path) -> None:
    """A worker that was presumed dead finishes after another has done its work and all is published."""
    shards = shards_of(ROWS)
    shards.write_dataset(tmp_path)
    job = files_in(tmp_path)[0].partition("-")[0]
    stage = WriteShards(shards._data.layout, str(tmp_path), job, WriteOptions())
    [part, *_] = shards.native
    assert len(list(stage(0, part.batches()))) == 1
    assert len(files_in(tmp_path)) == 4
    assert open_dataset(tmp_path, Good).read().id == goods(ROWS).id
    shards.write_dataset(tmp_path, mode="append")
    assert len(open_dataset(tmp_path, Good)) == 2 * ROWS
    shards.write_dataset(tmp_path, mode="overwrite")
    assert len(files_in(tmp_path)) == 3


def test_written_files_follow_the_order_of_partitions(tmp_path: Path) -> None:
    shards_of(ROWS).write_dataset(tmp_path, shard_bytes=1, group_bytes=300)
    dataset = open_dataset(tmp_path, Good)
    assert len(dataset.shards) > 3
    assert [shard.name for shard in dataset.shards] == files_in(tmp_path)
    assert DocumentShards[Good].read_parquet(str(tmp_path / "*.parquet")).collect().identical(goods(ROWS))


def test_write_dataset_uses_the_requested_tensor_storage(tmp_path: Path) -> None:
    shards_of(4).write_dataset(tmp_path, tensor_storage="list", compression={"photo": "zstd"})
    assert open_dataset(tmp_path, Good).read().unstack().identical(goods(4))


def test_write_dataset_rejects_wrong_requests_at_once(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"shuffle\(\) may have other rows"):
        shards_of(4).shuffle().write_dataset(tmp_path, mode="resume")
    with pytest.raises(OptionError, match="some of the fields only"):
        shards_of(4).select("price").write_dataset(tmp_path)
    (tmp_path / "other.parquet").write_bytes(b"x")
    with pytest.raises(StorageError, match=r"other\.parquet was not written by quire"):
        shards_of(4).write_dataset(tmp_path)
