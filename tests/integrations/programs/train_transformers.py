"""Train with the Trainer of Hugging Face transformers."""

from __future__ import annotations

from typing import Any

import torch
from common import CONFIG, latest, make_model, open_rows, record, resume_from, step_of
from torch import nn
from transformers import TrainingArguments

from quire.integrations.transformers import QuireTrainer


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model, self.trainer = make_model(), None

    def forward(self, x: torch.Tensor, labels: torch.Tensor, number: torch.Tensor) -> dict[str, Any]:
        steps = self.trainer.state.global_step * CONFIG.accumulate  # type: ignore[attr-defined]
        record(torch.distributed.get_rank() if torch.distributed.is_initialized() else 0, steps + 1, number)
        return {"loss": nn.functional.mse_loss(self.model(x).squeeze(1), labels.float())}


def main() -> None:
    arguments = TrainingArguments(
        CONFIG.folder,
        num_train_epochs=CONFIG.epochs,
        save_strategy="steps",
        save_steps=CONFIG.save_every,
        logging_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        gradient_accumulation_steps=CONFIG.accumulate,
        dataloader_num_workers=CONFIG.workers,
    )
    model = Model()
    inputs = {"x": "x", "labels": "y", "number": "number"}
    trainer = QuireTrainer(model, arguments, train_dataset=open_rows(), inputs=inputs)
    model.trainer = trainer
    checkpoint = latest("checkpoint-*")
    if checkpoint is not None:
        resume_from(arguments.process_index, step_of(checkpoint) * CONFIG.accumulate)
    trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))


if __name__ == "__main__":
    main()
