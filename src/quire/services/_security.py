"""TLS certificates of servers and clients, and the authorization of callers."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from quire._optional import require
from quire.errors import OptionError, ServiceAccessError, ServiceError

if TYPE_CHECKING:
    from types import ModuleType

    from grpc import ChannelCredentials, ServerCredentials, ServicerContext


Pem = str | os.PathLike[str] | bytes
"""The path of a PEM file, or its content."""


@dataclass(frozen=True)
class Tls:
    """Certificates, as PEM files or their bytes.

    A server needs a `certificate` and its `key`; with `ca`, it requires callers to have a certificate of that
    authority (mutual TLS). A client trusts the authority `ca` (by default those of the system), and presents its own
    `certificate` and `key` to a server that asks for them.
    """

    certificate: Pem | None = None
    key: Pem | None = None
    ca: Pem | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise OptionError("Tls: a certificate goes with its key; pass both or neither.")

    def server_credentials(self) -> ServerCredentials:
        """Return gRPC's credentials of a server."""
        if self.certificate is None or self.key is None:
            raise OptionError("Tls: a server needs a certificate and its key.")
        pair = (_read_pem(self.key), _read_pem(self.certificate))
        ca = _read_pem(self.ca)
        return _grpc().ssl_server_credentials([pair], root_certificates=ca, require_client_auth=ca is not None)

    def channel_credentials(self) -> ChannelCredentials:
        """Return gRPC's credentials of a client."""
        return _grpc().ssl_channel_credentials(_read_pem(self.ca), _read_pem(self.key), _read_pem(self.certificate))


def _read_pem(source: Pem | None) -> bytes | None:
    return source if source is None or isinstance(source, bytes) else Path(source).read_bytes()


def _grpc() -> ModuleType:
    return require("grpc", extra="grpc", needed_for="a gRPC service")


@dataclass(frozen=True)
class Caller:
    """Who calls what: the endpoint, the token, the peer's address, and the names in its certificate."""

    endpoint: str
    token: str | None
    peer: str
    metadata: Mapping[str, str | bytes] = field(default_factory=dict)
    identities: tuple[str, ...] = ()


Authorize = Callable[[Caller], bool]
"""Returns whether a caller may call; it is asked before anything of the request is read."""


def check_caller(authorize: Authorize | None, endpoint: str, context: ServicerContext) -> None:
    """Raise ServiceAccessError for a caller that `authorize` refuses; `context` is gRPC's context of the call."""
    if authorize is None:
        return
    # Pairs are objects of gRPC on one server, and tuples on the other.
    metadata = {pair[0]: pair[1] for pair in context.invocation_metadata() or ()}
    scheme, _, token = str(metadata.get("authorization", "")).partition(" ")
    identities = tuple(name.decode(errors="replace") for name in context.peer_identities() or ())
    # Other schemes than Bearer are no token, but `authorize` finds them in the metadata.
    bearer = token if scheme.lower() == "bearer" and token else None
    caller = Caller(endpoint, bearer, context.peer(), metadata, identities)
    try:
        is_allowed = authorize(caller)
    except ServiceError:
        raise  # a refusal with a reason
    except Exception as error:
        # A fault of the server, whatever class it has: a stranger gets no details, and a grpc.RpcError of an identity
        # provider must not look like one of this call.
        raise RuntimeError(f"{endpoint}: authorize() failed") from error
    if not is_allowed:
        why = "the token is not accepted" if bearer else "there is no token: Client(..., token=...)"
        refusal = ServiceAccessError(f"{endpoint}: the service refuses the call, {why}.")
        refusal.code = "PERMISSION_DENIED" if bearer else "UNAUTHENTICATED"
        raise refusal


def token_metadata(token: str | None) -> tuple[tuple[str, str], ...]:
    """Return the metadata that a client sends with every call."""
    return () if token is None else (("authorization", f"Bearer {token}"),)
