"""Several datasets as one stream of batches."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from quire.data import MixedDataset
from quire.errors import OptionError
from tests.data.sample_streams import flatten, numbers, open_samples, stream_samples, write_samples

pytestmark = [
    pytest.mark.needs("torch", "pyarrow", "fsspec", "xxhash"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata 0.11 calls it; torch 2.13 warns
]
SIZES = {"a": 100, "b": 60, "c": 30}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    place = tmp_path_factory.mktemp("stream")
    return {name: open_samples(write_samples(place / name, rows)) for name, rows in SIZES.items()}


def mixed(sources: Any, weights: Any = (3, 2, 1), **options: Any) -> MixedDataset:
    share = {name: options.pop(name) for name in ("rank", "world_size", "batch_size") if name in options}
    datasets = {name: stream_samples(source, **{"batch_size": 4, **share}) for name, source in sources.items()}
    return MixedDataset(datasets, weights, **options)


def taken(batches: Any) -> list[tuple[str, list[int]]]:
    """The dataset and the rows of each batch."""
    return [(batch.state["drawn"], *numbers([batch])) for batch in batches]


def rows_of(batches: Any, name: str) -> list[int]:
    return flatten(rows for drawn, rows in batches if drawn == name)


def together(dataset: Any, workers: int, mark: int = 1) -> list[Any]:
    shares = [list(dataset.batches(worker, workers, mark)) for worker in range(workers)]
    return [shares[i % workers][i // workers] for i in range(sum(map(len, shares)))]


def test_stop_first_ends_with_the_first_dataset(sources: Any) -> None:
    dataset = mixed(sources)
    for _ in range(3):
        length, batches = len(dataset), taken(dataset)
        assert length == len(batches)
        ended = [name for name, size in SIZES.items() if len(rows_of(batches, name)) == size]
        assert ended
        for name in SIZES:
            assert len(set(rows_of(batches, name))) == len(rows_of(batches, name)), "no row twice"


def test_stop_all_ends_when_all_were_read(sources: Any) -> None:
    dataset = mixed(sources, (1, 1, 4), stop="all")
    for _ in range(2):
        length, batches = len(dataset), taken(dataset)
        assert length == len(batches)
        for name, size in SIZES.items():
            assert sorted(rows_of(batches, name)[:size]) == list(range(size))
        assert len(rows_of(batches, "c")) > 2 * SIZES["c"]
        assert rows_of(batches, "c")[:30] != rows_of(batches, "c")[30:60], "another epoch"


def test_draws_follow_the_weights_and_the_seed(sources: Any) -> None:
    dataset = mixed(sources, (5, 3, 0), stop="first", seed=3)
    drawn = [name for name, _ in taken(dataset)]
    assert taken(mixed(sources, (5, 3, 0), seed=3)) == taken(mixed(sources, (0.5, 0.3, 0), seed=3))
    assert "c" not in drawn
    many = Counter(dataset._draws(0, 0).tolist())
    assert abs(many[0] / 4096 - 5 / 8) < 0.03
    other = [name for name, _ in taken(mixed(sources, (5, 3, 0), seed=4))]
    assert other != drawn
    assert drawn != [name for name, _ in taken(dataset)], "every pass draws anew"


def test_datasets_without_names_are_numbered(sources: Any) -> None:
    dataset = MixedDataset([stream_samples(source, 4) for source in sources.values()])
    assert {name for name, _ in taken(dataset)} == {"0", "1", "2"}


def test_ranks_draw_the_same_datasets_and_divide_the_rows(sources: Any) -> None:
    batches = [taken(mixed(sources, rank=rank, world_size=2, stop="all")) for rank in range(2)]
    assert [name for name, _ in batches[0]] == [name for name, _ in batches[1]]
    for name, size in SIZES.items():
        once = [flatten(rows) for rows in zip(*([r for n, r in part if n == name] for part in batches), strict=True)]
        assert sorted(flatten(once)[:size]) == list(range(size))


@pytest.mark.parametrize("stop", ["first", "all"])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_workers_yield_the_batches_of_one_process(sources: Any, workers: int, stop: Any) -> None:
    expected = [taken(each) for dataset in [mixed(sources, stop=stop)] for each in (dataset, dataset)]
    dataset = mixed(sources, stop=stop)
    assert [taken(together(dataset, workers, mark)) for mark in (1, 2)] == expected
    loader = DataLoader(
        mixed(sources, stop=stop), batch_size=None, num_workers=min(workers, 2), persistent_workers=True
    )  # type: ignore[arg-type]
    assert [taken(loader) for _ in range(2)] == expected


@pytest.mark.parametrize("stop", ["first", "all"])
def test_resumed_mix_equals_an_uninterrupted_one(sources: Any, stop: Any) -> None:
    whole = mixed(sources, stop=stop)
    expected = [taken(whole), taken(whole)]
    for count in (1, 5, 11, len(expected[0]) - 1):
        batches = iter(mixed(sources, stop=stop))
        first = [next(batches) for _ in range(count)]
        state = json.loads(json.dumps(first[-1].state))
        assert len(json.dumps(state)) < 1000 * (len(SIZES) + 1)
        for workers in (0, 2):
            dataset = mixed(sources, stop=stop)
            dataset.load_state_dict(state)
            rest = together(dataset, workers) if workers else list(dataset)
            assert taken(first) + taken(rest) == expected[0]
            assert taken(dataset) == expected[1]
    dataset = mixed(sources, stop=stop)
    other = mixed(sources, stop=stop)
    list(dataset)
    other.load_state_dict(dataset.state_dict())


def test_state_resumes_with_other_ranks(sources: Any) -> None:
    first = [taken(list(mixed(sources, stop="all", rank=rank, world_size=2))[:6]) for rank in range(2)]
    state = list(mixed(sources, stop="all", rank=0, world_size=2))[5].state
    rest = []
    for rank in range(3):
        dataset = mixed(sources, stop="all", rank=rank, world_size=3)
        dataset.load_state_dict(state)  # type: ignore[arg-type]
        rest.append(taken(dataset))
    for name, size in SIZES.items():
        before = flatten(rows_of(part, name) for part in first)
        steps = zip(*([rows for drawn, rows in part if drawn == name] for part in rest), strict=True)
        after = flatten(flatten(step) for step in steps)
        assert sorted((before + after)[:size]) == list(range(size))


@pytest.mark.needs("torchdata")
@pytest.mark.parametrize("workers", [0, 2])
def test_stateful_loader_resumes_where_it_was(sources: Any, workers: int) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    expected = taken(mixed(sources))
    loader = StatefulDataLoader(mixed(sources), batch_size=None, num_workers=workers)
    batches = iter(loader)
    first = [next(batches) for _ in range(7)]
    state = loader.state_dict()
    del batches, loader
    loader = StatefulDataLoader(mixed(sources), batch_size=None, num_workers=workers)
    loader.load_state_dict(state)
    assert taken(first) + taken(loader) == expected


def test_state_dict_raises_with_workers(sources: Any) -> None:
    dataset = mixed(sources)
    list(DataLoader(dataset, batch_size=None, num_workers=1))  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"batch.state"):
        dataset.state_dict()


def test_state_of_another_mix_is_rejected(sources: Any) -> None:
    state = mixed(sources).state_dict()
    for other in (mixed(sources, seed=1), mixed(sources, (1, 1, 1)), mixed({"a": sources["a"]}, [1])):
        with pytest.raises(OptionError, match="another mix"):
            other.load_state_dict(state)
    with pytest.raises(OptionError, match="no state of a MixedDataset"):
        mixed(sources).load_state_dict({})
    swapped = mixed({"a": sources["b"], "b": sources["a"], "c": sources["c"]})
    with pytest.raises(OptionError, match="another order of rows"):
        swapped.load_state_dict(state)


@pytest.mark.parametrize("weights", [(1, 2), (1, -1, 1), (0, 0, 0), (float("nan"), 1, 1)], ids=str)
def test_wrong_weights_are_rejected(sources: Any, weights: Any) -> None:
    with pytest.raises(OptionError, match="a weight from 0 up for each"):
        mixed(sources, weights)


def test_wrong_options_are_rejected(sources: Any, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="use 'first' or 'all'"):
        mixed(sources, stop="never")
    with pytest.raises(OptionError, match="a mix has datasets"):
        MixedDataset([])
    nothing = stream_samples(write_samples(tmp_path / "d", 3), last="drop")
    with pytest.raises(OptionError, match="has no steps, and was drawn"):
        list(MixedDataset([nothing, stream_samples(sources["a"])], stop="all"))
    with pytest.raises(OptionError, match=r"stop='all' waits for every dataset, and \['b'\] have weight 0"):
        mixed(sources, (1, 0, 1), stop="all")


@pytest.mark.parametrize("change", [{"step": -1}, {"epoch": "0"}, {"origin": None}], ids=str)
def test_damaged_state_is_rejected(sources: Any, change: Any) -> None:
    dataset = mixed(sources)
    with pytest.raises(OptionError, match="the state is damaged"):
        dataset.load_state_dict({**dataset.state_dict(), **change})


@pytest.mark.parametrize("change", [{"step": -1}, {"start": 1000}], ids=str)
def test_rejected_state_changes_nothing(sources: Any, change: Any) -> None:
    dataset = mixed(sources)
    before = dataset.state_dict()
    state = list(dataset)[10].state
    assert state is not None
    parts = state["datasets"]
    fresh = mixed(sources)
    with pytest.raises(OptionError):
        fresh.load_state_dict({**state, "datasets": {**parts, "c": {**parts["c"], **change}}})
    assert fresh.state_dict() == before


@pytest.mark.parametrize("state", [None, [], {"datasets": 1}], ids=repr)
def test_other_values_are_rejected_as_state(sources: Any, state: Any) -> None:
    with pytest.raises(OptionError, match="no state of a MixedDataset"):
        mixed(sources).load_state_dict(state)


# --- blocks of tokens and windows


def blocks_and_windows(sources: Any, **options: Any) -> MixedDataset:
    """A mix of rows, of blocks of 6 of the numbers of vectors, and of windows of 5 rows."""
    datasets = {name: stream_samples(source, 4) for name, source in sources.items()}
    parts = {"a": datasets["a"], "b": datasets["b"].pack("vector", 6), "c": datasets["c"].windows(5, 5)}
    return MixedDataset(parts, [1, 3, 1], stop="all", **options)


def describe_batches(batches: Any) -> list[tuple[str, Any]]:
    return [
        (batch.state["drawn"], batch.tokens.tolist() if batch.state["drawn"] == "b" else batch.number.tolist())
        for batch in batches
    ]


@pytest.mark.parametrize("workers", [0, 2])
def test_mix_of_rows_blocks_and_windows_resumes_in_a_data_loader(sources: Any, workers: int) -> None:
    expected = describe_batches(blocks_and_windows(sources))
    tokens = [token for name, batch in expected if name == "b" for block in batch for token in block]
    assert sorted(tokens[:240]) == [row for row in range(60) for _ in range(4)], "each token once in the first epoch"
    dataset, context = blocks_and_windows(sources), "fork" if workers else None
    batches = []
    for number, batch in enumerate(DataLoader(dataset, None, num_workers=workers, multiprocessing_context=context)):
        batches.append(batch)
        if number == 10:
            break
    assert describe_batches(batches) == expected[:11]
    resumed = blocks_and_windows(sources)
    resumed.load_state_dict(json.loads(json.dumps(batches[-1].state)))
    assert describe_batches(resumed) == expected[11:]


def test_state_of_blocks_is_small_in_a_mix(sources: Any) -> None:
    state = list(blocks_and_windows(sources))[-1].state
    assert len(json.dumps(state["datasets"]["b"])) < 200


def test_states_of_other_kinds_of_parts_are_rejected(sources: Any) -> None:
    state = blocks_and_windows(sources).state_dict()
    parts = state["datasets"]
    for other in ({**parts, "b": parts["a"]}, {**parts, "a": parts["b"]}):
        with pytest.raises(OptionError, match="no state"):
            blocks_and_windows(sources).load_state_dict({**state, "datasets": other})


def test_temperature_compares_tokens_with_tokens_only(sources: Any) -> None:
    packed = {name: stream_samples(source, 4).pack("vector", 6) for name, source in sources.items()}
    by_tokens = MixedDataset(packed, temperature=1.0)
    assert by_tokens._mix == MixedDataset(packed, [size / 100 for size in SIZES.values()])._mix
    with pytest.raises(OptionError, match="'a': 'rows', 'b': 'tokens'.*pass weights"):
        MixedDataset({"a": stream_samples(sources["a"]), "b": packed["b"]}, temperature=1.0)


def test_rows_of_blocks_and_windows_are_not_mixed(sources: Any) -> None:
    rows = stream_samples(sources["a"], 4)
    for part, unit in ((rows.pack("vector", 6), "tokens"), (rows.windows(5), "windows")):
        with pytest.raises(OptionError, match=f"'b' has {unit}.*use mix='batch'"):
            MixedDataset({"a": rows, "b": part}, mix="row")
