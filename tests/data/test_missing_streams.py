"""Missing values in datasets of shards: found from the null counts of the files, or in the batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from quire import BaseDocument, DocumentArray
from quire.data import MixedDataset, StreamingDataset
from quire.data._fetch import Fetch
from quire.errors import MissingValueError, OptionError
from quire.storage import Split, null_counts, open_dataset, write_dataset
from quire.typing import NdArray, float32
from tests.data.test_missing import has_zero, leaves, nullable_documents
from tests.strategies import laws

pytestmark = pytest.mark.needs("torch", "pyarrow", "fsspec", "xxhash")


class Box(BaseDocument):
    label: int = 1
    weight: float | None = None


class Row(BaseDocument):
    number: int
    label: int | None = None
    vector: NdArray[float32, 2] | None = None
    ragged: NdArray[float32] | None = None
    box: Box | None = None
    boxes: DocumentArray[Box] = []
    note: str | None = None


def row(i: int, **fields: Any) -> Row:
    full = {"label": i + 1, "vector": [1, 1], "ragged": [1.0] * (i % 3 + 1), "box": Box(), "boxes": [Box(weight=1)]}
    return Row(id=f"id{i}", number=i, **{**full, **fields})


def write_rows(folder: Path, documents: Any, format: str = "arrow", rows_in_shard: int = 10) -> Path:  # noqa: A002
    for start in range(0, len(documents), rows_in_shard):
        write_dataset(documents[start : start + rows_in_shard], folder, Row, mode="append", format=format)
    return folder


def stream_rows(source: Any, batch_size: int = 8, **options: Any) -> StreamingDataset[Row]:
    return StreamingDataset[Row](source, batch_size, **{"shapes": "ragged", **options})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thirty rows in three shards: number 17 has no label, number 25 no box, number 3 a box without a weight."""
    documents = [row(i) for i in range(30)]
    documents[17].label = documents[25].box = None
    documents[3].boxes = DocumentArray[Box]([Box()])
    return write_rows(tmp_path_factory.mktemp("missing") / "d", documents)


@pytest.fixture
def no_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("a batch was made")

    monkeypatch.setattr(Fetch, "batches", refuse)


# --- before the first batch


@pytest.mark.usefixtures("no_batches")
@pytest.mark.parametrize(
    ("path", "fields", "format"),
    [
        ("label", {"label": None}, "arrow"),
        ("label", {"label": None}, "parquet"),
        ("vector", {"vector": None}, "arrow"),
        ("vector", {"vector": None}, "parquet"),
        ("ragged", {"ragged": None}, "arrow"),
        ("box.label", {"box": None}, "arrow"),
        ("box.label", {"box": None}, "parquet"),
    ],
)
def test_null_counts_raise_at_construction(tmp_path: Path, format: str, path: str, fields: Any) -> None:  # noqa: A002
    documents = [row(i, **(fields if i == 17 else {})) for i in range(30)]
    source = write_rows(tmp_path / "d", documents, format)
    with pytest.raises(MissingValueError, match=rf"Row\.{path}: row 17 \(id id17\) has no value") as error:
        stream_rows(source)
    for way in (f"missing={{'{path}': value}}", "missing='mask'", f"batch.validity('{path}')"):
        assert way in str(error.value)


@pytest.mark.usefixtures("no_batches")
def test_null_counts_of_documents_in_lists_raise_at_construction(tmp_path: Path) -> None:
    documents = [row(i, boxes=[Box(weight=1), Box(weight=None if i == 12 else 2)]) for i in range(20)]
    with pytest.raises(MissingValueError, match=r"Row\.boxes\.weight: row 12"):
        stream_rows(write_rows(tmp_path / "d", documents))


def test_unread_columns_are_not_checked(folder: Path) -> None:
    batches = list(stream_rows(folder, columns=["number", "vector"]))
    assert sum(len(batch) for batch in batches) == 30
    with pytest.raises(MissingValueError, match=r"Row\.label: row 17 has no value"):
        stream_rows(folder, columns=["number", "label"])


@pytest.mark.parametrize("format", ["arrow", "parquet"])
def test_unread_fields_of_a_nested_document_are_not_checked(tmp_path: Path, format: str) -> None:  # noqa: A002
    documents = [row(i, box=Box(label=i, weight=None if i == 7 else 1.0)) for i in range(20)]
    source = write_rows(tmp_path / "d", documents, format)
    batches = list(stream_rows(source, columns=["box.label"]))
    assert sorted(number for batch in batches for number in batch.box.label.tolist()) == list(range(20))
    for columns in (["box.weight"], ["box"]):
        with pytest.raises(MissingValueError, match=r"Row\.box\.weight: row 7 has no value"):
            stream_rows(source, columns=columns)
    with pytest.raises(OptionError, match="missing: .*weight"):
        list(stream_rows(source, columns=["box.label"], missing={"box.weight": 0.0}))


@pytest.mark.parametrize("format", ["arrow", "parquet"])
def test_complete_data_is_not_checked_in_batches(tmp_path: Path, format: str) -> None:  # noqa: A002
    dataset = stream_rows(
        write_rows(tmp_path / "d", [row(i, boxes=[]) for i in range(20)], format), columns=["label", "box"]
    )
    assert not dataset._fetch._missing.in_batches or format == "parquet"
    assert sum(len(batch) for batch in dataset) == 20


@pytest.mark.parametrize("format", ["arrow", "parquet"])
def test_field_without_any_value_reads_as_none(tmp_path: Path, format: str) -> None:  # noqa: A002
    empty = {"label": None, "vector": None, "ragged": None, "box": None}
    source = write_rows(tmp_path / "d", [row(i, **empty) for i in range(20)], format)
    for workers in (0, 2):
        for batch in DataLoader(stream_rows(source), batch_size=None, num_workers=workers):
            assert batch.label is batch.vector is batch.ragged is batch.box.label is batch["box.weight"] is None
            assert len(batch.number) == len(batch)


# --- in the batch


def test_fields_without_null_counts_are_checked_in_the_batches(tmp_path: Path) -> None:
    table = pa.table({"number": range(20), "label": pa.array([None if i == 13 else i for i in range(20)])})
    (tmp_path / "d").mkdir()
    pq.write_table(table, tmp_path / "d" / "a.parquet", write_statistics=False)
    dataset = StreamingDataset[Row](tmp_path / "d", 4, shuffle=False, columns=["number", "label"])
    batches = iter(dataset)
    assert [next(batches).label.tolist() for _ in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    with pytest.raises(MissingValueError, match=r"Row\.label: document 13 has no value"):
        next(batches)


@pytest.mark.parametrize("path", ["vector", "ragged"])
def test_missing_tensors_in_parquet_files_raise(tmp_path: Path, path: str) -> None:
    documents = [row(i, **({path: None} if i == 17 else {})) for i in range(30)]
    with pytest.raises(MissingValueError, match=rf"Row\.{path}: \w+ 17 \(id id17\) has no value"):
        list(stream_rows(write_rows(tmp_path / "d", documents, "parquet")))


def test_functions_that_touch_a_field_move_the_check_to_the_batch(folder: Path) -> None:
    options: Any = {"columns": ["number", "label"], "shuffle": False}
    dataset = StreamingDataset[Row](folder, 10, {"label": lambda label: label * 2}, **options)
    batches = iter(dataset)
    next(batches)
    with pytest.raises(MissingValueError, match=r"Row\.label: document 17"):
        next(batches)
    with pytest.raises(MissingValueError, match=r"Row\.label: document 17"):
        dataset[17]
    texts = StreamingDataset[Row](folder, 10, {"label": str}, **options)
    assert [batch.label[7] for batch in texts] == ["8", None, "28"]


# --- filters


@pytest.mark.parametrize("format", ["arrow", "parquet"])
def test_missing_rows_that_a_filter_excludes_do_not_raise(tmp_path: Path, format: str) -> None:  # noqa: A002
    documents = [row(i, label=None if i in (3, 17) else i + 1) for i in range(30)]
    source = write_rows(tmp_path / "d", documents, format)
    results = [n for batch in stream_rows(source, where={"label": {"$gte": 1}}) for n in batch.label.tolist()]
    assert sorted(results) == [i + 1 for i in range(30) if i not in (3, 17)]
    assert {batch.label for batch in stream_rows(source, where={"number": {"$in": [3, 17]}})} == {None}
    with pytest.raises(MissingValueError, match=r"Row\.label: (row|document) 2"):
        list(stream_rows(source, where={"number": {"$in": [1, 2, 3, 4]}}, shuffle=False))


def test_only_the_split_with_the_missing_row_raises(tmp_path: Path) -> None:
    documents = [row(i, label=None if i == 17 else i + 1) for i in range(60)]
    source, failed = write_rows(tmp_path / "d", documents), 0
    for part in (0, 1):
        try:
            batches = list(stream_rows(source, where=Split("id", (0.5, 0.5), part)))
        except MissingValueError:
            failed += 1
        else:
            assert all((batch.label > 0).all() for batch in batches)
    assert failed == 1


# --- values and masks


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("framework", ["torch", "numpy"])
def test_missing_values_are_filled_or_masked(folder: Path, workers: int, framework: str) -> None:
    filled = {"label": -1, "box.label": 9, "boxes.weight": 0.5}
    options: Any = {"shuffle": False, "framework": framework}
    dataset = stream_rows(folder, 30, missing=filled, **options)
    [batch] = DataLoader(dataset, batch_size=None, num_workers=workers)
    assert batch.label.tolist() == [-1 if i == 17 else i + 1 for i in range(30)]
    assert batch.box.label.tolist() == [9 if i == 25 else 1 for i in range(30)]
    assert batch.boxes.weight.tolist() == [0.5 if i == 3 else 1 for i in range(30)]
    assert batch["box.weight"] is None
    assert batch[25].box is None
    [batch] = DataLoader(stream_rows(folder, 30, missing="mask", **options), batch_size=None, num_workers=workers)
    assert np.flatnonzero(~np.asarray(batch.validity("label"))).tolist() == [17]
    assert int(batch.label[17]) == 0


def test_wrong_values_of_missing_are_rejected(folder: Path) -> None:
    for wrong in ("fill", {"lable": 1}, {"label": "a"}, {"vector": [1]}, None):
        with pytest.raises(OptionError, match="missing"):
            stream_rows(folder, missing=wrong)


def test_loaders_windows_mixes_and_single_rows_follow_the_policy(folder: Path, tmp_path: Path) -> None:
    filled = {"label": -1, "box.label": 9, "boxes.weight": 0.5}
    dataset = stream_rows(folder, 10, missing=filled, shuffle=False)
    assert [int(batch.label.min()) for batch in dataset.loader(threads=2)] == [1, -1, 21]
    assert dataset[17].label == -1
    assert [int(batch.label.min()) for batch in dataset.windows(10, 10)] == [-1]
    other = write_rows(tmp_path / "d", [row(i) for i in range(10)])
    mixed = MixedDataset([dataset, stream_rows(other, 10)], stop="all")
    assert sorted({int(batch.label.min()) for batch in mixed}) == [-1, 1, 21]
    touched = StreamingDataset[Row](folder, 10, {"label": lambda label: label}, columns=["label"])
    with pytest.raises(MissingValueError, match=r"Row\.label"):
        list(MixedDataset([touched], stop="all"))


@pytest.mark.needs("tensorflow")
def test_tensorflow_datasets_are_filled(folder: Path) -> None:
    dataset = stream_rows(folder, 30, columns=["number", "label", "box"], missing={"label": -1, "box.label": 0})
    [everything] = list(dataset.to_tf_dataset())
    assert -1 in everything["label"].numpy()
    assert set(everything["box"]) == {"label", "id"} - {"id"}


@pytest.mark.needs("jax")
def test_batches_of_jax_are_filled(folder: Path) -> None:
    [batch] = stream_rows(folder, 30, columns=["label"], missing={"label": -1}).iter_batches("jax")
    assert int(batch.label.min()) == -1


# --- null counts


@pytest.mark.parametrize("format", ["arrow", "parquet"])
def test_null_counts_match_the_rows(tmp_path: Path, format: str) -> None:  # noqa: A002
    documents = [row(i, label=None if i % 2 else 1, vector=None, boxes=[Box()] * (i % 2)) for i in range(20)]
    dataset = open_dataset(write_rows(tmp_path / "d", documents, format), Row)
    paths = [("label",), ("vector",), ("ragged",), ("box", "label"), ("box", "weight"), ("boxes", "weight")]
    counts = null_counts(dataset, paths)
    assert counts[("label",)] == (10, 20)
    assert counts[("box", "weight")] == (20, 20)
    assert counts[("box", "label")] == (0, 20)
    assert counts[("vector",)] == (20, 20)
    if format == "arrow":  # Parquet files have no statistics of blobs, and count empty lists as nulls
        assert counts[("ragged",)] == (0, 20)
        assert counts[("boxes", "weight")] == (10, 10)


# --- laws


@laws
@given(nullable_documents(), st.sampled_from(["arrow", "parquet"]), st.sampled_from([None, {"": lambda _: None}]))
def test_zeros_replace_none_only_on_request(
    tmp_path_factory: pytest.TempPathFactory,
    documents: Any,
    format: str,  # noqa: A002
    preprocessing: Any,
) -> None:
    source = tmp_path_factory.mktemp("law") / "d"
    write_dataset(documents, source, format=format)
    kind, options = StreamingDataset[documents.document_type], {"shapes": "ragged", "shuffle": False}
    [masked] = kind(source, len(documents), preprocessing, missing="mask", **options)
    assert masked.unstack().identical(documents)  # None and zero are still distinguished
    try:
        [batch] = kind(source, len(documents), preprocessing, **options)
    except MissingValueError:
        assert any(value is None or has_zero(value) for _, value in leaves(masked))
    else:
        for path, value in leaves(batch):
            assert value is None or not has_zero(value), path
            assert value is not None or not batch.validity(path).any()
