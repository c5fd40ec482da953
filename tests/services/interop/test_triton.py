"""The clients of Triton, from PyPI, call services; `nox -s triton` runs this, because they need an older protobuf."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.grpc.aio as triton_aio
import tritonclient.http as triton_http
from fastapi import FastAPI
from tritonclient.utils import InferenceServerException

from quire import BaseDocument, DocumentArray, DocumentBatch
from quire.services import endpoint, mount_open_inference, serve
from quire.typing import NdArray, float16, float32, int32
from tests.services.http_server import run_app

pytestmark = pytest.mark.needs("tritonclient", "fastapi", "uvicorn", "grpc", "grpc_health", "grpc_reflection")


class Photo(BaseDocument):
    pixels: NdArray[float32, 3, "height", "width"]
    caption: str = ""
    half: NdArray[float16, 2] | None = None
    count: int = 0
    flag: bool = False
    tokens: NdArray[int32, "length"] | None = None
    embedding: NdArray[float32, 3] | None = None


def embed(docs: DocumentArray[Photo]) -> DocumentArray[Photo]:
    for doc in docs:
        doc.embedding = doc.pixels.mean(axis=(1, 2))
    return docs


@endpoint(max_batch_size=32)
def embed_batched(docs: DocumentBatch[Photo]) -> DocumentBatch[Photo]:
    docs.embedding = docs.pixels.mean(axis=(2, 3))
    return docs


MODELS = [embed, embed_batched]
PIXELS = np.random.default_rng(0).random((5, 3, 4, 6), np.float32)
INPUTS: dict[str, tuple[str, Any]] = {
    "pixels": ("FP32", PIXELS),
    "caption": ("BYTES", np.array([f"picture {i} \u00e9" for i in range(5)], object)),
    "half": ("FP16", np.full((5, 2), 0.5, np.float16)),
    "count": ("INT64", np.arange(5)),
    "flag": ("BOOL", np.arange(5) > 2),
    "tokens": ("INT32", np.arange(15, dtype=np.int32).reshape(5, 3)),
}


@pytest.fixture(scope="module", params=["grpc", "http"])
def site(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Any]]:
    """The module of a client, and a client."""
    if request.param == "grpc":
        with serve(MODELS, open_inference=True) as server:
            yield triton_grpc, triton_grpc.InferenceServerClient(server.address)
        return
    app = FastAPI()
    mount_open_inference(app, MODELS, "/quire")
    with run_app(app, lifespan="on") as site:
        yield triton_http, triton_http.InferenceServerClient(f"127.0.0.1:{site.port}/quire")


def make_inputs(module: Any, **options: Any) -> list[Any]:
    inputs = []
    for name, (datatype, array) in INPUTS.items():
        inputs.append(module.InferInput(name, array.shape, datatype))
        # FP16 exists as binary data only.
        inputs[-1].set_data_from_numpy(array, **({} if datatype == "FP16" else options))
    return inputs


def test_health_and_metadata(site: tuple[Any, Any]) -> None:
    _, client = site
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("embed")
    assert not client.is_model_ready("nothing")
    metadata = client.get_model_metadata("embed", **({"as_json": True} if site[0] is triton_grpc else {}))
    assert {tensor["name"] for tensor in metadata["inputs"]} == {*INPUTS, "embedding"}


@pytest.mark.parametrize("model", ["embed", "embed_batched"])
def test_every_datatype_round_trips(site: tuple[Any, Any], model: str) -> None:
    module, client = site
    forms = [{"binary_data": True}, {"binary_data": False}] if module is triton_http else [{}]
    for form in forms:
        outputs = [module.InferRequestedOutput(name, **form) for name in (*INPUTS, "embedding")]
        result = client.infer(model, make_inputs(module, **form), request_id="r1", outputs=outputs)
        np.testing.assert_allclose(result.as_numpy("embedding"), PIXELS.mean(axis=(2, 3)), rtol=1e-5)
        for name, (datatype, array) in INPUTS.items():
            values = result.as_numpy(name)
            if datatype == "BYTES":
                values = np.array([item.decode() if isinstance(item, bytes) else item for item in values], object)
            assert (values == array).all(), name
    result = client.infer(model, make_inputs(module))  # without naming outputs
    assert result.as_numpy("embedding").shape == (5, 3)


def test_errors_have_the_reason(site: tuple[Any, Any]) -> None:
    module, client = site
    wrong = module.InferInput("pixels", [3, 4, 6], "FP32")
    wrong.set_data_from_numpy(PIXELS[0])
    calls: dict[str, Callable[[], Any]] = {
        "no model 'nothing'": lambda: client.infer("nothing", make_inputs(module)),
        "no version '2'": lambda: client.infer("embed", make_inputs(module), model_version="2"),
        "expected the shape": lambda: client.infer("embed", [wrong]),
        "no output 'x'": lambda: client.infer("embed", make_inputs(module), outputs=[module.InferRequestedOutput("x")]),
        "'priority' is not supported": lambda: client.infer("embed", make_inputs(module), priority=1),
    }
    for words, call in calls.items():
        with pytest.raises(InferenceServerException, match=words):
            call()


def test_concurrent_callers_of_asyncio_share_batches() -> None:
    async def main(address: str) -> None:
        async with triton_aio.InferenceServerClient(address) as client:
            calls = (client.infer("embed_batched", make_inputs(triton_grpc)) for _ in range(32))
            results = await asyncio.gather(*calls)
            assert all(np.allclose(result.as_numpy("embedding"), PIXELS.mean(axis=(2, 3))) for result in results)

    with serve(MODELS, open_inference=True) as server:
        asyncio.run(main(server.address))
