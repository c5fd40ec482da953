"""The arguments of an Estimator and of its calls: options, columns that are features or labels, and creators.

Creators are functions of the user that make data, models, losses and optimizers; they get the arguments they declare.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from typing_extensions import TypedDict

from quire.array import DocumentBatch
from quire.data import Last, Missing
from quire.errors import ColumnError, MissingValueError, OptionError, did_you_mean

Names = str | Sequence[str] | None


def to_names(names: Names) -> tuple[str, ...] | None:
    return (names,) if isinstance(names, str) else None if names is None else tuple(names)


@dataclass(frozen=True)
class ColumnSelection:
    """The columns that are features, and those that are labels.

    Without a selection, a pair is features and labels, and so is a dict with 'x' and 'y'; a batch of documents goes to
    the model and to the loss as it is.
    """

    features: tuple[str, ...] | None = None
    labels: tuple[str, ...] | None = None

    @classmethod
    def of(cls, feature_cols: Names, label_cols: Names, labels_cols: Names = None) -> ColumnSelection:
        """Return the selection of the arguments of `fit`; `labels_cols` is another spelling."""
        if label_cols is not None and labels_cols is not None:
            raise OptionError("label_cols and labels_cols are the same: pass one of them.")
        labels = to_names(label_cols if labels_cols is None else labels_cols)
        if labels is not None and feature_cols is None:
            raise OptionError(f"label_cols={list(labels)} without feature_cols: pass the columns for the model.")
        return cls(to_names(feature_cols), labels)

    @property
    def paths(self) -> tuple[str, ...] | None:
        """All columns that are read; None if the whole batch is passed to the model."""
        return None if self.features is None else (*self.features, *(self.labels or ()))

    def split(self, content: object) -> tuple[tuple[Any, ...], Any]:
        """Return the arguments of the model, and the labels."""
        if self.features is None:
            if isinstance(content, DocumentBatch):
                return (content,), content
            if isinstance(content, Mapping) and "x" in content:
                return _to_arguments(content["x"]), content.get("y")
            if isinstance(content, (tuple, list)) and 0 < len(content) <= 2:
                return _to_arguments(content[0]), content[1] if len(content) == 2 else None
            return _to_arguments(content), None
        arguments = tuple(batch_column(content, name) for name in self.features)
        labels = tuple(batch_column(content, name) for name in self.labels or ())
        return arguments, labels[0] if len(labels) == 1 else labels or None


def batch_column(content: object, name: str) -> Any:
    """Return a column of a batch by name; of a batch of documents, by path."""
    if isinstance(content, (DocumentBatch, Mapping)):
        if isinstance(content, Mapping) and name not in content:
            raise ColumnError(f"{name!r}: the batch has no such column. {did_you_mean(name, map(str, content))}")
        values = content[name]
        if values is None and isinstance(content, DocumentBatch):
            raise MissingValueError(f"{content.schema.name}.{name}: no row of the batch has a value.")
        return values
    raise OptionError(
        f"feature_cols and label_cols are for documents, frames and dicts; the batches are {type(content).__name__}."
    )


def _to_arguments(features: object) -> tuple[Any, ...]:
    return tuple(features) if isinstance(features, (tuple, list)) else (features,)


ENGINES = ("local", "ray", "spark")


class EstimatorKeywords(TypedDict, total=False):
    """More keywords of `Estimator.from_torch` and `Estimator.from_keras`.

    config: the argument of creators.
    model_dir: the folder for checkpoints; on a cluster, one that all machines see. By default a temporary one.
    checkpoint_every: write a checkpoint every n steps within an epoch, too; by default only after each epoch. Only data
        that knows its position (a StreamingDataset, the URL of a dataset, rows by number) resumes there; other data
        starts its epoch again.
    max_restarts: how often training resumes from the last checkpoint after a rank was lost.
    seed: determines the order of the rows, and the weights that creators initialise.
    backend, workers_per_node: Orca's spelling of `engine` ('local', 'ray' or 'spark') and, on one machine, `workers`.
    """

    backend: str
    workers_per_node: int
    config: Mapping[str, Any]
    model_dir: str | os.PathLike[str] | None
    checkpoint_every: int | None
    max_restarts: int
    seed: int


class TorchEstimatorKeywords(EstimatorKeywords, total=False):
    """More keywords of `Estimator.from_torch`.

    scheduler_interval: when the scheduler steps: after each 'epoch' (the default), or after each 'step' of the
        optimizer, which OneCycleLR and CyclicLR need.
    loss_weight: a function of the labels of a batch that returns what the mean loss of the batch was divided by, for
        losses that are not means over rows. Torch's own losses with `weight` or `ignore_index` do not need it.
    precision, accumulate_grad_batches, gradient_clip_val, gradient_clip_algorithm, logger, strategy: as in Lightning's
        Trainer. `logger` is False by default; a `strategy` is one of DDP.
    trainer: more keywords of Lightning's Trainer, by name.
    """

    scheduler_interval: Literal["epoch", "step"] | None
    loss_weight: Callable[[Any], float] | None
    precision: Any
    accumulate_grad_batches: int
    gradient_clip_val: float | None
    gradient_clip_algorithm: Literal["norm", "value"] | None
    logger: Any
    strategy: Any
    trainer: Mapping[str, Any]


class LightningEstimatorKeywords(EstimatorKeywords, total=False):
    """More keywords of `Estimator.from_lightning`; others are options of Lightning's Trainer.

    loss_weight: a function of a batch, as `training_step` takes it, that returns what the mean loss of the batch was
        divided by, for losses that are not means over rows.
    """

    loss_weight: Callable[[Any], float] | None


TRAINER_KEYWORDS = (
    "precision",
    "accumulate_grad_batches",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "logger",
    "strategy",
)
"""Keywords of `Estimator.from_torch` that are passed on to Lightning's Trainer."""


def split_trainer_options(keywords: dict[str, Any]) -> dict[str, Any]:
    """Remove the options of Lightning's Trainer from keywords, and return them."""
    options = dict(keywords.pop("trainer", None) or {})
    for name in TRAINER_KEYWORDS:
        if name in keywords:
            if name in options:
                raise OptionError(f"{name} is passed twice: as a keyword, and in trainer={{...}}.")
            options[name] = keywords.pop(name)
    return options


@dataclass(frozen=True)
class EstimatorOptions:
    """How an Estimator works; see `EstimatorKeywords`."""

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
                raise OptionError(f"{name}={value}: at least 1 is needed.")
        if self.max_restarts < 0:
            raise OptionError(f"max_restarts={self.max_restarts}: it must not be negative.")


def resolve_engine(engine: Any, workers: int, keywords: dict[str, Any]) -> tuple[Any, int]:
    """Return engine and workers, also from Orca's `backend` and `workers_per_node`, which are removed from keywords."""
    backend, per_node = keywords.pop("backend", None), keywords.pop("workers_per_node", None)
    if backend is not None:
        if backend not in ENGINES:
            raise OptionError(f"backend={backend!r}: quire trains with engine='local', 'ray' or 'spark'.")
        if engine not in ("local", backend):
            raise OptionError(f"engine and backend={backend!r} are the same option: pass one of them.")
        engine = backend
    if per_node is not None:
        if workers != 1:
            raise OptionError("workers is the total of all nodes, workers_per_node that of one: pass one of them.")
        if engine_name(engine) != "local":
            raise OptionError(
                f"workers_per_node={per_node}: quire does not place workers on nodes. Pass workers=, the total of all "
                "nodes of the cluster."
            )
        workers = per_node
    return engine, workers


def engine_name(engine: object) -> str:
    """Return the name of an engine, which is passed by name or as `quire.distributed.engine(...)`."""
    return str(engine if isinstance(engine, str) else getattr(engine, "name", engine))


class FitKeywords(TypedDict, total=False):
    """More keywords of `Estimator.fit`.

    validation_data: evaluated after each epoch; its means are `val_loss` and so on.
    callbacks: objects with methods of `Callback`, or functions `callback(epoch, logs)`.
    global_batch_size: the rows of a step on all workers together, instead of `batch_size`.
    last: what happens to rows that do not fill a batch on every worker: 'keep' (the default) makes the last batches
        smaller, 'drop' leaves the rows out, 'pad' adds rows that count neither in the loss nor in metrics.
    shuffle: whether rows are shuffled in each epoch; by default as the data specifies, else they are.
    max_steps: stop after this number of steps.
    resume: continue from the last checkpoint in `model_dir`, of any run, until `epochs` epochs in total.
    progress: whether to show a progress bar; by default on a terminal.
    labels_cols: the same as `label_cols`.
    missing: how missing numbers and tensors in the columns that are read are handled, as in `MultiModalDataset`:
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


class EvaluateKeywords(TypedDict, total=False):
    """More keywords of `Estimator.evaluate`.

    global_batch_size, missing: as in `fit`. num_steps: stop after this number of steps. labels_cols: as `label_cols`.
    """

    global_batch_size: int | None
    num_steps: int | None
    labels_cols: Names
    missing: Missing


def worker_batch_size(batch_size: int | None, global_batch_size: int | None, workers: int) -> int | None:
    """Return the rows of a step on each worker; None leaves it to the data."""
    if batch_size is not None and global_batch_size is not None:
        raise OptionError("batch_size is per worker, global_batch_size for all workers together: pass one of them.")
    if global_batch_size is None:
        if batch_size is not None and batch_size < 1:
            raise OptionError(f"batch_size={batch_size}: at least 1 is needed.")
        return batch_size
    size, rest = divmod(global_batch_size, workers)
    if rest or size < 1:
        raise OptionError(f"global_batch_size={global_batch_size} cannot be divided evenly among {workers} workers.")
    return size


# --- creators


def required_parameters(function: Callable[..., Any]) -> list[str]:
    """Return the names of the required positional parameters; [] if the signature is unknown."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in parameters if p.kind in positional and p.default is inspect.Parameter.empty]


def takes_rank(creator: Callable[..., Any]) -> bool:
    """Whether a creator returns the share of a rank: `creator(rank, world_size, config)`."""
    names = required_parameters(creator)
    return len(names) == 3 or {"rank", "world_size"} <= set(names)


def create_data(creator: Callable[..., Any], config: Mapping[str, Any], rank: int, size: int) -> Any:
    """Call a creator of data with (rank, world_size, config), (config, batch_size) or (config)."""
    names, config = required_parameters(creator), dict(config)
    if takes_rank(creator):
        return creator(rank, size, config)
    if len(names) == 2:
        return creator(config, config["batch_size"])
    if len(names) > 2:
        name = getattr(creator, "__qualname__", type(creator).__name__)
        raise OptionError(f"{name}() takes {', '.join(names)}: a creator takes (config) or (rank, world_size, config).")
    return creator(config) if names else creator()


def create(creator: Callable[..., Any], config: Mapping[str, Any], *first: Any) -> Any:
    """Call a creator of a model, a loss or an optimizer, with or without the config."""
    number = len(required_parameters(creator))
    return creator(*first, dict(config)) if number > len(first) else creator(*first[: number or len(first)])
