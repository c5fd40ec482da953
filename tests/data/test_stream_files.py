"""Streams of plain Parquet files: without a class, by a pattern, and from a list."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from quire import BaseDocument
from quire.data import StreamingDataset
from quire.errors import OptionError, SchemaError, StorageNotFoundError
from quire.storage import ReadOptions, open_dataset
from tests.data.block_store import QUICK, serve_folder

pytestmark = pytest.mark.needs("pyarrow", "fsspec", "xxhash")


class Row(BaseDocument):
    number: int
    label: str = ""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for part in range(4):
        numbers = np.arange(part * 10, part * 10 + 10)
        place = tmp_path / "d" / ("2023" if part < 2 else "2024")
        place.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"number": numbers, "label": [f"l{n}" for n in numbers]}), place / f"p-{part}.parquet")
    (tmp_path / "d" / "2024" / "notes.txt").write_text("no data")
    return tmp_path / "d"


def numbers(dataset: Any) -> list[int]:
    return sorted(int(number) for batch in dataset for number in batch.number)


def test_stream_without_a_class_takes_that_of_the_files(folder: Path, tmp_path: Path) -> None:
    storage = ReadOptions(cache=tmp_path / "c")
    dataset = StreamingDataset(folder, 4, framework="numpy", storage=storage, columns=["number"])
    assert type(dataset).document_type is not BaseDocument
    assert list(dataset.stored.schema.by_name) == ["number"]
    assert numbers(dataset) == list(range(40))
    assert numbers(pickle.loads(pickle.dumps(dataset))) == list(range(40))
    assert numbers(StreamingDataset(open_dataset(folder, Row, cache=tmp_path / "c"), 4, framework="numpy")) == list(
        range(40)
    )


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("2024/*.parquet", range(20, 40)),
        ("*/p-[13].parquet", [*range(10, 20), *range(30, 40)]),
        ("**/p-?.parquet", range(40)),
        ("20?3/**/*.parquet", range(20)),
    ],
)
def test_pattern_selects_files(folder: Path, tmp_path: Path, pattern: str, expected: Any) -> None:
    options: dict[str, Any] = {"framework": "numpy", "storage": ReadOptions(cache=tmp_path / "c")}
    assert numbers(StreamingDataset[Row](f"{folder}/{pattern}", 4, **options)) == list(expected)
    assert len(open_dataset(f"{folder}/{pattern}", Row, cache=tmp_path / "c")) == len(list(expected))


def test_list_of_files_keeps_its_order(folder: Path, tmp_path: Path) -> None:
    files = [folder / "2024" / "p-3.parquet", folder / "2023" / "p-0.parquet"]
    options: dict[str, Any] = {"framework": "numpy", "storage": ReadOptions(cache=tmp_path / "c"), "shuffle": False}
    for dataset in (StreamingDataset[Row](files, 5, **options), StreamingDataset(files, 5, **options)):
        seen = [int(number) for batch in dataset for number in batch.number]
        assert seen == [*range(30, 40), *range(10)]


@pytest.mark.needs("obstore")
def test_list_of_remote_files_is_read_by_row_groups(folder: Path, tmp_path: Path) -> None:
    with serve_folder(folder) as store:
        files = [f"{store.url}/2023/p-1.parquet", f"{store.url}/2024/p-2.parquet"]
        storage = ReadOptions(cache=tmp_path / "c", remote=QUICK)
        dataset = StreamingDataset[Row](files, 3, framework="numpy", storage=storage)
        assert dataset.stored._row_reader.reads_blocks
        assert numbers(dataset) == list(range(10, 30))
        assert set(store.shard_reads().values()) == {1}


def test_lists_and_patterns_that_are_no_datasets_are_errors(folder: Path) -> None:
    with pytest.raises(StorageNotFoundError, match=r"no file that ends with .parquet or .arrow matches"):
        open_dataset(f"{folder}/2025/*.parquet", Row)
    with pytest.raises(OptionError, match=r"paths that end with .parquet or .arrow, and .*notes.txt' is none"):
        open_dataset([folder / "2024" / "notes.txt"], Row)
    with pytest.raises(OptionError, match="this one is empty"):
        open_dataset([], Row)
    with pytest.raises(OptionError, match="twice"):
        open_dataset([folder / "2023" / "p-0.parquet"] * 2, Row)
    with pytest.raises(OptionError, match="files of one store"):
        open_dataset([folder / "2023" / "p-0.parquet", "s3://bucket/p-1.parquet"], Row)
    with pytest.raises(OptionError, match="reads a dataset by its path"):
        StreamingDataset[Row]([], 4)
    with pytest.raises(OptionError, match="by its path or address, or a list of them, got"):
        open_dataset([Row(number=1)], Row)  # type: ignore[list-item]
    with pytest.raises(SchemaError, match="needs the documents' class"):
        StreamingDataset([Row(number=1)], 4)  # type: ignore[list-item]


def test_stream_without_a_class_takes_its_source_by_name(folder: Path, tmp_path: Path) -> None:
    dataset = StreamingDataset(
        url=f"{folder}/2023/*.parquet", batch_size=4, framework="numpy", storage=ReadOptions(cache=tmp_path / "c")
    )
    assert numbers(dataset) == list(range(20))
