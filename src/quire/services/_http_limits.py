"""What one route takes on at most: the size of bodies, and how many requests at once."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import HTTPException, Request

from quire.errors import ServiceLimitError
from quire.services._limits import Account, Budget, Limits


class Gate:
    """The requests in work. Those beyond the limit wait, and those beyond the queue are sent away with 503."""

    def __init__(self, limits: Limits) -> None:
        self.limits, self._budget, self._inside = limits, Budget(limits), 0
        self._turns: weakref.WeakKeyDictionary[Any, asyncio.Semaphore] = weakref.WeakKeyDictionary()

    @asynccontextmanager
    async def enter(self) -> AsyncIterator[Account]:
        """Wait for a turn; what the request takes in memory is told to the account."""
        if self._inside >= self.limits.max_concurrency + self.limits.max_queue:
            raise busy(f"{self._inside} requests are in work or wait already")
        turn = self._turns.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self.limits.max_concurrency))
        self._inside += 1
        try:
            async with turn:
                with self._budget.account() as account:
                    yield account
        finally:
            self._inside -= 1


class LimitedRequest(Request):  # type: ignore[misc]
    """A request whose body is read up to a limit; `Content-Length` is believed when it says too much."""

    def __init__(self, request: Request, limits: Limits, account: Account) -> None:
        super().__init__(request.scope, request._receive, request._send)
        self._limit, self._account = limits.max_request_bytes, account

    async def stream(self) -> AsyncIterator[bytes]:
        """The body as it comes."""
        told = self.headers.get("content-length", "")
        if told.isdigit() and int(told) > self._limit:
            raise self._too_large(f"{int(told):,} bytes")
        size = 0
        async for part in super().stream():
            size += len(part)
            if size > self._limit:
                raise self._too_large("more")
            try:
                self._account.take(len(part))
            except ServiceLimitError as error:
                raise busy(str(error)) from error
            yield part

    def _too_large(self, found: str) -> HTTPException:
        return HTTPException(413, f"the body has {found}, and the limit is {self._limit:,} bytes.")


def busy(why: str) -> HTTPException:
    """The error of a server that has enough to do."""
    return HTTPException(503, f"{why}: try again later.", {"Retry-After": "1"})
