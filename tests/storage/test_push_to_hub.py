"""Writing datasets to the Hugging Face Hub, and reading them with `datasets` and with quire."""

from __future__ import annotations

import enum
import io
from collections.abc import Iterator
from datetime import date, datetime, timezone
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from pydantic import Field

from quire import BaseDocument, DocumentArray
from quire.errors import EncodeError, OptionError, StorageError
from quire.storage import open_dataset, write_dataset
from quire.storage._hub_reader import find_configs
from quire.storage._hub_writer import features_to_yaml, update_card
from quire.storage._huggingface import write_huggingface
from quire.typing import AudioBytes, ImageBytes, NdArray, TorchTensor, float32, uint8
from tests.storage.hub_server import Hub, run_hub, use_endpoint

pytestmark = [
    pytest.mark.needs("pyarrow", "fsspec", "xxhash", "huggingface_hub", "yaml", "datasets", "PIL", "torch"),
    pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning"),  # uploads of huggingface_hub
]

PETS = "hf://datasets/owner/pets"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    with run_hub() as server:
        use_endpoint(server, monkeypatch)
        yield server


@pytest.fixture
def datasets(hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Return the library `datasets`, which talks to the server and has a cache of its own."""
    import datasets
    from huggingface_hub import HfFileSystem

    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", hub.endpoint)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(datasets.config, "HF_MODULES_CACHE", tmp_path / "modules")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    HfFileSystem.clear_instance_cache()  # it keeps listings
    datasets.disable_progress_bars()
    yield datasets
    HfFileSystem.clear_instance_cache()


class Kind(enum.Enum):
    CAT = "cat"
    DOG = "dog"


class Part(BaseDocument):
    text: str
    score: float | None = None


class Pet(BaseDocument):
    image: ImageBytes
    sound: AudioBytes | None = None
    label: Annotated[int, Field(json_schema_extra={"names": ["cat", "dog"]})]
    kind: Kind
    grid: NdArray[uint8, 4, 3]
    vector: NdArray[float32]
    volume: TorchTensor[float32, 2, 2, 2] | None = None
    born: date
    at: datetime
    part: Part | None = None
    parts: DocumentArray[Part]
    counts: dict[str, int]
    tags: list[str]


def png(value: int) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(np.full((4, 4, 3), value, np.uint8)).save(file, "png")
    return file.getvalue()


def make_pets(count: int, start: int = 0) -> DocumentArray[Pet]:
    import torch

    return DocumentArray[Pet](
        [
            Pet(
                id=f"{i}",
                image=png(i),
                label=i % 2,
                kind=Kind.DOG if i % 2 else Kind.CAT,
                grid=np.full((4, 3), i, np.uint8),
                vector=np.arange(i % 3, dtype=np.float32),
                volume=None if i % 2 else torch.full((2, 2, 2), i / 2),
                born=date(2024, 1, 1 + i % 28),
                at=datetime(2024, 1, 1, 12, tzinfo=timezone.utc),
                part=Part(id="p", text=f"part {i}") if i % 3 else None,
                parts=[Part(id=f"{j}", text="x", score=j / 2) for j in range(i % 3)],
                counts={"legs": 4, "age": i},
                tags=["a", "b"][: i % 3],
            )
            for i in range(start, start + count)
        ]
    )


def metadata_of(hub: Hub, name: str = "owner/pets") -> dict[str, Any]:
    text = hub.files(name)["README.md"].decode()
    metadata: dict[str, Any] = yaml.safe_load(text.split("---\n")[1])
    return metadata


# --- round trips


def test_datasets_restores_features_and_values(hub: Hub, datasets: Any) -> None:
    pets = make_pets(7)
    address = pets.push_to_hub("owner/pets")
    assert address == f"{PETS}@{hub.repositories['owner/pets'].refs['refs/heads/main']}"
    table = datasets.load_dataset("owner/pets", split="train")
    features = table.features
    assert isinstance(features["image"], datasets.Image)
    assert isinstance(features["sound"], datasets.Audio)
    assert features["label"] == datasets.ClassLabel(names=["cat", "dog"])
    assert features["grid"] == datasets.Array2D((4, 3), "uint8")
    assert features["volume"] == datasets.Array3D((2, 2, 2), "float32")
    assert features["part"] == {
        name: datasets.Value(t)
        for name, t in zip(("id", "text", "score"), ("string", "string", "float64"), strict=True)
    }
    assert len(table) == 7
    row = table[4]
    assert np.asarray(row["image"]).tolist() == np.full((4, 4, 3), 4).tolist()
    assert row["sound"] is None
    assert row["grid"] == np.full((4, 3), 4).tolist()
    assert row["volume"] == np.full((2, 2, 2), 2.0).tolist()
    assert row["vector"] == [0.0]
    assert row["kind"] == "cat"
    assert row["born"] == date(2024, 1, 5)
    assert row["at"] == datetime(2024, 1, 1, 12, tzinfo=timezone.utc)
    assert row["part"] == {"id": "p", "text": "part 4", "score": None}
    assert row["counts"] == '{"legs": 4, "age": 4}'
    assert table[3]["part"] is None
    assert table[3]["volume"] is None
    assert [list(row["tags"]) for row in table] == [pet.tags for pet in pets]


@pytest.mark.usefixtures("hub")
def test_quire_reads_the_same_documents() -> None:
    pets = make_pets(7)
    address = pets.push_to_hub("owner/pets")
    assert DocumentArray[Pet](open_dataset(address, Pet)) == pets


def test_class_from_features_is_pushed_with_the_same_features(datasets: Any) -> None:
    make_pets(5).push_to_hub("owner/pets")
    dataset = open_dataset(PETS, columns=["image", "label", "grid", "sound"])
    assert dataset.document_type.model_fields["image"].annotation is ImageBytes
    dataset.push_to_hub("owner/copy")
    one, other = (datasets.load_dataset(name, split="train") for name in ("owner/pets", "owner/copy"))
    assert other.features == datasets.Features(
        {name: one.features[name] for name in ("image", "sound", "label", "grid")}
    )
    assert other.cast_column("image", datasets.Image(decode=False))[4]["image"]["bytes"] == png(4)


def test_dataset_of_datasets_is_read_and_appended_to(hub: Hub, datasets: Any) -> None:
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "kind": datasets.ClassLabel(names=["x", "y", "z"]),
            "two words": datasets.Value("int32"),
            "entries": datasets.List({"a": datasets.Value("string")}),
            "point": datasets.List(datasets.Value("float32"), length=2),
        }
    )
    rows = {
        "image": [png(1), png(2), None],
        "kind": [0, 2, None],
        "two words": [1, 2, 3],
        "entries": [[{"a": "b"}], [], None],
        "point": [[1.0, 2.0]] * 3,
    }
    theirs = datasets.Dataset.from_dict(rows, features=features)
    datasets.DatasetDict(train=theirs, test=theirs.select([0])).push_to_hub("owner/theirs", "sub")
    dataset = open_dataset("hf://datasets/owner/theirs", split="train")
    assert len(dataset) == 3
    assert dataset[1].image == png(2)
    assert dataset[2].image is None
    assert dataset.document_type.model_fields["kind"].json_schema_extra == {"names": ["x", "y", "z"]}
    assert [entry.a for entry in dataset[0].entries] == ["b"]
    assert dataset[0].point.tolist() == [1, 2]
    dataset[[0, 1]].push_to_hub("owner/theirs", config="sub", split="train", append=True)
    again = datasets.load_dataset("owner/theirs", "sub")
    assert {split: len(part) for split, part in again.items()} == {"train": 5, "test": 1}
    assert again["train"].features["kind"] == features["kind"]
    assert again["train"]["two words"][:] == [1, 2, 3, 1, 2]
    info = metadata_of(hub, "owner/theirs")["dataset_info"]
    assert [(split["name"], split["num_examples"]) for split in info["splits"]] == [("train", 5), ("test", 1)]


def test_stored_dataset_is_pushed_in_shards(hub: Hub, datasets: Any, tmp_path: Path) -> None:
    class Noise(BaseDocument):
        number: int
        values: NdArray[float32, 1000]

    random = np.random.default_rng(0)
    rows = (Noise(number=i, values=random.random(1000, np.float32)) for i in range(6000))
    write_dataset(rows, tmp_path / "noise", document_type=Noise)
    stored = open_dataset(tmp_path / "noise", Noise)
    stored.filter({"number": {"$gte": 1000}}).push_to_hub("owner/noise", shard_bytes=8 << 20)
    names = sorted(name for name in hub.files("owner/noise") if name.endswith(".parquet"))
    assert names == [f"data/train-{i:05d}-of-{len(names):05d}.parquet" for i in range(len(names))]
    assert len(names) > 1
    groups = [pq.ParquetFile(io.BytesIO(hub.files("owner/noise")[name])).metadata.row_group(0) for name in names]
    assert max(group.total_byte_size for group in groups) < 6 << 20
    counts = hub.count()
    assert counts["commit"] == 1
    assert counts["lfs"] == len(names)
    table = datasets.load_dataset("owner/noise", split="train")
    assert table["number"][:] == list(range(1000, 6000))
    again = open_dataset("hf://datasets/owner/noise", Noise)
    assert (again[4999].values == stored[5999].values).all()


def test_folder_for_load_from_disk_has_features(datasets: Any, tmp_path: Path) -> None:
    (tmp_path / "pets").mkdir()
    write_huggingface(Pet, make_pets(5), tmp_path / "pets")
    table = datasets.load_from_disk(str(tmp_path / "pets"))
    assert isinstance(table.features["image"], datasets.Image)
    assert table.features["grid"] == datasets.List(datasets.List(datasets.Value("uint8")))
    assert table.features["label"] == datasets.ClassLabel(names=["cat", "dog"])
    assert np.asarray(table[4]["image"]).tolist() == np.full((4, 4, 3), 4).tolist()
    assert table[4]["grid"] == np.full((4, 3), 4).tolist()
    assert table.with_format("numpy")[4]["volume"].tolist() == np.full((2, 2, 2), 2.0).tolist()
    assert table[3]["volume"] is None
    assert table.map(lambda row: {"total": sum(map(sum, row["grid"]))})["total"][4] == 48


# --- splits, configs and branches


class Numbered(BaseDocument):
    number: int


def numbered(*values: int) -> DocumentArray[Numbered]:
    return DocumentArray[Numbered]([Numbered(id=f"{value}", number=value) for value in values])


def read(split: str, config: str | None = None, revision: str = "") -> list[int]:
    return [row.number for row in open_dataset(f"{PETS}{revision}", Numbered, split=split, config=config)]


def test_split_is_replaced_and_others_stay(hub: Hub) -> None:
    numbered(1, 2).push_to_hub("owner/pets")
    numbered(3).push_to_hub("owner/pets", split="test")
    numbered(4, 5, 6).push_to_hub("owner/pets")
    assert read("train") == [4, 5, 6]
    assert read("test") == [3]
    metadata = metadata_of(hub)
    assert [split["num_examples"] for split in metadata["dataset_info"]["splits"]] == [3, 1]
    assert metadata["size_categories"] == ["n<1K"]
    assert metadata["configs"] == [
        {
            "config_name": "default",
            "data_files": [{"split": "train", "path": "data/train-*"}, {"split": "test", "path": "data/test-*"}],
        }
    ]


def test_replacing_deletes_files_that_are_not_overwritten(hub: Hub) -> None:
    for values in ((1,), (2,), (3,)):
        numbered(*values).push_to_hub("owner/pets", append=True)
    assert sum(name.endswith(".parquet") for name in hub.files("owner/pets")) == 3
    numbered(7).push_to_hub("owner/pets")
    assert [name for name in hub.files("owner/pets") if name.endswith(".parquet")] == [
        "data/train-00000-of-00001.parquet"
    ]
    assert read("train") == [7]


def test_append_adds_files_with_new_numbers(hub: Hub, datasets: Any) -> None:
    numbered(1, 2).push_to_hub("owner/pets", append=True)  # the split is created
    before = hub.files("owner/pets")["data/train-00000-of-00001.parquet"]
    numbered(3).push_to_hub("owner/pets", append=True, commit_message="More")
    files = hub.files("owner/pets")
    assert files["data/train-00000-of-00001.parquet"] == before
    assert "data/train-00001-of-00002.parquet" in files
    assert read("train") == [1, 2, 3]
    assert datasets.load_dataset("owner/pets", split="train")["number"][:] == [1, 2, 3]
    assert hub.repositories["owner/pets"].messages[-1] == "More"
    assert metadata_of(hub)["dataset_info"]["splits"][0]["num_examples"] == 3


def test_append_keeps_the_types_of_the_dataset(hub: Hub) -> None:
    file = io.BytesIO()
    schema = pa.schema([("number", pa.int8()), ("share", pa.float32()), ("points", pa.list_(pa.float32()))])
    pq.write_table(pa.table({"number": [1], "share": [0.5], "points": [[0.25]]}, schema=schema), file)
    hub.create("owner/pets", {"train.parquet": file.getvalue()})
    rows = [*open_dataset(PETS)]
    DocumentArray[type(rows[0])](rows).push_to_hub("owner/pets", append=True)
    [name] = [name for name in hub.files("owner/pets") if name.startswith("data/")]
    appended = pq.read_schema(io.BytesIO(hub.files("owner/pets")[name]))
    assert [field.type for field in appended] == [pa.int8(), pa.float32(), pa.list_(pa.float32())]
    rows[0].number = 300
    with pytest.raises(EncodeError, match="number: .*300"):
        DocumentArray[type(rows[0])](rows).push_to_hub("owner/pets", append=True)
    rows[0].number, rows[0].share = 3, 0.1
    with pytest.raises(EncodeError, match="share: some numbers have more digits than float"):
        DocumentArray[type(rows[0])](rows).push_to_hub("owner/pets", append=True)


def test_configs_have_folders_of_their_own(hub: Hub, datasets: Any) -> None:
    numbered(1).push_to_hub("owner/pets", config="en")
    numbered(2).push_to_hub("owner/pets", config="de")
    make_pets(2).push_to_hub("owner/pets", config="pets")  # other columns
    assert read("train", "en") == [1]
    assert read("train", "de") == [2]
    assert datasets.load_dataset("owner/pets", "de", split="train")["number"][:] == [2]
    assert [info["config_name"] for info in metadata_of(hub)["dataset_info"]] == ["en", "de", "pets"]


@pytest.mark.usefixtures("hub")
def test_branch_is_created() -> None:
    numbered(1).push_to_hub("owner/pets")
    numbered(2).push_to_hub("owner/pets", revision="next")
    assert read("train") == [1]
    assert read("train", revision="@next") == [2]


def test_files_of_another_layout_stay_part_of_the_dataset(hub: Hub, datasets: Any) -> None:
    table = pa.table({"id": ["1"], "number": [1]})
    files = {}
    for name in ("train.parquet", "old/test.parquet"):
        file = io.BytesIO()
        pq.write_table(table, file)
        files[name] = file.getvalue()
    hub.create("owner/pets", files)
    numbered(2).push_to_hub("owner/pets", append=True)
    assert read("train") == [1, 2]
    assert read("test") == [1]
    parts = datasets.load_dataset("owner/pets")
    assert {split: part["number"][:] for split, part in parts.items()} == {"train": [1, 2], "test": [1]}


# --- the card


CARD = """---
# written by hand
license: mit
language:
- 'no'
- de
dataset_info:
  features: []
  splits: []
tags: [a, b]  # some
pretty_name: "Pets: all of them"
---

# Pets

Text with --- dashes.
---
The end.
"""


def test_text_and_other_metadata_of_the_card_stay(hub: Hub) -> None:
    hub.create("owner/pets", {"README.md": CARD.encode()})
    numbered(1).push_to_hub("owner/pets")
    text = hub.files("owner/pets")["README.md"].decode()
    before, after = CARD.split("dataset_info:\n  features: []\n  splits: []\n")
    assert text.startswith(before)
    assert text.endswith(after.partition("---\n")[2])
    assert 'tags: [a, b]  # some\npretty_name: "Pets: all of them"\n' in text
    assert metadata_of(hub)["language"] == ["no", "de"]
    assert metadata_of(hub)["dataset_info"]["splits"][0]["num_examples"] == 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no metadata\n",
        "---\n---\nempty\n",
        "---\nconfigs: [\n{config_name: a,\ndata_files: x}\n]\nlicense: mit\n---\n",
        "---\r\nlicense: mit\r\nconfigs:\r\n- config_name: a\r\n---\r\ntext\r\n",
        '---\n"configs": 1\nlicense: mit\n---\n',
        "---\nconfigs:\n# about a\n- a\n\n# about the license\nlicense: mit\n---\n",
    ],
)
def test_card_is_updated_whatever_its_yaml_is(text: str) -> None:
    changes = {"configs": [{"config_name": "b"}], "dataset_info": {"features": []}}
    updated = update_card(text, changes, "owner/pets")
    block, body = updated.removeprefix("---\n").split("---\n", 1)
    old = yaml.safe_load(text.split("---")[1]) if text.startswith("---") else None
    assert yaml.safe_load(block) == {**(old or {}), **changes}
    if text:
        assert body.strip() == text.rpartition("---")[2].strip()
    assert update_card(updated, changes, "owner/pets") == updated


LAYOUTS = [
    ["train.parquet", "test.parquet"],
    ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet", "data/extra.parquet"],
    ["data/my.split-00000-of-00001.parquet", "data/test-00000-of-00001-ab12.parquet"],
    ["train/a.parquet", "val/b.parquet", "other/c.parquet"],
    ["a/training/x.parquet", "b/dev/y.parquet"],
    ["my-train-1.parquet", "eval_2.parquet", "notes.parquet"],
    ["x/my_valid.parquet", "x/testing01.parquet"],
    ["contest.parquet", "trainer/a.parquet"],
    ["trained.parquet", "train1.parquet"],
    ["a.parquet", "b/c.parquet", "b/d/e.parquet"],
    [".hidden/train.parquet", "__special__/test.parquet", "rest.parquet"],
    ["Train.parquet", "TEST/a.parquet", "b.parquet"],
    ["train-test/a.parquet", "train/b.parquet"],
    ["2024.train/a.parquet", "evaluation data/b.parquet"],
]


@pytest.mark.parametrize("names", LAYOUTS, ids=" ".join)
def test_splits_are_those_of_datasets(names: list[str], datasets: Any, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    patterns = datasets.data_files.get_data_patterns(str(folder))
    theirs = datasets.data_files.DataFilesDict.from_patterns(patterns, base_path=str(folder))
    expected = {
        str(split): sorted({str(Path(file).relative_to(folder)) for file in files}) for split, files in theirs.items()
    }
    configs, _ = find_configs(names, {})
    assert configs == {"default": expected}


def test_features_have_the_form_of_datasets(datasets: Any) -> None:
    features = {
        "a": {"dtype": "int64", "_type": "Value"},
        "b": {"names": ["x", "y"], "_type": "ClassLabel"},
        "c": {"_type": "Image"},
        "d": {"sampling_rate": 16000, "_type": "Audio"},
        "e": {"shape": [2, 3], "dtype": "float32", "_type": "Array2D"},
        "f": [{"dtype": "string", "_type": "Value"}],
        "g": [[{"dtype": "float32", "_type": "Value"}]],
        "h": {"x": {"dtype": "bool", "_type": "Value"}, "y": {"_type": "Image"}},
        "i": [{"x": {"dtype": "bool", "_type": "Value"}, "z": [{"dtype": "int8", "_type": "Value"}]}],
        "j": [{"_type": "Image"}],
        "k": {"feature": {"dtype": "int64", "_type": "Value"}, "length": 2, "_type": "List"},
        "l": {"feature": {"x": {"dtype": "bool", "_type": "Value"}}, "_type": "LargeList"},
        "m": {"mode": None, "decode": False, "_type": "Image"},
    }
    assert datasets.Features._from_yaml_list(features_to_yaml(features)) == datasets.Features.from_dict(features)


# --- errors


def test_other_columns_are_an_error(hub: Hub) -> None:
    class Other(BaseDocument):
        number: str
        more: int

    numbered(1).push_to_hub("owner/pets")
    commits = len(hub.repositories["owner/pets"].commits)
    others = DocumentArray[Other]([Other(number="1", more=2)])
    for options in ({"append": True}, {"split": "test"}):
        with pytest.raises(
            EncodeError, match="'number' is string instead of int64; 'more' is new. All splits of a config"
        ):
            others.push_to_hub("owner/pets", **options)
    assert len(hub.repositories["owner/pets"].commits) == commits
    others.push_to_hub("owner/pets")  # the only split is replaced


def test_push_that_was_overtaken_changes_nothing(hub: Hub) -> None:
    numbered(1).push_to_hub("owner/pets")
    repository = hub.repositories["owner/pets"]
    hub.before_commit = lambda: repository.commit({**hub.files("owner/pets"), "other.txt": b"x"})
    with pytest.raises(
        StorageError, match="someone else has changed the dataset since .* Nothing was changed: push again"
    ):
        numbered(2).push_to_hub("owner/pets", append=True)
    assert read("train") == [1]
    numbered(2).push_to_hub("owner/pets", append=True)
    assert read("train") == [1, 2]


def test_server_that_cannot_be_reached_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with run_hub() as server:
        use_endpoint(server, monkeypatch)
    with pytest.raises(StorageError, match="owner/pets: pushing failed, and nothing was changed: ConnectError"):
        numbered(1).push_to_hub("owner/pets")


def test_token_without_rights_is_an_error(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StorageError, match="the token may not write there. Log in with `hf auth login`"):
        numbered(1).push_to_hub("owner/pets", token="hf_other")
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(StorageError, match="the token may not write there"):
        numbered(1).push_to_hub("owner/pets")
    assert not hub.repositories


def test_new_dataset_is_private_if_asked(hub: Hub) -> None:
    numbered(1).push_to_hub("owner/pets", private=True)
    assert hub.repositories["owner/pets"].private
    assert read("train") == [1]
    numbered(2).push_to_hub("owner/pets", private=True)
    with pytest.raises(OptionError, match="private=False: the dataset exists, and is private"):
        numbered(3).push_to_hub("owner/pets", private=False)
    assert read("train") == [2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"split": "a b"}, "split='a b': the name of a split"),
        ({"split": "train[:5]"}, "the name of a split"),
        ({"config": "a/b"}, "config='a/b': the name of a config"),
        ({"shard_bytes": 0}, "shard_bytes is at least 1"),
        ({"spilt": "train"}, "Did you mean 'split'"),
    ],
)
def test_wrong_options_are_errors(hub: Hub, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message.replace("[", r"\[")):
        numbered(1).push_to_hub("owner/pets", **options)
    assert not hub.count()


@pytest.mark.usefixtures("hub")
def test_push_without_rows_is_an_error() -> None:
    with pytest.raises(OptionError, match="there are no rows"):
        DocumentArray[Numbered]().push_to_hub("owner/pets")
    with pytest.raises(OptionError, match="the name of a dataset is owner/name, got 'owner/pets@main'"):
        numbered(1).push_to_hub("owner/pets@main")


@pytest.mark.usefixtures("hub")
def test_label_without_a_name_is_an_error() -> None:
    pet = make_pets(1)[0]
    pet.label = 2
    with pytest.raises(EncodeError, match="label: 2 is not a label: there are 2 names, from 0 on"):
        DocumentArray[Pet]([pet]).push_to_hub("owner/pets")


@pytest.mark.usefixtures("hub")
def test_tensors_of_another_type_are_an_error() -> None:
    class Loose(BaseDocument):
        values: NdArray

    rows = [Loose(values=np.zeros(2, np.float32)) for _ in range(1000)]
    with pytest.raises(
        EncodeError, match=r"the first tensors have 1 axes of float32, and one of int64 has the shape \(2, 2\)"
    ):
        DocumentArray[Loose]([*rows, Loose(values=np.zeros((2, 2), np.int64))]).push_to_hub("owner/pets")
