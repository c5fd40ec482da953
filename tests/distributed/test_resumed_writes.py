"""Datasets written from shards by a program that is interrupted, and continued with mode='resume'."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from quire import BaseDocument
from quire.distributed import DocumentShards
from quire.errors import OptionError, PartitionError, StorageError
from quire.storage import open_dataset, write_dataset

pytestmark = [
    pytest.mark.needs("pyarrow", "ray", "pyspark", "xxhash"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(600),
]
ROWS, PARTITIONS = 40, 8


class Row(BaseDocument):
    number: int


def logged(row: Row, log: str, failing: int | None = None) -> Row:
    """Note which rows are computed, in a file, and fail on one of them."""
    if row.number == failing:
        raise ValueError("this one")
    with Path(log).open("a") as file:
        file.write(f"{row.number}\n")
    return row


def computed(log: Path) -> list[int]:
    numbers = sorted(map(int, log.read_text().split()))
    log.unlink()
    return numbers


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_dataset([Row(id=f"{n}", number=n) for n in range(ROWS)], tmp_path / "source", shard_bytes=1, group_bytes=100)
    return tmp_path / "source"


def read(source: Path, engine: Any = "local") -> DocumentShards[Row]:
    return DocumentShards[Row].read_parquet(source, num_partitions=PARTITIONS, engine=engine)


def numbers_in(folder: Path) -> list[int]:
    return list(open_dataset(folder, Row)[:].number)


def rows_noted(folder: Path) -> int:
    """Return how many rows are in the files of partitions that are known to be complete."""
    notes = [json.loads(path.read_text()) for path in folder.glob(".*.complete.json")]
    return sum(shard["rows"] for note in notes for shard in json.loads(note["shards"]))


def leftovers(folder: Path) -> list[str]:
    """Return the files that do not belong to the dataset."""
    listed = {shard.name for shard in open_dataset(folder, Row).shards}
    return [path.name for path in folder.iterdir() if path.is_file() and path.name not in listed]


def test_only_missing_partitions_are_computed_on_every_engine(engine: Any, source: Path, tmp_path: Path) -> None:
    target, log = tmp_path / "target", tmp_path / "log"
    with pytest.raises(PartitionError, match="this one"):
        read(source, engine).map(logged, str(log), ROWS - 1).write_dataset(target, mode="resume")
    log.unlink()
    complete = rows_noted(target)  # by the partitions that were complete when the last one failed
    assert 0 < complete < ROWS
    shards = read(source, engine).map(logged, str(log), None)
    shards.write_dataset(target, mode="resume")
    assert len(computed(log)) <= ROWS - complete
    assert numbers_in(target) == list(range(ROWS))
    assert leftovers(target) == []


@pytest.mark.parametrize("mode", ["create", "resume"])
def test_a_killed_program_is_continued(source: Path, tmp_path: Path, mode: str) -> None:
    target, log = tmp_path / "target", tmp_path / "log"
    program = f"""
        import os, sys
        from pathlib import Path
        from tests.distributed.test_resumed_writes import Row, logged, read

        def dies(row: Row) -> Row:
            if row.number == 33:
                while len(list(Path({str(target)!r}).glob(".*.complete.json"))) < 3:
                    pass
                os._exit(9)
            return logged(row, {str(log)!r})

        logged_or_dies = dies
        logged_or_dies.__qualname__ = "logged"
        read(Path({str(source)!r})).map(logged_or_dies).write_dataset({str(target)!r}, mode={mode!r})
        """
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", textwrap.dedent(program)], check=False, timeout=120)
    assert done.returncode == 9
    assert len(computed(log)) < ROWS
    with pytest.raises(StorageError, match="'resume' to continue"):
        read(source).map(logged, str(log)).write_dataset(target, mode="create")
    read(source).map(logged, str(log)).write_dataset(target, mode="resume")
    assert len(computed(log)) <= ROWS - 3 * ROWS // PARTITIONS
    assert numbers_in(target) == list(range(ROWS))
    assert leftovers(target) == []


def test_resume_begins_where_nothing_is_written(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    read(source).write_dataset(target, mode="resume")
    assert numbers_in(target) == list(range(ROWS))
    with pytest.raises(StorageError, match="there is a dataset already. Pass mode='append' to add to it, or"):
        read(source).write_dataset(target, mode="resume")


def test_resume_of_a_program_that_was_killed_before_a_partition_was_complete(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "00000000000000aa-00000001-000000123400000.parquet").write_bytes(b"half")
    (target / ".00000000000000aa-00000002-000000123400000.parquet").write_bytes(b"half")
    read(source).write_dataset(target, mode="resume")
    assert numbers_in(target) == list(range(ROWS))
    assert leftovers(target) == []


def interrupt(source: Path, target: Path, log: Path) -> None:
    with pytest.raises(PartitionError, match="this one"):
        read(source).map(logged, str(log), ROWS - 1).write_dataset(target, mode="resume")


def test_resume_of_another_plan_is_an_error(source: Path, tmp_path: Path) -> None:
    target, log = tmp_path / "target", tmp_path / "log"
    interrupt(source, target, log)
    before = sorted(path.name for path in target.iterdir())
    for other in (
        read(source).filter({"number": {"$lt": 5}}),
        DocumentShards[Row].read_parquet(source, num_partitions=3).map(logged, str(log), None),
    ):
        with pytest.raises(OptionError, match="an interrupted job has written other rows"):
            other.write_dataset(target, mode="resume")
    again = read(source).map(logged, str(log), None)
    options: tuple[dict[str, Any], ...] = ({"format": "arrow"}, {"tensor_storage": "list"})
    for changed in options:
        with pytest.raises(OptionError, match="format=, tensor_storage=, or its files were not the same"):
            again.write_dataset(target, mode="resume", **changed)
    write_dataset([Row(id="new", number=99)], source, mode="append")
    with pytest.raises(OptionError, match="or its files were not the same"):
        read(source).map(logged, str(log), None).write_dataset(target, mode="resume")
    assert sorted(path.name for path in target.iterdir()) == before


def test_resume_with_other_fields_is_an_error(source: Path, tmp_path: Path) -> None:
    """The program was changed between its runs: rows of complete partitions lack the new field."""
    target, log = tmp_path / "target", tmp_path / "log"
    interrupt(source, target, log)

    class Wider(Row):
        label: str = "unknown"

    Wider.__name__ = "Row"
    shards = DocumentShards[Wider].read_parquet(source, num_partitions=PARTITIONS)
    with pytest.raises(OptionError, match="the fields of its class"):
        shards.map(logged, str(log), None, document_type=Wider).write_dataset(target, mode="resume")


def test_resume_refuses_partitions_that_differ_each_time(source: Path, tmp_path: Path, start_engine: Any) -> None:
    with pytest.raises(OptionError, match=r"the partitions of shuffle\(\) may have other rows"):
        read(source).shuffle().write_dataset(tmp_path / "target", mode="resume")
    with pytest.raises(OptionError, match=r"from_documents\(\) may have other rows"):
        shards = DocumentShards[Row].from_documents([Row(number=1)], engine=start_engine("ray"))
        shards.write_dataset(tmp_path / "target", mode="resume")
    read(source).shuffle(3).write_dataset(tmp_path / "target", mode="resume")
    assert sorted(numbers_in(tmp_path / "target")) == list(range(ROWS))


def test_overwriting_removes_what_an_interrupted_job_has_left(source: Path, tmp_path: Path) -> None:
    target, log = tmp_path / "target", tmp_path / "log"
    interrupt(source, target, log)
    read(source).write_dataset(target, mode="overwrite")
    assert numbers_in(target) == list(range(ROWS))
    assert leftovers(target) == []


def test_a_job_that_was_interrupted_after_it_was_complete_is_complete(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quire.distributed import _write

    target, log = tmp_path / "target", tmp_path / "log"
    with monkeypatch.context() as patch:
        patch.setattr(_write, "_remove_attempts", lambda *_: None)
        read(source).map(logged, str(log)).write_dataset(target)
    computed(log)
    assert len(leftovers(target)) == PARTITIONS
    read(source).map(logged, str(log)).write_dataset(target, mode="resume")
    assert not log.exists()
    assert numbers_in(target) == list(range(ROWS))
    assert leftovers(target) == []


def test_a_failed_job_without_resume_leaves_nothing(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    with pytest.raises(PartitionError, match="this one"):
        read(source).map(logged, str(tmp_path / "log"), ROWS - 1).write_dataset(target)
    assert not list(target.rglob("*.parquet")) + list(target.glob(".*"))
