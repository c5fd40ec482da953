"""docs/errors.md documents every error."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import quire.errors

PAGE = (Path(__file__).parents[1] / "docs" / "errors.md").read_text()
SECTIONS = dict(re.findall(r"^## (\w+)\n\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
ERRORS = [name for name in quire.errors.__all__ if name != "QuireError"]


def test_errors_page_has_one_heading_per_error() -> None:
    headings = re.findall(r"^## (\w+)", PAGE, re.MULTILINE)
    assert sorted(headings) == sorted(ERRORS)


@pytest.mark.parametrize("name", ERRORS)
def test_section_names_the_base_classes_and_says_what_to_do(name: str) -> None:
    first, *more = SECTIONS[name].split("\n\n")
    bases = re.match(r"Subclass of (`[\w.]+`(?:, `[\w.]+`)*)\. \S", first)
    assert bases is not None, first
    parents = [parent.__name__ for parent in getattr(quire.errors, name).__mro__[1:]]
    documented = [base.split(".")[-1] for base in re.findall(r"`([\w.]+)`", bases[1])]
    assert set(documented) <= set(parents)
    own = [parent.__name__ for parent in getattr(quire.errors, name).__bases__ if parent.__name__ != "QuireError"]
    assert documented == own
    assert any(part.strip() and not part.startswith("```") for part in more)
