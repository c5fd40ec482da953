"""The gRPC client on asyncio: `await AsyncClient('host:port').embed(docs)`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable
from types import TracebackType
from typing import Any

from typing_extensions import Self

from quire._optional import require
from quire.services._client import ANSWER_BYTES, Attempts, channel_options, closed, local_endpoints
from quire.services._description import OPTIONS, Contract, Plan
from quire.services._errors import error_of_rpc
from quire.services._limits import Allowance, keep_memory
from quire.services._payloads import Joiner, parts_of
from quire.services._security import Tls, token_metadata
from quire.services._service_spec import DESCRIBE, SERVICE, STREAM

grpc: Any = require("grpc", extra="grpc", needed_for="a client of a gRPC service")
aio: Any = require("grpc.aio", extra="grpc", needed_for="a client of a gRPC service")


class AsyncClient:
    """`Client` for asyncio: `await client.embed(docs)`, and `async for` over streams."""

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
        """See `Client`."""
        keep_memory()
        options = channel_options(max_answer_bytes)
        if tls is None:
            self._channel = aio.insecure_channel(target, options)
        else:
            self._channel = aio.secure_channel(target, tls.channel_credentials(), options)
        self.target, self.timeout, self.retries = target, timeout, retries
        self.max_answer_bytes = max_answer_bytes
        self._local = local_endpoints(service)
        self._metadata = token_metadata(token)
        self._contract: Contract | None = None
        self._closed = False
        self._methods: dict[str, Any] = {}

    def __getattr__(self, name: str) -> AsyncRemoteFunction:
        if name.startswith("_"):
            raise AttributeError(name)
        return self[name]

    def __getitem__(self, name: str) -> AsyncRemoteFunction:
        """An endpoint, whatever its name."""
        return AsyncRemoteFunction(self, name)

    async def endpoints(self) -> dict[str, str]:
        """The signatures of what can be called, by name."""
        return {name: told["signature"] for name, told in (await self.contract()).told["endpoints"].items()}

    async def contract(self) -> Contract:
        """What the server tells of itself; asked for once."""
        if self._closed:
            raise closed(self.target)
        if self._contract is None:
            ask = self._method(DESCRIBE, stream=False)
            told = await self._repeated(
                Attempts(self.retries, self.timeout, repeatable=True),
                lambda left: ask(b"", timeout=left, metadata=self._metadata),
                DESCRIBE,
            )
            self._contract = Contract(told, self._local)
        return self._contract

    async def close(self) -> None:
        """Close the connection; calls that run are cancelled."""
        self._closed = True
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, tp: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    def _method(self, name: str, *, stream: bool) -> Any:
        if name not in self._methods:
            make = self._channel.stream_stream if stream else self._channel.unary_unary
            self._methods[name] = make(f"/{SERVICE}/{name}")
        return self._methods[name]

    async def _repeated(self, attempts: Attempts, attempt: Callable[[float | None], Awaitable[Any]], name: str) -> Any:
        while True:
            try:
                return await attempt(attempts.left)
            except grpc.RpcError as error:
                told = error_of_rpc(error, f"{self.target} {name}")
            await asyncio.sleep(attempts.pause(told))


class AsyncRemoteFunction:
    """An endpoint of a server, to be awaited."""

    def __init__(self, client: AsyncClient, name: str) -> None:
        self._client, self._name = client, name

    async def __call__(self, value: Any, *, timeout: float | None = None) -> Any:
        """What the function gives; see `Client`. An endpoint that gives a stream gives an async iterator."""
        client, contract = self._client, await self._client.contract()
        told = contract.endpoint(self._name)
        if told["takes"]["stream"] or told["gives"]["stream"]:
            answers = self.stream(value if told["takes"]["stream"] else [value], timeout=timeout)
            return answers if told["gives"]["stream"] else await anext(answers)
        plan = contract.plan(self._name, value)
        data = plan.takes.encode(plan.takes.check(value, self._name))
        attempts = Attempts(client.retries, timeout or client.timeout, plan.idempotent)
        return await client._repeated(attempts, lambda left: self._once(plan, data, left, contract), self._name)

    async def _once(self, plan: Plan, data: bytes, left: float | None, contract: Contract) -> Any:
        client = self._client
        if len(data) <= contract.max_message_bytes:
            call = client._method(self._name, stream=False)
            answer = await call(data, timeout=left, metadata=client._metadata)
        else:
            call = client._method(self._name + STREAM, stream=True)
            parts = parts_of(data, contract.max_message_bytes)
            begun = call(parts, timeout=left, metadata=client._metadata)
            try:
                [answer] = [found async for found in _values(begun, client.max_answer_bytes)]
            finally:
                begun.cancel()
        return plan.gives.decode(answer, OPTIONS)

    async def stream(
        self,
        values: Iterable[Any] | AsyncIterable[Any],
        *,
        timeout: float | None = None,
    ) -> AsyncIterator[Any]:
        """The answers to a stream of values, in order, as they come; see `Client`."""
        contract, client = await self._client.contract(), self._client
        source = _as_async(values)
        first = await anext(source, None)
        plan = contract.plan(self._name, first)
        if first is None and not plan.takes.stream:
            return
        faults: list[BaseException] = []
        sent = self._sent(contract, first, source, faults)
        call = client._method(self._name + STREAM, stream=True)(sent, timeout=timeout, metadata=client._metadata)
        try:
            async for data in _values(call, client.max_answer_bytes):
                yield plan.gives.decode(data, OPTIONS)
        except (grpc.RpcError, asyncio.CancelledError) as error:
            if faults:
                raise faults[0] from None
            if isinstance(error, asyncio.CancelledError):
                raise
            raise error_of_rpc(error, f"{client.target} {self._name}") from None
        finally:
            call.cancel()

    async def _sent(
        self, contract: Contract, first: Any, source: AsyncIterator[Any], faults: list[BaseException]
    ) -> AsyncIterator[bytes]:
        try:
            value = first
            while value is not None:
                takes = contract.plan(self._name, value).takes
                for part in parts_of(takes.encode(takes.check(value, self._name)), contract.max_message_bytes):
                    yield part
                value = await anext(source, None)
        except Exception as error:
            faults.append(error)
            raise


async def _as_async(values: Any) -> AsyncIterator[Any]:
    if hasattr(values, "__aiter__"):
        async for value in values:
            yield value
    else:
        for value in values:
            yield value


async def _values(parts: Any, most: int) -> AsyncIterator[bytes]:
    allowance = Allowance(most)
    joiner = Joiner(allowance)
    async for part in parts:
        data = joiner.add(part)
        if data is not None:
            yield data
            allowance.clear()
    joiner.finish()
