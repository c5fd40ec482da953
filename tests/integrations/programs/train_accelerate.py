"""Train with accelerate, which saves the position of the loader with the model."""

from __future__ import annotations

from pathlib import Path

import torch
from accelerate import Accelerator
from common import CONFIG, compute_loss, latest, make_model, open_rows, record, resume_from, step_of


def main() -> None:
    accelerator = Accelerator(cpu=True)
    dataset, model = open_rows(), make_model()
    loader = dataset.loader()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer, prepared = accelerator.prepare(model, optimizer, loader)
    assert prepared is loader
    accelerator.register_for_checkpointing(loader)
    step, checkpoint = 0, latest("checkpoint-*")
    if checkpoint is not None:
        accelerator.load_state(str(checkpoint))
        step = step_of(checkpoint)
        resume_from(accelerator.process_index, step)
    for _ in range(dataset.epoch, CONFIG.epochs):
        for batch in loader:
            loss = compute_loss(model, batch.to(accelerator.device))
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            step += 1
            record(accelerator.process_index, step, batch.number)
            if step % CONFIG.save_every == 0:
                # Each process writes a part of a checkpoint, so it has its name when all of them are complete.
                unfinished = Path(CONFIG.folder, f"new-{step}")
                accelerator.save_state(str(unfinished))
                accelerator.wait_for_everyone()
                if accelerator.is_main_process:
                    unfinished.rename(Path(CONFIG.folder, f"checkpoint-{step}"))
    accelerator.end_training()


if __name__ == "__main__":
    main()
