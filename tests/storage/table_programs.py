"""What the tests of tables do, in processes of their own, because threads of lance do not survive a fork."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from quire import BaseDocument
from quire.errors import DecodeError, OptionError, QuireError
from quire.storage import StoredDataset, WriteOptions, import_dataset, open_dataset
from quire.storage.importers import IMPORTERS, ImportOptions
from quire.typing import NdArray

ROWS, STEP = 3000, 5
DELETED = f"number % {STEP} = 0"
"""The rows that are deleted from every table."""


class Meta(BaseDocument):
    width: int
    note: str | None = None


class Reading(BaseDocument):
    number: int
    score: float | None = None
    vector: NdArray[4, np.float32]
    tags: list[str]
    taken: datetime
    day: date
    price: Decimal
    picture: bytes
    meta: Meta


class Narrow(BaseDocument):
    number: int


class Wrong(BaseDocument):
    number: bytes


def cells(i: int) -> dict[str, Any]:
    return {
        "id": f"r{i}",
        "number": i,
        "score": None if i % 7 == 0 else i / 2,
        "vector": [float(i)] * 4,
        "tags": ["wide", "calm"][: i % 3],
        "taken": datetime.fromisoformat("2024-01-01") + timedelta(hours=i),
        "day": date(2024, 1, 1) + timedelta(days=i % 100),
        "price": Decimal(i) / 100,
        "picture": bytes([i % 256]) * 10,
        "meta": {"width": i, "note": None if i % 2 else "even"},
    }


def table(rows: range = range(ROWS)) -> pa.Table:
    schema = pa.schema(
        [
            ("id", pa.string()),
            ("number", pa.int64()),
            ("score", pa.float64()),
            ("vector", pa.list_(pa.float32())),
            ("tags", pa.list_(pa.string())),
            ("taken", pa.timestamp("us")),
            ("day", pa.date32()),
            ("price", pa.decimal128(12, 2)),
            ("picture", pa.binary()),
            ("meta", pa.struct([("width", pa.int64()), ("note", pa.string())])),
        ]
    )
    return pa.Table.from_pylist([cells(i) for i in rows], schema)


# --- writing: the path of the table, and the table of its first version as an object


def write_lance(folder: Path, rows: range = range(ROWS)) -> tuple[str, Any]:
    import lance

    path = str(folder / "readings.lance")
    lance.write_dataset(table(rows), path)
    lance.dataset(path).delete(DELETED)
    return path, lance.dataset(path, version=1)


def write_delta(folder: Path, rows: range = range(ROWS)) -> tuple[str, Any]:
    import deltalake

    path = str(folder / "readings")
    deltalake.write_deltalake(path, table(rows))
    deltalake.DeltaTable(path).delete(DELETED)
    return path, deltalake.DeltaTable(path, version=0)


def write_iceberg(folder: Path, rows: range = range(ROWS)) -> tuple[str, Any]:
    from pyiceberg.catalog.memory import InMemoryCatalog
    from pyiceberg.expressions import In
    from pyiceberg.table import StaticTable

    catalog = InMemoryCatalog("test", warehouse=folder.as_uri())
    catalog.create_namespace("space")
    written = catalog.create_table("space.readings", schema=table(range(1)).schema)
    middle = rows.start + len(rows) // 2
    for part in (range(rows.start, middle), range(middle, rows.stop)):
        written.append(table(part))
    first = StaticTable.from_metadata(written.metadata_location)
    written.delete(In("number", [i for i in rows if i % STEP == 0]))
    return str(folder / "space" / "readings"), first


WRITERS: dict[str, Callable[..., tuple[str, Any]]] = {
    "lance": write_lance,
    "delta": write_delta,
    "iceberg": write_iceberg,
}


# --- programs


def check_rows(dataset: StoredDataset[Any], numbers: list[int]) -> None:
    assert sorted(dataset[:].number) == numbers
    for row in (0, len(dataset) // 2, len(dataset) - 1):
        document = dataset[row]
        expected = cells(document.number)
        assert document.vector.tolist() == expected.pop("vector")
        meta = expected.pop("meta")
        assert (document.meta.width, document.meta.note) == (meta["width"], meta["note"])
        assert {name: getattr(document, name) for name in expected} == expected


LIVE = [i for i in range(ROWS) if i % STEP]


def import_with_inferred_class(name: str, folder: Path) -> None:
    path, first = WRITERS[name](folder)
    dataset = import_dataset(path, folder / "latest")
    check_rows(dataset, LIVE)
    assert type(dataset).document_type.__name__ == "Readings"
    types = {field.name: str(field) for field in type(dataset).document_type.document_schema().fields}
    assert (types["number"], types["score"], types["id"]) == ("int", "float | None", "str")
    check_rows(import_dataset(first, folder / "first"), list(range(ROWS)))  # an object, of another version


def import_with_given_class(name: str, folder: Path) -> None:
    path, _ = WRITERS[name](folder)
    check_rows(import_dataset(path, folder / "typed", name, Reading), LIVE)
    assert len(open_dataset(folder / "typed", Reading)) == len(LIVE)
    assert sorted(import_dataset(path, folder / "narrow", document_type=Narrow)[:].number) == LIVE
    with pytest.raises(DecodeError, match="Narrow has no field"):
        import_dataset(path, folder / "strict", document_type=Narrow, extra="forbid")
    with pytest.raises(DecodeError, match="number"):
        import_dataset(path, folder / "wrong", document_type=Wrong)
    assert not (folder / "wrong").exists() or not list((folder / "wrong").glob("*.parquet"))


def resume_an_import(name: str, folder: Path) -> None:
    """Stop after some rows, and continue: no row is missing or twice."""
    path, _ = WRITERS[name](folder)
    foreign = IMPORTERS[name](path, Reading, ImportOptions())
    assert foreign.total == len(LIVE)
    rows = [number for batch in foreign.rows(0) for number in batch.number]
    for start in (1, 999, 1024, len(LIVE) - 1, len(LIVE)):
        assert [number for batch in foreign.rows(start) for number in batch.number] == rows[start:]
    options = WriteOptions(shard_bytes=40_000)
    importer = IMPORTERS[name]

    def stop_early(*arguments: Any) -> Any:
        opened = importer(*arguments)

        def some(first: int) -> Any:
            for count, batch in enumerate(opened.rows(first)):
                if count == 2:
                    raise KeyboardInterrupt
                yield batch

        return type(opened)(opened.document_type, some, opened.total)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(IMPORTERS, name, stop_early)
        with pytest.raises(KeyboardInterrupt):
            import_dataset(path, folder / "target", name, Reading, options=options)
    dataset = import_dataset(path, folder / "target", name, Reading, options=options, mode="resume")
    assert sorted(dataset[:].number) == LIVE


def refuse_what_cannot_be_read(name: str, folder: Path) -> None:
    with pytest.raises(QuireError, match="no such file or folder"):
        import_dataset(folder / "nowhere", folder / "target", name)
    (folder / "empty").mkdir()
    with pytest.raises(QuireError, match="empty"):
        import_dataset(folder / "empty", folder / "target", name)
    path, _ = WRITERS[name](folder, range(1))  # its only row is deleted
    with pytest.raises(DecodeError, match="no class can be inferred without rows"):
        import_dataset(path, folder / "target", name)
    assert len(import_dataset(path, folder / "typed", name, Reading)) == 0
    from quire.files import RemoteOptions

    with pytest.raises(OptionError, match="with its? ?.*own options|and its own options"):
        import_dataset(path, folder / "target", name, remote=RemoteOptions(storage_options={"key": "a"}))


def import_delta_without_order(name: str, folder: Path) -> None:
    """Tables whose rows have no fixed order are read, and not resumed."""
    import deltalake

    path = str(folder / "mapped")
    deltalake.write_deltalake(path, table(range(50)), configuration={"delta.enableDeletionVectors": "true"})
    foreign = IMPORTERS[name](path, Reading, ImportOptions())
    assert sorted(number for batch in foreign.rows(0) for number in batch.number) == list(range(50))
    with pytest.raises(QuireError, match="cannot be resumed"):
        list(foreign.rows(10))


def write_and_drop(name: str, folder: Path) -> str:
    """Write a small table, and return its path only: tables of a library cannot be pickled."""
    return WRITERS[name](folder, range(100))[0]
