"""Estimator.from_lightning: a user's LightningModule with quire's data, ranks, checkpoints and predictions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn

from quire import DocumentArray
from quire.data import StreamingDataset
from quire.distributed import XShards
from quire.distributed.estimator import Estimator
from quire.errors import FunctionError, OptionError
from tests.distributed.sample_modules import CountingModule, FittedModule
from tests.distributed.sample_training import (
    Killer,
    Point,
    points,
    share_creator,
    written,
)

pytestmark = pytest.mark.needs("torch", "lightning", "torchmetrics", "pyarrow", "fsspec", "xxhash", "cloudpickle")
ROWS = 25


def arrays(rows: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    created = points(rows)
    return np.stack([point.x for point in created]), np.array([point.y for point in created], np.float32)


def weights(estimator: Estimator) -> np.ndarray:
    return estimator.get_model().linear.weight.detach().numpy()[0]  # type: ignore[no-any-return]


def counts(estimator: Estimator) -> list[float]:
    return estimator.get_model().seen.tolist()  # type: ignore[no-any-return]


# --- rows and steps


@pytest.mark.parametrize(("rows", "last"), [(26, "keep"), (21, "pad")])
def test_two_ranks_equal_one(rows: int, last: Any) -> None:
    """With 21 rows, one rank has none in the last step. Accumulated batches count by their rows, then are clipped."""
    runs = []
    for workers in (1, 2):
        estimator = Estimator.from_lightning(
            FittedModule(), workers=workers, accumulate_grad_batches=2, gradient_clip_val=0.5
        )
        history = estimator.fit(
            arrays(rows), epochs=2, global_batch_size=10, shuffle=False, last=last, validation_data=arrays(11)
        )
        runs.append((weights(estimator), history, estimator.evaluate(arrays(9), batch_size=3)))
    assert np.allclose(runs[0][0], runs[1][0], atol=1e-6)
    for first, second in zip(runs[0][1], runs[1][1], strict=True):
        assert list(first) == ["epoch", "loss", "mean", "rows", "mse", "val_error", "val_r2", "val_loss"]
        assert first["rows"] == second["rows"] == rows
        assert first == pytest.approx(second, rel=1e-5)
    assert runs[0][2] == pytest.approx(runs[1][2], rel=1e-5)


def test_logged_values_are_exact() -> None:
    x, y = arrays()
    estimator = Estimator.from_lightning(FittedModule(), workers=2)
    with torch.no_grad():
        error = (estimator.get_model()(torch.from_numpy(x)) - torch.from_numpy(y)).numpy()
    means = estimator.evaluate((x, y), batch_size=4)
    assert means["val_error"] == pytest.approx(np.abs(error).mean(), rel=1e-5)
    assert means["loss"] == pytest.approx((error**2).mean(), rel=1e-5)


DATA: dict[str, Any] = {
    "stream": lambda folder: StreamingDataset[Point](written(folder, ROWS), batch_size=4),
    "shards": lambda folder: XShards.partition({"number": np.arange(ROWS)}, 3),  # noqa: ARG005
    "shares": lambda folder: share_creator,  # noqa: ARG005
}


@pytest.mark.parametrize("kind", DATA)
def test_each_row_counts_once_on_two_ranks(kind: str, tmp_path: Path) -> None:
    estimator = Estimator.from_lightning(CountingModule(ROWS), workers=2)
    columns: Any = {} if kind == "shares" else {"feature_cols": "number"}
    estimator.fit(DATA[kind](tmp_path / "data"), batch_size=4, **columns)
    assert counts(estimator) == pytest.approx([1.0] * ROWS)


def test_killed_rank_is_replaced_and_rows_count_once(tmp_path: Path) -> None:
    data = written(tmp_path / "data", ROWS)
    runs = []
    for callbacks in ([], [Killer(tmp_path / "flag", after=6)]):
        estimator = Estimator.from_lightning(CountingModule(ROWS), workers=2)
        history = estimator.fit(data, epochs=3, batch_size=4, feature_cols="number", callbacks=callbacks)
        assert counts(estimator) == pytest.approx([3.0] * ROWS)
        runs.append(history)
    assert (tmp_path / "flag").exists()
    for first, second in zip(*runs, strict=True):
        assert first == pytest.approx(second, rel=1e-6)
        assert first["rows"] == ROWS


# --- state


def test_fit_continues_with_the_state_of_the_optimizer(tmp_path: Path) -> None:
    """Three epochs at once, in two calls, and after a resume from model_dir give the same weights; momentum matters."""
    runs = {}
    for name in ("once", "twice", "resumed", "ranks"):
        options: Any = {"model_dir": tmp_path / "m"} if name == "resumed" else {}
        estimator = Estimator.from_lightning(FittedModule(), workers=2 if name == "ranks" else 1, **options)
        size = {"global_batch_size": 10, "shuffle": False}
        estimator.fit(arrays(), epochs=3 if name == "once" else 2, **size)
        if name == "resumed":
            estimator = Estimator.from_lightning(FittedModule(), **options)
            [last] = estimator.fit(arrays(), epochs=3, resume=True, **size)[2:]
            assert last["epoch"] == 2
        elif name != "once":
            estimator.fit(arrays(), **size)
        assert estimator.get_model().extra == 3
        runs[name] = weights(estimator)
    for name in ("twice", "resumed", "ranks"):
        assert np.allclose(runs["once"], runs[name], atol=1e-6), name


@pytest.mark.filterwarnings("ignore:Found 1 module")
def test_module_is_unchanged_after_fit(tmp_path: Path) -> None:
    module = FittedModule()
    module.frozen.eval()
    estimator = Estimator.from_lightning(module)
    best = ModelCheckpoint(dirpath=tmp_path, monitor="val_error")
    estimator.fit(arrays(), epochs=9, validation_data=arrays(9), callbacks=[best, EarlyStopping("val_error", 1e9)])
    assert not {"log", "training_step", "validation_step", "on_train_epoch_end"} & set(module.__dict__)
    assert estimator.predict(arrays(9)[0]).shape == (9,)
    assert (module.training, module.frozen.training) == (True, False)
    fresh = Estimator.from_lightning(lambda config: FittedModule(**config), config={"scale": 5.0})
    fresh.load(best.best_model_path)
    assert fresh.evaluate(arrays(9))["val_error"] == pytest.approx(float(best.best_model_score or 0), rel=1e-5)
    estimator.save(tmp_path / "weights.pt")
    fresh.load(tmp_path / "weights.pt")
    assert np.array_equal(weights(fresh), weights(estimator))


def test_predict_uses_the_predict_step_of_the_module() -> None:
    class Doubled(FittedModule):
        def predict_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:  # noqa: ARG002
            return self(batch) * 2

    documents = DocumentArray[Point](points(7))
    plain = Estimator.from_lightning(FittedModule()).predict(documents, feature_cols="x")
    doubled = Estimator.from_lightning(Doubled(), workers=2).predict(documents, feature_cols="x", batch_size=2)
    assert [2 * one.prediction for one in plain] == pytest.approx([one.prediction for one in doubled])


def test_manual_optimization_works_on_whole_steps() -> None:
    class Manual(FittedModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            return loss

    runs = []
    for workers, last in ((1, "drop"), (2, "drop")):
        estimator = Estimator.from_lightning(Manual(), workers=workers)
        estimator.fit(arrays(), epochs=2, global_batch_size=10, shuffle=False, last=last)
        runs.append(weights(estimator))
    assert np.allclose(*runs, atol=1e-6)
    assert estimator._steps == 4
    with pytest.raises(OptionError, match="Pass last='drop'"):
        Estimator.from_lightning(Manual(), workers=2).fit(arrays())


# --- errors


def test_error_of_a_step_is_raised_at_once() -> None:
    class Failing(FittedModule):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:  # noqa: ARG002
            raise ZeroDivisionError("nothing to divide")

    with pytest.raises(FunctionError, match="rank [01] failed: ZeroDivisionError: nothing to divide"):
        Estimator.from_lightning(Failing(), workers=2).fit(arrays())


class WithoutValidation(LightningModule):  # type: ignore[misc]
    def training_step(self, dataloader_iter: Any) -> None: ...


REJECTED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "plain": (nn.Linear(3, 1), {}, "Linear is no LightningModule: use Estimator.from_torch"),
    "created": (lambda config: nn.Linear(3, 1), {}, "Linear is no LightningModule"),  # noqa: ARG005
    "epochs": (FittedModule, {"max_epochs": 3}, r"max_epochs=: pass epochs= to fit\(\)"),
    "unknown": (FittedModule, {"precisions": 3}, "Did you mean 'precision'"),
    "every": (FittedModule, {"checkpoint_every": 3}, "written after each epoch"),
    "iterator": (WithoutValidation(), {}, "must take a batch"),
}


@pytest.mark.parametrize("case", REJECTED)
def test_unusable_modules_and_options_are_rejected(case: str) -> None:
    module, options, message = REJECTED[case]
    with pytest.raises(OptionError, match=message):
        Estimator.from_lightning(module, **options).fit(arrays())


def test_module_without_validation_step_cannot_be_evaluated() -> None:
    estimator = Estimator.from_lightning(CountingModule(9))
    with pytest.raises(OptionError, match=r"evaluate\(\) calls validation_step\(\), and CountingModule has none"):
        estimator.evaluate(np.arange(9))
    with pytest.raises(OptionError, match="validation_data: CountingModule has no validation_step"):
        estimator.fit(np.arange(9), validation_data=np.arange(9))
