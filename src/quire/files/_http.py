"""Downloads by http and https, and by nothing that they might redirect to."""

from __future__ import annotations

import time
from http.client import HTTPException, HTTPResponse, InvalidURL
from typing import NoReturn
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
    request.HTTPRedirectHandler,
    request.HTTPErrorProcessor,
    request.UnknownHandler,
)
_PART = 1 << 18
_GONE = (404, 410)
_KEPT = "%/:;=&?~#+!$,'@()*[]"  # what an address may hold as it is


def read_http(uri: str, timeout: float | None, max_bytes: int) -> bytes:
    """The body of the answer to a GET; `timeout` seconds for all of it."""
    deadline = None if timeout is None else time.monotonic() + timeout
    try:
        query = request.Request(_quoted(uri), headers={"User-Agent": "quire"})  # noqa: S310 - the caller looked at the scheme
        with _opener().open(query, timeout=timeout) as answer:
            return _body(answer, uri, deadline, max_bytes)
    except TimeoutError as error:
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


def _quoted(uri: str) -> str:
    """The address with percent signs for what has no place in one, like spaces and umlauts."""
    parts = urlsplit(uri)
    return parts._replace(path=quote(parts.path, _KEPT), query=quote(parts.query, _KEPT), fragment="").geturl()


def _opener() -> request.OpenerDirector:
    opener = request.OpenerDirector()
    for handler in _HANDLERS:
        opener.add_handler(handler())
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
        raise UriError(f"{shown(uri)}: the download broke off after {len(content):,} of {told:,} bytes. Try again.")
    return bytes(content)
