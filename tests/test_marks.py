"""Test modules declare the optional packages that they import, so that the core can be tested without extras."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from tests.conftest import _needs_of_module

TESTS = Path(__file__).parent
ALWAYS = {"quire", "quire_proto3", "quire_proto4", "tests", "examples", "numpy", "pydantic", "pydantic_core", "google"}
ALWAYS |= {"annotated_types"}  # comes with pydantic
ALWAYS |= {"benchmarks"}  # a folder of the repository
ALWAYS |= {"rich", "typing_extensions", "pytest", "_pytest", "hypothesis", "cloudpickle", "xdist"}
COMES_WITH = {"keras": "tensorflow", "boto3": "moto", "werkzeug": "moto"}


@pytest.mark.parametrize("path", sorted(TESTS.rglob("test_*.py")), ids=lambda path: str(path.relative_to(TESTS)))
def test_modules_declare_the_optional_packages_they_import(path: Path) -> None:
    optional = {_needed_for(name) for name in _imported(path)} - ALWAYS - sys.stdlib_module_names
    assert optional <= set(_needs_of_module(path)), "say `pytestmark = pytest.mark.needs(...)`"


def _needed_for(name: str) -> str:
    if name.startswith("quire.storage"):
        return "pyarrow"
    root = name.partition(".")[0]
    return COMES_WITH.get(root, root)


def _imported(path: Path) -> list[str]:
    """Return the packages that are imported at module level."""
    modules = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules.append(node.module or "")
    return modules


def test_every_test_has_a_timeout(pytestconfig: pytest.Config) -> None:
    assert float(pytestconfig.getini("timeout")) > 0
    assert pytestconfig.getini("timeout_method") == "signal"
