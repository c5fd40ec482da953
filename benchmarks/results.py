"""What was measured, as it is kept: benchmarks/results has a file a part, with a section a row.

A section is a table and the goals that it speaks of. What is measured again takes the place of what was there, row by
row, so that a part can be measured in pieces. The pages and drawings are made of these files alone (see report.py).
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

KEPT = Path(__file__).with_name("results")
LOAD = os.getloadavg()[0]
DISTRIBUTIONS = {"quire": "quire-ml"}  # packages whose distribution has another name


@dataclass(frozen=True)
class Goal:
    """A number of quire's that is to be at most so large, or at least; a ratio to another's, or one of its own."""

    quire: str
    against: str
    """Who it is measured by; for a number of quire's own, what the number is."""
    values: Sequence[float]
    """One a round; none if somebody was not there."""
    by: str = "CPU"
    """CPU or wall time, for a ratio."""
    at_most: float | None = None
    at_least: float | None = None
    unit: str = "x"
    known: str = ""
    """What was known of others when the goal was set."""

    @property
    def value(self) -> float:
        """The median of the rounds."""
        return median(self.values)

    @property
    def part_reached(self) -> float:
        """How many times as good as it is to be: 1 is just reached, 2 is twice as good."""
        if self.at_least is not None:
            return self.value / self.at_least
        assert self.at_most is not None
        return self.at_most / self.value if self.value > 0 else float("inf")

    @property
    def verdict(self) -> str:
        """PASS or SHORT."""
        if not self.values:
            return "not measured"
        return "PASS" if self.part_reached >= 1 else "**SHORT**"

    @property
    def reach(self) -> str:
        """What it is to be."""
        sign, bound = (">=", self.at_least) if self.at_least is not None else ("<=", self.at_most)
        return f"{sign} {bound:g}{self._suffix}"

    @property
    def shown(self) -> str:
        """The median."""
        return f"{_short(self.value)}{self._suffix}" if self.values else ""

    @property
    def spread(self) -> str:
        """The least and the most of the rounds."""
        return f"{_short(min(self.values))} to {_short(max(self.values))}" if len(self.values) > 1 else ""

    @property
    def _suffix(self) -> str:
        return self.unit if self.unit in ("x", "") else f" {self.unit}"


@dataclass(frozen=True)
class Section:
    """A row: what was done, the table of everybody's times, the goals."""

    name: str
    title: str
    what: str
    head: Sequence[str]
    lines: Sequence[Sequence[str]]
    goals: Sequence[Goal] = ()
    others: dict[str, float] = field(default_factory=dict)
    """What others take, where quire takes 1."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Where, when and with what it was measured."""


def keep(part: str, section: Section, packages: Iterable[str], folder: Path = KEPT) -> None:
    """Write the section into the part's file, in place of the one with its name."""
    folder.mkdir(exist_ok=True)
    sections = {kept.name: kept for kept in load(part, folder)}
    sections[section.name] = replace(section, facts=facts(packages) | section.facts)
    file = folder / f"{part}.json"
    written = file.with_suffix(".part")
    written.write_text(json.dumps([asdict(kept) for kept in sections.values()], indent=1) + "\n")
    written.replace(file)


def load(part: str, folder: Path = KEPT) -> list[Section]:
    """The sections of a part, in the order in which they were first measured."""
    file = folder / f"{part}.json"
    if not file.exists():
        return []
    return [
        Section(**{**kept, "goals": [Goal(**goal) for goal in kept["goals"]]}) for kept in json.loads(file.read_text())
    ]


def facts(packages: Iterable[str]) -> dict[str, Any]:
    """Versions, processor, memory, and the load at the start; nothing that names a machine."""
    return {
        "machine": f"{platform.system()} on {platform.machine()}, {_processor()}, {os.cpu_count()} cores, {_memory()}",
        "versions": {"Python": platform.python_version()} | {package: version_of(package) for package in packages},
        "load": round(LOAD, 1),
    }


def version_of(package: str) -> str:
    """The installed version; what runs from its sources says it itself."""
    try:
        return importlib.metadata.version(DISTRIBUTIONS.get(package, package))
    except importlib.metadata.PackageNotFoundError:
        return getattr(sys.modules.get(package), "__version__", "not installed")


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "a processor")


def _memory() -> str:
    return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB of memory"


# --- as Markdown


def markdown(section: Section) -> str:
    """The heading, what was done, the table, the goals."""
    parts = [f"## {section.title}", section.what, markdown_table(section.head, section.lines)]
    if section.goals:
        parts.append(goal_table([("", goal) for goal in section.goals]))
    return "\n\n".join(parts) + "\n"


GOALS = ["quire", "against", "by", "", "least to most", "reach", "known", "verdict"]


def goal_table(goals: Iterable[tuple[str, Goal]]) -> str:
    """A line a goal, with the row it belongs to; rows without a name take no column."""
    lines = [(row, _goal_line(goal)) for row, goal in goals]
    if not any(row for row, _ in lines):
        return markdown_table(GOALS, [line for _, line in lines])
    return markdown_table(["", *GOALS], [[row, *line] for row, line in lines])


def _goal_line(goal: Goal) -> list[str]:
    by = goal.by if goal.unit == "x" else ""
    return [goal.quire, goal.against, by, goal.shown, goal.spread, goal.reach, goal.known, goal.verdict]


def markdown_table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table that reads well as text, too."""
    cells = [head, *lines]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    written = ["| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in cells]
    written.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(written)


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}" if abs(value) >= 10 else f"{value:.2f}"
