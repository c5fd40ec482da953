"""Versions of datasets: deletes, upserts, updates, tags, differences, compaction and cleanup."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError, field_validator

from quire import BaseDocument
from quire.errors import (
    ConflictError,
    OptionError,
    PathError,
    ShardError,
    StorageError,
    StorageExistsError,
    StorageNotFoundError,
)
from quire.files import Folder
from quire.storage import DatasetWriter, Pages, Split, column_statistics, null_counts, open_dataset, write_dataset
from quire.storage._live_rows import LiveRows
from quire.storage._manifest import _read_lines, encode_line, open_logs
from quire.storage._versions import VersionLog, decode_rows, encode_rows
from tests.files.s3_server import S3Server, run_s3_server

pytestmark = pytest.mark.needs("pyarrow", "xxhash", "fsspec", "obstore")
NOW = timedelta(0)


class Row(BaseDocument):
    id: str
    number: int
    text: str | None = None
    words: list[int] = []

    @field_validator("number")
    @classmethod
    def _check_number(cls, number: int) -> int:
        if number > 1_000_000:
            raise ValueError("the number is too large")
        return number


def rows(start: int, stop: int) -> list[Row]:
    return [
        Row(id=f"r{n}", number=n, text=None if n % 3 else f"secret-{n:06d}", words=list(range(n % 5)))
        for n in range(start, stop)
    ]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "cache"))


@pytest.fixture(params=["parquet", "arrow"])
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A dataset of 100 rows in several shards and blocks."""
    write_dataset(rows(0, 100), tmp_path / "data", format=request.param, group_bytes=700, shard_bytes=1500)
    return tmp_path / "data"


def numbers(dataset: Any) -> list[int]:
    return [row.number for row in dataset]


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# --- deleted rows do not come back


def test_deleted_rows_are_in_no_way_of_reading(folder: Path) -> None:
    dataset = open_dataset(folder, Row)
    assert len(dataset.shards) > 1
    gone = {0, 1, 2, 50, 98, 99, *range(20, 45)}
    assert dataset.delete({"number": {"$in": sorted(gone)}}) == len(gone)
    left = [n for n in range(100) if n not in gone]
    for each in (dataset, open_dataset(folder, Row), pickle.loads(pickle.dumps(dataset))):
        assert len(each) == len(left)
        assert numbers(each) == left
        assert [int(n) for n in each.take(np.arange(len(left))[::-1]).number] == left[::-1]
        assert (each[0].number, each[-1].number) == (left[0], left[-1])
        assert [int(n) for n in each.number] == left
        assert [int(n) for n in each.read().number] == left
        assert [int(n) for batch in each.iter_batches(7) for n in batch.number] == left
        assert list(each.map(lambda row: row.number, num_workers=1, backend="thread")) == left
        assert pa.table(each)["number"].to_pylist() == left
        assert each.to_dataframe()["number"].tolist() == left
    assert numbers(dataset.filter({"number": {"$lt": 25}})) == [n for n in left if n < 25]
    assert numbers(dataset.filter(lambda row: row.number < 25)) == [n for n in left if n < 25]
    assert numbers(open_dataset(folder, Row, where={"number": {"$gte": 40}})) == [n for n in left if n >= 40]
    parts = [open_dataset(folder, Row, where=Split("id", (0.5, 0.5), part)) for part in range(2)]
    assert sorted(n for part in parts for n in numbers(part)) == left
    assert sorted(n for part in dataset.split(0.5, 0.5, shuffle=True) for n in numbers(part)) == left
    assert len(dataset.sample(20)) == 20
    assert numbers(dataset.narrow(["number"])) == left
    assert dataset._row_reader.row_lengths("words").tolist() == [n % 5 for n in left]
    assert dataset._row_reader.block_starts()[-1] == len(left)
    assert dataset.null_count("text") is None
    assert null_counts(dataset, [("text",)]) == {}
    statistics = column_statistics(dataset, ["number", "text"])
    assert (statistics["number"].rows, statistics["number"].minimum, statistics["number"].maximum) == (len(left), 3, 97)
    pages = Pages(dataset)
    assert [int(n) for _, columns in pages.blocks() for n in columns.columns["number"].data] == left
    assert pages.matching({"number": {"$lt": 25}}).tolist() == [n for n, m in enumerate(left) if m < 25]
    assert pages.matching(lambda row: row.number == 97).tolist() == [left.index(97)]
    write_dataset(dataset, folder.parent / "copy")
    assert sorted(pq.read_table(folder.parent / "copy")["number"].to_pylist()) == left


def test_function_is_not_called_with_deleted_rows(folder: Path) -> None:
    dataset = open_dataset(folder, Row)
    dataset.delete({"number": {"$lt": 90}})
    seen: list[int] = []
    dataset.filter(lambda row: seen.append(row.number))  # type: ignore[func-returns-value]
    open_dataset(folder, Row, where=lambda row: seen.append(row.number))  # type: ignore[func-returns-value]
    assert sorted(seen) == sorted([*range(90, 100)] * 2)


def test_all_rows_can_be_deleted(folder: Path) -> None:
    dataset = open_dataset(folder, Row)
    assert dataset.delete({}) == 100
    assert len(dataset) == 0
    assert numbers(dataset) == []
    dataset.compact()
    assert numbers(open_dataset(folder)) == []  # an empty shard has the class
    dataset.upsert(rows(0, 2))
    assert numbers(dataset) == [0, 1]


@pytest.mark.parametrize("deleted", [[], [0], [9], [0, 1, 2], [7, 8, 9], [3, 5, 6], list(range(10))])
def test_live_rows_are_the_rows_without_the_deleted_ones(deleted: list[int]) -> None:
    live = LiveRows(10, np.array(deleted, np.int64))
    expected = [n for n in range(10) if n not in deleted]
    assert len(live) == len(expected)
    assert live[np.arange(len(live))].tolist() == expected
    before = [sum(n < row for n in expected) for row in range(11)]
    assert live.count_before(np.arange(11)).tolist() == before
    for start in range(10):
        for stop in range(start, 11):
            between = live.between(start, stop)
            inside = [n for n in expected if start <= n < stop]
            assert (list(range(start, stop)) if between is None else between.tolist()) == inside


def test_row_numbers_are_stored_in_few_bytes() -> None:
    chosen = np.sort(np.random.default_rng(0).choice(200_000, 2000, replace=False))
    text = encode_rows(chosen)
    assert len(text) < 6000
    assert decode_rows(text).tolist() == chosen.tolist()
    assert decode_rows(encode_rows(np.zeros(0, np.int64))).tolist() == []


def test_delete_writes_one_small_file(folder: Path) -> None:
    before = files(folder)
    assert open_dataset(folder, Row).delete({"number": 5}) == 1
    after = files(folder)
    assert {name: after[name] for name in before} == before
    new = {name for name in after if name not in before}
    assert new == {
        "_quire/version-0000000000.v2.jsonl",
        "_quire/version-0000000001.v2.jsonl",
        "_quire/version-0000000002.v2.jsonl",
        "_quire/versions.json",
    }


def test_change_of_nothing_makes_no_version(folder: Path) -> None:
    dataset = open_dataset(folder, Row)
    assert dataset.delete({"number": -1}) == 0
    assert dataset.update({"number": -1}, number=3) == 0
    assert dataset.upsert([]) == (0, 0)
    assert dataset.version == 1
    dataset.compact(shard_bytes=1)
    assert dataset.version == 1


# --- bytes are removed


def test_deleted_bytes_are_gone_after_compact_and_cleanup(folder: Path) -> None:
    dataset = open_dataset(folder, Row)
    secret = b"secret-000033"
    write_dataset(dataset, folder.parent / "plain", format="arrow")  # texts of Arrow files are stored as they are
    dataset = open_dataset(folder.parent / "plain", Row)
    place = folder.parent / "plain"
    assert any(secret in content for content in files(place).values())
    dataset.tag("before")
    dataset.delete({"number": 33})
    dataset.compact()
    dataset.cleanup(NOW)
    assert any(secret in content for content in files(place).values()), "the tag keeps the version"
    dataset.untag("before")
    assert dataset.cleanup(NOW) > 0
    assert not any(secret in content for content in files(place).values())
    assert numbers(dataset) == [n for n in range(100) if n != 33]


def test_cleanup_keeps_recent_versions_and_files_of_writers_at_work(folder: Path) -> None:
    dataset = open_dataset(folder, Row)
    dataset.delete({"number": 33})
    dataset.compact()
    assert dataset.cleanup() == 0
    assert [version.number for version in dataset.versions()] == [1, 2, 3]
    with DatasetWriter(folder, Row, mode="append", group_bytes=1, shard_bytes=1) as writer:
        writer.write(rows(200, 203))
        dataset.cleanup(NOW)
        assert 200 not in numbers(open_dataset(folder, Row)), "an append is one step"
    assert numbers(open_dataset(folder, Row))[-3:] == [200, 201, 202]
    stray = next(folder.glob("*.arrow"), None) or next(folder.glob("*.parquet"))
    shutil.copy(stray, folder / f"{0:016x}-{1:08x}-00000{stray.suffix}")
    shutil.copy(stray, folder / f"abc-1{stray.suffix}")  # of another tool
    assert open_dataset(folder, Row).cleanup(NOW) > 0
    assert [path.name for path in folder.glob("abc*")] == [f"abc-1{stray.suffix}"]
    assert not list(folder.glob("0000*"))


# --- upsert and update


@pytest.mark.parametrize(
    ("documents", "key", "message"),
    [
        (lambda: [*rows(0, 2), *rows(1, 2)], "id", "documents 1 and 2 have the same 'id', 'r1'"),
        (lambda: rows(0, 3), "text", "document 1 has no 'text'"),
        (lambda: rows(0, 2), "words", "'words' is no key"),
        (lambda: rows(0, 1)[0], "id", "takes documents, batches"),
    ],
)
def test_upsert_without_unique_keys_changes_nothing(
    folder: Path, documents: Callable[[], Any], key: str, message: str
) -> None:
    dataset = open_dataset(folder, Row)
    dataset.tag("t")
    before = files(folder)
    with pytest.raises(OptionError, match=message):
        dataset.upsert(documents(), key=key)
    assert files(folder) == before


def test_upsert_with_an_unknown_key_or_a_failing_source_changes_nothing(folder: Path) -> None:
    dataset = open_dataset(folder, Row)
    dataset.tag("t")
    before = files(folder)
    with pytest.raises(PathError, match="has no field 'key'"):
        dataset.upsert(rows(0, 2), key="key")

    def failing() -> Any:
        yield from rows(0, 50)
        raise RuntimeError("the source failed")

    with pytest.raises(RuntimeError, match="the source failed"):
        dataset.upsert(failing())
    assert files(folder) == before


def test_upsert_replaces_every_row_with_the_key(tmp_path: Path) -> None:
    write_dataset([Row(id="a", number=1), Row(id="b", number=2), Row(id="a", number=3)], tmp_path)
    dataset = open_dataset(tmp_path, Row)
    assert dataset.upsert([{"id": "a", "number": 4}, {"id": "c", "number": 5}]) == (1, 1)  # type: ignore[list-item]
    assert [(row.id, row.number) for row in dataset] == [("b", 2), ("a", 4), ("c", 5)]
    assert dataset.upsert(dataset.read(), key="number") == (3, 0)


def test_update_is_checked_by_the_class(folder: Path) -> None:
    dataset = open_dataset(folder, Row)
    dataset.tag("t")
    before = files(folder)
    with pytest.raises(ValidationError, match="the number is too large"):
        dataset.update({"number": 5}, number=2_000_000)
    with pytest.raises(ValidationError):
        dataset.update({"number": 5}, number="many")
    with pytest.raises(PathError, match="no field 'numbr'. Did you mean 'number'"):
        dataset.update({"number": 5}, numbr=5)
    with pytest.raises(OptionError, match="pass the columns"):
        dataset.update({"number": 5})
    with pytest.raises(PathError, match="numbr"):
        dataset.delete({"numbr": 5})
    assert files(folder) == before
    assert dataset.update({"number": {"$lt": 3}}, text="new", words=[9]) == 3
    assert [(row.number, row.text, row.words) for row in dataset][-3:] == [(n, "new", [9]) for n in range(3)]


class Narrow(BaseDocument):
    id: str
    number: int


def test_rows_are_not_written_again_by_a_class_that_lacks_columns(folder: Path) -> None:
    dataset = open_dataset(folder, Narrow)
    dataset.delete({"number": 5})
    for act in (lambda: dataset.update({"number": 1}, number=2), dataset.compact):
        with pytest.raises(StorageError, match=r"writes rows again: Narrow has no field '(text|words)'"):
            act()
    assert len(open_dataset(folder, Row)) == 99


def test_only_the_latest_version_as_a_whole_is_changed(folder: Path) -> None:
    dataset = open_dataset(folder, Row)
    dataset.delete({"number": 1})
    for part, reason in (
        (open_dataset(folder, Row, version=1), "was opened at version 1"),
        (dataset.filter({"number": {"$gt": 3}}), "some of its rows were selected"),
        (dataset.narrow(["number"]), "some of its columns were selected"),
    ):
        with pytest.raises(StorageError, match=reason):
            part.upsert(rows(0, 1))
    with pytest.raises(StorageError, match="compares all rows, and some of this dataset were selected"):
        dataset.filter({"number": {"$gt": 3}}).diff(1)
    assert dataset.narrow(["number"]).delete({"text": "secret-000003"}) == 1
    pq.write_table(pa.table({"id": ["a"], "number": [1]}), folder.parent / "plain.parquet")
    for plain in (folder.parent / "plain.parquet",):
        with pytest.raises(StorageError, match="has no versions"):
            open_dataset(plain, Narrow).delete({})
        with pytest.raises(OptionError, match="only datasets in folders that quire wrote have versions"):
            open_dataset(plain, Narrow, version=1)


# --- versions by number, tag and time


def test_versions_are_opened_by_number_tag_and_time(folder: Path) -> None:
    dataset = open_dataset(folder, Row)
    start = datetime.now(timezone.utc)
    dataset.delete({"number": {"$lt": 10}})
    middle = datetime.now(timezone.utc)
    dataset.tag("train-1")
    dataset.delete({"number": {"$lt": 20}})
    assert [len(open_dataset(folder, Row, version=n)) for n in (1, 2, 3, 4)] == [100, 90, 90, 80]
    assert len(open_dataset(folder, Row, version="train-1")) == 90
    assert len(open_dataset(folder, Row, version="latest")) == 80
    assert [len(open_dataset(folder, Row, as_of=when)) for when in (start, middle)] == [100, 90]
    assert [(v.number, v.kind, v.rows, v.tags) for v in dataset.versions()] == [
        (1, "write", 100, ()),
        (2, "delete", 90, ("train-1",)),
        (3, "tag", 90, ()),
        (4, "delete", 80, ()),
    ]
    with pytest.raises(StorageNotFoundError, match=r"no tag 'train-2'. The tags are: 'train-1'"):
        open_dataset(folder, Row, version="train-2")
    with pytest.raises(StorageNotFoundError, match="no version 9; the latest is 4"):
        open_dataset(folder, Row, version=9)
    with pytest.raises(StorageNotFoundError, match="no version from"):
        open_dataset(folder, Row, as_of=datetime(2000, 1, 1, tzinfo=timezone.utc))
    with pytest.raises(OptionError, match="a datetime with a time zone"):
        open_dataset(folder, Row, as_of=datetime(2000, 1, 1))  # noqa: DTZ001
    with pytest.raises(OptionError, match="not by both"):
        open_dataset(folder, Row, version=1, as_of=start)
    with pytest.raises(OptionError, match="the number of a version or a tag"):
        open_dataset(folder, Row, version=True)
    with pytest.raises(OptionError, match="version 2 has the tag 'train-1' already"):
        dataset.tag("train-1")
    for name in ("latest", "", "a b", "../x"):
        with pytest.raises(OptionError, match="a tag has letters"):
            dataset.tag(name)
    with pytest.raises(OptionError, match="no tag 'b'"):
        dataset.untag("b")
    with pytest.raises(StorageError, match="would remove the versions with the tags 'train-1'"):
        write_dataset(rows(0, 1), folder, mode="overwrite")
    assert len(open_dataset(folder, Row, version="train-1")) == 90


def test_dataset_without_commits_has_one_version(folder: Path) -> None:
    dataset = open_dataset(folder, Row, version=1)
    assert [(v.number, v.kind, v.rows) for v in dataset.versions()] == [(1, "write", 100)]
    assert abs(dataset.versions()[0].time - datetime.now(timezone.utc)) < timedelta(minutes=10)
    with pytest.raises(StorageNotFoundError, match="has version 1 only"):
        open_dataset(folder, Row, version=2)
    write_dataset(rows(0, 5), folder, mode="overwrite")
    assert open_dataset(folder, Row).version == 2
    write_dataset(rows(5, 7), folder, mode="append")
    assert [(v.number, v.kind, v.rows) for v in open_dataset(folder, Row).versions()] == [
        (2, "write", 5),
        (3, "append", 7),
    ]


def test_many_versions_can_be_opened(folder: Path) -> None:
    dataset = open_dataset(folder, Row)
    for number in range(40):
        dataset.delete({"number": number})
    for version in range(1, 42):
        assert numbers(open_dataset(folder, Row, version=version)) == list(range(version - 1, 100))
    states = [n for n in range(1, 42) if VersionLog(dataset.folder).commit(n).state is not None]
    assert states == [1, 16, 32]
    dataset.tag("kept", 20)
    dataset.cleanup(NOW)
    assert numbers(open_dataset(folder, Row, version="kept")) == list(range(19, 100))
    with pytest.raises(StorageNotFoundError, match="version 5 was removed"):
        open_dataset(folder, Row, version=5)
    with pytest.raises(StorageNotFoundError, match="version 19 was removed"):
        open_dataset(folder, Row, version=19)
    assert len(list((folder / "_quire").glob("version-*"))) == 43 - 15 + 1, "1 to 15 are gone; the marker is left"
    assert len(dataset.diff(20, "latest").removed) == 21


# --- conflicts: another writer commits between reading the latest version and creating the next


@pytest.fixture
def meanwhile(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Return a function that lets another change happen before the next commit is created."""

    def prepare(act: Callable[[], object]) -> None:
        create, pending = VersionLog.write, [act]

        def write(self: VersionLog, build: Any) -> Any:
            def build_late(head: Any) -> Any:
                change = build(head)
                if pending and change is not None:
                    pending.pop()()
                return change

            return create(self, build_late)

        monkeypatch.setattr(VersionLog, "write", write)

    return prepare


def test_delete_applies_to_rows_that_were_appended_meanwhile(folder: Path, meanwhile: Any) -> None:
    dataset = open_dataset(folder, Row)
    meanwhile(lambda: write_dataset([*rows(3, 4), *rows(200, 202)], folder, mode="append"))
    assert dataset.delete({"number": 3}) == 2
    assert numbers(dataset) == [n for n in range(100) if n != 3] + [200, 201]


def test_upsert_finds_keys_that_were_appended_meanwhile(folder: Path, meanwhile: Any) -> None:
    dataset = open_dataset(folder, Row)
    meanwhile(lambda: open_dataset(folder, Row).upsert([Row(id="r3", number=-3), Row(id="x", number=-1)]))
    assert dataset.upsert([Row(id="r3", number=3000), Row(id="x", number=1000)]) == (2, 0)
    assert numbers(dataset) == [n for n in range(100) if n != 3] + [3000, 1000]


def test_update_does_not_bring_back_rows_that_were_deleted_meanwhile(folder: Path, meanwhile: Any) -> None:
    dataset = open_dataset(folder, Row)
    meanwhile(lambda: open_dataset(folder, Row).delete({"number": 3}))
    assert dataset.update({"number": {"$lt": 5}}, text="new") == 4
    assert numbers(dataset) == [*range(5, 100), 0, 1, 2, 4]
    meanwhile(lambda: write_dataset(rows(98, 99), folder, mode="append"))
    assert dataset.update({"number": 98}, text="new") == 2
    meanwhile(lambda: open_dataset(folder, Row).compact())
    assert dataset.update({"number": 97}, text="new") == 1
    assert sorted(numbers(dataset)) == sorted([n for n in range(100) if n != 3] + [98])


def test_compaction_of_a_shard_that_was_changed_meanwhile_is_a_conflict(folder: Path, meanwhile: Any) -> None:
    dataset = open_dataset(folder, Row)
    dataset.delete({"number": 3})
    meanwhile(lambda: open_dataset(folder, Row).delete({"number": 4}))
    shards = sorted(path.name for path in folder.glob("*.*"))
    with pytest.raises(ConflictError, match="another writer changed rows of the shard"):
        dataset.compact()
    assert sorted(path.name for path in folder.glob("*.*")) == shards
    assert len(open_dataset(folder, Row)) == 98
    meanwhile(lambda: write_dataset(rows(200, 202), folder, mode="append"))
    dataset.compact()
    assert numbers(dataset) == [n for n in range(100) if n not in (3, 4)] + [200, 201]


def test_update_that_always_comes_too_late_is_a_conflict(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = open_dataset(folder, Row)
    dataset.tag("t")
    write = VersionLog.write

    def always_late(self: VersionLog, build: Any) -> Any:
        def build_late(head: Any) -> Any:
            change = build(head)
            monkeypatch.setattr(VersionLog, "write", write)
            number = int(open_dataset(folder, Row)[0].number)
            open_dataset(folder, Row).delete({"number": number})
            monkeypatch.setattr(VersionLog, "write", always_late)
            return change

        return write(self, build_late)

    monkeypatch.setattr(VersionLog, "write", always_late)
    with pytest.raises(ConflictError, match="other writers changed the same rows 8 times"):
        dataset.update({"number": {"$gte": 0}}, text="new")
    monkeypatch.setattr(VersionLog, "write", write)
    assert len(open_dataset(folder, Row)) == 92
    assert {row.text for row in open_dataset(folder, Row)}.isdisjoint({"new"})


def test_append_to_a_dataset_that_was_overwritten_is_an_error(folder: Path) -> None:
    open_dataset(folder, Row).delete({"number": 3})
    writer = DatasetWriter(folder, Row, mode="append")
    writer.write(rows(200, 202))
    write_dataset(rows(0, 2), folder, mode="overwrite")
    with pytest.raises(StorageError, match="another writer has overwritten the dataset"):
        writer.close()
    assert numbers(open_dataset(folder, Row)) == [0, 1]


def test_shards_stay_if_the_answer_to_the_commit_was_lost(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = open_dataset(folder, Row)
    dataset.tag("t")
    create = type(dataset.folder).create

    def lose_answer(self: Folder, name: str, content: bytes) -> None:
        create(self, name, content)
        raise StorageError("the connection broke off")

    monkeypatch.setattr(type(dataset.folder), "create", lose_answer)
    with pytest.raises(StorageError, match="broke off"):
        dataset.upsert([Row(id="x", number=-1)])
    monkeypatch.undo()
    assert numbers(open_dataset(folder, Row))[-1] == -1


def test_commit_whose_number_was_cleaned_up_does_not_count(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process is stopped before it creates a commit; meanwhile the number is used, and removed by cleanup."""
    dataset = open_dataset(folder, Row)
    dataset.tag("t")
    dataset.untag("t")
    create, pending = type(dataset.folder).create, [True]

    def late(self: Folder, name: str, content: bytes) -> None:
        if pending:
            pending.clear()
            other = open_dataset(folder, Row)
            for number in range(20):
                other.delete({"number": number})
            other.cleanup(NOW)
        create(self, name, content)

    monkeypatch.setattr(type(dataset.folder), "create", late)
    assert dataset.delete({"number": 50}) == 1
    assert numbers(open_dataset(folder, Row)) == [n for n in range(20, 100) if n != 50]
    assert not (folder / "_quire/version-0000000004.v2.jsonl").exists()


def test_first_commit_has_shards_that_were_finished_meanwhile(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that knows of no commits finishes after another one has read the logs, and before it commits."""
    empty = folder.parent / "new"
    first, second = (DatasetWriter(empty, Row, mode="append") for _ in range(2))
    first.write(rows(0, 3))
    second.write(rows(3, 6))
    first.close()
    create, pending = Folder.create, [second]
    local = type(open_dataset(folder, Row).folder)
    create = local.create

    def late(self: Folder, name: str, content: bytes) -> None:
        if name.endswith("1.v2.jsonl") and pending:
            pending.pop().close()
        create(self, name, content)

    monkeypatch.setattr(local, "create", late)
    assert open_dataset(empty, Row).delete({"number": 0}) == 1
    assert sorted(numbers(open_dataset(empty, Row))) == [1, 2, 3, 4, 5]


# --- files


def test_earlier_versions_of_quire_refuse_the_dataset(folder: Path) -> None:
    open_dataset(folder, Row).delete({"number": 3})
    for name in ("version-0000000000.v2.jsonl", "version-0000000002.v2.jsonl"):
        with pytest.raises(StorageError, match="reading this dataset requires versions"):
            list(_read_lines(open_logs(str(folder)), name))


def test_damaged_commit_is_an_error(folder: Path) -> None:
    dataset = open_dataset(folder, Row)
    dataset.delete({"number": 3})
    commit = folder / "_quire/version-0000000002.v2.jsonl"
    content = commit.read_bytes()
    for place in range(0, len(content) - 1, 7):
        commit.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
        with pytest.raises(ShardError, match=r"version-0000000002\.v2\.jsonl: the commit is damaged"):
            open_dataset(folder, Row)
    commit.write_bytes(content[:-40])
    with pytest.raises(ShardError, match="damaged"):
        open_dataset(folder, Row)
    line = {**json.loads(content), "requires": ["versions", "chapters"]}
    del line["sum"]
    commit.write_text(encode_line(line) + "\n")
    with pytest.raises(StorageError, match="requires chapters, which this version of quire does not support"):
        open_dataset(folder, Row)
    commit.write_text(encode_line({"requires": ["versions"], "commit": 2}) + "\n")
    with pytest.raises(StorageError, match="does not describe a commit"):
        open_dataset(folder, Row)
    shutil.copy(folder / "_quire/version-0000000001.v2.jsonl", commit)
    with pytest.raises(ShardError, match="the file has commit 1"):
        open_dataset(folder, Row)


def test_marker_alone_changes_nothing(folder: Path) -> None:
    marker = encode_line({"requires": ["versions"], "commit": 0})
    (folder / "_quire/version-0000000000.v2.jsonl").write_text(marker + "\n")
    assert numbers(open_dataset(folder, Row)) == list(range(100))
    write_dataset(rows(100, 102), folder, mode="append")
    assert numbers(open_dataset(folder, Row)) == list(range(102))


def test_resume_is_refused_after_rows_were_changed(folder: Path) -> None:
    write_dataset(rows(100, 110), folder, mode="append")
    write_dataset(rows(0, 120), folder, mode="resume")
    assert numbers(open_dataset(folder, Row)) == list(range(120))
    open_dataset(folder, Row).delete({"number": 3})
    with pytest.raises(StorageError, match="mode='resume' skips as many documents"):
        write_dataset(rows(0, 130), folder, mode="resume")


def test_stores_that_cannot_list_files_have_versions(folder: Path) -> None:
    from quire.storage import _manifest

    dataset = open_dataset(folder, Row)
    for number in range(3):
        dataset.delete({"number": number})
    logs = open_logs(str(folder))
    assert _manifest.list_commits(logs) == [0, 1, 2, 3, 4]

    class Unlistable:
        def list(self, *_: Any) -> Any:
            raise StorageError("this server lists nothing")

        def local_path(self, _: str) -> None:
            return None

        def __getattr__(self, name: str) -> Any:
            return getattr(logs, name)

    assert _manifest.list_commits(Unlistable()) == [1, 2, 3, 4]  # type: ignore[arg-type]
    _manifest.write_latest(dataset.folder, 1, 2)
    assert _manifest.list_commits(Unlistable()) == [1, 2, 3, 4], "later ones are found"  # type: ignore[arg-type]


# --- object stores


@pytest.fixture
def server() -> Any:
    with run_s3_server() as server:
        yield server


def test_versions_in_an_object_store(server: S3Server, tmp_path: Path) -> None:
    remote = server.options()
    url = "s3://bucket/data"
    write_dataset(rows(0, 100), url, Row, format="arrow", remote=remote, group_bytes=700, shard_bytes=1500)
    options: dict[str, Any] = {"remote": remote, "cache": tmp_path / "cache"}
    first, second = (open_dataset(url, Row, **options) for _ in range(2))
    assert first.delete({"number": {"$lt": 10}}) == 10
    assert second.upsert([Row(id="r5", number=5), Row(id="r20", number=-20)]) == (1, 1)
    with pytest.raises(StorageExistsError):
        second.folder.create("_quire/version-0000000003.v2.jsonl", b"")
    assert first.update({"number": 99}, text="x") == 1
    expected = [*range(10, 20), *range(21, 99), 5, -20, 99]
    assert numbers(open_dataset(url, Row, **options)) == numbers(first) == expected
    first.compact()
    assert numbers(open_dataset(url, Row, **options)) == expected
    assert len(open_dataset(url, Row, version=1, **options)) == 100
    assert first.cleanup(NOW) > 0
    assert numbers(open_dataset(url, Row, **options)) == expected


def test_concurrent_change_is_found_by_the_conditional_put(server: S3Server, tmp_path: Path) -> None:
    remote = server.options()
    url = "s3://bucket/data"
    write_dataset(rows(0, 10), url, Row, remote=remote)
    options: dict[str, Any] = {"remote": remote, "cache": tmp_path / "cache"}
    first = open_dataset(url, Row, **options)
    create, pending = type(first.folder).create, [True]

    def late(self: Any, name: str, content: bytes) -> None:
        if "version-" in name and name.endswith("2.v2.jsonl") and pending:
            pending.clear()
            assert open_dataset(url, Row, **options).delete({"number": 3}) == 1
        create(self, name, content)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(first.folder), "create", late)
        assert first.delete({"number": {"$lte": 3}}) == 3
    assert numbers(open_dataset(url, Row, **options)) == [4, 5, 6, 7, 8, 9]
    assert first.version == 3
