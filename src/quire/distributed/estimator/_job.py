"""A job for ranks: what is done with which model on which data. It is the same object on every rank.

It is sent as one file, whose large arrays are memory-mapped. A rank touches only the rows it needs, so however large
the arrays of a dataset are, no rank holds them all. The file is a sequence of parts: the pickle, and then each buffer
of it. A part is a header with its size, padding to a multiple of 64 bytes, and the data.
"""

from __future__ import annotations

import io
import json
import mmap
import pickle
import struct
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from quire._optional import is_loaded, require
from quire.distributed.estimator._feeds import FeedOptions, FeedSource, RankBatch
from quire.distributed.estimator._options import ColumnSelection
from quire.distributed.estimator._ranks import Floats, RankInfo, World
from quire.errors import PickleError, StorageNotFoundError

if TYPE_CHECKING:
    from typing import IO

    from quire.distributed.estimator._training import Training


Task = Literal["fit", "evaluate", "predict"]


class Backend(Protocol):
    """The steps of a training in one framework, on one rank."""

    model: Any
    tally: Floats

    def begin(self, *, training: bool) -> None:
        """Begin an epoch, or an evaluation, with all sums at zero."""
        ...

    def evaluate(self, item: RankBatch) -> None:
        """Add the loss and the metrics of a batch to the sums."""
        ...

    def predict(self, item: RankBatch) -> Any:
        """Return the output for the rows of a batch that count, as numpy arrays."""
        ...

    def logs(self, tally: Floats) -> dict[str, float]:
        """Return the means, from the sums of all ranks."""
        ...

    def save(self, folder: Path) -> None:
        """Write weights and the optimizer's state into a folder."""
        ...

    def load(self, folder: Path) -> None:
        """Read weights and the optimizer's state from a folder."""
        ...


class Recipe(Protocol):
    """A model and what belongs to it, as the user passed them: instances or creators. It can be sent to ranks."""

    framework: str

    def world(self, rank_info: RankInfo) -> World:
        """Connect to the other ranks."""
        ...

    def backend(self, rank_info: RankInfo, world: World, selection: ColumnSelection) -> Backend:
        """Return the backend of a rank."""
        ...

    def training(self, job: Job, backend: Any, world: World) -> Training:
        """Return the training of a rank."""
        ...

    def evaluate(self, job: Job, backend: Any, world: World) -> dict[str, float]:
        """Return the means over all rows of the data of a job."""
        ...

    def model(self) -> Any:
        """Return the model, with its current weights."""
        ...

    def load_state(self, state: bytes) -> None:
        """Load the state that ranks have trained."""
        ...

    def save(self, path: Path, *, entire: bool = False) -> None:
        """Write the weights to a file, or the entire model."""
        ...

    def load(self, path: Path, *, entire: bool = False) -> None:
        """Read the weights from a file, or from a checkpoint."""
        ...

    def dump_state(self, backend: Backend) -> bytes:
        """Return the state of a backend, for `load_state`."""
        ...


@dataclass
class Job:
    """What every rank does."""

    task: Task
    recipe: Recipe
    data: FeedSource
    feed_options: FeedOptions
    selection: ColumnSelection = field(default_factory=ColumnSelection)
    validation: FeedSource | None = None
    callbacks: Sequence[Any] = ()
    epochs: range = range(1)
    steps_before: int = 0
    max_steps: int | None = None
    folder: Path | None = None
    """The folder for checkpoints; None if there are none."""
    checkpoint_every: int | None = None
    run: str = ""
    resume: bool = False
    progress: Any = None


@dataclass
class RankOutcome:
    """The results of a rank; the state and the history are those of rank 0."""

    history: list[dict[str, Any]] = field(default_factory=list)
    logs: dict[str, float] = field(default_factory=dict)
    predictions: list[tuple[Any, Any]] = field(default_factory=list)
    """For each batch, the numbers of its rows in the data, if they are known, and the output for them."""
    state: bytes | None = None
    steps: int = 0
    callback_states: dict[int, Any] = field(default_factory=dict)
    """The states of Lightning's callbacks, by their place in the list: the best checkpoint, for example."""


_PART_HEADER = struct.Struct("<QQ")
_ALIGN = 64
_MIN_BUFFER_BYTES = 1 << 12
"""Smaller tensors are pickled without a buffer of their own."""


def write_job(job: Job, path: Path) -> None:
    """Write a job; functions and classes that cannot be imported are pickled by value."""
    cloudpickle: Any = require("cloudpickle", extra="process", needed_for="sending a training to other processes")
    buffers: list[pickle.PickleBuffer] = []
    file = io.BytesIO()
    try:
        _make_pickler(cloudpickle)(file, 5, buffer_callback=buffers.append).dump(job)
    except (TypeError, pickle.PicklingError, AttributeError) as error:
        raise PickleError(
            f"the model or the data cannot be sent to other processes: {error}. Pass a function that makes it there: "
            "model=lambda config: Net(), data=lambda config: DataLoader(...)."
        ) from error
    import_paths_file(path).write_text(json.dumps([entry or str(Path.cwd()) for entry in sys.path]))
    with path.open("wb") as target:
        _write_part(target, file.getvalue())
        for buffer in buffers:
            _write_part(target, buffer.raw())


def import_paths_file(job: Path) -> Path:
    """Return the file next to a job that lists where the driver imports from."""
    return job.with_suffix(".paths")


def _make_pickler(cloudpickle: Any) -> type[pickle.Pickler]:
    """Return cloudpickle's pickler, with torch's tensors as buffers.

    torch pickles a tensor as bytes inside the pickle. As a numpy array it becomes a buffer of its own (protocol 5),
    which ranks map instead of reading it.
    """
    torch: Any = require("torch", extra="torch", needed_for="a tensor") if is_loaded("torch") else None

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, value: Any) -> Any:
            if torch is not None and type(value) is torch.Tensor and value.nbytes >= _MIN_BUFFER_BYTES:
                plain = value.layout is torch.strided and value.device.type == "cpu"
                if plain and not (value.requires_grad or value.is_conj() or value.is_neg()):
                    with suppress(TypeError):  # numpy has no such dtype
                        return torch.from_numpy, (value.contiguous().numpy(),)
            return super().reducer_override(value)

    return Pickler


def _write_part(target: IO[bytes], data: bytes | memoryview) -> None:
    target.write(_PART_HEADER.pack(memoryview(data).nbytes, 0))
    target.write(b"\0" * (-target.tell() % _ALIGN))
    target.write(data)


def read_job(path: Path) -> Job:
    """Read a job. Its arrays can be written to; changes stay in this process."""
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except FileNotFoundError as error:
        raise StorageNotFoundError(
            f"{path}: this machine does not see the job. Pass model_dir, a folder that all machines of the cluster see."
        ) from error
    whole, parts, at = memoryview(mapped), list[memoryview](), 0
    while at < len(whole):
        size, _ = _PART_HEADER.unpack_from(whole, at)
        at += _PART_HEADER.size
        at += -at % _ALIGN
        parts.append(whole[at : at + size])
        at += size
    first, *buffers = parts
    job: Job = pickle.loads(first, buffers=buffers)  # noqa: S301 - written by write_job
    return job
