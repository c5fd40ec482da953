"""Train with Lightning, with a loader of quire, of torchdata, or the data module."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from common import CONFIG, compute_loss, latest, make_model, open_rows, record, resume_from, step_of

pl: Any = importlib.import_module(getattr(CONFIG, "package", "lightning.pytorch"))


class Model(pl.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.model = make_model()

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        loss = compute_loss(self.model, batch)
        # The data module lets Lightning find the batch size, which a mean over an epoch needs.
        sizes = {} if CONFIG.loader == "module" else {"batch_size": len(batch)}
        self.log("loss", loss, on_epoch=True, **sizes)
        assert sizes or self.trainer._results.batch_size == len(batch)
        record(self.global_rank, self.global_step + 1, batch.number)
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        self.log("error", compute_loss(self.model, batch), batch_size=len(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def main() -> None:
    dataset = open_rows()  # before Lightning starts the other processes
    data: dict[str, Any] = {}
    if CONFIG.loader == "module":
        from quire.integrations.lightning import QuireDataModule

        data["datamodule"] = QuireDataModule(dataset, open_rows(last="pad"), workers=CONFIG.workers)
    elif CONFIG.loader == "stateful":
        from torchdata.stateful_dataloader import StatefulDataLoader

        data["train_dataloaders"] = StatefulDataLoader(dataset, batch_size=None, num_workers=CONFIG.workers)
    elif CONFIG.loader == "plain":
        from torch.utils.data import DataLoader

        data["train_dataloaders"] = DataLoader(dataset, batch_size=None, num_workers=CONFIG.workers)
    else:
        data["train_dataloaders"] = dataset.loader()
    saving = pl.callbacks.ModelCheckpoint(
        CONFIG.folder, "checkpoint-{step}", save_top_k=-1, every_n_train_steps=CONFIG.save_every
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=CONFIG.processes,
        strategy="ddp" if CONFIG.processes > 1 else "auto",
        max_epochs=CONFIG.epochs,
        callbacks=[saving],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    checkpoint = latest("checkpoint-*.ckpt")
    if checkpoint is not None:
        resume_from(trainer.global_rank, step_of(checkpoint))
    trainer.fit(Model(), ckpt_path=checkpoint, **data)


if __name__ == "__main__":
    main()
