"""The training loop of torch models: Lightning's Trainer, on every rank.

Lightning runs epochs, steps, schedulers, precision, accumulation, clipping, loggers and callbacks. The data, the weight
of each row, exact means over ranks, and checkpoints with a position in the data are ours: a rank's batches come from a
`Feed`, and the ranks are already connected when the Trainer starts.
"""

from __future__ import annotations

import inspect
import logging
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins.environments import ClusterEnvironment
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from torch import nn

from quire.distributed.estimator._feeds import Feed, RankBatch, synchronize_steps
from quire.distributed.estimator._job import Job, RankOutcome
from quire.distributed.estimator._ranks import World
from quire.distributed.estimator._torch import TorchBackend
from quire.distributed.estimator._training import Training, TrainingState
from quire.errors import OptionError, did_you_mean

_DECIDED_HERE = {
    "accelerator": "the device of a rank is found by quire",
    "devices": "pass workers=",
    "num_nodes": "pass workers=",
    "max_epochs": "pass epochs= to fit()",
    "min_epochs": "pass epochs= to fit()",
    "max_steps": "pass max_steps= to fit()",
    "min_steps": "pass epochs= to fit()",
    "callbacks": "pass callbacks= to fit()",
    "plugins": "the ranks are connected by quire",
    "use_distributed_sampler": "rows are divided among ranks by quire",
    "reload_dataloaders_every_n_epochs": "batches come from the data of fit()",
    "enable_checkpointing": "pass model_dir=, or a ModelCheckpoint in callbacks= of fit()",
    "num_sanity_val_steps": "validation_data of fit() is evaluated after each epoch",
}
"""Keywords of the Trainer that cannot be passed, and what to do instead."""


def check_trainer_options(options: Mapping[str, Any], written: str = "trainer={{{!r}: ...}}") -> None:
    """Raise for keywords that Lightning's Trainer does not have, or that are decided here."""
    known = [name for name in inspect.signature(pl.Trainer.__init__).parameters if name != "self"]
    for name in options:
        if name in _DECIDED_HERE:
            raise OptionError(f"{written.format(name)}: {_DECIDED_HERE[name]}.")
        if name not in known:
            raise OptionError(f"{written.format(name)}: Lightning's Trainer has none. {did_you_mean(name, known)}")


class RankEnvironment(ClusterEnvironment):  # type: ignore[misc]
    """Tells Lightning about ranks that quire, Ray or Spark has started, one process each."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    @property
    def creates_processes_externally(self) -> bool:
        """Always True: the ranks run already."""
        return True

    @property
    def main_address(self) -> str:
        """Not used, because the ranks are connected already."""
        return "127.0.0.1"

    @property
    def main_port(self) -> int:
        """Not used, because the ranks are connected already."""
        return 0

    @staticmethod
    def detect() -> bool:
        """Return False: it is always passed explicitly."""
        return False

    def world_size(self) -> int:
        """Return the number of ranks."""
        return self._world.size

    def set_world_size(self, size: int) -> None:
        """Do nothing: the number of ranks is known."""

    def global_rank(self) -> int:
        """Return the number of this rank."""
        return self._world.rank

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the rank is known."""

    def local_rank(self) -> int:
        """Return 0: each process has one device, at place 0 of its list."""
        return 0

    def node_rank(self) -> int:
        """Return the rank: each process counts as a node with one device."""
        return self._world.rank


def make_strategy(requested: object, world: World, device: torch.device) -> Strategy:
    """Return the strategy of a rank; it may be requested by a name of DDP, or as a `DDPStrategy`."""
    if isinstance(requested, DDPStrategy):
        strategy = requested
    elif requested in ("auto", "ddp"):
        strategy = DDPStrategy()
    elif requested == "ddp_find_unused_parameters_true":
        strategy = DDPStrategy(find_unused_parameters=True)
    else:
        raise OptionError(
            f"strategy={requested!r}: use 'ddp', 'ddp_find_unused_parameters_true' or a DDPStrategy. Others divide the "
            "model among ranks, and checkpoints of the Estimator contain whole models."
        )
    if world.size == 1:
        return SingleDeviceStrategy(device)
    strategy.parallel_devices = [device]
    strategy.cluster_environment = RankEnvironment(world)
    return strategy


class Parcel:
    """A batch on its way through Lightning, which would otherwise copy dataclasses and look for tensors in them."""

    __slots__ = ("batch",)

    def __init__(self, batch: RankBatch) -> None:
        self.batch = batch


BatchConverter = Callable[[Iterator[RankBatch]], Iterator[Any]]
pack_batches: BatchConverter = partial(map, Parcel)


class TrainingBatches:
    """The batches of the current epoch, as a data loader."""

    def __init__(
        self, training: LightningTraining, trainer: pl.Trainer, convert: BatchConverter = pack_batches
    ) -> None:
        self._training, self._trainer, self._convert = training, trainer, convert

    def __len__(self) -> int:
        training, total = self._training, None
        # Counting asks the other ranks. After an error of this rank, which Lightning cleans up by asking for the length
        # once more, they would not answer, and the error would never be reported.
        if not self._trainer.interrupted and (training.world.size == 1 or training.feed.planned):
            total = training.count_batches()
        if total is None:
            raise TypeError("the number of batches is unknown")  # Lightning then reads one batch ahead
        return total

    def __iter__(self) -> Iterator[Any]:
        return self._convert(self._training.batches())


class ValidationBatches:
    """The batches of the validation data, as a data loader."""

    def __init__(self, feed: Feed, world: World, convert: BatchConverter = pack_batches) -> None:
        self._feed, self._world, self._convert = feed, world, convert

    def __iter__(self) -> Iterator[Any]:
        return self._convert(synchronize_steps(self._feed.batches(0), self._feed, self._world, "keep"))


class EstimatorModule(pl.LightningModule):  # type: ignore[misc]
    """A model with its loss, optimizer and scheduler, as Lightning's Trainer takes them."""

    def __init__(self, run: LightningTraining) -> None:
        super().__init__()
        self._run, self._backend = run, cast("TorchBackend", run.backend)
        self.model = self._backend.model
        if isinstance(self._backend.parts.loss, nn.Module):
            self.loss = self._backend.parts.loss  # moves to the device with the model: it may have weights of classes
        self._validated: dict[str, float] = {}
        self._plateau_loss: float | None = None

    def configure_optimizers(self) -> Any:
        parts = self._backend.parts
        if parts.optimizer is None or parts.loss is None:
            raise OptionError("fit() needs an optimizer and a loss: Estimator.from_torch(optimizer=..., loss=...).")
        if parts.scheduler is None:
            return parts.optimizer
        monitor = "loss" if self._run.validation is None else "val_loss"
        schedule = {"scheduler": parts.scheduler, "interval": parts.scheduler_interval, "monitor": monitor}
        return {"optimizer": parts.optimizer, "lr_scheduler": schedule}

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        """Step a scheduler; one on a plateau gets the mean over all rows, in full precision."""
        if metric is None:
            scheduler.step()
        else:
            scheduler.step(self._plateau_loss)

    def transfer_batch_to_device(self, batch: Parcel, device: Any, dataloader_idx: int) -> Parcel:
        """Return the batch as it is: only the columns that are used are moved, in the step."""
        del device, dataloader_idx
        return batch

    # --- steps

    def on_fit_start(self) -> None:
        self._backend.convert_input = self.trainer.precision_plugin.convert_input

    def on_train_epoch_start(self) -> None:
        self._run.write_pending_checkpoint()
        self._validated = {}
        self._run.begin_epoch()

    def training_step(self, batch: Parcel, batch_idx: int) -> torch.Tensor:
        del batch_idx
        loss = self._backend.compute_loss(batch.batch, self.trainer.accumulate_grad_batches)
        if self.trainer.loggers:
            rows = max(batch.batch.rows, 1)
            self.log("loss_step", self._backend.last_loss, on_step=True, on_epoch=False, batch_size=rows)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.trainer.accumulate_grad_batches > 1:
            groups = optimizer.param_groups
            self._backend.scale_accumulated_gradients(p for group in groups for p in group["params"])

    def on_train_batch_end(self, outputs: Any, batch: Parcel, batch_idx: int) -> None:
        del outputs
        self._run.end_batch(batch.batch, batch_idx + 1, self.trainer.global_step, self._backend.last_loss)
        if self._run._is_done():
            self.trainer.should_stop = True

    def on_train_epoch_end(self) -> None:
        means = self._backend.logs(self._run.world.sum(self._backend.tally))
        self._plateau_loss = self._validated["loss"] if self._validated else means.get("loss")
        self._log_means(means)
        if self._run.end_epoch(means, self._validated):
            self.trainer.should_stop = True
        # A scheduler on a plateau has not stepped yet, so the checkpoint is written when the next epoch begins.
        self._run.checkpoint_is_pending = True

    def on_train_end(self) -> None:
        self._run.write_pending_checkpoint()

    def _log_means(self, means: Mapping[str, float]) -> None:
        """Pass means to loggers and callbacks; they are the same on all ranks."""
        for name, value in means.items():
            self.log(name, value, sync_dist=self._run.world.size > 1, batch_size=1)


class ValidatedModule(EstimatorModule):
    """The same, with a validation. Lightning warns about steps of validation that are not used."""

    def on_validation_epoch_start(self) -> None:
        self._backend.begin(training=False)

    def validation_step(self, batch: Parcel, batch_idx: int) -> None:
        del batch_idx
        self._backend.evaluate(batch.batch)

    def on_validation_epoch_end(self) -> None:
        self._validated = self._backend.logs(self._run.world.sum(self._backend.tally))
        self._backend.select_tally(training=True)
        self._log_means({f"val_{name}": value for name, value in self._validated.items()})


class LightningTraining(Training):
    """A call of `fit` on one rank, run by Lightning's Trainer."""

    def __init__(self, job: Job, backend: TorchBackend, world: World, options: Mapping[str, Any]) -> None:
        check_trainer_options(options)
        self.options = options
        super().__init__(job, backend, world)
        self._lightning_callbacks = {
            place: one for place, one in enumerate(job.callbacks) if isinstance(one, pl.Callback)
        }
        self.checkpoint_is_pending = False

    def _observers(self) -> Sequence[Any]:
        others = [one for one in self.job.callbacks if not isinstance(one, pl.Callback)]
        for one in others:
            if any(base.__module__.startswith("pytorch_lightning.") for base in type(one).__mro__):
                raise OptionError(
                    f"the callback {type(one).__name__} is of the package pytorch_lightning, and the Estimator trains "
                    "with the package lightning: import it from lightning.pytorch.callbacks."
                )
        return others

    def run(self) -> RankOutcome:
        outcome = super().run()
        states = {place: one.state_dict() for place, one in self._lightning_callbacks.items()}
        outcome.callback_states = {place: state for place, state in states.items() if state}
        return outcome

    def begin_epoch(self) -> None:
        super().begin_epoch()
        if self.state.tally is not None:  # the epoch is continued
            self.backend.restore_metric_states(self.backend.loop_state.get("metrics", []))

    def write_checkpoint(self, state: TrainingState, *, within_epoch: bool = False) -> None:
        self.backend.loop_state = {
            "callbacks": {place: one.state_dict() for place, one in self._lightning_callbacks.items()},
            "precision": self._trainer.precision_plugin.state_dict(),
            "metrics": self.backend.gather_metric_states() if within_epoch else [],
        }
        super().write_checkpoint(state)

    def write_pending_checkpoint(self) -> None:
        """Write the checkpoint of the last epoch, if that was not done yet."""
        if self.checkpoint_is_pending:
            self.checkpoint_is_pending = False
            self.write_checkpoint(self.state)

    def run_epochs(self) -> None:
        with quiet():
            module = EstimatorModule(self) if self.validation is None else ValidatedModule(self)
            module.train()
            trainer = self._trainer = self._make_trainer()
            self._restore_loop(self.backend.loop_state)
            set_progress(trainer, self.state.epoch, self.state.steps)
            validation = None if self.validation is None else ValidationBatches(self.validation, self.world)
            run_fit(trainer, module, TrainingBatches(self, trainer), validation)
        self.backend.convert_input = None

    def _restore_loop(self, state: Mapping[str, Any]) -> None:
        """Continue with the states of callbacks and precision that a checkpoint has."""
        for place, one in self._lightning_callbacks.items():
            if state.get("callbacks", {}).get(place):
                one.load_state_dict(state["callbacks"][place])
        if state.get("precision"):
            self._trainer.precision_plugin.load_state_dict(state["precision"])

    def _make_trainer(self, *own: pl.Callback) -> pl.Trainer:
        callbacks = [*self._lightning_callbacks.values(), *own]
        return make_trainer(
            self.options,
            self.world,
            self.backend.device,
            self.job,
            max_epochs=self.job.epochs.stop,
            callbacks=callbacks,
        )


def make_trainer(
    options: Mapping[str, Any], world: World, device: torch.device, job: Job, callbacks: Sequence[Any], **more: Any
) -> pl.Trainer:
    """Return the Trainer of a rank, with the options of the user and those that are decided here."""
    defaults: dict[str, Any] = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": None if job.folder is None else str(Path(job.folder)),
    }
    return pl.Trainer(
        **{**defaults, **options, **more, "strategy": make_strategy(options.get("strategy", "auto"), world, device)},
        accelerator="cuda" if device.type == "cuda" else "cpu",
        devices=1,
        num_nodes=world.size,
        min_epochs=0,
        callbacks=list(callbacks),
        enable_checkpointing=any(isinstance(one, Checkpoint) for one in callbacks),
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        reload_dataloaders_every_n_epochs=1,  # epochs differ in length: one that is resumed is shorter
    )


def set_progress(trainer: pl.Trainer, epoch: int, steps: int) -> None:
    """Let a Trainer continue after a number of epochs and steps, as if it had taken them.

    The restart of Lightning itself would need the number of the batch within the epoch, and the same number of ranks.
    Here, an epoch that is continued is a shorter one: its batches begin at the position of the checkpoint.
    """
    loop = trainer.fit_loop
    for progress in (loop.epoch_progress.current, loop.epoch_progress.total):
        progress.ready = progress.started = progress.processed = progress.completed = epoch
    automatic, manual = loop.epoch_loop.automatic_optimization, loop.epoch_loop.manual_optimization
    for taken in (automatic.optim_progress.optimizer.step.total, manual.optim_step_progress.total):
        taken.ready = taken.completed = steps
    loop.epoch_loop._batches_that_stepped = steps


class KeepSigterm(pl.Callback):  # type: ignore[misc]
    """Restores the handler of SIGTERM.

    Lightning's own handler talks to the other ranks, which do not expect that. A rank that is terminated is lost.
    """

    def __init__(self, handler: Any) -> None:
        self.handler = handler

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        del trainer, pl_module
        if self.handler is not None:
            signal.signal(signal.SIGTERM, self.handler)


def run_fit(trainer: pl.Trainer, module: pl.LightningModule, batches: Any, validation: Any) -> None:
    """Call `fit`; signals mean what they mean without Lightning, which ends the program after an interrupt."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    interrupt = signal.getsignal(signal.SIGINT) if in_main_thread else None
    trainer.callbacks.append(KeepSigterm(signal.getsignal(signal.SIGTERM) if in_main_thread else None))
    try:
        trainer.fit(module, batches, validation)
    except SystemExit as ended:
        if not isinstance(ended.__context__, KeyboardInterrupt):
            raise
        if interrupt is not None:
            signal.signal(signal.SIGINT, interrupt)
        raise KeyboardInterrupt from None


@contextmanager
def quiet() -> Iterator[None]:
    """Leave out what Lightning logs about its own options, devices and loaders, and its use of a deprecated call."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.WARNING)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "You defined a `validation_step` but have no `val_dataloader`")
        warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning)
        try:
            yield
        finally:
            logger.setLevel(level)
