"""Downloads by http and https, and by nothing that they might redirect to."""

from __future__ import annotations

import time
from collections.abc import Container, Iterator
from contextlib import contextmanager
from http.client import HTTPException, HTTPResponse, InvalidURL
from typing import Any, NoReturn
from urllib import request
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlsplit

from quire.errors import UriError, UriNotFoundError, UriTimeoutError
from quire.files._limits import shown, too_large

_HANDLERS = (
    request.ProxyHandler,
    request.HTTPHandler,
    request.HTTPSHandler,
    request.HTTPDefaultErrorHandler,
    request.HTTPErrorProcessor,
    request.UnknownHandler,
)
_PART = 1 << 18
_GONE = (404, 410)
_KEPT = "%/:;=&?~#+!$,'@()*[]"  # what an address may hold as it is


WEB = ("http", "https")


def read_http(uri: str, timeout: float | None, max_bytes: int, schemes: Container[str] = WEB) -> bytes:
    """The body of the answer to a GET; `timeout` seconds for all of it. No redirect leaves the schemes."""
    deadline = None if timeout is None else time.monotonic() + timeout
    with told_of(uri, timeout), asked(uri, timeout, schemes) as answer:
        return _body(answer, uri, deadline, max_bytes)


def asked(uri: str, timeout: float | None, schemes: Container[str], **headers: str) -> HTTPResponse:
    """The answer to a GET."""
    query = request.Request(_quoted(uri), headers={"User-Agent": "quire", **headers})  # noqa: S310 - the caller looked at the scheme
    answer: HTTPResponse = _opener(schemes).open(query, timeout=timeout)
    return answer


@contextmanager
def told_of(uri: str, timeout: float | None) -> Iterator[None]:
    """Whatever goes wrong, with the address that it is about."""
    try:
        yield
    except TimeoutError as error:
        if isinstance(error, UriError):
            raise
        raise UriTimeoutError(
            f"{shown(uri)}: no complete answer within {timeout:g} seconds. Pass a larger timeout, or try again."
        ) from error
    except HTTPError as error:
        error.close()
        _refused(uri, error)
    except URLError as error:
        if isinstance(error.reason, TimeoutError):
            raise UriTimeoutError(f"{shown(uri)}: no connection within {timeout:g} seconds.") from error
        raise UriError(f"{shown(uri)}: no connection ({error.reason}).") from error
    except (InvalidURL, ValueError) as error:
        raise UriError(f"{shown(uri)}: not a valid address ({type(error).__name__}).") from error
    except UriError:
        raise
    except (HTTPException, OSError) as error:
        raise UriError(f"{shown(uri)}: the download broke off ({error!r}). Try again.") from error


class _Redirects(request.HTTPRedirectHandler):
    """Follows to where the schemes allow."""

    def __init__(self, schemes: Container[str]) -> None:
        self._schemes = schemes

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        if urlsplit(newurl).scheme.lower() not in self._schemes:
            raise UriError(f"{shown(req.full_url)}: the server points to {shown(newurl)}, which is not allowed here.")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _quoted(uri: str) -> str:
    """The address with percent signs for what has no place in one, like spaces and umlauts."""
    parts = urlsplit(uri)
    return parts._replace(path=quote(parts.path, _KEPT), query=quote(parts.query, _KEPT), fragment="").geturl()


def _opener(schemes: Container[str]) -> request.OpenerDirector:
    opener = request.OpenerDirector()
    for handler in (*(kind() for kind in _HANDLERS), _Redirects(schemes)):
        opener.add_handler(handler)
    return opener


def _refused(uri: str, error: HTTPError) -> NoReturn:
    kind = UriNotFoundError if error.code in _GONE else UriError
    raise kind(f"{shown(uri)}: the server answered {error.code} {error.reason}.") from error


def _body(answer: HTTPResponse, uri: str, deadline: float | None, max_bytes: int) -> bytes:
    """All that comes, in the parts in which it comes, so that a slow server cannot hold us beyond the deadline."""
    told = answer.length  # by Content-Length; None for a body in chunks
    if told is not None and told > max_bytes:
        raise too_large(uri, f"the server announces {told:,} bytes", max_bytes)
    content = bytearray()
    while part := answer.read1(_PART):
        content += part
        if len(content) > max_bytes:
            raise too_large(uri, "more than that came", max_bytes)
        if deadline is not None and time.monotonic() > deadline:
            raise TimeoutError
    if told is not None and len(content) < told:
        raise broken_off(uri, len(content), told)
    return bytes(content)


def broken_off(uri: str, found: int, told: int) -> UriError:
    """The error of a body that ends before it should."""
    error = UriError(f"{shown(uri)}: the download broke off after {found:,} of {told:,} bytes. Try again.")
    error.__cause__ = ConnectionAbortedError("the body ends early")  # a reason that may pass
    return error
