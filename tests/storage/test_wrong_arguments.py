"""Arguments of datasets that make no sense are errors of quire, which say what to write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from quire import BaseDocument, DocumentArray
from quire.errors import OptionError, PathError, ShardError
from quire.storage import Split, open_dataset, write_dataset

pytestmark = pytest.mark.needs("pyarrow", "fsspec", "xxhash")


class Row(BaseDocument):
    n: int
    text: str = ""


@pytest.mark.parametrize("url", [None, 5, b"rows"], ids=repr)
def test_open_dataset_rejects_values_that_are_no_path(url: Any) -> None:
    with pytest.raises(OptionError, match=f"got {type(url).__name__}"):
        open_dataset(url, Row)


@pytest.mark.parametrize(
    ("fractions", "index"), [(0.9, 0), (("0.9", "0.1"), 0), ((0.9, 0.1), "0"), ((0.9, 0.1), 2)], ids=repr
)
def test_split_rejects_wrong_parts(fractions: Any, index: Any) -> None:
    with pytest.raises(OptionError, match=r"fractions|index"):
        Split("n", fractions, index)


def test_split_by_an_unknown_field_lists_similar_fields(tmp_path: Path) -> None:
    write_dataset([Row(n=1)], tmp_path / "rows")
    with pytest.raises(PathError, match="Did you mean 'text'"):
        len(open_dataset(tmp_path / "rows", Row, where=Split("txt", (0.5, 0.5), 0)))


@pytest.mark.parametrize("url", [None, 5], ids=repr)
def test_write_dataset_rejects_values_that_are_no_path(url: Any) -> None:
    with pytest.raises(OptionError, match=f"got {type(url).__name__}"):
        write_dataset([Row(n=1)], url)


@pytest.mark.parametrize("documents", [None, "rows", 5, Row(n=1), {"n": 1}])
def test_write_dataset_rejects_values_that_are_no_documents(tmp_path: Path, documents: Any) -> None:
    for options in ({}, {"document_type": Row}):
        with pytest.raises(OptionError, match=f"expected documents.*got {type(documents).__name__}"):
            write_dataset(documents, tmp_path / "rows", **options)
    assert not (tmp_path / "rows").exists()


def test_write_dataset_describes_a_first_item_without_a_class(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="the first item is int 1"):
        write_dataset([1, 2], tmp_path / "rows")


@pytest.mark.parametrize("options", [{"compression": "zstd"}, {"shard_bytes": "128MB"}], ids=repr)
def test_write_dataset_rejects_options_of_another_type(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(options))):
        write_dataset([Row(n=1)], tmp_path / "rows", **options)


def test_two_columns_of_one_name_are_rejected(tmp_path: Path) -> None:
    table = pa.table({"n": [1], "again": [2], "other": [3]}).rename_columns(["n", "n", "other"])
    pq.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(ShardError, match="'n' in several columns"):
        open_dataset(tmp_path / "rows.parquet", Row)[0]


@pytest.mark.parametrize(
    "options", [{"delimiter": "::"}, {"delimiter": ""}, {"dialect": "exel"}, {"encoding": "utf-9"}]
)
def test_csv_rejects_wrong_layouts(tmp_path: Path, options: dict[str, Any]) -> None:
    name = next(iter(options))
    with pytest.raises(OptionError, match=f"{name}={options[name]!r}"):
        DocumentArray[Row].from_csv(text="n\n1\n", **options)
    with pytest.raises(OptionError, match=f"{name}={options[name]!r}"):
        DocumentArray[Row]([Row(n=1)]).to_csv(tmp_path / "rows.csv", **options)
