"""`quire view` as a process: its address, signals, imports and errors."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from quire import BaseDocument
from quire.storage import write_dataset
from tests.viewer.viewer_client import Client

pytestmark = pytest.mark.needs("fastapi", "uvicorn", "PIL", "pyarrow", "av")


class Word(BaseDocument):
    word: str


@contextmanager
def viewing(*arguments: Any) -> Iterator[tuple[dict[str, Any], subprocess.Popen[str]]]:
    command = [sys.executable, "-m", "quire", "view", *map(str, arguments), "--no-browser", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        output = process.stdout.readline()
        assert output, process.stderr.read()
        yield json.loads(output), process
    finally:
        process.kill()
        process.communicate()


class Address:
    """The address of a viewer in another process, for a `Client`."""

    def __init__(self, url: str) -> None:
        self.url, self.port = url, urlsplit(url).port


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_view_serves_a_dataset_until_a_signal(stored: Path, number: int) -> None:
    with viewing(stored) as (line, process):
        client = Client(Address(line["url"]))  # type: ignore[arg-type]
        assert client.enter().status == 200
        assert client.get_json("dataset")["rows"] == line["rows"] == 300
        process.send_signal(number)
        _, errors = process.communicate(timeout=20)
        assert (process.returncode, errors) == (0, "stopping\n")


_FIRST_PAGE = """
import sys, urllib.request
from http.cookiejar import CookieJar
import quire.viewer
from quire.cli._main import main
try:
    main(["view", "--help"])
except SystemExit:
    pass
with quire.viewer.Viewer(sys.argv[1]) as viewer:
    browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
    browser.open(viewer.url).read()
    for path in ("dataset", "rows?start=0&count=64"):
        browser.open(f"http://127.0.0.1:{viewer.port}/api/{path}").read()
print(*sorted(sys.modules), sep="\\n")
"""
_LATER = {"PIL", "av", "pandas", "pyarrow.compute", "pyarrow.dataset", "rich", "torch", "tensorflow", "jax", "trimesh"}
_LATER |= {"quire.cli._convert", "quire.cli._sources", "quire.documents", "quire.storage.importers"}


@pytest.mark.parametrize("file_format", ["arrow", "parquet"])
def test_first_page_imports_only_what_it_needs(tmp_path: Path, file_format: Any) -> None:
    write_dataset([Word(word=f"{i}") for i in range(100)], tmp_path, Word, format=file_format)
    command = [sys.executable, "-c", _FIRST_PAGE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    loaded = set(done.stdout.splitlines())
    assert {"quire.cli._view", "quire.viewer._viewer", "pyarrow.lib"} <= loaded
    assert sorted(_LATER & loaded) == []


def test_view_serves_a_csv_file(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("name,number\nAda,1\nGrace,2\n")
    with viewing(tmp_path / "rows.csv") as (line, _):
        client = Client(Address(line["url"]))  # type: ignore[arg-type]
        client.enter()
        assert [row["cells"][-1] for row in client.get_json("rows")["rows"]] == [1, 2]
        assert client.get_json("dataset")["title"].endswith("rows.csv")


def test_view_reports_a_missing_path_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "quire", "view", str(tmp_path / "nothing"), "--no-browser"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("quire: ")
