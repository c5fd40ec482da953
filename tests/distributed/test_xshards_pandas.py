"""Files as shards of data frames, and complete programs as users of Orca write them."""

from __future__ import annotations

import functools
import http.server
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pandas as pd
import pytest

from quire.distributed import PartitionError, XShards
from quire.distributed._row_containers import concat_rows
from quire.distributed.pandas import read_csv, read_json, read_parquet
from quire.errors import OptionError, StorageNotFoundError

pytestmark = [pytest.mark.needs("pandas", "pyarrow", "fsspec"), pytest.mark.filterwarnings("ignore")]

READERS: dict[str, Callable[..., XShards]] = {"csv": read_csv, "json": read_json, "parquet": read_parquet}
ENDINGS = {"csv": "csv", "json": "jsonl", "parquet": "parquet"}


def table(rows: int) -> pd.DataFrame:
    return pd.DataFrame({"location": [f"l{i % 3}" for i in range(rows)], "value": range(rows)})


def write(kind: str, folder: Any, rows: int = 10, files: int = 3) -> None:
    """Write the rows of a table to some files, and files that readers ignore."""
    options: dict[str, Any] = {"json": {"orient": "records", "lines": True}}.get(kind, {"index": False})
    for number, part in enumerate(np.array_split(np.arange(rows), files)):
        frame = table(rows).iloc[part]
        getattr(frame, f"to_{kind}")(f"{folder}/part-{number}.{ENDINGS[kind]}", **options)


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize("form", ["folder", "pattern", "list", "address", "path"])
def test_readers_accept_folders_patterns_and_lists(tmp_path: Path, kind: str, form: str) -> None:
    write(kind, tmp_path)
    (tmp_path / "_SUCCESS").write_text("")
    (tmp_path / ".part-0.crc").write_text("")
    (tmp_path / "README.md").write_text("no table")
    argument: Any = {
        "folder": str(tmp_path),
        "pattern": f"{tmp_path}/*.{ENDINGS[kind]}",
        "list": [tmp_path / f"part-{i}.{ENDINGS[kind]}" for i in range(3)],
        "address": f"file://{tmp_path}",
        "path": tmp_path,
    }[form]
    shards = READERS[kind](argument)
    assert shards.num_partitions() == 3
    assert len(shards) == 10
    pd.testing.assert_frame_equal(concat_rows(shards.collect()).reset_index(drop=True), table(10))


@pytest.mark.parametrize("kind", READERS)
def test_file_is_one_partition_unless_num_shards_is_set(tmp_path: Path, kind: str) -> None:
    write(kind, tmp_path, files=1)
    file = tmp_path / f"part-0.{ENDINGS[kind]}"
    assert READERS[kind](file).num_partitions() == 1
    assert [len(part) for part in READERS[kind](str(file), num_shards=4).collect()] == [2, 3, 2, 3]


def test_small_files_share_a_partition(tmp_path: Path) -> None:
    write("csv", tmp_path, rows=20, files=10)
    shards = read_csv(tmp_path, num_shards=2)
    assert [len(part) for part in shards.collect()] == [10, 10]
    assert concat_rows(shards.collect())["value"].tolist() == list(range(20))


def test_files_of_different_sizes_fill_every_partition(tmp_path: Path) -> None:
    table(1000).to_csv(tmp_path / "a.csv", index=False)
    table(3).to_csv(tmp_path / "b.csv", index=False)
    table(3).to_csv(tmp_path / "c.csv", index=False)
    assert [len(part) for part in read_csv(tmp_path, num_shards=3).collect()] == [1000, 3, 3]
    assert [len(part) for part in read_csv(tmp_path, num_shards=4).collect()] == [251, 252, 251, 252]


@pytest.mark.parametrize("kind", READERS)
def test_readers_accept_remote_folders_and_patterns(kind: str) -> None:
    place = f"memory://xshards-{kind}"
    write(kind, place)
    for path in (place, f"{place}/*.{ENDINGS[kind]}", f"{place}/part-1.{ENDINGS[kind]}"):
        whole = concat_rows(READERS[kind](path).collect())["value"].tolist()
        assert whole == ([4, 5, 6] if "part-1" in path else list(range(10)))
    fsspec.filesystem("memory").rm(f"/xshards-{kind}", recursive=True)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            """Log nothing."""

    handler = functools.partial(Quiet, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{served.server_address[1]}"
        served.shutdown()


def test_readers_accept_http_urls(tmp_path: Path, server: str) -> None:
    write("csv", tmp_path)
    shards = read_csv([f"{server}/part-0.csv", f"{server}/part-2.csv"])
    assert concat_rows(shards.collect())["value"].tolist() == [0, 1, 2, 3, 7, 8, 9]


def test_readers_pass_options_to_pandas(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x;day\n1;2024-05-17\n\n2;2024-05-18\n")
    frame = read_csv(tmp_path, sep=";", parse_dates=["day"], dtype={"x": "float32"}).first()
    assert frame["x"].dtype == np.float32
    assert frame["day"].dt.day.tolist() == [17, 18]
    (tmp_path / "a.json").write_text('[{"x": 1}, {"x": 2}]')
    assert read_json(tmp_path).first()["x"].tolist() == [1, 2]
    write("parquet", tmp_path)
    assert list(read_parquet(tmp_path, ["value"]).first()) == ["value"]
    with pytest.raises(OptionError, match="chunksize"):
        read_csv(tmp_path, chunksize=10)


def test_partition_folders_become_frame_columns(tmp_path: Path) -> None:
    table(9).assign(year=2024).to_parquet(tmp_path / "t", partition_cols=["year", "location"])
    whole = concat_rows(read_parquet(tmp_path / "t").collect())
    assert whole["year"].tolist() == [2024] * 9
    assert {place: set(rows["value"]) for place, rows in whole.groupby("location")} == {
        f"l{i}": {i, i + 3, i + 6} for i in range(3)
    }
    chosen = read_parquet(tmp_path / "t", columns=["location", "value"])
    assert list(chosen.first()) == ["location", "value"]


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(StorageNotFoundError, match="nothing.csv"):
        read_csv(tmp_path / "nothing.csv")
    with pytest.raises(StorageNotFoundError, match="no file matches"):
        read_csv(f"{tmp_path}/*.csv")
    with pytest.raises(OptionError, match="at least one"):
        read_csv([])
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(PartitionError, match="partition 0: .*bad.json"):
        read_json(tmp_path).collect()


# --- complete programs


@pytest.mark.needs("ray", "pyspark")
def test_orca_style_program_runs(engine: Any, tmp_path: Path) -> None:
    write("csv", tmp_path, rows=60, files=3)
    csv_path = str(tmp_path)
    use = functools.partial(read_csv, engine=engine)
    shard = use(csv_path)

    def negative(df: Any, column_name: str) -> Any:
        df[column_name] = df[column_name] * (-1)
        return df

    train_shards = shard.transform_shard(negative, "value")

    shard.partition_by(cols="location", num_partitions=4)
    location_list = shard["location"].unique()

    assert isinstance(location_list, np.ndarray)
    assert location_list.tolist() == ["l0", "l1", "l2"]
    assert concat_rows(train_shards.collect())["value"].tolist() == [-i for i in range(60)]
    assert concat_rows(shard.collect())["value"].tolist() == list(range(60))
    by_place = shard.partition_by(cols="location", num_partitions=4)
    homes = [set(part["location"]) for part in by_place.collect()]
    assert len(homes) == 4
    assert sorted(place for home in homes for place in home) == ["l0", "l1", "l2"]
    assert len(by_place) == 60


SNIPPETS = """
import numpy as np
from quire.distributed import XShards

train_images = np.random.random((20, 3, 224, 224))
train_label_images = np.zeros(20)
train_shards = XShards.partition([train_images, train_label_images])

def transform_to_dict(train_data):
    return {"x": train_data[0], "y": train_data[1]}

train_shards = train_shards.transform_shard(transform_to_dict)
---
from quire.distributed.pandas import read_csv
csv_path = "csv_file_or_folder"
shard = read_csv(csv_path)
---
def negative(df, column_name):
    df[column_name] = df[column_name] * (-1)
    return df

train_shards = shard.transform_shard(negative, 'value')
---
shard.partition_by(cols="location", num_partitions=4)
location_list = shard["location"].unique()
"""


def test_orca_snippets_run_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("csv_file_or_folder").mkdir()
    write("csv", "csv_file_or_folder")
    first, *others = SNIPPETS.split("---")
    names: dict[str, Any] = {}
    exec(first, names)
    whole = concat_rows(names["train_shards"].collect())
    assert np.array_equal(whole["x"], names["train_images"])
    assert np.array_equal(whole["y"], np.zeros(20))
    assert len(names["train_shards"]) == 20
    for snippet in others:
        exec(snippet, names)
    assert concat_rows(names["train_shards"].collect())["value"].tolist() == [-i for i in range(10)]
    assert names["location_list"].tolist() == ["l0", "l1", "l2"]
