"""The drawing of the benchmarks says what the tables of the pages say."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree as ET

import pytest

ROOT = Path(__file__).parents[2]
PAGE = """\
| quire     | against      | ratio | of wall | of min | target   |     | peers                       |
|-----------|--------------|-------|---------|--------|----------|-----|-----------------------------|
| construct | pydantic     | 0.50x | 0.50x   | 0.50x  | <= 1.30x | met | DocArray 10.00x, None 2.00x |

| construct | another      | 9.00x | 9.00x   | 9.00x  | <= 1.30x | met | a second table does not count |
"""
PAIRS = """\
|       | quire  | against       | ratio | reach   | known | |
|-------|--------|---------------|-------|---------|-------|-|
| write | quire  | MDS, wall     | 4.00x | >= 3x   |       | |
| write | quire  | a disk, wall  | 2.00x | <= 3x   |       | |
| write | quire  | size          | 1     | <= 1.02 |       | |
| write | quire  | LitData, wall |       | >= 3x   | 2x    | |
| write | quire  | quire, again  | 1.00x | >= 1x   |       | |
"""


@pytest.fixture
def plot(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = spec_from_file_location("plot_of_benchmarks", ROOT / "benchmarks" / "plot.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def test_the_drawing_is_that_of_the_pages(plot: ModuleType) -> None:
    drawn = plot.draw()
    assert drawn == plot.draw()
    assert plot.TARGET.read_text() == drawn, "the pages have changed: run `python benchmarks/report.py`"
    ET.fromstring(drawn)


def test_what_others_take_follows_from_what_quire_takes(plot: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(PAGE)
    bars = plot.bars_of(plot.Group("", "page.md", "construct"), tmp_path)
    assert bars == [plot.Bar("pydantic", 2), plot.Bar("DocArray", 20), plot.Bar("None", 4)]


def test_pairs_are_read_by_the_side_that_is_to_be_reached(plot: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "pairs.md").write_text(PAIRS)
    bars = plot.bars_of(plot.Group("", "pairs.md", "write"), tmp_path)
    assert bars == [plot.Bar("MDS", 4), plot.Bar("a disk", 0.5)]


def test_a_line_that_is_gone_is_told(plot: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(PAGE)
    with pytest.raises(SystemExit, match="no measured line that begins with 'stack'"):
        plot.bars_of(plot.Group("", "page.md", "stack"), tmp_path)
