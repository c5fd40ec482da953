"""The `needs` marker, and the rule that nothing is skipped without a word.

A test (or, by `pytestmark`, a module, which may then import them at its top) says which optional modules it uses:
`@pytest.mark.needs("torch")`; or packages of Node, which nox installs: `needs("node:@grpc/grpc-js")`. Where one is
missing the test is skipped and the module is left out; the summary tells which. With `--no-skips` both are failures,
unless `-m "not needs"` asks for the core alone.
"""

from __future__ import annotations

import ast
import os
import shutil
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

_left_out = pytest.StashKey[dict[str, list[str]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skips", action="store_true", help="a skipped test is a failed test")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_left_out] = {}
    if not _core_alone(config) and find_spec("paddle") and find_spec("tensorflow"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import paddle  # noqa: F401 - after tensorflow, it would end the process


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if collection_path.suffix != ".py" or (config.getoption("--no-skips") and not _core_alone(config)):
        return None
    missing = _missing(_needs_of_module(collection_path))
    if missing:
        config.stash[_left_out][str(collection_path.relative_to(config.rootpath))] = missing
        return True
    return None


def pytest_runtest_setup(item: pytest.Item) -> None:
    missing = _missing([module for marker in item.iter_markers("needs") for module in marker.args])
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report: Any = yield
    return _refuse_skip(report, item.config)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    report: Any = yield
    return _refuse_skip(report, collector.config)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    for path, missing in config.stash[_left_out].items():
        terminalreporter.write_line(f"LEFT OUT {path} - needs {', '.join(missing)}")


def _refuse_skip(report: Any, config: pytest.Config) -> Any:
    if config.getoption("--no-skips") and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"--no-skips, but skipped: {report.longrepr[2]}"
    return report


def _core_alone(config: pytest.Config) -> bool:
    return bool(config.getoption("markexpr") == "not needs")


def _missing(modules: list[str]) -> list[str]:
    return [module for module in modules if not _is_there(module)]


def _is_there(module: str) -> bool:
    if not module.startswith("node:"):
        return find_spec(module) is not None
    return shutil.which("node") is not None and Path(node_environment()["NODE_PATH"], module[5:]).exists()


def node_environment() -> dict[str, str]:
    """The environment in which Node finds the packages that `nox` has installed."""
    folder = os.environ.get("QUIRE_NODE") or str(Path(__file__).parents[1] / ".nox" / "node")
    return {**os.environ, "NODE_PATH": str(Path(folder, "node_modules"))}


def _needs_of_module(path: Path) -> list[str]:
    """The arguments of `pytestmark = pytest.mark.needs(...)`, read without importing the module."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            calls = [call for call in ast.walk(node.value) if isinstance(call, ast.Call)]
            needs = [call for call in calls if ast.unparse(call.func) == "pytest.mark.needs"]
            return [ast.literal_eval(argument) for call in needs for argument in call.args]
    return []
