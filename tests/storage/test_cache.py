"""The cache of files: each is created once, within a size limit, even if processes are killed."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import OptionError, StorageError
from quire.storage._cache import ShardCache, cache_key, default_folder

pytestmark = pytest.mark.needs("pyarrow")  # which the package imports

METHODS = ["fork", "spawn"]
KEYS = [cache_key("shard", number) for number in range(6)]
A, B, C, D = KEYS[:4]


def sized(size: int) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(b"x" * size) and None


def never(path: Path) -> None:
    raise AssertionError(f"{path} is made again")


def names(cache: ShardCache) -> set[str]:
    return {path.name for path in cache.folder.iterdir()}


def log(path: Path, word: str) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(handle, f"{word}\n".encode())
    os.close(handle)


# --- keys, places, limits


@given(st.lists(st.text() | st.integers()), st.lists(st.text() | st.integers()))
def test_cache_keys_differ_when_their_parts_differ(first: list[str | int], second: list[str | int]) -> None:
    assert len(cache_key(*first)) == 40
    assert (cache_key(*first) == cache_key(*second)) == (first == second)


def test_cache_keys_are_the_same_in_every_process_and_release() -> None:
    assert cache_key("s3://bucket/a.parquet", 7) == "ab65219f22cbe9a24d496c92aaaaf1a610589fde"
    assert len({cache_key("a", "b"), cache_key("ab"), cache_key("", "ab"), cache_key(1), cache_key("1")}) == 5


@pytest.mark.parametrize("key", ["", "abc", "../../etc/passwd", "A" * 40, "g" * 40, "a" * 129, f"{A}\n"])
def test_keys_must_be_hex_digits(tmp_path: Path, key: str) -> None:
    cache = ShardCache(tmp_path, 100)
    with pytest.raises(OptionError, match=r"hex digits.* cache_key"):
        cache.get(key, never)
    with pytest.raises(OptionError):
        cache.open(key, never)


def test_default_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("QUIRE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_folder() == tmp_path / "home/.cache/quire/shards"
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    assert default_folder() == tmp_path / "home/.cache/quire/shards"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_folder() == tmp_path / "xdg/quire/shards"
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "mine"))
    cache = ShardCache()
    assert cache.folder == tmp_path / "mine/shards"
    assert 0 < cache.max_bytes <= 100 * 10**9
    assert cache.get(A, sized(3)).read_bytes() == b"xxx"


def test_cache_folder_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"file/cache: the folder of the cache cannot be created .* QUIRE_CACHE"):
        ShardCache(tmp_path / "file" / "cache", 100)


def test_holds_compares_with_max_bytes(tmp_path: Path) -> None:
    cache = ShardCache(tmp_path, 100)
    assert [cache.holds(size) for size in (0, 100, 101)] == [True, True, False]
    with pytest.raises(OptionError, match="max_bytes"):
        ShardCache(tmp_path, 0)


def test_pickled_cache_is_the_same_cache(tmp_path: Path) -> None:
    cache = ShardCache(tmp_path, 100)
    path = cache.get(A, sized(3))
    again = pickle.loads(pickle.dumps(cache))
    assert again == cache
    assert again.get(A, never) == path


# --- making


def test_file_is_created_once_and_leaves_nothing_else(tmp_path: Path) -> None:
    cache = ShardCache(tmp_path, 100)
    path = cache.get(A, sized(5))
    assert path == tmp_path / A
    assert cache.get(A, never) == path
    with cache.open(A, never) as file:
        assert file.read() == b"xxxxx"
    assert names(cache) == {A}


def test_failing_make_function_leaves_nothing(tmp_path: Path) -> None:
    cache = ShardCache(tmp_path, 100)

    def fail(path: Path) -> None:
        path.write_bytes(b"half")
        path.with_name(f".{path.name}.1234.part").write_bytes(b"of a copy")  # as open_target names it
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        cache.get(A, fail)
    assert names(cache) == set()
    with pytest.raises(StorageError, match="returned without creating it"):
        cache.get(A, lambda _: None)
    assert cache.get(A, sized(2)).read_bytes() == b"xx"


def test_error_about_a_file_larger_than_the_cache_names_both_sizes(tmp_path: Path) -> None:
    cache = ShardCache(tmp_path, 1000)
    cache.get(A, sized(900))
    with pytest.raises(StorageError, match=r"a file of 1,001 bytes .* a cache of 1,000 bytes. Pass a larger max_bytes"):
        cache.get(B, sized(1001))
    assert names(cache) == {A}


def test_make_function_may_use_the_cache(tmp_path: Path) -> None:
    cache = ShardCache(tmp_path, 100)
    path = cache.get(A, lambda path: path.write_bytes(cache.get(B, sized(3)).read_bytes() * 2) and None)
    assert path.read_bytes() == b"xxxxxx"
    assert names(cache) == {A, B}


def test_removed_cache_folder_is_created_again(tmp_path: Path) -> None:
    cache = ShardCache(tmp_path / "cache", 100)
    cache.get(A, sized(3)).unlink()
    cache.folder.rmdir()
    assert cache.total_bytes() == 0
    assert cache.get(A, sized(4)).read_bytes() == b"xxxx"
    cache.clear()


def test_threads_create_a_file_once(tmp_path: Path) -> None:
    cache = ShardCache(tmp_path, 10_000)
    paths: list[Path] = []
    start = threading.Barrier(8)

    def make(path: Path) -> None:
        paths.append(path)
        path.write_bytes(b"y" * 100)

    def ask(_: int) -> list[int]:
        start.wait()
        return [len(cache.get(key, make).read_bytes()) for key in KEYS]

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(8))) == [[100] * 6] * 8
    assert len(paths) == 6
    assert names(cache) == set(KEYS)


def _race(cache: ShardCache, start: Any, answers: Any) -> None:
    def make(path: Path) -> None:
        log(cache.folder.parent / "made", path.name.partition(".")[0])
        path.write_bytes(path.name.encode() * 1000)

    start.wait()
    answers.put([cache.get(key, make).read_bytes()[:40].decode() for key in KEYS])


@pytest.mark.parametrize("method", METHODS)
def test_processes_create_a_file_once(tmp_path: Path, method: str) -> None:
    context = multiprocessing.get_context(method)
    cache, start, answers = ShardCache(tmp_path / "cache", 10**6), context.Barrier(3), context.SimpleQueue()
    children = [context.Process(target=_race, args=(cache, start, answers)) for _ in range(3)]
    for child in children:
        child.start()
    assert [answers.get() for _ in children] == [KEYS] * 3
    for child in children:
        child.join()
    assert sorted((tmp_path / "made").read_text().split()) == sorted(KEYS)
    assert names(cache) == set(KEYS)


def _die(cache: ShardCache, key: str, started: Any) -> None:
    def make(path: Path) -> None:
        path.write_bytes(b"half")
        path.with_name(f".{path.name}.1234.part").write_bytes(b"of a copy")
        started.send(os.getpid())
        signal.pause()

    cache.get(key, make)


def _ask(cache: ShardCache, key: str, answers: Any) -> None:
    answers.send(cache.get(key, sized(7)).read_bytes())


@pytest.mark.parametrize("method", METHODS)
def test_process_waiting_for_a_killed_one_creates_the_file(tmp_path: Path, method: str) -> None:
    context = multiprocessing.get_context(method)
    cache = ShardCache(tmp_path, 1000)
    started, tell_start = context.Pipe(duplex=False)
    receiver, tell_found = context.Pipe(duplex=False)
    maker = context.Process(target=_die, args=(cache, A, tell_start))
    maker.start()
    assert started.recv() == maker.pid
    waiter = context.Process(target=_ask, args=(cache, A, tell_found))
    waiter.start()
    assert not receiver.poll(0.2)
    assert f"{A}.part" in names(cache)
    maker.kill()
    assert receiver.recv() == b"x" * 7
    for child in (maker, waiter):
        child.join()
    assert maker.exitcode == -signal.SIGKILL
    assert names(cache) == {A}


def test_forked_child_does_not_keep_the_lock_of_a_file_being_created(tmp_path: Path) -> None:
    """Otherwise workers of a loader, forked while a thread creates a copy, would hold its lock as long as they live."""
    script = """
import os, signal, sys
from quire.storage._cache import ShardCache, cache_key
cache, key = ShardCache(sys.argv[1], 1000), cache_key("shard", 0)

def make(path):
    child = os.fork()
    if not child:
        signal.pause()
    print(child, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

cache.get(key, make)
"""
    done = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert done.stdout is not None
    child = int(done.stdout.readline())
    try:
        assert done.wait() == -signal.SIGKILL
        assert ShardCache(tmp_path, 1000).get(A, sized(3)).read_bytes() == b"xxx"
    finally:
        os.kill(child, signal.SIGKILL)
        done.stdout.close()


# --- room


def test_least_recently_used_files_are_removed(tmp_path: Path) -> None:
    cache = ShardCache(tmp_path, 300)
    for key in (A, B, C):
        cache.get(key, sized(100))
    cache.get(A, never)
    cache.get(D, sized(100))
    assert names(cache) == {A, C, D}
    with cache.open(C, never):
        pass
    cache.get(B, sized(150))
    assert names(cache) == {C, B}
    assert cache.total_bytes() == 250


def test_cache_does_not_remove_files_of_others(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_bytes(bytes(1000))
    cache = ShardCache(tmp_path, 100)
    cache.get(A, sized(100))
    cache.get(B, sized(100))
    assert names(cache) == {"thesis.txt", B}
    cache.clear()
    assert names(cache) == {"thesis.txt"}


def test_leftovers_of_killed_processes_are_removed_when_room_is_needed(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    cache = ShardCache(tmp_path, 100)
    started, tell_start = context.Pipe(duplex=False)
    maker = context.Process(target=_die, args=(cache, A, tell_start))
    maker.start()
    started.recv()
    cache.get(B, sized(100))
    cache.get(C, sized(100))
    cache.clear()
    assert {f"{A}.part", f"{A}.lock"} <= names(cache)  # it is being made
    maker.kill()
    maker.join()
    cache.get(B, sized(100))
    cache.get(C, sized(100))
    assert names(cache) == {C}


def _map(cache: ShardCache, pipe: Any) -> None:
    with cache.open(A, sized(1 << 20)) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        pipe.send("mapped")
        pipe.recv()
        pipe.send(mapped[:] == b"x" * (1 << 20))


@pytest.mark.parametrize("method", METHODS)
def test_mapped_file_stays_readable_after_removal(tmp_path: Path, method: str) -> None:
    context = multiprocessing.get_context(method)
    cache = ShardCache(tmp_path, 3 << 19)
    ours, theirs = context.Pipe()
    reader = context.Process(target=_map, args=(cache, theirs))
    reader.start()
    assert ours.recv() == "mapped"
    cache.get(B, sized(1 << 20))
    assert names(cache) == {B}
    ours.send("go on")
    assert ours.recv() is True
    reader.join()


@pytest.mark.parametrize("held", ["room", "file"])
def test_files_are_not_removed_while_their_lock_or_the_room_lock_is_held(tmp_path: Path, held: str) -> None:
    """A process that is about to open a file holds its lock; one that counts the files holds the room lock."""
    cache = ShardCache(tmp_path, 100)
    cache.get(A, sized(100))
    event = threading.Event()

    def make(path: Path) -> None:
        path.write_bytes(bytes(100))
        event.set()

    asking = threading.Thread(target=cache.get, args=(B, make))
    with cache._room() if held == "room" else cache._lock(A):
        asking.start()
        event.wait()
        asking.join(0.2)
        assert asking.is_alive()
        assert {A, f"{B}.part"} <= names(cache)
        assert B not in names(cache)
    asking.join()
    assert names(cache) == {B}


def _churn(folder: Path, limit: int, seed: int, answers: Any) -> None:
    cache, most, wrong = ShardCache(folder, limit), 0, 0
    for turn in range(60):
        key = KEYS[(turn * 5 + seed * 3 + turn * turn) % len(KEYS)]
        with cache.open(key, lambda path, key=key: path.write_bytes(key.encode() * 25) and None) as file:
            wrong += file.read() != key.encode() * 25
        with ShardCache(folder, limit)._room():
            most = max(most, cache.total_bytes())
    answers.put((most, wrong))


@pytest.mark.parametrize("method", METHODS)
def test_competing_processes_stay_within_max_bytes(tmp_path: Path, method: str) -> None:
    """There is room for two files of six; an opened file is always complete."""
    context = multiprocessing.get_context(method)
    answers = context.SimpleQueue()
    children = [context.Process(target=_churn, args=(tmp_path, 2000, seed, answers)) for seed in range(3)]
    for child in children:
        child.start()
    results = [answers.get() for _ in children]
    for child in children:
        child.join()
    assert results == [(2000, 0)] * 3
    assert len(names(ShardCache(tmp_path, 2000))) == 2
