"""Callbacks: what is told of a training while it goes on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Logs = Mapping[str, Any]


class Callback:
    """The base of callbacks: override what is needed. Objects that only have some of these methods will do.

    They are called on rank 0, with copies of themselves if that is another process. `model` is the model that is
    trained; with `stop_training = True` the training ends behind the epoch, on all ranks.
    """

    model: Any = None
    stop_training: bool = False

    def set_model(self, model: Any) -> None:
        """Told once, before the training begins."""
        self.model = model

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Before the first epoch."""

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Before an epoch."""

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Behind a step, with the loss of this rank's rows."""

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Behind an epoch, with the means over all rows."""

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Behind the last epoch."""


class Callbacks:
    """Several callbacks, told one after the other. A function is told of epochs: `callback(epoch, logs)`."""

    def __init__(self, callbacks: Iterable[Any], model: Any) -> None:
        self._callbacks = [_Told(one) if _is_function(one) else one for one in callbacks]
        self._model = model
        for one in self._callbacks:
            if hasattr(one, "set_model"):
                one.set_model(model)
            if hasattr(one, "set_params"):
                one.set_params({})

    def tell(self, event: str, *facts: Any) -> None:
        """Call the method of an event wherever there is one."""
        for one in self._callbacks:
            method = getattr(one, event, None)
            if method is not None:
                method(*facts)

    @property
    def listens_to_steps(self) -> bool:
        """Whether anyone wants to know of steps."""
        return bool(self._callbacks)

    @property
    def stop(self) -> bool:
        """Whether one of them wants the training to end."""
        asked = any(getattr(one, "stop_training", False) for one in self._callbacks)
        return asked or bool(getattr(self._model, "stop_training", False))


def _is_function(callback: Any) -> bool:
    return callable(callback) and not hasattr(callback, "on_epoch_end")


class _Told:
    """A function as a callback."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        self.function(epoch, logs)
