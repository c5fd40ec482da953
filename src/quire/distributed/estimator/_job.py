"""A job for ranks: what is done with which model on which data. It is the same object on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from quire.distributed.estimator._columns import Chosen
from quire.distributed.estimator._items import Item, Reading
from quire.distributed.estimator._sources import Source
from quire.distributed.estimator._world import Floats, Seat, World

Task = Literal["fit", "evaluate", "predict"]


class Side(Protocol):
    """A framework's side of a training, on one rank."""

    model: Any
    tally: Floats

    def begin(self, *, training: bool) -> None:
        """Begin an epoch, or an evaluation: nothing is counted yet."""
        ...

    def train(self, item: Item) -> float:
        """One step; the loss of this rank's rows."""
        ...

    def evaluate(self, item: Item) -> None:
        """Count the loss and the metrics of a batch."""
        ...

    def predict(self, item: Item) -> Any:
        """The output for the rows of a batch that count, as numpy arrays."""
        ...

    def epoch_done(self, logs: Mapping[str, Any]) -> None:
        """What is to be done after an epoch of training, whose means are `logs`."""
        ...

    def logs(self, tally: Floats) -> dict[str, float]:
        """The means, from the counts of all ranks."""
        ...

    def save(self, folder: Path) -> None:
        """Write weights and the optimizer's state into a folder."""
        ...

    def load(self, folder: Path) -> None:
        """Take them from there."""
        ...


class Recipe(Protocol):
    """A model and what belongs to it, as the user gave them: instances or creators. It can be sent to ranks."""

    framework: str

    def world(self, seat: Seat) -> World:
        """Join the other ranks."""
        ...

    def side(self, seat: Seat, world: World, chosen: Chosen) -> Side:
        """The framework's side on a rank."""
        ...

    def model(self) -> Any:
        """The model, with the weights that it has now."""
        ...

    def adopt(self, state: bytes) -> None:
        """Take over the state that ranks have trained."""
        ...

    def save(self, path: Path) -> None:
        """Write the weights to a file."""
        ...

    def load(self, path: Path) -> None:
        """Read the weights from a file, or from a checkpoint."""
        ...

    def packed(self, side: Side) -> bytes:
        """The state of a side, for `adopt`."""
        ...


@dataclass
class Job:
    """What every rank does."""

    task: Task
    recipe: Recipe
    data: Source
    reading: Reading
    chosen: Chosen = field(default_factory=Chosen)
    validation: Source | None = None
    callbacks: Sequence[Any] = ()
    epochs: range = range(1)
    steps_before: int = 0
    max_steps: int | None = None
    folder: Path | None = None
    """For checkpoints; None: there are none."""
    checkpoint_every: int | None = None
    run: str = ""
    resume: bool = False
    progress: Any = None


@dataclass
class Outcome:
    """What a rank brings home; the state and the history are rank 0's."""

    history: list[dict[str, Any]] = field(default_factory=list)
    logs: dict[str, float] = field(default_factory=dict)
    predictions: list[tuple[Any, Any]] = field(default_factory=list)
    """For each batch, the places of its rows in the data, if they are known, and the output for them."""
    state: bytes | None = None
    steps: int = 0
