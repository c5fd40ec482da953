"""Parts of files over HTTP, from a real server on loopback that answers with other ranges than requested."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from quire.errors import StorageError, UriError, UriTimeoutError
from quire.files import RemoteOptions, _remote, open_folder, open_seekable
from quire.files._fetch import fetch
from quire.files._http import HttpFile
from quire.files._throttling import watch_throttling
from tests.files.faulty_store import FaultyFileSystem, faulty_store
from tests.files.http_server import Site, serve_files

CONTENT = bytes(range(251)) * 3000


@pytest.fixture
def site() -> Iterator[Site]:
    with serve_files({"video.mp4": CONTENT}) as site:
        yield site


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Record the pauses between attempts instead of making them."""
    recorded: list[float] = []
    monkeypatch.setattr(time, "sleep", recorded.append)
    return recorded


@pytest.mark.parametrize("shift", [1, 100, None])
def test_seekable_file_retries_when_the_server_sends_another_range(
    site: Site, shift: int | None, pauses: list[float]
) -> None:
    site.shift = shift
    with open_seekable(f"{site.url}/video.mp4") as file:
        site.wrong_ranges = 2
        file.seek(300_000)
        assert file.read(1000) == CONTENT[300_000:301_000]
    assert site.wrong_ranges == 0
    assert len(pauses) == 2


@pytest.mark.parametrize("shift", [1, None])
def test_seekable_file_never_reads_bytes_of_another_range(site: Site, shift: int | None, pauses: list[float]) -> None:
    site.shift = shift
    with open_seekable(f"{site.url}/video.mp4", retries=1) as file:
        site.wrong_ranges = 100
        file.seek(300_000)
        with pytest.raises(UriError, match="asked for the bytes from 300,000 on, and answered with another range"):
            file.read(1000)
    assert len(pauses) == 1


def test_open_seekable_rejects_a_first_response_of_another_range(site: Site, pauses: list[float]) -> None:
    site.shift, site.wrong_ranges = 7, 100
    with (
        pytest.raises(UriError, match="bytes from 0 on, and answered with another range"),
        open_seekable(f"{site.url}/video.mp4"),
    ):
        pass
    assert len(pauses) == 2


@pytest.mark.usefixtures("pauses")
def test_seekable_file_is_read_from_ranges_that_are_shorter_than_requested(site: Site) -> None:
    site.longest_range = 100_000
    with open_seekable(f"{site.url}/video.mp4") as file:
        assert file.read() == CONTENT


def test_seekable_file_reports_a_file_of_another_size(site: Site) -> None:
    with open_seekable(f"{site.url}/video.mp4", retries=0) as file:
        site.files["/data/video.mp4"] = CONTENT[:-1]
        file.seek(300_000)
        with pytest.raises(UriError, match="changed while it was read"):
            file.read(1000)


def test_seekable_file_pauses_longer_after_each_failure(site: Site, pauses: list[float]) -> None:
    site.failures = 3
    with open_seekable(f"{site.url}/video.mp4", retries=3) as file:
        assert file.read(10) == CONTENT[:10]
    assert [0.05 * 2**number <= pause <= 0.1 * 2**number for number, pause in enumerate(pauses)] == [True] * 3


@pytest.mark.parametrize("shift", [1, 5000, None])
def test_resumed_download_retries_when_the_server_sends_another_range(
    site: Site, shift: int | None, pauses: list[float]
) -> None:
    site.cuts, site.shift, site.wrong_ranges = 1, shift, 2
    assert b"".join(HttpFile(f"{site.url}/video.mp4", RemoteOptions()).download()) == CONTENT
    assert site.wrong_ranges == 0
    assert len(pauses) == 3  # after the connection that broke off, and after each wrong range


@pytest.mark.usefixtures("pauses")
def test_resumed_download_never_returns_bytes_of_another_range(site: Site) -> None:
    site.cuts, site.shift, site.wrong_ranges = 1, 1, 100
    content = bytearray()
    with pytest.raises(StorageError, match="answered with another range"):
        for chunk in HttpFile(f"{site.url}/video.mp4", RemoteOptions(retries=2)).download():
            content += chunk
    assert content == CONTENT[: len(content)]


@pytest.mark.usefixtures("pauses")
def test_resumed_download_continues_after_ranges_that_are_shorter_than_requested(site: Site) -> None:
    site.cuts, site.longest_range = 1, 100_000
    assert b"".join(HttpFile(f"{site.url}/video.mp4", RemoteOptions()).download()) == CONTENT


@pytest.mark.usefixtures("pauses")
def test_resumed_download_reports_a_file_of_another_size(site: Site) -> None:
    site.cuts = 1
    download = HttpFile(f"{site.url}/video.mp4", RemoteOptions()).download()
    next(download)
    site.files["/data/video.mp4"] = CONTENT + b"more"
    with pytest.raises(StorageError, match="changed while it was read"):
        list(download)


# --- the deadline of a fetch


@pytest.mark.needs("fsspec")
def test_fetch_has_one_deadline_for_all_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    def read_slowly(self: FaultyFileSystem, *args: Any, **kwargs: Any) -> Any:
        time.sleep(0.25)
        return read(self, *args, **kwargs)

    with faulty_store() as store:
        folder = open_folder("faulty://data")
        with folder.open_for_write("a") as file:
            file.write(CONTENT[:20])
        monkeypatch.setattr(_remote, "_PART", 1)
        read = store.cat_file
        monkeypatch.setattr(store, "cat_file", read_slowly)
        with pytest.raises(UriTimeoutError, match="faulty://data/a: "):
            fetch("faulty://data/a", timeout=1.0)  # 20 parts take 5 seconds
        assert fetch("faulty://data/a", timeout=None) == CONTENT[:20]


# --- servers that ask to wait


def read_by_fsspec(url: str) -> bytes:
    """Read a file with a client of fsspec, which an option without a translation for obstore selects."""
    folder, _, name = url.rpartition("/")
    options = RemoteOptions(storage_options={"client_kwargs": {"trust_env": False}})
    return open_folder(folder, options).read(name)


def read_seekable(url: str) -> bytes:
    with open_seekable(url) as file:
        return file.read()


READERS = {
    "fetch": fetch,
    "download": lambda url: b"".join(HttpFile(url, RemoteOptions()).download()),
    "seekable": read_seekable,
    "fsspec": read_by_fsspec,
}


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("name", [*READERS])
def test_pause_is_as_long_as_the_server_asks_for(site: Site, pauses: list[float], name: str, status: int) -> None:
    if name == "fsspec":
        pytest.importorskip("aiohttp")
    site.failures, site.status, site.retry_after = 2, status, "3"
    assert READERS[name](f"{site.url}/video.mp4") == CONTENT
    assert pauses == [3.0, 3.0]


@pytest.mark.parametrize("name", [*READERS])
def test_server_that_asks_for_a_long_wait_is_an_error_at_once(site: Site, pauses: list[float], name: str) -> None:
    if name == "fsspec":
        pytest.importorskip("aiohttp")
    site.failures, site.status, site.retry_after = 1, 429, "3600"
    with pytest.raises((StorageError, UriError), match="wait for 3600 seconds|429"):
        READERS[name](f"{site.url}/video.mp4")
    assert pauses == []


def test_wait_that_a_server_asks_for_is_reported_to_who_makes_many_requests(site: Site, pauses: list[float]) -> None:
    site.failures, site.status, site.retry_after = 1, 429, "4"
    reported: list[float] = []
    with watch_throttling(reported.append):
        assert b"".join(HttpFile(f"{site.url}/video.mp4", RemoteOptions()).download()) == CONTENT
    assert reported == pauses == [4.0]
