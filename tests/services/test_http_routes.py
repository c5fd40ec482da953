"""Documents in FastAPI routes: JSON and protobuf by content negotiation, on a real server."""

from __future__ import annotations

import http.client
import json
import queue
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Annotated, Any

import numpy as np
import pytest
from fastapi import APIRouter, Body, Depends, FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import StreamingResponse

from quire import BaseDocument, DocumentArray, DocumentBatch
from quire.services import DocumentRoute, Limits
from quire.services._http_responses import negotiate
from quire.typing import NdArray
from tests.services.http_server import JSON, PROTOBUF, Answer, Site, run_app

pytestmark = pytest.mark.needs("fastapi", "uvicorn")

FILE = "application/octet-stream"


class Passage(BaseDocument):
    text: str
    embedding: NdArray[4] | None = None
    square: NdArray["n", "n"] | None = None


class Vector(BaseDocument):
    values: NdArray[4]
    name: str = ""


class Small(DocumentRoute):
    limits = Limits(max_request_bytes=2000, max_concurrency=1, max_queue=1)


busy, free = threading.Event(), threading.Event()


app = FastAPI()
app.router.route_class = DocumentRoute


@app.post("/one")
def one(doc: Passage) -> Vector:
    """One makes one."""
    return Vector(values=np.ones(4) * len(doc.text), name=doc.text)


@app.post("/many")
async def many(docs: DocumentArray[Passage], times: int = 1) -> DocumentArray[Vector]:
    vectors = [Vector(id=doc.id, values=np.full(4, len(doc.text) * times, np.float32), name=doc.text) for doc in docs]
    return DocumentArray[Vector](vectors)


@app.post("/columns", status_code=201)
def columns(batch: Annotated[DocumentBatch[Vector], Body(description="columns")]) -> DocumentBatch[Vector]:
    batch["values"] = batch["values"] * 2
    return batch


@app.get("/stream")
def stream(count: int) -> Iterator[Vector]:
    return (Vector(id=str(i), values=np.full(4, i, np.float32)) for i in range(count))


@app.get("/parts")
async def parts(count: int) -> AsyncIterator[DocumentArray[Vector]]:
    for i in range(count):
        yield DocumentArray[Vector]([Vector(id=str(i), values=np.full(4, i))] * 2)


@app.post("/default")
def default(docs: DocumentArray[Passage] = Body(description="documents")) -> Passage:  # noqa: B008, FAST002 - the older style
    return docs[0]


@app.post("/none")
def none(docs: DocumentArray[Passage] | None = None) -> dict[str, bool]:
    return {"none": docs is None}


@app.put("/upload")
def upload(docs: DocumentArray[Passage]) -> dict[str, int]:
    return {"documents": len(docs)}


@app.post("/two")
def two(doc: Passage, more: DocumentArray[Passage]) -> Passage:
    return Passage(text=doc.text + "".join(more.text))


@app.post("/wrong")
def wrong(doc: Passage) -> DocumentArray[Vector]:
    return [doc]  # type: ignore[return-value]


def named(name: str = "x") -> Passage:
    return Passage(text=name)


@app.get("/depends")
def depends(doc: Annotated[Passage, Depends(named)]) -> Passage:
    return doc


@app.get("/plain")
def plain(number: int = 3) -> dict[str, int]:
    return {"number": number}


small = APIRouter(route_class=Small)


@small.post("/size")
def size(docs: DocumentArray[Passage]) -> DocumentArray[Passage]:
    return docs


@small.post("/wait")
def wait(doc: Passage) -> Passage:
    busy.set()
    free.wait(30)
    return doc


app.include_router(small, prefix="/small")


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with run_app(app) as site:
        yield site


@pytest.fixture(scope="module")
def spec(site: Site) -> Any:
    return site.request("/openapi.json", method="GET").json()


PASSAGES = DocumentArray[Passage](
    Passage(id=str(i), text="x" * i, embedding=np.full(4, i, np.float32)) for i in range(5)
)
VECTORS = DocumentArray[Vector](
    Vector(id=d.id, values=np.full(4, 2 * len(d.text), np.float32), name=d.text) for d in PASSAGES
)


def as_protobuf(value: Any) -> bytes:
    return value.to_protobuf().SerializeToString()  # type: ignore[no-any-return]


JUNK = [b"\xff\xfe\x00", b"\x80\x05N.", b"\x93QUIRE\r\n" + bytes(70), b"\x0a\xff\xff\xff\x7f"]

# --- content negotiation


@pytest.mark.parametrize("accept", [JSON, PROTOBUF, "application/protobuf", "*/*", None])
@pytest.mark.parametrize("content_type", [JSON, PROTOBUF])
def test_arrays_are_negotiated_between_json_and_protobuf(site: Site, content_type: str, accept: str | None) -> None:
    body = PASSAGES.to_json() if content_type == JSON else as_protobuf(PASSAGES)
    answer = site.request("/many?times=2", body, Content_Type=content_type, **({"Accept": accept} if accept else {}))
    assert answer.status == 200, answer.body
    if accept is not None and "protobuf" in accept:
        assert answer.type == PROTOBUF
        assert DocumentArray[Vector].from_bytes(answer.body).identical(VECTORS)
    else:
        assert answer.type == JSON
        assert DocumentArray[Vector].from_json(answer.body) == VECTORS


def test_documents_and_batches_are_negotiated(site: Site) -> None:
    one = site.request("/one", as_protobuf(PASSAGES[3]), Content_Type=PROTOBUF, Accept=PROTOBUF)
    assert Vector.from_bytes(one.body) == Vector(values=np.ones(4) * 3, name="xxx")
    batch = VECTORS.stack()
    for content_type, body in ((PROTOBUF, as_protobuf(batch)), (JSON, batch.to_json())):
        binary = site.request("/columns", body, Content_Type=content_type, Accept=f"{JSON};q=0.5, {PROTOBUF}")
        assert (binary.status, binary.type) == (201, PROTOBUF)
        assert np.array_equal(DocumentBatch[Vector].from_bytes(binary.body).values, batch.values * 2)
        text = site.request("/columns", body, Content_Type=content_type)
        assert (text.status, text.type) == (201, JSON)
        assert np.array_equal(DocumentBatch[Vector].from_json(text.body).values, batch.values * 2)


def test_route_reads_rows_and_columns(site: Site) -> None:
    answer = site.request("/many?times=2", as_protobuf(PASSAGES.stack()), Content_Type=PROTOBUF, Accept=PROTOBUF)
    assert DocumentArray[Vector].from_bytes(answer.body).identical(VECTORS)


def test_other_parameters_work_as_in_fastapi(site: Site) -> None:
    assert site.request("/plain?number=4", method="GET", Accept="text/html").json() == {"number": 4}
    assert site.request("/depends?name=a", method="GET").json()["text"] == "a"
    both = {"doc": {"text": "a"}, "more": [{"text": "b"}, {"text": "c"}]}
    assert site.request("/two", json.dumps(both), Content_Type=JSON).json()["text"] == "abc"


def test_body_may_be_declared_as_default(site: Site, spec: Any) -> None:
    for content_type, body in ((JSON, PASSAGES.to_json()), (PROTOBUF, PASSAGES.to_bytes())):
        assert site.request("/default", body, Content_Type=content_type).json()["id"] == "0"
    assert check_refused(site.request("/default"))["type"] == "missing"
    assert spec["paths"]["/default"]["post"]["requestBody"]["content"][JSON]["schema"]["description"] == "documents"


def test_optional_body_may_be_omitted(site: Site) -> None:
    assert site.request("/none").json() == {"none": True}
    for content_type, body in ((JSON, PASSAGES.to_json()), (PROTOBUF, PASSAGES.to_bytes())):
        assert site.request("/none", body, Content_Type=content_type).json() == {"none": False}


# --- streams


def test_iterator_is_streamed_as_ndjson_or_file(site: Site) -> None:
    expected = [Vector(id=str(i), values=np.full(4, i, np.float32)) for i in range(3)]
    lines = site.request("/stream?count=3", method="GET")
    assert lines.type == "application/x-ndjson"
    assert list(DocumentArray[Vector].from_ndjson(text=lines.body.decode())) == expected
    for accept in (FILE, PROTOBUF):
        answer = site.request("/stream?count=3", method="GET", Accept=accept)
        assert answer.type == FILE
        assert DocumentArray[Vector].from_bytes(answer.body).identical(DocumentArray[Vector](expected))


def test_async_generator_of_arrays_is_one_stream(site: Site) -> None:
    for accept in ("application/x-ndjson", FILE):
        answer = site.request("/parts?count=3", method="GET", Accept=accept)
        read = DocumentArray[Vector].from_bytes(answer.body) if accept == FILE else answer.body.decode()
        docs = DocumentArray[Vector].from_ndjson(text=read) if isinstance(read, str) else read
        assert docs.id == ["0", "0", "1", "1", "2", "2"]


def test_push_and_pull_work_with_a_route(site: Site) -> None:
    PASSAGES.push(f"{site.url}/upload")
    DocumentArray[Passage].push_stream(iter(PASSAGES), f"{site.url}/upload", compress="gzip")
    assert DocumentArray[Vector].pull(f"{site.url}/stream?count=2000").id[-1] == "1999"


# --- errors


def test_unsupported_media_types_get_415_and_406(site: Site) -> None:
    answer = site.request("/many", b"<docs/>", Content_Type="text/xml")
    assert (answer.status, answer.json()["detail"]) == (
        415,
        f"the body is text/xml; this route takes {JSON}, {PROTOBUF}, {FILE}.",
    )
    assert site.request("/many", PASSAGES.to_json(), Content_Type="").status == 415
    assert site.request("/one", b"x", Content_Type=FILE).status == 415
    assert site.request("/many", PASSAGES.to_json(), Content_Type=JSON, Accept="image/png").status == 406


def check_refused(answer: Answer) -> dict[str, Any]:
    assert answer.status == 422, answer
    [error] = answer.json()["detail"]
    return error  # type: ignore[no-any-return]


def test_unknown_field_error_suggests_nearest_name(site: Site) -> None:
    error = check_refused(
        site.request("/many", json.dumps([{"text": "a"}, {"text": "b", "txt": "c"}]), Content_Type=JSON)
    )
    assert error["loc"] == ["body", 1, "txt"]
    assert error["msg"] == "Passage has no field 'txt'. Did you mean 'text'?"


def test_invalid_field_error_names_field(site: Site) -> None:
    rows = [{"text": "a"}, {"text": "b", "embedding": [1, 2, 3]}]
    error = check_refused(site.request("/many", json.dumps(rows), Content_Type=JSON))
    assert error["loc"] == ["body", 1, "embedding"]
    assert "(4,)" in error["msg"]

    class Other(BaseDocument):
        text: str
        embedding: NdArray[3]

    others = DocumentArray[Other]([Other(text="a", embedding=np.ones(3))])
    error = check_refused(site.request("/many", as_protobuf(others), Content_Type=PROTOBUF))
    assert error["loc"][0] == "body"
    assert "embedding" in error["msg"]


def test_nan_in_invalid_body_gets_422(site: Site) -> None:
    error = check_refused(site.request("/one", '{"text": "a", "embedding": [NaN, 1]}', Content_Type=JSON))
    assert error["loc"] == ["body", "embedding"]


@pytest.mark.parametrize("path", ["/one", "/many", "/columns"])
@pytest.mark.parametrize(
    "body", [b"\xff\xfe\x00", b"\x80\x05N.", b"\x93QUIRE\r\n" + bytes(70), b"\x0a\xff\xff\xff\x7f"]
)
def test_malformed_bodies_are_refused(site: Site, path: str, body: bytes) -> None:
    for content_type in (PROTOBUF, *([FILE] if path != "/one" else [])):
        assert check_refused(site.request(path, body, Content_Type=content_type))["loc"] == ["body"]
    assert site.request(path, body, Content_Type=JSON).status in (400, 422)


def test_missing_body_gets_422(site: Site) -> None:
    for headers in ({}, {"Content_Type": JSON}, {"Content_Type": PROTOBUF}):
        assert check_refused(site.request("/many", None, **headers))["type"] == "missing"


def test_pickles_are_never_read(site: Site) -> None:
    data = PASSAGES.to_bytes(protocol="pickle")
    assert "pickle" in check_refused(site.request("/many", data, Content_Type=FILE))["msg"]


def test_body_over_the_limit_gets_413(site: Site) -> None:
    assert site.request("/small/size", PASSAGES[:2].to_json(), Content_Type=JSON).status == 200
    body = PASSAGES[4].to_json() * 100
    answer = site.request("/small/size", body, Content_Type=JSON)
    assert (answer.status, answer.json()["detail"]) == (
        413,
        f"the body has {len(body):,} bytes, and the limit is 2,000 bytes.",
    )
    chunks = iter([body.encode()[:1000]] * 3)
    assert site.request("/small/size", chunks, Content_Type=PROTOBUF, Transfer_Encoding="chunked").status == 413
    packed = DocumentArray[Passage]([Passage(text="x" * 500_000)]).to_bytes(compress="gzip")
    assert len(packed) < 2000
    assert "max_bytes" in check_refused(site.request("/small/size", packed, Content_Type=FILE))["msg"]


def test_requests_beyond_the_queue_get_503(site: Site) -> None:
    body = PASSAGES[0].to_json()
    answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
    busy.clear()
    free.clear()
    with ThreadPoolExecutor(6) as pool:
        for _ in range(6):
            pool.submit(lambda: answers.put(site.request("/small/wait", body, Content_Type=JSON)))
        assert busy.wait(20)
        refused = [answers.get(timeout=20) for _ in range(4)]  # one runs, one waits
        free.set()
    assert [answer.status for answer in refused] == [503] * 4
    assert refused[0].headers["retry-after"] == "1"
    assert [answers.get().status for _ in range(2)] == [200, 200]


class OpenStream:
    """A streamed response of which the first line was read."""

    def __init__(self, site: Site, body: bytes) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", site.port, timeout=60)
        self.connection.request("POST", "/lines", body, {"Content-Type": PROTOBUF})
        self.response = self.connection.getresponse()
        assert json.loads(self.response.readline())["text"] == "0"

    def close(self) -> None:
        self.response.close()
        self.connection.close()


def streaming_app(limits: Limits) -> tuple[FastAPI, threading.Event]:
    """Return an application with a stream, which goes on when the event is set."""
    gate = threading.Event()

    class Limited(DocumentRoute):
        pass

    Limited.limits = limits
    router = APIRouter(route_class=Limited)

    @router.post("/lines")
    def lines(docs: DocumentArray[Passage]) -> Iterator[Passage]:
        yield Passage(text="0")
        while not gate.wait(0.05):
            yield Passage(text="x")
        yield Passage(text=str(len(docs)))

    @router.post("/size")
    def size(docs: DocumentArray[Passage]) -> int:
        return len(docs)

    app = FastAPI()
    app.include_router(router)
    return app, gate


def test_streamed_response_holds_its_place_until_it_is_sent() -> None:
    app, gate = streaming_app(Limits(max_concurrency=1, max_queue=1, max_stream_wait=0.2))
    body = PASSAGES.to_bytes()
    with run_app(app) as site:
        with closing(OpenStream(site, body)) as stream:
            for _ in range(2):
                refused = site.request("/size", body, Content_Type=PROTOBUF)
                assert refused.status == 503
                assert "open streams hold all 1 places" in refused.json()["detail"]
            gate.set()
            assert json.loads(stream.response.read().splitlines()[-1])["text"] == "5"
        assert site.request("/size", body, Content_Type=PROTOBUF).json() == 5


def test_limits_apply_to_requests_and_responses_that_a_route_streams_itself() -> None:
    gate = threading.Event()

    class Limited(DocumentRoute):
        limits = Limits(max_request_bytes=2_000, max_concurrency=1, max_queue=1, max_stream_wait=0.2)

    router = APIRouter(route_class=Limited)

    @router.post("/read")
    async def read(request: HttpRequest) -> int:
        return sum([len(part) async for part in request.stream()])

    @router.get("/own")
    def own() -> StreamingResponse:
        def lines() -> Iterator[bytes]:
            yield b"0\n"
            gate.wait(60)
            yield b"1\n"

        return StreamingResponse(lines())

    @router.get("/silent")
    def silent() -> Iterator[Passage]:
        gate.wait(60)
        yield Passage(text="first")

    app = FastAPI()
    app.include_router(router)
    with run_app(app) as site, ThreadPoolExecutor(1) as pool:
        assert site.request("/read", b"x" * 2_000).json() == 2_000
        for body in (b"x" * 2_001, iter([b"x" * 1_000] * 3)):
            headers = {"Transfer_Encoding": "chunked"} if isinstance(body, Iterator) else {}
            assert site.request("/read", body, **headers).status == 413
        for path in ("/own", "/silent"):  # both hold the only place, whether or not a value has been sent
            gate.clear()
            running = pool.submit(site.request, path, method="GET")
            while (refused := site.request("/read", b"")).status == 200:
                pass  # the stream has not begun
            assert (refused.status, refused.headers["retry-after"]) == (503, "1")
            assert "open streams hold all 1 places" in refused.json()["detail"]
            gate.set()
            assert running.result(60).status == 200
            assert site.request("/read", b"").status == 200


@pytest.mark.parametrize("way", ["end", "disconnect"])
def test_waiting_request_gets_the_place_of_a_stream(way: str) -> None:
    app, gate = streaming_app(Limits(max_concurrency=1, max_queue=1, max_stream_wait=60))
    body = PASSAGES.to_bytes()
    with run_app(app) as site, ThreadPoolExecutor(1) as pool:
        stream = OpenStream(site, body)
        waiting = pool.submit(site.request, "/size", body, Content_Type=PROTOBUF)
        if way == "end":
            gate.set()
            stream.response.read()
        stream.close()
        assert waiting.result(30).json() == 5


def test_request_of_a_stream_counts_as_pending_until_it_is_sent() -> None:
    body = PASSAGES.to_bytes()
    app, gate = streaming_app(Limits(max_pending_bytes=int(len(body) * 1.5)))
    with run_app(app) as site:
        with closing(OpenStream(site, body)) as stream:
            refused = site.request("/size", body, Content_Type=PROTOBUF)
            assert refused.status == 503
            assert "max_pending_bytes" in refused.json()["detail"]
            gate.set()
            stream.response.read()
        assert site.request("/size", body, Content_Type=PROTOBUF).json() == 5


def test_large_bodies_are_decoded_outside_of_the_event_loop(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding waits here until another request has been answered."""
    decoding, answered, decoded = threading.Event(), threading.Event(), []
    from_bytes = DocumentArray[Passage].from_bytes

    def decode_slowly(data: bytes, **options: Any) -> Any:
        decoded.append(len(data))
        if len(data) > 100_000:
            decoding.set()
            assert answered.wait(20)
        return from_bytes(data, **options)

    monkeypatch.setattr(DocumentArray[Passage], "from_bytes", decode_slowly)
    large = DocumentArray[Passage]([Passage(text="x" * 200_000)]).to_bytes()
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(site.request, "/upload", large, "PUT", Content_Type=PROTOBUF)
        assert decoding.wait(20)
        assert site.request("/upload", PASSAGES.to_bytes(), "PUT", Content_Type=PROTOBUF).json() == {"documents": 5}
        answered.set()
        assert slow.result(20).json() == {"documents": 1}
    assert len(decoded) == 2  # each body once
    error = check_refused(site.request("/upload", b"\xff" * 200_000, "PUT", Content_Type=PROTOBUF))
    assert (error["loc"], error["type"]) == (["body"], "documents")


def test_answer_of_wrong_class_gets_500(site: Site) -> None:
    for accept in (JSON, PROTOBUF):
        assert site.request("/wrong", '{"text": "a"}', Content_Type=JSON, Accept=accept).status == 500


# --- OpenAPI


def test_openapi_has_media_types_and_schemas(spec: Any) -> None:
    operation = spec["paths"]["/many"]["post"]
    assert set(operation["requestBody"]["content"]) == {JSON, PROTOBUF, FILE}
    rows = operation["requestBody"]["content"][JSON]["schema"]
    assert (rows["type"], rows["items"]) == ("array", {"$ref": "#/components/schemas/Passage"})
    assert operation["requestBody"]["content"][PROTOBUF]["schema"] == {"type": "string", "format": "binary"}
    assert operation["requestBody"]["required"] is True
    content = operation["responses"]["200"]["content"]
    assert set(content) == {JSON, PROTOBUF}
    assert content[JSON]["schema"]["items"] == {"$ref": "#/components/schemas/Vector"}
    assert [parameter["name"] for parameter in operation["parameters"]] == ["times"]


def test_openapi_describes_documents_batches_and_streams(spec: Any) -> None:
    one = spec["paths"]["/one"]["post"]
    assert one["requestBody"]["content"][JSON]["schema"] == {"$ref": "#/components/schemas/Passage"}
    assert one["description"] == "One makes one."
    columns = spec["paths"]["/columns"]["post"]
    assert columns["requestBody"]["content"][JSON]["schema"]["items"] == {"$ref": "#/components/schemas/Vector"}
    assert set(columns["responses"]["201"]["content"]) == {JSON, PROTOBUF}
    stream = spec["paths"]["/stream"]["get"]["responses"]["200"]["content"]
    assert stream["application/x-ndjson"]["schema"] == {"$ref": "#/components/schemas/Vector"}
    assert FILE in stream
    assert set(spec["paths"]["/two"]["post"]["requestBody"]["content"]) == {JSON}
    assert set(spec["paths"]["/small/size"]["post"]["requestBody"]["content"]) == {JSON, PROTOBUF, FILE}
    assert spec["components"]["schemas"]["Passage"]["properties"]["text"] == {"type": "string", "title": "Text"}


# --- the Accept header


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        (None, JSON),
        ("", JSON),
        ("*/*", JSON),
        ("application/*", JSON),
        ("text/html,*/*;q=0.1", JSON),
        (PROTOBUF, PROTOBUF),
        (f"{JSON};q=0.2, {PROTOBUF};q=0.9", PROTOBUF),
        (f"{JSON}, {PROTOBUF}", JSON),
        (f"*/*, {JSON};q=0", PROTOBUF),
        ("application/vnd.google.protobuf", PROTOBUF),
        ("image/png", None),
        (f"{JSON};q=zero", None),
    ],
    ids=str,
)
def test_negotiate_returns_preferred_media_type(accept: str | None, expected: str | None) -> None:
    assert negotiate(accept, [JSON, PROTOBUF]) == expected
