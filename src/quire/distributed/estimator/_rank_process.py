"""A rank as a process of its own: `python -m quire.distributed.estimator._child JOB ATTEMPT RANK ADDRESS,ADDRESS,...`.

It ends when the process that started it does: it then finds its standard input closed.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from pathlib import Path

from quire.distributed.estimator._job import read_job
from quire.distributed.estimator._launch import FAILED, LOST, Attempt, is_lost
from quire.distributed.estimator._ranks import RankInfo
from quire.distributed.estimator._training import run_rank


def _watch_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(LOST)


def main(job_file: str, attempt_folder: str, rank: str, addresses: str) -> int:
    """Do the part of a rank, and leave what came of it in the folder of the attempt."""
    threading.Thread(target=_watch_parent, daemon=True).start()
    attempt, told = Attempt(Path(attempt_folder)), tuple(addresses.split(","))
    seat = RankInfo(int(rank), len(told), told)
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
