"""A model of Keras, or a function that makes it, as the user gave it."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from quire.distributed.estimator._columns import Chosen
from quire.distributed.estimator._creators import make_part
from quire.distributed.estimator._keras_side import WEIGHTS, KerasSide, TensorFlowWorld, restore
from quire.distributed.estimator._world import Seat, World
from quire.errors import OptionError, StorageError, StorageNotFoundError

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
            self._model = make_part(self.module, self.config)
            self._compile(self._model)
            if self.state is not None:
                restore(self._model, _unpacked(self.state))
        return self._model

    def _compile(self, model: Any) -> None:
        given = self.compile_args
        arguments = (
            {} if given is None else dict(given if isinstance(given, Mapping) else make_part(given, self.config))
        )
        if self.metrics is not None:
            arguments["metrics"] = self.metrics
        if arguments:
            model.compile(**arguments)

    def world(self, seat: Seat) -> World:
        """Join the other ranks; all draw the same numbers, so that pipelines that shuffle do it alike."""
        world = TensorFlowWorld(seat)
        keras.utils.set_random_seed(self.seed)
        return world

    def side(self, seat: Seat, world: World, chosen: Chosen) -> KerasSide:
        """The steps on a rank."""
        del seat
        return KerasSide(self.model(), world, chosen)

    def packed(self, side: Any) -> bytes:
        """The state of a side."""
        return _packed(side.state())

    def adopt(self, state: bytes) -> None:
        """Take over the state that ranks have trained."""
        self.state = state
        if self._model is not None and not self._model.built:
            return
        restore(self.model(), _unpacked(state))

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
        self.state = _packed(KerasSide(self.model(), World(), Chosen()).state())

    def _load(self, path: Path) -> None:
        if path.is_dir():
            with np.load(path / WEIGHTS, allow_pickle=False) as found:
                restore(self.model(), dict(found))
        elif path.suffix == ".keras":
            found = keras.models.load_model(path)
            restore(self.model(), KerasSide(found, World(), Chosen()).state())
        else:
            self.model().load_weights(path)

    def __getstate__(self) -> dict[str, Any]:
        """The model as bytes: TensorFlow must know the other ranks before it makes the first variable."""
        if not isinstance(self.module, keras.Model):
            return {**self.__dict__, "_model": None}
        return {**self.__dict__, "_model": None, "module": _Packed(pickle.dumps(self.module))}


class _Packed:
    """A model on its way to a rank: made when it is asked for."""

    def __init__(self, content: bytes) -> None:
        self.content = content

    def __call__(self) -> Any:
        return pickle.loads(self.content)  # noqa: S301 - written by this very program


def _packed(state: Mapping[str, Any]) -> bytes:
    file = io.BytesIO()
    np.savez(file, **state)
    return file.getvalue()


def _unpacked(state: bytes) -> dict[str, Any]:
    with np.load(io.BytesIO(state), allow_pickle=False) as found:
        return dict(found)
