"""Training with Keras on TensorFlow: the recipe of a model, the steps on a rank, ranks, and tf.data pipelines.

The `fit` of Keras 3 does not run on several workers. Here each worker has the whole model, gradients are summed over
the workers, and every worker takes the same step.
"""

from __future__ import annotations

import io
import json
import os
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import ArrayLike

from quire.distributed.estimator._feeds import DEFAULT_BATCH_SIZE, Feed, FeedOptions, Position, RankBatch, to_rank_batch
from quire.distributed.estimator._job import Job
from quire.distributed.estimator._options import ColumnSelection, create
from quire.distributed.estimator._ranks import Floats, RankInfo, World
from quire.distributed.estimator._training import Training, evaluate, evaluate_job
from quire.errors import OptionError, PickleError, StorageError, StorageNotFoundError


@dataclass(frozen=True)
class TfSource:
    """A pipeline of this process. Other processes create theirs with a creator."""

    dataset: Any

    def open(self, world: World, feed_options: FeedOptions) -> Feed:
        return TfFeed(self.dataset, world, feed_options)

    def __reduce__(self) -> Any:
        raise PickleError(
            "a tf.data.Dataset cannot be sent to workers. Pass a function that creates it there: "
            "est.fit(lambda config: tf.data.Dataset...); generators and py_function then work, too."
        )


class TfFeed:
    """A rank's share of a pipeline: every n-th of its elements, which are rows or batches."""

    planned = resumable = False

    def __init__(self, dataset: tf.data.Dataset, world: World, feed_options: FeedOptions) -> None:
        if world.size > 1:
            if int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY:
                raise OptionError("the pipeline is infinite: leave out repeat(), fit() counts epochs.")
            dataset = dataset.shard(world.size, world.rank)
        if is_unbatched(dataset.element_spec):
            size = feed_options.batch_size or DEFAULT_BATCH_SIZE
            dataset = dataset.batch(size, drop_remainder=feed_options.last == "drop")
        self.dataset = dataset

    def steps(self, epoch: int, position: Position | None = None) -> int | None:
        del epoch, position
        cardinality = int(self.dataset.cardinality())
        return cardinality if cardinality >= 0 else None

    def batches(self, epoch: int, position: Position | None = None) -> Iterator[RankBatch]:
        del epoch, position
        for content in self.dataset:
            batch = to_rank_batch(content)
            batch.valid = np.ones(batch.rows, np.bool_)
            yield batch


def is_unbatched(spec: object) -> bool:
    """Whether elements are rows: a tensor has no axis, or the first axes differ in length."""
    shapes = [tuple(leaf.shape) for leaf in tf.nest.flatten(spec) if leaf.shape.rank is not None]
    if not shapes:
        return False
    if any(not shape for shape in shapes):
        return True
    return len({shape[0] for shape in shapes}) > 1


WEIGHTS = "weights.npz"


class TensorFlowWorld(World):
    """Ranks of a TensorFlow cluster. They sum tensors; each rank has its own variables."""

    def __init__(self, rank_info: RankInfo) -> None:
        super().__init__(rank_info)
        if not rank_info.joined:
            task = {"type": "worker", "index": rank_info.rank}
            os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": list(rank_info.addresses)}, "task": task})
        self._strategy = tf.distribute.MultiWorkerMirroredStrategy()
        self._sum = tf.function(self._all_reduce, reduce_retracing=True)

    def sum(self, values: ArrayLike) -> Floats:
        [sums] = self._sum([tf.constant(np.array(values, np.float64))])
        return np.asarray(sums)

    def sum_tensors(self, tensors: list[Any]) -> list[Any]:
        """Return the sums of tensors over all ranks; usable within a tf.function, too."""
        return self._all_reduce(tensors)  # type: ignore[no-any-return]

    def _all_reduce(self, tensors: list[Any]) -> Any:
        def inside(values: list[Any]) -> Any:
            placed = [tf.identity(value) for value in values]  # all_reduce needs tensors on the device of the rank
            return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, placed)

        return self._strategy.run(inside, args=(tensors,))


class KerasBackend:
    """The steps of a training with Keras on one rank.

    A rank's loss is weighted by its rows, so that the gradient is that of the mean over all rows of a step.
    """

    framework = "tensorflow"

    def __init__(self, model: tf.keras.Model, world: World, selection: ColumnSelection) -> None:
        self.model, self.world, self.selection = model, world, selection
        self._rows = self._loss = 0.0
        self._step = tf.function(self._train_step, reduce_retracing=True)
        self._test = tf.function(self._test_step, reduce_retracing=True)
        self._output = tf.function(lambda x: model(x, training=False), reduce_retracing=True)
        self._own = {name: self._overrides(name) for name in ("train_step", "test_step", "predict_step")}
        self._own_steps = {
            name: tf.function(getattr(model, name), reduce_retracing=True) for name in self._own if self._own[name]
        }
        self._own_logs: dict[str, float] = {}
        self._check_metrics()

    def _overrides(self, name: str) -> bool:
        """Whether the model has a step of its own."""
        owner = next((base for base in type(self.model).__mro__ if name in base.__dict__), None)
        of_keras = owner is not None and owner.__module__.partition(".")[0] == "keras"
        return not of_keras or name in self.model.__dict__

    def check_step(self, name: str) -> bool:
        """Return whether a step of the model itself is called; raise on several workers, which cannot do that."""
        if self._own[name] and self.world.size > 1:
            raise OptionError(
                f"{type(self.model).__name__} overrides {name}(), and {self.world.size} workers cannot call it: "
                "gradients and metrics are combined within a step. Override compute_loss() or compute_metrics() "
                "instead, or use workers=1."
            )
        return self._own[name]

    def _check_metrics(self) -> None:
        """Raise for metrics whose states cannot be added over ranks: Keras's own can, others must declare it."""
        if self.world.size == 1:
            return
        for metric in self._user_metrics():
            if not getattr(type(metric), "additive_state", False):
                raise OptionError(
                    f"the metric {metric.name} is of the class {type(metric).__name__}: how to combine its states on "
                    f"{self.world.size} workers is unknown. If they are sums over rows, declare "
                    "additive_state = True in the class; else use workers=1."
                )

    def _user_metrics(self) -> list[Any]:
        """Return the metrics of other classes than Keras's: of compile(), or attributes of the model."""
        compiled = getattr(self.model, "_compile_metrics", None)  # exists, but is not built before the first batch
        declared = [getattr(compiled, name, None) for name in ("_user_metrics", "_user_weighted_metrics")]
        return [
            metric
            for metric in [*getattr(self.model, "_metrics", ()), *tf.nest.flatten(declared)]
            if isinstance(metric, tf.keras.metrics.Metric) and type(metric).__module__.partition(".")[0] != "keras"
        ]

    # --- steps

    def begin(self, *, training: bool) -> None:
        del training
        self._rows = self._loss = 0.0
        self._own_logs = {}
        for metric in self.model.metrics if any(self._own.values()) else self._metrics():
            metric.reset_state()

    def train(self, batch: RankBatch) -> float:
        """Take one step; return the loss of this rank's rows."""
        if getattr(self.model, "optimizer", None) is None:
            raise OptionError("fit() needs a compiled model: model.compile(optimizer=..., loss=...), or compile_args.")
        x, y = self._split(batch)
        if not self.model.optimizer.built:
            self.model(x, training=False)  # builds the weights
            self.model.optimizer.build(self.model.trainable_variables)
        if self.check_step("train_step"):
            return self._take_own_step("train_step", x, y, batch)
        weight = tf.constant(batch.rows / max(batch.total or batch.rows, 1), tf.float32)
        return self._add_loss(self._step(x, y, self._real(batch), weight), batch)

    def evaluate(self, batch: RankBatch) -> None:
        x, y = self._split(batch)
        if self.check_step("test_step"):
            if batch.rows:
                self._take_own_step("test_step", x, y, batch)
            return
        self._add_loss(self._test(x, y, self._real(batch)) if batch.rows else 0.0, batch)

    def predict(self, batch: RankBatch) -> Any:
        x, _ = self._split(batch)
        step = self._own_steps["predict_step"] if self.check_step("predict_step") else self._output
        output = tf.nest.map_structure(np.asarray, step(x))
        return output if batch.valid is None else tf.nest.map_structure(lambda array: array[batch.valid], output)

    def _take_own_step(self, name: str, x: Any, y: Any, batch: RankBatch) -> float:
        """Call a step of the model itself. As in Keras, what the last one returned is the result of the epoch."""
        valid = self._real(batch)
        keep = lambda tensor: tf.boolean_mask(tensor, valid)  # noqa: E731
        x, y = tf.nest.map_structure(keep, x), tf.nest.map_structure(keep, y)
        logs = self._own_steps[name]((x,) if y is None else (x, y))
        if not isinstance(logs, Mapping):
            raise OptionError(f"{type(self.model).__name__}.{name}() must return a dict of numbers, as in Keras.")
        self._own_logs = {str(key): float(value) for key, value in logs.items()}
        self._rows += batch.rows
        return self._own_logs.get("loss", 0.0)

    def _train_step(self, x: object, y: object, valid: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss, output, labels = self._forward(x, y, valid, training=True)
            weighted = self.model.optimizer.scale_loss(tf.cast(loss, tf.float32) * weight)
        variables = self.model.trainable_variables
        values = [variable.value for variable in variables]
        # Unused variables have no gradient; with zeros, all ranks sum lists of the same length.
        gradients = [
            tf.zeros_like(value) if gradient is None else tf.convert_to_tensor(gradient)
            for value, gradient in zip(values, tape.gradient(weighted, values), strict=True)
        ]
        if self.world.size > 1:
            gradients = self.world.sum_tensors(gradients)  # type: ignore[attr-defined]
        self.model.optimizer.apply(gradients, variables)
        if labels is not None:
            self.model.compute_metrics(x, labels, output)
        return loss

    def _test_step(self, x: Any, y: Any, valid: Any) -> Any:
        loss, output, labels = self._forward(x, y, valid, training=False)
        if labels is not None:
            self.model.compute_metrics(x, labels, output)
        return loss

    def _forward(self, x: Any, y: Any, valid: Any, *, training: bool) -> tuple[Any, Any, Any]:
        """Return the loss (0 without a row that counts), and outputs and labels without padding."""
        output = self.model(x, training=training)
        keep = lambda tensor: tf.boolean_mask(tensor, valid)  # noqa: E731
        output, labels = tf.nest.map_structure(keep, output), tf.nest.map_structure(keep, y)
        loss = self.model.compute_loss(x=x, y=labels, y_pred=output, training=training)
        return tf.where(tf.reduce_any(valid), loss, tf.zeros_like(loss)), output, labels

    # --- batches

    def _split(self, batch: RankBatch) -> tuple[Any, Any]:
        arguments, labels = self.selection.split(batch.content)
        tensors = [self._tensors(argument) for argument in arguments]
        return tensors[0] if len(tensors) == 1 else tensors, self._tensors(labels)

    def _tensors(self, value: Any) -> Any:
        if value is None or isinstance(value, tf.Tensor):
            return value
        if isinstance(value, Mapping):
            return {name: self._tensors(part) for name, part in value.items()}
        if isinstance(value, tuple):
            return tuple(self._tensors(part) for part in value)
        array = np.asarray(value)
        if array.dtype == np.float64 and self.selection.features is not None:
            array = array.astype(tf.keras.backend.floatx())
        if array.dtype.kind not in "biufcSU":
            raise OptionError(
                f"a {type(value).__name__} cannot be converted to a TensorFlow tensor. Pass feature_cols and "
                "label_cols."
            )
        return tf.convert_to_tensor(array)

    def _real(self, batch: RankBatch) -> Any:
        if batch.valid is not None:
            return tf.constant(batch.valid)
        return tf.ones([len(batch.indices)] if batch.indices is not None else [batch.rows], tf.bool)

    # --- sums

    def _add_loss(self, loss: tf.Tensor, batch: RankBatch) -> float:
        value = float(loss)
        self._rows += batch.rows
        self._loss += value * batch.rows
        return value

    def _metrics(self) -> list[Any]:
        return [metric for metric in self.model.metrics if metric.name != "loss"]

    @property
    def tally(self) -> Floats:
        """The sums of this rank since the beginning: rows, losses, and the states of the metrics."""
        states = [np.ravel(np.asarray(v)) for metric in self._metrics() for v in metric.variables]
        return np.concatenate([[self._rows, self._loss], *states]).astype(np.float64)

    @tally.setter
    def tally(self, tally: Floats) -> None:
        """The sums of this rank since the beginning: rows, losses, and the states of the metrics."""
        self._rows, self._loss = float(tally[0]), float(tally[1])
        at = 2
        for metric in self._metrics():
            for variable in metric.variables:
                size = int(np.prod(variable.shape))
                variable.assign(np.reshape(tally[at : at + size], variable.shape))
                at += size

    def logs(self, tally: Floats) -> dict[str, float]:
        """Return the means of all ranks. States of metrics are sums, so their sum is the state of all ranks."""
        if self._own_logs:
            return dict(self._own_logs)
        own = self.tally
        if len(tally) != len(own):
            raise OptionError("the ranks have different metrics: not all of them have seen data.")
        self.tally = tally
        logs = {"loss": self._loss / max(self._rows, 1.0)}
        for metric in self._metrics():
            result = metric.result()
            named = result if isinstance(result, Mapping) else {metric.name: result}
            logs.update({name: float(value) for name, value in named.items() if name != "loss"})
        self.tally = own
        return logs

    # --- weights

    def state(self) -> dict[str, Any]:
        """Return the weights, and the optimizer's variables."""
        optimizer = getattr(self.model, "optimizer", None)
        variables = [] if optimizer is None else optimizer.variables
        return {
            **{f"model-{i}": np.asarray(value) for i, value in enumerate(self.model.weights)},
            **{f"optimizer-{i}": np.asarray(value) for i, value in enumerate(variables)},
        }

    def save(self, folder: Path) -> None:
        np.savez(folder / WEIGHTS, **self.state())

    def load(self, folder: Path) -> None:
        with np.load(folder / WEIGHTS, allow_pickle=False) as state:
            restore_model(self.model, dict(state))


class KerasTraining(Training):
    """The epochs of a training with Keras."""

    def __init__(self, job: Job, backend: KerasBackend, world: World) -> None:
        backend.check_step("train_step")
        if job.validation is not None:
            backend.check_step("test_step")
        super().__init__(job, backend, world)

    def run_epochs(self) -> None:
        while self.state.epoch < self.job.epochs.stop and not self._is_done():
            self.begin_epoch()
            for done, batch in enumerate(self.batches(), 1):
                loss = self.backend.train(batch)
                self.end_batch(batch, done, self.state.steps + 1, loss)
                if self._is_done():
                    break
            means = self.backend.logs(self.world.sum(self.backend.tally))
            validated = {} if self.validation is None else evaluate(self.validation, self.backend, self.world)
            stop = self.end_epoch(means, validated)
            self.write_checkpoint(self.state)
            if stop:
                break


def restore_model(model: tf.keras.Model, state: Mapping[str, Any]) -> None:
    """Load a state into a model and its optimizer."""
    weights = [state[f"model-{i}"] for i in range(sum(name.startswith("model-") for name in state))]
    if weights:
        if not model.built:
            raise OptionError("the model is not built yet: add an Input, or call it once, before weights are loaded.")
        model.set_weights(weights)
    optimizer = getattr(model, "optimizer", None)
    values = [state[f"optimizer-{i}"] for i in range(sum(name.startswith("optimizer-") for name in state))]
    if optimizer is not None and values:
        if len(optimizer.variables) < len(values):
            optimizer.build(model.trainable_variables)
        for variable, value in zip(optimizer.variables, values, strict=True):
            variable.assign(value)


keras: Any = tf.keras


@dataclass
class KerasRecipe:
    """A model, or a function of the config that creates one on the rank, and how to compile it."""

    module: Any
    compile_args: Any = None
    metrics: Any = None
    config: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    state: bytes | None = None
    framework = "tensorflow"

    def __post_init__(self) -> None:
        if keras.backend.backend() != "tensorflow":
            raise OptionError(f"Keras runs on {keras.backend.backend()}: from_keras() needs KERAS_BACKEND=tensorflow.")
        if not callable(self.module):
            raise OptionError(f"keras_model must be a Keras model, or pass model_creator; got {self.module!r}.")
        self._model: Any = self.module if isinstance(self.module, tf.keras.Model) else None
        if self._model is not None:
            self._compile(self._model)

    def model(self) -> tf.keras.Model:
        """Return the model of this process, created once."""
        if self._model is None:
            keras.utils.set_random_seed(self.seed)  # so that all ranks create the same weights
            self._model = create(self.module, self.config)
            self._compile(self._model)
            if self.state is not None:
                restore_model(self._model, _load_state(self.state))
        return self._model

    def _compile(self, model: tf.keras.Model) -> None:
        arguments = self.compile_args or {}
        arguments = dict(arguments if isinstance(arguments, Mapping) else create(arguments, self.config))
        if self.metrics is not None:
            arguments["metrics"] = self.metrics
        if arguments:
            model.compile(**arguments)

    def world(self, rank_info: RankInfo) -> World:
        """Connect to the other ranks; all have the same random numbers, so that pipelines shuffle alike."""
        world = TensorFlowWorld(rank_info)
        keras.utils.set_random_seed(self.seed)
        return world

    def backend(self, rank_info: RankInfo, world: World, selection: ColumnSelection) -> KerasBackend:
        del rank_info
        return KerasBackend(self.model(), world, selection)

    def training(self, job: Job, backend: Any, world: World) -> Training:
        return KerasTraining(job, backend, world)

    def evaluate(self, job: Job, backend: Any, world: World) -> dict[str, float]:
        return evaluate_job(job, backend, world)

    def dump_state(self, backend: Any) -> bytes:
        return _dump_state(backend.state())

    def load_state(self, state: bytes) -> None:
        self.state = state
        if self._model is not None and not self._model.built:
            return
        restore_model(self.model(), _load_state(state))

    def save(self, path: Path, *, entire: bool = False) -> None:
        """Write the whole model to a .keras file, or its weights to a .weights.h5 file."""
        if entire and path.suffix != ".keras":
            raise OptionError(f"{path}: with entire=True, a Keras model is saved to a .keras file.")
        if path.name.endswith(".weights.h5"):
            self.model().save_weights(path)
        elif path.suffix == ".keras":
            self.model().save(path)
        else:
            raise OptionError(f"{path}: a Keras model is saved to a .keras file, its weights to a .weights.h5 file.")

    def load(self, path: Path, *, entire: bool = False) -> None:
        """Read a file of `save`, or a checkpoint."""
        del entire  # the file says what it has
        file = path / WEIGHTS if path.is_dir() else path
        if not file.exists():
            raise StorageNotFoundError(f"{file}: there is no such file.")
        try:
            self._load(path)
        except (OSError, ValueError, KeyError) as error:
            raise StorageError(f"{file}: Keras cannot read weights from it: {error}") from error
        self.state = _dump_state(KerasBackend(self.model(), World(), ColumnSelection()).state())

    def _load(self, path: Path) -> None:
        if path.is_dir():
            with np.load(path / WEIGHTS, allow_pickle=False) as state:
                restore_model(self.model(), dict(state))
        elif path.suffix == ".keras":
            model = keras.models.load_model(path)
            restore_model(self.model(), KerasBackend(model, World(), ColumnSelection()).state())
        else:
            self.model().load_weights(path)

    def __getstate__(self) -> dict[str, Any]:
        """Return the model as bytes: TensorFlow must know the other ranks before it creates variables."""
        if not isinstance(self.module, tf.keras.Model):
            return {**self.__dict__, "_model": None}
        return {**self.__dict__, "_model": None, "module": _PickledModel(pickle.dumps(self.module))}


class _PickledModel:
    """A pickled model on its way to a rank, loaded when it is needed."""

    def __init__(self, content: bytes) -> None:
        self.content = content

    def __call__(self) -> Any:
        return pickle.loads(self.content)  # noqa: S301 - pickled by KerasRecipe


def _dump_state(state: Mapping[str, Any]) -> bytes:
    file = io.BytesIO()
    np.savez(file, **state)
    return file.getvalue()


def _load_state(state: bytes) -> dict[str, Any]:
    with np.load(io.BytesIO(state), allow_pickle=False) as arrays:
        return dict(arrays)
