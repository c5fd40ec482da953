"""Who may call: certificates on both sides, and a hook that looks at the caller."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import grpc
import pytest

from quire.errors import OptionError, ServiceAccessError, ServiceUnavailableError
from quire.services import AsyncClient, Caller, Client, Tls, serve, serve_async
from tests.services.gallery import embed, pictures, running

pytestmark = pytest.mark.needs("grpc", "grpc_health", "grpc_reflection")
FOLDER = Path(__file__).parent / "certificates"


def pair(name: str) -> tuple[Path, Path]:
    return FOLDER / f"{name}.pem", FOLDER / f"{name}.key"


CA = FOLDER / "ca.pem"
SERVER, MUTUAL = Tls(*pair("server")), Tls(*pair("server"), ca=CA)


def test_a_client_that_trusts_the_authority_is_answered() -> None:
    with serve(embed, tls=SERVER) as server, Client(f"localhost:{server.port}", tls=Tls(ca=CA)) as client:
        assert client.embed(pictures(1)).label == ["0"]


@pytest.mark.parametrize("tls", [None, Tls(ca=FOLDER / "stranger.pem")], ids=["plain", "another authority"])
def test_a_client_that_does_not_is_not(tls: Tls | None) -> None:
    with (
        serve(embed, tls=SERVER) as server,
        Client(f"localhost:{server.port}", tls=tls, retries=0, timeout=5) as client,
        pytest.raises(ServiceUnavailableError),
    ):
        client.embed(pictures(1))


def test_with_mutual_tls_the_client_shows_its_certificate_and_the_hook_sees_it() -> None:
    seen: list[Caller] = []

    def authorize(caller: Caller) -> bool:
        seen.append(caller)
        return "client.quire.test" in caller.identities

    tls = Tls(*pair("client"), ca=CA.read_bytes())
    with (
        serve(embed, tls=MUTUAL, authorize=authorize) as server,
        Client(f"localhost:{server.port}", tls=tls) as client,
    ):
        assert client.embed(pictures(1)).label == ["0"]
    assert [caller.endpoint for caller in seen] == ["Describe", "embed"]


@pytest.mark.parametrize("tls", [Tls(ca=CA), Tls(*pair("stranger"), ca=CA)], ids=["none", "a stranger's"])
def test_without_a_certificate_that_is_known_there_is_no_answer(tls: Tls) -> None:
    with (
        serve(embed, tls=MUTUAL) as server,
        Client(f"localhost:{server.port}", tls=tls, retries=0, timeout=5) as client,
        pytest.raises(ServiceUnavailableError),
    ):
        client.embed(pictures(1))


def known(caller: Caller) -> bool:
    return caller.token == "secret"


def test_a_token_is_looked_at_before_anything_is_read() -> None:
    with serve([embed, running], authorize=known) as server:
        with Client(server.address, token="secret") as client:
            assert client.embed(pictures(1)).label == ["0"]
            assert len(list(client.running(pictures(2)))) == 2
        with Client(server.address, token="wrong") as client, pytest.raises(ServiceAccessError) as caught:
            client.embed(pictures(1))
        assert caught.value.code == "PERMISSION_DENIED"
        with Client(server.address) as client, pytest.raises(ServiceAccessError, match="token=") as caught:
            client.embed(pictures(1))
        assert caught.value.code == "UNAUTHENTICATED"
        with grpc.insecure_channel(server.address) as channel:
            for method in ("/quire.v1.Documents/embed", "/Service/Embed"):
                with pytest.raises(grpc.RpcError) as refused:
                    channel.unary_unary(method)(b"\xff")
                assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
            with pytest.raises(grpc.RpcError) as refused:
                list(channel.stream_stream("/quire.v1.Documents/running_stream")(iter([b"\xff"])))
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_where_callers_are_looked_at_nothing_is_told_to_others() -> None:
    with serve(embed, authorize=known) as server, grpc.insecure_channel(server.address) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            list(channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")(iter([b""])))
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_a_hook_that_fails_lets_nobody_in() -> None:
    def broken(caller: Caller) -> bool:
        raise RuntimeError(caller.endpoint)

    with serve(embed, authorize=broken) as server, grpc.insecure_channel(server.address) as channel:
        for method in ("embed", "Describe"):
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary(f"/quire.v1.Documents/{method}")(b"")
            assert caught.value.code() is grpc.StatusCode.INTERNAL
            assert "RuntimeError" not in caught.value.details()


def test_the_asyncio_server_looks_too() -> None:
    async def main() -> None:
        async with serve_async([embed, running], authorize=known, tls=SERVER) as server:
            target, tls = f"localhost:{server.port}", Tls(ca=CA)
            async with AsyncClient(target, tls=tls, token="secret") as client:
                assert (await client.embed(pictures(1))).label == ["0"]
                assert len([score async for score in await client.running(pictures(2))]) == 2
            async with AsyncClient(target, tls=tls, token="wrong") as client:
                with pytest.raises(ServiceAccessError):
                    await client.embed(pictures(1))

    asyncio.run(main())


def test_only_this_machine_reaches_a_server_unless_asked_otherwise() -> None:
    with serve(embed) as server:
        assert server.host == "127.0.0.1"
        others = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)} - {"127.0.0.1"}
        for address in others:
            with pytest.raises(OSError, match="refused"):
                socket.create_connection((address, server.port), timeout=5)


def test_half_a_pair_is_an_error() -> None:
    with pytest.raises(OptionError, match="a certificate goes with its key"):
        Tls(certificate=CA)
    with pytest.raises(OptionError, match="a server needs a certificate"):
        serve(embed, tls=Tls(ca=CA))
