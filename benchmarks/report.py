"""Generate the pages and drawings of the benchmarks from benchmarks/results.

    python benchmarks/report.py

docs/benchmarks.md lists every goal. docs/benchmarks-<part>.md has every table of a part, after its introduction
(benchmarks/remarks/<part>.md). The same results give the same bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import plot
from results import KEPT, Goal, Section, goal_table, load, markdown, markdown_table

ROOT = Path(__file__).parents[1]
REMARKS = Path(__file__).with_name("remarks")
PARTS = {
    "core": "Documents, arrays, batches",
    "wire": "Bytes and files",
    "train": "Training",
    "stream": "Data larger than memory",
    "remote": "Object stores",
    "distributed": "Clusters",
    "services": "Services",
    "media": "Images, audio, video",
    "decode": "Decoding into batches",
    "view": "Viewer",
}

Kept = Mapping[str, Sequence[Section]]


def pages(kept: Kept, remarks: Path = REMARKS) -> dict[str, str]:
    """Return every page and drawing, by its path below docs."""
    contents = {f"benchmarks-{part}.md": part_page(part, sections, remarks) for part, sections in kept.items()}
    contents["benchmarks.md"] = front_page(kept, remarks)
    contents["images/benchmarks.svg"] = plot.draw_comparison(kept)
    contents["images/goals.svg"] = plot.draw_goals({PARTS[part]: goals_of(sections) for part, sections in kept.items()})
    return contents


def front_page(kept: Kept, remarks: Path) -> str:
    """Return the page with all goals."""
    parts = ["# Benchmarks", _remark("index", remarks)]
    parts += ["![CPU time relative to quire (1x), lower is better](images/benchmarks.svg)"]
    parts += ["## Goals", _counts(kept), "![Results relative to their targets](images/goals.svg)"]
    for part, sections in kept.items():
        goals = goal_table(goals_of(sections))
        parts += [f"## {PARTS[part]}", goals, f"[All tables of this part](benchmarks-{part}.md)"]
    parts += ["## Machines", _machines(section for sections in kept.values() for section in sections)]
    return "\n\n".join(parts) + "\n"


def part_page(part: str, sections: Sequence[Section], remarks: Path) -> str:
    """Return the page of a part: introduction, goals, tables."""
    parts = [f"# Benchmarks: {PARTS[part][0].lower()}{PARTS[part][1:]}", _remark(part, remarks)]
    how = "[Benchmarks](benchmarks.md) describes the method and the commands."
    parts += [goal_table(goals_of(sections)), how, f"{_machines(sections)}\n{_versions(sections)}"]
    return "\n\n".join([*parts, *(markdown(section).rstrip() for section in sections)]) + "\n"


def goals_of(sections: Iterable[Section]) -> list[tuple[str, Goal]]:
    """Return the goals with the title of their row, which is empty after the first goal of a row."""
    return [
        (section.title if not number else "", goal) for section in sections for number, goal in enumerate(section.goals)
    ]


def _counts(kept: Kept) -> str:
    lines = []
    for part, sections in kept.items():
        verdicts = [goal.verdict for _, goal in goals_of(sections)]
        counts = [len(verdicts), *(verdicts.count(verdict) for verdict in ("PASS", "**MISS**", "not measured"))]
        lines.append([PARTS[part], *map(str, counts)])
    totals = [str(sum(int(line[column]) for line in lines)) for column in range(1, 5)]
    return markdown_table(["", "goals", "PASS", "MISS", "not measured"], [*lines, ["all", *totals]])


def _remark(name: str, remarks: Path) -> str:
    return (remarks / f"{name}.md").read_text().strip()


def _machines(sections: Iterable[Section]) -> str:
    """List the machines with the range of their load averages at the start."""
    loads: dict[str, list[float]] = {}
    for section in sections:
        loads.setdefault(section.facts["machine"], []).append(section.facts["load"])
    return "\n".join(
        f"- {machine}; load average at the start {_range(averages)}" for machine, averages in sorted(loads.items())
    )


def _range(loads: Sequence[float]) -> str:
    least, most = min(loads), max(loads)
    return f"{least:.1f}" if least == most else f"{least:.1f} to {most:.1f}"


def _versions(sections: Iterable[Section]) -> str:
    by_package: dict[str, list[str]] = {}
    for section in sections:
        for package, version in section.facts["versions"].items():
            versions = by_package.setdefault(package, [])
            versions.extend([version] if version not in versions else [])
    return "- " + ", ".join(f"{package} {' and '.join(versions)}" for package, versions in by_package.items())


def main(docs: Path = ROOT / "docs", results: Path = KEPT) -> int:
    """Write all pages and drawings."""
    kept = {part: sections for part in PARTS if (sections := load(part, results))}
    for name, content in pages(kept).items():
        (docs / name).write_text(content)
        print(f"written: docs/{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
