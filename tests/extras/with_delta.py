"""Import a table of Delta Lake."""

from __future__ import annotations

import tempfile

import deltalake
import pyarrow as pa

from quire.storage import import_dataset

with tempfile.TemporaryDirectory() as folder:
    deltalake.write_deltalake(f"{folder}/table", pa.table({"number": list(range(100))}))
    deltalake.DeltaTable(f"{folder}/table").delete("number < 10")
    assert sorted(import_dataset(f"{folder}/table", f"{folder}/rows")[:].number.tolist()) == list(range(10, 100))
