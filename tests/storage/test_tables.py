"""Importing tables of Lance, Delta Lake and Iceberg, written by their own libraries."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import run

pytestmark = pytest.mark.needs("lance", "deltalake", "pyiceberg", "pyarrow", "fsspec", "xxhash")

FORMATS = ("lance", "delta", "iceberg")
Run = Callable[..., Any]


@pytest.fixture(scope="module")
def in_process() -> Iterator[Run]:
    """Run a function of tests/storage/table_programs.py in a spawned process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:

        def call(name: str, *arguments: Any) -> Any:
            return pool.submit(_call, name, *arguments).result()

        yield call


def _call(name: str, *arguments: Any) -> Any:
    from tests.storage import table_programs

    return getattr(table_programs, name)(*arguments)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "program",
    ["import_with_inferred_class", "import_with_given_class", "resume_an_import", "refuse_what_cannot_be_read"],
)
def test_tables_are_imported(program: str, name: str, in_process: Run, tmp_path: Path) -> None:
    in_process(program, name, tmp_path)


def test_delta_tables_without_an_order_are_read_but_not_resumed(in_process: Run, tmp_path: Path) -> None:
    in_process("import_delta_without_order", "delta", tmp_path)


@pytest.mark.parametrize("name", FORMATS)
def test_command_line_detects_and_converts_tables(name: str, in_process: Run, tmp_path: Path) -> None:
    path = in_process("write_and_drop", name, tmp_path)
    done = run(tmp_path, "inspect", path, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert (json.loads(done.stdout)["format"], json.loads(done.stdout)["rows"]) == (name, 80)
    done = run(tmp_path, "convert", path, "rows.ndjson", "--quiet")
    assert (done.returncode, done.stderr) == (0, "")
    numbers = sorted(json.loads(line)["number"] for line in (tmp_path / "rows.ndjson").read_text().splitlines())
    assert numbers == [i for i in range(100) if i % 5]
