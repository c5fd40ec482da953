"""The pages and drawings of the benchmarks, from what is kept in benchmarks/results.

    python benchmarks/report.py

docs/benchmarks.md has every goal, and docs/benchmarks-<part>.md every table of a part, after what is to be said of it
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
    "distributed": "Shards on clusters",
    "services": "Services",
    "media": "Pictures, sound, videos",
    "view": "The viewer",
}

Kept = Mapping[str, Sequence[Section]]


def pages(kept: Kept, remarks: Path = REMARKS) -> dict[str, str]:
    """Every page and drawing, by its path below docs."""
    made = {f"benchmarks-{part}.md": part_page(part, sections, remarks) for part, sections in kept.items()}
    made["benchmarks.md"] = front_page(kept, remarks)
    made["images/benchmarks.svg"] = plot.others_drawn(kept)
    made["images/goals.svg"] = plot.goals_drawn({PARTS[part]: goals_of(sections) for part, sections in kept.items()})
    return made


def front_page(kept: Kept, remarks: Path) -> str:
    """All goals."""
    parts = ["# Benchmarks", _remark("index", remarks)]
    parts += ["![What others take, where quire takes 1](images/benchmarks.svg)"]
    parts += ["## How far each goal is reached", _counts(kept), "![How far each goal is reached](images/goals.svg)"]
    for part, sections in kept.items():
        goals = goal_table(goals_of(sections))
        parts += [f"## {PARTS[part]}", goals, f"[Every table, and what is to be said of them](benchmarks-{part}.md)"]
    parts += ["## The machine", _machines(section for sections in kept.values() for section in sections)]
    return "\n\n".join(parts) + "\n"


def part_page(part: str, sections: Sequence[Section], remarks: Path) -> str:
    """What is to be said, the goals, and every table."""
    parts = [f"# Benchmarks: {PARTS[part][0].lower()}{PARTS[part][1:]}", _remark(part, remarks)]
    how = "How numbers are taken, and how to take them, is told [with all goals](benchmarks.md)."
    parts += [goal_table(goals_of(sections)), how, f"{_machines(sections)}\n{_versions(sections)}"]
    return "\n\n".join([*parts, *(markdown(section).rstrip() for section in sections)]) + "\n"


def goals_of(sections: Iterable[Section]) -> list[tuple[str, Goal]]:
    """The goals, the first one of a row with the row's title."""
    return [
        (section.title if not number else "", goal) for section in sections for number, goal in enumerate(section.goals)
    ]


def _counts(kept: Kept) -> str:
    lines = []
    for part, sections in kept.items():
        verdicts = [goal.verdict for _, goal in goals_of(sections)]
        short, missing = verdicts.count("**SHORT**"), verdicts.count("not measured")
        lines.append([PARTS[part], str(len(verdicts)), str(verdicts.count("PASS")), str(short), str(missing)])
    totals = [str(sum(int(line[column]) for line in lines)) for column in range(1, 5)]
    return markdown_table(["", "goals", "PASS", "SHORT", "not measured"], [*lines, ["all", *totals]])


def _remark(name: str, remarks: Path) -> str:
    return (remarks / f"{name}.md").read_text().strip()


def _machines(sections: Iterable[Section]) -> str:
    """Every machine that something was measured on, with the load averages at the starts."""
    loads: dict[str, list[float]] = {}
    for section in sections:
        loads.setdefault(section.facts["machine"], []).append(section.facts["load"])
    return "\n".join(
        f"- {machine}; load average at the start {_range(found)}" for machine, found in sorted(loads.items())
    )


def _range(loads: Sequence[float]) -> str:
    least, most = min(loads), max(loads)
    return f"{least:.1f}" if least == most else f"{least:.1f} to {most:.1f}"


def _versions(sections: Iterable[Section]) -> str:
    found: dict[str, list[str]] = {}
    for section in sections:
        for package, version in section.facts["versions"].items():
            versions = found.setdefault(package, [])
            versions.extend([version] if version not in versions else [])
    return "- " + ", ".join(f"{package} {' and '.join(versions)}" for package, versions in found.items())


def main(docs: Path = ROOT / "docs", results: Path = KEPT) -> int:
    """Write all of it."""
    kept = {part: sections for part in PARTS if (sections := load(part, results))}
    for name, content in pages(kept).items():
        (docs / name).write_text(content)
        print(f"written: docs/{name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
