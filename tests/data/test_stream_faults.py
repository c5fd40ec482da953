"""Shards that are missing, cut off or altered, and workers that die."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from quire import BaseDocument
from quire.data import StreamingDataset
from quire.errors import FunctionError, OptionError, ShardError
from tests.data.sample_streams import (
    Sample,
    collect_workers,
    end_at_three,
    fail_on_three,
    flatten,
    numbers,
    stream_samples,
    write_samples,
)

pytestmark = [
    pytest.mark.needs("torch", "pyarrow", "fsspec", "xxhash"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]
ROWS, BAD = 100, range(30, 40)


def removed(shard: Path) -> None:
    shard.unlink()


def cut_off(shard: Path) -> None:
    os.truncate(shard, shard.stat().st_size // 2)


def emptied(shard: Path) -> None:
    shard.write_bytes(b"")


def overwritten(shard: Path) -> None:
    shard.write_bytes(bytes(shard.stat().st_size))


def with_wrong_offsets(shard: Path) -> None:
    """The texts of the rows lie anywhere, and all else is as it was."""
    content = shard.read_bytes()
    offsets = b"".join(i.to_bytes(4, "little") for i in range(0, 44, 4))  # those of id30, id31, ...
    assert content.count(offsets) == 1
    shard.write_bytes(content.replace(offsets, b"\x7f" * len(offsets)))


DAMAGES = [removed, cut_off, emptied, overwritten, with_wrong_offsets]


def damaged(folder: Path, damage: Callable[[Path], None], **options: Any) -> Path:
    """A dataset whose fourth shard is damaged; its name."""
    write_samples(folder, ROWS, **options)
    shard = sorted(folder.glob("*.*"))[3]
    damage(shard)
    return shard


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_shard_raises_an_error_that_names_it(tmp_path: Path, damage: Any) -> None:
    shard = damaged(tmp_path / "d", damage)
    for way in (
        lambda ds: ds,
        lambda ds: ds.loader(threads=2),
        lambda ds: DataLoader(ds, batch_size=None, num_workers=1),
    ):
        with pytest.raises(ShardError, match=shard.name):
            list(way(stream_samples(tmp_path / "d")))


@pytest.mark.parametrize("format", ["arrow", "parquet"])
@pytest.mark.parametrize("damage", [removed, cut_off, overwritten])
def test_rows_of_a_damaged_shard_are_skipped(tmp_path: Path, damage: Any, format: str) -> None:  # noqa: A002
    shard = damaged(tmp_path / "d", damage, format=format)
    storage = {"storage": _cache(tmp_path)}
    steps = set()
    seen = []
    for rank in range(3):
        dataset = stream_samples(tmp_path / "d", on_error="skip", rank=rank, world_size=3, **storage)
        for _ in range(2):
            batches = list(dataset)
            steps.add(len(batches))
        seen += flatten(numbers(batches))
        assert len(dataset.errors) == 1
        assert shard.name in dataset.errors[0]
    assert steps == {5}
    assert sorted(seen) == sorted(set(range(ROWS)) - set(BAD))


@pytest.mark.parametrize("damage", DAMAGES)
def test_rows_of_a_damaged_shard_are_replaced(tmp_path: Path, damage: Any) -> None:
    shard = damaged(tmp_path / "d", damage)
    seen, sizes = [], []
    for rank in range(3):
        dataset = stream_samples(tmp_path / "d", on_error="replace", rank=rank, world_size=3, last="drop")
        batches = list(dataset)
        sizes.append([len(batch) for batch in batches])
        seen += flatten(numbers(batches))
        assert [shard.name in error for error in dataset.errors] == [True]
    assert sizes == [[8] * 4] * 3
    assert not set(seen) & set(BAD)
    assert max(map(seen.count, seen)) == 2, "they are replaced by different ones"


def test_padding_stays_masked_when_rows_are_skipped(tmp_path: Path) -> None:
    damaged(tmp_path / "d", removed)
    for on_error in ("skip", "replace"):
        dataset = stream_samples(tmp_path / "d", 64, on_error=on_error, last="pad")
        batches = list(dataset)
        real = sum(int(batch.mask().sum()) for batch in batches)
        assert real == (90 if on_error == "skip" else 100)


def test_errors_of_workers_are_listed(tmp_path: Path) -> None:
    shard = damaged(tmp_path / "d", removed)
    dataset = stream_samples(tmp_path / "d", on_error="skip")
    loader = DataLoader(dataset, batch_size=None, num_workers=2)
    assert sorted(flatten(numbers(loader))) == sorted(set(range(ROWS)) - set(BAD))
    assert [shard.name in error for error in dataset.errors] == [True]


def test_shard_deleted_during_an_epoch_follows_on_error(tmp_path: Path) -> None:
    folder = write_samples(tmp_path / "d", ROWS)
    shards = sorted(folder.glob("*.arrow"))
    raising, skipping = (
        stream_samples(folder, 10, shuffle=False),
        stream_samples(folder, 10, shuffle=False, on_error="skip"),
    )
    raising._group_size = skipping._group_size = 1  # batch by batch, so that shards are opened late
    first, second = iter(raising), iter(skipping)
    assert numbers([next(first)]) == numbers([next(second)]) == [[*range(10)]]
    shards[0].unlink()  # open by now, and there for who has it open
    shards[5].unlink()
    assert flatten(numbers(second)) == [*range(10, 50), *range(60, 100)]
    with pytest.raises(ShardError, match=shards[5].name):
        list(first)


@pytest.mark.parametrize("on_error", ["skip", "replace"])
def test_dataset_without_readable_shards_raises_under_every_policy(tmp_path: Path, on_error: str) -> None:
    folder = write_samples(tmp_path / "d", 20)
    dataset = stream_samples(folder, on_error=on_error)
    for shard in folder.glob("*.arrow"):
        shard.unlink()
    with pytest.raises(ShardError, match=rf"no shard of the dataset can be read, so on_error='{on_error}'.*\.arrow"):
        list(dataset)
    assert len(dataset.errors) == 2


class Other(BaseDocument):
    """A class that the stored data does not fit."""

    surname: str


@pytest.mark.parametrize("on_error", ["skip", "replace"])
def test_class_that_does_not_fit_the_data_raises(tmp_path: Path, on_error: Any) -> None:
    dataset = StreamingDataset[Other](write_samples(tmp_path / "d", 20), 8, on_error=on_error)
    with pytest.raises(ShardError, match=r"first error: .*Other\.surname: the data does not have it"):
        list(dataset)


@pytest.mark.parametrize("output", ["Sample", dict, 3])
def test_output_must_be_a_document_class(tmp_path: Path, output: Any) -> None:
    with pytest.raises(OptionError, match="output takes a document class, got"):
        stream_samples(write_samples(tmp_path / "d", 10), output=output)


def test_function_errors_are_not_skipped(tmp_path: Path) -> None:
    dataset = stream_samples(
        write_samples(tmp_path / "d", 10), preprocessing={"number": fail_on_three}, on_error="skip"
    )
    with pytest.raises(FunctionError, match=r"'number' by fail_on_three failed on document 3 \(id id3\)"):
        list(dataset)


def test_on_error_rejects_unknown_values(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="use 'raise', 'skip' or 'replace'"):
        stream_samples(write_samples(tmp_path / "d", 10), on_error="ignore")


# --- workers that die


def test_killed_worker_raises(tmp_path: Path) -> None:
    dataset = stream_samples(write_samples(tmp_path / "d", 100), preprocessing={"number": end_at_three}, shuffle=False)
    for options in ({}, {"persistent_workers": True}):
        loader = DataLoader(dataset, batch_size=None, num_workers=2, **options)
        with pytest.raises(RuntimeError, match="exited unexpectedly|killed by signal"):
            list(loader)


def test_pass_after_a_killed_worker_is_complete(tmp_path: Path) -> None:
    dataset = stream_samples(write_samples(tmp_path / "d", 100), epochs=2)
    iterator: Any = iter(DataLoader(dataset, batch_size=None, num_workers=2))
    next(iterator)
    os.kill(iterator._workers[1].pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="exited unexpectedly|killed by signal"):
        list(iterator)
    assert sorted(flatten(numbers(DataLoader(dataset, batch_size=None, num_workers=2)))) == sorted([*range(100)] * 2)


def test_workers_skip_the_same_rows(tmp_path: Path) -> None:
    damaged(tmp_path / "d", removed)
    dataset = stream_samples(tmp_path / "d", on_error="skip")
    expected = numbers(dataset)
    dataset.set_epoch(0)
    assert numbers(collect_workers(dataset, 3)) == expected
    assert dataset.document_type is Sample


def _cache(folder: Path) -> Any:
    from quire.storage import ReadOptions

    return ReadOptions(cache=folder / "cache")
