"""LightningModules for trainings, importable by ranks in other processes."""

from __future__ import annotations

from typing import Any

import torch
import torchmetrics
from lightning.pytorch import LightningModule
from torch import nn


class CountingModule(LightningModule):  # type: ignore[misc]
    """A LightningModule whose weights count how often each row was trained on."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.seen = nn.Parameter(torch.zeros(rows))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        del batch_idx
        numbers = torch.as_tensor(batch[0] if isinstance(batch, (tuple, list)) else batch)
        self.log("rows", float(len(numbers)), on_step=False, on_epoch=True, reduce_fx="sum")
        return -self.seen[numbers].mean()

    def configure_optimizers(self) -> Any:
        return _StepsByRows(self.parameters())


class _StepsByRows(torch.optim.SGD):
    """SGD that increases the weights of the rows in a step by 1, whatever their number."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=1.0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for parameter in group["params"]:
                smallest = -parameter.grad[parameter.grad != 0].max()  # equal for all rows of an exact step
                parameter.add_(-parameter.grad / smallest)
        return loss


class FittedModule(LightningModule):  # type: ignore[misc]
    """A regression that logs means, a sum and metrics with a state, and has state of its own in checkpoints."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.frozen, self.scale = nn.Linear(3, 1), nn.Dropout(), scale
        self.squared, self.r2 = torchmetrics.MeanSquaredError(), torchmetrics.R2Score()
        self.extra = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).squeeze(1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        del batch_idx
        x, y = batch
        output = self(x)
        self.log("mean", output.mean(), on_step=False, on_epoch=True)
        self.log("rows", float(len(x)), on_step=False, on_epoch=True, reduce_fx="sum", sync_dist=True)
        self.squared(output.detach(), y)
        self.log("mse", self.squared, on_step=False, on_epoch=True)
        self.log("step_only", output.mean())
        return nn.functional.mse_loss(output, y)

    def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        del batch_idx
        x, y = batch
        output = self(x)
        self.log_dict({"val_error": (output - y).abs().mean()})
        self.r2.update(output, y)
        self.log("val_r2", self.r2)
        return nn.functional.mse_loss(output, y)

    def on_train_epoch_end(self) -> None:
        self.extra += 1

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["extra"] = self.extra

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.extra = checkpoint["extra"]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)}
