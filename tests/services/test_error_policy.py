"""Whose error it is: the same answer from both gRPC servers, unary, streamed and batched, and over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import grpc
import pytest
from fastapi import APIRouter, FastAPI

from quire import BaseDocument, DocumentArray
from quire.errors import (
    CodecError,
    FunctionError,
    MissingValueError,
    QuireError,
    SchemaError,
    ServiceAccessError,
    ServiceError,
    ServiceLimitError,
    ServiceUnavailableError,
)
from quire.services import AsyncClient, Client, DocumentRoute, endpoint, mount, serve, serve_async
from tests.services.http_server import JSON, Site, run_app

pytestmark = pytest.mark.needs("grpc", "grpc_health", "grpc_reflection", "fastapi", "uvicorn")


class Item(BaseDocument):
    name: str


def with_attributes(error: ServiceError, **attributes: Any) -> ServiceError:
    for name, value in attributes.items():
        setattr(error, name, value)
    return error


FAILURES: dict[str, tuple[Callable[[], BaseException], type[QuireError], str, int]] = {
    # the function's error, and what the caller gets: the class, the gRPC code and the HTTP status
    "refusal": (lambda: ServiceError("not now"), ServiceError, "FAILED_PRECONDITION", 422),
    "code": (lambda: with_attributes(ServiceError("gone"), code="NOT_FOUND"), ServiceError, "NOT_FOUND", 404),
    "no_code": (lambda: with_attributes(ServiceError("odd"), code="TEAPOT"), ServiceError, "FAILED_PRECONDITION", 422),
    "busy": (lambda: ServiceLimitError("busy"), ServiceLimitError, "RESOURCE_EXHAUSTED", 503),
    "large": (
        lambda: with_attributes(ServiceLimitError("large"), retryable=False),
        ServiceLimitError,
        "RESOURCE_EXHAUSTED",
        413,
    ),
    "access": (lambda: ServiceAccessError("not you"), ServiceAccessError, "PERMISSION_DENIED", 403),
    "away": (lambda: ServiceUnavailableError("the model is away"), ServiceUnavailableError, "UNAVAILABLE", 503),
    "missing": (lambda: MissingValueError("Item.name: row 0"), MissingValueError, "INVALID_ARGUMENT", 422),
    # These would be the caller's if they came from the request.
    "codec": (lambda: CodecError("a file of the model"), FunctionError, "INTERNAL", 500),
    "schema": (lambda: SchemaError("a class of the model"), FunctionError, "INTERNAL", 500),
    "key": (lambda: KeyError("weights"), FunctionError, "INTERNAL", 500),
    "rpc": (lambda: grpc.RpcError("of a stub that the function calls"), FunctionError, "INTERNAL", 500),
    "exit": (lambda: SystemExit(3), FunctionError, "INTERNAL", 500),
}


def fail(name: str) -> None:
    make_error, *_ = FAILURES[name]
    error = make_error()
    raise error


def plain(docs: DocumentArray[Item]) -> DocumentArray[Item]:
    fail(docs[0].name)
    return docs


@endpoint(max_batch_size=4, max_wait=0)
def batched(docs: DocumentArray[Item]) -> DocumentArray[Item]:
    return plain(docs)


async def later(docs: DocumentArray[Item]) -> DocumentArray[Item]:
    return plain(docs)


def spread(docs: DocumentArray[Item]) -> Iterator[Item]:
    fail(docs[0].name)
    yield from docs


async def spread_later(docs: DocumentArray[Item]) -> AsyncIterator[Item]:
    fail(docs[0].name)
    for doc in docs:
        yield doc


def gather(docs: Iterator[Item]) -> Item:
    fail(next(docs).name)
    return Item(name="")


SERVICE = [plain, batched, later, spread, spread_later, gather]
NAMES = [function.__name__ for function in SERVICE]


def request(name: str, failure: str) -> Any:
    items = DocumentArray[Item]([Item(name=failure)])
    return iter(items) if name == "gather" else items


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with serve(SERVICE) as server, Client(server.address, retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    app, router = FastAPI(), APIRouter(route_class=DocumentRoute)
    mount(app, SERVICE, "/mounted")
    for function in (plain, later, spread, spread_later):
        router.post(f"/routes/{function.__name__}")(function)
    app.include_router(router)
    with run_app(app) as site:
        yield site


def check_error(caught: BaseException, failure: str) -> None:
    _, error_type, code, _ = FAILURES[failure]
    assert type(caught) is error_type
    if isinstance(caught, ServiceError):
        assert caught.code == code
    if isinstance(caught, ServiceLimitError):
        assert caught.retryable == (failure != "large")


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("name", NAMES)
def test_errors_of_functions_over_grpc(client: Client, name: str, failure: str) -> None:
    with pytest.raises(QuireError) as caught:
        result = client[name](request(name, failure))
        list(result)
    check_error(caught.value, failure)
    with pytest.raises(QuireError) as caught:
        list(client[name].stream(request("gather", failure) if name == "gather" else [request(name, failure)]))
    check_error(caught.value, failure)


def test_errors_of_functions_over_asynchronous_grpc() -> None:
    async def main() -> None:
        async with serve_async(SERVICE) as server, AsyncClient(server.address, retries=0) as client:
            for name in NAMES:
                for failure in FAILURES:
                    with pytest.raises(QuireError) as caught:
                        result = await client[name](request(name, failure))
                        [value async for value in result]
                    check_error(caught.value, failure)

    asyncio.run(main())


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("name", NAMES)
def test_errors_of_functions_over_http(site: Site, name: str, failure: str) -> None:
    _, error_type, _, status = FAILURES[failure]
    body = DocumentArray[Item]([Item(name=failure)]).to_json()
    answer = site.request(f"/mounted/{name}", body, Content_Type=JSON)
    assert answer.status == status
    assert answer.headers.get("retry-after") == ("1" if status == 503 else None)
    detail = answer.json()["detail"]
    assert detail.startswith(f"{name} failed: " if error_type is FunctionError else str(FAILURES[failure][0]()))


@pytest.mark.parametrize("name", ["plain", "later", "spread", "spread_later"])
def test_routes_respond_to_refusals_and_leave_failures_to_fastapi(site: Site, name: str) -> None:
    for failure, (_, error_type, _, status) in FAILURES.items():
        if failure != "exit":  # FastAPI does not handle it
            body = DocumentArray[Item]([Item(name=failure)]).to_json()
            answer = site.request(f"/routes/{name}", body, Content_Type=JSON)
            assert answer.status == status
            assert (b"failed" in answer.body) is False
            assert (answer.body == b"Internal Server Error") is (error_type is FunctionError)


def test_failing_authorize_is_a_fault_of_the_server() -> None:
    def authorize(caller: Any) -> bool:
        if caller.endpoint == "Describe":
            return True
        raise errors[0]

    errors: list[Exception] = []
    with serve(SERVICE, authorize=authorize) as server, Client(server.address) as client:
        for error in (CodecError("secret"), grpc.RpcError("secret"), KeyError("secret")):
            errors[:] = [error]
            for name in ("plain", "spread"):
                with pytest.raises(ServiceError, match="failed inside the server") as caught:
                    list(client[name](request(name, "key")))
                assert caught.value.code == "INTERNAL"
        errors[:] = [ServiceAccessError("not on Sundays")]
        for name in ("plain", "spread"):
            with pytest.raises(ServiceAccessError, match="not on Sundays"):
                list(client[name](request(name, "key")))
