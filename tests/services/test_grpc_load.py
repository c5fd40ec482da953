"""A small part of the load and the faults; `nox -s services` runs them large."""

from __future__ import annotations

import threading

import pytest

from quire.services import Client
from tests.services.gallery import pictures
from tests.services.pressure import ask, malformed, process

pytestmark = pytest.mark.needs("grpc", "grpc_health", "grpc_reflection")


def test_every_answer_is_to_its_question() -> None:
    with process() as (_, address):
        assert ask(address, clients=16, requests=1_600) == {"answered": 1_600}


def test_a_server_killed_in_the_middle_loses_no_call_that_may_be_repeated() -> None:
    with process() as (first, address):
        kill = threading.Timer(0.5, first.kill)
        kill.start()
        done: list[object] = []
        asking = threading.Thread(target=lambda: done.append(ask(address, clients=4, requests=2_400, retries=30)))
        asking.start()
        first.wait(20)
        with process(int(address.rpartition(":")[2])):
            asking.join(60)
    assert done == [{"answered": 2_400}]


def test_malformed_messages_are_refused_and_the_server_lives_on() -> None:
    with process() as (server, address):
        assert malformed(address, 400) == {"INVALID_ARGUMENT": 400}
        with Client(address) as client:
            assert client.alone(pictures(1)).label == ["0"]
        assert server.poll() is None
