"""Benchmark shards on threads, Ray and Spark: read, map and write 100 MB of images, compared with hand-written code.

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
"""Wall and CPU seconds by contestant, one value per round."""


class Aim(NamedTuple):
    """A target for a contestant: at most a multiple of the other's time, or at least a speedup."""

    ours: str
    theirs: str
    at_most: float | None = None
    at_least: float | None = None


class Row(NamedTuple):
    """A description of the work, and the targets."""

    title: str
    what: str
    aims: tuple[Aim, ...]


POOL, BY_ROW = "process pool that pickles documents", "pandas_udf, row by row"
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
    "ray": Row("Read, map, write on Ray", f"{READ}.", (Aim("DocumentShards", "hand-written Ray Data", at_most=1.15),)),
    "spark": Row(
        "Read, map, write on Spark", f"{READ}.", (Aim("DocumentShards", "hand-written mapInArrow", at_most=1.15),)
    ),
    "predict": Row(
        "Predict, a linear layer",
        "The pictures are read and pass through a linear layer of torch in batches of 128.",
        PREDICTED,
    ),
    "predict_network": Row(
        "Predict, five layers",
        "The pictures are read and pass through five layers of torch in batches of 128.",
        PREDICTED,
    ),
}
SCALING = {"local": "DocumentShards, map_batch", "ray": "DocumentShards", "spark": "DocumentShards"}


def parse_options() -> argparse.Namespace:
    """Parse the rows, the rounds, and whether results are stored."""
    names = [*ROWS, "scaling"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=names, default=names, help="default: all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--data", type=Path, help="folder of the images; default: a temporary folder")
    parser.add_argument("--keep", action="store_true", help="store the results in benchmarks/results")
    return parser.parse_args()


def measure(contest: str, workers: int, rounds: int, folder: Path) -> Times:
    """Run a contest in a process of its own, and return its times."""
    command = [sys.executable, "-W", "ignore", str(WORK), contest, str(workers), str(rounds), str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(WORK.parent)}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    times: Times = json.loads(done.stdout.splitlines()[-1])
    return times


def section_of(name: str, times: Times) -> Section:
    """Return the table and the goals of a row."""
    row = ROWS[name]
    rounds = len(next(iter(times.values()))["wall"])
    ours = row.aims[0].ours
    return Section(
        name,
        row.title,
        f"{row.what} {rounds} rounds, two workers.",
        ["", "wall", "CPU", "MB/s"],
        [_line(contestant, seconds) for contestant, seconds in times.items()],
        [_goal(aim, times) for aim in row.aims],
        {other: median(_ratios(times, other, ours)) for other in times if not other.startswith("DocumentShards")},
    )


def _line(name: str, seconds: dict[str, list[float]]) -> list[str]:
    wall = seconds["wall"]
    spread = f"{median(wall):.2f} s ({min(wall):.2f} to {max(wall):.2f})"
    return [name, spread, f"{median(seconds['cpu']):.2f} s", f"{MEGABYTES / median(wall):,.0f}"]


def _goal(aim: Aim, times: Times) -> Goal:
    pair = (aim.ours, aim.theirs) if aim.at_most else (aim.theirs, aim.ours)
    return Goal(aim.ours, aim.theirs, _ratios(times, *pair), at_most=aim.at_most, at_least=aim.at_least)


def _ratios(times: Times, top: str, bottom: str) -> list[float]:
    """Return the ratios of CPU times, one value per round."""
    return [a / b for a, b in zip(times[top]["cpu"], times[bottom]["cpu"], strict=True)]


def scaling(rounds: int, folder: Path) -> Section:
    """Compare one worker with two. There is no target, because the machine has two cores for everything."""
    lines = []
    for engine, ours in SCALING.items():
        one, two = (median(measure(engine, workers, rounds, folder)[ours]["wall"]) for workers in (1, 2))
        lines.append([engine, f"{one:.2f} s", f"{two:.2f} s", f"{one / two:.2f}x"])
    what = f"{READ}; wall time, the median of {rounds} rounds."
    return Section("scaling", "Scaling from one worker to two", what, ["", "1 worker", "2 workers", "speedup"], lines)


def main() -> int:
    """Measure the rows, print them, and store them with `--keep`."""
    options = parse_options()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.data or Path(temporary)
        for name in options.rows:
            if name == "scaling":
                section = scaling(options.rounds, folder)
            else:
                section = section_of(name, measure(name, 2, options.rounds, folder))
            print(markdown(section), flush=True)
            if options.keep:
                keep("distributed", section, PACKAGES)
    return 0


if __name__ == "__main__":
    sys.exit(main())
