"""The object store on loopback that benchmarks use: what it serves, counts and breaks."""

from __future__ import annotations

import urllib.error
import urllib.request
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPResponse, IncompleteRead
from pathlib import Path

import pytest

from benchmarks.loopback_store import Link, LoopbackStore

pytestmark = pytest.mark.needs("program:cc")
CONTENT = bytes(range(256)) * 4096


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LoopbackStore]:
    folder = tmp_path / "root" / "bucket" / "deep"
    folder.mkdir(parents=True)
    (folder / "data.bin").write_bytes(CONTENT)
    for number in range(3):
        (folder.parent / f"{number}.txt").write_text(str(number))
    with LoopbackStore(tmp_path / "root", Link(0, 0, 0), log=tmp_path / "log") as running:
        yield running


def read(store: LoopbackStore, path: str, **headers: str) -> bytes:
    request = urllib.request.Request(store.url(path), headers=headers)
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as answer:
        return answer.read()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("byte_range", "expected"),
    [
        ("bytes=5-9", CONTENT[5:10]),
        ("bytes=1048570-", CONTENT[1048570:]),
        ("bytes=1048570-9999999", CONTENT[1048570:]),
        ("bytes=-7", CONTENT[-7:]),
    ],
)
def test_range_returns_exactly_its_bytes(store: LoopbackStore, byte_range: str, expected: bytes) -> None:
    assert read(store, "bucket/deep/data.bin", Range=byte_range) == expected


def test_counters_and_log_agree_with_what_was_read(store: LoopbackStore) -> None:
    read(store, "bucket/0.txt")
    store.reset()
    read(store, "bucket/deep/data.bin")
    read(store, "bucket/deep/data.bin", Range="bytes=0-99")
    counts = store.counts()
    assert (counts.requests, counts.gets, counts.body_bytes) == (2, 2, len(CONTENT) + 100)
    assert counts.in_flight == 0
    assert [(request.path, request.range, request.size) for request in store.requests()] == [
        ("/bucket/deep/data.bin", "", len(CONTENT)),
        ("/bucket/deep/data.bin", "bytes=0-99", 100),
    ]


def test_list_has_pages_and_common_prefixes(store: LoopbackStore) -> None:
    keys, prefixes, token = [], [], ""
    for _ in range(10):
        query = f"list-type=2&delimiter=%2F&max-keys=2&prefix={token and '&continuation-token=' + token}"
        page = ET.fromstring(read(store, f"bucket?{query}"))
        name = page.tag.removesuffix("ListBucketResult")
        keys += [key.text for key in page.iterfind(f"{name}Contents/{name}Key")]
        prefixes += [prefix.text for prefix in page.iterfind(f"{name}CommonPrefixes/{name}Prefix")]
        if page.findtext(f"{name}IsTruncated") == "false":
            break
        token = page.findtext(f"{name}NextContinuationToken") or ""
    assert (keys, prefixes) == (["0.txt", "1.txt", "2.txt"], ["deep/"])


@pytest.mark.parametrize("path", ["bucket/missing", "bucket/deep", "../secret"])
def test_missing_object_is_an_error(store: LoopbackStore, path: str) -> None:
    with pytest.raises(urllib.error.HTTPError, match="404|501"):
        read(store, path)


def test_head_has_the_length_and_no_body(store: LoopbackStore) -> None:
    connection = HTTPConnection(store.endpoint.removeprefix("http://"), timeout=60)
    for _ in range(2):  # the connection stays open
        connection.request("HEAD", "/bucket/deep/data.bin")
        answer: HTTPResponse = connection.getresponse()
        assert (answer.status, answer.headers["Content-Length"]) == (200, str(len(CONTENT)))
        assert answer.read() == b""
    connection.close()


def test_burst_fails_the_next_requests_only(store: LoopbackStore) -> None:
    store.set_faults(burst=2, status=429)
    for _ in range(2):
        with pytest.raises(urllib.error.HTTPError, match="429"):
            read(store, "bucket/0.txt")
    assert read(store, "bucket/0.txt") == b"0"
    assert store.counts().faults == 2


def test_cut_body_is_half_of_the_promised_length(store: LoopbackStore) -> None:
    store.set_faults(cut_rate=1.0)
    with pytest.raises(IncompleteRead) as error:
        read(store, "bucket/deep/data.bin")
    assert len(error.value.partial) == len(CONTENT) // 2
    store.set_faults()
    assert read(store, "bucket/deep/data.bin") == CONTENT


def test_stalled_request_gets_no_answer(store: LoopbackStore) -> None:
    store.set_faults(stall_rate=1.0)
    connection = HTTPConnection(store.endpoint.removeprefix("http://"), timeout=0.2)
    connection.request("GET", "/bucket/deep/data.bin")
    with pytest.raises(TimeoutError):
        connection.getresponse()
    connection.close()


def test_link_limits_all_connections_together(tmp_path: Path) -> None:
    # Not a measurement: the server must not be faster than its link, however slow the machine is.
    (tmp_path / "bucket").mkdir()
    (tmp_path / "bucket" / "data.bin").write_bytes(CONTENT)
    with LoopbackStore(tmp_path, Link(0.05, 0, 10e6)) as store:
        for _ in range(2):
            read(store, "bucket/data.bin")
        counts = store.counts()
    # 2 MiB at 10 MB/s, less two bursts of 5 ms and a chunk each, and two latencies.
    assert counts.seconds >= 2 * len(CONTENT) / 10e6 - 2 * (0.005 + (128 << 10) / 10e6) + 0.1
