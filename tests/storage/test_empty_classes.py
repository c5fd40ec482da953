"""Classes without fields: their rows are counted, and a missing document stays missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest

from quire import BaseDocument, DocumentArray
from quire.data import StreamingDataset
from quire.errors import OptionError
from quire.storage import open_dataset, write_dataset

pytestmark = pytest.mark.needs("pyarrow")


class Empty(BaseDocument):
    id: ClassVar[None] = None  # type: ignore[assignment,misc]


class Holder(BaseDocument):
    id: ClassVar[None] = None  # type: ignore[assignment,misc]
    maybe: Empty | None = None
    one: Empty = Empty()
    many: DocumentArray[Empty] = DocumentArray[Empty]()


class Deep(BaseDocument):
    number: int
    holder: Holder | None = None


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.mark.parametrize("kind", ["arrow", "parquet"])
def test_class_without_fields_keeps_its_rows(tmp_path: Path, kind: Any) -> None:
    write_dataset([Empty()] * 3, tmp_path, document_type=Empty, format=kind)
    write_dataset([Empty()] * 2, tmp_path, document_type=Empty, format=kind, mode="append")
    dataset = open_dataset(tmp_path, Empty)
    dataset.verify()
    assert len(dataset) == len(dataset.read()) == len(dataset[:]) == 5
    assert list(dataset.read().unstack()) == [Empty()] * 5
    assert dataset[4] == Empty()
    assert [len(batch) for batch in StreamingDataset[Empty](tmp_path, 2, framework="numpy")] == [2, 2, 1]


@pytest.mark.parametrize("kind", ["arrow", "parquet"])
def test_missing_document_without_fields_stays_missing(tmp_path: Path, kind: Any) -> None:
    holders = [Holder(), Holder(maybe=Empty()), Holder(many=[Empty(), Empty()])]
    write_dataset(holders, tmp_path / "holders", document_type=Holder, format=kind)
    assert list(open_dataset(tmp_path / "holders", Holder).read().unstack()) == holders
    assert [open_dataset(tmp_path / "holders", Holder)[k] for k in range(3)] == holders
    deep = [Deep(number=0), *(Deep(number=k, holder=holder) for k, holder in enumerate(holders))]
    write_dataset(deep, tmp_path / "deep", document_type=Deep, format=kind)
    assert list(open_dataset(tmp_path / "deep", Deep)[:].unstack()) == deep


@pytest.mark.parametrize("kind", ["arrow", "parquet"])
def test_empty_list_of_columns_is_an_error(tmp_path: Path, kind: Any) -> None:
    write_dataset([Deep(number=k) for k in range(4)], tmp_path, format=kind)
    with pytest.raises(OptionError, match=r"columns=\[\] reads nothing: name fields of Deep"):
        open_dataset(tmp_path, Deep, columns=[])


def test_inferred_class_has_no_placeholder_field(tmp_path: Path) -> None:
    class Passing(BaseDocument):
        id: ClassVar[None] = None  # type: ignore[assignment,misc]

    write_dataset([Passing()] * 3, tmp_path, document_type=Passing)
    for log in (tmp_path / "_quire").iterdir():
        log.unlink()
    [file] = tmp_path.glob("*.parquet")
    dataset: Any = open_dataset(file, Empty)
    assert len(dataset.read()) == 3
