"""MixedDataset with mix='row': the plan compared with a model of fractions, then batches, ranks, states and loaders."""

from __future__ import annotations

import itertools
import json
import pickle
from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quire import BaseDocument
from quire.data import MixedDataset, StreamingDataset, _row_mixing
from quire.data._bijection import LARGEST
from quire.data._row_mixing import RowMix, RowState, Schedule, StepMemory, to_units
from quire.errors import ColumnError, OptionError
from quire.storage import write_dataset
from quire.typing import AnyTensor, NdArray, float32
from tests.data.sample_streams import (
    Sample,
    collect_workers,
    double,
    flatten,
    numbers,
    open_samples,
    samples,
    stream_samples,
    write_samples,
)

pytestmark = pytest.mark.needs("pyarrow", "fsspec", "xxhash")
SIZES = {"a": 40, "b": 23, "c": 7}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("rows")
    return {name: open_samples(write_samples(folder / name, size)) for name, size in SIZES.items()}


def mix(stored: dict[str, Any], weights: Any = (4, 2, 1), **options: Any) -> MixedDataset[Any]:
    own = {
        name: options.pop(name) for name in ("rank", "world_size", "batch_size", "last", "epochs") if name in options
    }
    if options.keys() & {"rows", "schedule", "temperature"}:
        weights = None
    parts = {name: stream_samples(source, **{"batch_size": 5, **own}) for name, source in stored.items()}
    return MixedDataset(parts, weights, mix="row", **options)


def content(batch: Any) -> list[tuple[int, int]]:
    """The dataset and the number of each row that is no padding."""
    mask = np.asarray(batch.mask())
    return list(zip(np.asarray(batch.sources)[mask].tolist(), numbers([batch])[0], strict=True))


def through_json(state: Any) -> Any:
    return json.loads(json.dumps(state))


# --- the plan


class Model:
    """The plan in fractions: rows of each dataset with a release and a due date, the earliest due date first."""

    def __init__(self, breakpoints: list[tuple[int, list[int]]]) -> None:
        # Shares are whole units in the plan: 5/18 is rounded, which decides whether a row is due where it is just due.
        self.breakpoints = [(start, [int(unit) for unit in to_units(weights)]) for start, weights in breakpoints]
        self.margin = Fraction(1, max(2 * len(breakpoints[0][1]) - 2, 2))
        self.counts, self.rows = [0] * len(breakpoints[0][1]), 0

    def ideal(self, number: int, rows: int) -> Fraction:
        total = Fraction(0)
        for segment, (start, weights) in enumerate(self.breakpoints):
            end = self.breakpoints[segment + 1][0] if segment + 1 < len(self.breakpoints) else rows
            total += max(0, min(end, rows) - start) * Fraction(weights[number], sum(weights))
        return total

    def due(self, number: int, row: int, most: int) -> int:
        return next((n for n in range(most) if self.ideal(number, n) > row + 1 - self.margin), most)

    def take(self, rows: int) -> list[int]:
        end = self.rows + rows
        released = [
            (self.due(number, row, end + 400), number, row)
            for number, count in enumerate(self.counts)
            for row in range(count, count + rows)
            if self.ideal(number, end) - row >= self.margin
        ]
        for _, number, _ in sorted(released)[:rows]:
            self.counts[number] += 1
        self.rows = end
        return list(self.counts)


@st.composite
def schedules(draw: Any, most: int = 5) -> list[tuple[int, list[int]]]:
    datasets = draw(st.integers(1, most))
    weights = st.lists(st.integers(0, 9), min_size=datasets, max_size=datasets).filter(any)
    starts = sorted({0, *draw(st.lists(st.integers(1, 120), max_size=3))})
    return [(start, draw(weights)) for start in starts]


def plan(breakpoints: list[tuple[int, list[int]]]) -> RowMix:
    starts, units = [start for start, _ in breakpoints], [to_units(weights) for _, weights in breakpoints]
    return RowMix(Schedule(starts, units), [10**9] * len(units[0]), None, [None] * len(units[0]))


@settings(deadline=None, max_examples=60)
@given(breakpoints=schedules(4), steps=st.lists(st.integers(1, 12), max_size=12))
@example(breakpoints=[(0, [0, 5, 6, 7]), (3, [0, 0, 0, 1])], steps=[1])
def test_plan_equals_the_model(breakpoints: list[tuple[int, list[int]]], steps: list[int]) -> None:
    model, mixed = Model(breakpoints), plan(breakpoints)
    current, counts = mixed.pass_at(0), [0] * len(breakpoints[0][1])
    for rows in steps:
        counts = mixed.advance(current, sum(counts), counts, rows)
        assert counts == model.take(rows)


@settings(deadline=None, max_examples=150)
@given(
    weights=st.lists(st.floats(0, 1) | st.integers(0, 10**6), min_size=1, max_size=12).filter(lambda w: sum(w) > 1e-9),
    steps=st.lists(st.integers(1, 40) | st.integers(1, 10**6), min_size=1, max_size=60),
)
def test_counts_are_less_than_one_row_from_the_ideal(weights: list[float], steps: list[int]) -> None:
    mixed = plan([(0, weights)])  # type: ignore[list-item]
    shares = [Fraction(unit, 2**53) for unit in to_units(weights)]
    assert sum(shares) == 1
    assert all(
        abs(s - Fraction(w) / sum(map(Fraction, weights))) < Fraction(1, 2**53)
        for s, w in zip(shares, weights, strict=True)
    )
    current, counts = mixed.pass_at(0), [0] * len(weights)
    for rows in steps:
        before, counts = counts, mixed.advance(current, sum(counts), counts, rows)
        assert sum(counts) == sum(before) + rows
        assert all(new >= old for old, new in zip(before, counts, strict=True))
        assert all(abs(count - share * sum(counts)) < 1 for count, share in zip(counts, shares, strict=True))
        assert mixed.unpack(current, sum(counts), mixed.pack(current, sum(counts), counts)) == counts
        assert mixed.is_possible(current, sum(counts), counts)


def test_plan_holds_for_thousands_of_changing_steps() -> None:
    """Small steps of many datasets are where taking the largest remainder fails."""
    random = np.random.default_rng(0)
    for datasets in (2, 3, 5, 9, 20):
        weights = (random.random(datasets) ** 3 + 1e-3).tolist()
        shares = [Fraction(unit, 2**53) for unit in to_units(weights)]
        mixed = plan([(0, weights)])
        current, counts, rows = mixed.pass_at(0), [0] * datasets, 0
        for step in random.integers(1, 4, 1_000).tolist():
            counts = mixed.advance(current, rows, counts, step)
            rows += step
            assert max(abs(count - share * rows) for count, share in zip(counts, shares, strict=True)) <= 1 - Fraction(
                1, max(2 * datasets - 2, 2)
            )


@settings(deadline=None, max_examples=100)
@given(breakpoints=schedules(), steps=st.lists(st.integers(1, 50), min_size=1, max_size=20))
def test_schedules_follow_the_rows_seen(breakpoints: list[tuple[int, list[int]]], steps: list[int]) -> None:
    model, mixed = Model(breakpoints), plan(breakpoints)
    current, counts = mixed.pass_at(0), [0] * len(breakpoints[0][1])
    for rows in steps:
        counts = mixed.advance(current, sum(counts), counts, rows)
        for number, count in enumerate(counts):
            assert abs(count - model.ideal(number, sum(counts))) < 1


@settings(deadline=None, max_examples=100)
@given(data=st.data(), sizes=st.lists(st.integers(1, 60), min_size=1, max_size=5), step=st.integers(1, 30))
def test_fixed_rows_are_exact_in_every_pass(data: Any, sizes: list[int], step: int) -> None:
    fixed = [data.draw(st.integers(0, 3 * size)) for size in sizes]
    if not sum(fixed):
        return
    mixed = RowMix(Schedule([0], [fixed], sum(fixed)), sizes, fixed)
    read = [0] * len(sizes)
    for number in range(3):
        current = mixed.pass_at(number)
        assert [epoch * size + at for (epoch, at), size in zip(current.starts, sizes, strict=True)] == read
        counts, rows = [0] * len(sizes), 0
        while rows < current.length:
            taken = min(step, current.length - rows)
            counts = mixed.advance(current, rows, counts, taken)
            rows += taken
        assert counts == fixed
        read = [old + new for old, new in zip(read, counts, strict=True)]


@settings(deadline=None, max_examples=150)
@given(
    breakpoints=schedules(),
    data=st.data(),
    step=st.integers(1, 30),
    number=st.integers(0, 4),
    stops_after_all=st.booleans(),
)
def test_passes_end_at_the_limits(
    breakpoints: list[tuple[int, list[int]]], data: Any, step: int, number: int, stops_after_all: bool
) -> None:
    datasets = len(breakpoints[0][1])
    sizes = data.draw(st.lists(st.integers(1, 40), min_size=datasets, max_size=datasets))
    if stops_after_all and not all(breakpoints[-1][1]):
        return
    starts, units = [start for start, _ in breakpoints], [to_units(weights) for _, weights in breakpoints]
    mixed = RowMix(Schedule(starts, units), sizes, None, sizes, stops_after_all=stops_after_all)
    current = mixed.pass_at(number)
    assert current.length < LARGEST
    counts, rows = [0] * datasets, 0
    while rows < current.length:
        taken = min(step, current.length - rows)
        counts = mixed.advance(current, rows, counts, taken)
        rows += taken
    if stops_after_all:
        assert all(count >= size for count, size in zip(counts, sizes, strict=True))
    else:
        assert all(count <= size for count, size in zip(counts, sizes, strict=True))
        assert any(count >= size - 1 for count, size in zip(counts, sizes, strict=True)), "a dataset has ended"
    following = mixed.pass_at(number + 1)
    assert following.seen == current.seen + current.length
    for (epoch, position), (later, other), count, size in zip(
        current.starts, following.starts, counts, sizes, strict=True
    ):
        assert position == other == 0
        assert epoch + -(-count // size) <= later <= epoch + count // size + 1, "the next epoch that was not begun"


def test_passes_far_away_are_found_at_once() -> None:
    mixed = RowMix(Schedule([0, 100], [to_units([1, 3]), to_units([1, 1])]), [40, 20], None, [40, 20])
    far = mixed.pass_at(10**12)
    near = mixed.pass_at(50)
    assert far.length == near.length == 40
    assert far.seen - near.seen == 40 * (10**12 - 50)
    assert far.starts[0][0] - near.starts[0][0] == 10**12 - 50


def test_passes_without_end_begin_with_other_epochs() -> None:
    mixed = plan([(0, [1, 2])])
    assert mixed.pass_at(0).is_endless
    assert [mixed.pass_at(number).starts[1] for number in range(3)] == [(0, 0), (2**32, 0), (2**33, 0)]


def test_datasets_without_end_do_not_hide_the_limits_of_others() -> None:
    for limits in ([None, 5], [5, None]):
        mixed = RowMix(Schedule([0], [to_units([1, 1])]), [10, 10], None, limits)
        assert 10 <= mixed.pass_at(0).length <= 11


def test_pass_ends_with_the_row_that_completes_the_last_dataset() -> None:
    # A unit is half a row. Row 3 of a dataset is due when its ideal exceeds 2.5 rows, which is after 6 rows of both.
    schedule = Schedule([0], [[1, 1]], scale=2)
    assert RowMix(schedule, [3, 3], None, [3, 3], stops_after_all=True).pass_at(0).length == 6
    assert [schedule.reach(0, ideal) for ideal in (0, 1, 6)] == [0, 1, 6]


# --- batches


@pytest.mark.parametrize("last", ["keep", "drop", "pad"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("stop", ["first", "all"])
def test_ranks_have_equal_shares_and_equal_states(stored: Any, world_size: int, last: Any, stop: Any) -> None:
    ranks = [mix(stored, rank=r, world_size=world_size, batch_size=4, last=last, stop=stop) for r in range(world_size)]
    lengths = {len(dataset) for dataset in ranks}
    steps = list(zip(*ranks, strict=True))
    assert lengths == {len(steps)}
    for step in steps:
        states = [batch.state for batch in step]
        assert all(state == states[0] for state in states)
        drawn = list(states[0]["drawn"].values())
        shares = np.array([np.bincount([part for part, _ in content(batch)], minlength=3) for batch in step])
        assert shares.sum(0).tolist() == drawn
        assert (np.abs(shares - np.array(drawn) / world_size) < 1).all(), "up to one row"
        sizes = [len(batch) for batch in step]
        assert sizes == [4] * world_size if last != "keep" or step is not steps[-1] else max(sizes) - min(sizes) <= 1
        for batch in step:
            assert (np.diff(batch.sources) >= 0).all(), "sorted by dataset"


@pytest.mark.parametrize("stop", ["first", "all"])
def test_rows_of_a_dataset_repeat_only_after_its_epoch(stored: Any, stop: Any) -> None:
    dataset = mix(stored, (1, 1, 1), stop=stop)
    epochs: dict[tuple[int, str], set[int]] = {}
    for _ in range(2):
        rows = flatten([content(batch) for batch in dataset])  # type: ignore[misc]
        for number, (name, size) in enumerate(SIZES.items()):
            own = [row for part, row in rows if part == number]
            for begin in range(0, len(own), size):
                epoch = own[begin : begin + size]
                assert len(set(epoch)) == len(epoch), f"{name}: no row twice in an epoch"
        counts = Counter(part for part, _ in rows)
        assert all(counts[number] >= size for number, size in enumerate(SIZES.values())) is (stop == "all")
        epochs.clear()


def test_fixed_epochs_continue_in_the_next_pass(stored: Any) -> None:
    dataset = mix(stored, rows={"a": 0.5, "b": 1.0, "c": 2.5})
    expected = [20, 23, round(2.5 * 7)]
    passes = []
    for _ in range(2):
        assert len(dataset) == -(-sum(expected) // 5)
        rows = flatten([content(batch) for batch in dataset])  # type: ignore[misc]
        assert [sum(part == number for part, _ in rows) for number in range(3)] == expected
        passes.append(rows)
    first = [row for rows in passes for part, row in rows if part == 0]
    assert sorted(first) == list(range(40)), "two halves of an epoch"


def test_temperature_weights_by_size(stored: Any) -> None:
    counts = {}
    for temperature in (1, 2, 100):
        rows = flatten([content(batch) for batch in mix(stored, temperature=temperature)])  # type: ignore[misc]
        counter = Counter(part for part, _ in rows)
        weights = [size ** (1 / temperature) for size in SIZES.values()]
        for number, weight in enumerate(weights):
            assert abs(counter[number] - weight / sum(weights) * len(rows)) < 1
        counts[temperature] = counter[2] / len(rows)
    assert counts[1] < counts[2] < counts[100]
    batches = MixedDataset([stream_samples(source) for source in stored.values()], temperature=1.0)
    assert np.diff(batches._bounds, prepend=0).round(4).tolist() == [round(size / 70, 4) for size in SIZES.values()]


def test_schedule_counts_rows_over_all_passes(stored: Any) -> None:
    schedule = [(0, {"a": 1, "b": 1, "c": 0}), (30, [1, 0, 1]), (60, [0, 1, 1])]
    dataset = mix(stored, schedule=schedule, batch_size=10, epochs=None)
    batches = iter(dataset)
    drawn = [next(batches).state["drawn"] for _ in range(8)]
    assert drawn == [{"a": 5, "b": 5, "c": 0}] * 3 + [{"a": 5, "b": 0, "c": 5}] * 3 + [{"a": 0, "b": 5, "c": 5}] * 2
    limited = mix({name: stored[name] for name in "ab"}, schedule=[(0, [1, 1]), (46, [1, 0])])
    assert sum(len(batch) for batch in limited) == 46 + 17, "b ends after 46 rows, and a after 17 more"
    assert {part for batch in limited for part, _ in content(batch)} == {0}, "the second pass begins after 46 rows"


def test_batches_have_the_rows_of_their_sources(stored: Any) -> None:
    for batch in mix(stored):
        for part, document in zip(batch.sources.tolist(), batch, strict=True):
            source = list(stored.values())[part]
            assert document.identical(source[document.number])


def test_sources_of_batches_drawn_whole(stored: Any) -> None:
    dataset = MixedDataset({name: stream_samples(source, 4) for name, source in stored.items()})
    for batch in dataset:
        assert batch.sources.tolist() == [list(SIZES).index(batch.state["drawn"])] * len(batch)
    assert next(iter(stream_samples(stored["a"], 4))).sources is None


@pytest.mark.needs("torch")
def test_sources_follow_the_framework_of_the_batch(stored: Any) -> None:
    import torch

    parts = [StreamingDataset[Sample](source, 4) for source in stored.values()]
    batch = next(iter(MixedDataset(parts, mix="row")))
    assert isinstance(batch.sources, torch.Tensor)
    assert isinstance(batch.vector, torch.Tensor)
    assert batch.to("cpu").sources.tolist() == batch.sources.tolist()
    assert pickle.loads(pickle.dumps(batch)).sources.tolist() == batch.sources.tolist()
    assert batch[:2].sources is None, "other rows"


# --- states


@pytest.mark.parametrize("options", [{"stop": "all"}, {"rows": [1.0, 0.5, 3]}, {"temperature": 2}], ids=str)
def test_state_resumes_at_every_step(stored: Any, options: Any) -> None:
    whole = mix(stored, **options)
    expected = [[content(batch) for batch in whole] for _ in range(3)]
    states = [through_json(batch.state) for batch in mix(stored, **options)]
    assert max(len(json.dumps(state)) for state in states) < 600
    for count, state in enumerate(states, 1):
        dataset = mix(stored, **options)
        dataset.load_state_dict(state)
        is_over = count == len(states)
        assert len(dataset) == len(expected[is_over])
        assert dataset.state_dict()["epoch"] == is_over
        rest = expected[1] if is_over else expected[0][count:]
        assert [content(batch) for batch in dataset] == rest
        assert [content(batch) for batch in dataset] == expected[1 + is_over]


def test_ranks_take_rows_in_turn_and_keep_their_turns(stored: Any) -> None:
    def run(state: Any = None, **options: Any) -> list[list[Any]]:
        ranks = []
        for rank in range(3):
            share = {"rank": rank, "world_size": 3, "shuffle": False, **options}
            parts = {name: stream_samples(source, 4, **share) for name, source in stored.items()}
            dataset = MixedDataset(parts, [4, 2, 1], mix="row")
            if state is not None:
                dataset.load_state_dict(state)
            ranks.append([(content(batch), through_json(batch.state)) for batch in dataset])
        return ranks

    whole, padded = run(), run(last="pad")
    firsts = set()
    for step in range(len(whole[0]) - 1):
        for number in range(3):
            rows = [[row for part, row in ranks[step][0] if part == number] for ranks in whole]
            assert all(after - before == 3 for own in rows for before, after in itertools.pairwise(own))
            firsts.add(min(range(3), key=lambda rank: rows[rank][:1] or [10**6]))
        assert [ranks[step][0] for ranks in whole] == [ranks[step][0] for ranks in padded], "only the last is padded"
        resumed = [[rows for rows, _ in ranks] for ranks in run(whole[0][step][1])]
        assert resumed == [[rows for rows, _ in ranks[step + 1 :]] for ranks in whole]
    assert firsts == {0, 1, 2}, "the rank with the first row changes from step to step"


def test_dataset_of_one_row_is_repeated(stored: Any, tmp_path: Any) -> None:
    sources = {**stored, "one": open_samples(write_samples(tmp_path / "one", 1))}
    rows = [row for batch in mix(sources, [4, 2, 1, 1], stop="all") for row in content(batch)]
    assert abs(rows.count((3, 0)) - len(rows) / 8) < 1


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_states_of_workers_are_combined(stored: Any, workers: int) -> None:
    expected = [content(batch) for batch in mix(stored, stop="all")]
    dataset = mix(stored, stop="all")
    first = dataset.state_dict()
    states = [[first, *(batch.state for batch in dataset.batches(own, workers, 1))] for own in range(workers)]
    for yielded in range(len(expected) + 1):
        for later in range(min(3, yielded + 1)):
            steps = [len(range(worker, yielded - later, workers)) for worker in range(workers)]
            snapshots = {
                f"worker_{worker}": {"dataset_state": through_json(states[worker][step])}
                for worker, step in enumerate(steps)
            }
            resumed = mix(stored, stop="all")
            resumed.load_state_dict({"_snapshot": {"_worker_snapshots": snapshots}, "_steps_since_snapshot": later})
            if yielded < len(expected):
                assert content(next(iter(resumed))) == expected[yielded]
            else:
                assert resumed.state_dict()["epoch"] == 1, "the pass was complete"


def test_state_knows_the_division_of_its_steps(stored: Any) -> None:
    state = RowState.from_dict(mix(stored, world_size=2, rank=0).state_dict())
    for changes, fits in (({}, True), ({"world_size": 3}, False), ({"batch_size": 4}, False), ({"last": "pad"}, False)):
        other: Any = mix(stored, **{"world_size": 2, "rank": 0, **changes})  # type: ignore[arg-type]
        assert state.divides_like(other._row_share(other._row_mix.pass_at(0), 0)) is fits


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_workers_yield_the_batches_of_one_process(stored: Any, workers: int) -> None:
    whole = mix(stored, stop="all")
    expected = [[content(batch) for batch in whole] for _ in range(2)]
    dataset = mix(stored, stop="all")
    for mark, batches in enumerate(expected, 1):
        assert [content(batch) for batch in collect_workers(dataset, workers, mark)] == batches  # type: ignore[arg-type]


def test_states_are_rejected_by_other_mixes(stored: Any, tmp_path: Any) -> None:
    state = list(mix(stored))[1].state
    others = [mix(stored, (1, 1, 1)), mix(stored, seed=1), mix(stored, stop="all"), mix(stored, rows=[1, 1, 1])]
    for other in [*others, mix(stored, epochs=2), mix({"a": stored["a"]}, [1])]:
        with pytest.raises(OptionError, match="the state is of another mix"):
            other.load_state_dict(state)
    swapped = {**stored, "b": open_samples(write_samples(tmp_path / "b", SIZES["b"], rows_in_shard=5))}
    with pytest.raises(OptionError, match="dataset 'b' has other rows"):
        mix(swapped).load_state_dict(state)
    drawn = MixedDataset({name: stream_samples(source) for name, source in stored.items()})
    with pytest.raises(OptionError, match="no state of a MixedDataset"):
        drawn.load_state_dict(state)
    with pytest.raises(OptionError, match="no state of a MixedDataset with mix='row'"):
        mix(stored).load_state_dict(drawn.state_dict())


@pytest.mark.parametrize(
    "change",
    [
        {"step": -1},
        {"epoch": "0"},
        {"start": 10**6},
        {"counts": 1},
        {"counts": {"a": 1, "b": 1, "c": 1}},
        {"counts": {"a": 10.0, "b": 0, "c": 0}},
        {"batch_size": 0},
        {"last": "never"},
        {"version": 2},
    ],
    ids=str,
)
def test_damaged_states_are_rejected_and_change_nothing(stored: Any, change: Any) -> None:
    state = list(mix(stored))[1].state
    dataset = mix(stored)
    before = dataset.state_dict()
    with pytest.raises(OptionError, match=r"the state is (damaged|of version)"):
        dataset.load_state_dict({**state, **change})
    assert dataset.state_dict() == before
    dataset.load_state_dict(state)


def test_states_round_trip(stored: Any) -> None:
    state = through_json(list(mix(stored))[2].state)
    assert RowState.from_dict(state).to_dict() == state
    assert RowState.from_dict({**state, "added_later": 1}).to_dict() == state
    for name in state:
        with pytest.raises(OptionError, match="no state of a MixedDataset"):
            RowState.from_dict({key: value for key, value in state.items() if key != name})


def test_plan_and_state_equal_golden_values(stored: Any) -> None:
    """A mix is resumed by another version of quire: its rows and its name never change."""
    batches = list(mix(stored, seed=7))
    assert [batch.state["drawn"] for batch in batches[:4]] == GOLDEN_DRAWN
    assert content(batches[3]) == GOLDEN_ROWS
    assert batches[0].state["mix"] == "53d51f4e6d21f16f"


GOLDEN_DRAWN = [{"a": 3, "b": 1, "c": 1}, {"a": 3, "b": 2, "c": 0}, {"a": 3, "b": 1, "c": 1}, {"a": 3, "b": 1, "c": 1}]
GOLDEN_ROWS = [(0, 30), (0, 1), (0, 31), (1, 2), (2, 0)]


# --- loaders


@pytest.mark.needs("torch")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_data_loader_yields_the_batches_of_one_process(stored: Any, method: str) -> None:
    from torch.utils.data import DataLoader

    whole = mix(stored, stop="all")
    expected = [[content(batch) for batch in whole] for _ in range(2)]
    loader: Any = DataLoader(
        mix(stored, stop="all"),  # type: ignore[arg-type]
        batch_size=None,
        num_workers=2,
        multiprocessing_context=method,
        persistent_workers=method == "fork",
    )
    assert [[content(batch) for batch in loader] for _ in range(2)] == expected


@pytest.mark.needs("torch", "torchdata")
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("workers", [0, 2])
def test_stateful_loader_resumes_where_it_was(stored: Any, workers: int) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    expected = [content(batch) for batch in mix(stored, stop="all")]
    loader: Any = StatefulDataLoader(mix(stored, stop="all"), batch_size=None, num_workers=workers)  # type: ignore[arg-type]
    batches = iter(loader)
    first = [content(next(batches)) for _ in range(5)]
    state = loader.state_dict()
    del batches, loader
    loader = StatefulDataLoader(mix(stored, stop="all"), batch_size=None, num_workers=workers)  # type: ignore[arg-type]
    loader.load_state_dict(state)
    assert first + [content(batch) for batch in loader] == expected
    for world_size in (1, 3):
        ranks = [mix(stored, stop="all", rank=rank, world_size=world_size) for rank in range(world_size)]
        for dataset in ranks:
            dataset.load_state_dict(state)
        rest = flatten([content(batch) for dataset in ranks for batch in dataset])  # type: ignore[misc]
        assert Counter(flatten(first) + rest) == Counter(flatten(expected)) or world_size > 1  # type: ignore[arg-type]
        assert len(flatten(first) + rest) == len(flatten(expected)), "the length of a pass does not depend on ranks"  # type: ignore[arg-type]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("by", ["row", "batch"])
def test_loader_yields_the_batches_of_one_process(stored: Any, by: Any, threads: int) -> None:
    def open_mix() -> MixedDataset[Any]:
        parts = {name: stream_samples(source, 5) for name, source in stored.items()}
        return MixedDataset(parts, mix=by, stop="all", seed=3)

    def rows(batches: Any) -> list[Any]:
        return [list(zip(batch.sources.tolist(), *numbers([batch]), strict=True)) for batch in batches]

    whole = open_mix()
    expected = [rows(whole), rows(whole)]
    loader = open_mix().loader(prefetch=3, threads=threads)
    assert len(loader) == len(expected[0])
    assert [rows(loader), rows(loader)] == expected
    loader = open_mix().loader(threads=threads)
    batches = iter(loader)
    first = [next(batches) for _ in range(4)]
    state = through_json(loader.state_dict())
    assert state == first[-1].state, "of the batches that were taken"
    batches.close()  # type: ignore[attr-defined]
    other = open_mix().loader(threads=threads)
    other.load_state_dict(state)
    assert rows(first) + rows(other) == expected[0]


def test_copies_continue_with_the_next_pass(stored: Any) -> None:
    whole = mix(stored)
    expected = [[content(batch) for batch in whole] for _ in range(3)]
    dataset = mix(stored)
    for batches in expected:
        assert [content(batch) for batch in dataset] == batches
        dataset = pickle.loads(pickle.dumps(dataset))


# --- classes and columns


class Base(BaseDocument):
    number: int
    vector: NdArray[float32, 4]


class Titled(Base):
    title: str = "-"


class Scored(Base):
    score: float = 0.5


class Wide(BaseDocument):
    number: int
    vector: NdArray[float32, 8]


class Loose(BaseDocument):
    number: int
    vector: AnyTensor


def write(folder: Any, document_type: Any, rows: int = 10, width: int = 4, dtype: Any = np.float32) -> Any:
    documents = [document_type(number=i, vector=np.full(width, i, dtype)) for i in range(rows)]
    write_dataset(documents, folder, document_type, format="arrow")
    return folder


def stream(folder: Any, document_type: Any, **options: Any) -> StreamingDataset[Any]:
    return StreamingDataset[document_type](folder, 4, framework="numpy", **options)


def test_classes_with_a_common_base_make_batches_of_it(tmp_path: Any) -> None:
    one = stream(write(tmp_path / "one", Titled), Titled)
    other = stream(write(tmp_path / "other", Scored), Scored)
    for batch in MixedDataset([one, other], mix="row"):
        assert batch.document_type is Base
        assert set(batch.schema.by_name) == {"id", "number", "vector"}
        assert batch.vector[:, 0].tolist() == batch.number.tolist()


def test_classes_without_a_common_base_are_rejected(tmp_path: Any) -> None:
    one = stream(write(tmp_path / "one", Base), Base)
    other = stream(write(tmp_path / "other", Wide, width=8), Wide)
    with pytest.raises(OptionError, match=r"no common base: Base \('0'\), Wide \('1'\)\. Pass output="):
        MixedDataset([one, other], mix="row")
    assert {len(batch) for batch in MixedDataset([one, other])} <= {4, 2}, "each batch has one class"


def test_output_is_a_common_class(tmp_path: Any) -> None:
    one = stream(write(tmp_path / "one", Base), Base, output=Loose)
    other = StreamingDataset[Wide](
        write(tmp_path / "other", Wide, width=8), 4, {"vector": lambda v: v[:4]}, output=Loose, framework="numpy"
    )
    for batch in MixedDataset([one, other], mix="row"):
        assert batch.document_type is Loose
        assert batch.vector[:, 0].tolist() == batch.number.tolist()


def test_tensors_of_other_shapes_and_dtypes_are_rejected(tmp_path: Any) -> None:
    parts = [stream(write(tmp_path / str(width), Loose, width=width), Loose) for width in (4, 8)]
    with pytest.raises(ColumnError, match=r"Loose\.vector: mixed shapes"):
        list(MixedDataset(parts, mix="row"))
    types = (np.float32, np.float64)
    parts = [stream(write(tmp_path / dtype.__name__, Loose, dtype=dtype), Loose) for dtype in types]
    with pytest.raises(ColumnError, match=r"Loose\.vector: the datasets of the mix have float32 and float64"):
        list(MixedDataset(parts, mix="row"))


def test_skipped_shards_leave_out_sources(stored: Any, tmp_path: Any) -> None:
    folder = write_samples(tmp_path / "damaged", 40)
    shard = sorted(folder.rglob("*.arrow"))[1]
    shard.write_bytes(shard.read_bytes()[:100])
    parts = [stream_samples(folder, 8, on_error="skip"), stream_samples(stored["b"], 8)]
    batches = list(MixedDataset(parts, [40, 23], mix="row"))
    assert sum(map(len, batches)) == 30 + 23
    for batch in batches:
        assert len(batch.sources) == len(batch)
    damaged = [row for batch in batches for part, row in content(batch) if part == 0]
    assert sorted(damaged) == [row for row in range(40) if not 10 <= row < 20]


# --- memory


class Large(BaseDocument):
    number: int
    pixels: NdArray[float32, 2_048]
    maybe: NdArray[float32, 1_024] | None = None
    small: NdArray[float32, 4]


@pytest.mark.parametrize("framework", ["numpy", pytest.param("torch", marks=pytest.mark.needs("torch"))])
@pytest.mark.parametrize("preprocessing", [None, {"small": double}], ids=["copied", "preprocessed"])
def test_large_rows_are_gathered_side_by_side(
    tmp_path: Any, framework: str, preprocessing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = []
    for name, size in (("a", 20), ("b", 10)):
        documents = [
            Large(
                number=i,
                pixels=np.full(2_048, i, np.float32),
                maybe=None if i % 3 else np.full(1_024, -i, np.float32),
                small=np.full(4, i, np.float32),
            )
            for i in range(size)
        ]
        write_dataset(documents, tmp_path / name, Large, format="arrow")
        options: dict[str, Any] = {"framework": framework, "missing": "mask"}
        parts.append(StreamingDataset[Large](tmp_path / name, 6, preprocessing, **options))
    joined = set()
    concat = _row_mixing.concat_columns

    def record(columns: Any, shapes: Any) -> Any:
        joined.update({"pixels", "maybe"} - set(columns[0].columns))
        return concat(columns, shapes)

    monkeypatch.setattr(_row_mixing, "concat_columns", record)
    kept = list(MixedDataset(parts, [2, 1], mix="row"))
    assert joined == {"pixels", "maybe"}, "without a copy"
    for batch in kept:
        for row, number in enumerate(batch.number.tolist()):
            assert (batch.pixels[row] == number).all()
            assert batch.small[row].tolist() == [number * (2 if preprocessing else 1)] * 4
            assert (batch.maybe[row] == (0 if number % 3 else -number)).all()
        assert batch.validity("maybe").tolist() == [number % 3 == 0 for number in batch.number.tolist()]


def test_memory_of_a_step_is_one_buffer_for_each_column() -> None:
    memory = StepMemory([2, 3])
    columns = [[memory.take(part, rows * width) for part, rows in enumerate((2, 3))] for width in (1 << 16, 1 << 17)]
    for width, (first, second) in zip((1 << 16, 1 << 17), columns, strict=True):
        assert (first.nbytes, second.nbytes) == (2 * width, 3 * width)
        assert second.ctypes.data == first.ctypes.data + first.nbytes, "side by side"
    # A request that is not for rows of one size gets memory of its own.
    assert memory.take(1, 10).nbytes == 10
    assert memory.take(1, 9).nbytes == 9


# --- options


def test_invalid_options_are_rejected(stored: Any) -> None:
    def check(match: str, parts: Any = None, **options: Any) -> None:
        with pytest.raises(OptionError, match=match):
            parts = [stream_samples(source) for source in stored.values()] if parts is None else parts
            MixedDataset(parts, **{"mix": "row", **options})

    check("mix='rows': use 'batch' or 'row'", mix="rows")
    check("use 'first' or 'all'", stop="never")
    check("a mix has datasets", {})
    check("weights and temperature both say", weights=[1, 1, 1], temperature=2)
    check("schedule and rows both say", schedule=[(0, [1, 1, 1])], rows=[1, 1, 1])
    check("temperature is a number above 0", temperature=0)
    check("rows is an option of mix='row'", mix="batch", rows=[1, 1, 1])
    check("schedule is an option of mix='row'", mix="batch", schedule=[(0, [1, 1, 1])])
    check("a weight from 0 up for each", weights=[1, 1])
    check("a weight from 0 up for each", schedule=[(0, [1, 1, 1]), (5, [0, 0, 0])])
    check("begin with 0 and increase, got", schedule=[(1, [1, 1, 1])])
    check("begin with 0 and increase, got", schedule=[(0, [1, 1, 1]), (0, [1, 1, 2])])
    check("begin with 0 and increase, got", schedule=[])
    check(r"schedule is a list of \(rows, weights\)", schedule=[1])
    check("expected a whole number", schedule=[(0.5, [1, 1, 1])])
    check(r"weights has a number for each dataset, \['0', '1', '2'\]", weights={"a": 1})
    check(r"stop='all' waits for every dataset, and \['2'\] have weight 0", weights=[1, 1, 0], stop="all")
    check(r"stop='all' waits", schedule=[(0, [1, 1, 1]), (5, [0, 1, 1])], stop="all")
    check("with rows, a pass has a fixed length", rows=[1, 1, 1], stop="all")
    check("rows has the epochs of each dataset", rows=[1, 1])
    check("rows has the epochs of each dataset", rows=[1, 1, -1])
    check("a pass would have no rows", rows=[0, 0, 0])
    one, two = stored["a"], stored["b"]
    check("have the option epochs", [stream_samples(one, epochs=2), stream_samples(two)], rows=[1, 1])
    check("batch_size is 8 in '0' and 9 in '1'", [stream_samples(one, 8), stream_samples(two, 9)])
    check("last is 'keep' in '0' and 'drop' in '1'", [stream_samples(one), stream_samples(two, last="drop")])
    pair = [stream_samples(one, rank=0, world_size=2), stream_samples(two, rank=1, world_size=2)]
    with pytest.raises(OptionError, match=r"ranks is \(0, 2\) in '0' and \(1, 2\) in '1'"):
        list(MixedDataset(pair, mix="row"))


def test_empty_datasets_need_weight_zero(stored: Any, tmp_path: Any) -> None:
    write_dataset(list(samples(0)), tmp_path / "none", Sample)
    parts = [stream_samples(tmp_path / "none", allow_empty=True), stream_samples(stored["b"])]
    with pytest.raises(OptionError, match=r"\['0'\] have no rows"):
        MixedDataset(parts, mix="row")


def test_datasets_without_end_have_no_length(stored: Any) -> None:
    with pytest.raises(TypeError, match="never end, and have no length together"):
        len(mix(stored, epochs=None))
    assert len(mix(stored, epochs=None, stop="all")) == len(mix(stored, stop="all"))
