"""A rank as a process of its own: `python -m quire.distributed.estimator._child JOB ATTEMPT RANK ADDRESS,ADDRESS,...`.

It ends when the process that started it does: it then finds its standard input closed.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

from quire.distributed.estimator._attempts import Attempt, is_lost
from quire.distributed.estimator._loop import run_rank
from quire.distributed.estimator._shipping import paths_of, read_job
from quire.distributed.estimator._world import Seat

_MODULE = "quire.distributed.estimator._child"
FAILED, LOST = 1, 75
"""What it ends with when something was raised, and when only another rank is gone."""


def start_rank(job: Path, attempt: Path, seat: Seat) -> subprocess.Popen[bytes]:
    """Start a rank; its environment tells the ranks as launchers do."""
    host, _, port = seat.addresses[0].rpartition(":")
    cores = max(1, (os.cpu_count() or 1) // seat.size)
    environment = {
        "OMP_NUM_THREADS": str(cores),
        "TF_CPP_MIN_LOG_LEVEL": "2",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(_paths(job)),
        "RANK": str(seat.rank),
        "WORLD_SIZE": str(seat.size),
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
    }
    command = [sys.executable, "-m", _MODULE, str(job), str(attempt), str(seat.rank), ",".join(seat.addresses)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)  # noqa: S603 - ourselves


def _paths(job: Path) -> list[str]:
    """Where this process imports from, and then the driver, whose functions and classes the job may name."""
    mine = [entry or str(Path.cwd()) for entry in sys.path]
    return list(dict.fromkeys([*mine, *json.loads(paths_of(job).read_text())]))


def _watch_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(LOST)


def main(job_file: str, attempt_folder: str, rank: str, addresses: str) -> int:
    """Do the part of a rank, and leave what came of it in the folder of the attempt."""
    threading.Thread(target=_watch_parent, daemon=True).start()
    attempt, told = Attempt(Path(attempt_folder)), tuple(addresses.split(","))
    seat = Seat(int(rank), len(told), told)
    try:
        attempt.keep(seat.rank, run_rank(read_job(Path(job_file)), seat))
    except Exception as error:  # noqa: BLE001 - it is raised where the ranks were started
        if is_lost(error):
            print(f"rank {rank}: {error}", file=sys.stderr)  # noqa: T201 - nobody else hears of it
            return LOST
        attempt.keep_error(seat.rank, error)
        return FAILED
    return 0


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    gc.collect()  # what datasets keep in folders is removed with them
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # without the ends of native threads, which may wait for each other
