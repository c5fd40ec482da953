"""Datasets on the Hugging Face Hub: opening splits, the requests that it takes, and faults of the server."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from quire import BaseDocument, DocumentArray
from quire.data import StreamingDataset
from quire.errors import OptionError, StorageError, StorageNotFoundError
from quire.files import RemoteOptions, open_folder
from quire.storage import Split, StoredDataset, open_dataset, write_dataset
from quire.typing import AudioBytes, ImageBytes, NdArray
from tests.storage.hub_server import TOKEN, Hub, run_hub, use_endpoint

pytestmark = pytest.mark.needs("pyarrow", "fsspec", "xxhash", "huggingface_hub", "yaml")

PETS = "hf://datasets/owner/pets"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    with run_hub() as server:
        use_endpoint(server, monkeypatch)
        yield server


def parquet(table: pa.Table, features: Mapping[str, Any] | None = None, **options: Any) -> bytes:
    """Return a Parquet file, with the features that `datasets` stores in its metadata."""
    if features is not None:
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    file = io.BytesIO()
    pq.write_table(table, file, **options)
    return file.getvalue()


def numbers(*values: int) -> bytes:
    return parquet(pa.table({"number": list(values)}))


def read_numbers(dataset: StoredDataset[Any]) -> list[int]:
    return [row.number for row in dataset]


SHARDED = {
    "README.md": b"# Pets\n",
    "data/train-00000-of-00003.parquet": numbers(0, 1),
    "data/train-00001-of-00003.parquet": numbers(2, 3, 4),
    "data/train-00002-of-00003.parquet": numbers(5),
    "data/test-00000-of-00001.parquet": numbers(10),
}


# --- configs and splits


def test_split_selects_files_by_name(hub: Hub) -> None:
    hub.create("owner/pets", SHARDED)
    assert read_numbers(open_dataset(PETS, split="train")) == [0, 1, 2, 3, 4, 5]
    assert read_numbers(open_dataset(PETS, split="test")) == [10]


@pytest.mark.parametrize(
    ("files", "splits"),
    [
        ({"train.parquet": numbers(1), "val.parquet": numbers(2)}, {"train": [1], "validation": [2]}),
        ({"train/a.parquet": numbers(1), "dev/b.parquet": numbers(2)}, {"train": [1], "validation": [2]}),
        ({"x/part-0.parquet": numbers(1), "x/part-1.parquet": numbers(2)}, {"train": [1, 2]}),
        ({"data/my_eval-2024.parquet": numbers(1), "data/train_1.parquet": numbers(2)}, {"train": [2]}),
        ({"contest.parquet": numbers(1), "latest.parquet": numbers(2)}, {"train": [1, 2]}),
        ({"data/odd.name-00000-of-00001.parquet": numbers(3), ".hidden/x.parquet": numbers(4)}, {"odd.name": [3]}),
    ],
)
def test_splits_follow_words_in_names(hub: Hub, files: dict[str, bytes], splits: dict[str, list[int]]) -> None:
    hub.create("owner/pets", files)
    for split, expected in splits.items():
        assert read_numbers(open_dataset(PETS, split=split)) == expected
    with pytest.raises(OptionError, match=f"the splits of the config 'default' are '{next(iter(splits))}'"):
        open_dataset(PETS, split="nothing")


CARD = b"""---
license: mit
configs:
- config_name: small
  data_files:
  - split: train
    path: files/a-*.parquet
  - split: held_out
    path:
    - files/**/b.parquet
    - other/c?.parquet
- config_name: large
  default: true
  data_files: files/a-[2-3].parquet
- config_name: inside
  data_dir: folder
---
# Pets
"""
CONFIGS = {
    "README.md": CARD,
    "files/a-1.parquet": numbers(1),
    "files/a-2.parquet": numbers(2),
    "files/deep/er/b.parquet": numbers(3),
    "other/c4.parquet": numbers(4),
    "other/c55.parquet": numbers(5),
    "folder/test.parquet": numbers(6),
    "folder/train.parquet": numbers(7),
}


def test_configs_and_patterns_come_from_the_card(hub: Hub) -> None:
    hub.create("owner/pets", CONFIGS)
    assert read_numbers(open_dataset(PETS, config="small", split="train")) == [1, 2]
    assert read_numbers(open_dataset(PETS, config="small", split="held_out")) == [3, 4]
    assert read_numbers(open_dataset(PETS)) == [2]  # the default config, which has one split
    assert read_numbers(open_dataset(PETS, config="inside", split="test")) == [6]


def test_unknown_config_lists_those_that_exist(hub: Hub) -> None:
    hub.create("owner/pets", CONFIGS)
    with pytest.raises(OptionError, match=r"config='smal': the configs are 'small', 'large', 'inside'.*'small'\?"):
        open_dataset(PETS, config="smal")
    hub.create("owner/pets", {**CONFIGS, "README.md": CARD.replace(b"  default: true\n", b"")})
    with pytest.raises(OptionError, match="config=None: the configs are 'small', 'large', 'inside'. Pass one of them"):
        open_dataset(PETS)


def test_unknown_split_lists_those_that_exist(hub: Hub) -> None:
    hub.create("owner/pets", SHARDED)
    with pytest.raises(OptionError, match=r"split='trian': .* are 'train', 'test'. Did you mean 'train'\?"):
        open_dataset(PETS, split="trian")
    with pytest.raises(OptionError, match="split=None: .* are 'train', 'test'. Pass one of them"):
        open_dataset(PETS)
    with pytest.raises(OptionError, match=r"split='train\[:10%\]': .* where=Split"):
        open_dataset(PETS, split="train[:10%]")


def test_converted_files_are_read_where_the_repository_has_no_parquet(hub: Hub) -> None:
    repository = hub.create("owner/pets", {"README.md": b"# Pets", "rows.csv": b"number\n1\n"})
    converted = {"default/train/0000.parquet": numbers(1), "default/partial-test/0000.parquet": numbers(2)}
    repository.commit(converted, "refs/convert/parquet")
    dataset = open_dataset(PETS, split="train")
    assert hub.count() == {"refs": 1, "tree": 2, "resolve": 1, "cdn": 1}
    assert read_numbers(dataset) == [1]
    with pytest.raises(OptionError, match="are 'train', 'partial-test'"):  # which has only the first rows
        open_dataset(PETS, split="test")


def test_converted_files_of_another_revision_are_not_read(hub: Hub) -> None:
    repository = hub.create("owner/pets", {"rows.csv": b"number\n1\n"})
    old = repository.refs["refs/heads/main"]
    repository.commit({"rows.csv": b"number\n2\n"})
    repository.commit({"default/train/0000.parquet": numbers(2)}, "refs/convert/parquet")
    assert read_numbers(open_dataset(PETS)) == [2]
    with pytest.raises(StorageNotFoundError, match="has no Parquet files, and the Hub has made none of this revision"):
        open_dataset(f"{PETS}@{old}")


def test_layout_of_converted_files_is_known_in_the_repository(hub: Hub) -> None:
    hub.create("owner/pets", {"en/train/0000.parquet": numbers(1), "de/train/0000.parquet": numbers(2)})
    assert read_numbers(open_dataset(PETS, config="de", split="train")) == [2]


def test_path_names_a_folder_or_a_file(hub: Hub) -> None:
    hub.create("owner/pets", CONFIGS)
    assert read_numbers(open_dataset(f"{PETS}/other")) == [4, 5]
    assert read_numbers(open_dataset(f"{PETS}/files/a-2.parquet")) == [2]
    with pytest.raises(OptionError, match="split='train': the path names the files already"):
        open_dataset(f"{PETS}/other", split="train")
    with pytest.raises(StorageNotFoundError, match="there is no file here that ends with .parquet"):
        open_dataset(f"{PETS}/nothing")


def test_dataset_of_quire_is_read_with_its_class(hub: Hub, tmp_path: Path) -> None:
    class Kept(BaseDocument):
        pixels: NdArray[2]

    write_dataset([Kept(pixels=np.array([i, i])) for i in range(3)], tmp_path / "kept", document_type=Kept)
    paths = [path for path in (tmp_path / "kept").rglob("*") if path.is_file()]
    hub.create("owner/kept", {str(path.relative_to(tmp_path / "kept")): path.read_bytes() for path in paths})
    dataset = open_dataset("hf://datasets/owner/kept")
    assert dataset.document_type is Kept
    assert dataset[2].pixels.tolist() == [2, 2]
    with pytest.raises(OptionError, match="a dataset that quire wrote has no splits"):
        open_dataset("hf://datasets/owner/kept", split="train")


def test_split_of_another_dataset_is_an_error(tmp_path: Path) -> None:
    pq.write_table(pa.table({"number": [1]}), tmp_path / "a.parquet")
    for option in ({"split": "train"}, {"config": "default"}):
        with pytest.raises(OptionError, match="is an option of datasets on the Hugging Face Hub"):
            open_dataset(tmp_path, **option)


@pytest.mark.parametrize("url", ["hf://datasets/pets", "hf://datasets/", "hf://datasets/owner"])
def test_incomplete_address_is_an_error(url: str) -> None:
    with pytest.raises(OptionError, match="is hf://datasets/owner/name"):
        open_dataset(url)


# --- features


def test_features_become_types(hub: Hub) -> None:
    features = {
        "image": {"_type": "Image"},
        "sound": {"sampling_rate": 16000, "_type": "Audio"},
        "label": {"names": ["cat", "dog"], "_type": "ClassLabel"},
        "grid": {"shape": [2, 2], "dtype": "float32", "_type": "Array2D"},
        "tags": {"feature": {"dtype": "string", "_type": "Value"}, "_type": "List"},
        "part": {"photo": {"_type": "Image"}, "kind": {"names": ["a"], "_type": "ClassLabel"}},
        "boxes": [{"x": {"dtype": "int64", "_type": "Value"}}],
    }
    file = {"bytes": b"content", "path": "a.png"}
    table = pa.table(
        {
            "image": [file, file],
            "sound": [None, {"bytes": b"sound", "path": None}],
            "label": [1, 0],
            "grid": pa.array([[[1.0, 2.0], [3.0, 4.0]]] * 2, pa.list_(pa.list_(pa.float32()))),
            "tags": [["a"], ["b", "c"]],
            "part": [{"photo": file, "kind": 0}, {"photo": file, "kind": None}],
            "boxes": [[{"x": 1}], [{"x": 2}, {"x": 3}]],
            "two words": [1.5, None],
        }
    )
    hub.create("owner/pets", {"data.parquet": parquet(table, features)})
    dataset = open_dataset(PETS)
    fields = dataset.document_type.model_fields
    assert fields["image"].annotation is ImageBytes
    assert fields["sound"].annotation == AudioBytes | None
    assert fields["label"].annotation is int
    assert fields["label"].json_schema_extra == {"names": ["cat", "dog"]}
    assert fields["sound"].json_schema_extra == {"huggingface": features["sound"]}
    assert fields["tags"].annotation == list[str]
    part = fields["part"].annotation.model_fields
    assert part["photo"].annotation is ImageBytes
    assert part["kind"].annotation == int | None
    assert part["kind"].json_schema_extra == {"names": ["a"]}
    required = {name for name, field in fields.items() if field.is_required()}
    assert required == {"image", "label", "grid", "tags", "part", "boxes"}
    row = dataset[0]
    assert row.image == b"content"
    assert row.sound is None
    assert row.grid.dtype == np.float32
    assert row.grid.tolist() == [[1, 2], [3, 4]]
    assert row.part.photo == b"content"
    assert [box.x for box in row.boxes] == [1]
    assert dataset[:].label.tolist() == [1, 0]


def test_own_class_is_read(hub: Hub) -> None:
    class Numbered(BaseDocument):
        number: float
        note: str = "none"

    hub.create("owner/pets", SHARDED)
    dataset = open_dataset(PETS, Numbered, split="train", where={"number": {"$gt": 3}})
    assert [(row.number, row.note) for row in dataset] == [(4.0, "none"), (5.0, "none")]


# --- revisions and access


def test_revision_is_a_branch_a_tag_a_commit_or_a_pull_request(hub: Hub) -> None:
    repository = hub.create("owner/pets", {"a.parquet": numbers(1)})
    first = repository.refs["refs/heads/main"]
    repository.refs["refs/tags/v1"] = first
    repository.commit({"a.parquet": numbers(2)})
    repository.commit({"a.parquet": numbers(3)}, "refs/heads/other/branch")
    repository.commit({"a.parquet": numbers(4)}, "refs/pr/7")
    values = {
        "": 2,
        "@main": 2,
        "@v1": 1,
        f"@{first}": 1,
        "@other%2Fbranch": 3,
        "@refs/pr/7": 4,
        "@refs%2Fpr%2F7": 4,
    }
    for revision, expected in values.items():
        assert read_numbers(open_dataset(f"{PETS}{revision}")) == [expected]
    with pytest.raises(StorageNotFoundError, match="has no revision 'v2'. A revision is a branch, a tag, or a commit"):
        open_dataset(f"{PETS}@v2")


def test_open_dataset_does_not_change_with_the_branch(hub: Hub) -> None:
    repository = hub.create("owner/pets", {"a.parquet": numbers(1, 2)})
    dataset = open_dataset(PETS)
    repository.commit({"a.parquet": numbers(3, 4)})
    assert read_numbers(pickle.loads(pickle.dumps(dataset))) == [1, 2]
    assert read_numbers(open_dataset(PETS)) == [3, 4]


def test_private_dataset_needs_a_token(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.create("owner/pets", {"a.parquet": numbers(1)}, private=True)
    assert read_numbers(open_dataset(PETS)) == [1]  # HF_TOKEN
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(
        StorageNotFoundError, match=r"no dataset owner/pets on the Hub, or it is private .* set HF_TOKEN"
    ):
        open_dataset(PETS)
    remote = RemoteOptions(storage_options={"token": TOKEN})
    assert read_numbers(open_dataset(PETS, remote=remote)) == [1]
    assert TOKEN not in repr(open_dataset(PETS, remote=remote).options)
    with pytest.raises(OptionError, match="storage_options of the Hub are token and endpoint, got 'key'"):
        open_dataset(PETS, remote=RemoteOptions(storage_options={"key": "x"}))


def test_writing_files_is_an_error(hub: Hub) -> None:
    hub.create("owner/pets", {"README.md": b"# Pets"})
    with pytest.raises(StorageError, match="datasets on the Hub are written by push_to_hub\\('owner/pets'\\)"):
        write_dataset([Numbered(number=1)], PETS, document_type=Numbered)


# --- requests


def test_opening_takes_three_requests_and_one_for_each_shard(hub: Hub) -> None:
    shards = {f"data/train-{i:05d}-of-00040.parquet": numbers(i, i) for i in range(40)}
    hub.create("owner/pets", {"README.md": b"# Pets", **shards})
    dataset = open_dataset(PETS, split="train")
    # The Hub redirects each request of a large file to its content delivery network.
    assert hub.count() == {"refs": 1, "tree": 1, "resolve": 1 + 40, "cdn": 40}
    assert len(dataset) == 80
    assert not any(request.method == "HEAD" for request in hub.requests)


def test_footers_are_read_once_on_a_machine(hub: Hub, tmp_path: Path) -> None:
    hub.create("owner/pets", SHARDED)
    dataset = open_dataset(PETS, split="train", cache=tmp_path / "cache")
    assert hub.count()["cdn"] == 3
    assert dataset.take(range(6)).number.tolist() == [0, 1, 2, 3, 4, 5]
    assert hub.count() == {"cdn": 3}  # a row group of each file
    again = open_dataset(PETS, split="train", cache=tmp_path / "cache")
    assert hub.count() == {"refs": 1, "tree": 1, "resolve": 1}  # no footer, and a small card
    assert read_numbers(again) == [0, 1, 2, 3, 4, 5]


def test_damaged_footer_in_the_cache_is_read_again(hub: Hub, tmp_path: Path) -> None:
    hub.create("owner/pets", SHARDED)
    open_dataset(PETS, split="train", cache=tmp_path / "cache")
    copies = [path for path in (tmp_path / "cache" / "blocks").rglob("*") if path.is_file() and path.stat().st_size]
    assert copies
    for path in copies:
        path.write_bytes(bytes(path.stat().st_size))
    assert read_numbers(open_dataset(PETS, split="train", cache=tmp_path / "cache")) == [0, 1, 2, 3, 4, 5]


def test_list_of_files_takes_one_listing(hub: Hub, tmp_path: Path) -> None:
    hub.create("owner/pets", SHARDED)
    files = [f"{PETS}/data/test-00000-of-00001.parquet", f"{PETS}/data/train-00000-of-00003.parquet"]
    dataset = open_dataset(files, Numbered, cache=tmp_path / "cache")
    assert hub.count() == {"refs": 1, "tree": 1, "resolve": 2, "cdn": 2}
    assert read_numbers(dataset) == [10, 0, 1]


def test_commit_needs_no_request_for_the_revision(hub: Hub) -> None:
    repository = hub.create("owner/pets", {"a.parquet": numbers(1)})
    open_dataset(f"{PETS}@{repository.refs['refs/heads/main']}")
    assert hub.count() == {"tree": 1, "resolve": 1, "cdn": 1}


def test_other_processes_do_not_list_files(hub: Hub, tmp_path: Path) -> None:
    hub.create("owner/pets", SHARDED)
    dataset = open_dataset(PETS, split="train", cache=tmp_path / "cache")
    hub.count()
    assert pickle.loads(pickle.dumps(dataset))[5].number == 5
    assert set(hub.count()) <= {"resolve", "cdn"}


def test_redirect_is_followed_once_for_a_file(hub: Hub, tmp_path: Path) -> None:
    hub.create("owner/pets", {"a.parquet": parquet(pa.table({"number": list(range(1000))}), row_group_size=100)})
    dataset = open_dataset(PETS, cache=tmp_path / "cache")
    folder, [shard] = dataset.folder, dataset.shards
    assert hub.count()["resolve"] == 1
    content = b"".join(folder.read_range(shard.name, start, start + 100) for start in range(0, 500, 100))
    assert content == hub.files("owner/pets")["a.parquet"][:500]
    assert hub.count() == {"cdn": 5}
    hub.signature = "second"  # the signature of the address has expired
    assert folder.read_range(shard.name, 0, 4) == b"PAR1"
    assert hub.count() == {"cdn": 2, "resolve": 1}


def test_long_footer_takes_a_second_request(hub: Hub) -> None:
    table = pa.table({f"column_{i}": list(range(40)) for i in range(60)})
    content = parquet(table, row_group_size=1)
    assert int.from_bytes(content[-8:-4], "little") > 1 << 16
    hub.create("owner/pets", {"a.parquet": content})
    dataset = open_dataset(PETS)
    assert hub.count() == {"refs": 1, "tree": 1, "resolve": 1, "cdn": 2}
    assert dataset[39].column_59 == 39


def test_folder_finds_single_files(hub: Hub) -> None:
    hub.create("owner/pets", SHARDED)
    folder = open_folder(f"{PETS}/data")
    assert folder.exists("test-00000-of-00001.parquet")
    assert folder.size("test-00000-of-00001.parquet") == len(SHARDED["data/test-00000-of-00001.parquet"])
    assert not folder.exists("nothing")
    assert not open_folder(PETS).exists("data")  # a folder
    assert hub.count() == {"paths-info": 4}
    assert [entry.name for entry in open_folder(PETS).list((".md",))] == ["README.md"]
    assert open_folder(f"{PETS}/nothing").list() == []
    requests = [("README.md", 0, 3), ("README.md", 2, 6), ("README.md", 3, 3)]
    assert open_folder(PETS).read_ranges(requests) == [b"# P", b"Pets", b""]


def test_listing_follows_pages(hub: Hub) -> None:
    hub.create("owner/pets", {"a.parquet": numbers(1), **{f"notes/{i:04d}.txt": b"x" for i in range(1200)}})
    assert read_numbers(open_dataset(PETS)) == [1]
    assert hub.count()["tree"] == 2


# --- faults


def test_limit_of_requests_is_waited_for(hub: Hub) -> None:
    hub.create("owner/pets", SHARDED)
    hub.limited, hub.retry_after = 2, "0"
    assert read_numbers(open_dataset(PETS, split="train")) == [0, 1, 2, 3, 4, 5]
    hub.limited, hub.retry_after = 1, "1"
    assert len(open_dataset(PETS, split="train")) == 6


def test_long_wait_is_an_error_at_once(hub: Hub) -> None:
    hub.create("owner/pets", SHARDED)
    dataset = open_dataset(PETS, split="train")
    hub.limited, hub.retry_after = 1, "3600"
    with pytest.raises(StorageError, match="asks to wait for 3600 seconds. Log in for a higher limit"):
        dataset.folder.read_range(dataset.shards[0].name, 0, 4)


def test_cut_connection_is_retried(hub: Hub) -> None:
    hub.create("owner/pets", SHARDED)
    hub.cuts = 3
    dataset = open_dataset(PETS, split="train")
    hub.cuts = 2
    assert read_numbers(dataset) == [0, 1, 2, 3, 4, 5]


def test_file_that_is_shorter_than_the_listing_is_an_error(hub: Hub) -> None:
    hub.create("owner/pets", SHARDED)
    folder = open_dataset(PETS, split="train").folder
    with pytest.raises(StorageError, match="Is the file complete"):
        folder.read_range("data/test-00000-of-00001.parquet", 0, 1 << 20)
    with pytest.raises(StorageNotFoundError, match="there is no such file"):
        folder.read_range("nothing.parquet", 0, 4)


# --- streaming


class Numbered(BaseDocument):
    number: int


@pytest.mark.needs("torch")
@pytest.mark.parametrize("method", [None, "fork", "spawn"])
def test_stream_has_every_row_once(hub: Hub, tmp_path: Path, method: str | None) -> None:
    import torch

    tables = [pa.table({"number": list(range(start, start + 50))}) for start in range(0, 200, 50)]
    files = {f"data/train-{i:05d}-of-00004.parquet": parquet(t, row_group_size=10) for i, t in enumerate(tables)}
    hub.create("owner/pets", files)
    dataset = open_dataset(PETS, Numbered, split="train", cache=tmp_path / "cache")
    hub.count()
    stream = StreamingDataset[Numbered](dataset, 16, seed=1)
    workers = {} if method is None else {"num_workers": 2, "multiprocessing_context": method}
    loader = torch.utils.data.DataLoader(stream, batch_size=None, **workers)
    rows = [number for batch in loader for number in batch.number.tolist()]
    assert sorted(rows) == list(range(200))
    assert rows != sorted(rows)
    counts = hub.count()
    assert set(counts) <= {"resolve", "cdn"}


def test_array_reads_a_split(hub: Hub) -> None:
    hub.create("owner/pets", SHARDED)
    documents = DocumentArray[Numbered](
        open_dataset(PETS, Numbered, split="train", where=Split("number", (0.5, 0.5), 0))
    )
    others = open_dataset(PETS, Numbered, split="train", where=Split("number", (0.5, 0.5), 1))
    assert sorted([*documents.number, *(row.number for row in others)]) == [0, 1, 2, 3, 4, 5]
