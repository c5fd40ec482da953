"""QuireTrainer: exact training with the Trainer of Hugging Face transformers.

transformers is imported when `QuireTrainer` is; `QuireTrainerMixin` is for subclasses of other Trainers.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.array import DocumentBatch
from quire.errors import MissingDependencyError, OptionError
from quire.integrations._loaders import PassLoader, make_loader

if TYPE_CHECKING:
    from typing import TypeAlias

    from transformers import Trainer

    Inputs: TypeAlias = Sequence[str] | Mapping[str, str] | Callable[[DocumentBatch[Any]], Mapping[str, Any]]

__all__ = ["QuireTrainer", "QuireTrainerMixin"]

_KEY = "QuireDataState"


class QuireTrainerMixin:
    """The methods of `QuireTrainer`, for a subclass of `transformers.Trainer`: `class T(QuireTrainerMixin, Trainer)`.

    `train_dataset` is a `StreamingDataset`, a `MixedDataset`, or windows or blocks of one. It makes its own batches and
    divides them among the processes, so that `accelerate` does not: `per_device_train_batch_size` has no effect.
    `inputs` are the arguments of the model: paths of tensors, paths by argument, or a function of the batch; without
    it, all tensors. `dataloader_num_workers` processes make the batches, or a thread if there are none.

    A checkpoint contains the position in the data. `train(resume_from_checkpoint=...)` continues with the very next row
    and reads none of the rows before it, with any number of processes and workers.
    """

    args: Any
    state: Any
    train_dataset: Any
    eval_dataset: Any

    def __init__(self, *arguments: Any, inputs: Inputs | None = None, **options: Any) -> None:
        self._make_inputs = _input_function(inputs)
        self._train_batches: _Inputs | None = None
        self._resumed: _Resumed | None = None
        super().__init__(*arguments, **options)
        self.add_callback(_state_callback()(self))  # type: ignore[attr-defined]

    # --- data

    def get_train_dataloader(self) -> Any:
        """Return the batches of the training data, which are not prepared by accelerate."""
        if self.train_dataset is None:
            raise OptionError("QuireTrainer has no train_dataset.")
        self._train_batches = self._batches_of(self.train_dataset)
        if self._resumed is not None:
            self._train_batches.load_state_dict(self._resumed.data)
        return self._train_batches

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return the batches of the evaluation data; datasets of other libraries are left to transformers."""
        dataset = self.eval_dataset[eval_dataset] if isinstance(eval_dataset, str) else eval_dataset
        dataset = self.eval_dataset if dataset is None else dataset
        if not callable(getattr(dataset, "loader", None)):
            return super().get_eval_dataloader(eval_dataset)  # type: ignore[misc]
        if self.args.world_size > 1 and getattr(getattr(dataset, "options", None), "last", "drop") != "drop":
            raise OptionError(
                "transformers gathers predictions in batches of one size: with several processes, an eval_dataset "
                "needs last='drop'; or evaluate with one process."
            )
        return self._batches_of(dataset)

    def _batches_of(self, dataset: Any) -> _Inputs:
        loader = make_loader("QuireTrainer", dataset, self.args.dataloader_num_workers)
        return _Inputs(loader, self._make_inputs)

    # --- resuming

    def train(self, resume_from_checkpoint: str | bool | None = None, **options: Any) -> Any:  # noqa: FBT001
        """Train, from a checkpoint if one is passed; True is the last one in `args.output_dir`."""
        self._resumed = None
        if resume_from_checkpoint is True:
            utils: Any = _import("transformers.trainer_utils")
            resume_from_checkpoint = utils.get_last_checkpoint(self.args.output_dir)
            if resume_from_checkpoint is None:
                raise OptionError(f"{self.args.output_dir} has no checkpoint to resume from.")
        if resume_from_checkpoint:
            self._resumed = _Resumed.read(Path(str(resume_from_checkpoint)))
        return super().train(resume_from_checkpoint=resume_from_checkpoint or None, **options)  # type: ignore[misc]

    # The arithmetic of transformers assumes that all epochs have the same number of steps. An epoch that was begun with
    # another number of processes has not: its number of steps, and that of the run, follow from the data.

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        """Count the epochs and steps of the run; those of a resumed run are what was done plus what remains."""
        *values, max_steps = super().set_initial_training_values(args, dataloader)  # type: ignore[misc]
        if self._resumed is not None and args.max_steps <= 0:
            max_steps = self._resumed.steps + self._count_updates(dataloader, self._resumed.passes)
        return (*values, max_steps)

    def _count_updates(self, batches: _Inputs, passes: int) -> int:
        """Return the number of updates from a position to the end of the run, if later passes are like this one."""
        accumulated: int = self.args.gradient_accumulation_steps
        left: float = self.args.num_train_epochs - passes
        whole, taken = math.ceil(len(batches) / accumulated), len(batches) - batches.steps_left()
        if left >= 1:
            return math.ceil(batches.steps_left() / accumulated) + math.ceil((left - 1) * whole)
        return max(0, math.ceil(left * whole) - taken // accumulated)

    def _init_training_state(self, *arguments: Any, **options: Any) -> tuple[int, int]:
        values: tuple[int, int] = super()._init_training_state(*arguments, **options)  # type: ignore[misc]
        # No batches are skipped: the dataset is at its position.
        return values if self._resumed is None else (self._resumed.passes, 0)

    def _run_epoch(self, *, train_dataloader: Any, **options: Any) -> None:
        if isinstance(train_dataloader, _Inputs):
            steps = train_dataloader.steps_left()
            updates = math.ceil(steps / self.args.gradient_accumulation_steps)
            options.update(steps_in_epoch=steps, num_update_steps_per_epoch=updates)
            if self.args.max_steps <= 0:
                self.state.max_steps = self.state.global_step + self._count_updates(train_dataloader, options["epoch"])
        super()._run_epoch(train_dataloader=train_dataloader, **options)  # type: ignore[misc]


class _Resumed:
    """What a checkpoint says about the data: its state, the complete passes, and the steps of the optimizer."""

    def __init__(self, data: Mapping[str, Any], passes: int, steps: int) -> None:
        self.data, self.passes, self.steps = data, passes, steps

    @classmethod
    def read(cls, checkpoint: Path) -> _Resumed:
        state = json.loads((checkpoint / "trainer_state.json").read_text())
        saved = (state.get("stateful_callbacks") or {}).get(_KEY, {}).get("attributes", {})
        if "data" not in saved:
            raise OptionError(
                f"{checkpoint} has no state of the data: it was not written by a QuireTrainer. Resuming from it would "
                "repeat rows; begin a new run with its model."
            )
        return cls(saved["data"], saved["passes"], state["global_step"])


class _Inputs(PassLoader):
    """The batches of a loader as arguments of a model."""

    def __init__(self, loader: Any, make_inputs: Callable[[DocumentBatch[Any]], Mapping[str, Any]]) -> None:
        super().__init__(loader)
        self._make_inputs = make_inputs

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return map(self._make_inputs, super().__iter__())


def _input_function(inputs: Inputs | None) -> Callable[[DocumentBatch[Any]], Mapping[str, Any]]:
    if inputs is None:
        return lambda batch: batch.tensors()
    if isinstance(inputs, str):
        raise OptionError(f"inputs={inputs!r}: pass a list of paths, such as [{inputs!r}].")
    if isinstance(inputs, Mapping):
        names = dict(inputs)
        return lambda batch: dict(zip(names, batch.tensors(*names.values()).values(), strict=True))
    if callable(inputs):
        return inputs
    paths = list(inputs)
    return lambda batch: batch.tensors(*paths)


def _import(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        message = f"QuireTrainer needs {error.name}, which is not installed: pip install transformers accelerate"
        raise MissingDependencyError(message, name=error.name) from None


@cache
def _state_callback() -> type[Any]:
    """Return a callback whose state, the position in the data, transformers saves in trainer_state.json."""
    callbacks: Any = _import("transformers.trainer_callback")

    class QuireDataState(callbacks.TrainerCallback, callbacks.ExportableState):  # type: ignore[misc]
        def __init__(self, trainer: QuireTrainerMixin) -> None:
            self._trainer = trainer

        def state(self) -> dict[str, Any]:
            batches, resumed = self._trainer._train_batches, self._trainer._resumed
            if batches is None:
                return {"args": {}, "attributes": {}}
            passes = batches.passes + (0 if resumed is None else resumed.passes)
            return {"args": {}, "attributes": {"data": batches.state_dict(), "passes": passes}}

    assert QuireDataState.__name__ == _KEY
    return QuireDataState


if TYPE_CHECKING:

    class QuireTrainer(QuireTrainerMixin, Trainer):  # type: ignore[misc]
        """A Trainer of transformers that trains on a StreamingDataset, and resumes exactly."""


def __getattr__(name: str) -> object:
    if name != "QuireTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    base: Any = _import("transformers")
    trainer = type(
        name, (QuireTrainerMixin, base.Trainer), {"__doc__": QuireTrainerMixin.__doc__, "__module__": __name__}
    )
    globals()[name] = trainer
    return trainer
