"""Push and pull over HTTP with a real server: sent while they are encoded, complete or not at all."""

from __future__ import annotations

import io
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from quire import BaseDocument, DocumentArray
from quire.errors import DecodeError, EncodeError, OptionError, StorageError, StorageNotFoundError
from quire.files import RemoteOptions
from quire.typing import NdArray
from tests.files.upload_server import UploadServer, run_upload_server


class Passage(BaseDocument):
    text: str
    embedding: NdArray[4096]


class Box(BaseDocument):
    value: object


SOON = RemoteOptions(retries=3, timeout=5, deadline=20)
ONCE = RemoteOptions(retries=0, timeout=5)


@pytest.fixture
def site() -> Iterator[UploadServer]:
    with run_upload_server() as site:
        yield site


def passages(count: int = 1500) -> Iterator[Passage]:
    rows = np.random.default_rng(0).random((50, 4096), np.float32)
    return (Passage(id=str(i), text=f"passage {i}", embedding=rows[i % 50]) for i in range(count))


@pytest.fixture(scope="module")
def docs() -> DocumentArray[Passage]:
    return DocumentArray[Passage](passages())


def stored(site: UploadServer, name: str) -> DocumentArray[Passage]:
    return DocumentArray[Passage].load_binary(io.BytesIO(site.files[f"/data/{name}"]))


# --- there and back


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("name", ["plain", "packed.protobuf.gz"])
def test_push_writes_the_file_of_save_binary(site: UploadServer, tmp_path: Path, name: str, workers: int) -> None:
    docs = DocumentArray[Passage](passages(700))
    docs.push(f"{site.url}/{name}", num_workers=workers)
    docs.save_binary(tmp_path / name)
    assert site.files[f"/data/{name}"] == (tmp_path / name).read_bytes()
    assert DocumentArray[Passage].pull(f"{site.url}/{name}").identical(docs)


def test_push_sends_chunks_and_pull_reads_every_form(site: UploadServer, docs: DocumentArray[Passage]) -> None:
    url = f"{site.url}/docs"
    docs.push(url)
    assert site.headers[0]["Transfer-Encoding"] == "chunked"
    assert "Content-Length" not in site.headers[0]
    assert DocumentArray.pull(url).identical(docs)
    with closing(DocumentArray[Passage].pull_stream(url)) as result:
        assert all(a.identical(b) for a, b in zip(result, docs, strict=True))
    assert len(DocumentArray[Passage].pull(url, copy=False)) == len(docs)


def test_push_of_empty_array_writes_a_file(site: UploadServer) -> None:
    DocumentArray[Passage]().push(f"{site.url}/empty")
    assert len(DocumentArray[Passage].pull(f"{site.url}/empty")) == 0


def test_query_of_address_does_not_choose_compression(site: UploadServer) -> None:
    DocumentArray[Passage](passages(3)).push(f"{site.url}/plain?next=file.gz")
    assert site.files["/data/plain?next=file.gz"].startswith(b"\x93QUIRE")


def test_push_sends_headers_and_password(site: UploadServer) -> None:
    options = RemoteOptions(storage_options={"headers": {"X-Key": "k"}})
    url = site.url.replace("http://", "http://me:secret@")
    DocumentArray[Passage](passages(3)).push(f"{url}/a", remote=options)
    assert (site.headers[0]["X-Key"], site.headers[0]["Authorization"]) == ("k", "Basic bWU6c2VjcmV0")


@pytest.mark.needs("trustme")
def test_push_trusts_certificate_of_ssl_context(site: UploadServer, tmp_path: Path) -> None:
    from tests.certificates import generate_certificates

    certificates = generate_certificates(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.server.certificate, certificates.server.key)
    site.socket = context.wrap_socket(site.socket, server_side=True)
    docs, url = DocumentArray[Passage](passages(300)), site.url.replace("http://", "https://") + "/docs"
    with pytest.raises(StorageError, match=f"{url}: .*certificate"):
        docs.push(url, remote=ONCE)
    trusting = RemoteOptions(storage_options={"ssl": ssl.create_default_context(cafile=certificates.authority)})
    docs.push(url, remote=trusting)
    assert DocumentArray[Passage].pull(url, remote=trusting).identical(docs)


# --- sending while encoding


def test_push_sends_while_documents_are_made(site: UploadServer) -> None:
    def slowly() -> Iterator[Passage]:
        yield from passages(3000)
        assert site.some.wait(20)  # else this would never end
        yield from passages(1)

    DocumentArray[Passage].push_stream(slowly(), f"{site.url}/docs")
    assert len(stored(site, "docs")) == 3001


def test_push_stream_has_backpressure(site: UploadServer) -> None:
    taken = 0

    def counted() -> Iterator[Passage]:
        nonlocal taken
        for taken, passage in enumerate(passages(20_000), 1):  # noqa: B007 - the number is looked at below
            yield passage

    site.reads.clear()
    options = RemoteOptions(retries=0, timeout=0.2)
    with pytest.raises(StorageError, match="timed out|no answer within"):
        DocumentArray[Passage].push_stream(counted(), f"{site.url}/docs", remote=options)
    assert taken < 8000  # of 16 KB each: ready to be sent, being encoded, and in buffers of the system


# --- failures


def test_push_retries_temporary_errors(site: UploadServer, docs: DocumentArray[Passage]) -> None:
    site.failures = 2
    docs.push(f"{site.url}/docs", remote=SOON)
    assert len(site.seen) == 3
    assert stored(site, "docs").identical(docs)


@pytest.mark.parametrize("compress", [None, "gzip"])
def test_push_stream_restarts_after_connection_loss(site: UploadServer, compress: str | None) -> None:
    site.breaks = [1, 3_000_000, 9_000_000]
    DocumentArray[Passage].push_stream(passages(), f"{site.url}/docs", compress=compress, remote=SOON)
    assert len(site.seen) == 4
    assert stored(site, "docs").identical(DocumentArray[Passage](passages()))


def test_push_error_of_too_large_file_has_reason_of_server(site: UploadServer, docs: DocumentArray[Passage]) -> None:
    site.refuses = 1
    with pytest.raises(StorageError, match=rf"{site.url}/docs: writing the file is not possible .*413"):
        docs[:3].push(f"{site.url}/docs", remote=SOON)
    site.refuses = 2_000_000
    with pytest.raises(StorageError, match=f"{site.url}/docs: "):
        docs.push(f"{site.url}/docs", remote=ONCE)
    assert site.files == {}


def test_push_error_names_address_without_password(site: UploadServer) -> None:
    site.failures = 100
    url = site.url.replace("http://", "http://me:secret@")
    with pytest.raises(StorageError, match="tried twice|tried 2 times") as caught:
        DocumentArray[Passage](passages(3)).push(f"{url}/a", remote=RemoteOptions(retries=1))
    assert "503" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_push_rejects_redirects(site: UploadServer) -> None:
    site.failures, site.status = 1, 307
    with pytest.raises(StorageError, match="points to"):
        DocumentArray[Passage](passages(3)).push(f"{site.url}/a")


def test_push_error_names_address_without_server() -> None:
    with pytest.raises(StorageError, match="127.0.0.1:9/x: writing the file failed"):
        DocumentArray[Passage](passages(3)).push("http://127.0.0.1:9/x", remote=ONCE)


def test_push_times_out_on_hanging_server(site: UploadServer) -> None:
    site.hangs = True
    options = RemoteOptions(retries=1, timeout=0.2, deadline=5)
    with pytest.raises(StorageError, match="writing the file failed"):
        DocumentArray[Passage](passages(3)).push(f"{site.url}/a", remote=options)
    with pytest.raises(StorageError, match="reading the file failed"):
        DocumentArray[Passage].pull(f"{site.url}/a", remote=options)


def test_push_stream_raises_error_of_source_and_writes_nothing(site: UploadServer) -> None:
    def broken() -> Iterator[Passage]:
        yield from passages()
        raise LookupError("no more")

    with pytest.raises(LookupError, match="no more"):
        DocumentArray[Passage].push_stream(broken(), f"{site.url}/docs", remote=SOON)
    with pytest.raises(EncodeError, match="value"):
        DocumentArray[Box]([Box(value=object())]).push(f"{site.url}/docs", remote=SOON)
    for _ in range(500):  # the server sees it a little later
        if site.unfinished == len(site.seen):
            break
        time.sleep(0.01)
    assert site.files == {}
    assert site.unfinished == len(site.seen)


def test_push_keeps_old_file_after_connection_loss(site: UploadServer) -> None:
    old = DocumentArray[Passage](passages(3))
    old.push(f"{site.url}/docs")
    site.breaks = [1_000_000]
    with pytest.raises(StorageError):
        DocumentArray[Passage].push_stream(passages(), f"{site.url}/docs", remote=ONCE)
    assert DocumentArray[Passage].pull(f"{site.url}/docs").identical(old)


# --- pull


def test_pull_resumes_after_connection_loss(site: UploadServer, docs: DocumentArray[Passage]) -> None:
    docs.push(f"{site.url}/docs")
    site.cuts = 2
    assert DocumentArray[Passage].pull(f"{site.url}/docs", remote=SOON).identical(docs)
    ranges = [asked for method, _, asked in site.seen if method == "GET"]
    assert ranges[0] is None
    assert all(asked and asked.endswith("-") for asked in ranges[1:])


@pytest.mark.parametrize("ranges", [True, False])
def test_pull_restarts_without_ranges_or_lengths(
    site: UploadServer, docs: DocumentArray[Passage], ranges: bool
) -> None:
    docs.push(f"{site.url}/docs")
    site.ranges, site.cuts = ranges, 1
    with closing(DocumentArray[Passage].pull_stream(f"{site.url}/docs", remote=SOON)) as result:
        assert sum(1 for _ in result) == len(docs)


def test_pull_rejects_file_that_changes(site: UploadServer, docs: DocumentArray[Passage]) -> None:
    docs.push(f"{site.url}/docs")
    site.cuts, site.etags = 1, ['"one"', '"one"']
    assert len(DocumentArray[Passage].pull(f"{site.url}/docs", remote=SOON)) == len(docs)
    site.cuts, site.etags = 1, ['"one"', '"two"']
    with pytest.raises(StorageError, match=f"{site.url}/docs: the file was changed while it was read"):
        DocumentArray[Passage].pull(f"{site.url}/docs", remote=SOON)


def test_pull_does_not_retry_missing_file(site: UploadServer) -> None:
    with pytest.raises(StorageNotFoundError, match=f"{site.url}/none: "):
        DocumentArray[Passage].pull(f"{site.url}/none")
    assert len(site.seen) == 1


@pytest.mark.parametrize("keep", [0, 5, 100, -100, -1])
def test_pull_error_of_truncated_file_names_address(site: UploadServer, keep: int) -> None:
    DocumentArray[Passage](passages(100)).push(f"{site.url}/docs")
    site.files["/data/docs"] = site.files["/data/docs"][:keep] if keep != -1 else b"not a file of documents"
    with pytest.raises(DecodeError, match=f"^{site.url}/docs: "):
        DocumentArray[Passage].pull(f"{site.url}/docs")
    with pytest.raises(DecodeError, match=f"^{site.url}/docs: "):
        list(DocumentArray[Passage].pull_stream(f"{site.url}/docs"))


def test_pull_stream_stops_download_with_reader(site: UploadServer, docs: DocumentArray[Passage]) -> None:
    docs.push(f"{site.url}/docs")
    result = DocumentArray[Passage].pull_stream(f"{site.url}/docs")
    assert next(result).identical(docs[0])
    result.close()  # type: ignore[attr-defined]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("quire-receive")]


# --- options


def test_push_rejects_bad_options_before_sending(site: UploadServer) -> None:
    docs = DocumentArray[Passage](passages(3))
    with pytest.raises(OptionError, match="num_workers=0"):
        docs.push(f"{site.url}/a", num_workers=0)
    with pytest.raises(OptionError, match="two spellings"):
        docs.push(f"{site.url}/a", num_workers=1, num_worker=2)
    with pytest.raises(TypeError, match="has no option 'compres'. Did you mean 'compress'"):
        docs.push(f"{site.url}/a", compres="gzip")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="has no option 'maxbytes'"):
        DocumentArray[Passage].pull(f"{site.url}/a", maxbytes=1)  # type: ignore[call-arg]
    with pytest.raises(OptionError, match="no storage option 'key'"):
        docs.push(f"{site.url}/a", remote=RemoteOptions(storage_options={"key": "x"}))
    assert site.seen == []


def test_progress_bar_is_off_by_default(site: UploadServer, capfd: pytest.CaptureFixture[str]) -> None:
    docs = DocumentArray[Passage](passages(300))
    docs.push(f"{site.url}/a")
    DocumentArray[Passage].pull(f"{site.url}/a")
    assert capfd.readouterr() == ("", "")
    docs.push(f"{site.url}/a", show_progress=True)
    DocumentArray[Passage].pull(f"{site.url}/a", show_progress=True)
    list(DocumentArray[Passage].pull_stream(f"{site.url}/a", show_progress=True))
    out, err = capfd.readouterr()
    assert out == ""
    words = [line.split() for line in err.splitlines()]
    assert [line[0] for line in words] == ["pushing", "pulling", "pulling"]
    assert ["300/300" in words[0], "300" in words[1], "300" in words[2]] == [True] * 3  # a pull does not know the total
