"""Services for tools and other languages: health, reflection, the `.proto`, and generated classes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from quire import BaseDocument
from quire.errors import SchemaError
from quire.services import Server, serve, serve_async, service_proto
from tests.codec.protoc import compile_proto
from tests.services.sample_service import double, embed, pictures, rate, running, spread, total

pytestmark = pytest.mark.needs("grpc", "grpc_health", "grpc_reflection", "grpc_tools")
SERVICE = [embed, rate, running, spread, total, double]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve(SERVICE, name="Gallery", proto=service_proto(SERVICE, package="art", name="Gallery")) as server:
        yield server


@pytest.fixture(scope="module")
def channel(server: Server) -> Iterator[Any]:
    with grpc.insecure_channel(server.address) as channel:
        yield channel


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return compile_proto(service_proto(SERVICE, package="art", name="Gallery"), tmp_path_factory.mktemp("proto"))


# --- health and reflection


def test_health_service_reports_serving() -> None:
    with serve(embed) as server, grpc.insecure_channel(server.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for name in ("", "quire.v1.Documents", "Embed"):
            assert (
                stub.Check(health_pb2.HealthCheckRequest(service=name)).status == health_pb2.HealthCheckResponse.SERVING
            )
        watched = stub.Watch(health_pb2.HealthCheckRequest(service=""))
        assert next(watched).status == health_pb2.HealthCheckResponse.SERVING
        server.stop(grace=0.5)


def test_reflection_lists_services_and_files(channel: Any) -> None:
    ask = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
    request = reflection_pb2.ServerReflectionRequest
    [listed] = ask(iter([request(list_services="")]))
    names = {service.name for service in listed.list_services_response.service}
    assert {"quire.v1.Documents", "art.Gallery", "grpc.health.v1.Health"} <= names
    pool = descriptor_pool.DescriptorPool()
    for symbol in ("quire.v1.Batch", "quire.v1.Documents", "art.Gallery"):
        [response] = ask(iter([request(file_containing_symbol=symbol)]))
        for data in response.file_descriptor_response.file_descriptor_proto:
            pool.Add(descriptor_pb2.FileDescriptorProto.FromString(data))
    service = pool.FindServiceByName("art.Gallery")
    assert [method.name for method in service.methods][:2] == ["Embed", "EmbedStream"]
    assert service.FindMethodByName("Rate").output_type.full_name == "art.Score"


def test_descriptors_of_reflection_suffice_for_a_call(channel: Any) -> None:
    """As grpcurl does: with the descriptors of the server and nothing else."""
    from google.protobuf import json_format, message_factory

    ask = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
    [response] = ask(iter([reflection_pb2.ServerReflectionRequest(file_containing_symbol="art.Gallery")]))
    pool = descriptor_pool.DescriptorPool()
    for data in response.file_descriptor_response.file_descriptor_proto:
        pool.Add(descriptor_pb2.FileDescriptorProto.FromString(data))
    method = pool.FindServiceByName("art.Gallery").FindMethodByName("Rate")
    takes, gives = map(message_factory.GetMessageClass, (method.input_type, method.output_type))
    pixels = np.arange(4, dtype="<f4").tobytes()
    picture = takes(label="four", pixels={"dtype": "float32", "shape": [4], "data": pixels})
    answer = gives.FromString(channel.unary_unary("/art.Gallery/Rate")(picture.SerializeToString()))
    assert json_format.MessageToDict(answer)["value"] == 6.0


# --- the .proto


def test_protoc_classes_call_every_method(channel: Any, generated: Any) -> None:
    def make_picture(number: int) -> Any:
        return generated.Picture.FromString(pictures(number + 1)[number].to_typed_protobuf().SerializeToString())

    def many(*numbers: int) -> Any:
        return generated.PictureArray(documents=[make_picture(number) for number in numbers])

    def method(name: str, arity: str, answer: Any) -> Any:
        return getattr(channel, arity)(
            f"/art.Gallery/{name}", lambda message: message.SerializeToString(), answer.FromString
        )

    embedded = method("Embed", "unary_unary", generated.PictureArray)(many(1, 2))
    vectors = [np.frombuffer(doc.embedding.data, "<f4").tolist() for doc in embedded.documents]
    assert vectors == [[2, 2], [4, 4]]
    assert [doc.id for doc in embedded.documents] == ["p1", "p2"]
    answers = method("EmbedStream", "stream_stream", generated.PictureArray)(iter([many(1), many(2, 3)]))
    assert [len(answer.documents) for answer in answers] == [1, 2]
    assert method("Rate", "unary_unary", generated.Score)(make_picture(2)).value == 8
    assert [
        s.value for s in method("Running", "stream_stream", generated.Score)(iter([make_picture(1), make_picture(2)]))
    ] == [4, 12]
    assert [doc.label for doc in method("Spread", "unary_stream", generated.Picture)(many(1, 2))] == ["1", "2"]
    assert method("Total", "stream_unary", generated.Score)(iter([many(1), many(2)])).value == 12
    doubled = method("Double", "unary_unary", generated.PictureArray)(many(3))
    assert np.frombuffer(doubled.documents[0].pixels.data, "<f4").tolist() == [6] * 4


def test_invalid_value_of_typed_message_names_field(channel: Any, generated: Any) -> None:
    wrong = generated.Picture(pixels={"dtype": "float32", "shape": [8], "data": bytes(32)})
    with pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary("/art.Gallery/Rate")(wrong.SerializeToString())
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "Picture.pixels" in caught.value.details()


def test_previous_proto_keeps_numbers_and_package() -> None:
    before = service_proto(rate, package="art")
    text = before.replace("label = 3", "label = 9")
    again = service_proto(rate, text)
    assert "package art;" in again
    assert "label = 9" in again
    assert service_proto(rate, again) == again


class Gallery(BaseDocument):
    name: str


def gallery_of(doc: Gallery) -> Gallery:
    return doc


def test_service_named_like_a_message_is_renamed(tmp_path: Path) -> None:
    text = service_proto(gallery_of, name="Gallery")
    assert "service GalleryService {" in text
    compile_proto(text, tmp_path)


def anything(doc: BaseDocument) -> BaseDocument:
    return doc


def test_documents_of_any_class_have_no_proto_but_can_be_served() -> None:
    with pytest.raises(SchemaError, match="documents of any class have no .proto"):
        service_proto(anything)
    from quire.services import Client

    with serve(anything) as server, Client(server.address) as client:
        assert client.anything(pictures(1)[0]).label == "0"


def test_proto_command_writes_messages_and_service(tmp_path: Path) -> None:
    out = tmp_path / "gallery.proto"
    command = [sys.executable, "-m", "quire", "proto", "--service", "tests.services.sample_service:embed"]
    done = subprocess.run(
        [*command, "--package", "shop", "--output", str(out)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "rpc Embed(PictureArray) returns (PictureArray);" in out.read_text()
    compile_proto(out.read_text(), tmp_path)
    again = subprocess.run([*command, "--output", str(out)], capture_output=True, text=True, check=False)
    assert again.returncode == 0
    assert "package shop;" in out.read_text()


def test_async_server_offers_health_and_typed_methods(generated: Any) -> None:
    async def main() -> None:
        proto = service_proto(SERVICE, package="art", name="Gallery")
        async with (
            serve_async(SERVICE, name="Gallery", proto=proto) as server,
            grpc.aio.insecure_channel(server.address) as channel,
        ):
            status = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=""))
            assert status.status == health_pb2.HealthCheckResponse.SERVING
            message = generated.Picture.FromString(pictures(2)[1].to_typed_protobuf().SerializeToString())
            total = channel.stream_unary("/art.Gallery/Total")
            array = generated.PictureArray(documents=[message])
            answer = generated.Score.FromString(await total(iter([array.SerializeToString()])))
            assert answer.value == 4

    asyncio.run(main())


def test_importing_services_does_not_import_grpc() -> None:
    code = "import sys, quire.services\nfrom quire.services import endpoint, Limits\nprint('grpc' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
