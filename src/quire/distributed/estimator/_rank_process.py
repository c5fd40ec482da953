"""A rank as a process: `python -m quire.distributed.estimator._rank_process JOB ATTEMPT RANK ADDRESS,ADDRESS,...`.

It ends when the process that started it does, because its standard input is then closed.
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
    sys.stdin.buffer.read()  # returns when the other end of the pipe is closed
    os._exit(LOST)  # at once: the main thread may wait for another rank inside native code


def main(job_file: str, attempt_folder: str, rank: str, addresses: str) -> int:
    """Run a rank, and leave its result in the folder of the attempt."""
    threading.Thread(target=_watch_parent, daemon=True).start()
    attempt, hosts = Attempt(Path(attempt_folder)), tuple(addresses.split(","))
    rank_info = RankInfo(int(rank), len(hosts), hosts)
    try:
        attempt.write_outcome(rank_info.rank, run_rank(read_job(Path(job_file)), rank_info))
    except Exception as error:  # noqa: BLE001 - it is raised by the process that started the ranks
        if is_lost(error):
            print(f"rank {rank}: {error}", file=sys.stderr)  # noqa: T201 - it is not reported otherwise
            return LOST
        attempt.write_error(rank_info.rank, error)
        return FAILED
    return 0


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    gc.collect()  # datasets remove their temporary folders
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # skips the shutdown of native threads, which may wait for each other
