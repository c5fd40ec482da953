"""Command line of the benchmarks whose contestants take turns in one process, and their results as sections."""

from __future__ import annotations

import argparse
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from measure import Contestant, Result, Row, measure
from results import Goal, Section, goal_table, keep, markdown

UNITS = {"us": 1e6, "ms": 1e3}

Builder = Callable[[int], Row | Section]
"""Builds a row to be measured, or a section with results."""


def parse_options(description: str, names: Iterable[str]) -> argparse.Namespace:
    """Parse the rows, rounds, sizes and threads, and whether results are stored."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=list(names), default=list(names), help="default: all")
    parser.add_argument("--rounds", type=int, default=9, help="at least 5, and 11 for imports")
    parser.add_argument("--size", type=int, default=10_000, help="documents in an array or a batch")
    parser.add_argument(
        "--threads", type=int, default=1, help="threads of torch; with more than one, read the ratio of wall times"
    )
    parser.add_argument("--keep", action="store_true", help="store the results in benchmarks/results")
    return parser.parse_args()


def run(part: str, builders: Mapping[str, Builder], options: argparse.Namespace, packages: Sequence[str]) -> int:
    """Measure the rows, print them, and store them with `--keep`; return 1 if a row crashed."""
    sections = []
    for name in options.rows:
        try:
            row = builders[name](options.size)
            section = row if isinstance(row, Section) else section_of(name, measure(row, options.rounds))
        except Exception:  # noqa: BLE001 - a row that crashes is reported, and the others continue
            traceback.print_exc()
            continue
        sections.append(section)
        print(markdown(section), flush=True)
        if options.keep:
            keep(part, section, packages)
    print(goal_table((section.name, goal) for section in sections for goal in section.goals))
    return 0 if len(sections) == len(options.rows) else 1


def section_of(name: str, result: Result) -> Section:
    """Convert the timings of a row to a section."""
    row = result.row
    rounds = len(result.timings[row.quire.name].wall)
    method = f"{rounds} rounds, turns per round: {row.turns}, calls per turn: {row.calls}"
    return Section(
        name,
        row.title,
        f"{row.what} {method}.",
        ["", f"CPU {row.unit}", f"wall {row.unit}", "min to max", "CPU ratio", "wall ratio"],
        [_line(result, contestant) for contestant in row.contestants],
        list(_goals(result)),
        _others(result),
    )


def _line(result: Result, contestant: Contestant) -> list[str]:
    if contestant.loop is None:
        return [contestant.name, contestant.missing, *[""] * 4]
    timing, scale = result.timings[contestant.name], UNITS[result.row.unit]
    times = [f"{median(seconds) * scale:,.2f}" for seconds in (timing.cpu, timing.wall)]
    spread = f"{min(timing.wall) * scale:,.2f} to {max(timing.wall) * scale:,.2f}"
    if contestant is result.row.floor or result.row.reference.loop is None:
        return [contestant.name, *times, spread, "", ""]
    ratios = [median(result.ratios(contestant.name, by)) for by in ("cpu", "wall")]
    return [contestant.name, *times, spread, *(f"{ratio:.2f}x" for ratio in ratios)]


def _goals(result: Result) -> Iterator[Goal]:
    """Yield the goals of the reference, of the peers that its target applies to, and of those with a target."""
    row = result.row
    by = "wall" if row.by_wall else "cpu"
    for other in [row.reference, *(peer for peer in row.peers if peer.name in row.also)]:
        ratios = result.ratios(row.quire.name, by, other.name) if other.loop else []
        bound: dict[str, Any] = {"at_least": round(1 / row.target, 9)} if row.faster else {"at_most": row.target}
        values = [1 / ratio for ratio in ratios] if row.faster else ratios
        yield Goal(row.quire.name, other.name, values, "wall" if row.by_wall else "CPU", known=row.known, **bound)
    if row.cpu_target is not None and row.reference.loop:
        ratios = result.ratios(row.quire.name, "cpu", row.reference.name)
        yield Goal(row.quire.name, row.reference.name, ratios, "CPU", at_most=row.cpu_target)
    for peer in row.peers:
        if peer.name in row.speedups:
            values = [1 / ratio for ratio in result.ratios(row.quire.name, by, peer.name)] if peer.loop else []
            yield Goal(
                row.quire.name,
                peer.name,
                values,
                "wall" if row.by_wall else "CPU",
                at_least=row.speedups[peer.name],
            )


def _others(result: Result) -> dict[str, float]:
    """Return the times of the other libraries relative to quire."""
    row, by = result.row, "wall" if result.row.by_wall else "cpu"
    others = [contestant.name for contestant in (row.reference, *row.peers) if contestant.loop]
    times = {name: median(result.ratios(name, by, row.quire.name)) for name in others}
    return {name: ratio for name, ratio in times.items() if not name.startswith("quire")}
