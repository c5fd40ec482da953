"""Jobs on ranks of an engine: written once, and launched until no rank is lost."""

from __future__ import annotations

import importlib
import shutil
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from quire.distributed.estimator._attempts import with_restarts
from quire.distributed.estimator._job import Job, Outcome
from quire.distributed.estimator._launcher import Launch
from quire.distributed.estimator._options import Options
from quire.distributed.estimator._shipping import write_job

_LAUNCHERS = {
    "local": "_local_ranks:launch_local",
    "ray": "_ray_ranks:launch_ray",
    "spark": "_spark_ranks:launch_spark",
}
_STARTS_AGAIN = {"ray"}
"""Engines that start lost ranks themselves."""


def launch(job: Job, options: Options, folder: Path) -> list[Outcome]:
    """What every rank makes of a job."""
    work = folder / f".job-{uuid.uuid4().hex}"
    work.mkdir(parents=True)
    restarts = options.max_restarts if job.task == "fit" else 1
    try:
        write_job(job, work / "job")
        told = Launch(work / "job", options.workers, job.recipe.framework, restarts, options.model_dir is not None)
        again = 0 if options.engine in _STARTS_AGAIN else restarts
        return with_restarts(partial(_launcher(options.engine), told), work, again)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _launcher(engine: str) -> Callable[..., Any]:
    module, _, name = _LAUNCHERS[engine].partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(f"{__package__}.{module}"), name)
    return found
