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
from tests.data.streams import Sample, flat, numbers, opened, streamed, together, written

pytestmark = [
    pytest.mark.needs("torch", "pyarrow", "fsspec", "xxhash"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata 0.11 calls it; torch 2.13 warns
]
ROWS = 101


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return opened(written(tmp_path_factory.mktemp("stream") / "d", ROWS))


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
def test_after_any_number_of_stops_it_goes_on_with_the_next_row(source: Any, stops: list[int], **options: Any) -> None:
    whole = streamed(source, 4, epochs=4, **options)
    expected = numbers(whole)
    found: list[list[int]] = []
    state = streamed(source, 4, epochs=4, **options).state_dict()
    for stop in [*stops, len(expected)]:
        dataset = streamed(source, 4, epochs=4, **options)
        dataset.load_state_dict(through_json(state))
        batches = dataset if stop % 2 else dataset.loader(threads=2)
        for taken_now, batch in enumerate(batches, 1):
            found += numbers([batch])
            if taken_now == stop:
                break
        state = dataset.state_dict()
        if len(found) == len(expected):
            break
    assert found == expected


@settings(deadline=None, max_examples=40)
@given(
    phases=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 3), st.integers(1, 9), st.integers(0, 4)), max_size=4),
    shuffle=st.sampled_from(["block", "global", False]),
)
def test_with_other_ranks_workers_and_batches_every_row_still_comes_once(
    source: Any, phases: Any, shuffle: Any
) -> None:
    phases = [*phases, (2, 1, 7, ROWS)]
    state, seen = None, []
    for world, workers, batch_size, steps in phases:
        ranks = [streamed(source, batch_size, rank=r, world_size=world, shuffle=shuffle) for r in range(world)]
        for dataset in ranks:
            if state is not None:
                dataset.load_state_dict(state)
        if ranks[0].epoch:
            break  # all of the epoch was taken
        found = [together(dataset, workers)[:steps] for dataset in ranks]
        seen += flat(numbers(flat(found)))
        states = [json.dumps(batches[-1].state) for batches in found if batches]
        assert len(set(states)) <= 1, "it is the same on every rank"
        state = json.loads(states[0]) if states else state
    assert sorted(seen) == list(range(ROWS))


def test_the_order_goes_on_as_it_was_when_the_ranks_are_others(source: Any) -> None:
    [order] = numbers(streamed(source, ROWS))
    first = [taken(streamed(source, 5, rank=rank, world_size=3), 2) for rank in range(3)]
    assert sorted(flat(numbers(flat(first)))) == sorted(order[:30])
    rest = streamed(source, ROWS)
    rest.load_state_dict(first[0][-1].state)
    assert numbers(rest) == [order[30:]]


def test_the_end_of_an_epoch_is_the_beginning_of_the_next(source: Any) -> None:
    dataset, other = streamed(source), streamed(source)
    list(dataset)
    other.load_state_dict(dataset.state_dict())
    assert other.epoch == 1
    assert numbers(other) == numbers(dataset)


def test_a_new_dataset_has_a_state(source: Any) -> None:
    dataset, other = streamed(source), streamed(source)
    other.set_epoch(3)
    other.load_state_dict(dataset.state_dict())
    assert numbers(other) == numbers(dataset)
    dataset.set_epoch(3)
    other.load_state_dict(dataset.state_dict())
    assert other.epoch == 3


def test_the_number_of_epochs_may_be_another(source: Any) -> None:
    dataset = streamed(source, 50, epochs=None)
    state = taken(dataset, 8)[-1].state
    for epochs in (1, 2, None):
        other = streamed(source, 50, epochs=epochs)
        other.load_state_dict(state)
        dataset.set_epoch(2)
        assert numbers(taken(other, 1)) == numbers(taken(dataset, 3)[2:])


def test_loading_a_state_opens_no_shard(tmp_path: Path) -> None:
    folder = written(tmp_path / "d", 30)
    state = streamed(folder).state_dict()
    dataset = streamed(folder)
    for shard in folder.glob("*.arrow"):
        shard.unlink()
    dataset.load_state_dict({**state, "step": 2})
    assert dataset.state_dict()["start"] == 16
    assert len(dataset) == 2


def test_states_do_not_change_afterwards(source: Any) -> None:
    dataset = streamed(source)
    batches = iter(dataset)
    states = [(dataset.state_dict(), next(batches).state) for _ in range(3)]
    assert [before["step"] for before, _ in states] == [0, 1, 2]
    assert [after["step"] for _, after in states if after] == [1, 2, 3]


# --- of batches that workers make


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_batches_of_a_data_loader_carry_their_state(source: Any, method: str) -> None:
    expected = numbers(streamed(source))
    batches = taken(loaded(streamed(source), 3, multiprocessing_context=method), 5)
    dataset = streamed(source)
    dataset.load_state_dict(through_json(batches[-1].state))
    assert numbers(batches) + numbers(loaded(dataset)) == expected


def test_batches_keep_their_state_on_their_way_to_a_device(source: Any) -> None:
    [batch] = taken(streamed(source, framework="torch"), 1)
    assert batch.state is not None
    for moved in (batch.to("cpu"), batch.pin_memory(), batch.to_framework("numpy")):
        assert moved.state == batch.state
    [batch] = taken(streamed(source).iter_batches(framework="torch"), 1)
    assert batch.state is not None


def test_states_of_several_epochs_made_by_workers(source: Any) -> None:
    expected = numbers(streamed(source, epochs=3))
    for count in (12, 13, 14, 26, 27):
        batches = taken(loaded(streamed(source, epochs=3), 3), count)
        dataset = streamed(source, epochs=3)
        dataset.load_state_dict(batches[-1].state)
        assert numbers(batches) + numbers(loaded(dataset, 2)) == expected


def test_the_dataset_does_not_know_what_was_taken_of_its_workers(source: Any) -> None:
    dataset = streamed(source)
    list(loaded(dataset))
    with pytest.raises(OptionError, match=r"Keep the state of the last one, batch.state"):
        dataset.state_dict()
    list(dataset)
    assert dataset.state_dict()["epoch"] == 1


# --- of a StatefulDataLoader


@pytest.mark.needs("torchdata")
@pytest.mark.parametrize("options", [{}, {"snapshot_every_n_steps": 3}], ids=["each", "third"])
@pytest.mark.parametrize("workers", [0, 1, 3])
def test_a_stateful_loader_goes_on_where_it_was(source: Any, workers: int, options: Any) -> None:
    expected = [batch for epoch in range(2) for batch in _epoch(source, epoch)]
    found: list[list[int]] = []
    state = None
    while len(found) < len(expected):
        loader = stateful(streamed(source), workers, **options)
        if state is not None:
            loader.load_state_dict(state)
        for at, batch in enumerate(loader):
            found += numbers([batch])
            if at == 4:
                break
        state = loader.state_dict()
        del loader
    assert found == expected


@pytest.mark.needs("torchdata")
@pytest.mark.parametrize("persistent", [False, True])
def test_a_stateful_loader_that_goes_on_comes_to_the_next_epochs(source: Any, persistent: bool) -> None:
    loader = stateful(streamed(source), 2, persistent_workers=persistent)
    first = taken(loader, 7)
    state = loader.state_dict()
    del loader
    dataset = streamed(source)
    loader = stateful(dataset, 2, persistent_workers=persistent)
    loader.load_state_dict(state)
    assert numbers(first) + numbers(loader) == _epoch(source, 0)
    assert [numbers(loader) for _ in range(2)] == [_epoch(source, 1), _epoch(source, 2)]


@pytest.mark.needs("torchdata")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_loader_loads_its_own_state(source: Any, workers: int) -> None:
    loader = stateful(streamed(source), workers)
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
def test_the_state_of_a_stateful_loader_goes_on_with_other_workers_and_ranks(
    source: Any, workers: int, options: Any
) -> None:
    [order] = numbers(streamed(source, ROWS))
    for count in (1, 4, 7, 12):
        loader = stateful(streamed(source, 8), workers, **options)
        first = taken(loader, count)
        state = loader.state_dict()
        del loader
        ranks = [streamed(source, 3, rank=rank, world_size=3) for rank in range(3)]
        for dataset in ranks:
            dataset.load_state_dict(state)
        rest = [flat(numbers(loaded(dataset, 2))) for dataset in ranks]
        assert flat(numbers(first)) == order[: count * 8]
        assert sorted(flat(rest)) == sorted(order[count * 8 :])


@pytest.mark.needs("torchdata")
def test_workers_whose_share_is_another_refuse_a_state(source: Any) -> None:
    loader = stateful(streamed(source), 2)
    taken(loader, 3)
    state = loader.state_dict()
    other = stateful(streamed(source, rank=0, world_size=2), 2)
    other.load_state_dict(state)
    with pytest.raises(OptionError, match=r"Give the state to the dataset, not to the loader"):
        list(other)


@pytest.mark.needs("torchdata")
@pytest.mark.parametrize("count", [5, 12, 13, 14, 30])
def test_a_stateful_loader_in_a_pass_of_several_epochs(source: Any, count: int) -> None:
    expected = numbers(streamed(source, epochs=3))
    loader = stateful(streamed(source, epochs=3), 3)
    first = taken(loader, count)
    state = loader.state_dict()
    del loader
    loader = stateful(streamed(source, epochs=3), 3)
    loader.load_state_dict(state)
    assert numbers(first) + numbers(loader) == expected
    dataset = streamed(source, epochs=3)
    dataset.load_state_dict(state)
    assert numbers(first) + numbers(dataset) == expected


def _epoch(source: Any, epoch: int) -> list[list[int]]:
    dataset = streamed(source)
    dataset.set_epoch(epoch)
    return numbers(dataset)


# --- of something else


def test_the_state_of_another_order_is_refused(source: Any, tmp_path: Path) -> None:
    state = streamed(source).state_dict()
    with pytest.raises(OptionError, match="seed was 0, is 1"):
        streamed(source, seed=1).load_state_dict(state)
    with pytest.raises(OptionError, match="shuffle was 'block', is False"):
        streamed(source, shuffle=False).load_state_dict(state)
    with pytest.raises(OptionError, match="window was 101, is"):
        streamed(source, memory_bytes=100).load_state_dict(state)
    with pytest.raises(OptionError, match="size was 101, is 50.*dataset was"):
        streamed(written(tmp_path / "d", 50)).load_state_dict(state)
    other = written(tmp_path / "other", ROWS, rows_in_shard=11)
    with pytest.raises(OptionError, match="dataset was '[0-9a-f]{16}', is"):
        streamed(other).load_state_dict(state)


def test_the_state_of_other_rows_is_refused(source: Any) -> None:
    folder = source.folder.url
    some = [
        StoredDataset[Sample](folder, where={"number": {"$lt": 50}}),
        StoredDataset[Sample](folder, where={"number": {"$gte": 51}}),
    ]
    states = [streamed(stored).state_dict() for stored in some]
    assert states[0]["size"] == states[1]["size"]
    with pytest.raises(OptionError, match="where"):
        streamed(some[0]).load_state_dict(states[1])


@pytest.mark.parametrize("wrong", [{}, {"epoch": 1}, None, [], {"version": 2}], ids=repr)
def test_what_is_no_state_is_refused(source: Any, wrong: Any) -> None:
    with pytest.raises(OptionError, match="this is no state of a StreamingDataset"):
        streamed(source).load_state_dict(wrong)


@pytest.mark.parametrize(
    "change", [{"step": -1}, {"epoch": -1}, {"start": 1000}, {"step": "1"}, {"batch_size": 0}], ids=str
)
def test_a_damaged_state_is_refused(source: Any, change: Any) -> None:
    dataset = streamed(source)
    with pytest.raises(OptionError):
        dataset.load_state_dict({**dataset.state_dict(), **change})
    assert sorted(flat(numbers(dataset))) == list(range(ROWS))
