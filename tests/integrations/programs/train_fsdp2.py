"""Train with FSDP2 on the CPU, and save with torch.distributed.checkpoint, which other numbers of ranks can load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import CONFIG, compute_loss, latest, make_model, open_rows, ranks, record, resume_from, step_of
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main() -> None:
    rank, world_size = ranks()
    dist.init_process_group("gloo")
    dataset, model = open_rows(), make_model()
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    step, path = 0, latest("checkpoint-*")
    if path is not None:
        weights, moments = get_state_dict(model, optimizer)
        content: dict[str, Any] = {"model": weights, "optimizer": moments}
        dcp.load(content, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=content["model"], optim_state_dict=content["optimizer"])
        dataset.load_state_dict(json.loads((path / "data.json").read_text()))
        step = step_of(path)
        resume_from(rank, step)
    for _ in range(dataset.epoch, CONFIG.epochs):
        for batch in dataset.loader():
            loss = compute_loss(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            record(rank, step, batch.number)
            if step % CONFIG.save_every == 0:
                weights, moments = get_state_dict(model, optimizer)
                target = Path(CONFIG.folder, f"new-{step}")
                dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=target)
                if rank == 0:
                    (target / "data.json").write_text(json.dumps(batch.state))
                    target.rename(Path(CONFIG.folder, f"checkpoint-{step}"))
                dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
