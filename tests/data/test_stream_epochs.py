"""Passes and epochs: which comes next, in this process and in workers."""

from __future__ import annotations

import copy
import json
import multiprocessing
import pickle
import threading
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from quire.errors import OptionError
from tests.data.sample_streams import collect_workers, flatten, numbers, open_samples, stream_samples, write_samples

pytestmark = [
    pytest.mark.needs("torch", "pyarrow", "fsspec", "xxhash"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]
ROWS = 50


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return open_samples(write_samples(tmp_path_factory.mktemp("stream") / "d", ROWS))


def make_loader(dataset: Any, workers: int = 2, **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size=None, num_workers=workers, **options)


def expected(source: Any, epoch: int, **options: Any) -> list[list[int]]:
    """The batches of an epoch, as a dataset that was never used gives them."""
    dataset = stream_samples(source, **options)
    dataset.set_epoch(epoch)
    return numbers(dataset)


# --- the next pass is the next epoch


def test_passes_of_a_dataset_and_of_its_loader_are_one_epoch_each(source: Any) -> None:
    dataset = stream_samples(source)
    for epoch in range(4):
        assert dataset.epoch == epoch
        assert len(dataset) == 7
        assert numbers(dataset if epoch % 2 else dataset.loader()) == expected(source, epoch)
    assert dataset.epoch == 4


def test_epochs_differ_and_the_same_seed_repeats_them(source: Any) -> None:
    first, second = stream_samples(source, seed=5), stream_samples(source, seed=5)
    results = [flatten(numbers(first)) for _ in range(3)]
    assert len(set(map(tuple, results))) == 3
    assert [flatten(numbers(second)) for _ in range(3)] == results
    assert flatten(numbers(stream_samples(source, seed=6))) not in results


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("workers", [1, 3])
def test_passes_of_a_data_loader_are_one_epoch_each(source: Any, workers: int, persistent: bool) -> None:
    dataset = stream_samples(source)
    loader = make_loader(dataset, workers, persistent_workers=persistent)
    for epoch in range(4):
        assert len(loader) == 7
        assert numbers(loader) == expected(source, epoch)
        assert dataset.epoch == epoch


@pytest.mark.parametrize("persistent", [False, True])
def test_generator_with_the_same_seed_repeats_no_epoch(source: Any, persistent: bool) -> None:
    dataset = stream_samples(source)
    for epoch in range(3):
        loader = make_loader(dataset, persistent_workers=persistent, generator=torch.Generator().manual_seed(1))
        assert numbers(loader) == expected(source, epoch)


def test_resumed_pass_is_followed_by_a_complete_epoch(source: Any) -> None:
    dataset = stream_samples(source)
    batches = iter(dataset)
    state = next(batches).state
    assert state is not None
    dataset.load_state_dict(state)
    for epoch in range(2):
        loader = make_loader(dataset, generator=torch.Generator().manual_seed(1))
        assert numbers(loader) == expected(source, epoch)[1 - epoch :]


def test_passes_with_and_without_workers_take_turns(source: Any) -> None:
    dataset = stream_samples(source)
    ways = [dataset, make_loader(dataset), dataset.loader(), make_loader(dataset, 0), make_loader(dataset, 3)]
    for epoch, way in enumerate(ways):
        assert numbers(way) == expected(source, epoch)


def test_interrupted_pass_is_followed_by_the_next_epoch(source: Any) -> None:
    dataset = stream_samples(source)
    next(iter(dataset))
    next(iter(dataset.loader()))
    assert numbers(dataset) == expected(source, 2)
    for _ in make_loader(dataset):
        break
    loader = make_loader(dataset, persistent_workers=True)
    for _ in loader:
        break
    assert numbers(loader) == expected(source, 5)


def test_unused_iterator_begins_no_pass(source: Any) -> None:
    dataset = stream_samples(source)
    iter(dataset)
    iter(dataset.loader())
    assert numbers(dataset) == expected(source, 0)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_of_every_start_method_count_epochs(source: Any, method: str) -> None:
    dataset = stream_samples(source)
    loader = make_loader(dataset, multiprocessing_context=method, persistent_workers=True)
    for epoch in range(2):
        assert numbers(loader) == expected(source, epoch)


# --- epochs that are set


def test_set_epoch_applies_to_the_next_pass(source: Any) -> None:
    dataset = stream_samples(source)
    dataset.set_epoch(7)
    assert dataset.epoch == 7
    assert numbers(dataset) == expected(source, 7)
    assert numbers(dataset) == expected(source, 8)
    dataset.set_epoch(0)
    assert numbers(make_loader(dataset)) == expected(source, 0)
    with pytest.raises(OptionError, match="epoch: expected 0 to"):
        dataset.set_epoch(-1)


def test_set_epoch_reaches_persistent_workers(source: Any) -> None:
    dataset = stream_samples(source)
    loader = make_loader(dataset, persistent_workers=True)
    for epoch in (3, 3, 1):
        dataset.set_epoch(epoch)
        assert numbers(loader) == expected(source, epoch)


def test_set_epoch_keeps_the_position_of_a_resumed_epoch(source: Any) -> None:
    dataset = stream_samples(source)
    dataset.set_epoch(1)
    batches = iter(dataset)
    seen = [next(batches), next(batches)]
    resumed = stream_samples(source)
    resumed.load_state_dict(seen[-1].state)  # type: ignore[arg-type]
    results = []
    for epoch in range(1, 3):
        resumed.set_epoch(epoch)
        results.append(numbers(make_loader(resumed)))
    assert results == [expected(source, 1)[2:], expected(source, 2)]


# --- passes of several epochs


@pytest.mark.parametrize("workers", [0, 2, 3])
def test_pass_of_three_epochs_yields_all_of_them(source: Any, workers: int) -> None:
    dataset = stream_samples(source, epochs=3)
    loader = make_loader(dataset, workers) if workers else dataset
    for turn in range(2):
        assert len(loader) == len(dataset) == 21
        result = numbers(loader)
        assert result == [batch for epoch in range(3) for batch in expected(source, turn * 3 + epoch)]


def test_endless_pass_continues_with_later_epochs(source: Any) -> None:
    dataset = stream_samples(source, epochs=None)
    with pytest.raises(TypeError, match="has no length"):
        len(dataset)
    batches = iter(dataset)
    results = [next(batches) for _ in range(25)]
    assert numbers(results) == [batch for epoch in range(4) for batch in expected(source, epoch)][:25]
    assert numbers([next(iter(dataset))]) == expected(source, 4)[:1]  # it had come to the fourth


@pytest.mark.parametrize("workers", [2, 3])
def test_endless_pass_continues_in_workers(source: Any, workers: int) -> None:
    batches = iter(make_loader(stream_samples(source, epochs=None), workers))
    results = [next(batches) for _ in range(25)]
    assert numbers(results) == [batch for epoch in range(4) for batch in expected(source, epoch)][:25]


def test_endless_pass_without_steps_raises(tmp_path: Path) -> None:
    folder = write_samples(tmp_path / "d", 5)
    with pytest.raises(OptionError, match="an epoch has no steps"):
        next(iter(stream_samples(folder, 8, last="drop", epochs=None)))


@pytest.mark.parametrize("epochs", [0, -1])
def test_epochs_must_be_positive(source: Any, epochs: int) -> None:
    with pytest.raises(OptionError, match="at least one, or None"):
        stream_samples(source, epochs=epochs)


# --- lengths


@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("last", ["keep", "drop", "pad"])
def test_length_is_exact(source: Any, last: str, epochs: int) -> None:
    dataset = stream_samples(source, 7, last=last, epochs=epochs, rank=1, world_size=3)
    for way in (dataset, dataset.loader(), make_loader(dataset, 2)):
        for _ in range(2):
            length = len(way)
            assert len(list(way)) == length


def test_length_of_a_resumed_pass_and_of_later_ones_is_exact(source: Any) -> None:
    dataset = stream_samples(source, 7, epochs=2)
    batches = iter(dataset)
    state = [next(batches) for _ in range(11)][-1].state
    assert state is not None
    for way in (dataset, dataset.loader()):
        dataset.load_state_dict(state)
        assert [(len(way), len(list(way))) for _ in range(2)] == [(16, 5), (16, 16)]
    loader = make_loader(dataset)
    dataset.load_state_dict(state)
    for _ in range(2):
        for at, _ in enumerate(loader):
            assert len(dataset) == 16, at


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("workers", [0, 2])
def test_length_of_a_pass_counts_steps_of_all_sizes(source: Any, epochs: int, workers: int) -> None:
    # The pass is resumed twice, each time with other steps, and its length is always that of the whole pass.
    taken, rows, state = 0, [], None
    for batch_size, world_size, steps in ((4, 2, 3), (3, 1, 2), (2, 3, None)):
        ranks = [
            stream_samples(source, batch_size, epochs=epochs, rank=rank, world_size=world_size)
            for rank in range(world_size)
        ]
        for dataset in ranks:
            if state is not None:
                dataset.load_state_dict(json.loads(json.dumps(state)))
            length, loader = len(dataset), make_loader(dataset, workers) if workers else dataset.loader()
            batches = list(islice(loader, steps))
            rows += flatten(numbers(batches))
            if steps is None:
                assert length == taken + len(batches)
                if not workers:  # otherwise only the loader knows whether the pass is over
                    assert len(dataset) == epochs * 8, "of the next pass"
            assert [batch.state["taken"] for batch in batches] == [taken] * len(batches)
        taken, state = taken + len(batches), batches[-1].state
    assert sorted(rows) == sorted([*range(ROWS)] * epochs)


def test_length_is_estimated_from_a_state_of_quire_0_1(source: Any) -> None:
    dataset = stream_samples(source, 7)
    state = {**next(iter(dataset)).state, "start": 21}
    del state["taken"]
    dataset.load_state_dict(state)
    assert (len(dataset), len(list(dataset))) == (8, 4)


def test_state_of_a_pass_of_more_epochs_begins_a_new_pass(source: Any) -> None:
    state = list(islice(stream_samples(source, 7, epochs=3), 20))[-1].state
    dataset = stream_samples(source, 7)
    dataset.load_state_dict(state)
    assert (dataset.epoch, len(dataset), len(list(dataset))) == (2, 8, 4)


# --- copies and other processes


@pytest.mark.parametrize("threads", [1, 3])
def test_no_loader_thread_is_alive_after_a_pass(source: Any, threads: int) -> None:
    dataset = stream_samples(source, 7)
    dataset._group_size_ahead = 1
    for _ in range(20):
        list(dataset.loader(threads=threads))
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("quire-loader")]


def test_copy_counts_its_own_passes(source: Any) -> None:
    dataset = stream_samples(source)
    list(dataset)
    other = copy.deepcopy(dataset)
    for _ in range(2):
        list(dataset)
    assert numbers(other) == expected(source, 1)
    assert numbers(dataset) == expected(source, 3)
    del dataset
    assert numbers(other) == expected(source, 2)


def test_pickled_dataset_outlives_the_original(source: Any) -> None:
    dataset = stream_samples(source)
    list(dataset)
    content = pickle.dumps(dataset)
    del dataset
    other = pickle.loads(content)
    for epoch in (1, 2):
        assert numbers(make_loader(other)) == expected(source, epoch)


def _first_batches(dataset: Any, results: Any) -> None:
    results.put((numbers(dataset), numbers(make_loader(dataset))))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_count_their_own_passes(source: Any, method: str) -> None:
    dataset = stream_samples(source)
    context = multiprocessing.get_context(method)
    results = context.Queue()
    processes = [context.Process(target=_first_batches, args=(dataset, results)) for _ in range(2)]
    for process in processes:
        process.start()
    result = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert result == [(expected(source, 0), expected(source, 1))] * 2
    assert dataset.epoch == 0


def test_same_pass_id_again_is_another_pass(source: Any) -> None:
    dataset = stream_samples(source)
    for epoch in range(2):
        assert numbers(collect_workers(dataset, 3, mark=9)) == expected(source, epoch)
