"""Recognise the trainer that iterates over a dataset, and loaders under which the position in it would be lost.

A trainer that saves and restores a run has to save the position in the data, too. Lightning does so for loaders that
have `state_dict`, and torch's DataLoader has none: a resumed run would then repeat rows and leave out others, without a
message. Accelerate divides an iterable dataset among its processes, although a rank's share is all that it gets.

The stack shows who iterates, and that no trainer is involved if none is loaded: nothing is imported for this. A forked
worker of a DataLoader inherits the stack of the process that started it; a dataset on its way to a spawned worker is
checked when it is pickled.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from types import FrameType
from typing import Any

from quire._optional import is_loaded
from quire.data._epoch_registry import EpochRegistry, PassStart
from quire.errors import OptionError

_LIGHTNING = ("lightning.pytorch", "pytorch_lightning")
_ACCELERATE = "accelerate.data_loader"
_PLAIN = "torch.utils.data.dataloader"
_STATEFUL = ("torchdata.stateful_dataloader", "quire.data._worker_loader")


class LoaderStateWarning(UserWarning):
    """A trainer iterates over a dataset with a loader that cannot save the position in it."""


def check_trainer(registry: EpochRegistry, world_size: int, epochs: int | None, *, is_resumed: bool) -> None:
    """Check the loader of a pass that is about to begin, if a trainer takes its batches.

    Raises an error if rows would be lost: accelerate divides the share of a rank again, or Lightning resumes in the
    middle of an epoch and no state was loaded (`is_resumed`: by this worker). Warns once if Lightning cannot save the
    position.
    """
    if not any(map(is_loaded, (*_LIGHTNING, _ACCELERATE))):
        return
    modules = set()
    for module, frame in _frames():
        modules.add(module)
        if module == _ACCELERATE:
            _check_accelerate(frame, world_size)
        if not _is_loop(module):
            continue
        loop = module.rpartition(".")[2]
        if loop in ("evaluation_loop", "prediction_loop"):
            return
        if loop == "fit_loop":
            is_plain = _PLAIN in modules and not any(name.startswith(_STATEFUL) for name in modules)
            is_resumed = is_resumed or registry.read().start != PassStart()
            _check_lightning(frame, registry, is_plain=is_plain, is_endless=epochs is None, is_resumed=is_resumed)
            return


def is_in_fit_loop() -> bool:
    """Return whether the fit loop of Lightning is what called this."""
    return any(map(is_loaded, _LIGHTNING)) and any(
        _is_loop(module) and module.endswith(".fit_loop") for module, _ in _frames()
    )


def _frames() -> Iterator[tuple[str, FrameType]]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield str(frame.f_globals.get("__name__", "")), frame
        frame = frame.f_back


def _is_loop(module: str) -> bool:
    return module.startswith(tuple(f"{name}.loops." for name in _LIGHTNING))


def _check_accelerate(frame: FrameType, world_size: int) -> None:
    loader: Any = frame.f_locals.get("self")
    # IterableDatasetShard takes each n-th row, DataLoaderDispatcher lets the first process read for all.
    processes = {
        "IterableDatasetShard": getattr(loader, "num_processes", 1),
        "DataLoaderDispatcher": getattr(getattr(loader, "state", None), "num_processes", 1),
    }.get(type(loader).__name__, 1)
    if processes > 1 and world_size > 1:
        raise OptionError(
            f"accelerate divides the batches of this rank among its {processes} processes again, so most rows would be "
            "lost. Use accelerator.prepare(dataset.loader()), which leaves the loader as it is, or with the Trainer of "
            "transformers, quire.integrations.transformers.QuireTrainer."
        )


def _check_lightning(
    frame: FrameType, registry: EpochRegistry, *, is_plain: bool, is_endless: bool, is_resumed: bool
) -> None:
    fit_loop = frame.f_locals.get("self")
    progress = getattr(getattr(fit_loop, "epoch_loop", None), "batch_progress", None)
    taken = getattr(getattr(progress, "current", None), "ready", 0)
    is_inside = bool(taken and getattr(fit_loop, "restarting", False) and not getattr(progress, "is_last_batch", False))
    if is_inside and not is_resumed:
        raise OptionError(
            f"Lightning resumes after {taken} batches of the epoch, but no state of the data was loaded, so rows would "
            "be repeated and others left out. The checkpoint was written, or is read, with a loader that has no state: "
            "use quire.integrations.lightning.QuireDataModule, dataset.loader() or torchdata's StatefulDataLoader."
        )
    if is_plain and registry.is_first_time("warned about a plain DataLoader"):
        warnings.warn(
            "Lightning cannot save the position in the data with a plain torch DataLoader: a run that is resumed in "
            "the middle of an epoch would repeat rows. Use quire.integrations.lightning.QuireDataModule(dataset), "
            "dataset.loader() or torchdata's StatefulDataLoader.",
            LoaderStateWarning,
            stacklevel=2,
        )
    elif is_endless and registry.is_first_time("warned about a pass without end"):
        warnings.warn(
            "the dataset has epochs=None, and so no length. Lightning then takes a batch more than it trains on, and a "
            "run that is resumed leaves this batch out. Use epochs=1, and max_epochs or max_steps of the Trainer.",
            LoaderStateWarning,
            stacklevel=2,
        )
