"""Benchmark the response times and the memory of the viewer.

    python benchmarks/view.py --documents 1000000 --rounds 7

The viewer runs in its own process, `quire view`, on a dataset of texts, numbers and embeddings of 64 float32, in Arrow
and in Parquet. *First page* is the time from the start of the process to the last byte of the first rows; *after start*
is measured from the moment it prints its address, without the start of Python and its imports. Random rows are
requested as the grid does, over HTTP and in a real browser, until they are displayed. Memory is the peak: resident
memory, and the anonymous part, without mapped files.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlencode, urlsplit

import numpy as np
from results import Goal, Section, keep, markdown

from quire import BaseDocument, DocumentBatch
from quire.storage import write_dataset
from quire.typing import NdArray

_BLOCK = 20_000
_PAGE = 64
_PLACES = 200
_JUMPS = 40
PACKAGES = ("quire", "fastapi", "uvicorn", "pyarrow", "numpy")
_ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
_JUMP = """async (part) => {
  const grid = document.getElementById("grid"), began = performance.now();
  grid.scrollTop = part * (grid.scrollHeight - grid.clientHeight);
  for (;;) {
    await new Promise(requestAnimationFrame);
    const rows = [...document.querySelectorAll(".grid-layer .row")];
    if (performance.now() - began > 20 && rows.length > 5 && rows.every((row) => !row.dataset.empty)) break;
  }
  return performance.now() - began;
}"""


class Passage(BaseDocument):
    """A row of the dataset."""

    name: str
    score: float
    count: int
    ok: bool
    embedding: NdArray[64, np.float32]


def blocks(documents: int) -> Iterator[DocumentBatch[Passage]]:
    """Yield the rows in blocks."""
    chance = np.random.default_rng(0)
    for start in range(0, documents, _BLOCK):
        count = min(_BLOCK, documents - start)
        columns = {
            "id": [f"{i:08x}" for i in range(start, start + count)],
            "name": [f"passage number {i} of the collection" for i in range(start, start + count)],
            "score": chance.normal(size=count),
            "count": chance.integers(0, 1000, count),
            "ok": chance.random(count) > 0.5,
            "embedding": chance.normal(size=(count, 64)).astype(np.float32),
        }
        yield DocumentBatch[Passage].from_columns(columns)


@dataclass
class Client:
    """A client that sends the requests of a browser on one connection."""

    url: str
    cookie: str = ""
    connection: http.client.HTTPConnection = field(init=False)

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        self.connection = http.client.HTTPConnection(str(parts.hostname), parts.port)
        self.connection.request("GET", f"/?{parts.query}")
        answer = self.connection.getresponse()
        answer.read()
        self.cookie = str(answer.getheader("set-cookie")).partition(";")[0]

    def get(self, address: str, /, **query: Any) -> Any:
        """Return the answer of the server."""
        target = f"{address}?{urlencode(query)}" if query else address
        self.connection.request("GET", target, headers={"Cookie": self.cookie})
        answer = self.connection.getresponse()
        body = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{target}: {answer.status} {body[:200]!r}")
        return json.loads(body) if address.startswith("/api") else body

    def seconds(self, address: str, /, **query: Any) -> float:
        """Return the duration of a request."""
        began = time.perf_counter()
        self.get(address, **query)
        return time.perf_counter() - began


class Memory:
    """Polls the memory of a process, and keeps the peaks."""

    def __init__(self, pid: int) -> None:
        self.resident = self.own = 0
        self._path = Path(f"/proc/{pid}/status")
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._ended.wait(0.01):
            try:
                lines = dict(line.split(":", 1) for line in self._path.read_text().splitlines())
            except OSError:
                return
            sizes = {name: int(lines[name].split()[0]) * 1024 for name in ("VmHWM", "RssAnon") if name in lines}
            self.resident = max(self.resident, sizes.get("VmHWM", 0))
            self.own = max(self.own, sizes.get("RssAnon", 0))

    def stop(self) -> None:
        """Stop polling."""
        self._ended.set()
        self._thread.join()


@contextmanager
def running(folder: Path) -> Iterator[tuple[Client, float, float, int]]:
    """Start a viewer; yield a client, the seconds to the first page from both starting points, and the process id."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "quire", "view", str(folder), "--no-browser", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        ready = time.perf_counter()
        client = Client(url)
        for path in ("/", "/api/dataset"):
            client.get(path)
        client.get("/api/rows", start=0, count=_PAGE)
        yield client, time.perf_counter() - began, time.perf_counter() - ready, process.pid
    finally:
        process.terminate()
        process.wait()


def first_pages(folder: Path, rounds: int) -> list[tuple[float, float]]:
    """Return the seconds to the first page of new processes."""
    times = []
    for _ in range(rounds):
        with running(folder) as (_, whole, after, _pid):
            times.append((whole, after))
    return times


@dataclass(frozen=True)
class Line:
    """A measurement and its target."""

    what: str
    values: list[float]
    unit: str = "ms"
    target: float | None = None

    def cells(self) -> list[str]:
        """Return a line of the table."""
        middle, worst = median(self.values), max(self.values)
        return [self.what, *(f"{each:,.0f} {self.unit}" for each in (middle, self.p95, worst))]

    @property
    def p95(self) -> float:
        """The 95th percentile."""
        return sorted(self.values)[round(0.95 * (len(self.values) - 1))]

    def goals(self) -> list[Goal]:
        """Return the goal, if there is a target; for many values, the 95th percentile must meet it."""
        if self.target is None:
            return []
        if len(self.values) < 40:
            return [Goal("quire", self.what, self.values, unit=self.unit, at_most=self.target)]
        return [Goal("quire", f"{self.what}, p95", [self.p95], unit=self.unit, at_most=self.target)]


def measure_viewer(folder: Path, documents: int, *, browser: bool) -> list[Line]:
    """Measure the requests to one viewer."""
    places = random.Random(0)
    with running(folder) as (client, _, _, pid):
        memory = Memory(pid)
        starts = [places.randrange(documents - _PAGE) for _ in range(_PLACES)]
        pages = [1000 * client.seconds("/api/rows", start=start, count=_PAGE) for start in starts]
        lines = [Line("random rows, over HTTP", pages, target=150)]
        if browser:
            lines.append(Line("random rows, shown by a browser", jumps(client, places), target=150))
            client.connection.close()  # the server has closed it meanwhile; the next request opens another one
        first = {
            "filter by a number": {"where": "score > 1"},
            "filter by a text": {"where": "name ~ 99"},
            "sort by a number": {"sort": "score", "desc": "true"},
        }
        for what, query in first.items():
            lines.append(Line(f"{what}, first time", [1000 * client.seconds("/api/rows", count=_PAGE, **query)]))
        ordered = [1000 * client.seconds("/api/rows", start=s, count=_PAGE, sort="score", desc="true") for s in starts]
        lines.append(Line("random rows, sorted", ordered, target=150))
        for what, path, query in (
            ("neighbours of a row", "neighbours", {"row": 5, "path": "embedding"}),
            ("map", "map", {"path": "embedding"}),
            ("statistics of a column", "statistics", {"path": "score"}),
        ):
            lines.append(Line(what, [1000 * client.seconds(f"/api/{path}", **query)]))
        memory.stop()
        lines.append(Line("memory, resident", [memory.resident / 1e6], "MB", 500))
        lines.append(Line("memory, anonymous", [memory.own / 1e6], "MB", 500))
    return lines


def jumps(client: Client, places: random.Random) -> list[float]:
    """Return the milliseconds until a browser displays the rows after jumps to random positions."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=_ARGUMENTS)
        page = browser.new_page(viewport={"width": 1360, "height": 820})
        name, _, value = client.cookie.partition("=")
        parts = urlsplit(client.url)
        page.context.add_cookies([{"name": name, "value": value, "domain": "127.0.0.1", "path": "/"}])
        page.goto(f"http://127.0.0.1:{parts.port}/")
        page.wait_for_selector("html[data-ready]")
        page.wait_for_timeout(500)
        durations = [float(page.evaluate(_JUMP, places.random())) for _ in range(_JUMPS)]
        browser.close()
    return durations


def main() -> int:
    """Measure, print the tables, and store them with `--keep`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=7, help="number of processes to start")
    parser.add_argument("--formats", nargs="+", default=["arrow", "parquet"])
    parser.add_argument("--no-browser", action="store_true")
    parser.add_argument("--folder", type=Path, help="folder to keep the datasets in; default: a temporary folder")
    parser.add_argument("--keep", action="store_true", help="store the results in benchmarks/results")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        for form in options.formats:
            folder = (options.folder or Path(temporary)) / f"{options.documents}-{form}"
            if not folder.exists():
                write_dataset(blocks(options.documents), folder, Passage, format=form)
            section = section_of(form, folder, options)
            print(markdown(section), flush=True)
            if options.keep:
                keep("view", section, PACKAGES)
    return 0


def section_of(form: str, folder: Path, options: argparse.Namespace) -> Section:
    """Return the measurements of one dataset."""
    times = first_pages(folder, options.rounds)
    lines = [
        Line("first page, including process start", [1000 * whole for whole, _ in times], target=1000),
        Line("first page, after start", [1000 * after for _, after in times], target=1000),
        *measure_viewer(folder, options.documents, browser=not options.no_browser),
    ]
    return Section(
        form if options.documents == 1_000_000 else f"{form}_{options.documents}",
        f"{options.documents:,} rows, {form.capitalize()}",
        f"The first page was measured in {options.rounds} processes; random rows were requested {_PLACES} times "
        f"over HTTP, {_JUMPS} times in a browser.",
        ["", "median", "p95", "worst"],
        [line.cells() for line in lines],
        [goal for line in lines for goal in line.goals()],
    )


if __name__ == "__main__":
    sys.exit(main())
