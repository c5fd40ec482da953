"""The gRPC client: `Client('host:port').embed(docs)`."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from numbers import Real
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from typing_extensions import Self

from quire._optional import require
from quire.errors import (
    OptionError,
    QuireError,
    ServiceError,
    ServiceLimitError,
    ServiceTimeoutError,
    ServiceUnavailableError,
)
from quire.services._description import END, CallPlan, Contract
from quire.services._endpoints import Endpoint, collect_endpoints, endpoint_of
from quire.services._errors import Status, rpc_to_error, status_to_error
from quire.services._limits import RESPONSE_BYTES, ResponseAllowance, retain_message_memory
from quire.services._payloads import InT, OutT, PartJoiner, split_parts
from quire.services._security import Tls, token_metadata
from quire.services._service_spec import DESCRIBE, SERVICE, STREAM_SUFFIX

if TYPE_CHECKING:
    from grpc import Channel


T = TypeVar("T")
ArgT = TypeVar("ArgT")
ResultT = TypeVar("ResultT")
R = TypeVar("R")
grpc: Any = require("grpc", extra="grpc", needed_for="a client of a gRPC service")
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0
_DIR_TIMEOUT = 1.0  # seconds that completing names may wait for a server
_jitter = random.SystemRandom()  # differs in forked workers, which would retry at the same time otherwise


@dataclass
class Attempts:
    """The attempts of one call: when to retry it, and how much time is left.

    Reading the description, which comes first, is repeatable; the call itself is if its endpoint is idempotent.
    """

    retries: int
    timeout: float | None
    repeatable: bool = True
    retried: int = 0
    started: float = field(default_factory=time.monotonic)

    @property
    def seconds_left(self) -> float | None:
        """The seconds until the deadline."""
        # Never 0, also after the deadline: the attempt then ends with gRPC's own status, as any other that takes long.
        return None if self.timeout is None else max(0.001, self.timeout - (time.monotonic() - self.started))

    def next_pause(self, error: Exception) -> float:
        """Return the seconds to wait before the next attempt; raise the error if there is none.

        Pauses double, with a random factor, so that many clients do not come back at the same time.
        """
        wait = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0**self.retried) * _jitter.uniform(0.5, 1.5)
        out_of_time = self.seconds_left is not None and self.seconds_left <= wait
        # A call that is too large stays too large; other limits are those of a server that is busy now.
        is_busy = isinstance(error, ServiceLimitError) and error.retryable
        may_pass = is_busy or isinstance(error, ServiceUnavailableError)
        if not self.repeatable or not may_pass or self.retried >= self.retries or out_of_time:
            raise error
        self.retried += 1
        return wait


def check_timeout(timeout: float | None) -> float | None:
    """Return the timeout if it is a positive number or None; raise OptionError otherwise."""
    is_number = isinstance(timeout, Real) and not isinstance(timeout, bool)
    if timeout is not None and not (is_number and 0 < timeout < math.inf):
        raise OptionError(
            f"timeout={timeout!r}: use a positive number of seconds. None is the timeout of the client for a call, and "
            "no timeout for a client."
        )
    return timeout


class BaseClient:
    """What the clients on threads and on asyncio have in common."""

    _channels: Any
    """The module that opens channels: `grpc`, or `grpc.aio`."""

    def __init__(
        self,
        target: str,
        service: object = None,
        *,
        tls: Tls | None = None,
        token: str | None = None,
        timeout: float | None = 60.0,
        retries: int = 4,
        max_response_bytes: int = RESPONSE_BYTES,
    ) -> None:
        """Connect to a server at 'host:port', when the first call is made.

        service: the function or class that is served, or one with the same signatures; answers then have its types.
        timeout: how many seconds a call may take, all attempts together; None for no limit. Answers that are a stream
            may take longer, unless the call has a timeout of its own.
        retries: how often an idempotent call is repeated while the server is unavailable or overloaded.
        max_response_bytes: a larger response is an error; in a stream, the limit is for each value.
        """
        retain_message_memory()
        self.target, self.timeout = target, check_timeout(timeout)
        self.retries, self.max_response_bytes = retries, max_response_bytes
        self._channel = self._open_channel(tls)
        self._local_endpoints = {} if service is None else collect_endpoints(service, construct=False)
        self._metadata = token_metadata(token)
        self._lock = threading.Lock()
        self._contract: Contract | None = None
        self._closed = False
        self._methods: dict[str, Any] = {}

    def _open_channel(self, tls: Tls | None) -> Channel:
        options = [
            ("grpc.max_receive_message_length", self.max_response_bytes),
            ("grpc.max_send_message_length", -1),
            # A server that was restarted is found again within moments.
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.min_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 2000),
            ("grpc.enable_retries", 0),  # the client retries, since it knows which calls are idempotent
        ]
        if tls is None:
            return self._channels.insecure_channel(self.target, options)
        return self._channels.secure_channel(self.target, tls.channel_credentials(), options)

    def _begin_call(self, timeout: float | None) -> Attempts:
        """Start the time of a call, which includes reading the description; by default, the client's timeout."""
        if self._closed:
            raise ServiceError(
                f"{self.target}: the client is closed. Call it inside its `with`, or create another one."
            )
        return Attempts(self.retries, self.timeout if timeout is None else check_timeout(timeout))

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

    _channels = grpc

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
                self._read_contract(Attempts(0, _DIR_TIMEOUT))
        return super().__dir__()

    def endpoints(self) -> dict[str, str]:
        """Return the signatures of the endpoints, by name."""
        return self.contract().signatures

    def contract(self) -> Contract:
        """Return the description of the server, which is read once."""
        return self._read_contract(self._begin_call(None))

    def _read_contract(self, attempts: Attempts) -> Contract:
        if self._contract is not None:
            return self._contract
        # Another thread may be reading the description, with a longer timeout than this call.
        seconds = attempts.seconds_left
        if not self._lock.acquire(timeout=-1 if seconds is None else min(seconds, threading.TIMEOUT_MAX)):
            raise ServiceTimeoutError(f"{self.target} {DESCRIBE}: no answer in time.")
        try:
            if self._contract is None:
                describe = self._method(DESCRIBE)
                description = self._retry(
                    attempts, lambda seconds: describe(b"", timeout=seconds, metadata=self._metadata), DESCRIBE
                )
                self._contract = Contract(description, self._local_endpoints)
            return self._contract
        finally:
            self._lock.release()

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
                error = rpc_to_error(rpc, f"{self.target} {name}")
            time.sleep(attempts.next_pause(error))


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
        contract = client._read_contract(attempts)
        endpoint = contract.endpoint(self._name)
        takes_stream, gives_stream = endpoint["takes"]["stream"], endpoint["gives"]["stream"]
        if takes_stream or gives_stream:
            values: Any = value if takes_stream else [value]
            answers = self._stream(values, timeout if gives_stream else attempts.seconds_left)
            answer: ResultT = answers if gives_stream else next(answers)  # type: ignore[assignment]
            return answer
        plan = contract.plan(self._name, value, self._local)
        data = plan.encode(value)
        attempts = replace(attempts, repeatable=plan.idempotent, retried=0)
        return client._retry(attempts, lambda seconds: self._call_once(plan, data, seconds, contract), self._name)

    def _call_once(self, plan: CallPlan, data: bytes, timeout: float | None, contract: Contract) -> ResultT:
        client = self._client
        # The stream method takes values of any size, in parts, but a unary call takes less time on both sides.
        if len(data) <= contract.max_message_bytes:
            answer = client._method(self._name)(data, timeout=timeout, metadata=client._metadata)
        else:
            parts = split_parts(data, contract.max_message_bytes)
            call = client._method(self._name, stream=True)(parts, timeout=timeout, metadata=client._metadata)
            try:
                [answer] = _join_parts(call, client.max_response_bytes)
            finally:  # an error on this side would leave the stream open, and a thread of the server occupied
                call.cancel()
        result: ResultT = plan.output.decode(answer)
        return result

    def future(self, value: ArgT, *, timeout: float | None = None) -> Call[ResultT]:
        """Start a call of one message without waiting; its answer is asked for later, or the call is cancelled."""
        client = self._client
        attempts = client._begin_call(timeout)
        plan = client._read_contract(attempts).plan(self._name, value, self._local)
        method, data = client._method(self._name), plan.encode(value)
        future = method.future(data, timeout=attempts.seconds_left, metadata=client._metadata)
        return Call(future, plan, f"{client.target} {self._name}")

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
        requests = _RequestParts(client._read_contract(attempts), self._name, values, self._local)
        if requests.is_empty and not requests.plan.input.stream:
            return  # no values, no answers; a function that takes a stream is called with an empty one
        seconds = None if timeout is None else attempts.seconds_left
        call = client._method(self._name, stream=True)(requests, timeout=seconds, metadata=client._metadata)
        try:
            for data in _join_parts(call, client.max_response_bytes):
                yield requests.plan.output.decode(data)
        except grpc.RpcError as rpc:
            # If the caller's own iterator fails, gRPC cancels the call, and its status does not have the reason.
            raise requests.error or rpc_to_error(rpc, f"{client.target} {self._name}") from None
        finally:
            call.cancel()


class Call(Generic[ResultT]):
    """A running call."""

    def __init__(self, future: Any, plan: CallPlan, where: str) -> None:
        self._future, self._plan, self._where = future, plan, where

    def result(self, timeout: float | None = None) -> ResultT:
        """Wait for the answer; raise ServiceTimeoutError if it does not arrive within `timeout` seconds."""
        try:
            data = self._future.result(timeout)
        except grpc.FutureCancelledError:
            status = Status("CANCELLED", f"{self._where}: the call was cancelled.", "")
            raise status_to_error(status, self._where) from None
        except grpc.FutureTimeoutError:
            raise ServiceTimeoutError(f"{self._where}: no answer within {timeout} s.") from None
        except grpc.RpcError as rpc:
            raise rpc_to_error(rpc, self._where) from None
        answer: ResultT = self._plan.output.decode(data)
        return answer

    def cancel(self) -> bool:
        """Cancel the call, on the server too."""
        return bool(self._future.cancel())

    def done(self) -> bool:
        """Return whether there is an answer or an error."""
        return bool(self._future.done())


class _RequestParts(Iterator[bytes]):
    """The parts of the values of a stream, encoded when gRPC asks for them.

    The first value is taken at once, since its class decides how the answers are read.
    """

    def __init__(self, contract: Contract, name: str, values: Iterable[Any], local: Endpoint | None) -> None:
        self.error: BaseException | None = None
        self._contract, self._name, self._values, self._local = contract, name, iter(values), local
        first = next(self._values, END)
        self.is_empty = first is END
        self._parts = iter(()) if self.is_empty else self._encode(first)
        self.plan = contract.plan(name, first, local)

    def _encode(self, value: object) -> Iterator[bytes]:
        data = self._contract.plan(self._name, value, self._local).encode(value)
        return split_parts(data, self._contract.max_message_bytes)

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
