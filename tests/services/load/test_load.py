"""Load and faults, large: minutes, so only `nox -s services` runs them."""

from __future__ import annotations

import threading
import time
from collections import Counter

import pytest

from quire.services import Client
from tests.services.gallery import pictures
from tests.services.pressure import ask, malformed, process, resident

pytestmark = pytest.mark.needs("grpc", "grpc_health", "grpc_reflection")


def test_200_000_requests_from_64_clients_are_all_answered_and_none_mixed() -> None:
    with process() as (server, address):
        ask(address, clients=64, requests=6_400)
        before = resident(server.pid)
        assert ask(address, clients=64, requests=200_000) == {"answered": 200_000}
        assert resident(server.pid) - before < 64 << 20


def test_a_server_killed_again_and_again_loses_nothing() -> None:
    done: list[Counter[str]] = []
    with process() as (server, address):
        port = int(address.rpartition(":")[2])
        asking = threading.Thread(target=lambda: done.append(ask(address, clients=64, requests=32_000, retries=60)))
        asking.start()
        time.sleep(3)
        server.kill()
        server.wait(20)
    for pause in (4, 4, None):
        with process(port) as (server, _):
            if pause is None:
                asking.join(300)
            else:
                time.sleep(pause)
                server.kill()
                server.wait(20)
    assert done == [{"answered": 32_000}]


def test_without_retries_the_errors_are_typed() -> None:
    done: list[Counter[str]] = []
    with process() as (server, address):
        asking = threading.Thread(target=lambda: done.append(ask(address, clients=16, requests=16_000, retries=0)))
        asking.start()
        time.sleep(3)
        server.kill()
        asking.join(120)
    [ended] = done
    assert ended.keys() == {"answered", "ServiceUnavailableError"}
    assert ended.total() == 16_000


def test_10_000_malformed_messages_are_refused_and_memory_is_flat() -> None:
    with process() as (server, address):
        assert malformed(address, 2_000) == {"INVALID_ARGUMENT": 2_000}
        before = resident(server.pid)
        assert malformed(address, 10_000, seed=1) == {"INVALID_ARGUMENT": 10_000}
        assert resident(server.pid) - before < 16 << 20
        with Client(address) as client:
            assert client.together(pictures(2)).label == ["0", "1"]
