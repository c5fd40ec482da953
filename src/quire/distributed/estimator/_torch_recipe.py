"""A model of torch with its optimizer, loss and metrics, as the user gave them."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler

from quire.distributed.estimator._columns import Chosen
from quire.distributed.estimator._creators import make_part, parameters_of
from quire.distributed.estimator._torch_metrics import is_stateful, metrics_of
from quire.distributed.estimator._torch_side import (
    WEIGHTS,
    SchedulerInterval,
    TorchParts,
    TorchSide,
    TorchWorld,
    restore,
)
from quire.distributed.estimator._world import Seat, World
from quire.errors import OptionError, StorageError, StorageNotFoundError


@dataclass
class TorchRecipe:
    """Instances, or functions that make them on the rank. Instances keep what was trained."""

    module: Any
    optimizer: Any = None
    loss: Any = None
    metrics: Any = None
    scheduler: Any = None
    scheduler_interval: Any = None
    config: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    state: bytes | None = None
    framework = "torch"

    def __post_init__(self) -> None:
        metrics_of(self.metrics)  # complains of what it does not know
        self._parts: TorchParts | None = None
        if self.scheduler_interval not in (None, "epoch", "step"):
            raise OptionError(f"scheduler_interval={self.scheduler_interval!r}: use 'epoch' or 'step'.")
        if not isinstance(self.module, nn.Module) and not callable(self.module):
            raise OptionError(f"model is a Module, or a function that makes one; got a {type(self.module).__name__}.")
        if isinstance(self.optimizer, torch.optim.Optimizer) and not isinstance(self.module, nn.Module):
            raise OptionError(
                "the optimizer has parameters of another model: pass a function of the model that makes one."
            )

    @property
    def has_stateful_metrics(self) -> bool:
        """Whether a metric keeps a state over the batches of an epoch, which checkpoints do not hold."""
        return any(map(is_stateful, metrics_of(self.metrics).values()))

    def parts(self) -> TorchParts:
        """The instances of this process; made once."""
        if self._parts is None:
            model = self.module if isinstance(self.module, nn.Module) else self._created()
            optimizer = self._optimizer(model)
            scheduler = self.scheduler
            if isinstance(scheduler, type) or (callable(scheduler) and not hasattr(scheduler, "state_dict")):
                scheduler = make_part(scheduler, self.config, optimizer)
            metrics, interval = metrics_of(self.metrics), interval_of(scheduler, self.scheduler_interval)
            self._parts = TorchParts(model, optimizer, self._loss(), metrics, scheduler, interval)
            if self.state is not None:
                restore(self._parts, _unpacked(self.state))
        return self._parts

    def _created(self) -> Any:
        """The model that a function makes, with the same weights on every rank."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return make_part(self.module, self.config)

    def _optimizer(self, model: nn.Module) -> Any:
        given = self.optimizer
        if given is None or isinstance(given, torch.optim.Optimizer):
            return given
        first: Any = model.parameters() if parameters_of(given)[:1] == ["params"] else model
        return make_part(given, self.config, first)

    def _loss(self) -> Any:
        """A loss takes outputs and labels; what takes no more than a config makes one."""
        loss = self.loss
        is_class = isinstance(loss, type)
        creates = not isinstance(loss, nn.Module) and callable(loss) and len(parameters_of(loss)) < 2
        return make_part(loss, self.config) if is_class or (creates and parameters_of(loss)) else loss

    def world(self, seat: Seat) -> World:
        """Join the other ranks; each draws its own numbers, and the same ones in every run."""
        torch.manual_seed(self.seed + seat.rank)
        return TorchWorld(seat)

    def side(self, seat: Seat, world: World, chosen: Chosen) -> TorchSide:
        """The steps on a rank."""
        return TorchSide(self.parts(), world, seat, chosen)

    def model(self) -> nn.Module:
        """The model, with the weights that it has now."""
        return self.parts().model

    def packed(self, side: Any) -> bytes:
        """The state of a side."""
        file = io.BytesIO()
        torch.save(side.state(), file)
        return file.getvalue()

    def adopt(self, state: bytes) -> None:
        """Take over the state that ranks have trained."""
        self.state = state
        restore(self.parts(), _unpacked(state))

    def save(self, path: Path) -> None:
        """Write the weights to a file."""
        torch.save({name: value.cpu() for name, value in self.model().state_dict().items()}, path)

    def load(self, path: Path) -> None:
        """Read the weights from a file of `save`, or weights and the optimizer's state from a checkpoint."""
        file = path / WEIGHTS if path.is_dir() else path
        try:
            found = torch.load(file, map_location="cpu", weights_only=True)
        except FileNotFoundError as error:
            raise StorageNotFoundError(f"{file}: nothing is there.") from error
        except Exception as error:
            raise StorageError(f"{file}: these are no weights that torch can read: {error}") from error
        restore(self.parts(), found if path.is_dir() else {"model": found})
        self.state = self.packed(TorchSide(self.parts(), World(), Seat(), Chosen()))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_parts": None}


def interval_of(scheduler: Any, interval: SchedulerInterval | None) -> SchedulerInterval:
    """Return when a scheduler takes its steps: as is said, else after each epoch. Where that would be wrong, raise."""
    name = type(scheduler).__name__
    if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) and interval == "step":
        raise OptionError(f"scheduler_interval='step': {name} looks at the loss of an epoch. Leave it out.")
    inner = [scheduler, *getattr(scheduler, "_schedulers", ())]  # of a SequentialLR or a ChainedScheduler
    counts_steps = [one for one in inner if isinstance(one, (lr_scheduler.OneCycleLR, lr_scheduler.CyclicLR))]
    if counts_steps and interval is None:
        raise OptionError(
            f"{type(counts_steps[0]).__name__} counts steps, and schedulers take theirs after each epoch by default. "
            "Pass scheduler_interval='step' (or 'epoch', if that is meant)."
        )
    return interval or "epoch"


def _unpacked(state: bytes) -> Any:
    return torch.load(io.BytesIO(state), map_location="cpu", weights_only=True)
