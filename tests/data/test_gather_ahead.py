"""Remote streams gather the next batches in a thread, and nothing else about them differs from local streams."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.data import StreamingDataset
from quire.data._gather_ahead import gather_ahead
from quire.errors import OptionError, ShardError
from quire.storage import ReadOptions
from tests.data.block_store import QUICK, BlockStore, Item, serve_folder, write_items

pytestmark = pytest.mark.needs("pyarrow", "xxhash", "obstore")
ROWS = 480


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_items(tmp_path_factory.mktemp("ahead") / "d", ROWS)


@pytest.fixture
def store(folder: Path) -> Iterator[BlockStore]:
    with serve_folder(folder) as store:
        yield store


def open_stream(place: Any, cache: Path, **options: Any) -> StreamingDataset[Item]:
    storage = ReadOptions(cache=cache, remote=QUICK)
    options = {"shuffle": "interleaved", "framework": "numpy", **options}
    return StreamingDataset[Item](place, 16, storage=storage, **options)


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "quire-stream"]


def wait_until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


# --- iterations


@given(st.lists(st.integers(0, 5), max_size=8), st.integers(0, 20))
def test_items_come_in_order_until_the_iteration_is_closed(sizes: list[int], taken: int) -> None:
    items = gather_ahead(iter(enumerate(sizes)), lambda group: ((group[0], place) for place in range(group[1])))
    expected = [(number, place) for number, size in enumerate(sizes) for place in range(size)]
    assert [item for item, _ in zip(items, range(taken), strict=False)] == expected[:taken]
    items.close()  # type: ignore[attr-defined]
    wait_until(lambda: not threads())


def test_at_most_two_groups_are_gathered_before_they_are_taken() -> None:
    gathered: list[int] = []

    def gather(group: int) -> Iterator[int]:
        gathered.append(group)
        yield group

    items = gather_ahead(iter(range(100)), gather)
    assert next(items) == 0
    wait_until(lambda: gathered == [0, 1, 2])
    assert [next(items) for _ in range(3)] == [1, 2, 3]
    assert len(gathered) <= 6
    items.close()  # type: ignore[attr-defined]


def test_error_comes_after_the_items_before_it() -> None:
    def gather(group: int) -> Iterator[int]:
        yield group
        if group == 2:
            raise ValueError("at two")

    items = gather_ahead(iter(range(100)), gather)
    assert [next(items) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="at two"):
        next(items)
    wait_until(lambda: not threads())


def test_groups_come_from_the_thread_that_iterates() -> None:
    seen: list[tuple[threading.Thread, threading.Thread]] = []

    def groups() -> Iterator[threading.Thread]:
        for _ in range(5):
            yield threading.current_thread()

    def gather(group: threading.Thread) -> Iterator[None]:
        seen.append((group, threading.current_thread()))
        yield None

    assert len(list(gather_ahead(groups(), gather))) == 5
    assert all(group is threading.main_thread() and own is not group for group, own in seen)


# --- streams


def test_remote_stream_has_the_batches_and_states_of_the_local_one(
    store: BlockStore, folder: Path, tmp_path: Path
) -> None:
    local, remote = open_stream(folder, tmp_path / "a"), open_stream(store.url, tmp_path / "b")
    pairs = zip(local, remote, strict=True)
    for left, right in pairs:
        assert left.number.tolist() == right.number.tolist()
        assert (left.vector == right.vector).all()
        # The position after the batch that was taken, not after those that were gathered.
        assert remote.state_dict() == local.state_dict() == right.state == left.state
    assert not threads(), "a pass that was taken to its end leaves no thread"
    assert [batch.number.tolist() for batch in local] == [batch.number.tolist() for batch in remote], "the next epoch"


def test_stream_resumes_after_the_last_batch_that_was_taken(store: BlockStore, tmp_path: Path) -> None:
    dataset = open_stream(store.url, tmp_path / "c")
    seen = list[int]()
    for number, batch in enumerate(dataset):
        seen += batch.number.tolist()
        if number == 4:
            break
    wait_until(lambda: not threads())
    dataset.load_state_dict(dataset.state_dict())
    seen += [row for batch in dataset for row in batch.number.tolist()]
    assert sorted(seen) == list(range(ROWS))


def test_local_stream_has_no_thread(folder: Path, tmp_path: Path) -> None:
    before = threading.active_count()
    for _ in open_stream(folder, tmp_path / "c"):
        assert threading.active_count() == before


def test_user_functions_run_in_the_thread_that_iterates(store: BlockStore, tmp_path: Path) -> None:
    seen: set[threading.Thread] = set()

    def double(vector: Any) -> Any:
        seen.add(threading.current_thread())
        return vector * 2

    dataset = open_stream(store.url, tmp_path / "c", preprocessing={"vector": double})
    for batch in dataset:
        assert (batch.vector[:, 0] == 2 * batch.number).all()
    assert seen == {threading.main_thread()}


def test_damaged_shard_is_an_error_after_the_batches_before_it(folder: Path, tmp_path: Path) -> None:
    with serve_folder(folder) as store:
        dataset = open_stream(store.url, tmp_path / "c", shuffle=False)
        rows = dataset.stored.shards[0].rows
        store.gone.add(dataset.stored.shards[1].name)
        seen = list[int]()
        with pytest.raises(ShardError, match="missing"):
            for batch in dataset:
                seen += batch.number.tolist()
        assert seen == list(range(len(seen)))
        assert len(seen) <= rows
        assert dataset.state_dict()["step"] == len(seen) // 16
    wait_until(lambda: not threads())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_iteration_in_a_forked_child_is_an_error_and_the_parent_continues(store: BlockStore, tmp_path: Path) -> None:
    dataset = open_stream(store.url, tmp_path / "c")
    batches = iter(dataset)
    seen = next(batches).number.tolist()
    child = os.fork()
    if not child:
        try:
            next(batches)
        except OptionError as error:
            os._exit(0 if "forked" in str(error) else 2)
        except BaseException:  # noqa: BLE001 - reported by the status
            os._exit(3)
        os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    seen += [row for batch in batches for row in batch.number.tolist()]
    assert sorted(seen) == list(range(ROWS))


def test_rows_of_batches_that_were_gathered_ahead_stay_as_they_are(store: BlockStore, tmp_path: Path) -> None:
    batches = list(open_stream(store.url, tmp_path / "c"))
    numbers = np.concatenate([batch.number for batch in batches])
    vectors = np.concatenate([batch.vector for batch in batches])
    assert sorted(numbers.tolist()) == list(range(ROWS))
    assert (vectors == numbers[:, None]).all()
