"""A mixed load for as long as one wants: unary, batched and streamed calls with everything that goes wrong.

    python -m tests.services.soak --seconds 600 --clients 64

Servers are killed and restarted in the first part of the time; the last server then runs alone, so that the growth of
its memory is that of a server under load, and not of its start. Every answer is checked.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np

from quire import DocumentArray
from quire.errors import ServiceError
from quire.services import Client, endpoint
from tests.services.load_generator import corrupt, resident_memory, server_process
from tests.services.sample_service import Picture, embed, pictures

PART_WITH_KILLS = 0.4
WARM_UP = 0.25
"""The part of the life of the last server after which its memory is compared."""
_SLOW_PAUSE = 0.02


def repeat(parts: Iterator[DocumentArray[Picture]]) -> Iterator[DocumentArray[Picture]]:
    """Answer a stream with a stream."""
    for part in parts:
        yield embed(part)


@endpoint(idempotent=True)
def linger(docs: DocumentArray[Picture]) -> DocumentArray[Picture]:
    """Take longer than the deadline of the caller."""
    time.sleep(0.05)
    return docs


@dataclass
class Report:
    """How the calls of a run ended, how long they took, and the memory of the last server."""

    seconds: float
    outcomes: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    latencies: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    memory: list[tuple[float, int]] = field(default_factory=list)
    """The resident bytes of the last server, and the seconds after its start."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, kind: str, outcome: str, seconds: float) -> None:
        """Count a call."""
        with self._lock:
            self.outcomes[kind][outcome] += 1
            if outcome == "answered":
                self.latencies[kind].append(seconds)

    @property
    def growth(self) -> float:
        """The growth of the memory after the warm-up: the median of the last quarter by that of the one after it."""
        life = self.memory[-1][0]
        after = [size for second, size in self.memory if WARM_UP * life <= second < 2 * WARM_UP * life]
        last = [size for second, size in self.memory if second >= (1 - WARM_UP) * life]
        return statistics.median(last) / statistics.median(after) - 1

    def to_lines(self) -> list[str]:
        """Return a table of the calls, and the memory."""
        lines = ["| calls | number | outcome | p50 | p99 |", "|---|---|---|---|---|"]
        for kind, outcomes in self.outcomes.items():
            spent = sorted(self.latencies[kind])
            times = [f"{1000 * spent[int(part * (len(spent) - 1))]:,.0f} ms" if spent else "" for part in (0.5, 0.99)]
            ends = ", ".join(f"{number:,} {name}" for name, number in outcomes.most_common())
            lines.append(f"| {kind} | {outcomes.total():,} | {ends} | {times[0]} | {times[1]} |")
        tenths = [self.memory[int(part / 10 * (len(self.memory) - 1))][1] / 1e6 for part in range(1, 11)]
        lines.append(f"memory of the server in MB, ten times: {', '.join(f'{size:.0f}' for size in tenths)}")
        lines.append(f"growth after the warm-up: {100 * self.growth:+.1f} %")
        return lines


# --- calls


def call_unary(client: Client, _: Any, chance: random.Random) -> str:
    """Call an endpoint with one to three rows, with or without dynamic batching."""
    request = pictures(chance.choice((1, 1, 2, 3)), start=chance.randrange(1 << 20))
    name = chance.choice(("embed_batched", "embed_alone"))
    check_answer(request, client[name](request))
    return "answered"


def call_large(client: Client, _: Any, chance: random.Random) -> str:
    """Call an endpoint with many rows."""
    request = pictures(500, start=chance.randrange(1 << 20))
    check_answer(request, client.embed_batched(request))
    return "answered"


def call_stream(client: Client, _: Any, chance: random.Random) -> str:
    """Send a stream of values, and read that of the answers; sometimes slowly, sometimes not to its end."""
    requests = [pictures(20, start=chance.randrange(1 << 20)) for _ in range(8)]
    pause, stop = chance.choice((0, 0, _SLOW_PAUSE)), chance.choice((3, 8, 8))
    answers = client.repeat.stream(requests, timeout=60)
    for number, answer in zip(range(stop), answers, strict=False):
        check_answer(requests[number], answer)
        time.sleep(pause)
    answers.close()  # type: ignore[attr-defined]
    return "answered"


def call_with_short_deadline(client: Client, _: Any, chance: random.Random) -> str:
    """Call a function that takes longer than the deadline."""
    client.linger(pictures(1), timeout=chance.uniform(0.005, 0.03))
    return "answered"


def send_malformed(_: Client, channel: Any, chance: random.Random) -> str:
    """Send bytes that are no message."""
    data = corrupt(pictures(3).stack().to_bytes(), chance)
    return call_raw(channel, chance.choice(("embed_alone", "embed_batched")), data)


def send_oversized(_: Client, channel: Any, chance: random.Random) -> str:
    """Send a message that is larger than the server takes."""
    return call_raw(channel, "embed_alone", bytes(5 << 20 if chance.random() < 0.9 else 24 << 20))


def call_raw(channel: Any, name: str, data: bytes) -> str:
    """Send bytes, and return the code."""
    try:
        channel.unary_unary(f"/quire.v1.Documents/{name}")(data, timeout=60)
    except grpc.RpcError as error:
        return str(error.code().name)
    return "answered"


def check_answer(request: DocumentArray[Picture], answer: Any) -> None:
    """Raise an AssertionError for an answer of another request."""
    assert answer.label == request.label
    assert np.array_equal(np.stack(answer.embedding), np.stack(request.pixels)[:, :2] * 2)


KINDS: dict[str, tuple[Callable[[Client, Any, random.Random], str], int, set[str]]] = {
    "unary": (call_unary, 60, {"answered"}),
    "500 rows": (call_large, 4, {"answered"}),
    # A stream is not sent again: it may be lost with its server.
    "stream": (call_stream, 10, {"answered", "ServiceUnavailableError"}),
    # A client that has no processor at its deadline may find the answer first.
    "short deadline": (call_with_short_deadline, 4, {"ServiceTimeoutError", "ServiceUnavailableError", "answered"}),
    "malformed": (send_malformed, 4, {"INVALID_ARGUMENT", "UNAVAILABLE"}),
    # The server may close the stream while the message is being sent.
    "oversized": (send_oversized, 1, {"RESOURCE_EXHAUSTED", "UNAVAILABLE"}),
}
"""The kinds of calls: a function, how often it is chosen, and how its calls may end."""
SERVED = [
    *("tests.services.load_generator:embed_batched", "tests.services.load_generator:embed_alone"),
    *("tests.services.soak:repeat", "tests.services.soak:linger"),
]


def soak(seconds: float, clients: int, kills: int) -> Report:
    """Run the load, and return how its calls ended; a wrong answer raises an AssertionError."""
    report, done, pool = Report(seconds), threading.Event(), ThreadPoolExecutor(clients)
    names, weights = list(KINDS), [weight for _, weight, _ in KINDS.values()]

    def run_client(address: str, number: int) -> None:
        chance, turn = random.Random(number), number
        with Client(address, timeout=120) as client, grpc.insecure_channel(address) as channel:
            client.contract()
            while not done.is_set():
                # Each client begins with another kind, so that a short run has all of them.
                [kind] = [names[turn]] if turn < len(names) else chance.choices(names, weights)
                turn = len(names)
                started = time.monotonic()
                try:
                    outcome = KINDS[kind][0](client, channel, chance)
                except ServiceError as error:
                    outcome = type(error).__name__
                report.add(kind, outcome, time.monotonic() - started)

    began, port, running = time.monotonic(), 0, []
    try:
        for turn in range(kills + 1):
            with server_process(port, SERVED) as (server, address):  # which is killed at the end
                started = time.monotonic()
                if not running:
                    port = int(address.rpartition(":")[2])
                    running = [pool.submit(run_client, address, number) for number in range(clients)]
                share = PART_WITH_KILLS * (turn + 1) / kills if turn < kills else 1
                while time.monotonic() < began + share * seconds and not any(each.done() for each in running):
                    time.sleep(min(0.5, seconds / 200))
                    if turn == kills:
                        report.memory.append((time.monotonic() - started, resident_memory(server.pid)))
                if turn == kills:
                    done.set()
                    for each in running:
                        each.result(180)
            time.sleep(min(2.0, seconds / 60))
    finally:
        done.set()
        with suppress(RuntimeError):
            pool.shutdown(wait=True)
    return report


def find_unexpected(report: Report) -> dict[str, set[str]]:
    """Return the outcomes that calls must not have."""
    unexpected = {kind: set(outcomes) - KINDS[kind][2] for kind, outcomes in report.outcomes.items()}
    return {kind: outcomes for kind, outcomes in unexpected.items() if outcomes}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--kills", type=int, default=5)
    chosen = parser.parse_args()
    result = soak(chosen.seconds, chosen.clients, chosen.kills)
    sys.stdout.write("\n".join([*result.to_lines(), str(find_unexpected(result) or "")]) + "\n")
