"""Rows of a batch that are replaced, batches in fields of documents, and batches as CSV."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import BaseDocument, DocumentArray, DocumentBatch, Text
from quire.errors import (
    ColumnError,
    DocumentTypeError,
    EncodeError,
    RowIndexError,
    SchemaError,
    UnknownOptionError,
)
from quire.typing import AnyTensor, NdArray, float32


class Inner(BaseDocument):
    weight: float | None = None


class Row(BaseDocument):
    number: int
    title: Text
    vector: NdArray[float32, 2]
    inner: Inner | None = None
    notes: DocumentArray[Inner] = []


def make_rows(start: int, count: int) -> DocumentArray[Row]:
    return DocumentArray[Row](
        Row(
            number=n,
            title=f"row {n}",
            vector=np.full(2, n, np.float32),
            inner=None if n % 3 == 0 else Inner(weight=None if n % 3 == 1 else n),
            notes=[Inner(weight=float(k)) for k in range(n % 3)],
        )
        for n in range(start, start + count)
    )


KEYS: list[Any] = [
    slice(1, 3),
    slice(None),
    slice(None, None, -2),
    [4, 0],
    np.array([True, False, True, False, False]),
    np.array([-1]),
    [],
]


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_rows_are_replaced_as_in_an_array(key: Any) -> None:
    rows = make_rows(0, 5)
    batch = rows.stack()
    incoming = make_rows(10, len(rows[key]))
    batch[key] = incoming
    rows[key] = incoming
    assert batch.unstack().identical(rows)


def test_one_row_is_replaced_by_a_document_or_a_mapping() -> None:
    batch, before = make_rows(0, 3).stack(), make_rows(0, 3)
    vector = batch.vector
    batch[-1] = make_rows(7, 1)[0]
    batch[0] = {"number": 9, "title": "x", "vector": np.zeros(2, np.float32)}
    assert batch.number.tolist() == [9, 1, 7]
    assert batch.title.text == ["x", "row 1", "row 7"]
    assert vector.tolist() == before.stack().vector.tolist()  # tensors that were read before do not change


def test_rows_of_a_nested_batch_are_those_of_the_whole() -> None:
    batch = make_rows(1, 2).stack()
    batch.title[0] = Text("new")
    assert batch[0].title == "new"


@pytest.mark.needs("torch")
def test_replaced_rows_keep_the_framework() -> None:
    import torch

    batch = make_rows(0, 3).stack("torch")
    batch[1] = Row(number=8, title="x", vector=np.ones(2, np.float32))
    assert torch.equal(batch.number, torch.tensor([0, 8, 2]))


def test_rows_that_do_not_fit_change_nothing() -> None:
    batch = make_rows(0, 3).stack()
    with pytest.raises(ColumnError, match="2 rows, but 1 documents"):
        batch[:2] = make_rows(5, 1)
    with pytest.raises(RowIndexError, match="position 3 is out of range"):
        batch[3] = make_rows(5, 1)[0]
    with pytest.raises(DocumentTypeError, match="expected a Row, got Text"):
        batch[0] = Text("x")
    assert batch.unstack() == make_rows(0, 3)


# --- batches in fields


class Holder(BaseDocument):
    batch: DocumentBatch[Row]
    anything: Any = None


def test_batch_in_a_field_survives_every_form() -> None:
    holder = Holder(batch=make_rows(0, 4).stack(), anything=make_rows(4, 1).stack())
    for copy in (
        Holder.from_bytes(holder.to_bytes()),
        Holder.from_protobuf(holder.to_protobuf()),
        DocumentArray[Holder].from_bytes(DocumentArray[Holder]([holder]).to_bytes())[0],
        DocumentBatch[Holder].from_bytes(DocumentArray[Holder]([holder]).stack().to_bytes())[0],
    ):
        assert isinstance(copy.batch, DocumentBatch[Row])
        assert isinstance(copy.anything, DocumentBatch[Row])
        assert copy == holder
    holder.anything = None  # JSON has no batches without a type
    assert Holder.from_json(holder.to_json()) == holder


@pytest.mark.needs("pyarrow")
def test_batch_in_a_field_is_stored(tmp_path: Path) -> None:
    from quire.storage import open_dataset, write_dataset

    holder = Holder(batch=make_rows(0, 4).stack())
    write_dataset([holder], tmp_path / "made", Holder)
    assert open_dataset(tmp_path / "made", Holder)[0] == holder


def test_batch_of_mixed_shapes_in_a_field_is_refused() -> None:
    class Sound(BaseDocument):
        samples: AnyTensor

    class Sounds(BaseDocument):
        batch: Any

    array = DocumentArray[Sound]([Sound(samples=np.ones(2)), Sound(samples=np.ones(3))])
    for shapes in ("pad", "ragged"):
        with pytest.raises(EncodeError, match="Sound.samples has tensors of mixed shapes, which rows do not stack to"):
            Sounds(batch=array.stack(shapes=shapes)).to_bytes()  # type: ignore[arg-type]


# --- CSV


def test_batch_writes_the_table_of_its_array(tmp_path: Path) -> None:
    rows = make_rows(0, 3)
    assert rows.stack().to_csv() == rows.to_csv()
    rows.stack().to_csv(tmp_path / "rows.csv", delimiter=";")
    assert DocumentArray[Row].from_csv(tmp_path / "rows.csv", delimiter=";") == rows
    assert DocumentBatch[Row].from_csv(tmp_path / "rows.csv", delimiter=";").unstack() == rows
    assert DocumentBatch[Row].from_csv(text=rows.to_csv()) == rows.stack()


def test_errors_about_a_table_for_a_batch_say_what_to_write() -> None:
    with pytest.raises(SchemaError, match=r"say DocumentBatch\[Student\].from_csv\(\)"):
        DocumentBatch.from_csv(text="a\n")
    with pytest.raises(UnknownOptionError, match="Did you mean 'delimiter'"):
        DocumentBatch[Row].from_csv(text="a\n", delimeter=";")  # type: ignore[call-arg]


def test_progress_of_loading_is_an_option(tmp_path: Path) -> None:
    rows = make_rows(0, 3)
    rows.save_binary(tmp_path / "rows.bin")
    for show in (True, False, None):
        assert DocumentBatch[Row].load_binary(tmp_path / "rows.bin", show_progress=show).unstack() == rows
        assert DocumentArray[Row].load_binary(tmp_path / "rows.bin", show_progress=show) == rows
        assert len(list(DocumentArray[Row].load_binary(tmp_path / "rows.bin", streaming=True, show_progress=show))) == 3
        assert len(list(DocumentBatch[Row].load_binary(tmp_path / "rows.bin", streaming=True, show_progress=show))) == 1
