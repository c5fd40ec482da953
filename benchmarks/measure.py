"""Interleaved measurements: contestants take turns within every round, so that other load affects all of them alike.

A round gives each contestant a number of turns, each of several calls; its time in the round is that of the median
turn. Wall time and CPU time (of all threads and child processes) are recorded. The ratio to the reference is the median
over the rounds of the ratio within a round. CPU time decides, because wall time includes the work of other processes.
"""

from __future__ import annotations

import gc
import importlib
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import repeat
from statistics import median
from typing import Any

Loop = Callable[[int], object]
"""Repeats its work the given number of times."""

_shuffle = random.Random(0)


@dataclass(frozen=True)
class Contestant:
    """A name and a loop, or the reason why there is no loop."""

    name: str
    loop: Loop | None = None
    missing: str = ""
    processes: Sequence[int] = ()
    """Ids of other processes that work for the loop, such as a server, whose CPU time counts."""


@dataclass(frozen=True)
class Row:
    """A comparison of quire with a reference and with peers.

    A round is `turns` turns of `calls` calls. The time of `floor`, if there is one, is subtracted from all times.
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
    cpu_target: float | None = None
    """With `by_wall`, a target for the CPU time, in addition."""
    by_wall: bool = False
    """Whether wall time decides, because the work is spread over several cores."""
    faster: bool = False
    """Whether the result is reported as a speedup of at least 1 / target."""
    also: Sequence[str] = ()
    """The peers that the target applies to, besides the reference."""
    speedups: Mapping[str, float] = field(default_factory=dict)
    """The least speedup over some of the peers, each with a target of its own."""
    known: str = ""
    """Results of other libraries that were known when the target was set."""

    @property
    def contestants(self) -> list[Contestant]:
        """All contestants, in the order of the table."""
        return [self.reference, self.quire, *self.peers, *([self.floor] if self.floor else [])]


@dataclass
class Timing:
    """Seconds, one value per round (or turn)."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    def less(self, floor: Timing) -> Timing:
        """Return the times minus the median of the floor."""
        wall, cpu = median(floor.wall), median(floor.cpu)
        return Timing([seconds - wall for seconds in self.wall], [seconds - cpu for seconds in self.cpu])


@dataclass(frozen=True)
class Result:
    """The timings of a row by contestant, without those that are not installed."""

    row: Row
    timings: dict[str, Timing]

    def ratios(self, name: str, by: str = "cpu", other: str = "") -> list[float]:
        """Return the time of a contestant relative to another, or to the reference; one value per round."""
        ours, base = self.timings[name], self.timings[other or self.row.reference.name]
        return [a / b for a, b in zip(getattr(ours, by), getattr(base, by), strict=True)]


def repeated(function: Callable[[], object]) -> Loop:
    """Return a loop that calls a function."""

    def loop(calls: int) -> None:
        for _ in repeat(None, calls):
            function()

    return loop


def peer(name: str, package: str, build: Callable[[Any], Loop]) -> Contestant:
    """Return a contestant whose loop is built with the module of its package, such as peer_docarray."""
    try:
        module = importlib.import_module(f"peer_{package}")
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        return Contestant(name, missing="not installed")
    return Contestant(name, build(module))


@contextmanager
def busy_processes(number: int) -> Iterator[None]:
    """Keep other processes busy for the duration of a block."""
    with ExitStack() as stack:
        for _ in range(number):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(process.kill)
        yield


def measure(row: Row, rounds: int) -> Result:
    """Measure the contestants that are installed, after one turn as a warm-up.

    Existing objects are frozen, so that the garbage collector does not visit them. The collector stays on: every
    contestant pays for its own garbage.
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
    """Return wall and CPU seconds per call. The order is random, so that no contestant always follows the same one."""
    spent = {contestant.name: Timing() for contestant in contestants}
    for _ in range(turns):
        for contestant in _shuffle.sample(contestants, len(contestants)):
            assert contestant.loop is not None
            cpu, wall = _cpu_seconds(contestant.processes), time.perf_counter()
            contestant.loop(calls)
            spent[contestant.name].wall.append(time.perf_counter() - wall)
            spent[contestant.name].cpu.append(_cpu_seconds(contestant.processes) - cpu)
    return {name: (median(timing.wall) / calls, median(timing.cpu) / calls) for name, timing in spent.items()}


def _cpu_seconds(processes: Sequence[int]) -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime + sum(map(cpu_seconds_of, processes))


def cpu_seconds_of(pid: int) -> float:
    """Return the CPU seconds of another process, by the clock that clock_getcpuclockid returns on Linux."""
    return time.clock_gettime(~pid << 3 | 2)
