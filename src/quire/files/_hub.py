"""Datasets on the Hugging Face Hub, as folders whose files are read by ranges.

`HfFileSystem` of huggingface_hub could serve as any other filesystem of fsspec, but wastes requests: it asks for the
repository and for the listing of a folder before it opens a file, reads 5 MiB ahead, and keeps listings for the whole
process. Its documentation recommends `HfApi` instead, which is used here together with the documented functions for
requests. Two things are added. A folder can be pinned to a commit, so that its content never changes and workers need
no listing of their own. And the address that the Hub redirects to, a content delivery network, is used again for later
ranges of a file: the Hub limits the number of requests, and a redirect costs a round trip.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn, TypeVar
from urllib.parse import quote, unquote

from quire._optional import require
from quire.errors import OptionError, StorageError, StorageNotFoundError
from quire.files._folder import Entries, Entry, Folder, check_name, check_range, file_too_short, is_visible
from quire.files._open import open_target
from quire.files._retry import TEMPORARY_STATUS, RemoteCall, RemoteOptions, run_with_timeout
from quire.files._uris import display_uri

T = TypeVar("T")

PREFIX = "hf://datasets/"
CONVERTED = "refs/convert/parquet"
"""The branch in which the Hub keeps Parquet files of datasets in other formats."""
_ADDRESS = re.compile(
    r"hf://datasets/(?P<repo>[^/@]+/[^/@]+)(?:@(?P<revision>refs/(?:convert|pr)/[^/]+|[^/]+))?(?:/(?P<path>.*))?"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_PART = 16 << 20
"""The bytes that one request reads at most."""
_LOCATION_SECONDS = 300.0
"""How long the target of a redirect is used again. The Hub signs addresses for an hour."""
_NO_ACCESS = (401, 403)
_EXPIRED = (400, 401, 403, 404, 410)
"""Statuses of an address that was signed a while ago; the Hub is then asked for a new one."""


class HubFile(NamedTuple):
    """A file of a repository: its size, and a digest of its content."""

    size: int
    digest: str


class _Content(NamedTuple):
    """The bytes of a response, and the size of the whole file if the response has it."""

    data: bytes
    total: int | None


class _Refusal(NamedTuple):
    """The error for an answer of the Hub that is final, and what it is made from."""

    error: StorageError
    cause: Exception


class HubFolder(Folder):
    """A dataset repository on the Hub, or a folder of it: 'hf://datasets/owner/name[@revision][/path]'.

    `storage_options` may have a token and an endpoint. By default, the token is that of `hf auth login` or HF_TOKEN,
    and the endpoint that of HF_ENDPOINT.
    """

    def __init__(self, url: str, options: RemoteOptions | None = None) -> None:
        match = _ADDRESS.fullmatch(url.rstrip("/"))
        if match is None:
            raise OptionError(
                f"{display_uri(url)}: the address of a dataset on the Hub is hf://datasets/owner/name, with "
                "@revision and a path after it if needed."
            )
        self.url, self.options = url.rstrip("/"), options or RemoteOptions()
        self.repo_id = match["repo"]
        self.revision: str | None = None if match["revision"] is None else unquote(match["revision"])
        self.path = match["path"] or ""
        self._files: dict[str, HubFile] | None = None
        self._commits: dict[str, str] | None = None
        self._locations: dict[str, tuple[str, float]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return HubFolder, (self.url, self.options)

    @property
    def token(self) -> str | bool | None:
        """The token of the storage options; None for that of the environment."""
        token: str | bool | None = self.options.storage_options.get("token")
        return token

    def api(self) -> Any:
        """Return the client of huggingface_hub."""
        unknown = set(self.options.storage_options) - {"token", "endpoint"}
        if unknown:
            raise OptionError(
                f"{display_uri(self.url)}: storage_options of the Hub are token and endpoint, got "
                f"{', '.join(sorted(map(repr, unknown)))}."
            )
        endpoint = self.options.storage_options.get("endpoint")
        return self._hub().HfApi(endpoint=endpoint, token=self.token, library_name="quire")

    def _hub(self) -> Any:
        return require("huggingface_hub", extra="huggingface", needed_for=display_uri(self.url))

    # --- revisions

    @property
    def is_pinned(self) -> bool:
        """Whether the revision is a commit, so that the content never changes."""
        return self.revision is not None and _COMMIT.fullmatch(self.revision) is not None

    def at(self, revision: str) -> HubFolder:
        """Return the same folder at another revision."""
        path = f"/{self.path}" if self.path else ""
        return HubFolder(f"{PREFIX}{self.repo_id}@{quote(revision, safe='')}{path}", self.options)

    def pin(self) -> HubFolder:
        """Return the folder at the commit that its revision names now: a branch, a tag, or the beginning of a commit.

        A request, unless the revision is a commit.
        """
        if self.is_pinned:
            return self
        revision = self.revision or "main"
        commit = self._list_commits().get(revision)
        if commit is None:
            api = self.api()
            info = self._call(
                "looking for the revision", lambda: api.repo_info(self.repo_id, revision=revision, repo_type="dataset")
            )
            commit = str(info.sha)
        pinned = self.at(commit)
        pinned._commits = self._commits
        return pinned

    def converted(self) -> HubFolder | None:
        """Return the Parquet files that the Hub has made of a pinned folder; None if there are none of this commit."""
        # They are made from the main branch: those of another revision would be other data.
        commits = self._list_commits()
        if CONVERTED not in commits or commits.get("main") != self.revision or self.path:
            return None
        return self.at(commits[CONVERTED])

    def _list_commits(self) -> dict[str, str]:
        """Return the commits of branches, tags and other references, by name."""
        if self._commits is None:
            api, with_requests = self.api(), (self.revision or "").startswith("refs/pr/")
            refs = self._call(
                "looking for the revision",
                lambda: api.list_repo_refs(
                    self.repo_id, repo_type="dataset", include_pull_requests=with_requests or None
                ),
            )
            groups = [refs.tags, refs.branches, refs.converts, refs.pull_requests or []]
            self._commits = {}
            for ref in [ref for group in groups for ref in group]:
                self._commits[ref.ref] = str(ref.target_commit)
                if not ref.ref.startswith(("refs/convert/", "refs/pr/")):
                    self._commits[ref.name] = str(ref.target_commit)
        return self._commits

    # --- files

    def files(self) -> dict[str, HubFile]:
        """Return all files of the folder by name, in order; the listing of a pinned folder is kept.

        A request, and one more for every 1000 files.
        """
        if self._files is not None:
            return self._files
        api = self.api()

        def list_tree() -> list[Any]:
            tree = api.list_repo_tree(
                self.repo_id, self.path or None, recursive=True, revision=self.revision, repo_type="dataset"
            )
            # A folder has a tree_id instead. The listing of a file is the file itself.
            return [item for item in tree if hasattr(item, "blob_id") and item.path != self.path]

        try:
            items = self._call("listing the files", list_tree)
        except StorageNotFoundError as error:
            if isinstance(error.__cause__, self._hub().errors.EntryNotFoundError):
                return {}  # the folder does not exist in the repository
            raise
        start = len(self.path) + 1 if self.path else 0
        files = {item.path[start:]: _describe(item) for item in sorted(items, key=lambda item: str(item.path))}
        if self.is_pinned:
            self._files = files
        return files

    def list(self, suffixes: Sequence[str] = (), *, hidden: bool = False) -> Entries:
        """Return the files here and in subfolders, sorted by name."""
        ends = tuple(suffixes)
        return [
            Entry(name, file.size)
            for name, file in self.files().items()
            if (not ends or name.endswith(ends)) and (hidden or all(map(is_visible, name.split("/"))))
        ]

    def exists(self, name: str) -> bool:
        """Return whether there is a file of that name."""
        return self._find(name) is not None

    def size(self, name: str) -> int:
        """Return the size of a file in bytes."""
        file = self._find(name)
        if file is None:
            raise StorageNotFoundError(f"{display_uri(self.join(name))}: there is no such file.")
        return file.size

    def _find(self, name: str) -> HubFile | None:
        """Return a file: from the listing if there is one, otherwise by a request for this file."""
        check_name(name, self.url)
        if self._files is not None:
            return self._files.get(name)
        api, path = self.api(), f"{self.path}/{name}" if self.path else name
        infos = self._call(
            "looking for the file",
            lambda: api.get_paths_info(self.repo_id, [path], revision=self.revision, repo_type="dataset"),
            self.join(name),
        )
        return next((_describe(info) for info in infos if hasattr(info, "blob_id")), None)

    def read(self, name: str) -> bytes:
        """Return the content of a small file."""
        return self._read(name, None, "reading the file").data

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        """Return the bytes from start to stop."""
        check_range(start, stop)
        parts = [self._read_part(name, begin, min(begin + _PART, stop)) for begin in range(start, stop, _PART)]
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def read_ranges(self, requests: Sequence[tuple[str, int, int]], *, concurrency: int = 32) -> Sequence[bytes]:
        """Return the bytes of many small ranges, in the order of the requests."""
        with futures.ThreadPoolExecutor(max(1, min(concurrency, len(requests)))) as pool:
            return list(pool.map(lambda request: self.read_range(*request), requests))

    def _read_part(self, name: str, start: int, stop: int) -> bytes:
        content = self._read(name, (start, stop), f"reading bytes {start:,} to {stop:,}")
        if len(content.data) != stop - start:
            raise file_too_short(self.join(name), content.total or len(content.data), start, stop)
        return content.data

    def fetch(self, name: str, target: Path) -> None:
        """Download a file to a local path, part by part."""
        with open_target(target) as file:
            for part in self._parts(name):
                file.write(part)

    def _parts(self, name: str) -> Iterator[bytes]:
        # The first response has the size of the file, so that no other request is needed for it.
        first = self._read(name, (0, _PART), "reading the file")
        yield first.data
        for start in range(len(first.data), first.total or 0, _PART):
            yield self._read_part(name, start, min(start + _PART, first.total or 0))

    def _read(self, name: str, span: tuple[int, int] | None, what: str) -> _Content:
        check_name(name, self.url)
        size = 0 if span is None else span[1] - span[0]
        return self._call(what, lambda: self._request(name, span), self.join(name), size)

    def _request(self, name: str, span: tuple[int, int] | None) -> _Content:
        """Request a file, or a range of it, which may end after the file."""
        hub, now = self._hub(), time.monotonic()
        location, until = self._locations.get(name, ("", 0.0))
        if until > now:
            try:
                return self._get(location, span, token=False)  # it is signed, and not for the eyes of others
            except hub.errors.HfHubHTTPError as error:
                if _status(error) not in _EXPIRED:
                    raise
                self._locations.pop(name, None)
        path = f"{self.path}/{name}" if self.path else name
        url = hub.hf_hub_url(
            self.repo_id, path, repo_type="dataset", revision=self.revision, endpoint=self.api().endpoint
        )
        return self._get(url, span, token=self.token, name=name)

    def _get(self, url: str, span: tuple[int, int] | None, *, token: Any, name: str | None = None) -> _Content:
        hub = self._hub()
        headers = {**hub.utils.build_hf_headers(token=token, library_name="quire"), "Accept-Encoding": "identity"}
        if span is not None:
            headers["Range"] = f"bytes={span[0]}-{span[1] - 1}"
        # Without its retries: `_call` has those of RemoteOptions.
        response = hub.utils.http_backoff("GET", url, headers=headers, timeout=self.options.timeout, max_retries=0)
        hub.utils.hf_raise_for_status(response)
        if name is not None and response.history:
            self._locations[name] = str(response.url), time.monotonic() + _LOCATION_SECONDS
        data, length = response.content, response.headers.get("Content-Length")
        if length is not None and len(data) != int(length):
            raise OSError(f"{len(data):,} bytes came instead of {int(length):,}")
        if span is None or response.status_code != 206:  # the server does not support ranges, and sent the whole file
            return _Content(data if span is None else data[span[0] : span[1]], len(data))
        total = response.headers.get("Content-Range", "").rpartition("/")[2]
        return _Content(data, int(total) if total.isdigit() else None)

    # --- requests

    def _call(self, what: str, request: Callable[[], T], url: str | None = None, size: int = 0) -> T:
        """Return the result of a request, which is tried again while the failure may be temporary."""
        address = url or self.url

        def attempt(seconds: float) -> T | _Refusal:
            try:
                return run_with_timeout(request, seconds)
            except Exception as error:
                refusal = self._explain(error, what, address)
                if refusal is None:
                    raise
                return _Refusal(refusal, error)

        advice = "Log in for a higher limit, or pass RemoteOptions(deadline=...) with more seconds."
        result = RemoteCall(what, address, size, advice).run(attempt, self.options)
        if isinstance(result, _Refusal):
            raise result.error from result.cause
        return result

    def _explain(self, error: Exception, what: str, url: str) -> StorageError | None:
        """Return the error for an answer that another attempt would not change, with what to do; otherwise None."""
        errors, where, status = self._hub().errors, display_uri(url), _status(error)
        if isinstance(error, errors.GatedRepoError):
            return StorageError(
                f"{where}: the dataset is gated: ask for access on its page on the Hub, and log in with `hf auth "
                "login`, or set HF_TOKEN."
            )
        if isinstance(error, errors.RevisionNotFoundError):
            return StorageNotFoundError(
                f"{where}: the dataset {self.repo_id} has no revision {self.revision!r}. A revision is a branch, a "
                "tag, or a commit."
            )
        if isinstance(error, errors.RepositoryNotFoundError) or status in _NO_ACCESS:
            return StorageNotFoundError(
                f"{where}: there is no dataset {self.repo_id} on the Hub, or it is private and the token may not read "
                "it. Log in with `hf auth login`, set HF_TOKEN, or pass "
                "RemoteOptions(storage_options={'token': ...})."
            )
        if isinstance(error, errors.EntryNotFoundError) or status == 404:
            return StorageNotFoundError(f"{where}: there is no such file.")
        if isinstance(error, errors.OfflineModeIsEnabled):
            return StorageError(f"{where}: HF_HUB_OFFLINE is set, so nothing is read from the Hub.")
        if 400 <= status < 500 and status not in TEMPORARY_STATUS:
            return StorageError(f"{where}: {what} is not possible ({error}).")
        return None

    # --- writing

    def open_for_write(self, name: str, *, durable: bool = True) -> AbstractContextManager[IO[bytes]]:  # noqa: ARG002
        """Raise an error: files are written in commits."""
        self._refuse_writing(name)

    def create(self, name: str, content: bytes) -> None:  # noqa: ARG002 - nothing is written
        """Raise an error: files are written in commits."""
        self._refuse_writing(name)

    def append_line(self, name: str, line: str) -> None:  # noqa: ARG002 - no line is written
        """Raise an error: files are written in commits."""
        self._refuse_writing(name)

    def delete(self, name: str) -> None:
        """Raise an error: files are removed in commits."""
        self._refuse_writing(name)

    def _refuse_writing(self, name: str) -> NoReturn:
        raise StorageError(
            f"{display_uri(self.join(name))}: datasets on the Hub are written by push_to_hub('{self.repo_id}'), in one "
            "commit."
        )


def _describe(item: Any) -> HubFile:
    """Return the size and the digest of a file in a listing; large files have the digest of their content."""
    return HubFile(item.size, item.lfs.sha256 if item.lfs else item.blob_id)


def _status(error: Exception) -> int:
    status = getattr(getattr(error, "response", None), "status_code", 0)
    return status if isinstance(status, int) else 0
