"""The gRPC client on asyncio: `await AsyncClient('host:port').embed(docs)`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from types import TracebackType
from typing import Any, Generic, TypeAlias, TypeVar, overload

from typing_extensions import Self

from quire._optional import require
from quire.errors import OptionError, PathError, QuireError, SchemaError, ServiceLimitError, ServiceTimeoutError
from quire.services._client import DESCRIBE_SECONDS, Attempts, BaseClient, check_timeout
from quire.services._description import END, CallPlan, Contract
from quire.services._endpoints import Endpoint, endpoint_of
from quire.services._limits import ResponseAllowance
from quire.services._payloads import InT, OutT, PartJoiner, split_parts
from quire.services._security import Tls
from quire.services._service_spec import DESCRIBE

T = TypeVar("T")
R = TypeVar("R")
ArgT = TypeVar("ArgT")
ResultT = TypeVar("ResultT")
Stream: TypeAlias = Iterable[T] | AsyncIterable[T]
"""The values of a stream, from either kind of iterable."""
aio: Any = require("grpc.aio", extra="grpc", needed_for="a client of a gRPC service")
grpc: Any = require("grpc", extra="grpc", needed_for="a client of a gRPC service")


class AsyncClient(BaseClient):
    """`Client` for asyncio: `await client.embed(docs)`, and `async for` over streams."""

    def _open_channel(self, tls: Tls | None, options: list[tuple[str, Any]], interceptors: list[Any]) -> Any:
        try:
            if tls is None:
                return aio.insecure_channel(self.target, options, interceptors=interceptors)
            return aio.secure_channel(self.target, tls.channel_credentials(), options, interceptors=interceptors)
        except ValueError as error:
            raise OptionError(f"interceptors: {error}") from error

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
        """Return the description of the server. It is read once, and again when the server was upgraded."""
        return await self._read_contract(self._begin_call(None))

    async def _read_contract(self, attempts: Attempts) -> Contract:
        # Without a lock: tasks that start together may read it several times, each within its own timeout.
        if self._contract is not None:
            return self._contract
        describe = self._method(DESCRIBE)
        description = await self._retry(
            attempts, lambda seconds: describe(b"", **self._call_arguments(seconds, attempts.request_id)), DESCRIBE
        )
        return self._keep_contract(description)

    async def _with_contract(self, attempts: Attempts, use: Callable[[Contract], T]) -> T:
        """Return what `use` makes of the description; see `Client`."""
        contract = await self._read_contract(attempts)
        try:
            return use(contract)
        except (PathError, SchemaError, ServiceLimitError):
            if contract.read_at >= attempts.started:
                raise
            describe = self._method(DESCRIBE)
            try:  # at once, or not at all: the error is known
                newer = self._keep_contract(await describe(b"", timeout=DESCRIBE_SECONDS, metadata=self._metadata))
            except grpc.RpcError:
                newer = contract
            if newer is contract:
                raise
        return use(newer)

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
                error = self._rpc_to_error(rpc, name, attempts.request_id)
            await asyncio.sleep(attempts.next_pause(error))

    def _rpc_to_error(self, rpc: Any, name: str, request_id: str) -> QuireError:
        error = super()._rpc_to_error(rpc, name, request_id)
        is_connected = self._channel.get_state() is grpc.ChannelConnectivity.READY
        if isinstance(error, ServiceTimeoutError) and self._was_connected and not is_connected:
            return self._no_connection(f"{self.target} {name}", request_id)
        return error


class AsyncRemoteFunction(Generic[ArgT, ResultT]):
    """An endpoint of a server, to be awaited."""

    def __init__(self, client: AsyncClient, name: str, local: Endpoint | None = None) -> None:
        self._client, self._name, self._local = client, name, local

    async def __call__(self, value: ArgT, *, timeout: float | None = None) -> ResultT:
        """Return what the function returns, or an async iterator if it returns a stream; see `Client`."""
        client = self._client
        attempts = client._begin_call(timeout)
        endpoint = await client._with_contract(attempts, lambda contract: contract.endpoint(self._name))
        takes_stream, gives_stream = endpoint["takes"]["stream"], endpoint["gives"]["stream"]
        if takes_stream or gives_stream:
            values: Any = value if takes_stream else [value]
            answers = self._stream(values, None if gives_stream and timeout is None else attempts.seconds_left)
            answer: ResultT = answers if gives_stream else await anext(answers)  # type: ignore[assignment]
            return answer
        plan, data = await client._with_contract(
            attempts, lambda contract: contract.encode(self._name, value, self._local)
        )
        attempts.begin_call(repeatable=plan.idempotent)
        with client._span(self._name) as span:
            return await client._retry(
                attempts,
                lambda seconds: self._call_once(plan, data, client._call_arguments(seconds, attempts.request_id, span)),
                self._name,
            )

    async def _call_once(self, plan: CallPlan, data: bytes, arguments: dict[str, Any]) -> ResultT:
        client = self._client
        # As in `Client`: one message if it fits, else the stream method, which takes values in parts.
        if len(data) <= plan.max_message_bytes:
            call = client._method(self._name)(data, **arguments)
            answer = await call
        else:
            parts = split_parts(data, plan.max_message_bytes)
            call = client._method(self._name, stream=True)(parts, **arguments)
            try:
                [answer] = [joined async for joined in _join_parts(call, client.max_response_bytes)]
            finally:
                call.cancel()
        client._check_contract(await call.trailing_metadata())
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
        await client._read_contract(attempts)
        source = _iterate_async(values)
        # The class of the first value is needed before gRPC, which enforces the deadline from then on, gets the call.
        taking: asyncio.Future[Any] = asyncio.ensure_future(anext(source, END))
        try:
            await asyncio.wait({taking}, timeout=None if timeout is None else attempts.seconds_left)
            if not taking.done():
                raise ServiceTimeoutError(f"{client.target} {self._name}: there was no value to send in time.")
            first = taking.result()
        finally:
            taking.cancel()

        def plan_stream(contract: Contract) -> tuple[Contract, CallPlan]:
            return contract, contract.plan(self._name, first, self._local)

        contract, plan = await client._with_contract(attempts, plan_stream)
        if first is END and not plan.input.stream:
            return
        errors: list[BaseException] = []  # of the values, of which gRPC reports only that the request failed
        requests = self._encode_stream(contract, first, source, errors)
        with client._span(self._name) as span:
            seconds = None if timeout is None else attempts.seconds_left
            arguments = client._call_arguments(seconds, attempts.request_id, span)
            if timeout is None:
                arguments["wait_for_ready"] = False  # it would wait for ever
            call = client._method(self._name, stream=True)(requests, **arguments)
            try:
                async for data in _join_parts(call, client.max_response_bytes):
                    yield plan.output.decode(data)
                client._check_contract(await call.trailing_metadata())
            except (grpc.RpcError, asyncio.CancelledError) as error:
                # If the values fail, gRPC cancels the call, and the task gets a CancelledError that nobody asked for.
                if errors:
                    raise errors[0] from None
                if isinstance(error, asyncio.CancelledError):
                    raise
                metadata = await call.initial_metadata()
                raise client._stream_error(error, metadata, self._name, attempts.request_id) from None
            finally:
                call.cancel()

    async def _encode_stream(
        self, contract: Contract, first: object, source: AsyncIterator[Any], errors: list[BaseException]
    ) -> AsyncIterator[bytes]:
        try:
            value: object = first
            while value is not END:
                plan, data = contract.encode(self._name, value, self._local)
                for part in split_parts(data, plan.max_message_bytes):
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
