"""MixedDataset, part by part: states, weights, draws, and passes compared with a model in plain Python."""

from __future__ import annotations

import bisect
import json
import pickle
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from quire.data import MixedDataset, _mixing
from quire.data._epoch_registry import Worker
from quire.data._mixing import MixedState, _cumulative_weights, _weights_by_size
from quire.errors import OptionError
from tests.data.sample_streams import (
    collect_workers,
    double,
    flatten,
    numbers,
    open_samples,
    stream_samples,
    write_samples,
)

pytestmark = pytest.mark.needs("pyarrow", "fsspec", "xxhash")
SIZES = (10, 6, 1)
BATCH_SIZE = 2
BITS = 2**64 - 1


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    place = tmp_path_factory.mktemp("mixing")
    return [open_samples(write_samples(place / str(size), size)) for size in SIZES]


def mix(stored: list[Any], *, epochs: Sequence[int | None] = (1, 1), **options: Any) -> MixedDataset:
    """A mix of datasets in the order of their rows, with the options of the mix or of the datasets."""
    own = {name: options.pop(name) for name in ("rank", "world_size", "batch_size", "last") if name in options}
    datasets = [
        stream_samples(source, **{"batch_size": BATCH_SIZE, "shuffle": False, "last": "keep", "epochs": count, **own})
        for source, count in zip(stored, epochs, strict=False)
    ]
    return MixedDataset(datasets, **options)


# --- the model


def splitmix(number: int) -> int:
    number = ((number ^ number >> 30) * 0xBF58476D1CE4E5B9) & BITS
    return ((number ^ number >> 27) * 0x94D049BB133111EB) & BITS


def mixed(number: int) -> int:
    number = splitmix(number + 0x9E3779B97F4A7C15 & BITS)
    return number ^ number >> 31


def draw(bounds: Sequence[float], seed: int, epoch: int, step: int) -> int:
    """The number of the dataset of a step, as docs describe it: a function of the seed, the pass and the step."""
    key = mixed(mixed(mixed(seed) + epoch))
    return bisect.bisect_right(bounds, (splitmix(key + step & BITS) >> 11) / 2**53)


Taken = tuple[str, list[int], int]
"""The name of a dataset, the rows of a batch, and the epoch of the dataset."""


def model(epochs: Sequence[int | None], bounds: Sequence[float], seed: int, stop: str) -> Iterator[list[Taken]]:
    """The passes of a mix on one rank."""
    starts = [0] * len(epochs)
    number = 0
    while True:
        batches: list[Taken] = []
        at = [(0, 0) for _ in epochs]  # epochs of the pass that are complete, and batches of the current one
        while len(batches) < 200:
            drawn = draw(bounds, seed, number, len(batches))
            whole = [done + (step == steps(i)) >= (epochs[i] or 1) for i, (done, step) in enumerate(at)]
            if all(whole) if stop == "all" else whole[drawn] and epochs[drawn] is not None:
                break
            done, step = at[drawn]
            if step == steps(drawn):
                done, step = done + 1, 0
            rows = list(range(SIZES[drawn]))[step * BATCH_SIZE : (step + 1) * BATCH_SIZE]
            batches.append((str(drawn), rows, starts[drawn] + done))
            at[drawn] = done, step + 1
        yield batches
        starts = [start + max(count or 1, done + 1) for start, count, (done, _) in zip(starts, epochs, at, strict=True)]
        number += 1


def steps(number: int) -> int:
    return -(-SIZES[number] // BATCH_SIZE)


def content(batch: Any) -> Taken:
    drawn = batch.state["drawn"]
    return drawn, numbers([batch])[0], batch.state["datasets"][drawn]["epoch"]


def through_json(state: Any) -> Any:
    return json.loads(json.dumps(state))


# --- weights and draws


@pytest.mark.parametrize(
    ("count", "weights", "bounds"),
    [
        (1, None, [1]),
        (4, None, [0.25, 0.5, 0.75, 1]),
        (3, (4, 3, 1), [0.5, 0.875, 1]),
        (3, (0, 1, 0), [0, 1, 1]),
        (2, [1e-300, 1e-300], [0.5, 1]),
    ],
)
def test_weights_become_cumulative_bounds(count: int, weights: Any, bounds: list[float]) -> None:
    assert _cumulative_weights(dict.fromkeys(map(str, range(count))), weights).tolist() == bounds


@pytest.mark.parametrize(
    ("count", "weights"),
    [
        (0, None),
        (0, ()),
        (2, (1,)),
        (2, (1, 1, 1)),
        (2, ((1, 1),)),
        (2, (1, -1)),
        (2, (2, -1)),
        (2, (0, 0)),
        (2, (1, float("nan"))),
        (2, (1, float("inf"))),
        (2, (1e308, 1e308)),
    ],
)
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_invalid_weights_are_rejected(count: int, weights: Any) -> None:
    with pytest.raises(OptionError, match=f"a weight from 0 up for each; got {count} and"):
        _cumulative_weights(dict.fromkeys(map(str, range(count))), weights)


@pytest.mark.parametrize("seed", [None, 1.5, "1"])
def test_seed_must_be_a_whole_number(stored: list[Any], seed: Any) -> None:
    with pytest.raises(OptionError, match="seed: expected a whole number, got"):
        mix(stored, seed=seed)


def test_draws_equal_golden_values(stored: list[Any]) -> None:
    """A mix is resumed by another version of quire: its draws and its name never change."""
    dataset = mix(stored, weights=(3, 1), seed=7)
    assert "".join(str(dataset._draw(2, step)) for step in range(24)) == "100000101000000000000000"
    assert dataset.state_dict()["mix"] == "f14c73f493261bbe"


@pytest.mark.parametrize("epoch", [0, 1, 10**6])
def test_draws_are_a_function_of_seed_pass_and_step(stored: list[Any], epoch: int) -> None:
    bounds = [0.5, 0.625, 1.0]
    dataset = mix(stored, epochs=(1, 1, 1), weights=(4, 1, 3), seed=3)
    for step in (*range(50), 4_095, 4_096, 4_097, 8_191, 8_192, 0, 10**9):
        assert dataset._draw(epoch, step) == draw(bounds, 3, epoch, step)


def test_chances_above_all_bounds_draw_the_last_dataset(stored: list[Any]) -> None:
    dataset = mix(stored)
    dataset._bounds = np.array([0.25, 0.5])  # as if the sum of the weights were rounded down
    assert [dataset._draw(0, step) for step in range(50)] == [
        min(draw([0.25, 0.5], 0, 0, step), 1) for step in range(50)
    ]


def test_fingerprint_depends_on_seed_weights_and_datasets(stored: list[Any]) -> None:
    options: list[dict[str, Any]] = [{}, {"seed": 1}, {"weights": (1, 2)}, {"epochs": (1, 1, 1)}, {"epochs": (1,)}]
    assert len({mix(stored, **chosen).state_dict()["mix"] for chosen in options}) == len(options)
    assert mix(stored).state_dict()["mix"] == mix(stored, weights=(2, 2), stop="all").state_dict()["mix"]


# --- states


@pytest.fixture
def state(stored: list[Any]) -> dict[str, Any]:
    batch_state = list(mix(stored, seed=2))[1].state
    assert batch_state is not None
    return through_json(batch_state)


def test_states_count_the_epochs_of_each_dataset(stored: list[Any]) -> None:
    for batch in mix(stored, **MIXES["several epochs"]):
        for part in batch.state["datasets"].values():
            assert (part["epoch"], part["before"]) == (part["done"], 0), "in the first pass"


def test_states_round_trip(stored: list[Any], state: dict[str, Any]) -> None:
    streams = mix(stored, seed=2)._streams
    assert MixedState.from_dict(state, streams).to_dict() == state
    assert MixedState.from_dict({**state, "added_later": 1}, streams).to_dict() == state
    zero = {**state, "epoch": 0, "step": 0, "origin": 0}
    assert MixedState.from_dict(zero, streams).to_dict() == zero


@pytest.mark.parametrize("name", ["epoch", "step", "origin", "mix", "drawn", "datasets"])
def test_states_without_a_field_are_rejected(state: dict[str, Any], name: str) -> None:
    del state[name]
    with pytest.raises(OptionError, match="this is no state of a MixedDataset"):
        MixedState.from_dict(state, {})


@pytest.mark.parametrize("value", [-1, 1.0, "1", None])
@pytest.mark.parametrize("name", ["epoch", "step", "origin"])
def test_states_with_invalid_counts_are_rejected(state: dict[str, Any], name: str, value: Any) -> None:
    with pytest.raises(OptionError, match="the state is damaged: epoch, step and origin"):
        MixedState.from_dict({**state, name: value}, {})


def test_states_of_other_mixes_are_rejected(stored: list[Any], state: dict[str, Any]) -> None:
    parts = state["datasets"]
    others = [
        (mix(stored), state),
        (mix(stored, seed=2, weights=(1, 2)), state),
        (mix(stored, seed=2), {**state, "datasets": {"0": parts["0"]}}),
        (mix(stored, seed=2), {**state, "datasets": {"0": parts["0"], "2": parts["1"]}}),
    ]
    for dataset, other in others:
        with pytest.raises(OptionError, match="the state is of another mix"):
            dataset.load_state_dict(other)
    with pytest.raises(OptionError, match="another order of rows"):
        mix(stored, seed=2).load_state_dict({**state, "datasets": {"0": parts["1"], "1": parts["0"]}})
    mix(stored, seed=2).load_state_dict(state)


# --- options


def test_datasets_have_names_or_numbers(stored: list[Any]) -> None:
    datasets = [stream_samples(source, 2) for source in stored]
    assert list(MixedDataset(datasets).datasets) == ["0", "1", "2"]
    assert list(MixedDataset(dict(zip("abc", datasets, strict=True))).datasets) == ["a", "b", "c"]


def test_mixes_are_registered_with_torch(stored: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[type[Any]] = []
    monkeypatch.setattr(_mixing, "register_with_torch", registered.append)
    content = pickle.dumps(mix(stored))
    assert registered == [MixedDataset]
    pickle.loads(content)
    assert registered == [MixedDataset] * 2, "a worker that is started unpickles it"


def test_framework_is_torch_if_one_dataset_has_it(stored: list[Any]) -> None:
    assert mix(stored).framework == "numpy"
    assert MixedDataset([stream_samples(stored[0]), stream_samples(stored[1], framework="torch")]).framework == "torch"


def test_batches_are_copies_of_stored_rows_if_nothing_changes_them(stored: list[Any]) -> None:
    assert mix(stored).only_copies is True
    assert mix(stored, mix="row").only_copies is False
    changed = stream_samples(stored[1], preprocessing={"number": double})
    assert MixedDataset([stream_samples(stored[0]), changed]).only_copies is False


def test_weights_by_size_have_twelve_decimals(stored: list[Any]) -> None:
    datasets = dict(enumerate(stream_samples(source) for source in stored))
    weights = _weights_by_size(datasets, 3)  # type: ignore[arg-type]
    assert weights == [1.0, 0.843432665302, 0.464158883361]


def test_rows_of_datasets_that_differ_in_batches_are_not_mixed(stored: list[Any]) -> None:
    def check(match: str, second: Any) -> None:
        with pytest.raises(OptionError, match=match):
            MixedDataset([stream_samples(stored[0]), second], mix="row")

    check("shapes is 'error' in '0' and 'pad' in '1'", stream_samples(stored[1], shapes="pad"))
    check("framework is 'numpy' in '0' and 'torch' in '1'", stream_samples(stored[1], framework="torch"))
    check("max_tokens has made them already", stream_samples(stored[1], 8, max_tokens=64, bucket_by="number"))
    check("'1' has windows instead: use mix='batch'", stream_samples(stored[1]).windows(2))


def test_trainer_check_knows_whether_a_mix_is_resumed(stored: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []
    monkeypatch.setattr(_mixing, "check_trainer", lambda *_, is_resumed: calls.append(is_resumed))
    own = mix(stored)
    state = next(iter(own)).state
    monkeypatch.setattr(_mixing, "this_worker", lambda: Worker(0, 1, 1))
    resumed = mix(stored)
    resumed.load_state_dict(state)
    next(resumed._begin(Worker(0, 1, 1)))
    assert calls == [False, True]


def test_workers_send_mixed_rows_in_shared_memory(stored: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[type[Any]] = []
    monkeypatch.setattr(_mixing, "use_shared_memory", used.append)
    batch = next(iter(mix(stored, mix="row")))
    assert used == []
    monkeypatch.setattr(_mixing, "in_worker", lambda: True)
    next(iter(mix(stored, mix="row")))
    assert set(used) == {type(batch)}


def test_mix_stops_at_the_first_end_or_when_all_ended(stored: list[Any]) -> None:
    with pytest.raises(OptionError, match="use 'first' or 'all'"):
        mix(stored, stop="never")
    with pytest.raises(OptionError, match=r"stop='all' waits for every dataset, and \['1'\] have weight 0"):
        mix(stored, weights=(1, 0), stop="all")
    assert {batch.state["drawn"] for batch in mix(stored, weights=(1, 0), stop="first")} == {"0"}


def test_datasets_without_end_have_no_length(stored: list[Any]) -> None:
    with pytest.raises(TypeError, match="never end, and have no length together"):
        len(mix(stored, epochs=(None, None)))
    assert len(mix(stored, epochs=(None, None), stop="all")) == len(mix(stored, stop="all"))
    assert len(mix(stored, **MIXES["one without end"])) == len(expected_passes("one without end")[0])


@pytest.mark.parametrize("stop", ["first", "all"])
def test_drawing_a_dataset_without_steps_raises(stored: list[Any], stop: Any) -> None:
    datasets = [stream_samples(source, 2, last="drop", shuffle=False) for source in (stored[0], stored[2])]
    dataset = MixedDataset(datasets, stop=stop)
    if stop == "first":
        assert all(batch.state["drawn"] == "0" for batch in dataset), "the pass ends when it would be drawn"
    else:
        with pytest.raises(OptionError, match="has no steps, and was drawn"):
            list(dataset)


# --- mixes

MIXES: dict[str, dict[str, Any]] = {
    "until the first ends": {"stop": "first"},
    "until all ended": {"stop": "all"},
    "a small dataset often": {"stop": "all", "weights": (2, 3, 3), "epochs": (1, 1, 1), "seed": 5},
    "several epochs": {"stop": "all", "weights": (1, 1), "epochs": (1, 3)},
    "several epochs until the first ends": {"stop": "first", "weights": (1, 2), "epochs": (2, 3), "seed": 1},
    "one without end": {"stop": "first", "weights": (3, 1, 8), "epochs": (1, 2, None), "seed": 2},
    "all of one without end": {"stop": "all", "weights": (2, 1), "epochs": (None, 1), "seed": 4},
}
BOUNDS = {"a small dataset often": [0.25, 0.625, 1], "several epochs until the first ends": [1 / 3, 1]}
BOUNDS |= {"one without end": [0.25, 1 / 3, 1], "all of one without end": [2 / 3, 1]}
PASSES = 4


def expected_passes(name: str) -> list[list[Taken]]:
    options = MIXES[name]
    passes = model(options.get("epochs", (1, 1)), BOUNDS.get(name, [0.5, 1]), options.get("seed", 0), options["stop"])
    expected = [next(passes) for _ in range(PASSES)]
    assert all(0 < len(batches) < 200 for batches in expected)
    return expected


# --- workers that hold their own state


def iterate_as(dataset: MixedDataset, worker: Worker, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Iterate as a worker process does, in this process."""
    monkeypatch.setattr(_mixing, "this_worker", lambda: worker)
    return iter(dataset)


@pytest.mark.parametrize("name", ["until the first ends", "until all ended", "several epochs"])
@pytest.mark.parametrize("count", [0, 1, 2])
def test_workers_resume_from_their_own_states(
    stored: list[Any], name: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, following, *_ = expected_passes(name)
    first, second = mix(stored, **MIXES[name]), mix(stored, **MIXES[name])
    states = []
    for number in range(2):
        batches = iterate_as(first, Worker(number, 2, 5), monkeypatch)
        assert [content(next(batches)) for _ in range(count)] == expected[number : number + 2 * count : 2]
        states.append(through_json(first.state_dict()))
        assert states[-1]["step"] == (number + 2 * count - 1 if count else 0)
    for number in (1, 0):
        worker = Worker(number, 2, 7)
        monkeypatch.setattr(_mixing, "this_worker", lambda worker=worker: worker)
        second.load_state_dict(states[number])
        assert second.state_dict() == states[number]
        batches = iterate_as(second, worker, monkeypatch)
        assert [content(batch) for batch in batches] == expected[number + 2 * count :: 2]
    for number in range(2):
        batches = iterate_as(second, Worker(number, 2, 9), monkeypatch)
        assert [content(batch) for batch in batches] == following[number::2]


def test_state_of_a_new_mix_by_rows_begins_with_the_first_row(stored: list[Any]) -> None:
    resumed = mix(stored, mix="row")
    resumed.load_state_dict(mix(stored, mix="row").state_dict())
    assert numbers(resumed) == numbers(mix(stored, mix="row"))


@pytest.mark.parametrize("by", ["batch", "row"])
def test_worker_rejects_a_state_with_other_steps(stored: list[Any], monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    dataset = mix(stored, mix=by)
    batches = iterate_as(dataset, Worker(0, 1, 5), monkeypatch)
    next(batches)
    state = dataset.state_dict()
    for change in ({"batch_size": 1}, {"world_size": 2, "rank": 0}, {"last": "drop"}):
        other = mix(stored, mix=by, **change)

        def resume(other: MixedDataset = other) -> None:
            other.load_state_dict(state)
            if by == "batch":  # where the datasets check their states when a pass begins
                iterate_as(other, Worker(0, 1, 7), monkeypatch)

        with pytest.raises(OptionError, match="give the state to the MixedDataset itself"):
            resume()


def test_state_dict_raises_with_workers(stored: list[Any]) -> None:
    dataset = mix(stored)
    assert dataset.state_dict()["step"] == 0
    collect_workers(dataset, 2)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"keep the state of the last one, batch\.state"):
        dataset.state_dict()
    list(dataset)
    assert dataset.state_dict()["epoch"] == 1


# --- passes


@pytest.mark.parametrize("workers", [0, 3])
@pytest.mark.parametrize("name", MIXES)
def test_passes_match_the_model(stored: list[Any], name: str, workers: int) -> None:
    dataset = mix(stored, **MIXES[name])
    for number, expected in enumerate(expected_passes(name)):
        if not workers:
            assert len(dataset) == len(expected)
        batches = collect_workers(dataset, workers, mark=number + 1) if workers else list(dataset)  # type: ignore[arg-type]
        assert [content(batch) for batch in batches] == expected
        states = [batch.state for batch in batches]
        assert [(state["epoch"], state["step"], state["origin"]) for state in states] == [
            (number, step + 1, 0) for step in range(len(expected))
        ]
        if not workers:
            assert dataset.state_dict() == states[-1]


@pytest.mark.parametrize(
    ("name", "workers"), [*((name, 0) for name in MIXES), ("until all ended", 2), ("one without end", 2)]
)
def test_mixes_resume_with_the_next_batch(stored: list[Any], name: str, workers: int) -> None:
    expected = expected_passes(name)
    dataset = mix(stored, **MIXES[name])
    for number in (0, 1):
        batches = list(dataset)
        for count in {1, len(batches) // 2 + 1, len(batches) - 1, len(batches)} if number == 0 else {1, len(batches)}:
            batch = batches[count - 1]
            resumed = mix(stored, **MIXES[name])
            resumed.load_state_dict(through_json(batch.state))
            rest = [expected[number][count:], *expected[number + 1 :]]
            is_over = not rest[0]
            if is_over:
                del rest[0]
            if not workers:
                assert len(resumed) == len(expected[number + is_over]), "of the whole pass"
                state = resumed.state_dict()
                at = (number + is_over, 0 if is_over else count)
                assert (state["epoch"], state["step"], state["origin"], state["drawn"]) == (*at, at[1], "")
            for mark, following in enumerate(rest[: 1 + is_over], 1):
                taken = collect_workers(resumed, workers, mark) if workers else resumed  # type: ignore[arg-type]
                assert [content(batch) for batch in taken] == following


def test_resumed_mix_counts_from_its_start(stored: list[Any]) -> None:
    state = next(iter(mix(stored))).state
    for workers in (0, 2, 3):
        resumed = mix(stored)
        resumed.load_state_dict(state)
        batches = collect_workers(resumed, workers)  # type: ignore[arg-type]
        assert [(batch.state["step"], batch.state["origin"]) for batch in batches] == [
            (2 + place, 1) for place in range(len(batches))
        ]


def test_state_of_a_new_mix_counts_the_passes_of_another_mix_over_its_datasets(stored: list[Any]) -> None:
    first = mix(stored, epochs=(1, None), weights=(1, 0), stop="first")
    assert list(first)
    second = MixedDataset(first.datasets)
    state = second.state_dict()
    assert [part["epoch"] for part in state["datasets"].values()] == [1, 1]
    resumed = MixedDataset(mix(stored, epochs=(1, None)).datasets)
    resumed.load_state_dict(state)
    assert [content(batch) for batch in second] == [content(batch) for batch in resumed]


@pytest.mark.parametrize("name", MIXES)
def test_interrupted_pass_is_followed_by_the_next(stored: list[Any], name: str) -> None:
    expected = expected_passes(name)
    dataset = mix(stored, **MIXES[name])
    batches = iter(dataset)
    assert content(next(batches)) == expected[0][0]
    assert len(dataset) == len(expected[0]), "the length is that of the pass under way"
    del batches
    taken = [batch.state for batch in dataset]
    for state, (drawn, _, _) in zip(taken, expected[1], strict=False):
        assert (state["epoch"], state["drawn"]) == (1, drawn)


def test_copies_continue_with_the_next_pass(stored: list[Any]) -> None:
    expected = expected_passes("several epochs")
    dataset = mix(stored, **MIXES["several epochs"])
    for batches in expected:
        assert [content(batch) for batch in dataset] == batches
        dataset = pickle.loads(pickle.dumps(dataset))


@pytest.mark.parametrize("name", ["until the first ends", "until all ended", "several epochs"])
def test_ranks_draw_from_the_same_datasets(stored: list[Any], name: str) -> None:
    ranks = [list(mix(stored, rank=rank, world_size=2, batch_size=1, **MIXES[name])) for rank in range(2)]
    expected = expected_passes(name)[0]
    taken = list(zip(*ranks, strict=True))
    assert [first.state["drawn"] for first, _ in taken] == [drawn for drawn, _, _ in expected]
    assert [flatten(numbers(pair)) for pair in taken] == [rows for _, rows, _ in expected]
    assert all(first.state == second.state for first, second in taken)
