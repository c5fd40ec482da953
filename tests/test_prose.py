"""tools/prose.py: banned phrases, and names that are a participle alone."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

PROSE = runpy.run_path(str(Path(__file__).parents[1] / "tools" / "prose.py"))
check_file, check_names = PROSE["check_file"], PROSE["check_names"]
FILE = Path("src/module.py")


@pytest.mark.parametrize(
    "code",
    [
        "found = 1",
        "found: int = 1",
        "found += 1",
        "rows, found = 1, 2",
        "for given in range(3): pass",
        "with open('x') as made: pass",
        "x = [made for made in ()]",
        "x = lambda wanted: 1",
        "def check(wanted): pass",
        "def made(): pass",
        "if found := 1: pass",
    ],
)
def test_participles_alone_are_reported(code: str) -> None:
    [message] = check_names(FILE, f"\n{code}\n")
    assert message.startswith("src/module.py:2: ")


@pytest.mark.parametrize(
    "code",
    ["from hypothesis import given", "x.found = 1", "print(found)", "given_rows = 1", "'found = 1'", "f(made=1)"],
)
def test_other_names_are_accepted(code: str) -> None:
    assert check_names(FILE, code) == []


def test_banned_phrases_are_reported_across_lines(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("It has so\nmany rows.\n")
    [message] = check_file(tmp_path / "page.md")
    assert message.endswith("page.md:1: 'so\\nmany': write n, or the name of the number")
