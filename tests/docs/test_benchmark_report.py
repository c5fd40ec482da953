"""The pages and drawings of the benchmarks are generated from the stored results."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree as ET

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"
MODULES = ("results", "plot", "measure", "contest", "report", "stream_rows", "stream_report")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The modules of the benchmarks, which can only be imported from their folder."""
    monkeypatch.syspath_prepend(FOLDER)
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})
    for name in MODULES:
        del sys.modules[name]


def test_pages_and_drawings_match_the_stored_results(bench: Any) -> None:
    kept = {part: bench.results.load(part) for part in bench.report.PARTS}
    assert all(kept.values()), "every part has been measured"
    for name, content in bench.report.pages(kept).items():
        assert (ROOT / "docs" / name).read_text() == content, f"docs/{name}: run `python benchmarks/report.py`"
        if name.endswith(".svg"):
            ET.fromstring(content)


def test_readme_quotes_current_results(bench: Any) -> None:
    kept = {part: bench.results.load(part) for part in bench.report.PARTS}
    verdicts = [goal.verdict for sections in kept.values() for _, goal in bench.report.goals_of(sections)]

    def value(part: str, row: str, against: str) -> float:
        [section] = [section for section in kept[part] if section.name == row]
        return next(goal.value for goal in section.goals if goal.against == against)  # type: ignore[no-any-return]

    met, missed = verdicts.count("PASS"), verdicts.count("**MISS**")
    copies = sorted(value("wire", f"batch_to_bytes_{kind}", "one copy") for kind in ("passages", "photos"))
    quotes = [
        f"all {len(verdicts)} targets, of which {met} are met and {missed} missed",
        f"{value('stream', 'documents', 'LitData'):.0f} times as fast as LitData",
        f"{value('stream', 'documents', 'HF datasets'):.0f} times as fast as Hugging Face datasets",
        f"{value('train', 'dataset_batched', 'hand-written index_select'):.2f} times the CPU time of hand-written",
        f"{copies[0]:.2f} to {copies[1]:.2f} times the CPU time of one memory copy",
    ]
    readme = (ROOT / "README.md").read_text()
    assert [quote for quote in quotes if quote not in readme] == []


def test_every_row_of_the_drawing_has_results(bench: Any) -> None:
    named = {(part, section.name) for part in bench.report.PARTS for section in bench.results.load(part)}
    assert set(bench.plot.SHOWN) <= named


@pytest.mark.parametrize(
    ("bound", "values", "verdict"),
    [
        ({"at_most": 1.3}, [1.0, 1.3, 2.0], "PASS"),
        ({"at_most": 1.3}, [1.0, 1.31, 2.0], "**MISS**"),
        ({"at_least": 3}, [2.9, 3.0, 9.0], "PASS"),
        ({"at_least": 3}, [2.9, 2.99, 9.0], "**MISS**"),
        ({"at_least": 3}, [], "not measured"),
    ],
)
def test_the_median_decides_the_verdict(bench: Any, bound: Any, values: list[float], verdict: str) -> None:
    assert bench.results.Goal("quire", "a peer", values, **bound).verdict == verdict


def test_keep_replaces_a_section_of_the_same_name(bench: Any, tmp_path: Path) -> None:
    results = bench.results
    goal = results.Goal("quire", "a peer", [1.0, 2.0], at_most=2.0, known="another 3x")
    first, second = (results.Section(name, name, "", ["", "s"], [["quire", "1"]], [goal]) for name in "ab")
    results.keep("core", first, ["pydantic"], tmp_path)
    results.keep("core", second, ["pydantic"], tmp_path)
    results.keep("core", replace(first, title="again"), ["pydantic"], tmp_path)
    kept = results.load("core", tmp_path)
    assert [(section.name, section.title) for section in kept] == [("a", "again"), ("b", "b")]
    assert kept[0].goals == [goal]
    assert kept[0].facts["versions"].keys() == {"Python", "pydantic"}


def test_a_speedup_has_a_lower_bound_as_target(bench: Any) -> None:
    loop = bench.measure.repeated(lambda: None)
    ours, base, late = (bench.measure.Contestant(name, loop) for name in ("quire", "base", "late"))
    row = bench.measure.Row("row", "", ours, base, [late], 1 / 4, faster=True, also=("late",), by_wall=True)
    times = {"quire": 1.0, "base": 8.0, "late": 3.0}
    timings = {name: bench.measure.Timing([seconds] * 5, [1.0] * 5) for name, seconds in times.items()}
    section = bench.contest.section_of("row", bench.measure.Result(row, timings))
    goals = [(goal.against, goal.shown, goal.target, goal.verdict) for goal in section.goals]
    assert goals == [("base", "8.00x", ">= 4x", "PASS"), ("late", "3.00x", ">= 4x", "**MISS**")]
    assert section.others == {"base": 8, "late": 3}


def test_peers_may_have_targets_of_their_own(bench: Any) -> None:
    loop = bench.measure.repeated(lambda: None)
    ours, base, slow = (bench.measure.Contestant(name, loop) for name in ("quire", "base", "slow"))
    absent = bench.measure.Contestant("absent", missing="not installed")
    speedups = {"slow": 1.5, "absent": 2.0}
    row = bench.measure.Row("row", "", ours, base, [slow, absent], 1.1, speedups=speedups, by_wall=True)
    times = {"quire": 1.0, "base": 1.0, "slow": 1.4}
    timings = {name: bench.measure.Timing([seconds] * 5, [1.0] * 5) for name, seconds in times.items()}
    section = bench.contest.section_of("row", bench.measure.Result(row, timings))
    goals = [(goal.against, goal.shown, goal.target, goal.verdict) for goal in section.goals]
    assert goals == [
        ("base", "1.00x", "<= 1.1x", "PASS"),
        ("slow", "1.40x", ">= 1.5x", "**MISS**"),
        ("absent", "", ">= 2x", "not measured"),
    ]


def test_a_contestant_that_is_not_installed_is_marked(bench: Any) -> None:
    ours = bench.measure.Contestant("quire", bench.measure.repeated(lambda: None))
    absent = bench.measure.Contestant("a peer", missing="not installed")
    row = bench.measure.Row("row", "", ours, absent, [], 1.0)
    section = bench.contest.section_of("row", bench.measure.measure(row, 5))
    assert section.lines[0][:2] == ["a peer", "not installed"]
    assert [goal.verdict for goal in section.goals] == ["not measured"]
    assert section.others == {}


def test_a_stream_with_an_error_is_not_measured(bench: Any) -> None:
    row = next(row for row in bench.stream_rows.ROWS if row.name == "documents")
    rounds = [{"cpu_s_per_million": 2.0, "rows_per_s": 5.0}] * 5
    outcomes = {
        "quire": {"rounds": rounds, "check": {}},
        "HF datasets": {"rounds": [{"cpu_s_per_million": 30.0, "rows_per_s": 1.0}] * 5, "check": {}},
        "MosaicML MDS": {"rounds": [], "error": "not installed"},
    }
    section = bench.stream_report.section_of(row, outcomes)
    verdicts = {goal.against: (goal.shown, goal.verdict) for goal in section.goals}
    assert verdicts["HF datasets"] == ("15x", "PASS")
    assert verdicts["MosaicML MDS"] == ("", "not measured")
    assert section.others == {"HF datasets": 15}
