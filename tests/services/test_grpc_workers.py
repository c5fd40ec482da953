"""Servers of several processes: supervision, rolling restarts, summed metrics."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import Self

from quire import DocumentArray
from quire.errors import OptionError, SchemaError, ServiceError, ServiceUnavailableError, UnknownOptionError
from quire.services import Client, Limits, WorkerServer, endpoint, serve, serve_async
from tests.services.load_generator import ROOT
from tests.services.sample_service import Picture, Score, embed, pictures, who
from tests.services.test_grpc_metrics import read_metrics, wait_for_sample
from tests.services.test_grpc_restarts import wait_until

pytestmark = pytest.mark.needs("grpc", "grpc_health", "grpc_reflection", "prometheus_client", "cloudpickle")


def exists(pid: int) -> bool:
    """Return whether a process runs, also one that is not a child of this process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


class Load:
    """Clients that call `who`, and check every answer."""

    def __init__(self, address: str, clients: int = 6) -> None:
        self.answers: Counter[int] = Counter()
        self._address, self._lock, self._done = address, threading.Lock(), threading.Event()
        self._pool = ThreadPoolExecutor(clients)
        self._running = [self._pool.submit(self._call, number * 1_000_000) for number in range(clients)]

    def _call(self, number: int) -> None:
        with Client(self._address) as client:
            while not self._done.is_set():
                [score] = client.who(pictures(1, start=number))
                assert score.of == str(number)
                with self._lock:
                    self.answers[int(score.value)] += 1
                number += 1
                time.sleep(0.01)  # so that new processes get a share of the processor

    def wait_for_answers(self, number: int) -> None:
        """Wait until clients have got this many answers more, or one has failed."""
        enough = self.answers.total() + number
        wait_until(lambda: self.answers.total() >= enough or any(each.done() for each in self._running))

    def __enter__(self) -> Self:
        self.wait_for_answers(20)
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        for each in self._running:
            each.result(60)  # raises what a call has raised
        self._pool.shutdown()


def collect_pids(address: str, number: int) -> Counter[int]:
    """Call `who` from new clients until this many processes have answered."""
    pids: Counter[int] = Counter()
    deadline = time.monotonic() + 60
    while len(pids) < number:
        assert time.monotonic() < deadline, pids
        with Client(address) as client:
            pids[int(client.who(pictures(1))[0].value)] += 1
    return pids


# --- calls


def test_workers_share_a_port_and_their_metrics_are_summed() -> None:
    factor = 3.0

    def scale(docs: DocumentArray[Picture]) -> DocumentArray[Score]:  # local, so it is sent by value
        return DocumentArray[Score]([Score(value=float(doc.pixels[0]) * factor, of=str(os.getpid())) for doc in docs])

    with serve([who, scale], workers=2, metrics=True) as server:
        assert server.endpoints.keys() == {"who", "scale"}
        assert server.address == f"127.0.0.1:{server.port}"
        pids = collect_pids(server.address, 2)
        assert set(pids) == set(server.worker_pids)
        with Client(server.address) as client:
            assert {score.value for score in client.scale(pictures(2))} == {0.0, 3.0}
        calls = pids.total()
        wait_for_sample(server.metrics_url, 'quire_requests_total{code="OK",endpoint="who"}', calls)

        # Counters include those of workers that were killed, and calls in flight do not.
        first, second = server.worker_pids
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: first not in server.worker_pids)
        assert second in server.worker_pids
        collect_pids(server.address, 2)
        samples = read_metrics(server.metrics_url)
        assert samples['quire_requests_total{code="OK",endpoint="who"}'] >= calls + 2
        assert samples['quire_request_seconds_count{endpoint="scale"}'] == 1
        assert samples['quire_requests_in_flight{endpoint="who"}'] == 0

        for workers in (None, 2):
            with pytest.raises(ServiceError, match="in use"):
                serve(embed, port=server.port, workers=workers)
        last_pids, url = server.worker_pids, server.metrics_url
    assert not any(exists(pid) for pid in last_pids)
    with pytest.raises(OSError, match="refused"):
        read_metrics(url)
    with serve(embed, port=server.port) as alone, Client(alone.address) as client:  # the port is free again
        assert client.embed(pictures(1)).label == ["0"]
        assert alone.port == server.port
    with serve(embed, port=server.port, workers=1) as again, Client(again.address) as client:
        assert client.embed(pictures(1)).label == ["0"]
        assert not again.wait(0.01)
        again.stop()
        assert again.wait()


def test_killed_worker_loses_no_idempotent_call() -> None:
    with serve(who, workers=2) as server, Load(server.address) as load:
        killed = []
        for turn in range(3):
            pid = server.worker_pids[turn % 2]
            killed.append(pid)
            os.kill(pid, signal.SIGKILL)
            load.wait_for_answers(20)
            wait_until(lambda pid=pid: pid not in server.worker_pids)  # type: ignore[misc]
        assert not set(server.worker_pids) & set(killed)
        assert len(collect_pids(server.address, 2)) == 2


# --- `quire serve --workers`


@contextmanager
def serving(*names: str, options: tuple[str, ...] = ()) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `quire serve --workers 2`, and yield the process and its address."""
    services = [f"tests.services.sample_service:{name}" for name in names]
    command = [sys.executable, "-m", "quire", "serve", *services, "--port", "0", "--workers", "2", "--json", *options]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            yield process, json.loads(process.stdout.readline())["address"]
        finally:
            process.kill()


def test_serve_command_restarts_on_sighup_and_drains_on_sigterm() -> None:
    with serving("who", "slow") as (process, address):
        before = set(collect_pids(address, 2))
        assert process.pid not in before
        with Load(address) as load:
            process.send_signal(signal.SIGHUP)
            wait_until(lambda: not any(exists(pid) for pid in before))
            load.wait_for_answers(20)
        after = set(collect_pids(address, 2))
        assert not before & after
        with Client(address) as client, ThreadPoolExecutor(1) as pool:
            client.contract()
            slow = pictures(1)
            slow[0].label = "1.0"
            running = pool.submit(client.slow, slow)
            time.sleep(0.4)
            process.send_signal(signal.SIGTERM)
            time.sleep(0.2)
            with pytest.raises(ServiceUnavailableError):  # no new calls
                client.slow(slow, timeout=5)
            assert running.result().label == ["1.0"]
        assert process.wait(20) == 0
        assert not any(exists(pid) for pid in after)


def test_workers_end_when_their_supervisor_is_killed() -> None:
    with serving("who") as (process, address):
        pids = collect_pids(address, 2)
        process.kill()
        wait_until(lambda: not any(exists(pid) for pid in pids))


def test_serve_command_counts_abandoned_calls_of_workers() -> None:
    with serving("slow", options=("--grace", "0.3")) as (process, address), Client(address) as client:
        client.contract()
        slow = pictures(1)
        slow[0].label = "3600"
        call = client.slow.future(slow)
        time.sleep(0.4)
        process.send_signal(signal.SIGTERM)
        with pytest.raises(ServiceUnavailableError):
            call.result()
        assert process.wait(60) == 1


# --- failures


class Fragile:
    """A service that cannot be created while a file exists."""

    def __init__(self) -> None:
        marker = Path(os.environ["QUIRE_TEST_MARKER"])
        if marker.exists():
            if marker.read_text() == "crash":
                os.kill(os.getpid(), signal.SIGSEGV)
            raise ValueError("no weights")

    @endpoint(idempotent=True)
    def who(self, docs: DocumentArray[Picture]) -> DocumentArray[Score]:
        return who(docs)


def test_worker_that_cannot_start_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    marker = tmp_path / "marker"
    monkeypatch.setenv("QUIRE_TEST_MARKER", str(marker))
    for text, message in (("fail", "ValueError: no weights"), ("crash", "before it could serve: .*SIGSEGV")):
        marker.write_text(text)
        with pytest.raises(ServiceError, match=message):
            serve(Fragile, workers=2)
    marker.unlink()
    with serve(Fragile, workers=2) as server, Client(server.address) as client:
        first, second = server.worker_pids
        marker.write_text("fail")
        with pytest.raises(ServiceError, match="no weights"):
            server.restart()
        assert server.worker_pids == [first, second]  # the old ones go on
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: caplog.text.count("ValueError: no weights") >= 2)
        assert client.who(pictures(1))[0].value == second
        marker.unlink()
        wait_until(lambda: first not in server.worker_pids)
        assert set(collect_pids(server.address, 2)) == set(server.worker_pids)
    assert "killed by SIGKILL" in caplog.text


def no_call(caller: Any) -> bool:
    return caller.endpoint == "Describe"


def test_options_reach_the_workers() -> None:
    with serve(who, workers=1, authorize=no_call, limits=Limits(max_request_bytes=5_000)) as server:
        with Client(server.address) as client:
            assert client.contract().endpoint("who")
            with pytest.raises(ServiceError, match="who"):
                client.who(pictures(1))
        with pytest.raises(OptionError, match="metrics=True"):
            server.metrics_url  # noqa: B018


class Locked:
    def __init__(self) -> None:
        self.lock = threading.Lock()

    def run(self, docs: DocumentArray[Picture]) -> DocumentArray[Picture]:
        return docs


def serve_with(service: object, **options: Any) -> Callable[[], WorkerServer]:
    return lambda: serve(service, **{"workers": 2, **options})


@pytest.mark.parametrize(
    ("start", "error", "message"),
    [
        (serve_with(who, workers=0), OptionError, "workers=0: use the number of processes"),
        (serve_with(who, workers=True), OptionError, "workers=True"),
        (serve_with(who, options=[("grpc.so_reuseport", 0)]), OptionError, "grpc.so_reuseport cannot be changed"),
        (serve_with(who, metrics=-1), OptionError, "metrics=-1"),
        (serve_with(Locked()), OptionError, "the service cannot be sent to other processes.*lock.*class instead"),
        (serve_with(who, interceptors=[threading.Lock()]), OptionError, "an option cannot be sent"),
        (serve_with(who, interceptors=["none"]), ServiceError, "interceptors: str is no grpc.ServerInterceptor"),
        (serve_with(pictures), SchemaError, "int cannot be sent"),
        (serve_with(who, worker=2), UnknownOptionError, "worker"),
        (lambda: serve_async(who, workers=2), UnknownOptionError, "workers"),  # type: ignore[call-arg]
        (serve_with(who, host="192.0.2.1"), ServiceError, "192.0.2.1:0 cannot be opened"),
    ],
)
def test_options_that_cannot_work_are_errors(start: Callable[[], object], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        start()
