"""Many clients, a server that dies, messages that are none: what the load tests do, small in CI and large in nox."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from quire import DocumentArray
from quire.codec._wire import delimited
from quire.errors import ServiceError
from quire.services import Client, endpoint
from tests.services.gallery import Picture, embed, pictures

ROOT = Path(__file__).parents[2]


@endpoint(idempotent=True, max_batch_size=64, max_wait=0.002)
def together(docs: DocumentArray[Picture]) -> DocumentArray[Picture]:
    return embed(docs)


@endpoint(idempotent=True)
def alone(docs: DocumentArray[Picture]) -> DocumentArray[Picture]:
    return embed(docs)


@contextmanager
def process(port: int = 0) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that serves both, and its address."""
    names = [f"{__name__}:{name}" for name in ("together", "alone")]
    command = [sys.executable, "-m", "quire", "serve", *names, "--port", str(port)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    ) as made:
        try:
            assert made.stdout is not None
            yield made, made.stdout.readline().removeprefix("serving on ").strip()
        finally:
            made.kill()


def ask(address: str, clients: int, requests: int, *, retries: int = 4) -> Counter[str]:
    """So many requests from so many clients; how they ended. An answer that is not to its question is an error."""
    ended: Counter[str] = Counter()
    lock = threading.Lock()

    def one_client(number: int) -> None:
        draw, mine = random.Random(number), Counter[str]()
        with Client(address, retries=retries, timeout=60) as client:
            for turn in range(requests // clients):
                mine[_asked(client, draw, number * 1_000_000 + turn * 10)] += 1
        with lock:
            ended.update(mine)

    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(one_client, range(clients)))
    return ended


def _asked(client: Client, draw: random.Random, start: int) -> str:
    question = pictures(draw.choice((1, 1, 1, 2, 3)), start=start)
    try:
        answer = client[draw.choice(("together", "alone"))](question)
    except ServiceError as error:
        return type(error).__name__
    assert answer.label == question.label
    assert answer["id"] == question["id"]
    found, expected = np.stack(answer.embedding), np.stack(question.pixels)[:, :2] * 2
    assert np.array_equal(found, expected), (found, expected)
    return "answered"


def malformed(address: str, number: int, seed: int = 0) -> Counter[str]:
    """So many messages with bytes that are altered, cut, or put in; the codes with which they ended."""
    draw, ended = random.Random(seed), Counter[str]()
    good = pictures(3).stack().to_bytes()
    with grpc.insecure_channel(address) as channel:
        methods = [
            (channel.unary_unary("/quire.v1.Documents/alone"), bytes),
            (channel.unary_unary("/quire.v1.Documents/together"), bytes),
            (channel.unary_unary("/Service/Alone"), b"\x07".__add__),  # a message of other fields is an empty one there
            (_gathered(channel.stream_stream("/quire.v1.Documents/alone_stream")), partial(delimited, 1)),
        ]
        for _ in range(number):
            call, wrapped = draw.choice(methods)
            ended[_sent(call, wrapped(_altered(good, draw)))] += 1
    return ended


def _altered(good: bytes, draw: random.Random) -> bytes:
    """A message that cannot be right: it is cut, or begins with what no message begins with."""
    kind = draw.randrange(3)
    if kind == 0:
        return good[: draw.randrange(len(good) // 2, len(good) - 1)]
    if kind == 1:
        return bytes([draw.randrange(256) | 0x07]) + draw.randbytes(draw.randrange(200))
    at = draw.randrange(4, len(good))
    return b"\x07" + good[:at] + draw.randbytes(8) + good[at:]


def _gathered(call: Any) -> Any:
    return lambda data: list(call(iter([data])))


def _sent(call: Any, data: bytes) -> str:
    try:
        call(data)
    except grpc.RpcError as error:
        return str(error.code().name)
    return "answered"


def resident(pid: int) -> int:
    """The bytes of memory that a process has."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))
