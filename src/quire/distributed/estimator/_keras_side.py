"""Training with Keras on TensorFlow: the step by a tape, the metrics, the weights, and the ranks.

The `fit` of Keras 3 does not run on several workers. Here each worker has the whole model, gradients are summed over
the workers, and every worker takes the same step.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from quire.distributed.estimator._columns import Chosen
from quire.distributed.estimator._items import Item
from quire.distributed.estimator._world import Floats, Seat, World
from quire.errors import OptionError

WEIGHTS = "weights.npz"


class TensorFlowWorld(World):
    """Ranks of a TensorFlow cluster. They sum tensors; variables are each rank's own."""

    def __init__(self, seat: Seat) -> None:
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


class KerasSide:
    """The steps of a training with Keras on one rank.

    A rank's loss counts by its rows, so that the gradient is that of the mean over all rows of a step.
    """

    framework = "tensorflow"

    def __init__(self, model: Any, world: World, chosen: Chosen) -> None:
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

    def train(self, item: Item) -> float:
        """One step: the loss of this rank's rows."""
        self._check_step("train_step")
        if getattr(self.model, "optimizer", None) is None:
            raise OptionError("fit() needs a compiled model: model.compile(optimizer=..., loss=...), or compile_args.")
        x, y = self._split(item)
        if not self.model.optimizer.built:
            self._build(x)
        weight = tf.constant(item.rows / max(item.total or item.rows, 1), tf.float32)
        return self._count(self._step(x, y, self._real(item), weight), item)

    def evaluate(self, item: Item) -> None:
        """Count the loss and the metrics of a batch."""
        self._check_step("test_step")
        x, y = self._split(item)
        self._count(self._test(x, y, self._real(item)) if item.rows else 0.0, item)

    def predict(self, item: Item) -> Any:
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

    def _split(self, item: Item) -> tuple[Any, Any]:
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

    def _real(self, item: Item) -> Any:
        if item.real is not None:
            return tf.constant(item.real)
        return tf.ones([len(item.places)] if item.places is not None else [item.rows], tf.bool)

    # --- what was counted

    def _count(self, loss: Any, item: Item) -> float:
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
            restore(self.model, dict(found))


def restore(model: Any, state: Mapping[str, Any]) -> None:
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
