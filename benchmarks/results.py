"""Store measurements: benchmarks/results has one file per part, with one section per row.

A section is a table and the goals that are checked with it. A new measurement replaces the section of the same name, so
that a part can be measured in pieces. The pages and drawings are generated from these files alone (see report.py).
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
    """A target for a number of quire: an upper or a lower bound for a ratio to another contestant or for a quantity."""

    quire: str
    against: str
    """The other contestant of a ratio; for a quantity of quire alone, its name."""
    values: Sequence[float]
    """One value per round; empty if a contestant is not installed."""
    by: str = "CPU"
    """The time that a ratio compares: CPU or wall."""
    at_most: float | None = None
    at_least: float | None = None
    unit: str = "x"
    known: str = ""
    """Results of other libraries that were known when the target was set."""

    @property
    def value(self) -> float:
        """The median of the rounds."""
        return median(self.values)

    @property
    def margin(self) -> float:
        """How many times better than the target: 1 just meets it, 2 is twice as good."""
        if self.at_least is not None:
            return self.value / self.at_least
        assert self.at_most is not None
        return self.at_most / self.value if self.value > 0 else float("inf")

    @property
    def verdict(self) -> str:
        """PASS or MISS, by the median."""
        if not self.values:
            return "not measured"
        return "PASS" if self.margin >= 1 else "**MISS**"

    @property
    def target(self) -> str:
        """The bound as text."""
        sign, bound = (">=", self.at_least) if self.at_least is not None else ("<=", self.at_most)
        return f"{sign} {bound:g}{self._suffix}"

    @property
    def shown(self) -> str:
        """The median as text."""
        return f"{_short(self.value)}{self._suffix}" if self.values else ""

    @property
    def spread(self) -> str:
        """The smallest and the largest value of the rounds."""
        return f"{_short(min(self.values))} to {_short(max(self.values))}" if len(self.values) > 1 else ""

    @property
    def _suffix(self) -> str:
        return self.unit if self.unit in ("x", "") else f" {self.unit}"


@dataclass(frozen=True)
class Section:
    """A row of the benchmarks: a description, the table of all contestants, and the goals."""

    name: str
    title: str
    what: str
    head: Sequence[str]
    lines: Sequence[Sequence[str]]
    goals: Sequence[Goal] = ()
    others: dict[str, float] = field(default_factory=dict)
    """The time of each other contestant relative to quire (1x)."""
    facts: dict[str, Any] = field(default_factory=dict)
    """The machine, the versions of the packages, and the load."""


def keep(part: str, section: Section, packages: Iterable[str], folder: Path = KEPT) -> None:
    """Write the section to the file of the part; it replaces the section of the same name."""
    folder.mkdir(exist_ok=True)
    sections = {kept.name: kept for kept in load(part, folder)}
    sections[section.name] = replace(section, facts=facts(packages) | section.facts)
    file = folder / f"{part}.json"
    written = file.with_suffix(".part")
    written.write_text(json.dumps([asdict(kept) for kept in sections.values()], indent=1) + "\n")
    written.replace(file)


def load(part: str, folder: Path = KEPT) -> list[Section]:
    """Return the sections of a part, in the order in which they were first measured."""
    file = folder / f"{part}.json"
    if not file.exists():
        return []
    return [
        Section(**{**kept, "goals": [Goal(**goal) for goal in kept["goals"]]}) for kept in json.loads(file.read_text())
    ]


def facts(packages: Iterable[str]) -> dict[str, Any]:
    """Return versions, processor, memory and the load at the start, but no name of the machine."""
    return {
        "machine": f"{platform.system()} on {platform.machine()}, {_processor()}, {os.cpu_count()} cores, {_memory()}",
        "versions": {"Python": platform.python_version()} | {package: version_of(package) for package in packages},
        "load": round(LOAD, 1),
    }


def version_of(package: str) -> str:
    """Return the installed version, or `__version__` of a package that runs from its sources."""
    try:
        return importlib.metadata.version(DISTRIBUTIONS.get(package, package))
    except importlib.metadata.PackageNotFoundError:
        return getattr(sys.modules.get(package), "__version__", "not installed")


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "a processor")


def _memory() -> str:
    return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB of memory"


# --- Markdown


def markdown(section: Section) -> str:
    """Format a section: heading, description, table, goals."""
    parts = [f"## {section.title}", section.what, markdown_table(section.head, section.lines)]
    if section.goals:
        parts.append(goal_table([("", goal) for goal in section.goals]))
    return "\n\n".join(parts) + "\n"


GOALS = ["quire", "compared with", "time", "result", "min to max", "target", "known results", "verdict"]


def goal_table(goals: Iterable[tuple[str, Goal]]) -> str:
    """Format one line per goal, with the title of its row; without any title, the column is left out."""
    lines = [(row, _goal_line(goal)) for row, goal in goals]
    if not any(row for row, _ in lines):
        return markdown_table(GOALS, [line for _, line in lines])
    return markdown_table(["", *GOALS], [[row, *line] for row, line in lines])


def _goal_line(goal: Goal) -> list[str]:
    by = goal.by if goal.unit == "x" else ""
    return [goal.quire, goal.against, by, goal.shown, goal.spread, goal.target, goal.known, goal.verdict]


def markdown_table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Format a table with aligned columns, which is readable as plain text, too."""
    cells = [head, *lines]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    written = ["| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in cells]
    written.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(written)


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}" if abs(value) >= 10 else f"{value:.2f}"
