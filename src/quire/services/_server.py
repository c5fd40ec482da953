"""The server on threads."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any, NoReturn

from typing_extensions import Self

from quire._optional import require
from quire.services._calls import Calls, LoopThread
from quire.services._door import Door, Lane
from quire.services._endpoints import Endpoint
from quire.services._errors import KIND, Status, status_of
from quire.services._methods import DESCRIBE, SERVICE, Offer, Offered, describe_for_reflection
from quire.services._options import ServeOptions, bind
from quire.services._security import check_caller

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
