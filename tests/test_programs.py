"""Tests of missing programs are counted in the summary, with the install command."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import programs

TESTS = Path(__file__).parent
MODULE = """
import pytest

pytestmark = pytest.mark.needs("program:chromium")

@pytest.mark.parametrize("number", range(3))
def test_page(number): ...
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with these rules, and a module whose tests need a browser."""
    (tmp_path / "tests").mkdir()
    for name in ("conftest.py", "programs.py"):
        shutil.copy(TESTS / name, tmp_path / "tests")
    (tmp_path / "tests" / "test_page.py").write_text(MODULE)
    # conftest.py imports paddle, which takes seconds.
    (tmp_path / "paddle.py").write_text("def disable_signal_handler(): ...\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = .\nmarkers = needs(*modules)\n")
    return tmp_path


def run(project: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--import-mode=importlib",
        "-p",
        "no:cacheprovider",
        "-ra",
        *options,
        "tests",
    ]
    known = {name: value for name, value in os.environ.items() if name not in {"CI", "PYTEST_ADDOPTS"}}
    known["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # starts faster
    return subprocess.run(
        command,
        cwd=project,
        env={**known, "PYTHONPATH": str(project), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("options", [(), ("-p", "xdist", "-n", "2")], ids=["one process", "xdist"])
def test_missing_program_is_counted_with_its_install_command(project: Path, options: tuple[str, ...]) -> None:
    done = run(project, "--no-skips", *options, PATH=str(project))
    assert done.returncode == 0, done.stdout
    assert "3 skipped" in done.stdout
    command = programs.chromium_command()
    assert f"NOT RUN 3 tests that need Chromium. To run them, too: {command}" in done.stdout


def test_missing_program_fails_in_ci(project: Path) -> None:
    done = run(project, "--no-skips", PATH=str(project), CI="true")
    assert done.returncode == 1
    assert "3 errors" in done.stdout and "--no-skips, but skipped: Skipped: needs the program Chromium" in done.stdout


def test_program_at_the_end_of_the_path_is_used(project: Path) -> None:
    browser = project / "chromium"
    browser.write_text("#!/bin/sh\n")
    browser.chmod(0o755)
    done = run(project, "--no-skips", PATH=str(project))
    assert "3 passed" in done.stdout and "NOT RUN" not in done.stdout


@pytest.mark.parametrize("option", ["--no-skips", "--allow-missing"])
def test_missing_module_fails_unless_allowed(project: Path, option: str) -> None:
    lines = ["import pytest", "@pytest.mark.needs('no_such_module')", "def test_it(): ..."]
    (project / "tests" / "test_page.py").write_text("\n".join(lines))
    done = run(project, "--no-skips", option)
    assert done.returncode == (1 if option == "--no-skips" else 0), done.stdout
    assert "needs no_such_module" in done.stdout


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('openjdk version "21" 2023-09-19', 21),
        ('java version "1.8.0_392"', 8),
        ("The operation couldn't be completed. Unable to locate a Java Runtime.", None),
    ],
)
def test_java_version_is_parsed(
    text: str, version: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text(f"#!/bin/sh\necho '{text.replace(chr(39), '')}' >&2\n")
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    programs.java_version.cache_clear()
    try:
        assert programs.java_version() == version
        assert programs.has_java() == ((version or 0) >= 17)
    finally:
        programs.java_version.cache_clear()


def test_java_version_is_none_without_java(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    programs.java_version.cache_clear()
    try:
        assert programs.java_version() is None
    finally:
        programs.java_version.cache_clear()
