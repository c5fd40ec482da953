"""README and CONTRIBUTING, which mkdocs does not see, name files that are there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\]\(([\w./-]+)(?:#[\w-]*)?\)")
NAMED = re.compile(r"(?<![\w/.])((?:src|tests|docs|examples|benchmarks)/[\w./-]*\w)")


def missing(text: str) -> list[str]:
    named = {*LINK.findall(text), *NAMED.findall(text)}
    return sorted(name for name in named if not (ROOT / name).exists())


def test_every_file_that_is_named_is_there() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    if not (ROOT / "src").is_dir():
        return  # the wheel is tested, and the sources are elsewhere
    found = {page.name: missing(page.read_text()) for page in pages}
    assert found == {"README.md": [], "CONTRIBUTING.md": ["src/quire/tensors/_abacus.py"]}  # which a reader writes


def test_a_file_that_is_not_there_is_found() -> None:
    assert missing("[a](docs/nowhere.md#part) and tests/nothing.py, but [b](https://x.org/c)") == [
        "docs/nowhere.md",
        "tests/nothing.py",
    ]
