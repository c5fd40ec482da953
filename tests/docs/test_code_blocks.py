"""Every Python block of the README and the docs runs; the blocks of a page run in order, in one module."""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(
    r"^(?P<indent> *)```(?:python|py)\b(?P<info>[^\n]*)\n(?P<code>.*?)^(?P=indent)```", re.MULTILINE | re.DOTALL
)
TITLE = re.compile(r'title="(?P<name>\w+\.py)"')
TRAINERS = {"accelerate", "lightning", "ray", "transformers"}
"""Packages that start processes and threads, and change logging: files that import them run in their own process."""
CORE = {"google", "numpy", "pydantic", "quire", "rich", "typing_extensions"}


def blocks_of(page: str) -> list[str]:
    """Return the code blocks of a page, each moved to its line number, so that tracebacks point into the page."""
    blocks = []
    for match in FENCE.finditer(page):
        line = page.count("\n", 0, match.start("code"))
        blocks.append("\n" * line + textwrap.dedent(match["code"]))
    return blocks


def files_of(page: str) -> dict[str, str]:
    """Return the blocks whose title is a file name; they are also written as files."""
    titled = [(TITLE.search(match["info"]), match["code"]) for match in FENCE.finditer(page)]
    return {title["name"]: textwrap.dedent(code) for title, code in titled if title}


def needs_of(blocks: list[str]) -> list[str]:
    """Return the optional modules that the blocks import, or that the packages of quire in them need."""
    nodes = [node for block in blocks for node in ast.walk(ast.parse(block))]
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    needed = {"pyarrow"} if any(name.startswith(("quire.storage", "quire.distributed")) for name in names) else set()
    needed |= {"lancedb"} if any("lance://" in block for block in blocks) else set()
    return sorted(needed | {name.split(".")[0] for name in names} - CORE - sys.stdlib_module_names)


def run(block: str, path: Path | str, namespace: dict[str, object]) -> None:
    """Run a block as a separate program, without the `__future__` imports of this module."""
    exec(compile(block, path, "exec", dont_inherit=True), namespace)


def page_parameter(path: Path) -> object:
    """Return a parameter for a page, marked with the modules that it needs."""
    blocks = blocks_of(path.read_text())
    needs = needs_of(blocks)
    marks = [pytest.mark.needs(*needs)] if needs else []
    starts_threads = any("quire.distributed" in block or "quire.services" in block for block in blocks)
    if starts_threads or {*TRAINERS, "lancedb"} & {*needs}:
        marks.append(pytest.mark.cluster)
    return pytest.param(path, marks=marks, id=path.relative_to(ROOT).as_posix())


@pytest.mark.parametrize("path", [page_parameter(path) for path in PAGES])
def test_page_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of the page run in order, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    for name, code in files_of(path.read_text()).items():
        (tmp_path / name).write_text(code)
    module = ModuleType("__main__")  # as in a notebook: definitions of a page are sent to other processes by value
    monkeypatch.setitem(sys.modules, module.__name__, module)
    programs = {code for code in files_of(path.read_text()).values() if not TRAINERS.isdisjoint(needs_of([code]))}
    for block in blocks_of(path.read_text()):
        if block.lstrip("\n") not in programs:  # otherwise another block of the page runs the file
            run(block, path, module.__dict__)


def test_block_titled_with_a_file_name_is_written_as_a_file() -> None:
    page = '```python title="train.py"\nx = 1\n```\n```python title="in words"\ny = 2\n```\n```python\nz = 3\n```\n'
    assert files_of(page) == {"train.py": "x = 1\n"}
    assert len(blocks_of(page)) == 3


def test_failing_block_keeps_the_line_number_of_the_page() -> None:
    """Indented and titled blocks are found in order, with the line numbers of the page."""
    page = 'text\n```python title="a"\nx = 1\n```\n- item\n    ```py\n    y = x\n    1 / 0\n    ```\n```text\nno\n```\n'
    first, second = blocks_of(page)
    namespace: dict[str, object] = {}
    run(first, "page", namespace)
    with pytest.raises(ZeroDivisionError) as caught:
        run(second, "page", namespace)
    assert namespace["y"] == 1
    assert caught.traceback[-1].lineno + 1 == 8
