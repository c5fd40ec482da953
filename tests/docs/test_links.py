"""README and CONTRIBUTING, which mkdocs does not check, refer to existing files."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\]\(([\w./-]+)(?:#[\w-]*)?\)")
PATH = re.compile(r"(?<![\w/.])((?:src|tests|docs|examples|benchmarks)/[\w./-]*\w)")


def missing_files(text: str) -> list[str]:
    paths = {*LINK.findall(text), *PATH.findall(text)}
    return sorted(name for name in paths if not (ROOT / name).exists())


def test_every_referenced_file_exists() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    if not (ROOT / "src").is_dir():
        return  # the wheel is tested without the sources
    missing = {page.name: missing_files(page.read_text()) for page in pages}
    assert missing == {
        "README.md": [],
        "CONTRIBUTING.md": ["src/quire/tensors/_abacus.py"],
    }  # written by the reader of the recipe


def test_missing_files_are_reported() -> None:
    assert missing_files("[a](docs/nowhere.md#part) and tests/nothing.py, but [b](https://x.org/c)") == [
        "docs/nowhere.md",
        "tests/nothing.py",
    ]
