"""Passes and epochs: which comes next, in this process and in workers."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from quire.errors import OptionError
from tests.data.streams import flat, numbers, opened, streamed, together, written

pytestmark = [
    pytest.mark.needs("torch", "pyarrow", "fsspec", "xxhash"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]
ROWS = 50


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return opened(written(tmp_path_factory.mktemp("stream") / "d", ROWS))


def loaded(dataset: Any, workers: int = 2, **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size=None, num_workers=workers, **options)


def expected(source: Any, epoch: int, **options: Any) -> list[list[int]]:
    """The batches of an epoch, as a dataset that was never used gives them."""
    dataset = streamed(source, **options)
    dataset.set_epoch(epoch)
    return numbers(dataset)


# --- the next pass is the next epoch


def test_passes_of_a_dataset_and_of_its_loader_are_one_epoch_each(source: Any) -> None:
    dataset = streamed(source)
    for epoch in range(4):
        assert dataset.epoch == epoch
        assert len(dataset) == 7
        assert numbers(dataset if epoch % 2 else dataset.loader()) == expected(source, epoch)
    assert dataset.epoch == 4


def test_epochs_differ_and_the_same_seed_repeats_them(source: Any) -> None:
    first, second = streamed(source, seed=5), streamed(source, seed=5)
    found = [flat(numbers(first)) for _ in range(3)]
    assert len(set(map(tuple, found))) == 3
    assert [flat(numbers(second)) for _ in range(3)] == found
    assert flat(numbers(streamed(source, seed=6))) not in found


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("workers", [1, 3])
def test_passes_of_a_data_loader_are_one_epoch_each(source: Any, workers: int, persistent: bool) -> None:
    dataset = streamed(source)
    loader = loaded(dataset, workers, persistent_workers=persistent)
    for epoch in range(4):
        assert len(loader) == 7
        assert numbers(loader) == expected(source, epoch)
        assert dataset.epoch == epoch


@pytest.mark.parametrize("persistent", [False, True])
def test_a_generator_that_is_seeded_alike_repeats_no_epoch(source: Any, persistent: bool) -> None:
    dataset = streamed(source)
    for epoch in range(3):
        loader = loaded(dataset, persistent_workers=persistent, generator=torch.Generator().manual_seed(1))
        assert numbers(loader) == expected(source, epoch)


def test_a_resumed_pass_is_whole_again_in_the_next_epoch(source: Any) -> None:
    dataset = streamed(source)
    batches = iter(dataset)
    state = next(batches).state
    assert state is not None
    dataset.load_state_dict(state)
    for epoch in range(2):
        loader = loaded(dataset, generator=torch.Generator().manual_seed(1))
        assert numbers(loader) == expected(source, epoch)[1 - epoch :]


def test_passes_with_and_without_workers_take_turns(source: Any) -> None:
    dataset = streamed(source)
    ways = [dataset, loaded(dataset), dataset.loader(), loaded(dataset, 0), loaded(dataset, 3)]
    for epoch, way in enumerate(ways):
        assert numbers(way) == expected(source, epoch)


def test_a_pass_that_was_broken_off_is_behind(source: Any) -> None:
    dataset = streamed(source)
    next(iter(dataset))
    next(iter(dataset.loader()))
    assert numbers(dataset) == expected(source, 2)
    for _ in loaded(dataset):
        break
    loader = loaded(dataset, persistent_workers=True)
    for _ in loader:
        break
    assert numbers(loader) == expected(source, 5)


def test_an_iterator_that_is_not_used_begins_no_pass(source: Any) -> None:
    dataset = streamed(source)
    iter(dataset)
    iter(dataset.loader())
    assert numbers(dataset) == expected(source, 0)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_of_every_kind(source: Any, method: str) -> None:
    dataset = streamed(source)
    loader = loaded(dataset, multiprocessing_context=method, persistent_workers=True)
    for epoch in range(2):
        assert numbers(loader) == expected(source, epoch)


# --- epochs that are set


def test_set_epoch_is_for_the_next_pass(source: Any) -> None:
    dataset = streamed(source)
    dataset.set_epoch(7)
    assert dataset.epoch == 7
    assert numbers(dataset) == expected(source, 7)
    assert numbers(dataset) == expected(source, 8)
    dataset.set_epoch(0)
    assert numbers(loaded(dataset)) == expected(source, 0)
    with pytest.raises(OptionError, match="epoch: expected 0 to"):
        dataset.set_epoch(-1)


def test_set_epoch_reaches_workers_that_live_on(source: Any) -> None:
    dataset = streamed(source)
    loader = loaded(dataset, persistent_workers=True)
    for epoch in (3, 3, 1):
        dataset.set_epoch(epoch)
        assert numbers(loader) == expected(source, epoch)


def test_set_epoch_in_a_loop_that_resumes_keeps_the_place(source: Any) -> None:
    dataset = streamed(source)
    dataset.set_epoch(1)
    batches = iter(dataset)
    seen = [next(batches), next(batches)]
    resumed = streamed(source)
    resumed.load_state_dict(seen[-1].state)  # type: ignore[arg-type]
    found = []
    for epoch in range(1, 3):
        resumed.set_epoch(epoch)
        found.append(numbers(loaded(resumed)))
    assert found == [expected(source, 1)[2:], expected(source, 2)]


# --- passes of several epochs


@pytest.mark.parametrize("workers", [0, 2, 3])
def test_a_pass_of_three_epochs(source: Any, workers: int) -> None:
    dataset = streamed(source, epochs=3)
    loader = loaded(dataset, workers) if workers else dataset
    for turn in range(2):
        assert len(loader) == len(dataset) == 21
        found = numbers(loader)
        assert found == [batch for epoch in range(3) for batch in expected(source, turn * 3 + epoch)]


def test_a_pass_that_never_ends(source: Any) -> None:
    dataset = streamed(source, epochs=None)
    with pytest.raises(TypeError, match="has no length"):
        len(dataset)
    batches = iter(dataset)
    found = [next(batches) for _ in range(25)]
    assert numbers(found) == [batch for epoch in range(4) for batch in expected(source, epoch)][:25]
    assert numbers([next(iter(dataset))]) == expected(source, 4)[:1]  # it had come to the fourth


@pytest.mark.parametrize("workers", [2, 3])
def test_a_pass_that_never_ends_in_workers(source: Any, workers: int) -> None:
    batches = iter(loaded(streamed(source, epochs=None), workers))
    found = [next(batches) for _ in range(25)]
    assert numbers(found) == [batch for epoch in range(4) for batch in expected(source, epoch)][:25]


def test_a_pass_that_never_ends_over_nothing_is_an_error(tmp_path: Path) -> None:
    folder = written(tmp_path / "d", 5)
    with pytest.raises(OptionError, match="an epoch has no steps"):
        next(iter(streamed(folder, 8, last="drop", epochs=None)))


@pytest.mark.parametrize("epochs", [0, -1])
def test_a_pass_has_an_epoch_at_least(source: Any, epochs: int) -> None:
    with pytest.raises(OptionError, match="at least one, or None"):
        streamed(source, epochs=epochs)


# --- lengths


@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("last", ["keep", "drop", "pad"])
def test_the_length_is_exact(source: Any, last: str, epochs: int) -> None:
    dataset = streamed(source, 7, last=last, epochs=epochs, rank=1, world_size=3)
    for way in (dataset, dataset.loader(), loaded(dataset, 2)):
        for _ in range(2):
            length = len(way)
            assert len(list(way)) == length


def test_the_length_of_a_resumed_pass_and_of_those_behind_it(source: Any) -> None:
    dataset = streamed(source, 7, epochs=2)
    batches = iter(dataset)
    state = [next(batches) for _ in range(11)][-1].state
    assert state is not None
    for way in (dataset, dataset.loader()):
        dataset.load_state_dict(state)
        assert [(len(way), len(list(way))) for _ in range(2)] == [(5, 5), (16, 16)]
    loader = loaded(dataset)
    dataset.load_state_dict(state)
    for length in (5, 16):
        for at, _ in enumerate(loader):
            assert len(dataset) == length, at


# --- copies and other processes


@pytest.mark.parametrize("threads", [1, 3])
def test_no_loader_thread_is_alive_after_a_pass(source: Any, threads: int) -> None:
    dataset = streamed(source, 7)
    dataset._group_size_ahead = 1
    for _ in range(20):
        list(dataset.loader(threads=threads))
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("quire-loader")]


def test_a_copy_counts_for_itself(source: Any) -> None:
    dataset = streamed(source)
    list(dataset)
    other = copy.deepcopy(dataset)
    for _ in range(2):
        list(dataset)
    assert numbers(other) == expected(source, 1)
    assert numbers(dataset) == expected(source, 3)
    del dataset
    assert numbers(other) == expected(source, 2)


def test_a_pickled_dataset_outlives_its_origin(source: Any) -> None:
    dataset = streamed(source)
    list(dataset)
    content = pickle.dumps(dataset)
    del dataset
    other = pickle.loads(content)
    for epoch in (1, 2):
        assert numbers(loaded(other)) == expected(source, epoch)


def _first_batches(dataset: Any, results: Any) -> None:
    results.put((numbers(dataset), numbers(loaded(dataset))))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_that_were_given_one_dataset_count_each_for_itself(source: Any, method: str) -> None:
    dataset = streamed(source)
    context = multiprocessing.get_context(method)
    results = context.Queue()
    processes = [context.Process(target=_first_batches, args=(dataset, results)) for _ in range(2)]
    for process in processes:
        process.start()
    found = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert found == [(expected(source, 0), expected(source, 1))] * 2
    assert dataset.epoch == 0


def test_the_same_mark_again_is_another_pass(source: Any) -> None:
    dataset = streamed(source)
    for epoch in range(2):
        assert numbers(together(dataset, 3, mark=9)) == expected(source, epoch)
