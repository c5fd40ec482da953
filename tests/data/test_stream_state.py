"""States: resumed == uninterrupted, row for row, whatever the ranks and workers were and are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from quire.errors import OptionError
from quire.storage import StoredDataset
from tests.data.sample_streams import (
    Sample,
    collect_workers,
    flatten,
    numbers,
    open_samples,
    stream_samples,
    write_samples,
)

pytestmark = [
    pytest.mark.needs("torch", "pyarrow", "fsspec", "xxhash"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata 0.11 calls it; torch 2.13 warns
]
ROWS = 101


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return open_samples(write_samples(tmp_path_factory.mktemp("stream") / "d", ROWS))


def loaded(dataset: Any, workers: int = 2, **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset, batch_size=None, num_workers=workers, **options)


def stateful(dataset: Any, workers: int, **options: Any) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(dataset, batch_size=None, num_workers=workers, **options)


def taken(batches: Any, count: int) -> list[Any]:
    iterator = iter(batches)
    return [next(iterator) for _ in range(count)]


def through_json(state: Any) -> Any:
    text = json.dumps(state)
    assert len(text) < 1000
    return json.loads(text)


# --- of a dataset


@settings(deadline=None, max_examples=40)
@given(
    stops=st.lists(st.integers(1, 40), max_size=5),
    last=st.sampled_from(["keep", "drop", "pad"]),
    seed=st.integers(0, 9),
)
def test_stream_resumes_with_the_next_row_after_any_stops(source: Any, stops: list[int], **options: Any) -> None:
    whole = stream_samples(source, 4, epochs=4, **options)
    expected = numbers(whole)
    row_numbers: list[list[int]] = []
    state = stream_samples(source, 4, epochs=4, **options).state_dict()
    for stop in [*stops, len(expected)]:
        dataset = stream_samples(source, 4, epochs=4, **options)
        dataset.load_state_dict(through_json(state))
        batches = dataset if stop % 2 else dataset.loader(threads=2)
        for taken_now, batch in enumerate(batches, 1):
            row_numbers += numbers([batch])
            if taken_now == stop:
                break
        state = dataset.state_dict()
        if len(row_numbers) == len(expected):
            break
    assert row_numbers == expected


@settings(deadline=None, max_examples=40)
@given(
    phases=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 3), st.integers(1, 9), st.integers(0, 4)), max_size=4),
    shuffle=st.sampled_from(["block", "global", False]),
)
def test_every_row_comes_once_with_other_ranks_workers_and_batch_sizes(source: Any, phases: Any, shuffle: Any) -> None:
    phases = [*phases, (2, 1, 7, ROWS)]
    state, seen = None, []
    for world, workers, batch_size, steps in phases:
        ranks = [stream_samples(source, batch_size, rank=r, world_size=world, shuffle=shuffle) for r in range(world)]
        for dataset in ranks:
            if state is not None:
                dataset.load_state_dict(state)
        if ranks[0].epoch:
            break  # all of the epoch was taken
        row_numbers = [collect_workers(dataset, workers)[:steps] for dataset in ranks]
        seen += flatten(numbers(flatten(row_numbers)))
        states = [json.dumps(batches[-1].state) for batches in row_numbers if batches]
        assert len(set(states)) <= 1, "it is the same on every rank"
        state = json.loads(states[0]) if states else state
    assert sorted(seen) == list(range(ROWS))


def test_order_continues_with_other_ranks(source: Any) -> None:
    [order] = numbers(stream_samples(source, ROWS))
    first = [taken(stream_samples(source, 5, rank=rank, world_size=3), 2) for rank in range(3)]
    assert sorted(flatten(numbers(flatten(first)))) == sorted(order[:30])
    rest = stream_samples(source, ROWS)
    rest.load_state_dict(first[0][-1].state)
    assert numbers(rest) == [order[30:]]


def test_state_at_the_end_of_an_epoch_resumes_with_the_next(source: Any) -> None:
    dataset, other = stream_samples(source), stream_samples(source)
    list(dataset)
    other.load_state_dict(dataset.state_dict())
    assert other.epoch == 1
    assert numbers(other) == numbers(dataset)


def test_new_dataset_has_a_state(source: Any) -> None:
    dataset, other = stream_samples(source), stream_samples(source)
    other.set_epoch(3)
    other.load_state_dict(dataset.state_dict())
    assert numbers(other) == numbers(dataset)
    dataset.set_epoch(3)
    other.load_state_dict(dataset.state_dict())
    assert other.epoch == 3


def test_state_loads_with_another_number_of_epochs(source: Any) -> None:
    dataset = stream_samples(source, 50, epochs=None)
    state = taken(dataset, 8)[-1].state
    for epochs in (1, 2, None):
        other = stream_samples(source, 50, epochs=epochs)
        other.load_state_dict(state)
        dataset.set_epoch(2)
        assert numbers(taken(other, 1)) == numbers(taken(dataset, 3)[2:])


def test_loading_a_state_opens_no_shard(tmp_path: Path) -> None:
    folder = write_samples(tmp_path / "d", 30)
    state = stream_samples(folder).state_dict()
    dataset = stream_samples(folder)
    for shard in folder.glob("*.arrow"):
        shard.unlink()
    dataset.load_state_dict({**state, "step": 2})
    assert dataset.state_dict()["start"] == 16
    assert len(dataset) == 4


def test_states_are_snapshots(source: Any) -> None:
    dataset = stream_samples(source)
    batches = iter(dataset)
    states = [(dataset.state_dict(), next(batches).state) for _ in range(3)]
    assert [before["step"] for before, _ in states] == [0, 1, 2]
    assert [after["step"] for _, after in states if after] == [1, 2, 3]


# --- of batches that workers make


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_batches_of_a_data_loader_carry_their_state(source: Any, method: str) -> None:
    expected = numbers(stream_samples(source))
    batches = taken(loaded(stream_samples(source), 3, multiprocessing_context=method), 5)
    dataset = stream_samples(source)
    dataset.load_state_dict(through_json(batches[-1].state))
    assert numbers(batches) + numbers(loaded(dataset)) == expected


def test_batches_keep_their_state_when_moved(source: Any) -> None:
    [batch] = taken(stream_samples(source, framework="torch"), 1)
    assert batch.state is not None
    for moved in (batch.to("cpu"), batch.pin_memory(), batch.to_framework("numpy")):
        assert moved.state == batch.state
    [batch] = taken(stream_samples(source).iter_batches(framework="torch"), 1)
    assert batch.state is not None


def test_states_of_workers_span_several_epochs(source: Any) -> None:
    expected = numbers(stream_samples(source, epochs=3))
    for count in (12, 13, 14, 26, 27):
        batches = taken(loaded(stream_samples(source, epochs=3), 3), count)
        dataset = stream_samples(source, epochs=3)
        dataset.load_state_dict(batches[-1].state)
        assert numbers(batches) + numbers(loaded(dataset, 2)) == expected


def test_state_dict_raises_with_workers(source: Any) -> None:
    dataset = stream_samples(source)
    list(loaded(dataset))
    with pytest.raises(OptionError, match=r"Keep the state of the last one, batch.state"):
        dataset.state_dict()
    list(dataset)
    assert dataset.state_dict()["epoch"] == 1


# --- of a StatefulDataLoader


@pytest.mark.needs("torchdata")
@pytest.mark.parametrize("options", [{}, {"snapshot_every_n_steps": 3}], ids=["each", "third"])
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_stateful_loader_resumes_where_it_was(source: Any, workers: int, options: Any) -> None:
    expected = [batch for epoch in range(2) for batch in _epoch(source, epoch)]
    row_numbers: list[list[int]] = []
    state = None
    while len(row_numbers) < len(expected):
        loader = stateful(stream_samples(source), workers, **options)
        if state is not None:
            loader.load_state_dict(state)
        for at, batch in enumerate(loader):
            row_numbers += numbers([batch])
            if at == 4:
                break
        state = loader.state_dict()
        del loader
    assert row_numbers == expected


@pytest.mark.needs("torchdata")
@pytest.mark.parametrize("persistent", [False, True])
def test_resumed_stateful_loader_continues_with_the_next_epochs(source: Any, persistent: bool) -> None:
    loader = stateful(stream_samples(source), 2, persistent_workers=persistent)
    first = taken(loader, 7)
    state = loader.state_dict()
    del loader
    dataset = stream_samples(source)
    loader = stateful(dataset, 2, persistent_workers=persistent)
    loader.load_state_dict(state)
    assert numbers(first) + numbers(loader) == _epoch(source, 0)
    assert [numbers(loader) for _ in range(2)] == [_epoch(source, 1), _epoch(source, 2)]


@pytest.mark.needs("torchdata")
@pytest.mark.parametrize("workers", [0, 2])
def test_stateful_loader_loads_its_own_state(source: Any, workers: int) -> None:
    loader = stateful(stream_samples(source), workers)
    batches = iter(loader)
    first = [next(batches) for _ in range(4)]
    state = loader.state_dict()
    rest = list(batches)
    loader.load_state_dict(state)
    assert numbers(first) + numbers(loader) == numbers(first + rest) == _epoch(source, 0)
    assert numbers(loader) == _epoch(source, 1)


@pytest.mark.needs("torchdata")
@pytest.mark.parametrize("options", [{}, {"snapshot_every_n_steps": 3}], ids=["each", "third"])
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_state_of_a_stateful_loader_resumes_with_other_workers_and_ranks(
    source: Any, workers: int, options: Any
) -> None:
    [order] = numbers(stream_samples(source, ROWS))
    for count in (1, 4, 7, 12):
        loader = stateful(stream_samples(source, 8), workers, **options)
        first = taken(loader, count)
        state = loader.state_dict()
        del loader
        ranks = [stream_samples(source, 3, rank=rank, world_size=3) for rank in range(3)]
        for dataset in ranks:
            dataset.load_state_dict(state)
        rest = [flatten(numbers(loaded(dataset, 2))) for dataset in ranks]
        assert flatten(numbers(first)) == order[: count * 8]
        assert sorted(flatten(rest)) == sorted(order[count * 8 :])


@pytest.mark.needs("torchdata")
def test_workers_with_another_share_reject_a_state(source: Any) -> None:
    loader = stateful(stream_samples(source), 2)
    taken(loader, 3)
    state = loader.state_dict()
    other = stateful(stream_samples(source, rank=0, world_size=2), 2)
    other.load_state_dict(state)
    with pytest.raises(OptionError, match=r"Give the state to the dataset, not to the loader"):
        list(other)


@pytest.mark.needs("torchdata")
@pytest.mark.parametrize("count", [5, 12, 13, 14, 30])
def test_stateful_loader_resumes_in_a_pass_of_several_epochs(source: Any, count: int) -> None:
    expected = numbers(stream_samples(source, epochs=3))
    loader = stateful(stream_samples(source, epochs=3), 3)
    first = taken(loader, count)
    state = loader.state_dict()
    del loader
    loader = stateful(stream_samples(source, epochs=3), 3)
    loader.load_state_dict(state)
    assert numbers(first) + numbers(loader) == expected
    dataset = stream_samples(source, epochs=3)
    dataset.load_state_dict(state)
    assert numbers(first) + numbers(dataset) == expected


def _epoch(source: Any, epoch: int) -> list[list[int]]:
    dataset = stream_samples(source)
    dataset.set_epoch(epoch)
    return numbers(dataset)


# --- of something else


def test_state_of_another_order_is_rejected(source: Any, tmp_path: Path) -> None:
    state = stream_samples(source).state_dict()
    with pytest.raises(OptionError, match="seed was 0, is 1"):
        stream_samples(source, seed=1).load_state_dict(state)
    with pytest.raises(OptionError, match="shuffle was 'block', is False"):
        stream_samples(source, shuffle=False).load_state_dict(state)
    with pytest.raises(OptionError, match="window was 101, is"):
        stream_samples(source, memory_bytes=100).load_state_dict(state)
    with pytest.raises(OptionError, match="size was 101, is 50.*dataset was"):
        stream_samples(write_samples(tmp_path / "d", 50)).load_state_dict(state)
    other = write_samples(tmp_path / "other", ROWS, rows_in_shard=11)
    with pytest.raises(OptionError, match="dataset was '[0-9a-f]{16}', is"):
        stream_samples(other).load_state_dict(state)


def test_state_of_other_rows_is_rejected(source: Any) -> None:
    folder = source.folder.url
    some = [
        StoredDataset[Sample](folder, where={"number": {"$lt": 50}}),
        StoredDataset[Sample](folder, where={"number": {"$gte": 51}}),
    ]
    states = [stream_samples(stored).state_dict() for stored in some]
    assert states[0]["size"] == states[1]["size"]
    with pytest.raises(OptionError, match="where"):
        stream_samples(some[0]).load_state_dict(states[1])


@pytest.mark.parametrize("wrong", [{}, {"epoch": 1}, None, [], {"version": 2}], ids=repr)
def test_other_values_are_rejected_as_state(source: Any, wrong: Any) -> None:
    with pytest.raises(OptionError, match="this is no state of a StreamingDataset"):
        stream_samples(source).load_state_dict(wrong)


@pytest.mark.parametrize(
    "change", [{"step": -1}, {"epoch": -1}, {"start": 1000}, {"step": "1"}, {"batch_size": 0}], ids=str
)
def test_damaged_state_is_rejected(source: Any, change: Any) -> None:
    dataset = stream_samples(source)
    with pytest.raises(OptionError):
        dataset.load_state_dict({**dataset.state_dict(), **change})
    assert sorted(flatten(numbers(dataset))) == list(range(ROWS))
