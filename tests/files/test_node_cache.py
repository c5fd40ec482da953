"""The node cache and the fetcher: blocks of remote files on the local disk."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path

import pytest

from quire.errors import StorageError, StorageNotFoundError
from quire.files import _node_cache
from quire.files._folder import LocalFolder
from quire.files._node_cache import BlockRange, Fetcher, LocalSource
from quire.files._throttling import report_throttling

pytestmark = pytest.mark.timeout(60)
SIZE = 1000


class CountingFolder(LocalFolder):
    """A local folder that counts the ranges that are read; `gate` stops reads until it is set."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.reads: list[tuple[str, int, int]] = []
        self.errors: list[Exception] = []
        self.on_read: Callable[[], None] = lambda: None
        self.gate = threading.Event()
        self.gate.set()
        self.active = self.most = 0
        self._lock = threading.Lock()

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        with self._lock:
            self.reads.append((name, start, stop))
            self.active += 1
            self.most = max(self.most, self.active)
        try:
            assert self.gate.wait(30)
            self.on_read()
            with self._lock:
                if self.errors:
                    raise self.errors.pop(0)
            return super().read_range(name, start, stop)
        finally:
            with self._lock:
                self.active -= 1


@pytest.fixture
def folder(tmp_path: Path) -> CountingFolder:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "file").write_bytes(bytes(range(250)) * (64 * SIZE // 250))
    return CountingFolder(tmp_path / "d")


def block(number: int, size: int = SIZE) -> BlockRange:
    key = blake2b(f"{number}".encode(), digest_size=20).hexdigest()
    return BlockRange(key, "file", number * SIZE, number * SIZE + size)


def content(source: LocalSource, folder: LocalFolder, number: int) -> bytes:
    with source.open(folder, block(number)) as file:
        return file.read()


def expected(number: int) -> bytes:
    return (bytes(range(250)) * (64 * SIZE // 250))[number * SIZE : (number + 1) * SIZE]


def wait_until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def files(source: LocalSource) -> set[str]:
    return {path.stem for path in source.cache.place.iterdir() if path.suffix == ".block"}


def test_block_is_downloaded_once_and_has_the_bytes_of_its_range(folder: CountingFolder, tmp_path: Path) -> None:
    source = LocalSource(tmp_path / "c", 10 * SIZE)
    for _ in range(2):
        assert [content(source, folder, number) for number in (3, 0)] == [expected(3), expected(0)]
    assert Counter(folder.reads) == {("file", 3000, 4000): 1, ("file", 0, 1000): 1}
    assert sorted(path.suffix for path in (tmp_path / "c").iterdir()) == [".block", ".block"]
    assert content(LocalSource(tmp_path / "c", 10 * SIZE), folder, 3) == expected(3)
    assert len(folder.reads) == 2, "another process finds the files"


def test_requested_blocks_are_downloaded_several_at_a_time(folder: CountingFolder, tmp_path: Path) -> None:
    source = LocalSource(tmp_path / "c", 64 * SIZE)
    folder.gate.clear()
    source.request(folder, [(block(number), number) for number in range(40)])
    wait_until(lambda: folder.active >= 8)
    folder.gate.set()
    wait_until(lambda: len(files(source)) == 40)
    assert folder.most >= 8
    assert len(folder.reads) == len(set(folder.reads)) == 40


def test_blocks_with_the_first_priority_are_downloaded_first(
    folder: CountingFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_node_cache, "FIRST_IN_FLIGHT", 1)
    source = LocalSource(tmp_path / "c", 64 * SIZE)
    folder.gate.clear()
    source.request(folder, [(block(50), 0)])
    wait_until(lambda: folder.active)
    source.request(folder, [(block(number), number) for number in (9, 2, 5)])
    waiting = threading.Thread(target=content, args=(source, folder, 7))
    waiting.start()
    wait_until(lambda: len(source.fetcher._jobs) == 5)
    folder.gate.set()
    waiting.join(30)
    wait_until(lambda: len(files(source)) == 5)
    assert [start // SIZE for _, start, _ in folder.reads] == [50, 7, 2, 5, 9]


def test_large_block_is_downloaded_in_parts(
    folder: CountingFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_node_cache, "_PART_BYTES", 300)
    source = LocalSource(tmp_path / "c", 10 * SIZE)
    assert content(source, folder, 1) == expected(1)
    assert sorted(folder.reads) == [
        ("file", 1000, 1300),
        ("file", 1300, 1600),
        ("file", 1600, 1900),
        ("file", 1900, 2000),
    ]


def test_cache_stays_within_its_limit_and_drops_released_blocks_first(folder: CountingFolder, tmp_path: Path) -> None:
    source = LocalSource(tmp_path / "c", 4 * SIZE)
    source.expect(folder, 64 * SIZE)
    source.request(folder, [(block(0), 0), (block(1), 0)])
    wait_until(lambda: len(files(source)) == 2)
    for number in range(2, 30):
        assert content(source, folder, number) == expected(number)
        assert source.fetcher._bytes <= 4 * SIZE
        assert len(files(source)) <= 4
        assert {block(0).key, block(1).key} <= files(source), "they were not released"
    source.release([block(0), block(1)])
    for number in range(30, 60):
        content(source, folder, number)
    assert not {block(0).key, block(1).key} & files(source)
    assert len(files(source)) <= 4


def test_pinned_blocks_survive_epochs_of_a_dataset_larger_than_the_cache(
    folder: CountingFolder, tmp_path: Path
) -> None:
    source = LocalSource(tmp_path / "c", 16 * SIZE)
    source.expect(folder, 64 * SIZE)
    reads = []
    for epoch in range(3):
        before = len(folder.reads)
        for number in range(64):
            source.request(folder, [(block(number), number)])
            assert content(source, folder, number) == expected(number)
            source.release([block(number)])
        reads.append(len(folder.reads) - before)
        assert epoch or reads == [64]
    assert max(reads[1:]) <= 64 - 6, "an LRU cache would have downloaded all 64 again"


def test_reader_that_waits_gets_a_block_although_requests_fill_the_cache(
    folder: CountingFolder, tmp_path: Path
) -> None:
    source = LocalSource(tmp_path / "c", 3 * SIZE)
    source.request(folder, [(block(number), number) for number in range(10)])
    wait_until(lambda: len(files(source)) == 3)
    for number in range(20):
        assert content(source, folder, number) == expected(number)
        assert len(files(source)) <= 3


def test_reader_gets_a_block_although_others_are_fetched_before_it(folder: CountingFolder, tmp_path: Path) -> None:
    source = LocalSource(tmp_path / "c", 3 * SIZE)
    source.request(folder, [(block(number), number) for number in range(3)])
    wait_until(lambda: len(files(source)) == 3)
    source.fetch(folder, [block(number) for number in range(10, 16)])
    assert content(source, folder, 20) == expected(20)
    wait_until(lambda: not source.fetcher._jobs)
    assert len(files(source)) <= 3


def test_block_larger_than_the_cache_is_an_error(folder: CountingFolder, tmp_path: Path) -> None:
    source = LocalSource(tmp_path / "c", SIZE - 1)
    with pytest.raises(StorageError, match=r"a block of 1,000 bytes of file does not fit into a cache of 999 bytes"):
        source.open(folder, block(0))
    assert not folder.reads


def test_failed_download_is_raised_where_the_block_is_needed_and_tried_again(
    folder: CountingFolder, tmp_path: Path
) -> None:
    source = LocalSource(tmp_path / "c", 10 * SIZE)
    folder.errors = [StorageNotFoundError("gone: there is no such file.")]
    with pytest.raises(StorageNotFoundError, match="gone"):
        content(source, folder, 0)
    assert not list((tmp_path / "c").iterdir()), "no unfinished file is left"
    assert content(source, folder, 0) == expected(0)


def test_truncated_and_removed_files_are_downloaded_again(folder: CountingFolder, tmp_path: Path) -> None:
    source = LocalSource(tmp_path / "c", 10 * SIZE)
    content(source, folder, 0)
    os.truncate(source.cache.path(block(0).key), 10)
    assert content(source, folder, 0) == expected(0)
    source.cache.remove(block(0).key)
    assert content(source, folder, 0) == expected(0)
    assert len(folder.reads) == 3
    for path in (tmp_path / "c").iterdir():
        path.unlink()
    (tmp_path / "c").rmdir()
    assert content(source, folder, 1) == expected(1)


def test_only_files_of_the_cache_are_removed(folder: CountingFolder, tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    others = ["notes.txt", "abc.block", f"{'0' * 40}.part", f"{'g' * 40}.block"]
    for name in others:
        (tmp_path / "c" / name).write_bytes(b"x" * 5000)
    killed, running = f"{'0' * 40}.999999999-0.part", f"{'1' * 40}.{os.getpid()}-0.part"
    for name in (killed, running):
        (tmp_path / "c" / name).touch()
    source = LocalSource(tmp_path / "c", 2 * SIZE)
    for number in range(10):
        content(source, folder, number)
    names = {path.name for path in (tmp_path / "c").iterdir()}
    assert {*others, running} <= names
    assert killed not in names


def test_two_fetchers_of_one_folder_stay_within_the_limit(folder: CountingFolder, tmp_path: Path) -> None:
    sources = [LocalSource(tmp_path / "c", 8 * SIZE) for _ in range(2)]
    for number in range(60):
        for source in sources:
            source.fetcher._next_scan = 0.0
            assert content(source, folder, number) == expected(number)
        assert len(files(sources[0])) <= 8
    assert len(folder.reads) == 60, "each finds what the other has downloaded"


def test_full_disk_frees_blocks_and_is_an_error_if_there_are_none(
    folder: CountingFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = LocalSource(tmp_path / "c", 64 * SIZE)
    room = 3

    def allocate(*_: int) -> None:
        if len(files(source)) >= room:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    for number in range(8):
        assert content(source, folder, number) == expected(number)
        assert len(files(source)) <= 3
    room = 0
    with pytest.raises(StorageError, match="No space left on device. Free space on this disk, or pass another folder"):
        content(source, folder, 9)


def test_throttled_requests_halve_the_downloads_at_a_time(folder: CountingFolder, tmp_path: Path) -> None:
    source = LocalSource(tmp_path / "c", 64 * SIZE)
    folder.on_read = report_throttling
    assert content(source, folder, 0) == expected(0)
    folder.on_read = lambda: None
    assert source.fetcher._in_flight.limit == 8
    assert source.fetcher._in_flight.pause() > 0
    assert content(source, folder, 1) == expected(1)


def test_clients_share_downloads_and_blocks_stay_until_the_last_one_has_passed(
    folder: CountingFolder, tmp_path: Path
) -> None:
    fetcher = Fetcher(tmp_path / "c", 4 * SIZE)
    fetcher.expect("d", 64 * SIZE)
    folder.gate.clear()
    for client in ("a", "b"):
        fetcher.request(client, folder, [(block(0), 0), (block(1), 1)])
    folder.gate.set()
    wait_until(lambda: len(fetcher._sizes) == 2)
    assert len(folder.reads) == 2
    fetcher.release("a", [block(0).key, block(1).key])
    assert not fetcher._free
    assert not fetcher._pinned
    fetcher.leave("b")
    assert {*fetcher._free, *fetcher._pinned} == {block(0).key, block(1).key}


def test_many_threads_get_every_block(folder: CountingFolder, tmp_path: Path) -> None:
    source = LocalSource(tmp_path / "c", 20 * SIZE)
    complete: list[Sequence[int]] = []

    def read(order: Sequence[int]) -> None:
        for number in order:
            assert content(source, folder, number) == expected(number)
        complete.append(order)

    threads = [threading.Thread(target=read, args=([*range(start, 64), *range(start)],)) for start in range(0, 64, 8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
        assert not thread.is_alive()
    assert len(complete) == len(threads)
