"""Push and pull with an object store: obstore and s3fs against the S3 server of moto on loopback."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import boto3
import numpy as np
import pytest
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

from quire import BaseDocument, DocumentArray
from quire.errors import StorageError, StorageNotFoundError
from quire.files import RemoteOptions, _remote, delete_file, list_files
from quire.typing import NdArray

pytestmark = pytest.mark.needs("moto", "flask", "s3fs", "obstore")


class Passage(BaseDocument):
    text: str
    embedding: NdArray[16384]


class Faults:
    """Middleware that answers the next planned requests with an error status."""

    def __init__(self, application: Any) -> None:
        self._application = application
        self.plan: list[tuple[str, str, str]] = []
        self.seen: list[str] = []

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        method, query = environ["REQUEST_METHOD"], environ["QUERY_STRING"]
        self.seen.append(f"{method} {query}")
        if self.plan and method == self.plan[0][0] and self.plan[0][1] in query:
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start(self.plan.pop(0)[2], [("Content-Length", "0")])
            return [b""]
        return self._application(environ, start)  # type: ignore[no-any-return]


class Store:
    """An S3 server with one bucket."""

    def __init__(self, port: int, faults: Faults) -> None:
        self.url, self.faults = f"http://127.0.0.1:{port}", faults
        keys = {"aws_access_key_id": "key", "aws_secret_access_key": "secret", "region_name": "us-east-1"}
        self.client = boto3.client("s3", endpoint_url=self.url, **keys)

    def options(self, **more: Any) -> RemoteOptions:
        known = {"key": "key", "secret": "secret", "endpoint_url": self.url, "skip_instance_cache": True}
        region = {"client_kwargs": {"region_name": "us-east-1"}}
        return RemoteOptions(storage_options={**known, **region}, **{"timeout": 20, **more})

    def names(self) -> list[str]:
        return [result["Key"] for result in self.client.list_objects_v2(Bucket="bucket").get("Contents", [])]

    def unfinished(self) -> list[Any]:
        return list(self.client.list_multipart_uploads(Bucket="bucket").get("Uploads", []))


@pytest.fixture(scope="module")
def server() -> Iterator[Store]:
    faults = Faults(DomainDispatcherApplication(create_backend_app))
    created = make_server("127.0.0.1", 0, faults, threaded=True)
    thread = threading.Thread(target=created.serve_forever, daemon=True)
    thread.start()
    yield Store(created.server_port, faults)
    created.shutdown()
    thread.join()
    created.server_close()


@pytest.fixture(params=["obstore", "s3fs"])
def store(server: Store, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    if request.param == "s3fs":
        monkeypatch.setattr(_remote, "is_installed", lambda name: name != "obstore")
    server.client.create_bucket(Bucket="bucket")
    server.faults.seen.clear()
    yield server
    for name in server.names():
        server.client.delete_object(Bucket="bucket", Key=name)
    server.client.delete_bucket(Bucket="bucket")


def passages(count: int = 300) -> Iterator[Passage]:
    rows = np.random.default_rng(0).random((20, 16384), np.float32)
    return (Passage(id=str(i), text=f"passage {i}", embedding=rows[i % 20]) for i in range(count))


@pytest.fixture(scope="module")
def docs() -> DocumentArray[Passage]:
    return DocumentArray[Passage](passages())


def test_push_uploads_large_array_in_parts(store: Store, docs: DocumentArray[Passage]) -> None:
    docs.push("s3://bucket/folder/docs", remote=store.options())
    assert sum("partNumber" in seen for seen in store.faults.seen) >= 2
    assert store.names() == ["folder/docs"]
    assert DocumentArray[Passage].pull("s3://bucket/folder/docs", remote=store.options()).identical(docs)


def test_pushed_arrays_are_listed_and_deleted(store: Store, docs: DocumentArray[Passage]) -> None:
    for name in ("b", "folder/a"):
        docs[:1].push(f"s3://bucket/{name}", remote=store.options())
    assert list_files("s3://bucket", remote=store.options()) == ["s3://bucket/b", "s3://bucket/folder/a"]
    assert list_files("s3://bucket/folder", remote=store.options()) == ["s3://bucket/folder/a"]
    assert delete_file("s3://bucket/folder/a", remote=store.options())
    assert store.names() == ["b"]
    with pytest.raises(StorageNotFoundError, match="s3://bucket/folder/a: there is no such file"):
        delete_file("s3://bucket/folder/a", remote=store.options())


def test_push_of_small_compressed_array_and_stream(store: Store, docs: DocumentArray[Passage]) -> None:
    docs[:5].push("s3://bucket/docs.gz", remote=store.options())
    assert DocumentArray[Passage].pull("s3://bucket/docs.gz", remote=store.options()).identical(docs[:5])
    DocumentArray[Passage].push_stream(passages(), "s3://bucket/docs", remote=store.options())
    result = DocumentArray[Passage].pull_stream("s3://bucket/docs", remote=store.options())
    assert all(a.identical(b) for a, b in zip(result, docs, strict=True))


def test_push_uploads_while_documents_are_made(store: Store) -> None:
    def waiting() -> Iterator[Passage]:
        yield from passages(400)
        for _ in range(2000):
            if any("partNumber=1" in seen for seen in store.faults.seen):
                break
            threading.Event().wait(0.01)
        assert any("partNumber=1" in seen for seen in store.faults.seen)
        yield from passages(1)

    DocumentArray[Passage].push_stream(waiting(), "s3://bucket/docs", num_workers=1, remote=store.options())
    assert store.names() == ["docs"]


def test_push_of_failing_source_leaves_no_file_and_no_parts(store: Store) -> None:
    def broken() -> Iterator[Passage]:
        yield from passages()
        raise LookupError("no more")

    with pytest.raises(LookupError, match="no more"):
        DocumentArray[Passage].push_stream(broken(), "s3://bucket/docs", remote=store.options())
    assert store.names() == []
    assert store.unfinished() == []


@pytest.mark.parametrize("request_", [("PUT", "partNumber=2"), ("POST", "uploadId")], ids=["part", "completion"])
def test_push_retries_busy_store(store: Store, docs: DocumentArray[Passage], request_: tuple[str, str]) -> None:
    store.faults.plan = [(*request_, "503 Slow Down")]
    docs.push("s3://bucket/docs", remote=store.options())
    assert store.faults.plan == []
    assert store.unfinished() == []
    assert DocumentArray[Passage].pull("s3://bucket/docs", remote=store.options()).identical(docs)


def test_push_error_of_refused_part_leaves_nothing(store: Store, docs: DocumentArray[Passage]) -> None:
    store.faults.plan = [("PUT", "partNumber=2", "403 Forbidden")]
    with pytest.raises(StorageError, match="s3://bucket/docs: writing the file is not possible"):
        docs.push("s3://bucket/docs", remote=store.options())
    assert store.names() == []
    assert store.unfinished() == []


def test_pull_error_names_missing_object(store: Store, docs: DocumentArray[Passage]) -> None:
    with pytest.raises(StorageNotFoundError, match="s3://bucket/none: there is no such file"):
        DocumentArray[Passage].pull("s3://bucket/none", remote=store.options())
    with pytest.raises(StorageError, match="s3://nowhere/docs: "):
        docs[:3].push("s3://nowhere/docs", remote=store.options(retries=0))
