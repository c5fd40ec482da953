"""Train on a dataset with Lightning."""

from __future__ import annotations

import tempfile
import warnings

import lightning.pytorch as pl
import torch

from quire import BaseDocument
from quire.data import StreamingDataset
from quire.integrations.lightning import QuireDataModule
from quire.storage import write_dataset
from quire.typing import NdArray, float32


class Row(BaseDocument):
    x: NdArray[float32, 4]


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.rows = torch.nn.Linear(4, 1), 0

    def training_step(self, batch: object, _: int) -> torch.Tensor:
        loss = self.linear(batch.x).square().mean()
        self.log("loss", loss, on_epoch=True)
        self.rows += len(batch)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


with tempfile.TemporaryDirectory() as folder:
    write_dataset((Row(x=[i, 1, 2, 3]) for i in range(10)), f"{folder}/rows", document_type=Row)
    model, data = Model(), QuireDataModule(StreamingDataset[Row](f"{folder}/rows", batch_size=4))
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pl.Trainer(accelerator="cpu", max_epochs=2, default_root_dir=folder, **options).fit(model, data)
    assert model.rows == 20
