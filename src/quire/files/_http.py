"""HTTP requests: downloads within limits, downloads that resume, and uploads in chunks.

Single files are read and written with urllib, and not with obstore or fsspec: it needs no extra, redirects can be
restricted, and limits are checked while a body arrives. See docs/decisions/0020-http-without-obstore.md.

This module is imported when it is needed, since the modules of urllib take as long to import as the rest of quire.
"""

from __future__ import annotations

import re
import time
from base64 import b64encode
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection, InvalidURL
from ssl import SSLContext
from typing import Any
from urllib import request
from urllib.error import HTTPError, URLError
from urllib.parse import quote, unquote, urlsplit

from quire.errors import OptionError, StorageError, UriError, UriNotFoundError, UriTimeoutError, did_you_mean
from quire.files._retry import GONE_STATUS, RemoteCall, RemoteOptions, is_temporary
from quire.files._uris import display_uri, uri_too_large

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
            raise uri_too_large(url, f"the server announces {announced:,} bytes", max_bytes)
        content = bytearray()
        # In the chunks in which it arrives, so that a slow server cannot go on after the deadline.
        while chunk := response.read1(_CHUNK):
            content += chunk
            if len(content) > max_bytes:
                raise uri_too_large(url, "more than that came", max_bytes)
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError
        if announced is not None and len(content) < announced:
            raise incomplete_download(url, len(content), announced)
        return bytes(content)


def open_url(url: str, timeout: float | None, schemes: Container[str], **headers: str) -> HTTPResponse:
    """Return the response to a GET."""
    query = request.Request(quote_url(url), headers={"User-Agent": "quire", **headers})  # noqa: S310 - the caller checked the scheme
    return _open(query, timeout, schemes)


def _open(
    query: request.Request,
    timeout: float | None,
    schemes: Container[str],
    own_headers: Iterable[str] = (),
    ssl: SSLContext | None = None,
) -> HTTPResponse:
    """Return the response to a request. Headers with the names `own_headers` are not sent to where it is redirected."""
    # Not urllib's default opener, which follows redirects to ftp://.
    opener = request.OpenerDirector()
    for handler in (
        request.ProxyHandler(),
        _UploadHandler(),
        _UploadHandlerTls(ssl),
        request.HTTPDefaultErrorHandler(),
        request.HTTPErrorProcessor(),
        request.UnknownHandler(),
        _Redirects(schemes, own_headers),
    ):
        opener.add_handler(handler)
    response: HTTPResponse = opener.open(query, timeout=timeout)
    return response


class _Redirects(request.HTTPRedirectHandler):
    """Follows redirects within the allowed schemes, and sends passwords and headers of the user to no other server."""

    def __init__(self, schemes: Container[str], own_headers: Iterable[str] = ()) -> None:
        self._schemes, self._own_headers = schemes, tuple(own_headers)

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        if urlsplit(newurl).scheme.lower() not in self._schemes:
            raise UriError(
                f"{display_uri(req.full_url)}: the server points to {display_uri(newurl)}, which is not allowed here."
            )
        # urllib reads the whole body of a redirect, however long; that of a closed response is empty.
        fp.close()
        redirected = super().redirect_request(req, fp, code, msg, headers, newurl)
        if redirected is not None and _origin(newurl) != _origin(req.full_url):
            for name in self._own_headers:
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


class ResumableDownload:
    """The content of a file on a server, from any position on, which may take several requests.

    One response is read until the next read is elsewhere, or until it breaks off. A server without support for ranges
    sends the file from its start, of which what comes before the position is dropped.
    """

    def __init__(self, url: str, open_at: Callable[[Mapping[str, str], float | None], HTTPResponse]) -> None:
        self._url, self._open_at = url, open_at
        self._response: HTTPResponse | None = None
        self._position = 0
        self._validator: str | None = None
        self.size: int | None = None
        self.has_ranges = False

    def open(self, position: int, seconds: float | None, *, is_range: bool = True) -> None:
        """Send a request for the content from a position on, and check that the file is still the same."""
        self.close()
        headers = {"Range": f"bytes={position}-"} if is_range else {}
        response = self._response = self._open_at(headers, seconds)
        start, size, self.has_ranges = 0, response.length, response.status == 206
        if self.has_ranges:
            start, size = position, sent_range(self._url, response, position)
        validator = validator_of(response)
        is_other = validator != self._validator or (size or self.size) != (self.size or size)
        if self._validator is not None and is_other:
            raise UriError(f"{display_uri(self._url)}: the file was changed while it was read. Read it again.")
        self._validator, self.size = validator, size if size is not None else self.size
        while start < position:  # the server does not support ranges
            skipped = response.read(min(_CHUNK, position - start))
            if not skipped:
                raise incomplete_download(self._url, start, position)
            start += len(skipped)
        self._position = position

    def read(self, position: int, count: int, seconds: float | None, *, is_range: bool = True) -> bytes:
        """Return up to `count` bytes, which are none at the end of the file; after an error, call it again."""
        try:
            if self._response is None or self._position != position:
                self.open(position, seconds, is_range=is_range)
            assert self._response is not None
            content = self._response.read1(count)
        except BaseException:
            self.close()
            raise
        left = self._response.length or (self.size or 0) - position  # a server may send less than was requested
        if not content and left > 0:
            self.close()
            raise incomplete_download(self._url, position, position + left)
        self._position += len(content)
        return content

    def close(self) -> None:
        """Close the connection."""
        response, self._response = self._response, None
        if response is not None:
            with suppress(OSError):
                response.close()


# --- files that are written and read in chunks


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
        # The name and password of the address are sent as a header.
        parts = urlsplit(url)
        credentials, at, host = parts.netloc.rpartition("@")
        self._address = quote_url(parts._replace(netloc=host).geturl())
        encoded = b64encode(unquote(credentials).encode()).decode()
        self._headers = {"Authorization": f"Basic {encoded}"} if at else {}
        self._headers |= dict(options.storage_options.get("headers") or {})

    def upload(self, pieces: Iterable[Any]) -> None:
        """Send a body in chunks. Only the last chunk completes the file: a server drops a body that ends before."""
        headers = {"Content-Type": "application/octet-stream"}
        with self.open("PUT", self._options.timeout, headers, pieces) as response:
            response.read(_CHUNK)

    def download(self) -> Iterator[bytes]:
        """Yield the body; where a connection breaks off, the rest is requested again from there."""
        accept = {"Accept": "application/octet-stream, */*;q=0.1"}
        body = ResumableDownload(self.url, lambda headers, seconds: self.open("GET", seconds, {**accept, **headers}))
        call, position = RemoteCall("reading the file", self.url), 0

        def read(seconds: float) -> bytes:
            try:
                # The first request is for the whole file: a range of an empty file would be an error.
                return body.read(position, _CHUNK, seconds, is_range=position > 0)
            except UriError as error:
                kind = OSError if is_temporary(error) else StorageError
                raise kind(str(error)) from error

        try:
            while chunk := call.run(read, self._options):
                position += len(chunk)
                yield chunk
        finally:
            body.close()

    def open(self, method: str, seconds: float | None, headers: Mapping[str, str], data: Any = None) -> HTTPResponse:
        """Return the response to a request; errors are those that `RemoteCall` distinguishes."""
        where = display_uri(self.url)
        try:
            all_headers = {"User-Agent": "quire", **headers, **self._headers}
            query = request.Request(self._address, data, all_headers, method=method)  # noqa: S310 - of http
            return _open(query, seconds, HTTP_SCHEMES, self._headers, self._options.storage_options.get("ssl"))
        except HTTPError as error:
            error.close()
            if 300 <= error.code < 400:
                location = error.headers.get("Location", "another address")
                raise StorageError(f"{where}: the server points to {display_uri(location)}. Use that.") from error
            raise
        except UriError as error:  # a redirect that is not allowed
            raise StorageError(str(error)) from error
        except URLError as error:
            if isinstance(error.reason, OSError):
                raise error.reason from error
            raise
        except (InvalidURL, ValueError) as error:
            raise StorageError(f"{where}: not a valid address ({error}).") from error
        except HTTPException as error:
            raise OSError(f"the server's answer broke off ({error!r})") from error
