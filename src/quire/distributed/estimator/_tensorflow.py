"""Pipelines of tf.data as the data of a training."""

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

from quire.distributed.estimator._creators import create
from quire.distributed.estimator._feeds import DEFAULT_BATCH_SIZE, Feed, FeedOptions, Position, RankBatch, to_rank_batch
from quire.distributed.estimator._options import ColumnSelection
from quire.distributed.estimator._ranks import Floats, RankInfo, World
from quire.errors import OptionError, PickleError, StorageError, StorageNotFoundError


@dataclass(frozen=True)
class TfSource:
    """A pipeline of this process. Other processes make theirs with a creator."""

    dataset: Any

    def open(self, world: World, reading: FeedOptions) -> Feed:
        """The share of a rank."""
        return TfFeed(self.dataset, world, reading)

    def __reduce__(self) -> Any:
        raise PickleError(
            "a tf.data.Dataset lives in the process that made it, and cannot be sent to workers. Pass a function that "
            "makes it there: est.fit(lambda config: tf.data.Dataset...); generators and py_function then work, too."
        )


class TfFeed:
    """A rank's share of a pipeline: every so-manieth of its elements, which are rows or batches."""

    planned = resumable = False

    def __init__(self, dataset: Any, world: World, reading: FeedOptions) -> None:
        if world.size > 1:
            if int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY:
                raise OptionError("the pipeline never ends: leave out repeat(), fit() counts epochs.")
            dataset = dataset.shard(world.size, world.rank)
        if is_unbatched(dataset.element_spec):
            size = reading.batch_size or DEFAULT_BATCH_SIZE
            dataset = dataset.batch(size, drop_remainder=reading.last == "drop")
        self.dataset = dataset

    def steps(self, epoch: int, position: Position | None = None) -> int | None:
        """The steps of the epoch, if they are known."""
        del epoch, position
        found = int(self.dataset.cardinality())
        return found if found >= 0 else None

    def items(self, epoch: int, position: Position | None = None) -> Iterator[RankBatch]:
        """The batches of an epoch, from its beginning."""
        del epoch, position
        for content in self.dataset:
            item = to_rank_batch(content)
            item.real = np.ones(item.rows, np.bool_)
            yield item


def is_unbatched(spec: Any) -> bool:
    """Whether elements are rows: one of their tensors has no axis, or none has one of unknown or common length."""
    shapes = [tuple(leaf.shape) for leaf in tf.nest.flatten(spec) if leaf.shape.rank is not None]
    if not shapes:
        return False
    if any(not shape for shape in shapes):
        return True
    return len({shape[0] for shape in shapes}) > 1


WEIGHTS = "weights.npz"


class TensorFlowWorld(World):
    """Ranks of a TensorFlow cluster. They sum tensors; variables are each rank's own."""

    def __init__(self, seat: RankInfo) -> None:
        super().__init__(seat)
        if not seat.joined:
            task = {"type": "worker", "index": seat.rank}
            os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": list(seat.addresses)}, "task": task})
        self._strategy = tf.distribute.MultiWorkerMirroredStrategy()
        self._sum = tf.function(self._summed, reduce_retracing=True)

    def sum(self, values: Any) -> Floats:
        """The sums of numbers over all ranks."""
        [found] = self._sum([tf.constant(np.array(values, np.float64))])
        return np.asarray(found)

    def sum_tensors(self, tensors: list[Any]) -> list[Any]:
        """The sums of tensors over all ranks; for use in a function of TensorFlow, too."""
        return self._summed(tensors)  # type: ignore[no-any-return]

    def _summed(self, tensors: list[Any]) -> Any:
        def inside(values: list[Any]) -> Any:
            placed = [tf.identity(value) for value in values]  # on the device of the rank, which it asks for
            return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, placed)

        return self._strategy.run(inside, args=(tensors,))


class KerasBackend:
    """The steps of a training with Keras on one rank.

    A rank's loss counts by its rows, so that the gradient is that of the mean over all rows of a step.
    """

    framework = "tensorflow"

    def __init__(self, model: Any, world: World, chosen: ColumnSelection) -> None:
        self.model, self.world, self.chosen = model, world, chosen
        self._rows = self._loss = 0.0
        self._step = tf.function(self._train_step, reduce_retracing=True)
        self._test = tf.function(self._test_step, reduce_retracing=True)
        self._output = tf.function(lambda x: model(x, training=False), reduce_retracing=True)
        self._checked_steps: set[str] = set()
        self._check_metrics()

    def _check_step(self, name: str) -> None:
        """Raise if the model overrides a step of Keras, which is not called here."""
        if name in self._checked_steps:
            return
        self._checked_steps.add(name)
        owner = next((base for base in type(self.model).__mro__ if name in base.__dict__), None)
        of_keras = owner is not None and owner.__module__.partition(".")[0] == "keras"
        if name in self.model.__dict__ or not of_keras:
            raise OptionError(
                f"{type(self.model).__name__} overrides {name}(), which Estimator does not call: it has a step of its "
                "own, for any number of workers. Override compute_loss() or compute_metrics() instead, which it calls, "
                "or train with the model's own fit()."
            )

    def _check_metrics(self) -> None:
        """States of metrics are added over ranks: those of Keras are sums, and others must say so."""
        if self.world.size == 1:
            return
        for metric in self._metrics_of_the_user():
            if not getattr(type(metric), "additive_state", False):
                raise OptionError(
                    f"the metric {metric.name} is of the class {type(metric).__name__}: how its states on "
                    f"{self.world.size} workers go together is not known. If they are sums over rows, say so by "
                    "additive_state = True in the class; else use workers=1."
                )

    def _metrics_of_the_user(self) -> list[Any]:
        """Those whose class is not Keras's own: passed to compile(), or attributes of the model."""
        compiled = getattr(self.model, "_compile_metrics", None)  # made, but not built before the first batch
        given = [getattr(compiled, name, None) for name in ("_user_metrics", "_user_weighted_metrics")]
        return [
            metric
            for metric in [*getattr(self.model, "_metrics", ()), *tf.nest.flatten(given)]
            if isinstance(metric, tf.keras.metrics.Metric) and type(metric).__module__.partition(".")[0] != "keras"
        ]

    # --- steps

    def begin(self, *, training: bool) -> None:
        """Begin an epoch, or an evaluation."""
        del training
        self._rows = self._loss = 0.0
        for metric in self._metrics():
            metric.reset_state()

    def train(self, item: RankBatch) -> float:
        """One step: the loss of this rank's rows."""
        self._check_step("train_step")
        if getattr(self.model, "optimizer", None) is None:
            raise OptionError("fit() needs a compiled model: model.compile(optimizer=..., loss=...), or compile_args.")
        x, y = self._split(item)
        if not self.model.optimizer.built:
            self._build(x)
        weight = tf.constant(item.rows / max(item.total or item.rows, 1), tf.float32)
        return self._count(self._step(x, y, self._real(item), weight), item)

    def evaluate(self, item: RankBatch) -> None:
        """Count the loss and the metrics of a batch."""
        self._check_step("test_step")
        x, y = self._split(item)
        self._count(self._test(x, y, self._real(item)) if item.rows else 0.0, item)

    def predict(self, item: RankBatch) -> Any:
        """The output for the rows of a batch that count."""
        self._check_step("predict_step")
        x, _ = self._split(item)
        output = tf.nest.map_structure(np.asarray, self._output(x))
        return output if item.real is None else tf.nest.map_structure(lambda array: array[item.real], output)

    def epoch_done(self, logs: Mapping[str, Any]) -> None:
        """Schedules of Keras count steps by themselves."""

    def _train_step(self, x: Any, y: Any, real: Any, weight: Any) -> Any:
        with tf.GradientTape() as tape:
            loss, output, labels = self._forward(x, y, real, training=True)
            counted = self.model.optimizer.scale_loss(tf.cast(loss, tf.float32) * weight)
        variables = self.model.trainable_variables
        values = [variable.value for variable in variables]
        gradients = [
            tf.zeros_like(value) if found is None else tf.convert_to_tensor(found)
            for value, found in zip(values, tape.gradient(counted, values), strict=True)
        ]
        if self.world.size > 1:
            gradients = self.world.sum_tensors(gradients)  # type: ignore[attr-defined]
        self.model.optimizer.apply(gradients, variables)
        if labels is not None:
            self._update(labels, output, x)
        return loss

    def _test_step(self, x: Any, y: Any, real: Any) -> Any:
        loss, output, labels = self._forward(x, y, real, training=False)
        if labels is not None:
            self._update(labels, output, x)
        return loss

    def _forward(self, x: Any, y: Any, real: Any, *, training: bool) -> tuple[Any, Any, Any]:
        """The loss, and outputs and labels without the rows that only fill up; no row at all has no loss."""
        output = self.model(x, training=training)
        keep = lambda tensor: tf.boolean_mask(tensor, real)  # noqa: E731
        output, labels = tf.nest.map_structure(keep, output), tf.nest.map_structure(keep, y)
        loss = self.model.compute_loss(x=x, y=labels, y_pred=output, training=training)
        there = tf.reduce_any(real)
        return tf.where(there, loss, tf.zeros_like(loss)), output, labels

    def _update(self, labels: Any, output: Any, x: Any) -> None:
        self.model.compute_metrics(x, labels, output)

    def _build(self, x: Any) -> None:
        self.model(x, training=False)
        self.model.optimizer.build(self.model.trainable_variables)

    # --- batches

    def _split(self, item: RankBatch) -> tuple[Any, Any]:
        arguments, labels = self.chosen.split(item.content)
        given = [self._tensors(argument) for argument in arguments]
        return given[0] if len(given) == 1 else given, self._tensors(labels)

    def _tensors(self, value: Any) -> Any:
        if value is None or isinstance(value, tf.Tensor):
            return value
        if isinstance(value, Mapping):
            return {name: self._tensors(part) for name, part in value.items()}
        if isinstance(value, tuple):
            return tuple(self._tensors(part) for part in value)
        array = np.asarray(value)
        if array.dtype == np.float64 and self.chosen.features is not None:
            array = array.astype(tf.keras.backend.floatx())
        if array.dtype.kind not in "biufcSU":
            raise OptionError(
                f"a {type(value).__name__} has no form as a tensor of TensorFlow: pass feature_cols and label_cols."
            )
        return tf.convert_to_tensor(array)

    def _real(self, item: RankBatch) -> Any:
        if item.real is not None:
            return tf.constant(item.real)
        return tf.ones([len(item.places)] if item.places is not None else [item.rows], tf.bool)

    # --- what was counted

    def _count(self, loss: Any, item: RankBatch) -> float:
        value = float(loss)
        self._rows += item.rows
        self._loss += value * item.rows
        return value

    def _metrics(self) -> list[Any]:
        return [metric for metric in self.model.metrics if metric.name != "loss"]

    @property
    def tally(self) -> Floats:
        """What this rank has counted since the beginning: rows, losses, and the states of the metrics."""
        states = [np.ravel(np.asarray(v)) for metric in self._metrics() for v in metric.variables]
        return np.concatenate([[self._rows, self._loss], *states]).astype(np.float64)

    @tally.setter
    def tally(self, tally: Any) -> None:
        self._rows, self._loss = float(tally[0]), float(tally[1])
        at = 2
        for metric in self._metrics():
            for variable in metric.variables:
                size = int(np.prod(variable.shape))
                variable.assign(np.reshape(tally[at : at + size], variable.shape))
                at += size

    def logs(self, tally: Floats) -> dict[str, float]:
        """The means of all ranks: the states of a metric are sums, so the sum of them is the state of all."""
        kept = self.tally
        if len(tally) != len(kept):
            raise OptionError("the ranks have other metrics: not all of them have seen data.")
        self.tally = tally
        found = {"loss": self._loss / max(self._rows, 1.0)}
        for metric in self._metrics():
            result = metric.result()
            named = result if isinstance(result, Mapping) else {metric.name: result}
            found.update({name: float(value) for name, value in named.items() if name != "loss"})
        self.tally = kept
        return found

    # --- weights

    def state(self) -> dict[str, Any]:
        """The weights, and what the optimizer keeps."""
        optimizer = getattr(self.model, "optimizer", None)
        held = {f"model-{place}": np.asarray(value) for place, value in enumerate(self.model.weights)}
        kept = [] if optimizer is None else optimizer.variables
        return {**held, **{f"optimizer-{place}": np.asarray(value) for place, value in enumerate(kept)}}

    def save(self, folder: Path) -> None:
        """Write the state into a folder."""
        np.savez(folder / WEIGHTS, **self.state())

    def load(self, folder: Path) -> None:
        """Take the state from a folder."""
        with np.load(folder / WEIGHTS, allow_pickle=False) as found:
            restore_model(self.model, dict(found))


def restore_model(model: Any, state: Mapping[str, Any]) -> None:
    """Give a model, and its optimizer, the state that others had."""
    weights = [state[f"model-{place}"] for place in range(sum(name.startswith("model-") for name in state))]
    if weights:
        if not model.built:
            raise OptionError(
                "the model has no shape yet: give it an Input, or call it once, before weights are loaded."
            )
        model.set_weights(weights)
    optimizer = getattr(model, "optimizer", None)
    kept = [state[f"optimizer-{place}"] for place in range(sum(name.startswith("optimizer-") for name in state))]
    if optimizer is not None and kept:
        if len(optimizer.variables) < len(kept):
            optimizer.build(model.trainable_variables)
        for variable, value in zip(optimizer.variables, kept, strict=True):
            variable.assign(value)


keras: Any = tf.keras


@dataclass
class KerasRecipe:
    """A model, or a function of the config that makes one on the rank, and how to compile it."""

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
            raise OptionError(f"keras_model is a model of Keras, or pass model_creator; got {self.module!r}.")
        self._model: Any = self.module if isinstance(self.module, keras.Model) else None
        if self._model is not None:
            self._compile(self._model)

    def model(self) -> Any:
        """The model of this process; made once."""
        if self._model is None:
            keras.utils.set_random_seed(self.seed)  # so that all ranks make the same
            self._model = create(self.module, self.config)
            self._compile(self._model)
            if self.state is not None:
                restore_model(self._model, _load_state(self.state))
        return self._model

    def _compile(self, model: Any) -> None:
        given = self.compile_args
        arguments = {} if given is None else dict(given if isinstance(given, Mapping) else create(given, self.config))
        if self.metrics is not None:
            arguments["metrics"] = self.metrics
        if arguments:
            model.compile(**arguments)

    def world(self, seat: RankInfo) -> World:
        """Join the other ranks; all draw the same numbers, so that pipelines that shuffle do it alike."""
        world = TensorFlowWorld(seat)
        keras.utils.set_random_seed(self.seed)
        return world

    def side(self, seat: RankInfo, world: World, chosen: ColumnSelection) -> KerasBackend:
        """The steps on a rank."""
        del seat
        return KerasBackend(self.model(), world, chosen)

    def packed(self, side: Any) -> bytes:
        """The state of a side."""
        return _dump_state(side.state())

    def adopt(self, state: bytes) -> None:
        """Take over the state that ranks have trained."""
        self.state = state
        if self._model is not None and not self._model.built:
            return
        restore_model(self.model(), _load_state(state))

    def save(self, path: Path) -> None:
        """Write the whole model to a .keras file, or its weights to a .weights.h5 file."""
        if path.name.endswith(".weights.h5"):
            self.model().save_weights(path)
        elif path.suffix == ".keras":
            self.model().save(path)
        else:
            raise OptionError(f"{path}: a model of Keras is saved to a .keras file, its weights to a .weights.h5 file.")

    def load(self, path: Path) -> None:
        """Read a file of `save`, or a checkpoint."""
        file = path / WEIGHTS if path.is_dir() else path
        if not file.exists():
            raise StorageNotFoundError(f"{file}: nothing is there.")
        try:
            self._load(path)
        except (OSError, ValueError, KeyError) as error:
            raise StorageError(f"{file}: these are no weights that Keras can read: {error}") from error
        self.state = _dump_state(KerasBackend(self.model(), World(), ColumnSelection()).state())

    def _load(self, path: Path) -> None:
        if path.is_dir():
            with np.load(path / WEIGHTS, allow_pickle=False) as found:
                restore_model(self.model(), dict(found))
        elif path.suffix == ".keras":
            found = keras.models.load_model(path)
            restore_model(self.model(), KerasBackend(found, World(), ColumnSelection()).state())
        else:
            self.model().load_weights(path)

    def __getstate__(self) -> dict[str, Any]:
        """The model as bytes: TensorFlow must know the other ranks before it makes the first variable."""
        if not isinstance(self.module, keras.Model):
            return {**self.__dict__, "_model": None}
        return {**self.__dict__, "_model": None, "module": _PickledModel(pickle.dumps(self.module))}


class _PickledModel:
    """A model on its way to a rank: made when it is asked for."""

    def __init__(self, content: bytes) -> None:
        self.content = content

    def __call__(self) -> Any:
        return pickle.loads(self.content)  # noqa: S301 - written by this very program


def _dump_state(state: Mapping[str, Any]) -> bytes:
    file = io.BytesIO()
    np.savez(file, **state)
    return file.getvalue()


def _load_state(state: bytes) -> dict[str, Any]:
    with np.load(io.BytesIO(state), allow_pickle=False) as found:
        return dict(found)
