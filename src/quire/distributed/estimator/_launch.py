"""Starting ranks: as processes of this machine, as workers of Ray Train, or as tasks of a Spark barrier stage.

A job is written once, and launched again while ranks are lost. The ranks of an attempt leave their results, or the
error that one of them raised, in its folder. Ray Train connects its ranks, and restarts them when one is lost. Spark
does not restart a barrier stage when a task is lost, so that is done here.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from quire._optional import require
from quire.distributed._ray import ray_session
from quire.distributed._spark import spark_session
from quire.distributed.estimator._job import Job, RankOutcome, import_paths_file, read_job, write_job
from quire.distributed.estimator._options import EstimatorOptions
from quire.distributed.estimator._ranks import RankInfo
from quire.distributed.estimator._training import run_rank
from quire.errors import FunctionError, OptionError, QuireError

if TYPE_CHECKING:
    from types import ModuleType

    from pyspark.sql import SparkSession
    from ray.train.data_parallel_trainer import DataParallelTrainer


_log = logging.getLogger("quire.distributed")
_COMMUNICATION_MODULES = ("torch.distributed", "torch.nn.parallel", "torch.autograd", "torch._tensor", "tensorflow")
"""Modules whose native calls talk to other ranks; gradients are exchanged within `backward`."""
_LOST_CONNECTION_TEXTS = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "address already in use",
    "eaddrinuse",
    "collective ops is aborted",
    "socket closed",
    "heartbeat",
    "gloo",
)
"""How gloo and TensorFlow describe a lost connection, in a RuntimeError or an unspecific error."""


class LostRanksError(Exception):
    """A rank is gone: killed, or cut off from the others. Another attempt may succeed."""


class RemoteTraceback(Exception):  # noqa: N818 - it holds text, like that of concurrent.futures
    """The traceback of an error in another process."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@dataclass(frozen=True)
class Attempt:
    """The folder in which the ranks of one attempt leave their results."""

    folder: Path

    def write_outcome(self, rank: int, outcome: RankOutcome) -> None:
        _write_whole(self.folder / f"outcome-{rank}", pickle.dumps(outcome, 5))

    def write_error(self, rank: int, error: BaseException) -> None:
        text = "".join(traceback.format_exception(error))
        try:
            content = pickle.dumps((error, text))
            pickle.loads(content)  # noqa: S301 - pickled just now
        except Exception:  # noqa: BLE001 - pickling runs code of the error's class
            content = pickle.dumps((None, text))
        _write_whole(self.folder / f"error-{rank}", content)

    def read_outcomes(self, size: int) -> list[RankOutcome]:
        return [pickle.loads((self.folder / f"outcome-{rank}").read_bytes()) for rank in range(size)]  # noqa: S301

    @property
    def has_error(self) -> bool:
        """Whether a rank has failed by itself, and not because another one was lost."""
        return any(self.folder.glob("error-*"))

    def raise_error(self) -> None:
        """Raise the error of a rank, if there is one; errors of quire as they are."""
        for path in sorted(self.folder.glob("error-*")):
            error, text = pickle.loads(path.read_bytes())  # noqa: S301 - written by our own ranks
            remote, rank = RemoteTraceback(text), path.name.rpartition("-")[2]
            if isinstance(error, QuireError):
                raise error from remote
            failure = FunctionError(f"rank {rank} failed: {text.strip().splitlines()[-1]}")
            if error is None:
                raise failure from remote
            error.__cause__ = remote
            raise failure from error


def _write_whole(path: Path, content: bytes) -> None:
    """Write a file that is complete or does not exist."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.new")  # not one of the names that readers look for, such as error-*
    new.write_bytes(content)
    new.replace(path)


def is_lost(error: BaseException) -> bool:
    """Whether an error only says that another rank is gone.

    That is an error raised by the communication of a framework itself: its innermost frame is theirs. An error raised
    by code of the user (a callback, a model, a pipeline), or by a library that it calls, is an error of that code,
    whatever its message.
    """
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    origin = "" if traceback is None else str(traceback.tb_frame.f_globals.get("__name__", ""))
    if isinstance(error, QuireError) or not origin.startswith(_COMMUNICATION_MODULES):
        return False
    name, text = type(error).__name__, str(error).lower()
    if name in ("DistNetworkError", "DistStoreError", "DistBackendError"):
        return True
    if name == "UnknownError" and "collective ops" not in text:
        return False  # TensorFlow wraps errors of Python functions in a pipeline in it
    return any(words in text for words in _LOST_CONNECTION_TEXTS)


def with_restarts(launch: Callable[[Attempt], list[RankOutcome]], folder: Path, restarts: int) -> list[RankOutcome]:
    """Launch ranks, and again when some of them are lost: they resume from the last checkpoint."""
    for number in range(restarts + 1):
        attempt = Attempt(folder / f"attempt-{number}")
        attempt.folder.mkdir(parents=True)
        try:
            return launch(attempt)
        except LostRanksError as error:
            attempt.raise_error()
            if number == restarts:
                raise FunctionError(f"{error} This was attempt {number + 1}: max_restarts={restarts}.") from error
            _log.warning("%s Training resumes from the last checkpoint.", error)
        finally:
            shutil.rmtree(attempt.folder, ignore_errors=True)
    raise AssertionError


def lost_rank_error(rank: int | str, why: str) -> LostRanksError:
    """Return the error about a rank that is gone."""
    return LostRanksError(f"rank {rank} was lost: {why}.")


@dataclass(frozen=True)
class LaunchSpec:
    """A number of ranks for a job in a file. `restarts` is for engines that restart lost ranks themselves."""

    job: Path
    size: int
    framework: str
    restarts: int
    shared: bool = True
    """Whether the user has chosen the folder of the files, so that all machines see it."""


_RANK_MODULE = "quire.distributed.estimator._rank_process"
FAILED, LOST = 1, 75
"""The exit codes of a rank that raised an error, and of one that lost another rank."""


def start_rank(job: Path, attempt: Path, rank_info: RankInfo) -> subprocess.Popen[bytes]:
    """Start a rank; its environment describes the ranks as launchers do."""
    host, _, port = rank_info.addresses[0].rpartition(":")
    cores = max(1, (os.cpu_count() or 1) // rank_info.size)
    own = [entry or str(Path.cwd()) for entry in sys.path]
    driver = json.loads(import_paths_file(job).read_text())  # the job may refer to modules of the driver
    paths = dict.fromkeys([*own, *driver])
    environment = {
        "OMP_NUM_THREADS": str(cores),
        "TF_CPP_MIN_LOG_LEVEL": "2",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "RANK": str(rank_info.rank),
        "WORLD_SIZE": str(rank_info.size),
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
    }
    arguments = [str(job), str(attempt), str(rank_info.rank), ",".join(rank_info.addresses)]
    command = [sys.executable, "-m", _RANK_MODULE, *arguments]
    # The pipe to its standard input closes when this process ends, however it ends, and the rank then ends, too.
    return subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)  # noqa: S603 - our own module


_GRACE_SECONDS = 20.0
"""How many seconds the other ranks have to end by themselves when one has failed."""


def launch_local(launch: LaunchSpec, attempt: Attempt) -> list[RankOutcome]:
    """Start ranks on this machine, and wait for their results."""
    size = launch.size
    addresses = free_addresses("127.0.0.1", size)
    ranks = [start_rank(launch.job, attempt.folder, RankInfo(rank, size, addresses)) for rank in range(size)]
    try:
        wait_for_ranks(ranks, attempt)
    finally:
        for process in ranks:
            end_process(process)
    return attempt.read_outcomes(size)


def free_addresses(host: str, number: int) -> tuple[str, ...]:
    """Return addresses with ports that are free now."""
    # All sockets stay open until every port is known, so that no port is returned twice.
    with ExitStack() as stack:
        sockets = [stack.enter_context(closing(socket.socket())) for _ in range(number)]
        for one in sockets:
            one.bind((host, 0))
        return tuple(f"{host}:{one.getsockname()[1]}" for one in sockets)


def wait_for_ranks(ranks: list[subprocess.Popen[bytes]], attempt: Attempt) -> None:
    """Wait until all ranks are done; raise when one fails."""
    while True:
        codes = [process.poll() for process in ranks]
        failed = [(rank, code) for rank, code in enumerate(codes) if code]
        if failed:
            raise _find_lost_rank(ranks, failed, attempt)
        if None not in codes:
            return
        time.sleep(0.02)


def _find_lost_rank(
    ranks: list[subprocess.Popen[bytes]], failed: list[tuple[int, int]], attempt: Attempt
) -> LostRanksError:
    """Return the error: of ranks that were killed and others that miss them, it names one that was killed."""
    # A rank that ends with LOST misses another one, which may still be about to report an error or to be killed. It
    # gets some time, because that error or signal is the cause.
    attempt.raise_error()
    until = time.monotonic() + (_GRACE_SECONDS if all(code > FAILED for _, code in failed) else 0.0)
    while time.monotonic() < until and any(process.poll() is None for process in ranks):
        time.sleep(0.02)
        attempt.raise_error()
    codes = [(rank, process.poll()) for rank, process in enumerate(ranks)]
    killed = [(rank, code) for rank, code in codes if code is not None and code < 0]
    rank, code = (killed or failed)[0]
    names = {number.value: number.name for number in signal.Signals}
    killer = names.get(-code, f"signal {-code}")  # real-time signals have no name
    return lost_rank_error(rank, f"killed by {killer}" if code < 0 else f"its process ended with {code}")


def end_process(process: subprocess.Popen[bytes]) -> None:
    """Kill a rank that is still running."""
    if process.poll() is None:
        process.kill()
    process.wait()
    if process.stdin is not None:
        with suppress(OSError):
            process.stdin.close()


_MAX_RAY_STARTS = 4
"""Ray waits a minute for room for all workers, and this many times more; by default without end."""


def launch_ray(launch: LaunchSpec, attempt: Attempt) -> list[RankOutcome]:
    """Run ranks as workers of Ray Train, and wait for their results."""
    ray = ray_session()
    # Checked here, because Ray would wait for ever for cores, or for a folder that its machines do not see.
    cores = int(ray.cluster_resources().get("CPU", 0))
    if cores < launch.size:
        raise OptionError(f"workers={launch.size}, but Ray has {cores} cores: use fewer workers, or a larger cluster.")
    machines = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    if len(machines) > 1 and not launch.shared:
        raise OptionError(f"Ray runs on {len(machines)} machines: pass model_dir=..., a folder that all of them see.")
    config = {"job": str(launch.job), "attempt": str(attempt.folder)}
    trainer = _make_trainer(ray, launch, config, attempt.folder / "ray")
    try:
        trainer.fit()
    except Exception as error:
        attempt.raise_error()
        if type(getattr(error, "controller_failure", None)).__name__ == "WorkerGroupStartupTimeoutError":
            raise FunctionError(
                f"Ray had no room for workers={launch.size} for minutes: other work uses its cores. Wait for it, or "
                "use fewer workers."
            ) from error
        raise lost_rank_error("of Ray", f"{type(error).__name__}: {error}") from error
    attempt.raise_error()
    return attempt.read_outcomes(launch.size)


def _make_trainer(ray: ModuleType, launch: LaunchSpec, config: dict[str, str], storage: Path) -> DataParallelTrainer:
    train: Any = require("ray.train", extra="ray", needed_for="engine='ray'")
    loopback = ray.util.get_node_ip_address().startswith("127.")
    run = train.RunConfig(
        storage_path=str(storage),
        failure_config=train.FailureConfig(max_failures=launch.restarts, controller_failure_limit=_MAX_RAY_STARTS),
        worker_runtime_env={"env_vars": {"GLOO_SOCKET_IFNAME": "lo"}} if loopback else None,
        logging_config=train.LoggingConfig(log_level="ERROR"),
    )
    scaling = train.ScalingConfig(num_workers=launch.size)
    if launch.framework == "torch":
        torch: Any = require("ray.train.torch", extra="ray", needed_for="engine='ray'")
        return torch.TorchTrainer(ray_rank, train_loop_config=config, scaling_config=scaling, run_config=run)
    tensorflow: Any = require("ray.train.tensorflow", extra="ray", needed_for="engine='ray'")
    return tensorflow.TensorflowTrainer(ray_rank, train_loop_config=config, scaling_config=scaling, run_config=run)


def ray_rank(config: dict[str, str]) -> None:
    """Run a rank. An error of its own code ends the training; when a worker is lost, Ray restarts all."""
    train: Any = require("ray.train", extra="ray", needed_for="engine='ray'")
    context, attempt = train.get_context(), Attempt(Path(config["attempt"]))
    if attempt.has_error:
        return
    rank_info = RankInfo(context.get_world_rank(), context.get_world_size(), joined=True)
    try:
        attempt.write_outcome(rank_info.rank, run_rank(read_job(Path(config["job"])), rank_info))
    except Exception as error:
        if not is_lost(error):
            attempt.write_error(rank_info.rank, error)
        raise


def launch_spark(launch: LaunchSpec, attempt: Attempt) -> list[RankOutcome]:
    """Run ranks as tasks of a barrier stage, and wait for their results."""
    session = spark_session()
    _check_spark_room(session, launch)
    work = partial(spark_rank, job=str(launch.job), attempt=str(attempt.folder))
    try:
        session.range(0, launch.size, 1, launch.size).mapInArrow(work, "rank long", barrier=True).collect()
    except Exception as error:
        attempt.raise_error()
        raise describe_loss(error) from error
    return attempt.read_outcomes(launch.size)


def _check_spark_room(session: SparkSession, launch: LaunchSpec) -> None:
    """Raise where Spark would wait ten minutes: too few slots, or machines that do not see the folder."""
    context: Any = None
    with suppress(Exception):  # Spark Connect has no context
        context = session.sparkContext
    if context is None:
        return
    if not launch.shared and not context.master.startswith("local"):
        raise OptionError(f"Spark runs on {context.master}: pass model_dir=..., a folder that all of its machines see.")
    slots = context.defaultParallelism
    if slots < launch.size:
        raise OptionError(f"workers={launch.size}, but Spark runs {slots} tasks at a time: use fewer workers.")


def describe_loss(error: Exception) -> LostRanksError:
    """Return the error about a task of Spark that failed, with the message of `spark_rank` if it has one."""
    ended = re.search(r"rank (\d+) was lost: (its process ended with -?\d+)", str(error))
    if ended is not None:
        return lost_rank_error(ended[1], ended[2])
    return lost_rank_error("of Spark", f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")


def spark_rank(batches: Iterator[pa.RecordBatch], job: str, attempt: str) -> Iterator[pa.RecordBatch]:
    """Start a process for a rank, in a task that lives as long as the process."""
    for _ in batches:
        pass
    pyspark: Any = require("pyspark", extra="spark", needed_for="engine='spark'")
    context = pyspark.BarrierTaskContext.get()
    rank, tasks = context.partitionId(), context.getTaskInfos()
    host = tasks[rank].address.rpartition(":")[0] or tasks[rank].address
    addresses = tuple(context.allGather(free_addresses(host, 1)[0]))
    process = start_rank(Path(job), Path(attempt), RankInfo(rank, len(addresses), addresses))
    try:
        while process.poll() is None:
            time.sleep(0.02)
    finally:
        end_process(process)
    if process.returncode:
        raise RuntimeError(f"rank {rank} was lost: its process ended with {process.returncode}")
    yield pa.RecordBatch.from_arrays([pa.array([rank], pa.int64())], names=["rank"])


_LAUNCHERS = {
    "local": launch_local,
    "ray": launch_ray,
    "spark": launch_spark,
}
_RESTARTING_ENGINES = {"ray"}
"""Engines that restart lost ranks themselves."""


def launch(job: Job, options: EstimatorOptions, folder: Path) -> list[RankOutcome]:
    """Run a job on all ranks, and return their results."""
    work = folder / f".job-{uuid.uuid4().hex}"
    work.mkdir(parents=True)
    restarts = options.max_restarts if job.task == "fit" else 1
    try:
        write_job(job, work / "job")
        spec = LaunchSpec(work / "job", options.workers, job.recipe.framework, restarts, options.model_dir is not None)
        again = 0 if options.engine in _RESTARTING_ENGINES else restarts
        return with_restarts(partial(_LAUNCHERS[options.engine], spec), work, again)
    finally:
        shutil.rmtree(work, ignore_errors=True)
