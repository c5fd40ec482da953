"""Datasets of other libraries (see tests/storage/foreign/make.py) are imported."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import sys
import tarfile
from collections import OrderedDict, namedtuple
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import Field

from quire import BaseDocument, DocumentArray
from quire.errors import DecodeError, OptionError, StorageError, StorageNotFoundError
from quire.media import decode_frames
from quire.storage import StoredDataset, import_dataset, open_dataset, write_dataset
from quire.storage.importers._unpickle import load_schema, load_value
from quire.typing import NdArray, TorchTensor, float32, uint8
from tests.storage.foreign.make import ROWS, row

pytestmark = pytest.mark.needs("pyarrow", "PIL")
FOREIGN = Path(__file__).parent / "foreign"


def check_shared(dataset: StoredDataset[Any], rows: range, *fields: str) -> None:
    """Check that the fields are those of `row`, in order."""
    assert len(dataset) == len(rows)
    for document, i in zip(dataset[:], rows, strict=True):
        expected = row(i)
        for field in fields:
            result = getattr(document, field)
            same = (
                np.array_equal(result, expected[field]) if isinstance(result, np.ndarray) else result == expected[field]
            )
            assert same, (i, field, result)


def copied(name: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(FOREIGN / name, tmp_path / "source"))


# --- Petastorm


def test_petastorm_is_imported_with_its_own_schema(tmp_path: Path) -> None:
    dataset = import_dataset(FOREIGN / "petastorm", tmp_path / "made", "petastorm", allow_pickle=True)
    check_shared(dataset, range(ROWS), "number", "name", "weight", "image", "embedding", "ragged")
    assert str(dataset.schema).startswith("Foreign(number: int, name: str, weight: float, even: bool, price: Decimal,")
    assert "image: NdArray[uint8, 4, 6, 3], photo: NdArray[uint8, 'dim0', 'dim1', 3]" in str(dataset.schema)
    assert "maybe: NdArray[float32, 2] | None, note: str | None" in str(dataset.schema)
    assert dataset[3].price == Decimal("0.75")
    assert [document.note for document in dataset[:]] == ["note 0", None, None, "note 3", None, None, "note 6"]
    assert [None if each.maybe is None else each.maybe.tolist() for each in dataset[:3]] == [[0, 0], None, [2, -2]]
    assert abs(int(dataset[5].photo.mean()) - 105) <= 1


def test_pickled_schema_is_refused_unless_allowed(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="allow_pickle=True"):
        import_dataset(FOREIGN / "petastorm", tmp_path / "made", "petastorm")
    assert not (tmp_path / "made").exists()


@pytest.mark.needs("torch")
def test_petastorm_with_a_class_reads_no_pickle(tmp_path: Path) -> None:
    class Picture(BaseDocument):
        number: int
        image: TorchTensor[3, 4, 6, uint8]
        vector: NdArray[float32, 5] = Field(validation_alias="embedding")

    source = copied("petastorm", tmp_path)
    (source / "_common_metadata").unlink()
    dataset = import_dataset(source, tmp_path / "made", "petastorm", Picture)
    assert dataset[4].image.tolist() == np.full((3, 4, 6), 40).tolist()
    assert dataset[4].vector.tolist() == [4, 5, 6, 7, 8]


def test_petastorm_partition_folders_become_columns(tmp_path: Path) -> None:
    class Row(BaseDocument):
        number: int
        year: int
        place: str

    source = copied("petastorm", tmp_path)
    [file] = source.glob("*.parquet")
    for year, place in ((2023, "north"), (2024, "south")):
        (source / f"year={year}" / f"place={place}").mkdir(parents=True)
        shutil.copy(file, source / f"year={year}" / f"place={place}" / "part.parquet")
    file.unlink()
    dataset = import_dataset(source, tmp_path / "made", document_type=Row)
    assert [(each.number, each.year, each.place) for each in dataset[ROWS - 1 : ROWS + 1]] == [
        (6, 2023, "north"),
        (0, 2024, "south"),
    ]


class _Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def test_pickled_schema_that_would_run_code_is_refused(tmp_path: Path) -> None:
    source = copied("petastorm", tmp_path)
    schema = pq.read_schema(source / "_common_metadata")
    evil = {b"dataset-toolkit.unischema.v1": pickle.dumps(_Evil(tmp_path / "ran"))}
    pq.write_metadata(schema.with_metadata({**schema.metadata, **evil}), source / "_common_metadata")
    with pytest.raises(DecodeError, match=r"_common_metadata: the pickle names (posix|nt).mkdir, which is refused"):
        import_dataset(source, tmp_path / "made", "petastorm", allow_pickle=True)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["builtins eval", "numpy load", "petastorm.fs_utils run", "pyspark.sql.types x"])
def test_pickles_that_name_functions_are_refused(name: str) -> None:
    module, function = name.split()
    content = b"c" + f"{module}\n{function}\n".encode() + b"(S'1'\ntR."
    with pytest.raises(DecodeError, match="refused|broken"):
        load_schema(content)
    with pytest.raises(DecodeError, match="refused"):
        load_value(content)


@pytest.mark.parametrize("protocol", range(6))
def test_pickled_schemas_of_every_protocol_are_read(protocol: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pickles of older versions of Python. Instead of petastorm, classes of the same names are pickled."""
    monkeypatch.setitem(sys.modules, "petastorm", ModuleType("petastorm"))
    unischema, codecs = ModuleType("petastorm.unischema"), ModuleType("petastorm.codecs")
    for module, name in ((unischema, "Unischema"), (unischema, "Member"), (codecs, "NdarrayCodec")):
        setattr(module, name, type(name, (), {"__module__": module.__name__}))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    schema, codec = unischema.Unischema(), codecs.NdarrayCodec()
    schema._name, schema._fields = "Old", OrderedDict(x=(np.dtype("<f4"), (None, 2), codec), y=np.int16)
    result = load_schema(pickle.dumps(schema, protocol))
    assert (result.kind, result._name, list(result._fields)) == ("Unischema", "Old", ["x", "y"])
    assert result._fields["x"][2].kind == "NdarrayCodec"
    assert result._fields["x"][0].arguments[0] == "f4"
    assert result._fields["y"].name == "int16"


@pytest.mark.parametrize(("protocol", "fields_per_row"), [(0, 4), (0, 5), (1, 5), (2, 4), (2, 5), (5, 5)], ids=str)
def test_petastorm_of_old_versions_is_imported(
    protocol: int, fields_per_row: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every kind of field of the datasets that old versions of Petastorm wrote, in folders for a partition key.

    Texts have several widths in arrays, bytes contain zeros, arrays are empty or missing, and fields are named tuples
    (of 4 values before `nullable` existed) in pickles of every protocol. Instead of petastorm and pyspark, classes of
    the same names are pickled.
    """
    parents = ("pyspark", "pyspark.sql")
    modules = {
        name: ModuleType(name)
        for name in ("petastorm", "petastorm.unischema", "petastorm.codecs", *parents, "pyspark.sql.types")
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    unischema, codecs, types = (
        modules[name] for name in ("petastorm.unischema", "petastorm.codecs", "pyspark.sql.types")
    )
    names = ("name", "numpy_dtype", "shape", "codec", "nullable")[:fields_per_row]
    tuple_type: Any = namedtuple("UnischemaField", names)  # type: ignore[misc]  # noqa: PYI024 - as petastorm's
    tuple_type.__module__ = "petastorm.unischema"
    unischema.UnischemaField = tuple_type  # type: ignore[attr-defined]
    for module, name in (
        (unischema, "Unischema"),
        *((codecs, name) for name in ("NdarrayCodec", "ScalarCodec", "CompressedImageCodec")),
        *((types, name) for name in ("StringType", "ShortType", "DecimalType")),
    ):
        setattr(module, name, type(name, (), {"__module__": module.__name__}))

    def field(*values: Any) -> Any:
        return tuple_type(*values[:fields_per_row])

    def scalar(spark: str) -> Any:
        codec = codecs.ScalarCodec()
        codec._spark_type = getattr(types, spark)()
        return codec

    schema, image = unischema.Unischema(), codecs.CompressedImageCodec()
    image._image_codec, image._quality = ".png", 80
    fields = [
        field("partition_key", np.str_, (), scalar("StringType"), False),
        field("number", np.int64, (), codecs.ScalarCodec(), False),
        field("small", np.int32, (), scalar("ShortType"), False),
        field("odd", np.bool_, (), None, False),
        field("amount", Decimal, (), scalar("DecimalType"), False),
        field("words", np.str_, (None,), codecs.NdarrayCodec(), False),
        field("raw", np.bytes_, (None, None), codecs.NdarrayCodec(), False),
        field("sensor", np.str_, (1,), codecs.NdarrayCodec(), False),
        field("matrix", np.uint16, (2, 3), codecs.NdarrayCodec(), False),
        field("picture", np.uint8, (4, 5, 3), image, False),
    ]
    if fields_per_row == 5:
        fields += [
            field("maybe", np.str_, (None,), codecs.NdarrayCodec(), True),
            field("never", np.uint16, (2, 3), codecs.NdarrayCodec(), True),
            field("count", np.int32, (), codecs.ScalarCodec(), True),
        ]
    schema._name, schema._fields = "Old", OrderedDict((each.name, each) for each in fields)
    source = tmp_path / "old"
    words = [["a", "bb"], ["cccc"], [], ["é", "x", "yy"]]
    raw = [np.array([[b"\0A", b"BB\0A"], [b"", bytes([65 + n]) * (n + 1)]]) for n in range(4)]
    pixels = [np.full((4, 5, 3), 50 * n, np.uint8) for n in range(4)]
    for part, rows in enumerate(([0, 1], [2, 3])):
        columns = {
            "number": rows,
            "small": pa.array(rows, pa.int16()),
            "odd": [n % 2 == 1 for n in rows],
            "amount": pa.array([Decimal(n) / 100 for n in rows], pa.decimal128(10, 9)),
            "words": [_npy(np.array(words[n], np.str_)) for n in rows],
            "raw": [_npy(raw[n]) for n in rows],
            "sensor": [_npy(np.array(["sensor" * (n + 1)])) for n in rows],
            "matrix": [_npy(np.full((2, 3), n, np.uint16)) for n in rows],
            "picture": [_png(pixels[n]) for n in rows],
        }
        if fields_per_row == 5:
            columns |= {
                "maybe": pa.array([None if n == 1 else _npy(np.array(words[n], np.str_)) for n in rows], pa.binary()),
                "never": pa.array([None] * 2, pa.binary()),
                "count": pa.array([n if n % 2 else None for n in rows], pa.int32()),
            }
        table = pa.table(columns)
        (source / f"partition_key=p_{part}").mkdir(parents=True)
        pq.write_table(table, source / f"partition_key=p_{part}" / "part-0.parquet")
    metadata = {b"dataset-toolkit.unischema.v1": pickle.dumps(schema, protocol)}
    pq.write_metadata(table.schema.with_metadata(metadata), source / "_common_metadata")
    dataset = import_dataset(source, tmp_path / "made", "petastorm", allow_pickle=True)
    rows_read = list(dataset)
    assert [row.partition_key for row in rows_read] == ["p_0", "p_0", "p_1", "p_1"]
    assert [(row.number, row.small, row.odd) for row in rows_read] == [(n, n, n % 2 == 1) for n in range(4)]
    assert [row.amount for row in rows_read] == [Decimal(n) / 100 for n in range(4)]
    assert [row.words.tolist() for row in rows_read] == words
    assert [row.raw.tolist() for row in rows_read] == [array.tolist() for array in raw]
    assert [row.sensor.tolist() for row in rows_read] == [["sensor" * (n + 1)] for n in range(4)]
    assert [row.matrix.dtype for row in rows_read] == [np.uint16] * 4
    assert all(np.array_equal(row.picture, pixels[n]) for n, row in enumerate(rows_read))
    if fields_per_row == 5:
        assert [None if row.maybe is None else row.maybe.tolist() for row in rows_read] == [
            None if n == 1 else words[n] for n in range(4)
        ]
        assert [row.never for row in rows_read] == [None] * 4
        assert [row.count for row in rows_read] == [None, 1, None, 3]


def test_texts_of_several_widths_are_stacked_and_written(tmp_path: Path) -> None:
    rows = [Words(words=np.array(["x" * (n + 1), "é"])) for n in range(3)]
    assert DocumentArray[Words](rows).stack().words.tolist() == [["x", "é"], ["xx", "é"], ["xxx", "é"]]
    write_dataset(rows, tmp_path / "words")
    assert [row.words.tolist() for row in open_dataset(tmp_path / "words", Words)] == [r.words.tolist() for r in rows]


class Words(BaseDocument):
    words: NdArray


def _png(pixels: np.ndarray[Any, Any]) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def _npy(array: np.ndarray[Any, Any]) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


# --- MDS

MDS_FIELDS = ("number", "name", "weight", "embedding", "ragged", "blob")


def test_mds_imports_every_encoding(tmp_path: Path) -> None:
    dataset = import_dataset(FOREIGN / "mds-raw", tmp_path / "made", "mds")
    check_shared(dataset, range(ROWS), *MDS_FIELDS)
    last = dataset[ROWS - 1]
    assert (last.big, last.small, last.half, last.exact) == (10**15 + 6, 6, 3.0, Decimal("1.5"))
    assert last.extra == {"tags": [], "i": 6}
    assert last.typed.dtype == np.int16
    assert np.array_equal(decode_frames(last.image, "", None, None)[0], row(6)["image"])
    assert [len(document.gallery) for document in dataset[:]] == [0, 1, 2, 0, 1, 2, 0]
    assert decode_frames(dataset[2].gallery[1], "", None, None)[0][0, 0].tolist() == [20, 20, 20]


def test_mds_images_become_tensors(tmp_path: Path) -> None:
    dataset = import_dataset(FOREIGN / "mds-raw", tmp_path / "made", "mds", images="decode")
    check_shared(dataset, range(ROWS), *MDS_FIELDS, "image")
    assert (dataset[3].raw.shape, int(dataset[3].raw[0, 0])) == ((4, 6), 30)


@pytest.mark.needs("zstandard")
@pytest.mark.parametrize("name", ["mds-gz", "mds-zstd"])
def test_compressed_mds_is_imported(name: str, tmp_path: Path) -> None:
    check_shared(import_dataset(FOREIGN / name, tmp_path / "made"), range(ROWS), "number", "name")


def test_mds_pickles_are_refused_unless_allowed(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="thing: pickled. Pass allow_pickle=True"):
        import_dataset(FOREIGN / "mds-pickle", tmp_path / "made")
    dataset = import_dataset(FOREIGN / "mds-pickle", tmp_path / "made", allow_pickle=True)
    assert [document.thing for document in dataset[:2]] == [{"i": 0}, {"i": 1}]


def test_plain_pickled_values_are_read_and_others_refused(tmp_path: Path) -> None:
    value = {"a": [1, 2.5, None], "b": np.arange(6).reshape(2, 3), "c": np.float32(2), "d": Decimal("1.5"), "e": {3}}
    for protocol in range(2, 6):
        result = load_value(pickle.dumps(value, protocol))
        assert result["b"].tolist() == [[0, 1, 2], [3, 4, 5]]
        assert {**result, "b": 0} == {**value, "b": 0}
    with pytest.raises(DecodeError, match="mkdir, which is refused"):
        load_value(pickle.dumps(_Evil(tmp_path / "ran")))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("damage", ["cut", "altered", "missing"])
def test_damaged_mds_shard_is_an_error_that_names_it(damage: str, tmp_path: Path) -> None:
    source = copied("mds-raw", tmp_path)
    shard = source / "shard.00001.mds"
    content = bytearray(shard.read_bytes())
    content[4:8] = (0xFFFFFFFF).to_bytes(4, "little")
    {"cut": lambda: os.truncate(shard, 1000), "altered": lambda: shard.write_bytes(content), "missing": shard.unlink}[
        damage
    ]()
    with pytest.raises((DecodeError, StorageNotFoundError), match="shard.00001.mds"):
        import_dataset(source, tmp_path / "made", "mds")


def test_interrupted_import_resumes_where_it_stopped(tmp_path: Path) -> None:
    source, target = copied("mds-raw", tmp_path), tmp_path / "made"
    shard = source / "shard.00002.mds"
    kept = shard.read_bytes()
    shard.write_bytes(kept[:100])
    with pytest.raises(DecodeError, match="shard.00002.mds"):
        import_dataset(source, target, "mds", shard_bytes=1, group_bytes=1)
    shard.write_bytes(kept)
    dataset = import_dataset(source, target, "mds", mode="resume", shard_bytes=1, group_bytes=1)
    check_shared(dataset, range(ROWS), *MDS_FIELDS)


@pytest.mark.parametrize("name", ["petastorm", "webdataset", "huggingface"])
def test_every_format_resumes_from_any_row(name: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"allow_pickle": True, "split": "train" if name == "huggingface" else None}
    whole = import_dataset(FOREIGN / name, tmp_path / "whole", **options)
    from quire.storage import write_dataset

    for done in range(len(whole) + 1):
        target = tmp_path / f"part{done}"
        write_dataset(whole[:done], target)
        dataset = import_dataset(FOREIGN / name, target, document_type=whole.document_type, mode="resume", **options)
        assert dataset[:] == whole[:]


# --- WebDataset


def test_webdataset_class_is_inferred_from_samples(tmp_path: Path) -> None:
    dataset = import_dataset(FOREIGN / "webdataset", tmp_path / "made", "webdataset")
    assert [document.key for document in dataset[:]] == [f"sample{i:04d}" for i in range(4)]
    assert [document.note_txt for document in dataset[:]] == [None, "note 1", None, "note 3"]
    for i, document in enumerate(dataset[:]):
        expected = row(i)
        assert (document.txt, document.bin, document.cls) == (expected["name"], expected["blob"], i % 3)
        assert document.json_ == {"tags": expected["tags"], "i": i}
        assert np.array_equal(document.npy, expected["embedding"])
        assert np.array_equal(document.crop_npy, expected["ragged"])
        assert np.array_equal(decode_frames(document.png, "", None, None)[0], expected["image"])
    assert "npy: NdArray[float32, 5]" in str(dataset.schema)
    assert "crop_npy: NdArray[int16, 'dim0', 2]" in str(dataset.schema)


def test_webdataset_is_imported_with_a_class(tmp_path: Path) -> None:
    class Picture(BaseDocument):
        image: NdArray[uint8, 3, 4, 6] = Field(validation_alias="png")
        label: int = Field(validation_alias="cls")

    dataset = import_dataset(FOREIGN / "webdataset", tmp_path / "made", "webdataset", Picture)
    assert [document.label for document in dataset[:]] == [0, 1, 2, 0]
    assert np.array_equal(dataset[2].image, row(2)["image"].transpose(2, 0, 1))


def test_compressed_webdataset_is_imported(tmp_path: Path) -> None:
    [document] = import_dataset(FOREIGN / "webdataset-packed", tmp_path / "made")[:]
    assert (document.key, document.txt, document.cls) == ("one", "packed", 5)


def tar_of(path: Path, files: dict[str, bytes]) -> Path:
    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def test_samples_are_grouped_by_the_name_before_the_first_dot(tmp_path: Path) -> None:
    names = {"a/x.txt": b"1", "a/x.seg.txt": b"2", "b/x.txt": b"3", "b/x.seg.TXT": b"4", ".hidden": b"", "plain": b""}
    tar_of(tmp_path / "source" / "s.tar", names)
    batch = import_dataset(tmp_path / "source", tmp_path / "made")[:]
    assert [(each.key, each.txt, each.seg_txt) for each in batch] == [("a/x", "1", "2"), ("b/x", "3", "4")]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a.cls": b"one"}, "sample 'a'.*cls.*invalid literal"),
        ({"a.npy": b"\x93NUMPY"}, "sample 'a'.*npy"),
        ({"a.json": b"{"}, "sample 'a'.*json"),
        ({"a.txt": b"1", "a.TXT": b"2"}, "two files of the sample 'a' end in 'txt'"),
        ({"a.png": b"no image"}, "sample 'a'.*not an image"),
    ],
)
def test_invalid_sample_is_an_error_that_names_it(files: dict[str, bytes], message: str, tmp_path: Path) -> None:
    tar_of(tmp_path / "source" / "s.tar", files)
    with pytest.raises(DecodeError, match=f"s.tar.*{message}"):
        import_dataset(tmp_path / "source", tmp_path / "made", images="decode")


def test_object_arrays_and_pickles_are_refused(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    np.save(buffer, np.array([{}], object), allow_pickle=True)
    tar_of(tmp_path / "source" / "s.tar", {"a.npy": buffer.getvalue()})
    with pytest.raises(DecodeError, match="allow_pickle=False"):
        import_dataset(tmp_path / "source", tmp_path / "made", allow_pickle=True)
    tar_of(tmp_path / "source" / "s.tar", {"a.pkl": pickle.dumps(_Evil(tmp_path / "ran"))})
    with pytest.raises(OptionError, match="allow_pickle=True"):
        import_dataset(tmp_path / "source", tmp_path / "made")
    with pytest.raises(DecodeError, match="refused"):
        import_dataset(tmp_path / "source", tmp_path / "made", allow_pickle=True)
    assert not (tmp_path / "ran").exists()


def test_truncated_tar_is_an_error_and_complete_samples_are_kept(tmp_path: Path) -> None:
    source = copied("webdataset", tmp_path)
    os.truncate(source / "part-001.tar", 700)
    with pytest.raises(DecodeError, match="part-001.tar"):
        import_dataset(source, tmp_path / "made")


def test_file_that_only_late_samples_have_requires_a_class(tmp_path: Path) -> None:
    files = {f"s{i:03d}.txt": b"x" for i in range(100)} | {"s100.txt": b"x", "s100.cls": b"1"}
    tar_of(tmp_path / "source" / "s.tar", files)
    with pytest.raises(DecodeError, match="sample 's100': cls: not among the files of the first 100 samples"):
        import_dataset(tmp_path / "source", tmp_path / "made")


# --- Hugging Face


def test_huggingface_is_imported_with_its_features(tmp_path: Path) -> None:
    dataset = import_dataset(FOREIGN / "huggingface", tmp_path / "made", "huggingface", split="train", name="thing")
    check_shared(dataset, range(5), "number", "name", "weight", "embedding", "tags", "blob")
    assert str(dataset.schema).startswith("Thing(number: int, name: str, weight: float, embedding: NdArray[float32, 5]")
    assert "grid: NdArray[float32, 2, 3], growing: NdArray[int16, 'dim0', 2], ragged: NdArray[int64]" in str(
        dataset.schema
    )
    for i, document in enumerate(dataset[:]):
        assert document.label == i % 3
        assert np.array_equal(document.grid, np.full((2, 3), i))
        assert np.array_equal(document.growing, row(i)["ragged"])
        assert document.ragged.tolist() == list(range(i % 4))
        assert (document.where.x, document.where.y) == (i, -i)
        assert [(box.left, box.text) for box in document.boxes] == [(k, f"box {k}") for k in range(i % 3)]
        assert document.note == (None if i % 2 else f"note {i}")
        assert np.array_equal(decode_frames(document.image, "", None, None)[0], row(i)["image"])
    label = dataset.document_type.model_json_schema()["properties"]["label"]
    assert label["names"] == ["cat", "dog", "owl"]


def test_huggingface_images_of_a_split_become_tensors(tmp_path: Path) -> None:
    dataset = import_dataset(FOREIGN / "huggingface", tmp_path / "made", split="test", images="decode")
    check_shared(dataset, range(5, ROWS), "number", "image")


def test_error_about_an_unknown_split_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="split=None: the splits are 'train', 'test'"):
        import_dataset(FOREIGN / "huggingface", tmp_path / "made")


def saved(folder: Path, table: pa.Table, features: dict[str, Any]) -> Path:
    folder.mkdir()
    with pa.OSFile(str(folder / "data.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
    (folder / "dataset_info.json").write_text(json.dumps({"features": features}))
    return folder


def test_images_at_a_path_are_not_read(tmp_path: Path) -> None:
    images = pa.array([{"bytes": b"", "path": None}, {"bytes": None, "path": "/etc/passwd"}])
    source = saved(tmp_path / "source", pa.table({"image": images}), {"image": {"_type": "Image"}})
    with pytest.raises(DecodeError, match="image: some files are not in the dataset, but at a path"):
        import_dataset(source, tmp_path / "made")


def test_images_in_lists_and_structs_become_bytes(tmp_path: Path) -> None:
    cell = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    one, two = {"bytes": b"1", "path": None}, {"bytes": b"2", "path": "x"}
    table = pa.table(
        {
            "many": pa.array([[one, two], None, []], pa.list_(cell)),
            "inner": pa.array([{"picture": one}, {"picture": two}, {"picture": None}]),
        }
    )
    features = {
        "many": {"feature": {"_type": "Image"}, "_type": "List"},
        "inner": {"picture": {"_type": "Image"}},
    }
    batch = import_dataset(saved(tmp_path / "source", table, features), tmp_path / "made")[:]
    assert [document.many for document in batch] == [[b"1", b"2"], None, []]
    assert [document.inner.picture for document in batch] == [b"1", b"2", None]


# --- all of them


@pytest.mark.needs("fsspec")
def test_remote_source_is_imported_to_a_remote_target() -> None:
    import fsspec

    store = fsspec.filesystem("memory")
    store.put(str(FOREIGN / "mds-raw"), "/import-source", recursive=True)
    dataset = import_dataset("memory://import-source", "memory://import-target")
    check_shared(dataset, range(ROWS), "number", "name")


def test_imported_dataset_opens_without_its_class(tmp_path: Path) -> None:
    import_dataset(FOREIGN / "petastorm", tmp_path / "made", allow_pickle=True, name="Gone")
    check_shared(open_dataset(tmp_path / "made"), range(ROWS), "number", "image", "ragged")


@pytest.mark.needs("torch")
def test_inferred_classes_are_pickled_to_loader_workers(tmp_path: Path) -> None:
    from torch.utils.data import DataLoader

    from quire.data import StreamingDataset

    for name in ("mds-gz", "huggingface"):
        result = import_dataset(FOREIGN / name, tmp_path / name, split="train" if name == "huggingface" else None)
        assert pickle.loads(pickle.dumps(result[0])) == result[0]
        dataset = StreamingDataset[result.document_type](result, 3, shapes="ragged")
        loader = DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context="fork", timeout=60)
        assert sorted(number for batch in loader for number in batch.number.tolist()) == list(range(len(result)))


def test_inferred_classes_of_one_name_stay_apart(tmp_path: Path) -> None:
    import_dataset(FOREIGN / "mds-gz", tmp_path / "one")
    import_dataset(FOREIGN / "mds-pickle", tmp_path / "two", allow_pickle=True)
    assert open_dataset(tmp_path / "one")[1].name == "row 1 é"
    assert open_dataset(tmp_path / "two")[1].thing == {"i": 1}


def test_unknown_format_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="the format cannot be detected by the files"):
        import_dataset(tmp_path, tmp_path / "made")
    with pytest.raises(OptionError, match="format='mdx' is not a format that can be imported. Did you mean 'mds'?"):
        import_dataset(tmp_path, tmp_path / "made", "mdx")  # type: ignore[arg-type]
    for name in ("petastorm", "mds", "webdataset", "huggingface"):
        with pytest.raises(StorageError, match="no such file|there are no"):
            import_dataset(tmp_path, tmp_path / "made", name)  # type: ignore[arg-type]
