"""TLS certificates of servers and clients, and the authorization of callers."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import grpc
import pytest

from quire.errors import OptionError, ServiceAccessError, ServiceUnavailableError
from quire.services import AsyncClient, Caller, Client, Tls, serve, serve_async
from tests.certificates import Certificates, KeyPair, generate_certificates
from tests.services.sample_service import embed, pictures, running

pytestmark = pytest.mark.needs("grpc", "grpc_health", "grpc_reflection", "trustme")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return generate_certificates(tmp_path_factory.mktemp("certificates"))


def make_tls(pair: KeyPair, **options: object) -> Tls:
    return Tls(pair.certificate, pair.key, **options)  # type: ignore[arg-type]


def test_client_that_trusts_the_authority_is_answered(certificates: Certificates) -> None:
    trusting = Tls(ca=certificates.authority)
    with (
        serve(embed, tls=make_tls(certificates.server)) as server,
        Client(f"localhost:{server.port}", tls=trusting) as client,
    ):
        assert client.embed(pictures(1)).label == ["0"]


UNTRUSTING: dict[str, Callable[[Certificates], Tls | None]] = {
    "plain": lambda _: None,
    "another authority": lambda certificates: Tls(ca=certificates.other_authority),
}


@pytest.mark.parametrize("tls", UNTRUSTING.values(), ids=UNTRUSTING)
def test_client_without_trust_cannot_connect(
    certificates: Certificates, tls: Callable[[Certificates], Tls | None]
) -> None:
    with (
        serve(embed, tls=make_tls(certificates.server)) as server,
        Client(f"localhost:{server.port}", tls=tls(certificates), retries=0, timeout=5) as client,
        pytest.raises(ServiceUnavailableError),
    ):
        client.embed(pictures(1))


def test_authorize_sees_identities_of_client_certificate(certificates: Certificates) -> None:
    callers: list[Caller] = []

    def authorize(caller: Caller) -> bool:
        callers.append(caller)
        return "client.quire.test" in caller.identities

    tls = make_tls(certificates.client, ca=certificates.authority.read_bytes())
    with (
        serve(embed, tls=make_tls(certificates.server, ca=certificates.authority), authorize=authorize) as server,
        Client(f"localhost:{server.port}", tls=tls) as client,
    ):
        assert client.embed(pictures(1)).label == ["0"]
    assert [caller.endpoint for caller in callers] == ["Describe", "embed"]


UNKNOWN: dict[str, Callable[[Certificates], Tls]] = {
    "no certificate": lambda certificates: Tls(ca=certificates.authority),
    "of a stranger": lambda certificates: make_tls(certificates.stranger, ca=certificates.authority),
}


@pytest.mark.parametrize("tls", UNKNOWN.values(), ids=UNKNOWN)
def test_mutual_tls_rejects_clients_without_known_certificate(
    certificates: Certificates, tls: Callable[[Certificates], Tls]
) -> None:
    with (
        serve(embed, tls=make_tls(certificates.server, ca=certificates.authority)) as server,
        Client(f"localhost:{server.port}", tls=tls(certificates), retries=0, timeout=5) as client,
        pytest.raises(ServiceUnavailableError),
    ):
        client.embed(pictures(1))


def has_token(caller: Caller) -> bool:
    return caller.token == "secret"


def test_authorize_checks_token_before_request_is_read() -> None:
    with serve([embed, running], authorize=has_token) as server:
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


def test_authorize_turns_reflection_off() -> None:
    with serve(embed, authorize=has_token) as server, grpc.insecure_channel(server.address) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            list(channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")(iter([b""])))
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_failing_authorize_refuses_every_call() -> None:
    def broken(caller: Caller) -> bool:
        raise RuntimeError(caller.endpoint)

    with serve(embed, authorize=broken) as server, grpc.insecure_channel(server.address) as channel:
        for method in ("embed", "Describe"):
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary(f"/quire.v1.Documents/{method}")(b"")
            assert caught.value.code() is grpc.StatusCode.INTERNAL
            assert "RuntimeError" not in caught.value.details()


def test_async_server_checks_tokens(certificates: Certificates) -> None:
    async def main() -> None:
        async with serve_async([embed, running], authorize=has_token, tls=make_tls(certificates.server)) as server:
            target, tls = f"localhost:{server.port}", Tls(ca=certificates.authority)
            async with AsyncClient(target, tls=tls, token="secret") as client:
                assert (await client.embed(pictures(1))).label == ["0"]
                assert len([score async for score in await client.running(pictures(2))]) == 2
            async with AsyncClient(target, tls=tls, token="wrong") as client:
                with pytest.raises(ServiceAccessError):
                    await client.embed(pictures(1))

    asyncio.run(main())


def test_server_listens_on_loopback_by_default() -> None:
    with serve(embed) as server:
        assert server.host == "127.0.0.1"
        others = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)} - {"127.0.0.1"}
        for address in others:
            with pytest.raises(OSError, match="refused"):
                socket.create_connection((address, server.port), timeout=5)


def test_tls_rejects_certificate_without_key() -> None:
    with pytest.raises(OptionError, match="a certificate goes with its key"):
        Tls(certificate=b"certificate")
    with pytest.raises(OptionError, match="a server needs a certificate"):
        serve(embed, tls=Tls(ca=b"certificate"))
