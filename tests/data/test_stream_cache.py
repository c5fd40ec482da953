"""Parquet datasets, read through a cache that may be smaller than they are."""

from __future__ import annotations

import multiprocessing
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import BaseDocument
from quire.data import StreamingDataset
from quire.errors import OptionError
from quire.storage import ReadOptions, Split, write_dataset
from quire.storage._shard_reader import ShardReader
from quire.typing import NdArray, float32
from tests.data.sample_streams import Sample, collect_workers, flatten, numbers, stream_samples, write_samples

pytestmark = pytest.mark.needs("pyarrow", "fsspec", "xxhash")
SHARDS, ROWS = 20, 400


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_samples(tmp_path_factory.mktemp("stream") / "d", ROWS, format="parquet", rows_in_shard=ROWS // SHARDS)


@pytest.fixture
def transcodes(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each shard is written anew, in this process."""
    counts: Counter[str] = Counter()
    transcode = ShardReader._write_copy

    def counting(self: ShardReader, shard: Any, target: Path) -> None:
        counts[shard.name] += 1
        transcode(self, shard, target)

    monkeypatch.setattr(ShardReader, "_write_copy", counting)
    return counts


def size_of_one(folder: Path, cache: Path) -> int:
    """The bytes of a shard in the cache."""
    dataset = stream_samples(folder, storage=ReadOptions(cache=cache))
    dataset[0]
    return dataset.stored._row_reader.shard_reader.cache.total_bytes()


def test_large_cache_decodes_each_shard_once(folder: Path, tmp_path: Path, transcodes: Counter[str]) -> None:
    for shuffle in ("block", "global", False):
        dataset = stream_samples(folder, shuffle=shuffle, storage=ReadOptions(cache=tmp_path / "cache"))
        assert sorted(flatten(numbers(dataset))) == list(range(ROWS))
    assert set(transcodes.values()) == {1}
    assert len(transcodes) == SHARDS


@pytest.mark.parametrize("room", [2, 5, 9])
def test_small_cache_decodes_each_shard_about_once_per_epoch(
    folder: Path, tmp_path: Path, transcodes: Counter[str], room: int
) -> None:
    one = size_of_one(folder, tmp_path / "one")
    transcodes.clear()
    options = ReadOptions(cache=tmp_path / "cache", cache_bytes=one * room + one // 2)
    dataset = stream_samples(folder, storage=options)
    for epoch in range(3):
        seen = []
        for batch in dataset:
            seen += numbers([batch])
            assert dataset.stored._row_reader.shard_reader.cache.total_bytes() <= options.cache_bytes  # type: ignore[operator]
        assert sorted(flatten(seen)) == list(range(ROWS))
        assert sum(transcodes.values()) <= SHARDS * (epoch + 1) * 1.1
    assert len(set(seen[0])) > 1 or room == 2


def test_rows_of_a_window_are_mixed(folder: Path, tmp_path: Path) -> None:
    one = size_of_one(folder, tmp_path / "one")
    dataset = stream_samples(folder, 20, storage=ReadOptions(cache=tmp_path / "cache", cache_bytes=one * 10 + 1))
    assert dataset.order.block == 20
    assert dataset.order.window in (4, 5)
    first = next(iter(dataset)).number // 20
    assert len(np.unique(first)) > 3, "a batch is of most shards of the window"


class Large(BaseDocument):
    vector: NdArray[float32, 2000]


def test_files_removed_from_the_cache_are_closed(tmp_path: Path) -> None:
    for _ in range(SHARDS):
        rows = [Large(vector=np.zeros(2000, np.float32)) for _ in range(8)]
        write_dataset(rows, tmp_path / "d", mode="append", format="parquet")
    options = ReadOptions(cache=tmp_path / "cache", cache_bytes=8 * 8100 * 4)
    dataset = StreamingDataset[Large](tmp_path / "d", 4, storage=options)
    most = 0
    for _ in range(3):
        for _ in dataset:
            maps = Path(f"/proc/{os.getpid()}/maps").read_text()
            removed = re.findall(rf"{tmp_path}/cache/\S+ \(deleted\)", maps)
            most = max(most, len(removed))
    assert 0 < most < SHARDS // 2


def test_global_shuffle_needs_room_for_all_shards(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"the cache holds 1,000 bytes of about [\d,]+. Use shuffle='block'"):
        stream_samples(folder, shuffle="global", storage=ReadOptions(cache=tmp_path, cache_bytes=1000))


def test_compressed_shards_count_with_their_decompressed_size(tmp_path: Path) -> None:
    same = [Sample(number=i, vector=[0, 0, 0, 0]) for i in range(2000)]
    write_dataset(same, tmp_path / "d", compression={"vector": "zstd"})
    size = sum(file.stat().st_size for file in (tmp_path / "d").glob("*.parquet"))
    options = ReadOptions(cache=tmp_path / "cache", cache_bytes=size + 1000)
    with pytest.raises(OptionError, match="Use shuffle='block'"):
        stream_samples(tmp_path / "d", shuffle="global", storage=options)


def test_selected_rows_come_once_through_a_small_cache(folder: Path, tmp_path: Path) -> None:
    one = size_of_one(folder, tmp_path / "one")
    options = ReadOptions(cache=tmp_path / "cache", cache_bytes=one * 6)
    seen = []
    for index in range(2):
        dataset = stream_samples(folder, where=Split("id", (0.7, 0.3), index), storage=options)
        seen += flatten(numbers(collect_workers(dataset, 2)))
    assert sorted(seen) == list(range(ROWS))


def _read(folder: Path, options: ReadOptions, rank: int, results: Any) -> None:
    dataset = stream_samples(folder, rank=rank, world_size=3, storage=options)
    results.put([flatten(numbers(dataset)) for _ in range(2)])


@pytest.mark.parametrize("room", [6, 100])
def test_many_processes_share_one_cache(folder: Path, tmp_path: Path, room: int) -> None:
    one = size_of_one(folder, tmp_path / "one")
    options = ReadOptions(cache=tmp_path / "cache", cache_bytes=one * room)
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    processes = [context.Process(target=_read, args=(folder, options, rank, results)) for rank in range(3)]
    for process in processes:
        process.start()
    result = [results.get(timeout=120) for _ in processes]
    for process in processes:
        process.join()
    for epoch in range(2):
        assert sorted(flatten([rank[epoch] for rank in result])) == list(range(ROWS))
