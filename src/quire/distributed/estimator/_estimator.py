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
from quire.distributed.estimator._feeds import FeedOptions, Source
from quire.distributed.estimator._job import Job, Outcome, Recipe
from quire.distributed.estimator._launch import launch
from quire.distributed.estimator._options import (
    ColumnSelection,
    EstimatorKeywords,
    EstimatorOptions,
    EvaluateKeywords,
    FitKeywords,
    Names,
    TorchEstimatorKeywords,
    engine_name,
    worker_batch_size,
)
from quire.distributed.estimator._predictions import PredictionSpec, is_of_engine, predict_rows, predict_shards
from quire.distributed.estimator._ranks import RankInfo
from quire.distributed.estimator._sources import make_source
from quire.distributed.estimator._training import latest_checkpoint, run_rank
from quire.errors import OptionError, check_options


class Estimator:
    """A model with the calls `fit`, `evaluate` and `predict`, the same on every engine.

    It is made by `Estimator.from_torch` or `Estimator.from_keras`. `batch_size` is always the rows of a step on one
    worker. Data goes to the workers as it is asked for there: each row is trained on once an epoch, and all workers
    take the same number of steps.
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
        """An Estimator of a model of torch.

        Each of them is an instance, or a function that makes it: `model(config)`, `optimizer(model, config)` or a class
        of torch.optim, `loss(config)`, `scheduler(optimizer, config)`. Metrics are names ('accuracy', 'mae', 'mse'),
        functions of outputs and labels that are means over rows, or objects with a state, as of torchmetrics.
        Schedulers take a step after each epoch, or after each batch with `scheduler_interval='step'`.
        """
        torch: Any = require(f"{__package__}._torch", extra="torch", needed_for="Estimator.from_torch()")
        check_options("Estimator.from_torch", working, TorchEstimatorKeywords.__annotations__)
        more: dict[str, Any] = dict(working)
        interval = more.pop("scheduler_interval", None)
        made = EstimatorOptions(engine_name(engine), workers, **more)
        recipe = torch.TorchRecipe(model, optimizer, loss, metrics, scheduler, interval, made.config, made.seed)
        if made.checkpoint_every is not None and recipe.has_stateful_metrics:
            raise OptionError(
                "checkpoint_every writes checkpoints within an epoch, and they do not hold the state of metrics such "
                "as those of torchmetrics: leave one of them out."
            )
        return Estimator(recipe, made, engine)

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
        """An Estimator of a compiled model of Keras, or of a function that makes one on the worker.

        `compile_args` are the keywords of `model.compile`, or a function of the config that gives them, for models that
        are not compiled.
        """
        keras: Any = require(f"{__package__}._tensorflow", extra="tensorflow", needed_for="Estimator.from_keras()")
        given = model_creator if keras_model is None else keras_model
        check_options("Estimator.from_keras", working, EstimatorKeywords.__annotations__)
        made = EstimatorOptions(engine_name(engine), workers, **working)
        recipe = keras.KerasRecipe(given, compile_args, metrics, made.config, made.seed)
        return Estimator(recipe, made, engine)

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
        """Train for so many more epochs: the means of each, a dict an epoch.

        Data is a DataLoader, a tf.data.Dataset, a function that makes one (`creator(config)`, which is shared out, or
        `creator(rank, world_size, config)`, which gives a share), a StreamingDataset, the address of a dataset,
        DocumentShards, a DataFrame of Spark, a Dataset of Ray, a DocumentArray, or arrays. `feature_cols` are the
        columns that the model is given, one argument each, and `label_cols` those that the loss is.
        """
        check_options("Estimator.fit", more, FitKeywords.__annotations__)
        if epochs < 1:
            raise OptionError(f"epochs={epochs}: at least 1.")
        resume, first = more.get("resume", False), self._epochs
        job = self._job("fit", data, self._reading(batch_size, more), _select_columns(feature_cols, label_cols, more))
        job.callbacks, job.max_steps = tuple(more.get("callbacks") or ()), more.get("max_steps")
        job.validation = self._validation(more.get("validation_data"), job.reading)
        job.epochs, job.steps_before = range(first, epochs if resume else first + epochs), self._steps
        job.folder, job.resume = self._checkpoints(), resume
        job.checkpoint_every, job.run = self.options.checkpoint_every, uuid.uuid4().hex
        with show_progress(job, self._folder, more.get("progress")):
            outcome = self._run(job, self.options.workers)[0]
        return self._fitted(outcome)

    def _fitted(self, outcome: Outcome) -> list[dict[str, Any]]:
        if outcome.state is not None:
            self._recipe.adopt(outcome.state)
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
        """The means of the loss and the metrics over all rows, each of which counts once."""
        check_options("Estimator.evaluate", more, EvaluateKeywords.__annotations__)
        chosen = _select_columns(feature_cols, label_cols, more)
        job = self._job("evaluate", data, self._reading(batch_size, more), chosen)
        job.max_steps = more.get("num_steps")
        return self._run(job, self.options.workers)[0].logs

    def predict(
        self,
        data: Any,
        batch_size: int | None = None,
        feature_cols: Names = None,
        output_col: str = "prediction",
    ) -> Any:
        """The outputs of the model, in the order of the rows.

        Documents, shards and frames are given back with them as one more column; of all else they are arrays.
        """
        chosen = ColumnSelection.of(feature_cols, None)
        if is_of_engine(data):
            return predict_shards(data, PredictionSpec(self._recipe, chosen, output_col, batch_size))
        return predict_rows(data, partial(self._predict, batch_size=batch_size, chosen=chosen), output_col)

    def _predict(self, data: Any, batch_size: int | None, chosen: ColumnSelection) -> list[Outcome]:
        job = self._job("predict", data, self._reading(batch_size, {}), chosen)
        return self._run(job, self.options.workers)

    # --- jobs

    def _reading(self, batch_size: int | None, more: Any) -> FeedOptions:
        size = worker_batch_size(batch_size, more.get("global_batch_size"), self.options.workers)
        options = self.options
        last, shuffle = more.get("last", "keep"), more.get("shuffle")
        missing = MissingOptions.of(more.get("missing", "raise"))
        return FeedOptions(size, last, shuffle, options.seed, self._recipe.framework, options.config, missing)

    def _job(self, task: Any, data: Any, reading: FeedOptions, chosen: ColumnSelection) -> Job:
        missing = replace(reading.missing, only=chosen.paths)
        if task == "predict":  # the model gets the error when it reads a column with missing values
            missing = MissingOptions("read")
        reading = replace(reading, missing=missing)
        return Job(task, self._recipe, self._source(data, reading), reading, chosen)

    def _source(self, data: Any, reading: FeedOptions) -> Source:
        return make_source(data, reading, self._folder)

    def _validation(self, data: Any, reading: FeedOptions) -> Source | None:
        return None if data is None else self._source(data, replace(reading, shuffle=False))

    def _run(self, job: Job, workers: int) -> list[Outcome]:
        if self.options.engine == "local" and workers == 1:
            return [run_rank(job, RankInfo())]
        if not isinstance(self._engine, str):
            _ = self._engine.workers  # it runs now, with the options that it was made with
        return launch(job, self.options, self._folder)

    def _checkpoints(self) -> Path | None:
        """The folder for checkpoints; one process that keeps none for the user needs none."""
        alone = self.options.engine == "local" and self.options.workers == 1
        return None if alone and self.options.model_dir is None else self._folder

    # --- the model

    def get_model(self) -> Any:
        """The model, with the weights that it has now."""
        return self._recipe.model()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the weights of the model to a file; of Keras, the whole model if the path ends with .keras."""
        self._recipe.save(Path(path))

    def load(self, path: str | os.PathLike[str]) -> None:
        """Read weights: a file of `save`, or a checkpoint, whose optimizer is then as it was, too."""
        self._recipe.load(Path(path))

    @staticmethod
    def latest_checkpoint(folder: str | os.PathLike[str]) -> str | None:
        """The last checkpoint in a folder; None if there is none."""
        return latest_checkpoint(folder)

    def __repr__(self) -> str:
        return f"<Estimator on {self.options.engine} with {self.options.workers} workers>"


def _select_columns(feature_cols: Names, label_cols: Names, more: Any) -> ColumnSelection:
    return ColumnSelection.of(feature_cols, label_cols, more.get("labels_cols"))


def _make_folder(owner: Estimator, options: EstimatorOptions) -> Path:
    """The folder of an Estimator: the one that is given, or one that is removed with it."""
    if options.model_dir is not None:
        made = Path(options.model_dir).absolute()
        made.mkdir(parents=True, exist_ok=True)
        return made
    made = Path(tempfile.mkdtemp(prefix="quire-estimator-"))
    weakref.finalize(owner, shutil.rmtree, made, ignore_errors=True)
    return made
