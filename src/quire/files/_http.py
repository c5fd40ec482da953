"""HTTP requests: downloads within limits, resumed downloads, and uploads in chunks."""

from __future__ import annotations

import time
from base64 import b64encode
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection, InvalidURL
from typing import Any, NoReturn
from urllib import request
from urllib.error import HTTPError, URLError
from urllib.parse import quote, unquote, urlsplit

from quire.errors import OptionError, StorageError, UriError, UriNotFoundError, UriTimeoutError, did_you_mean
from quire.files._retry import Errand, RemoteOptions
from quire.files._uris import shown, too_large

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


_PIECE = 1 << 18
_KNOWN = ("headers", "ssl")


class _Patient(HTTPConnection):
    """A connection that hears what a server says that closes it while it is sent to: that it is too much, say."""

    broken: OSError | None = None

    def request(self, *args: Any, **kwargs: Any) -> None:
        try:
            super().request(*args, **kwargs)
        except ConnectionError as error:
            if self.sock is None:  # nobody is there
                raise
            self.broken = error

    def getresponse(self) -> HTTPResponse:
        if self.broken is None:
            return super().getresponse()
        try:
            answer = super().getresponse()
        except (OSError, HTTPException):
            raise self.broken from None
        if answer.status < 300:  # to a body of which it has not seen the end
            answer.close()
            raise self.broken
        return answer


class _PatientTls(_Patient, HTTPSConnection):
    """The same, encrypted."""


class _Plain(request.HTTPHandler):
    def http_open(self, req: request.Request) -> HTTPResponse:
        return self.do_open(_Patient, req)


class _Tls(request.HTTPSHandler):
    def __init__(self, context: Any) -> None:
        super().__init__(context=context)
        self._given = context

    def https_open(self, req: request.Request) -> HTTPResponse:
        return self.do_open(_PatientTls, req, context=self._given)


class Web:
    """Requests to one address. `storage_options` may have `headers`, and an `ssl` context, as for fsspec."""

    def __init__(self, url: str, options: RemoteOptions) -> None:
        unknown = sorted(options.storage_options.keys() - set(_KNOWN))
        if unknown:
            known = did_you_mean(unknown[0], _KNOWN)
            raise OptionError(f"{shown(url)}: over http there is no storage option {unknown[0]!r}. {known}")
        self._url, self._options = url, options
        self._address, self._headers = _without_password(url)
        self._headers |= {"User-Agent": "quire", **dict(options.storage_options.get("headers") or {})}

    def put(self, pieces: Iterable[Any]) -> None:
        """Send a body in chunks. Only the last chunk makes it a file: a server drops what ends before."""
        headers = {"Content-Type": "application/octet-stream"}
        with self._ask("PUT", self._options.timeout, headers, pieces) as answer:
            answer.read(_PIECE)

    def get(self) -> Iterator[bytes]:
        """The body of the file, piece by piece; what breaks off is asked for again from there."""
        body = _Body(self, self._url)
        errand = Errand("reading the file", self._url)
        try:
            while piece := errand.run(body.next, self._options):
                yield piece
        finally:
            body.close()

    def _ask(self, method: str, seconds: float, headers: dict[str, str], data: Any = None) -> HTTPResponse:
        try:
            query = request.Request(self._address, data, {**headers, **self._headers}, method=method)  # noqa: S310 - of http
            answer: HTTPResponse = self._opener().open(query, timeout=seconds)
        except HTTPError as error:
            error.close()
            if 300 <= error.code < 400:
                there = error.headers.get("Location", "another address")
                raise StorageError(f"{shown(self._url)}: the server points to {shown(there)}. Use that.") from error
            raise
        except URLError as error:
            raise error.reason if isinstance(error.reason, OSError) else error from error
        except (InvalidURL, ValueError) as error:
            raise StorageError(f"{shown(self._url)}: not a valid address ({error}).") from error
        except HTTPException as error:
            raise OSError(f"the server's answer broke off ({error!r})") from error
        return answer

    def _opener(self) -> request.OpenerDirector:
        opener = request.OpenerDirector()
        tls = _Tls(self._options.storage_options.get("ssl"))
        others = (request.ProxyHandler, request.HTTPDefaultErrorHandler, request.HTTPRedirectHandler)
        for part in (_Plain(), tls, request.HTTPErrorProcessor(), *(kind() for kind in others)):
            opener.add_handler(part)
        return opener


class _Body:
    """The body of an answer, which may take several requests."""

    def __init__(self, web: Web, url: str) -> None:
        self._web, self._url = web, url
        self._answer: HTTPResponse | None = None
        self._position, self._mark = 0, ""

    def next(self, seconds: float) -> bytes:
        """The next piece; nothing at the end."""
        if self._answer is None:
            self._answer = self._open(seconds)
        try:
            return self._read(self._answer)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ask no more."""
        answer, self._answer = self._answer, None
        if answer is not None:
            answer.close()

    def _read(self, answer: HTTPResponse) -> bytes:
        try:
            piece = answer.read1(_PIECE)
        except HTTPException as error:
            raise OSError(f"the connection broke off after {self._position:,} bytes ({error!r})") from error
        if not piece and answer.length:
            raise OSError(f"the connection broke off after {self._position:,} bytes, {answer.length:,} before the end")
        self._position += len(piece)
        return piece

    def _open(self, seconds: float) -> HTTPResponse:
        headers = {"Accept": "application/octet-stream, */*;q=0.1"}
        if self._position:
            headers["Range"] = f"bytes={self._position}-"
        answer = self._web._ask("GET", seconds, headers)
        try:
            self._go_on(answer)
        except BaseException:
            answer.close()
            raise
        return answer

    def _go_on(self, answer: HTTPResponse) -> None:
        """See that it is the same file as before, and go to where the last answer ended."""
        mark = answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""
        if self._position and mark != self._mark:
            raise StorageError(f"{shown(self._url)}: the file was changed while it was read. Read it again.")
        self._mark = mark
        start = 0
        if answer.status == 206:
            start = int((answer.headers.get("Content-Range") or "bytes 0-").split()[-1].partition("-")[0])
        while start < self._position:  # a server that knows no ranges
            skipped = answer.read(min(_PIECE, self._position - start))
            if not skipped:
                raise OSError(f"the file ends after {start:,} bytes, of which there were more before")
            start += len(skipped)


def _without_password(url: str) -> tuple[str, dict[str, str]]:
    """The address as a request has it, and the name and password that stand in it as a header."""
    parts = urlsplit(url)
    name, at, host = parts.netloc.rpartition("@")
    if not at:
        return _quoted(url), {}
    secret = b64encode(unquote(name).encode()).decode()
    return _quoted(parts._replace(netloc=host).geturl()), {"Authorization": f"Basic {secret}"}
