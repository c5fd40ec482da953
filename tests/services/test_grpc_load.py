"""Load and faults at small size; `nox -s services` runs them at full size."""

from __future__ import annotations

import pytest

from quire.services import Client
from tests.services.load_generator import send_malformed, send_requests, server_process
from tests.services.sample_service import pictures
from tests.services.soak import KINDS, find_unexpected, soak

pytestmark = pytest.mark.needs("grpc", "grpc_health", "grpc_reflection")


def test_concurrent_clients_get_their_own_answers() -> None:
    with server_process() as (_, address):
        assert send_requests(address, clients=16, requests=1_600) == {"answered": 1_600}


def test_mixed_load_with_a_killed_server_ends_as_expected() -> None:
    """Unary calls, streams, slow readers, short deadlines, malformed and oversized messages, and a kill."""
    report = soak(seconds=6, clients=8, kills=1)
    assert find_unexpected(report) == {}
    assert set(report.outcomes) == set(KINDS)
    assert report.outcomes["unary"]["answered"] > 5


def test_server_survives_malformed_messages() -> None:
    with server_process() as (server, address):
        assert send_malformed(address, 400) == {"INVALID_ARGUMENT": 400}
        with Client(address) as client:
            assert client.embed_alone(pictures(1)).label == ["0"]
        assert server.poll() is None
