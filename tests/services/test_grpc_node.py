"""A Node client of a service in Python, which has only the `.proto`."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from quire.services import serve, service_proto
from tests.conftest import node_environment
from tests.services import sample_service

pytestmark = pytest.mark.needs(
    "grpc", "grpc_health", "grpc_reflection", "node:@grpc/grpc-js", "node:@grpc/proto-loader"
)
SERVICE = [sample_service.embed, sample_service.rate, sample_service.running]


def test_node_client_calls_the_service(tmp_path: Path) -> None:
    text = service_proto(SERVICE, package="art", name="Gallery")
    file = tmp_path / "gallery.proto"
    file.write_text(text)
    script = Path(__file__).with_name("client.js")
    with serve(SERVICE, name="Gallery", proto=file) as server:
        command = ["node", str(script), str(file), server.address]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=node_environment())
    assert done.returncode == 0, done.stderr
    output = json.loads(done.stdout)
    assert output["embeddings"] == [[2, 4], [10, 12]]
    assert output["labels"] == ["one", "two"]
    assert output["scores"] == [10, 36]
    assert output["streamed"] == [["one"], ["two", "one"]]
    assert output["wrong"]["code"] == 3  # INVALID_ARGUMENT
    assert "Picture.pixels" in output["wrong"]["details"]
