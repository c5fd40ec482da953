"""HTTP requests: downloads within limits, downloads that resume, and uploads in chunks.

This module is imported when it is needed, since the modules of urllib take as long to import as the rest of quire.
"""

from __future__ import annotations

import re
import time
from base64 import b64encode
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection, InvalidURL
from ssl import SSLContext
from typing import Any
from urllib import request
from urllib.error import HTTPError, URLError
from urllib.parse import quote, unquote, urlsplit

from quire.errors import OptionError, StorageError, UriError, UriNotFoundError, UriTimeoutError, did_you_mean
from quire.files._retry import GONE_STATUS, RemoteCall, RemoteOptions
from quire.files._uris import display_uri, too_large

HTTP_SCHEMES = ("http", "https")
_CHUNK = 1 << 18
_ALLOWED_CHARACTERS = "%/:;=&?~#+!$,'@()*[]"  # those that stay as they are in a URL
_KNOWN_OPTIONS = ("headers", "ssl")
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")


def quote_url(url: str) -> str:
    """Percent-encode characters that a URL must not have, like spaces and umlauts."""
    parts = urlsplit(url)
    path, query = quote(parts.path, _ALLOWED_CHARACTERS), quote(parts.query, _ALLOWED_CHARACTERS)
    return parts._replace(path=path, query=query, fragment="").geturl()


def validator_of(response: HTTPResponse) -> str:
    """Return the header that changes when the file changes; an empty text if there is none."""
    return response.headers.get("ETag") or response.headers.get("Last-Modified") or ""


def sent_range(url: str, response: HTTPResponse, start: int) -> int | None:
    """Check that a partial response (206) begins at byte `start`; return the size of the file, or None if unknown.

    Some servers and caches answer with another range than the requested one: its bytes must not be used.
    """
    header = response.headers.get("Content-Range") or ""
    match = _CONTENT_RANGE.fullmatch(header.strip())
    if match is None or int(match[1]) != start:
        error = UriError(
            f"{display_uri(url)}: the server was asked for the bytes from {start:,} on, and answered with another "
            f"range (Content-Range: {header!r}). Try again, or read the file from a server that supports ranges."
        )
        error.__cause__ = ConnectionAbortedError("the server sent another range")  # a reason to retry
        raise error
    return None if match[3] == "*" else int(match[3])


# --- downloads


def read_http(url: str, timeout: float | None, max_bytes: int, schemes: Container[str] = HTTP_SCHEMES) -> bytes:
    """Return the body of a GET; `timeout` seconds are for all of it. Redirects stay within the schemes."""
    deadline = None if timeout is None else time.monotonic() + timeout
    with translate_errors(url, timeout), open_url(url, timeout, schemes) as response:
        announced = response.length  # by Content-Length; None for a chunked body
        if response.status == 206:  # although no range was requested
            announced = sent_range(url, response, 0)
        if announced is not None and announced > max_bytes:
            raise too_large(url, f"the server announces {announced:,} bytes", max_bytes)
        content = bytearray()
        # In the chunks in which it arrives, so that a slow server cannot go on after the deadline.
        while chunk := response.read1(_CHUNK):
            content += chunk
            if len(content) > max_bytes:
                raise too_large(url, "more than that came", max_bytes)
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError
        if announced is not None and len(content) < announced:
            raise incomplete_download(url, len(content), announced)
        return bytes(content)


def open_url(url: str, timeout: float | None, schemes: Container[str], **headers: str) -> HTTPResponse:
    """Return the response to a GET."""
    # Not urllib's default opener, which follows redirects to ftp://.
    opener = request.OpenerDirector()
    for handler in (
        request.ProxyHandler(),
        request.HTTPHandler(),
        request.HTTPSHandler(),
        request.HTTPDefaultErrorHandler(),
        request.HTTPErrorProcessor(),
        request.UnknownHandler(),
        _Redirects(schemes),
    ):
        opener.add_handler(handler)
    query = request.Request(quote_url(url), headers={"User-Agent": "quire", **headers})  # noqa: S310 - the caller checked the scheme
    response: HTTPResponse = opener.open(query, timeout=timeout)
    return response


class _Redirects(request.HTTPRedirectHandler):
    """Follows redirects within the allowed schemes."""

    def __init__(self, schemes: Container[str]) -> None:
        self._schemes = schemes

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        if urlsplit(newurl).scheme.lower() not in self._schemes:
            raise UriError(
                f"{display_uri(req.full_url)}: the server points to {display_uri(newurl)}, which is not allowed here."
            )
        # urllib reads the whole body of a redirect, however long; that of a closed response is empty.
        fp.close()
        return super().redirect_request(req, fp, code, msg, headers, newurl)


class _OwnHeaders(request.HTTPRedirectHandler):
    """Follows redirects, and sends passwords and the headers of the user to no other server."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = tuple(names)

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        fp.close()
        redirected = super().redirect_request(req, fp, code, msg, headers, newurl)
        if redirected is not None and _origin(newurl) != _origin(req.full_url):
            for name in self._names:
                redirected.remove_header(name.capitalize())  # as urllib spells the names of headers
        return redirected


def _origin(url: str) -> tuple[str, str | None, int | None]:
    """Return what makes two addresses belong to the same server."""
    parts = urlsplit(url)
    scheme = parts.scheme.lower()
    return scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(scheme)


@contextmanager
def translate_errors(url: str, timeout: float | None) -> Iterator[None]:
    """Raise any failure of a download as a UriError that names the address."""
    where = display_uri(url)
    try:
        yield
    except TimeoutError as error:
        if isinstance(error, UriError):
            raise
        raise UriTimeoutError(
            f"{where}: no complete response{_within(timeout)}. Pass a larger timeout, or try again."
        ) from error
    except HTTPError as error:
        error.close()
        kind = UriNotFoundError if error.code in GONE_STATUS else UriError
        raise kind(f"{where}: the server answered {error.code} {error.reason}.") from error
    except URLError as error:
        if isinstance(error.reason, TimeoutError):
            raise UriTimeoutError(f"{where}: no connection{_within(timeout)}.") from error
        raise UriError(f"{where}: no connection ({error.reason}).") from error
    except (InvalidURL, ValueError) as error:
        raise UriError(f"{where}: not a valid address ({type(error).__name__}).") from error
    except UriError:
        raise
    except (HTTPException, OSError) as error:
        raise UriError(f"{where}: the download broke off ({error!r}). Try again.") from error


def _within(timeout: float | None) -> str:
    return "" if timeout is None else f" within {timeout:g} seconds"  # without a timeout, the system gave up


def incomplete_download(url: str, received: int, announced: int) -> UriError:
    """Return the error for a body that ends early."""
    error = UriError(
        f"{display_uri(url)}: the download broke off after {received:,} of {announced:,} bytes. Try again."
    )
    error.__cause__ = ConnectionAbortedError("the body ends early")  # a reason to retry
    return error


# --- uploads, and downloads that resume


class _UploadConnection(HTTPConnection):
    """A connection that reads the answer of a server that closes it during an upload, as "413 too large"."""

    broken: OSError | None = None

    def request(self, *args: Any, **kwargs: Any) -> None:
        try:
            super().request(*args, **kwargs)
        except ConnectionError as error:
            if self.sock is None:  # there is no connection
                raise
            self.broken = error

    def getresponse(self) -> HTTPResponse:
        if self.broken is None:
            return super().getresponse()
        try:
            response = super().getresponse()
        except (OSError, HTTPException):
            raise self.broken from None
        if response.status < 300:  # a success, although the server has not seen the end of the body
            response.close()
            raise self.broken
        return response


class _UploadConnectionTls(_UploadConnection, HTTPSConnection):
    """An upload connection with TLS."""


class _UploadHandler(request.HTTPHandler):
    def http_open(self, req: request.Request) -> HTTPResponse:
        return self.do_open(_UploadConnection, req)


class _UploadHandlerTls(request.HTTPSHandler):
    def __init__(self, context: SSLContext | None) -> None:
        super().__init__(context=context)
        self._ssl_context = context

    def https_open(self, req: request.Request) -> HTTPResponse:
        return self.do_open(_UploadConnectionTls, req, context=self._ssl_context)


class HttpFile:
    """The file at an http address. `storage_options` may have `headers`, and an `ssl` context, as for fsspec."""

    def __init__(self, url: str, options: RemoteOptions) -> None:
        unknown = sorted(options.storage_options.keys() - set(_KNOWN_OPTIONS))
        if unknown:
            suggestion = did_you_mean(unknown[0], _KNOWN_OPTIONS)
            raise OptionError(f"{display_uri(url)}: over http there is no storage option {unknown[0]!r}. {suggestion}")
        self.url, self._options = url, options
        self._address, self._headers = _extract_password(url)
        self._headers |= {"User-Agent": "quire", **dict(options.storage_options.get("headers") or {})}

    def upload(self, pieces: Iterable[Any]) -> None:
        """Send a body in chunks. Only the last chunk completes the file: a server drops a body that ends before."""
        headers = {"Content-Type": "application/octet-stream"}
        with self.open("PUT", self._options.timeout, headers, pieces) as response:
            response.read(_CHUNK)

    def download(self) -> Iterator[bytes]:
        """Yield the body; where a connection breaks off, the rest is requested again from there."""
        body = _ResumableBody(self)
        call = RemoteCall("reading the file", self.url)
        try:
            while chunk := call.run(body.next, self._options):
                yield chunk
        finally:
            body.close()

    def open(self, method: str, seconds: float, headers: dict[str, str], data: Any = None) -> HTTPResponse:
        """Return the response to a request."""
        opener = request.OpenerDirector()
        for handler in (
            _UploadHandler(),
            _UploadHandlerTls(self._options.storage_options.get("ssl")),
            request.HTTPErrorProcessor(),
            request.ProxyHandler(),
            request.HTTPDefaultErrorHandler(),
            _OwnHeaders(self._headers.keys() - {"User-Agent"}),
        ):
            opener.add_handler(handler)
        where = display_uri(self.url)
        try:
            query = request.Request(self._address, data, {**headers, **self._headers}, method=method)  # noqa: S310 - of http
            response: HTTPResponse = opener.open(query, timeout=seconds)
        except HTTPError as error:
            error.close()
            if 300 <= error.code < 400:
                location = error.headers.get("Location", "another address")
                raise StorageError(f"{where}: the server points to {display_uri(location)}. Use that.") from error
            raise
        except URLError as error:
            if isinstance(error.reason, OSError):
                raise error.reason from error
            raise
        except (InvalidURL, ValueError) as error:
            raise StorageError(f"{where}: not a valid address ({error}).") from error
        except HTTPException as error:
            raise OSError(f"the server's answer broke off ({error!r})") from error
        return response


class _ResumableBody:
    """The body of a file, which may take several requests."""

    def __init__(self, file: HttpFile) -> None:
        self._file = file
        self._response: HTTPResponse | None = None
        self._position, self._validator = 0, ""
        self._size: int | None = None

    def next(self, seconds: float) -> bytes:
        """Return the next chunk, which is empty at the end."""
        if self._response is None:
            self._response = self._open(seconds)
        try:
            return self._read(self._response)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the connection."""
        response, self._response = self._response, None
        if response is not None:
            response.close()

    def _read(self, response: HTTPResponse) -> bytes:
        try:
            chunk = response.read1(_CHUNK)
        except HTTPException as error:
            raise OSError(f"the connection broke off after {self._position:,} bytes ({error!r})") from error
        left = response.length or (self._size or 0) - self._position  # a server may send less than was requested
        if not chunk and left > 0:
            raise OSError(f"the connection broke off after {self._position:,} bytes, {left:,} before the end")
        self._position += len(chunk)
        return chunk

    def _open(self, seconds: float) -> HTTPResponse:
        headers = {"Accept": "application/octet-stream, */*;q=0.1"}
        if self._position:
            headers["Range"] = f"bytes={self._position}-"
        response = self._file.open("GET", seconds, headers)
        try:
            self._resume(response)
        except BaseException:
            response.close()
            raise
        return response

    def _resume(self, response: HTTPResponse) -> None:
        """Check that the file is still the same, and skip to the position where the last response ended."""
        start, size = 0, response.length
        if response.status == 206:
            start = self._position
            size = sent_range(self._file.url, response, start)
        validator = validator_of(response)
        if self._position and (validator != self._validator or (size or self._size) != (self._size or size)):
            raise StorageError(f"{display_uri(self._file.url)}: the file was changed while it was read. Read it again.")
        self._validator, self._size = validator, size or self._size
        while start < self._position:  # the server does not support ranges
            skipped = response.read(min(_CHUNK, self._position - start))
            if not skipped:
                raise OSError(f"the file ends after {start:,} bytes, and had more before")
            start += len(skipped)


def _extract_password(url: str) -> tuple[str, dict[str, str]]:
    """Return the URL of a request, and the name and password of the original URL as a header."""
    parts = urlsplit(url)
    credentials, at, host = parts.netloc.rpartition("@")
    if not at:
        return quote_url(url), {}
    encoded = b64encode(unquote(credentials).encode()).decode()
    return quote_url(parts._replace(netloc=host).geturl()), {"Authorization": f"Basic {encoded}"}
