"""Streams of datasets with deleted rows, and of versions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import BaseDocument
from quire.data import StreamingDataset
from quire.errors import OptionError, StorageNotFoundError
from quire.storage import open_dataset, write_dataset
from tests.files.s3_server import run_s3_server

pytestmark = pytest.mark.needs("pyarrow", "xxhash", "fsspec", "obstore")
ROWS = 300
GONE = sorted({*range(0, 300, 7), *range(100, 160), 299})
LEFT = [n for n in range(ROWS) if n not in GONE]


class Row(BaseDocument):
    id: str
    number: int
    tokens: list[int]


def rows() -> list[Row]:
    return [Row(id=f"r{n}", number=n, tokens=[n] * (n % 4 + 1)) for n in range(ROWS)]


@contextmanager
def stored(kind: str, tmp_path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the address of a dataset with deleted rows, and the options to open it with."""
    options: dict[str, Any] = {"group_bytes": 900, "shard_bytes": 4000}
    if kind != "s3":
        yield str(tmp_path / "data"), {}
        return
    with run_s3_server() as server:
        remote = {"remote": server.options(), "cache": tmp_path / "cache"}
        write_dataset(rows(), "s3://bucket/data", Row, format="arrow", remote=server.options(), **options)
        yield "s3://bucket/data", remote


@pytest.fixture(params=["arrow", "parquet"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "cache"))
    write_dataset(rows(), tmp_path / "data", format=request.param, group_bytes=900, shard_bytes=4000)
    dataset = open_dataset(tmp_path / "data", Row)
    dataset.tag("train-1")
    assert dataset.delete({"number": {"$in": GONE}}) == len(GONE)
    return tmp_path / "data"


def stream(folder: Any, **options: Any) -> StreamingDataset[Row]:
    return StreamingDataset[Row](folder, options.pop("batch_size", 8), framework="numpy", **options)


def numbers(batches: Any) -> list[int]:
    return [int(number) for batch in batches for number in batch.number]


@pytest.mark.parametrize("shuffle", ["block", "interleaved", "global", False])
@pytest.mark.parametrize("world_size", [1, 3])
def test_every_live_row_comes_once_on_any_number_of_ranks(folder: Path, shuffle: Any, world_size: int) -> None:
    seen = [
        number
        for rank in range(world_size)
        for number in numbers(stream(folder, shuffle=shuffle, rank=rank, world_size=world_size, memory_bytes=2000))
    ]
    assert sorted(seen) == LEFT
    assert shuffle is not False or world_size > 1 or seen == LEFT


@pytest.mark.parametrize("shuffle", ["block", "interleaved", "global", False])
def test_stream_with_deleted_rows_resumes_at_the_next_row(folder: Path, shuffle: Any) -> None:
    whole = stream(folder, shuffle=shuffle)
    batches = list(whole)
    for taken in (1, 7, len(batches) - 1):
        first, resumed = stream(folder, shuffle=shuffle), stream(folder, shuffle=shuffle)
        iterator = iter(first)
        seen = numbers(next(iterator) for _ in range(taken))
        resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert seen + numbers(resumed) == numbers(batches)


def test_packed_blocks_have_the_tokens_of_live_rows(folder: Path) -> None:
    expected = sorted(n for n in LEFT for _ in range(n % 4 + 1))
    for split in (True, False):
        packed = stream(folder, last="keep").pack("tokens", 16, split=split, pad_value=-1)
        tokens = np.concatenate([np.asarray(batch.tokens).reshape(-1) for batch in packed])
        assert sorted(tokens[tokens >= 0].tolist()) == expected


def test_batches_of_similar_lengths_have_live_rows(folder: Path) -> None:
    assert sorted(numbers(stream(folder, bucket_by="tokens"))) == LEFT


def test_filter_selects_live_rows(folder: Path) -> None:
    assert sorted(numbers(stream(folder, where={"number": {"$lt": 120}}))) == [n for n in LEFT if n < 120]


def test_stream_reads_the_version_of_a_tag(folder: Path) -> None:
    for version in ("train-1", 1, open_dataset(folder, Row).versions()[0].time):
        assert sorted(numbers(stream(folder, version=version))) == list(range(ROWS))
    assert sorted(numbers(stream(open_dataset(folder, Row, version="train-1")))) == list(range(ROWS))
    assert StreamingDataset(str(folder), 8, version="train-1", framework="numpy").num_rows == ROWS
    with pytest.raises(StorageNotFoundError, match="no tag 'train-2'"):
        stream(folder, version="train-2")
    with pytest.raises(OptionError, match="pass columns, where, verify and version to open_dataset"):
        stream(open_dataset(folder, Row), version=1)


@pytest.mark.parametrize("pack", [False, True])
def test_state_of_another_version_is_refused(folder: Path, pack: bool) -> None:
    def streams(**options: Any) -> Any:
        dataset = stream(folder, **options)
        return dataset.pack("tokens", 16) if pack else dataset

    pinned = streams(version="train-1")
    next(iter(pinned))
    state = pinned.state_dict()
    assert state["dataset_version"] == 1
    with pytest.raises(OptionError, match=r"It is of version 1 of the dataset, and the stream reads version 3: open"):
        streams().load_state_dict(state)
    streams(version=1).load_state_dict(state)
    open_dataset(folder, Row).tag("other")  # a version with the same rows
    before = streams(version=3).state_dict()
    streams().load_state_dict(before)


def test_stream_keeps_its_rows_while_the_dataset_is_changed(folder: Path) -> None:
    dataset = open_dataset(folder, Row)
    reading = stream(dataset, shuffle=False)
    iterator = iter(reading)
    first = numbers([next(iterator)])
    dataset.delete({"number": {"$lt": 200}})
    assert first + numbers(iterator) == LEFT
    assert reading.num_rows == len(LEFT)
    assert len(dataset) == sum(n >= 200 for n in LEFT)


@pytest.mark.parametrize("shuffle", ["block", "interleaved"])
def test_stream_from_an_object_store_has_live_rows(tmp_path: Path, shuffle: Any) -> None:
    with stored("s3", tmp_path) as (url, options):
        open_dataset(url, Row, **options).delete({"number": {"$in": GONE}})
        opened = open_dataset(url, Row, **options)
        seen = numbers(stream(opened, shuffle=shuffle))
        assert sorted(seen) == LEFT
        first = stream(opened, shuffle=shuffle)
        start = numbers([next(iter(first))])
        second = stream(opened, shuffle=shuffle)
        second.load_state_dict(first.state_dict())
        assert start + numbers(second) == seen
