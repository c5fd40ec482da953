"""`quire convert`: every format, inferred classes, and atomic writes."""

from __future__ import annotations

import gzip
import json
from base64 import b64decode
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from quire import BaseDocument, DocumentArray
from quire.cli import main
from quire.cli._targets import _replace_folder
from quire.storage import open_dataset, write_dataset
from quire.typing import NdArray, float32
from tests.cli.commands import Student, students

pytestmark = pytest.mark.needs("PIL", "pyarrow", "xxhash")
FOREIGN = Path(__file__).parents[1] / "storage" / "foreign"
STUDENT = ["--document", "tests.cli.commands:Student"]
COUNT = 25


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("convert")
    write_dataset(students(COUNT), folder / "students", shard_bytes=4000, group_bytes=2000)
    return folder / "students"


def convert(*arguments: Any) -> int:
    return main(["convert", *map(str, arguments)])


def rows(path: Path, capsys: pytest.CaptureFixture[str], *more: str) -> list[Any]:
    """Return all rows at a path, as `quire head --json` prints them."""
    capsys.readouterr()
    assert main(["head", str(path), "-n", "1000", "--json", *more]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


CONVERSIONS = {
    "csv": ("out.csv", []),
    "tsv": ("out.tsv", []),
    "csv.gz": ("out.csv.gz", []),
    "ndjson": ("out.ndjson", []),
    "jsonl.xz": ("out.jsonl.xz", []),
    "base64": ("out.ndjson", ["--tensors", "base64"]),
    "json": ("out.json", []),
    "protobuf": ("out.pb", []),
    "protobuf.gz": ("out.pb.gz", []),
    "option": ("out.bin", ["--to", "quire", "--compress", "lzma"]),
    "parquet": ("out.parquet", []),
    "arrow": ("out.arrow", []),
    "lists": ("out.parquet", ["--tensor-storage", "list"]),
    "dataset": ("out", []),
    "arrow dataset": ("out", ["--to", "arrow", "--shard-bytes", "4000"]),
}


@pytest.mark.parametrize("conversion", CONVERSIONS)
def test_convert_round_trips_every_format(
    conversion: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, more = CONVERSIONS[conversion]
    assert convert(source, tmp_path / name, *more) == 0
    expected = json.loads(students(COUNT).to_json())
    assert rows(tmp_path / name, capsys, *STUDENT) == expected
    assert convert(tmp_path / name, tmp_path / "back", *STUDENT) == 0
    back = open_dataset(tmp_path / "back", Student).read().unstack()
    assert all(map(Student.identical, back, students(COUNT)))


@pytest.mark.parametrize("conversion", CONVERSIONS)
def test_convert_infers_a_class_for_every_format(
    conversion: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, more = CONVERSIONS[conversion]
    assert convert(source, tmp_path / name, *STUDENT, *more) == 0
    inferred = rows(tmp_path / name, capsys)
    expected = json.loads(students(COUNT).to_json())
    assert [row["name"] for row in inferred] == [row["name"] for row in expected]
    assert inferred == expected
    assert convert(tmp_path / name, tmp_path / "inferred") == 0
    assert rows(tmp_path / "inferred", capsys) == expected


def test_convert_round_trips_hugging_face(source: Path, tmp_path: Path) -> None:
    assert convert(source, tmp_path / "hf", "--to", "huggingface", *STUDENT) == 0
    assert {file.name for file in (tmp_path / "hf").iterdir()} == {
        "data-00000-of-00001.arrow",
        "dataset_info.json",
        "state.json",
    }
    features = json.loads((tmp_path / "hf" / "dataset_info.json").read_text())["features"]
    assert features["age"] == {"dtype": "int64", "_type": "Value"}
    assert features["photo"] == [[[{"dtype": "uint8", "_type": "Value"}]]]
    assert features["papers"][0]["title"] == {"dtype": "string", "_type": "Value"}
    assert convert(tmp_path / "hf", tmp_path / "back", *STUDENT) == 0
    back = open_dataset(tmp_path / "back", Student).read().unstack()
    assert all(map(Student.identical, back, students(COUNT)))


class Color(Enum):
    RED = "red"


class Kinds(BaseDocument):
    color: Color = Color.RED
    day: date = date(2020, 1, 2)
    at: datetime | None = None
    span: timedelta = timedelta(seconds=3)
    price: Decimal = Decimal("1.50")
    blob: bytes = b"x"
    flag: bool = True
    ragged: NdArray[float32] | None = None


def test_convert_round_trips_every_hugging_face_type(tmp_path: Path) -> None:
    moment = datetime(2021, 3, 4, 5, 6, tzinfo=timezone.utc)
    documents = [Kinds(at=moment if n % 2 else None, ragged=np.arange(n, dtype=np.float32)) for n in range(1, 4)]
    DocumentArray[Kinds](documents).save_binary(tmp_path / "kinds.pb")
    typed = ["--document", f"{__name__}:Kinds"]
    assert convert(tmp_path / "kinds.pb", tmp_path / "hf", "--to", "huggingface", *typed) == 0
    assert convert(tmp_path / "hf", tmp_path / "back.pb", *typed) == 0
    assert all(map(Kinds.identical, DocumentArray[Kinds].load_binary(tmp_path / "back.pb"), documents))


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("petastorm", ["--allow-pickle"]),
        ("mds-raw", []),
        ("mds-zstd", []),
        ("webdataset", []),
        ("huggingface", ["--split", "train"]),
    ],
)
def test_convert_reads_formats_of_other_libraries(
    name: str, more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert(FOREIGN / name, tmp_path / "out.parquet", *more, "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["from"], summary["to"]) == (name.partition("-")[0], "parquet")
    assert summary["rows"] == len(open_dataset(tmp_path / "out.parquet")) > 0
    assert summary["bytes"] == (tmp_path / "out.parquet").stat().st_size


# --- folders of files


def test_convert_round_trips_a_folder_of_files(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert(source, tmp_path / "photos", "--to", "files", "--content", "photo", *STUDENT) == 0
    assert len(list((tmp_path / "photos").glob("*.png"))) == COUNT
    with Image.open(tmp_path / "photos" / "00000007.png") as image:
        assert np.array(image)[0, 0].tolist() == [7, 7, 7]
    assert convert(tmp_path / "photos", tmp_path / "back.parquet") == 0
    converted = rows(tmp_path / "back.parquet", capsys)
    assert [(row["path"], row["mime_type"], row["name"]) for row in converted[:2]] == [
        ("00000000.png", "image/png", "Ada 0"),
        ("00000001.png", "image/png", "Ada 1"),
    ]
    assert convert(tmp_path / "back.parquet", tmp_path / "again", "--to", "files") == 0
    for file in (tmp_path / "photos").glob("*.png"):
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes()


def test_files_without_metadata_have_path_mime_type_and_content(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in" / "deep").mkdir(parents=True)
    (tmp_path / "in" / "a.txt").write_text("hello")
    (tmp_path / "in" / "deep" / "b").write_bytes(b"\0\1")
    (tmp_path / "in" / ".hidden").write_text("no")
    assert convert(tmp_path / "in", tmp_path / "out.ndjson") == 0
    assert rows(tmp_path / "out.ndjson", capsys) == [
        {"path": "a.txt", "mime_type": "text/plain", "content": "aGVsbG8="},
        {"path": "deep/b", "mime_type": None, "content": "AAE="},
    ]
    assert convert(tmp_path / "in", tmp_path / "texts.ndjson", "--document", "quire:Document") == 0
    assert [Path(row["uri"]).name for row in rows(tmp_path / "texts.ndjson", capsys)] == ["a.txt", "b"]


BAD_PATHS = {
    "../out.txt": "leads out of the folder",
    "/tmp/out.txt": "leads out of the folder",
    "a/../../b": "leads out of the folder",
    "a\\b": "leads out of the folder",
    "a\0b": "leads out of the folder",
    ".": "is not the name of a file",
    "metadata.jsonl": "is that of the file with the other fields",
    "a/metadata.jsonl": "is that of the file with the other fields",
    ".hidden": "hidden files of a folder are not read back",
    "a/.b/c": "hidden files of a folder are not read back",
}


@pytest.mark.parametrize("path", BAD_PATHS, ids=ascii)
def test_convert_rejects_paths_that_are_no_files_of_the_folder(
    path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.ndjson").write_text(json.dumps({"path": path, "text": "x"}) + "\n")
    assert convert(tmp_path / "rows.ndjson", tmp_path / "out", "--to", "files", "--content", "text") == 1
    assert BAD_PATHS[path] in capsys.readouterr().err
    assert [entry.name for entry in tmp_path.iterdir()] == ["rows.ndjson"]


@pytest.mark.parametrize(
    "paths", [["a.txt", "a.txt"], ["a.txt", "./a.txt"], ["a", "a/b"], ["a/b", "a"], [None, "00000000.txt"]], ids=str
)
def test_convert_rejects_documents_with_the_same_path(
    paths: list[str | None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [json.dumps({"path": path, "text": f"text {number}"}) for number, path in enumerate(paths)]
    (tmp_path / "rows.ndjson").write_text("\n".join(lines))
    assert convert(tmp_path / "rows.ndjson", tmp_path / "out", "--to", "files", "--content", "text") == 1
    assert f"row 1: the path {str(Path(str(paths[1])))!r} belongs to another document" in capsys.readouterr().err
    assert [entry.name for entry in tmp_path.iterdir()] == ["rows.ndjson"]


@pytest.mark.parametrize("path", ["x" * 300, "/".join(["x" * 200] * 30)], ids=["name", "path"])
def test_convert_rejects_names_that_are_too_long(path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.ndjson").write_text(json.dumps({"path": path, "text": "x"}))
    assert convert(tmp_path / "rows.ndjson", tmp_path / "out", "--to", "files", "--content", "text") == 1
    assert f"row 0: the path '{'x' * 40}'... has {len(path)} bytes" in capsys.readouterr().err
    assert [entry.name for entry in tmp_path.iterdir()] == ["rows.ndjson"]


def test_unusual_names_of_files_round_trip(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [
        "A.txt",
        "a.txt",
        "a:b",
        "-rf",
        "~/x",
        "a b",
        "CON",
        "line\nbreak",
        "\u00e9",
        "e\u0301",
        "100%",
        "'quoted'",
    ]
    lines = [json.dumps({"path": path, "text": path}) for path in paths]
    (tmp_path / "rows.ndjson").write_text("\n".join(lines))
    assert convert(tmp_path / "rows.ndjson", tmp_path / "out", "--to", "files", "--content", "text") == 0
    assert convert(tmp_path / "out", tmp_path / "back.ndjson") == 0
    contents = {row["path"]: b64decode(row["content"]).decode() for row in rows(tmp_path / "back.ndjson", capsys)}
    assert contents == {path: path for path in paths}


def test_convert_rejects_a_field_that_metadata_uses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.ndjson").write_text('{"file_name": "mine", "text": "x"}\n')
    assert convert(tmp_path / "rows.ndjson", tmp_path / "out", "--to", "files", "--content", "text") == 1
    assert "row 0: metadata.jsonl names the file of a row in 'file_name'" in capsys.readouterr().err
    assert convert(tmp_path / "rows.ndjson", tmp_path / "out", "--to", "files", "--content", "file_name") == 0


def test_files_keep_paths_that_do_not_name_them_as_fields(tmp_path: Path) -> None:
    lines = ['{"path": [1, 2], "text": "a"}', '{"path": null, "text": "b"}', '{"path": "kept.txt", "text": null}']
    (tmp_path / "rows.ndjson").write_text("\n".join(lines))
    assert convert(tmp_path / "rows.ndjson", tmp_path / "out", "--to", "files", "--content", "text") == 0
    metadata = [json.loads(line) for line in (tmp_path / "out" / "metadata.jsonl").read_text().splitlines()]
    assert metadata == [
        {"file_name": "00000000.txt", "path": [1, 2]},
        {"file_name": "00000001.txt", "path": None},
        {"path": "kept.txt"},
    ]


def test_files_have_the_suffix_of_their_content(tmp_path: Path) -> None:
    starts = [b"RIFF1234WAVEfmt ", b"RIFF1234WEBPVP8 ", b"RIFF1234AVI LIST", b"%PDF-1.7", b"\x89PNG\r\n\x1a\n", b"?"]
    docs = DocumentArray[Attachment]([Attachment(content=start) for start in starts])
    write_dataset(docs, tmp_path / "docs")
    assert convert(tmp_path / "docs", tmp_path / "out", "--to", "files") == 0
    names = sorted(file.name for file in (tmp_path / "out").iterdir())
    suffixes = [".wav", ".webp", ".avi", ".pdf", ".png", ".bin"]
    assert names == [*(f"{row:08d}{suffix}" for row, suffix in enumerate(suffixes)), "metadata.jsonl"]


class Attachment(BaseDocument):
    content: bytes


# --- JSON


@pytest.mark.parametrize("name", ["rows.json", "rows.ndjson", "rows"])
@pytest.mark.parametrize("typed", [True, False])
def test_convert_accepts_a_byte_order_mark(
    name: str, typed: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = '[{"name": "Ada"}]' if name == "rows.json" else '{"name": "Ada"}\n'
    (tmp_path / name).write_text(content, "utf-8-sig")
    document = ["--document", "tests.cli.test_convert:Person"] if typed else []
    assert convert(tmp_path / name, tmp_path / "out.parquet", *document) == 0
    assert [row["name"] for row in rows(tmp_path / "out.parquet", capsys)] == ["Ada"]


@pytest.mark.parametrize("content", ["5", '"text"', "null", "true", "", "x"])
@pytest.mark.parametrize("typed", [True, False])
def test_convert_rejects_json_that_holds_no_rows(
    content: str, typed: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.json").write_text(content)
    document = ["--document", "tests.cli.test_convert:Person"] if typed else []
    assert convert(tmp_path / "rows.json", tmp_path / "out.parquet", *document) == 1
    assert f"a JSON file holds an object or a list of objects, and this one starts with {content!r}" in (
        capsys.readouterr().err
    )


def test_convert_rejects_other_encodings_and_items(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.json").write_text('[{"name": "Ada"}]', "utf-16")
    assert convert(tmp_path / "rows.json", tmp_path / "out.parquet") == 1
    assert "the file is UTF-16, and JSON is read as UTF-8" in capsys.readouterr().err
    (tmp_path / "rows.json").write_text('[{"name": "Ada"}, 5]')
    assert convert(tmp_path / "rows.json", tmp_path / "out.parquet") == 1
    assert "row 1: a row must be a JSON object, got int." in capsys.readouterr().err


# --- atomic writes


@pytest.mark.parametrize("name", ["out.csv", "out.json", "out.pb", "out.parquet", "out.arrow", "out"])
def test_failed_conversion_leaves_an_existing_target_unchanged(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = "".join(f'{{"name": "{n}"}}\n' for n in range(3000))
    (tmp_path / "good.ndjson").write_text(good)
    (tmp_path / "bad.ndjson").write_text(good + '{"name": 7}\n')
    typed = ["--document", "tests.cli.test_convert:Named"]
    assert convert(tmp_path / "bad.ndjson", tmp_path / name, *typed) == 1
    assert "line 3001" in capsys.readouterr().err
    assert not (tmp_path / name).exists()
    assert convert(tmp_path / "good.ndjson", tmp_path / name, *typed) == 0
    before = _contents(tmp_path)
    assert convert(tmp_path / "good.ndjson", tmp_path / name, *typed) == 1
    assert "Pass --force" in capsys.readouterr().err
    assert convert(tmp_path / "bad.ndjson", tmp_path / name, *typed, "--force") == 1
    assert _contents(tmp_path) == before
    assert convert(tmp_path / "good.ndjson", tmp_path / name, *typed, "--force", "--limit", "7") == 0
    assert len(rows(tmp_path / name, capsys, *typed)) == 7
    assert {entry.name for entry in tmp_path.iterdir()} == {"good.ndjson", "bad.ndjson", name}


class Named(BaseDocument):
    name: str


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def test_convert_rejects_existing_and_overlapping_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.csv").write_text("a\n1\n")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").write_text("data")
    (tmp_path / "empty").mkdir()
    assert convert(tmp_path / "rows.csv", tmp_path / "full") == 1
    assert (tmp_path / "full" / "precious").exists()
    assert convert(tmp_path / "rows.csv", tmp_path / "empty") == 0
    for target in (tmp_path, tmp_path / "full" / "inside"):
        assert convert(tmp_path / "full", target, "--to", "files", "--force") == 1
        assert "the target is the source, or one is inside the other" in capsys.readouterr().err


def test_limit_counts_rows_across_batches(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for limit in (1, 3, 24, 100):
        assert convert(source, tmp_path / "out.csv", "--limit", limit, "--force", "--json") == 0
        assert json.loads(capsys.readouterr().out)["rows"] == min(limit, COUNT)


def test_text_is_compressed_according_to_its_suffix(source: Path, tmp_path: Path) -> None:
    assert convert(source, tmp_path / "out.csv.gz") == 0
    assert convert(source, tmp_path / "out.csv") == 0
    assert gzip.decompress((tmp_path / "out.csv.gz").read_bytes()) == (tmp_path / "out.csv").read_bytes()


def test_convert_reports_rows_of_another_class(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    students(2).to_ndjson(tmp_path / "rows.ndjson")
    assert convert(tmp_path / "rows.ndjson", tmp_path / "out.pb", "--document", "tests.cli.commands:Thesis") == 1
    assert "quire: Thesis in " in capsys.readouterr().err


def test_unknown_columns_of_text_files_are_errors_unless_ignored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.csv").write_text("name,agee\nAda,36\n")
    document = ["--document", "tests.cli.test_convert:Person"]
    assert convert(tmp_path / "rows.csv", tmp_path / "out.ndjson", *document) == 1
    assert "Person has no column 'agee'. Did you mean 'age'? Or pass --extra ignore." in capsys.readouterr().err
    assert not (tmp_path / "out.ndjson").exists()
    assert convert(tmp_path / "rows.csv", tmp_path / "out.ndjson", *document, "--extra", "ignore") == 0
    assert json.loads((tmp_path / "out.ndjson").read_text())["name"] == "Ada"


class Person(BaseDocument):
    name: str
    age: int = 0


def test_interrupted_replacement_restores_the_old_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "row.txt").write_text("old")
    rename = Path.replace

    def interrupt(self: Path, to: Path) -> Path:
        if self.name == "new":
            raise KeyboardInterrupt
        return rename(self, to)

    monkeypatch.setattr(Path, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt), _replace_folder(target) as new:
        (new / "row.txt").write_text("new")
    assert (target / "row.txt").read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]
