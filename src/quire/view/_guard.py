"""Who may look: this machine's own browser, with the token of the address, and no page of another site.

The token in the address is good for one use; what is given for it is a cookie that scripts do not see and that other
sites' pages do not send. The name that the browser has asked for must be one of this machine's own: a stranger's name
that was pointed here is turned away.
"""

from __future__ import annotations

import hmac
import secrets
import threading
from collections.abc import Awaitable, Callable, MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs

Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Any, Send], Awaitable[None]]

_SAFE = (
    (b"content-security-policy", b"default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
)
_ENTER = b"""<!doctype html><html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" content="0;url=/">
<title>quire</title><link rel="icon" href="/assets/mark.svg"><p><a href="/">Open the viewer</a></p></html>"""
_CLOSED = b"""<!doctype html><html lang="en"><meta charset="utf-8"><title>quire</title>
<link rel="icon" href="/assets/mark.svg">
<link rel="stylesheet" href="/assets/view.css"><main class="closed"><h1>This page is closed</h1>
<p>Its address works once, in one browser. Ask for a new one where the viewer was started.</p></main></html>"""


class Guard:
    """An ASGI application in front of another one."""

    def __init__(self, app: App, port: int) -> None:
        self._app = app
        self._hosts = {f"{name}:{port}".encode() for name in ("127.0.0.1", "localhost", "[::1]")}
        self._cookie = f"quire-view-{port}"
        self._session = secrets.token_urlsafe(32)
        self._tokens: set[str] = set()
        self._lock = threading.Lock()

    def new_token(self) -> str:
        """A token that lets one browser in, once."""
        token = secrets.token_urlsafe(24)
        with self._lock:
            self._tokens.add(token)
        return token

    async def __call__(self, scope: Scope, receive: Any, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = dict(scope["headers"])
        if headers.get(b"host", b"").lower() not in self._hosts:
            await _answer(send, 421, b"This address is not served here.")
        elif scope["method"] not in ("GET", "HEAD"):
            await _answer(send, 405, b"This server is read only.", (b"allow", b"GET, HEAD"))
        elif scope["path"] == "/" and b"token=" in scope["query_string"]:
            await self._enter(scope, headers, send)
        elif scope["path"].startswith("/assets/") or self._knows(headers):
            await self._app(scope, receive, _with_headers(send))
        else:
            await _answer(send, 401, _CLOSED, (b"content-type", b"text/html; charset=utf-8"))

    async def _enter(self, scope: Scope, headers: dict[bytes, bytes], send: Send) -> None:
        """Give a cookie for the token, and go on from a page of this site, so that the browser sends it."""
        token = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if not self._knows(headers) and not (scope["method"] == "GET" and self._used_up(token)):
            await _answer(send, 401, _CLOSED, (b"content-type", b"text/html; charset=utf-8"))
            return
        cookie = f"{self._cookie}={self._session}; Path=/; HttpOnly; SameSite=Strict".encode()
        await _answer(send, 200, _ENTER, (b"content-type", b"text/html; charset=utf-8"), (b"set-cookie", cookie))

    def _used_up(self, token: str) -> bool:
        with self._lock:
            found = next((known for known in self._tokens if _same(known, token)), None)
            self._tokens.discard(found or "")
        return found is not None

    def _knows(self, headers: dict[bytes, bytes]) -> bool:
        try:
            cookies = SimpleCookie(headers.get(b"cookie", b"").decode("latin-1"))
        except CookieError:
            return False
        return self._cookie in cookies and _same(cookies[self._cookie].value, self._session)


def _same(first: str, second: str) -> bool:
    return hmac.compare_digest(first.encode("utf-8", "replace"), second.encode("utf-8", "replace"))


def _with_headers(send: Send) -> Send:
    async def sent(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            names = {name for name, _ in message["headers"]}
            more = [] if b"cache-control" in names else [(b"cache-control", b"no-store")]
            message = {**message, "headers": [*message["headers"], *_SAFE, *more]}
        await send(message)

    return sent


async def _answer(send: Send, status: int, body: bytes, *headers: tuple[bytes, bytes]) -> None:
    given = {name for name, _ in headers}
    plain = [] if b"content-type" in given else [(b"content-type", b"text/plain; charset=utf-8")]
    length = (b"content-length", str(len(body)).encode())
    guarded = _with_headers(send)
    await guarded({"type": "http.response.start", "status": status, "headers": [*headers, *plain, length]})
    await guarded({"type": "http.response.body", "body": body})
