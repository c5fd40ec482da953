"""A drawing of the benchmarks, from the tables in the pages: the numbers are never written twice.

`python benchmarks/report.py` writes docs/images/benchmarks.svg; the same pages give the same bytes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
TARGET = DOCS / "images" / "benchmarks.svg"


@dataclass(frozen=True)
class Group:
    """A line of a page's first table, or some of them: by how their first cell begins."""

    title: str
    page: str
    begins: str


_DATASET = "MultiModalDataset, 10,000 nested images and captions,"
GROUPS = (
    Group("Shuffled documents from disk", "benchmarks-stream.md", "documents"),
    Group("Shuffled tables from disk", "benchmarks-stream.md", "table"),
    Group("Shuffled pictures from disk", "benchmarks-stream.md", "pictures"),
    Group("Random rows by number", "benchmarks-stream.md", "random"),
    Group("Write a dataset (wall time)", "benchmarks-stream.md", "write"),
    Group("DataLoader, a function for each row", "benchmarks-train.md", f"{_DATASET} a function"),
    Group("DataLoader, functions on columns", "benchmarks-train.md", f"{_DATASET} batched"),
    Group("Make a document", "benchmarks.md", "construct"),
    Group("Stack documents", "benchmarks.md", "stack"),
    Group("A batch to bytes", "benchmarks-wire.md", "DocumentBatch.to_bytes, 10,000"),
    Group("Read, map, write on Ray", "benchmarks-distributed.md", "ray"),
    Group("Read, map, write on Spark", "benchmarks-distributed.md", "spark"),
)


@dataclass(frozen=True)
class Bar:
    """Somebody else, and what they take of what quire takes: 2 is twice as long, and below 1 they are faster."""

    name: str
    times: float


def bars_of(group: Group, docs: Path = DOCS) -> list[Bar]:
    """Everybody who was measured beside quire."""
    lines = [line for line in first_table((docs / group.page).read_text()) if line[0].startswith(group.begins)]
    bars = [bar for line in lines for bar in _bars(line)]
    if not bars:
        raise SystemExit(f"docs/{group.page}: the first table has no measured line that begins with {group.begins!r}.")
    return bars


def first_table(page: str) -> list[list[str]]:
    """The cells of the page's first table, line by line, without its head."""
    found = re.search(r"(?:^\|.*\n)+", page, re.MULTILINE)
    lines = found[0].splitlines() if found else []
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def _bars(line: Sequence[str]) -> Iterator[Bar]:
    """Pages of one kind tell what quire takes of a reference and of peers, those of the other kind a pair a line."""
    if len(line) == 8:
        own = _times(line[2])
        yield Bar(line[1], 1 / own)
        for name, times in re.findall(r"(\S.*?) ([\d.]+)x(?:, |$)", line[7]):
            yield Bar(name, float(times) / own)
        return
    reach = next(cell for cell in line if cell.startswith((">=", "<=")))
    if line[2].startswith("quire") or not re.fullmatch(r"[\d.]+x", line[3]):
        return  # quire beside itself, something else than a ratio, or not measured
    times = _times(line[3])
    yield Bar(re.sub(r", (cpu|wall)$", "", line[2]), times if reach.startswith(">=") else 1 / times)


def _times(cell: str) -> float:
    return float(cell.rstrip("x"))


# --- the drawing

WIDTH, LEFT, RIGHT, TOP, STEP, GAP = 880, 270, 700, 62, 17, 11
LEAST, MOST = 0.25, 200.0
TICKS = (0.5, 1, 2, 5, 10, 20, 50, 100)
STYLE = """\
text { font: 12px system-ui, sans-serif; fill: #24292f }
.title { font-weight: 600; font-size: 14px } .soft { fill: #656d76 } .line { stroke: #d0d7de } .own { stroke: #24292f }
.slower { fill: #2f6f9f } .faster { fill: #c2621b }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .soft { fill: #9198a1 } .line { stroke: #3d444d } .own { stroke: #e6edf3 }
  .slower { fill: #5ba4d8 } .faster { fill: #e69350 }
}"""


def at(times: float) -> float:
    """Where a number stands on the axis, which is one of powers."""
    share = math.log(times / LEAST) / math.log(MOST / LEAST)
    return LEFT + (RIGHT - LEFT) * share


def draw(docs: Path = DOCS) -> str:
    """The drawing."""
    rows, y = [], float(TOP + GAP)
    for group in GROUPS:
        bars = bars_of(group, docs)
        rows.append(_text(LEFT - 10, y + 11, group.title, anchor="end"))
        for bar in bars:
            rows.extend(_bar(bar, y))
            y += STEP
        y += GAP
    head = [
        _text(20, 24, "What others take, where quire takes 1", style="title"),
        _text(20, 42, "CPU time, on an axis of powers. Left of the line the other one is faster.", style="soft"),
    ]
    parts = [*head, *_axis(y), *rows]
    size = f'viewBox="0 0 {WIDTH} {y + 8:.0f}" width="{WIDTH}" height="{y + 8:.0f}"'
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="Benchmarks of quire">'
    return "\n".join([opening, f"<style>\n{STYLE}\n</style>", *parts, "</svg>\n"])


def _axis(bottom: float) -> Iterator[str]:
    for tick in TICKS:
        x, style = at(tick), "own" if tick == 1 else "line"
        yield f'<line class="{style}" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom:.0f}"/>'
        name, soft = ("quire", "") if tick == 1 else (f"{tick:g}x", "soft")
        yield _text(x, TOP - 4, name, style=soft, anchor="middle")


def _bar(bar: Bar, y: float) -> Iterator[str]:
    start, end = sorted((at(1), at(bar.times)))
    style, width = "slower" if bar.times >= 1 else "faster", max(end - start, 1)
    yield f'<rect class="{style}" x="{start:.1f}" y="{y + 2:.0f}" width="{width:.1f}" height="{STEP - 5}"/>'
    yield _text(max(end, at(1)) + 6, y + 12, f"{bar.name} {_short(bar.times)}")


def _short(times: float) -> str:
    return f"{times:.0f}x" if times >= 10 else f"{times:.2g}x"


def _text(x: float, y: float, text: str, *, style: str = "", anchor: str = "start") -> str:
    named = f' class="{style}"' if style else ""
    return f'<text{named} x="{x:.1f}" y="{y:.0f}" text-anchor="{anchor}">{escape(text)}</text>'


def main() -> None:
    """Write the drawing."""
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(draw())
    print(f"written: {TARGET.relative_to(DOCS.parent)}")
