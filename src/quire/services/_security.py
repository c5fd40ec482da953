"""Who may call, and over which line: TLS on both sides, and a hook that looks at the caller."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire._optional import require
from quire.errors import OptionError, ServiceAccessError

Pem = str | os.PathLike[str] | bytes
"""The path of a PEM file, or what stands in one."""


@dataclass(frozen=True)
class Tls:
    """Certificates, as PEM files or their bytes.

    A server needs a `certificate` and its `key`; with `ca`, it asks callers for certificates of that authority (mutual
    TLS). A client trusts the authority `ca` (those of the system, unless given), and shows its own `certificate`, with
    its `key`, to a server that asks.
    """

    certificate: Pem | None = None
    key: Pem | None = None
    ca: Pem | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise OptionError("Tls: a certificate goes with its key; give both or neither.")

    def server_credentials(self) -> Any:
        """What gRPC's servers take."""
        if self.certificate is None or self.key is None:
            raise OptionError("Tls: a server needs a certificate and its key.")
        pair = (_pem(self.key), _pem(self.certificate))
        ca = None if self.ca is None else _pem(self.ca)
        return _grpc().ssl_server_credentials([pair], root_certificates=ca, require_client_auth=ca is not None)

    def channel_credentials(self) -> Any:
        """What gRPC's clients take."""
        parts = [None if part is None else _pem(part) for part in (self.ca, self.key, self.certificate)]
        return _grpc().ssl_channel_credentials(*parts)


def _pem(source: Pem) -> bytes:
    return source if isinstance(source, bytes) else Path(source).read_bytes()


def _grpc() -> Any:
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
"""Whether a caller may; called before anything of the request is read."""


def caller_of(endpoint: str, context: Any) -> Caller:
    """The caller, from gRPC's context of a call."""
    metadata = {pair[0]: pair[1] for pair in context.invocation_metadata() or ()}
    scheme, _, token = str(metadata.get("authorization", "")).partition(" ")
    identities = tuple(name.decode(errors="replace") for name in context.peer_identities() or ())
    return Caller(
        endpoint, token if scheme.lower() == "bearer" and token else None, context.peer(), metadata, identities
    )


def check_caller(authorize: Authorize | None, endpoint: str, context: Any) -> None:
    """Raise an error for a caller that may not."""
    if authorize is None:
        return
    caller = caller_of(endpoint, context)
    if not authorize(caller):
        why = "the token is not accepted" if caller.token else "there is no token: Client(..., token=...)"
        refused = ServiceAccessError(f"{endpoint}: the service refuses the call, {why}.")
        refused.code = "PERMISSION_DENIED" if caller.token else "UNAUTHENTICATED"
        raise refused


def token_metadata(token: str | None) -> tuple[tuple[str, str], ...]:
    """What a client sends with every call."""
    return () if token is None else (("authorization", f"Bearer {token}"),)
