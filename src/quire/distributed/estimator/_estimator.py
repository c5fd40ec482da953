"""Estimator: one model, trained, evaluated and used on one process, several, or a cluster."""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from typing_extensions import Unpack

from quire._optional import require
from quire.data import MissingOptions
from quire.distributed._engine import Engine
from quire.distributed.estimator._callbacks import show_progress
from quire.distributed.estimator._feeds import FeedOptions
from quire.distributed.estimator._job import Job, RankOutcome, Recipe
from quire.distributed.estimator._launch import launch
from quire.distributed.estimator._options import (
    ColumnSelection,
    EstimatorKeywords,
    EstimatorOptions,
    EvaluateKeywords,
    FitKeywords,
    LightningEstimatorKeywords,
    Names,
    TorchEstimatorKeywords,
    engine_name,
    resolve_engine,
    split_trainer_options,
    worker_batch_size,
)
from quire.distributed.estimator._partitions import predict_xshards
from quire.distributed.estimator._predictions import PredictionSpec, is_of_engine, predict_rows, predict_shards
from quire.distributed.estimator._ranks import RankInfo
from quire.distributed.estimator._sources import make_source
from quire.distributed.estimator._training import latest_checkpoint, run_rank
from quire.distributed.xshards import XShards
from quire.errors import OptionError, check_options


class Estimator:
    """A model with the methods `fit`, `evaluate` and `predict`, the same on every engine.

    Create it by `Estimator.from_torch`, `from_lightning` or `from_keras`. `batch_size` is always the rows of a step on
    one worker. Workers read the data as they need it: each row is trained on once per epoch, and all
    workers take the same number of steps.
    """

    def __init__(self, recipe: Recipe, options: EstimatorOptions, engine: str | Engine = "local") -> None:
        self._recipe, self.options, self._engine = recipe, options, engine
        self.history: list[dict[str, Any]] = []
        self._steps = self._epochs = 0
        self._folder = _make_folder(self, options)

    @staticmethod
    def from_torch(
        *,
        model: Any,
        optimizer: Any = None,
        loss: Any = None,
        metrics: Any = None,
        engine: str | Engine = "local",
        workers: int = 1,
        scheduler: Any = None,
        **working: Unpack[TorchEstimatorKeywords],
    ) -> Estimator:
        """Create an Estimator of a PyTorch model.

        Each argument is an instance, or a function that creates it: `model(config)`, `optimizer(model, config)` or a
        class of torch.optim, `loss(config)`, `scheduler(optimizer, config)`. Metrics are names ('accuracy', 'mae',
        'mse'), functions of outputs and labels that are means over rows, or objects with a state, as in torchmetrics.
        Schedulers step after each epoch, or after each step with `scheduler_interval='step'`. `fit` trains with
        Lightning's Trainer (extra `lightning`), whose options are keywords, too.
        """
        torch: Any = require(f"{__package__}._torch", extra="torch", needed_for="Estimator.from_torch()")
        check_options("Estimator.from_torch", working, TorchEstimatorKeywords.__annotations__)
        keywords: dict[str, Any] = dict(working)
        interval, loss_weight = keywords.pop("scheduler_interval", None), keywords.pop("loss_weight", None)
        trainer = _trainer_options(keywords)
        engine, workers = resolve_engine(engine, workers, keywords)
        options = EstimatorOptions(engine_name(engine), workers, **keywords)
        recipe = torch.TorchRecipe(
            model,
            optimizer,
            loss,
            metrics,
            scheduler,
            interval,
            options.config,
            options.seed,
            loss_weight=loss_weight,
            trainer=trainer,
        )
        if options.checkpoint_every is not None:
            recipe.check_metrics_can_be_saved()
        return Estimator(recipe, options, engine)

    @staticmethod
    def from_lightning(module: Any, *, engine: str | Engine = "local", workers: int = 1, **options: Any) -> Estimator:
        """Create an Estimator of a LightningModule, or of a function of the config that creates one.

        `fit` calls the module's own steps, hooks and `configure_optimizers`, `evaluate` its `validation_step`, and
        `predict` its `predict_step`, or else `forward`. Batches contain only rows that count, and a mean loss and what
        the module logs for an epoch count each row once, on any number of workers. The history has the mean `loss`, and
        the values that are logged for the epoch.

        Keywords are those of the other Estimators (`config`, `model_dir`, `max_restarts`, `seed`), `loss_weight`, and
        those of Lightning's Trainer (`precision`, `accumulate_grad_batches`, `logger`, ...). Checkpoints are written
        after each epoch: `checkpoint_every` is not available.
        """
        lightning: Any = require(
            f"{__package__}._lightning_module", extra="lightning", needed_for="Estimator.from_lightning()"
        )
        known = LightningEstimatorKeywords.__annotations__
        keywords = {name: options[name] for name in options if name in known}
        if keywords.pop("checkpoint_every", None) is not None:
            raise OptionError(
                "checkpoint_every: Lightning keeps what a module logs within an epoch, so checkpoints of a "
                "LightningModule are written after each epoch. Leave it out."
            )
        trainer = {name: options[name] for name in options if name not in known}
        loss_weight = keywords.pop("loss_weight", None)
        engine, workers = resolve_engine(engine, workers, keywords)
        working = EstimatorOptions(engine_name(engine), workers, **keywords)
        recipe = lightning.ModuleRecipe(
            module, config=working.config, seed=working.seed, loss_weight=loss_weight, trainer=trainer
        )
        return Estimator(recipe, working, engine)

    @staticmethod
    def from_keras(
        keras_model: Any = None,
        *,
        model_creator: Callable[..., Any] | None = None,
        compile_args: Any = None,
        metrics: Any = None,
        engine: str | Engine = "local",
        workers: int = 1,
        **working: Unpack[EstimatorKeywords],
    ) -> Estimator:
        """Create an Estimator of a compiled Keras model, or of a function that creates one on the worker.

        `compile_args` are the keywords of `model.compile`, or a function of the config that returns them, for models
        that are not compiled.
        """
        keras: Any = require(f"{__package__}._tensorflow", extra="tensorflow", needed_for="Estimator.from_keras()")
        model = model_creator if keras_model is None else keras_model
        check_options("Estimator.from_keras", working, EstimatorKeywords.__annotations__)
        keywords: dict[str, Any] = dict(working)
        engine, workers = resolve_engine(engine, workers, keywords)
        options = EstimatorOptions(engine_name(engine), workers, **keywords)
        recipe = keras.KerasRecipe(model, compile_args, metrics, options.config, options.seed)
        return Estimator(recipe, options, engine)

    # --- training

    def fit(
        self,
        data: Any,
        epochs: int = 1,
        batch_size: int | None = None,
        feature_cols: Names = None,
        label_cols: Names = None,
        **more: Unpack[FitKeywords],
    ) -> list[dict[str, Any]]:
        """Train for `epochs` more epochs; return the means of each, one dict per epoch.

        Data is a DataLoader, a tf.data.Dataset, a function that returns one (`creator(config)`, which is divided among
        workers, or `creator(rank, world_size, config)`, which returns a share), a StreamingDataset, the URL of a
        dataset, DocumentShards, XShards of dicts of arrays or of data frames, a Spark DataFrame, a Ray Dataset, a
        DocumentArray, or arrays. `feature_cols` are the columns that are passed to the model, one argument each, and
        `label_cols` those that are passed to the loss.
        """
        check_options("Estimator.fit", more, FitKeywords.__annotations__)
        if epochs < 1:
            raise OptionError(f"epochs={epochs}: at least 1 is needed.")
        resume, first = more.get("resume", False), self._epochs
        job = self._job(
            "fit", data, self._feed_options(batch_size, more), _select_columns(feature_cols, label_cols, more)
        )
        job.callbacks, job.max_steps = tuple(more.get("callbacks") or ()), more.get("max_steps")
        if more.get("validation_data") is not None:
            in_order = replace(job.feed_options, shuffle=False)
            job.validation = make_source(more["validation_data"], in_order, self._folder)
        job.epochs, job.steps_before = range(first, epochs if resume else first + epochs), self._steps
        job.folder, job.resume = self._checkpoint_folder(), resume
        job.checkpoint_every, job.run = self.options.checkpoint_every, uuid.uuid4().hex
        with show_progress(job, self._folder, more.get("progress")):
            outcome = self._run(job, self.options.workers)[0]
        for place, state in outcome.callback_states.items():  # of rank 0, which has copies if it is another process
            job.callbacks[place].load_state_dict(state)
        return self._finish_fit(outcome)

    def _finish_fit(self, outcome: RankOutcome) -> list[dict[str, Any]]:
        if outcome.state is not None:
            self._recipe.load_state(outcome.state)
        self._steps = outcome.steps
        self._epochs = outcome.history[-1]["epoch"] + 1 if outcome.history else self._epochs
        self.history += outcome.history
        return outcome.history

    def evaluate(
        self,
        data: Any,
        batch_size: int | None = None,
        feature_cols: Names = None,
        label_cols: Names = None,
        **more: Unpack[EvaluateKeywords],
    ) -> dict[str, float]:
        """Return the means of the loss and the metrics over all rows, each of which counts once."""
        check_options("Estimator.evaluate", more, EvaluateKeywords.__annotations__)
        selection = _select_columns(feature_cols, label_cols, more)
        job = self._job("evaluate", data, self._feed_options(batch_size, more), selection)
        job.max_steps = more.get("num_steps")
        return self._run(job, self.options.workers)[0].logs

    def predict(
        self,
        data: Any,
        batch_size: int | None = None,
        feature_cols: Names = None,
        output_col: str = "prediction",
    ) -> Any:
        """Return the outputs of the model, in the order of the rows.

        Documents, shards and frames are returned with the outputs as one more column, XShards of dicts with one more
        key; for other data they are arrays.
        """
        selection = ColumnSelection.of(feature_cols, None)
        if isinstance(data, XShards):
            return predict_xshards(data, self._recipe, selection, output_col, batch_size)
        if is_of_engine(data):
            return predict_shards(data, PredictionSpec(self._recipe, selection, output_col, batch_size))
        return predict_rows(data, partial(self._predict, batch_size=batch_size, selection=selection), output_col)

    def _predict(self, data: Any, batch_size: int | None, selection: ColumnSelection) -> list[RankOutcome]:
        job = self._job("predict", data, self._feed_options(batch_size, {}), selection)
        return self._run(job, self.options.workers)

    # --- jobs

    def _feed_options(self, batch_size: int | None, more: Any) -> FeedOptions:
        size = worker_batch_size(batch_size, more.get("global_batch_size"), self.options.workers)
        options = self.options
        last, shuffle = more.get("last", "keep"), more.get("shuffle")
        missing = MissingOptions.of(more.get("missing", "raise"))
        return FeedOptions(size, last, shuffle, options.seed, self._recipe.framework, options.config, missing)

    def _job(self, task: Any, data: Any, feed_options: FeedOptions, selection: ColumnSelection) -> Job:
        missing = replace(feed_options.missing, only=selection.paths)
        if task == "predict":  # reading a column with missing values raises in the model
            missing = MissingOptions("read")
        feed_options = replace(feed_options, missing=missing)
        return Job(task, self._recipe, make_source(data, feed_options, self._folder), feed_options, selection)

    def _run(self, job: Job, workers: int) -> list[RankOutcome]:
        if self.options.engine == "local" and workers == 1:
            return [run_rank(job, RankInfo())]
        if not isinstance(self._engine, str):
            _ = self._engine.workers  # starts the engine now, with its own options
        return launch(job, self.options, self._folder)

    def _checkpoint_folder(self) -> Path | None:
        """Return the folder for checkpoints; None for one process without a model_dir."""
        alone = self.options.engine == "local" and self.options.workers == 1
        return None if alone and self.options.model_dir is None else self._folder

    # --- the model

    def get_model(self) -> Any:
        """Return the model, with its current weights."""
        return self._recipe.model()

    def save(self, path: str | os.PathLike[str], *, entire: bool = False) -> None:
        """Write the weights of the model to a file; of Keras, the whole model if the path ends with .keras.

        With `entire=True`, a model of torch is pickled as a whole, for `torch.load(path, weights_only=False)`.
        """
        self._recipe.save(Path(path), entire=entire)

    def load(self, path: str | os.PathLike[str], *, entire: bool = False) -> None:
        """Read weights from a file of `save`, or weights and the optimizer's state from a checkpoint.

        A torch model that was saved with `entire=True` is read with `entire=True`: that unpickles the file, which can
        run any code, so do it only with files of your own.
        """
        self._recipe.load(Path(path), entire=entire)

    def shutdown(self, *, force: bool = False) -> None:
        """Remove the temporary files of the Estimator. Engines keep running; `engine(...).close()` stops one.

        There are no workers to stop: they end with each call. `force` has no effect.
        """
        del force
        if self.options.model_dir is None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder.mkdir()  # it can still be used

    @staticmethod
    def latest_checkpoint(folder: str | os.PathLike[str]) -> str | None:
        """Return the last checkpoint in a folder; None if there is none."""
        return latest_checkpoint(folder)

    def __repr__(self) -> str:
        return f"<Estimator on {self.options.engine} with {self.options.workers} workers>"


def _trainer_options(keywords: dict[str, Any]) -> dict[str, Any]:
    """Remove the options of Lightning's Trainer from keywords; return them, checked."""
    options = split_trainer_options(keywords)
    if options:
        lightning: Any = require(f"{__package__}._lightning", extra="lightning", needed_for="options of a Trainer")
        lightning.check_trainer_options(options)
    return options


def _select_columns(feature_cols: Names, label_cols: Names, more: Any) -> ColumnSelection:
    return ColumnSelection.of(feature_cols, label_cols, more.get("labels_cols"))


def _make_folder(owner: Estimator, options: EstimatorOptions) -> Path:
    """Return the folder of an Estimator: `model_dir`, or one that is removed with it."""
    if options.model_dir is not None:
        folder = Path(options.model_dir).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    folder = Path(tempfile.mkdtemp(prefix="quire-estimator-"))
    weakref.finalize(owner, shutil.rmtree, folder, ignore_errors=True)
    return folder
