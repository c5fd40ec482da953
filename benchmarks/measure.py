"""Interleaved measuring: contestants take turns within every round, so that the machine's moods fall on all alike.

A round gives each contestant so many turns of so many calls; its time in the round is that of its median turn. Kept are
wall time and CPU time (of all threads, and of child processes). The ratio to the reference is the median over rounds
of the ratio within a round. CPU time decides: on a machine that others use too, wall time is also theirs.
"""

from __future__ import annotations

import gc
import importlib
import random
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from statistics import median
from typing import Any

Loop = Callable[[int], object]
"""Does its work so many times."""

_shuffle = random.Random(0)


@dataclass(frozen=True)
class Contestant:
    """A name and a loop; without a loop, the reason why there is none."""

    name: str
    loop: Loop | None = None
    missing: str = ""


@dataclass(frozen=True)
class Row:
    """What is compared: quire with its reference, and the peers beside it.

    A round is `turns` turns of `calls` calls. The time of `floor`, where there is one, is taken off everybody's.
    """

    title: str
    what: str
    quire: Contestant
    reference: Contestant
    peers: Sequence[Contestant]
    target: float
    unit: str = "us"
    calls: int = 1
    turns: int = 1
    least_rounds: int = 5
    floor: Contestant | None = None
    by_wall: bool = False
    """Whether wall time decides, as where the work is spread over cores."""
    faster: bool = False
    """Whether it is told as a gain: at least 1 / target times as fast."""
    also: Sequence[str] = ()
    """The peers that the target is meant for, too."""
    known: str = ""
    """What was known of others when the target was set."""

    @property
    def contestants(self) -> list[Contestant]:
        """Everybody, in the order of the table."""
        return [self.reference, self.quire, *self.peers, *([self.floor] if self.floor else [])]


@dataclass
class Timing:
    """Seconds, one number a round (or a turn)."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def less(self, floor: Timing) -> Timing:
        """The times without the floor's median time."""
        wall, cpu = median(floor.wall), median(floor.cpu)
        return Timing([seconds - wall for seconds in self.wall], [seconds - cpu for seconds in self.cpu])


@dataclass(frozen=True)
class Result:
    """The timings of a row, by contestant; who is missing is not among them."""

    row: Row
    timings: dict[str, Timing]

    def ratios(self, name: str, by: str = "cpu", other: str = "") -> list[float]:
        """What a contestant takes of another's time, or of the reference's; a number a round."""
        ours, base = self.timings[name], self.timings[other or self.row.reference.name]
        return [a / b for a, b in zip(getattr(ours, by), getattr(base, by), strict=True)]


def repeated(function: Callable[[], object]) -> Loop:
    """A loop that calls a function."""

    def loop(calls: int) -> None:
        for _ in repeat(None, calls):
            function()

    return loop


def peer(name: str, package: str, build: Callable[[Any], Loop]) -> Contestant:
    """A contestant whose loop is built with the module named after its package, such as peer_docarray."""
    try:
        module = importlib.import_module(f"peer_{package}")
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        return Contestant(name, missing="not installed")
    return Contestant(name, build(module))


def measure(row: Row, rounds: int) -> Result:
    """The timings of everybody who is there, after one turn that does not count.

    What was made before is out of the garbage collector's sight, and the collector stays on: each pays for its garbage.
    """
    present = [contestant for contestant in row.contestants if contestant.loop]
    timings = {contestant.name: Timing() for contestant in present}
    _play_round(present, row.calls, 1)
    gc.collect()
    gc.freeze()
    try:
        for _ in range(max(rounds, row.least_rounds)):
            for name, (wall, cpu) in _play_round(present, row.calls, row.turns).items():
                timings[name].wall.append(wall)
                timings[name].cpu.append(cpu)
    finally:
        gc.unfreeze()
    if row.floor:
        floor = timings[row.floor.name]
        timings = {name: timing if timing is floor else timing.less(floor) for name, timing in timings.items()}
    return Result(row, timings)


def _play_round(contestants: Sequence[Contestant], calls: int, turns: int) -> dict[str, tuple[float, float]]:
    """Wall and CPU seconds a call. The order is random, so that nobody always comes after the same one."""
    spent = {contestant.name: Timing() for contestant in contestants}
    for _ in range(turns):
        for contestant in _shuffle.sample(contestants, len(contestants)):
            assert contestant.loop is not None
            cpu, wall = _cpu_seconds(), time.perf_counter()
            contestant.loop(calls)
            spent[contestant.name].wall.append(time.perf_counter() - wall)
            spent[contestant.name].cpu.append(_cpu_seconds() - cpu)
    return {name: (median(timing.wall) / calls, median(timing.cpu) / calls) for name, timing in spent.items()}


def _cpu_seconds() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime
