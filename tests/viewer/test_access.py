"""Access control: tokens, cookies, host names and security headers."""

from __future__ import annotations

import http.client
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from quire.viewer import Viewer
from tests.viewer.viewer_client import Client

pytestmark = pytest.mark.needs("fastapi", "uvicorn", "PIL", "pyarrow", "av")

SAFE = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    "cross-origin-resource-policy": "same-origin",
}


def test_requests_without_token_are_unauthorized(client: Client) -> None:
    stranger = Client(client.viewer)
    for path in ("/", "/api/dataset", "/api/rows", "/api/image?row=0&path=picture", "/?token=", "/?token=guess"):
        answer = stranger.get(path)
        assert answer.status == 401, path
        assert b"place" not in answer.body.lower()


def test_token_works_once(client: Client) -> None:
    url = client.viewer.url
    first, second = Client(client.viewer), Client(client.viewer)
    assert first.enter(url).status == 200
    assert first.get("/api/dataset").status == 200
    assert second.enter(url).status == 401
    assert second.get("/api/dataset").status == 401


def test_browser_with_session_can_reload_the_address(client: Client) -> None:
    browser, url = Client(client.viewer), client.viewer.url
    browser.enter(url)
    assert browser.get(f"/?{urlsplit(url).query}").status == 200


def test_head_request_does_not_use_the_token(client: Client) -> None:
    browser, url = Client(client.viewer), client.viewer.url
    assert browser.get(f"/?{urlsplit(url).query}", method="HEAD").status == 401
    assert browser.enter(url).status == 200


def test_cookie_is_http_only_and_same_site(client: Client) -> None:
    cookie = Client(client.viewer).enter().headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert f"quire-view-{client.viewer.port}=" in cookie


@pytest.mark.parametrize("cookie", ["", "quire-view=x", "{name}=wrong", "{name}=", "{name}=\xff", "a=b; {name}"])
def test_invalid_cookies_are_unauthorized(client: Client, cookie: str) -> None:
    stranger = Client(client.viewer, cookie.format(name=f"quire-view-{client.viewer.port}"))
    assert stranger.get("/api/dataset").status == 401


@pytest.mark.parametrize("other", ["a b=c", 'x="unclosed', "{json: 1}", "=", "a=\xe9", "name with space"])
def test_malformed_cookies_of_other_applications_keep_the_session(client: Client, other: str) -> None:
    for cookie in (f"{other}; {client.cookie}", f"{client.cookie}; {other}", f"{other};{client.cookie};{other}"):
        assert Client(client.viewer, cookie).get("/api/dataset").status == 200


def send_headers(viewer: Viewer, headers: list[tuple[str, str]]) -> int:
    """Send a request with exactly these headers, of which several may have the same name, and return the status."""
    with closing(http.client.HTTPConnection("127.0.0.1", viewer.port, timeout=60)) as connection:
        connection.putrequest("GET", "/api/dataset", skip_host=True, skip_accept_encoding=True)
        for name, value in headers:
            connection.putheader(name, value)
        connection.endheaders()
        return connection.getresponse().status


def test_session_is_found_among_duplicate_quoted_and_split_cookies(client: Client) -> None:
    name, _, session = client.cookie.partition("=")
    host = ("Host", f"127.0.0.1:{client.viewer.port}")
    stale = f"{name}=stale"
    for cookies in (
        [client.cookie, stale],
        [stale, client.cookie],
        [f'{name}="{session}"'],
        [f" {name} = {session} "],
        ["a=b", client.cookie, "c=d"],
    ):
        assert send_headers(client.viewer, [host, ("Cookie", "; ".join(cookies))]) == 200
        assert send_headers(client.viewer, [host, *(("Cookie", cookie) for cookie in cookies)]) == 200
    for cookie in (f'{name}="{session}', f"{name}={session}{session}", f"x{client.cookie}", f'{name}=""', session):
        assert send_headers(client.viewer, [host, ("Cookie", cookie)]) == 401


def test_every_host_header_must_be_accepted(client: Client) -> None:
    own, other = ("Host", f"127.0.0.1:{client.viewer.port}"), ("Host", "evil.example")
    cookie = ("Cookie", client.cookie)
    assert send_headers(client.viewer, [own, cookie]) == 200
    for headers in ([other, own], [own, other], [other], []):
        assert send_headers(client.viewer, [*headers, cookie]) in (400, 421)  # some HTTP parsers refuse it themselves


@pytest.mark.parametrize("host", ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "[::1]:80", ""])
def test_foreign_host_names_are_rejected(client: Client, host: str) -> None:
    answer = client.get("/api/dataset", headers={"Host": host.format(port=client.viewer.port)})
    assert answer.status == 421
    assert answer.headers["content-security-policy"].startswith("default-src 'self'")


@pytest.mark.parametrize("host", ["localhost:{port}", "LOCALHOST:{port}", "[::1]:{port}"])
def test_loopback_host_names_are_accepted(client: Client, host: str) -> None:
    assert client.get("/api/dataset", headers={"Host": host.format(port=client.viewer.port)}).status == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_methods_other_than_get_are_rejected(client: Client, method: str) -> None:
    assert client.get("/api/rows", method=method).status == 405


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/api/dataset",
        "/api/rows",
        "/assets/main.js",
        "/nothing",
        "/api/rows?where=%22",
        "/api/video?row=1&path=film",
    ],
)
def test_every_response_has_security_headers(client: Client, path: str) -> None:
    headers = client.get(path).headers
    assert headers["content-security-policy"].startswith("default-src 'self'")
    assert SAFE.items() <= headers.items()
    assert "access-control-allow-origin" not in headers
    assert "server" not in headers


@pytest.mark.parametrize(
    "path", ["..%2f..%2fpyproject.toml", "%2e%2e/_api.py", "../_api.py", "..", "main.js%00", "x.js"]
)
def test_assets_serve_no_other_files(client: Client, path: str) -> None:
    answer = client.get(f"/assets/{path}")
    assert answer.status == 404
    assert b"import" not in answer.body


def test_viewer_listens_on_loopback_only(stored: Path) -> None:
    with Viewer(stored) as viewer:
        assert viewer._socket.getsockname()[0] == "127.0.0.1"
        assert viewer.url.startswith(f"http://127.0.0.1:{viewer.port}/?token=")
        assert viewer.url != viewer.url
