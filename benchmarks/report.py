"""The command line of the benchmarks, and their results as tables and as a page.

`python benchmarks/report.py` draws docs/images/benchmarks.svg anew, from the tables of the pages.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median

import plot
from measure import Contestant, Ratios, Result, Row, measure

UNITS = {"us": 1e6, "ms": 1e3}

HOW_TO_READ = """\
In every round the contestants take turns, in random order; the time of a call in a round is taken from the median turn.
*CPU*, *wall* and *min* are the median CPU time (of all threads and child processes), the median wall time and the
shortest wall time over the rounds. *ratio* is to the first line of a table: the median over the rounds of the ratio of
CPU times within a round. It decides whether a target is met, because the machine was not ours alone. *of wall* and *of
min* are the same by wall times, and by the shortest; where they differ much, the machine was busy with something else.
"""


def parse_options(description: str, names: Iterable[str]) -> argparse.Namespace:
    """Which rows, how often, how large, on how many threads, and where to write the page."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=list(names), default=list(names), help="default: all")
    parser.add_argument("--rounds", type=int, default=9, help="at least 5, and 11 for imports")
    parser.add_argument("--size", type=int, default=10_000, help="documents in an array or a batch")
    parser.add_argument(
        "--threads", type=int, default=1, help="threads of torch; with more than one, read the ratio of wall times"
    )
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the results as a page")
    return parser.parse_args()


def run(builders: Mapping[str, Callable[[int], Row]], options: argparse.Namespace, packages: Sequence[str]) -> int:
    """Measure the rows, print them, write the page if asked; 1 if a row crashed."""
    facts = machine_facts(options.threads, packages)
    print(facts, "\n")
    results, sections = [], []
    for name in options.rows:
        try:
            results.append(measure(builders[name](options.size), options.rounds))
            sections.append(section(results[-1]))
        except Exception:  # noqa: BLE001 - a row that crashes is reported, and the others go on
            sections.append(f"## {name}\n\n**crashed**\n")
            traceback.print_exc()
        print(sections[-1], flush=True)
    print(summary_table(results))
    if options.markdown:
        parts = ["# Benchmarks\n", summary_table(results) + "\n", HOW_TO_READ, facts + "\n", *sections]
        options.markdown.write_text("\n".join(parts))
    return 0 if len(results) == len(options.rows) else 1


def machine_facts(threads: int, packages: Sequence[str]) -> str:
    """Versions, cores, threads and load; nothing that names a machine."""
    versions = [f"{package} {version_of(package)}" for package in packages]
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return "\n".join(
        [
            f"- Python {platform.python_version()}, {', '.join(versions)}",
            f"- {platform.system()} on {platform.machine()}, {os.cpu_count()} cores, load average {load} at the start",
            f"- torch runs on {threads} thread{'s' if threads > 1 else ''}",
        ]
    )


def version_of(package: str) -> str:
    """The installed version; what runs from its sources says it itself."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return getattr(sys.modules.get(package), "__version__", "not installed")


# --- tables


def section(result: Result) -> str:
    """A row's heading, what it measures, its table and its verdict."""
    row = result.row
    head = ["", f"CPU {row.unit}", f"wall {row.unit}", f"min {row.unit}", "ratio", "of wall", "of min"]
    table = markdown_table(head, (_result_line(result, contestant) for contestant in row.contestants))
    rounds = f"{len(result.timings[row.quire.name].wall)} rounds, turns a round: {row.turns}, calls a turn: {row.calls}"
    verdict = f"Target: at most {row.target:.2f}x{' of wall time' if row.by_wall else ''}, {_verdict(result)}."
    return f"## {row.title}\n\n{row.what}\n{rounds}.\n\n{table}\n\n{verdict}\n"


def _result_line(result: Result, contestant: Contestant) -> list[str]:
    if contestant.loop is None:
        return [contestant.name, contestant.missing, *[""] * 5]
    timing, scale = result.timings[contestant.name], UNITS[result.row.unit]
    times = [f"{seconds * scale:,.2f}" for seconds in (median(timing.cpu), median(timing.wall), min(timing.wall))]
    ratios = [""] * 3 if contestant is result.row.floor else _format(result.ratios(contestant.name))
    return [contestant.name, *times, *ratios]


def summary_table(results: Iterable[Result]) -> str:
    """A line a row: quire's ratios, the target, and the peers' ratios."""
    head = ["quire", "against", "ratio", "of wall", "of min", "target", "", "peers"]
    return markdown_table(head, map(_summary_line, results))


def _summary_line(result: Result) -> list[str]:
    row = result.row
    peers = [
        f"{contestant.name} {_format(result.ratios(contestant.name))[0] if contestant.loop else contestant.missing}"
        for contestant in row.peers
    ]
    ratios = _format(result.ratios(row.quire.name))
    target = f"<= {row.target:.2f}x{' of wall' if row.by_wall else ''}"
    return [row.title, row.reference.name, *ratios, target, _verdict(result), ", ".join(peers)]


def _verdict(result: Result) -> str:
    return "met" if result.met else "**missed**"


def _format(ratios: Ratios) -> list[str]:
    return [f"{ratio:.2f}x" for ratio in (ratios.cpu, ratios.wall, ratios.minima)]


def markdown_table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table that reads well as text, too."""
    cells = [head, *lines]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    written = ["| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in cells]
    written.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(written)


if __name__ == "__main__":
    plot.main()
