"""Import a dataset of Lance."""

from __future__ import annotations

import tempfile

import lance
import pyarrow as pa

from quire.storage import import_dataset

with tempfile.TemporaryDirectory() as folder:
    lance.write_dataset(pa.table({"number": list(range(100))}), f"{folder}/rows.lance")
    lance.dataset(f"{folder}/rows.lance").delete("number < 10")
    assert import_dataset(f"{folder}/rows.lance", f"{folder}/rows")[:].number.tolist() == list(range(10, 100))
