"""The keywords of `serve` and `serve_async`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import Self, TypedDict

from quire.errors import OptionError, ServiceError, check_options
from quire.services._limits import ASIDE, Limits
from quire.services._memory import keep_memory
from quire.services._security import Authorize, Tls

DEFAULT_LIMITS = Limits()


class Serving(TypedDict, total=False):
    """How a service is served.

    limits: what the server takes on at most.
    tls: its certificate; callers then need TLS too.
    authorize: a function that is told who calls, and says whether they may.
    name: the service's name for other languages, unless it is that of the class or function.
    proto: the `.proto` whose numbers and package other languages use, as `quire proto --service` wrote it.
    reflection: whether tools may ask for the methods; by default where there is no `authorize`.
    grace: how many seconds calls have to end when the server stops.
    """

    limits: Limits
    tls: Tls
    authorize: Authorize
    name: str
    proto: str | os.PathLike[str]
    reflection: bool
    grace: float


@dataclass(frozen=True)
class ServeOptions:
    """The keywords, with what stands for those that are left out; see `Serving`."""

    limits: Limits = DEFAULT_LIMITS
    tls: Tls | None = None
    authorize: Authorize | None = None
    name: str | None = None
    proto: str | os.PathLike[str] | None = None
    reflection: bool | None = None
    grace: float = 30.0

    @classmethod
    def of(cls, call: str, keywords: Serving) -> Self:
        """The options of a call; an unknown keyword is an error."""
        check_options(call, keywords, Serving.__annotations__)
        return cls(**keywords)

    def __post_init__(self) -> None:
        if self.grace < 0:
            raise OptionError(f"grace={self.grace}: use seconds, 0 or more.")

    @property
    def previous(self) -> str | None:
        """The text of the `.proto`."""
        if self.proto is None or (isinstance(self.proto, str) and "\n" in self.proto):
            return self.proto
        return Path(self.proto).read_text(encoding="utf-8")

    @property
    def reflects(self) -> bool:
        """Whether tools may ask for the methods."""
        return self.authorize is None if self.reflection is None else self.reflection

    def server_arguments(self) -> dict[str, Any]:
        """What gRPC's servers take."""
        keep_memory()
        options = [
            ("grpc.max_receive_message_length", self.limits.max_message_bytes),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", 0),  # else two servers could share a port, and neither would know
        ]
        most = self.limits.max_concurrency + self.limits.max_queue
        return {"options": options, "maximum_concurrent_rpcs": most + ASIDE}


def bind(server: Any, host: str, port: int, tls: Tls | None) -> int:
    """Open the port; the number that was given, where 0 was asked for."""
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        if tls is None:
            bound = int(server.add_insecure_port(address))
        else:
            bound = int(server.add_secure_port(address, tls.server_credentials()))
    except RuntimeError as error:
        raise ServiceError(f"{address} cannot be opened: {error}") from error
    if bound == 0:  # which is how old versions of gRPC tell
        raise ServiceError(f"{address} cannot be opened: it is in use, or not an address of this machine.")
    return bound
