"""The table of docs/scale.md has the numbers that the code of `quire plan` computes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.needs("torch", "pyarrow", "fsspec", "xxhash")


def load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("scale_tool", ROOT / "tools" / "scale.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its classes are looked up by the name of their module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("place", [0, 1, 2])
def test_plans_of_the_page_are_those_of_the_planner(place: int) -> None:
    tool = load_tool()
    page = (ROOT / "docs" / "scale.md").read_text()
    table = page[page.index(tool.BEGIN) : page.index(tool.END)].splitlines()
    dataset = tool.DATASETS[place]
    lines = [line for line in table if line.startswith(f"| {dataset.name} |")]
    assert len(lines) == len(tool.NODES)
    assert tool.rows_of(dataset) == lines
