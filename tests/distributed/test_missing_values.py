"""Missing values in the data of an Estimator: errors in training, and in prediction when the model reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from quire import BaseDocument, DocumentArray
from quire.data import MultiModalDataset, StreamingDataset
from quire.distributed import DocumentShards
from quire.distributed.estimator import Estimator
from quire.errors import MissingValueError, OptionError, QuireError
from quire.storage import write_dataset
from quire.typing import NdArray, float32

pytestmark = pytest.mark.needs("torch", "lightning", "pyarrow", "fsspec", "xxhash", "cloudpickle")


class Point(BaseDocument):
    x: NdArray[float32, 2] | None = None
    y: float | None = None
    rating: float | None = None


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)

    def forward(self, x: Any) -> Any:
        return self.linear(x).squeeze(1)


class WholeBatch(Net):
    def forward(self, batch: Any) -> Any:
        return super().forward(batch.x)


def points(count: int = 8, **fields: Any) -> DocumentArray[Point]:
    created = DocumentArray[Point](Point(id=f"id{i}", x=np.full(2, i, np.float32), y=float(i)) for i in range(count))
    for name, rows in fields.items():
        for row in rows:
            setattr(created[row], name, None)
    return created


def estimator(model: type[nn.Module] = Net) -> Estimator:
    def sgd(net: nn.Module, config: Any) -> Any:
        del config
        return torch.optim.SGD(net.parameters(), lr=0.01)

    return Estimator.from_torch(model=model(), optimizer=sgd, loss=nn.MSELoss())


COLUMNS: Any = {"feature_cols": "x", "label_cols": "y", "batch_size": 4}


@pytest.mark.parametrize("stored", [False, True])
def test_fit_raises_for_missing_values_in_read_columns(tmp_path: Path, stored: bool) -> None:
    def data(documents: Any) -> Any:
        if not stored:
            return documents
        folder = tmp_path / f"d{len(list(tmp_path.iterdir()))}"
        write_dataset(documents, folder, Point)
        return str(folder)

    for call in (estimator().fit, estimator().evaluate):
        with pytest.raises(MissingValueError, match=r"Point\.y: \w+ 5 \(id id5\)"):
            call(data(points(y=[5])), **COLUMNS)
        with pytest.raises(MissingValueError, match=r"Point\.x: \w+ 2 \(id id2\)"):
            call(data(points(x=[2])), **COLUMNS)
        documents = points()
        documents[3].rating = 1.0
        assert call(data(documents), **COLUMNS)  # other columns are not read
        assert call(data(points(y=[5])), missing={"y": 0}, **COLUMNS)
        assert call(data(points(y=[5])), missing="mask", **COLUMNS)


def test_fit_rejects_a_column_without_values() -> None:
    with pytest.raises(MissingValueError, match=r"Point\.rating: no row of the batch has a value"):
        estimator().fit(points(), feature_cols="x", label_cols="rating")


def test_fit_keeps_the_missing_policy_of_datasets(tmp_path: Path) -> None:
    write_dataset(points(y=[5]), tmp_path / "d", Point)
    datasets = [
        MultiModalDataset[Point](points(y=[5]), missing={"y": 1.0}),
        StreamingDataset[Point](tmp_path / "d", 4, missing={"y": 1.0}),
    ]
    for dataset in datasets:
        assert estimator().fit(dataset, **{**COLUMNS, "batch_size": 4})
        with pytest.raises(OptionError, match="missing is for documents"):
            estimator().fit(dataset, missing="mask", **COLUMNS)
    with pytest.raises(OptionError, match="missing='all'"):
        estimator().fit(points(), missing="all", **COLUMNS)  # type: ignore[arg-type]


@pytest.mark.parametrize(("model", "columns"), [(Net, "x"), (WholeBatch, None)])
def test_predict_raises_when_the_model_reads_missing_values(tmp_path: Path, model: Any, columns: Any) -> None:
    est = estimator(model)
    write_dataset(points(y=[1, 5]), tmp_path / "whole", Point)
    write_dataset(points(x=[5]), tmp_path / "part", Point)
    for data in (points(y=[1, 5]), points(y=[1, 5]).stack(), tmp_path / "whole"):
        actual = est.predict(data, 4, columns)
        assert len(actual) == 8
        assert actual[5].y is None
    for data in (points(x=[5]), points(x=[5]).stack(), tmp_path / "part"):
        with pytest.raises(MissingValueError, match=r"Point\.x: row 1 \(id id5\)"):
            est.predict(data, 4, columns)


@pytest.mark.parametrize(("model", "columns"), [(Net, "x"), (WholeBatch, None)])
def test_predict_on_shards_raises_for_missing_values(model: Any, columns: Any) -> None:
    est = estimator(model)
    created = est.predict(DocumentShards.from_documents(points(y=[1, 5])), 4, columns).collect()
    assert [document.y for document in created][:2] == [0.0, None]
    with pytest.raises(QuireError, match=r"Point\.x: row \d \(id id5\) has no value"):
        est.predict(DocumentShards.from_documents(points(x=[5])), 4, columns).collect()
