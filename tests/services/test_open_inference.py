"""The Open Inference Protocol over gRPC and HTTP, with messages that protoc's classes and json write."""

from __future__ import annotations

import asyncio
import json
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import grpc
import numpy as np
import pytest
from fastapi import FastAPI
from pydantic import Field as PydanticField

from quire import BaseDocument, DocumentArray, DocumentBatch
from quire.errors import OptionError, SchemaError, ServiceError
from quire.services import Limits, endpoint, mount_open_inference, serve, serve_async
from quire.typing import NdArray, float32, uint8
from tests.codec.protoc import compile_proto
from tests.services.http_server import JSON, Answer, Site, run_app

pytestmark = pytest.mark.needs(
    "grpc", "grpc_health", "grpc_reflection", "grpc_tools", "fastapi", "uvicorn", "prometheus_client"
)

# The messages of the protocol, by its specification.
PROTO = """
syntax = "proto3";
package inference;
message ModelReadyRequest { string name = 1; string version = 2; }
message ModelReadyResponse { bool ready = 1; }
message ServerMetadataResponse { string name = 1; string version = 2; repeated string extensions = 3; }
message ModelMetadataRequest { string name = 1; string version = 2; }
message ModelMetadataResponse {
  message TensorMetadata { string name = 1; string datatype = 2; repeated int64 shape = 3; }
  string name = 1; repeated string versions = 2; string platform = 3;
  repeated TensorMetadata inputs = 4; repeated TensorMetadata outputs = 5;
}
message InferParameter {
  oneof parameter_choice { bool bool_param = 1; int64 int64_param = 2; string string_param = 3; }
}
message InferTensorContents {
  repeated bool bool_contents = 1; repeated int32 int_contents = 2; repeated int64 int64_contents = 3;
  repeated uint32 uint_contents = 4; repeated uint64 uint64_contents = 5; repeated float fp32_contents = 6;
  repeated double fp64_contents = 7; repeated bytes bytes_contents = 8;
}
message ModelInferRequest {
  message InferInputTensor {
    string name = 1; string datatype = 2; repeated int64 shape = 3;
    map<string, InferParameter> parameters = 4; InferTensorContents contents = 5;
  }
  message InferRequestedOutputTensor { string name = 1; map<string, InferParameter> parameters = 2; }
  string model_name = 1; string model_version = 2; string id = 3; map<string, InferParameter> parameters = 4;
  repeated InferInputTensor inputs = 5; repeated InferRequestedOutputTensor outputs = 6;
  repeated bytes raw_input_contents = 7;
}
message ModelInferResponse {
  message InferOutputTensor {
    string name = 1; string datatype = 2; repeated int64 shape = 3;
    map<string, InferParameter> parameters = 4; InferTensorContents contents = 5;
  }
  string model_name = 1; string model_version = 2; string id = 3; map<string, InferParameter> parameters = 4;
  repeated InferOutputTensor outputs = 5; repeated bytes raw_output_contents = 6;
}
"""


class Photo(BaseDocument):
    pixels: NdArray[float32, 3, "height", "width"]
    caption: str = ""
    embedding: NdArray[float32, 3] | None = None


class Numbers(BaseDocument):
    """A field of every datatype that has its own."""

    flag: bool
    count: int
    share: Annotated[float, PydanticField(le=1)]
    content: bytes
    small: NdArray[uint8, 2]


class Loose(BaseDocument):
    pixels: NdArray


class Nested(BaseDocument):
    photo: Photo


def embed(docs: DocumentArray[Photo]) -> DocumentArray[Photo]:
    for doc in docs:
        doc.embedding = doc.pixels.mean(axis=(1, 2))
    return docs


class Batched:
    """A model with dynamic batching, which changes its argument and fails for some rows."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.gate = threading.Event()

    @endpoint(max_batch_size=256, max_wait=0.2)
    def embed_batched(self, docs: DocumentBatch[Photo]) -> DocumentBatch[Photo]:
        self.sizes.append(len(docs))
        pixels = docs.pixels
        pixels *= 2
        if "bad" in docs.caption:
            raise ValueError("a bad one")
        docs.embedding = pixels.mean(axis=(2, 3)) / 2
        return docs


def embed_one(doc: Photo) -> Photo:
    doc.embedding = doc.pixels.mean(axis=(1, 2))
    return doc


async def negate(batch: DocumentBatch[Numbers]) -> DocumentBatch[Numbers]:
    batch.count = -batch.count
    return batch


def fail(docs: DocumentArray[Photo]) -> DocumentArray[Photo]:
    raise ValueError(f"no good: {len(docs)}")


def refuse(docs: DocumentArray[Photo]) -> DocumentArray[Photo]:
    error = ServiceError(f"not {len(docs)} today")
    error.code = "PERMISSION_DENIED"
    raise error


PIXELS = np.random.default_rng(0).random((5, 3, 4, 6), np.float32)
batched = Batched()
MODELS = [embed, batched, embed_one, negate, fail, refuse]


@pytest.fixture(scope="module")
def messages(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return compile_proto(PROTO, Path(tmp_path_factory.mktemp("inference")))


class GrpcModels:
    """The methods of the protocol, for one server."""

    def __init__(self, channel: Any, messages: Any) -> None:
        self.channel, self.messages = channel, messages

    def call(self, method: str, request: Any, response: str) -> Any:
        data = request if isinstance(request, bytes) else request.SerializeToString()
        answer = self.channel.unary_unary(f"/inference.GRPCInferenceService/{method}")(data, timeout=60)
        return getattr(self.messages, response).FromString(answer)

    def request(self, model: str, inputs: dict[str, tuple[str, Any]], *outputs: str) -> Any:
        """Make a request with raw contents."""
        request = self.messages.ModelInferRequest(model_name=model, id="r1")
        for name, (datatype, array) in inputs.items():
            request.inputs.add(name=name, datatype=datatype, shape=np.shape(array))
            if datatype == "BYTES":
                raw = b"".join(struct.pack("<I", len(item)) + item for item in array)
            else:
                raw = np.asarray(array).tobytes()
            request.raw_input_contents.append(raw)
        for output in outputs:
            request.outputs.add(name=output)
        return request

    def infer(self, request: Any) -> dict[str, Any]:
        """Return the outputs of a call as arrays, by name."""
        response = self.call("ModelInfer", request, "ModelInferResponse")
        assert (response.id, response.model_name, response.model_version) == ("r1", request.model_name, "1")
        dtypes = {"FP32": "<f4", "UINT8": "u1", "INT64": "<i8", "FP64": "<f8", "BOOL": "?"}
        arrays = {}
        for output, raw in zip(response.outputs, response.raw_output_contents, strict=True):
            if output.datatype == "BYTES":
                items, rest = [], raw
                while rest:
                    (size,) = struct.unpack_from("<I", rest)
                    items.append(rest[4 : 4 + size])
                    rest = rest[4 + size :]
                arrays[output.name] = items
                assert list(output.shape) == [len(items)]
            else:
                arrays[output.name] = np.frombuffer(raw, dtypes[output.datatype]).reshape(output.shape)
        return arrays


@contextmanager
def open_models(kind: str, messages: Any, functions: Any, **options: Any) -> Iterator[GrpcModels]:
    """Serve functions, with threads or with asyncio in a thread."""
    if kind == "threads":
        with (
            serve(functions, open_inference=True, **options) as server,
            grpc.insecure_channel(server.address) as channel,
        ):
            yield GrpcModels(channel, messages)
        return
    ready, done = threading.Event(), threading.Event()
    addresses: list[str] = []

    async def main() -> None:
        async with serve_async(functions, open_inference=True, **options) as server:
            addresses.append(server.address)
            ready.set()
            await asyncio.to_thread(done.wait)

    thread = threading.Thread(target=asyncio.run, args=[main()])
    thread.start()
    try:
        assert ready.wait(60)
        with grpc.insecure_channel(addresses[0]) as channel:
            yield GrpcModels(channel, messages)
    finally:
        done.set()
        thread.join()


@pytest.fixture(scope="module", params=["threads", "asyncio"])
def models(request: pytest.FixtureRequest, messages: Any) -> Iterator[GrpcModels]:
    with open_models(request.param, messages, MODELS) as models:
        yield models


# --- gRPC


def test_metadata_names_inputs_and_outputs(models: GrpcModels) -> None:
    request = models.messages.ModelMetadataRequest
    metadata = models.call("ModelMetadata", request(name="embed"), "ModelMetadataResponse")
    assert (metadata.name, list(metadata.versions), metadata.platform) == ("embed", ["1"], "quire")
    inputs = {tensor.name: (tensor.datatype, list(tensor.shape)) for tensor in metadata.inputs}
    assert inputs == {
        "pixels": ("FP32", [-1, 3, -1, -1]),
        "caption": ("BYTES", [-1]),
        "embedding": ("FP32", [-1, 3]),
    }
    assert [tensor.name for tensor in metadata.outputs] == ["pixels", "caption", "embedding"]
    one = models.call("ModelMetadata", request(name="embed_one", version="1"), "ModelMetadataResponse")
    assert [list(tensor.shape) for tensor in one.inputs] == [[3, -1, -1], [1], [3]]
    assert models.call("ServerMetadata", b"", "ServerMetadataResponse").name == "quire"
    ready = models.messages.ModelReadyRequest(name="embed")
    for method, body in (("ServerLive", b""), ("ServerReady", b""), ("ModelReady", ready)):
        assert models.call(method, body, "ModelReadyResponse").ready
    for other in (
        models.messages.ModelReadyRequest(name="x"),
        models.messages.ModelReadyRequest(name="embed", version="2"),
    ):
        assert not models.call("ModelReady", other, "ModelReadyResponse").ready


@pytest.mark.parametrize("model", ["embed", "embed_batched"])
def test_raw_contents_become_rows_and_outputs(models: GrpcModels, model: str) -> None:
    captions = [f"picture {i} \u00e9".encode() for i in range(5)]
    inputs = {"pixels": ("FP32", PIXELS), "caption": ("BYTES", captions)}
    outputs = models.infer(models.request(model, inputs))
    np.testing.assert_allclose(outputs["embedding"], PIXELS.mean(axis=(2, 3)), rtol=1e-5)
    assert outputs["caption"] == captions
    assert models.infer(models.request(model, inputs, "caption")).keys() == {"caption"}


def test_a_document_is_one_row_without_its_dimension(models: GrpcModels) -> None:
    inputs = {"pixels": ("FP32", PIXELS[0]), "caption": ("BYTES", [b"one"])}
    outputs = models.infer(models.request("embed_one", inputs))
    np.testing.assert_allclose(outputs["embedding"], PIXELS[0].mean(axis=(1, 2)), rtol=1e-5)
    assert outputs["caption"] == [b"one"]


def test_typed_contents_of_every_datatype(models: GrpcModels) -> None:
    request = models.messages.ModelInferRequest(model_name="negate", id="r1")
    for name, datatype, shape, contents in (
        ("flag", "BOOL", [2], {"bool_contents": [True, False]}),
        ("count", "INT32", [2], {"int_contents": [-3, 4]}),
        ("share", "FP64", [2], {"fp64_contents": [0.5, 0.25]}),
        ("content", "BYTES", [2], {"bytes_contents": [b"\xff", b""]}),
        ("small", "UINT8", [2, 2], {"uint_contents": [1, 2, 3, 255]}),
    ):
        request.inputs.add(name=name, datatype=datatype, shape=shape, contents=contents)
    outputs = models.infer(request)
    assert outputs["count"].tolist() == [3, -4]
    assert outputs["flag"].tolist() == [True, False]
    assert outputs["share"].tolist() == [0.5, 0.25]
    assert outputs["content"] == [b"\xff", b""]
    assert outputs["small"].tolist() == [[1, 2], [3, 255]]


def _wrong_requests(models: GrpcModels) -> dict[str, tuple[Any, str, str]]:
    pixels = ("FP32", PIXELS)
    make = models.request
    versioned = make("embed", {"pixels": pixels})
    versioned.model_version = "7"
    parameter, tensor_parameter = make("embed", {"pixels": pixels}), make("embed", {"pixels": pixels})
    parameter.parameters["sequence_id"].int64_param = 1
    tensor_parameter.inputs[0].parameters["shared_memory_region"].string_param = "x"
    short, long = make("embed", {"pixels": pixels}), make("embed", {"pixels": pixels})
    short.raw_input_contents[0] = short.raw_input_contents[0][:-4]
    long.raw_input_contents.append(b"")
    both = make("embed", {"pixels": pixels})
    both.inputs[0].contents.fp32_contents.append(1)
    typed = models.messages.ModelInferRequest(model_name="embed")
    typed.inputs.add(name="pixels", datatype="FP32", shape=[1, 3, 1, 1], contents={"int_contents": [1, 2, 3]})
    text = make("embed", {"pixels": ("FP32", PIXELS[:1]), "caption": ("BYTES", [b"\xff"])})
    numbers = {
        "flag": ("BOOL", np.array([True])),
        "count": ("INT64", np.array([1])),
        "content": ("BYTES", [b""]),
        "small": ("UINT8", np.zeros((1, 2), np.uint8)),
    }

    def shaped(*shape: int) -> Any:
        request = make("embed", {"pixels": ("FP32", np.zeros((0, 3, 1, 1), np.float32))})
        request.inputs[0].shape[:] = shape
        return request

    return {
        "no address": (shaped(0, 3, 1 << 62, 1), "INVALID_ARGUMENT", "is no shape"),
        "no product": (shaped(0, 3, 1 << 40, 1 << 40), "INVALID_ARGUMENT", "is no shape"),
        "dimensions": (shaped(*[1] * 10_000), "INVALID_ARGUMENT", "a shape of 10000 dimensions"),
        "empty rows": (shaped(1 << 40, 3, 0, 1), "INVALID_ARGUMENT", "1099511627776 rows would take far more memory"),
        "unknown model": (make("nothing", {}), "NOT_FOUND", "no model 'nothing'"),
        "version": (versioned, "NOT_FOUND", "version '7'"),
        "unknown input": (make("embed", {"x": pixels}), "INVALID_ARGUMENT", "no input 'x'"),
        "missing input": (make("embed", {"caption": ("BYTES", [b""])}), "INVALID_ARGUMENT", "lacks the inputs pixels"),
        "no input": (make("embed", {}), "INVALID_ARGUMENT", "lacks the inputs"),
        "unknown output": (make("embed", {"pixels": pixels}, "x"), "INVALID_ARGUMENT", "no output 'x'"),
        "datatype": (make("embed", {"pixels": ("FP64", PIXELS.astype("f8"))}), "INVALID_ARGUMENT", "expected FP32"),
        "no datatype": (make("embed", {"pixels": ("FLOAT", PIXELS)}), "INVALID_ARGUMENT", "is no datatype"),
        "shape": (make("embed", {"pixels": ("FP32", PIXELS[0])}), "INVALID_ARGUMENT", "expected the shape"),
        "rows": (
            make("embed", {"pixels": pixels, "caption": ("BYTES", [b""])}),
            "INVALID_ARGUMENT",
            "columns of different lengths",
        ),
        "parameter": (parameter, "INVALID_ARGUMENT", "'sequence_id' is not supported"),
        "parameter of an input": (tensor_parameter, "INVALID_ARGUMENT", "'shared_memory_region' is not supported"),
        "bytes": (short, "INVALID_ARGUMENT", "has 1440 bytes, got 1436"),
        "raw contents": (long, "INVALID_ARGUMENT", "raw contents for 2"),
        "both contents": (both, "INVALID_ARGUMENT", "has contents, and the request raw contents"),
        "contents": (typed, "INVALID_ARGUMENT", "contents of FP32 are field 6"),
        "text": (text, "INVALID_ARGUMENT", "not UTF-8"),
        "bound": (make("negate", {**numbers, "share": ("FP64", np.array([2.0]))}), "INVALID_ARGUMENT", "share"),
        "failure": (make("fail", {"pixels": pixels}), "INTERNAL", "ValueError: no good: 5"),
        "refusal": (make("refuse", {"pixels": pixels}), "PERMISSION_DENIED", "not 5 today"),
    }


def test_wrong_requests_are_errors_that_name_the_reason(models: GrpcModels) -> None:
    for name, (request, code, words) in _wrong_requests(models).items():
        with pytest.raises(grpc.RpcError) as caught:
            models.infer(request)
        assert (name, caught.value.code().name) == (name, code)
        assert words in caught.value.details(), name


def test_changed_bytes_of_requests_are_refused_or_answered(models: GrpcModels) -> None:
    data = models.request("embed", {"pixels": ("FP32", PIXELS), "caption": ("BYTES", [b"a"] * 5)}).SerializeToString()
    call = models.channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
    random = np.random.default_rng(7)
    codes = set()
    for _ in range(300):
        changed = bytearray(data[: random.integers(1, len(data) + 1)])
        for place in random.integers(0, min(len(changed), 120), 3).tolist():
            changed[place] = random.integers(256)
        try:
            call(bytes(changed), timeout=60)
        except grpc.RpcError as error:
            codes.add(error.code().name)
    assert codes <= {"INVALID_ARGUMENT", "NOT_FOUND"}
    assert models.infer(models.request("embed", {"pixels": ("FP32", PIXELS)})).keys() >= {"embedding"}


def test_requests_share_batches_without_a_thread_each(messages: Any) -> None:
    """More callers than threads make one batch, and the caller whose rows fail is alone with its error."""
    service = Batched()
    with serve(service, open_inference=True, limits=Limits(max_concurrency=4, max_queue=200), metrics=True) as server:
        with grpc.insecure_channel(server.address) as channel, ThreadPoolExecutor(64) as pool:
            models = GrpcModels(channel, messages)

            def call(number: int) -> Any:
                caption = [b"bad" if number == 13 else b""]
                pixels = ("FP32", np.full((1, 3, 1, 1), number, np.float32))
                try:
                    request = models.request("embed_batched", {"pixels": pixels, "caption": ("BYTES", caption)})
                    return models.infer(request)["embedding"][0, 0]
                except grpc.RpcError as error:
                    return error.details()

            answers = list(pool.map(call, range(64)))
        metrics = server.metrics_url
        assert "a bad one" in answers.pop(13)
        assert answers == [number for number in range(64) if number != 13]
        assert max(service.sizes) > 4
        assert metrics.endswith("/metrics")


@pytest.mark.parametrize("kind", ["threads", "asyncio"])
def test_authorize_applies_to_every_method(messages: Any, kind: str) -> None:
    with open_models(kind, messages, embed, authorize=lambda caller: caller.token == "secret") as models:
        for method, request in (
            ("ServerLive", b""),
            ("ModelInfer", models.request("embed", {"pixels": ("FP32", PIXELS)})),
            ("ModelInfer", models.request("missing", {"pixels": ("FP32", PIXELS)})),  # like one that exists
            ("ModelInfer", b"\xff"),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                models.call(method, request, "ModelInferResponse")
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_workers_serve_models(messages: Any) -> None:
    with (
        serve(embed, open_inference=["embed"], workers=1) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        models = GrpcModels(channel, messages)
        assert "embedding" in models.infer(models.request("embed", {"pixels": ("FP32", PIXELS)}))


def test_endpoints_that_cannot_be_models_are_errors() -> None:
    def loose(docs: DocumentArray[Loose]) -> DocumentArray[Loose]:
        return docs

    def nested(docs: DocumentArray[Nested]) -> DocumentArray[Nested]:
        return docs

    def stream(docs: Iterator[Photo]) -> Iterator[Photo]:
        return docs

    for function, words in (
        (loose, "Loose.pixels needs a dtype and a number of dimensions"),
        (nested, "Nested.photo cannot be an input"),
        (stream, "has no streams"),
    ):
        with pytest.raises(SchemaError, match=words):
            serve(function, open_inference=True)
    with pytest.raises(OptionError, match="no endpoint 'other'"):
        serve(embed, open_inference=["other"])
    with serve([embed, stream], open_inference=["embed"]) as server:  # the others are not asked for
        assert set(server.endpoints) == {"embed", "stream"}


def test_outputs_that_the_protocol_lacks_are_failures_of_the_function(messages: Any) -> None:
    def some(docs: DocumentArray[Photo]) -> DocumentArray[Photo]:
        docs[0].embedding = np.zeros(3, np.float32)
        return docs

    def ragged(docs: DocumentArray[Photo]) -> DocumentArray[Photo]:
        docs[0].pixels = docs[0].pixels[:, :1]
        return docs

    with serve([some, ragged], open_inference=True) as server, grpc.insecure_channel(server.address) as channel:
        models = GrpcModels(channel, messages)
        for model, words in (("some", "row 1 of the output 'embedding' has no value"), ("ragged", "shape")):
            with pytest.raises(grpc.RpcError, match=words) as caught:
                models.infer(models.request(model, {"pixels": ("FP32", PIXELS)}))
            assert caught.value.code() is grpc.StatusCode.INTERNAL
        # Optional fields that no row has are left out, and are an error where they are asked for.
        with pytest.raises(grpc.RpcError, match="has no value"):
            models.infer(models.request("ragged", {"pixels": ("FP32", PIXELS[:1])}, "embedding"))
        assert models.infer(models.request("ragged", {"pixels": ("FP32", PIXELS[:1])})).keys() == {"pixels", "caption"}


# --- HTTP


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    app = FastAPI()
    mount_open_inference(app, MODELS, "/base", limits=Limits(max_request_bytes=100_000))
    with run_app(app, lifespan="on") as site:
        yield site


def infer(site: Site, model: str, request: dict[str, Any], binary: bytes = b"", **headers: str) -> Answer:
    head = json.dumps(request).encode()
    if binary:
        headers["Inference_Header_Content_Length"] = str(len(head))
    return site.request(f"/base/v2/models/{model}/infer", head + binary, **headers)


def http_input(name: str, datatype: str, shape: Any, data: Any = None, **parameters: Any) -> dict[str, Any]:
    entry = {"name": name, "datatype": datatype, "shape": list(shape)}
    return entry | ({"parameters": parameters} if data is None else {"data": data})


JSON_PIXELS = http_input("pixels", "FP32", PIXELS.shape, PIXELS.tolist())
DEEP: Any = "a"
for _ in range(100):
    DEEP = [DEEP]


@pytest.mark.parametrize("model", ["embed", "embed_batched"])
@pytest.mark.parametrize("nested", [True, False])
def test_json_tensors_may_be_flat_or_nested(site: Site, model: str, nested: bool) -> None:
    data = PIXELS.tolist() if nested else PIXELS.ravel().tolist()
    caption = http_input("caption", "BYTES", [5], ["a", "b", "c", "d", "\u00e9"])
    request = {"id": "r1", "inputs": [http_input("pixels", "FP32", PIXELS.shape, data), caption]}
    answer = infer(site, model, request)
    assert answer.type == JSON
    response = answer.json()
    assert (response["id"], response["model_name"], response["model_version"]) == ("r1", model, "1")
    outputs = {output["name"]: output for output in response["outputs"]}
    assert outputs["caption"]["data"] == ["a", "b", "c", "d", "\u00e9"]
    np.testing.assert_allclose(
        np.reshape(outputs["embedding"]["data"], outputs["embedding"]["shape"]), PIXELS.mean(axis=(2, 3)), rtol=1e-5
    )


def test_binary_tensors_follow_the_json(site: Site) -> None:
    pixels = PIXELS.tobytes()
    request = {
        "inputs": [http_input("pixels", "FP32", PIXELS.shape, binary_data_size=len(pixels))],
        "outputs": [{"name": "embedding", "parameters": {"binary_data": True}}, {"name": "caption"}],
    }
    answer = infer(site, "embed", request, pixels, X_Request_Id="order-17")
    assert answer.type == "application/octet-stream"
    assert answer.headers["x-request-id"] == "order-17"
    length = int(answer.headers["inference-header-content-length"])
    embedding, caption = json.loads(answer.body[:length])["outputs"]
    assert embedding["parameters"] == {"binary_data_size": len(answer.body) - length}
    assert caption["data"] == [""] * 5
    values = np.frombuffer(answer.body[length:], "<f4").reshape(embedding["shape"])
    np.testing.assert_allclose(values, PIXELS.mean(axis=(2, 3)), rtol=1e-5)
    everything = {"inputs": request["inputs"], "parameters": {"binary_data_output": True}}
    answer = infer(site, "embed", everything, pixels)
    length = int(answer.headers["inference-header-content-length"])
    assert all("data" not in output for output in json.loads(answer.body[:length])["outputs"])


def test_documents_and_async_functions_over_http(site: Site) -> None:
    one = {"inputs": [http_input("pixels", "FP32", PIXELS[0].shape, PIXELS[0].tolist())]}
    outputs = {output["name"]: output for output in infer(site, "embed_one", one).json()["outputs"]}
    assert outputs["embedding"]["shape"] == [3]
    request = {
        "inputs": [
            http_input("flag", "BOOL", [1], [True]),
            http_input("count", "INT64", [1], [7]),
            http_input("share", "FP32", [1], [0.5]),
            http_input("content", "BYTES", [1], ["x"]),
            http_input("small", "UINT8", [1, 2], [[1, 2]]),
        ]
    }
    outputs = {output["name"]: output for output in infer(site, "negate", request).json()["outputs"]}
    assert outputs["count"]["data"] == [-7]
    assert outputs["flag"]["data"] == [True]


def test_metadata_and_health_over_http(site: Site) -> None:
    def get(path: str) -> Answer:
        return site.request(f"/base/v2{path}", method="GET")

    assert get("").json()["extensions"] == ["binary_tensor_data"]
    for path in ("/health/live", "/health/ready", "/models/embed/ready", "/models/embed/versions/1/ready"):
        assert get(path).status == 200
    assert get("/models/embed").json()["inputs"][0] == {"name": "pixels", "datatype": "FP32", "shape": [-1, 3, -1, -1]}
    assert get("/models/nothing/ready").status == 404
    assert get("/models/embed/versions/2").json() == {"error": "the model 'embed' has no version '2', only '1'."}


@pytest.mark.parametrize(
    ("request_body", "status", "words"),
    [
        ({"inputs": [JSON_PIXELS], "inputz": []}, 400, "unknown key 'inputz'"),
        ({"inputs": [JSON_PIXELS], "parameters": {"priority": 1}}, 400, "'priority' is not supported"),
        ({"inputs": [JSON_PIXELS], "outputs": [{"name": "x"}]}, 400, "no output 'x'"),
        ({"inputs": [{**JSON_PIXELS, "parameters": {"x": 1}}]}, 400, "'x' is not supported"),
        ({"inputs": [{**JSON_PIXELS, "shape": [5, 3, 4, 7]}]}, 400, "has 420 elements, got 360"),
        ({"inputs": [{**JSON_PIXELS, "shape": [5, -3]}]}, 400, "is no shape"),
        ({"inputs": [{**JSON_PIXELS, "data": [[1], [2, 3]]}]}, 400, "no array of FP32"),
        ({"inputs": [{**JSON_PIXELS, "data": ["a"] * 360}]}, 400, "no array of FP32"),
        ({"inputs": [http_input("pixels", "FP32", PIXELS.shape, binary_data_size=4)]}, 400, "0 more bytes"),
        ({"inputs": [http_input("pixels", "FP32", [1, 3, 1, 1], [1, 2, 1e39])]}, 400, "values that are not FP32"),
        ({"inputs": [http_input("pixels", "FP32", [0, 10**30, 0, 0], [])]}, 400, "is no shape"),
        ({"inputs": [JSON_PIXELS, http_input("caption", "BYTES", [1], ["\ud800"])]}, 400, "is not Unicode"),
        ({"inputs": [JSON_PIXELS, http_input("caption", "BYTES", [1], DEEP)]}, 400, "more than 32 dimensions"),
        ({"inputs": "x"}, 400, "no list of inputs"),
        ({}, 400, "no list of inputs"),
        ([1], 400, "no JSON object"),
    ],
)
def test_wrong_bodies_are_errors_in_the_form_of_the_protocol(
    site: Site, request_body: Any, status: int, words: str
) -> None:
    answer = infer(site, "embed", request_body)
    assert answer.status == status
    assert words in answer.json()["error"]


def test_bodies_that_python_cannot_read_are_errors(site: Site) -> None:
    path = "/base/v2/models/embed/infer"
    answer = site.request(path, b"[" * 50_000)
    assert (answer.status, "the body is no JSON" in answer.json()["error"]) == (400, True)
    answer = site.request(path, b"{}", Inference_Header_Content_Length="\xb2")
    assert (answer.status, "is no number of bytes" in answer.json()["error"]) == (400, True)


def test_errors_of_functions_and_limits_over_http(site: Site) -> None:
    request = {"inputs": [JSON_PIXELS]}
    for model, status, words in (("fail", 500, "ValueError: no good: 5"), ("refuse", 403, "not 5 today")):
        answer = infer(site, model, request)
        assert (answer.status, words in answer.json()["error"]) == (status, True)
    large = http_input("pixels", "FP32", (1, 3, 100, 100), [0.5] * 30_000)
    assert infer(site, "embed", {"inputs": [large]}).status == 413
    assert infer(site, "embed", request, Content_Encoding="gzip").status == 415
    assert infer(site, "embed", request, b"xx").status == 400
    nan = {"inputs": [http_input("pixels", "FP32", (1, 3, 1, 1), [float("nan")] * 3)]}
    assert "Ask for the output with binary_data" in infer(site, "embed", nan).json()["error"]
    for count in (1.5, 2**70):
        answer = infer(site, "negate", {"inputs": [http_input("count", "INT64", [1], [count])]})
        assert answer.status == 400
