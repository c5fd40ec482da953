"""Routes of plain FastAPI, declarations that cannot work, plain lists in JSON, and the spans of FastAPI."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Any

import numpy as np
import pytest
from fastapi import APIRouter, Body, FastAPI, Form, Query, Response
from fastapi.exceptions import FastAPIError
from fastapi.testclient import TestClient

from quire import BaseDocument, DocumentArray, DocumentBatch
from quire.errors import OptionError, SchemaError
from quire.services import DocumentRoute, endpoint, mount
from quire.typing import NdArray, float32

pytestmark = pytest.mark.needs("fastapi")


class Passage(BaseDocument):
    text: str
    embedding: NdArray[float32, 2] | None = None


ROWS = DocumentArray[Passage]([Passage(text="a", embedding=[1, 2]), Passage(text="b", embedding=[3, 4])])
JSON = {"Content-Type": "application/json"}


def make_app(argument: Any, returns: Any, route_class: type[Any] | None = None) -> FastAPI:
    def route(docs: Any) -> Any:
        return docs

    route.__annotations__ = {"docs": argument} if returns is None else {"docs": argument, "return": returns}
    app = FastAPI()
    if route_class is not None:
        app.router.route_class = route_class
    app.post("/x")(route)
    return app


def post(app: FastAPI, body: str) -> Any:
    return TestClient(app, raise_server_exceptions=False).post("/x", content=body, headers=JSON)


# --- without DocumentRoute: these are the rows of a table in docs/fastapi.md


@pytest.mark.parametrize(
    "argument",
    [
        Annotated[DocumentArray[Passage], Body()],
        Annotated[DocumentBatch[Passage], Body()],
        Annotated[DocumentArray[Passage] | None, Body()],
        list[Passage],
    ],
)
def test_plain_routes_take_arrays_and_batches_with_body(argument: Any) -> None:
    app = make_app(argument, argument)
    response = post(app, ROWS.to_json())
    assert response.status_code == 200
    assert DocumentArray[Passage].from_json(response.content) == ROWS
    assert TestClient(app).get("/openapi.json").status_code == 200


def test_plain_routes_take_a_document_without_body() -> None:
    response = post(make_app(Passage, Passage), ROWS[0].to_json())
    assert Passage.from_json(response.content) == ROWS[0]


def test_plain_routes_take_a_batch_without_body_for_a_query() -> None:
    response = post(make_app(DocumentBatch[Passage], DocumentBatch[Passage]), ROWS.to_json())
    assert (response.status_code, response.json()["detail"][0]["loc"]) == (422, ["query", "docs"])


def test_plain_routes_cannot_return_arrays_without_a_declaration() -> None:
    assert post(make_app(Annotated[DocumentArray[Passage], Body()], None), ROWS.to_json()).status_code == 500


def test_plain_routes_cannot_take_streams() -> None:
    with pytest.raises(FastAPIError):
        make_app(Annotated[Iterator[Passage], Body()], None)


# --- with DocumentRoute


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (Iterator[Passage], r"docs: a request has one body.* `docs: DocumentArray\[Passage\]`"),
        (AsyncIterator[DocumentBatch[Passage]], "docs: a request has one body"),
        (DocumentArray[Passage] | Passage, r"docs: .* a union with DocumentArray\[Passage\], Passage"),
        (Annotated[DocumentArray[Passage], Query()], r"docs: .* cannot be sent as Query\(\).* Annotated\["),
        (Annotated[DocumentBatch[Passage], Form()], r"docs: .* cannot be sent as Form\(\)"),
    ],
)
def test_declarations_that_cannot_work_explain_themselves(argument: Any, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        make_app(argument, DocumentArray[Passage], DocumentRoute)


def test_a_route_that_returns_an_array_without_a_declaration_explains_itself() -> None:
    app = make_app(DocumentArray[Passage], None, DocumentRoute)
    with pytest.raises(SchemaError, match=r"add `-> DocumentArray\[Passage\]`"):
        TestClient(app).post("/x", content=ROWS.to_json(), headers=JSON)


# --- plain lists


class Vectors(BaseDocument):
    numbers: NdArray[float32, 2, 2]
    odd: NdArray
    missing: NdArray | None = None


class ListsRoute(DocumentRoute):
    tensors = "lists"


def test_tensors_of_a_route_are_plain_lists() -> None:
    document = Vectors(numbers=[[1, 2], [3, np.nan]], odd=np.array([1 + 2j]))
    rows = DocumentArray[Vectors]([document])
    plain = {"numbers": [[1.0, 2.0], [3.0, "NaN"]], "odd": [[1.0, 2.0]], "missing": None}
    router = APIRouter(route_class=ListsRoute)

    @router.post("/one")
    def one(document: Vectors, response: Response) -> Vectors:
        response.headers["x-kept"] = "yes"  # FastAPI writes the response, with everything that it knows
        return document

    @router.post("/array")
    async def array(docs: DocumentArray[Vectors]) -> DocumentArray[Vectors]:
        return docs

    @router.post("/batch")
    def batch(docs: DocumentBatch[Vectors]) -> DocumentBatch[Vectors]:
        return docs

    @router.post("/stream")
    def stream(docs: DocumentArray[Vectors]) -> Iterator[Vectors]:
        yield from docs

    @router.post("/own")
    def own(docs: DocumentArray[Vectors]) -> dict[str, Any]:
        return {"text": docs.to_json()}  # not an answer of the route: it keeps dtypes

    app = FastAPI()
    app.include_router(router)
    http = TestClient(app)
    answer = http.post("/one", content=document.to_json(), headers=JSON)
    assert answer.headers["x-kept"] == "yes"
    assert answer.json() == {"id": document.id, **plain}
    for path in ("/array", "/batch"):
        assert http.post(path, content=rows.to_json(), headers=JSON).json() == [{"id": document.id, **plain}]
    [line] = http.post("/stream", content=rows.to_json(), headers=JSON).text.splitlines()
    assert json.loads(line) == {"id": document.id, **plain}
    assert http.post("/own", content=rows.to_json(), headers=JSON).json() == {"text": rows.to_json()}
    # Lists of numbers are read again, by the dtype of the field. Other media types are not affected.
    finite = {**answer.json(), "numbers": [[1, 2], [3, 4]]}
    assert http.post("/one", content=json.dumps(finite), headers=JSON).json()["numbers"] == [[1.0, 2.0], [3.0, 4.0]]
    assert http.post("/one", content=answer.content, headers=JSON).status_code == 422
    protobuf = http.post("/array", content=rows.to_json(), headers={**JSON, "Accept": "application/x-protobuf"})
    assert DocumentArray[Vectors].from_bytes(protobuf.content)[0].numbers.dtype == "float32"


def test_tensors_of_a_mounted_service_are_plain_lists() -> None:
    @endpoint(max_batch_size=4, max_wait=0)
    def double(docs: DocumentBatch[Passage]) -> DocumentBatch[Passage]:
        docs.embedding = docs.embedding * 2
        return docs

    for tensors in ("lists", "objects"):
        app = FastAPI()
        mount(app, double, tensors=tensors)  # type: ignore[arg-type]
        with TestClient(app) as http:
            first = http.post("/double", content=ROWS.to_json(), headers=JSON).json()[0]["embedding"]
        assert first == ([2, 4] if tensors == "lists" else {**first, "data": [2, 4], "dtype": "float32"})
    with pytest.raises(OptionError, match="use 'objects' or 'lists'"):
        mount(FastAPI(), double, tensors="list")  # type: ignore[arg-type]


# --- spans


@pytest.mark.needs("opentelemetry", "opentelemetry.sdk", "grpc", "fastapi.telemetry")
def test_functions_of_routes_run_in_the_spans_of_fastapi(spans: Any) -> None:
    from opentelemetry import propagate, trace

    def show(docs: DocumentArray[Passage]) -> DocumentArray[Passage]:
        trace_id = f"{trace.get_current_span().get_span_context().trace_id:032x}"
        return DocumentArray[Passage]([Passage(text=trace_id) for _ in docs])

    def stream(docs: DocumentArray[Passage]) -> Iterator[Passage]:
        yield from show(docs)

    async def later(docs: DocumentArray[Passage]) -> DocumentArray[Passage]:
        return show(docs)

    def fail(docs: DocumentArray[Passage]) -> DocumentArray[Passage]:
        raise ValueError(f"no {len(docs)} passages")

    service = [show, stream, later, fail]
    app = FastAPI()
    mount(app, service, "/v1")
    http = TestClient(app)
    with trace.get_tracer("test").start_as_current_span("parent") as parent:
        headers = dict(JSON)
        propagate.inject(headers)
        texts = {f.__name__: http.post(f"/v1/{f.__name__}", content=ROWS.to_json(), headers=headers) for f in service}
    by_name = {name: span for (name, kind), span in spans(len(service) + 1).items() if kind == "SERVER"}
    context = parent.get_span_context()
    for function in service:
        span = by_name[function.__name__]
        assert span.name == f"POST /v1/{function.__name__}"
        assert (span.context.trace_id, span.parent.span_id) == (context.trace_id, context.span_id)
        assert span.attributes["http.response.status_code"] == (500 if function is fail else 200)
    for name in ("show", "stream", "later"):
        assert f"{context.trace_id:032x}" in texts[name].text
