"""Shards on threads, on Ray and on Spark: 100 MB of pictures are read, mapped and written, beside code by hand.

    python benchmarks/distributed.py --rows local ray --rounds 5 --markdown docs/benchmarks-distributed.md

A row is a process with one engine and so many workers, in which contestants take turns (see distributed_work.py). With
`--json`, rows that were measured before are kept, so that they can be measured one by one. `--rows` without a name
measures nothing, and shows what is there.
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
from typing import Any, NamedTuple

from report import machine_facts, markdown_table

PACKAGES = ("quire", "numpy", "pyarrow", "ray", "pyspark", "torch")
WORK = Path(__file__).with_name("distributed_work.py")
MEGABYTES = 8192 * 3 * 64 * 64 / 1e6

Times = dict[str, dict[str, list[float]]]
"""By contestant: seconds of wall and of CPU, one number a round."""


class Goal(NamedTuple):
    """How two contestants of a row are to compare: the first one is to take at most so much of the other's time."""

    row: str
    ours: str
    theirs: str
    most: float
    faster: bool = False
    """Whether it is told as a gain: at least 1 / most times as fast."""


GOALS = [
    Goal("local", "DocumentShards, map_batch", "a process pool that pickles documents", 1 / 5, faster=True),
    Goal("local", "DocumentShards, map", "a process pool that pickles documents", 1 / 5, faster=True),
    Goal("ray", "DocumentShards", "Ray Data by hand", 1.15),
    Goal("spark", "DocumentShards", "mapInArrow by hand", 1.15),
    Goal("predict", "DocumentShards, map_batch of a model", "pandas_udf, row by row", 1 / 3, faster=True),
    Goal("predict", "DocumentShards on threads", "pandas_udf, row by row", 1 / 3, faster=True),
    Goal("predict_network", "DocumentShards, map_batch of a model", "pandas_udf, row by row", 1 / 3, faster=True),
    Goal("predict_network", "DocumentShards on threads", "pandas_udf, row by row", 1 / 3, faster=True),
]
SCALING = {"local": "DocumentShards, map_batch", "ray": "DocumentShards", "spark": "DocumentShards"}
ROWS = {name: (name, 2) for name in ("local", "ray", "spark", "predict", "predict_network")}
ROWS |= {f"{name}_alone": (name, 1) for name in SCALING}

HOW_TO_READ = f"""\
{MEGABYTES:.0f} MB of pictures (8,192 of uint8 (3, 64, 64), a label and a text, in eight Parquet files) are read,
inverted and written; `predict` reads them and runs a linear layer of torch, `predict_network` one of five layers, with
128 rows a batch. By hand, that is done by a Spark of its own, which has no part of quire. Everything is warm: sessions
and workers run, files are in page cache, two rounds do not count, and on Spark twelve, as Java compiles for so long. In
a round the contestants take turns. *wall* is the median over the rounds, with the least and the most; *CPU* is user and
system time of all processes, drivers and workers. A ratio is the median of the ratio within a round, and that of CPU
times decides, as on a machine that others use too, wall time is also theirs. By hand, nothing is checked on the way:
there are no checksums, no documents, no schema, no log that makes a write exactly once.
"""


def parse_options() -> argparse.Namespace:
    """Which rows, how often, and where results go."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="*", choices=list(ROWS), default=list(ROWS), help="default: all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--data", type=Path, help="where the pictures are, or are to be; default: a temporary folder")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the times, and those that are there")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the results as a page")
    return parser.parse_args()


def measured(row: str, rounds: int, folder: Path) -> Times:
    """The times of a row, in a process of its own."""
    contest, workers = ROWS[row]
    command = [sys.executable, "-W", "ignore", str(WORK), contest, str(workers), str(rounds), str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(WORK.parent)}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    found: Times = json.loads(done.stdout.splitlines()[-1])
    return found


def ratio(times: Times, ours: str, theirs: str, kind: str) -> float:
    """The median of the ratio within a round."""
    return median(a / b for a, b in zip(times[ours][kind], times[theirs][kind], strict=True))


def goal_table(results: dict[str, Times]) -> str:
    """A line a goal."""
    head = ["", "quire", "against", "CPU", "wall", "reach", ""]
    return markdown_table(head, [_goal_line(goal, results[goal.row]) for goal in GOALS if goal.row in results])


def _goal_line(goal: Goal, times: Times) -> list[str]:
    wall, cpu = (ratio(times, goal.ours, goal.theirs, kind) for kind in ("wall", "cpu"))
    verdict = "PASS" if cpu <= goal.most else "**SHORT**"
    if goal.faster:
        return [
            goal.row,
            goal.ours,
            goal.theirs,
            f"{1 / cpu:.2f}x",
            f"{1 / wall:.2f}x",
            f">= {1 / goal.most:.0f}x",
            verdict,
        ]
    return [goal.row, goal.ours, goal.theirs, f"{cpu:.2f}x", f"{wall:.2f}x", f"<= {goal.most:.2f}x", verdict]


def scaling_table(results: dict[str, Times]) -> str:
    """From one worker to two: stated, not judged, as the machine has two cores for all of it."""
    lines = []
    for row, ours in SCALING.items():
        if row in results and f"{row}_alone" in results:
            one, two = (median(results[name][ours]["wall"]) for name in (f"{row}_alone", row))
            lines.append([row, f"{one:.2f} s", f"{two:.2f} s", f"{one / two:.2f}x"])
    return markdown_table(["", "1 worker", "2 workers", "gain"], lines)


def time_table(times: Times) -> str:
    """A line a contestant."""
    lines = []
    for name, found in times.items():
        wall = found["wall"]
        spread = f"{median(wall):.2f} s ({min(wall):.2f} to {max(wall):.2f})"
        lines.append([name, spread, f"{median(found['cpu']):.2f} s", f"{MEGABYTES / median(wall):,.0f}"])
    return markdown_table(["", "wall", "CPU", "MB/s"], lines)


def page(results: dict[str, Times], facts: str) -> str:
    """All of it."""
    parts = ["# Benchmarks: shards on clusters\n", goal_table(results) + "\n", HOW_TO_READ, facts + "\n"]
    parts += ["## From one worker to two\n", scaling_table(results) + "\n"]
    for row, times in results.items():
        contest, workers = ROWS[row]
        rounds = len(next(iter(times.values()))["wall"])
        title = f"## {contest}, {workers} worker{'s' if workers > 1 else ''}\n"
        parts += [title, f"{rounds} rounds.\n", time_table(times) + "\n"]
    return "\n".join(parts)


def main() -> None:
    """Measure the rows, print the page, write it if asked."""
    options = parse_options()
    facts = "\n".join(machine_facts(1, PACKAGES).splitlines()[:2])
    results: dict[str, Times] = {}
    if options.json and options.json.exists():
        results = json.loads(options.json.read_text())
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.data or Path(temporary)
        for row in options.rows:
            results[row] = measured(row, options.rounds, folder)
            _keep(options.json, results)
    results = {row: results[row] for row in ROWS if row in results}
    print(page(results, facts))
    if options.markdown:
        options.markdown.write_text(page(results, facts))


def _keep(file: Path | None, results: dict[str, Any]) -> None:
    if file:
        file.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
