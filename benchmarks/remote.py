"""Benchmark training from an object store, compared with other libraries and with plain ranged reads.

    python benchmarks/remote.py --install --venvs ../peers                  # creates the environments of the others
    python benchmarks/remote.py --rows first epoch nodes stall --rounds 5
    python benchmarks/remote.py --keep

The store is on loopback (see loopback_store.py, which needs a C compiler): 30 ms before each answer, 60 MB/s a
connection, and 200 MB/s for all connections together. The data is 16,000 pictures, 198 MB, in quire's case with blocks
of 1 MiB; each library has it in its own format and default sizes. Every round of every contestant is a fresh process
with an empty cache folder that prints one line (see remote_peers/remote_protocol.py), and contestants take turns. A
first round, which is not timed, compares every value. Others without an environment are marked; `--install` creates it.
WebDataset needs `curl`. On a machine with other load, read the bytes and requests: they are exact, times are not.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import stream_data
from loopback_store import Link, LoopbackStore
from measure import busy_processes
from results import DISTRIBUTIONS, Goal, Section, goal_table, keep, markdown, version_of
from stream import PINS as STREAM_PINS
from stream import install

from quire import BaseDocument
from quire.data import StreamingDataset
from quire.errors import OptionError
from quire.storage import write_dataset

ADAPTERS = Path(__file__).with_name("remote_peers")
BUCKET = "bench"
WORKLOAD, SCALE = "pictures", 0.8
BATCH = 64
LINK = Link()
OURS = ("quire", "limit")
PINS = {
    "mosaic": STREAM_PINS["mosaic"],
    "litdata": STREAM_PINS["litdata"],
    "lancedb": ["lancedb==0.40.0", *STREAM_PINS["lance"]],
    "datasets": [*STREAM_PINS["datasets"], "aiohttp", "requests"],  # by which fsspec reads HTTP
    "webdataset": STREAM_PINS["webdataset"],
}
PATIENCE = 900
MB = 1e6

Outcome = dict[str, Any]
Outcomes = dict[str, list[Outcome]]
"""The outcomes of the rounds of each contestant."""


@dataclass(frozen=True)
class Contestant:
    """An adapter, and how it reads its data."""

    name: str
    peer: str
    variant: str = ""
    store: str = ""
    """The variant that wrote the data."""
    workers: int = 0
    warm: bool = False


@dataclass(frozen=True)
class Row:
    """A comparison: its contestants, what their processes do, and how the outcomes become a section."""

    name: str
    contestants: Sequence[Contestant]
    report: Callable[[Row, Outcomes, dict[str, str]], Section]
    changes: dict[str, Any]
    """Fields of the task that differ from the default."""
    busy: int = 0
    """The number of other processes that are busy during the timed rounds."""
    link: Link = LINK


# --- contestants and rows


@cache
def best_shuffle() -> str:
    """Return the order that is made for object stores, or the default one of versions that do not have it."""

    class Number(BaseDocument):
        number: int

    with tempfile.TemporaryDirectory() as folder:
        write_dataset([Number(number=1)], f"{folder}/d", document_type=Number, show_progress=False)
        try:
            StreamingDataset[Number](f"{folder}/d", batch_size=1, shuffle="interleaved")  # type: ignore[arg-type]
        except OptionError:
            return "block"
    return "interleaved"


def quire(name: str, kind: str = "arrow", **options: Any) -> Contestant:
    """Return a variant of quire."""
    return Contestant(name, "quire", f"{kind}/{best_shuffle()}", kind, **options)


def rivals() -> Iterator[Contestant]:
    """Yield the other libraries, without workers and with two, because some read one file at a time in each."""
    for workers, ending in ((0, ""), (2, ", 2 workers")):
        for name, peer, variant in (
            ("MosaicML Streaming", "mosaic", ""),
            ("LitData", "litdata", ""),
            ("LanceDB", "lancedb", ""),
            ("LanceDB, groups of 85 rows", "lancedb", "clumps"),
            ("HF datasets", "datasets", ""),
            ("WebDataset", "webdataset", ""),
        ):
            yield Contestant(f"{name}{ending}", peer, variant, workers=workers)


def rows() -> list[Row]:
    """Return all rows."""
    ours = (quire("quire"), quire("quire, Parquet", "parquet"))
    warm = (quire("quire", warm=True), quire("quire, Parquet", "parquet", warm=True))
    cold = (quire("quire, new process"), quire("quire, Parquet, new process", "parquet"))
    limit = Contestant("plain ranged reads", "limit", store="arrow")
    workers = quire("quire, 2 workers", workers=2)
    loader = replace(ours[0], name="quire, loader", variant=f"{ours[0].variant}/loader")
    return [
        Row("limit", (limit,), report_limit, {}),
        Row("first", (*warm, *cold), report_first, {}),
        Row("epoch", (limit, *ours, workers), report_epoch, {"epochs": 2}),
        Row("contended", (limit, *ours), report_epoch, {"epochs": 2}, busy=2),
        Row("nodes", ours[:1], report_nodes, {}),
        Row("stall", (*ours, loader, workers), report_stall, {"computing": "sleep"}),
        Row("stall_busy", (*ours, loader, workers), report_stall, {"computing": "busy"}),
        Row("plan", warm, report_plan, {}),
        Row("plan_far", warm, report_plan, {}, link=Link(latency=0.1, connection=20e6, total=50e6)),
        Row("rivals", (*ours, workers, *rivals()), report_rivals, {}),
    ]


def parse_options() -> argparse.Namespace:
    """Parse the rows, contestants, rounds and folders."""
    names = [row.name for row in rows()]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=names, default=names, help="default: all")
    parser.add_argument("--peers", nargs="+", choices=[*OURS, *PINS], default=[*OURS, *PINS], help="default: all")
    parser.add_argument("--rounds", type=int, default=5, help="use fewer than 5 only to try it out")
    parser.add_argument("--scale", type=float, default=SCALE, help="factor for 20,000 pictures")
    parser.add_argument("--data", type=Path, default=Path("build/remote"), help="folder of the store and of the caches")
    parser.add_argument("--venvs", type=Path, default=Path(".nox/remote-peers"), help="folder of the environments")
    parser.add_argument("--install", action="store_true", help="create missing environments")
    parser.add_argument("--keep", action="store_true", help="store the results in benchmarks/results")
    return parser.parse_args()


def main() -> int:
    """Measure, print, and store the results with `--keep`."""
    options = parse_options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # raises SystemExit, so that child processes are ended, too
    if options.install:
        for peer in set(options.peers) & set(PINS):
            install(options.venvs / peer, PINS[peer])
    (options.data / "store" / BUCKET).mkdir(parents=True, exist_ok=True)
    goals = []
    for row in (row for row in rows() if row.name in options.rows):
        section = Bench(row, options).section()
        goals += [(section.name, goal) for goal in section.goals]
        print(markdown(section), flush=True)
        if options.keep:
            keep("remote", replace(section, facts={"versions": versions(options)}), ())
    print(goal_table(goals))
    return 0


def versions(options: argparse.Namespace) -> dict[str, str]:
    """Return the installed versions of quire, what it reads with, and the others."""
    installed = {"Python": platform.python_version()}
    installed |= {package: version_of(package) for package in ("quire", "torch", "pyarrow", "obstore")}
    ask = "from importlib.metadata import version as v; import sys; print(v(sys.argv[1]))"
    for peer, pins in PINS.items():
        python, package = interpreter(peer, options), pins[0].split("==")[0]
        command = [str(python), "-c", ask, DISTRIBUTIONS.get(package, package)]
        done = subprocess.run(command, capture_output=True, text=True, check=False) if python.exists() else None
        installed[package] = done.stdout.strip() if done and done.stdout else "not installed"
    return installed


def interpreter(peer: str, options: argparse.Namespace) -> Path:
    """Return the interpreter of a peer; quire uses the current one."""
    return Path(sys.executable) if peer in OURS else (options.venvs / peer / "bin/python").absolute()


# --- rounds


class Bench:
    """Runs the rounds of a row."""

    def __init__(self, row: Row, options: argparse.Namespace) -> None:
        self.row, self.options = row, options
        self.data: Path = options.data.absolute()
        self.present = [contestant for contestant in row.contestants if contestant.peer in options.peers]
        self.errors: dict[str, str] = {}
        self.caches = self.data / "caches"
        shutil.rmtree(self.caches, ignore_errors=True)
        self.caches.mkdir(parents=True)

    def section(self) -> Section:
        """Create missing data, check all contestants, and measure the others."""
        outcomes: Outcomes = {contestant.name: [] for contestant in self.present}
        for contestant in self.present:
            try:
                self.prepare(contestant)
            except (OSError, RuntimeError, subprocess.SubprocessError) as error:
                self.fail(contestant, error)
        with busy_processes(self.row.busy):
            for _ in range(self.options.rounds):
                for contestant in self.present:
                    if contestant.name in self.errors:
                        continue
                    try:
                        outcomes[contestant.name].append(self.play(contestant))
                    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
                        self.fail(contestant, error)
        shutil.rmtree(self.caches)
        return self.row.report(self.row, outcomes, self.errors)

    def fail(self, contestant: Contestant, error: BaseException) -> None:
        """Record why a contestant has no results."""
        self.errors[contestant.name] = str(error)[:160]
        print(f"{self.row.name}: {contestant.name}: {error}", file=sys.stderr, flush=True)

    def prepare(self, contestant: Contestant) -> None:
        """Create the data if it is missing, and compare every value that is read."""
        folder, writer = self.folder(contestant), contestant
        if contestant.peer == "limit":
            writer = replace(contestant, peer="quire")
        if not is_made(folder, writer.peer):
            self.run(writer, [self.task(writer, operation="make", variant=writer.store)])
            mark_made(folder, writer.peer)
        if contestant.peer == "limit" or is_checked(contestant, folder):
            return
        [outcome] = self.run(contestant, [self.task(contestant, check=True, epochs=1, computing="")])
        if outcome["wrong_columns"]:
            raise RuntimeError(f"these columns differ from what was written: {', '.join(outcome['wrong_columns'])}")
        _checked.add((contestant, folder))

    def play(self, contestant: Contestant) -> Outcome:
        """Run one round."""
        if self.row.name == "nodes":
            return self.play_nodes(contestant)
        [outcome] = self.run(contestant, [self.task(contestant, **self.row.changes)])
        folder = self.folder(contestant)
        outcome |= {"data_bytes": data_bytes(folder), "needed_bytes": needed_bytes(folder, outcome)}
        if self.row.report is report_plan:
            outcome["plan"] = plan_run(folder, contestant.variant, self.row.link)
        return outcome

    def play_nodes(self, contestant: Contestant) -> Outcome:
        """Read an epoch on some nodes together, for batches that divide the blocks evenly, and some that do not."""
        totals: Outcome = {"data_bytes": data_bytes(self.folder(contestant))}
        size = stream_data.WORKLOADS[WORKLOAD].scaled(self.options.scale).rows
        for nodes in (1, 2, 4):
            for batch in (64, 50):
                files = [self.data / f"rows-{rank}.npy" for rank in range(nodes)]
                places = [{"rank": rank, "world_size": nodes, "rows_file": str(files[rank])} for rank in range(nodes)]
                tasks = [self.task(contestant, batch=batch, **place) for place in places]
                outcomes = self.run(contestant, tasks)
                seen = np.concatenate([np.load(file) for file in files])
                totals[f"{nodes}/{batch}"] = outcomes[0]["total_bytes"]
                totals[f"{nodes}/{batch}/once"] = bool(np.array_equal(np.sort(seen), np.arange(size)))
        return totals

    def folder(self, contestant: Contestant) -> Path:
        """Return the folder of the contestant's data in the store."""
        peer = "quire" if contestant.peer == "limit" else contestant.peer
        size = stream_data.WORKLOADS[WORKLOAD].scaled(self.options.scale).rows
        return self.data / "store" / BUCKET / "-".join(filter(None, (peer, contestant.store, str(size))))

    def task(self, contestant: Contestant, **changes: Any) -> Outcome:
        """Return the task of one process."""
        folder = self.folder(contestant)
        return {
            "operation": "read",
            "workload_name": WORKLOAD,
            "folder": str(folder),
            "key": f"{BUCKET}/{folder.name}",
            "scale": self.options.scale,
            "variant": contestant.variant,
            "batch": BATCH,
            "workers": contestant.workers,
            "warm": contestant.warm,
            **changes,
        }

    def run(self, contestant: Contestant, tasks: list[Outcome]) -> list[Outcome]:
        """Run processes, and once more if they fail: some libraries fail now and then, which is reported."""
        try:
            return self.run_once(contestant, tasks)
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            print(f"{self.row.name}: {contestant.name}, first attempt: {error}", file=sys.stderr, flush=True)
            outcomes = self.run_once(contestant, tasks)
            return [{**outcome, "failed": str(error)} for outcome in outcomes]

    def run_once(self, contestant: Contestant, tasks: list[Outcome]) -> list[Outcome]:
        """Run processes at the same time, each with an empty cache, and return what they print."""
        python = interpreter(contestant.peer, self.options)
        if not python.exists():
            raise RuntimeError("not installed")
        # A new folder, because creating files costs more while the system remembers those that were just deleted.
        caches = Path(tempfile.mkdtemp(dir=self.caches))
        program = str(ADAPTERS / f"remote_{contestant.peer}.py")
        with LoopbackStore(self.data / "store", self.row.link) as store, started_processes() as start:
            for number, task in enumerate(tasks):
                folder = caches / str(number)
                folder.mkdir(parents=True)
                task |= {"endpoint": store.endpoint, "cache": str(folder)}
                start([str(python), program, json.dumps(task)], environment(store.endpoint, self.data))
            outcomes = start.outcomes()
            total = store.counts()
        for outcome in outcomes:
            outcome |= {"total_bytes": total.body_bytes, "total_requests": total.requests}
        return outcomes


class Starter:
    """Starts processes, each in a session of its own, and collects the last line that each prints."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.children: list[subprocess.Popen[str]] = []

    def __call__(self, command: list[str], variables: dict[str, str]) -> None:
        """Start a process. Its output goes to files: descendants that outlive it would keep pipes open."""
        number = len(self.children)
        with (self._folder / f"out-{number}").open("w") as out, (self._folder / f"err-{number}").open("w") as err:
            child = subprocess.Popen(command, stdout=out, stderr=err, text=True, env=variables, start_new_session=True)
        self.children.append(child)

    def outcomes(self) -> list[Outcome]:
        """Wait for all processes, and parse their last lines."""
        outcomes = []
        for number, child in enumerate(self.children):
            if child.wait(PATIENCE):
                lines = [line for line in (self._folder / f"err-{number}").read_text().splitlines() if line.strip()]
                raise RuntimeError(lines[-1] if lines else f"ended with {child.returncode}")
            outcomes.append(json.loads((self._folder / f"out-{number}").read_text().splitlines()[-1]))
        return outcomes


@contextmanager
def started_processes() -> Iterator[Starter]:
    """Yield a starter of processes, which are killed at the end with what they have started."""
    with tempfile.TemporaryDirectory() as folder:
        starter = Starter(Path(folder))
        try:
            yield starter
        finally:
            for child in starter.children:
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()


def environment(endpoint: str, data: Path) -> dict[str, str]:
    """Return the environment of a contestant: the endpoint and any keys, and no folder but that of the data."""
    (data / "tmp").mkdir(parents=True, exist_ok=True)
    own = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    return {
        **own,
        "AWS_ACCESS_KEY_ID": "any",
        "AWS_SECRET_ACCESS_KEY": "any",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": endpoint,
        "S3_ENDPOINT_URL": endpoint,
        "HF_HOME": str(data / "hf"),
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_OFFLINE": "1",
        "TMPDIR": str(data / "tmp"),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }


# --- data

_checked: set[tuple[Contestant, Path]] = set()


def is_checked(contestant: Contestant, folder: Path) -> bool:
    """Return whether an earlier row has compared all values."""
    return (contestant, folder) in _checked


def is_made(folder: Path, peer: str) -> bool:
    """Return whether the folder is complete, and written by the current code of the adapter."""
    return stream_data.is_made(folder, ADAPTERS / f"remote_{peer}.py")


def mark_made(folder: Path, peer: str) -> None:
    """Record that the folder is complete."""
    stream_data.mark_made(folder, ADAPTERS / f"remote_{peer}.py")


def data_bytes(folder: Path) -> int:
    """Return the bytes of all files."""
    return stream_data.size_of(folder)


@cache
def blocks_of(folder: Path) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return the first row and the bytes of every block of a dataset of quire, by row."""
    blocks = []
    for path in folder.glob("*.arrow"):
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
        blocks += [(batch.column("row")[0].as_py(), batch.nbytes) for batch in batches if len(batch)]
    for path in folder.glob("*.parquet"):
        file = pq.ParquetFile(path)
        for number in range(file.num_row_groups):
            group = file.metadata.row_group(number)
            size = sum(group.column(column).total_compressed_size for column in range(group.num_columns))
            blocks.append((file.read_row_group(number, ["row"]).column("row")[0].as_py(), size))
    starts, sizes = zip(*sorted(blocks), strict=True) if blocks else ((), ())
    return np.array(starts), np.array(sizes)


def needed_bytes(folder: Path, outcome: Outcome) -> int:
    """Return the bytes of the blocks that have rows of the first batch."""
    starts, sizes = blocks_of(folder)
    first = np.array(outcome.get("first_rows", []))
    if not len(starts) or not len(first):
        return 0
    return int(sizes[np.unique(np.searchsorted(starts, first, "right") - 1)].sum())


@cache
def plan_run(folder: Path, variant: str, link: Link) -> Outcome:
    """Return the plan of an epoch on one node, from the local files."""
    dataset = StreamingDataset(str(folder), BATCH, shuffle=variant.split("/")[1])
    plan = dataset.plan(link=link.total, connection=link.connection, latency=link.latency)
    return plan.to_dict()["run"]


# --- sections


def values_of(outcomes: list[Outcome], key: str, epoch: int = 0) -> list[float]:
    """Return a number of an epoch, or of the process, one value per round."""
    return [
        outcome["epochs"][epoch][key] if "epochs" in outcome and key in outcome["epochs"][epoch] else outcome[key]
        for outcome in outcomes
    ]


def show(values: Sequence[float], form: str = "{:.2f}") -> str:
    """Format the median and the range."""
    if not values:
        return ""
    low, middle, high = (form.format(value) for value in (min(values), median(values), max(values)))
    return middle if low == high else f"{middle} ({low} to {high})"


def in_mb(values: Sequence[float]) -> list[float]:
    """Convert bytes to MB."""
    return [value / MB for value in values]


def relative_epoch(outcomes: list[Outcome]) -> list[float]:
    """Return the time of the first epoch relative to the time in which the link sends the data."""
    return [
        seconds / (outcome["data_bytes"] / LINK.total)
        for outcome, seconds in zip(outcomes, values_of(outcomes, "seconds"), strict=True)
    ]


def cpu_per_mb(outcomes: list[Outcome]) -> list[float]:
    """Return the CPU time of the first epoch in ms per MB of the data."""
    return [
        1e3 * seconds / (outcome["data_bytes"] / MB)
        for outcome, seconds in zip(outcomes, values_of(outcomes, "cpu_seconds"), strict=True)
    ]


def allowed_first(outcome: Outcome) -> float:
    """Return the target for the first batch: 6 round trips, and 1.25 times what the needed bytes take on the link."""
    return 6 * LINK.latency + 1.25 * float(outcome["needed_bytes"]) / LINK.total


def lines_of(
    head: Sequence[str], outcomes: Outcomes, errors: dict[str, str], cells: Callable[[list[Outcome]], list[str]]
) -> list[list[str]]:
    """Return a line for each contestant; one that failed has the reason instead."""
    lines = []
    for name, rounds in outcomes.items():
        is_measured = rounds and name not in errors
        lines.append(
            [name, *(cells(rounds) if is_measured else [errors.get(name, "no rounds"), *[""] * (len(head) - 2)])]
        )
    return lines


STORE = "The store answers after 30 ms, with 60 MB/s a connection and 200 MB/s for all."


def report_limit(row: Row, outcomes: Outcomes, errors: dict[str, str]) -> Section:
    """Report how fast the store can be read at all."""

    def cells(rounds: list[Outcome]) -> list[str]:
        speeds = [outcome["epochs"][0]["bytes"] / MB / outcome["epochs"][0]["seconds"] for outcome in rounds]
        return [show(values_of(rounds, "seconds")), show(speeds, "{:.0f}"), show(cpu_per_mb(rounds))]

    what = f"All shards of quire in ranges of 1 MiB by obstore, 32 in flight, without decoding. {STORE}"
    head = ["", "seconds", "MB/s", "CPU ms/MB"]
    return Section(row.name, "Plain ranged reads", what, head, lines_of(head, outcomes, errors, cells))


def report_first(row: Row, outcomes: Outcomes, errors: dict[str, str]) -> Section:
    """Report the first batch."""

    def cells(rounds: list[Outcome]) -> list[str]:
        return [
            show(values_of(rounds, "open_s")),
            show(values_of(rounds, "first_batch_s")),
            show([allowed_first(outcome) for outcome in rounds]),
            show(in_mb(values_of(rounds, "needed_bytes")), "{:.1f}"),
            show(in_mb(values_of(rounds, "first_batch_bytes")), "{:.1f}"),
            show(values_of(rounds, "first_batch_requests"), "{:.0f}"),
        ]

    goals = []
    for name in ("quire", "quire, Parquet"):
        rounds = outcomes.get(name, [])
        times = [outcome["epochs"][0]["first_batch_s"] / allowed_first(outcome) for outcome in rounds]
        allowed = "first batch / (6 round trips + 1.25 needed bytes / link)"
        goals.append(Goal(name, allowed, times, at_most=1.0, unit="", known="7.5 s"))
        bytes_before = in_mb(values_of(rounds, "first_batch_bytes"))
        goals.append(Goal(name, "bytes before the first batch", bytes_before, at_most=40, unit="MB", known="197 MB"))
    what = (
        f"From `iter()` on an open dataset to the first shuffled batch of {BATCH}, with an empty cache, after another "
        "small dataset was read, so that everything is started; *new process* includes the start. *needed* are the "
        f"blocks with rows of the batch, *read* what the store had sent when the batch arrived. {STORE}"
    )
    head = ["", "open, s", "first batch, s", "allowed, s", "needed, MB", "read, MB", "requests"]
    return Section(row.name, "First shuffled batch", what, head, lines_of(head, outcomes, errors, cells), goals)


def report_epoch(row: Row, outcomes: Outcomes, errors: dict[str, str]) -> Section:
    """Report the first and the second epoch."""

    def cells(rounds: list[Outcome]) -> list[str]:
        share = [outcome["epochs"][0]["bytes"] / outcome["data_bytes"] for outcome in rounds]
        return [
            show(values_of(rounds, "seconds")),
            show(relative_epoch(rounds)),
            show(share, "{:.3f}"),
            show(values_of(rounds, "requests"), "{:.0f}"),
            show(values_of(rounds, "most_in_flight"), "{:.0f}"),
            show(cpu_per_mb(rounds)),
            show(values_of(rounds, "requests", 1), "{:.0f}"),
            show(values_of(rounds, "seconds", 1)),
            "yes" if all(outcome.get("exactly_once") for outcome in rounds) else "",
        ]

    goals = []
    for name, most in (("quire", 3.0), ("quire, Parquet", 3.5)):
        rounds = outcomes.get(name, [])
        if not row.busy:
            goals.append(
                Goal(name, "epoch / (bytes / link)", relative_epoch(rounds), at_most=1.3, unit="", known="2.3")
            )
        goals.append(Goal(name, "CPU time", cpu_per_mb(rounds), at_most=most, unit="ms/MB"))
        requests = values_of(rounds, "requests", 1)
        goals.append(Goal(name, "requests in the second epoch", requests, at_most=0.5, unit=""))
    load = " Two other processes are busy." if row.busy else ""
    what = f"Two shuffled epochs with an empty cache at the start, large enough for all data.{load} {STORE}"
    head = ["", "epoch, s", "/ (bytes / link)", "bytes / data", "requests", "in flight", "CPU ms/MB"]
    head += ["requests, 2nd", "seconds, 2nd", "exactly once"]
    title = "Epochs next to two busy processes" if row.busy else "Epochs"
    return Section(row.name, title, what, head, lines_of(head, outcomes, errors, cells), goals)


def report_nodes(row: Row, outcomes: Outcomes, errors: dict[str, str]) -> Section:
    """Report the bytes of all nodes together."""
    lines, goals = [], []
    for name, rounds in outcomes.items():
        for nodes in (1, 2, 4):
            for batch in (64, 50):
                key = f"{nodes}/{batch}"
                shares = [outcome[key] / outcome["data_bytes"] for outcome in rounds]
                once = "yes" if all(outcome[f"{key}/once"] for outcome in rounds) else "no"
                lines.append(
                    [name, str(nodes), str(batch), show(shares, "{:.3f}"), once if rounds else errors.get(name, "")]
                )
                what = f"bytes / data, {nodes} nodes, batches of {batch}"
                goals.append(Goal(name, what, shares, at_most=1.02, unit="", known="1.0 on one node"))
    what = f"One shuffled epoch, opening included; a node is a process with its own cache folder. {STORE}"
    head = ["", "nodes", "batch", "bytes / data", "each row once"]
    return Section(row.name, "Bytes over the link", what, head, lines, goals)


def report_stall(row: Row, outcomes: Outcomes, errors: dict[str, str]) -> Section:
    """Report how long a training loop waits."""

    def cells(rounds: list[Outcome]) -> list[str]:
        shares = [100 * share for share in values_of(rounds, "stall_share")]
        return [show(shares, "{:.1f}"), show(values_of(rounds, "first_batch_s")), show(values_of(rounds, "seconds"))]

    goals = []
    for name in ("quire", "quire, Parquet", "quire, loader"):
        shares = [100 * share for share in values_of(outcomes.get(name, []), "stall_share")]
        goals.append(Goal(name, "waiting after the first batch", shares, at_most=5, unit="%"))
    is_busy = row.changes["computing"] == "busy"
    step = "computes on the CPU for 5 ms" if is_busy else "waits 5 ms, as for a GPU,"
    what = f"A loop that {step} after each batch of {BATCH}; the time that it waits for later batches. {STORE}"
    title = f"Stalls of a loop that {'computes' if is_busy else 'waits for a device'} 5 ms a batch"
    head = ["", "waiting, %", "first batch, s", "epoch, s"]
    return Section(row.name, title, what, head, lines_of(head, outcomes, errors, cells), goals)


def report_plan(row: Row, outcomes: Outcomes, errors: dict[str, str]) -> Section:
    """Report the seconds, bytes and requests of an epoch next to those of its plan."""

    def ratios(rounds: list[Outcome], measured: str, planned: str) -> list[float]:
        return [outcome["epochs"][0][measured] / outcome["plan"][planned] for outcome in rounds]

    def cells(rounds: list[Outcome]) -> list[str]:
        plan = rounds[0]["plan"]
        return [
            f"{plan['first_batch_seconds']:.2f}",
            show(values_of(rounds, "first_batch_s")),
            f"{plan['epoch_seconds']:.2f}",
            show(values_of(rounds, "seconds")),
            show(ratios(rounds, "bytes", "node_bytes"), "{:.4f}"),
            show(ratios(rounds, "requests", "node_requests"), "{:.4f}"),
        ]

    goals = []
    for name, rounds in outcomes.items():
        for label, measured, planned in (
            ("first batch", "first_batch_s", "first_batch_seconds"),
            ("epoch", "seconds", "epoch_seconds"),
        ):
            # Both directions count: a run that takes half of the planned time is as wrong as one that takes twice.
            off = [max(ratio, 1 / ratio) for ratio in ratios(rounds, measured, planned)]
            goals.append(Goal(name, f"{label}, seconds compared with the plan", off, at_most=1.25, unit=""))
    link = row.link
    what = (
        "An epoch with an empty cache, after another small dataset was read, next to `dataset.plan()`. The store "
        f"answers after {1e3 * link.latency:.0f} ms, with {link.connection / MB:.0f} MB/s a connection and "
        f"{link.total / MB:.0f} MB/s for all."
    )
    head = [
        "",
        "first batch, planned",
        "first batch, s",
        "epoch, planned",
        "epoch, s",
        "bytes / plan",
        "requests / plan",
    ]
    return Section(row.name, "Plan and run", what, head, lines_of(head, outcomes, errors, cells), goals)


def report_rivals(row: Row, outcomes: Outcomes, errors: dict[str, str]) -> Section:
    """Report the first batch and the epoch of every library."""

    def cells(rounds: list[Outcome]) -> list[str]:
        last = rounds[-1]
        once = "yes" if last["exactly_once"] else f"no: {last['repeated']} repeated, {last['lost']} missing"
        failed = sum("failed" in outcome for outcome in rounds)
        once += f"; failed {failed} times" if failed else ""
        return [
            show(values_of(rounds, "open_s")),
            show(values_of(rounds, "first_batch_s")),
            show(in_mb(values_of(rounds, "first_batch_bytes")), "{:.0f}"),
            show(values_of(rounds, "seconds")),
            show([outcome["epochs"][0]["bytes"] / outcome["data_bytes"] for outcome in rounds]),
            show(values_of(rounds, "requests"), "{:.0f}"),
            show(cpu_per_mb(rounds)),
            once,
            f"{last['mixing']:.3f}",
        ]

    goals, others = [], {}
    for name, rounds in outcomes.items():
        if name.startswith("quire"):
            continue
        for key, label in (("first_batch_s", "first batch"), ("seconds", "epoch")):
            ours, theirs = values_of(outcomes.get("quire", []), key), values_of(rounds, key)
            ratios = [a / b for a, b in zip(ours, theirs, strict=False)]
            goals.append(Goal("quire", f"{name}, {label}", ratios, "wall", at_most=1.0))
            if key == "seconds" and ratios:
                others[name] = 1 / median(ratios)
    what = (
        "Every library reads its own format as its documentation describes, by HTTP (quire, HF datasets, WebDataset) "
        "or S3; from `iter()` in a new process with an empty cache. *mixing* is the entropy of the tenths of the "
        f"dataset that the rows of a batch come from, relative to a random permutation. {STORE}"
    )
    head = ["", "open, s", "first batch, s", "MB before it", "epoch, s", "bytes / data", "requests", "CPU ms/MB"]
    head += ["exactly once", "mixing"]
    title = "Other libraries"
    return Section(row.name, title, what, head, lines_of(head, outcomes, errors, cells), goals, others)


if __name__ == "__main__":
    sys.exit(main())
