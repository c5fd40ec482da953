"""Train with DistributedDataParallel, and save the state of the last batch with the model."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from common import CONFIG, compute_loss, latest, make_model, open_rows, ranks, record, resume_from
from torch.utils.data import DataLoader


def main() -> None:
    rank, world_size = ranks()
    dataset, model = open_rows(), make_model()
    if world_size > 1:
        dist.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step, path = 0, latest("checkpoint-*.pt")
    if path is not None:
        checkpoint = torch.load(path)
        (model.module if world_size > 1 else model).load_state_dict(checkpoint["model"])
        dataset.load_state_dict(checkpoint["data"])
        step = checkpoint["step"]
        resume_from(rank, step)
    workers = CONFIG.workers
    loader = DataLoader(dataset, batch_size=None, num_workers=workers) if workers else dataset.loader()
    for _ in range(dataset.epoch, CONFIG.epochs):
        for batch in loader:
            loss = compute_loss(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            record(rank, step, batch.number)
            if step % CONFIG.save_every == 0 and rank == 0:
                weights = (model.module if world_size > 1 else model).state_dict()
                target = Path(CONFIG.folder, f"checkpoint-{step}.pt")
                torch.save({"model": weights, "data": batch.state, "step": step}, target.with_suffix(".new"))
                target.with_suffix(".new").rename(target)
    if world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
