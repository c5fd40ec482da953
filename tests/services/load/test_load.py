"""Load and faults at full size, which takes minutes; `nox -s services` runs them."""

from __future__ import annotations

import threading
import time
from collections import Counter

import pytest

from quire.services import Client
from tests.services.load_generator import (
    resident_memory,
    restart_server_under_load,
    send_malformed,
    send_requests,
    server_process,
)
from tests.services.sample_service import pictures
from tests.services.soak import KINDS, find_unexpected, soak

pytestmark = pytest.mark.needs("grpc", "grpc_health", "grpc_reflection")


def test_200_000_requests_from_64_clients_get_their_own_answers() -> None:
    with server_process() as (server, address):
        send_requests(address, clients=64, requests=6_400)
        before = resident_memory(server.pid)
        assert send_requests(address, clients=64, requests=200_000) == {"answered": 200_000}
        assert resident_memory(server.pid) - before < 64 << 20


@pytest.mark.timeout(900)
def test_64_clients_survive_5_kills_without_a_lost_or_mixed_answer() -> None:
    outcomes = restart_server_under_load(clients=64, kills=5, outage=2.0, uptime=3.0)
    assert outcomes.keys() == {"answered"}
    assert outcomes.total() > 1_000


@pytest.mark.timeout(1200)
def test_mixed_load_of_10_minutes_ends_as_expected() -> None:
    report = soak(seconds=600, clients=64, kills=5)
    assert find_unexpected(report) == {}, report.to_lines()
    assert set(report.outcomes) == set(KINDS)
    # Each arena of the allocator keeps the memory of its largest moment, so growth slows down before it stops.
    assert report.growth < 0.25, report.to_lines()


def test_killed_server_raises_unavailable_error_without_retries() -> None:
    outcomes: list[Counter[str]] = []
    with server_process() as (server, address):
        clients = threading.Thread(
            target=lambda: outcomes.append(send_requests(address, clients=16, requests=16_000, retries=0))
        )
        clients.start()
        time.sleep(3)
        server.kill()
        clients.join(120)
    [outcome] = outcomes
    assert outcome.keys() == {"answered", "ServiceUnavailableError"}
    assert outcome.total() == 16_000


def test_10_000_malformed_messages_are_refused_without_leaking_memory() -> None:
    with server_process() as (server, address):
        assert send_malformed(address, 2_000) == {"INVALID_ARGUMENT": 2_000}
        before = resident_memory(server.pid)
        assert send_malformed(address, 10_000, seed=1) == {"INVALID_ARGUMENT": 10_000}
        assert resident_memory(server.pid) - before < 16 << 20
        with Client(address) as client:
            assert client.embed_batched(pictures(2)).label == ["0", "1"]
