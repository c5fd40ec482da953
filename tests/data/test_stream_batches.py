"""What batches hold: every kind of field, in every framework, preprocessed, chosen, padded and masked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from quire import BaseDocument, DocumentArray, DocumentBatch
from quire.data import MultiModalDataset, StreamingDataset, batched
from quire.errors import ColumnError, FunctionError, OptionError, RowIndexError
from quire.storage import Split, open_dataset, write_dataset
from quire.typing import NdArray, float32
from tests.data.sample_streams import (
    Article,
    Sample,
    Scaled,
    article,
    double,
    fail_on_three,
    flatten,
    numbers,
    stream_samples,
    write_samples,
)

pytestmark = pytest.mark.needs("torch", "pyarrow", "fsspec", "xxhash")
ROWS = 23


@pytest.fixture(scope="module", params=["arrow", "parquet"])
def folder(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("stream") / "d"
    for start in range(0, ROWS, 6):
        part = [article(i) for i in range(start, min(start + 6, ROWS))]
        write_dataset(part, place, Article, mode="append", format=request.param)
    return place


def articles(folder: Path, batch_size: int = 4, **options: Any) -> StreamingDataset[Article]:
    return StreamingDataset[Article](folder, batch_size, **{"shapes": "ragged", "missing": "mask", **options})


def as_array(value: Any) -> Any:
    return value.numpy() if hasattr(value, "numpy") else np.asarray(value)


def check(batch: Any) -> None:
    """Every field of a row is that of its number."""
    rows = as_array(batch.number).tolist()
    assert as_array(batch.image).tolist() == [[[float(i)] * 3] * 2 for i in rows]
    assert batch.validity("score").tolist() == [i % 3 == 0 for i in rows]
    assert [document.score for document in batch] == [None if i % 3 else i / 2 for i in rows]
    assert [None if d.sound is None else as_array(d.sound).tolist() for d in batch] == [
        None if i % 2 else [i] * 2 for i in rows
    ]
    assert [as_array(document.words).tolist() for document in batch] == [list(range(i % 4 + 1)) for i in rows]
    assert batch.text == [f"text {i}" for i in rows]
    assert batch.author.name == [f"name {i}" for i in rows]
    assert [document.author.born for document in batch] == [None if i % 2 else i for i in rows]
    assert batch.validity("editor").tolist() == [i % 5 == 0 for i in rows]
    assert as_array(batch.pages.vector).tolist() == [[float(j)] * 2 for i in rows for j in range(i % 3)]


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_stream_reads_every_kind_of_field(folder: Path, framework: str) -> None:
    dataset = articles(folder, framework=framework)
    seen = []
    for batch in [*dataset, *dataset.loader(threads=2), *DataLoader(dataset, batch_size=None, num_workers=2)]:
        assert type(batch) is DocumentBatch[Article]
        assert type(batch.image).__module__.startswith(framework)
        check(batch)
        seen += as_array(batch.number).tolist()
    assert sorted(seen) == sorted([*range(ROWS)] * 3)


@pytest.mark.needs("jax")
def test_iter_batches_yields_jax_arrays(folder: Path) -> None:
    import jax

    columns = ["number", "image", "score", "author", "pages"]
    for batch in articles(folder, framework="jax", columns=columns):
        assert isinstance(batch.image, jax.Array)
        assert isinstance(batch.pages.vector, jax.Array)
        assert batch.image[:, 0, 0].tolist() == batch.number.tolist()
    for batch in articles(folder, columns=columns).iter_batches(framework="jax"):
        assert isinstance(batch.image, jax.Array)
        assert batch.number.dtype == "int32"
        assert batch.state is not None


@pytest.mark.needs("tensorflow")
def test_to_tf_dataset_yields_every_row(tmp_path: Path) -> None:
    import tensorflow as tf

    folder = write_samples(tmp_path / "d", 50)
    dataset = stream_samples(folder)
    elements = dataset.to_tf_dataset(features="vector", labels="number")
    assert int(elements.cardinality()) == 7
    for epoch in range(2):
        dataset.set_epoch(epoch)
        expected = numbers(streamed_at(folder, epoch))
        assert [labels.numpy().tolist() for _, labels in elements] == expected
    model = tf.keras.Sequential([tf.keras.Input((4,)), tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    history = model.fit(elements, epochs=2, verbose=0, shuffle=False)
    assert len(history.history["loss"]) == 2
    state = next(iter(stream_samples(folder))).state
    dataset.load_state_dict(state)
    resumed = dataset.to_tf_dataset(features="vector", labels="number")
    assert [len(list(resumed)) for _ in range(2)] == [6, 7]
    endless = stream_samples(folder, epochs=None).to_tf_dataset(features="vector")
    assert len(list(endless.take(20))) == 20


def streamed_at(folder: Path, epoch: int) -> Any:
    dataset = stream_samples(folder)
    dataset.set_epoch(epoch)
    return dataset


# --- masks


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world", [1, 3])
def test_mean_over_masked_rows_is_exact(tmp_path: Path, world: int, workers: int) -> None:
    folder = write_samples(tmp_path / "d", 101)
    total, count = 0.0, 0
    for rank in range(world):
        dataset = stream_samples(folder, 8, framework="torch", last="pad", rank=rank, world_size=world)
        for batch in DataLoader(dataset, batch_size=None, num_workers=workers):
            mask = batch.mask()
            assert mask.dtype == torch.bool
            assert len(batch) == len(batch.vector) == len(mask) == 8
            total += float((batch.vector[:, 0] * mask).sum())
            count += int(mask.sum())
    assert (total / count, count) == (50.0, 101)


def test_batch_without_padding_has_a_true_mask(tmp_path: Path) -> None:
    for last in ("keep", "drop", "pad"):
        for batch in stream_samples(write_samples(tmp_path / last, 16), last=last):
            assert batch.mask().all()


def test_masks_survive_preprocessing_and_moves(tmp_path: Path) -> None:
    dataset = stream_samples(
        write_samples(tmp_path / "d", 5), 8, preprocessing={"vector": double}, last="pad", framework="torch"
    )
    for batch in (next(iter(dataset)), next(iter(dataset)).to("cpu"), next(iter(dataset)).to_framework("numpy")):
        assert batch.mask().tolist() == [True] * 5 + [False] * 3
    dataset = StreamingDataset[Sample](tmp_path / "d", 8, {"": _same}, last="pad", output=Sample)
    assert next(iter(dataset)).mask().tolist() == [True] * 5 + [False] * 3


def _same(document: Any) -> None:
    """Nothing is changed."""


# --- preprocessing


@batched
def halve(values: Any) -> Any:
    return values / 2


@pytest.mark.parametrize("workers", [0, 2])
def test_stream_preprocesses_batches(folder: Path, workers: int) -> None:
    dataset = articles(folder, preprocessing={"image": [double, double], "author.name": len, "pages.vector": halve})
    for batch in DataLoader(dataset, batch_size=None, num_workers=workers):
        rows = batch.number.tolist()
        assert batch.image[:, 0, 0].tolist() == [i * 4.0 for i in rows]
        assert batch.author.name.tolist() == [len(f"name {i}") for i in rows]
        assert batch.pages.vector[:, 0].tolist() == [j / 2 for i in rows for j in range(i % 3)]


def test_preprocessing_does_not_change_the_stored_data(folder: Path) -> None:
    dataset = articles(folder, preprocessing={"image": _double_in_place, "": _rename})
    for _ in range(3):
        for batch in dataset:
            assert batch.image[:, 0, 0].tolist() == [i * 2.0 for i in batch.number.tolist()]
            assert batch.text == [f"text {i}!" for i in batch.number.tolist()]


def _double_in_place(image: Any) -> None:
    image *= 2


def _rename(document: Any) -> None:
    document.text += "!"


@pytest.mark.parametrize("workers", [0, 1])
def test_output_validates_as_another_class(folder: Path, workers: int) -> None:
    dataset = articles(folder, preprocessing={"image": double}, output=Scaled, framework="torch")
    batches = list(DataLoader(dataset, batch_size=None, num_workers=workers))
    for batch in batches:
        assert type(batch) is DocumentBatch[Scaled]
        assert batch.image[:, 0, 0].tolist() == [i * 2.0 for i in batch.number.tolist()]
    assert len(batches) == 6


@pytest.mark.parametrize("workers", [0, 1])
def test_function_error_names_path_document_and_row(folder: Path, workers: int) -> None:
    dataset = articles(folder, preprocessing={"number": fail_on_three})
    with pytest.raises(FunctionError, match=r"'number' by fail_on_three failed on document 3 \(id id3\)") as caught:
        list(DataLoader(dataset, batch_size=None, num_workers=workers))
    assert "ValueError: three is not allowed" in str(caught.value)


# --- columns, rows and shapes


def test_columns_selects_fields(folder: Path) -> None:
    dataset = articles(folder, columns=["number", "author.born"])
    for batch in dataset:
        assert [field.name for field in batch.schema.fields] == ["number", "author"]
        assert [field.name for field in batch.author.schema.fields] == ["born"]


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ({"number": {"$lt": 7}}, set(range(7))),
        ({"text": "text 3"}, {3}),
        ({"number": {"$gt": 100}}, set()),
    ],
    ids=["less", "equal", "none"],
)
def test_where_selects_rows(folder: Path, where: Any, expected: set[int]) -> None:
    for shuffle in ("block", "global", False):
        options = {"where": where, "shuffle": shuffle, "columns": ["number"], "framework": "numpy"}
        dataset = articles(folder, **options, allow_empty=not expected)
        assert dataset.num_rows == len(expected)
        assert len(dataset) == -(-len(expected) // 4)
        assert sorted(flatten(numbers(dataset))) == sorted(expected)


def test_empty_stream_is_rejected_unless_allowed(folder: Path, tmp_path: Path) -> None:
    nothing = {"number": {"$gt": 100}}
    with pytest.raises(OptionError, match=r"none of its 23 rows matches where=\{'number'.*allow_empty=True"):
        articles(folder, where=nothing)
    with pytest.raises(OptionError, match=r"none of its 23 rows was chosen in open_dataset\(\)"):
        articles(open_dataset(folder, Article, where=nothing))
    write_dataset([], tmp_path / "empty", Article)
    with pytest.raises(OptionError, match="empty: it has no rows, so training on it would do nothing"):
        articles(tmp_path / "empty")
    assert list(articles(tmp_path / "empty", allow_empty=True)) == []


def test_splits_divide_the_rows(folder: Path) -> None:
    parts = [articles(folder, where=Split("id", (0.6, 0.4), index), framework="numpy") for index in range(2)]
    assert sorted(flatten(flatten(numbers(part) for part in parts))) == list(range(ROWS))


def test_shapes_pads_or_keeps_ragged_tensors(folder: Path) -> None:
    for batch in articles(folder, shapes="pad"):
        longest = max(i % 4 + 1 for i in batch.number.tolist())
        assert batch.words.shape == (len(batch), longest)
        assert batch.mask("words").sum(dim=1).tolist() == [i % 4 + 1 for i in batch.number.tolist()]
    with pytest.raises(ColumnError, match=r"Article.words"):
        list(articles(folder, shapes="error"))


class Clip(BaseDocument):
    samples: NdArray[float32, "length"]


@pytest.mark.parametrize(("framework", "tensor_type"), [("torch", torch.Tensor), ("numpy", np.ndarray)])
def test_padded_tensors_have_the_framework_of_the_batches(tmp_path: Path, framework: str, tensor_type: type) -> None:
    clips = DocumentArray[Clip](Clip(samples=np.ones(i % 3 + 1, np.float32)) for i in range(8))
    write_dataset(clips, tmp_path / "clips", format="arrow")
    stream = StreamingDataset[Clip](tmp_path / "clips", 4, shapes="pad", framework=framework)
    rows = MultiModalDataset[Clip](clips, shapes="pad", framework=framework)
    for batch in (*stream, rows.__getitems__([0, 1, 2])):
        assert isinstance(batch.samples, tensor_type)


def test_stream_returns_rows_by_number(folder: Path) -> None:
    dataset = articles(folder, preprocessing={"image": double})
    assert [dataset[i].number for i in (0, -1, np.int64(7))] == [0, ROWS - 1, 7]
    assert type(dataset[0]) is Article
    assert dataset[3].image[0, 0] == 6
    for key, expected in [
        ([3, 1, 3], [3, 1, 3]),
        (slice(20, None), [20, 21, 22]),
        (slice(None, None, -9), [22, 13, 4]),
        (np.arange(ROWS) < 2, [0, 1]),
        (torch.tensor([5, -1]), [5, 22]),
        ([], []),
    ]:
        batch = dataset[key]
        assert type(batch) is DocumentBatch[Article]
        assert batch.number.tolist() == expected
    for wrong in (ROWS, -ROWS - 1, [0, ROWS]):
        with pytest.raises(RowIndexError):
            dataset[wrong]


def test_rows_by_number_count_selected_rows(folder: Path) -> None:
    dataset = articles(folder, where={"number": {"$gte": 20}})
    assert [dataset[i].number for i in range(3)] == [20, 21, 22]
    assert dataset[[2, 0]].number.tolist() == [22, 20]


def test_rows_by_number_do_not_begin_a_pass(folder: Path) -> None:
    dataset = articles(folder)
    before = dataset.state_dict()
    dataset[3], dataset[[1, 2]]
    assert dataset.state_dict() == before


def test_batches_unstack_to_documents(folder: Path) -> None:
    for batch in articles(folder):
        assert isinstance(batch.unstack(), DocumentArray)


def test_options_accept_numpy_integers(folder: Path) -> None:
    dataset = articles(folder, np.int64(5), seed=np.uint64(7), rank=np.int32(0), world_size=np.int16(2))
    dataset.set_epoch(np.int64(3))
    plain = articles(folder, 5, seed=7, rank=0, world_size=2)
    plain.set_epoch(3)
    assert [batch.number.tolist() for batch in dataset] == [batch.number.tolist() for batch in plain]
    assert all(type(value) in (int, str) for value in dataset.state_dict().values())


@pytest.mark.parametrize("name", ["batch_size", "seed", "rank", "world_size", "epochs"])
def test_options_reject_other_numbers(folder: Path, name: str) -> None:
    options: dict[str, Any] = {"batch_size": 4, "rank": 0, "world_size": 1, name: 1.5}
    with pytest.raises(OptionError, match=rf"^{name}: expected a whole number, got 1\.5 \(float\)\.$"):
        articles(folder, **options)


def test_stream_rejects_documents_in_memory() -> None:
    with pytest.raises(
        OptionError, match=r"got DocumentArray\[Article\]\. Documents in memory are for MultiModalDataset"
    ):
        StreamingDataset[Article](DocumentArray[Article](), 4)
