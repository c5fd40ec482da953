"""The program examples/shards.py has the same output on every engine."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = [pytest.mark.needs("pyarrow", "ray", "pyspark", "cloudpickle"), pytest.mark.filterwarnings("ignore")]
PROGRAM = Path(__file__).parents[2] / "examples/shards.py"


def test_example_has_the_same_output_on_every_engine(
    engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("__main__")  # definitions of a program are sent to workers by value
    monkeypatch.setitem(sys.modules, module.__name__, module)
    source, _, _ = PROGRAM.read_text().partition("if __name__")
    exec(compile(source, PROGRAM, "exec", dont_inherit=True), module.__dict__)
    actual = module.main(engine, str(tmp_path / "here"))
    assert len(actual) > 200
    assert actual == module.main("local", str(tmp_path / "local"))
