"""The gRPC client: `Client('host:port').embed(docs)`."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from typing_extensions import Self

from quire._optional import require
from quire.errors import ServiceError, ServiceLimitError, ServiceTimeoutError, ServiceUnavailableError
from quire.services._description import OPTIONS, Contract, Plan
from quire.services._endpoints import Endpoint, endpoints_of
from quire.services._errors import Status, error_of, error_of_rpc
from quire.services._limits import Allowance, MiB, keep_memory
from quire.services._payloads import Joiner, parts_of
from quire.services._security import Tls, token_metadata
from quire.services._service_spec import DESCRIBE, SERVICE, STREAM

_FIRST, _LONGEST = 0.05, 2.0
_jitter = random.Random()  # noqa: S311 - nothing secret


@dataclass
class Attempts:
    """The attempts of one call: how many are left, and until when."""

    retries: int
    timeout: float | None
    repeatable: bool
    made: int = 0
    started: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float | None:
        """The seconds that are left, for gRPC's deadline."""
        return None if self.timeout is None else max(0.001, self.timeout - (time.monotonic() - self.started))

    def pause(self, error: Exception) -> float:
        """How long to wait before the next attempt; where there is none, the error is raised."""
        again = isinstance(error, (ServiceUnavailableError, ServiceLimitError)) and _is_passing(error)
        wait = min(_LONGEST, _FIRST * 2.0**self.made) * _jitter.uniform(0.5, 1.5)
        out_of_time = self.left is not None and self.left <= wait
        if not (again and self.repeatable) or self.made >= self.retries or out_of_time:
            raise error
        self.made += 1
        return wait


def _is_passing(error: ServiceError) -> bool:
    """Whether it may go better later: a message that is too large stays too large."""
    return not (isinstance(error, ServiceLimitError) and ("max_request_bytes" in str(error) or "larger" in str(error)))


grpc: Any = require("grpc", extra="grpc", needed_for="a client of a gRPC service")
ANSWER_BYTES = 256 * MiB


def channel_options(max_answer_bytes: int) -> list[tuple[str, int]]:
    """What gRPC's channels take. A server that was restarted is found again within moments."""
    return [
        ("grpc.max_receive_message_length", max_answer_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2000),
        ("grpc.enable_retries", 0),  # repeated here, where it is known which calls may be
    ]


def closed(target: str) -> ServiceError:
    """What is told to who calls with a client that was closed."""
    return ServiceError(f"{target}: the client is closed. Call inside of its `with`, or make another one.")


def local_endpoints(service: Any) -> dict[str, Endpoint]:
    """The endpoints that the client's own program knows by their signatures."""
    return {} if service is None else endpoints_of(service, construct=False)


class Client:
    """The endpoints of a service as methods: `client.embed(docs)` gives what `embed(docs)` gives there.

    The address is 'host:port'. Before the first call of an endpoint, its schema is held against the documents' class.
    Given the `service` too (the function or class, or one with the same signatures), answers have the types that it
    says; else they are of the class that the server names, if it is loaded. A client may be used by many threads.
    """

    def __init__(
        self,
        target: str,
        service: Any = None,
        *,
        tls: Tls | None = None,
        token: str | None = None,
        timeout: float | None = 60.0,
        retries: int = 4,
        max_answer_bytes: int = ANSWER_BYTES,
    ) -> None:
        """With the seconds that a call may take, and how often one that may be repeated is, when the server is away.

        An answer of more than `max_answer_bytes` is an error; of a stream, each of its values may have so many.
        """
        keep_memory()
        options = channel_options(max_answer_bytes)
        if tls is None:
            self._channel = grpc.insecure_channel(target, options)
        else:
            self._channel = grpc.secure_channel(target, tls.channel_credentials(), options)
        self.target, self.timeout, self.retries = target, timeout, retries
        self.max_answer_bytes = max_answer_bytes
        self._local = local_endpoints(service)
        self._metadata = token_metadata(token)
        self._lock = threading.Lock()
        self._contract: Contract | None = None
        self._closed = False
        self._methods: dict[str, Any] = {}

    def __getattr__(self, name: str) -> RemoteFunction:
        if name.startswith("_"):
            raise AttributeError(name)
        return self[name]

    def __getitem__(self, name: str) -> RemoteFunction:
        """An endpoint, whatever its name."""
        self.contract().endpoint(name)
        return RemoteFunction(self, name)

    def endpoints(self) -> dict[str, str]:
        """The signatures of what can be called, by name."""
        return {name: told["signature"] for name, told in self.contract().told["endpoints"].items()}

    def contract(self) -> Contract:
        """What the server tells of itself; asked for once."""
        if self._closed:
            raise closed(self.target)
        with self._lock:
            if self._contract is None:
                ask = self._method(DESCRIBE, stream=False)
                told = self._repeated(
                    Attempts(self.retries, self.timeout, repeatable=True),
                    lambda left: ask(b"", timeout=left, metadata=self._metadata),
                    DESCRIBE,
                )
                self._contract = Contract(told, self._local)
            return self._contract

    def close(self) -> None:
        """Close the connection; calls that run are cancelled."""
        self._closed = True
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, tp: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _method(self, name: str, *, stream: bool) -> Any:
        if name not in self._methods:
            make = self._channel.stream_stream if stream else self._channel.unary_unary
            self._methods[name] = make(f"/{SERVICE}/{name}")
        return self._methods[name]

    def _repeated(self, attempts: Attempts, attempt: Callable[[float | None], Any], name: str) -> Any:
        while True:
            try:
                return attempt(attempts.left)
            except grpc.RpcError as error:
                told = error_of_rpc(error, f"{self.target} {name}")
            time.sleep(attempts.pause(told))


class RemoteFunction:
    """An endpoint of a server, to be called like the function that it is."""

    def __init__(self, client: Client, name: str) -> None:
        self._client, self._name = client, name

    def __call__(self, value: Any, *, timeout: float | None = None) -> Any:
        """What the function gives: a value, or an iterator of values where it gives a stream.

        Documents that make more than one message go in parts. `timeout` is in seconds, instead of the client's.
        """
        client, contract = self._client, self._client.contract()
        told = contract.endpoint(self._name)
        if told["takes"]["stream"] or told["gives"]["stream"]:
            values = value if told["takes"]["stream"] else [value]
            answers = self.stream(values, timeout=timeout)
            return answers if told["gives"]["stream"] else next(answers)
        plan = contract.plan(self._name, value)
        data = plan.takes.encode(plan.takes.check(value, self._name))
        attempts = Attempts(client.retries, timeout or client.timeout, plan.idempotent)
        return client._repeated(attempts, lambda left: self._once(plan, data, left, contract), self._name)

    def _once(self, plan: Plan, data: bytes, timeout: float | None, contract: Contract) -> Any:
        client = self._client
        if len(data) <= contract.max_message_bytes:
            call = client._method(self._name, stream=False)
            answer = call(data, timeout=timeout, metadata=client._metadata)
        else:
            call = client._method(self._name + STREAM, stream=True)
            parts = parts_of(data, contract.max_message_bytes)
            begun = call(parts, timeout=timeout, metadata=client._metadata)
            try:
                [answer] = _values(begun, client.max_answer_bytes)
            finally:
                begun.cancel()
        return plan.gives.decode(answer, OPTIONS)

    def future(self, value: Any, *, timeout: float | None = None) -> Call:
        """Begin a call of one message, and go on; the answer is asked for later, or the call cancelled."""
        client, contract = self._client, self._client.contract()
        plan = contract.plan(self._name, value)
        data = plan.takes.encode(plan.takes.check(value, self._name))
        call = client._method(self._name, stream=False)
        begun = call.future(data, timeout=timeout or client.timeout, metadata=client._metadata)
        return Call(begun, plan, f"{client.target} {self._name}")

    def stream(self, values: Iterable[Any], *, timeout: float | None = None) -> Iterator[Any]:
        """The answers to a stream of values, in order, as they come.

        Values are taken no faster than the server reads them, and answers made no faster than they are taken. Without
        a `timeout` a stream may go on for ever. To end early, close the iterator.
        """
        sent = _Sent(self._client.contract(), self._name, values)
        if not sent.begin():
            return
        client = self._client
        call = client._method(self._name + STREAM, stream=True)(sent, timeout=timeout, metadata=client._metadata)
        try:
            for data in _values(call, client.max_answer_bytes):
                yield sent.plan.gives.decode(data, OPTIONS)
        except grpc.RpcError as error:
            raise sent.fault or error_of_rpc(error, f"{client.target} {self._name}") from None
        finally:
            call.cancel()


class Call:
    """A call that is under way."""

    def __init__(self, begun: Any, plan: Plan, where: str) -> None:
        self._begun, self._plan, self._where = begun, plan, where

    def result(self, timeout: float | None = None) -> Any:
        """The answer, when it is there; with a timeout, an error when it is not there by then."""
        try:
            return self._plan.gives.decode(self._begun.result(timeout), OPTIONS)
        except grpc.FutureCancelledError:
            raise error_of(Status("CANCELLED", f"{self._where}: the call was cancelled.", ""), self._where) from None
        except grpc.FutureTimeoutError:
            raise ServiceTimeoutError(f"{self._where}: no answer within {timeout} s.") from None
        except grpc.RpcError as error:
            raise error_of_rpc(error, self._where) from None

    def cancel(self) -> bool:
        """Give up the call; the server hears of it."""
        return bool(self._begun.cancel())

    def done(self) -> bool:
        """Whether there is an answer, or an error."""
        return bool(self._begun.done())


class _Sent(Iterator[bytes]):
    """The parts of the values that are sent, made when gRPC asks for them."""

    plan: Plan

    def __init__(self, contract: Contract, name: str, values: Iterable[Any]) -> None:
        self.fault: BaseException | None = None
        self._contract, self._name, self._values = contract, name, iter(values)
        self._parts: Iterator[bytes] = iter(())

    def begin(self) -> bool:
        """Take the first value, whose class says how the stream is read; False where there is none."""
        first = next(self._values, None)
        if first is not None:
            self._parts = self._cut(first)
        self.plan = self._contract.plan(self._name, first)
        return first is not None or self.plan.takes.stream

    def _cut(self, value: Any) -> Iterator[bytes]:
        takes = self._contract.plan(self._name, value).takes
        return parts_of(takes.encode(takes.check(value, self._name)), self._contract.max_message_bytes)

    def __next__(self) -> bytes:
        try:
            while True:
                part = next(self._parts, None)
                if part is not None:
                    return part
                self._parts = self._cut(next(self._values))
        except StopIteration:
            raise
        except BaseException as error:
            self.fault = error
            raise


def _values(parts: Iterable[bytes], most: int) -> Iterator[bytes]:
    allowance = Allowance(most)
    joiner = Joiner(allowance)
    for part in parts:
        data = joiner.add(part)
        if data is not None:
            yield data
            allowance.clear()
    joiner.finish()
