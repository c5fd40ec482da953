"""The gRPC client on asyncio: `await AsyncClient('host:port').embed(docs)`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from dataclasses import replace
from types import TracebackType
from typing import Any, Generic, TypeAlias, TypeVar, overload

from typing_extensions import Self

from quire._optional import require
from quire.services._client import Attempts, BaseClient, check_timeout
from quire.services._description import END, CallPlan, Contract
from quire.services._endpoints import Endpoint, endpoint_of
from quire.services._errors import rpc_to_error
from quire.services._limits import ResponseAllowance
from quire.services._payloads import InT, OutT, PartJoiner, split_parts
from quire.services._service_spec import DESCRIBE

T = TypeVar("T")
R = TypeVar("R")
ArgT = TypeVar("ArgT")
ResultT = TypeVar("ResultT")
Stream: TypeAlias = Iterable[T] | AsyncIterable[T]
"""The values of a stream, from either kind of iterable."""
grpc: Any = require("grpc", extra="grpc", needed_for="a client of a gRPC service")


class AsyncClient(BaseClient):
    """`Client` for asyncio: `await client.embed(docs)`, and `async for` over streams."""

    _channels = require("grpc.aio", extra="grpc", needed_for="a client of a gRPC service")

    def __getattr__(self, name: str) -> AsyncRemoteFunction[Any, Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        return self[name]

    @overload
    def __getitem__(self, endpoint: str) -> AsyncRemoteFunction[Any, Any]: ...
    @overload
    def __getitem__(self, endpoint: Callable[[InT], OutT]) -> AsyncRemoteFunction[InT, OutT]: ...
    @overload
    def __getitem__(self, endpoint: Callable[[InT], Coroutine[Any, Any, OutT]]) -> AsyncRemoteFunction[InT, OutT]: ...
    @overload  # methods of a class
    def __getitem__(self, endpoint: Callable[[Any, InT], OutT]) -> AsyncRemoteFunction[InT, OutT]: ...
    @overload
    def __getitem__(
        self, endpoint: Callable[[Any, InT], Coroutine[Any, Any, OutT]]
    ) -> AsyncRemoteFunction[InT, OutT]: ...
    @overload  # streams
    def __getitem__(self, endpoint: Callable[[Iterator[InT]], OutT]) -> AsyncRemoteFunction[Stream[InT], OutT]: ...
    @overload
    def __getitem__(
        self, endpoint: Callable[[Iterator[InT]], Iterator[OutT]]
    ) -> AsyncRemoteFunction[Stream[InT], AsyncIterator[OutT]]: ...
    @overload
    def __getitem__(
        self, endpoint: Callable[[InT], Iterator[OutT]]
    ) -> AsyncRemoteFunction[InT, AsyncIterator[OutT]]: ...
    @overload
    def __getitem__(
        self, endpoint: Callable[[AsyncIterator[InT]], AsyncIterator[OutT]]
    ) -> AsyncRemoteFunction[Stream[InT], AsyncIterator[OutT]]: ...
    @overload
    def __getitem__(
        self, endpoint: Callable[[AsyncIterator[InT]], Coroutine[Any, Any, OutT]]
    ) -> AsyncRemoteFunction[Stream[InT], OutT]: ...
    @overload
    def __getitem__(
        self, endpoint: Callable[[InT], AsyncIterator[OutT]]
    ) -> AsyncRemoteFunction[InT, AsyncIterator[OutT]]: ...
    def __getitem__(self, endpoint: str | Callable[..., Any]) -> AsyncRemoteFunction[Any, Any]:
        """Return an endpoint by name, also one that a method of the client hides, or by a function; see `Client`."""
        if isinstance(endpoint, str):
            return AsyncRemoteFunction(self, endpoint)
        local = endpoint_of(endpoint)
        return AsyncRemoteFunction(self, local.name, local)

    async def endpoints(self) -> dict[str, str]:
        """Return the signatures of the endpoints, by name."""
        return (await self.contract()).signatures

    async def contract(self) -> Contract:
        """Return the description of the server, which is read once."""
        return await self._read_contract(self._begin_call(None))

    async def _read_contract(self, attempts: Attempts) -> Contract:
        # Without a lock: tasks that start together may read it several times, each within its own timeout.
        if self._contract is None:
            describe = self._method(DESCRIBE)
            description = await self._retry(
                attempts, lambda seconds: describe(b"", timeout=seconds, metadata=self._metadata), DESCRIBE
            )
            self._contract = Contract(description, self._local_endpoints)
        return self._contract

    async def close(self) -> None:
        """Close the connection; running calls are cancelled."""
        self._closed = True
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, tp: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    async def _retry(self, attempts: Attempts, attempt: Callable[[float | None], Awaitable[T]], name: str) -> T:
        while True:
            try:
                return await attempt(attempts.seconds_left)
            except grpc.RpcError as rpc:
                error = rpc_to_error(rpc, f"{self.target} {name}")
            await asyncio.sleep(attempts.next_pause(error))


class AsyncRemoteFunction(Generic[ArgT, ResultT]):
    """An endpoint of a server, to be awaited."""

    def __init__(self, client: AsyncClient, name: str, local: Endpoint | None = None) -> None:
        self._client, self._name, self._local = client, name, local

    async def __call__(self, value: ArgT, *, timeout: float | None = None) -> ResultT:
        """Return what the function returns, or an async iterator if it returns a stream; see `Client`."""
        client = self._client
        attempts = client._begin_call(timeout)
        contract = await client._read_contract(attempts)
        endpoint = contract.endpoint(self._name)
        takes_stream, gives_stream = endpoint["takes"]["stream"], endpoint["gives"]["stream"]
        if takes_stream or gives_stream:
            values: Any = value if takes_stream else [value]
            answers = self._stream(values, timeout if gives_stream else attempts.seconds_left)
            answer: ResultT = answers if gives_stream else await anext(answers)  # type: ignore[assignment]
            return answer
        plan = contract.plan(self._name, value, self._local)
        data = plan.encode(value)
        attempts = replace(attempts, repeatable=plan.idempotent, retried=0)
        return await client._retry(attempts, lambda seconds: self._call_once(plan, data, seconds, contract), self._name)

    async def _call_once(self, plan: CallPlan, data: bytes, timeout: float | None, contract: Contract) -> ResultT:
        client = self._client
        # As in `Client`: one message if it fits, else the stream method, which takes values in parts.
        if len(data) <= contract.max_message_bytes:
            answer = await client._method(self._name)(data, timeout=timeout, metadata=client._metadata)
        else:
            parts = split_parts(data, contract.max_message_bytes)
            call = client._method(self._name, stream=True)(parts, timeout=timeout, metadata=client._metadata)
            try:
                [answer] = [joined async for joined in _join_parts(call, client.max_response_bytes)]
            finally:
                call.cancel()
        result: ResultT = plan.output.decode(answer)
        return result

    @overload
    def stream(
        self: AsyncRemoteFunction[Stream[T], AsyncIterator[R]], values: Stream[T], *, timeout: float | None = None
    ) -> AsyncIterator[R]: ...
    @overload
    def stream(
        self: AsyncRemoteFunction[Stream[T], R], values: Stream[T], *, timeout: float | None = None
    ) -> AsyncIterator[R]: ...
    @overload
    def stream(
        self: AsyncRemoteFunction[T, AsyncIterator[R]], values: Stream[T], *, timeout: float | None = None
    ) -> AsyncIterator[R]: ...
    @overload
    def stream(self, values: Stream[ArgT], *, timeout: float | None = None) -> AsyncIterator[ResultT]: ...
    def stream(self, values: Stream[Any], *, timeout: float | None = None) -> AsyncIterator[Any]:
        """Yield the answers to a stream of values, in order, as they arrive; see `Client`."""
        return self._stream(values, check_timeout(timeout))

    async def _stream(self, values: Stream[Any], timeout: float | None) -> AsyncIterator[Any]:
        client = self._client
        attempts = client._begin_call(timeout)
        contract = await client._read_contract(attempts)
        source = _iterate_async(values)
        first = await anext(source, END)
        plan = contract.plan(self._name, first, self._local)
        if first is END and not plan.input.stream:
            return
        errors: list[BaseException] = []  # of the values, of which gRPC reports only that the request failed
        requests = self._encode_stream(contract, first, source, errors)
        seconds = None if timeout is None else attempts.seconds_left
        call = client._method(self._name, stream=True)(requests, timeout=seconds, metadata=client._metadata)
        try:
            async for data in _join_parts(call, client.max_response_bytes):
                yield plan.output.decode(data)
        except (grpc.RpcError, asyncio.CancelledError) as error:
            # If the values fail, gRPC cancels the call, and the task gets a CancelledError that nobody asked for.
            if errors:
                raise errors[0] from None
            if isinstance(error, asyncio.CancelledError):
                raise
            raise rpc_to_error(error, f"{client.target} {self._name}") from None
        finally:
            call.cancel()

    async def _encode_stream(
        self, contract: Contract, first: object, source: AsyncIterator[Any], errors: list[BaseException]
    ) -> AsyncIterator[bytes]:
        try:
            value: object = first
            while value is not END:
                data = contract.plan(self._name, value, self._local).encode(value)
                for part in split_parts(data, contract.max_message_bytes):
                    yield part
                value = await anext(source, END)
        except Exception as error:
            errors.append(error)
            raise


async def _iterate_async(values: Stream[T]) -> AsyncIterator[T]:
    if isinstance(values, AsyncIterable):
        async for value in values:
            yield value
    else:
        for value in values:
            yield value


async def _join_parts(parts: AsyncIterable[bytes], max_bytes: int) -> AsyncIterator[bytes]:
    """Yield the values in a stream of parts, each of at most `max_bytes`."""
    allowance = ResponseAllowance(max_bytes)
    joiner = PartJoiner(allowance)
    async for part in parts:
        data = joiner.add(part)
        if data is not None:
            yield data
            allowance.clear()
    joiner.finish()
