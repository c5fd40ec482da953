"""Remote datasets: in a store in memory, and on a read-only server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from quire.errors import ShardError, StorageError, StorageNotFoundError
from quire.files import RemoteOptions
from quire.storage import ReadOptions, open_dataset, write_dataset
from tests.files.faulty_store import faulty_store
from tests.files.http_server import Site, serve_files
from tests.storage.sample_documents import Photo, photos

pytestmark = pytest.mark.needs("fsspec", "pyarrow")

_QUICK = RemoteOptions(retries=1, deadline=5.0, timeout=1.0)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def store() -> Iterator[Any]:
    filesystem = fsspec.filesystem("memory")
    filesystem.store.clear()
    yield filesystem
    filesystem.store.clear()


def _numbers(url: str, **more: Any) -> list[int]:
    return [int(number) for number in open_dataset(url, Photo, **more).read().number]


# --- a store


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_remote_dataset_is_written_and_read(kind: Any) -> None:
    write_dataset(photos(30), "memory://shelf", format=kind, group_bytes=2000, shard_bytes=4000)
    dataset = open_dataset("memory://shelf")
    assert type(dataset).document_type is Photo
    assert [int(number) for number in dataset[[29, 0, 7]].number] == [29, 0, 7]
    assert not dataset._row_reader.is_mapped
    assert _numbers("memory://shelf") == list(range(30))
    dataset.verify()
    assert len(open_dataset("memory://shelf", Photo, where={"number": {"$lt": 5}})) == 5
    assert [len(batch) for batch in dataset.iter_batches(20)] == [20, 10]


def test_remote_dataset_is_appended_to_and_replaced(store: Any) -> None:
    write_dataset(photos(3), "memory://shelf")
    write_dataset(photos(3, 3), "memory://shelf", mode="append")
    write_dataset(photos(9), "memory://shelf", mode="resume")
    assert _numbers("memory://shelf") == list(range(9))
    write_dataset(photos(2, 50), "memory://shelf", mode="overwrite")
    assert _numbers("memory://shelf") == [50, 51]
    assert len([name for name in store.store if name.endswith(".parquet")]) == 1


def test_remote_shards_are_fetched_once(store: Any) -> None:
    write_dataset(photos(10), "memory://shelf")
    assert open_dataset("memory://shelf", Photo)[3].number == 3
    [name] = [name for name in store.store if name.endswith(".parquet")]
    del store.store[name]
    assert open_dataset("memory://shelf", Photo)[4].number == 4
    with pytest.raises(ShardError, match=r"shelf/.*parquet: the shard is missing"):
        open_dataset("memory://shelf", Photo, columns=["number"]).read()


def test_remote_plain_files_are_a_dataset(store: Any) -> None:
    for number in range(3):
        with store.open(f"/plain/part-{number}.parquet", "wb") as file:
            pq.write_table(pa.table({"number": [number]}), file)
    assert open_dataset("memory://plain")[:].number.tolist() == [0, 1, 2]
    assert open_dataset("memory://plain/part-1.parquet")[:].number.tolist() == [1]


@pytest.mark.usefixtures("store")
def test_remote_folder_without_a_dataset_is_an_error() -> None:
    with pytest.raises(StorageNotFoundError, match="no dataset here"):
        open_dataset("memory://nothing")


def test_failing_store_is_an_error_that_names_the_shard() -> None:
    with faulty_store() as faulty:
        write_dataset(photos(10), "faulty://shelf")
        options = ReadOptions(remote=_QUICK)
        dataset = open_dataset("faulty://shelf", Photo, options=options)
        faulty.plan["cat_file"] = [OSError("reset")]
        assert dataset[0].number == 0
        again = open_dataset("faulty://shelf", Photo, columns=["number"], options=options)
        faulty.plan["cat_file"] = [OSError("reset")] * 9
        with pytest.raises(ShardError, match=r"faulty://shelf/\w+-\w+-00000\.parquet.*tried 2 times.*reset"):
            again[0]


def test_store_that_rejects_writes_is_an_error_and_leaves_no_dataset() -> None:
    with faulty_store() as faulty:
        faulty.plan["put_file"] = [PermissionError("no")] * 9
        with pytest.raises(StorageError, match="faulty://shelf"):
            write_dataset(photos(10), "faulty://shelf", remote=_QUICK)
        faulty.plan.clear()
        with pytest.raises(StorageNotFoundError):
            open_dataset("faulty://shelf", Photo)


# --- a server


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    write_dataset(photos(12), tmp_path / "d", group_bytes=1500, shard_bytes=1500)
    files = {str(file.relative_to(tmp_path / "d")): file.read_bytes() for file in (tmp_path / "d").rglob("*.*")}
    with serve_files(files) as running:
        yield running


@pytest.mark.needs("aiohttp")
def test_dataset_on_a_server_without_listing_is_read(site: Site) -> None:
    dataset = open_dataset(site.url, Photo, remote=_QUICK)
    assert len(dataset.shards) > 1
    assert [int(number) for number in dataset.read().number] == list(range(12))
    assert dataset[11].number == 11
    assert type(open_dataset(site.url, remote=_QUICK)).document_type is Photo
    dataset.verify()
    with pytest.raises(StorageError, match="nothing is written to an http address"):
        write_dataset(photos(1), site.url, mode="append", remote=_QUICK)


@pytest.mark.needs("aiohttp")
def test_slow_or_failing_server_is_an_error_that_names_the_shard(site: Site) -> None:
    dataset = open_dataset(site.url, Photo, remote=RemoteOptions(retries=1, deadline=2.0, timeout=0.3))
    name = dataset.shards[0].name
    site.failures = 99
    with pytest.raises(ShardError, match=name):
        dataset[0]
    site.failures, site.hangs = 0, True
    with pytest.raises(ShardError, match=name):
        dataset[0]
    site.hangs = False
    site.released.set()
    assert dataset[0].number == 0


@pytest.mark.needs("aiohttp")
def test_error_about_a_missing_remote_file_names_it(site: Site) -> None:
    dataset = open_dataset(site.url, Photo, remote=_QUICK)
    name = dataset.shards[1].name
    del site.files[f"/data/{name}"]
    with pytest.raises(ShardError, match=f"{name}: the shard is missing"):
        dataset[int(dataset._row_reader.starts[1])]
    with pytest.raises(ShardError, match=f"1 of {len(dataset.shards)} shards"):
        dataset.verify()
