"""Data of another class that shares no field with the one that reads it is an error, and not documents of defaults."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from pydantic import Field, create_model

from quire import BaseDocument, Document, DocumentArray, DocumentBatch
from quire.data import StreamingDataset
from quire.distributed import DocumentShards
from quire.errors import DecodeError, QuireError, StorageError
from quire.storage import open_dataset, write_dataset

pytestmark = pytest.mark.needs("pandas", "pyarrow", "torch")


class Photo(BaseDocument):
    caption: str = ""
    stars: int = 0


class Invoice(BaseDocument):
    amount: float = 0.0


class Renamed(BaseDocument):
    text: str = Field("", validation_alias="caption")


class Open(BaseDocument, extra="allow"):
    amount: float = 0.0


class OnlyId(BaseDocument):
    pass


class WithoutId(BaseDocument):
    id: ClassVar[None] = None  # type: ignore[assignment, misc]
    amount: float = 0.0


PHOTOS = DocumentArray[Photo]([Photo(caption="a", stars=5), Photo(caption="b", stars=4)])


def _store(folder: Path, format: str) -> Path:  # noqa: A002 - the name of the option
    write_dataset(PHOTOS, folder / "rows", document_type=Photo, format=format)  # type: ignore[arg-type]
    return folder / "rows"


READERS: dict[str, Callable[[Any, Path], Any]] = {
    "document": lambda tp, _: tp.from_bytes(PHOTOS[0].to_bytes()),
    "message": lambda tp, _: tp.from_protobuf(PHOTOS[0].to_protobuf()),
    "array": lambda tp, _: DocumentArray[tp].from_bytes(PHOTOS.to_bytes()),
    "batch": lambda tp, _: DocumentBatch[tp].from_bytes(PHOTOS.stack().to_bytes()),
    "data frame": lambda tp, _: DocumentArray[tp].from_dataframe(PHOTOS.to_dataframe()),
    "csv": lambda tp, _: DocumentArray[tp].from_csv(text=PHOTOS.to_csv(), extra="ignore"),
    "arrow": lambda tp, _: DocumentBatch[tp].from_arrow(PHOTOS.stack().to_arrow()),
    "stored parquet": lambda tp, path: list(open_dataset(_store(path, "parquet"), tp)),
    "stored arrow": lambda tp, path: list(open_dataset(_store(path, "arrow"), tp)),
    "one row of arrow": lambda tp, path: open_dataset(_store(path, "arrow"), tp)[1],
    "some columns": lambda tp, path: list(open_dataset(_store(path, "arrow"), tp, columns=["amount"])),
    "read": lambda tp, path: open_dataset(_store(path, "parquet"), tp).read(),
    "filter": lambda tp, path: open_dataset(_store(path, "parquet"), tp).filter({"amount": 0.0}).read(),
    "stream": lambda tp, path: list(StreamingDataset[tp](_store(path, "parquet"), 2, epochs=1)),
    "stream, damage skipped": lambda tp, path: list(
        StreamingDataset[tp](_store(path, "arrow"), 2, epochs=1, on_error="skip")
    ),
    "shards": lambda tp, path: DocumentShards[tp].read_parquet(_store(path, "parquet")).collect(),
}


@pytest.mark.parametrize("document_type", [Invoice, WithoutId])
@pytest.mark.parametrize("name", READERS)
def test_reading_as_a_class_without_a_common_field_is_an_error(name: str, document_type: Any, tmp_path: Path) -> None:
    with pytest.raises(QuireError, match="none of the (fields|columns)"):
        READERS[name](document_type, tmp_path)


@pytest.mark.parametrize("document_type", [Renamed, Open, OnlyId, Document])
@pytest.mark.parametrize("name", ["document", "array", "batch", "stored parquet", "stored arrow"])
def test_aliases_open_classes_and_classes_without_fields_read_other_data(
    name: str, document_type: Any, tmp_path: Path
) -> None:
    READERS[name](document_type, tmp_path)


def test_data_without_fields_is_read_with_defaults() -> None:
    ids = DocumentArray[OnlyId]([OnlyId(id="a")])
    assert DocumentArray[Invoice].from_bytes(ids.to_bytes())[0] == Invoice(id="a", amount=0.0)
    assert Invoice.from_bytes(ids[0].to_bytes()) == Invoice(id="a", amount=0.0)


def test_versions_of_one_class_need_no_common_field(tmp_path: Path) -> None:
    newer: Any = create_model("Photo", __base__=BaseDocument, rating=(float, 0.5))
    for name in ("document", "array", "batch", "stored parquet", "stored arrow"):
        READERS[name](newer, tmp_path / name.replace(" ", "-"))


def test_missing_required_field_is_named() -> None:
    strict: Any = create_model("Strict", __base__=BaseDocument, amount=(float, ...))
    for name in ("document", "array", "batch"):
        with pytest.raises(DecodeError, match=r"Strict\.amount: .*the bytes do not hold it"):
            READERS[name](strict, Path())


def test_unknown_fields_may_be_kept() -> None:
    kept = Invoice.from_bytes(PHOTOS[0].to_bytes(), unknown="keep")
    assert kept.__pydantic_extra__ == {"caption": "a", "stars": 5}
    assert DocumentArray[Invoice].from_bytes(PHOTOS.to_bytes(), unknown="keep")[1].id == PHOTOS[1].id


def test_rows_of_an_unrelated_class_are_not_appended(tmp_path: Path) -> None:
    path = _store(tmp_path, "parquet")
    with pytest.raises(StorageError, match="Invoice is not compatible with the stored documents"):
        write_dataset([Invoice(amount=1.0)], path, document_type=Invoice, mode="append")
    assert len(open_dataset(path)) == 2


def test_the_error_names_the_fields_of_the_data() -> None:
    with pytest.raises(DecodeError) as caught:
        Invoice.from_bytes(PHOTOS[0].to_bytes())
    assert str(caught.value) == (
        "Invoice has none of the fields of the data, which are caption, stars: it was written from another class. "
        "Read it with that class, or add the old names of fields as aliases."
    )
