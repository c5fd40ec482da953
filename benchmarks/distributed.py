"""Shards on threads, on Ray and on Spark: 100 MB of pictures are read, mapped and written, beside code by hand.

    python benchmarks/distributed.py --rows local ray --rounds 5 --keep

A row is a process with one engine and two workers, in which contestants take turns (see distributed_work.py);
`scaling` has each engine with one worker and with two.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import NamedTuple

from results import Goal, Section, keep, markdown

PACKAGES = ("quire", "numpy", "pyarrow", "ray", "pyspark", "torch")
WORK = Path(__file__).with_name("distributed_work.py")
MEGABYTES = 8192 * 3 * 64 * 64 / 1e6

Times = dict[str, dict[str, list[float]]]
"""By contestant: seconds of wall and of CPU, one number a round."""


class Aim(NamedTuple):
    """How two contestants of a row are to compare: at most so much of the other's time, or at least so much faster."""

    ours: str
    theirs: str
    at_most: float | None = None
    at_least: float | None = None


class Row(NamedTuple):
    """What is done, and by whom it is measured."""

    title: str
    what: str
    aims: tuple[Aim, ...]


POOL, BY_ROW = "a process pool that pickles documents", "pandas_udf, row by row"
PREDICTED = (
    Aim("DocumentShards, map_batch of a model", BY_ROW, at_least=3),
    Aim("DocumentShards on threads", BY_ROW, at_least=3),
)
READ = f"{MEGABYTES:.0f} MB of pictures are read, inverted and written"
ROWS = {
    "local": Row(
        "Read, map, write on threads",
        f"{READ}, on two threads.",
        (Aim("DocumentShards, map_batch", POOL, at_least=5), Aim("DocumentShards, map", POOL, at_least=5)),
    ),
    "ray": Row("Read, map, write on Ray", f"{READ}.", (Aim("DocumentShards", "Ray Data by hand", at_most=1.15),)),
    "spark": Row("Read, map, write on Spark", f"{READ}.", (Aim("DocumentShards", "mapInArrow by hand", at_most=1.15),)),
    "predict": Row(
        "Predict, a linear layer",
        "The pictures are read and go through a linear layer of torch, 128 a batch.",
        PREDICTED,
    ),
    "predict_network": Row(
        "Predict, five layers", "The pictures are read and go through five layers of torch, 128 a batch.", PREDICTED
    ),
}
SCALING = {"local": "DocumentShards, map_batch", "ray": "DocumentShards", "spark": "DocumentShards"}


def parse_options() -> argparse.Namespace:
    """Which rows, how often, and whether results are kept."""
    names = [*ROWS, "scaling"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=names, default=names, help="default: all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--data", type=Path, help="where the pictures are, or are to be; default: a temporary folder")
    parser.add_argument("--keep", action="store_true", help="put what was measured into benchmarks/results")
    return parser.parse_args()


def measured(contest: str, workers: int, rounds: int, folder: Path) -> Times:
    """The times of a contest, in a process of its own."""
    command = [sys.executable, "-W", "ignore", str(WORK), contest, str(workers), str(rounds), str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(WORK.parent)}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    found: Times = json.loads(done.stdout.splitlines()[-1])
    return found


def section_of(name: str, times: Times) -> Section:
    """A row's table and its goals."""
    row = ROWS[name]
    rounds = len(next(iter(times.values()))["wall"])
    ours = row.aims[0].ours
    return Section(
        name,
        row.title,
        f"{row.what} {rounds} rounds, two workers.",
        ["", "wall", "CPU", "MB/s"],
        [_line(contestant, found) for contestant, found in times.items()],
        [_goal(aim, times) for aim in row.aims],
        {other: median(_ratios(times, other, ours)) for other in times if not other.startswith("DocumentShards")},
    )


def _line(name: str, found: dict[str, list[float]]) -> list[str]:
    wall = found["wall"]
    spread = f"{median(wall):.2f} s ({min(wall):.2f} to {max(wall):.2f})"
    return [name, spread, f"{median(found['cpu']):.2f} s", f"{MEGABYTES / median(wall):,.0f}"]


def _goal(aim: Aim, times: Times) -> Goal:
    pair = (aim.ours, aim.theirs) if aim.at_most else (aim.theirs, aim.ours)
    return Goal(aim.ours, aim.theirs, _ratios(times, *pair), at_most=aim.at_most, at_least=aim.at_least)


def _ratios(times: Times, top: str, bottom: str) -> list[float]:
    """Of CPU times, a number a round."""
    return [a / b for a, b in zip(times[top]["cpu"], times[bottom]["cpu"], strict=True)]


def scaling(rounds: int, folder: Path) -> Section:
    """From one worker to two: stated, not judged, as the machine has two cores for all of it."""
    lines = []
    for engine, ours in SCALING.items():
        one, two = (median(measured(engine, workers, rounds, folder)[ours]["wall"]) for workers in (1, 2))
        lines.append([engine, f"{one:.2f} s", f"{two:.2f} s", f"{one / two:.2f}x"])
    what = f"{READ}; wall time, the median of {rounds} rounds."
    return Section("scaling", "From one worker to two", what, ["", "1 worker", "2 workers", "gain"], lines)


def main() -> int:
    """Measure the rows, print them, keep them if asked."""
    options = parse_options()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.data or Path(temporary)
        for name in options.rows:
            if name == "scaling":
                section = scaling(options.rounds, folder)
            else:
                section = section_of(name, measured(name, 2, options.rounds, folder))
            print(markdown(section), flush=True)
            if options.keep:
                keep("distributed", section, PACKAGES)
    return 0


if __name__ == "__main__":
    sys.exit(main())
