"""Benchmark data larger than memory: write, open, shuffle and read, compared with other libraries.

    python benchmarks/stream.py --rows pictures table --rounds 5 --scale 0.1 --install
    python benchmarks/stream.py --install --keep

Every library has its own environment. Every round of every contestant is a fresh process that prints one line (see
stream_peers/protocol.py), and contestants take turns. A first round, which is not timed, compares every row and records
the memory. Peers without an environment are marked; `--install` creates it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import stream_data
from measure import busy_processes
from results import DISTRIBUTIONS, keep, markdown
from stream_report import section_of
from stream_rows import ROWS, Contestant, Row

HERE = Path(__file__).parent
ADAPTERS = HERE / "stream_peers"
OURS = ("quire", "memmap")
TORCH = "torch==2.13.0"
PINS: dict[str, list[str]] = {
    "mosaic": ["mosaicml-streaming==0.13.0"],
    "litdata": ["litdata==0.2.76"],
    "datasets": ["datasets==5.2.0"],
    "webdataset": ["webdataset==1.0.2"],
    "lance": ["pylance==14.0.2"],
    "tensordict": ["tensordict==0.15.3"],
    "petastorm": ["petastorm==0.13.1", "pyarrow==12.0.1", "numpy==1.23.5", "pandas<2.1", "setuptools<70"],
}
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "PYTHONWARNINGS": "ignore",
}
PATIENCE = 1800

Outcome = dict[str, Any]


def parse_options() -> argparse.Namespace:
    """Parse the rows, contestants, rounds, sizes and folders."""
    names = [row.name for row in ROWS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=names, default=names, help="default: all")
    parser.add_argument("--peers", nargs="+", choices=[*OURS, *PINS], default=[*OURS, *PINS], help="default: all")
    parser.add_argument("--rounds", type=int, default=5, help="use fewer than 5 only to try it out")
    parser.add_argument("--scale", type=float, default=1.0, help="factor for the rows of every workload")
    parser.add_argument("--seconds", type=float, default=1.0, help="minimum duration of a round")
    parser.add_argument("--limit", type=float, default=8.0, help="maximum duration of a round")
    parser.add_argument("--data", type=Path, default=Path("build/stream"), help="folder of the workloads")
    parser.add_argument("--venvs", type=Path, default=Path(".nox/peers"), help="folder of the environments")
    parser.add_argument("--install", action="store_true", help="create missing environments")
    parser.add_argument("--make", action="store_true", help="only create the data of the workloads")
    parser.add_argument("--cgroup", type=Path, help="memory cgroup of 1.5 GB for the row `large`; default: a ulimit")
    parser.add_argument("--keep", action="store_true", help="store the results in benchmarks/results")
    return parser.parse_args()


def main() -> int:
    """Measure, print, and store the results with `--keep`."""
    options = parse_options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # raises SystemExit, so that child processes are ended, too
    if options.install:
        for peer in set(options.peers) & set(PINS):
            install(options.venvs / peer, PINS[peer])
    for row in (row for row in ROWS if row.name in options.rows):
        section = section_of(row, measure(row, options))
        print(markdown(section), flush=True)
        if options.keep:
            facts = {"versions": {"Python": platform.python_version(), **versions(options)}}
            keep("stream", replace(section, facts=facts), ())
    return 0


# --- environments


def install(folder: Path, pins: list[str]) -> None:
    """Create an environment. torch is installed first, so that the peer does not install another version."""
    python = folder / "bin/python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        numpy = [pin for pin in pins if pin.startswith("numpy")]
        subprocess.run([str(python), "-m", "pip", "install", "-q", TORCH, *numpy], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", *(pins if numpy else [TORCH, *pins])], check=True)


def interpreter(peer: str, options: argparse.Namespace) -> Path:
    """Return the interpreter of a peer; quire and numpy use the current one."""
    return Path(sys.executable) if peer in OURS else (options.venvs / peer / "bin/python").absolute()


def versions(options: argparse.Namespace) -> dict[str, str]:
    """Return the installed versions of the peers."""
    ask = "from importlib.metadata import version as v; import sys; print(v(sys.argv[1]))"
    packages = {peer: pins[0].split("==")[0] for peer, pins in PINS.items()} | {"quire": "quire", "memmap": "numpy"}
    installed = {}
    for peer, package in packages.items():
        python = interpreter(peer, options)
        command = [str(python), "-c", ask, DISTRIBUTIONS.get(package, package)]
        done = subprocess.run(command, capture_output=True, text=True, check=False) if python.exists() else None
        installed[package] = done.stdout.strip() if done and done.stdout else "not installed"
    return installed


# --- rounds


def measure(row: Row, options: argparse.Namespace) -> dict[str, Any]:
    """Return the checked round and the timed rounds, by contestant."""
    results: dict[str, Any] = {}
    present = [contestant for contestant in row.contestants if contestant.peer in options.peers]
    for contestant in present:
        results[contestant.name] = {"rounds": []}
        try:
            results[contestant.name].update(first_round(row, contestant, options))
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            results[contestant.name]["error"] = str(error)
            print(f"{row.name}: {contestant.name}: {error}", file=sys.stderr, flush=True)
    runnable = [contestant for contestant in present if "error" not in results[contestant.name]]
    with busy_processes(row.busy):
        for _ in range(min(options.rounds, row.most_rounds)):
            for contestant in runnable:
                results[contestant.name]["rounds"].append(play(row, contestant, options))
    return results


def first_round(row: Row, contestant: Contestant, options: argparse.Namespace) -> Outcome:
    """Create the data if it is missing, and check the rows that are read."""
    outcome: Outcome = {}
    if row.operation != "write":
        folder, recipe = folder_of(row, contestant, options), ADAPTERS / f"peer_{contestant.peer}.py"
        if not stream_data.is_made(folder, recipe):
            variant = contestant.store or contestant.variant
            outcome["make"] = play(row, contestant, options, operation="make", variant=variant)
            stream_data.mark_made(folder, recipe)
        outcome["bytes"] = stream_data.size_of(folder)
    if options.make:
        return {**outcome, "error": "only the data was created"}
    outcome["check"] = play(row, contestant, options, check=True)
    wrong = outcome["check"].get("wrong_columns")
    if wrong:
        outcome["error"] = f"these columns differ from what was written: {', '.join(wrong)}"
    return outcome


def folder_of(row: Row, contestant: Contestant, options: argparse.Namespace) -> Path:
    """Return the folder of the contestant's data."""
    workload = stream_data.WORKLOADS[row.workload].scaled(options.scale)
    return stream_data.folder_of(options.data.absolute(), contestant.peer, contestant.store, workload)


def play(row: Row, contestant: Contestant, options: argparse.Namespace, **changes: Any) -> Outcome:
    """Run one process, and return the outcome that it prints."""
    python, folder = interpreter(contestant.peer, options), folder_of(row, contestant, options)
    if not python.exists():
        raise RuntimeError("not installed")
    task = {
        "operation": row.operation,
        "workload_name": row.workload,
        "folder": str(folder if row.operation != "write" else folder.with_suffix(".written")),
        "scale": options.scale,
        "variant": contestant.variant,
        "batch": stream_data.WORKLOADS[row.workload].batch,
        "shuffle": contestant.shuffle,
        "workers": row.workers if contestant.workers is None else contestant.workers,
        "seconds": options.seconds,
        "limit": PATIENCE if contestant.whole else options.limit,
        "epochs": row.epochs,
        **changes,
    }
    timed = task["operation"] != "make"
    if row.memory_mb and timed:
        drop_pages(folder)
    limit = limiter(row.memory_mb, options.cgroup) if row.memory_mb and timed else None
    command = [str(python), str(ADAPTERS / f"peer_{contestant.peer}.py"), json.dumps(task)]
    return run_child(command, options.data, limit, row.threads)


def run_child(command: list[str], data: Path, limit: Callable[[], None] | None, threads: int = 1) -> Outcome:
    """Run a command and parse its last line; after a timeout, kill it with its descendants."""
    folders = {"HF_HOME": str(data.absolute() / "hf"), "TMPDIR": str(data.absolute() / "tmp")}
    numbers = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    (data / "tmp").mkdir(parents=True, exist_ok=True)
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **QUIET, **folders, **numbers},
        start_new_session=True,
        preexec_fn=limit,  # noqa: PLW1509 - this process has one thread
    ) as child:
        try:
            out, err = child.communicate(timeout=PATIENCE)
        except BaseException:
            os.killpg(child.pid, signal.SIGKILL)
            raise
    if child.returncode:
        lines = [line for line in err.splitlines() if line.strip()]
        raise RuntimeError(lines[-1] if lines else f"ended with {child.returncode}")
    outcome: Outcome = json.loads(out.splitlines()[-1])
    return outcome


# --- limits of memory


def limiter(megabytes: int, cgroup: Path | None) -> Callable[[], None]:
    """Return a function that moves the child into the cgroup, or limits its allocations without one."""

    def limit() -> None:
        if cgroup:
            (cgroup / "cgroup.procs").write_text(str(os.getpid()))
        else:
            resource.setrlimit(resource.RLIMIT_DATA, (megabytes << 20, megabytes << 20))

    return limit


def drop_pages(folder: Path) -> None:
    """Drop the files from the page cache."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main())
