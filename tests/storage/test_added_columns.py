"""Columns that are added to a stored dataset: side files, and every way to read them."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest

from quire import BaseDocument
from quire.data import StreamingDataset
from quire.distributed import DocumentShards, engine
from quire.errors import (
    ColumnError,
    ConflictError,
    DocumentTypeError,
    OptionError,
    ShardError,
    StorageError,
)
from quire.storage import Pages, column_statistics, null_counts, open_dataset, write_dataset
from quire.storage._versions import VersionLog
from quire.tensors import Shape
from tests.codec.round_trips import exact
from tests.files.s3_server import S3Server, run_s3_server
from tests.storage.golden import FOLDER, Color, Golden, Values, documents, value_document

pytestmark = pytest.mark.needs("pyarrow", "xxhash", "fsspec", "obstore", "polars")
NOW = timedelta(0)


class Row(BaseDocument):
    id: str
    number: int
    text: str | None = None


class Embedded(Row):
    vector: Annotated[np.ndarray, Shape(3)]
    label: str | None


class Scored(Embedded):
    score: float


def rows(start: int, stop: int) -> list[Row]:
    return [Row(id=f"r{n}", number=n, text=None if n % 3 else f"text-{n}") for n in range(start, stop)]


def vector(number: int) -> list[float]:
    return [number, number + 0.5, -number]


def embed(batch: Any) -> dict[str, Any]:
    numbers = np.asarray(batch.number)
    return {
        "vector": np.stack([numbers, numbers + 0.5, -numbers], axis=1).astype(np.float64),
        "label": [None if n % 2 else f"label-{n}" for n in numbers.tolist()],
    }


def check_rows(rows_read: Any, numbers: list[int]) -> None:
    """Check that documents have these numbers, in order, and the columns that belong to them."""
    rows_read = list(rows_read)
    assert [row.number for row in rows_read] == numbers
    for row in rows_read:
        assert row.id == f"r{row.number}"
        assert row.text == (None if row.number % 3 else f"text-{row.number}")
        assert row.vector.tolist() == vector(row.number)
        assert row.label == (None if row.number % 2 else f"label-{row.number}")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path / "cache"))


@pytest.fixture(params=["parquet", "arrow"])
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A dataset of 100 rows in several shards and blocks, of which 4 are deleted."""
    write_dataset(rows(0, 100), tmp_path / "data", format=request.param, group_bytes=700, shard_bytes=800)
    open_dataset(tmp_path / "data", Row).delete({"number": {"$in": [3, 40, 41, 99]}})
    return tmp_path / "data"


LIVE = [n for n in range(100) if n not in (3, 40, 41, 99)]


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def side_files(folder: Path) -> list[Path]:
    return sorted((folder / "_quire" / "columns").glob("*.arrow"))


# --- every way of reading


@pytest.mark.parametrize("verify", ["first_touch", "always", "never"])
def test_every_way_of_reading_has_the_new_columns(folder: Path, verify: Any) -> None:
    added = open_dataset(folder, Row).add_columns(embed, Embedded, batch_size=7)
    assert len(added.shards) > 1
    for dataset in (
        added,
        open_dataset(folder, Embedded, verify=verify),
        pickle.loads(pickle.dumps(open_dataset(folder, Embedded, verify=verify))),
    ):
        check_rows(dataset, LIVE)
        check_rows(dataset.read(), LIVE)
        places = [90, 0, 41, 3, 3, 95]
        check_rows(dataset.take(places), [LIVE[place] for place in places])
        check_rows((row for batch in dataset.iter_batches(11) for row in batch), LIVE)
        check_rows(dataset.filter({"label": {"$in": ["label-8", "label-90"]}}), [8, 90])
        check_rows(dataset.filter(lambda row: row.vector[0] > 95), [96, 97, 98])
        assert dataset["label"][:2] == ["label-0", None]
        assert np.asarray(dataset.narrow(["vector"]).take([1]).vector).tolist() == [vector(1)]
        assert [row.number for row in dataset.narrow(["number"])] == LIVE
        nearest, _ = dataset.find(np.array(vector(7)), "vector", metric="euclidean", limit=1)
        check_rows(nearest, [7])
        dataset.verify()
    check_rows(open_dataset(folder, Embedded, where={"label": {"$in": ["label-6"]}}), [6])


def test_other_readers_have_the_new_columns(folder: Path) -> None:
    dataset = open_dataset(folder, Row).add_columns(embed, Embedded)
    frame = pl.DataFrame(dataset)
    assert frame["label"].to_list() == [None if n % 2 else f"label-{n}" for n in LIVE]
    pages = Pages(dataset)
    labels = [label for _, columns in pages.blocks(30) for label in columns.columns["label"].values()]
    assert labels == [None if n % 2 else f"label-{n}" for n in LIVE]
    assert column_statistics(dataset, ["label"])["label"].missing == sum(n % 2 for n in LIVE)
    assert null_counts(dataset, [("label",)]) == {}
    assert dataset.null_count("label") is None


def test_streams_have_the_new_columns(folder: Path) -> None:
    open_dataset(folder, Row).add_columns(embed, Embedded)
    shuffles: list[Any] = [False, "block", "interleaved", "global"]
    for shuffle in shuffles:
        stream = StreamingDataset[Embedded](str(folder), 8, framework="numpy", shuffle=shuffle)
        rows_read = [row for batch in stream for row in batch]
        check_rows(sorted(rows_read, key=lambda row: row.number), LIVE)


def test_class_of_the_new_columns_is_inferred(folder: Path) -> None:
    open_dataset(folder, Row).add_columns(embed, Embedded)
    assert open_dataset(folder).document_type is Embedded
    check_rows(open_dataset(folder), LIVE)


def test_earlier_class_and_earlier_version_are_read_without_the_columns(folder: Path) -> None:
    before = open_dataset(folder, Row)
    number = before.version
    before.add_columns(embed, Embedded)
    assert [row.number for row in before] == LIVE
    assert before.version == number + 1
    earlier: Any = open_dataset(folder, version=number)
    assert earlier.document_type is Row
    assert [row.number for row in earlier] == LIVE
    with pytest.raises(ShardError, match="vector"):
        open_dataset(folder, Embedded, version=number).read()


def test_engine_reads_the_new_columns(folder: Path) -> None:
    open_dataset(folder, Row).add_columns(embed, Embedded)
    read = DocumentShards[Embedded].read_parquet(folder, engine=engine("local", num_workers=2))
    check_rows(sorted(read.collect(), key=lambda row: row.number), LIVE)


class Everything(Golden):
    added: Values | None
    moment_of: datetime
    tint: Color
    items_of: list[int]
    sizes: np.ndarray


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.parametrize("version", ["v1", "v2"])
def test_columns_of_every_kind_are_added_to_earlier_formats(tmp_path: Path, version: str, kind: str) -> None:
    shutil.copytree(FOLDER / version / kind, tmp_path / "rows")
    values = [None if n == 3 else value_document(n) for n in range(6)]

    def compute(batch: Any) -> dict[str, Any]:
        numbers = [int(row.id[1:]) for row in batch]
        return {
            "added": [values[n] for n in numbers],
            "moment_of": [value_document(n).zoned for n in numbers],
            "tint": [value_document(n).color for n in numbers],
            "items_of": [list(range(n)) for n in numbers],
            "sizes": [np.arange(n, dtype=np.float32) for n in numbers],
        }

    dataset = open_dataset(tmp_path / "rows", Golden).add_columns(compute, Everything, batch_size=1)
    for merged in (False, True):
        if merged:
            dataset.compact()
        for rows_read in (list(dataset), list(dataset.take([0, 1, 2, 3, 4, 5]))):
            assert exact(
                [Golden(**{name: row[name] for name in Golden.model_fields}) for row in map(dict, rows_read)],
                documents(),
            )
            assert exact([row.added for row in rows_read if row.added], [value for value in values if value])
            assert [row.moment_of for row in rows_read] == [value_document(n).zoned for n in range(6)]
            assert [row.tint for row in rows_read] == [value_document(n).color for n in range(6)]
            assert [list(row.items_of) for row in rows_read] == [list(range(n)) for n in range(6)]
            assert [row.sizes.tolist() for row in rows_read] == [list(range(n)) for n in range(6)]
        dataset.verify()


# --- what is written


def test_no_byte_is_rewritten_and_one_commit_is_written(folder: Path) -> None:
    before = files(folder)
    dataset = open_dataset(folder, Row)
    added = dataset.add_columns(embed, Embedded)
    after = files(folder)
    changed = {name for name in before if after[name] != before[name]}
    assert changed <= {"_quire/versions.json"}
    new = sorted(after.keys() - before.keys())
    assert [name for name in new if "/columns/" not in name] == [f"_quire/version-{added.version:010d}.v2.jsonl"]
    assert len(side_files(folder)) == len(added.shards)
    assert b'"requires":["versions","columns"]' in after[f"_quire/version-{added.version:010d}.v2.jsonl"]
    assert added.versions()[-1].kind == "columns"
    assert added.diff(added.version - 1)[0].read().number.tolist() == []


def test_side_file_has_a_row_for_each_stored_row_in_the_same_blocks(folder: Path) -> None:
    added = open_dataset(folder, Row).add_columns(embed, Embedded)
    for shard in added.shards:
        [side] = shard.sides
        assert (side.rows, side.fields) == (shard.rows, ("vector", "label"))
        reader = pa.ipc.open_file(folder / side.name)
        assert reader.num_record_batches == (shard.blocks or len(shard.groups))
        assert reader.schema.names == ["vector", "label"]


def test_state_of_a_later_commit_has_the_columns(folder: Path) -> None:
    dataset = open_dataset(folder, Row).add_columns(embed, Embedded)
    for n in range(20):  # every 16th commit has the whole state
        dataset.tag(f"t{n}")
    assert VersionLog(dataset.folder).commit(16).state is not None
    assert b'"requires":["versions","columns"]' in files(folder)["_quire/version-0000000016.v2.jsonl"]
    check_rows(open_dataset(folder, Embedded), LIVE)


def test_columns_are_added_twice(folder: Path) -> None:
    dataset = open_dataset(folder, Row).add_columns(embed, Embedded)

    def score(batch: Any) -> dict[str, Any]:
        return {"score": np.asarray(batch.vector)[:, 1]}

    scored = dataset.add_columns(score, Scored)
    check_rows(scored, LIVE)
    assert [row.score for row in scored.take(list(range(96)))] == [n + 0.5 for n in LIVE]
    assert scored.compact() > 0
    assert not any(shard.sides for shard in scored.shards)
    assert [row.score for row in scored] == [n + 0.5 for n in LIVE]


def test_function_may_return_a_batch(folder: Path) -> None:
    def embed_all(batch: Any) -> Any:
        return batch.with_columns(Embedded, **embed(batch))

    check_rows(open_dataset(folder, Row).add_columns(embed_all, Embedded), LIVE)


# --- changes after columns were added


def test_rows_are_changed_after_columns_were_added(folder: Path) -> None:
    dataset = open_dataset(folder, Row).add_columns(embed, Embedded)
    dataset.tag("added")
    assert dataset.delete({"label": "label-10"}) == 1
    other = Embedded(id="r11", number=11, text=None, vector=np.array(vector(11)), label=None)
    new = Embedded(id="r300", number=300, text="text-300", vector=np.array(vector(300)), label="label-300")
    assert dataset.upsert([other, new]) == (1, 1)
    assert dataset.update({"label": "label-12"}, label="changed") == 1
    kept = [n for n in LIVE if n not in (10, 11, 12)]
    assert [row.number for row in dataset] == [*kept, 11, 300, 12]
    check_rows([row for row in dataset if row.number != 12], [*kept, 11, 300])
    assert dataset[len(dataset) - 1].label == "changed"
    added, removed = dataset.diff("added")
    assert [row.number for row in added] == [11, 300, 12]
    check_rows(removed, [10, 11, 12])


def test_documents_are_appended_after_columns_were_added(folder: Path) -> None:
    open_dataset(folder, Row).add_columns(embed, Embedded)
    more = [Embedded(id="r3", number=3, text="text-3", vector=np.array(vector(3)), label=None)]
    write_dataset(more, folder, mode="append")
    check_rows(open_dataset(folder, Embedded), [*LIVE, 3])


def test_compaction_merges_columns_and_cleanup_removes_side_files(folder: Path) -> None:
    dataset = open_dataset(folder, Row).add_columns(embed, Embedded)
    assert dataset.compact() > 0
    assert not any(shard.sides for shard in dataset.shards)
    check_rows(dataset, LIVE)
    assert side_files(folder)
    dataset.cleanup(NOW)
    assert side_files(folder) == []
    check_rows(open_dataset(folder, Embedded), LIVE)


def test_compaction_with_the_earlier_class_is_refused(folder: Path) -> None:
    dataset = open_dataset(folder, Row)
    dataset.add_columns(embed, Embedded)
    with pytest.raises(StorageError, match="vector"):
        dataset.compact()
    check_rows(open_dataset(folder, Embedded), LIVE)


def test_cleanup_keeps_side_files_that_a_version_needs(folder: Path) -> None:
    dataset = open_dataset(folder, Row).add_columns(embed, Embedded)
    dataset.cleanup(NOW, uncommitted=NOW)
    check_rows(open_dataset(folder, Embedded), LIVE)


def test_overwriting_removes_side_files(folder: Path) -> None:
    open_dataset(folder, Row).add_columns(embed, Embedded)
    write_dataset(rows(0, 3), folder, mode="overwrite")
    assert side_files(folder) == []
    assert [row.number for row in open_dataset(folder, Row)] == [0, 1, 2]


def test_columns_added_during_a_compaction_are_a_conflict(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset, other = open_dataset(folder, Row), open_dataset(folder, Row)
    write = VersionLog.write

    def add_first(self: VersionLog, build: Any) -> Any:
        monkeypatch.setattr(VersionLog, "write", write)
        other.add_columns(embed, Embedded)
        return write(self, build)

    monkeypatch.setattr(VersionLog, "write", add_first)
    with pytest.raises(ConflictError):
        dataset.compact()
    check_rows(open_dataset(folder, Embedded), LIVE)


def test_rows_appended_while_columns_are_computed_get_them(folder: Path) -> None:
    appended = threading.Event()

    def slow(batch: Any) -> dict[str, Any]:
        if not appended.is_set():
            appended.set()
            write_dataset(rows(100, 130), folder, mode="append")
            open_dataset(folder, Row).delete({"number": 7})
        return embed(batch)

    added = open_dataset(folder, Row).add_columns(slow, Embedded, workers=1)
    check_rows(added, [*(n for n in LIVE if n != 7), *range(100, 130)])


# --- errors change nothing


def no_label(batch: Any) -> Any:
    return {"vector": embed(batch)["vector"]}


def too_many(batch: Any) -> Any:
    return {**embed(batch), "other": [0] * len(batch)}


def too_few(batch: Any) -> Any:
    return {**embed(batch), "label": ["x"] * (len(batch) - 1)}


def wrong_shape(batch: Any) -> Any:
    return {**embed(batch), "vector": np.zeros((len(batch), 4))}


def no_mapping(batch: Any) -> Any:
    return embed(batch)["vector"]


def failing(batch: Any) -> Any:
    if 50 in batch.number.tolist():
        raise ValueError("row 50")
    return embed(batch)


@pytest.mark.parametrize(
    ("function", "error", "match"),
    [
        (no_label, OptionError, "'label'"),
        (too_many, OptionError, "'other'"),
        (too_few, ColumnError, "values"),
        (wrong_shape, Exception, "vector"),
        (no_mapping, OptionError, "by name"),
        (failing, ValueError, "row 50"),
        ("embed", OptionError, "function"),
    ],
)
def test_functions_that_fail_change_nothing(folder: Path, function: Any, error: Any, match: str) -> None:
    dataset = open_dataset(folder, Row)
    before, version = files(folder), dataset.version
    with pytest.raises(error, match=match):
        dataset.add_columns(function, Embedded)
    left = {name: content for name, content in files(folder).items() if "/columns/" not in name}
    assert left == before
    assert open_dataset(folder, Row).version == dataset.version == version
    dataset.cleanup(NOW, uncommitted=NOW)
    assert side_files(folder) == []


class Other(BaseDocument):
    id: str
    label: str


class Retyped(Row):
    number: float  # type: ignore[assignment]
    label: str


@pytest.mark.parametrize(
    ("document_type", "match"),
    [(Other, "lacks the field 'number'"), (Retyped, "another type"), (Row, "no field"), (dict, "document class")],
)
def test_classes_that_do_not_extend_the_stored_one_are_refused(folder: Path, document_type: Any, match: str) -> None:
    before = files(folder)
    with pytest.raises(DocumentTypeError, match=match):
        open_dataset(folder, Row).add_columns(embed, document_type)
    assert files(folder) == before


def test_columns_that_exist_are_refused(folder: Path) -> None:
    open_dataset(folder, Row).add_columns(embed, Embedded)
    before = files(folder)
    with pytest.raises(StorageError, match=r"label, vector already"):
        open_dataset(folder, Row).add_columns(embed, Embedded)
    assert files(folder) == before


def test_parts_of_a_dataset_are_refused(folder: Path) -> None:
    dataset = open_dataset(folder, Row)
    for part in (dataset.filter({"number": 1}), dataset.narrow(["number"]), open_dataset(folder, Row, version=1)):
        with pytest.raises(StorageError, match="add_columns"):
            part.add_columns(embed, Embedded)
    choices: list[dict[str, Any]] = [{"batch_size": 0}, {"workers": 0}]
    for options in choices:
        with pytest.raises(OptionError, match=next(iter(options))):
            dataset.add_columns(embed, Embedded, **options)


@pytest.mark.parametrize("read", ["take", "iterate", "verify"])
def test_damaged_side_file_is_an_error_that_names_it(folder: Path, read: str) -> None:
    added = open_dataset(folder, Row).add_columns(embed, Embedded)
    path = folder / added.shards[0].sides[0].name
    content = bytearray(path.read_bytes())
    table = added.shards[0].sides[0].table
    assert table is not None
    place = content.index(np.array(vector(5)).tobytes())
    assert place < table[0]
    content[place] ^= 1
    path.chmod(0o644)
    path.write_bytes(content)
    dataset = open_dataset(folder, Embedded)
    with pytest.raises(ShardError, match=path.name):
        if read == "take":
            dataset.take([4])
        elif read == "iterate":
            list(dataset)
        else:
            dataset.verify()
    assert open_dataset(folder, Row).take([4]).number.tolist() == [5]


def test_missing_side_file_is_an_error_that_names_it(folder: Path) -> None:
    added = open_dataset(folder, Row).add_columns(embed, Embedded)
    path = folder / added.shards[0].sides[0].name
    path.unlink()
    with pytest.raises(ShardError, match=path.name):
        open_dataset(folder, Embedded).take([4])


# --- resuming


def test_finished_side_files_are_used_again(folder: Path) -> None:
    calls: list[int] = []
    fails = True

    def work(batch: Any) -> Any:
        if fails and 60 in batch.number.tolist():
            raise ValueError("interrupted")
        calls.extend(batch.number.tolist())
        return embed(batch)

    with pytest.raises(ValueError, match="interrupted"):
        open_dataset(folder, Row).add_columns(work, Embedded, workers=1, batch_size=5)
    finished = {path: path.read_bytes() for path in side_files(folder)}
    calls.clear()
    fails = False
    added = open_dataset(folder, Row).add_columns(work, Embedded, workers=1, batch_size=5)
    check_rows(added, LIVE)
    assert finished
    assert len(calls) < 100
    assert all(path.read_bytes() == content for path, content in finished.items())
    assert set(finished) <= set(side_files(folder))
    assert len(side_files(folder)) == len(added.shards)


def test_interrupted_call_with_another_plan_is_refused(folder: Path) -> None:
    fails = True

    def first(batch: Any) -> Any:
        if fails and 99 in batch.number.tolist():
            raise ValueError("interrupted")
        return embed(batch)

    with pytest.raises(ValueError, match="interrupted"):
        open_dataset(folder, Row).add_columns(first, Embedded, workers=1)
    assert side_files(folder)
    before = files(folder)
    with pytest.raises(StorageError, match="restart=True"):
        open_dataset(folder, Row).add_columns(embed, Embedded)
    assert files(folder) == before
    check_rows(open_dataset(folder, Row).add_columns(embed, Embedded, restart=True), LIVE)


_PROGRAM = """
import os, sys, time
from pathlib import Path
from quire.storage import open_dataset
from tests.storage.test_added_columns import Embedded, Row, embed

folder, marks = sys.argv[1:]

def work(batch):
    Path(marks, f"{batch.number.tolist()[0]}-{os.getpid()}").touch()
    time.sleep(0.02)
    return embed(batch)

open_dataset(folder, Row).add_columns(work, Embedded, batch_size=4, workers=1)
"""


def test_killed_process_is_continued(tmp_path: Path) -> None:
    folder, marks = tmp_path / "data", tmp_path / "marks"
    marks.mkdir()
    for start in range(0, 100, 20):
        write_dataset(rows(start, start + 20), folder, mode="append" if start else "create", format="arrow")
    command = [sys.executable, "-c", _PROGRAM, str(folder), str(marks)]
    process = subprocess.Popen(command)
    while process.poll() is None and len(side_files(folder)) < 2:
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    finished = side_files(folder)
    assert 2 <= len(finished) < 5
    assert open_dataset(folder).document_type is Row
    with pytest.raises(ShardError, match="vector"):
        open_dataset(folder, Embedded).read()
    for mark in marks.iterdir():
        mark.unlink()
    subprocess.run(command, check=True)
    check_rows(open_dataset(folder, Embedded), list(range(100)))
    again = {int(mark.name.partition("-")[0]) // 20 for mark in marks.iterdir()}
    assert len(again) == 5 - len(finished)
    assert set(finished) <= set(side_files(folder))


# --- object stores


@pytest.fixture
def server() -> Iterator[S3Server]:
    with run_s3_server() as server:
        yield server


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_columns_in_an_object_store(server: S3Server, tmp_path: Path, kind: Any) -> None:
    remote, url = server.options(), "s3://bucket/data"
    write_dataset(rows(0, 100), url, Row, format=kind, remote=remote, group_bytes=700, shard_bytes=800)
    options: dict[str, Any] = {"remote": remote, "cache": tmp_path / "cache"}
    dataset = open_dataset(url, Row, **options)
    dataset.delete({"number": {"$in": [3, 40, 41, 99]}})
    check_rows(dataset.add_columns(embed, Embedded), LIVE)
    again = open_dataset(url, Embedded, **options)
    check_rows(again.take([90, 0, 41]), [LIVE[90], LIVE[0], LIVE[41]])
    again.upsert([Embedded(id="r1", number=1, vector=np.array(vector(1)), label=None)])
    check_rows(again.take([95, 0, 94]), [1, 0, 98])  # shards with and without side files
    stream = StreamingDataset[Embedded](open_dataset(url, Embedded, **options), 8, framework="numpy")
    rows_read = [row for batch in stream for row in batch]
    check_rows(sorted(rows_read, key=lambda row: row.number), LIVE)
    again.compact()
    assert again.cleanup(NOW) > 0
    check_rows(open_dataset(url, Embedded, **options), [0, *LIVE[2:], 1])
