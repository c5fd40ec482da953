"""The gRPC server on threads, the options of `serve`, and what both servers share."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from typing_extensions import Self, TypedDict

from quire._optional import require
from quire.errors import OptionError, ServiceError, check_options
from quire.services._admission import HEALTH_SERVICE, PARKED_HANDLER, AdmissionInterceptor, IdleStreams
from quire.services._calls import Calls, LoopThread
from quire.services._description import contract_fingerprint
from quire.services._endpoints import Endpoint
from quire.services._errors import CONTRACT_METADATA, IDLE_METADATA, Status, error_to_status, log
from quire.services._inference import INFER, INFERENCE_SERVICE, InferenceModels
from quire.services._limits import (
    SHORTEST_KEEPALIVE,
    ChannelOptions,
    Limits,
    check_channel_options,
    keepalive_options,
    retain_message_memory,
)
from quire.services._metrics import GONE, NO_METRICS, OK, CallMetrics, Metrics, open_metrics
from quire.services._request_ids import REQUEST_ID, AcceptedRequestId, accept_request_id, find_request_id
from quire.services._security import Authorize, Tls, check_caller
from quire.services._service_spec import DESCRIBE, SERVICE, MethodSpec, ServiceSpec
from quire.services._tracing import NO_SPAN, CallSpan, open_tracing

if TYPE_CHECKING:
    from grpc import Server as GrpcServer
    from grpc import ServicerContext


T = TypeVar("T")
grpc: Any = require("grpc", extra="grpc", needed_for="a gRPC service")
SERVING, NOT_SERVING = 1, 2  # of grpc.health.v1.HealthCheckResponse

LIVENESS, READINESS = "liveness", "readiness"
"""The names under which Kubernetes asks for the two kinds of health, by its documentation."""
_EXTRA_RPCS = 1024
"""How many calls beyond the limits gRPC accepts, so that they are refused with a reason or are health checks."""
UNWIND_SECONDS = 1.0
"""How long the threads of calls that were cancelled when the server stopped have to end."""
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
    keepalive: float | None
    max_connection_age: float | None
    interceptors: Sequence[Any]
    options: ChannelOptions
    metrics: bool | int
    tracing: bool
    open_inference: bool | Sequence[str]


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
    keepalive: float | None = 60.0
    max_connection_age: float | None = None
    interceptors: Sequence[Any] = ()
    options: ChannelOptions = ()
    metrics: bool | int = False
    tracing: bool = False
    open_inference: bool | Sequence[str] = False

    @classmethod
    def from_keywords(cls, call: str, keywords: ServeKeywords) -> Self:
        """Return the options of a call; an unknown keyword is an error."""
        known = ["host", "port", *(["workers"] if call == "serve" else []), *ServeKeywords.__annotations__]
        check_options(call, keywords, known)
        return cls(**keywords)

    def __post_init__(self) -> None:
        if self.grace < 0:
            raise OptionError(f"grace={self.grace}: use seconds, 0 or more.")
        if self.max_connection_age is not None and not 0 < self.max_connection_age < math.inf:
            raise OptionError(f"max_connection_age={self.max_connection_age}: use a positive number of seconds.")

    def check_interceptors(self, interceptor_type: type[Any]) -> list[Any]:
        """Return the interceptors; raise OptionError for one of the other kind of server."""
        for interceptor in self.interceptors:
            if not isinstance(interceptor, interceptor_type):
                expected = f"{interceptor_type.__module__.removesuffix('._interceptor')}.{interceptor_type.__name__}"
                raise OptionError(f"interceptors: {type(interceptor).__name__} is no {expected}, as this server needs.")
        return list(self.interceptors)

    def channel_options(self) -> list[tuple[str, Any]]:
        """Return the options of gRPC's server; those of the caller come last, and win."""
        options = [
            ("grpc.max_receive_message_length", self.limits.max_message_bytes),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", 0),  # otherwise two servers could share a port without noticing
            # Clients may send pings as often as `Client(keepalive=...)` allows.
            ("grpc.http2.min_ping_interval_without_data_ms", int(SHORTEST_KEEPALIVE * 1000) // 2),
            ("grpc.keepalive_permit_without_calls", 1),
            *keepalive_options(self.keepalive),
        ]
        if self.max_connection_age is not None:
            options += [
                ("grpc.max_connection_age_ms", int(self.max_connection_age * 1000)),
                ("grpc.max_connection_age_grace_ms", int(self.grace * 1000)),
            ]
        own = check_channel_options(self.options)
        names = {name for name, _ in own}
        return [option for option in options if option[0] not in names] + own

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


class CallRecord:
    """What is recorded of one call: its id, its metrics and its span."""

    __slots__ = ("_metrics", "_span", "receive", "request_id", "sent")

    def __init__(self, request_id: str, metrics: CallMetrics, span: CallSpan) -> None:
        self.request_id = request_id
        self._metrics, self._span = metrics, span
        self.receive, self.sent = metrics.receive, metrics.sent

    def activate(self) -> contextlib.AbstractContextManager[object]:
        """Make the id and the span the current ones inside the block, which must not contain a `yield`."""
        return AcceptedRequestId(self.request_id) if self._span is NO_SPAN else self._activate_span()

    @contextlib.contextmanager
    def _activate_span(self) -> Iterator[None]:
        with AcceptedRequestId(self.request_id), self._span.activate():
            yield

    def run(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function with the id and in the span."""
        with self.activate():
            return function(*args)

    def fail(self, error: BaseException) -> Status:
        """End the call with an error, and return its status; what is logged about it has the id."""
        with AcceptedRequestId(self.request_id):
            status = error_to_status(error)
        self.end(status)
        return status

    def end(self, status: Status = OK) -> None:
        """End the call with a status; only the first time."""
        self._metrics.end(status)
        self._span.end(None if status is OK else status)


class BaseServer:
    """What the servers on threads and on asyncio have in common."""

    port: int
    abandoned_calls = 0
    """The number of calls that went on after `stop()`, because their functions did not return in time.

    Python cannot end their threads, and waits for them when the process exits.
    """

    def __init__(self, service: object, host: str, options: ServeOptions) -> None:
        self.host = host
        self._options = options
        self._spec = ServiceSpec.build(service, options.limits, options.name, options.proto_text)
        self._models = InferenceModels(self._spec.endpoints, options.open_inference)
        self._metrics = NO_METRICS
        self._tracing = open_tracing(enabled=options.tracing)
        self._contract_metadata = ((CONTRACT_METADATA, contract_fingerprint(self._spec.description)),)
        idle = options.limits.stream_idle_timeout
        self._stream_metadata = () if idle is None else ((IDLE_METADATA, f"{idle:g}"),)

    @property
    def endpoints(self) -> dict[str, Endpoint]:
        """The endpoints, by name."""
        return self._spec.endpoints

    @property
    def address(self) -> str:
        """Host and port, as clients take them."""
        return join_address(self.host, self.port)

    def _begin_call(self, endpoint: str, context: Any, nbytes: int = 0) -> CallRecord:
        """Record a call that begins; `context` is gRPC's context of it."""
        metadata = context.invocation_metadata()
        is_recorded = endpoint != DESCRIBE
        call = CallRecord(
            accept_request_id(find_request_id(metadata)),
            (self._metrics if is_recorded else NO_METRICS).begin(endpoint, nbytes),
            self._tracing.begin_server(endpoint, metadata) if is_recorded else NO_SPAN,
        )
        context.set_trailing_metadata(self._response_metadata(call))
        return call

    def _response_metadata(self, call: CallRecord) -> tuple[tuple[str, str], ...]:
        """Return the trailing metadata of every response."""
        return (*self._contract_metadata, (REQUEST_ID, call.request_id))

    @property
    def metrics_url(self) -> str:
        """The address of the Prometheus metrics, with `metrics=`."""
        if self._metrics.url is None:
            raise OptionError("the server has no metrics: pass metrics=True, or the number of a port.")
        return self._metrics.url

    @property
    def _readiness_names(self) -> tuple[str, ...]:
        """The names in the health service that report whether calls are accepted."""
        return ("", READINESS, *self._spec.service_names)

    def _is_unready(self, starved: str) -> bool:
        """Return whether no endpoint can be called while one kind of calls ("unary" or "streams") is starved."""
        return all(endpoint.is_unary == (starved == "unary") for endpoint in self.endpoints.values())

    def _server_arguments(self) -> dict[str, Any]:
        """Return the arguments of gRPC's servers."""
        retain_message_memory()
        limits = self._options.limits
        most = limits.max_calls + limits.max_open_streams + _EXTRA_RPCS
        return {"options": self._options.channel_options(), "maximum_concurrent_rpcs": most}

    def _add_services(
        self,
        server: GrpcServer,
        make_method: Callable[[MethodSpec], Any],
        make_description: Callable[[Callable[[bytes], bytes]], Any],
        infer: Callable[..., Any],
    ) -> None:
        """Add the services of the spec to a gRPC server, and reflection where it is enabled."""
        make_handler = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, False): grpc.stream_unary_rpc_method_handler,
            (True, True): grpc.stream_stream_rpc_method_handler,
        }
        # Generic handlers take and return bytes: quire encodes messages itself, without generated classes.
        describe = grpc.unary_unary_rpc_method_handler(make_description(lambda _: self._spec.description))
        services: dict[str, dict[str, Any]] = {SERVICE: {DESCRIBE: describe}}
        for method in self._spec.methods():
            handler = make_handler[method.streams](make_method(method))
            services.setdefault(method.service, {})[method.name] = handler
        if self._models.models:
            services[INFERENCE_SERVICE] = {
                name: grpc.unary_unary_rpc_method_handler(make_description(respond))
                for name, respond in self._models.responders().items()
            }
            services[INFERENCE_SERVICE][INFER] = grpc.unary_unary_rpc_method_handler(infer)
        handlers = [grpc.method_handlers_generic_handler(name, methods) for name, methods in services.items()]
        server.add_generic_rpc_handlers(handlers)
        if self._options.has_reflection:
            reflection = require("grpc_reflection.v1alpha.reflection", extra="grpc", needed_for="a gRPC service")
            names = (*self._spec.service_names, HEALTH_SERVICE)
            reflection.enable_server_reflection(names, server, self._spec.descriptor_pool())

    def _bind(self, server: GrpcServer, port: int) -> int:
        """Open the port, and return its number, which the system chooses for port 0."""
        address, tls = join_address(self.host, port), self._options.tls
        try:
            if tls is None:
                bound = int(server.add_insecure_port(address))
            else:
                bound = int(server.add_secure_port(address, tls.server_credentials()))
        except RuntimeError as error:
            raise ServiceError(
                f"{address} cannot be opened: it is in use, or not an address of this machine ({error})."
            ) from error
        if bound == 0:  # how old versions of gRPC report a failure
            raise ServiceError(f"{address} cannot be opened: it is in use, or not an address of this machine.")
        return bound

    def _count_abandoned(self, calls: int) -> None:
        self.abandoned_calls = calls
        if calls:
            log.warning("the process cannot end before these calls return, which outlasted the grace period: %d", calls)


def join_address(host: str, port: int) -> str:
    """Return host and port, as gRPC takes them."""
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

    def __init__(
        self, service: object, host: str, port: int, options: ServeOptions, metrics: Metrics | None = None
    ) -> None:
        """Start to serve; `metrics` replaces those of the options."""
        super().__init__(service, host, options)
        self._loop = LoopThread()
        interceptors = options.check_interceptors(grpc.ServerInterceptor)
        arguments = self._server_arguments()
        self._metrics = open_metrics(options.metrics, host) if metrics is None else metrics
        self._calls = Calls(self.endpoints, options.limits, self._loop.run, self._metrics)
        streams = {f"/{method.service}/{method.name}" for method in self._spec.methods() if any(method.streams)}
        self._admission = AdmissionInterceptor(options.limits, streams, self._report_starved, self._metrics)
        self._idle_streams = IdleStreams(options.limits)
        threads = self._admission.unary.executor
        # Admission control comes first: interceptors see the calls that it admits.
        self._server = grpc.server(threads, interceptors=[self._admission, *interceptors], **arguments)
        self._stop_requested, self._stop_lock = threading.Event(), threading.Lock()
        self._stopped = False
        infer = self._infer
        if any(model.endpoint.batched for model in self._models.models.values()):
            infer = partial(self._infer)  # a method has no attributes of its own
            setattr(infer, PARKED_HANDLER, self._make_parked_handler(self._models.bind))
        self._add_services(self._server, self._make_method, self._make_description, infer)
        self._health = add_health(self._server)
        try:
            self.port = self._bind(self._server, port)
        except ServiceError:
            self._metrics.close()
            raise
        self._server.start()
        for name in (LIVENESS, *self._readiness_names):
            self._health.set(name, SERVING)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the server has stopped, by `stop()` or SIGTERM; return False if the timeout passes before."""
        with on_signals({signal.SIGTERM: self._stop_requested.set}):
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
            deadline = time.monotonic() + grace
            # Health first, so that load balancers stop sending calls; then the calls, and last what they run on.
            self._health.enter_graceful_shutdown()
            self._server.stop(grace).wait()
            self._calls.close(max(0.0, deadline - time.monotonic()))
            self._loop.close()
            self._idle_streams.close()
            self._admission.close()
            self._count_abandoned(self._admission.wait_until_idle(UNWIND_SECONDS))
            self._metrics.close()
            self._stopped = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, tp: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def _report_starved(self, kind: str, *, is_starved: bool) -> None:
        if not self._is_unready(kind):
            return
        for name in self._readiness_names:
            self._health.set(name, NOT_SERVING if is_starved else SERVING)

    def _abort(self, context: ServicerContext, call: CallRecord, error: BaseException) -> NoReturn:
        status = call.fail(error)
        context.set_trailing_metadata(status.metadata + self._response_metadata(call))
        context.abort(grpc.StatusCode[status.code], status.message)
        raise AssertionError("abort() raises")

    # --- methods

    def _make_description(self, respond: Callable[[bytes], bytes]) -> Callable[..., bytes]:
        """Return a method that describes the service to callers."""

        def describe(data: bytes, context: ServicerContext) -> bytes:
            call = self._begin_call(DESCRIBE, context)
            try:
                self._admission.check()
                call.run(check_caller, self._options.authorize, DESCRIBE, context)
                return call.run(respond, data)
            except Exception as error:  # noqa: BLE001 - the caller gets it
                self._abort(context, call, error)

        return describe

    def _make_method(self, method: MethodSpec) -> Callable[..., Any]:
        endpoint = method.endpoint

        def answer(data: bytes, context: ServicerContext) -> bytes:
            return self._answer_call(endpoint, data, context)

        def stream(messages: Any, context: ServicerContext) -> Iterator[bytes]:
            call = self._begin_call(endpoint.name, context)
            try:
                self._admission.check()
                call.run(check_caller, self._options.authorize, endpoint.name, context)
                context.send_initial_metadata(self._stream_metadata)
                with self._idle_streams.watch(context.cancel) as activity, self._calls.budget.account() as account:
                    requests = call.receive(activity.receive(messages) if method.streams[0] else [messages])
                    answers = self._calls.stream(endpoint, requests, account, framed=method.framed)
                    with contextlib.closing(answers):
                        while (message := call.run(next, answers, None)) is not None:
                            call.sent(len(message))
                            with activity.wait():
                                yield message
                call.end()
            except grpc.RpcError:
                return  # the caller is gone, or the stream was idle
            except Exception as error:  # noqa: BLE001 - the caller gets it, and the server goes on
                self._abort(context, call, error)
            finally:
                call.end(GONE)  # without effect if the call has ended already

        if not any(method.streams):
            if endpoint.batched:
                setattr(answer, PARKED_HANDLER, self._make_parked_handler(lambda _: endpoint))
            return answer
        # A method that takes a stream and returns one value yields exactly one message.
        return stream if method.streams[1] else lambda messages, context: b"".join(stream(messages, context))

    def _infer(self, data: bytes, context: ServicerContext) -> bytes:
        return self._answer_call(self._find_model(self._models.bind, data, context), data, context)

    def _find_model(self, find: Callable[[bytes], Endpoint], data: bytes, context: ServicerContext) -> Endpoint:
        """Return the endpoint that a request names, or end the call."""
        try:
            self._admission.check()
            return find(data)
        except Exception as error:  # noqa: BLE001 - the caller gets it
            call = self._begin_call(INFER, context, len(data))
            try:  # a caller who is refused does not learn which models exist
                call.run(check_caller, self._options.authorize, INFER, context)
            except Exception as refusal:  # noqa: BLE001 - the caller gets it
                self._abort(context, call, refusal)
            self._abort(context, call, error)

    def _answer_call(self, endpoint: Endpoint, data: bytes, context: ServicerContext) -> bytes:
        call = self._begin_call(endpoint.name, context, len(data))
        try:
            self._admission.check()
            # Calls may wait for this one, since its request is complete.
            with self._admission.unary.slots.ends_by_itself(), call.activate():
                response = self._answer(endpoint, data, context)
        except Exception as error:  # noqa: BLE001 - the caller gets it, and the server goes on
            self._abort(context, call, error)
        call.sent(len(response))
        call.end()
        return response

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

    def _make_parked_handler(self, find: Callable[[bytes], Endpoint]) -> Any:
        """Return a handler whose calls wait for their batch without a thread; `find` returns the endpoint of a request.

        gRPC knows handlers that return before they have answered only for methods that return a stream. For the caller,
        a stream of one message is the same as a response.
        """

        def park(data: bytes, context: ServicerContext, send: Callable[[bytes | None], None]) -> None:
            endpoint = self._find_model(find, data, context)
            if not endpoint.batched:
                send(self._answer_call(endpoint, data, context))
                send(None)
                return
            account = self._calls.budget.account()
            call = self._begin_call(endpoint.name, context, len(data))
            try:
                self._admission.check()
                call.run(check_caller, self._options.authorize, endpoint.name, context)
                account.take(len(data))
                future = call.run(self._calls.submit, endpoint, data)
            except Exception as error:  # noqa: BLE001 - the caller gets it, and the server goes on
                account.clear()
                self._abort(context, call, error)
            self._admission.parked.add(1)

            def answer() -> None:
                try:
                    message = call.run(self._calls.encode, endpoint, future.result())
                except (Exception, CancelledError) as error:  # noqa: BLE001 - the caller gets it
                    status = call.fail(error)
                    context.set_trailing_metadata(status.metadata + self._response_metadata(call))
                    context.set_code(grpc.StatusCode[status.code])
                    context.set_details(status.message)
                else:
                    call.sent(len(message))
                    call.end()
                    send(message)
                finally:
                    account.clear()
                send(None)  # the status

            def answer_in_thread(_: object) -> None:
                # Not in the thread of the batch, which would wait for callers that read slowly.
                self._admission.parked.add(-1)
                try:
                    self._admission.unary.executor.submit(answer)
                except RuntimeError:  # the server has stopped, and the call was cancelled
                    account.clear()
                    call.end(GONE)

            future.add_done_callback(answer_in_thread)
            # A caller who is gone does not wait in the queue. gRPC refuses the callback of a call that has ended.
            if not context.add_callback(future.cancel):
                future.cancel()

        park.experimental_non_blocking = True  # type: ignore[attr-defined]
        return grpc.unary_stream_rpc_method_handler(park)


@contextlib.contextmanager
def on_signals(calls: Mapping[signal.Signals, Callable[[], None]]) -> Iterator[None]:
    """Call functions when the process receives signals; only the main thread can install handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, _: FrameType | None) -> None:
        calls[signal.Signals(number)]()

    previous = {number: signal.signal(number, handle) for number in calls}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
