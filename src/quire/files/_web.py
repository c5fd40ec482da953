"""Files behind http and https: sent in chunks, and read on from where a connection broke."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Iterator
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection, InvalidURL
from typing import Any
from urllib import request
from urllib.error import HTTPError, URLError
from urllib.parse import unquote, urlsplit

from quire.errors import OptionError, StorageError, did_you_mean
from quire.files._http import _quoted
from quire.files._limits import shown
from quire.files._retry import Errand, RemoteOptions

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
