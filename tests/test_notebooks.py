"""The notebooks of examples/notebooks were executed without an error; `nox -s notebooks` executes them again."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "examples" / "notebooks").glob("*.ipynb"))


def test_there_are_three_notebooks() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["images_to_model", "larger_than_memory", "search_and_serve"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_was_executed_in_order_and_holds_no_path_of_a_machine(path: Path) -> None:
    text = path.read_text()
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert outputs
    assert all(output["output_type"] != "error" and output.get("name") != "stderr" for output in outputs)
    for cell in cells:
        ast.parse("".join(cell["source"]))
    assert not any(word in text for word in ("/tmp/", "/root", "/home/"))
