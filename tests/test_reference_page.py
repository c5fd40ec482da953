"""docs/reference.md lists every public name, and nothing else."""

from __future__ import annotations

import ast
import importlib
import pydoc
import re
from pathlib import Path

import pytest

import quire

pytestmark = pytest.mark.needs("fastapi", "grpc", "pandas", "pyarrow", "torch")  # every name is imported

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "reference.md").read_text()
DIRECTIVES = re.findall(r"^::: (\S+)", PAGE, re.MULTILINE)
WORDS = set(re.findall(r"`([\w.]+)`", PAGE))
LAZY = {"quire.typing.TensorFlowTensor"}  # accessing it would import TensorFlow
PUBLIC = quire._MODULES


MODULES = {"quire.distributed.pandas", *(f"quire.{name}" for name in PUBLIC)}


def names_of(module: str) -> set[str]:
    return set(importlib.import_module(module).__all__)


def is_listed(module: str, name: str) -> bool:
    """Whether the page lists the name: with a directive, in the text, or with its module."""
    same = [directive for directive in DIRECTIVES if directive.split(".")[-1] == name]
    return bool(same) or name in WORDS or f"{module}.{name}" in WORDS or module in DIRECTIVES


@pytest.mark.parametrize("module", ["quire", *(f"quire.{name}" for name in PUBLIC)])
def test_page_lists_every_public_name(module: str) -> None:
    assert sorted(name for name in names_of(module) if not is_listed(module, name)) == []


@pytest.mark.parametrize("directive", sorted(set(DIRECTIVES) - LAZY))
def test_listed_names_are_public_and_have_docstrings(directive: str) -> None:
    module, _, name = directive.rpartition(".")
    assert name in names_of(module) or directive in MODULES
    assert pydoc.locate(directive).__doc__


def test_names_are_listed_once() -> None:
    assert sorted({name for name in DIRECTIVES if DIRECTIVES.count(name) > 1}) == []


def test_pages_import_only_public_names() -> None:
    """Every name that a page or the README imports from quire is listed."""
    unknown = set()
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for block in re.findall(r"^```python[^\n]*\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
            unknown |= {f"{page.name}: {name}" for name in imported_names(block) if not is_listed(*name.rsplit(".", 1))}
    assert sorted(unknown) == []


def imported_names(block: str) -> set[str]:
    nodes = [node for node in ast.walk(ast.parse(block)) if isinstance(node, ast.ImportFrom)]
    names = [(node.module or "", alias.name) for node in nodes for alias in node.names]
    return {f"{module}.{name}" for module, name in names if module.split(".")[0] == "quire" and "._" not in module}


def test_sections_of_the_page_are_the_attributes_of_the_package() -> None:
    sections = set(re.findall(r"^## (quire\S*)", PAGE, re.MULTILINE))
    assert sections == {"quire", *(f"quire.{name}" for name in quire._MODULES)}
