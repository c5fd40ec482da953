"""`quire serve` in a process of its own: graceful shutdown, kills and errors."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from quire import DocumentArray
from quire.errors import QuireError, ServiceUnavailableError
from quire.services import Client
from tests.services.sample_service import Picture, pictures

pytestmark = pytest.mark.needs("grpc", "grpc_health", "grpc_reflection")
ROOT = Path(__file__).parents[2]


@contextmanager
def serving(*names: str, port: int = 0, options: tuple[str, ...] = ()) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `quire serve`, and yield the process and its address."""
    services = [f"tests.services.sample_service:{name}" for name in names]
    command = [sys.executable, "-m", "quire", "serve", *services, "--port", str(port), *options]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().removeprefix("serving on ").strip()
        finally:
            process.kill()


def slow_request(seconds: float) -> DocumentArray[Picture]:
    return DocumentArray[Picture]([Picture(pixels=np.zeros(4, np.float32), label=str(seconds))])


def test_serve_command_finishes_running_calls_on_sigterm() -> None:
    with serving("embed", "slow") as (process, address), Client(address) as client:
        assert client.endpoints().keys() == {"embed", "slow"}
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(client.slow, slow_request(1.0))
            time.sleep(0.4)
            process.send_signal(signal.SIGTERM)
            time.sleep(0.2)
            with pytest.raises(ServiceUnavailableError):  # no new calls
                client.embed(pictures(1), timeout=5)
            assert running.result().label == ["1.0"]  # but running calls are answered
        assert process.wait(10) == 0


def test_serve_command_stops_after_grace() -> None:
    with serving("slow", options=("--grace", "0.3")) as (process, address), Client(address) as client:
        client.endpoints()
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(client.slow, slow_request(3600))
            time.sleep(0.4)
            process.send_signal(signal.SIGTERM)
            with pytest.raises(QuireError):
                running.result()
        assert process.wait(60) == 1  # although the thread of the call still runs


def test_serve_command_stops_on_ctrl_c() -> None:
    with serving("embed") as (process, address), Client(address) as client:
        assert client.embed(pictures(1)).label == ["0"]
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0


def test_killed_server_fails_calls_and_idempotent_ones_are_retried() -> None:
    """Only idempotent calls are retried: how far others came is unknown."""
    with serving("who", "slow") as (process, address), Client(address) as client:
        first = client.who(pictures(1))[0].value
        assert first == process.pid
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(client.slow, slow_request(5))
            time.sleep(0.4)
            process.kill()
            process.wait(10)
            with pytest.raises(ServiceUnavailableError, match=address):
                running.result(10)
        answers: list[float] = []
        caller = threading.Thread(target=lambda: answers.append(client.who(pictures(1))[0].value))
        caller.start()  # while there is no server
        with serving("who", port=int(address.rpartition(":")[2])) as (second, _):
            caller.join(30)
            assert answers == [second.pid]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tests.services.sample_service:embedd"], "has no 'embedd'. Did you mean 'embed'"),
        (["tests.services.sample_service:pictures", "--port", "0"], "pictures(number): int cannot be sent"),
    ],
)
def test_serve_command_reports_errors_without_traceback(arguments: list[str], message: str) -> None:
    command = [sys.executable, "-m", "quire", "serve", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=30)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr
