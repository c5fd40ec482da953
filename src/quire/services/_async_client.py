"""The gRPC client on asyncio: `await AsyncClient('host:port').embed(docs)`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable
from types import TracebackType
from typing import Any, TypeVar

from typing_extensions import Self

from quire._optional import require
from quire.services._client import Attempts, BaseClient
from quire.services._description import CallPlan, Contract
from quire.services._errors import rpc_to_error
from quire.services._limits import ResponseAllowance
from quire.services._payloads import PartJoiner, split_parts
from quire.services._service_spec import DESCRIBE

T = TypeVar("T")
grpc: Any = require("grpc", extra="grpc", needed_for="a client of a gRPC service")


class AsyncClient(BaseClient):
    """`Client` for asyncio: `await client.embed(docs)`, and `async for` over streams."""

    _channels = require("grpc.aio", extra="grpc", needed_for="a client of a gRPC service")

    def __getattr__(self, name: str) -> AsyncRemoteFunction:
        if name.startswith("_"):
            raise AttributeError(name)
        return self[name]

    def __getitem__(self, name: str) -> AsyncRemoteFunction:
        """Return an endpoint by name, also one that a method of the client hides."""
        return AsyncRemoteFunction(self, name)

    async def endpoints(self) -> dict[str, str]:
        """Return the signatures of the endpoints, by name."""
        return (await self.contract()).signatures

    async def contract(self) -> Contract:
        """Return the description of the server, which is read once."""
        self._check_open()
        if self._contract is None:
            describe = self._method(DESCRIBE)
            description = await self._retry(
                Attempts(self.retries, self.timeout, repeatable=True),
                lambda seconds: describe(b"", timeout=seconds, metadata=self._metadata),
                DESCRIBE,
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


class AsyncRemoteFunction:
    """An endpoint of a server, to be awaited."""

    def __init__(self, client: AsyncClient, name: str) -> None:
        self._client, self._name = client, name

    async def __call__(self, value: Any, *, timeout: float | None = None) -> Any:
        """Return what the function returns, or an async iterator if it returns a stream; see `Client`."""
        client, contract = self._client, await self._client.contract()
        endpoint = contract.endpoint(self._name)
        takes_stream, gives_stream = endpoint["takes"]["stream"], endpoint["gives"]["stream"]
        if takes_stream or gives_stream:
            answers = self.stream(value if takes_stream else [value], timeout=timeout)
            return answers if gives_stream else await anext(answers)
        plan = contract.plan(self._name, value)
        data = plan.encode(value)
        attempts = Attempts(client.retries, timeout or client.timeout, plan.idempotent)
        return await client._retry(attempts, lambda seconds: self._call_once(plan, data, seconds, contract), self._name)

    async def _call_once(self, plan: CallPlan, data: bytes, timeout: float | None, contract: Contract) -> Any:
        client = self._client
        if len(data) <= contract.max_message_bytes:
            answer = await client._method(self._name)(data, timeout=timeout, metadata=client._metadata)
        else:
            parts = split_parts(data, contract.max_message_bytes)
            call = client._method(self._name, stream=True)(parts, timeout=timeout, metadata=client._metadata)
            try:
                [answer] = [joined async for joined in _join_parts(call, client.max_answer_bytes)]
            finally:
                call.cancel()
        return plan.output.decode(answer)

    async def stream(
        self,
        values: Iterable[Any] | AsyncIterable[Any],
        *,
        timeout: float | None = None,
    ) -> AsyncIterator[Any]:
        """Yield the answers to a stream of values, in order, as they arrive; see `Client`."""
        contract, client = await self._client.contract(), self._client
        source = _iterate_async(values)
        first = await anext(source, None)
        plan = contract.plan(self._name, first)
        if first is None and not plan.input.stream:
            return
        errors: list[BaseException] = []  # of the values, of which gRPC reports only that the request failed
        requests = self._encode_stream(contract, first, source, errors)
        call = client._method(self._name, stream=True)(requests, timeout=timeout, metadata=client._metadata)
        try:
            async for data in _join_parts(call, client.max_answer_bytes):
                yield plan.output.decode(data)
        except (grpc.RpcError, asyncio.CancelledError) as error:
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
            while value is not None:
                data = contract.plan(self._name, value).encode(value)
                for part in split_parts(data, contract.max_message_bytes):
                    yield part
                value = await anext(source, None)
        except Exception as error:
            errors.append(error)
            raise


async def _iterate_async(values: Iterable[Any] | AsyncIterable[Any]) -> AsyncIterator[Any]:
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
