"""Training with torch: the step, the metrics, the weights, and the ranks of torch.distributed."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ReduceLROnPlateau

from quire.array import DocumentBatch
from quire.distributed.estimator._columns import Chosen
from quire.distributed.estimator._items import Item
from quire.distributed.estimator._torch_losses import loss_divisor
from quire.distributed.estimator._torch_metrics import Metric, computed, is_stateful, sum_of, sums_over_ranks
from quire.distributed.estimator._world import Floats, Seat, World
from quire.errors import OptionError

WEIGHTS = "weights.pt"
SchedulerInterval = Literal["epoch", "step"]


class TorchWorld(World):
    """Ranks of torch.distributed."""

    def __init__(self, seat: Seat) -> None:
        super().__init__(seat)
        self.device, self._joined = device_of(seat), seat.joined
        if not seat.joined:
            host, _, port = seat.addresses[0].rpartition(":")
            if host.startswith("127."):
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            dist.init_process_group(
                "nccl" if self.device.type == "cuda" else "gloo",
                init_method=f"tcp://{host}:{port}",
                rank=seat.rank,
                world_size=seat.size,
                timeout=timedelta(minutes=30),
            )

    def sum(self, values: Any) -> Floats:
        """The sums of numbers over all ranks."""
        numbers = torch.as_tensor(np.array(values, np.float64)).to(self.device)
        dist.all_reduce(numbers)
        return numbers.cpu().numpy()

    def close(self) -> None:
        """Leave together: a rank that goes first may leave another one waiting in its native code."""
        if dist.is_initialized():
            dist.barrier()
            gc.collect()
            if not self._joined:
                dist.destroy_process_group()


def device_of(seat: Seat) -> torch.device:
    """The device of a rank: an accelerator of its own where there are any."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", seat.rank)) % torch.cuda.device_count())


@dataclass
class TorchParts:
    """What is trained: instances, all of one process."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None = None
    loss: Callable[..., Any] | None = None
    metrics: Mapping[str, Metric] | None = None
    scheduler: Any = None
    scheduler_interval: SchedulerInterval = "epoch"


class TorchSide:
    """The steps of a training with torch on one rank.

    A rank's loss counts by its rows (or by the weights of its labels, see `loss_divisor`), so that the gradient is that
    of the mean over all rows of a step, however unequal the ranks are in them.
    """

    framework = "torch"

    def __init__(self, parts: TorchParts, world: World, seat: Seat, chosen: Chosen) -> None:
        self.parts, self.world, self.chosen = parts, world, chosen
        self.device = device_of(seat)
        self.model = parts.model.to(self.device)
        self._net: nn.Module | None = None
        metrics = dict(parts.metrics or {})
        self._stateful = {name: self._placed(metric) for name, metric in metrics.items() if is_stateful(metric)}
        self._metrics = {name: metric for name, metric in metrics.items() if name not in self._stateful}
        self._names = tuple(metrics)
        self._tally = np.zeros(3 + len(self._metrics))
        """Rows, the sum of losses, what that is divided by, and the sums of metrics."""
        self._divisor = loss_divisor(parts.loss)
        reduction = getattr(parts.loss, "reduction", "mean")
        if reduction not in ("mean", "sum"):
            raise OptionError(f"the loss has reduction={reduction!r}: it must give one number, by 'mean' or 'sum'.")
        self._is_sum = reduction == "sum"
        self._check_ranks()

    def _placed(self, metric: Any) -> Any:
        return metric.to(self.device) if hasattr(metric, "to") else metric

    def _check_ranks(self) -> None:
        """Metrics with a state that only knows the rows of its own rank are refused on several."""
        own = [name for name, metric in self._stateful.items() if not sums_over_ranks(metric)]
        if own and self.world.size > 1:
            raise OptionError(
                f"metrics: {own[0]} keeps a state, and does not say how those of {self.world.size} ranks go together. "
                "Use a metric of torchmetrics, which does, or workers=1."
            )

    # --- steps

    def begin(self, *, training: bool) -> None:
        """Begin an epoch, or an evaluation."""
        self.model.train(training)
        self._tally = np.zeros_like(self._tally)
        for metric in self._stateful.values():
            metric.reset()

    def train(self, item: Item) -> float:
        """One step: the loss of this rank's rows."""
        optimizer = self.parts.optimizer
        if optimizer is None or self.parts.loss is None:
            raise OptionError("fit() needs an optimizer and a loss: Estimator.from_torch(optimizer=..., loss=...).")
        optimizer.zero_grad(set_to_none=True)
        output, labels = self._forward(self._distributed(), item)
        loss = self._loss(output, labels, item)
        (loss * (self._share(labels, item) * self.world.size)).backward()
        optimizer.step()
        if self.parts.scheduler is not None and self.parts.scheduler_interval == "step":
            self.parts.scheduler.step()
        return self._count(loss.detach(), output, labels, item)

    def _share(self, labels: Any, item: Item) -> float:
        """How much of a step's loss this rank has."""
        if self._is_sum or self.world.size == 1:
            return 1.0
        if self._divisor is None:
            return item.rows / max(item.total or item.rows, 1)
        mine = self._counts(labels, item)
        total = float(self.world.sum([mine])[0])
        return mine / total if total else 0.0

    def _counts(self, labels: Any, item: Item) -> float:
        """What the mean loss of a batch counts: its rows, or the weights of its labels."""
        return self._divisor(labels) if self._divisor and item.rows and not self._is_sum else float(item.rows)

    def evaluate(self, item: Item) -> None:
        """Count the loss and the metrics of a batch."""
        with torch.no_grad():
            output, labels = self._forward(self.model, item)
            loss = None if self.parts.loss is None else self._loss(output, labels, item)
            self._count(loss, output, labels, item)

    def predict(self, item: Item) -> Any:
        """The output for the rows of a batch that count."""
        with torch.no_grad():
            output, _ = self._forward(self.model, item)
        return _mapped(output, lambda tensor: tensor.cpu().numpy())

    def epoch_done(self, logs: Mapping[str, Any]) -> None:
        """Let a scheduler of epochs take its step; one on a plateau looks at the validation's loss, if there is one."""
        scheduler = self.parts.scheduler
        if scheduler is None or self.parts.scheduler_interval == "step":
            return
        if isinstance(scheduler, ReduceLROnPlateau):
            scheduler.step(logs["val_loss"] if "val_loss" in logs else logs["loss"])
        else:
            scheduler.step()

    def _distributed(self) -> nn.Module:
        if self._net is None:
            wrapped = self.world.size > 1 and any(p.requires_grad for p in self.model.parameters())
            devices = [self.device] if self.device.type == "cuda" else None
            self._net = DistributedDataParallel(self.model, device_ids=devices) if wrapped else self.model
        return self._net

    def _forward(self, net: nn.Module, item: Item) -> tuple[Any, Any]:
        arguments, labels = self.chosen.split(item.content)
        arguments = tuple(self._prepared(argument) for argument in arguments)
        output, labels = net(*arguments), self._prepared(labels)
        if item.real is None:
            return output, labels
        real = torch.as_tensor(item.real, device=self.device)
        return _mapped(output, lambda tensor: tensor[real]), _mapped(labels, lambda tensor: tensor[real])

    def _loss(self, output: Any, labels: Any, item: Item) -> Any:
        if not item.rows:
            return sum(tensor.sum() for tensor in _tensors(output)) * 0.0
        assert self.parts.loss is not None
        return self.parts.loss(output, labels)

    def _prepared(self, value: Any) -> Any:
        """On the device; columns of doubles get the width of the model's weights."""
        if isinstance(value, DocumentBatch):
            return value.to(self.device)
        if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
            value = torch.from_numpy(np.ascontiguousarray(value) if value.flags.writeable else value.copy())
        if not isinstance(value, torch.Tensor):
            return _mapped(value, self._prepared) if isinstance(value, (tuple, list, Mapping)) else value
        if value.dtype is torch.float64 and self.chosen.features is not None:
            value = value.to(self._width())
        return value.to(self.device, non_blocking=True)

    def _width(self) -> torch.dtype:
        floats = (p.dtype for p in self.model.parameters() if p.dtype.is_floating_point)
        return next(floats, torch.get_default_dtype())

    # --- what was counted

    def _count(self, loss: Any, output: Any, labels: Any, item: Item) -> float:
        value = 0.0 if loss is None else float(loss)
        counts = self._counts(labels, item)
        self._tally[0] += item.rows
        self._tally[1] += value if self._is_sum else value * counts if counts else 0.0
        self._tally[2] += counts
        if item.rows:
            with torch.no_grad():
                for place, metric in enumerate(self._metrics.values(), 3):
                    self._tally[place] += sum_of(metric, output, labels, item.rows)
                for metric in self._stateful.values():
                    metric.update(output, labels)
        return value

    @property
    def tally(self) -> Floats:
        """What this rank has counted since the beginning."""
        return self._tally

    @tally.setter
    def tally(self, tally: Any) -> None:
        self._tally = np.array(tally, np.float64)

    def logs(self, tally: Floats) -> dict[str, float]:
        """The means of the counts of all ranks, and what metrics with a state have computed of all rows."""
        rows = max(float(tally[0]), 1.0)
        means = dict(zip(self._metrics, (tally[3:] / rows).tolist(), strict=True))
        found = {} if self.parts.loss is None else {"loss": float(tally[1]) / (float(tally[2]) or 1.0)}
        for name in self._names:
            if name in means:
                found[name] = means[name]
            else:
                found.update(computed(name, self._stateful[name]))
        return found

    # --- weights

    def state(self) -> dict[str, Any]:
        """The weights, and what the optimizer and the scheduler keep."""
        parts = {"optimizer": self.parts.optimizer, "scheduler": self.parts.scheduler}
        kept = {name: part.state_dict() for name, part in parts.items() if part is not None}
        return {"model": self.model.state_dict(), **kept}

    def save(self, folder: Path) -> None:
        """Write the state into a folder."""
        torch.save(self.state(), folder / WEIGHTS)

    def load(self, folder: Path) -> None:
        """Take the state from a folder."""
        restore(self.parts, torch.load(folder / WEIGHTS, map_location=self.device, weights_only=True))

    @property
    def stop_training(self) -> bool:
        """A callback of Keras says it on the model; here it says it itself."""
        return False


def restore(parts: TorchParts, state: Mapping[str, Any]) -> None:
    """Give parts the state that others had."""
    parts.model.load_state_dict(state["model"])
    if parts.optimizer is not None and "optimizer" in state:
        parts.optimizer.load_state_dict(state["optimizer"])
    if parts.scheduler is not None and "scheduler" in state:
        parts.scheduler.load_state_dict(state["scheduler"])


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """A nest of the same form with its tensors, and batches of documents, changed."""
    if isinstance(value, (torch.Tensor, DocumentBatch, np.ndarray)):
        return change(value)
    if isinstance(value, Mapping):
        return {name: _mapped(part, change) for name, part in value.items()}
    return tuple(_mapped(part, change) for part in value) if isinstance(value, (tuple, list)) else value


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    for part in value.values() if isinstance(value, Mapping) else value if isinstance(value, (tuple, list)) else ():
        yield from _tensors(part)
