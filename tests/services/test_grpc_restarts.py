"""Servers that are killed, restarted and upgraded while clients are connected."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from quire import BaseDocument, DocumentArray
from quire.errors import (
    DecodeError,
    OptionError,
    PathError,
    SchemaError,
    ServiceError,
    ServiceLimitError,
    ServiceTimeoutError,
    ServiceUnavailableError,
)
from quire.services import AsyncClient, Client, Limits, endpoint, serve, serve_async
from quire.services._client import Attempts
from tests.services.load_generator import restart_server_under_load, server_process
from tests.services.sample_service import Picture, Score, embed, pictures, running

pytestmark = pytest.mark.needs("grpc", "grpc_health", "grpc_reflection")


@endpoint(idempotent=True)
def label(docs: DocumentArray[Picture]) -> DocumentArray[Picture]:
    return docs


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# --- restarts


def test_every_idempotent_call_is_answered_while_a_server_is_killed_and_restarted() -> None:
    """With the default options: no call fails, none is lost, and none gets the answer of another."""
    outcomes = restart_server_under_load(clients=6, kills=2, outage=0.5, uptime=0.3)
    assert outcomes.keys() == {"answered"}


def test_async_calls_wait_for_a_server_that_is_restarted() -> None:
    async def main() -> None:
        with server_process() as (first, address):
            client = AsyncClient(address)
            assert (await client.embed_alone(pictures(1))).label == ["0"]
            first.kill()
        calls = [asyncio.create_task(client.embed_alone(pictures(1, start=i))) for i in range(8)]
        await asyncio.sleep(0.3)
        with server_process(int(address.rpartition(":")[2])):
            assert [answer.label for answer in await asyncio.gather(*calls)] == [[str(i)] for i in range(8)]
            await client.close()

    asyncio.run(main())


def test_calls_that_are_not_idempotent_wait_for_a_server_before_they_are_sent() -> None:
    answers: list[Any] = []
    with serve(embed) as first, Client(first.address) as client:
        assert client.embed(pictures(1)).label == ["0"]
        first.stop(0)
        wait_until(lambda: not client._is_connected())  # a call on the old connection would be lost
        callers = [
            threading.Thread(target=lambda: answers.append(client.embed(pictures(1)).label)),
            threading.Thread(target=lambda: answers.append(client.embed.future(pictures(1)).result().label)),
            threading.Thread(target=lambda: answers.append(next(client.embed.stream([pictures(1)], timeout=60)).label)),
        ]
        for caller in callers:
            caller.start()
        time.sleep(0.2)
        with serve(embed, port=first.port):
            for caller in callers:
                caller.join(60)
    assert answers == [["0"]] * 3


@pytest.mark.parametrize("kind", ["threads", "asyncio"])
def test_calls_that_are_not_idempotent_are_sent_once(kind: str) -> None:
    calls: list[int] = []

    def vanish(docs: DocumentArray[Picture]) -> DocumentArray[Picture]:
        calls.append(len(docs))
        raise ServiceUnavailableError("as if the connection had been lost")

    with serve(vanish) as server:
        if kind == "threads":
            with Client(server.address) as client, pytest.raises(ServiceUnavailableError):
                client.vanish(pictures(1))
        else:

            async def main() -> None:
                async with AsyncClient(server.address) as client:
                    with pytest.raises(ServiceUnavailableError):
                        await client.vanish(pictures(1))

            asyncio.run(main())
    assert calls == [1]


def test_calls_fail_at_their_deadline_while_the_server_is_gone() -> None:
    with serve([label, embed]) as server, Client(server.address) as client:
        client.contract()
        server.stop(0)
        for call in (
            client.label,
            client.embed,
            lambda docs, timeout: client.label.future(docs, timeout=timeout).result(),
        ):
            started = time.monotonic()
            with pytest.raises(
                ServiceUnavailableError, match="could not be reached again within the timeout"
            ) as caught:
                call(pictures(1), timeout=0.5)
            assert time.monotonic() - started >= 0.4
            assert caught.value.code == "UNAVAILABLE"

        async def main() -> None:
            with serve(label) as server:
                async with AsyncClient(server.address) as client:
                    await client.contract()
                    await asyncio.to_thread(server.stop, 0)
                    with pytest.raises(ServiceUnavailableError, match="within the timeout"):
                        await client.label(pictures(1), timeout=0.5)

        asyncio.run(main())


def test_slow_answers_of_a_connected_server_are_timeouts() -> None:
    gate = threading.Event()

    @endpoint(idempotent=True)
    def wait(docs: DocumentArray[Picture]) -> DocumentArray[Picture]:
        gate.wait(60)
        return docs

    with serve(wait) as server, Client(server.address) as client:
        with pytest.raises(ServiceTimeoutError):
            client.wait(pictures(1), timeout=0.3)

        async def main() -> None:
            async with AsyncClient(server.address) as client:
                with pytest.raises(ServiceTimeoutError):
                    await client.wait(pictures(1), timeout=0.3)

        asyncio.run(main())
        gate.set()


def test_server_that_was_never_reached_is_given_up_before_the_timeout() -> None:
    started = time.monotonic()
    with Client("127.0.0.1:1", timeout=600) as client, pytest.raises(ServiceUnavailableError, match="127.0.0.1:1"):
        client.embed(pictures(1))
    assert time.monotonic() - started < 60  # 5 seconds on an idle machine


def test_first_call_waits_for_a_server_that_starts() -> None:
    with serve(embed) as reserved:
        port = reserved.port
    with Client(f"127.0.0.1:{port}") as client:
        answers: list[Any] = []
        caller = threading.Thread(target=lambda: answers.append(client.embed(pictures(1)).label))
        caller.start()
        time.sleep(0.3)
        with serve(embed, port=port):
            caller.join(60)
    assert answers == [["0"]]


def pauses(attempts: Attempts, error: ServiceError, number: int) -> list[float]:
    return [attempts.next_pause(error) for _ in range(number)]


def test_pauses_double_up_to_a_limit_and_end_at_the_deadline() -> None:
    unavailable, busy = ServiceUnavailableError("gone"), ServiceLimitError("busy")
    for error, longest in ((unavailable, 0.75), (busy, 3.0)):
        waits = pauses(Attempts(None, 600, connected=True), error, 50)
        assert 0.025 <= waits[0] <= 0.075
        assert max(waits) <= longest
        assert min(waits[10:]) >= longest / 3
    near = Attempts(None, 10, connected=True, started=time.monotonic() - 9.9)
    assert pauses(near, busy, 20)[-1] < 0.1  # shortened, so that the last attempt is before the deadline
    for attempts in (
        Attempts(None, 10, connected=True, started=time.monotonic() - 10),
        Attempts(None, 600, connected=False, started=time.monotonic() - 5),
        Attempts(0, 600, connected=True),
        Attempts(None, 600, connected=True, repeatable=False),
    ):
        with pytest.raises(ServiceUnavailableError, match="gone"):
            attempts.next_pause(unavailable)
    assert pauses(Attempts(None, None, connected=True, retried=10_000), unavailable, 1)[0] <= 0.75
    with pytest.raises(ServiceLimitError):
        pauses(Attempts(3, 600, connected=True), busy, 4)


@pytest.mark.parametrize("retries", [-1, 1.5, True, "3"])
def test_retries_must_be_a_whole_number(retries: Any) -> None:
    with pytest.raises(OptionError, match="retries="):
        Client("127.0.0.1:1", retries=retries)


# --- upgrades


def added(docs: DocumentArray[Picture]) -> DocumentArray[Score]:
    return DocumentArray[Score]([Score(value=1.0, of=doc.label) for doc in docs])


class Wide(BaseDocument):
    pixels: Any
    label: str = ""
    weight: float


@endpoint(name="label")
def label_wide(docs: DocumentArray[Wide]) -> DocumentArray[Wide]:
    return docs


def test_connected_client_calls_an_endpoint_that_an_upgrade_adds() -> None:
    with serve(label) as first, Client(first.address) as client:
        client.label(pictures(1))
        with pytest.raises(PathError, match="no endpoint 'added'"):
            client.added(pictures(1))
        first.stop(0)
        with serve([label, added, running], port=first.port):
            assert client.label(pictures(1)).label == ["0"]  # its response has the new fingerprint
            assert client.endpoints().keys() == {"label", "added", "running"}
            assert client.added(pictures(1)).of == ["0"]
    with serve(label) as first, Client(first.address) as client:
        client.label(pictures(1))
        first.stop(0)
        with serve([label, added, running], port=first.port):  # without a response in between
            client.label.future(pictures(1)).cancel()
            wait_until(client._is_connected)
            assert [score.of for score in client.running(iter(pictures(2)), timeout=60)] == ["0", "1"]


def test_connected_client_notices_a_changed_schema() -> None:
    with serve(label) as first, Client(first.address) as client:
        client.label(pictures(1))
        first.stop(0)
        with serve(label_wide, port=first.port) as second:
            with pytest.raises(DecodeError, match="Wide.weight"):  # the server refuses it
                client.label(pictures(1))
            with pytest.raises(SchemaError, match="Wide.weight"):
                client.label(pictures(1))
            second.stop(0)
            with serve(label, port=first.port):  # a rollback: the schema does not fit, so it is read again
                assert call_until_reconnected(client) == ["0"]


def call_until_reconnected(client: Client) -> Any:
    """Call while the schema does not fit: reading the description again does not wait for a connection."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            return client.label(pictures(1)).label
        except SchemaError:
            time.sleep(0.05)
    raise AssertionError("the description was not read again")


def test_connected_client_notices_a_higher_limit() -> None:
    with serve(label, limits=Limits(max_request_bytes=2_000)) as first, Client(first.address) as client:
        with pytest.raises(ServiceLimitError):
            client.label(pictures(1_000))
        first.stop(0)
        with serve(label, port=first.port):
            assert client.label(pictures(1)).label == ["0"]
            assert len(client.label(pictures(1_000))) == 1_000


def test_async_client_notices_an_upgrade() -> None:
    async def main() -> None:
        async with serve_async(label) as first, AsyncClient(first.address) as client:
            await client.label(pictures(1))
            with pytest.raises(PathError):
                await client.added(pictures(1))
            await first.stop(0)
            async with serve_async([label, added, running], port=first.port):
                assert (await client.label(pictures(1))).label == ["0"]
                assert (await client.added(pictures(1))).of == ["0"]
                answers = await client.running(iter(pictures(2)), timeout=60)
                assert [score.of async for score in answers] == ["0", "1"]
                assert (await client.endpoints()).keys() == {"label", "added", "running"}

    asyncio.run(main())


def test_client_keeps_descriptions_of_servers_that_answer_in_turn() -> None:
    described: list[str] = []

    def count(caller: Any) -> bool:
        described.append(caller.endpoint)
        return True

    with serve(label, authorize=count) as first, Client(first.address) as client:
        client.label(pictures(1))
        first_contract = client._contract
        first.stop(0)
        with serve([label, added], port=first.port, authorize=count) as second:
            client.label(pictures(1))
            client.label(pictures(1))
            second.stop(0)
            with serve(label, port=first.port, authorize=count):
                client.label(pictures(1))
                client.label(pictures(1))
                assert client._contract is first_contract
    assert described.count("Describe") == 2
