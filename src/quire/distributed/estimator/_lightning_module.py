"""LightningModules of the user: their own steps, optimizers, hooks and logs, with the data and the ranks of quire.

The module itself is given to Lightning's Trainer. While it is trained, four of its methods are replaced on the object:
the steps (a loss counts by its rows), `log` (a mean counts each row once, over all ranks), and the end of an epoch.
"""

from __future__ import annotations

import functools
import inspect
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, cast

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden

from quire.array import DocumentBatch
from quire.distributed.estimator._feeds import RankBatch
from quire.distributed.estimator._job import Job
from quire.distributed.estimator._lightning import (
    LightningTraining,
    TrainingBatches,
    ValidationBatches,
    check_trainer_options,
    make_trainer,
    quiet,
    run_fit,
    set_progress,
)
from quire.distributed.estimator._options import ColumnSelection
from quire.distributed.estimator._ranks import Floats, RankInfo, World
from quire.distributed.estimator._torch import TorchBackend, TorchParts, TorchRecipe, map_tensors, parse_state
from quire.distributed.estimator._training import Training
from quire.errors import OptionError

_TRAINING_KEYS = ("optimizer_states", "lr_schedulers")


@dataclass
class ModuleParts(TorchParts):
    """A LightningModule, and the states of its optimizers and schedulers, which exist while it is trained only."""

    training_state: dict[str, Any] = field(default_factory=dict)

    def state(self) -> dict[str, Any]:
        """Return a checkpoint with the names of Lightning's own, and with what the module's hook adds."""
        checkpoint = {"state_dict": self.model.state_dict(), **self.training_state}
        cast("pl.LightningModule", self.model).on_save_checkpoint(checkpoint)
        return checkpoint

    def restore(self, state: Mapping[str, Any]) -> None:
        if any(key in state for key in _TRAINING_KEYS):  # a whole checkpoint, not only weights
            cast("pl.LightningModule", self.model).on_load_checkpoint(dict(state))
            self.training_state = {key: state[key] for key in _TRAINING_KEYS if key in state}
        self.model.load_state_dict(state["state_dict"])


class ModuleBackend(TorchBackend):
    """The batches, loss weights and outputs of a LightningModule on one rank."""

    parts: ModuleParts

    def set_mode(self, *, training: bool) -> None:
        """Do nothing: Lightning switches modes, and layers that the user has put into evaluation mode stay in it."""

    def module_batch(self, batch: RankBatch) -> Any:
        """Return what the steps of the module are called with: only rows that count, unless there are none."""
        content = batch.content
        if self.selection.features is not None:
            arguments, labels = self.selection.split(content)
            features = arguments[0] if len(arguments) == 1 else arguments
            content = features if labels is None else (features, labels)
        content = self._prepare(content)
        if batch.valid is None or not batch.rows:
            return content
        if isinstance(content, DocumentBatch):
            return content[np.flatnonzero(batch.valid)]
        valid = torch.as_tensor(batch.valid, device=self.device)
        return map_tensors(content, lambda tensor: tensor[valid])

    def weigh_loss(self, loss: torch.Tensor, content: object, batch: RankBatch, accumulate: int) -> torch.Tensor:
        """Add a loss to the sums; return it, weighted by the rows of the batch."""
        self.last_loss = self._add_to_tally(loss.detach(), None, content, batch)
        return loss * self._loss_factor(content, batch, accumulate)

    def add_loss(self, loss: torch.Tensor, content: object, batch: RankBatch) -> None:
        """Add a loss to the sums of the evaluation."""
        self._add_to_tally(loss.detach(), None, content, batch)

    def predict(self, batch: RankBatch) -> Any:
        """Return the result of `predict_step`, if the module has one of its own, or else of `forward`."""
        module = cast("pl.LightningModule", self.model)
        modes = {part: part.training for part in module.modules()}
        module.eval()
        try:
            with torch.no_grad():
                if is_overridden("predict_step", module):
                    output = module.predict_step(self.module_batch(batch), 0)
                else:
                    output, _ = self._forward(batch)
        finally:
            for part, mode in modes.items():
                part.training = mode
        return map_tensors(output, lambda tensor: tensor.cpu().numpy())

    def logs(self, tally: Floats) -> dict[str, float]:
        return {"loss": float(tally[1] / tally[2])} if tally[2] else {}


class ModuleSteps(pl.Callback):  # type: ignore[misc]
    """Calls the steps of a module with batches of ranks, and makes what it logs exact over rows and ranks."""

    def __init__(self, backend: ModuleBackend, world: World) -> None:
        self.backend, self.world = backend, world
        self.module = cast("pl.LightningModule", backend.model)
        # Lightning reads batches ahead, so those that were read wait here for their step.
        self._waiting: dict[bool, deque[RankBatch]] = {True: deque(), False: deque()}
        self._batch: RankBatch | None = None
        self._is_training_step = False
        self.epoch_names: list[str] = []
        """The names of values that were logged for the epoch."""
        self.validated: dict[str, float] = {}

    def convert(self, batches: Iterator[RankBatch], *, training: bool) -> Iterator[Any]:
        """Yield batches as the module takes them."""
        waiting = self._waiting[training]
        waiting.clear()  # of a loop that ended early
        for batch in batches:
            waiting.append(batch)
            yield self.backend.module_batch(batch)

    @contextmanager
    def installed(self, **more: Callable[..., Any]) -> Iterator[None]:
        """Replace methods of the module."""
        own: dict[str, Callable[..., Any]] = {
            "log": self._log,
            "training_step": self._training_step,
            "validation_step": self._validation_step,
            **more,
        }
        instance = self.module.__dict__
        before = {name: instance[name] for name in own if name in instance}
        methods = {name: getattr(self.module, name) for name in own}
        for name, method in own.items():
            instance[name] = functools.wraps(methods[name])(functools.partial(method, methods[name]))
        try:
            yield
        finally:
            for name in own:
                del instance[name]
            instance.update(before)

    # --- replaced methods

    def _training_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        batch = self._batch
        assert batch is not None
        with _unchanged_metrics(self.module) if not batch.rows else nullcontext():
            output = step(*args, **kwargs)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(loss, torch.Tensor):
            return output
        content = args[0] if args else kwargs["batch"]
        weighted = self.backend.weigh_loss(loss, content, batch, self.module.trainer.accumulate_grad_batches)
        if not self.module.automatic_optimization:
            return output
        return {**output, "loss": weighted} if isinstance(output, Mapping) else weighted

    def _validation_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        batch = self._batch
        assert batch is not None
        with _unchanged_metrics(self.module) if not batch.rows else nullcontext():
            output = step(*args, **kwargs)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self.backend.add_loss(loss, args[0] if args else kwargs["batch"], batch)
        return output

    def _log(self, log: Callable[..., None], name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Log a value. A mean counts by the rows of its batch, and an epoch's by those of all ranks."""
        keywords = inspect.signature(log).bind(name, value, *args, **kwargs).arguments
        on_epoch = keywords.get("on_epoch")
        if on_epoch is None:
            on_epoch = not self._is_training_step
        if on_epoch and name not in self.epoch_names:
            self.epoch_names.append(name)
        if not hasattr(value, "compute"):  # torchmetrics have their own count of rows and ranks
            if on_epoch and self.world.size > 1 and not keywords.get("rank_zero_only"):
                keywords["sync_dist"] = True
            if self._batch is not None:
                rows = keywords.get("batch_size")
                rows = self._batch.rows if rows is None or not self._batch.rows else rows
                # Lightning divides whole numbers by the number of ranks without the rest: 13 and 12 rows would be 24.
                keywords["batch_size"] = float(rows)
                if not self._batch.rows and keywords.get("reduce_fx") in ("sum", torch.sum):
                    keywords["value"] = value * 0
        log(**keywords)

    # --- hooks

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        del trainer, pl_module, batch, batch_idx
        self._batch, self._is_training_step = self._waiting[True].popleft(), True

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        del trainer, pl_module, batch, batch_idx, dataloader_idx
        self._batch = self._waiting[False].popleft()

    def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        del trainer, pl_module
        self._is_training_step = False
        self.backend.begin(training=False)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        del trainer, pl_module
        self._batch = None
        self.validated = self.backend.logs(self.world.sum(self.backend.tally))
        self.backend.select_tally(training=True)

    def epoch_values(self, metrics: Mapping[str, Any]) -> dict[str, float]:
        """Return the values that the module has logged for the epoch."""
        return {name: float(metrics[name]) for name in self.epoch_names if name in metrics}


class ModuleTrainingSteps(ModuleSteps):
    """The same, for `fit`: with the state of the optimizers, epochs, checkpoints and history."""

    def __init__(self, run: ModuleTraining) -> None:
        super().__init__(run.backend, run.world)
        self._run = run

    def end_epoch(self, hook: Callable[[], None]) -> None:
        """Call the module's own `on_train_epoch_end`, and record the epoch with what was logged in it."""
        self._batch, self._is_training_step = None, False
        hook()
        trainer = self.module.trainer
        means = self.backend.logs(self.world.sum(self.backend.tally))
        means.update(self.epoch_values(trainer.callback_metrics))
        validated = {name: value for name, value in self.validated.items() if f"val_{name}" not in means}
        if self._run.end_epoch(means, validated):
            trainer.should_stop = True
        self._run.checkpoint_is_pending = True  # written after a scheduler on a plateau has stepped

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        del pl_module
        state = self.backend.parts.training_state
        for optimizer, saved in zip(trainer.optimizers, state.get("optimizer_states", ()), strict=False):
            optimizer.load_state_dict(saved)
        for config, saved in zip(trainer.lr_scheduler_configs, state.get("lr_schedulers", ()), strict=False):
            config.scheduler.load_state_dict(saved)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        del pl_module
        self._save_training_state(trainer)
        self._run.write_pending_checkpoint()
        self.validated = {}
        self._run.begin_epoch()

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        if trainer.accumulate_grad_batches > 1 and pl_module.automatic_optimization:
            groups = optimizer.param_groups
            self.backend.scale_accumulated_gradients(p for group in groups for p in group["params"])

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        del pl_module, outputs, batch
        assert self._batch is not None
        self._run.end_batch(self._batch, batch_idx + 1, trainer.global_step, self.backend.last_loss)
        if self._run._is_done():
            trainer.should_stop = True

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        del pl_module
        self._save_training_state(trainer)
        self._run.write_pending_checkpoint()

    def _save_training_state(self, trainer: pl.Trainer) -> None:
        self.backend.parts.training_state = {
            "optimizer_states": [optimizer.state_dict() for optimizer in trainer.optimizers],
            "lr_schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        }


@contextmanager
def _unchanged_metrics(module: torch.nn.Module) -> Iterator[None]:
    """Let the torchmetrics of a module forget what they see: a rank without rows takes the step with one of another."""
    metrics: list[Any] = [part for part in module.modules() if hasattr(part, "metric_state")]
    states = [(deepcopy(metric.metric_state), metric.__dict__.get("_update_count")) for metric in metrics]
    try:
        yield
    finally:
        for metric, (state, count) in zip(metrics, states, strict=True):
            for name, value in state.items():
                setattr(metric, name, value)
            metric.__dict__.update({"_update_count": count, "_computed": None})


class ModuleTraining(LightningTraining):
    """A call of `fit` on one rank, of a LightningModule."""

    backend: ModuleBackend

    def begin_epoch(self) -> None:
        Training.begin_epoch(self)  # there are no checkpoints within an epoch

    def run_epochs(self) -> None:
        module = cast("pl.LightningModule", self.backend.model)
        if self.validation is not None and not is_overridden("validation_step", module):
            raise OptionError(f"validation_data: {type(module).__name__} has no validation_step().")
        if "dataloader_iter" in inspect.signature(module.training_step).parameters:
            raise OptionError(f"{type(module).__name__}.training_step(dataloader_iter): it must take a batch.")
        whole = self.feed.planned and self.job.feed_options.last == "drop"
        if not module.automatic_optimization and self.world.size > 1 and not whole:
            raise OptionError(
                f"{type(module).__name__} has automatic_optimization=False, so its losses cannot be weighted by rows, "
                "and the last step of an epoch may have unequal numbers of rows on the workers. Pass last='drop' to "
                "fit(), with data whose rows have numbers, or use workers=1."
            )
        steps = ModuleTrainingSteps(self)
        with quiet(), steps.installed(on_train_epoch_end=steps.end_epoch):
            trainer = self._trainer = self._make_trainer(steps)
            self._restore_loop(self.backend.loop_state)
            set_progress(trainer, self.state.epoch, self.state.steps)
            batches = TrainingBatches(self, trainer, functools.partial(steps.convert, training=True))
            validation = None
            if self.validation is not None:
                convert = functools.partial(steps.convert, training=False)
                validation = ValidationBatches(self.validation, self.world, convert)
            run_fit(trainer, module, batches, validation)


@dataclass
class ModuleRecipe(TorchRecipe):
    """A LightningModule, or a function that creates one on the rank."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_trainer_options(self.trainer, "{}=")
        if isinstance(self.module, torch.nn.Module):
            self._check(self.module)

    def _check(self, module: object) -> None:
        if isinstance(module, pl.LightningModule):
            return
        other = any(base.__module__.startswith("pytorch_lightning.") for base in type(module).__mro__)
        raise OptionError(
            f"{type(module).__name__} is a module of the package pytorch_lightning: let it inherit from "
            "lightning.pytorch.LightningModule."
            if other
            else f"{type(module).__name__} is no LightningModule: use Estimator.from_torch(model=...)."
        )

    def parts(self) -> ModuleParts:
        if self._parts is None:
            module = self.module if isinstance(self.module, torch.nn.Module) else self._create_model()
            self._check(module)
            self._parts = ModuleParts(module, loss_weight=self.loss_weight)
            if self.state is not None:
                self._parts.restore(parse_state(self.state))
        return cast("ModuleParts", self._parts)

    def backend(self, rank_info: RankInfo, world: World, selection: ColumnSelection) -> ModuleBackend:
        return ModuleBackend(self.parts(), world, rank_info, selection)

    def training(self, job: Job, backend: Any, world: World) -> Training:
        return ModuleTraining(job, backend, world, self.trainer)

    def evaluate(self, job: Job, backend: ModuleBackend, world: World) -> dict[str, float]:
        """Return what `validation_step` logs, and the mean of the losses that it returns."""
        module = cast("pl.LightningModule", backend.model)
        if not is_overridden("validation_step", module):
            raise OptionError(f"evaluate() calls validation_step(), and {type(module).__name__} has none.")
        steps = ModuleSteps(backend, world)
        feed = job.data.open(world, job.feed_options.in_order())
        batches = ValidationBatches(feed, world, functools.partial(steps.convert, training=False))
        limit = {} if job.max_steps is None else {"limit_val_batches": job.max_steps}
        with quiet(), steps.installed():
            trainer = make_trainer(self.trainer, world, backend.device, job, callbacks=[steps], **limit)
            trainer.validate(module, batches, verbose=False)
            return {**steps.validated, **steps.epoch_values(trainer.callback_metrics)}

    def weights_of(self, state: Mapping[str, Any]) -> dict[str, Any]:
        return {"state_dict": state["state_dict"]} if "pytorch-lightning_version" in state else {"state_dict": state}
