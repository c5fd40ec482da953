"""Convert the results of stream.py to sections."""

from __future__ import annotations

from statistics import median
from typing import Any

from results import Goal, Section
from stream_rows import Aim, Row

Outcomes = dict[str, Any]
"""What the processes of the contestants printed."""


def section_of(row: Row, outcomes: Outcomes) -> Section:
    """Return the table and the goals of a row; the first contestant that is quire represents it."""
    present = [contestant.name for contestant in row.contestants if contestant.name in outcomes]
    return Section(
        row.name,
        row.title,
        row.what,
        _head(row),
        [_line(name, outcomes[name], row) for name in present],
        [_goal(aim, outcomes) for aim in row.aims],
        _others(present, outcomes, by="wall" if row.workers or row.operation == "write" else "cpu"),
    )


def _others(present: list[str], outcomes: Outcomes, by: str) -> dict[str, float]:
    """Return the times of the other libraries relative to quire."""
    ours = next((name for name in present if name in ("quire", "quire, 2 workers")), "")
    others = [name for name in present if not name.startswith("quire") and _measured(outcomes[name])]
    if not _measured(outcomes.get(ours)) or not _values(outcomes[ours], "rows_per_s"):
        return {}
    return {name: median(_ratios(Aim(ours, name, by=by), outcomes)) for name in others}


# --- contestants


def _head(row: Row) -> list[str]:
    return {
        "read": ["", "rows/s", "CPU s / M rows", "first batch", "memory", "anonymous", "exactly once", "mixing"],
        "take": ["", "rows/s", "CPU s / M rows", "first batch", "memory", "anonymous"],
        "write": ["", "rows/s", "CPU s / M rows", "MB/s", "size"],
        "start": ["", "first batch", "CPU"],
        "resume": ["", "first batch", "exactly once", "state"],
    }[row.operation]


def _line(name: str, result: Outcomes, row: Row) -> list[str]:
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
        "exactly once": _once(result["check"]),
        "mixing": _share(result["check"]),
    }
    return [name, *(cells[column] for column in head[1:])]


def _values(result: Outcomes, key: str) -> list[float]:
    return [outcome[key] for outcome in result["rounds"] if outcome.get(key) is not None]


def _range(result: Outcomes, key: str, form: str) -> str:
    values = _values(result, key)
    if not values:
        return ""
    low, middle, high = (form.format(value) for value in (min(values), median(values), max(values)))
    return f"{middle} ({low.split(' ')[0]} to {high.split(' ')[0]})"


def _checked(result: Outcomes, key: str, form: str) -> str:
    return form.format(result["check"][key]) if key in result["check"] else ""


def _once(check: Outcomes) -> str:
    if check.get("exactly_once") is None:
        return ""
    if check["exactly_once"]:
        return "yes"
    return f"no: {check.get('repeated', '?')} repeated, {check.get('lost', '?')} missing"


def _share(check: Outcomes) -> str:
    return f"{check['entropy'] / check['ideal_entropy']:.3f}" if "entropy" in check else ""


# --- goals


def _goal(aim: Aim, outcomes: Outcomes) -> Goal:
    bound: Outcomes = {"at_least": aim.at_least} if aim.at_least else {"at_most": aim.at_most}
    if aim.theirs:
        values = (
            _ratios(aim, outcomes) if _measured(outcomes.get(aim.ours)) and _measured(outcomes.get(aim.theirs)) else []
        )
        by = {"cpu": "CPU", "cpu of memmap": "CPU, relative to memmap"}.get(aim.by, aim.by)
        return Goal(aim.ours, aim.theirs, values, by, known=aim.known, **bound)
    name, unit = OWN.get(aim.by, (aim.by, ""))
    values = _own_values(aim.by, outcomes[aim.ours]) if _measured(outcomes.get(aim.ours)) else []
    return Goal(aim.ours, name, values, unit=unit, known=aim.known, **bound)


OWN = {
    "first_batch_s": ("seconds to the first batch", "s"),
    "growth_mb": ("memory growth per epoch", "MB"),
    "budget_mb": ("memory above the start", "MB"),
    "size": ("size of the files relative to the data", ""),
}


def _ratios(aim: Aim, outcomes: Outcomes) -> list[float]:
    """Return the speed relative to the other contestant, one value per round."""
    ours, theirs = outcomes[aim.ours], outcomes[aim.theirs]
    if aim.by == "wall":
        return _divided(_values(ours, "rows_per_s"), _values(theirs, "rows_per_s"))
    speeds = _divided(_values(theirs, "cpu_s_per_million"), _values(ours, "cpu_s_per_million"))
    if aim.by == "cpu of memmap":
        gather, scan = outcomes["numpy memmap gather"], outcomes["numpy memmap, in order"]
        random = _divided(_values(scan, "cpu_s_per_million"), _values(gather, "cpu_s_per_million"))
        return _divided(speeds, random)
    return speeds


def _measured(result: Outcomes | None) -> bool:
    return bool(result and result["rounds"] and "error" not in result)


def _own_values(name: str, ours: Outcomes) -> list[float]:
    if name == "mixing":
        return [float(ours["check"]["entropy"] / ours["check"]["ideal_entropy"])]
    if name == "budget_mb":
        return [float(ours["check"]["peak_anon_mb"] - ours["check"]["base_anon_mb"])]
    return _values(ours, name)


def _divided(tops: list[float], bottoms: list[float]) -> list[float]:
    return [top / bottom for top, bottom in zip(tops, bottoms, strict=True)]
