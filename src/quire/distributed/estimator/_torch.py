"""Models of PyTorch: the recipe of a model, its losses and outputs on a rank, metrics, and ranks of torch.distributed.

The training loop itself is Lightning's, see `_lightning`.

A metric function is called for each batch, and its result is weighted by the rows of the batch. That is exact for means
over rows only: functions known to be no such means (scikit-learn's, torchmetrics' functional ones) are refused. Objects
with `update`, `compute` and `reset`, as in torchmetrics, keep their own state over an epoch.
"""

from __future__ import annotations

import gc
import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import ArrayLike
from torch import nn
from torch.nn import functional
from torch.optim import lr_scheduler

from quire._optional import require
from quire.array import DocumentBatch
from quire.distributed.estimator._feeds import RankBatch
from quire.distributed.estimator._job import Job
from quire.distributed.estimator._options import ColumnSelection, create, required_parameters
from quire.distributed.estimator._ranks import Floats, RankInfo, World
from quire.distributed.estimator._training import Training, evaluate_job
from quire.errors import OptionError, StorageError, StorageNotFoundError, did_you_mean


def loss_divisor(loss: object) -> Callable[[Any], float] | None:
    """Return a function from labels to the divisor of a mean loss; None if the divisor is their number.

    The mean of cross-entropy is weighted: each label counts by the weight of its class, and not at all if it is
    `ignore_index`. Means of ranks and batches must be weighted by this divisor to give the mean over all rows.
    """
    if isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss)):
        return partial(_sum_weights, weight=loss.weight, ignore_index=loss.ignore_index)
    function: Any = loss
    keywords: dict[str, Any] = {}
    while isinstance(function, partial):
        function, keywords = function.func, {**function.keywords, **keywords}
    if function in (functional.cross_entropy, functional.nll_loss):
        return partial(_sum_weights, weight=keywords.get("weight"), ignore_index=keywords.get("ignore_index", -100))
    return None


def _sum_weights(labels: Any, weight: torch.Tensor | None, ignore_index: int) -> float:
    if not isinstance(labels, torch.Tensor):
        return float(len(labels))
    if labels.is_floating_point():  # class probabilities: the mean is over rows
        return float(labels.numel() // max(labels.shape[1], 1) if labels.ndim > 1 else len(labels))
    is_counted = labels != ignore_index
    if weight is None:
        return float(is_counted.sum())
    return float(weight.to(labels.device)[labels[is_counted]].sum())


Metric = Callable[[Any, Any], Any]
"""A function that returns a value for each row or the mean over the rows, or an object with a state."""


def _accuracy(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    if output.ndim > 1 and output.shape[1] > 1:
        return (output.argmax(1) == labels.reshape(len(output), *output.shape[2:])).double()
    return ((output.reshape(-1) > 0.5) == (labels.reshape(-1) > 0.5)).double()


def _mae(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (output.double() - labels.reshape(output.shape)).abs()


def _mse(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (output.double() - labels.reshape(output.shape)).square()


NAMED_METRICS: dict[str, Metric] = {"accuracy": _accuracy, "mae": _mae, "mse": _mse}


def resolve_metrics(metrics: Any) -> dict[str, Metric]:
    """Return metrics by name: 'accuracy', 'mae', 'mse', functions, objects with a state, or a dict of them."""
    if metrics is None:
        return {}
    if isinstance(metrics, Mapping) and not is_stateful(metrics):
        return {name: _resolve_metric(metric)[1] for name, metric in metrics.items()}
    if not isinstance(metrics, Iterable) or isinstance(metrics, str) or callable(metrics):
        metrics = [metrics]
    return dict(_resolve_metric(metric) for metric in metrics)


def _resolve_metric(metric: Any) -> tuple[str, Metric]:
    if isinstance(metric, str):
        if metric not in NAMED_METRICS:
            raise OptionError(f"metrics: there is no {metric!r}. {did_you_mean(metric, NAMED_METRICS)}")
        return metric, NAMED_METRICS[metric]
    if isinstance(metric, type):
        raise OptionError(f"metrics: {metric.__name__} is a class. Pass an object of it: {metric.__name__}(...).")
    if not callable(metric) and not is_stateful(metric):
        raise OptionError(f"metrics are functions of outputs and labels, or names; got a {type(metric).__name__}.")
    name = getattr(metric, "__name__", type(metric).__name__).lower()
    _check_is_mean(name, metric)
    return name, metric


def is_stateful(metric: object) -> bool:
    """Whether a metric has torchmetrics' protocol: `update(outputs, labels)`, `compute()`, `reset()`."""
    return all(callable(getattr(metric, name, None)) for name in ("update", "compute", "reset"))


def sums_over_ranks(metric: object) -> bool:
    """Whether the `compute` of a metric with a state covers all ranks, as in torchmetrics."""
    return any(base.__module__.partition(".")[0] == "torchmetrics" for base in type(metric).__mro__)


def _check_is_mean(name: str, metric: object) -> None:
    function = metric
    while hasattr(function, "func"):  # functools.partial
        function = function.func
    module = getattr(function, "__module__", None) or ""
    if module.startswith("sklearn."):
        raise OptionError(
            f"metrics: {name} of scikit-learn takes labels first, and the mean of its values for batches is not its "
            "value for all rows. Pass a metric with a state, as torchmetrics has them, or compute it from predict()."
        )
    if module.startswith("torchmetrics.functional"):
        raise OptionError(
            f"metrics: {name} is a function of one batch, and the mean of its values for batches is not its value for "
            "all rows. Pass an object of torchmetrics, which keeps a state over batches, such as AUROC(...)."
        )


def sum_metric(metric: Metric, output: Any, labels: Any, rows: int) -> float:
    """Return the sum over the rows of a batch of a metric that returns a value for each, or their mean."""
    value = torch.as_tensor(metric(output, labels)).double()
    if value.ndim and value.shape[0] == rows:
        return float(value.reshape(rows, -1).mean(1).sum())
    return float(value.mean()) * rows


def can_be_saved(metric: object) -> bool:
    """Whether the state of a metric can be written to a checkpoint."""
    return all(callable(getattr(metric, name, None)) for name in ("state_dict", "load_state_dict"))


def metric_state(metric: Any) -> Any:
    """Return the state of a metric; torchmetrics leaves it out of state dicts unless it is persistent."""
    if hasattr(metric, "persistent"):
        metric.persistent(mode=True)
    return deepcopy(metric.state_dict())


def compute_metric(name: str, metric: Any) -> dict[str, float]:
    """Return what a metric with a state has computed since its reset: a number, or several by name."""
    value = metric.compute()
    if isinstance(value, Mapping):
        return {str(key): float(part) for key, part in value.items()}
    number = torch.as_tensor(value)
    if number.numel() != 1:
        raise OptionError(f"metrics: {name} computes {number.numel()} numbers. Let it average them (average='macro').")
    return {name: float(number)}


WEIGHTS = "weights.pt"
SchedulerInterval = Literal["epoch", "step"]


class TorchWorld(World):
    """Ranks of torch.distributed."""

    def __init__(self, rank_info: RankInfo) -> None:
        super().__init__(rank_info)
        self.device, self._joined = rank_device(rank_info), rank_info.joined
        if not rank_info.joined:
            host, _, port = rank_info.addresses[0].rpartition(":")
            if host.startswith("127."):
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            dist.init_process_group(
                "nccl" if self.device.type == "cuda" else "gloo",
                init_method=f"tcp://{host}:{port}",
                rank=rank_info.rank,
                world_size=rank_info.size,
                timeout=timedelta(minutes=30),
            )

    def sum(self, values: ArrayLike) -> Floats:
        numbers = torch.as_tensor(np.array(values, np.float64)).to(self.device)
        dist.all_reduce(numbers)
        return numbers.cpu().numpy()

    def close(self) -> None:
        """Disconnect all ranks together: one that leaves first may keep another waiting in native code."""
        if dist.is_initialized():
            dist.barrier()
            gc.collect()
            if not self._joined:
                dist.destroy_process_group()


def rank_device(rank_info: RankInfo) -> torch.device:
    """Return the device of a rank: an accelerator of its own if there are any."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank_info.rank)) % torch.cuda.device_count())


@dataclass
class TorchParts:
    """The instances that are trained, all in one process."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None = None
    loss: Callable[..., Any] | None = None
    metrics: Mapping[str, Metric] | None = None
    scheduler: Any = None
    scheduler_interval: SchedulerInterval = "epoch"
    loss_weight: Callable[[Any], float] | None = None

    def state(self) -> dict[str, Any]:
        """Return the weights, and the state of the optimizer and the scheduler."""
        parts = {"optimizer": self.optimizer, "scheduler": self.scheduler}
        states = {name: part.state_dict() for name, part in parts.items() if part is not None}
        return {"model": self.model.state_dict(), **states}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Load a state into the instances."""
        self.model.load_state_dict(state["model"])
        if self.optimizer is not None and "optimizer" in state:
            self.optimizer.load_state_dict(state["optimizer"])
        if self.scheduler is not None and "scheduler" in state:
            self.scheduler.load_state_dict(state["scheduler"])


@dataclass
class _AccumulatedWeight:
    """The weight of the batches whose gradients are accumulated, in units of the rows of the first of them."""

    weight: float = 0.0
    unit: float = 0.0

    def add(self, weight: float, rows: int) -> float:
        """Add the weight of a batch; return what its loss is multiplied by."""
        self.unit = self.unit or float(rows)  # the same on all ranks; keeps gradients in the range of a mean
        self.weight += weight
        return weight / self.unit


class Tally:
    """The sums of a rank over an epoch or an evaluation, and its metrics with a state."""

    def __init__(self, stateful: Mapping[str, Any], sums: int) -> None:
        self.stateful = stateful
        self.sums: Floats = np.zeros(3 + sums)
        """Rows, the sum of losses, what that is divided by, and the sums of metrics."""

    def reset(self) -> None:
        self.sums = np.zeros_like(self.sums)
        for metric in self.stateful.values():
            metric.reset()


class TorchBackend:
    """The losses, metrics and outputs of a model of torch on one rank.

    A rank's loss is weighted by its rows (or by the weights of its labels, see `loss_divisor`), so that the gradient is
    that of the mean over all rows of a step, however unequally the ranks share them.
    """

    framework = "torch"

    def __init__(self, parts: TorchParts, world: World, rank_info: RankInfo, selection: ColumnSelection) -> None:
        self.parts, self.world, self.selection = parts, world, selection
        self.device = rank_device(rank_info)
        self.model = parts.model.to(self.device)
        metrics = dict(parts.metrics or {})
        stateful = {name: self._to_device(metric) for name, metric in metrics.items() if is_stateful(metric)}
        self._metrics = {name: metric for name, metric in metrics.items() if name not in stateful}
        self._names = tuple(metrics)
        # A validation can take place within an epoch of training, so each has its own sums and metrics.
        self._tallies = {
            True: Tally(stateful, len(self._metrics)),
            False: Tally({name: deepcopy(metric) for name, metric in stateful.items()}, len(self._metrics)),
        }
        self._tally = self._tallies[False]
        self._divisor = parts.loss_weight or loss_divisor(parts.loss)
        reduction = getattr(parts.loss, "reduction", "mean")
        if reduction not in ("mean", "sum"):
            raise OptionError(f"the loss has reduction={reduction!r}: it must return one number, by 'mean' or 'sum'.")
        self._is_sum = reduction == "sum"
        if self._is_sum and parts.loss_weight is not None:
            raise OptionError("loss_weight is for losses that are means, and the loss has reduction='sum'.")
        self.convert_input: Callable[[Any], Any] | None = None
        """Converts the dtypes of inputs, if the training has another precision than the data."""
        self.last_loss = 0.0
        """The loss of this rank's rows in the last step."""
        self._accumulated = _AccumulatedWeight()
        self.loop_state: dict[str, Any] = {}
        """What else a checkpoint holds: the states of callbacks, of the precision, and of metrics on each rank."""
        self._check_ranks()

    def _to_device(self, metric: Any) -> Any:
        return metric.to(self.device) if hasattr(metric, "to") else metric

    def _check_ranks(self) -> None:
        """Raise for metrics whose state only covers the rows of one rank, if there are several."""
        local = [name for name, metric in self._tally.stateful.items() if not sums_over_ranks(metric)]
        if local and self.world.size > 1:
            raise OptionError(
                f"metrics: {local[0]} keeps a state, and how to combine those of {self.world.size} ranks is unknown. "
                "Use a metric of torchmetrics, which does it, or workers=1."
            )

    # --- steps

    def begin(self, *, training: bool) -> None:
        self.set_mode(training=training)
        self.select_tally(training=training)
        self._tally.reset()
        if training:
            self._accumulated = _AccumulatedWeight()

    def set_mode(self, *, training: bool) -> None:
        """Switch the model to training, or to evaluation."""
        self.model.train(training)

    def select_tally(self, *, training: bool) -> None:
        """Continue with the sums of the training, or of the evaluation."""
        self._tally = self._tallies[training]

    def compute_loss(self, batch: RankBatch, accumulate: int = 1) -> torch.Tensor:
        """Return the loss of a batch, weighted so that the gradients of all ranks and batches of a step add up.

        The gradients of ranks are averaged by DistributedDataParallel, and Lightning divides the loss by the number of
        batches that it accumulates: both are undone here, because each must count by its rows instead.
        """
        if self.parts.loss is None:
            raise OptionError("fit() needs an optimizer and a loss: Estimator.from_torch(optimizer=..., loss=...).")
        output, labels = self._forward(batch)
        loss: torch.Tensor = self._loss(output, labels, batch)
        self.last_loss = self._add_to_tally(loss.detach(), output, labels, batch)
        return loss * self._loss_factor(labels, batch, accumulate)

    def _loss_factor(self, labels: object, batch: RankBatch, accumulate: int) -> float:
        """Return what the mean loss of a batch is multiplied by."""
        if accumulate == 1 or self._is_sum:
            return self._loss_share(labels, batch) * self.world.size * accumulate
        weight = self._accumulated.add(self._divisor_of(labels, batch), max(batch.total or batch.rows, 1))
        return weight * self.world.size * accumulate

    def scale_accumulated_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        """Divide the gradients of several batches by the weight of all of their rows, on all ranks."""
        if self._is_sum or not self._accumulated.unit:
            return
        total = float(self.world.sum([self._accumulated.weight])[0])
        factor = self._accumulated.unit / total if total else 0.0
        self._accumulated = _AccumulatedWeight()
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def _loss_share(self, labels: object, batch: RankBatch) -> float:
        """Return this rank's share of a step's loss."""
        if self._is_sum or self.world.size == 1:
            return 1.0
        if self._divisor is None:
            return batch.rows / max(batch.total or batch.rows, 1)
        own = self._divisor_of(labels, batch)
        total = float(self.world.sum([own])[0])
        return own / total if total else 0.0

    def _divisor_of(self, labels: object, batch: RankBatch) -> float:
        """Return the weight of the mean loss of a batch: its rows, or the weights of its labels."""
        counted = self._divisor is not None and batch.rows and not self._is_sum
        return float(self._divisor(labels)) if counted and self._divisor else float(batch.rows)

    def evaluate(self, batch: RankBatch) -> None:
        with torch.no_grad():
            output, labels = self._forward(batch)
            loss = None if self.parts.loss is None else self._loss(output, labels, batch)
            self._add_to_tally(loss, output, labels, batch)

    def predict(self, batch: RankBatch) -> Any:
        with torch.no_grad():
            output, _ = self._forward(batch)
        return map_tensors(output, lambda tensor: tensor.cpu().numpy())

    def _forward(self, batch: RankBatch) -> tuple[Any, Any]:
        arguments, labels = self.selection.split(batch.content)
        arguments = tuple(self._prepare(argument) for argument in arguments)
        if self.convert_input is not None:
            arguments = self.convert_input(arguments)
        output, labels = self.model(*arguments), self._prepare(labels)
        if batch.valid is None:
            return output, labels
        valid = torch.as_tensor(batch.valid, device=self.device)
        return map_tensors(output, lambda tensor: tensor[valid]), map_tensors(labels, lambda tensor: tensor[valid])

    def _loss(self, output: Any, labels: Any, batch: RankBatch) -> Any:
        if not batch.rows:
            # Zero, but with a gradient for every output: the other ranks wait for this rank's gradients.
            return sum(tensor.sum() for tensor in _iter_tensors(output)) * 0.0
        assert self.parts.loss is not None
        return self.parts.loss(output, labels)

    def _prepare(self, value: Any) -> Any:
        """Move a value to the device; columns of doubles get the dtype of the model's weights."""
        if isinstance(value, DocumentBatch):
            return value.to(self.device)
        if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
            value = torch.from_numpy(np.ascontiguousarray(value) if value.flags.writeable else value.copy())
        if not isinstance(value, torch.Tensor):
            return map_tensors(value, self._prepare) if isinstance(value, (tuple, list, Mapping)) else value
        if value.dtype is torch.float64 and self.selection.features is not None:
            value = value.to(self._float_dtype())
        return value.to(self.device, non_blocking=True)

    def _float_dtype(self) -> torch.dtype:
        floats = (p.dtype for p in self.model.parameters() if p.dtype.is_floating_point)
        return next(floats, torch.get_default_dtype())

    # --- sums

    def _add_to_tally(self, loss: torch.Tensor | None, output: Any, labels: Any, batch: RankBatch) -> float:
        value = 0.0 if loss is None else float(loss)
        counts, sums = self._divisor_of(labels, batch), self._tally.sums
        sums[0] += batch.rows
        sums[1] += value if self._is_sum else value * counts if counts else 0.0
        sums[2] += counts
        if batch.rows:
            with torch.no_grad():
                for place, metric in enumerate(self._metrics.values(), 3):
                    sums[place] += sum_metric(metric, output, labels, batch.rows)
                for metric in self._tally.stateful.values():
                    metric.update(output, labels)
        return value

    @property
    def tally(self) -> Floats:
        """The sums of this rank since the beginning."""
        return self._tally.sums

    @tally.setter
    def tally(self, tally: Floats) -> None:
        """The sums of this rank since the beginning."""
        self._tally.sums = np.array(tally, np.float64)

    def logs(self, tally: Floats) -> dict[str, float]:
        """Return the means of the sums of all ranks, and the results of metrics with a state."""
        rows = max(float(tally[0]), 1.0)
        means = dict(zip(self._metrics, (tally[3:] / rows).tolist(), strict=True))
        logs = {} if self.parts.loss is None else {"loss": float(tally[1]) / (float(tally[2]) or 1.0)}
        for name in self._names:
            if name in means:
                logs[name] = means[name]
            else:
                logs.update(compute_metric(name, self._tally.stateful[name]))
        return logs

    # --- weights

    def save(self, folder: Path) -> None:
        torch.save({**self.parts.state(), "loop": self.loop_state}, folder / WEIGHTS)

    def load(self, folder: Path) -> None:
        state = torch.load(folder / WEIGHTS, map_location=self.device, weights_only=True)
        self.parts.restore(state)
        self.loop_state = state.get("loop", {})

    def gather_metric_states(self) -> list[dict[str, Any]]:
        """Return the states of the training's metrics on each rank, by name."""
        if not self._tallies[True].stateful:
            return []
        own = {name: metric_state(metric) for name, metric in self._tallies[True].stateful.items()}
        if self.world.size == 1:
            return [own]
        states: list[Any] = [None] * self.world.size
        dist.all_gather_object(states, own)
        return states

    def restore_metric_states(self, states: list[dict[str, Any]]) -> None:
        """Continue with metric states of a checkpoint within an epoch."""
        stateful = self._tallies[True].stateful
        if len(states) != self.world.size and (states or stateful):
            raise OptionError(
                f"the checkpoint within an epoch has the metrics of {len(states)} ranks, and there are "
                f"{self.world.size}: resume with the same metrics and number of workers."
            )
        for name, metric in stateful.items():
            metric.load_state_dict(states[self.world.rank][name])


def map_tensors(value: Any, change: Callable[[Any], Any]) -> Any:
    """Apply a function to the tensors, and the batches of documents, of a nest."""
    if isinstance(value, (torch.Tensor, DocumentBatch, np.ndarray)):
        return change(value)
    if isinstance(value, Mapping):
        return {name: map_tensors(part, change) for name, part in value.items()}
    return tuple(map_tensors(part, change) for part in value) if isinstance(value, (tuple, list)) else value


def _iter_tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    for part in value.values() if isinstance(value, Mapping) else value if isinstance(value, (tuple, list)) else ():
        yield from _iter_tensors(part)


@dataclass
class TorchRecipe:
    """Instances, or functions that create them on the rank. Instances keep what was trained."""

    module: Any
    optimizer: Any = None
    loss: Any = None
    metrics: Any = None
    scheduler: Any = None
    scheduler_interval: Any = None
    config: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    loss_weight: Callable[[Any], float] | None = None
    trainer: Mapping[str, Any] = field(default_factory=dict)
    """Keywords of Lightning's Trainer."""
    state: bytes | None = None
    framework = "torch"

    def __post_init__(self) -> None:
        resolve_metrics(self.metrics)  # raises for unknown ones
        self._parts: TorchParts | None = None
        if self.scheduler_interval not in (None, "epoch", "step"):
            raise OptionError(f"scheduler_interval={self.scheduler_interval!r}: use 'epoch' or 'step'.")
        if not isinstance(self.module, nn.Module) and not callable(self.module):
            raise OptionError(
                f"model must be a Module or a function that returns one; got a {type(self.module).__name__}."
            )
        if isinstance(self.optimizer, torch.optim.Optimizer) and not isinstance(self.module, nn.Module):
            raise OptionError(
                "the optimizer has parameters of another model: pass a function of the model that returns one."
            )

    def check_metrics_can_be_saved(self) -> None:
        """Raise for metrics whose state a checkpoint within an epoch would lack."""
        for name, metric in resolve_metrics(self.metrics).items():
            if is_stateful(metric) and not can_be_saved(metric):
                raise OptionError(
                    f"checkpoint_every writes checkpoints within an epoch, and the state of the metric {name} cannot "
                    "be saved: give it state_dict() and load_state_dict(), use one of torchmetrics, or leave "
                    "checkpoint_every out."
                )

    def parts(self) -> TorchParts:
        """Return the instances of this process, created once."""
        if self._parts is None:
            model = self.module if isinstance(self.module, nn.Module) else self._create_model()
            optimizer = self._optimizer(model)
            scheduler = self.scheduler
            if isinstance(scheduler, type) or (callable(scheduler) and not hasattr(scheduler, "state_dict")):
                scheduler = create(scheduler, self.config, optimizer)
            metrics, interval = resolve_metrics(self.metrics), resolve_interval(scheduler, self.scheduler_interval)
            loss = self._loss()
            self._parts = TorchParts(model, optimizer, loss, metrics, scheduler, interval, self.loss_weight)
            if self.state is not None:
                self._parts.restore(parse_state(self.state))
        return self._parts

    def _create_model(self) -> Any:
        """Call the creator of the model, with the same initial weights on every rank."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return create(self.module, self.config)

    def _optimizer(self, model: nn.Module) -> Any:
        optimizer = self.optimizer
        if optimizer is None or isinstance(optimizer, torch.optim.Optimizer):
            return optimizer
        first: Any = model.parameters() if required_parameters(optimizer)[:1] == ["params"] else model
        return create(optimizer, self.config, first)

    def _loss(self) -> Any:
        """Return the loss. A function of at most a config creates one; a loss takes outputs and labels."""
        loss = self.loss
        is_class = isinstance(loss, type)
        creates = not isinstance(loss, nn.Module) and callable(loss) and len(required_parameters(loss)) < 2
        return create(loss, self.config) if is_class or (creates and required_parameters(loss)) else loss

    def world(self, rank_info: RankInfo) -> World:
        """Connect to the other ranks; each has its own random numbers, the same in every run."""
        torch.manual_seed(self.seed + rank_info.rank)
        return TorchWorld(rank_info)

    def backend(self, rank_info: RankInfo, world: World, selection: ColumnSelection) -> TorchBackend:
        return TorchBackend(self.parts(), world, rank_info, selection)

    def training(self, job: Job, backend: Any, world: World) -> Training:
        lightning: Any = require(f"{__package__}._lightning", extra="lightning", needed_for="Estimator.fit()")
        return lightning.LightningTraining(job, backend, world, self.trainer)  # type: ignore[no-any-return]

    def evaluate(self, job: Job, backend: Any, world: World) -> dict[str, float]:
        return evaluate_job(job, backend, world)

    def model(self) -> nn.Module:
        return self.parts().model

    def dump_state(self, backend: Any) -> bytes:
        file = io.BytesIO()
        torch.save(backend.parts.state(), file)
        return file.getvalue()

    def load_state(self, state: bytes) -> None:
        self.state = state
        self.parts().restore(parse_state(state))

    def save(self, path: Path, *, entire: bool = False) -> None:
        if entire:
            torch.save(self.model(), path)
            return
        torch.save({name: value.cpu() for name, value in self.model().state_dict().items()}, path)

    def load(self, path: Path, *, entire: bool = False) -> None:
        """Read the weights from a file of `save`, or weights and the optimizer's state from a checkpoint."""
        file = path / WEIGHTS if path.is_dir() else path
        try:
            state = torch.load(file, map_location="cpu", weights_only=not entire)
            state = state.state_dict() if isinstance(state, nn.Module) else state
        except FileNotFoundError as error:
            raise StorageNotFoundError(f"{file}: there is no such file.") from error
        except Exception as error:
            raise StorageError(f"{file}: torch cannot read weights from it: {error}") from error
        self.parts().restore(state if path.is_dir() else self.weights_of(state))
        self.state = self.dump_state(self.backend(RankInfo(), World(), ColumnSelection()))

    def weights_of(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state of the model in a file of `save`, or of Lightning's ModelCheckpoint."""
        if "pytorch-lightning_version" not in state:
            return {"model": state}
        prefix = "model."  # the name of the model in EstimatorModule
        names = [name for name in state["state_dict"] if name.startswith(prefix)]
        return {"model": {name.removeprefix(prefix): state["state_dict"][name] for name in names}}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_parts": None}


def resolve_interval(scheduler: object, interval: SchedulerInterval | None) -> SchedulerInterval:
    """Return when a scheduler steps: as specified, else after each epoch; raise if that would be wrong."""
    name = type(scheduler).__name__
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) and interval == "step":
        raise OptionError(f"scheduler_interval='step': {name} looks at the loss of an epoch. Leave it out.")
    inner = [scheduler, *getattr(scheduler, "_schedulers", ())]  # of a SequentialLR or a ChainedScheduler
    counts_steps = [one for one in inner if isinstance(one, (lr_scheduler.OneCycleLR, lr_scheduler.CyclicLR))]
    if counts_steps and interval is None:
        raise OptionError(
            f"{type(counts_steps[0]).__name__} counts batches, and schedulers step after each epoch by default. "
            "Pass scheduler_interval='step' (or 'epoch', if that is intended)."
        )
    return interval or "epoch"


def parse_state(state: bytes) -> Any:
    """Return the state that `dump_state` has written."""
    return torch.load(io.BytesIO(state), map_location="cpu", weights_only=True)
