"""Checkpoints: the weights in one folder with where the data goes on, whole or not there at all."""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from quire.errors import StorageError, StorageNotFoundError

_NAME = re.compile(r"checkpoint-(\d{9,})")
_PLACE = "place.json"
_KEPT = 2


@dataclass(frozen=True)
class Place:
    """Where a training is: the epoch, the steps behind it, the position of the data in the epoch, and the history.

    `tally` is what was counted in the epoch so far, of all ranks. `run` tells one call of `fit` from another.
    """

    epoch: int = 0
    steps: int = 0
    position: dict[str, Any] | None = None
    tally: list[float] | None = None
    history: list[dict[str, Any]] = field(default_factory=list)
    run: str = ""


def write_checkpoint(folder: Path, place: Place, save: Callable[[Path], None]) -> Path:
    """Write a checkpoint beside those that are there, of which the last two are kept."""
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / f".new-{uuid.uuid4().hex}"
    made.mkdir()
    try:
        save(made)
        (made / _PLACE).write_text(json.dumps(asdict(place)))
        final = folder / f"checkpoint-{place.steps:09d}"
        if final.exists():  # of the same step, written before a restart
            shutil.rmtree(final)
        made.replace(final)
    except OSError as error:
        shutil.rmtree(made, ignore_errors=True)
        raise StorageError(f"{folder}: the checkpoint cannot be written: {error}") from error
    for old in checkpoints(folder)[:-_KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, the oldest first."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name) and (path / _PLACE).is_file())


def latest_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """The last checkpoint in a folder; None if there is none."""
    found = checkpoints(Path(folder))
    return str(found[-1]) if found else None


def read_place(checkpoint: Path) -> Place:
    """Where the training was whose checkpoint this is."""
    try:
        return Place(**json.loads((checkpoint / _PLACE).read_text()))
    except FileNotFoundError as error:
        raise StorageNotFoundError(f"{checkpoint}: no checkpoint is there.") from error
    except (OSError, TypeError, ValueError) as error:
        raise StorageError(f"{checkpoint}: the checkpoint cannot be read: {error}") from error
