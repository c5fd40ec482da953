"""Reading files: the same documents from the same files, on every engine."""

from __future__ import annotations

import gzip
import re
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from quire import BaseDocument, Document, DocumentArray
from quire.distributed import DocumentShards, PartitionError
from quire.distributed._sources import PARTITION_BYTES, assign_to_partitions, find_files
from quire.errors import OptionError, SchemaError, StorageError, StorageNotFoundError
from quire.files import RemoteOptions
from quire.storage import write_dataset
from tests.distributed.sample_documents import Good, Rated, dearer, goods

pytestmark = [pytest.mark.needs("pyarrow", "ray", "pyspark", "fsspec"), pytest.mark.filterwarnings("ignore")]
ROWS = 30


class Line(BaseDocument):
    town: str
    people: int
    rain: float | None = None


LINES = ["town,people,rain", "Bath,94,0.5", "Cork,224,", "Ely,19,1.5"]


# --- on every engine


def test_read_parquet_accepts_datasets_folders_and_patterns(engine: Any, tmp_path: Path) -> None:
    write_dataset(goods(ROWS), tmp_path / "set", group_bytes=600, shard_bytes=3000)
    pattern = str(tmp_path / "s*" / "*.parquet")
    for path in (tmp_path / "set", f"file://{tmp_path}/set", pattern):
        shards = DocumentShards[Good].read_parquet(path, num_partitions=4, engine=engine)
        assert shards.collect().identical(goods(ROWS))
        assert (len(shards), shards.num_partitions()) == (ROWS, 4)
    few = DocumentShards.read_parquet(tmp_path / "set", columns=["price", "maker.town"], engine=engine)
    assert type(few) is DocumentShards[Good]
    assert few.filter({"price": {"$lt": 2}}).collect().maker.town == ["Bath", "Cork"]


def test_read_csv_and_read_json(engine: Any, tmp_path: Path) -> None:
    goods(10).to_csv(tmp_path / "a.csv")
    goods(ROWS)[10:].to_csv(tmp_path / "b.csv")
    goods(ROWS).to_ndjson(tmp_path / "all.jsonl")
    for shards in (
        DocumentShards[Good].read_csv(tmp_path, num_partitions=2, engine=engine),
        DocumentShards[Good].read_json(tmp_path / "all.jsonl", engine=engine),
    ):
        assert shards.map(dearer).collect().price == list(range(1, ROWS + 1))
        assert shards.collect().identical(goods(ROWS))


def test_readers_infer_a_class(engine: Any, tmp_path: Path) -> None:
    (tmp_path / "towns.csv").write_text("first name,size\nBath,94\nCork,224")
    shards = DocumentShards.read_csv(tmp_path / "towns.csv", engine=engine)
    assert [(d.first_name, d.size) for d in shards.map(lambda d: d).collect()] == [("Bath", 94), ("Cork", 224)]
    (tmp_path / "towns.json").write_text('[{"town": {"name": "Bath"}, "at": [1, 2]}]')
    [actual] = DocumentShards.read_json(tmp_path / "towns.json", engine=engine).filter(lambda d: d.town).collect()
    assert (actual.town.name, actual.at.tolist()) == ("Bath", [1, 2])


def test_read_binary_creates_a_document_per_file(engine: Any, tmp_path: Path) -> None:
    for name in ("a.png", "b.txt"):
        (tmp_path / name).write_bytes(name.encode() * 3)
    actual = DocumentShards.read_binary(tmp_path, engine=engine).collect()
    assert [(Path(d.uri).name, d.blob, d.mime_type) for d in actual] == [
        ("a.png", b"a.png" * 3, "image/png"),
        ("b.txt", b"b.txt" * 3, "text/plain"),
    ]
    assert type(actual[0]) is Document


def test_rows_without_ids_get_stable_ids(engine: Any, tmp_path: Path) -> None:
    table = pa.table({"town": ["Bath", "Cork", "Ely"], "people": [94, 224, 19]})
    pq.write_table(table, tmp_path / "towns.parquet", row_group_size=2)
    (tmp_path / "towns.csv").write_text("\n".join(LINES))
    for read in (DocumentShards[Line].read_parquet, DocumentShards[Line].read_csv):
        shards = read(tmp_path, engine=engine)
        ids = shards.collect().id
        assert len(set(ids)) == 3
        assert shards.collect().id == ids
        assert sorted(one for part in shards.split(0.5, 0.5) for one in part.collect().id) == sorted(ids)
        assert ids == read(tmp_path, num_partitions=1).collect().id


def test_read_error_names_file_and_row(engine: Any, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("\n".join(LINES))
    (tmp_path / "b.csv").write_text("\n".join([*LINES, "York,many,"]))
    with pytest.raises(PartitionError, match=r"partition 1: .*b\.csv, line 5") as caught:
        DocumentShards[Line].read_csv(tmp_path, num_partitions=2, engine=engine).collect()
    assert caught.value.partition == 1


# --- on one


def test_truncated_shard_is_named(tmp_path: Path) -> None:
    write_dataset(goods(ROWS), tmp_path)
    shards = DocumentShards[Good].read_parquet(tmp_path)
    [file] = tmp_path.glob("*.parquet")
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(PartitionError, match=rf"partition 0: ShardError: .*{file.name}: the shard was altered"):
        shards.collect()


def test_large_file_is_split_by_row_groups(tmp_path: Path) -> None:
    write_dataset(goods(ROWS), tmp_path / "set", group_bytes=600, format="arrow")
    shards = DocumentShards[Good].read_parquet(tmp_path / "set", num_partitions=3)
    sizes = [len(part) for part in _parts(shards)]
    assert sum(sizes) == ROWS
    assert min(sizes) > 0
    assert len(DocumentShards[Good].read_parquet(tmp_path / "set", num_partitions=50).collect()) == ROWS


def _parts(shards: DocumentShards[Any]) -> list[list[Any]]:
    return [[row for batch in part.batches() for row in batch.to_pylist()] for part in shards.native]


def test_partition_folders_become_columns(tmp_path: Path) -> None:
    for year in (2024, 2025):
        (tmp_path / f"year={year}").mkdir()
        pq.write_table(pa.table({"town": ["Bath", "Ely"]}), tmp_path / f"year={year}" / "part.parquet")
    actual = DocumentShards.read_parquet(tmp_path).filter({"year": 2025}).collect()
    assert [(document.town, document.year) for document in actual] == [("Bath", 2025), ("Ely", 2025)]


def test_compressed_text_and_tabs_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("\n".join(LINES).replace(",", "\t"))
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress("\n".join(LINES).encode()))
    (tmp_path / "c.csv").write_text("\n".join(LINES).replace(",", ";"))
    actual = DocumentShards[Line].read_csv([tmp_path / "a.tsv", tmp_path / "b.csv.gz"]).collect()
    assert actual.people == [94, 224, 19] * 2
    assert actual.rain == [0.5, None, 1.5] * 2
    assert DocumentShards[Line].read_csv(tmp_path / "c.csv", delimiter=";").first().people == 94
    (tmp_path / "more.csv").write_text("town,people,lake\nBath,94,no\n")
    assert DocumentShards[Line].read_csv(tmp_path / "more.csv", extra="ignore").first().town == "Bath"


def test_reading_nothing_is_an_error(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing.csv"):
        message = "there is no such file, and no folder with files in it to read. Pass allow_empty=True"
        with pytest.raises(StorageNotFoundError, match=message):
            DocumentShards[Line].read_csv(path)
    with pytest.raises(StorageNotFoundError):
        DocumentShards[Good].read_parquet(tmp_path / "none")
    with pytest.raises(OptionError, match="at least one path is needed"):
        DocumentShards[Line].read_csv([])
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(SchemaError, match="Rated has no field"):
        DocumentShards[Rated].read_binary(tmp_path)
    with pytest.raises(OptionError, match="num_partitions=0"):
        DocumentShards.read_binary(tmp_path, num_partitions=0)


READERS = ["read_parquet", "read_csv", "read_json", "read_binary"]


@pytest.mark.parametrize("reader", READERS)
def test_pattern_without_files_needs_allow_empty(reader: str, tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("x")
    document_type = Document if reader == "read_binary" else Line
    for path in (tmp_path / "typo" / "*.x", [tmp_path / "other.txt", tmp_path / "*.x"]):
        with pytest.raises(StorageNotFoundError, match=r"no file matches '.*\*\.x'\. Pass allow_empty=True"):
            getattr(DocumentShards[document_type], reader)(path)
    shards = getattr(DocumentShards[document_type], reader)(tmp_path / "*.x", allow_empty=True)
    assert (len(shards), shards.num_partitions()) == (0, 1)
    assert shards.map(lambda doc: doc).collect() == DocumentArray[document_type]()
    assert len(getattr(DocumentShards[document_type], reader)(tmp_path / "none", allow_empty=True)) == 0


def write_empty(reader: str, folder: Path) -> list[Path]:
    """Write sources of a kind without a row."""
    if reader == "read_parquet":
        write_dataset(DocumentArray[Line](), folder / "set", document_type=Line)
        schema = pa.schema([("town", pa.string()), ("people", pa.int64())])
        pq.write_table(schema.empty_table(), folder / "plain.parquet")
        return [folder / "set", folder / "plain.parquet", folder / "plain.*"]
    contents: dict[str, Any] = {
        "read_csv": {
            "none.csv": b"",
            "names.csv": b"\ntown,people,rain\r\n\n",
            "z.csv.gz": gzip.compress(b"town,people"),
        },
        "read_json": {"none.jsonl": b"", "blank.jsonl": b"\n \n", "array.json": b" [ ]\n"},
    }
    for name, content in contents[reader].items():
        (folder / name).write_bytes(content)
    return [folder, *(folder / name for name in contents[reader])]


@pytest.mark.parametrize("reader", READERS[:3])
def test_source_without_rows_needs_allow_empty(reader: str, tmp_path: Path) -> None:
    for path in write_empty(reader, tmp_path):
        message = f"{re.escape(str(path))}: there are no rows to read. Pass allow_empty=True"
        with pytest.raises(OptionError, match=message):
            getattr(DocumentShards[Line], reader)(path)
        assert getattr(DocumentShards[Line], reader)(path, allow_empty=True).collect() == DocumentArray[Line]()


def test_one_row_in_any_file_is_enough(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("town,people\n")
    (tmp_path / "b.csv").write_text("town,people\nBath,94")
    (tmp_path / "c.csv").write_text("town,people\nBath,94".replace("Bath", "B" * 100_000))
    assert DocumentShards[Line].read_csv([tmp_path / "a.csv", tmp_path / "b.csv"]).collect().people == [94]
    assert len(DocumentShards[Line].read_csv(tmp_path / "c.csv")) == 1
    (tmp_path / "a.jsonl").write_text("")
    (tmp_path / "b.jsonl").write_text('{"town": "Bath", "people": 94}')
    assert DocumentShards[Line].read_json(tmp_path).collect().people == [94]


@pytest.mark.parametrize("reader", READERS[:3])
def test_empty_source_needs_a_class(reader: str, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="no file to infer the class"):
        getattr(DocumentShards, reader)(tmp_path / "*.x", allow_empty=True)


def test_ray_accepts_empty_sources(start_engine: Any, tmp_path: Path) -> None:
    ray = start_engine("ray")
    for reader in READERS[:3]:
        (tmp_path / reader).mkdir()
        for path in write_empty(reader, tmp_path / reader):
            with pytest.raises(OptionError, match="there are no rows to read"):
                getattr(DocumentShards[Line], reader)(path, engine=ray)
        for path in (tmp_path / reader, tmp_path / "*.x"):
            shards = getattr(DocumentShards[Line], reader)(path, engine=ray, allow_empty=True)
            assert len(shards.filter({"people": 1})) == len(shards.collect()) == 0


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.csv", ["a.csv", "b.csv"]),
        ("**/*.csv", ["a.csv", "b.csv", "c/d.csv", "c/e/f.csv"]),
        ("[!a]*.csv", ["b.csv"]),
        ("[ab].csv", ["a.csv", "b.csv"]),
        ("?/?.csv", ["c/d.csv"]),
        ("c/**", ["c/d.csv", "c/e/f.csv"]),
    ],
)
def test_find_files_matches_glob_patterns(tmp_path: Path, pattern: str, expected: list[str]) -> None:
    for name in ("a.csv", "b.csv", "c/d.csv", "c/e/f.csv", "abc.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    actual = find_files(f"{tmp_path}/{pattern}", (), RemoteOptions())
    assert [file.url.removeprefix(f"{tmp_path}/") for file in actual] == expected


def test_assign_to_partitions_balances_sizes_in_order() -> None:
    assert assign_to_partitions("abcd", [1, 1, 1, 1], 2, 9) == [["a", "b"], ["c", "d"]]
    assert assign_to_partitions("abcd", [9, 1, 1, 1], 2, 9) == [["a"], ["b", "c", "d"]]
    assert assign_to_partitions("ab", [0, 0], None, 9) == [["a"], ["b"]]
    assert assign_to_partitions("ab", [1, 1], 4, 1) == [[], ["a"], [], ["b"]]
    assert len(assign_to_partitions(range(100), [PARTITION_BYTES] * 100, None, 2)) == 100
    assert len(assign_to_partitions(range(100), [1] * 100, None, 2)) == 2


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Log nothing."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """Serve the folder over HTTP."""
    served = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path)))
    threading.Thread(target=served.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{served.server_port}"
    served.shutdown()
    served.server_close()


@pytest.mark.needs("aiohttp")
def test_readers_accept_remote_urls(server: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("\n".join(LINES))
    goods(5).save_parquet(tmp_path / "goods.parquet")
    assert DocumentShards[Line].read_csv(f"{server}/a.csv").collect().town == ["Bath", "Cork", "Ely"]
    assert DocumentShards[Good].read_parquet(f"{server}/goods.parquet").collect().identical(goods(5))
    [actual] = DocumentShards.read_binary(f"{server}/a.csv").collect()
    assert (actual.uri, actual.blob) == (f"{server}/a.csv", (tmp_path / "a.csv").read_bytes())


def test_read_json_accepts_arrays(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(goods(4).to_json())
    assert DocumentShards[Good].read_json(tmp_path).collect().identical(DocumentArray[Good](goods(4)))
