"""Train with Ray Train's TorchTrainer; a worker that ends unexpectedly ends the run."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
from common import CONFIG, compute_loss, make_model, open_rows, record, resume_from


def train(_: dict[str, Any]) -> None:
    rank = ray.train.get_context().get_world_rank()
    dataset = open_rows()
    model = ray.train.torch.prepare_model(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step, checkpoint = 0, ray.train.get_checkpoint()  # the last one of the run, also in a new process
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            content = torch.load(Path(folder, "state.pt"))
        getattr(model, "module", model).load_state_dict(content["model"])
        dataset.load_state_dict(content["data"])
        step = content["step"]
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
                with tempfile.TemporaryDirectory() as folder:
                    weights = getattr(model, "module", model).state_dict()
                    torch.save({"model": weights, "data": batch.state, "step": step}, Path(folder, "state.pt"))
                    saved = ray.train.Checkpoint.from_directory(folder) if rank == 0 else None
                    ray.train.report({"step": step}, checkpoint=saved)
                if CONFIG.kill_at:
                    # Ray registers a checkpoint after `report` has returned, unless the worker dies before. Wait, so
                    # that the test may kill the worker in any later step.
                    ray.train.get_all_reported_checkpoints(ray.train.CheckpointConsistencyMode.COMMITTED)


def main() -> None:
    ray.init("local", num_cpus=CONFIG.processes, include_dashboard=False, log_to_driver=False)
    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config={},
        scaling_config=ray.train.ScalingConfig(num_workers=CONFIG.processes),
        run_config=ray.train.RunConfig(name="run", storage_path=str(Path(CONFIG.folder, "ray"))),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
