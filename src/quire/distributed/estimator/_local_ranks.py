"""Ranks as processes of this machine."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from contextlib import ExitStack, closing, suppress

from quire.distributed.estimator._attempts import Attempt, LostRanksError, lost
from quire.distributed.estimator._child import FAILED, start_rank
from quire.distributed.estimator._job import Outcome
from quire.distributed.estimator._launcher import Launch
from quire.distributed.estimator._world import Seat

_PATIENCE = 20.0
"""So many seconds the other ranks have to end by themselves when one has failed."""


def launch_local(launch: Launch, attempt: Attempt) -> list[Outcome]:
    """Start so many ranks, and wait for what they make."""
    size = launch.size
    addresses = free_addresses("127.0.0.1", size)
    ranks = [start_rank(launch.job, attempt.folder, Seat(rank, size, addresses)) for rank in range(size)]
    try:
        wait_for(ranks, attempt)
    finally:
        for process in ranks:
            end(process)
    return attempt.outcomes(size)


def free_addresses(host: str, number: int) -> tuple[str, ...]:
    """So many ports that are free now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(closing(socket.socket())) for _ in range(number)]
        for one in sockets:
            one.bind((host, 0))
        return tuple(f"{host}:{one.getsockname()[1]}" for one in sockets)


def wait_for(ranks: list[subprocess.Popen[bytes]], attempt: Attempt) -> None:
    """Wait until all ranks are done. The first that fails is waited for, and the others are ended."""
    while True:
        codes = [process.poll() for process in ranks]
        failed = [(rank, code) for rank, code in enumerate(codes) if code]
        if failed:
            raise _failure(ranks, failed, attempt)
        if None not in codes:
            return
        time.sleep(0.02)


def _failure(ranks: list[subprocess.Popen[bytes]], failed: list[tuple[int, int]], attempt: Attempt) -> LostRanksError:
    """What happened: of a rank that was killed, and of others that miss it, the one that was killed is told of."""
    attempt.raise_error()
    until = time.monotonic() + (_PATIENCE if all(code > FAILED for _, code in failed) else 0.0)
    while time.monotonic() < until and any(process.poll() is None for process in ranks):
        time.sleep(0.02)
        attempt.raise_error()
    codes = [(rank, process.poll()) for rank, process in enumerate(ranks)]
    killed = [(rank, code) for rank, code in codes if code is not None and code < 0]
    rank, code = (killed or failed)[0]
    return lost(rank, f"killed by {_signal(-code)}" if code < 0 else f"its process ended with {code}")


def _signal(number: int) -> str:
    with suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"


def end(process: subprocess.Popen[bytes]) -> None:
    """End a rank that is still there."""
    if process.poll() is None:
        process.kill()
    process.wait()
    if process.stdin is not None:
        with suppress(OSError):
            process.stdin.close()
