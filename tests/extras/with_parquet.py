"""Write a dataset, and read it in random order."""

from __future__ import annotations

import tempfile

import numpy as np

from quire import BaseDocument
from quire.data import StreamingDataset
from quire.storage import ReadOptions, open_dataset, write_dataset
from quire.typing import NdArray


class Sample(BaseDocument):
    x: NdArray[4]
    number: int


with tempfile.TemporaryDirectory() as folder:
    for kind in ("parquet", "arrow"):
        url = f"{folder}/{kind}"
        write_dataset((Sample(x=np.ones(4), number=i) for i in range(100)), url, document_type=Sample, format=kind)
        assert len(open_dataset(url)) == 100
        batches = StreamingDataset[Sample](
            url, batch_size=10, framework="numpy", storage=ReadOptions(cache=f"{folder}/cache")
        )
        assert sorted(number for batch in batches for number in batch.number.tolist()) == list(range(100))
