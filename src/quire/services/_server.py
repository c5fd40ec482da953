"""The gRPC server on threads, the options of `serve`, and what both servers share."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn

from typing_extensions import Self, TypedDict, Unpack

from quire._optional import require
from quire.errors import OptionError, ServiceError, check_options
from quire.services._admission import Door, Lane
from quire.services._calls import Calls, LoopThread
from quire.services._endpoints import Endpoint
from quire.services._errors import KIND, Status, status_of
from quire.services._limits import ASIDE, Limits, keep_memory
from quire.services._security import Authorize, Tls, check_caller
from quire.services._service_spec import DESCRIBE, SERVICE, Offer, Offered, describe_for_reflection, make_offer

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


grpc: Any = require("grpc", extra="grpc", needed_for="a gRPC service")


class Server:
    """A service that is being served; it ends with its `with` block, by `stop()`, or by SIGTERM during `wait()`."""

    def __init__(self, offer: Offer, host: str, port: int, options: ServeOptions) -> None:
        """Start to serve."""
        self._offer, self._options = offer, options
        self._loop = LoopThread()
        self._calls = Calls(offer.endpoints, options.limits, self._loop.run)
        self._lane = Lane(options.limits.max_concurrency, "quire serve")
        self._door = Door(self._lane, options.limits, self._report_starved)
        self._server = grpc.server(self._lane, interceptors=[self._door], **options.server_arguments())
        self._asked, self._stopping = threading.Event(), threading.Lock()
        self._stopped = False
        self._server.add_generic_rpc_handlers(list(_rpc_methods(self._offer, self._method, self._describe)))
        self._health = add_tools(self._server, offer, options)
        self.host = host
        self.port = bind(self._server, host, port, options.tls)
        self._server.start()
        for name in (LIVENESS, *ready_names(offer)):
            self._health.set(name, serving())

    @property
    def endpoints(self) -> dict[str, Endpoint]:
        """What can be called, by name."""
        return self._offer.endpoints

    @property
    def address(self) -> str:
        """Host and port, as a `Client` takes them."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the server is asked to stop, by `stop()` or SIGTERM, and has; False if the time was up before."""
        with _on_sigterm(self._asked.set):
            if not self._asked.wait(timeout):
                return False
        self.stop()
        return True

    def stop(self, grace: float | None = None) -> None:
        """Take no new calls, let those that run end within `grace` seconds, and end."""
        self._asked.set()
        with self._stopping:
            if self._stopped:
                return
            grace = self._options.grace if grace is None else grace
            self._health.enter_graceful_shutdown()
            self._server.stop(grace).wait()
            self._calls.close(grace)
            self._loop.close()
            self._lane.shutdown(wait=False)
            self._door.close()
            self._stopped = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, tp: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def _report_starved(self, *, is_starved: bool) -> None:
        for name in ready_names(self._offer):
            self._health.set(name, not_serving() if is_starved else serving())

    # --- what is called

    def _describe(self, _: bytes, context: Any) -> bytes:
        try:
            self._door.check()
            check_caller(self._options.authorize, DESCRIBE, context)
        except Exception as error:  # noqa: BLE001
            _abort(context, status_of(error))
        return self._offer.description

    def _method(self, offered: Offered) -> Callable[..., Any]:
        endpoint = offered.endpoint

        def unary(data: bytes, context: Any) -> bytes:
            try:
                self._door.check()
                with self._door.slots.end_by_itself():
                    return self._answer(endpoint, data, context)
            except Exception as error:  # noqa: BLE001 - the caller is told, and the server lives on
                _abort(context, status_of(error))

        def stream(messages: Any, context: Any) -> Iterator[bytes]:
            try:
                self._door.check()
                check_caller(self._options.authorize, endpoint.name, context)
                with self._calls.budget.account() as account:
                    single = messages if offered.streams[0] else [messages]
                    yield from self._calls.stream(endpoint, single, account, framed=offered.framed)
            except grpc.RpcError:
                return  # the caller is gone
            except Exception as error:  # noqa: BLE001
                _abort(context, status_of(error))

        def gathered(messages: Any, context: Any) -> bytes:
            return b"".join(stream(messages, context))

        if not any(offered.streams):
            return unary
        return stream if offered.streams[1] else gathered

    def _answer(self, endpoint: Endpoint, data: bytes, context: Any) -> bytes:
        check_caller(self._options.authorize, endpoint.name, context)
        with self._calls.budget.account() as account:
            account.take(len(data))
            if not endpoint.batched:
                return self._calls.answer(endpoint, data)
            future = self._calls.submit(endpoint, data)
            context.add_callback(future.cancel)  # a caller who is gone does not wait in the queue
            return self._calls.encode(endpoint, future.result())


def serve(service: Any, host: str = "127.0.0.1", port: int = 0, **how: Unpack[Serving]) -> Server:
    """Serve a function on documents, a class of such, or a list, over gRPC; on a free port unless one is given.

    The server runs on threads of this process, until its `with` block ends or `stop()` is called. `wait()` waits until
    the process is asked to end. Other machines reach it only through a `host` that is not this machine's own.
    """
    options = ServeOptions.of("serve", how)
    return Server(make_offer(service, options.limits, options.name, options.previous), host, port, options)


def _abort(context: Any, status: Status) -> NoReturn:
    context.set_trailing_metadata(((KIND, status.kind),))
    context.abort(grpc.StatusCode[status.code], status.message)
    raise AssertionError  # abort() raises


def _rpc_methods(offer: Offer, make: Callable[[Offered], Any], describe: Any) -> Iterator[Any]:
    """gRPC's own tables of methods, a table a service."""
    arities = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }
    tables: dict[str, dict[str, Any]] = {SERVICE: {DESCRIBE: grpc.unary_unary_rpc_method_handler(describe)}}
    for offered in offer.methods():
        tables.setdefault(offered.service, {})[offered.name] = arities[offered.streams](make(offered))
    for service, methods in tables.items():
        yield grpc.method_handlers_generic_handler(service, methods)


LIVENESS, READINESS = "liveness", "readiness"
"""The names under which Kubernetes asks for the two kinds of health, by its documentation."""


def ready_names(offer: Offer) -> tuple[str, ...]:
    """The names in the health service that say whether calls are accepted; LIVENESS says that the process answers."""
    return ("", READINESS, *offer.service_names)


def serving() -> Any:
    """The state of health while calls are taken."""
    return require("grpc_health.v1.health_pb2", extra="grpc", needed_for="a gRPC service").HealthCheckResponse.SERVING


def not_serving() -> Any:
    """The state of health while calls are refused."""
    health = require("grpc_health.v1.health_pb2", extra="grpc", needed_for="a gRPC service")
    return health.HealthCheckResponse.NOT_SERVING


def add_tools(server: Any, offer: Offer, options: ServeOptions, *, aio: bool = False) -> Any:
    """The standard services: health, and reflection where it is wanted. The first is given back."""
    health = require("grpc_health.v1.health", extra="grpc", needed_for="a gRPC service")
    reflection = require("grpc_reflection.v1alpha.reflection", extra="grpc", needed_for="a gRPC service")
    services = require("grpc_health.v1.health_pb2_grpc", extra="grpc", needed_for="a gRPC service")
    servicer = health.aio.HealthServicer() if aio else health.HealthServicer()
    services.add_HealthServicer_to_server(servicer, server)
    if options.reflects:
        names = (*offer.service_names, health.SERVICE_NAME)
        reflection.enable_server_reflection(names, server, describe_for_reflection(offer))
    return servicer


@contextlib.contextmanager
def _on_sigterm(call: Callable[[], None]) -> Iterator[None]:
    """Call a function when the process is asked to end; only the main thread can listen."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def asked(_: int, __: FrameType | None) -> None:
        call()

    before = signal.signal(signal.SIGTERM, asked)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
