"""A server and a client on old and new protobuf runtimes, in two environments.

`QUIRE_OLD_PYTHON` is the Python of an environment with protobuf 3.20 and gRPC 1.48; `nox -s services` creates it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.needs("grpc", "grpc_health", "grpc_reflection")
ROOT = Path(__file__).parents[3]
CLIENT = """
import sys, google.protobuf, grpc
from quire.services import Client
from tests.services.sample_service import embed, pictures, running
from tests.services.sample_service import Picture
with Client(sys.argv[1]) as client:
    docs = pictures(3)
    assert client.embed(docs).identical(embed(pictures(3)))
    assert client.double(docs.stack()).pixels[2].tolist() == [4, 4, 4, 4]
    large = pictures(60_000)
    assert client.embed(large).label == large.label
    assert [score.value for score in client.running(pictures(3))] == [0, 4, 12]
    assert [score.value for score in client.running_later(pictures(3))] == [0, 4, 12]
with grpc.insecure_channel(sys.argv[1]) as channel:
    message = docs[2].to_typed_protobuf().SerializeToString()
    assert b"2" in channel.unary_unary("/Service/Rate")(message)
print(google.protobuf.__version__.split(".")[0], grpc.__version__)
"""
SERVED = [f"tests.services.sample_service:{name}" for name in ("embed", "double", "running", "running_later", "rate")]


def old_python() -> str:
    python = os.environ.get("QUIRE_OLD_PYTHON")
    assert python, "set QUIRE_OLD_PYTHON, or run `nox -s services`"
    return python


@pytest.mark.parametrize("server_is_old", [True, False], ids=["old server", "old client"])
def test_old_and_new_protobuf_runtimes_work_together(server_is_old: bool) -> None:
    old, new = old_python(), sys.executable
    server, client = (old, new) if server_is_old else (new, old)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [server, "-m", "quire", "serve", *SERVED, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().removeprefix("serving on ").strip()
            done = subprocess.run(
                [client, "-c", CLIENT, address],
                capture_output=True,
                text=True,
                check=False,
                env=environment,
                timeout=120,
            )
        finally:
            process.terminate()
        assert process.wait(20) == 0
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] == ("7" if server_is_old else "3")
