"""Access control: only a browser on this machine that was given the token of the address.

The token in the address works once. It is exchanged for a session cookie that scripts cannot read (HttpOnly) and that
pages of other sites do not send (SameSite=Strict). The Host header must be a loopback name, which stops DNS rebinding:
a page of another site whose name was pointed at 127.0.0.1.
"""

from __future__ import annotations

import hmac
import secrets
import threading
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import parse_qs

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_SECURITY_HEADERS = (
    (b"content-security-policy", b"default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-frame-options", b"DENY"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
)
_HTML = (b"content-type", b"text/html; charset=utf-8")
_PLAIN_TEXT = (b"content-type", b"text/plain; charset=utf-8")
# A redirect would carry the origin of the link that led here, and the browser would not send a SameSite=Strict cookie.
_ENTRY_PAGE = b"""<!doctype html><html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" content="0;url=/">
<title>quire</title><link rel="icon" href="/assets/mark.svg"><p><a href="/">Open the viewer</a></p></html>"""
_CLOSED_PAGE = b"""<!doctype html><html lang="en"><meta charset="utf-8"><title>quire</title>
<link rel="icon" href="/assets/mark.svg">
<link rel="stylesheet" href="/assets/view.css"><main class="closed"><h1>This page is closed</h1>
<p>Its address works once, in one browser. Ask for a new one where the viewer was started.</p></main></html>"""


class AccessControl:
    """ASGI middleware that authenticates requests and adds security headers to every response."""

    def __init__(self, app: App, port: int) -> None:
        self._app = app
        self._hosts = {f"{name}:{port}".encode() for name in ("127.0.0.1", "localhost", "[::1]")}
        self._cookie = f"quire-view-{port}"
        self._session = secrets.token_urlsafe(32)
        self._tokens: set[str] = set()
        self._lock = threading.Lock()

    def new_token(self) -> str:
        """Create a token that admits one browser, once."""
        token = secrets.token_urlsafe(24)
        with self._lock:
            self._tokens.add(token)
        return token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        hosts = {value.lower() for name, value in scope["headers"] if name == b"host"}
        if not hosts or not hosts <= self._hosts:
            await _respond(send, 421, b"This address is not served here.", _PLAIN_TEXT)
        elif scope["method"] not in ("GET", "HEAD"):
            await _respond(send, 405, b"This server is read only.", _PLAIN_TEXT, (b"allow", b"GET, HEAD"))
        elif scope["path"] == "/" and b"token=" in scope["query_string"]:
            await self._exchange_token(scope, send)
        elif scope["path"].startswith("/assets/") or self._has_session(scope):
            await self._app(scope, receive, _add_security_headers(send))
        else:
            await _respond(send, 401, _CLOSED_PAGE, _HTML)

    async def _exchange_token(self, scope: Scope, send: Send) -> None:
        """Set the session cookie if the token is valid, or if the browser has a session already (a reload)."""
        token = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if not self._has_session(scope) and not (scope["method"] == "GET" and self._use_token(token)):
            await _respond(send, 401, _CLOSED_PAGE, _HTML)
            return
        cookie = f"{self._cookie}={self._session}; Path=/; HttpOnly; SameSite=Strict".encode()
        await _respond(send, 200, _ENTRY_PAGE, _HTML, (b"set-cookie", cookie))

    def _use_token(self, token: str) -> bool:
        with self._lock:
            match = next((known for known in self._tokens if _is_equal(known, token)), None)
            self._tokens.discard(match or "")
        return match is not None

    def _has_session(self, scope: Scope) -> bool:
        # Cookies of other applications on this host arrive, too, because cookies do not depend on the port. Neither
        # parser of the standard stack takes them all: `http.cookies.SimpleCookie` drops everything after a malformed
        # one, and Starlette's keeps one of several cookies with the same name. A proxy may split them into several
        # headers, and may add the quotes that RFC 6265 allows around a value.
        cookies = b";".join(value for name, value in scope["headers"] if name == b"cookie").decode("latin-1").split(";")
        pairs = [cookie.partition("=") for cookie in cookies]
        values = [value.strip() for name, _, value in pairs if name.strip() == self._cookie]
        unquoted = [value[1:-1] if value[:1] == value[-1:] == '"' else value for value in values]
        return any(_is_equal(value, self._session) for value in unquoted)


def _is_equal(first: str, second: str) -> bool:
    """Compare secrets in constant time."""
    return hmac.compare_digest(first.encode("utf-8", "replace"), second.encode("utf-8", "replace"))


def _add_security_headers(send: Send) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            names = {name for name, _ in message["headers"]}
            cache = [] if b"cache-control" in names else [(b"cache-control", b"no-store")]
            message = {**message, "headers": [*message["headers"], *_SECURITY_HEADERS, *cache]}
        await send(message)

    return send_with_headers


async def _respond(send: Send, status: int, body: bytes, *headers: tuple[bytes, bytes]) -> None:
    length = (b"content-length", str(len(body)).encode())
    send = _add_security_headers(send)
    await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
    await send({"type": "http.response.body", "body": body})
