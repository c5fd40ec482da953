"""Draw the benchmarks: CPU time of other libraries relative to quire, and results relative to their targets."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from results import Goal, Section

SHOWN = {
    ("stream", "documents"): "Shuffled documents from disk",
    ("stream", "table"): "Shuffled tables from disk",
    ("stream", "pictures"): "Shuffled pictures from disk",
    ("stream", "random"): "Random rows by number",
    ("stream", "write"): "Write a dataset (wall time)",
    ("train", "dataset_per_row"): "DataLoader, a function per row",
    ("train", "dataset_batched"): "DataLoader, functions on columns",
    ("core", "construct"): "Create a document",
    ("core", "stack"): "Stack documents",
    ("wire", "batch_to_bytes_passages"): "Encode a batch",
    ("distributed", "ray"): "Read, map, write on Ray",
    ("distributed", "spark"): "Read, map, write on Spark",
}
"""The rows in the drawing of the README, with their titles there."""


@dataclass(frozen=True)
class Bar:
    """A bar from 1 to a number on a logarithmic axis, with a name on its left and a label on its right."""

    name: str
    number: float
    label: str


def draw_comparison(kept: Mapping[str, Sequence[Section]]) -> str:
    """Draw the time of the other libraries relative to quire."""
    named = {(part, section.name): section for part, sections in kept.items() for section in sections}
    groups = {
        title: [Bar("", times, f"{name} {_short(times)}") for name, times in named[key].others.items()]
        for key, title in SHOWN.items()
        if key in named
    }
    return draw(
        "CPU time relative to quire (1x), lower is better",
        "Logarithmic axis. Left of the line, the other library is faster.",
        Axis(270, "quire"),
        groups,
    )


def draw_goals(goals: Mapping[str, Iterable[tuple[str, Goal]]]) -> str:
    """Draw every result relative to its target, part by part."""
    groups = {}
    for part, goals_of_part in goals.items():
        bars, row = [], ""
        for title, goal in goals_of_part:
            row = title or row
            if goal.values:
                name = f"{_cut(row, 40)}: {_cut(goal.against, 28)}"
                bars.append(Bar(name, goal.margin, f"{goal.shown}, target {goal.target}"))
        groups[part] = bars
    return draw(
        "Results relative to their targets, higher is better",
        "Logarithmic axis. Left of the line, the target is missed.",
        Axis(450, "target"),
        groups,
    )


# --- SVG

TOP, STEP, GAP = 62, 17, 11
LEAST, MOST = 0.25, 1000.0
TICKS = (0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)
STYLE = """\
text { font: 12px system-ui, sans-serif; fill: #24292f }
.title { font-weight: 600; font-size: 14px } .group { font-weight: 600 }
.soft { fill: #656d76 } .line { stroke: #d0d7de } .own { stroke: #24292f }
.over { fill: #2f6f9f } .under { fill: #c2621b }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .soft { fill: #9198a1 } .line { stroke: #3d444d } .own { stroke: #e6edf3 }
  .over { fill: #5ba4d8 } .under { fill: #e69350 }
}"""


@dataclass(frozen=True)
class Axis:
    """A logarithmic axis that starts at `left`; its line at 1 has a name."""

    left: int
    one: str

    @property
    def right(self) -> int:
        """The position of its end."""
        return self.left + 420

    def at(self, number: float) -> float:
        """Return the position of a number."""
        share = math.log(number / LEAST) / math.log(MOST / LEAST)
        return self.left + (self.right - self.left) * share


def draw(title: str, what: str, axis: Axis, groups: Mapping[str, Sequence[Bar]]) -> str:
    """Return an SVG with groups of bars."""
    rows, y = [], float(TOP + GAP)
    for name, bars in groups.items():
        own_line = any(bar.name for bar in bars)
        rows.append(_text(axis.left - 10, y + 11, name, style="group" if own_line else "", anchor="end"))
        y += STEP if own_line else 0
        for bar in bars:
            rows.extend(_bar(bar, y, axis))
            y += STEP
        y += GAP
    head = [_text(20, 24, title, style="title"), _text(20, 42, what, style="soft")]
    parts = [*head, *_lines(y, axis), *rows]
    width = axis.right + 220
    size = f'viewBox="0 0 {width} {y + 8:.0f}" width="{width}" height="{y + 8:.0f}"'
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(title)}">'
    return "\n".join([opening, f"<style>\n{STYLE}\n</style>", *parts, "</svg>\n"])


def _lines(bottom: float, axis: Axis) -> Iterator[str]:
    for tick in TICKS:
        x, style = axis.at(tick), "own" if tick == 1 else "line"
        yield f'<line class="{style}" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom:.0f}"/>'
        name, soft = (axis.one, "") if tick == 1 else (f"{tick:g}x", "soft")
        yield _text(x, TOP - 4, name, style=soft, anchor="middle")


def _bar(bar: Bar, y: float, axis: Axis) -> Iterator[str]:
    number = min(max(bar.number, LEAST), MOST)
    start, end = sorted((axis.at(1), axis.at(number)))
    style, width = "over" if bar.number >= 1 else "under", max(end - start, 1)
    if bar.name:
        yield _text(axis.left - 10, y + 12, bar.name, style="soft", anchor="end")
    yield f'<rect class="{style}" x="{start:.1f}" y="{y + 2:.0f}" width="{width:.1f}" height="{STEP - 5}"/>'
    yield _text(max(end, axis.at(1)) + 6, y + 12, bar.label)


def _cut(name: str, longest: int) -> str:
    return name if len(name) <= longest else name[: longest - 1].rstrip(" ,:") + "…"


def _short(times: float) -> str:
    return f"{times:.0f}x" if times >= 10 else f"{times:.2g}x"


def _text(x: float, y: float, text: str, *, style: str = "", anchor: str = "start") -> str:
    named = f' class="{style}"' if style else ""
    return f'<text{named} x="{x:.1f}" y="{y:.0f}" text-anchor="{anchor}">{escape(text)}</text>'
