"""How an Estimator works, and how a call of it does."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from typing_extensions import TypedDict

from quire.data._epoch import Last
from quire.data._missing import Missing
from quire.distributed.estimator._columns import Names
from quire.errors import OptionError, did_you_mean

ENGINES = ("local", "ray", "spark")


class Working(TypedDict, total=False):
    """More keywords of `Estimator.from_torch` and `Estimator.from_keras`.

    config: what creators are called with.
    model_dir: the folder for checkpoints; on a cluster, one that all machines see. Without it, a temporary one.
    checkpoint_every: so many steps apart, checkpoints are written in the middle of an epoch, too; without it, behind
        each epoch. Only data that knows its position (a StreamingDataset, the address of a dataset, rows by number)
        goes on from there; other data begins its epoch anew.
    max_restarts: how often training goes on from the last checkpoint when a rank was lost.
    seed: the order of the rows follows from it, and the weights that functions make.
    """

    config: Mapping[str, Any]
    model_dir: str | os.PathLike[str] | None
    checkpoint_every: int | None
    max_restarts: int
    seed: int


class TorchWorking(Working, total=False):
    """More keywords of `Estimator.from_torch`.

    scheduler_interval: when the scheduler takes its steps: after each 'epoch' (the default), or after each 'step', that
        is each batch, as OneCycleLR and CyclicLR need it.
    """

    scheduler_interval: Literal["epoch", "step"] | None


@dataclass(frozen=True)
class Options:
    """How an Estimator works; see `Working`."""

    engine: str = "local"
    workers: int = 1
    config: Mapping[str, Any] = field(default_factory=dict)
    model_dir: str | os.PathLike[str] | None = None
    checkpoint_every: int | None = None
    max_restarts: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise OptionError(f"engine={self.engine!r}: there is no such engine. {did_you_mean(self.engine, ENGINES)}")
        for name in ("workers", "checkpoint_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise OptionError(f"{name}={value}: at least 1.")
        if self.max_restarts < 0:
            raise OptionError(f"max_restarts={self.max_restarts}: at least 0.")


def engine_name(engine: Any) -> str:
    """The name of an engine, which is given by name or as `quire.distributed.engine(...)`."""
    return str(engine if isinstance(engine, str) else getattr(engine, "name", engine))


class Fitting(TypedDict, total=False):
    """More keywords of `Estimator.fit`.

    validation_data: evaluated behind each epoch; its means are `val_loss` and so on.
    callbacks: objects with methods of `Callback`, or functions `callback(epoch, logs)`.
    global_batch_size: the rows of a step on all workers together, in place of `batch_size`.
    last: what becomes of rows that do not fill a batch on every worker: 'keep' (the default) makes the last batches
        smaller, 'drop' leaves them out, 'pad' fills up with rows that count neither in loss nor in metrics.
    shuffle: whether rows are shuffled in each epoch; by default as the data says, and else they are.
    max_steps: stop after so many steps.
    resume: go on from the last checkpoint in `model_dir`, of whatever run, to the end of `epochs` in all.
    progress: whether to show a bar; by default on a terminal.
    labels_cols: the same as `label_cols`.
    missing: what becomes of missing numbers and tensors in the columns that are read, as of `MultiModalDataset`:
        'raise' (the default), 'mask' or values by path. Datasets and loaders have an option of their own.
    """

    validation_data: Any
    callbacks: Iterable[Any]
    global_batch_size: int | None
    last: Last
    shuffle: bool | None
    max_steps: int | None
    resume: bool
    progress: bool | None
    labels_cols: Names
    missing: Missing


class Evaluating(TypedDict, total=False):
    """More keywords of `Estimator.evaluate`.

    global_batch_size, missing: as of `fit`. num_steps: no more steps than that. labels_cols: the same as `label_cols`.
    """

    global_batch_size: int | None
    num_steps: int | None
    labels_cols: Names
    missing: Missing


def batch_size_of(batch_size: int | None, global_batch_size: int | None, workers: int) -> int | None:
    """The rows of a step on each worker; None leaves it to the data."""
    if batch_size is not None and global_batch_size is not None:
        raise OptionError("batch_size is that of a worker, global_batch_size that of all together: pass one of them.")
    if global_batch_size is None:
        if batch_size is not None and batch_size < 1:
            raise OptionError(f"batch_size={batch_size}: at least 1.")
        return batch_size
    size, rest = divmod(global_batch_size, workers)
    if rest or size < 1:
        raise OptionError(f"global_batch_size={global_batch_size} cannot be shared out evenly among {workers} workers.")
    return size
