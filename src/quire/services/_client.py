"""The gRPC client: `Client('host:port').embed(docs)`."""

from __future__ import annotations

import math
import queue
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from numbers import Real
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from typing_extensions import Self

from quire._optional import require
from quire.errors import (
    OptionError,
    PathError,
    QuireError,
    SchemaError,
    ServiceError,
    ServiceLimitError,
    ServiceTimeoutError,
    ServiceUnavailableError,
    reject_unknown_options,
)
from quire.services._description import END, CallPlan, Contract
from quire.services._endpoints import Endpoint, collect_endpoints, endpoint_of
from quire.services._errors import (
    CONTRACT_METADATA,
    IDLE_METADATA,
    Status,
    idle_stream_error,
    rpc_to_error,
    status_to_error,
)
from quire.services._limits import (
    RESPONSE_BYTES,
    ChannelOptions,
    ResponseAllowance,
    check_channel_options,
    keepalive_options,
    retain_message_memory,
)
from quire.services._payloads import InT, OutT, PartJoiner, split_parts
from quire.services._request_ids import REQUEST_ID, choose_request_id, find_request_id
from quire.services._security import Tls, token_metadata
from quire.services._service_spec import DESCRIBE, SERVICE, STREAM_SUFFIX
from quire.services._tracing import NO_SPAN, NO_TRACING, CallSpan, open_tracing

if TYPE_CHECKING:
    from grpc import Channel


T = TypeVar("T")
ArgT = TypeVar("ArgT")
ResultT = TypeVar("ResultT")
R = TypeVar("R")
grpc: Any = require("grpc", extra="grpc", needed_for="a client of a gRPC service")
_FIRST_PAUSE, _LAST_CHANCE = 0.05, 0.02
_LONGEST_PAUSE = {ServiceUnavailableError: 0.5, ServiceLimitError: 2.0}  # a busy server needs longer pauses
_FIRST_CONNECTION = 5.0  # seconds in which a client must reach the server for the first time
_CONNECT_MS = 4000  # milliseconds for one attempt to connect, with TLS
_NO_SPAN = nullcontext(NO_SPAN)
DESCRIBE_SECONDS = 1.0
"""How long completing names, and reading a description once more, may wait for a server."""
_jitter = random.SystemRandom()  # differs in forked workers, which would retry at the same time otherwise


@dataclass
class Attempts:
    """The attempts of one call: when to retry it, and how much time is left.

    Reading the description, which comes first, is repeatable; the call itself is if its endpoint is idempotent.
    """

    retries: int | None
    timeout: float | None
    connected: bool
    """Whether the client has reached the server before. It then waits for a server that is restarted; otherwise the
    address may be wrong."""
    repeatable: bool = True
    retried: int = 0
    started: float = field(default_factory=time.monotonic)
    request_id: str = field(default_factory=choose_request_id)

    def begin_call(self, *, repeatable: bool) -> None:
        """Begin to count the attempts of the call, after the description was read."""
        self.connected, self.repeatable, self.retried = True, repeatable, 0

    @property
    def seconds_left(self) -> float | None:
        """The seconds until the deadline."""
        # Never 0, also after the deadline: the attempt then ends with gRPC's own status, as any other that takes long.
        return None if self.timeout is None else max(0.001, self.timeout - (time.monotonic() - self.started))

    def next_pause(self, error: Exception) -> float:
        """Return the seconds to wait before the next attempt; raise the error if there is none.

        Pauses double, with a random factor, so that many clients do not come back at the same time. The last one is
        shorter, so that a call is given up at its deadline and not before.
        """
        # A call that is too large stays too large; other limits are those of a server that is busy now.
        is_busy = isinstance(error, ServiceLimitError) and error.retryable
        is_unavailable = isinstance(error, ServiceUnavailableError)
        if not self.repeatable or not (is_busy or is_unavailable):
            raise error
        if self.retries is not None and self.retried >= self.retries:
            raise error
        left = math.inf if self.timeout is None else self.timeout - (time.monotonic() - self.started)
        if is_unavailable and not self.connected:
            left = min(left, _FIRST_CONNECTION - (time.monotonic() - self.started))
        if left <= _LAST_CHANCE:
            raise error
        longest = _LONGEST_PAUSE[ServiceLimitError if is_busy else ServiceUnavailableError]
        pause = min(longest, _FIRST_PAUSE * 2.0 ** min(self.retried, 10)) * _jitter.uniform(0.5, 1.5)
        self.retried += 1
        return min(pause, left - _LAST_CHANCE)


def check_timeout(timeout: float | None) -> float | None:
    """Return the timeout if it is a positive number or None; raise OptionError otherwise."""
    is_number = isinstance(timeout, Real) and not isinstance(timeout, bool)
    if timeout is not None and not (is_number and 0 < timeout < math.inf):
        raise OptionError(
            f"timeout={timeout!r}: use a positive number of seconds. None is the timeout of the client for a call, and "
            "no timeout for a client."
        )
    return timeout


def check_retries(retries: Any) -> int | None:
    """Return the number of retries, or None; raise OptionError for anything else."""
    if retries is not None and (isinstance(retries, bool) or not isinstance(retries, int) or retries < 0):
        raise OptionError(f"retries={retries!r}: use a whole number, 0 or more, or None to retry until the timeout.")
    return retries


class BaseClient:
    """What the clients on threads and on asyncio have in common."""

    @reject_unknown_options
    def __init__(  # noqa: PLR0913 - the options of a client
        self,
        target: str,
        service: object = None,
        *,
        tls: Tls | None = None,
        token: str | None = None,
        timeout: float | None = 60.0,
        retries: int | None = None,
        max_response_bytes: int = RESPONSE_BYTES,
        keepalive: float | None = None,
        interceptors: Sequence[Any] = (),
        options: ChannelOptions = (),
        tracing: bool = False,
    ) -> None:
        """Connect to a server at 'host:port', when the first call is made.

        service: the function or class that is served, or one with the same signatures; answers then have its types.
        timeout: how many seconds a call may take, all attempts together; None for no limit. Answers that are a stream
            may take longer, unless the call has a timeout of its own.
        retries: how often an idempotent call is repeated while the server is unavailable or overloaded; by default
            until the timeout. A server that was never reached is given up after 5 seconds.
        max_response_bytes: a larger response is an error; in a stream, the limit is for each value.
        keepalive: after how many silent seconds of a call the server is asked whether it is still there, at least 10;
            by default never, and a call to a machine that is gone ends at its timeout.
        interceptors: interceptors of gRPC; those of `grpc.aio` for an AsyncClient.
        options: options of gRPC itself, as pairs; they replace those that quire sets.
        tracing: whether calls are recorded as spans of OpenTelemetry, whose context is sent to the server.
        """
        if target.startswith(("http://", "https://")):
            raise OptionError(
                f"target={target!r}: an address of gRPC is 'host:port', without a scheme; for TLS, pass tls=Tls()."
            )
        retain_message_memory()
        self.target, self.timeout = target, check_timeout(timeout)
        self.retries, self.max_response_bytes = check_retries(retries), max_response_bytes
        own_options = check_channel_options(options)
        names = {name for name, _ in own_options}
        defaults = [*self._channel_options(), *keepalive_options(keepalive)]
        all_options = [option for option in defaults if option[0] not in names] + own_options
        self._channel = self._open_channel(tls, all_options, list(interceptors))
        self._local_endpoints = {} if service is None else collect_endpoints(service, construct=False)
        self._metadata = token_metadata(token)
        self._tracing = open_tracing(enabled=tracing)
        self._lock = threading.Lock()
        self._contract: Contract | None = None
        self._contracts: dict[str, Contract] = {}  # by fingerprint: servers of two versions may answer in turn
        self._closed = False
        self._methods: dict[str, Any] = {}

    def _channel_options(self) -> list[tuple[str, Any]]:
        return [
            ("grpc.max_receive_message_length", self.max_response_bytes),
            ("grpc.max_send_message_length", -1),
            # A server that was restarted is found again within moments. In spite of its name, the minimum is the time
            # for one attempt to connect, and does not delay the next one.
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 200),
            ("grpc.min_reconnect_backoff_ms", _CONNECT_MS),
            # A connection of its own, so that clients of one process are distributed among the workers of a server.
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_retries", 0),  # the client retries, since it knows which calls are idempotent
        ]

    def _open_channel(self, tls: Tls | None, options: list[tuple[str, Any]], interceptors: list[Any]) -> Channel:
        if tls is None:
            channel = grpc.insecure_channel(self.target, options)
        else:
            channel = grpc.secure_channel(self.target, tls.channel_credentials(), options)
        try:
            return grpc.intercept_channel(channel, *interceptors)
        except TypeError as error:
            channel.close()
            raise OptionError(f"interceptors: {error}") from error

    def _begin_call(self, timeout: float | None) -> Attempts:
        """Start the time of a call, which includes reading the description; by default, the client's timeout."""
        if self._closed:
            raise ServiceError(
                f"{self.target}: the client is closed. Call it inside its `with`, or create another one."
            )
        return Attempts(self.retries, self.timeout if timeout is None else check_timeout(timeout), self._was_connected)

    @property
    def _was_connected(self) -> bool:
        """Whether a server has answered before; calls then wait until it is back, until their deadline."""
        return bool(self._contracts)

    def _span(self, name: str) -> AbstractContextManager[CallSpan]:
        """Record a call inside the block as a span."""
        return _NO_SPAN if self._tracing is NO_TRACING else self._record_span(name)

    @contextmanager
    def _record_span(self, name: str) -> Iterator[CallSpan]:
        span = self._tracing.begin_client(name, self.target)
        try:
            yield span
        except BaseException as error:
            span.fail(error)
            raise
        span.end()

    def _call_arguments(self, seconds: float | None, request_id: str, span: CallSpan = NO_SPAN) -> dict[str, Any]:
        """Return the keywords of a call of gRPC."""
        metadata = (*self._metadata, (REQUEST_ID, request_id), *span.headers)
        return {"timeout": seconds, "metadata": metadata, "wait_for_ready": self._was_connected}

    def _keep_contract(self, description: bytes) -> Contract:
        """Use a description that was read."""
        contract = Contract(description, self._local_endpoints)
        contract = self._contracts.setdefault(contract.fingerprint, contract)
        contract.read_at = time.monotonic()
        self._contract = contract
        return contract

    def _check_contract(self, metadata: Any) -> None:
        """Forget the description if the metadata of a response names another one: the server was upgraded."""
        for key, value in metadata or ():
            if key == CONTRACT_METADATA and self._contract is not None and value != self._contract.fingerprint:
                self._contract = self._contracts.get(value)  # None is read by the next call

    def _rpc_to_error(self, rpc: Any, name: str, request_id: str) -> QuireError:
        """Return the error that a `grpc.RpcError` reports, after its metadata was checked."""
        self._check_contract(rpc.trailing_metadata())
        error = rpc_to_error(rpc, f"{self.target} {name}")
        # A server may have chosen another id, and one that was never reached has sent none.
        error.request_id = find_request_id(rpc.trailing_metadata()) or request_id
        if isinstance(error, PathError):
            self._contract = None  # the endpoint may be gone since the description was read
        return error

    def _stream_error(self, rpc: Any, initial_metadata: Any, name: str, request_id: str) -> QuireError:
        """Return the error of a stream; if this side did not cancel it, the server has, because it was idle."""
        seconds = next((value for key, value in initial_metadata or () if key == IDLE_METADATA), None)
        if rpc.code() is grpc.StatusCode.CANCELLED and seconds is not None:
            error: QuireError = idle_stream_error(seconds)
            error.request_id = request_id
            return error
        return self._rpc_to_error(rpc, name, request_id)

    @staticmethod
    def _no_connection(where: str, request_id: str) -> ServiceUnavailableError:
        error = ServiceUnavailableError(
            f"{where}: the connection to the server was lost, and it could not be reached again within the timeout."
        )
        error.code = "UNAVAILABLE"
        error.request_id = request_id
        return error

    def __dir__(self) -> list[str]:
        names = self._local_endpoints if self._contract is None else self._contract.signatures
        return sorted({*super().__dir__(), *names})

    def _method(self, name: str, *, stream: bool = False) -> Any:
        """Return gRPC's callable of an endpoint."""
        path = name + STREAM_SUFFIX if stream else name
        if path not in self._methods:
            make = self._channel.stream_stream if stream else self._channel.unary_unary
            self._methods[path] = make(f"/{SERVICE}/{path}")
        return self._methods[path]


class Client(BaseClient):
    """The endpoints of a service as methods: `client.embed(docs)` returns what `embed(docs)` returns on the server.

    Before the first call of an endpoint, the server's schema is compared with the documents' class. Answers are of the
    class that was sent where the server has one class for both, else of the class that the server names, if it is
    loaded. With `service`, they have the types of its signatures. A client may be used by many threads.
    """

    def __getattr__(self, name: str) -> RemoteFunction[Any, Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        return self[name]

    @overload
    def __getitem__(self, endpoint: str) -> RemoteFunction[Any, Any]: ...
    @overload
    def __getitem__(self, endpoint: Callable[[InT], OutT]) -> RemoteFunction[InT, OutT]: ...
    @overload
    def __getitem__(self, endpoint: Callable[[InT], Coroutine[Any, Any, OutT]]) -> RemoteFunction[InT, OutT]: ...
    @overload  # methods of a class
    def __getitem__(self, endpoint: Callable[[Any, InT], OutT]) -> RemoteFunction[InT, OutT]: ...
    @overload
    def __getitem__(self, endpoint: Callable[[Any, InT], Coroutine[Any, Any, OutT]]) -> RemoteFunction[InT, OutT]: ...
    @overload  # streams
    def __getitem__(self, endpoint: Callable[[Iterator[InT]], OutT]) -> RemoteFunction[Iterable[InT], OutT]: ...
    @overload
    def __getitem__(
        self, endpoint: Callable[[Iterator[InT]], Iterator[OutT]]
    ) -> RemoteFunction[Iterable[InT], Iterator[OutT]]: ...
    @overload
    def __getitem__(self, endpoint: Callable[[InT], Iterator[OutT]]) -> RemoteFunction[InT, Iterator[OutT]]: ...
    @overload
    def __getitem__(
        self, endpoint: Callable[[AsyncIterator[InT]], AsyncIterator[OutT]]
    ) -> RemoteFunction[Iterable[InT], Iterator[OutT]]: ...
    @overload
    def __getitem__(
        self, endpoint: Callable[[AsyncIterator[InT]], Coroutine[Any, Any, OutT]]
    ) -> RemoteFunction[Iterable[InT], OutT]: ...
    @overload
    def __getitem__(self, endpoint: Callable[[InT], AsyncIterator[OutT]]) -> RemoteFunction[InT, Iterator[OutT]]: ...
    def __getitem__(self, endpoint: str | Callable[..., Any]) -> RemoteFunction[Any, Any]:
        """Return an endpoint by name, also one that a method of the client hides, or by a function.

        A function with the signature of the endpoint, such as the served one, or a method of the served class, gives
        the types: answers of `client[embed](docs)` are what `embed` declares, also for type checkers.
        """
        # The name is checked by the call: reading the description here would not follow the timeout of the call.
        if isinstance(endpoint, str):
            return RemoteFunction(self, endpoint)
        local = endpoint_of(endpoint)
        return RemoteFunction(self, local.name, local)

    def __dir__(self) -> list[str]:
        # Completing `client.` reads the description once, but must not wait long for a server that does not answer.
        if not self._closed:
            with suppress(QuireError):
                self._read_contract(Attempts(0, DESCRIBE_SECONDS, self._was_connected))
        return super().__dir__()

    def endpoints(self) -> dict[str, str]:
        """Return the signatures of the endpoints, by name."""
        return self.contract().signatures

    def contract(self) -> Contract:
        """Return the description of the server. It is read once, and again when the server was upgraded."""
        return self._read_contract(self._begin_call(None))

    def _read_contract(self, attempts: Attempts) -> Contract:
        contract = self._contract  # other threads may forget it at any time
        if contract is not None:
            return contract
        # Another thread may be reading the description, with a longer timeout than this call.
        seconds = attempts.seconds_left
        if not self._lock.acquire(timeout=-1 if seconds is None else min(seconds, threading.TIMEOUT_MAX)):
            raise ServiceTimeoutError(f"{self.target} {DESCRIBE}: no answer in time.")
        try:
            contract = self._contract
            if contract is None:
                describe = self._method(DESCRIBE)
                description = self._retry(
                    attempts,
                    lambda seconds: describe(b"", **self._call_arguments(seconds, attempts.request_id)),
                    DESCRIBE,
                )
                contract = self._keep_contract(description)
            return contract
        finally:
            self._lock.release()

    def _with_contract(self, attempts: Attempts, use: Callable[[Contract], T]) -> T:
        """Return what `use` makes of the description; if the call does not fit it, the description is read again.

        The server may have been upgraded since: it has an endpoint more, another schema or a higher limit.
        """
        contract = self._read_contract(attempts)
        try:
            return use(contract)
        except (PathError, SchemaError, ServiceLimitError):
            if contract.read_at >= attempts.started:
                raise
            describe = self._method(DESCRIBE)
            try:  # at once, or not at all: the error is known
                newer = self._keep_contract(describe(b"", timeout=DESCRIBE_SECONDS, metadata=self._metadata))
            except grpc.RpcError:
                newer = contract
            if newer is contract:
                raise
        return use(newer)

    def close(self) -> None:
        """Close the connection; running calls are cancelled."""
        self._closed = True
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, tp: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _retry(self, attempts: Attempts, attempt: Callable[[float | None], T], name: str) -> T:
        while True:
            try:
                return attempt(attempts.seconds_left)
            except grpc.RpcError as rpc:
                error = self._rpc_to_error(rpc, name, attempts.request_id)
            time.sleep(attempts.next_pause(error))

    def _rpc_to_error(self, rpc: Any, name: str, request_id: str) -> QuireError:
        error = super()._rpc_to_error(rpc, name, request_id)
        if isinstance(error, ServiceTimeoutError) and self._was_connected and not self._is_connected():
            return self._no_connection(f"{self.target} {name}", request_id)
        return error

    def _is_connected(self) -> bool:
        """Return whether the channel is connected at this moment."""
        states: queue.SimpleQueue[Any] = queue.SimpleQueue()
        try:
            self._channel.subscribe(states.put)  # called with the current state first
            return bool(states.get(timeout=1) is grpc.ChannelConnectivity.READY)
        except (queue.Empty, ValueError):  # ValueError: the channel is closed
            return True
        finally:
            self._channel.unsubscribe(states.put)


class RemoteFunction(Generic[ArgT, ResultT]):
    """An endpoint of a server, to be called like the function that it serves."""

    def __init__(self, client: Client, name: str, local: Endpoint | None = None) -> None:
        self._client, self._name, self._local = client, name, local

    def __call__(self, value: ArgT, *, timeout: float | None = None) -> ResultT:
        """Return what the function returns: a value, or an iterator of values if it returns a stream.

        Documents that do not fit into one message are sent in parts. `timeout` is in seconds, instead of the client's,
        and includes reading the description of the service. Without it, an iterator of answers may go on for ever.
        """
        client = self._client
        attempts = client._begin_call(timeout)
        endpoint = client._with_contract(attempts, lambda contract: contract.endpoint(self._name))
        takes_stream, gives_stream = endpoint["takes"]["stream"], endpoint["gives"]["stream"]
        if takes_stream or gives_stream:
            values: Any = value if takes_stream else [value]
            # Reading the description took a part of the time, unless a stream of answers may go on for ever.
            answers = self._stream(values, None if gives_stream and timeout is None else attempts.seconds_left)
            answer: ResultT = answers if gives_stream else next(answers)  # type: ignore[assignment]
            return answer
        plan, data = client._with_contract(attempts, lambda contract: contract.encode(self._name, value, self._local))
        attempts.begin_call(repeatable=plan.idempotent)
        with client._span(self._name) as span:
            return client._retry(
                attempts,
                lambda seconds: self._call_once(plan, data, client._call_arguments(seconds, attempts.request_id, span)),
                self._name,
            )

    def _call_once(self, plan: CallPlan, data: bytes, arguments: dict[str, Any]) -> ResultT:
        client = self._client
        # The stream method takes values of any size, in parts, but a unary call takes less time on both sides.
        if len(data) <= plan.max_message_bytes:
            answer, call = client._method(self._name).with_call(data, **arguments)
        else:
            parts = split_parts(data, plan.max_message_bytes)
            call = client._method(self._name, stream=True)(parts, **arguments)
            try:
                [answer] = _join_parts(call, client.max_response_bytes)
            finally:  # an error on this side would leave the stream open, and a thread of the server occupied
                call.cancel()
        client._check_contract(call.trailing_metadata())
        result: ResultT = plan.output.decode(answer)
        return result

    def future(self, value: ArgT, *, timeout: float | None = None) -> Call[ResultT]:
        """Start a call of one message without waiting; its answer is asked for later, or the call is cancelled."""
        client = self._client
        attempts = client._begin_call(timeout)
        plan, data = client._with_contract(attempts, lambda contract: contract.encode(self._name, value, self._local))
        span = client._tracing.begin_client(self._name, client.target)
        arguments = client._call_arguments(attempts.seconds_left, attempts.request_id, span)
        future = client._method(self._name).future(data, **arguments)
        if span is not NO_SPAN:
            future.add_done_callback(lambda call: span.end(_status_of(call)))
        return Call(client, future, plan, attempts.request_id)

    @overload
    def stream(
        self: RemoteFunction[Iterable[T], Iterator[R]], values: Iterable[T], *, timeout: float | None = None
    ) -> Iterator[R]: ...
    @overload
    def stream(
        self: RemoteFunction[Iterable[T], R], values: Iterable[T], *, timeout: float | None = None
    ) -> Iterator[R]: ...
    @overload
    def stream(
        self: RemoteFunction[T, Iterator[R]], values: Iterable[T], *, timeout: float | None = None
    ) -> Iterator[R]: ...
    @overload
    def stream(self, values: Iterable[ArgT], *, timeout: float | None = None) -> Iterator[ResultT]: ...
    def stream(self, values: Iterable[Any], *, timeout: float | None = None) -> Iterator[Any]:
        """Yield the answers to a stream of values, in order, as they arrive.

        Values are taken no faster than the server reads them, and answers are produced no faster than they are taken.
        Without a `timeout` a stream may go on for ever. To end it early, close the iterator.
        """
        return self._stream(values, check_timeout(timeout))

    def _stream(self, values: Iterable[Any], timeout: float | None) -> Iterator[Any]:
        client = self._client
        attempts = client._begin_call(timeout)  # with the client's timeout, if the stream has none: for the description
        client._read_contract(attempts)
        remaining = iter(values)
        # The class of the first value decides how the answers are read.
        first = next(remaining, END)
        requests = client._with_contract(
            attempts, lambda contract: _RequestParts(contract, self._name, first, remaining, self._local)
        )
        if first is END and not requests.plan.input.stream:
            return  # no values, no answers; a function that takes a stream is called with an empty one
        with client._span(self._name) as span:
            seconds = None if timeout is None else attempts.seconds_left
            arguments = client._call_arguments(seconds, attempts.request_id, span)
            if timeout is None:
                arguments["wait_for_ready"] = False  # it would wait for ever
            call = client._method(self._name, stream=True)(requests, **arguments)
            try:
                for data in _join_parts(call, client.max_response_bytes):
                    yield requests.plan.output.decode(data)
                client._check_contract(call.trailing_metadata())
            except grpc.RpcError as rpc:
                # If the caller's own iterator fails, gRPC cancels the call, and its status does not have the reason.
                raise requests.error or client._stream_error(
                    rpc, call.initial_metadata(), self._name, attempts.request_id
                ) from None
            finally:
                call.cancel()


class Call(Generic[ResultT]):
    """A running call."""

    def __init__(self, client: Client, future: Any, plan: CallPlan, request_id: str) -> None:
        self._client, self._future, self._plan, self.request_id = client, future, plan, request_id

    def result(self, timeout: float | None = None) -> ResultT:
        """Wait for the answer; raise ServiceTimeoutError if it does not arrive within `timeout` seconds."""
        where = f"{self._client.target} {self._plan.name}"
        try:
            data = self._future.result(timeout)
        except grpc.FutureCancelledError:
            status = Status("CANCELLED", f"{where}: the call was cancelled.", "")
            raise status_to_error(status, where) from None
        except grpc.FutureTimeoutError:
            raise ServiceTimeoutError(f"{where}: no answer within {timeout} s.") from None
        except grpc.RpcError as rpc:
            raise self._client._rpc_to_error(rpc, self._plan.name, self.request_id) from None
        self._client._check_contract(self._future.trailing_metadata())
        answer: ResultT = self._plan.output.decode(data)
        return answer

    def cancel(self) -> bool:
        """Cancel the call, on the server too."""
        return bool(self._future.cancel())

    def done(self) -> bool:
        """Return whether there is an answer or an error."""
        return bool(self._future.done())


def _status_of(call: Any) -> Status | None:
    """Return the status of a call of gRPC that has ended, None if it was answered."""
    code = call.code()
    return None if code is grpc.StatusCode.OK else Status(code.name, call.details() or "", "")


class _RequestParts(Iterator[bytes]):
    """The parts of the values of a stream, encoded when gRPC asks for them; those of the first value at once."""

    def __init__(
        self, contract: Contract, name: str, first: object, values: Iterator[Any], local: Endpoint | None
    ) -> None:
        self.error: BaseException | None = None
        self._contract, self._name, self._values, self._local = contract, name, values, local
        self.plan = contract.plan(name, first, local)
        self._parts = iter(()) if first is END else self._encode(first)

    def _encode(self, value: object) -> Iterator[bytes]:
        plan, data = self._contract.encode(self._name, value, self._local)
        return split_parts(data, plan.max_message_bytes)

    def __next__(self) -> bytes:
        try:
            while (part := next(self._parts, None)) is None:
                self._parts = self._encode(next(self._values))
        except StopIteration:
            raise
        except BaseException as error:  # gRPC reports only that the request failed
            self.error = error
            raise
        return part


def _join_parts(parts: Iterable[bytes], max_bytes: int) -> Iterator[bytes]:
    """Yield the values in a stream of parts, each of at most `max_bytes`."""
    allowance = ResponseAllowance(max_bytes)
    joiner = PartJoiner(allowance)
    for part in parts:
        data = joiner.add(part)
        if data is not None:
            yield data
            allowance.clear()
    joiner.finish()
