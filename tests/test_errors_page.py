"""docs/errors.md tells of every error."""

from __future__ import annotations

import re
from pathlib import Path

import quire.errors

PAGE = Path(__file__).parents[1] / "docs" / "errors.md"


def test_the_page_has_a_row_for_every_error_with_its_builtin() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", PAGE.read_text(), re.MULTILINE))
    expected = set(quire.errors.__all__) - {"QuireError"}
    assert set(rows) == expected
    for name, bases in rows.items():
        error = getattr(quire.errors, name)
        for base in re.findall(r"`([\w.]+)`", bases):
            assert base.split(".")[-1] in {parent.__name__ for parent in error.__mro__}, name
