"""The gRPC client: `Client('host:port').embed(docs)`."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeVar

from typing_extensions import Self

from quire._optional import require
from quire.errors import ServiceError, ServiceLimitError, ServiceTimeoutError, ServiceUnavailableError
from quire.services._description import CallPlan, Contract
from quire.services._endpoints import collect_endpoints
from quire.services._errors import Status, rpc_to_error, status_to_error
from quire.services._limits import RESPONSE_BYTES, ResponseAllowance, retain_message_memory
from quire.services._payloads import PartJoiner, split_parts
from quire.services._security import Tls, token_metadata
from quire.services._service_spec import DESCRIBE, SERVICE, STREAM_SUFFIX

T = TypeVar("T")
grpc: Any = require("grpc", extra="grpc", needed_for="a client of a gRPC service")
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0
_jitter = random.Random()  # noqa: S311 - not for secrets


@dataclass
class Attempts:
    """The attempts of one call: when to retry it, and how much time is left."""

    retries: int
    timeout: float | None
    repeatable: bool
    retried: int = 0
    started: float = field(default_factory=time.monotonic)

    @property
    def seconds_left(self) -> float | None:
        """The seconds until the deadline."""
        return None if self.timeout is None else max(0.001, self.timeout - (time.monotonic() - self.started))

    def next_pause(self, error: Exception) -> float:
        """Return the seconds to wait before the next attempt; raise the error if there is none.

        Pauses double, with a random factor, so that many clients do not come back at the same time.
        """
        wait = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0**self.retried) * _jitter.uniform(0.5, 1.5)
        out_of_time = self.seconds_left is not None and self.seconds_left <= wait
        if not self.repeatable or not _may_pass(error) or self.retried >= self.retries or out_of_time:
            raise error
        self.retried += 1
        return wait


def _may_pass(error: Exception) -> bool:
    """Return whether a later attempt may succeed: a message that is too large stays too large."""
    if isinstance(error, ServiceLimitError):
        return "max_request_bytes" not in str(error) and "larger" not in str(error)
    return isinstance(error, ServiceUnavailableError)


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
        max_answer_bytes: int = RESPONSE_BYTES,
    ) -> None:
        """Connect to a server at 'host:port', when the first call is made.

        service: the function or class that is served, or one with the same signatures; answers then have its types.
        timeout: how many seconds a call may take.
        retries: how often an idempotent call is repeated while the server is unavailable or overloaded.
        max_answer_bytes: a larger answer is an error; in a stream, the limit is for each value.
        """
        retain_message_memory()
        self.target, self.timeout, self.retries, self.max_answer_bytes = target, timeout, retries, max_answer_bytes
        self._channel = self._open_channel(tls)
        self._local_endpoints = {} if service is None else collect_endpoints(service, construct=False)
        self._metadata = token_metadata(token)
        self._lock = threading.Lock()
        self._contract: Contract | None = None
        self._closed = False
        self._methods: dict[str, Any] = {}

    def _open_channel(self, tls: Tls | None) -> Any:
        options = [
            ("grpc.max_receive_message_length", self.max_answer_bytes),
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

    def _check_open(self) -> None:
        if self._closed:
            raise ServiceError(
                f"{self.target}: the client is closed. Call it inside its `with`, or create another one."
            )

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

    def __getattr__(self, name: str) -> RemoteFunction:
        if name.startswith("_"):
            raise AttributeError(name)
        return self[name]

    def __getitem__(self, name: str) -> RemoteFunction:
        """Return an endpoint by name, also one that a method of the client hides."""
        self.contract().endpoint(name)
        return RemoteFunction(self, name)

    def endpoints(self) -> dict[str, str]:
        """Return the signatures of the endpoints, by name."""
        return self.contract().signatures

    def contract(self) -> Contract:
        """Return the description of the server, which is read once."""
        self._check_open()
        with self._lock:
            if self._contract is None:
                describe = self._method(DESCRIBE)
                # Reading the description changes nothing, so it can always be repeated.
                description = self._retry(
                    Attempts(self.retries, self.timeout, repeatable=True),
                    lambda seconds: describe(b"", timeout=seconds, metadata=self._metadata),
                    DESCRIBE,
                )
                self._contract = Contract(description, self._local_endpoints)
            return self._contract

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


class RemoteFunction:
    """An endpoint of a server, to be called like the function that it serves."""

    def __init__(self, client: Client, name: str) -> None:
        self._client, self._name = client, name

    def __call__(self, value: Any, *, timeout: float | None = None) -> Any:
        """Return what the function returns: a value, or an iterator of values if it returns a stream.

        Documents that do not fit into one message are sent in parts. `timeout` is in seconds, instead of the client's.
        """
        client, contract = self._client, self._client.contract()
        endpoint = contract.endpoint(self._name)
        takes_stream, gives_stream = endpoint["takes"]["stream"], endpoint["gives"]["stream"]
        if takes_stream or gives_stream:
            answers = self.stream(value if takes_stream else [value], timeout=timeout)
            return answers if gives_stream else next(answers)
        plan = contract.plan(self._name, value)
        data = plan.encode(value)
        attempts = Attempts(client.retries, timeout or client.timeout, plan.idempotent)
        return client._retry(attempts, lambda seconds: self._call_once(plan, data, seconds, contract), self._name)

    def _call_once(self, plan: CallPlan, data: bytes, timeout: float | None, contract: Contract) -> Any:
        client = self._client
        if len(data) <= contract.max_message_bytes:
            answer = client._method(self._name)(data, timeout=timeout, metadata=client._metadata)
        else:
            parts = split_parts(data, contract.max_message_bytes)
            call = client._method(self._name, stream=True)(parts, timeout=timeout, metadata=client._metadata)
            try:
                [answer] = _join_parts(call, client.max_answer_bytes)
            finally:
                call.cancel()
        return plan.output.decode(answer)

    def future(self, value: object, *, timeout: float | None = None) -> Call:
        """Start a call of one message without waiting; its answer is asked for later, or the call is cancelled."""
        client = self._client
        plan = client.contract().plan(self._name, value)
        method = client._method(self._name)
        future = method.future(plan.encode(value), timeout=timeout or client.timeout, metadata=client._metadata)
        return Call(future, plan, f"{client.target} {self._name}")

    def stream(self, values: Iterable[Any], *, timeout: float | None = None) -> Iterator[Any]:
        """Yield the answers to a stream of values, in order, as they arrive.

        Values are taken no faster than the server reads them, and answers are produced no faster than they are taken.
        Without a `timeout` a stream may go on for ever. To end it early, close the iterator.
        """
        client = self._client
        requests = _RequestParts(client.contract(), self._name, values)
        if requests.is_empty and not requests.plan.input.stream:
            return  # no values, no answers; a function that takes a stream is called with an empty one
        call = client._method(self._name, stream=True)(requests, timeout=timeout, metadata=client._metadata)
        try:
            for data in _join_parts(call, client.max_answer_bytes):
                yield requests.plan.output.decode(data)
        except grpc.RpcError as rpc:
            raise requests.error or rpc_to_error(rpc, f"{client.target} {self._name}") from None
        finally:
            call.cancel()


class Call:
    """A running call."""

    def __init__(self, future: Any, plan: CallPlan, where: str) -> None:
        self._future, self._plan, self._where = future, plan, where

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the answer; raise ServiceTimeoutError if it does not arrive within `timeout` seconds."""
        try:
            return self._plan.output.decode(self._future.result(timeout))
        except grpc.FutureCancelledError:
            status = Status("CANCELLED", f"{self._where}: the call was cancelled.", "")
            raise status_to_error(status, self._where) from None
        except grpc.FutureTimeoutError:
            raise ServiceTimeoutError(f"{self._where}: no answer within {timeout} s.") from None
        except grpc.RpcError as rpc:
            raise rpc_to_error(rpc, self._where) from None

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

    def __init__(self, contract: Contract, name: str, values: Iterable[Any]) -> None:
        self.error: BaseException | None = None
        self._contract, self._name, self._values = contract, name, iter(values)
        first = next(self._values, None)
        self.is_empty = first is None
        self._parts = iter(()) if self.is_empty else self._encode(first)
        self.plan = contract.plan(name, first)

    def _encode(self, value: object) -> Iterator[bytes]:
        data = self._contract.plan(self._name, value).encode(value)
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
