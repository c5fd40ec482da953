"""Load and faults for service tests: concurrent clients, a server process, malformed messages."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from quire import DocumentArray
from quire.codec import encode_delimited
from quire.errors import ServiceError
from quire.services import Client, endpoint
from tests.services.sample_service import Picture, embed, pictures

ROOT = Path(__file__).parents[2]


@endpoint(idempotent=True, max_batch_size=64, max_wait=0.002)
def embed_batched(docs: DocumentArray[Picture]) -> DocumentArray[Picture]:
    return embed(docs)


@endpoint(idempotent=True)
def embed_alone(docs: DocumentArray[Picture]) -> DocumentArray[Picture]:
    return embed(docs)


@contextmanager
def server_process(port: int = 0, names: Sequence[str] = ()) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Serve endpoints, by default both, in a process; yield it and its address. It is killed at the end."""
    names = names or [f"{__name__}:{name}" for name in ("embed_batched", "embed_alone")]
    command = [sys.executable, "-m", "quire", "serve", *names, "--port", str(port)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().removeprefix("serving on ").strip()
        finally:
            process.kill()


def restart_server_under_load(clients: int, kills: int, outage: float, *, uptime: float = 1.0) -> Counter[str]:
    """Kill a server with SIGKILL and start it again on its port, while clients call it; count how the calls ended.

    Clients have the default options, and check every answer. `outage` and `uptime` are seconds without and with a
    server, in addition to the time that a process takes to start.
    """
    outcomes: Counter[str] = Counter()
    lock, done = threading.Lock(), threading.Event()

    def run_client(address: str, number: int) -> None:
        generator, turn = random.Random(number), 0
        with Client(address) as client:
            while not done.is_set():
                outcome = _send_request(client, generator, number * 1_000_000 + turn * 10)
                turn += 1
                with lock:
                    outcomes[outcome] += 1

    def wait_for_answers(number: int) -> None:
        """Wait until clients have got this many answers more."""
        enough, deadline = outcomes.total() + number, time.monotonic() + 120
        while outcomes.total() < enough and time.monotonic() < deadline:
            time.sleep(0.02)

    port, running = 0, []
    with ThreadPoolExecutor(clients) as pool:
        try:
            for turn in range(kills + 1):
                with server_process(port) as (_, address):  # which is killed at the end
                    if not running:
                        port = int(address.rpartition(":")[2])
                        running = [pool.submit(run_client, address, number) for number in range(clients)]
                    wait_for_answers(clients)
                    time.sleep(uptime)
                    if turn == kills:
                        done.set()
                        for each in running:
                            each.result(120)
                time.sleep(outage)
        finally:
            done.set()
    return outcomes


def send_requests(address: str, clients: int, requests: int, *, retries: int | None = None) -> Counter[str]:
    """Send requests from concurrent clients, check every answer, and count how the calls ended."""
    outcomes: Counter[str] = Counter()
    lock = threading.Lock()

    def run_client(number: int) -> None:
        generator, own_outcomes = random.Random(number), Counter[str]()
        with Client(address, retries=retries, timeout=60) as client:
            for turn in range(requests // clients):
                own_outcomes[_send_request(client, generator, number * 1_000_000 + turn * 10)] += 1
        with lock:
            outcomes.update(own_outcomes)

    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(run_client, range(clients)))
    return outcomes


def _send_request(client: Client, generator: random.Random, start: int) -> str:
    request = pictures(generator.choice((1, 1, 1, 2, 3)), start=start)
    try:
        answer = client[generator.choice(("embed_batched", "embed_alone"))](request)
    except ServiceError as error:
        return type(error).__name__
    assert answer.label == request.label
    assert answer["id"] == request["id"]
    embedding, expected = np.stack(answer.embedding), np.stack(request.pixels)[:, :2] * 2
    assert np.array_equal(embedding, expected), (embedding, expected)
    return "answered"


def send_malformed(address: str, number: int, seed: int = 0) -> Counter[str]:
    """Send messages with changed, missing or additional bytes, and count the status codes."""
    generator, codes = random.Random(seed), Counter[str]()
    message = pictures(3).stack().to_bytes()
    with grpc.insecure_channel(address) as channel:
        stream = channel.stream_stream("/quire.v1.Documents/embed_alone_stream")
        methods = [
            (channel.unary_unary("/quire.v1.Documents/embed_alone"), bytes),
            (channel.unary_unary("/quire.v1.Documents/embed_batched"), bytes),
            # In a typed message other fields are ignored, so the bytes begin with an invalid tag.
            (channel.unary_unary("/Service/EmbedAlone"), b"\x07".__add__),
            (lambda data: list(stream(iter([data]))), partial(encode_delimited, 1)),
        ]
        for _ in range(number):
            call, wrap = generator.choice(methods)
            codes[_call(call, wrap(corrupt(message, generator)))] += 1
    return codes


def corrupt(message: bytes, generator: random.Random) -> bytes:
    """Return a message that cannot be valid: it is cut, or begins with an invalid tag."""
    kind = generator.randrange(3)
    if kind == 0:
        return message[: generator.randrange(len(message) // 2, len(message) - 1)]
    if kind == 1:
        return bytes([generator.randrange(256) | 0x07]) + generator.randbytes(generator.randrange(200))
    at = generator.randrange(4, len(message))
    return b"\x07" + message[:at] + generator.randbytes(8) + message[at:]


def _call(call: Any, data: bytes) -> str:
    try:
        call(data)
    except grpc.RpcError as error:
        return str(error.code().name)
    return "answered"


def resident_memory(pid: int) -> int:
    """Return the resident memory of a process in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))
