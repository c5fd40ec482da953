"""QuireDataModule: exact training with Lightning, with either of the packages `lightning` and `pytorch_lightning`.

Lightning is imported when `QuireDataModule` is: a class of the package that the program has imported, or else of the
one that is installed. `QuireDataModuleMixin` serves programs that import both.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from quire._optional import is_installed, is_loaded, require
from quire.array import DocumentBatch
from quire.errors import OptionError
from quire.integrations._loaders import PassLoader, make_loader

if TYPE_CHECKING:
    from lightning.pytorch import LightningDataModule

__all__ = ["QuireDataModule", "QuireDataModuleMixin"]


class QuireDataModuleMixin:
    """The methods of `QuireDataModule`, for a subclass of `LightningDataModule`.

    Datasets are `StreamingDataset`s, `MixedDataset`s, and windows or blocks of them. Every process reads its share: the
    ranks are those of Lightning's strategy. `workers` processes make the batches, or `threads` of the process if there
    are none. Checkpoints contain the position in `train`: a run that is resumed continues with the very next row, with
    any number of processes and workers.
    """

    trainer: Any

    def __init__(
        self,
        train: Any = None,
        val: Any = None,
        test: Any = None,
        predict: Any = None,
        *,
        workers: int = 0,
        prefetch: int = 4,
        threads: int = 1,
    ) -> None:
        super().__init__()
        self.train, self.val, self.test, self.predict = train, val, test, predict
        self.workers, self.prefetch, self.threads = workers, prefetch, threads
        self._train_batches: _Batches | None = None
        for dataset in (train, val, test, predict):
            if dataset is not None:
                self._make_loader(dataset)  # raises an error for one that cannot be used

    def train_dataloader(self) -> Any:
        """Return the batches of `train`, at the position of the checkpoint that the Trainer resumes from."""
        if self.train is None:
            raise OptionError("the data module has no training data: QuireDataModule(train=dataset).")
        self._attach()
        return self._batches

    def val_dataloader(self) -> Any:
        """Return the batches of `val`."""
        return self._evaluate(self.val)

    def test_dataloader(self) -> Any:
        """Return the batches of `test`."""
        return self._evaluate(self.test)

    def predict_dataloader(self) -> Any:
        """Return the batches of `predict`."""
        return self._evaluate(self.predict)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the training data, which Lightning saves in its checkpoints."""
        return {} if self._train_batches is None else {"train": self._train_batches.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of a checkpoint."""
        if "train" in state and self.train is not None:
            self._batches.load_state_dict(state["train"])

    @property
    def _batches(self) -> _Batches:
        if self._train_batches is None:
            if getattr(getattr(self.train, "options", None), "epochs", 1) is None:
                raise OptionError(
                    "the training data has epochs=None, and so no length; Lightning then takes a batch ahead, which a "
                    "run that is resumed would leave out. Use epochs=1, and max_epochs or max_steps of the Trainer."
                )
            self._train_batches = _Batches(self._make_loader(self.train))
        return self._train_batches

    def _evaluate(self, dataset: Any) -> Any:
        self._attach()
        return [] if dataset is None else _Batches(self._make_loader(dataset))

    def _make_loader(self, dataset: Any) -> Any:
        options = {"prefetch": self.prefetch, "threads": self.threads}
        return make_loader("QuireDataModule", dataset, self.workers, **options)

    def _attach(self) -> None:
        """Prepare the Trainer for batches of documents, and for an epoch that is shorter or longer than the others."""
        trainer = getattr(self, "trainer", None)
        if trainer is None:
            return
        callback_type = _batch_size_callback(type(trainer).__module__.rpartition(".trainer.")[0])
        if not any(isinstance(callback, callback_type) for callback in trainer.callbacks):
            trainer.callbacks.append(callback_type())
        # An epoch that was begun with another number of processes has another number of batches than the next ones, and
        # Lightning asks for the length only when it asks for the loader.
        if self._train_batches is not None and self._train_batches.was_loaded:
            trainer.reload_dataloaders_every_n_epochs = 1


class _Batches(PassLoader):
    """The batches of a loader. Lightning loads the state of the data module, and then that of each of its loaders."""

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self._loaded: Any = None

    @property
    def was_loaded(self) -> bool:
        return self._loaded is not None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state != self._loaded:
            super().load_state_dict(state)
            self._loaded = state


@cache
def _batch_size_callback(package: str) -> type[Any]:
    """Return a callback that reports the number of documents as the batch size.

    Lightning searches a batch for tensors to find its size, which weights the means of logged values. In a batch of
    documents it would find the documents instead.
    """

    class BatchSizeCallback(importlib.import_module(package).Callback):  # type: ignore[misc]
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, *_: Any) -> None:  # noqa: ARG002
            if isinstance(batch, DocumentBatch) and trainer._results is not None:
                trainer._results.batch_size = len(batch)

        on_validation_batch_start = on_test_batch_start = on_train_batch_start

    return BatchSizeCallback


if TYPE_CHECKING:

    class QuireDataModule(QuireDataModuleMixin, LightningDataModule):  # type: ignore[misc]
        """The datasets of a Lightning Trainer: `trainer.fit(model, QuireDataModule(train, val, workers=2))`."""


def __getattr__(name: str) -> object:
    if name != "QuireDataModule":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    packages = ("lightning.pytorch", "pytorch_lightning")
    package = next((name for name in packages if is_loaded(name)), None)
    if package is None:
        package = packages[not is_installed("lightning") and is_installed("pytorch_lightning")]
    base: Any = require(package, extra="lightning", needed_for="QuireDataModule")
    data_module = type(
        name,
        (QuireDataModuleMixin, base.LightningDataModule),
        {"__doc__": QuireDataModuleMixin.__doc__, "__module__": __name__},
    )
    globals()[name] = data_module
    return data_module
