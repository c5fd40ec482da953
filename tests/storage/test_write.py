"""Datasets are written in complete shards of the requested size, from any iterable of documents."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from quire import BaseDocument, DocumentArray
from quire.errors import (
    DocumentTypeError,
    EncodeError,
    OptionError,
    PathError,
    StorageError,
)
from quire.files import open_folder
from quire.storage import DatasetWriter, WriteOptions, open_dataset, write_dataset
from quire.storage._shard_reader import read_block_rows
from quire.typing import NdArray, float32
from tests.codec.round_trips import exact
from tests.storage.sample_documents import Meta, Photo, photo, photos

pytestmark = pytest.mark.needs("pyarrow")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "cache"))


class Wide(BaseDocument):
    number: int
    data: NdArray[float32, 256]


def _wide(count: int) -> Iterator[Wide]:
    return (Wide(number=n, data=np.full(256, n, np.float32)) for n in range(count))


def _numbers(path: Path, document_type: type[Any] = Photo) -> list[int]:
    return [int(number) for number in open_dataset(path, document_type, columns=["number"]).read().number]


def _files(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


# --- what is written


def test_writing_without_durability_does_not_wait_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[str] = []
    monkeypatch.setattr("os.fsync", lambda handle: waited.append(Path(f"/proc/self/fd/{handle}").readlink().name))
    write_dataset(_wide(100), tmp_path / "a", document_type=Wide, format="arrow", shard_bytes=20_000)
    assert any(".arrow" in name for name in waited)
    waited.clear()
    write_dataset(_wide(100), tmp_path / "b", document_type=Wide, format="arrow", shard_bytes=20_000, durable=False)
    assert not any(".arrow" in name for name in waited)
    assert _numbers(tmp_path / "b", Wide) == list(range(100))


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_documents_round_trip(tmp_path: Path, kind: Any) -> None:
    documents = photos(50)
    write_dataset(documents, tmp_path / "d", format=kind, group_bytes=4000, shard_bytes=10_000)
    dataset = open_dataset(tmp_path / "d")
    assert type(dataset).document_type is Photo
    assert len(dataset.shards) > 1
    assert exact(list(dataset[:].unstack()), list(documents))
    assert exact(list(dataset.read().unstack()), list(documents))
    dataset.verify()


def _mixed(documents: DocumentArray[Photo]) -> Iterator[Any]:
    yield documents[0]
    yield documents[1:3].stack(shapes="ragged")
    yield documents[3].model_dump()
    yield documents[4:4].stack(shapes="ragged")
    yield from documents[4:]


_SOURCES: dict[str, Any] = {
    "an array": lambda documents: documents,
    "a list": list,
    "a generator": iter,
    "a batch": lambda documents: documents.stack(shapes="ragged"),
    "batches": lambda documents: [documents[:3].stack(shapes="ragged"), documents[3:].stack(shapes="ragged")],
    "mappings": lambda documents: [document.model_dump() for document in documents],
    "a mixture": _mixed,
}


@pytest.mark.parametrize("source", _SOURCES.values(), ids=_SOURCES)
def test_any_iterable_of_documents_is_written(tmp_path: Path, source: Any) -> None:
    documents = photos(9)
    write_dataset(source(documents), tmp_path, document_type=Photo)
    assert exact(list(open_dataset(tmp_path)[:].unstack()), list(documents))


def test_class_is_that_of_the_first_document(tmp_path: Path) -> None:
    write_dataset((photo(n) for n in range(3)), tmp_path / "documents")
    write_dataset([photos(3).stack(shapes="ragged")], tmp_path / "batches")
    assert _numbers(tmp_path / "documents") == _numbers(tmp_path / "batches") == [0, 1, 2]
    with pytest.raises(OptionError, match="document_type="):
        write_dataset([], tmp_path / "nothing")
    with pytest.raises(OptionError, match="document_type="):
        write_dataset([{"number": 1}], tmp_path / "mapping")


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_dataset_without_rows_is_valid(tmp_path: Path, kind: Any) -> None:
    write_dataset([], tmp_path, document_type=Photo, format=kind)
    dataset = open_dataset(tmp_path)
    assert (len(dataset), type(dataset).document_type) == (0, Photo)
    assert len(dataset.read()) == len(dataset[:]) == len(dataset[[]]) == 0
    assert list(dataset.iter_batches()) == []
    dataset.verify()
    write_dataset(photos(2), tmp_path, format=kind, mode="append")
    assert _numbers(tmp_path) == [0, 1]


def test_row_groups_and_shards_have_about_the_requested_size(tmp_path: Path) -> None:
    write_dataset(_wide(40_000), tmp_path, document_type=Wide, shard_bytes=12 << 20)
    shards = open_dataset(tmp_path, Wide).shards
    assert len(shards) == 4
    for shard in shards[:-1]:
        assert (12 << 20) <= shard.bytes < (14 << 20)
    metadata = pq.read_metadata(tmp_path / shards[0].name)
    sizes = [metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)]
    assert all((1 << 19) <= size <= (5 << 18) for size in sizes)
    assert [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)] == [
        *read_block_rows(open_folder(tmp_path), shards[0])
    ]
    assert shards[0].blocks == metadata.num_row_groups


def test_large_batch_is_split_into_row_groups(tmp_path: Path) -> None:
    batch = DocumentArray[Wide](list(_wide(5000))).stack()
    write_dataset(batch, tmp_path, group_bytes=1 << 18, shard_bytes=2 << 20)
    shards = open_dataset(tmp_path, Wide).shards
    assert len(shards) == 3
    assert all(max(read_block_rows(open_folder(tmp_path), shard)) <= 256 for shard in shards)


def test_log_has_rows_bytes_and_checksums(tmp_path: Path) -> None:
    write_dataset(photos(5), tmp_path)
    [log] = (tmp_path / "_quire").glob("*.jsonl")
    head, line = map(json.loads, log.read_text().splitlines())
    assert head.keys() == {"version", "sum"}
    assert (line["rows"], line["blocks"], line["bytes"]) == (5, 1, (tmp_path / line["name"]).stat().st_size)
    assert len(line["xxh3"]) == len(line["layout"]) == len(line["sum"]) == 16
    assert {head["version"], line["version"]} == {2}


def test_shards_are_named_in_order_and_are_plain_parquet(tmp_path: Path) -> None:
    write_dataset(photos(40), tmp_path, group_bytes=2000, shard_bytes=3000)
    assert pq.read_table(tmp_path)["number"].to_pylist() == list(range(40))
    metadata = pq.read_schema(next(tmp_path.glob("*.parquet"))).metadata
    assert json.loads(metadata[b"quire.json_schema"])["title"] == "Photo"
    assert metadata[b"quire.class"] == b"tests.storage.sample_documents:Photo"


# --- how columns are packed


def _column(path: Path, name: str) -> Any:
    group = pq.read_metadata(next(path.glob("*.parquet"))).row_group(0)
    columns = [group.column(i) for i in range(group.num_columns)]
    return next(column for column in columns if column.path_in_schema == name)


def test_tensors_are_not_compressed_and_all_else_uses_zstd(tmp_path: Path) -> None:
    write_dataset(photos(5), tmp_path)
    assert _column(tmp_path, "image").compression == "UNCOMPRESSED"
    assert _column(tmp_path, "image").physical_type == "FIXED_LEN_BYTE_ARRAY"
    assert _column(tmp_path, "image").statistics is None
    assert _column(tmp_path, "caption").compression == "ZSTD"
    assert _column(tmp_path, "meta.stamp").statistics.max == 40


def test_compression_is_set_by_field(tmp_path: Path) -> None:
    chosen = {"image": "zstd", "number": "none", "meta": "snappy", "meta.tags": "gzip"}
    write_dataset(photos(5), tmp_path, compression=chosen)
    names = {"image": "ZSTD", "number": "UNCOMPRESSED", "meta.source": "SNAPPY", "meta.tags.list.element": "GZIP"}
    assert {name: _column(tmp_path, name).compression for name in names} == names
    assert _column(tmp_path, "number").statistics.max == 4
    assert exact(list(open_dataset(tmp_path)[:].unstack()), list(photos_like(tmp_path)))


def photos_like(path: Path) -> Any:
    """Return the documents of a dataset, read by pyarrow."""
    return open_dataset(path).read().unstack()


def test_compression_of_an_unknown_field_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PathError, match="colour"):
        write_dataset(photos(1), tmp_path / "d", compression={"colour": "zstd"})
    with pytest.raises(OptionError, match="'image': 'rar'"):
        write_dataset(photos(1), tmp_path / "d", compression={"image": "rar"})
    with pytest.raises(OptionError, match="format='parquet'"):
        write_dataset(photos(1), tmp_path / "d", compression={"image": "zstd"}, format="arrow")
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize("storage", ["binary", "list"])
def test_tensors_are_stored_for_other_readers(tmp_path: Path, storage: Any) -> None:
    documents = photos(6)
    write_dataset(documents, tmp_path, tensor_storage=storage)
    stored = pq.read_schema(next(tmp_path.glob("*.parquet"))).field("image").type
    assert stored == pa.binary() if storage == "binary" else pa.types.is_fixed_size_list(stored)
    assert exact(list(open_dataset(tmp_path)[:].unstack()), list(documents))


# --- modes


def test_create_does_not_change_an_existing_dataset(tmp_path: Path) -> None:
    write_dataset(photos(3), tmp_path)
    before = _files(tmp_path)
    with pytest.raises(StorageError, match="'append'.*'resume'.*'overwrite'"):
        write_dataset(photos(2), tmp_path)
    assert _files(tmp_path) == before


def test_append_adds_rows_at_the_end(tmp_path: Path) -> None:
    for start in (0, 3, 6):
        write_dataset(photos(3, start), tmp_path, mode="append", format="arrow" if start == 3 else "parquet")
    assert _numbers(tmp_path) == list(range(9))


def test_resume_skips_stored_rows(tmp_path: Path) -> None:
    write_dataset(photos(5), tmp_path)
    write_dataset(iter(photos(9)), tmp_path, document_type=Photo, mode="resume")
    assert _numbers(tmp_path) == list(range(9))
    write_dataset([photos(6).stack(shapes="ragged"), photos(6, 6).stack(shapes="ragged")], tmp_path, mode="resume")
    assert _numbers(tmp_path) == list(range(12))
    write_dataset(photos(12), tmp_path, mode="resume")
    assert _numbers(tmp_path) == list(range(12))


def test_overwrite_removes_the_old_dataset(tmp_path: Path) -> None:
    for _ in range(2):
        write_dataset(photos(3), tmp_path, mode="append")
    write_dataset(photos(4, 100), tmp_path, mode="overwrite")
    assert _numbers(tmp_path) == [100, 101, 102, 103]
    assert len(list(tmp_path.glob("*.parquet"))) == 1
    assert len(list((tmp_path / "_quire").glob("[0-9a-f]*.jsonl"))) == 1
    write_dataset([], tmp_path, document_type=Photo, mode="overwrite")
    assert _numbers(tmp_path) == []


def test_overwrite_keeps_files_that_other_tools_add_meanwhile(tmp_path: Path) -> None:
    write_dataset(photos(3), tmp_path)
    other = tmp_path / "export.parquet"
    with DatasetWriter(tmp_path, Photo, mode="overwrite") as writer:
        writer.write(photos(2, 100))
        pq.write_table(pa.table({"number": [1]}), other)
    assert other.exists()
    assert len(list(tmp_path.glob("*.parquet"))) == 2  # the other one is the new shard


def test_failed_overwrite_leaves_the_old_dataset(tmp_path: Path) -> None:
    write_dataset(photos(3), tmp_path)
    before = _files(tmp_path)

    def failing() -> Iterator[Photo]:
        yield from photos(50)
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        write_dataset(failing(), tmp_path, document_type=Photo, mode="overwrite", group_bytes=1000, shard_bytes=1000)
    assert _numbers(tmp_path) == [0, 1, 2]
    assert before.items() <= _files(tmp_path).items()
    with pytest.raises(StorageError, match="mode='overwrite'"):
        write_dataset(photos(5), tmp_path, mode="resume")
    write_dataset(photos(1, 7), tmp_path, mode="overwrite")
    assert _numbers(tmp_path) == [7]
    assert len(list(tmp_path.glob("*.parquet"))) == 1


@pytest.mark.parametrize("mode", ["create", "append", "resume", "overwrite"])
def test_folder_with_other_files_is_not_written_to(tmp_path: Path, mode: Any) -> None:
    pq.write_table(pa.table({"number": [1]}), tmp_path / "other.parquet")
    with pytest.raises(StorageError, match="other.parquet"):
        write_dataset(photos(1), tmp_path, mode=mode)
    assert list(tmp_path.iterdir()) == [tmp_path / "other.parquet"]


def test_invalid_options_are_errors() -> None:
    for wrong in ({"format": "csv"}, {"mode": "w"}, {"shard_bytes": 0}, {"group_bytes": -1}):
        with pytest.raises(OptionError):
            WriteOptions(**wrong)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="tensor_storage"):
        WriteOptions(format="arrow", tensor_storage="list")


def test_progress_is_shown_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_dataset(photos(3), tmp_path / "a", show_progress=True)
    shown = capsys.readouterr()
    assert "writing" in shown.out + shown.err
    write_dataset(photos(3), tmp_path / "b", show_progress=False)
    quiet = capsys.readouterr()
    assert quiet.out + quiet.err == ""


# --- what cannot be written


class Small(BaseDocument):
    number: int


class Larger(Small):
    more: int = 0


_WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "a document of another class": (Meta(), DocumentTypeError, "dataset of Small"),
    "no document": (3, DocumentTypeError, "got.*int"),
    "a subclass": (Larger(number=1), EncodeError, "Small.*Larger"),
    "a batch of a subclass": (DocumentArray[Larger]([Larger(number=1)]).stack(), EncodeError, "Small.*Larger"),
    "a batch of another class": (DocumentArray[Meta]([Meta()]).stack(), DocumentTypeError, "dataset of Small"),
    "a number of 65 bits": (Small(number=2**64), EncodeError, "Small.number"),
    "a mapping that does not fit": ({"number": "x"}, ValidationError, "number"),
}


@pytest.mark.parametrize(("wrong", "error", "message"), _WRONG.values(), ids=_WRONG)
@pytest.mark.parametrize("mode", ["create", "append", "overwrite"])
def test_invalid_document_changes_nothing(
    tmp_path: Path, wrong: Any, error: type[Exception], message: str, mode: Any
) -> None:
    if mode != "create":
        write_dataset([Small(number=n) for n in range(3)], tmp_path)
    before = _files(tmp_path)
    good = [Small(number=n) for n in range(2000)]
    with pytest.raises(error, match=message):
        write_dataset([*good, wrong], tmp_path, document_type=Small, mode=mode, group_bytes=4000)
    assert _files(tmp_path) == before


def test_writer_continues_after_an_invalid_document(tmp_path: Path) -> None:
    with DatasetWriter(tmp_path, Small) as writer:
        for number in (1, 2**64, 2):
            try:
                writer.write([Small(number=number)])
            except EncodeError:
                assert number == 2**64
    assert _numbers(tmp_path, Small) == [1, 2]


def test_folder_without_write_permission_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file"):
        write_dataset(photos(1), tmp_path / "file" / "below")


@pytest.mark.parametrize("document_type", ["Photo", dict, photo(0)], ids=["text", "class", "document"])
def test_document_type_must_be_a_document_class(tmp_path: Path, document_type: Any) -> None:
    with pytest.raises(OptionError, match="document_type: expected a document class"):
        write_dataset(photos(2), tmp_path / "d", document_type=document_type)
    assert not (tmp_path / "d").exists()


class Loose(BaseDocument):
    number: int = 0
    text: str = ""
    span: timedelta = timedelta(0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"number": 2**70}, rf"Loose\.number: .*\({2**70}\)\. A field of Decimal or str holds any number\."),
        ({"text": "ab\ud800"}, r"Loose\.text: a lone surrogate .*'ab\\ud800'.*errors='replace'"),
        ({"span": timedelta.max}, r"Loose\.span: .*\(datetime\.timedelta\(days=999999999"),
    ],
    ids=["number", "text", "span"],
)
def test_error_about_an_unstorable_value_names_the_field(tmp_path: Path, content: dict[str, Any], message: str) -> None:
    with pytest.raises(EncodeError, match=message):
        write_dataset([Loose(), Loose(**content)], tmp_path / "d", Loose)


def test_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "photos"
    file.write_text("mine")
    for mode in ("create", "append", "resume", "overwrite"):
        with pytest.raises(StorageError, match=r"photos: this is a file, and a dataset is a folder"):
            write_dataset(photos(3), file, mode=mode)
    assert file.read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["photos"]
