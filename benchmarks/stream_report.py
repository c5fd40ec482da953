"""The results of stream.py as tables and as a page."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from statistics import median
from typing import Any

from report import markdown_table
from stream_rows import Goal, Row

HOW_TO_READ = """\
Every number is the median over rounds, from the least to the most. In a round every contestant is a fresh process, and
they take turns. *rows/s* is by the clock on the wall, after the first five batches; *CPU s / M rows* are seconds of
user and system time, of all threads and children, for a million rows. *first batch* is from opening to the first batch,
without imports. *memory* is the peak of what the process and its children hold (PSS), and *anonymous* the part of it
that is not files, each with what the interpreter and its libraries take. *once* tells whether an epoch gave every row
exactly once, and *mixing* is the entropy of the tenths of the dataset that the rows of a batch come from, as a share
of a true permutation's. Both, and every value of every column, are checked in a round of its own before the others.

A ratio is the median over the rounds of the ratio within a round. CPU time decides where one process works, wall time
where several do. All data is in page cache, save for W3.
"""

Found = dict[str, Any]


def summary(row: Row, found: Found) -> str:
    """A row's heading, its table and its goals."""
    lines = [
        _line(contestant.name, found[contestant.name], row)
        for contestant in row.contestants
        if contestant.name in found
    ]
    parts = [f"## {row.title}", row.what, markdown_table(_head(row), lines)]
    goals = [_goal_line(row, goal, found) for goal in row.goals]
    if goals:
        parts.append(markdown_table(GOALS, [line[1:] for line in goals]))
    return "\n\n".join(parts) + "\n"


def page(rows: Sequence[Row], found: Found, load: tuple[float, float, float], versions: dict[str, str]) -> str:
    """All goals, how to read them, and every row."""
    measured = [row for row in rows if row.name in found]
    goals = [_goal_line(row, goal, found[row.name]) for row in measured for goal in row.goals]
    facts = [
        f"- Python {platform.python_version()}, "
        + ", ".join(f"{name} {version}" for name, version in versions.items()),
        f"- {platform.system()} on {platform.machine()}, {os.cpu_count()} cores, load average "
        + ", ".join(f"{value:.1f}" for value in load)
        + " at the start; OMP_NUM_THREADS=1",
    ]
    head = "# Benchmarks: data larger than memory\n"
    return "\n".join(
        [
            head,
            markdown_table(["", *GOALS], goals) + "\n",
            HOW_TO_READ,
            *facts,
            "",
            *(summary(row, found[row.name]) for row in measured),
        ]
    )


# --- contestants


def _head(row: Row) -> list[str]:
    return {
        "read": ["", "rows/s", "CPU s / M rows", "first batch", "memory", "anonymous", "once", "mixing"],
        "take": ["", "rows/s", "CPU s / M rows", "first batch", "memory", "anonymous"],
        "write": ["", "rows/s", "CPU s / M rows", "MB/s", "size"],
        "start": ["", "first batch", "CPU"],
        "resume": ["", "first batch", "once", "state"],
    }[row.operation]


def _line(name: str, result: Found, row: Row) -> list[str]:
    head = _head(row)
    if "error" in result or not result["rounds"]:
        return [name, result.get("error", "no rounds")[:120], *[""] * (len(head) - 2)]
    cells = {
        "rows/s": _range(result, "rows_per_s", "{:,.0f}"),
        "CPU s / M rows": _range(result, "cpu_s_per_million", "{:,.2f}"),
        "first batch": _range(result, "first_batch_s", "{:.3f} s"),
        "CPU": _range(result, "first_batch_cpu_s", "{:.3f} s"),
        "MB/s": _range(result, "mb_per_s", "{:,.0f}"),
        "size": _range(result, "size", "{:.3f}x"),
        "state": _range(result, "state_bytes", "{:,.0f} bytes"),
        "memory": _checked(result, "peak_pss_mb", "{:,.0f} MB"),
        "anonymous": _checked(result, "peak_anon_mb", "{:,.0f} MB"),
        "once": _once(result["check"]),
        "mixing": _share(result["check"]),
    }
    return [name, *(cells[column] for column in head[1:])]


def _values(result: Found, key: str) -> list[float]:
    return [outcome[key] for outcome in result["rounds"] if outcome.get(key) is not None]


def _range(result: Found, key: str, form: str) -> str:
    values = _values(result, key)
    if not values:
        return ""
    low, middle, high = (form.format(value) for value in (min(values), median(values), max(values)))
    return f"{middle} ({low.split(' ')[0]} to {high.split(' ')[0]})"


def _checked(result: Found, key: str, form: str) -> str:
    return form.format(result["check"][key]) if key in result["check"] else ""


def _once(check: Found) -> str:
    if check.get("exactly_once") is None:
        return ""
    if check["exactly_once"]:
        return "yes"
    return f"no: {check.get('repeated', '?')} again, {check.get('lost', '?')} never"


def _share(check: Found) -> str:
    return f"{check['entropy'] / check['ideal_entropy']:.3f}" if "entropy" in check else ""


# --- goals

GOALS = ["quire", "against", "ratio", "reach", "known", ""]


def _goal_line(row: Row, goal: Goal, found: Found) -> list[str]:
    """The row's name, who, against whom, how far, how far it should be, what was known, and the verdict."""
    reach = f">= {goal.at_least:g}{'x' if goal.theirs else ''}" if goal.at_least else f"<= {goal.at_most:g}"
    against = f"{goal.theirs}, {goal.by}" if goal.theirs else goal.by.replace("_", " ")
    value = goal_value(goal, found)
    if value is None:
        return [row.name, goal.ours, against, "", reach, goal.known, "not measured"]
    met = value >= goal.at_least if goal.at_least else value <= goal.at_most
    shown = f"{value:,.2f}x" if goal.theirs else f"{value:.3g}"
    return [row.name, goal.ours, against, shown, reach, goal.known, "PASS" if met else "**SHORT**"]


def goal_value(goal: Goal, found: Found) -> float | None:
    """The number that a goal is about; None if somebody was not there."""
    ours, theirs = found.get(goal.ours), found.get(goal.theirs)
    if not _measured(ours) or (goal.theirs and not _measured(theirs)):
        return None
    assert ours is not None
    if not goal.theirs:
        return _own_value(goal.by, ours)
    assert theirs is not None
    if goal.by == "wall":
        return _ratio(_values(ours, "rows_per_s"), _values(theirs, "rows_per_s"))
    speed = _ratio(_values(theirs, "cpu_s_per_million"), _values(ours, "cpu_s_per_million"))
    if goal.by == "cpu of memmap":
        gather, scan = found["numpy memmap gather"], found["numpy memmap, in order"]
        return speed / _ratio(_values(scan, "cpu_s_per_million"), _values(gather, "cpu_s_per_million"))
    return speed


def _measured(result: Found | None) -> bool:
    return bool(result and result["rounds"] and "error" not in result)


def _own_value(name: str, ours: Found) -> float | None:
    if name == "mixing":
        return float(ours["check"]["entropy"] / ours["check"]["ideal_entropy"])
    if name == "budget_mb":
        return float(ours["check"]["peak_anon_mb"] - ours["check"]["base_anon_mb"])
    values = _values(ours, name)
    return median(values) if values else None


def _ratio(tops: list[float], bottoms: list[float]) -> float:
    return median(top / bottom for top, bottom in zip(tops, bottoms, strict=True))
