"""`quire inspect`, `head`, `stats` and `verify` of datasets and files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from quire import BaseDocument, DocumentArray
from quire.cli import main
from quire.storage import column_statistics, open_dataset, write_dataset
from tests.cli.commands import Student, students

pytestmark = pytest.mark.needs("pyarrow", "xxhash")
STUDENT = ["--document", "tests.cli.commands:Student"]
FIELDS = ["id", "name", "age", "score", "photo", "thesis", "tags", "papers"]


class Node(BaseDocument):
    name: str
    children: DocumentArray["Node"] = []


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("inspect")
    rows = students(40)
    write_dataset(rows, path / "dataset", shard_bytes=3000, group_bytes=2000)
    write_dataset(rows, path / "mapped", format="arrow", shard_bytes=3000, group_bytes=2000)
    rows.save_parquet(path / "rows.parquet")
    rows.save_binary(path / "rows.pb.gz")
    rows.to_ndjson(path / "rows.ndjson")
    rows.to_csv(path / "rows.csv")
    (path / "rows.json").write_text(rows.to_json())
    (path / "one.json").write_text(rows[3].to_json())
    (path / "empty.csv").write_text("name,thesis.title\n")
    DocumentArray[Node]([Node(name="a", children=[Node(name="b")])]).save_binary(path / "nodes.pb")
    return path


SOURCES = ["dataset", "mapped", "rows.parquet", "rows.pb.gz", "rows.ndjson", "rows.csv", "rows.json"]


def run_json(capsys: pytest.CaptureFixture[str], *arguments: Any, code: int = 0) -> Any:
    assert main([*map(str, arguments), "--json"]) == code
    return json.loads(capsys.readouterr().out)


def run_text(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    assert main([*map(str, arguments)]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("typed", [True, False])
@pytest.mark.parametrize("name", SOURCES)
def test_inspect_shows_schema_rows_and_bytes(
    name: str, typed: bool, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = STUDENT if typed else []
    result = run_json(capsys, "inspect", folder / name, *more)
    assert result["rows"] == 40
    assert [field["name"] for field in result["schema"]] == FIELDS
    types = {field["name"]: field["type"] for field in result["schema"]}
    assert (types["age"], types["score"], types["photo"]) == ("int", "float | None", "NdArray[uint8, 8, 9, 3]")
    [papers] = [field for field in result["schema"] if field["name"] == "papers"]
    assert [field["name"] for field in papers["fields"]] == ["id", "title", "vector"]
    whole = sum(
        file.stat().st_size for file in [*(folder / name).rglob("*.parquet"), *(folder / name).rglob("*.arrow")]
    )
    assert result["bytes"] == (whole or (folder / name).stat().st_size)
    text = run_text(capsys, "inspect", folder / name, *more)
    for line in ("40 rows", "photo: NdArray[uint8, 8, 9, 3]", "papers: DocumentArray["):
        assert line in text


def test_inspect_shows_shards_and_compression(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dataset = open_dataset(folder / "dataset", Student)
    result = run_json(capsys, "inspect", folder / "dataset", "--shards", "--stats", "--columns", "age")
    assert result["shards"] == len(dataset.shards) == len(result["shard_files"]) > 2
    assert sum(shard["rows"] for shard in result["shard_files"]) == 40
    assert result["checksums"] is True
    assert result["columns"]["photo"]["compression"] == "none"
    assert result["columns"]["name"]["compression"] == "zstd"
    assert result["statistics"].keys() == {"age"}
    text = run_text(capsys, "inspect", folder / "dataset", "--shards", "--stats")
    for line in (dataset.shards[-1].name, "papers.list.element.title", "zstd", "▁" if "▁" in text else "█"):
        assert line in text


def test_inspect_shows_compression_and_index_of_a_quire_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run_json(capsys, "inspect", folder / "rows.pb.gz", *STUDENT)
    assert (result["compression"], result["index"], result["blocks"]) == ("gzip", True, 1)


def test_inspect_marks_recursive_documents(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    typed = ["--document", f"{__name__}:Node"]
    result = run_json(capsys, "inspect", folder / "nodes.pb", *typed)
    [children] = [field for field in result["schema"] if field["name"] == "children"]
    assert children["recursive"] is True
    assert "fields" not in children
    assert "children: DocumentArray[Node] ↻" in run_text(capsys, "inspect", folder / "nodes.pb", *typed)


def test_columns_of_plain_parquet_become_fields_without_an_id(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pq.write_table(pa.table({"my col": ["x", None], "n": [1, 2]}), tmp_path / "plain.parquet")
    result = run_json(capsys, "inspect", tmp_path / "plain.parquet")
    assert [field["name"] for field in result["schema"]] == ["my_col", "n"]
    assert result["checksums"] is False
    assert json.loads(run_text(capsys, "head", tmp_path / "plain.parquet", "-n", "1", "--json")) == {
        "my_col": "x",
        "n": 1,
    }


# --- head


@pytest.mark.parametrize("name", SOURCES)
def test_head_skips_rows_of_every_format(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = run_text(capsys, "head", folder / name, "--skip", "17", "-n", "5", "--json", *STUDENT).splitlines()
    assert [json.loads(line) for line in lines] == json.loads(students(22)[17:].to_json())
    assert run_text(capsys, "head", folder / name, "--skip", "40", "--json", *STUDENT) == ""
    assert len(run_text(capsys, "head", folder / name, "--json", *STUDENT).splitlines()) == 10


def test_head_shows_selected_columns(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = run_text(capsys, "head", folder / "dataset", "-n", "3", "--columns", "name,thesis", *STUDENT)
    for part in ("40 rows of Student", "name", "thesis.title", "Ada 2", 'On 1, and "more"\\n'):
        assert part in text
    assert "photo" not in text
    [line] = run_text(capsys, "head", folder / "dataset", "-n", "1", "--columns", "age", "--json").splitlines()
    assert json.loads(line) == {"age": 0}
    assert "photo = <numpy uint8[8, 9, 3]>" in run_text(capsys, "head", folder / "dataset", "-n", "1", "--tree")


def test_head_reads_no_more_rows_than_it_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.csv").write_text("a\n1\n2\nbad,row\n")
    (tmp_path / "rows.ndjson").write_text('{"a": 1}\n{"a": 2}\nno json\n')
    for name in ("rows.csv", "rows.ndjson"):
        assert run_text(capsys, "head", tmp_path / name, "-n", "2", "--json") == '{"a":1}\n{"a":2}\n'
        assert "│ 1 │ 2 │" in run_text(capsys, "head", tmp_path / name, "-n", "2")
        assert main(["head", str(tmp_path / name), "-n", "3"]) == 1


def test_single_json_object_is_one_row(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [line] = run_text(capsys, "head", folder / "one.json", "--json", *STUDENT).splitlines()
    assert json.loads(line)["name"] == "Ada 3"


def test_csv_without_rows_has_columns(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run_json(capsys, "inspect", folder / "empty.csv")
    assert (result["rows"], [field["name"] for field in result["schema"]]) == (0, ["name", "thesis"])
    assert run_text(capsys, "head", folder / "empty.csv", "--json") == ""
    assert run_json(capsys, "stats", folder / "empty.csv")["columns"]["thesis.title"]["rows"] == 0


# --- stats


@pytest.mark.parametrize("name", SOURCES)
def test_stats_are_equal_for_every_format(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = column_statistics(open_dataset(folder / "mapped", Student))
    result = run_json(capsys, "stats", folder / name, *STUDENT)["columns"]
    assert _rounded(result) == {path: _rounded(column.to_dict()) for path, column in expected.items()}
    text = run_text(capsys, "stats", folder / name, *STUDENT)
    for part in ("age", "19.5", "8x9x3", "█", "a (26)"):
        assert part in text


def _rounded(value: Any) -> Any:
    """Round floats: their last digits depend on the blocks that were summed."""
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.9g}") if isinstance(value, float) else value


def test_stats_use_the_requested_rows_and_bins(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("dataset", "rows.csv"):
        result = run_json(capsys, "stats", folder / name, "--rows", "7", "--bins", "3", "--columns", "age")["columns"][
            "age"
        ]
        assert result["rows"] == 7
        assert len(result["histogram"]["counts"]) == 3


# --- verify


def test_verify_reports_every_damaged_shard(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_dataset(students(40), tmp_path / "d", format="arrow", shard_bytes=3000, group_bytes=2000)
    assert run_json(capsys, "verify", tmp_path / "d", *STUDENT)["faults"] == []
    assert ": OK: 40 rows" in run_text(capsys, "verify", tmp_path / "d", *STUDENT)
    first, second, *_ = sorted((tmp_path / "d").glob("*.arrow"))
    content = bytearray(first.read_bytes())
    content[len(content) // 2] ^= 255
    first.write_bytes(content)
    second.unlink()
    result = run_json(capsys, "verify", tmp_path / "d", *STUDENT, code=3)
    assert [fault["name"] for fault in result["faults"]] == [first.name, second.name]
    assert "checksum" in result["faults"][0]["fault"]
    assert "missing" in result["faults"][1]["fault"]
    assert main(["verify", str(tmp_path / "d"), *STUDENT]) == 3
    out, error = capsys.readouterr()
    assert out.count("\n") == 2
    assert "2 of" in error


@pytest.mark.parametrize("name", ["rows.parquet", "rows.pb.gz", "rows.ndjson"])
def test_verify_reports_truncated_files(
    name: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = (folder / name).read_bytes()
    (tmp_path / name).write_bytes(content[: len(content) * 2 // 3])
    [fault] = run_json(capsys, "verify", tmp_path / name, *STUDENT, code=3)["faults"]
    assert fault["fault"]


def test_inspect_shows_the_version_and_deleted_rows(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(folder / "dataset", tmp_path / "dataset")
    open_dataset(tmp_path / "dataset", Student).tag("train-1")
    assert open_dataset(tmp_path / "dataset", Student).delete(lambda student: student.age % 2 == 0) > 0
    left = len(open_dataset(tmp_path / "dataset", Student))
    result = run_json(capsys, "inspect", tmp_path / "dataset")
    assert (result["version"], result["rows"], result["deleted_rows"]) == (3, left, 40 - left)
    text = run_text(capsys, "inspect", tmp_path / "dataset")
    assert "version: 3\n" in text
    assert f"deleted_rows: {40 - left}\n" in text
