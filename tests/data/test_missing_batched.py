"""Missing values and batched preprocessing functions: reading them is an error, filling them is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from quire import BaseDocument, DocumentArray
from quire.data import MultiModalDataset, StreamingDataset, batched
from quire.errors import MissingValueError
from quire.storage import write_dataset
from quire.typing import NdArray, uint8

pytestmark = pytest.mark.needs("torch", "pyarrow")


class Box(BaseDocument):
    label: int = 1
    mask: NdArray[uint8, 2] | None = None


class Row(BaseDocument):
    label: int | None = None
    score: float | None = None
    note: str | None = None
    box: Box | None = None
    boxes: DocumentArray[Box] = []


def make_rows(**fields: Any) -> DocumentArray[Row]:
    """Six rows with fields that are functions of the number of the row."""
    return DocumentArray[Row](Row(id=f"id{i}", **{name: value(i) for name, value in fields.items()}) for i in range(6))


LABELLED = make_rows(label=lambda i: None if i == 3 else 7)


def double_label(batch: Any) -> None:
    batch.score = batch.label * 2.0


@pytest.mark.parametrize("missing", ["raise", {"label": -100, "score": 0.0}], ids=["raise", "values"])
def test_batched_function_cannot_read_missing_values(missing: Any) -> None:
    dataset = MultiModalDataset[Row](LABELLED, {"": batched(double_label)}, missing=missing)
    assert dataset.__getitems__([0, 1]).score.tolist() == [14.0, 14.0]
    with pytest.raises(MissingValueError) as caught:
        dataset.__getitems__([2, 3])
    for part in (
        "documents 2, 3",
        "Row.label: row 1 (id id3) has no value",
        "batch.fill_missing({'label': value})",
        "missing='mask'",
    ):
        assert part in str(caught.value)


def test_error_of_a_batched_function_is_raised_by_a_loader() -> None:
    dataset = MultiModalDataset[Row](LABELLED, {"": batched(double_label)})
    with pytest.raises(MissingValueError, match=r"Row\.label: row 1"):
        list(DataLoader(dataset, batch_size=2, num_workers=2, multiprocessing_context="fork"))


def test_batched_function_on_a_stream_cannot_read_missing_values(tmp_path: Path) -> None:
    write_dataset(LABELLED, tmp_path / "rows")
    steps = {"": batched(double_label)}
    options: Any = {"batch_size": 6, "shuffle": False}
    with pytest.raises(MissingValueError, match=r"Row\.label: row 3"):
        list(StreamingDataset[Row](tmp_path / "rows", preprocessing=steps, **options))
    [batch] = StreamingDataset[Row](tmp_path / "rows", preprocessing=steps, missing="mask", **options)
    assert batch.score.tolist() == [14.0, 14.0, 14.0, 0.0, 14.0, 14.0]


def test_batched_function_reads_zeros_under_a_mask() -> None:
    batch = MultiModalDataset[Row](LABELLED, {"": batched(double_label)}, missing="mask").__getitems__([2, 3])
    assert batch.score.tolist() == [14.0, 0.0]
    assert batch.validity("label").tolist() == [True, False]


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("kind", ["documents", "stream"])
def test_results_for_masked_rows_are_zeros(framework: str, kind: str, tmp_path: Path) -> None:
    rows = make_rows(
        label=lambda i: None if i == 3 else 7,
        score=lambda i: None if i == 1 else 0.5,
        box=lambda i: None if i == 2 else Box(label=i, mask=None if i == 4 else [i, i]),
        boxes=lambda i: [Box(label=2, mask=None if i == 0 else [9, 9])],
    )
    steps = {
        "label": batched(lambda labels: labels + 100),
        "score": batched(lambda scores: scores + 1.5),
        "box.mask": batched(lambda masks: masks + 1),
        "boxes.mask": batched(lambda masks: masks + 1),
    }
    if kind == "stream":
        write_dataset(rows, tmp_path / "rows")
        options: Any = {"batch_size": 6, "shuffle": False, "missing": "mask"}
        [batch] = StreamingDataset[Row](tmp_path / "rows", preprocessing=steps, framework=framework, **options)
    else:
        batch = MultiModalDataset[Row](rows, steps, missing="mask", framework=framework).__getitems__(list(range(6)))
    assert batch.label.tolist() == [107, 107, 107, 0, 107, 107]
    assert batch.score.tolist() == [2, 0, 2, 2, 2, 2]
    assert batch.validity("score").tolist() == [True, False, True, True, True, True]
    assert batch["box.mask"].tolist() == [[1, 1], [2, 2], [0, 0], [4, 4], [0, 0], [6, 6]]
    assert batch._columns.columns["boxes"].flat.columns["mask"].data.tolist() == [[0, 0]] + [[10, 10]] * 5


def fill_by_validity(batch: Any) -> Any:
    known = batch.validity("label")
    batch = batch.fill_missing({"label": 0})
    batch.score = torch.where(known, batch.label * 2.0, -1.0)
    return batch


def replace_column(batch: Any) -> None:
    batch.label = [-1 if row.label is None else row.label for row in batch]


def read_as_held(batch: Any) -> None:
    column = batch.column("label")
    batch.label = torch.where(torch.from_numpy(column.valid_rows()), column.data, -5)


@pytest.mark.parametrize(
    ("function", "expected"), [(fill_by_validity, [7, 0]), (replace_column, [7, -1]), (read_as_held, [7, -5])]
)
def test_batched_function_can_fill_missing_values(function: Any, expected: list[int]) -> None:
    batch = MultiModalDataset[Row](LABELLED, {"": batched(function)}).__getitems__([2, 3])
    assert batch.label.tolist() == expected
    assert batch.validity("label").all()


def test_batched_function_may_leave_missing_values_unread() -> None:
    def set_note(batch: Any) -> None:
        batch.note = ["a"] * len(batch)

    dataset = MultiModalDataset[Row](LABELLED, {"": batched(set_note)}, missing={"label": -100})
    assert dataset.__getitems__([2, 3]).label.tolist() == [7, -100]


def test_field_without_any_value_reads_as_none_in_a_batched_function() -> None:
    seen: list[Any] = []
    dataset = MultiModalDataset[Row](
        make_rows(label=lambda i: i), {"": batched(lambda batch: seen.append(batch.score))}
    )
    dataset.__getitems__([0, 1])
    assert seen == [None]


# --- nested documents


def sum_mask(boxes: Any) -> None:
    boxes.label = boxes["mask"].sum(axis=1).astype(np.int64)


def test_batched_function_on_nested_documents_cannot_read_missing_values() -> None:
    def make_box(i: int) -> Box | None:
        return None if i == 1 else Box(mask=None if i == 2 else [1, i])

    documents = make_rows(label=lambda i: i, box=make_box)
    options: Any = {"framework": "numpy", "missing": {"box.mask": 0, "box.label": -1}}
    dataset = MultiModalDataset[Row](documents, {"box": batched(sum_mask)}, **options)
    assert dataset.__getitems__([0, 1]).box.label.tolist() == [1, -1]  # a document that is None is passed over
    with pytest.raises(MissingValueError, match=r"Row\.box\.mask: row 2"):
        dataset.__getitems__([0, 1, 2])
    whole = MultiModalDataset[Row](documents, {"": batched(lambda batch: sum_mask(batch.box))}, **options)
    with pytest.raises(MissingValueError, match=r"Row\.box\.mask: row 1"):
        whole.__getitems__([0, 1])  # and is missing where the whole row is read


def test_batched_function_on_arrays_of_documents_cannot_read_missing_values() -> None:
    documents = make_rows(label=lambda i: i, boxes=lambda i: [Box(mask=None if i == 2 else [1, i])])
    dataset = MultiModalDataset[Row](
        documents, {"boxes": batched(lambda boxes: sum_mask(boxes.flat))}, framework="numpy", missing={"boxes.mask": 0}
    )
    assert dataset.__getitems__([0, 1]).boxes.label.tolist() == [1, 2]
    with pytest.raises(MissingValueError, match=r"Row\.boxes\.mask: row 1"):
        dataset.__getitems__([1, 2])
