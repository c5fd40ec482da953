"""The ids of calls: in logs, in errors, in metadata and headers."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest

from quire import DocumentArray
from quire.errors import FunctionError, OptionError, QuireError, ServiceError, ServiceUnavailableError
from quire.services import (
    AsyncClient,
    Caller,
    Client,
    current_request_id,
    endpoint,
    mount,
    serve,
    serve_async,
    use_request_id,
)
from tests.services.sample_service import Picture, Score, pictures

pytestmark = pytest.mark.needs("grpc", "grpc_health", "grpc_reflection", "fastapi")


def show(docs: DocumentArray[Picture]) -> DocumentArray[Score]:
    return DocumentArray[Score]([Score(value=0.0, of=str(current_request_id())) for _ in docs])


async def show_later(docs: DocumentArray[Picture]) -> DocumentArray[Score]:
    await asyncio.sleep(0)
    return show(docs)


def show_each(docs: Iterator[Picture]) -> Iterator[Score]:
    for _ in docs:
        yield Score(value=0.0, of=str(current_request_id()))


def fail(docs: DocumentArray[Picture]) -> DocumentArray[Picture]:
    raise ValueError(f"no {len(docs)} pictures")


@endpoint(max_batch_size=4, max_wait=0)
def fail_batched(docs: DocumentArray[Picture]) -> DocumentArray[Picture]:
    return fail(docs)


def fail_in_stream(docs: Iterator[Picture]) -> Iterator[Picture]:
    yield next(docs)
    raise ValueError("no second picture")


SERVICE = [show, show_later, show_each, fail, fail_batched, fail_in_stream]


def logged_ids(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    """Return the ids of the records that start with a text; the ids in their messages are the same."""
    records = [record for record in caplog.records if record.getMessage().startswith(text)]
    for record in records:
        assert record.getMessage().endswith(f"(request {record.request_id})")  # type: ignore[attr-defined]
    return [record.request_id for record in records]  # type: ignore[attr-defined]


def test_an_id_reaches_functions_logs_and_errors(caplog: pytest.LogCaptureFixture) -> None:
    with serve(SERVICE) as server, Client(server.address) as client:
        assert current_request_id() is None
        with use_request_id("mine-1"):
            assert show(pictures(1)).of == ["mine-1"]
            assert client.show(pictures(2)).of == ["mine-1"] * 2
            assert client.show_later(pictures(1)).of == ["mine-1"]
            assert [score.of for score in client.show_each(iter(pictures(2)))] == ["mine-1"] * 2
        assert current_request_id() is None
        chosen = [client.show(pictures(1)).of[0] for _ in range(3)]
        assert len(set(chosen)) == 3
        assert all(re.fullmatch("[0-9a-f]{16}", each) for each in chosen)
        for name in ("fail", "fail_batched"):
            with use_request_id(f"mine-{name}"), pytest.raises(FunctionError) as caught:
                client[name](pictures(1))
            assert caught.value.request_id == f"mine-{name}"
            assert logged_ids(caplog, f"{name} failed") == [f"mine-{name}"]
        with use_request_id("mine-stream"), pytest.raises(FunctionError) as caught:
            list(client.fail_in_stream(iter(pictures(2))))
        assert caught.value.request_id == "mine-stream"
        assert logged_ids(caplog, "fail_in_stream failed") == ["mine-stream"]
        call = client.fail.future(pictures(1))
        with pytest.raises(FunctionError) as caught:
            call.result()
        assert caught.value.request_id == call.request_id == logged_ids(caplog, "fail failed")[-1]


def test_an_id_on_asyncio(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with serve_async(SERVICE) as server, AsyncClient(server.address) as client:

            async def call(request_id: str) -> None:
                with use_request_id(request_id):  # of this task alone
                    assert (await client.show(pictures(1))).of == [request_id]
                    assert (await client.show_later(pictures(1))).of == [request_id]
                    assert [score.of async for score in await client.show_each(iter(pictures(2)))] == [request_id] * 2
                    for name in ("fail", "fail_batched"):
                        with pytest.raises(FunctionError) as caught:
                            await client[name](pictures(1))
                        assert caught.value.request_id == request_id

            await asyncio.gather(*(call(f"task-{number}") for number in range(8)))

    asyncio.run(main())
    assert sorted(logged_ids(caplog, "fail failed")) == sorted(logged_ids(caplog, "fail_batched failed"))
    assert set(logged_ids(caplog, "fail failed")) == {f"task-{number}" for number in range(8)}


def test_faults_of_the_server_name_the_id(caplog: pytest.LogCaptureFixture) -> None:
    def authorize(caller: Caller) -> bool:
        raise KeyError(caller.endpoint)

    with (
        serve(show, authorize=authorize) as server,
        Client(server.address) as client,
        use_request_id("mine-2"),
        pytest.raises(ServiceError, match=r"server's log has the reason \(request mine-2\)") as caught,
    ):
        client.show(pictures(1))
    assert caught.value.request_id == "mine-2"
    assert logged_ids(caplog, "a call failed inside the server") == ["mine-2"]


def test_a_function_passes_its_id_on_to_the_services_that_it_calls() -> None:
    with serve(show) as inner, Client(inner.address) as inner_client:

        def forward(docs: DocumentArray[Picture]) -> DocumentArray[Score]:
            return inner_client[show](docs)

        with serve(forward) as outer, Client(outer.address) as client, use_request_id("mine-3"):
            assert client.forward(pictures(1)).of == ["mine-3"]


def test_an_error_without_an_answer_has_the_id_that_was_sent() -> None:
    with (
        Client("127.0.0.1:1", retries=0) as client,
        use_request_id("mine-4"),
        pytest.raises(ServiceUnavailableError) as caught,
    ):
        client.show(pictures(1))
    assert caught.value.request_id == "mine-4"
    assert QuireError("local").request_id is None


@pytest.mark.parametrize("wrong", ["", "two words", "line\nbreak", "x" * 129, "ü"])
def test_ids_that_logs_cannot_show_are_refused(wrong: str) -> None:
    with pytest.raises(OptionError, match="visible ASCII"), use_request_id(wrong):
        pass


def test_servers_replace_ids_that_logs_cannot_show() -> None:
    import grpc

    with serve(show) as server, grpc.insecure_channel(server.address) as channel:
        describe = channel.unary_unary("/quire.v1.Documents/Describe")
        for sent, is_kept in (("abc-1", True), ("two words", False), ("x" * 200, False)):
            _, call = describe.with_call(b"", metadata=[("x-request-id", sent)])
            returned = dict(call.trailing_metadata())["x-request-id"]
            assert (returned == sent) is is_kept
            assert re.fullmatch("[!-~]{1,128}", returned)


def test_http_routes_return_the_id_with_answers_and_errors(caplog: pytest.LogCaptureFixture) -> None:
    from fastapi import FastAPI
    from fastapi.testclient import TestClient

    app = FastAPI()
    mount(app, SERVICE)
    with TestClient(app) as http:

        def post(name: str, body: Any = None, **headers: str) -> Any:
            rows = pictures(1).to_json() if body is None else body
            return http.post(f"/{name}", content=rows, headers={"Content-Type": "application/json", **headers})

        for name in ("show", "show_later", "show_each"):
            response = post(name, **{"X-Request-ID": "mine-5"})
            assert (response.status_code, response.headers["x-request-id"]) == (200, "mine-5")
            assert '"mine-5"' in response.text
        assert re.fullmatch("[0-9a-f]{16}", post("show").headers["x-request-id"])
        assert post("show", **{"X-Request-ID": "two words"}).headers["x-request-id"] != "two words"
        invalid = post("show", '[{"no": 1}]', **{"X-Request-ID": "mine-6"})
        assert (invalid.status_code, invalid.headers["x-request-id"]) == (422, "mine-6")
        for name in ("fail", "fail_batched"):
            with caplog.at_level(logging.WARNING):
                failed = post(name, **{"X-Request-ID": f"http-{name}"})
            assert (failed.status_code, failed.headers["x-request-id"]) == (500, f"http-{name}")
            assert logged_ids(caplog, f"{name} failed") == [f"http-{name}"]
