"""Load and faults at small size; `nox -s services` runs them at full size."""

from __future__ import annotations

import pytest

from quire.services import Client
from tests.services.load_generator import send_malformed, send_requests, server_process
from tests.services.sample_service import pictures

pytestmark = pytest.mark.needs("grpc", "grpc_health", "grpc_reflection")


def test_concurrent_clients_get_their_own_answers() -> None:
    with server_process() as (_, address):
        assert send_requests(address, clients=16, requests=1_600) == {"answered": 1_600}


def test_server_survives_malformed_messages() -> None:
    with server_process() as (server, address):
        assert send_malformed(address, 400) == {"INVALID_ARGUMENT": 400}
        with Client(address) as client:
            assert client.embed_alone(pictures(1)).label == ["0"]
        assert server.poll() is None
