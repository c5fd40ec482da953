"""A service mounted as routes of FastAPI, on a real server."""

from __future__ import annotations

import copy
import json
import re
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from fastapi import APIRouter, Depends, FastAPI, Header, HTTPException

from quire import BaseDocument, DocumentArray, DocumentBatch
from quire.errors import CodecError, ServiceUnavailableError
from quire.services import DocumentRoute, Limits, endpoint, mount
from quire.typing import NdArray
from tests.services.http_server import JSON, PROTOBUF, Site, run_app

pytestmark = pytest.mark.needs("fastapi", "uvicorn")

FILE = "application/octet-stream"


class Item(BaseDocument):
    number: int
    values: NdArray[3] | None = None


def double(docs: DocumentArray[Item]) -> DocumentArray[Item]:
    """Twice as much."""
    return DocumentArray[Item](Item(id=doc.id, number=2 * doc.number) for doc in docs)


class Sums:
    def __init__(self) -> None:
        self.calls: list[int] = []
        self.open = threading.Event()

    async def negate(self, doc: Item) -> Item:
        return Item(number=-doc.number)

    @endpoint(max_batch_size=64, max_wait=0.2)
    def batched(self, batch: DocumentBatch[Item]) -> DocumentBatch[Item]:
        self.calls.append(len(batch))
        if (np.asarray(batch.number) == 13).any():
            raise ValueError("thirteen")
        batch["number"] = np.asarray(batch.number) + 1
        return batch

    def running(self, docs: Iterator[Item]) -> Iterator[Item]:
        total = 0
        for doc in docs:
            total += doc.number
            yield Item(number=total)

    async def slowly(self, docs: AsyncIterator[DocumentArray[Item]]) -> AsyncIterator[DocumentArray[Item]]:
        async for part in docs:
            yield part
            yield part

    def fails(self, doc: Item) -> Item:
        errors: dict[int, Exception] = {
            1: ServiceUnavailableError("the model is away"),
            2: CodecError("item.number: too odd"),
            3: HTTPException(418, "a teapot"),
        }
        raise errors.get(doc.number) or LookupError("secret")

    @endpoint(max_batch_size=8, max_wait=0)
    def fails_batched(self, docs: DocumentArray[Item]) -> DocumentArray[Item]:
        return DocumentArray[Item]([self.fails(doc) for doc in docs])


sums = Sums()


def check(x_token: str = Header("")) -> None:
    if x_token != "open":
        raise HTTPException(401, "no token")


app = FastAPI()
mount(app, [double, sums], "/v1", limits=Limits(max_request_bytes=10_000))
mount(app, double, "/closed", dependencies=[Depends(check)], tags=["closed"])


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with run_app(app) as site:
        yield site


ITEMS = DocumentArray[Item](Item(id=str(i), number=i) for i in range(4))


def numbers(body: bytes) -> list[int]:
    return list(DocumentArray[Item].from_bytes(body).number)


def test_mounted_function_speaks_json_and_protobuf(site: Site) -> None:
    answer = site.request("/v1/double", ITEMS.to_json(), Content_Type=JSON)
    assert [row["number"] for row in answer.json()] == [0, 2, 4, 6]
    data = ITEMS.to_protobuf().SerializeToString()
    answer = site.request("/v1/double", data, Content_Type=PROTOBUF, Accept=PROTOBUF)
    assert numbers(answer.body) == [0, 2, 4, 6]


def test_mounted_method_may_be_async_and_take_one_document(site: Site) -> None:
    assert site.request("/v1/negate", '{"number": 5}', Content_Type=JSON).json()["number"] == -5


def test_mounted_streams_take_one_body_and_answer_while_running(site: Site) -> None:
    lines = site.request("/v1/running", ITEMS.to_json(), Content_Type=JSON)
    assert lines.type == "application/x-ndjson"
    assert DocumentArray[Item].from_ndjson(text=lines.body.decode()).number == [0, 1, 3, 6]
    answer = site.request("/v1/slowly", ITEMS.to_bytes(), Content_Type=FILE, Accept=FILE)
    assert numbers(answer.body) == [0, 1, 2, 3, 0, 1, 2, 3]


def test_mounted_endpoint_batches_calls_and_isolates_failures(site: Site) -> None:
    def ask(number: int) -> Any:
        body = DocumentArray[Item]([Item(number=number)]).stack().to_bytes()
        return site.request("/v1/batched", body, Content_Type=PROTOBUF, Accept=PROTOBUF)

    sums.calls.clear()
    with ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(ask, range(24)))
    assert answers[13].status == 500
    assert "thirteen" in answers[13].json()["detail"]
    others = [number for number in range(24) if number != 13]
    assert [numbers(answers[number].body) for number in others] == [[number + 1] for number in others]
    assert max(sums.calls) > 1


@pytest.mark.parametrize(
    ("number", "status", "words"),
    [(1, 503, "the model is away"), (2, 500, "fails.* failed: CodecError"), (3, 418, "a teapot"), (4, 500, "fails")],
)
def test_mounted_errors_map_to_http_status(site: Site, number: int, status: int, words: str) -> None:
    item = Item(number=number)
    for path, body in (("fails", item.to_json()), ("fails_batched", DocumentArray[Item]([item]).to_json())):
        answer = site.request(f"/v1/{path}", body, Content_Type=JSON)
        assert answer.status == status
        assert re.search(words, answer.json()["detail"])


def test_large_mounted_requests_are_copied_outside_of_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy for dynamic batching waits here until another request has been answered."""
    copying, answered = threading.Event(), threading.Event()
    deepcopy = copy.deepcopy

    def copy_slowly(value: Any, *memo: Any) -> Any:
        if isinstance(value, DocumentBatch):
            copying.set()
            assert answered.wait(20)
        return deepcopy(value, *memo)

    monkeypatch.setattr("quire.services._http_mount.copy.deepcopy", copy_slowly)
    app = FastAPI()
    mount(app, Sums())
    with run_app(app) as site, ThreadPoolExecutor(1) as pool:
        body = ITEMS.stack().to_bytes()
        slow = pool.submit(site.request, "/batched", body, Content_Type=PROTOBUF, Accept=PROTOBUF)
        assert copying.wait(20)
        assert site.request("/negate", '{"number": 5}', Content_Type=JSON).json()["number"] == -5
        answered.set()
        assert numbers(slow.result(20).body) == [1, 2, 3, 4]


def test_mount_applies_limits_and_dependencies(site: Site) -> None:
    large = DocumentArray[Item](Item(number=i) for i in range(1000)).to_json()
    assert site.request("/v1/double", large, Content_Type=JSON).status == 413
    assert site.request("/closed/double", large, Content_Type=JSON).status == 401
    assert len(site.request("/closed/double", large, Content_Type=JSON, X_Token="open").json()) == 1000


def test_openapi_lists_every_mounted_endpoint(site: Site) -> None:
    paths = site.request("/openapi.json", method="GET").json()["paths"]
    names = ["batched", "double", "fails", "fails_batched", "negate", "running", "slowly"]
    assert sorted(paths) == ["/closed/double", *(f"/v1/{name}" for name in names)]
    assert paths["/v1/double"]["post"]["description"] == "Twice as much."
    assert paths["/closed/double"]["post"]["tags"] == ["closed"]
    assert "application/x-ndjson" in paths["/v1/running"]["post"]["responses"]["200"]["content"]


def test_shutdown_answers_waiting_calls_and_ends_threads() -> None:
    events: list[str] = []

    @asynccontextmanager
    async def own(_: FastAPI) -> AsyncIterator[None]:
        events.append("begin")
        yield
        events.append("end")

    sums, app = Sums(), FastAPI(lifespan=own)
    mount(app, sums, "/v1")
    before = {thread for thread in threading.enumerate() if thread.name == "quire batched"}
    for number in (1, 2):  # an application may be started more than once
        with run_app(app, lifespan="on") as site:
            body = DocumentArray[Item]([Item(number=number)]).to_json()
            answer = site.request("/v1/batched", body, Content_Type=JSON, Accept=JSON)
            assert [item["number"] for item in answer.json()] == [number + 1]
            assert {thread for thread in threading.enumerate() if thread.name == "quire batched"} > before
        assert {thread for thread in threading.enumerate() if thread.name == "quire batched"} == before
    assert events == ["begin", "end"] * 2


def test_router_with_mounted_service_can_be_included() -> None:
    router, app = APIRouter(), FastAPI()
    mount(router, Sums())
    app.include_router(router, prefix="/v2")
    before = {thread for thread in threading.enumerate() if thread.name == "quire batched"}
    with run_app(app, lifespan="on") as site:
        body = DocumentArray[Item]([Item(number=1)]).to_json()
        assert site.request("/v2/batched", body, Content_Type=JSON, Accept=JSON).status == 200
    assert {thread for thread in threading.enumerate() if thread.name == "quire batched"} == before


# --- missing values


class Photo(BaseDocument):
    pixels: NdArray[2] | None = None
    bright: bool | None = None


def classify(docs: DocumentBatch[Photo]) -> DocumentBatch[Photo]:
    docs.bright = docs.pixels.mean(1) > 1
    return docs


async def classify_later(docs: DocumentBatch[Photo]) -> DocumentBatch[Photo]:
    return classify(docs)


@endpoint(max_batch_size=8, max_wait=0.01)
def classify_together(docs: DocumentBatch[Photo]) -> DocumentBatch[Photo]:
    return classify(docs)


def unread(docs: DocumentBatch[Photo]) -> DocumentBatch[Photo]:
    return docs


def test_reading_missing_values_responds_422() -> None:
    app, router = FastAPI(), APIRouter(route_class=DocumentRoute)
    router.post("/plain")(classify)
    router.post("/plain_later")(classify_later)
    app.include_router(router)
    mount(app, [classify, classify_later, classify_together, unread], "/mounted")
    whole = json.dumps([{"pixels": [3, 3]}, {"pixels": [0, 0]}])
    part = json.dumps([{"pixels": [3, 3]}, {"pixels": None}])
    paths = ["/plain", "/plain_later", "/mounted/classify", "/mounted/classify_later", "/mounted/classify_together"]
    with run_app(app) as site:
        for path in paths:
            answer = site.request(path, whole, content_type=JSON)
            assert [row["bright"] for row in answer.json()] == [True, False]
            answer = site.request(path, part, content_type=JSON)
            assert answer.status == 422
            assert "Photo.pixels: row 1" in answer.json()["detail"]
        assert site.request("/mounted/unread", part, content_type=JSON).json()[1]["pixels"] is None
