"""MixedDataset against a model: whatever stops and resumes a mix, the next batch is the one that would have followed.

A few hundred resumes run with the tests; `nox -s laws` runs 10,000 (QUIRE_LAWS_RESUMES).
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import pickle
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from quire import BaseDocument
from quire.data import MixedDataset, StreamingDataset, _mixing
from quire.data._epoch_registry import Worker
from quire.storage import StoredDataset, write_dataset
from quire.typing import NdArray, int64
from tests.data.sample_streams import collect_workers, flatten, numbers, open_samples, stream_samples, write_samples

pytestmark = pytest.mark.needs("pyarrow", "fsspec", "xxhash")
SIZES = (1, 2, 5, 12, 20)
RESUMES = int(os.environ.get("QUIRE_LAWS_RESUMES", "250"))
EXAMPLE_STEPS = 40


@pytest.fixture(scope="module", autouse=True)
def sources(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("mix")
    Sources.stored = {size: open_samples(write_samples(folder / str(size), size)) for size in SIZES}
    for size in SIZES:
        bounds = np.cumsum([0, *token_lengths(size)]).tolist()
        documents = [Tokens(tokens=np.arange(begin, end)) for begin, end in itertools.pairwise(bounds)]
        write_dataset(documents, folder / f"tokens{size}", Tokens, format="arrow", durable=False)
        Sources.tokens[size] = StoredDataset[Tokens](folder / f"tokens{size}")


class Tokens(BaseDocument):
    """A document whose tokens are different from those of all others."""

    tokens: NdArray[int64, "length"]


def token_lengths(size: int) -> list[int]:
    return [1 + 3 * row % 7 for row in range(size)]


class Sources:
    """The stored datasets of this module, by their number of rows."""

    stored: ClassVar[dict[int, Any]] = {}
    tokens: ClassVar[dict[int, Any]] = {}


# --- the model


@dataclass(frozen=True)
class Part:
    """One dataset of a mix: rows, or blocks of tokens. `pack` is their length, and whether documents are split."""

    size: int
    batch_size: int
    last: str
    epochs: int | None
    shuffle: Any
    pack: tuple[int, bool] | None = None

    def open(self, rank: int, world_size: int, shorter: int = 0) -> Any:
        """Open the dataset; blocks of split documents may be made shorter."""
        options = {"last": self.last, "epochs": self.epochs, "shuffle": self.shuffle}
        share = {"rank": rank, "world_size": world_size, **options}
        if self.pack is None:
            return stream_samples(Sources.stored[self.size], self.batch_size, **share)
        length, split = self.pack
        dataset = StreamingDataset[Tokens](Sources.tokens[self.size], self.batch_size, framework="numpy", **share)
        return dataset.pack("tokens", length - shorter if split else length, split=split)

    @property
    def units(self) -> int:
        """The number of rows, or of tokens, of an epoch."""
        return self.size if self.pack is None else sum(token_lengths(self.size))


@lru_cache(maxsize=10_000)
def epoch_batches(part: Part, epoch: int, rank: int, world_size: int) -> list[list[int]]:
    """The rows of every batch of one epoch, read without a mix."""
    dataset = replace(part, epochs=1).open(rank, world_size)
    dataset.set_epoch(epoch)
    return [units_of(batch) for batch in dataset]


def units_of(batch: Any) -> list[int]:
    """The row numbers or the tokens of a batch, without padding."""
    if "tokens" not in batch.keys():  # noqa: SIM118 - a batch is no mapping
        return numbers([batch])[0]
    return batch.tokens[batch.document_ids >= 0].tolist()


class Place(NamedTuple):
    """A place in a mix: the pass, the epoch with which each dataset began it, and the number of batches taken."""

    number: int
    starts: tuple[int, ...]
    taken: int


@dataclass(frozen=True)
class Mix:
    """A mix of datasets on one rank, and the model of what it gives."""

    parts: tuple[Part, ...]
    weights: tuple[int, ...]
    seed: int
    stop: str
    rank: int
    world_size: int

    def open(self, **changes: int) -> MixedDataset:
        share = {"rank": self.rank, "world_size": self.world_size, **changes}
        datasets = [part.open(**share) for part in self.parts]
        return MixedDataset(datasets, self.weights, seed=self.seed, stop=self.stop)  # type: ignore[arg-type]

    @property
    def is_endless(self) -> bool:
        return self.stop == "first" and any(part.epochs is None for part in self.parts)

    def batches(self, place: Place, most: int | None = None) -> tuple[list[Any], list[list[tuple[int, int]]]]:
        """The batches of a pass from its beginning, and after each the (epochs done, steps) of every dataset.

        A pass that ends is returned whole: with a small weight, a dataset may take hundreds of draws.
        """
        if most is None:
            most = 400 if self.is_endless else 1_000_000
        draws = _draws(self)
        position = [(0, 0) for _ in self.parts]
        batches, positions = [], [list(position)]
        while len(batches) < most:
            whole = [self._is_complete(number, *at) for number, at in enumerate(position)]
            number = draws(place.number, len(batches))
            if all(whole) if self.stop == "all" else whole[number] and self.parts[number].epochs is not None:
                break
            done, step = position[number]
            if step == self._steps(number):
                done, step = done + 1, 0
            rows = self._epoch(number, place.starts[number] + done)[step]
            batches.append((str(number), rows))
            position[number] = (done, step + 1)
            positions.append(list(position))
        return batches, positions

    def following(self, place: Place) -> Place:
        """Where the pass after this one begins, wherever this one was left."""
        _, positions = self.batches(place, place.taken)
        starts = [
            start + max(part.epochs or 1, done + 1)
            for start, part, (done, _) in zip(place.starts, self.parts, positions[place.taken], strict=True)
        ]
        return Place(place.number + 1, tuple(starts), 0)

    def at_end(self, place: Place) -> bool:
        """Whether a dataset stands at the end of an epoch."""
        _, positions = self.batches(place, place.taken)
        return any(step == self._steps(number) for number, (_, step) in enumerate(positions[place.taken]))

    def _is_complete(self, number: int, done: int, step: int) -> bool:
        return done + (step == self._steps(number)) >= (self.parts[number].epochs or 1)

    def _steps(self, number: int) -> int:
        return len(self._epoch(number, 0))

    def _epoch(self, number: int, epoch: int) -> list[list[int]]:
        return epoch_batches(self.parts[number], epoch, self.rank, self.world_size)


@lru_cache(maxsize=100)
def _draws(mix: Mix) -> Any:
    dataset = mix.open()
    return lambda epoch, step: int(dataset._draws(epoch, 0)[step])


@st.composite
def mixes(draw: Any, *, endless: bool = True) -> Mix:
    world_size = draw(st.integers(1, 3))
    stop = draw(st.sampled_from(["first", "all"]))
    parts = []
    for size in draw(st.lists(st.sampled_from(SIZES), min_size=2, max_size=4)):
        batch_size = draw(st.integers(1, 5))
        pack = draw(st.none() | st.tuples(st.integers(7, 20), st.booleans()))
        blocks = size if pack is None else sum(token_lengths(size)) // pack[0]
        fills = blocks >= world_size * batch_size  # else an epoch with last='drop' has no steps
        last = draw(st.sampled_from(["keep", "drop", "pad"] if fills else ["keep", "pad"]))
        epochs = draw(st.sampled_from([1, 1, 1, 2, 3, None] if endless else [1, 1, 2]))
        parts.append(Part(size, batch_size, last, epochs, draw(st.sampled_from(["block", "global", False])), pack))
    weights = tuple(draw(st.lists(st.integers(1, 4), min_size=len(parts), max_size=len(parts))))
    rank = draw(st.integers(0, world_size - 1))
    return Mix(tuple(parts), weights, draw(st.integers(0, 999)), stop, rank, world_size)


def content(batch: Any) -> tuple[str, list[int]]:
    return batch.state["drawn"], units_of(batch)


def through_json(state: Any) -> Any:
    return json.loads(json.dumps(state))


# --- the machine


class MixMachine(RuleBasedStateMachine):
    """Take batches, stop, resume from any state seen, copy, abandon passes; the model says what must come."""

    resumes: ClassVar[int] = 0
    resumes_at_end: ClassVar[int] = 0

    @initialize(mix=mixes())
    def open(self, mix: Mix) -> None:
        self.mix = mix
        self.dataset = mix.open()
        self.place = self.first_place = Place(0, (0,) * len(mix.parts), 0)
        self.iterator: Any = None
        self.states = [(through_json(self.dataset.state_dict()), self.place)]
        self.workers_ran = False

    # Where a state of the end of a pass goes on: with the pass after it.
    def resumed_place(self, place: Place) -> Place:
        batches, _ = self.mix.batches(place)
        return self.mix.following(place) if place.taken == len(batches) else place

    @rule(count=st.integers(1, 8))
    def take(self, count: int) -> None:
        """Take some batches, in a new pass where none is under way."""
        if self.iterator is None:
            self.iterator, self.first_place, self.workers_ran = iter(self.dataset), self.place, False
        expected, _ = self.mix.batches(self.place)
        for _ in range(count):
            batch = next(self.iterator, None)
            if batch is None:
                assert self.place.taken == len(expected), "the pass ends when the model does"
                self.iterator, self.place = None, self.mix.following(self.place)
                self.first_place = self.place
                return
            assert self.place.taken < len(expected), "the pass goes on where the model ends"
            assert content(batch) == expected[self.place.taken]
            self.place = self.place._replace(taken=self.place.taken + 1)
            self.states.append((through_json(batch.state), self.place))
            if self.mix.is_endless and self.place.taken > 300:  # the model computes 400 batches
                self.abandon()
                return

    @rule(which=st.integers(0, 10**6), is_fresh=st.booleans())
    def resume_from_a_batch(self, which: int, is_fresh: bool) -> None:
        """Resume from the state of any batch so far, in a new process or in this one."""
        self.load(*self.states[which % len(self.states)], is_fresh=is_fresh)

    @precondition(lambda self: not self.workers_ran)
    @rule(is_fresh=st.booleans())
    def resume_from_the_dataset(self, is_fresh: bool) -> None:
        """Resume from where the dataset itself is."""
        self.load(through_json(self.dataset.state_dict()), self.place, is_fresh=is_fresh)

    def load(self, state: Any, place: Place, *, is_fresh: bool) -> None:
        if is_fresh:
            self.dataset = self.mix.open()
        self.dataset.load_state_dict(state)
        MixMachine.resumes += 1
        MixMachine.resumes_at_end += self.mix.at_end(place)
        self.iterator, self.workers_ran = None, False
        self.place = self.first_place = self.resumed_place(place)

    @precondition(lambda self: self.iterator is None and not self.mix.is_endless)
    @rule(workers=st.integers(1, 3))
    def take_the_rest_with_workers(self, workers: int) -> None:
        """Let workers make the rest of the pass."""
        expected, _ = self.mix.batches(self.place)
        batches = collect_workers(self.dataset, workers, mark=Worker.alone().pass_id)  # type: ignore[arg-type]
        assert [content(batch) for batch in batches] == expected[self.place.taken :]
        for batch in batches:
            self.place = self.place._replace(taken=self.place.taken + 1)
            self.states.append((through_json(batch.state), self.place))
        self.place, self.workers_ran = self.mix.following(self.place), True

    @precondition(lambda self: self.iterator is not None)
    @rule()
    def abandon(self) -> None:
        """Leave a pass: iterating again begins the next one."""
        self.iterator = None
        self.workers_ran = True  # its own state stays where it was left, and its length that of the pass left
        self.place = self.mix.following(self.place)

    @precondition(lambda self: self.iterator is None)
    @rule()
    def copy(self) -> None:
        """Go on with a copy, as a worker does."""
        self.dataset = pickle.loads(pickle.dumps(self.dataset))

    @precondition(lambda self: not self.workers_ran and not self.mix.is_endless)
    @rule()
    def measure(self) -> None:
        """The length is that of the whole pass, also where it was resumed."""
        batches, _ = self.mix.batches(self.first_place)
        assert len(self.dataset) == len(batches)

    def teardown(self) -> None:
        gc.collect(0)


def test_mix_resumes_with_the_very_next_batch() -> None:
    MixMachine.resumes = MixMachine.resumes_at_end = 0
    chosen = settings(
        max_examples=20,
        stateful_step_count=EXAMPLE_STEPS,
        derandomize=False,  # every round has other examples
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    while MixMachine.resumes < RESUMES:
        run_state_machine_as_test(MixMachine, settings=chosen)
    print(f"{MixMachine.resumes} resumes, {MixMachine.resumes_at_end} with a dataset at the end of an epoch")  # noqa: T201 - with -s
    assert MixMachine.resumes_at_end > RESUMES // 25, "the law is about datasets at their end"


# --- workers that resume on their own


def worker_batches(dataset: MixedDataset, who: Worker, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Iterate as a worker process does, in this process."""
    monkeypatch.setattr(_mixing, "this_worker", lambda: who)
    return iter(dataset)


@settings(deadline=None, max_examples=max(RESUMES // 25, 10), suppress_health_check=list(HealthCheck))
@given(mix=mixes(endless=False), workers=st.integers(1, 3), count=st.integers(0, 30), data=st.data())
def test_workers_resume_from_their_own_states(mix: Mix, workers: int, count: int, data: Any) -> None:
    expected, _ = mix.batches(Place(0, (0,) * len(mix.parts), 0))
    count = min(count, len(expected))
    mark, contents = Worker.alone().pass_id, dict[int, Any]()
    with pytest.MonkeyPatch.context() as monkeypatch:
        first = mix.open()
        states = []
        for number in range(workers):
            batches = worker_batches(first, Worker(number, workers, mark), monkeypatch)
            for step in range(number, count, workers):
                contents[step] = content(next(batches))
            states.append(through_json(first.state_dict()))
        second, mark = mix.open(), Worker.alone().pass_id
        order = data.draw(st.permutations(range(workers)))
        for number in order:
            who = Worker(number, workers, mark)
            monkeypatch.setattr(_mixing, "this_worker", lambda who=who: who)
            second.load_state_dict(states[number])
            next_step = number + workers * len(range(number, count, workers))
            for step, batch in enumerate(iter(second)):
                contents[next_step + step * workers] = content(batch)
    assert [contents[step] for step in range(len(contents))] == expected


# --- other ranks


@settings(deadline=None, max_examples=max(RESUMES // 25, 10), suppress_health_check=list(HealthCheck))
@given(
    mix=mixes(endless=False),
    phases=st.lists(
        st.tuples(st.integers(1, 3), st.integers(0, 2), st.integers(0, 6), st.integers(0, 4)), min_size=1, max_size=4
    ),
)
def test_every_row_and_token_comes_once_for_any_ranks(mix: Mix, phases: list[tuple[int, int, int, int]]) -> None:
    parts = tuple(replace(part, last="keep") for part in mix.parts)
    mix = Mix(parts, mix.weights, mix.seed, mix.stop, 0, 1)
    rows: dict[str, list[int]] = {str(number): [] for number in range(len(parts))}
    state: Any = None
    for world_size, workers, count, shorter in [*phases, (2, 0, 10**6, 0)]:
        ranks = [mix.open(rank=rank, world_size=world_size, shorter=shorter) for rank in range(world_size)]
        if state is not None:
            for dataset in ranks:
                dataset.load_state_dict(state)
            if ranks[0].state_dict()["epoch"]:
                break  # the first pass is complete
        taken = [collect_workers(dataset, workers)[:count] for dataset in ranks]  # type: ignore[arg-type]
        drawn = [[content(batch)[0] for batch in batches] for batches in taken]
        assert all(names == drawn[0] for names in drawn), "every rank draws from the same dataset"
        for step in zip(*taken, strict=True):
            rows[content(step[0])[0]] += flatten(content(batch)[1] for batch in step)
        if taken[0]:
            states = [through_json(batches[-1].state) for batches in taken]
            assert all(other == states[0] for other in states), "the state is the same on every rank"
            state = states[0]
    complete = 0
    for number, part in enumerate(parts):
        own_rows = rows[str(number)]
        size = part.units
        whole = [sorted(own_rows[k : k + size]) for k in range(0, len(own_rows) - size + 1, size)]
        assert whole == [list(range(size))] * len(whole), "every epoch has every row, or token, once"
        rest = own_rows[len(whole) * size :]
        assert len(set(rest)) == len(rest)
        complete += len(whole) >= (part.epochs or 1)
        if mix.stop == "first":
            assert len(own_rows) <= size * (part.epochs or 1)
    assert complete == len(parts) if mix.stop == "all" else complete >= 1


# --- mixes by rows


@dataclass(frozen=True)
class RowOptions:
    """A mix by rows. `share` has the options that decide how much of each dataset is taken."""

    sizes: tuple[int, ...]
    shuffles: tuple[Any, ...]
    batch_size: int
    last: str
    epochs: int | None
    seed: int
    share: tuple[tuple[str, Any], ...]

    def open(self, rank: int = 0, world_size: int = 1) -> MixedDataset:
        options = {"last": self.last, "epochs": self.epochs, "rank": rank, "world_size": world_size}
        parts = [
            stream_samples(Sources.stored[size], self.batch_size, shuffle=shuffle, **options)
            for size, shuffle in zip(self.sizes, self.shuffles, strict=True)
        ]
        return MixedDataset(parts, mix="row", seed=self.seed, **dict(self.share))

    def ideal(self, number: int, seen: int, rows: int) -> Fraction:
        """How many of some rows, after those seen, should be of a dataset."""
        share = dict(self.share)
        if "rows" in share:
            fixed = [round(epochs * size) for epochs, size in zip(share["rows"], self.sizes, strict=True)]
            return rows * Fraction(fixed[number], sum(fixed))
        breakpoints = share.get("schedule") or [(0, share["weights"])]
        ends = [start for start, _ in breakpoints[1:]] + [10**9]
        return sum(
            (
                max(0, min(end, seen + rows) - max(start, seen)) * Fraction(weights[number], sum(weights))
                for (start, weights), end in zip(breakpoints, ends, strict=True)
            ),
            Fraction(0),
        )


@st.composite
def row_mixes(draw: Any) -> RowOptions:
    sizes = tuple(draw(st.lists(st.sampled_from(SIZES), min_size=2, max_size=4)))
    several = {"min_size": len(sizes), "max_size": len(sizes)}
    weights = st.lists(st.integers(1, 9), **several)
    kind = draw(st.sampled_from(["weights", "schedule", "rows"]))
    if kind == "rows":
        share = {
            "rows": draw(st.lists(st.sampled_from([0.5, 1.0, 1.0, 2.5]), **several).filter(lambda r: max(r) > 0.5))
        }
    else:
        share = {"stop": draw(st.sampled_from(["first", "all"])), "weights": draw(weights)}
        if kind == "schedule":
            starts = sorted({0, *draw(st.lists(st.integers(1, 90), max_size=2))})
            share = {"stop": share["stop"], "schedule": [(start, draw(weights)) for start in starts]}
    shuffles = tuple(draw(st.lists(st.sampled_from(["block", "global", False]), **several)))
    last = draw(st.sampled_from(["keep", "keep", "pad", "drop"]))
    epochs = 1 if kind == "rows" else draw(st.sampled_from([1, 1, 2, None]))
    return RowOptions(
        sizes, shuffles, draw(st.integers(1, 6)), last, epochs, draw(st.integers(0, 9)), tuple(share.items())
    )


class RowPlace(NamedTuple):
    """A place in a mix by rows: the pass, and the rows of each dataset so far."""

    number: int
    counts: tuple[int, ...]


class RowMixMachine(RuleBasedStateMachine):
    """Train on several ranks, stop, resume with others from any state seen; the laws say what may come.

    The rows of a step are the next ones of each dataset, in numbers less than one row from the ideal, divided evenly.
    Whatever led to a place, the same ranks go on from it with the same batches.
    """

    resumes: ClassVar[int] = 0

    @initialize(options=row_mixes(), world_size=st.integers(1, 3))
    def open(self, options: RowOptions, world_size: int) -> None:
        self.options = options
        self.open_ranks(world_size)
        self.plan = self.ranks[0]._row_mix
        self.orders = [dataset.order for dataset in self.ranks[0].datasets.values()]
        self.place = RowPlace(0, (0,) * len(options.sizes))
        self.states = [(through_json(self.ranks[0].state_dict()), self.place)]
        self.known: dict[Any, Any] = {}

    def open_ranks(self, world_size: int) -> None:
        self.ranks = [self.options.open(rank, world_size) for rank in range(world_size)]
        self.iterator: Any = None
        self.is_abandoned = False

    @property
    def current(self) -> Any:
        assert self.plan is not None
        return self.plan.pass_at(self.place.number)

    def is_over(self) -> bool:
        left = self.current.length - sum(self.place.counts)
        return left < len(self.ranks) * self.options.batch_size if self.options.last == "drop" else left == 0

    def check_step(self, batches: Any) -> None:
        """Check the batches of all ranks in one step, and move on."""
        states = [through_json(batch.state) for batch in batches]
        assert all(state == states[0] for state in states)
        state, old, current = states[0], self.place.counts, self.current
        assert state["epoch"] == self.place.number
        counts = tuple(state["counts"].values())
        seen = sum(counts)
        for number, count in enumerate(counts):
            assert abs(count - self.options.ideal(number, current.seen, seen)) < 1
        shares = []
        rows: list[set[int]] = [set() for _ in counts]
        for batch in batches:
            real = batch.mask()
            sources = batch.sources[real]
            shares.append([int((sources == number).sum()) for number in range(len(counts))])
            for number, row in zip(sources.tolist(), batch.number[real].tolist(), strict=True):
                rows[number].add(row)
        for number, (epoch, position) in enumerate(current.starts):
            places = [position + place for place in range(old[number], counts[number])]
            size = self.options.sizes[number]
            expected = {int(self.orders[number].rows(epoch + at // size, np.array([at % size]))[0]) for at in places}
            assert rows[number] == expected, "the next rows of the dataset"
            own = [share[number] for share in shares]
            assert sum(own) == len(places)
            assert max(own) - min(own) <= 1
        key = self.place, len(self.ranks)
        content = [list(zip(batch.sources.tolist(), batch.number.tolist(), strict=True)) for batch in batches]
        assert self.known.setdefault(key, content) == content
        self.place = RowPlace(self.place.number, counts)
        self.states.append((state, self.place))

    def move_to_next_pass(self) -> None:
        self.iterator, self.place = None, RowPlace(self.place.number + 1, (0,) * len(self.options.sizes))

    @rule(count=st.integers(1, 8))
    def take(self, count: int) -> None:
        if self.iterator is None:
            self.iterator, self.is_abandoned = zip(*self.ranks, strict=True), False
        for _ in range(count):
            batches = next(self.iterator, None)
            assert (batches is None) is self.is_over()
            if batches is None:
                self.move_to_next_pass()
                return
            self.check_step(batches)

    @rule(which=st.integers(0, 10**6), world_size=st.integers(1, 4), is_fresh=st.booleans())
    def resume(self, which: int, world_size: int, is_fresh: bool) -> None:
        """Resume from any state so far: with other ranks, in a new process or in this one."""
        state, place = self.states[which % len(self.states)]
        if is_fresh:
            self.open_ranks(world_size)
        for dataset in self.ranks:
            dataset.load_state_dict(state)
        RowMixMachine.resumes += 1
        self.iterator, self.is_abandoned, self.place = None, False, place
        at_end = state["step"] and self.ranks[0].state_dict()["epoch"] > state["epoch"]
        if at_end:
            self.move_to_next_pass()

    @precondition(lambda self: self.iterator is None and not self.current.is_endless)
    @rule(workers=st.integers(1, 3))
    def take_the_rest_with_workers(self, workers: int) -> None:
        mark = Worker.alone().pass_id
        batches = [collect_workers(dataset, workers, mark) for dataset in self.ranks]  # type: ignore[arg-type]
        for step in zip(*batches, strict=True):
            self.check_step(step)
        assert self.is_over()
        self.move_to_next_pass()
        self.is_abandoned = True

    @precondition(lambda self: self.iterator is not None)
    @rule()
    def abandon(self) -> None:
        """Leave a pass: iterating again begins the next one."""
        self.move_to_next_pass()
        self.is_abandoned = True

    @precondition(lambda self: self.iterator is None)
    @rule()
    def copy(self) -> None:
        self.ranks = pickle.loads(pickle.dumps(self.ranks))

    @precondition(lambda self: self.iterator is None and not self.is_abandoned and not self.current.is_endless)
    @rule()
    def measure(self) -> None:
        """The length counts the steps before the pass was resumed, and those that are left."""
        dataset = self.ranks[0]
        taken = dataset._registry.current_start(1).taken
        step = len(self.ranks) * self.options.batch_size
        whole, rest = divmod(self.current.length - sum(self.place.counts), step)
        more = {"drop": False, "pad": rest > 0, "keep": rest >= len(self.ranks) or (rest > 0 and not whole)}
        assert len(dataset) == taken + whole + more[self.options.last]

    def teardown(self) -> None:
        gc.collect(0)


def test_mix_by_rows_keeps_its_laws_however_it_is_resumed() -> None:
    RowMixMachine.resumes = 0
    chosen = settings(
        max_examples=20,
        stateful_step_count=EXAMPLE_STEPS,
        derandomize=False,  # every round has other examples
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    while RowMixMachine.resumes < RESUMES:
        run_state_machine_as_test(RowMixMachine, settings=chosen)
    print(f"{RowMixMachine.resumes} resumes of mixes by rows")  # noqa: T201 - with -s


# --- regressions


def test_model_returns_long_passes_whole() -> None:
    parts = (Part(20, 1, "keep", 2, "block"), Part(1, 1, "keep", 1, "block"))
    mix = Mix(parts, (1, 11), 275, "all", rank=0, world_size=1)
    expected, _ = mix.batches(Place(0, (0, 0), 0))
    assert [content(batch) for batch in mix.open()] == expected
    assert len(expected) > 400


@pytest.mark.parametrize("stop", ["first", "all"])
def test_dataset_at_its_end_stays_there_when_the_mix_resumes(stop: str) -> None:
    mix = Mix((Part(20, 4, "keep", 1, "block"), Part(1, 4, "keep", 1, "block")), (1, 1), 2, stop, rank=0, world_size=1)
    unbroken = mix.open()
    passes = [[content(batch) for batch in unbroken] for _ in range(3)]
    if stop == "first":
        assert [name for name, _ in passes[0]] == ["0", "1", "0"]
    states = [through_json(batch.state) for batch in mix.open()]
    for count, state in enumerate(states, 1):
        resumed = mix.open()
        resumed.load_state_dict(state)
        rest = [passes[0][count:], *passes[1:]] if count < len(states) else passes[1:]
        assert len(resumed) == len(passes[0] if count < len(states) else passes[1])
        assert [[content(batch) for batch in resumed] for _ in rest] == rest


def test_state_at_the_end_of_a_pass_resumes_with_the_next_pass() -> None:
    mix = Mix((Part(5, 2, "keep", 1, "block"), Part(2, 2, "keep", 2, False)), (2, 1), 5, "all", rank=0, world_size=1)
    dataset, other = mix.open(), mix.open()
    list(dataset)
    other.load_state_dict(dataset.state_dict())
    assert [content(batch) for batch in other] == [content(batch) for batch in dataset]
