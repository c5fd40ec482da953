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
from typing import TYPE_CHECKING, Any, NoReturn

from typing_extensions import Self, TypedDict, Unpack

from quire._optional import require
from quire.errors import OptionError, ServiceError, check_options
from quire.services._admission import HEALTH_SERVICE, AdmissionInterceptor, CountingExecutor
from quire.services._calls import Calls, LoopThread
from quire.services._endpoints import Endpoint
from quire.services._errors import Status, error_to_status
from quire.services._limits import Limits, retain_message_memory
from quire.services._security import Authorize, Tls, check_caller
from quire.services._service_spec import DESCRIBE, SERVICE, MethodSpec, ServiceSpec

if TYPE_CHECKING:
    from grpc import Server as GrpcServer
    from grpc import ServicerContext


grpc: Any = require("grpc", extra="grpc", needed_for="a gRPC service")
SERVING, NOT_SERVING = 1, 2  # of grpc.health.v1.HealthCheckResponse

LIVENESS, READINESS = "liveness", "readiness"
"""The names under which Kubernetes asks for the two kinds of health, by its documentation."""
_EXTRA_RPCS = 1024
"""How many calls beyond the limits gRPC accepts, so that they are refused with a reason or are health checks."""
_DEFAULT_LIMITS = Limits()


class ServeKeywords(TypedDict, total=False):
    """The keywords of `serve`, which explains them, and of `serve_async`."""

    limits: Limits
    tls: Tls
    authorize: Authorize
    name: str
    proto: str | os.PathLike[str]
    reflection: bool
    grace: float


@dataclass(frozen=True)
class ServeOptions:
    """The keywords with their defaults; see `ServeKeywords`."""

    limits: Limits = _DEFAULT_LIMITS
    tls: Tls | None = None
    authorize: Authorize | None = None
    name: str | None = None
    proto: str | os.PathLike[str] | None = None
    reflection: bool | None = None
    grace: float = 30.0

    @classmethod
    def from_keywords(cls, call: str, keywords: ServeKeywords) -> Self:
        """Return the options of a call; an unknown keyword is an error."""
        check_options(call, keywords, ServeKeywords.__annotations__)
        return cls(**keywords)

    def __post_init__(self) -> None:
        if self.grace < 0:
            raise OptionError(f"grace={self.grace}: use seconds, 0 or more.")

    @property
    def proto_text(self) -> str | None:
        """The text of the `.proto`, which is passed as a text with line breaks or as a path."""
        if self.proto is None or (isinstance(self.proto, str) and "\n" in self.proto):
            return self.proto
        return Path(self.proto).read_text(encoding="utf-8")

    @property
    def has_reflection(self) -> bool:
        """Whether tools may ask for the methods."""
        return self.authorize is None if self.reflection is None else self.reflection


class BaseServer:
    """What the servers on threads and on asyncio have in common."""

    port: int

    def __init__(self, service: object, host: str, options: ServeOptions) -> None:
        self.host = host
        self._options = options
        self._spec = ServiceSpec.build(service, options.limits, options.name, options.proto_text)

    @property
    def endpoints(self) -> dict[str, Endpoint]:
        """The endpoints, by name."""
        return self._spec.endpoints

    @property
    def address(self) -> str:
        """Host and port, as clients take them."""
        return _join_address(self.host, self.port)

    @property
    def _readiness_names(self) -> tuple[str, ...]:
        """The names in the health service that report whether calls are accepted."""
        return ("", READINESS, *self._spec.service_names)

    def _server_arguments(self) -> dict[str, Any]:
        """Return the arguments of gRPC's servers."""
        retain_message_memory()
        limits = self._options.limits
        options = [
            ("grpc.max_receive_message_length", limits.max_message_bytes),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", 0),  # otherwise two servers could share a port without noticing
        ]
        return {"options": options, "maximum_concurrent_rpcs": limits.max_calls + _EXTRA_RPCS}

    def _add_services(
        self, server: GrpcServer, make_method: Callable[[MethodSpec], Any], describe: Callable[..., Any]
    ) -> None:
        """Add the services of the spec to a gRPC server, and reflection where it is enabled."""
        make_handler = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, False): grpc.stream_unary_rpc_method_handler,
            (True, True): grpc.stream_stream_rpc_method_handler,
        }
        # Generic handlers take and return bytes: quire encodes messages itself, without generated classes.
        services: dict[str, dict[str, Any]] = {SERVICE: {DESCRIBE: grpc.unary_unary_rpc_method_handler(describe)}}
        for method in self._spec.methods():
            handler = make_handler[method.streams](make_method(method))
            services.setdefault(method.service, {})[method.name] = handler
        handlers = [grpc.method_handlers_generic_handler(name, methods) for name, methods in services.items()]
        server.add_generic_rpc_handlers(handlers)
        if self._options.has_reflection:
            reflection = require("grpc_reflection.v1alpha.reflection", extra="grpc", needed_for="a gRPC service")
            names = (*self._spec.service_names, HEALTH_SERVICE)
            reflection.enable_server_reflection(names, server, self._spec.descriptor_pool())

    def _bind(self, server: GrpcServer, port: int) -> int:
        """Open the port, and return its number, which the system chooses for port 0."""
        address, tls = _join_address(self.host, port), self._options.tls
        try:
            if tls is None:
                bound = int(server.add_insecure_port(address))
            else:
                bound = int(server.add_secure_port(address, tls.server_credentials()))
        except RuntimeError as error:
            raise ServiceError(f"{address} cannot be opened: {error}") from error
        if bound == 0:  # how old versions of gRPC report a failure
            raise ServiceError(f"{address} cannot be opened: it is in use, or not an address of this machine.")
        return bound


def _join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def add_health(server: GrpcServer, *, aio: bool = False) -> Any:
    """Add the standard health service to a gRPC server, and return its servicer."""
    health = require("grpc_health.v1.health", extra="grpc", needed_for="a gRPC service")
    health_grpc = require("grpc_health.v1.health_pb2_grpc", extra="grpc", needed_for="a gRPC service")
    servicer = health.aio.HealthServicer() if aio else health.HealthServicer()
    health_grpc.add_HealthServicer_to_server(servicer, server)
    return servicer


class Server(BaseServer):
    """A running service; it stops at the end of its `with` block, by `stop()`, or by SIGTERM during `wait()`."""

    def __init__(self, service: object, host: str, port: int, options: ServeOptions) -> None:
        """Start to serve."""
        super().__init__(service, host, options)
        self._loop = LoopThread()
        self._calls = Calls(self.endpoints, options.limits, self._loop.run)
        self._executor = CountingExecutor(options.limits.max_concurrency, "quire serve")
        self._admission = AdmissionInterceptor(self._executor, options.limits, self._report_starved)
        self._server = grpc.server(self._executor, interceptors=[self._admission], **self._server_arguments())
        self._stop_requested, self._stop_lock = threading.Event(), threading.Lock()
        self._stopped = False
        self._add_services(self._server, self._make_method, self._describe)
        self._health = add_health(self._server)
        self.port = self._bind(self._server, port)
        self._server.start()
        for name in (LIVENESS, *self._readiness_names):
            self._health.set(name, SERVING)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the server has stopped, by `stop()` or SIGTERM; return False if the timeout passes before."""
        with _on_sigterm(self._stop_requested.set):
            if not self._stop_requested.wait(timeout):
                return False
        self.stop()
        return True

    def stop(self, grace: float | None = None) -> None:
        """Accept no new calls, let running calls finish within `grace` seconds, and stop."""
        self._stop_requested.set()
        with self._stop_lock:
            if self._stopped:
                return
            grace = self._options.grace if grace is None else grace
            # Health first, so that load balancers stop sending calls; then the calls, and last what they run on.
            self._health.enter_graceful_shutdown()
            self._server.stop(grace).wait()
            self._calls.close(grace)
            self._loop.close()
            self._executor.shutdown(wait=False)
            self._admission.close()
            self._stopped = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, tp: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def _report_starved(self, *, is_starved: bool) -> None:
        for name in self._readiness_names:
            self._health.set(name, NOT_SERVING if is_starved else SERVING)

    # --- methods

    def _describe(self, _: bytes, context: ServicerContext) -> bytes:
        try:
            self._admission.check()
            check_caller(self._options.authorize, DESCRIBE, context)
        except Exception as error:  # noqa: BLE001 - the caller gets it
            _abort(context, error_to_status(error))
        return self._spec.description

    def _make_method(self, method: MethodSpec) -> Callable[..., Any]:
        endpoint = method.endpoint

        def answer(data: bytes, context: ServicerContext) -> bytes:
            try:
                self._admission.check()
                # Calls may wait for this one, since its request is complete; they are refused where streams run.
                with self._admission.slots.ends_by_itself():
                    return self._answer(endpoint, data, context)
            except Exception as error:  # noqa: BLE001 - the caller gets it, and the server goes on
                _abort(context, error_to_status(error))

        def stream(messages: Any, context: ServicerContext) -> Iterator[bytes]:
            try:
                self._admission.check()
                check_caller(self._options.authorize, endpoint.name, context)
                with self._calls.budget.account() as account:
                    requests = messages if method.streams[0] else [messages]
                    yield from self._calls.stream(endpoint, requests, account, framed=method.framed)
            except grpc.RpcError:
                return  # the caller is gone
            except Exception as error:  # noqa: BLE001 - the caller gets it, and the server goes on
                _abort(context, error_to_status(error))

        if not any(method.streams):
            return answer
        # A method that takes a stream and returns one value yields exactly one message.
        return stream if method.streams[1] else lambda messages, context: b"".join(stream(messages, context))

    def _answer(self, endpoint: Endpoint, data: bytes, context: ServicerContext) -> bytes:
        check_caller(self._options.authorize, endpoint.name, context)
        with self._calls.budget.account() as account:
            account.take(len(data))
            if not endpoint.batched:
                return self._calls.answer(endpoint, data)
            future = self._calls.submit(endpoint, data)
            # A caller who is gone does not wait in the queue. gRPC refuses the callback of a call that has ended.
            if not context.add_callback(future.cancel):
                future.cancel()
            return self._calls.encode(endpoint, future.result())


def serve(service: object, host: str = "127.0.0.1", port: int = 0, **options: Unpack[ServeKeywords]) -> Server:
    """Serve a function on documents, a class of such functions, or a list of both, over gRPC.

    The server runs on threads of this process, on a free port unless one is passed, until its `with` block ends or
    `stop()` is called. `wait()` waits until the process receives SIGTERM. The default host accepts only connections
    from this machine.

    limits: what the server accepts.
    tls: its certificate; callers then need TLS too.
    authorize: a function that receives the `Caller` and returns whether the call is allowed.
    name: the name of the service for other languages, by default that of the class or function.
    proto: the `.proto` whose numbers and package other languages use, as `quire proto --service` wrote it.
    reflection: whether tools may ask for the methods; by default where there is no `authorize`.
    grace: how many seconds running calls have to finish when the server stops.
    """
    return Server(service, host, port, ServeOptions.from_keywords("serve", options))


def _abort(context: ServicerContext, status: Status) -> NoReturn:
    context.set_trailing_metadata(status.metadata)
    context.abort(grpc.StatusCode[status.code], status.message)
    raise AssertionError("abort() raises")


@contextlib.contextmanager
def _on_sigterm(call: Callable[[], None]) -> Iterator[None]:
    """Call a function when the process receives SIGTERM; only the main thread can install a handler."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(_: int, __: FrameType | None) -> None:
        call()

    previous = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
