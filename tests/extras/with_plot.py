"""Plan a training run, and write a plot of it."""

from __future__ import annotations

import tempfile
from pathlib import Path

from quire import BaseDocument
from quire.data import StreamingDataset
from quire.storage import write_dataset


class Row(BaseDocument):
    number: int


with tempfile.TemporaryDirectory() as folder:
    write_dataset((Row(number=i) for i in range(100)), f"{folder}/rows", document_type=Row)
    plan = StreamingDataset[Row](f"{folder}/rows", batch_size=4, shuffle="interleaved", framework="numpy").plan(nodes=2)
    plan.plot(f"{folder}/plan.svg")
    assert Path(f"{folder}/plan.svg").read_text().count("<path") > 10
