"""Ranks as workers of Ray Train, which connects them, and starts them again when one is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quire._optional import require
from quire.distributed._ray_session import ray_session
from quire.distributed.estimator._attempts import Attempt, is_lost, lost
from quire.distributed.estimator._job import Outcome
from quire.distributed.estimator._launcher import Launch
from quire.distributed.estimator._loop import run_rank
from quire.distributed.estimator._shipping import read_job
from quire.distributed.estimator._world import Seat
from quire.errors import FunctionError, OptionError

_STARTS = 4
"""Ray waits a minute for room for all workers, and then so many times more; left to itself it would not end."""


def launch_ray(launch: Launch, attempt: Attempt) -> list[Outcome]:
    """Run so many workers of Ray Train, and wait for what they make."""
    ray = ray_session()
    _check_room(ray, launch)
    told = {"job": str(launch.job), "attempt": str(attempt.folder)}
    trainer = _trainer(ray, launch, told, attempt.folder / "ray")
    try:
        trainer.fit()
    except Exception as error:
        attempt.raise_error()
        if type(getattr(error, "controller_failure", None)).__name__ == "WorkerGroupStartupTimeoutError":
            raise FunctionError(
                f"Ray had no room for workers={launch.size} for minutes: other work holds its cores. Wait for it, or "
                "use fewer workers."
            ) from error
        raise lost("of Ray", f"{type(error).__name__}: {error}") from error
    attempt.raise_error()
    return attempt.outcomes(launch.size)


def _check_room(ray: Any, launch: Launch) -> None:
    """Ray would wait for more machines for ever, and other machines do not see a folder of here."""
    cores = int(ray.cluster_resources().get("CPU", 0))
    if cores < launch.size:
        raise OptionError(f"workers={launch.size}, and Ray has {cores} cores: use fewer workers, or a larger cluster.")
    machines = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    if len(machines) > 1 and not launch.shared:
        raise OptionError(f"Ray runs on {len(machines)} machines: pass model_dir=..., a folder that all of them see.")


def _trainer(ray: Any, launch: Launch, told: dict[str, str], storage: Path) -> Any:
    train: Any = require("ray.train", extra="ray", needed_for="engine='ray'")
    loopback = ray.util.get_node_ip_address().startswith("127.")
    run = train.RunConfig(
        storage_path=str(storage),
        failure_config=train.FailureConfig(max_failures=launch.restarts, controller_failure_limit=_STARTS),
        worker_runtime_env={"env_vars": {"GLOO_SOCKET_IFNAME": "lo"}} if loopback else None,
        logging_config=train.LoggingConfig(log_level="ERROR"),
    )
    scaling = train.ScalingConfig(num_workers=launch.size)
    if launch.framework == "torch":
        torch: Any = require("ray.train.torch", extra="ray", needed_for="engine='ray'")
        return torch.TorchTrainer(ray_rank, train_loop_config=told, scaling_config=scaling, run_config=run)
    tensorflow: Any = require("ray.train.tensorflow", extra="ray", needed_for="engine='ray'")
    return tensorflow.TensorflowTrainer(ray_rank, train_loop_config=told, scaling_config=scaling, run_config=run)


def ray_rank(told: dict[str, str]) -> None:
    """A worker's part. What its own code raises ends the training; when a worker is lost, Ray starts all again."""
    train: Any = require("ray.train", extra="ray", needed_for="engine='ray'")
    context, attempt = train.get_context(), Attempt(Path(told["attempt"]))
    if attempt.has_error:
        return
    seat = Seat(context.get_world_rank(), context.get_world_size(), joined=True)
    try:
        attempt.keep(seat.rank, run_rank(read_job(Path(told["job"])), seat))
    except Exception as error:
        if not is_lost(error):
            attempt.keep_error(seat.rank, error)
        raise
