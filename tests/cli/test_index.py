"""`quire index build` and `quire index search`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import DocumentArray
from quire.cli import main
from tests.cli.commands import Thesis

pytestmark = pytest.mark.needs("lancedb", "pyarrow", "xxhash")
CLASS = "tests.cli.commands:Thesis"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Return a function that runs the command, and returns its exit code, output and error."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        code = main(["index", *arguments])
        output = capsys.readouterr()
        return code, output.out, output.err

    return call


def test_build_and_search_an_index(run: Callable[..., Any], tmp_path: Path) -> None:
    theses = DocumentArray[Thesis](
        Thesis(id=f"t{n}", title=f"thesis number{n}", vector=[np.cos(n / 10), np.sin(n / 10)]) for n in range(20)
    )
    theses.save_binary(tmp_path / "theses.pb")
    code, output, error = run("build", "theses.pb", "lance://idx", "--document", CLASS, "--optimize", "--json")
    assert code == 0, error
    assert json.loads(output)["upserted"] == json.loads(output)["documents"] == 20
    build = run("build", "theses.pb", "lance://idx", "--document", CLASS)
    assert build[1] == "20 documents: 0 written, 20 unchanged, 0 deleted\n"
    search = ("search", "lance://idx", "--document", CLASS)
    rows = [json.loads(line) for line in run(*search, "--like", "t7", "--limit", "3", "--json")[1].splitlines()]
    assert [row["document"]["id"] for row in rows[:1]] == ["t7"]
    assert rows[0]["score"] == pytest.approx(1)
    code, output, error = run(*search, "--text", "number3", "--where", '{"id": "t3"}')
    assert (code, error, "thesis number3" in output) == (0, "", True)
    for arguments, message in (
        (("--like", "nothing"), "no document with this id"),
        (("--where", "{"), "--where is JSON"),
        ((), "vector=, text="),
    ):
        code, _, error = run(*search, *arguments)
        assert (code, message in error) == (1, True)
    assert "needs the class" in run("build", "theses.pb", "lance://idx")[2]
